# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models under training: in memory, or rebuilt from checkpoint and journal.

After a kill, or after its eviction from memory, a model is rebuilt from its
newest recovery checkpoint by repeating the journaled requests after it.
"""

import collections
from collections.abc import Mapping
import dataclasses
import json
from typing import Any

from absl import logging

from tba_jax.chat_api import strict_json
from tba_jax.learning import checkpoint
from tba_jax.serving import kinds
from tba_jax.serving import protobufs
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import saved_weights
from tba_jax.serving import schemas
from tba_jax.serving import served_base
from tba_jax.serving import served_replay
from tba_jax.serving import trained_model

# Recovery checkpoints of a model; the older serves if the newer is damaged.
_KEEP = 2


@dataclasses.dataclass
class ServedModel:
  """A model in memory.

  replay: buffer of a model that the server trains; None for others.
  steps_since_save: optimizer steps after the newest recovery checkpoint.
  """

  run: trained_model.TrainedModel
  saver: checkpoint.Checkpointer
  replay: served_replay.ServedReplay | None
  steps_since_save: int = 0

  def execute(self, kind: str, body: bytes) -> bytes:
    """Executes a request that needs this model alone; returns its result.

    Raises:
      ValueError: the request is invalid; the params are unchanged.
    """
    if kind in (kinds.FORWARD, kinds.FORWARD_BACKWARD):
      result = self.run.run_pass(protobufs.unpack_pass(body))
      return protobufs.pack_pass_result(result)
    if kind == kinds.OPTIM_STEP:
      metrics = self.run.step(
          strict_json.read(schemas.OptimStep, body).adam_params
      )
      return strict_json.to_json({"metrics": metrics})
    if kind == kinds.INSERT:
      state = self.replay.insert(json.loads(body), self.run.num_steps)
    else:
      state = self.replay.train(self.run)
    return json.dumps(state).encode()


@dataclasses.dataclass
class ServedModels:
  """The models of a server; for the engine's thread."""

  base: served_base.ServedBase
  registry: registry_lib.Registry
  journal: request_journal.RequestJournal
  weights: saved_weights.SavedWeights
  _models: collections.OrderedDict[str, ServedModel] = dataclasses.field(
      default_factory=collections.OrderedDict, init=False
  )

  @property
  def in_memory(self) -> list[str]:
    """Ids of the models in memory, most recently used last."""
    return list(self._models)

  def execute(self, request: request_journal.ServerRequest) -> bytes:
    """Executes a model's request; returns its result.

    Raises:
      ValueError: the request is invalid; the params are unchanged.
    """
    model, kind = request.owner, request.kind
    if kind == kinds.CREATE:
      self.get(model)
      return strict_json.to_json({"type": kind, "model_id": model})
    if kind == kinds.LOAD:
      path = self._load(
          model, strict_json.read(schemas.LoadWeights, request.body)
      )
      return strict_json.to_json(
          {"type": kind, "path": path, "model_id": model}
      )
    if kind in (kinds.SAVE, kinds.SAVE_SAMPLER, kinds.EXPORT):
      body = strict_json.read(schemas.SaveWeights, request.body)
      return strict_json.to_json(self._save(request, body))
    if kind in (kinds.START, kinds.STOP):
      self.get(model)
      is_start = kind == kinds.START
      reason = "" if is_start else "stopped"
      self.registry.set_running(model, is_start, reason)
      return strict_json.to_json({"type": kind})
    if kind != kinds.FORWARD and kind not in kinds.REPEATED:
      raise ValueError(f"{request.id}: this version has no request {kind!r}")
    return self.get(model).execute(kind, request.body)

  def get(self, model: str) -> ServedModel:
    """Returns a model, from memory or rebuilt.

    Raises:
      ValueError: there is no such model.
      RuntimeError: the model cannot be rebuilt.
    """
    if model in self._models:
      self._models.move_to_end(model)
      return self._models[model]
    spec = self.registry.model(model)
    if spec is None:
      raise ValueError(f"model {model}: there is none; create_model makes one")
    created = self.journal.outcome(f"{model}:0")
    if created is not None and created.kind == kinds.LOAD and created.failure:
      raise ValueError(
          f"model {model} was not made: {created.failure['error']}"
      )
    while len(self._models) >= self.base.config.serve.max_models:
      self.forget(next(iter(self._models)))
    folder = self.weights.model_folder(model) / "state"
    saver = checkpoint.Checkpointer(str(folder), keep=_KEEP)
    try:
      served, seq = self._restore(saver, spec)
      self._models[model] = served
      self._repeat(model, seq)
    except BaseException:
      self._models.pop(model, None)
      _close(saver)
      raise
    return served

  def forget(self, model: str) -> None:
    """Drops a model from memory; `get` rebuilds it."""
    if served := self._models.pop(model, None):
      _close(served.saver)

  def close(self) -> None:
    for model in self.in_memory:
      self.forget(model)

  def save_in_time(self, request: request_journal.ServerRequest) -> None:
    """Saves a recovery checkpoint after a request, if one is due."""
    kind, served = request.kind, self._models.get(request.owner)
    if kind in (kinds.OPTIM_STEP, kinds.TRAIN):
      served.steps_since_save += 1
    elif kind != kinds.LOAD:
      return
    every_steps = self.base.config.serve.checkpoint_every_steps
    # A load is saved at once: its source may be overwritten before a repeat.
    if served.steps_since_save < every_steps and kind != kinds.LOAD:
      return
    state = {"params": served.run.params, "opt_state": served.run.opt_state}
    host: dict[str, Any] = {"seq": request.seq}
    if served.replay is not None:
      host["replay"] = served.replay.get_state()
    try:
      served.saver.save(request.seq, state, host, wait=kind == kinds.LOAD)
      steps = served.saver.newest_steps()
      if len(steps) == _KEEP:
        # Bodies after the older checkpoint stay, in case the newer is damaged.
        self.journal.drop_bodies(request.owner, steps[0])
    # After any error of Orbax, the journal suffices; the next save may succeed.
    except Exception as error:
      logging.error("%s", error)
      return
    served.steps_since_save = 0

  def _restore(
      self, saver: checkpoint.Checkpointer, spec: Mapping[str, Any]
  ) -> tuple[ServedModel, int]:
    """Returns a model at its newest checkpoint, and that request's number."""
    programs, replay = self.base.programs(spec), None
    trainable = programs.trainable
    if "replay" in spec:
      replay = served_replay.ServedReplay(
          self.base.config,
          strict_json.read(schemas.CreateReplay, spec["replay"]),
          self.base.policy.tokenizer,
      )
    if saver.latest_step() is None:
      params = trainable.init(spec["seed"])
      state = {"params": params, "opt_state": trainable.init_optimizer(params)}
      run = trained_model.TrainedModel(programs, **state)
      return ServedModel(run, saver, replay), -1
    try:
      state, host = saver.restore(trainable.abstract_state())
    except ValueError as error:
      # Damage on disk is not an error of the request that needs the model.
      raise RuntimeError(str(error)) from error
    if replay is not None:
      replay.set_state(host["replay"])
    run = trained_model.TrainedModel(programs, **state)
    return ServedModel(run, saver, replay), int(host["seq"])

  def _repeat(self, model: str, seq: int) -> None:
    """Repeats the finished requests of a model after a number.

    Raises:
      RuntimeError: a request cannot be repeated, or has another outcome.
    """
    repeated = 0
    for request, is_done in self.journal.since(model, seq):
      if not is_done:
        break
      if request.kind not in kinds.REPEATED:
        continue
      failure = self.journal.outcome(request.id).failure
      # The only failed request that may have had an effect is a step: it drops
      # a non-finite gradient.
      if failure and (
          request.kind not in (kinds.OPTIM_STEP, kinds.TRAIN)
          or failure["category"] != "user"
      ):
        continue
      if request.body is None:
        raise RuntimeError(
            f"{request.id} cannot be done again: its body is gone, and no"
            f" checkpoint in {self.weights.model_folder(model)} has its effect"
        )
      try:
        self.execute(request)
      except ValueError as error:
        if failure is None:
          raise RuntimeError(
              f"{request.id} cannot be done again: {error}"
          ) from error
      else:
        if failure is not None:
          raise RuntimeError(
              f"{request.id} failed the first time, but not when it was done"
              f" again: {failure['error']}"
          )
      repeated += 1
    if repeated:
      print(f"{model}: {repeated} requests after its checkpoint done again")

  def _load(self, model: str, body: schemas.LoadWeights) -> str:
    """Replaces a model's params with a checkpoint's; returns the path."""
    model_spec, path = self.registry.model(model), body.path
    spec, state = self.weights.read(path)
    for key in ("rank", "targets"):
      if spec[key] != model_spec[key]:
        raise ValueError(
            f"{path} has {key}={spec[key]!r}, the model"
            f" {model_spec[key]!r}: must be a checkpoint of the same adapters"
        )
    if body.optimizer and "opt_state" not in state:
      raise ValueError(
          f"{path} has no optimizer state: must be a path of save_weights"
      )
    self.get(model).run.load(
        state["params"], state["opt_state"] if body.optimizer else None
    )
    return path

  def _save(
      self, request: request_journal.ServerRequest, body: schemas.SaveWeights
  ) -> dict[str, Any]:
    """Saves a model; an unnamed version is returned as a sampling session."""
    model, kind = request.owner, request.kind
    run = self.get(model).run
    if kind == kinds.EXPORT:
      path, size = self.weights.export(request, body, run)
      return {"type": kind, "path": path, "size_bytes": size}
    if kind == kinds.SAVE:
      path = self.weights.save(request, body, run)
      return {"type": kind, "path": path}
    path = self.weights.save_version(request, body, run)
    if body.path:
      return {"type": kind, "path": path}
    # Numbered apart from the sampling sessions that clients create.
    sampler = f"{model}:sample:{request.seq}"
    self.registry.add_sampler(sampler, model.partition(":")[0], path)
    # Only replays have a session of this name.
    self.registry.set_sampler(kinds.newest_sampler(model), path)
    return {"type": kind, "sampling_session_id": sampler}


def _close(saver: checkpoint.Checkpointer) -> None:
  try:
    saver.close()
  # After any error of Orbax, the journal has what the checkpoint lacks.
  except Exception as error:
    logging.error("%s", error)

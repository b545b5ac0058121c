# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Engine of a server: one thread that owns the devices and executes requests.

HTTP handlers submit requests to its queue and return; the engine passes each
request to the part responsible, and journals the outcome.
"""

from collections.abc import Callable, Sequence
import pathlib
from typing import Any, TypeVar

from absl import logging
import ml_collections

from tba_jax import types
from tba_jax.chat_api import strict_json
from tba_jax.policy import policy as policy_lib
from tba_jax.serving import agent_episodes
from tba_jax.serving import crash_guard
from tba_jax.serving import database
from tba_jax.serving import kinds
from tba_jax.serving import pass_settings
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import replays as replays_lib
from tba_jax.serving import request_journal
from tba_jax.serving import request_queue
from tba_jax.serving import sample_batches
from tba_jax.serving import saved_weights
from tba_jax.serving import served_base
from tba_jax.serving import served_models

_T = TypeVar("_T")


class Engine:
  """Executes the requests of a server; `run` is the loop of its thread.

  registry, journal: sessions, models and checkpoints; requests.
  base, weights, models: the base model; checkpoints; models under training.
  samples, episodes, replays: sampling, agents, and training by the server.

  Args:
    workdir: directory of the server, which gets a `serve` folder.
    on_done: function that the thread calls with the ids of finished requests.
    source: policy and params of a server that only samples; None = the model
      that the config names.

  Raises:
    ValueError: the model cannot be loaded, or the directory belongs to a server
      with other settings.
    OSError: the directory cannot be used.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      workdir: str,
      on_done: Callable[[list[str]], None],
      source: tuple[policy_lib.Policy, types.PyTree] | None = None,
  ):
    if source is None:
      pass_settings.check_config(config)
    folder = pathlib.Path(workdir) / "serve"
    folder.mkdir(parents=True, exist_ok=True)
    self._db = database.Database(folder / "journal.sqlite")
    self.registry = registry_lib.Registry(self._db)
    self.journal = request_journal.RequestJournal(self._db)
    self.base = served_base.ServedBase(
        config, workdir, folder, self.registry, source
    )
    self._crash_guard = crash_guard.CrashGuard(folder / "under_way.json")
    self.queue = request_queue.RequestQueue(
        self.journal, config.serve.gap_deadline_s, on_done
    )
    self.weights = saved_weights.SavedWeights(
        self.base.policy,
        config.lora.alpha,
        self.base.base_name,
        self.base.abstract_state,
        self.registry,
        folder,
        self.queue.insist,
    )
    self.models = served_models.ServedModels(
        self.base, self.registry, self.journal, self.weights
    )
    self.samples = sample_batches.SampleBatches(
        self.base, self.registry, self.weights
    )
    self.episodes = agent_episodes.AgentEpisodes(
        self.base, self.registry, self.journal, self.samples
    )
    self.replays = replays_lib.Replays(
        self.base,
        self.registry,
        self.journal,
        self.queue,
        self.weights,
        self.models,
    )

  def stop(self) -> None:
    """Asks the thread to end after its current request."""
    self.queue.stop()
    # The process may exit before its current request ends: that is no crash.
    self._crash_guard.clear()

  def run(self) -> None:
    """Executes requests until `stop`; for one thread.

    Raises:
      OSError: the journal cannot be read, or still not be written at `stop`.
    """
    for model in self.registry.running_replays():
      if self._crash_guard.may_begin([model]):
        self.queue.insist(self.replays.go_on, model)
      else:
        self.registry.set_running(model, False, crash_guard.DEADLY)
    while batch := self.queue.next_batch():
      for group in self._split_suspects(batch):
        if self.queue.is_stopping:
          break
        if not self._crash_guard.may_begin([request.id for request in group]):
          self._give_up(group)
        elif group[0].kind in kinds.DECODED:
          self._sample(group)
        else:
          self._do(group[0])
    self.models.close()
    self._db.close()

  def _split_suspects(
      self, batch: list[request_journal.ServerRequest]
  ) -> list[list[request_journal.ServerRequest]]:
    """Returns a batch, split into single requests if any may be deadly."""
    if not any(self._crash_guard.is_suspect(request.id) for request in batch):
      return [batch]
    ordered = sorted(batch, key=lambda request: request.kind == kinds.FINISH)
    return [[request] for request in ordered]

  def _give_up(self, requests: Sequence[request_journal.ServerRequest]) -> None:
    """Fails requests during which the process has died too often."""
    for request in requests:
      logging.error(
          "%s (%s) is left out: %s",
          request.id,
          request.kind,
          crash_guard.DEADLY,
      )
      text = f"{request.id}: {crash_guard.DEADLY}"
      self._end(request, kinds.failure(text, "server"))

  def _attempt(
      self, id: str, fn: Callable[..., _T], *args: Any
  ) -> _T | dict[str, str]:
    """Returns the result of `fn`, or a request's failure if it raises.

    A ValueError is the request's fault; after any other error, the state in
    memory is unknown.
    """
    try:
      return fn(*args)
    except ValueError as error:
      return kinds.failure(str(error))
    # The server survives whatever JAX, Orbax or the disk raise.
    except Exception as error:
      logging.exception("%s failed", id)
      return kinds.failure(f"{type(error).__name__}: {error}", "server")

  def _do(self, request: request_journal.ServerRequest) -> None:
    """Executes a model's request, and journals its outcome."""
    outcome = self._attempt(request.id, self.models.execute, request)
    if kinds.is_of_server(outcome):
      self.models.forget(request.owner)  # Rebuilt when next needed.
    self._end(request, outcome)

  def _end(
      self, request: request_journal.ServerRequest, outcome: kinds.Outcome
  ) -> None:
    """Journals the outcome of a request, and starts what follows from it."""
    model = request.owner
    self.queue.finish({request.id: outcome})
    if request.kind in kinds.DECODED:
      return
    self.queue.advance(request)
    if isinstance(outcome, bytes):
      self.models.save_in_time(request)
    elif request.kind == kinds.TRAIN or (
        request.kind == kinds.SAVE_SAMPLER and request.body == kinds.PUBLISH
    ):
      reason = outcome["error"]
      self.queue.insist(self.registry.set_running, model, False, reason)
    self.queue.insist(self.replays.go_on, model)

  def _sample(self, batch: list[request_journal.ServerRequest]) -> None:
    """Decodes samples, compatible ones together, then ends episodes."""
    together: dict[Any, list[sample_batches.SampleJob]] = {}
    failed: dict[str, kinds.Outcome] = {}
    ends = [request for request in batch if request.kind == kinds.FINISH]
    for request in batch:
      if request.kind == kinds.FINISH:
        continue
      job = self._attempt(request.id, self._job, request)
      if isinstance(job, dict):
        failed[request.id] = job
      else:
        together.setdefault((job.path, job.settings), []).append(job)
    self.queue.finish(failed)
    for jobs in together.values():
      ids = [job.id for job in jobs]
      outcomes = self._attempt(", ".join(ids), self.samples.complete, jobs)
      if isinstance(outcomes, dict):
        outcomes = [outcomes] * len(jobs)
        for job in jobs:  # Some answers may already be in their episodes.
          self.episodes.forget(job.owner)
      self.queue.finish(dict(zip(ids, outcomes, strict=True)))
    for request in ends:
      outcome = self._attempt(request.id, self._end_episode, request)
      self.queue.finish({request.id: outcome})

  def _job(
      self, request: request_journal.ServerRequest
  ) -> sample_batches.SampleJob:
    """Returns the sampling job; ValueError if the request is invalid."""
    is_call = request.kind in (kinds.CALL, kinds.ANSWER)
    job = (self.episodes if is_call else self.samples).job(request)
    self.samples.check(job)
    return job

  def _end_episode(self, request: request_journal.ServerRequest) -> bytes:
    entered = self.replays.enter_episodes(self.episodes.end(request))
    id = request.owner
    return strict_json.to_json(
        {"type": request.kind, "episode_id": id, **entered}
    )

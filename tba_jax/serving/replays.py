# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replays of a server: creation, insertion of groups, and the next request."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from absl import logging

from tba_jax.chat_api import strict_json
from tba_jax.losses import objective_table
from tba_jax.serving import kinds
from tba_jax.serving import pass_settings
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import request_queue
from tba_jax.serving import saved_weights
from tba_jax.serving import schemas
from tba_jax.serving import served_base
from tba_jax.serving import served_models
from tba_jax.serving import served_replay


@dataclasses.dataclass
class Replays:
  """The replays of a server; `go_on` is for the engine's thread."""

  base: served_base.ServedBase
  registry: registry_lib.Registry
  journal: request_journal.RequestJournal
  queue: request_queue.RequestQueue
  weights: saved_weights.SavedWeights
  models: served_models.ServedModels

  def add(self, body: schemas.CreateReplay) -> str:
    """Adds the model of a replay; returns its id.

    Raises:
      ValueError: a setting is invalid, or the number is another replay's.
      LookupError: the checkpoint to start from does not exist.
    """
    number = body.replay_seq_id
    model = f"{body.session_id}:replay:{number}"
    served_replay.with_replay(self.base.config, body.replay)
    spec = self.base.spec_of(model, body.lora_config)
    if body.model_path:
      saved = self.registry.checkpoint(body.model_path)
      if saved is None:
        raise LookupError(f"{body.model_path}: there is no such checkpoint")
      spec = {key: saved[key] for key in spec}
    least = self._least_completions(body)
    if body.completions_per_prompt < least:
      raise ValueError(
          f"completions_per_prompt = {body.completions_per_prompt}: must be"
          f" {least} or more with loss_fn={body.loss_fn!r}"
      )
    spec["replay"] = body.model_dump()
    self.registry.add_model(model, body.session_id, spec)
    if self.registry.model(model) != json.loads(json.dumps(spec)):
      raise ValueError(
          f"replay_seq_id = {number}: is another replay; take another number"
      )
    self.registry.add_sampler(kinds.newest_sampler(model), body.session_id, "")
    return model

  def settings(self, model: str) -> schemas.CreateReplay:
    return strict_json.read(
        schemas.CreateReplay, self.registry.model(model)["replay"]
    )

  def least_completions(self, model: str) -> int:
    """Returns the smallest group size that a replay can learn from."""
    return self._least_completions(self.settings(model))

  def reward(
      self, model: str, id: str, rewards: Sequence[float]
  ) -> request_journal.ServerRequest:
    """Queues the insertion of a rewarded sample into its replay.

    Raises:
      LookupError: the replay has no such sample.
      ValueError: the sample is unfinished or failed, or the rewards do not fit.
    """
    outcome = self.journal.outcome(id)
    is_own = id.startswith(f"{kinds.newest_sampler(model)}:")
    if outcome is None or not is_own or outcome.kind != kinds.SAMPLE_INTO:
      raise LookupError(f'{id}: no sample with "into": "replay" of {model}')
    if outcome.result is None:
      text = (outcome.failure or {}).get("error", "not done yet")
      raise ValueError(f"{id}: {text}")
    group = served_replay.group_of_sample(
        json.loads(outcome.result), rewards, self.least_completions(model)
    )
    return self._insert(model, group, f"reward-{id.rpartition(':')[2]}")

  def enter_episodes(self, spec: Mapping[str, Any]) -> dict[str, int]:
    """Queues the insertion of an episode's group once all of it has finished.

    Args:
      spec: JSON facts about the episode.

    Returns:
      Number of groups queued and of rows left out; {} if the episode is in no
      group, or the group is unfinished.
    """
    together = spec["together"]
    if not together:
      return {}
    outcomes, size = self.registry.outcomes_of(together)
    if len(outcomes) != size:
      return {}
    model = spec["replay"]
    groups, left_out = served_replay.groups_of_episodes(
        outcomes, self.least_completions(model)
    )
    for n, group in enumerate(groups):
      self._insert(model, group, f"{together}:{n}")
    return {"groups": len(groups), "rows_left_out": left_out}

  def go_on(self, model: str) -> None:
    """Queues the next request of a running replay, if one is due."""
    running, _ = self.registry.running(model)
    if not running or self.queue.has_waiting(model):
      return
    try:
      served = self.models.get(model)
    # The replay stops on any error, rather than retry forever.
    except Exception as error:
      logging.exception("%s failed", model)
      reason = f"{type(error).__name__}: {error}"
      self.registry.set_running(model, False, reason)
      return
    settings, step = served.replay.settings, served.run.num_steps
    is_last = step >= settings.num_steps
    published = self.weights.step(
        self.registry.sampler(kinds.newest_sampler(model))
    )
    if step > published and (
        is_last or step % settings.publish_every_steps == 0
    ):
      self.queue.submit(kinds.SAVE_SAMPLER, model, None, kinds.PUBLISH)
    elif is_last:
      self.registry.set_running(model, False, "done")
    elif not served.replay.missing(step):
      self.queue.submit(kinds.TRAIN, model, None, b"{}")

  def state(self, model: str, after: int) -> dict[str, Any]:
    """Returns the state of a replay.

    Args:
      after: step after which metrics are returned, the newest 1000 at most.
    """
    settings = self.settings(model)
    is_running, reason = self.registry.running(model)
    results = self.journal.results
    steps = [json.loads(r) for _, r in results(model, kinds.TRAIN, -1, 1000)]
    newest = [
        (seq, json.loads(result))
        for kind in (kinds.INSERT, kinds.TRAIN)
        for seq, result in results(model, kind, -1, 1)
    ]
    counts = dict(max(newest, key=lambda x: x[0], default=(0, {}))[1])
    counts.pop("metrics", None)
    counts.pop("step", None)
    step = steps[-1]["step"] if steps else 0
    path = self.registry.sampler(kinds.newest_sampler(model))
    return {
        "replay_id": model,
        "running": is_running,
        "reason": reason,
        "step": step,
        "num_steps": settings.num_steps,
        "missing_groups": served_replay.missing_groups(
            settings, counts.get("groups", 0), step
        ),
        "counts": counts,
        "version": self.weights.step(path),
        "model_path": path or None,
        "sampling_session_id": kinds.newest_sampler(model),
        "steps": [s for s in steps if s["step"] > after],
    }

  def _least_completions(self, settings: schemas.CreateReplay) -> int:
    """Returns the smallest group size; ValueError for an invalid objective."""
    config = pass_settings.objective_config(
        self.base.config, settings.loss_fn, settings.loss_fn_config
    )
    return objective_table.min_completions(config.loss)

  def _insert(
      self, model: str, group: Mapping[str, Any], name: str
  ) -> request_journal.ServerRequest:
    body = json.dumps(group).encode()
    return self.queue.submit(kinds.INSERT, model, None, body, name=name)

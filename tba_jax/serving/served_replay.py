# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay on the server: it trains a model on groups while clients sample.

    POST /api/v1/create_replay         a model, its loss and how to draw
                                       -> {"replay_id", "sampling_session_id"}
    POST /api/v1/replays/ID/start      trains until `num_steps` or a stop
    POST /api/v1/asample               with {"into": "replay"}
    POST /api/v1/replays/ID/reward     {"request_id", "rewards"} of a sample
    POST /api/v1/create_episode        with {"into": "replay", "group",
                                       "num_episodes"}
    GET  /api/v1/replays/ID?after=STEP  state, counts, metrics of steps
    POST /api/v1/replays/ID/stop

A replay is a model whose requests the server numbers: each new group, each step
(draw, pass and optimizer update) and each saved version is a request in the
journal like a client's, and the buffer is part of the model's checkpoint. So a
replay recovers from a kill as other models do, with the same groups, draws and
steps, bit for bit. The sampling session of a replay points at its newest
version.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any

import ml_collections
import numpy as np

from tba_jax import loop
from tba_jax import types
from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.learning import batches
from tba_jax.learning import schedules
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.serving import schemas
from tba_jax.serving import trained_model

# Settings of `config.replay` that each replay may change.
SETTINGS = (
    "capacity", "capacity_per_prompt", "recent_fraction", "recent_window_steps",
    "skip_equal_rewards", "selection", "reward_temperature",
    "age_decay_steps", "dedupe",
)  # fmt: skip


def with_replay(
    config: ml_collections.ConfigDict, changes: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Returns the config with the settings that a replay changes."""
  lines = []
  for key, value in changes.items():
    if key not in SETTINGS:
      raise ValueError(f"replay.{key}: must be one of {', '.join(SETTINGS)}")
    lines.append(f"replay.{key}={value}")
  try:
    config = load.apply_overrides(config.copy_and_resolve_references(), lines)
  except ValueError as error:
    raise ValueError(f"replay: {error}") from error
  for key in changes:
    allowed = settings_lib.SETTINGS[f"replay.{key}"].allowed
    if not allowed.test(config.replay[key]):
      raise ValueError(
          f"replay.{key} = {config.replay[key]!r}: must be {allowed.text}"
      )
  return config


class ServedReplay:
  """The buffer of a replay, and counts of what has passed through it.

  counts: number of completions that have `entered`, were `trained` on, or were
    `evicted` untrained, and of `groups` that have entered. All other
    completions are in the buffer, untrained.

  Raises:
    ValueError: a setting is invalid.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      settings: schemas.CreateReplay,
      tokenizer: tokenizer_lib.Tokenizer,
  ):
    self.settings = settings
    config = with_replay(config, settings.replay)
    counts = config.loss.include_stop_token
    self._tokenizer = None if counts else tokenizer
    self._num_tokens = config.sampling.max_completion_tokens
    self._buffer = buffer_lib.ReplayBuffer(
        config,
        reward_temperature=schedules.reward_temperature(
            config.replay, per_round_steps=0
        ),
    )
    self._buffer.begin_epoch(0, 0)
    self.counts = {"groups": 0, "entered": 0, "trained": 0, "evicted": 0}

  def insert(self, body: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Stores a group that `pack_group` packed; returns the counts.

    Raises:
      ValueError: the buffer rejects the group.
    """
    rows, T = body["completions"], self._num_tokens
    ids = np.zeros((len(rows), T), np.int32)
    mask = np.zeros(ids.shape, np.bool_)
    logprobs = np.zeros(ids.shape, np.float32)
    for s, row in enumerate(rows):
      n = len(row["ids"])
      ids[s, :n], mask[s, :n] = row["ids"], row["mask"]
      logprobs[s, :n] = row["logprobs"]
    prompt = np.asarray(body["prompt_ids"], np.int32)
    group = types.Group(
        prompt_id=_prompt_id(prompt),
        visit=0,
        position=0,
        prompt_tokens=prompt,
        completion_tokens=ids,
        completion_lengths=np.array([len(r["ids"]) for r in rows], np.int32),
        sampled_mask=mask,
        stopped=np.array([r["stopped"] for r in rows], np.bool_),
        behavior_logprobs=logprobs,
        rewards=np.array([r["reward"] for r in rows], np.float32),
        versions=np.array([r["version"] for r in rows], np.int32),
        epoch=0,
    )
    evicted = self._buffer.insert(group, step)
    self.counts["groups"] += 1
    self.counts["entered"] += len(rows)
    self.counts["evicted"] += evicted.completions
    return self.state()

  def missing(self, step: int) -> int:
    """Returns how many more groups must enter before a step."""
    return missing_groups(self.settings, self.counts["groups"], step)

  def draw(self, step: int) -> tuple[types.Batch, dict[str, float]]:
    """Returns a batch without reference log-probs, and its statistics.

    Raises:
      ValueError: the buffer is empty.
    """
    s = self.settings
    draw = self._buffer.sample(
        s.prompts_per_batch, s.completions_per_prompt, step
    )
    batch = batches.of_draw(draw, self._tokenizer)
    self.counts["trained"] += self._buffer.mark_drawn(draw.ids).completions
    stats = draw.stats()
    names = ("fresh_share", "recent_share", "staleness_steps", "stop_rate")
    metrics = {name: stats[name] for name in names}
    metrics["reward_mean"] = float(draw.rewards.mean())
    return batch, metrics

  def train(self, run: trained_model.TrainedModel) -> dict[str, Any]:
    """Takes the next step of a model; returns its result.

    The loop ends after one step, since each step is a request of the journal:
    after a kill, unsaved steps are repeated request by request.

    Raises:
      ValueError: the buffer is empty, or the gradient is not finite.
    """
    results = []

    def note(step: int, draw: Any, metrics: Mapping[str, float]) -> None:
      del draw
      results.append({"step": step + 1, "metrics": metrics, **self.state()})

    first = run.num_steps
    learner = _ReplayLearner(run, self.settings)
    loop.run(self._draws(first, first + 1), learner, [note])
    return results[-1]

  def _draws(
      self, first: int, last: int
  ) -> Iterator[tuple[int, tuple[types.Batch, dict[str, float]]]]:
    for step in range(first, last):
      yield step, self.draw(step)

  def state(self) -> dict[str, Any]:
    """Returns the counts, and how many completions are stored."""
    return {
        **self.counts,
        "stored": len(self._buffer),
        "untrained": self._buffer.untrained().completions,
    }

  def get_state(self) -> dict[str, Any]:
    """Returns the host state of a checkpoint."""
    return {"buffer": self._buffer.get_state(), "counts": dict(self.counts)}

  def set_state(self, state: Mapping[str, Any]) -> None:
    self._buffer.set_state(state["buffer"])
    self.counts = dict(state["counts"])


@dataclasses.dataclass(frozen=True)
class _ReplayLearner:
  """Trains a model on the batches of a replay."""

  run: trained_model.TrainedModel
  settings: schemas.CreateReplay

  def step(
      self, draw: tuple[types.Batch, dict[str, float]]
  ) -> dict[str, float]:
    batch, stats = draw
    loss = self.run.run_batch(
        self.settings.loss_fn, self.settings.loss_fn_config, batch
    )
    groups = float(len(batch.rewards))
    metrics = {"loss:mean": loss, "groups:sum": groups, **stats}
    return metrics | self.run.step(self.settings.adam_params)


def missing_groups(
    settings: schemas.CreateReplay, groups: int, step: int
) -> int:
  """Returns how many groups a step still needs once `groups` have entered."""
  return max(0, max(1, settings.groups_each_step * (step + 1)) - groups)


def pack_group(
    prompt_ids: Sequence[int], completions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns a group as JSON.

  Args:
    completions: `ids`, `mask`, `logprobs`, `version`, `stopped` and `reward` of
      each.
  """
  return {"prompt_ids": list(prompt_ids), "completions": list(completions)}


def groups_of_episodes(
    outcomes: Sequence[Mapping[str, Any]], least: int
) -> tuple[list[dict[str, Any]], int]:
  """Returns the groups of finished episodes, and how many rows are left out.

  Rows with the same prompt form a group. Rows of episodes without a reward and
  rows of other agents than the task's are left out, and so are groups of fewer
  than `least` rows.

  Args:
    outcomes: `Episode.to_json` of each episode, with its `reward`.
    least: smallest group size of the objective.
  """
  by_prompt: dict[tuple[int, ...], list[dict[str, Any]]] = {}
  left_out = 0
  for outcome in outcomes:
    for row in outcome["rows"]:
      if outcome["reward"] is None or not row.get("is_task", True):
        left_out += 1
        continue
      by_prompt.setdefault(tuple(row["prompt_ids"]), []).append(
          {
              "ids": row["completion_ids"],
              "mask": row["sampled_mask"],
              "logprobs": row["logprobs"],
              "version": min(v for v in row["versions"] if v >= 0),
              "stopped": row["stopped"],
              "reward": outcome["reward"],
          }
      )
  groups = []
  for prompt, rows in by_prompt.items():
    if len(rows) < least:
      left_out += len(rows)
    else:
      groups.append(pack_group(prompt, rows))
  return groups, left_out


def group_of_sample(
    result: Mapping[str, Any], rewards: Sequence[float], least: int
) -> dict[str, Any]:
  """Returns the group of a sample `into` a replay.

  Args:
    least: smallest group size of the objective.

  Raises:
    ValueError: there is not one reward for each completion, or too few.
  """
  sequences = result["sequences"]
  if len(rewards) != len(sequences):
    raise ValueError(
        f"rewards: must be {len(sequences)} numbers, one for each completion"
    )
  if len(sequences) < least:
    raise ValueError(
        f"the sample has {len(sequences)} completions: must be {least} or more"
    )
  return pack_group(
      result["prompt_ids"],
      [
          {
              "ids": s["tokens"],
              "mask": [1] * len(s["tokens"]),
              "logprobs": s["logprobs"],
              "version": result["version"],
              "stopped": s["stop_reason"] == "stop",
              "reward": float(reward),
          }
          for s, reward in zip(sequences, rewards, strict=True)
      ],
  )


def _prompt_id(prompt: np.ndarray) -> int:
  """Returns 63 bits of a digest, the same for equal prompts."""
  digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
  return int.from_bytes(digest, "big") >> 1

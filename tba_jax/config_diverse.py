# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the settings of `configs/common_red_team.py` must be to others. No JAX.

As the checks of `config_relations.py`, which calls them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Names of `config.loss`.
OF_A_TEMPERED_TARGET = ("tb", "tb_learned_z")

_Problems = Iterator[tuple[str, str]]


def tempering(c: Mapping[str, Any]) -> _Problems:
  """Other losses have no target to temper."""
  name = c["loss.name"]
  if name in OF_A_TEMPERED_TARGET:
    return
  for part in ("tau", "gamma"):
    for key in (f"tempering.{part}", f"tempering.{part}_final"):
      if c[key] != 1:
        yield key, f"allowed 1 with config.loss.name = {name!r}"


def explore(c: Mapping[str, Any]) -> _Problems:
  """Temperatures in their order, and a completion that can still end."""
  if c["explore.min_temperature"] > c["explore.max_temperature"]:
    yield "explore.min_temperature", (
        "allowed up to config.explore.max_temperature ="
        f" {c['explore.max_temperature']}"
    )
  if c["explore.min_tokens"] >= c["sampling.max_completion_tokens"]:
    yield "explore.min_tokens", (
        "allowed less than config.sampling.max_completion_tokens ="
        f" {c['sampling.max_completion_tokens']}"
    )
  if c["explore.fraction"] and c["loss.ratio_clip"]:
    yield "explore.fraction", (
        "allowed 0 with config.loss.ratio_clip above 0: a trust region is"
        " around the policy, not around what explores"
    )


def replay_filter(c: Mapping[str, Any]) -> _Problems:
  """What is filtered must have its order, and its encoder."""
  changed = (
      ("replay_filter.similarity", "none"),
      ("replay_filter.evict", "oldest"),
      ("replay_filter.freeze_step", 0),
      ("replay_filter.duplicates", "newest"),
  )
  for key, plain in changed:
    if c["rounds.mini_batches"] and c[key] != plain:
      yield key, f"allowed {plain!r} with config.rounds.mini_batches above 0"
  has_encoder = c["task.name"] == "red_team"
  if c["replay_filter.similarity"] == "cosine" and not has_encoder:
    yield "replay_filter.similarity", (
        "allowed 'none', 'edit' where the task has no config.task.encoder"
    )
  if c["replay_filter.duplicates"] == "oldest" and not c["replay.dedupe"]:
    yield "replay_filter.duplicates", (
        "allowed 'newest' with config.replay.dedupe = False"
    )


def victim(c: Mapping[str, Any]) -> _Problems:
  """A judge with models of its own runs in the role itself."""
  if c["task.name"] == "red_team" and c["reward.where"] != "process":
    yield "reward.where", "allowed 'process' with config.task.name = 'red_team'"

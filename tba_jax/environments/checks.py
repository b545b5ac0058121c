# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of settings against the environments that they name."""

from tba_jax.models import checks as models
from tba_jax.system import rules
from tba_jax.tasks import base
from tba_jax.tasks import task_table


def played(c: rules.Values) -> rules.Problems:
  """Checks the backend of the environments that `generate` runs."""
  if c.program != "generate" or not task_table.facts(c["task.name"]).has_turns:
    return
  try:
    where = task_table.configured_task(c).rewards_where
  except ValueError as error:
    yield "", str(error)
    return
  if c["reward.backend"] not in where:
    yield "reward.backend", (
        f"must be {' or '.join(map(repr, where))} with this task"
    )


def fits(c: rules.Values, task: base.PromptSet) -> rules.Problems:
  """Yields problems with settings that environments do not support."""
  if c.get("init") == "sft" and not task.can_demonstrate:
    yield "init", (
        "must be 'scratch' or a model's folder: config.task.source has no"
        " method demonstrate to fine-tune on"
    )
  if c.get("offline.path") and not c["offline.reward_field"]:
    yield "offline.reward_field", (
        "must be the name of a field with environments, which reward only the"
        " episodes that they play"
    )
  shape = models.shape_or_none(c) if "init" in c else None
  if c.get("sampling.stop_strings") and shape and shape.has_states:
    yield "sampling.stop_strings", (
        "must be '' with environments for the model of config.init: the states"
        " of its delta nets would include the tokens that a stop string cuts"
        " off; its stop tokens end turns too"
    )
  if c.get("evaluate.judge"):
    yield "evaluate.judge", "must be '' with environments"

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What settings of rewards and judges must be to each other. No JAX here.

As in `config_relations.py`, which runs these checks with its own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keys that name a folder, and what they may be instead.
FOLDERS = (
    ("evaluate.judge", ("", "task", "command")),
    ("reward.model", ("reward_model",)),
    ("reward_model.init", ("sft",)),
    ("reward_model.relabel", ("", "task")),
)

_Problems = Iterator[tuple[str, str]]


def _verifier(c: Mapping[str, Any]) -> _Problems:
  # Nothing else bounds the time that a command, or sympy, takes.
  if c.get("task.verifier") and c["reward.where"] != "pool":
    yield "reward.where", "allowed 'pool' with a config.task.verifier"
  if c["task.name"] == "math" and c["reward.where"] != "pool":
    yield "reward.where", "allowed 'pool' with config.task.name = 'math'"


def _judge(c: Mapping[str, Any]) -> _Problems:
  if c["evaluate.judge"] == "command" and not c["evaluate.judge_command"]:
    yield "evaluate.judge_command", (
        "allowed a command with config.evaluate.judge = 'command'"
    )


CHECKS: tuple[Callable[[Mapping[str, Any]], _Problems], ...] = (
    _verifier,
    _judge,
)

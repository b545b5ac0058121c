# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every check of a config, before any device is touched. No JAX here.

`validate` compares the config with the base config and the task's own fields
(unknown, missing and wrongly typed keys), then each value with its range, then
the values with each other, and reports all that is wrong at once.
"""

from collections.abc import Mapping, Sequence
import fnmatch
from typing import Any

import ml_collections

from tba_jax.config import load
from tba_jax.config import ranges
from tba_jax.config import relations
from tba_jax.config import settings as settings_lib
from tba_jax.tasks import base
from tba_jax.tasks import build

ConfigError = load.ConfigError

# Programs from a file of lines to another one, with a model that they name.
LINE_PROGRAMS = ("generate", "score")

# What may differ when a run is continued: how it is watched, served and
# guarded, where it computes, and how long it is; not what it computes from one
# step to the next.
# A longer `train.num_steps` stretches a learning-rate decay from that step on.
RESUMABLE_KEYS = (
    "checkpoint.*",
    "cores.*",
    "evaluate.*",
    "export.*",
    "generate.*",
    "guards.*",
    "log.*",
    "mesh.*",
    "publish.carrier",
    "publish.directory",
    "publish.keep_versions",
    "replay.max_segment_mb",
    "reward.deadline_s",
    "reward.memory_mb",
    "reward.num_workers",
    "reward.start_deadline_s",
    "search.cpu_devices",
    "search.credits",
    "search.lease_s",
    "search.mesh.*",
    "search.num_searchers",
    "search.pull_every_s",
    "search.starvation_s",
    "sharding.*",
    "store.*",
    "sweep.*",
    "train.num_steps",
    "train.wall_clock_limit_s",
    "trainer.*",
)
# What may differ between the hosts of a run: what a host has, and where it has
# its files. `sft.*` and `reward_model.*` are of programs that run alone. Model
# and data are held against the trainer's by what they say (`agreement.facts`).
HOST_KEYS = (
    "cores.*",
    "init",
    "reward.memory_mb",
    "reward.num_workers",
    "reward_model.*",
    "sft.*",
    "store.*",
    "task.data",
    "task.instructions",
    "task.test",
    "task.train",
    "task.validation",
    "tokenizer.source",
    "trainer.coordinator",
)
# Folders of models whose content nobody compares: a path may differ from
# another path, and from nothing else.
PATH_KEYS = (
    "loss.value_init",
    "reward.model",
    "task.classifier_folder",
    "task.encoder",
    "task.victim",
)
# A searcher may differ from its trainer in these too, and in RESUMABLE_KEYS: it
# has devices of its own, and no completion depends on how many rows decode at
# the same time.
SEARCHER_KEYS = ("*mesh.*", "sampling.num_rows", "sharding.*")


def validate(
    config: ml_collections.ConfigDict,
    *,
    program: str = "train",
    task: base.Task | None = None,
) -> None:
  """Raises one error with all that is wrong with a config.

  Args:
    config: complete.
    program: that will run; `sampling.temperature` may be 0 (greedy) only where
      nothing is trained: "evaluate" and "generate".
    task: stands in for the one that `config.task` describes, which is then not
      checked.

  Raises:
    ConfigError: a line `config.path = value: what is allowed` per problem.
  """
  values = load.flatten(config)
  if task is not None:
    values = {k: v for k, v in values.items() if not k.startswith("task.")}
  expected = _expected(str(values.get("task.name")))
  problems, good = _check_types(values, expected)
  for key in list(good):
    allowed = ranges.allowed(key, good[key])
    if allowed and not (
        key == "sampling.temperature"
        and good[key] == 0
        and program in ("evaluate", "generate")
    ):
      problems.append(_line(key, good.pop(key), allowed))
  if program in LINE_PROGRAMS:
    # The model is the folder's, and no task is there.
    for key, allowed in relations.line_program_problems(good):
      problems.append(_line(key, good[key], allowed))
    _raise(problems)
    return
  if task is None and not any(p.startswith("config.task.") for p in problems):
    try:
      task = build.make_task(config.get("task", {}))
    except ValueError as error:
      problems.append(str(error))
  found = [
      *relations.problems(good),
      *relations.lora_program_problems(good, program),
  ]
  for key, allowed in found:
    problems.append(_line(key, good[key], allowed))
  if task is not None:
    problems += _check_task(good, task)
  _raise(problems)


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  """Raises where a run would be continued with another computation.

  Args:
    old: the config that the run was started with, as its `config.json` has it.
    new: the config asked for now.

  Raises:
    ConfigError: a line per key that differs and is not in `RESUMABLE_KEYS`.
  """
  old, new = load.flatten(old), load.flatten(new)
  defaults = _defaults(new)
  lines = []
  for key in sorted(set(old) | set(new)):
    # A key that came or went with another version of the code has its default
    # on the side that does not know it.
    before, now = (side.get(key, defaults.get(key)) for side in (old, new))
    if before != now and not is_resumable(key):
      lines.append(
          f"config.{key} = {now!r}: the run was started with {before!r}, and"
          " this key cannot change when it is continued; set it back, or give"
          " another --workdir"
      )
  if lines:
    raise ConfigError("\n".join(lines))


def check_hosts(
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    sides: tuple[str, str],
    *,
    searcher: bool,
) -> None:
  """Raises where two processes of a run would not compute the same.

  Args:
    mine: settings of one, by key.
    theirs: those of the other.
    sides: what to call the two.
    searcher: whether one of them is a searcher, and not both of one trainer.

  Raises:
    ConfigError: a line per key that differs and that may not.
  """
  defaults = _defaults(mine)
  free = HOST_KEYS + searcher * (RESUMABLE_KEYS + SEARCHER_KEYS)
  lines = []
  for key in sorted(set(mine) | set(theirs)):
    # As in `check_resume`.
    a, b = (side.get(key, defaults.get(key)) for side in (mine, theirs))
    paths = key in PATH_KEYS and "/" in str(a) and "/" in str(b)
    if a != b and not paths and not _is_any(key, free):
      lines.append(
          f"config.{key} = {a!r} at {sides[0]}, {b!r} at {sides[1]}: allowed"
          " the same on all hosts of a run"
      )
  if lines:
    raise ConfigError("\n".join(lines))


def is_resumable(key: str) -> bool:
  """Tells whether a key may change when a run is continued."""
  return _is_any(key, RESUMABLE_KEYS)


def _defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a key stands for that is lacking, those of the task too."""
  fields = build.fields(settings.get("task.name", "")) or {}
  task = {f"task.{name}": value for name, value in fields.items()}
  return load.flatten(settings_lib.get_config()) | task


def _is_any(key: str, patterns: Sequence[str]) -> bool:
  return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _raise(problems: list[str]) -> None:
  if problems:
    raise ConfigError("\n".join(dict.fromkeys(problems)))


def _line(key: str, value: Any, allowed: str) -> str:
  return f"config.{key} = {value!r}: {allowed}"


def _expected(task_name: str) -> dict[str, Any]:
  """Returns every key that may be there, with a value of its type."""
  expected = load.flatten(settings_lib.get_config())
  fields = build.fields(task_name) or {}
  return expected | {f"task.{name}": value for name, value in fields.items()}


def _check_types(
    values: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
  """Returns the problems, and the values that are known and well typed."""
  problems, good = [], {}
  task_is_known = build.fields(values.get("task.name")) is not None
  for key, value in values.items():
    if key not in expected:
      # Of a task that does not exist only the name is wrong.
      if task_is_known or not key.startswith("task."):
        problems.append(load.unknown_key(key, value, list(expected)))
    elif not _has_type(value, expected[key]):
      kind = load.type_name(expected[key])
      problems.append(_line(key, value, f"allowed {kind}"))
    else:
      good[key] = value
  for key in expected:
    # A task fills in the fields that are left out.
    if key not in values and not key.startswith("task."):
      problems.append(
          f"config.{key}: is missing; tba_jax/config/settings.py has it"
      )
  return problems, good


def _has_type(value: Any, example: Any) -> bool:
  if isinstance(value, bool) or isinstance(example, bool):
    return isinstance(value, bool) and isinstance(example, bool)
  if isinstance(example, float):
    return isinstance(value, (int, float))
  return isinstance(value, type(example))


def _check_task(good: Mapping[str, Any], task: base.Task) -> list[str]:
  """Checks what must fit the task: its longest texts, its held-out prompts."""
  lines = []
  if good.get("tokenizer.source") == "task":  # Another cuts in other tokens.
    # Of rows of data, what is too long is left out.
    longest = 0 if base.has_report(task) else task.max_prompt_tokens
    read = base.report_of(task) is not None
    longest_completion = 0 if read else task.max_completion_tokens
    for key, needed, what in (
        ("sampling.max_prompt_tokens", longest, "prompt"),
        (
            "sampling.max_completion_tokens",
            longest_completion,
            "right completion, with its stop token,",
        ),
    ):
      if good.get(key, needed) < needed:
        lines.append(
            _line(
                key,
                good[key],
                f"allowed {needed} or more: the longest {what} has {needed}"
                " tokens",
            )
        )
  if good.get("checkpoint.keep_best") and base.VALIDATION not in task.splits:
    why = "allowed False: the task has no validation split to choose by"
    lines.append(_line("checkpoint.keep_best", True, why))
  for key, split in (
      ("evaluate.num_prompts", base.split_while_training(task)),
      ("evaluate.final_prompts", base.HELD_OUT),
  ):
    size = task.num_prompts(split)
    if good.get(key, 0) > size:
      what = f"the {split.replace('_', '-')} prompts of the task"
      lines.append(_line(key, good[key], f"allowed up to {size}, {what}"))
  return lines

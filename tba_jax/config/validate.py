# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs every check of a config, before any device is touched.

`validate` checks names, types and ranges (`settings.py`), then the relations
between settings (`checks.py` or `settings.py` of each folder), and reports all
errors at once.
"""

from collections.abc import Iterable, Mapping
import os
from typing import Any

import ml_collections

from tba_jax.config import custom_code
from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import variants
from tba_jax.evaluation import settings as evaluation
from tba_jax.learning import checks as learning
from tba_jax.losses import checks as losses
from tba_jax.models import checks as models
from tba_jax.policy import checks as policy
from tba_jax.programs import checks as programs
from tba_jax.replay import settings as replay
from tba_jax.rewards import settings as rewards
from tba_jax.run import settings as run
from tba_jax.sampling import checks as sampling
from tba_jax.serving import settings as serving
from tba_jax.system import processes
from tba_jax.system import rules
from tba_jax.tasks import checks as tasks
from tba_jax.tasks import task_table
from tba_jax.tools import settings as tools
from tba_jax.transport import checks as transport
from tba_jax.transport.groups import settings as groups

ConfigError = load.ConfigError

# Programs that read a JSONL file and take a model by name.
LINE_PROGRAMS = ("generate", "score")
_WITHOUT_TASK = ("store", "status", "report", "export", "compile", "serve")
# Sections that a program reads; relations in other sections go unchecked.
_MODEL = (
    "", "task", "tokenizer", "model", "lora", "mesh", "sampling",
)  # fmt: skip
_SECTIONS_OF = {
    "sft": (*_MODEL, "sft", "evaluate", "reward"),
    "reward_model": (*_MODEL, "reward_model", "evaluate"),
    "evaluate": (*_MODEL, "evaluate", "reward"),
    "export": (*_MODEL, "export"),
    "serve": (*_MODEL, "serve"),
    "sweep": (
        *_MODEL, "optimizer", "sft", "sweep", "reference", "rounds", "loss",
        "tempering", "explore", "train", "evaluate", "reward", "offline",
    ),
    "store": ("store",),
    "status": ("store",),
    "report": (),
}  # fmt: skip


def _unread(c: Mapping[str, Any]) -> rules.Problems:
  """Yields non-default settings that nothing reads."""
  for key, setting in settings.SETTINGS.items():
    if setting.read_with and {key, setting.read_with[0]} <= c.keys():
      yield from rules.unread(c, key, setting.default, *setting.read_with)


# Existence of files and models, in all sections.
_FILES = (rewards.readable, models.named)
_CHECKS = (
    _unread,
    *losses.CHECKS,
    *policy.CHECKS,
    *models.CHECKS,
    *tasks.CHECKS,
    *sampling.CHECKS,
    *groups.CHECKS,
    *replay.CHECKS,
    *rewards.CHECKS,
    *learning.CHECKS,
    *evaluation.CHECKS,
    *transport.CHECKS,
    *run.CHECKS,
    *programs.CHECKS,
    *tools.CHECKS,
    *serving.CHECKS,
)


def validate(
    config: ml_collections.ConfigDict,
    *,
    program: str = "train",
    elsewhere: bool = False,
) -> list[str]:
  """Raises one error with all problems of a config.

  Args:
    program: name of the program; in sections that it does not read, only types
      and ranges are checked.
    elsewhere: whether the run's files and packages are on other machines, so
      that they may be missing on this one.

  Returns:
    With `elsewhere`, one line per model or data set missing on this machine.

  Raises:
    ConfigError: a line `config.KEY = VALUE: must be …` per problem.
  """
  values = load.flatten(config)
  if program == "one_process":
    values["run.processes"] = "one"
  problems, good = _check_values(values, program)
  sections = _sections_read(good, program)
  c = rules.Values(good, program, sections, elsewhere)
  not_here: list[str] = []
  if program in LINE_PROGRAMS:
    problems += _lines(c, programs.OF_LINES)
  else:
    missing = _failed_checks(c, _FILES)
    lines = [_line(c, *problem) for problem in missing]
    (not_here if elsewhere else problems).extend(lines)
    for key, _ in missing:
      c.pop(key, None)
    # Settings that the program does not read may have any value, so replace
    # them by the defaults, which are consistent.
    defaults = {
        key: setting.default
        for key, setting in settings.SETTINGS.items()
        # It gives the shape of the model in WORKDIR/sft.
        if rules.section(key) not in sections and key != "sft.init"
    }
    read = rules.Values({**c, **defaults}, program, sections, elsewhere)
    problems += _lines(read, _CHECKS, sections)
    if elsewhere and c.get("init") == "sft":
      allowed = (
          "must be a folder on the hosts or a hub name ORG/NAME, because SFT is"
          " not run there; run --program=sft and give its WORKDIR/sft/model"
      )
      problems.append(_line(c, "init", allowed))
    task_is_wrong = any(p.startswith("config.task.") for p in problems)
    if program not in _WITHOUT_TASK and not task_is_wrong:
      lines = _lines(c, [tasks.fits])
      (not_here if elsewhere else problems).extend(lines)
  # A supervisor has already tried this code.
  is_supervised = processes.SUPERVISED in os.environ
  if not (elsewhere or problems or is_supervised):
    if tried := custom_code.parts(good, program):
      problems += custom_code.problems(config.to_dict(), tried)
  if problems:
    raise ConfigError("\n".join(dict.fromkeys(problems)))
  return not_here


def _check_values(
    values: Mapping[str, Any], program: str
) -> tuple[list[str], dict[str, Any]]:
  """Returns (problems of individual values, valid values)."""
  problems, good = [], {}
  expected = differences.defaults(values.get("task.name"))
  task_is_known = task_table.fields(values.get("task.name")) is not None
  for key, value in values.items():
    if key not in expected:
      # For an unknown task, only its name is reported.
      if task_is_known or not key.startswith("task."):
        problems.append(load.unknown_key(key, value, list(expected)))
    elif allowed := _allowed(key, value, expected[key], program):
      problems.append(_line(values, key, f"must be {allowed}"))
    else:
      good[key] = value
  for key in expected:
    # Missing task fields get their defaults.
    if key not in values and not key.startswith("task."):
      problems.append(
          f"config.{key}: is missing; start from"
          " tba_jax.config.settings.get_config()"
      )
  return problems, good


def _is_text(value: str) -> bool:
  """Returns whether a string can be written to files and command lines."""
  try:
    return b"\0" not in value.encode()
  except UnicodeEncodeError:  # A lone surrogate.
    return False


def _allowed(key: str, value: Any, default: Any, program: str) -> str:
  """Returns what is allowed if `value` is invalid, else ""."""
  if default is None and value is None:
    return ""
  setting = settings.SETTINGS.get(key)
  if isinstance(value, str) and settings.is_over_steps(key):
    return "" if setting.allowed.test(value) else setting.allowed.text
  kind = float if default is None else type(default)
  numbers = (int, float) if kind is float else kind
  is_bool = isinstance(value, bool)
  if not isinstance(value, numbers) or is_bool != (kind is bool):
    return variants.type_name(default)
  if kind is str and not _is_text(value):
    return "UTF-8 text without NUL characters"
  # Arrays are 32-bit; reject numbers that would overflow or round to 0.
  if kind is int and key != "seed" and abs(value) >= 2**31:
    return "a whole number below 2**31"
  if kind is float and not rules.is_float32(value):
    low, high = rules.MIN_FLOAT, rules.MAX_FLOAT
    return f"a finite number, 0 or from {low} to {high}"
  if setting is None or setting.allowed.test(value):
    return ""
  text = setting.allowed.text
  if setting.allowed.explain is not None:
    return setting.allowed.explain(value) or text
  if setting.also is None or value != setting.also[0]:
    return text
  also, by = setting.also
  return "" if program in by else f"{text}, or {also} in {' and '.join(by)}"


def _sections_read(c: Mapping[str, Any], program: str) -> set[str]:
  """Returns the sections that a program reads, "" for top-level keys."""
  if program in _SECTIONS_OF:
    return set(_SECTIONS_OF[program])
  out = {"", *settings.SECTIONS} - {"generate", "export", "sweep"}
  if c.get("init") != "sft":
    out.discard("sft")
  if not rewards.trains_reward_model(c):
    out.discard("reward_model")
  return out


def _failed_checks(
    c: rules.Values, checks: Iterable[rules.Check]
) -> list[tuple[str, str]]:
  """Returns the problems that the checks find.

  A check that needs an invalid value raises KeyError and is skipped: the value
  itself has already been reported.
  """
  problems = []
  for check in checks:
    try:
      for problem in check(c):
        problems.append(problem)
    except KeyError:
      continue
  return problems


def _lines(
    c: rules.Values,
    checks: Iterable[rules.Check],
    sections: set[str] | None = None,
) -> list[str]:
  """Returns one line per problem in `sections` (None: all sections)."""
  return [
      _line(c, key, allowed)
      for key, allowed in _failed_checks(c, checks)
      if sections is None or rules.section(key) in sections
  ]


def _line(c: Mapping[str, Any], key: str, allowed: str) -> str:
  if not key:  # `allowed` is a whole line.
    return allowed
  # Errors from reading a folder begin with the folder, which is `value`.
  value = c[key]
  return f"config.{key} = {value!r}: {allowed.removeprefix(f'{value}: ')}"

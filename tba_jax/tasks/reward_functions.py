# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of a user's own task: built-in checks, Python functions, a command.

A reward is a function of (prompt, completion, row), `row` being the fields of
the data's row, that returns a number. A task's reward is their weighted sum:

    "number"                                one of the built-in ones
    "my_rewards.py:polite"                  a function of a file
    "my_package.rewards:polite"             a function of a module
    "exact, my_rewards.py:short * 0.1"      several, weighted
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib
import importlib.util
import json
import math
import pathlib
import shlex
import subprocess
import sys
from typing import Any

from tba_jax.system import processes
from tba_jax.tasks import answers
from tba_jax.tasks import base

RewardFn = Callable[[str, str, Mapping[str, Any]], float]
# Why a completion is wrong, "" or None for no reason.
ReasonFn = Callable[[str, str, Mapping[str, Any]], str | None]

# The field with the reference answer, as the built-in rewards find it.
ANSWER = "answer"


@dataclasses.dataclass(frozen=True)
class Part:
  """A weighted reward.

  name: as metrics call it.
  function: of (prompt, completion, row).
  weight: in the sum.
  """

  name: str
  function: RewardFn
  weight: float


def exact(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 where the completion is the answer, but for outer white space."""
  del prompt
  return float(completion.strip() == str(row[ANSWER]).strip())


def number(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 where the last numbers of completion and answer are equal."""
  del prompt
  found = answers.last_number(completion)
  right = answers.last_number(str(row[ANSWER]))
  return float(found is not None and found == right)


def contains(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
  """Returns 1 where the answer is a part of the completion."""
  del prompt
  return float(str(row[ANSWER]).strip() in completion)


def _why_not_exact(prompt: str, completion: str, row: Mapping[str, Any]) -> str:
  right = exact(prompt, completion, row)
  return "" if right else f'wanted "{str(row[ANSWER]).strip()}"'


def _why_not_number(
    prompt: str, completion: str, row: Mapping[str, Any]
) -> str:
  del prompt
  return answers.number_difference(
      answers.last_number(completion), answers.last_number(str(row[ANSWER]))
  )


def _why_not_contains(
    prompt: str, completion: str, row: Mapping[str, Any]
) -> str:
  right = contains(prompt, completion, row)
  return "" if right else f'is without "{str(row[ANSWER]).strip()}"'


BUILT_IN: Mapping[str, RewardFn] = {
    "exact": exact,
    "number": number,
    "contains": contains,
}
REASONS: Mapping[RewardFn, ReasonFn] = {
    exact: _why_not_exact,
    number: _why_not_number,
    contains: _why_not_contains,
}


def parse(key: str, text: str) -> list[Part]:
  """Returns the parts that a setting lists; see the module.

  Raises:
    ValueError: one is not known, cannot be imported, or has no number as
      weight; or a name comes twice.
  """
  parts = []
  for item in filter(None, (i.strip() for i in text.split(","))):
    what, star, weight = (i.strip() for i in item.partition("*"))
    try:
      value = float(weight) if star else 1.0
    except ValueError as error:
      raise ValueError(f"{key}={item!r}: {weight!r} is no weight") from error
    if not math.isfinite(value):
      raise ValueError(f"{key}={item!r}: allowed a finite weight")
    function = BUILT_IN.get(what) or _imported(key, what, tuple(BUILT_IN))
    parts.append(Part(what.rpartition(":")[2], function, value))
  names = [part.name for part in parts]
  if len(set(names)) < len(names):
    raise ValueError(f"{key}={text!r}: allowed rewards with different names")
  return parts


def _imported(key: str, what: str, others: Sequence[str] = ()) -> Any:
  where, colon, name = what.rpartition(":")
  if not colon:
    names = "".join(f"{other}, " for other in others)
    raise ValueError(
        f"{key}={what!r}: allowed {names}FILE.py:FUNCTION or MODULE:FUNCTION"
    )
  try:
    if where.endswith(".py"):
      path = pathlib.Path(where).expanduser()
      # Dataclasses and pickle look their module up; the file's own name may be
      # that of another module.
      own_name = f"rewards of {path}"
      spec = importlib.util.spec_from_file_location(own_name, path)
      module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
    else:
      module = importlib.import_module(where)
    function = getattr(module, name)
  # Code of the user's: anything may be wrong.
  except (Exception, SystemExit) as error:
    raise ValueError(f"{key}={what!r}: {error!r}") from error
  if not callable(function):
    raise ValueError(f"{key}={what!r}: is no function")
  return function


def parse_reason(key: str, text: str) -> ReasonFn | None:
  """Returns the function that a setting names, None where it is "".

  Raises:
    ValueError: it cannot be imported.
  """
  return _imported(key, text) if text else None


def make_command(key: str, command: str) -> RewardFn:
  """Returns a reward that runs a verifier's command for each completion.

  The command gets one JSON object, `prompt`, `completion` and `row`, on its
  standard input and writes a number as the last line of its standard output.
  Its time is bounded from outside: by the deadline of the pool's worker, which
  is killed with what it started.

  Raises:
    ValueError: the command is empty or cannot be split into words.
  """
  try:
    words = shlex.split(command)
  except ValueError as error:
    raise ValueError(f"{key}={command!r}: {error}") from error
  if not words:
    raise ValueError(f"{key}={command!r}: allowed a command")

  def verify(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    question = {"prompt": prompt, "completion": completion, "row": row}
    return _run(words, json.dumps(question, default=str))

  return verify


def _run(words: Sequence[str], text: str) -> float:
  try:
    done = subprocess.run(
        words,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=processes.die_with_parent,
    )
  except OSError as error:
    raise base.RewardError("exit", f"{words[0]}: {error}") from error
  if done.returncode:
    raise base.RewardError(
        "exit", f"{words[0]} ended with {done.returncode}: {done.stderr[-200:]}"
    )
  lines = done.stdout.split("\n")
  last = next((line for line in reversed(lines) if line.strip()), "")
  try:
    return float(last)
  except ValueError as error:
    raise base.RewardError("nan", f"{words[0]} wrote {last[:80]!r}") from error

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Declarations of settings, as in the `settings.py` of each folder.

A `settings.py` has `SECTIONS` and `SETTINGS`, by key, and `CHECKS` across
settings: a check yields the key of each wrong value and what is allowed. Checks
that read files or models are in the folder's `checks.py`, so that tables import
almost nothing; neither imports JAX. `tba_jax/config/` merges and runs them.
Units are in the names (`_s`, `_steps`, `_tokens`, `_mb`) or in the meaning.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import importlib.util
import math
import operator
import re
from typing import Any

from tba_jax.system import ramps

Problems = Iterator[tuple[str, str]]
Check = Callable[..., Problems]
_IS_ABOVE_0 = "above 0"
# Bounds of float32.
MIN_FLOAT, MAX_FLOAT = 1.2e-38, 3.4e38


@dataclasses.dataclass(frozen=True)
class Allowed:
  """Allowed values of a setting.

  text: wording for messages and the reference page.
  test: predicate for values of the right type.
  names: the allowed names, if they are a fixed set.
  explain: wording for one refused value, instead of `text`.
  is_over_steps: whether the value may also be a ramp, as text (`ramps.py`).
  """

  text: str
  test: Callable[[Any], Any]
  names: tuple[str, ...] = ()
  explain: Callable[[Any], str] | None = None
  is_over_steps: bool = False


@dataclasses.dataclass(frozen=True)
class Fixed:
  """A reason why a setting must not change when a run is resumed.

  why: completion of "it cannot change when a run is resumed: …".
  holds: predicate of the run's settings and the requested ones, each by key.
  """

  why: str
  holds: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] = (
      lambda old, new: True
  )


@dataclasses.dataclass(frozen=True)
class Setting:
  """A setting.

  default: initial value, which also determines the type; None is an unset
    number.
  allowed: range or choices.
  meaning: description for `docs/reference/settings.md`.
  hosts: differences allowed between the hosts of a run: "same", none unless
    the section allows them; "own", any; "path", other paths to the same files;
    "searcher", between a searcher and the trainer.
  fixed: reason why it must not change when a run is resumed, "" if it may; None
    for the section's reason.
  files: whether it may name files or folders of the machine, or commands.
  read_with: key of another setting, and its values with which this one is
    read, or "above 0"; with other values only the default is allowed.
  also: value that some programs also allow, and these programs.
  auto: whether an unset value follows model, data and machine if the policy
    starts from a pretrained model (`programs/defaults.py`).
  """

  default: bool | int | float | str | None
  allowed: Allowed
  meaning: str
  hosts: str = "same"
  fixed: str | Fixed | None = None
  files: bool = False
  read_with: tuple[str, Any] | None = None
  also: tuple[Any, tuple[str, ...]] | None = None
  auto: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
  """A section of settings.

  meaning: description of the section.
  hosts, fixed: defaults of these fields of `Setting` in this section.
  """

  meaning: str
  hosts: str = "same"
  fixed: str = ""


class Values(dict[str, Any]):
  """Values by key, for checks. A check of a missing value raises KeyError.

  program: reader of the settings.
  sections: names of the sections that the program reads, "" for top-level keys.
  elsewhere: whether files and packages are on other machines.
  """

  def __init__(
      self,
      values: Mapping[str, Any],
      program: str,
      sections: set[str],
      elsewhere: bool = False,
  ):
    super().__init__(values)
    self.program = program
    self.sections = sections
    self.elsewhere = elsewhere


def section(key: str) -> str:
  """Returns the section of a key, "" for a top-level one."""
  return key.partition(".")[0] if "." in key else ""


def at_least(low: int) -> Allowed:
  return Allowed(f"{low} or more", lambda v: v >= low)


def wait(low: float = 0.0) -> Allowed:
  """Allows seconds to wait; pipes accept up to 2**31 milliseconds."""
  text = f"{low:g} or more" if low else "above 0"
  return Allowed(
      f"{text}, up to 10**6 seconds",
      lambda v: (v >= low if low else v > 0) and v <= 10**6,
  )


def one_of(*names: str) -> Allowed:
  return Allowed(", ".join(map(repr, names)), lambda v: v in names, names)


def subset_of(*names: str) -> Allowed:
  """Allows a comma-separated subset of the names; "" is the empty one."""

  def is_list(text: str) -> bool:
    items = text.split(",") if text else []
    return set(items) <= set(names) and len(set(items)) == len(items)

  text = f"'' or some of {', '.join(names)}, each once, separated by commas"
  return Allowed(text, is_list)


def is_float32(value: float) -> bool:
  """Returns whether a number neither underflows nor overflows in float32."""
  return not value or MIN_FLOAT <= abs(value) <= MAX_FLOAT


def over_steps(allowed: Allowed) -> Allowed:
  """Allows a number, or a ramp over steps, as `ramps.py` parses it."""

  def test(value: float | str) -> bool:
    try:
      ramp = ramps.parse(value)
    except ValueError:
      return False
    ends = ramp.start, ramp.end
    return all(is_float32(end) and allowed.test(end) for end in ends)

  text = f"{allowed.text}, or {ramps.FORM} of two such numbers"
  return Allowed(text, test, is_over_steps=True)


def matching(pattern: str, text: str) -> Allowed:
  return Allowed(text, lambda v: re.fullmatch(pattern, v))


FLAG = Allowed("True, False", lambda v: True)
TEXT = Allowed("any text", lambda v: True)
NAME = Allowed("a name", bool)
NUMBER = Allowed("a number", math.isfinite)
NUMBER_OR_NONE = Allowed(
    "a number, or None", lambda v: v is None or math.isfinite(v)
)
COUNT, FROM_0 = at_least(1), at_least(0)
ABOVE_0 = Allowed("a number above 0", lambda v: 0 < v < math.inf)
UP_TO_0 = Allowed("a number up to 0", lambda v: -math.inf < v <= 0)
NOT_NEGATIVE = Allowed("a number from 0 on", lambda v: 0 <= v < math.inf)
UNIT = Allowed("from 0 to 1", lambda v: 0 <= v <= 1)
ABOVE_0_TO_1 = Allowed("above 0 and up to 1", lambda v: 0 < v <= 1)
BELOW_1 = Allowed("from 0 to below 1", lambda v: 0 <= v < 1)
DTYPE = one_of("float32", "bfloat16")
DTYPE_OR_OWN = one_of("", "float32", "bfloat16")
WAIT = wait()
INTEGERS = matching(r"|\d+(,\d+)*", "whole numbers separated by commas")

REPEATS = ": drawing a group from fewer would repeat completions"

_RELATIONS = {
    "less than": operator.lt,
    "up to": operator.le,
    "at least": operator.ge,
    "more than": operator.gt,
    # A micro-batch of 0 is the whole batch.
    "a multiple of": lambda a, b: not b or a % b == 0,
}


def is_above_0(value: float | str) -> bool:
  """Returns whether a number, or both ends of a ramp, are above 0."""
  ramp = ramps.parse(value)
  return min(ramp.start, ramp.end) > 0


def compare(key: str, relation: str, other: str, why: str = "") -> Check:
  """Relates the values of two settings."""

  def check(c: Values) -> Problems:
    if not _RELATIONS[relation](c[key], c[other]):
      yield key, f"must be {relation} config.{other} = {c[other]}{why}"

  return check


def require(
    key: str, test: Callable[[Any], Any], required: Mapping[str, Any]
) -> Check:
  """Requires values of other settings if the value of `key` passes a test.

  Args:
    key: name of the tested setting.
    test: predicate of its value.
    required: key of another setting -> its allowed values, or "above 0".
  """

  def check(c: Values) -> Problems:
    if not test(c[key]):
      return
    for other, allowed in required.items():
      if allowed == _IS_ABOVE_0:
        fits, text = is_above_0(c[other]), allowed
      else:
        fits, text = c[other] in allowed, " or ".join(map(repr, allowed))
      if not fits:
        yield other, f"must be {text} with config.{key} = {c[key]!r}"

  return check


def unread(
    c: Values, key: str, default: Any, other: str, values: Any
) -> Problems:
  """Yields `key` if nothing reads it and its value is not the default.

  Args:
    c: values by key.
    key: setting that is read only with some values of `other`.
    default: value of `key` that is always allowed.
    other: key of the setting that decides.
    values: settings of `other` with which `key` is read, or "above 0".
  """
  value, is_above_0 = c[other], values == _IS_ABOVE_0
  if c[key] == default or (value > 0 if is_above_0 else value in values):
    return
  which = values if is_above_0 else f"= {', '.join(values)}"
  yield key, (
      f"must be {default!r} with config.{other} = {value!r}, where nothing"
      f" reads it; it is read with config.{other} {which}"
  )


def lacks(package: str, extra: str) -> str:
  """Returns how to install a missing package, "" for an installed one."""
  if importlib.util.find_spec(package) is not None:
    return ""
  return f"needs a package that is not installed: pip install tba_jax[{extra}]"

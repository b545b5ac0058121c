# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds jumps of a metric, and by halving what one goes back to.

Source: Zeller 1999, Yesterday, my program worked. Today, it does not. Why?
(ESEC/FSE), algorithm dd, with the groups as changes.

Rule: the values of a metric before a step give a band (`band`). A value jumps
if it is outside. The jump is gone if the value is back inside, or keeps at most
a twentieth of its distance from the band (`is_gone`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Steps that a band is made of; a search for jumps needs more of them.
_MOST_STEPS, _FEWEST_STEPS, _FEWEST_TO_SEARCH = 20, 5, 10
# Distinct values that show how much a metric varies; a search needs them.
_FEWEST_VALUES = 5
# Width of the margin on each side of the values: a share of their range, and at
# least a share of their size.
_MARGIN, _LEAST_MARGIN = 1.0, 0.01
_REMAINDER = 0.05
MAX_RERUNS = 64


class TooManyReruns(Exception):
  """`MAX_RERUNS` were not enough."""


def band(values: Sequence[float]) -> tuple[float, float]:
  """Returns the lowest and the highest normal value of a metric.

  These are the extremes of the last 20 finite values, each moved outwards by
  the distance between them, or by a hundredth of the larger one.

  Args:
    values: metric of the steps before the rerun, in order.

  Raises:
    ValueError: there are fewer than 5 finite values.
  """
  finite = [value for value in values if np.isfinite(value)][-_MOST_STEPS:]
  if len(finite) < _FEWEST_STEPS:
    raise ValueError(
        f"must begin after {_FEWEST_STEPS} or more recorded steps, whose values"
        f" show what is normal; there are {len(finite)}"
    )
  low, high = min(finite), max(finite)
  margin = max(_MARGIN * (high - low), _LEAST_MARGIN * max(abs(low), abs(high)))
  return low - margin, high + margin


def first(values: Mapping[int, float], since: int = 0) -> int | None:
  """Returns the first step outside the band of at least 10 earlier ones.

  Returns None without a jump. A metric that hardly changes, such as a reward
  that is still 0, has no band.

  Args:
    values: metric by step, in order.
    since: earliest step to consider.
  """
  before: list[float] = []
  for step, value in values.items():
    recent = before[-_MOST_STEPS:]
    can_jump = step >= since and len(before) >= _FEWEST_TO_SEARCH
    if can_jump and len({*recent}) >= _FEWEST_VALUES:
      low, high = band(before)
      if not low <= value <= high:
        return step
    if np.isfinite(value):
      before.append(value)
  return None


def is_gone(value: float, jump: float, band: tuple[float, float]) -> bool:
  """Returns whether a value lacks the jump of another, see above."""
  distance = lambda x: max(band[0] - x, x - band[1], 0.0)
  if not np.isfinite(jump):
    return bool(np.isfinite(value)) and not distance(value)
  return bool(np.isfinite(value)) and (
      distance(value) <= _REMAINDER * distance(jump)
  )


def smallest(
    items: Sequence[T], is_gone_without: Callable[[Sequence[T]], bool]
) -> list[T]:
  """Returns a small set of items without which the jump is gone.

  Takes about 2 log2(n) tests if the jump goes back to one of n items.

  Args:
    items: candidates to leave out; similar ones are neighbours.
    is_gone_without: predicate of the items that are left out.

  Returns:
    The set, or [] if the jump stays without all items.
  """
  cache: dict[frozenset[T], bool] = {}

  def test(some: Sequence[T]) -> bool:
    key = frozenset(some)
    if key not in cache:
      cache[key] = is_gone_without(some)
    return cache[key]

  def search(part: Sequence[T], others: Sequence[T]) -> list[T]:
    """Returns the part's share of the set; `others` are also left out."""
    if len(part) == 1:
      return list(part)
    halves = part[: len(part) // 2], part[len(part) // 2 :]
    for half in halves:
      if test([*half, *others]):
        return search(half, others)
    if not others and not test(part):
      return []
    first = search(halves[0], [*others, *halves[1]])
    return first + search(halves[1], [*others, *first])

  result = search(items, []) if items else []
  return result if result and test(result) else []

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the settings, versions, searchers or groups that a jump goes back to.

Steps are trained again with changes of settings undone, or without groups
(`jump.smallest`). A cause must be specific: if the jump is also gone without as
many neighbours, chance explains it. Of several causes, fewer items come first,
then those that leave out fewer groups: the smallest change that removes the
jump.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

import ml_collections
import numpy as np

from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import decisions
from tba_jax.report import diagnosis
from tba_jax.report import run_reader
from tba_jax.tools import counterfactual
from tba_jax.tools import jump

# Values of `--bisect` that take metric and steps from the run.
SOURCES = ANY, COLLAPSE = "any", "collapse"
SETTING, ALL = "setting", "all"
UNITS = (*counterfactual.UNITS, SETTING, ALL)
# Metrics that show a jump, the clearest first.
_METRICS = ("reward_mean", "kl", "entropy", "effective_sample_share", "loss",
            "grad_norm")  # fmt: skip
# Cause of a collapse (`findings.causes`) -> metric.
_COLLAPSES = {
    "log-prob gap": "logprob_gap",
    "effective sample size": "effective_sample_share",
    "clipped share": "ratio_clip_share",
    "length": "reward_mean",
    "entropy": "entropy",
    "KL": "kl",
}
# Steps after a jump that show how long it lasts, and before a jump in which a
# change of settings may have led to it, or a bad step.
_STEPS_AFTER, _STEPS_BEFORE, _FEWEST_BEFORE = 4, 20, 4
_MAX_NAMES = 8


@dataclasses.dataclass(frozen=True)
class Jump:
  """A jump of a metric, and the steps to train again.

  first, last: step to begin with, step to end before.
  before: step whose earlier values are normal.
  normal: lowest and highest normal value.
  """

  metric: str
  first: int
  last: int
  before: int
  normal: tuple[float, float]


def find(
    run: run_reader.RunData,
    recording: decisions.Recording,
    starts: Collection[int],
    source: str,
) -> Jump | None:
  """Returns the first jump in the record that can be rerun, or None.

  Args:
    starts: steps that a rerun may begin with.
    source: `ANY`, or `COLLAPSE` for the metric of the collapse that the run's
      report names.

  Raises:
    ValueError: the report names no collapse.
  """
  metrics = _METRICS
  if source == COLLAPSE:
    collapse = diagnosis.collapse(run)
    if collapse is None:
      raise ValueError(
          f"--bisect={COLLAPSE}: must be a metric or {ANY}; the run's report"
          " names no collapse"
      )
    metrics = (_COLLAPSES[collapse.cause],)
  jumps = []
  for metric in metrics:
    step = jump.first(recording.metric(metric), min(starts, default=0) + 1)
    if step is not None:
      jumps.append((step, metric))
  if not jumps:
    return None
  step, metric = min(jumps, key=lambda found: found[0])
  before = [
      at
      for at, _ in changes(recording, step - _STEPS_BEFORE, step + 1)
      if at in starts
  ]
  newest = min([step - _FEWEST_BEFORE, *before])
  first = max(
      (s for s in starts if s <= newest), default=min(starts, default=0)
  )
  normal = jump.band(
      [v for n, v in recording.metric(metric).items() if n < step]
  )
  last = min(step + _STEPS_AFTER, max(recording.steps) + 1)
  return Jump(metric, first, last, step, normal)


def changes(
    recording: decisions.Recording, first: int, last: int
) -> dict[tuple[int, str], tuple[object, object]]:
  """Returns {(step, key): (old, new)} of settings changed on a resume."""
  out = {}
  for step in range(first, last):
    if step in recording.steps and step - 1 in recording.steps:
      sides = [recording.steps[s].start.config for s in (step - 1, step)]
      if sides[0] != sides[1]:
        for key, pair in differences.changed(*sides).items():
          out[step, key] = pair
  return out


@dataclasses.dataclass(frozen=True)
class _Item:
  """A candidate: settings to undo, or groups to leave out.

  undone: (step, key) of changes of settings.
  later: groups that params trained with these sampled.
  """

  name: str
  undone: frozenset[tuple[int, str]] = frozenset()
  groups: frozenset[int] = frozenset()
  later: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Cause:
  """Items without which the jump is gone; `groups` counts those left out."""

  unit: str
  items: Sequence[_Item]
  groups: int


def _joined(items: Sequence[_Item]) -> Iterator[frozenset[Any]]:
  """Yields `undone`, `groups` and `later` of all items together."""
  for name in ("undone", "groups", "later"):
    yield frozenset().union(*(getattr(item, name) for item in items))


class Bisection:
  """Search for the causes of a jump, in units of several kinds.

  reruns: number of reruns so far.
  """

  def __init__(
      self,
      train: Callable[..., counterfactual.Outcome],
      index: counterfactual.GroupIndex,
      recording: decisions.Recording,
      jumped: Jump,
  ):
    """Trains the steps as recorded.

    Args:
      train: function from changes to undo and groups to leave out to the
        outcome of a rerun.
    """
    self._train, self._index = train, index
    self._recording, self._metric = recording, jumped.metric
    self._normal = normal = jumped.normal
    self.outcome, self.reruns = train(), 1
    self._values = self._of(self.outcome)
    self.steps = [
        step
        for step, value in self._values.items()
        if not normal[0] <= value <= normal[1]
    ]
    self._cache: dict[frozenset, bool | None] = {}

  def _of(self, outcome: counterfactual.Outcome) -> Mapping[int, float]:
    return {s: m[self._metric] for s, m in outcome.metrics.items()}

  def items(self, unit: str) -> list[_Item]:
    """Returns the candidates of a unit, similar ones next to each other."""
    if unit == SETTING:
      return self._settings()
    groups: dict[str, set[int]] = {}
    drawn = self.outcome.groups()
    for group in drawn:
      groups[self._index.names(group, unit)[0]] = set()
    for group in self._index.origins:
      name, *_ = self._index.names(group, unit)
      if name in groups:
        groups[name].add(group)
    return [_Item(name, groups=frozenset(g)) for name, g in groups.items()]

  def _settings(self) -> list[_Item]:
    """Returns changed settings, or the data since then if sampling changed."""
    first, last = min(self._values), max(self._values) + 1
    items, sampled = [], {}
    for (step, key), (old, new) in changes(
        self._recording, first, last
    ).items():
      words = f"config.{key} = {new!r} since step {step}, was {old!r}"
      match counterfactual.why_fixed(*self._configs(step), key):
        case "":
          undone = frozenset({(step, key)})
          items.append(_Item(words, undone, later=self._since(step + 1)))
        case counterfactual.SAMPLED:
          sampled.setdefault(step, []).append(words)
    for step, names in sampled.items():
      if since := self._since(step):
        items.append(_Item(" or ".join(names), groups=since))
    return items

  def _since(self, version: int) -> frozenset[int]:
    """Returns the groups that a version or a newer one sampled."""
    origins = self._index.origins.items()
    return frozenset(n for n, o in origins if o.version >= version)

  def _configs(
      self, step: int
  ) -> tuple[ml_collections.ConfigDict, ml_collections.ConfigDict]:
    """Returns the configs of a step and of the one before."""
    return tuple(
        load.complete(
            ml_collections.ConfigDict(self._recording.steps[s].start.config)
        )
        for s in (step, step - 1)
    )

  def _is_gone(self, items: Sequence[_Item], of: str) -> bool | None:
    """Returns whether the jump is gone without items.

    Returns None if nothing is left, or settings do not fit together.

    Raises:
      TooManyReruns: `MAX_RERUNS` were made.
    """
    undone, groups, later = _joined(items)
    is_gone = self._is_gone_with(undone, groups, len(items), of)
    if undone and not is_gone:
      # Data of a policy that would not have been is far from the present one.
      of += f" and {len(later)} later groups"
      is_gone = self._is_gone_with(undone, groups | later, len(items), of)
    return is_gone

  def _is_gone_with(
      self,
      undone: frozenset[tuple[int, str]],
      left_out: frozenset[int],
      count: int,
      of: str,
  ) -> bool | None:
    key = frozenset([("undone", undone), ("left out", left_out)])
    if key in self._cache:
      return self._cache[key]
    if self.reruns == jump.MAX_RERUNS:
      raise jump.TooManyReruns
    self.reruns += 1
    try:
      left = self._of(self._train(undone=undone, left_out=left_out))
      is_gone = all(
          jump.is_gone(left[step], self._values[step], self._normal)
          for step in self.steps
      )
      words = ", ".join(f"{left[step]:.6g}" for step in self.steps[-1:])
      words += ", gone" if is_gone else ", not gone"
    except (buffer_lib.NothingLeftError, load.ConfigError) as error:
      is_gone, words = None, str(error)
    print(
        f"rerun {self.reruns}: without {count} of {of}: {words}",
        flush=True,
    )
    self._cache[key] = is_gone
    return is_gone

  def cause(self, unit: str, among: Cause | None = None) -> Cause | None:
    """Returns the smallest specific cause found in a unit, or None.

    Args:
      among: cause whose groups contain the ones to search, if known.
    """
    items = self.items(unit)
    if among is not None and any(item.groups for item in among.items):
      within = frozenset().union(*(item.groups for item in among.items))
      items = [item for item in items if item.groups & within]
    of = f"{len(items)} {unit}s"
    best: list[_Item] = []

    def is_gone_without(some: Sequence[_Item]) -> bool:
      nonlocal best
      is_gone = bool(self._is_gone(some, of))
      if is_gone and (not best or len(some) < len(best)):
        best = list(some)
      return is_gone

    # A search that is cut off may have found a set.
    with contextlib.suppress(jump.TooManyReruns):
      best = jump.smallest(items, is_gone_without) or best
    if not best or not self._is_specific(unit, best, of):
      return None
    drawn = frozenset(self.outcome.groups())
    undone, groups, later = _joined(best)
    if undone and not self._is_gone_with(undone, groups, len(best), of):
      groups |= later
    return Cause(unit, best, len(groups & drawn))

  def _is_specific(self, unit: str, best: Sequence[_Item], of: str) -> bool:
    """Returns whether the jump stays without as many neighbours."""
    if unit == SETTING:
      undone, groups, later = _joined(best)
      if not later or self._is_gone_with(undone, groups, len(best), of):
        return True
      control = [_Item("", groups=later)]
      return self._stays_without(control, "1 set of later groups")
    drawn = frozenset(
        np.unique(
            np.concatenate([self.outcome.drawn[s].ravel() for s in self.steps])
        ).tolist()
    )
    others = [
        item
        for item in self.items(unit)
        if item not in best and item.groups & drawn
    ]
    if not others:
      return True
    place = min(len(others) - len(best), len(others) // 2)
    control = others[max(place, 0) :][: len(best)]
    return self._stays_without(control, of)

  def _stays_without(self, control: Sequence[_Item], of: str) -> bool:
    """Returns whether the jump stays without other items, as far as known."""
    is_gone = None
    with contextlib.suppress(jump.TooManyReruns):
      is_gone = self._is_gone(control, f"{of}, as a control")
    if is_gone is None:
      print("note: without a control; the jump may be gone by chance")
    elif is_gone:
      print("the jump is also gone without others: by chance")
    return not is_gone

  def causes(self, unit: str) -> list[Cause]:
    """Returns causes in a unit, or in all of them, the likeliest first."""
    if unit != ALL:
      return [cause] if (cause := self.cause(unit)) else []
    found: list[Cause] = []
    among = None
    for each in (SETTING, "version", "searcher", "group"):
      cause = self.cause(each, among if each == "group" else None)
      if cause is not None:
        found.append(cause)
        if cause.groups and (among is None or cause.groups < among.groups):
          among = cause
      elif each == "version" and self._stays_without_data():
        break
    return sorted(found, key=lambda cause: (len(cause.items), cause.groups))

  def _stays_without_data(self) -> bool:
    """Whether the jump stays without all drawn groups."""
    items = self.items("version")
    with contextlib.suppress(jump.TooManyReruns):
      return self._is_gone(items, f"{len(items)} versions") is False
    return False

  def describe(self, cause: Cause) -> str:
    """Returns the items of a cause, in a line."""
    names = [item.name for item in cause.items]
    if cause.unit == "group":
      names = [self._index.describe(int(name)) for name in names]
    elif cause.unit != SETTING:
      names = [f"{cause.unit} {name}" for name in names]
    more = f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else ""
    groups = f" ({cause.groups} drawn groups)" if cause.groups > 1 else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}{groups}"


def run(
    train: Callable[..., counterfactual.Outcome],
    index: counterfactual.GroupIndex,
    recording: decisions.Recording,
    jumped: Jump,
    unit: str,
) -> int:
  """Prints what a jump of a metric goes back to; returns the exit status."""
  bisection = Bisection(train, index, recording, jumped)
  outcome = bisection.outcome
  step = max(bisection.steps, default=max(outcome.metrics))
  metric, (low, high) = jumped.metric, jumped.normal
  print(
      f"step {step}: train/{metric} is {outcome.metrics[step][metric]:.6g};"
      f" {low:.6g} to {high:.6g} is normal before step {jumped.before}"
  )
  if outcome.difference:
    print(f"note: the rerun differs from the record: {outcome.difference}")
  if note := outcome.unknown_note():
    print(note)
  if not bisection.steps:
    print("the rerun has no jump")
    return 1
  causes = bisection.causes(unit)
  if not causes:
    of = "units" if unit == ALL else f"{unit}s"
    print(
        f"no set of {of} without which the jump is gone:"
        f" {bisection.reruns} reruns"
    )
    return 1
  for rank, cause in enumerate(causes, 1):
    count = len(cause.items)
    together = f"{count} {cause.unit}s together"
    words = f"one {cause.unit}" if count == 1 else together
    place = f"{rank}. " if len(causes) > 1 else ""
    print(
        f"{place}the jump is gone without {words} ({bisection.reruns} reruns):"
    )
    print(f"  {bisection.describe(cause)}")
  return 0

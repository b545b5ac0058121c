# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a run: queries of the table of `findings`."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from tba_jax.report import evidence
from tba_jax.report import findings
from tba_jax.report import incidents as incidents_lib
from tba_jax.report import run_reader

# Consecutive blocks of steps that must show a cause of a collapse.
_IN_A_ROW = 2


class Finding(NamedTuple):
  """A row of the table that holds for a run."""

  name: str
  sentence: str
  remedy: str = ""

  def __str__(self) -> str:
    return f"{self.sentence} {self.remedy}".rstrip()


@dataclasses.dataclass(frozen=True)
class Collapse:
  """A collapse, by its first cause.

  cause: name of the finding.
  step: first step of the blocks that show the cause.
  until: first step after the collapse; None if it lasts.
  line: summary in one line.
  followers: (cause, step) of later causes.
  """

  cause: str
  step: int
  until: int | None
  line: str
  sentence: str
  followers: tuple[tuple[str, int], ...] = ()


def _find(*tables: evidence.Rows) -> list[Finding]:
  """Returns the rows that hold, in order."""
  return [
      Finding(name, *words)
      for rows in tables
      for name, (holds, *words) in rows.items()
      if holds
  ]


def verdict(run: run_reader.RunData) -> Finding:
  """Returns whether a run learned, with a remedy if it did not.

  Completions that could not be judged are in no mean: if their share has
  clearly risen, better means do not show that the policy is better.
  """
  outcome, *_ = _find(findings.outcomes(run))
  for unjudged in _find(findings.unjudged(run))[:1]:
    if not unjudged.remedy:
      return outcome._replace(sentence=f"{outcome.sentence} {unjudged}")
    rest = outcome.sentence.removeprefix("Learned: ")
    is_worse = outcome.name in ("worse", "overfitted")
    return (outcome if is_worse else unjudged)._replace(
        sentence=f"{unjudged.sentence} {rest}"
    )
  return outcome


def advice(run: run_reader.RunData) -> list[str]:
  """Returns sentences on a run's bottlenecks and on the value of its data.

  If the run did not learn, a remedy replaces the bottlenecks.
  """
  first = [verdict(run).remedy]
  if not first[0]:
    first = _find(findings.bottlenecks(run))[:1] + _find(findings.waits(run))
  return [*map(str, first), *map(str, _find(findings.data(run)))]


def collapse(run: run_reader.RunData) -> Collapse | None:
  """Returns the collapse that the metrics show: a loss with a cause, or None.

  The history is split into blocks of steps. The rewards of batches, whose
  prompts a run may choose, do not count if the held-out metric has risen (or is
  full) and has not fallen, or if groups of equal rewards are left out.
  """
  moments = evidence.moments(run.records)
  tables = [findings.causes(moment) for moment in moments]
  causes = []
  for name in tables[0] if tables else ():
    span = _last_span(
        [i > 0 and rows[name][0] for i, rows in enumerate(tables)]
    )
    if span:
      start, end = (moments[i].step if i < len(moments) else None for i in span)
      causes.append((start, end, Finding(name, *tables[span[1] - 1][name][1:])))
  if not causes:
    return None
  (step, until, first), *later = sorted(causes, key=lambda cause: cause[0])
  since = f"since step {step}"
  since += "" if until is None else f" until step {until}"
  line = f"{first.name} {since}: {first.sentence}"
  followers = tuple((other.name, start) for start, _, other in later)
  after = ", ".join(f"{name} (step {start})" for name, start in followers)
  after = f"; after it {after}" if after else ""
  sentence = (
      f"Collapse by {first.name} {since}: {first.sentence}{after}. To do:"
      f" {first.remedy}."
  )
  return Collapse(first.name, step, until, line, sentence, followers)


def _last_span(shown: Sequence[bool]) -> tuple[int, int] | None:
  """Returns start and end of the last run of True that is long enough."""
  end = len(shown)
  while end:
    start = end
    while start and shown[start - 1]:
      start -= 1
    if end - start >= _IN_A_ROW:
      return start, end
    end = min(start, end - 1)
  return None


def incidents(run: run_reader.RunData) -> list[str]:
  """Returns what happened: a collapse, errors, pauses; [] for a quiet run."""
  collapsed = collapse(run)
  first = [collapsed.sentence] if collapsed else []
  rest = _find(incidents_lib.errors(run), incidents_lib.pauses(run))
  return [*first, *map(str, rest)]

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who says which of two completions is better: for win-rates. No JAX here."""

import abc
from collections.abc import Sequence
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from tba_jax.rewards import judges


@dataclasses.dataclass(frozen=True)
class Contest:
  """A completion against the task's reference completion.

  prompt: text, as the policy sees it.
  request: of which prompt, and the policy's completion.
  reference: what it is compared with; ends by itself.
  """

  prompt: str
  request: "judges.Request"
  reference: str


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What was said of a contest.

  win: 1 where the completion is better, 0 where it is not, .5 for a tie of
    judges that know one; None where there is no verdict.
  score, reference_score: of judges that score; else None.
  failure: "" or in one word why there is no verdict.
  """

  win: float | None
  score: float | None = None
  reference_score: float | None = None
  failure: str = ""


class Comparer(abc.ABC):
  """Compares completions with references."""

  @abc.abstractmethod
  def compare(self, contests: Sequence[Contest]) -> list[Verdict]:
    """Returns one verdict a contest, in their order; never raises."""

  def close(self) -> None:
    """Ends what was started; the comparer is not used afterwards."""


class Scores(Comparer):
  """Wins by a strictly higher score, as Asynchronous RLHF's gold model."""

  @abc.abstractmethod
  def score(self, contests: Sequence[Contest]) -> list[float | None]:
    """Returns a score a contest of its request; None where there is none."""

  def __init__(self):
    # References come again at every evaluation.
    self._of_reference: dict[tuple[str, int], float | None] = {}

  def compare(self, contests: Sequence[Contest]) -> list[Verdict]:
    key = lambda c: (c.request.split, c.request.index)
    missing = {key(c): c for c in contests if key(c) not in self._of_reference}
    asked = [
        dataclasses.replace(
            c,
            request=dataclasses.replace(
                c.request, completion=c.reference, stopped=True
            ),
        )
        for c in missing.values()
    ]
    scores = self.score([*contests, *asked])
    own, new = scores[: len(contests)], scores[len(contests) :]
    self._of_reference.update(zip(missing, new))
    return [
        _verdict(score, self._of_reference[key(contest)])
        for contest, score in zip(contests, own)
    ]


class OfTask(Scores):
  """Scores by the task's own reward."""

  def __init__(self, judge: "judges.Judge"):
    """Takes the judge of the task; closed with this."""
    super().__init__()
    self._judge = judge

  def score(self, contests: Sequence[Contest]) -> list[float | None]:
    found = self._judge.judge([c.request for c in contests])
    return [None if one.failure else one.reward for one in found]

  def close(self) -> None:
    self._judge.close()


def _verdict(score: float | None, reference: float | None) -> Verdict:
  if score is None or reference is None:
    return Verdict(None, score, reference, "no_score")
  return Verdict(float(score > reference), score, reference)

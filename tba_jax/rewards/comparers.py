# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares completions with references, for win-rates."""

import abc
from collections.abc import Sequence
import dataclasses
import json
import shlex
import sys
import time
import zlib

from tba_jax.rewards import judges
from tba_jax.system import frames
from tba_jax.system import sandbox
from tba_jax.system import supervised_worker
from tba_jax.tasks import base


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A completion against the task's reference completion.

  prompt: text or messages, as in the task.
  request: prompt index, and the policy's completion.
  reference: text to compare with; ends with a stop token.
  """

  prompt: base.Prompt
  request: judges.JudgeRequest
  reference: str


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Outcome of a comparison.

  win: 1 if the completion is better, 0 if not, .5 for a tie; None = no verdict.
  score, reference_score: scores, None if the judge has none.
  failure: cause of a missing verdict in one word, else "".
  """

  win: float | None
  score: float | None = None
  reference_score: float | None = None
  failure: str = ""


class Comparer(abc.ABC):
  """Compares completions with references."""

  @abc.abstractmethod
  def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Returns one verdict per comparison, in order; never raises."""

  def close(self) -> None:
    """Releases processes and models."""


class Scores(Comparer):
  """Wins by a strictly higher score, as in Asynchronous RLHF's gold model."""

  @abc.abstractmethod
  def score(self, comparisons: Sequence[Comparison]) -> list[float | None]:
    """Returns the score of each comparison's request, or None."""

  def __init__(self):
    # Cache: every evaluation uses the same references.
    self._of_reference: dict[tuple[str, int], float | None] = {}

  def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
    key = lambda c: (c.request.split, c.request.index)
    missing = {
        key(c): c for c in comparisons if key(c) not in self._of_reference
    }
    completions = [
        dataclasses.replace(
            c,
            request=dataclasses.replace(
                c.request, completion=c.reference, stopped=True
            ),
        )
        for c in missing.values()
    ]
    scores = self.score([*comparisons, *completions])
    old, new = scores[: len(comparisons)], scores[len(comparisons) :]
    self._of_reference.update(zip(missing, new))
    return [
        _verdict(score, self._of_reference[key(comparison)])
        for comparison, score in zip(comparisons, old)
    ]


class OfTask(Scores):
  """Scores by the task's own reward; owns the judge and closes it."""

  def __init__(self, judge: judges.Judge):
    super().__init__()
    self._judge = judge

  def score(self, comparisons: Sequence[Comparison]) -> list[float | None]:
    judgements = self._judge.judge([c.request for c in comparisons])
    return [None if one.failure else one.reward for one in judgements]

  def close(self) -> None:
    self._judge.close()


def _verdict(score: float | None, reference: float | None) -> Verdict:
  if score is None or reference is None:
    return Verdict(None, score, reference, "no_score")
  return Verdict(float(score > reference), score, reference)


_LAUNCHER = ("-m", "tba_jax.system.sandbox")
_MAX_LINE = 1 << 20


class _Failure(Exception):
  """No verdict; `args` are a one-word cause and a message."""


class CommandComparer(Comparer):
  """Asks a user's command for verdicts, one comparison at a time.

  The command is started once. It reads one JSON object per line, {"prompt",
  "first", "second"}, and answers each with a line {"winner": "first" | "second"
  | "tie"}. A hash of the texts decides which is first, so that a position bias
  cancels out. A missing, invalid or late verdict fails only that comparison:
  the command is killed with all that it started, and the next comparison starts
  a new one.
  """

  def __init__(
      self,
      command: str,
      *,
      deadline_s: float,
      on_event: judges.OnEvent | None = None,
  ):
    """Parses the command; it is started when first needed.

    Args:
      command: words as a shell would split them; no shell runs it.
      deadline_s: longest time of one comparison.
      on_event: function that receives ("judge_failed", message) at the first,
        second, fourth … failure of a cause.

    Raises:
      ValueError: the command is empty or cannot be split into words.
    """
    try:
      self._words = shlex.split(command)
    except ValueError as error:
      raise ValueError(
          f"config.evaluate.judge_command={command!r}: {error}"
      ) from error
    if not self._words:
      raise ValueError("config.evaluate.judge_command='': must be a command")
    self._deadline_s = deadline_s
    self._failures = judges.FailureLog("judge_failed", on_event)
    self._child: supervised_worker.ChildProcess | None = None

  def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
    return [self._compare_one(comparison) for comparison in comparisons]

  def _compare_one(self, comparison: Comparison) -> Verdict:
    texts = comparison.request.completion, comparison.reference
    prompt = base.plain_text(comparison.prompt)
    swap = zlib.crc32("\0".join((prompt, *texts)).encode()) % 2 == 1
    first, second = reversed(texts) if swap else texts
    question = {"prompt": comparison.prompt, "first": first, "second": second}
    cause = ""
    try:
      winner = self._ask(json.dumps(question).encode() + b"\n")
    except _Failure as failure:
      cause, message = failure.args
    except frames.PipeTimeout:
      cause, message = "deadline", f"no verdict in {self._deadline_s:g} s"
    except frames.PipeClosed as error:
      cause, message = "exit", str(error)
    if cause:
      self.close()
      self._failures.add(cause, message)
      return Verdict(None, failure=cause)
    if winner == "tie":
      return Verdict(0.5)
    return Verdict(float((winner == "second") == swap))

  def _ask(self, line: bytes) -> str:
    """Returns the winner that the command names."""
    deadline = time.monotonic() + self._deadline_s
    # The command may exit at any time, and dies with the thread that started
    # it, perhaps an earlier evaluation's.
    if self._child is not None and self._child.has_ended():
      self.close()
    if self._child is None:
      self._start()
    if self._child.pipes.has_input():
      # An unread line would be taken for the verdict of this comparison.
      raise _Failure("verdict", "wrote more than it was asked")
    self._child.pipes.write(line, deadline)
    answer = b""
    while not answer.endswith(b"\n"):
      answer += self._child.pipes.read_some(1 << 16, deadline)
      if len(answer) > _MAX_LINE or answer.count(b"\n") > 1:
        raise _Failure("verdict", f"wrote more than a line: {answer[:80]!r}")
    try:
      winner = json.loads(answer)["winner"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise _Failure("verdict", f"wrote {answer[:80]!r}") from error
    if winner not in ("first", "second", "tie"):
      raise _Failure("verdict", f"named {winner!r} as the winner")
    return winner

  def _start(self) -> None:
    try:
      self._child = supervised_worker.ChildProcess(
          [sys.executable, *_LAUNCHER, *self._words], sandbox.without_secrets()
      )
    except OSError as error:
      raise _Failure("start", f"{self._words[0]}: {error}") from error

  def close(self) -> None:
    if self._child is not None:
      self._child.kill()
    self._child = None

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges: completions in, rewards out, whatever the reward's code does.

A completion that cannot be judged has no reward: NaN in its judgement, in its
group (`types.Group`) and in the journal, so that it cannot be mistaken for a
value. The buffer and evaluations give it `reward.fallback`; if that is None,
the buffer does not store it, and evaluations leave it out of every mean.
Failures are counted by cause:

    error     the reward raised
    nan       not a finite float32
    deadline  no answer in time; the worker was killed
    crash     the worker exited
    start     no worker could be started
    size      an environment's text is too long
    reset     an environment's text is not a function of its seed

or a cause of the task's own, such as `exit` of a verifier's command.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
import threading
from typing import Any

import ml_collections
import numpy as np

from tba_jax.system import user_code
from tba_jax.tasks import base

# Standard deviation of a reward part, relative to its size, below which it
# counts as 0.
_MIN_SPREAD = 1e-6
# Most characters of a reason.
MAX_REASON = 500

OnEvent = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class EpisodeOutcome:
  """Result of an environment for a completion.

  reward: sum of the rewards of all turns, task units.
  is_right: whether the environment reports a success.
  turn_rewards: reward of each turn that the environment has answered.
  turn_ends: completion tokens up to the end of each turn that was sent to the
    environment.
  seconds: total time of the environment's answers.
  metrics: numbers reported by the environment, by name.
  failure, message: cause and description of a failure, else "".
  """

  reward: float
  is_right: bool
  seconds: float
  turn_rewards: tuple[float, ...] = ()
  turn_ends: tuple[int, ...] = ()
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  failure: str = ""
  message: str = ""

  @property
  def num_turns(self) -> int:
    return len(self.turn_rewards)


@dataclasses.dataclass(frozen=True)
class JudgeRequest:
  """A completion to judge.

  stopped: whether it ended with a stop token, not at the token limit.
  outcome: result of its environment; None for a task without environments.
  tokens: ids of the completion's tokens, with the stop token.
  """

  split: str
  index: int
  completion: str
  stopped: bool = True
  outcome: EpisodeOutcome | None = None
  tokens: Sequence[int] = ()


class FailureLog:
  """Counts failures by cause; reports the first, second, fourth … of each.

  counts: failures by cause.
  """

  def __init__(self, kind: str, on_event: OnEvent | None):
    """`on_event` receives (kind, message)."""
    self.counts: dict[str, int] = {}
    self._kind = kind
    self._on_event = on_event
    self._lock = threading.Lock()

  def add(self, cause: str, message: str) -> None:
    with self._lock:
      count = self.counts[cause] = self.counts.get(cause, 0) + 1
    if self._on_event is not None and count & (count - 1) == 0:
      self._on_event(self._kind, f"{cause}, {count} so far: {message}")


class Judge(abc.ABC):
  """Judges completions and counts them.

  on_devices: whether the judge runs models on the devices of its role.
  """

  on_devices = False

  def __init__(self, *, on_event: OnEvent | None = None):
    """Initializes the counters.

    `on_event` receives ("reward_failed", message) at the first, second, fourth
    … failure of a cause.
    """
    self._failures = FailureLog("reward_failed", on_event)
    self._lock = threading.Lock()
    self._completions = 0
    self._sums: dict[str, float] = {}
    self._counts: dict[str, int] = {}

  @abc.abstractmethod
  def _judge(self, requests: Sequence[JudgeRequest]) -> list[base.Judgement]:
    """Returns one judgement per request; failures come from `_failed`."""

  def judge(self, requests: Sequence[JudgeRequest]) -> list[base.Judgement]:
    """Returns one judgement per request, in order.

    Raises nothing but `url_judge.JudgeDownError`.
    """
    judged = self._judge(requests)
    with self._lock:
      self._completions += len(judged)
      for one in judged:
        if not one.failure:
          for name, value in one.parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
    return judged

  def _explain(self, requests: Sequence[JudgeRequest]) -> list[str]:
    """Returns one reason per request; failures come from `no_reason`."""
    return [""] * len(requests)

  def explain(self, requests: Sequence[JudgeRequest]) -> list[str]:
    """Returns why each completion is wrong, "" if correct or unknown.

    For displayed samples: counts nothing and never raises; an error in the
    task's code is returned as the reason.
    """
    return [str(reason)[:MAX_REASON] for reason in self._explain(requests)]

  def set_metrics(
      self, prompts: Sequence[Mapping[str, Any]]
  ) -> Mapping[str, float]:
    """Returns metrics of all completions as a set; none by default.

    `prompts` are an evaluation's prompts, each with `samples` (mappings with a
    `completion`) and `right`, whether each sample is correct.
    """
    del prompts
    return {}

  def totals(self) -> dict[str, Any]:
    """Returns counts since the start, as JSON types.

    completions: number judged, failures included.
    failures: counts by cause.
    sums: sum of each part of the reward, failures excluded.
    counts: completions with each part; parts may differ between prompts.
    """
    with self._lock:
      return {
          "completions": self._completions,
          "failures": dict(self._failures.counts),
          "sums": dict(self._sums),
          "counts": dict(self._counts),
      }

  def close(self) -> None:
    """Releases processes and models."""

  def _failed(
      self, request: JudgeRequest, cause: str, message: str
  ) -> base.Judgement:
    place = f"prompt {request.index} of {request.split!r}"
    self._failures.add(cause, f"{place}: {message[:300]}")
    return base.Judgement(math.nan, None, failure=cause)

  def _checked(
      self, request: JudgeRequest, judgement: base.Judgement
  ) -> base.Judgement:
    """Returns the judgement with plain floats, or a failure."""
    try:
      reward = base.number(judgement.reward, "the reward")
      parts = {n: base.number(v, n) for n, v in judgement.parts.items()}
    except base.RewardError as error:
      return self._failed(request, error.cause, str(error))
    return dataclasses.replace(judgement, reward=reward, parts=parts)


def final_rewards(
    config_loss: ml_collections.ConfigDict,
    judged: Sequence[base.Judgement],
    stopped: Sequence[bool] | np.ndarray,
    part_weights: Mapping[str, float] | None = None,
) -> np.ndarray:
  """Returns the training rewards of a prompt's completions, [N] float32.

  NaN for completions that could not be judged. Rewards of cut-off completions
  follow `loss.missing_stop`; "replace" is as in Noukhovitch et al. 2024
  (arXiv:2410.18252), and "mask" leaves them as judged (`batches.of_draw`).
  Applied where a group is judged, so that all later readers see these rewards.

  Args:
    config_loss: reads `reward_weight`, `missing_stop` and
      `missing_stop_reward`.
    judged: N judgements.
    stopped: [N], whether the completion ended with a stop token.
    part_weights: weights of the reward's parts, which are normalized
      separately; None takes the rewards as judged.
  """
  if part_weights is None:
    rewards_N = np.array([j.reward for j in judged], np.float32)
  else:
    rewards_N = sum_of_normalized(judged, part_weights)
  rewards_N = np.float32(config_loss.reward_weight) * rewards_N
  if config_loss.missing_stop in ("keep", "mask"):
    return rewards_N
  cut_N = np.float32(
      config_loss.reward_weight * config_loss.missing_stop_reward
  )
  if config_loss.missing_stop == "add":
    cut_N = rewards_N + cut_N
  return np.where(stopped, rewards_N, cut_N)


def rewards_by_turn(
    outcomes: Sequence[EpisodeOutcome],
    rewards_S: np.ndarray,
    sampled_SxT: np.ndarray,
    weight: float = 1.0,
) -> np.ndarray:
  """Returns each turn's reward at its last token, [S, T] float32, 0 elsewhere.

  Args:
    outcomes: results of S completions, or []. Turns of a failed environment
      have no rewards.
    rewards_S: [S] float32, training rewards. The part that turn rewards do not
      account for, such as the reward for a missing stop token, is put on the
      last token.
    sampled_SxT: [S, T] bool, True on the tokens that the policy sampled.
    weight: factor on the rewards of environments.
  """
  out = np.zeros(sampled_SxT.shape, np.float64)
  for row, outcome in zip(out, outcomes):
    sizes = np.abs([outcome.reward, *outcome.turn_rewards])
    if outcome.failure or sizes.max() > base.MAX_REWARD:
      continue
    for end, reward in zip(outcome.turn_ends, outcome.turn_rewards):
      row[end - 1] += weight * reward
  T = sampled_SxT.shape[1]
  last_S = np.maximum(T - 1 - sampled_SxT[:, ::-1].argmax(axis=1), 0)
  out[np.arange(len(out)), last_S] += rewards_S - out.sum(axis=1)
  return out.astype(np.float32)


def sum_of_normalized(
    judged: Sequence[base.Judgement], part_weights: Mapping[str, float]
) -> np.ndarray:
  """Returns Σ_n w_n (r_n - mean r_n)/std r_n over a group, [N] float32.

  In a plain sum of rewards of different scales, each counts in proportion to
  its spread; normalized, each counts by its weight. A part that is equal for
  all completions adds 0, and so does a missing part; a completion that could
  not be judged stays NaN and is in no mean.

  Source: GDPO (arXiv:2601.05242, eq. 4 and 5), whose last normalization, over
  the batch, is left to `loss.beta` and the objective.

  Args:
    judged: N judgements of one prompt's completions.
    part_weights: w_n by name of the part.
  """
  sums_N = np.array([j.reward if j.failure else 0.0 for j in judged])
  sizes_N = np.zeros(len(judged))
  for name, weight in part_weights.items():
    has_part = np.array([not j.failure and name in j.parts for j in judged])
    if not has_part.any():
      continue
    values = np.array(
        [j.parts[name] for j, has in zip(judged, has_part) if has]
    )
    spread = values.std()
    # Equal values may differ from their mean by rounding.
    if spread > _MIN_SPREAD * max(1.0, np.abs(values).max()):
      scaled = weight * (values - values.mean()) / spread
      sums_N[has_part] += scaled
      sizes_N[has_part] += np.abs(scaled)
  # Parts that cancel leave a rounding error, but ties must be exactly equal.
  sums_N[np.abs(sums_N) < _MIN_SPREAD * sizes_N] = 0.0
  return sums_N.astype(np.float32)


def of_groups(requests: Sequence[JudgeRequest]) -> list[list[JudgeRequest]]:
  """Returns successive requests of one prompt as groups."""
  prompt = lambda request: (request.split, request.index)
  return [list(group) for _, group in itertools.groupby(requests, prompt)]


def texts_and_tokens(
    group: Sequence[JudgeRequest],
) -> tuple[list[str], list[Sequence[int]]]:
  """Returns the texts of completions, and their tokens."""
  return [r.completion for r in group], [r.tokens for r in group]


def no_reason(message: str) -> str:
  """Returns the text to show if no reason could be found."""
  return f"(no reason: {message})"


class InProcess(Judge):
  """Calls the task in this process, for fast rewards that never hang."""

  def __init__(
      self,
      task: base.Task,
      *,
      on_event: OnEvent | None = None,
  ):
    """Takes the task; see `Judge`."""
    super().__init__(on_event=on_event)
    self._task = task

  def _judge(self, requests: Sequence[JudgeRequest]) -> list[base.Judgement]:
    if self._task.judges_groups:
      return [j for group in of_groups(requests) for j in self._group(group)]
    return [self._judge_one(request) for request in requests]

  def _group(self, group: Sequence[JudgeRequest]) -> list[base.Judgement]:
    first = group[0]
    try:
      judged = self._task.judge_group(
          first.split, first.index, *texts_and_tokens(group)
      )
    # User code on a model's text may raise anything.
    except (Exception, SystemExit) as error:
      judged = [base.RewardError("error", user_code.describe(error))] * len(
          group
      )
    return [
        self._failed(request, one.cause, str(one))
        if isinstance(one, base.RewardError)
        else self._checked(request, one)
        for request, one in zip(group, judged, strict=True)
    ]

  def _explain(self, requests: Sequence[JudgeRequest]) -> list[str]:
    return [self._explain_one(request) for request in requests]

  def _explain_one(self, request: JudgeRequest) -> str:
    try:
      return self._task.explain(
          request.split, request.index, request.completion
      )
    # User code on a model's text may raise anything.
    except (Exception, SystemExit) as error:
      return no_reason(user_code.describe(error))

  def _judge_one(self, request: JudgeRequest) -> base.Judgement:
    try:
      judge = self._task.judge if request.stopped else self._task.judge_cut_off
      judgement = judge(request.split, request.index, request.completion)
    except base.RewardError as error:
      return self._failed(request, error.cause, str(error))
    # User code on a model's text may raise anything.
    except (Exception, SystemExit) as error:
      return self._failed(request, "error", user_code.describe(error))
    return self._checked(request, judgement)


class OfOutcomes(Judge):
  """Takes the rewards that environments returned during sampling.

  The parts of a reward are the number of turns, the environment's seconds, and
  its metrics.
  """

  def _judge(self, requests: Sequence[JudgeRequest]) -> list[base.Judgement]:
    return [self._judge_one(request) for request in requests]

  def _judge_one(self, request: JudgeRequest) -> base.Judgement:
    outcome = request.outcome
    if outcome.failure:
      return self._failed(request, outcome.failure, outcome.message)
    judged = base.judgement_of(
        outcome.reward, outcome.is_right, request.completion
    )
    parts = {
        **outcome.metrics,
        "turns": float(outcome.num_turns),
        "environment_s": outcome.seconds,
    }
    return self._checked(request, dataclasses.replace(judged, parts=parts))

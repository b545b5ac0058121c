# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges, comparers and evaluators of a config.

A judge rewards completions: the task's own code, a verifier process, frozen
models of the task, or a reward model. A comparer says which of two is better.
"""

from collections.abc import Callable, Sequence
import pathlib
from typing import Any

import ml_collections
import numpy as np

from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.rewards import red_team as rewards_red_team
from tba_jax.rewards import reward_model
from tba_jax.tasks import base
from tba_jax.tasks import red_team as tasks_red_team
from tba_jax.training import evaluator
from tba_jax.training import policy as policy_lib

_MADE_HERE = "reward_model"


class ModelJudge(judges.Judge):
  """Rewards by a reward model: the raw score of its scalar head."""

  def __init__(
      self,
      scorer: reward_model.RewardScorer,
      task: base.Task,
      *,
      fallback: float,
      on_event: judges.OnEvent | None = None,
      with_keys: bool = False,
  ):
    """Takes the model.

    Args:
      scorer: of the reward model.
      task: prompts, and references.
      fallback, on_event: as `Judge` has them.
      with_keys: whether a completion that scores above the task's reference
        counts as right, for which references are scored too.
    """
    super().__init__(fallback=fallback, on_event=on_event)
    self._scorer = scorer
    self._task = task
    self._with_keys = with_keys
    self._of_reference: dict[tuple[str, int], float] = {}

  def _judge(self, requests: Sequence[judges.Request]) -> list[base.Judgement]:
    if self._with_keys:
      self._score_references(requests)
    scores = self._scorer.score([self._text(r) for r in requests])
    return [
        self._checked(request, self._judgement(request, score))
        for request, score in zip(requests, scores.tolist())
    ]

  def _text(self, request: judges.Request) -> reward_model.Text:
    prompt = self._task.prompt(request.split, request.index)
    return reward_model.Text(prompt, request.completion, request.stopped)

  def _judgement(self, request: judges.Request, score: float) -> base.Judgement:
    reference = self._of_reference.get((request.split, request.index), np.inf)
    key = request.completion if score > reference else None
    return base.Judgement(score, key)

  def _score_references(self, requests: Sequence[judges.Request]) -> None:
    missing = {(r.split, r.index) for r in requests} - set(self._of_reference)
    keys = sorted(missing)
    texts = [
        reward_model.Text(
            self._task.prompt(*key), base.reference_text(self._task, *key)
        )
        for key in keys
    ]
    self._of_reference.update(zip(keys, self._scorer.score(texts).tolist()))


class ModelComparer(comparers.Scores):
  """Scores by a gold reward model."""

  def __init__(self, scorer: reward_model.RewardScorer):
    """Takes the model."""
    super().__init__()
    self._scorer = scorer

  def score(self, contests: Sequence[comparers.Contest]) -> list[float | None]:
    texts = [
        reward_model.Text(c.prompt, c.request.completion, c.request.stopped)
        for c in contests
    ]
    scores = self._scorer.score(texts).tolist()
    return [score if np.isfinite(score) else None for score in scores]


def make_task_judge(
    config: ml_collections.ConfigDict,
    task: base.Task,
    on_event: Callable[[str, str], None] | None = None,
) -> judges.Judge:
  """Returns the judge by the task's own rewards, whatever `reward` names.

  Args:
    config: reads `reward`, `task` and `seed`.
    task: of the run.
    on_event: called with (kind, message) for what failed.

  Raises:
    ValueError: a folder of a frozen model cannot be read.
  """
  if isinstance(task, tasks_red_team.RedTeam):
    return rewards_red_team.make_judge(config, task, on_event)
  return pool.make_judge(config, task, on_event)


def make_embed(
    policy: policy_lib.Policy,
) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
  """Returns completions' tokens -> their sentence embeddings, [n, D] float32.

  Args:
    policy: of a task with an encoder.
  """
  embed = rewards_red_team.make_embed(policy.task)
  return lambda tokens: embed([policy.tokenizer.decode(t) for t in tokens])


def make_judge(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.Task,
    on_event: judges.OnEvent | None = None,
    *,
    with_keys: bool = False,
) -> judges.Judge:
  """Returns the judge that `config.reward` asks for.

  Args:
    config: reads `reward`, `task` and what `reward_scorer.load` reads.
    workdir: of the run; holds the reward model that was made for it.
    task: of the run.
    on_event: receives what failed.
    with_keys: as `ModelJudge` has it.

  Raises:
    ValueError: the reward model is not there or cannot be read.
  """
  if config.reward.where != "model":
    return make_task_judge(config, task, on_event)
  folder = config.reward.model
  if folder == _MADE_HERE:
    folder = pathlib.Path(workdir) / _MADE_HERE / "model"
  return ModelJudge(
      reward_model.load_scorer(config, "reward.model", folder),
      task,
      fallback=config.reward.fallback,
      on_event=on_event,
      with_keys=with_keys,
  )


def of_searcher(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    policy: policy_lib.Policy,
    on_event: judges.OnEvent | None = None,
) -> judges.Judge:
  """Returns the judge of a searcher; args and errors as of `make_judge`."""
  if config.reward.role == "trainer":
    return reward_model.Unscored()
  return make_judge(config, workdir, policy.task, on_event)


def of_trainer(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    policy: policy_lib.Policy,
    on_event: judges.OnEvent | None = None,
) -> reward_model.GroupScorer:
  """Returns what gives groups their rewards in the trainer, if it does.

  Args:
    config, workdir, on_event: as `make_judge`.
    policy: of the run.

  Raises: as `make_judge`.
  """
  judge = None
  if config.reward.role == "trainer":
    judge = make_judge(config, workdir, policy.task, on_event)
  return reward_model.GroupScorer(judge, policy.tokenizer, config.loss)


def make_comparer(
    config: ml_collections.ConfigDict,
    task: base.Task,
    on_event: judges.OnEvent | None = None,
) -> comparers.Comparer | None:
  """Returns who compares with references, None where nobody does.

  Args:
    config: reads `evaluate`, `reward` and what `reward_scorer.load` reads.
    task: of the run.
    on_event: receives what failed.

  Raises:
    ValueError: the gold model is not there or cannot be read.
  """
  c = config.evaluate
  if not c.judge:
    return None
  if c.judge == "command":
    return comparers.CommandComparer(
        c.judge_command, deadline_s=c.judge_deadline_s, on_event=on_event
    )
  if c.judge == "task":
    return comparers.OfTask(make_task_judge(config, task, on_event))
  return ModelComparer(
      reward_model.load_scorer(config, "evaluate.judge", c.judge)
  )


def make_evaluator(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    policy: policy_lib.Policy,
    on_event: judges.OnEvent | None = None,
    **references: Any,
) -> evaluator.Evaluator:
  """Returns the evaluator of the held-out split, with judge and comparer.

  Args:
    config, workdir, on_event: as `make_judge`.
    policy: of the run.
    **references: as `Evaluator` takes them.

  Raises: as `make_judge` and `make_comparer`.
  """
  return evaluator.Evaluator(
      config,
      policy,
      make_judge(config, workdir, policy.task, on_event, with_keys=True),
      comparer=make_comparer(config, policy.task, on_event),
      **references,
  )

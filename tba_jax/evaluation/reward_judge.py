# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds judges, comparers and evaluators from a config.

A judge rewards completions: by the task's code, a verifier process, a model
over HTTP, frozen models of the task, or a reward model. A comparer prefers one
of two completions. Frozen models are on the mesh of the role that judges; a
mesh of None is one device.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax.environments import build as environments_build
from tba_jax.evaluation import evaluator
from tba_jax.policy import frozen_models
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import red_team_models
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.rewards import red_team_judge as rewards_red_team
from tba_jax.rewards import reward_scorer
from tba_jax.rewards import url_judge
from tba_jax.tasks import base
from tba_jax.tasks import red_team as tasks_red_team

_MADE_HERE = "reward_model"


class ModelJudge(judges.Judge):
  """Rewards by the raw score of a reward model."""

  on_devices = True

  def __init__(
      self,
      scorer: reward_scorer.RewardScorer,
      task: base.Task,
      *,
      on_event: judges.OnEvent | None = None,
      with_keys: bool = False,
  ):
    """Stores the model.

    Args:
      task: source of prompts and references.
      on_event: event sink, see `Judge`.
      with_keys: whether to count completions that score above the task's
        reference as correct; scores the references too.
    """
    super().__init__(on_event=on_event)
    self._scorer = scorer
    self._task = task
    self._with_keys = with_keys
    self._of_reference: dict[tuple[str, int], float] = {}

  def _judge(
      self, requests: Sequence[judges.JudgeRequest]
  ) -> list[base.Judgement]:
    if self._with_keys:
      self._score_references(requests)
    scores = self._scorer.score([self._text(r) for r in requests])
    return [
        self._checked(request, self._judgement(request, score))
        for request, score in zip(requests, scores.tolist())
    ]

  def _text(self, request: judges.JudgeRequest) -> reward_scorer.Text:
    prompt = self._task.prompt(request.split, request.index)
    return reward_scorer.Text(prompt, request.completion, request.stopped)

  def _judgement(
      self, request: judges.JudgeRequest, score: float
  ) -> base.Judgement:
    reference = self._of_reference.get((request.split, request.index), np.inf)
    key = request.completion if score > reference else None
    return base.Judgement(score, key)

  def _score_references(self, requests: Sequence[judges.JudgeRequest]) -> None:
    missing = {(r.split, r.index) for r in requests} - set(self._of_reference)
    keys = sorted(missing)
    texts = [
        reward_scorer.Text(
            self._task.prompt(*key), base.reference_text(self._task, *key)
        )
        for key in keys
    ]
    self._of_reference.update(zip(keys, self._scorer.score(texts).tolist()))


class ModelComparer(comparers.Scores):
  """Scores by a gold reward model."""

  def __init__(self, scorer: reward_scorer.RewardScorer):
    super().__init__()
    self._scorer = scorer

  def score(
      self, comparisons: Sequence[comparers.Comparison]
  ) -> list[float | None]:
    texts = [
        reward_scorer.Text(c.prompt, c.request.completion, c.request.stopped)
        for c in comparisons
    ]
    scores = self._scorer.score(texts).tolist()
    return [score if np.isfinite(score) else None for score in scores]


def make_task_judge(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.PromptSet,
    on_event: judges.OnEvent | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> judges.Judge:
  """Returns the judge of the task's reward, whatever `config.reward` names.

  Raises ValueError if a frozen model's folder cannot be read.
  """
  if task.has_turns:
    return judges.OfOutcomes(on_event=on_event)
  if not isinstance(task, tasks_red_team.RedTeam):
    judge = pool.make_judge(config, workdir, task, on_event)
    if task.has_judge:
      judge = url_judge.UrlJudge(
          config.reward, workdir, task, judge, on_event=on_event
      )
    return judge
  return rewards_red_team.RedTeamJudge(
      red_team_models.load_victim(config, task, mesh),
      red_team_models.load_classifier(config, task, mesh),
      red_team_models.load_embed(task, mesh),
      success_threshold=task.setting("success_threshold"),
      on_event=on_event,
  )


def _load_scorer(
    config: ml_collections.ConfigDict,
    key: str,
    folder: str | pathlib.Path,
    task: base.Task,
    mesh: jax.sharding.Mesh | None,
) -> reward_scorer.RewardScorer:
  """Returns a scorer, after a check that it can read the task's prompts.

  Raises ValueError if it cannot: messages need a chat template.
  """
  scorer = frozen_models.load_scorer(config, key, folder, mesh)
  split = base.TRAIN if task.num_prompts(base.TRAIN) else base.HELD_OUT
  try:
    scorer.encode(reward_scorer.Text(task.prompt(split, 0), ""))
  except ValueError as error:
    raise ValueError(
        f"config.{key}={str(folder)!r}: it cannot read the prompts: {error}"
    ) from error
  return scorer


def make_judge(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.PromptSet,
    on_event: judges.OnEvent | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    with_keys: bool = False,
) -> judges.Judge:
  """Returns the judge that `config.reward` names.

  Args:
    config: settings `reward`, `task` and the settings of `load_scorer`.
    workdir: directory with the run's own reward model, if it has one.
    on_event: function that receives failures.
    with_keys: whether to score references too, see `ModelJudge`.

  Raises:
    ValueError: the reward model is missing or cannot be read.
  """
  if config.reward.backend != "model":
    return make_task_judge(config, workdir, task, on_event, mesh=mesh)
  folder = config.reward.model
  if folder == _MADE_HERE:
    folder = pathlib.Path(workdir) / _MADE_HERE / "model"
  return ModelJudge(
      _load_scorer(config, "reward.model", folder, task, mesh),
      task,
      on_event=on_event,
      with_keys=with_keys,
  )


def make_comparer(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.PromptSet,
    on_event: judges.OnEvent | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> comparers.Comparer | None:
  """Returns the comparer that `config.evaluate.judge` names, or None.

  Raises ValueError if the gold model is missing or cannot be read.
  """
  c = config.evaluate
  if not c.judge:
    return None
  if c.judge == "command":
    return comparers.CommandComparer(
        c.judge_command, deadline_s=c.judge_deadline_s, on_event=on_event
    )
  if c.judge == "task":
    judge = make_task_judge(config, workdir, task, on_event, mesh=mesh)
    return comparers.OfTask(judge)
  return ModelComparer(
      _load_scorer(config, "evaluate.judge", c.judge, task, mesh)
  )


def make_evaluator(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    policy: policy_lib.Policy,
    on_event: judges.OnEvent | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    **references: Any,
) -> evaluator.Evaluator:
  """Returns the evaluator of the held-out split, with judge and comparer.

  `references` are passed to `Evaluator`. Raises what `make_judge` and
  `make_comparer` raise.
  """
  judge = make_judge(
      config, workdir, policy.task, on_event, mesh=mesh, with_keys=True
  )
  return evaluator.Evaluator(
      config,
      policy,
      judge,
      comparer=make_comparer(config, workdir, policy.task, on_event, mesh=mesh),
      environments=environments_build.make(
          config, workdir, policy.task, policy.tokenizer, on_event
      ),
      **references,
  )

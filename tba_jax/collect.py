# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collector: turns prompts and a version of the params into groups.

Searchers, the single-process loop, sweeps and evaluations all sample and reward
completions here. Rewards are final, `loss.missing_stop` included, so journal,
buffer and losses see the same values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import itertools
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.environments import turns
from tba_jax.losses import objective_table
from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.rewards import judges
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import samplers
from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import task_table as tasks

# Number of tokens at a prompt's end that may spell "<think>" and a line break.
_END_TOKENS = 8

# (position in the prompt order, prompt id, visit).
Prompt = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Sampled:
  """A sampled prompt, without rewards.

  prompt: position, id and visit.
  completions: S sampled completions.
  outcomes: () -> [S], results of the environments, for which it may wait; None
    without environments.
  """

  prompt: Prompt
  request: requests_lib.Request
  completions: types.Completions
  outcomes: Callable[[], Sequence[judges.EpisodeOutcome]] | None = None


@dataclasses.dataclass(frozen=True)
class _Begun:
  """Prompts before sampling.

  observations: first observations of the active prompts that are played.
  """

  active: list[tuple[Prompt, requests_lib.Request]] = dataclasses.field(
      default_factory=list
  )
  observations: list[turns.FirstObservation] = dataclasses.field(
      default_factory=list
  )
  failed: list[Sampled] = dataclasses.field(default_factory=list)


class Collector:
  """Samples prompts of a split and rewards their completions.

  `collector(prompts, params, version)` does both. Callers with two threads
  sample in one and reward in the other.
  """

  def __init__(
      self,
      task: base.PromptSet,
      tokenizer: tokenizer_lib.Tokenizer,
      sampler: requests_lib.Sampler,
      judge: judges.Judge,
      *,
      num_completions: int,
      split: str = base.TRAIN,
      loss: ml_collections.ConfigDict | None = None,
      part_weights: Mapping[str, float] | None = None,
      reference: Any = None,
      seed: int | None = None,
      environments: turns.Environments | None = None,
      by_turn: bool = False,
      draws_equal: bool = True,
      prompt_tokens: Mapping[int, np.ndarray] | None = None,
  ):
    """Initializes the collector.

    Args:
      num_completions: S, completions per prompt.
      loss: `config.loss`, which weights rewards and sets the reward of
        truncated completions; None keeps the judge's rewards.
      part_weights: factors of the reward's components, each of which is
        normalized over a prompt's completions before they are summed; None
        keeps the total.
      reference: `GroupReference`; None leaves reference log-probs to the
        trainer.
      seed: sampling seed; None uses the sampler's seed.
      environments: source of prompts and of replies to completions; None if the
        task has no environment.
      by_turn: whether groups get per-turn rewards.
      draws_equal: result of `draws_equal_groups`.
      prompt_tokens: [P] int32 by prompt id, token ids of prompts that differ
        from the task's, as in a log.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._sampler = sampler
    self._judge = judge
    self._num_completions = num_completions
    self._split = split
    self._loss = loss
    self._part_weights = part_weights
    self._reference = reference
    self._seed = seed
    self._environments = environments
    self._by_turn = by_turn
    self._draws_equal = draws_equal
    self._prompt_tokens = dict(prompt_tokens or {})

  @property
  def has_reference(self) -> bool:
    """Whether groups get reference log-probs here."""
    return self._reference is not None

  def stats(self, wall_s: float) -> dict[str, float]:
    """Returns statistics of `wall_s` seconds of sampling."""
    if self._environments is None:
      return {}
    share = min(1.0, self._environments.waited_s / wall_s)
    return {"environment_wait_share": share}

  def __call__(
      self,
      prompts: Sequence[Prompt],
      params: types.PyTree,
      version: int,
      epoch: int = 0,
  ) -> list[types.Group]:
    """Returns a group for each prompt, sampled with `params`."""
    if not prompts:
      return []
    sampled = self.sample(prompts, params, version)
    rewards = self.rewards(sampled)
    ref_logprobs = self.start_reference(sampled, rewards)
    return self.groups(sampled, rewards, ref_logprobs(), epoch)

  def sample(
      self, prompts: Sequence[Prompt], params: types.PyTree, version: int
  ) -> list[Sampled]:
    """Samples S completions of each prompt and waits for all of them.

    Args:
      prompts: P prompts.
      params: policy params from `Sampler.put`.
      version: policy version of `params`.

    Returns:
      The sampled prompts, in the given order.
    """
    begun = self._begin(prompts, version)
    requests = [request for _, request in begun.active]
    episodes = None
    if self._environments is not None:
      episodes = self._environments.episodes(
          begun.observations, self._num_completions
      )
    # Keep no reference in this frame, so that newer params can free these.
    holder = [params]
    del params
    sampled = {one.prompt: one for one in begun.failed}
    try:
      completions = []
      if requests:
        completions = self._sampler.sample(
            holder.pop(), requests, version=version, newer=None, turns=episodes
        )
      played = itertools.count()
      for one, c in zip(begun.active, completions, strict=True):
        outcomes = None
        if self._is_played(one[0]):
          outcomes = episodes.outcomes(next(played))
        sampled[one[0]] = Sampled(*one, c, outcomes)
    finally:
      if episodes is not None:
        episodes.close()
    return [sampled[prompt] for prompt in prompts]

  def stream(
      self,
      more: Callable[[], Sequence[Prompt] | None],
      params: types.PyTree,
      version: int,
      newer: Callable[[], tuple[int, types.PyTree] | None] | None = None,
  ) -> Iterator[list[Sampled]]:
    """Samples S completions of each prompt as slots become free.

    Args:
      more: () -> further prompts, each at most once, or None if there are none
        at present.
      params: policy params from `Sampler.put`.
      version: policy version of `params`.
      newer: () -> (version, newer params), or None.

    Yields:
      Finished prompts, in any order. Ends once all are finished and `more`
      returns None.

    Raises:
      ValueError: a prompt is too long for the sampler.
      TimeoutError: the environments do not respond.
    """
    # By request number, counted in the order of `more`, and the numbers of
    # played requests in `episodes`.
    begun: dict[int, tuple[Prompt, requests_lib.Request]] = {}
    episode_numbers: dict[int, int] = {}
    num_begun = num_played = 0
    # Prompts whose environments failed.
    failed: list[Sampled] = []
    # Upcoming prompts whose environments are being reset. Resets may queue
    # behind running episodes, so decoding polls for them.
    coming: futures.Future[_Begun] | None = None
    newest = version

    def note_newer() -> tuple[int, types.PyTree] | None:
      nonlocal newest
      version_and_params = newer()
      if version_and_params is not None:
        newest, _ = version_and_params
      return version_and_params

    episodes = None
    if self._environments is not None:
      episodes = self._environments.episodes([], self._num_completions)

    def next_requests() -> list[requests_lib.Request] | None:
      nonlocal coming, num_begun, num_played
      if coming is None and (prompts := more()) is not None:
        coming = beginning.submit(self._begin, prompts, newest)
      if coming is None:
        return None
      if episodes is not None and begun and not coming.done():
        return None
      made, coming = coming.result(), None
      failed.extend(made.failed)
      if episodes is not None:
        episodes.begin(made.observations)
      for prompt, request in made.active:
        begun[num_begun] = prompt, request
        if self._is_played(prompt):
          episode_numbers[num_begun] = num_played
          num_played += 1
        num_begun += 1
      return [request for _, request in made.active]

    finished = self._sampler.stream(
        params,
        next_requests,
        version=version,
        newer=newer and note_newer,
        turns=episodes,
    )
    del params
    with futures.ThreadPoolExecutor(1, "begin_prompts") as beginning:
      try:
        for batch in finished:
          sampled = [
              Sampled(
                  *begun.pop(number),
                  completions,
                  episodes.outcomes(episode_numbers.pop(number))
                  if number in episode_numbers
                  else None,
              )
              for number, completions in batch
          ]
          yield [*failed, *sampled]
          failed.clear()
          del batch, sampled  # Free them while the next ones decode.
        if failed:
          yield failed
      finally:
        if episodes is not None:
          episodes.close()

  def _begin(self, prompts: Sequence[Prompt], version: int) -> "_Begun":
    """Makes requests of prompts, and separates those that already failed."""
    observations: dict[Prompt, turns.FirstObservation] = {}
    if played := [prompt for prompt in prompts if self._is_played(prompt)]:
      ids = [prompt_id for _, prompt_id, _ in played]
      observations = dict(
          zip(played, self._environments.prompts(self._split, ids))
      )
    begun, S = _Begun(), self._num_completions
    for prompt in prompts:
      position, prompt_id, visit = prompt
      observation = observations.get(prompt)
      request = requests_lib.Request(
          prompt_tokens=(
              observation.tokens if observation else self._tokens_of(prompt_id)
          ),
          prompt_id=prompt_id,
          visit=visit,
          num_completions=S,
          position=position,
          seed=self._seed,
      )
      if observation is not None and observation.failure is not None:
        T = self._sampler.settings.max_completion_tokens
        none = no_completions(S, T, version)
        begun.failed.append(
            Sampled(prompt, request, none, ([observation.outcome] * S).copy)
        )
        continue
      begun.active.append((prompt, request))
      if observation is not None:
        begun.observations.append(observation)
    return begun

  def _is_played(self, prompt: Prompt) -> bool:
    """Returns whether an environment has the prompt, not a log or the task."""
    return self._environments is not None and (
        prompt[1] not in self._prompt_tokens
    )

  def start_reference(
      self,
      sampled: Sequence[Sampled],
      rewards_P: Sequence[np.ndarray] | None = None,
  ) -> Callable[[], Sequence[np.ndarray | None]]:
    """Dispatches the reference pass; returns a function that waits for it.

    Args:
      sampled: P sampled prompts.
      rewards_P: [S] for each prompt, to find groups that no batch uses; None
        skips none.

    Returns:
      () -> [S, T] float32 for each prompt: None without a reference, NaN for
      skipped groups.
    """
    if self._reference is None:
      return lambda: [None] * len(sampled)
    chosen = list(range(len(sampled)))
    if rewards_P is not None and not self._draws_equal:
      # Unjudged completions make a spread NaN, which is not 0.
      spread_P = np.ptp(np.stack(rewards_P), axis=1)
      # Batches use groups of equal rewards only if there are no others.
      if (spread_P > 0).any():
        chosen = np.flatnonzero(spread_P != 0).tolist()
    completions = [sampled[i].completions for i in chosen]
    wait = self._reference.start(
        [sampled[i].request.prompt_tokens for i in chosen],
        [c.tokens for c in completions],
        [c.lengths for c in completions],
        [c.sampled_mask for c in completions],
        [c.kept_ids for c in completions],
    )

    def wait_for_all() -> list[np.ndarray]:
      computed = dict(zip(chosen, wait(), strict=True))
      shapes = (one.completions.tokens.shape for one in sampled)
      return [
          computed.get(i, np.full(shape, np.nan, np.float32))
          for i, shape in enumerate(shapes)
      ]

    return wait_for_all

  def judge_requests(
      self, sampled: Sequence[Sampled]
  ) -> list[list[judges.JudgeRequest]]:
    """Returns S judge requests per prompt, or none if rewards are known.

    If the prompt ends with `<think>`, it is prepended for the judge, see
    `answers.with_opening`.
    """
    none_S = [None] * self._num_completions
    return [
        [
            judges.JudgeRequest(
                self._split,
                one.request.prompt_id,
                answers.with_opening(
                    self._tokenizer.decode(
                        one.request.prompt_tokens[-_END_TOKENS:]
                    ),
                    text,
                ),
                bool(stopped),
                outcome,
                tokens_T[:length].tolist(),
            )
            for text, stopped, outcome, tokens_T, length in zip(
                self._tokenizer.decode_completions(one.completions),
                one.completions.stopped,
                one.outcomes() if one.outcomes else none_S,
                one.completions.tokens,
                one.completions.lengths,
            )
            if one.completions.rewards is None
        ]
        for one in sampled
    ]

  def judge(
      self, requests_PxS: Sequence[Sequence[judges.JudgeRequest]]
  ) -> list[list[base.Judgement]]:
    """Returns S judgements per prompt."""
    # In a single call, so that a pool distributes the requests over workers.
    judged = iter(self._judge.judge([r for some in requests_PxS for r in some]))
    return [[next(judged) for _ in some] for some in requests_PxS]

  def rewards(self, sampled: Sequence[Sampled]) -> list[np.ndarray]:
    """Judges completions; returns final rewards, [S] per prompt."""
    judged_PxS = self.judge(self.judge_requests(sampled))
    return [
        self._rewards(judged_S, one.completions)
        if one.completions.rewards is None
        else one.completions.rewards
        for judged_S, one in zip(judged_PxS, sampled, strict=True)
    ]

  def groups(
      self,
      sampled: Sequence[Sampled],
      rewards_P: Sequence[np.ndarray],
      ref_logprobs_P: Sequence[np.ndarray | None],
      epoch: int,
  ) -> list[types.Group]:
    """Assembles groups.

    Args:
      sampled: P sampled prompts.
      rewards_P: result of `rewards`.
      ref_logprobs_P: result of `start_reference(…)()`.
      epoch: start count of the trainer that published the params.
    """
    return [
        self._group(*one, epoch)
        for one in zip(sampled, rewards_P, ref_logprobs_P, strict=True)
    ]

  def _group(
      self,
      sampled: Sampled,
      rewards_S: np.ndarray,
      ref_logprobs: np.ndarray | None,
      epoch: int,
  ) -> types.Group:
    c, request = sampled.completions, sampled.request
    if ref_logprobs is not None:
      rewards_S = self._task.final_rewards(
          rewards_S, ref_logprobs, c.sampled_mask
      )
    position, prompt_id, visit = sampled.prompt
    return types.Group(
        prompt_id=prompt_id,
        visit=visit,
        position=position,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=c.tokens,
        completion_lengths=c.lengths,
        sampled_mask=c.sampled_mask,
        stopped=c.stopped,
        behavior_logprobs=c.logprobs,
        rewards=rewards_S,
        versions=c.versions,
        epoch=epoch,
        ref_logprobs=ref_logprobs,
        routes=c.routes,
        prompt_routes=c.prompt_routes,
        kept_ids=c.kept_ids,
        turn_rewards=self._turn_rewards(sampled, rewards_S),
    )

  def _turn_rewards(
      self, sampled: Sampled, rewards_S: np.ndarray
  ) -> np.ndarray | None:
    if not self._by_turn:
      return None
    return judges.rewards_by_turn(
        sampled.outcomes() if sampled.outcomes else [],
        rewards_S,
        sampled.completions.sampled_mask,
        1.0 if self._loss is None else self._loss.reward_weight,
    )

  def _rewards(
      self, judged_S: Sequence[base.Judgement], completions: types.Completions
  ) -> np.ndarray:
    if self._loss is None:
      return np.array([j.reward for j in judged_S], np.float32)
    return judges.final_rewards(
        self._loss, judged_S, completions.stopped, self._part_weights
    )

  def _tokens_of(self, prompt_id: int) -> np.ndarray:
    if prompt_id not in self._prompt_tokens:
      prompt = self._task.prompt(self._split, prompt_id)
      self._prompt_tokens[prompt_id] = np.asarray(
          self._tokenizer.encode_prompt(prompt), np.int32
      )
    return self._prompt_tokens[prompt_id]


def no_completions(S: int, T: int, version: int) -> types.Completions:
  """Returns empty completions for a prompt whose environment failed."""
  zeros = lambda *dtypes: [np.zeros((S, T), dtype) for dtype in dtypes]
  tokens, logprobs, plain, sampled = zeros("int32", "float32", "float32", bool)
  return types.Completions(
      tokens=tokens,
      lengths=np.zeros(S, np.int32),
      sampled_mask=sampled,
      logprobs=logprobs,
      plain_logprobs=plain,
      stopped=np.ones(S, bool),
      versions=np.full(S, version, np.int32),
      token_versions=np.full((S, T), -1, np.int32),
  )


def make_collector(
    config: ml_collections.ConfigDict,
    policy: Any,
    sampler: requests_lib.Sampler,
    judge: judges.Judge,
    **parts: Any,
) -> Collector:
  """Returns the collector of training prompts.

  Args:
    policy: a `policy.Policy`.
    **parts: `reference`, `environments` and `prompt_tokens` of `Collector`.
  """
  return Collector(
      policy.task,
      policy.tokenizer,
      sampler,
      judge,
      num_completions=config.search.samples_per_prompt,
      loss=config.loss,
      part_weights=(
          policy.task.part_weights if config.reward.normalize_parts else None
      ),
      seed=config.seed,
      by_turn=has_turn_rewards(config),
      draws_equal=draws_equal_groups(config),
      **parts,
  )


def has_turn_rewards(config: ml_collections.ConfigDict) -> bool:
  """Returns whether groups have per-turn rewards.

  Only losses with per-token targets read them; other losses read the sum.
  """
  has_turns = tasks.facts(config.task.name).has_turns
  return has_turns and objective_table.find(config.loss.name).has_targets


def draws_equal_groups(config: ml_collections.ConfigDict) -> bool:
  """Returns whether batches may contain groups of equal rewards.

  If not, such groups are not stored, and their reference log-probs are not
  computed. In lockstep batches may contain them, because what is skipped would
  depend on how prompts are distributed over searchers.
  """
  return not (
      config.replay.skip_equal_rewards
      and config.replay.recent_fraction == 1
      and objective_table.holds_reference(config, "searcher")
      and not config.search.lockstep
  )


# Conditions of optional columns, see `types.Column.when`.
CONDITIONS = {
    "reference": lambda config: objective_table.holds_reference(
        config, "searcher"
    ),
    "routes": lambda config: config.train.router_replay,
    "kept_ids": samplers.num_kept,
    "turn_rewards": has_turn_rewards,
}
# Axes of optional columns -> fields of the model's config.
_SIZES = {"N": "num_expert_layers", "A": "route_bytes"}


def optional_columns(
    config: ml_collections.ConfigDict,
    model_config: config_lib.ModelConfig | None = None,
) -> dict[str, tuple[int, ...]]:
  """Returns the optional columns in a run's groups.

  Args:
    model_config: shape of the policy; None if no column has the axes N and A.

  Returns:
    Column name -> sizes of its axes N and A, or C, () for most.
  """

  def sizes(column: types.Column) -> tuple[int, ...]:
    if column.axes.endswith("C"):
      return (samplers.num_kept(config),)
    named = (_SIZES[axis] for axis in column.axes if axis in _SIZES)
    return tuple(getattr(model_config, name) for name in named)

  return {
      name: sizes(column)
      for name, column in types.COLUMNS.items()
      if column.when and CONDITIONS[column.when](config)
  }

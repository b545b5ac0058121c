# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in worker processes, which answer the turns of completions.

An environment occupies a process from the end of a completion's first turn to
the end of the last. If it hangs, dies or raises, the completion ends there with
the fallback reward and is counted by cause (`rewards/judges.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import math
import queue
import time
from typing import Any
import weakref

import numpy as np

from tba_jax.environments import environment_task
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.rewards import judges
from tba_jax.sampling import requests
from tba_jax.system import supervised_worker
from tba_jax.tasks import base

# Text or messages.
Observation = base.Prompt
Failure = tuple[str, str]  # Cause and message.

# Seconds after which a sampler that returns no turn counts as dead.
_TURN_DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True)
class FirstObservation:
  """An environment's first observation, or why there is none.

  seed: argument of the environment's `reset`.
  observation: text or messages; None after a failure.
  tokens: [P] int32, token ids; empty after a failure.
  failure: cause and message, or None.
  tools: JSON schemas of the environment's tools.
  judges_cut: whether the environment rewards an episode that is cut off.
  """

  seed: int
  observation: Observation | None
  tokens: np.ndarray
  failure: Failure | None = None
  tools: Sequence[Mapping[str, Any]] = ()
  judges_cut: bool = False

  @property
  def outcome(self) -> judges.EpisodeOutcome:
    """Outcome of each completion after a failure."""
    cause, message = self.failure
    return judges.EpisodeOutcome(
        0.0, False, 0.0, failure=cause, message=message
    )


class Environments:
  """A task's environments in worker processes, started on first use.

  waited_s: seconds in which the sampler had nothing to decode because all
    running completions waited for their environments.
  """

  def __init__(
      self,
      task: environment_task.EnvironmentTask,
      tokenizer: tokenizer_lib.Tokenizer,
      workers: supervised_worker.WorkerPool,
      max_prompt_tokens: int,
  ):
    """Initializes the environments.

    Args:
      task: seeds and limits.
      workers: processes, from `episode_pool.make`.
      max_prompt_tokens: P.
    """
    self.task = task
    self._tokenizer = tokenizer
    self._workers = workers
    self._max_prompt_tokens = max_prompt_tokens
    self.waited_s = 0.0
    # Time of the last answer of a process, by `monotonic`.
    self._answered_s = -math.inf
    self._prompts: dict[int, FirstObservation] = {}
    self._live: weakref.WeakSet[Episodes] = weakref.WeakSet()

  def prompts(
      self, split: str, indices: Sequence[int]
  ) -> list[FirstObservation]:
    """Returns the first observation for each prompt."""
    return self.begin([self.task.seed(split, index) for index in indices])

  def begin(self, seeds: Sequence[int]) -> list[FirstObservation]:
    """Returns the first observation for each seed."""
    missing = sorted({*seeds} - {*self._prompts})
    prompts = dict(
        zip(missing, self._workers.threads.map(self._reset, missing))
    )
    # Failures are not cached: the next visit retries.
    self._prompts.update(
        (s, p) for s, p in prompts.items() if p.failure is None
    )
    return [self._prompts.get(seed) or prompts[seed] for seed in seeds]

  def episodes(
      self, prompts: Sequence[FirstObservation], num_completions: int
  ) -> "Episodes":
    """Returns the environments for one call of the sampler.

    Args:
      prompts: first observation of each request, with tokens.
      num_completions: S, completions per request.
    """
    episodes = Episodes(
        self.task,
        self._tokenizer,
        self._workers,
        prompts,
        num_completions,
        self._note_wait,
        self._call,
        lambda: self._answered_s,
    )
    self._live.add(episodes)
    return episodes

  def _note_wait(self, seconds: float) -> None:
    self.waited_s += seconds

  def demonstration(
      self, split: str, index: int, max_tokens: int
  ) -> tuple[Sequence[int], list[int], list[bool]]:
    """Returns an episode with the turns that the environment demonstrates.

    Args:
      split, index: prompt.
      max_tokens: most tokens of turns and answers; later turns are dropped.

    Returns:
      Prompt ids, ids of turns and answers, and their mask, True on the turns.
      Every turn ends with a stop token.

    Raises:
      ValueError: the environment fails.
    """
    seed = self.task.seed(split, index)
    answer = self._workers.threads.submit(self._demonstrate, seed).result()
    if failure := _failure(answer):
      raise ValueError(
          f"config.task.source: demonstrate fails for seed {seed}"
          f" ({failure[0]}): {failure[1]}"
      )
    (first, *texts), tools = answer["turns"], answer["tools"]
    prompt = self._tokenizer.encode_prompt(first, tools)
    ids, mask, stop_id = [], [], self._tokenizer.stop_id(first)
    dialogue = tokenizer_lib.Dialogue(self._tokenizer, first, tools)
    for turn, reply in zip(texts[::2], texts[1::2]):
      tokens = [*self._tokenizer.encode(turn, ids or prompt), stop_id]
      if len(ids) + len(tokens) > max_tokens:
        break
      ids, mask = ids + tokens, mask + [True] * len(tokens)
      reply = dialogue.encode_answer(turn, tokens, reply)
      ids, mask = [*ids, *reply], mask + [False] * len(reply)
    if not any(mask):
      raise ValueError(
          f"config.sampling.max_completion_tokens = {max_tokens}: must be"
          f" {len(tokens)} or more, the length of the first turn of the"
          f" demonstration for seed {seed}"
      )
    # Nothing follows the last answer, so it is dropped.
    num = len(mask) - mask[::-1].index(True)
    return prompt, ids[:num], mask[:num]

  def close(self) -> None:
    """Kills the processes and releases the threads of all completions."""
    for episodes in list(self._live):
      episodes.close()
    self._workers.close()

  def _call(
      self, worker: supervised_worker.SupervisedWorker, message: Any
  ) -> dict[str, Any]:
    answer = worker.call(message)
    self._answered_s = time.monotonic()
    return answer

  def _demonstrate(self, seed: int) -> dict[str, Any]:
    with self._workers.hold() as worker:
      return self._call(worker, ["demonstrate", seed, self.task.max_turns])

  def _reset(self, seed: int) -> FirstObservation:
    with self._workers.hold() as worker:
      answer = self._call(worker, ["reset", seed])
    failure, tokens = _failure(answer), []
    if failure is None:
      try:
        tokens = self._tokenizer.encode_prompt(
            answer["observation"], answer["tools"]
        )
      except ValueError as error:
        failure = "error", str(error)
    if failure is None and not 1 <= len(tokens) <= self._max_prompt_tokens:
      failure = "size", (
          f"reset({seed}) returned {len(tokens)} tokens: must be 1 to"
          f" config.sampling.max_prompt_tokens = {self._max_prompt_tokens}"
      )
    if failure is not None:
      tokens = []
    return FirstObservation(
        seed,
        answer.get("observation"),
        np.asarray(tokens, np.int32),
        failure,
        answer.get("tools", ()),
        answer.get("judges_cut", False),
    )


def _failure(answer: dict[str, Any]) -> Failure | None:
  if "failure" in answer:
    return answer["failure"], answer["message"]
  return None


class _Episode:
  """The environment of one completion.

  A thread runs it: it waits for turns and enqueues answers.

  dialogue: messages so far.
  turn: text and ids of the last turn.
  turns: queue of texts, each with the number of tokens before it and its own;
    None once the completion has ended.
  length: completion tokens that the environment has seen.
  ends: completion length at the end of each turn.
  rewards: reward of each answered turn.
  was_cut: whether its completion was cut off at the maximum length.
  cut_turn: text of an unfinished turn, with the number of tokens before it and
    its own; the text is None without one.
  cut_reward: amount earned after the last answered turn, if it was cut off.
  played: result of the thread.
  metrics: newest value of each of the environment's metrics.
  """

  def __init__(self, dialogue: tokenizer_lib.Dialogue | None = None):
    self.dialogue = dialogue
    self.turn: tuple[str, Sequence[int]] = "", ()
    self.turns: queue.SimpleQueue[tuple[str, int, int] | None] = (
        queue.SimpleQueue()
    )
    self.length = 0
    self.ends: list[int] = []
    self.rewards: list[float] = []
    self.was_cut = False
    self.cut_turn: tuple[str | None, int, int] = None, 0, 0
    self.cut_reward = 0.0
    self.played: futures.Future[None] | None = None
    self.success: bool | None = None
    self.metrics: dict[str, float] = {}
    self.seconds = 0.0
    self.failure: Failure | None = None


def _wait_for_end(episode: _Episode) -> None:
  """Waits until an episode has played; its calls have deadlines."""
  try:
    episode.played.result()
  except futures.CancelledError:
    episode.failure = "closed", "the environments were closed before it"
  except BaseException:  # pylint: disable=broad-exception-caught
    pass  # It is the episode's failure.


class Episodes:
  """The environments for one call of the sampler, as its `requests.Turns`."""

  def __init__(
      self,
      task: environment_task.EnvironmentTask,
      tokenizer: tokenizer_lib.Tokenizer,
      workers: supervised_worker.WorkerPool,
      prompts: Sequence[FirstObservation],
      num_completions: int,
      on_wait: Callable[[float], None],
      call: Callable[[supervised_worker.SupervisedWorker, Any], dict[str, Any]],
      last_answer_s: Callable[[], float],
  ):
    """Starts no episode yet; see `Environments.episodes`.

    `on_wait` receives the seconds of each wait; `call` passes a message to a
    process; `last_answer_s` returns the time of the last answer of one.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._workers = workers
    self._num_completions = num_completions
    self._on_wait = on_wait
    self._call = call
    self._last_answer_s = last_answer_s
    # Last time at which a turn ended, was cut or was answered.
    self._active_s = time.monotonic()
    # By request number.
    self._prompts: dict[int, FirstObservation] = {}
    self._num_prompts = 0
    self.begin(prompts)
    self._episodes: dict[requests.Owner, _Episode] = {}
    self._answered: queue.SimpleQueue[
        tuple[requests.Owner, Observation | None]
    ] = queue.SimpleQueue()
    self._closed = False

  def begin(self, prompts: Sequence[FirstObservation]) -> None:
    """Registers the prompts of the sampler's next requests."""
    for prompt in prompts:
      self._prompts[self._num_prompts] = prompt
      self._num_prompts += 1

  def end(self, owner: requests.Owner, tokens: np.ndarray) -> None:
    self._active_s = time.monotonic()
    episode = self._episodes.get(owner)
    if episode is None:
      episode = self._start(owner)
    if episode.failure is not None:  # The wait for this turn timed out.
      self._answered.put((owner, None))
      return
    turn = tokens[episode.length :]
    num_before = len(self._prompts[owner[0]].tokens) + episode.length
    episode.length = len(tokens)
    episode.ends.append(episode.length)
    text = self._tokenizer.decode_completion(turn, len(turn), stopped=True)
    episode.turn = text, turn
    episode.turns.put((text, num_before, len(turn)))

  def cut(self, owner: requests.Owner, tokens: np.ndarray | None) -> None:
    self._active_s = time.monotonic()
    episode = self._episodes.get(owner)
    if episode is None and self._prompts[owner[0]].judges_cut:
      episode = self._start(owner)
    if episode is None:
      return
    episode.was_cut = True
    prompt = self._prompts[owner[0]]
    if tokens is not None and prompt.judges_cut:
      turn = tokens[episode.length :]
      text = self._tokenizer.decode_completion(turn, len(turn), stopped=False)
      num_before = len(prompt.tokens) + episode.length
      episode.cut_turn = text, num_before, len(turn)
    episode.turns.put(None)

  def _start(self, owner: requests.Owner) -> _Episode:
    prompt = self._prompts[owner[0]]
    dialogue = tokenizer_lib.Dialogue(
        self._tokenizer, prompt.observation, prompt.tools
    )
    episode = self._episodes[owner] = _Episode(dialogue)
    episode.played = self._workers.threads.submit(
        self._play, owner, prompt, episode
    )
    return episode

  def answers(
      self, wait_s: float
  ) -> list[tuple[requests.Owner, np.ndarray | None]]:
    if wait_s > 0:
      self._wait(wait_s)
    answered = []
    while not self._answered.empty():
      owner, observation = self._answered.get()
      episode = self._episodes.get(owner)
      # The sampler has finished episodes that were cut off.
      if episode is not None and not episode.was_cut:
        answered.append((owner, observation))
    if answered:
      self._active_s = time.monotonic()
    return [
        (owner, self._tokens(owner, observation))
        for owner, observation in answered
    ]

  def _wait(self, wait_s: float) -> None:
    """Waits for an answer, which stays in the queue.

    Raises:
      TimeoutError: no answer came within the longest allowed time.
    """
    # The first turn waits for `reset` and then for `step`, of its own process
    # or of others before it.
    most_s = 2 * self._workers.longest_s
    start_s = time.monotonic()
    try:
      self._answered.put(self._answered.get(timeout=min(wait_s, most_s)))
    except queue.Empty:
      # Processes may be busy with other prompts, or episodes cut off.
      active_s = max(self._active_s, self._last_answer_s())
      if time.monotonic() - active_s >= most_s:
        raise TimeoutError(
            f"no environment of config.task.source answered in {most_s:g} s,"
            " although answers and process starts have shorter deadlines"
            " (config.reward.deadline_s)"
        ) from None
    finally:
      self._on_wait(time.monotonic() - start_s)

  def close(self) -> None:
    """Releases the threads of unfinished completions."""
    self._closed = True
    for episode in list(self._episodes.values()):
      episode.turns.put(None)

  def outcomes(
      self, request: int
  ) -> Callable[[], Sequence[judges.EpisodeOutcome]]:
    """Returns the outcomes of a request whose completions have all ended.

    They are a function, which waits for the rewards of episodes cut off.
    """
    judges_cut = self._prompts.pop(request).judges_cut
    episodes = [
        self._episodes.pop((request, sample), _Episode())
        for sample in range(self._num_completions)
    ]

    @functools.cache
    def get() -> Sequence[judges.EpisodeOutcome]:
      for episode in episodes:
        if judges_cut and episode.was_cut:
          _wait_for_end(episode)
      return list(map(self._outcome, episodes))

    return get

  def _outcome(self, episode: _Episode) -> judges.EpisodeOutcome:
    reward = sum(episode.rewards) + episode.cut_reward
    is_right = episode.success
    if is_right is None:
      is_right = (
          bool(episode.rewards or episode.was_cut)
          and reward >= self._task.correct_threshold
      )
    cause, message = episode.failure or ("", "")
    return judges.EpisodeOutcome(
        reward=reward,
        is_right=is_right,
        seconds=episode.seconds,
        turn_rewards=tuple(episode.rewards),
        turn_ends=tuple(episode.ends),
        metrics=dict(episode.metrics),
        failure=cause,
        message=message,
    )

  def _tokens(
      self, owner: requests.Owner, observation: Observation | None
  ) -> np.ndarray | None:
    """Returns the ids of an answer; None ends the completion."""
    if observation is None:
      return None
    episode = self._episodes[owner]
    try:
      tokens = episode.dialogue.encode_answer(*episode.turn, observation)
    except ValueError as error:
      episode.failure = "error", str(error)
      episode.turns.put(None)
      return None
    episode.length += len(tokens)
    return np.asarray(tokens, np.int32)

  def _play(
      self, owner: requests.Owner, prompt: FirstObservation, episode: _Episode
  ) -> None:
    """Runs an episode to its end in a thread of the pool."""
    try:
      self._play_turns(owner, prompt, episode)
    except BaseException as error:  # The sampler must not wait forever.
      episode.failure = "error", repr(error)
      self._answered.put((owner, None))
      raise

  def _play_turns(
      self, owner: requests.Owner, prompt: FirstObservation, episode: _Episode
  ) -> None:
    if self._closed and not (episode.was_cut and prompt.judges_cut):
      return
    with self._workers.hold() as worker:

      def timed(message: list[Any]) -> dict[str, Any]:
        start = time.perf_counter()
        answer = self._call(worker, message)
        episode.seconds += time.perf_counter() - start
        episode.failure = episode.failure or _failure(answer)
        return answer

      def note(answer: dict[str, Any]) -> None:
        episode.success = answer["success"]
        episode.metrics |= answer["metrics"]

      def end() -> None:
        if prompt.judges_cut:
          answer = timed(["end", *episode.cut_turn])
          if episode.failure is None:
            episode.cut_reward = answer["reward"]
            note(answer)

      first = timed(["reset", prompt.seed])
      said = first.get("observation"), list(first.get("tools", ()))
      if episode.failure is None and said != (
          prompt.observation,
          list(prompt.tools),
      ):
        episode.failure = "reset", (
            f"reset({prompt.seed}) returned"
            f" {str(first['observation'])[:80]!r}, but before"
            f" {str(prompt.observation)[:80]!r}: must return the same"
            " observation for the same seed"
        )
      if episode.failure is not None:
        self._answered.put((owner, None))
        return
      while (turn := self._turn(episode)) is not None:
        answer = timed(["step", *turn])
        if episode.failure is None:
          episode.rewards.append(answer["reward"])
          note(answer)
        over = episode.failure is not None or answer["done"]
        if not over and len(episode.rewards) == self._task.max_turns:
          over = True
          end()
        self._answered.put((owner, None if over else answer["observation"]))
        if over:
          return
      if episode.was_cut:
        end()

  def _turn(self, episode: _Episode) -> tuple[str, int, int] | None:
    """Returns the next turn; None if the completion has ended."""
    try:
      return episode.turns.get(timeout=_TURN_DEADLINE_S)
    except queue.Empty:
      episode.failure = "turn", (
          f"the searcher sampled no next turn in {_TURN_DEADLINE_S:g} s"
      )
      return None

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in worker processes, which answer the turns of completions.

An environment has a process from the end of a completion's first turn to its
last. A completion whose environment hangs, dies or raises ends there, with the
fallback reward, and is counted by the cause (`rewards/judges.py`).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
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

# A text or messages.
Said = base.Prompt
Failure = tuple[str, str]  # Cause and message.

# Seconds within which the sampler makes a turn, if it still runs.
_TURN_DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True)
class FirstObservation:
  """What an environment says first, or why it says nothing.

  seed: argument of the environment's `reset`.
  said: text or messages; None after a failure.
  tokens: [P] int32, the ids; none after a failure.
  failure: cause and message, None without one.
  tools: JSON schemas of its tools.
  """

  seed: int
  said: Said | None
  tokens: np.ndarray
  failure: Failure | None = None
  tools: Sequence[Mapping[str, Any]] = ()

  @property
  def outcome(self) -> judges.EpisodeOutcome:
    """What each of its completions gets after a failure."""
    cause, message = self.failure
    return judges.EpisodeOutcome(
        0.0, False, 0.0, failure=cause, message=message
    )


class Environments:
  """Processes of a task's environments, started when first needed.

  waited_s: seconds in which the sampler had nothing to decode: all completions
    under way waited for their environments.
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
    # Time of the last answer to `reset` for a prompt, by `monotonic`.
    self._reset_s = -math.inf
    self._prompts: dict[int, FirstObservation] = {}
    self._live: weakref.WeakSet[Episodes] = weakref.WeakSet()

  def prompts(
      self, split: str, indices: Sequence[int]
  ) -> list[FirstObservation]:
    """Returns what the environments of some prompts say first."""
    return self.begin([self.task.seed(split, index) for index in indices])

  def begin(self, seeds: Sequence[int]) -> list[FirstObservation]:
    """Returns what the environments of some seeds say first."""
    missing = sorted({*seeds} - {*self._prompts})
    prompts = dict(
        zip(missing, self._workers.threads.map(self._reset, missing))
    )
    # After a failure the next visit tries again.
    self._prompts.update(
        (s, p) for s, p in prompts.items() if p.failure is None
    )
    return [self._prompts.get(seed) or prompts[seed] for seed in seeds]

  def episodes(
      self, prompts: Sequence[FirstObservation], num_completions: int
  ) -> "Episodes":
    """Returns the environments of a call of the sampler.

    Args:
      prompts: prompt of each of its requests, with tokens.
      num_completions: S, completions of each.
    """
    episodes = Episodes(
        self.task,
        self._tokenizer,
        self._workers,
        prompts,
        num_completions,
        self._note_wait,
        lambda: self._reset_s,
    )
    self._live.add(episodes)
    return episodes

  def _note_wait(self, seconds: float) -> None:
    self.waited_s += seconds

  def demonstration(
      self, split: str, index: int, max_tokens: int
  ) -> tuple[Sequence[int], list[int], list[bool]]:
    """Returns an episode whose turns the environment itself says.

    Args:
      split, index: prompt.
      max_tokens: most tokens of the turns and answers; later turns are left
        out.

    Returns:
      Ids of the prompt, of turns and answers, and their mask, True on the
      turns, each of which has a stop token.

    Raises:
      ValueError: the environment fails.
    """
    seed = self.task.seed(split, index)
    answer = self._workers.threads.submit(self._demonstrate, seed).result()
    if failure := _failure(answer):
      raise ValueError(
          f"config.task.source: demonstrate fails with seed {seed}"
          f" ({failure[0]}): {failure[1]}"
      )
    (first, *said), tools = answer["turns"], answer["tools"]
    prompt = self._tokenizer.encode_prompt(first, tools)
    ids, mask, stop_id = [], [], self._tokenizer.stop_id(first)
    dialogue = Dialogue(self._tokenizer, first, tools)
    for turn, reply in zip(said[::2], said[1::2]):
      tokens = [*self._tokenizer.encode(turn, ids or prompt), stop_id]
      if len(ids) + len(tokens) > max_tokens:
        break
      ids, mask = ids + tokens, mask + [True] * len(tokens)
      reply = dialogue.encode_answer(turn, tokens, reply)
      ids, mask = [*ids, *reply], mask + [False] * len(reply)
    if not any(mask):
      raise ValueError(
          f"config.sampling.max_completion_tokens = {max_tokens}: must be"
          f" {len(tokens)} or more, which the demonstration of seed {seed}"
          " begins with"
      )
    # What is said last is no context of anything.
    num = len(mask) - mask[::-1].index(True)
    return prompt, ids[:num], mask[:num]

  def close(self) -> None:
    """Kills the processes, and lets the threads of all completions go."""
    for episodes in list(self._live):
      episodes.close()
    self._workers.close()

  def _demonstrate(self, seed: int) -> dict[str, Any]:
    with self._workers.hold() as worker:
      return worker.call(["demonstrate", seed, self.task.max_turns])

  def _reset(self, seed: int) -> FirstObservation:
    with self._workers.hold() as worker:
      answer = worker.call(["reset", seed])
    self._reset_s = time.monotonic()
    failure, tokens = _failure(answer), []
    if failure is None:
      try:
        tokens = self._tokenizer.encode_prompt(answer["said"], answer["tools"])
      except ValueError as error:
        failure = "error", str(error)
    if failure is None and not 1 <= len(tokens) <= self._max_prompt_tokens:
      failure = "size", (
          f"reset({seed}) says {len(tokens)} tokens: must be 1 to"
          f" config.sampling.max_prompt_tokens = {self._max_prompt_tokens}"
      )
    if failure is not None:
      tokens = []
    return FirstObservation(
        seed,
        answer.get("said"),
        np.asarray(tokens, np.int32),
        failure,
        answer.get("tools", ()),
    )


def _failure(answer: dict[str, Any]) -> Failure | None:
  if "failure" in answer:
    return answer["failure"], answer["message"]
  return None


class Dialogue:
  """What has been said in a completion, for what the chat template writes."""

  def __init__(
      self,
      tokenizer: tokenizer_lib.Tokenizer,
      first: Said,
      tools: Sequence[Mapping[str, Any]],
  ):
    """Begins with what the environment says first, and schemas of its tools."""
    self._tokenizer, self._tools = tokenizer, tools
    self._chat = list(tokenizer.messages(first) or ())

  def encode_answer(
      self, text: str, turn: Sequence[int], said: Said
  ) -> list[int]:
    """Returns the ids of an answer to a turn, and takes note of both.

    Args:
      text: decoded turn.
      turn: its ids, with what ended it.
      said: answer.

    Raises:
      ValueError: there is no template for messages, or it refuses them.
    """
    ids = self._tokenizer.encode_answer(said, turn, self._chat, self._tools)
    if isinstance(said, str):
      said = [{"role": "user", "content": said}]
    if self._chat:
      self._chat += [{"role": "assistant", "content": text}, *said]
    return ids


class _Episode:
  """The environment of one completion.

  A thread plays it: it waits for turns and puts answers.

  dialogue: messages so far.
  turn: text and ids of the last turn.
  turns: texts of turns; None once the completion is over.
  length: tokens of the completion that its environment has seen.
  ends: tokens of the completion up to the end of each turn.
  rewards: reward of each turn that was answered.
  metrics: newest value of each metric that the environment names.
  """

  def __init__(self, dialogue: Dialogue | None = None):
    self.dialogue = dialogue
    self.turn: tuple[str, Sequence[int]] = "", ()
    self.turns: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    self.length = 0
    self.ends: list[int] = []
    self.rewards: list[float] = []
    self.success: bool | None = None
    self.metrics: dict[str, float] = {}
    self.seconds = 0.0
    self.failure: Failure | None = None


class Episodes:
  """The environments of one call of the sampler: its `requests.Turns`."""

  def __init__(
      self,
      task: environment_task.EnvironmentTask,
      tokenizer: tokenizer_lib.Tokenizer,
      workers: supervised_worker.WorkerPool,
      prompts: Sequence[FirstObservation],
      num_completions: int,
      on_wait: Callable[[float], None],
      last_reset_s: Callable[[], float],
  ):
    """Begins nothing yet; see `Environments.episodes`.

    `on_wait` receives the seconds of each wait, `last_reset_s` returns when
    a process was last in use for a prompt.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._workers = workers
    self._num_completions = num_completions
    self._on_wait = on_wait
    self._last_reset_s = last_reset_s
    # Time at which a turn last ended, was cut or was answered.
    self._active_s = time.monotonic()
    # By the number of their request.
    self._prompts: dict[int, FirstObservation] = {}
    self._num_prompts = 0
    self.begin(prompts)
    self._episodes: dict[requests.Owner, _Episode] = {}
    self._answered: queue.SimpleQueue[tuple[requests.Owner, Said | None]] = (
        queue.SimpleQueue()
    )
    self._closed = False

  def begin(self, prompts: Sequence[FirstObservation]) -> None:
    """Takes the prompts of the sampler's next requests."""
    for prompt in prompts:
      self._prompts[self._num_prompts] = prompt
      self._num_prompts += 1

  def end(self, owner: requests.Owner, tokens: np.ndarray) -> None:
    self._active_s = time.monotonic()
    episode = self._episodes.get(owner)
    if episode is None:
      prompt = self._prompts[owner[0]]
      dialogue = Dialogue(self._tokenizer, prompt.said, prompt.tools)
      episode = self._episodes[owner] = _Episode(dialogue)
      self._workers.threads.submit(self._play, owner, episode)
    if episode.failure is not None:  # It waited too long for this turn.
      self._answered.put((owner, None))
      return
    turn = tokens[episode.length :]
    episode.length = len(tokens)
    episode.ends.append(episode.length)
    text = self._tokenizer.decode_completion(turn, len(turn), stopped=True)
    episode.turn = text, turn
    episode.turns.put(text)

  def cut(self, owner: requests.Owner) -> None:
    self._active_s = time.monotonic()
    if owner in self._episodes:
      self._episodes[owner].turns.put(None)

  def answers(
      self, wait_s: float
  ) -> list[tuple[requests.Owner, np.ndarray | None]]:
    if wait_s > 0:
      self._wait(wait_s)
    answered = []
    while not self._answered.empty():
      answered.append(self._answered.get())
    if answered:
      self._active_s = time.monotonic()
    return [(owner, self._tokens(owner, said)) for owner, said in answered]

  def _wait(self, wait_s: float) -> None:
    """Waits for an answer, which stays in the queue.

    Raises:
      TimeoutError: there was none for longer than each of them may take.
    """
    # A first turn has the answers to `reset` and then to `step`.
    most_s = 2 * self._workers.longest_s
    start_s = time.monotonic()
    try:
      self._answered.put(self._answered.get(timeout=min(wait_s, most_s)))
    except queue.Empty:
      # Processes may have been in use for prompts that come next.
      active_s = max(self._active_s, self._last_reset_s())
      if time.monotonic() - active_s >= most_s:
        raise TimeoutError(
            f"no environment of config.task.source has answered in"
            f" {most_s:g} s, though each answer, and the start of each"
            " process, has a shorter deadline (config.reward.deadline_s)"
        ) from None
    finally:
      self._on_wait(time.monotonic() - start_s)

  def close(self) -> None:
    """Lets the threads of completions that are not over go."""
    self._closed = True
    for episode in list(self._episodes.values()):
      episode.turns.put(None)

  def outcomes(self, request: int) -> list[judges.EpisodeOutcome]:
    """Returns the results of a request's completions, once all are over."""
    del self._prompts[request]
    return [
        self._outcome(self._episodes.pop((request, sample), _Episode()))
        for sample in range(self._num_completions)
    ]

  def _outcome(self, episode: _Episode) -> judges.EpisodeOutcome:
    reward = sum(episode.rewards)
    is_right = episode.success
    if is_right is None:
      is_right = (
          bool(episode.rewards) and reward >= self._task.correct_threshold
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
      self, owner: requests.Owner, said: Said | None
  ) -> np.ndarray | None:
    """Returns the ids of an answer; None ends the completion."""
    if said is None:
      return None
    episode = self._episodes[owner]
    try:
      tokens = episode.dialogue.encode_answer(*episode.turn, said)
    except ValueError as error:
      episode.failure = "error", str(error)
      episode.turns.put(None)
      return None
    episode.length += len(tokens)
    return np.asarray(tokens, np.int32)

  def _play(self, owner: requests.Owner, episode: _Episode) -> None:
    """Plays an episode to its end, in a thread of the pool."""
    try:
      self._play_turns(owner, episode)
    except BaseException as error:  # The sampler must not wait for ever.
      episode.failure = "error", repr(error)
      self._answered.put((owner, None))
      raise

  def _play_turns(self, owner: requests.Owner, episode: _Episode) -> None:
    if self._closed:
      return
    prompt = self._prompts[owner[0]]
    with self._workers.hold() as worker:

      def timed(message: list[Any]) -> dict[str, Any]:
        start = time.perf_counter()
        answer = worker.call(message)
        episode.seconds += time.perf_counter() - start
        episode.failure = episode.failure or _failure(answer)
        return answer

      first = timed(["reset", prompt.seed])
      if episode.failure is None and first["said"] != prompt.said:
        episode.failure = "reset", (
            f"reset({prompt.seed}) said {str(first['said'])[:80]!r}, and before"
            f" {str(prompt.said)[:80]!r}"
        )
      if episode.failure is not None:
        self._answered.put((owner, None))
        return
      while (turn := self._turn(episode)) is not None:
        answer = timed(["step", turn])
        if episode.failure is None:
          episode.rewards.append(answer["reward"])
          episode.success = answer["success"]
          episode.metrics |= answer["metrics"]
        over = (
            episode.failure is not None
            or answer["done"]
            or len(episode.rewards) == self._task.max_turns
        )
        self._answered.put((owner, None if over else answer["said"]))
        if over:
          return

  def _turn(self, episode: _Episode) -> str | None:
    """Returns the next turn; None if the completion is over."""
    try:
      return episode.turns.get(timeout=_TURN_DEADLINE_S)
    except queue.Empty:
      episode.failure = "turn", (
          f"the searcher has sampled no next turn in {_TURN_DEADLINE_S:g} s"
      )
      return None

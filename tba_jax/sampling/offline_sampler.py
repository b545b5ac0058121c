# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampler that replaces sampling by logged completions."""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import objective_table
from tba_jax.models import dialogue
from tba_jax.sampling import requests
from tba_jax.tasks import base
from tba_jax.tasks import episode_formats
from tba_jax.tasks import offline_completions

# Separates these random numbers from others with the same seed.
_STREAM = 0x106
_OUTSIDE = "have tokens outside the vocabulary"
# Nats; stands for a logged 0, which greedy decoding reports.
_ALMOST_ZERO = -1e-30
# Nats; less likely tokens are practically never sampled.
_RARE = -10.0
# Most characters of a chat template's error.
_MAX_ERROR = 120


class OfflineSampler:
  """Answers some requests from a log and samples the others.

  platform: field of `requests.Sampler`.
  """

  def __init__(self, log: "Log", sampler: requests.Sampler):
    """Wraps `sampler`, which serves the other requests."""
    self._log = log
    self._sampler = sampler
    self.settings, self.platform = sampler.settings, sampler.platform
    self.put, self.token_logprobs = sampler.put, sampler.token_logprobs
    self.stream = functools.partial(requests.in_one_batch, self.sample)

  def warm_up(self, params: Any) -> None:
    if self._log.share < 1:
      self._sampler.warm_up(params)

  def sample(
      self,
      params: Any,
      prompts: Sequence[requests.Request],
      *,
      version: int,
      newer: requests.NewerFn | None = None,
      turns: requests.Turns | None = None,
  ) -> list[types.Completions]:
    """Returns the completions of each prompt; see `requests.Sampler`."""
    is_logged = [self._log.has(r.position, r.prompt_id) for r in prompts]
    others = [r for r, logged in zip(prompts, is_logged) if not logged]
    sampled = iter(())
    if others:
      # No frame keeps a reference, so newer params free these.
      holder = [params]
      del params
      sampled = iter(
          self._sampler.sample(
              holder.pop(), others, version=version, newer=newer, turns=turns
          )
      )
    return [
        self._log.draw(r.prompt_id, r.visit, r.num_completions, version)
        if logged
        else next(sampled)
        for r, logged in zip(prompts, is_logged)
    ]


@dataclasses.dataclass(frozen=True)
class _Encoded:
  """A logged completion as token ids.

  ids: all tokens, including an environment's.
  sampled: whether the policy sampled each of `ids`.
  logprobs: log-probs of `ids`, nats, 0 where not sampled; None if unknown.
  stopped: whether a stop token or stop string ended it.
  num_lost: sampled tokens that are not in `sampled`.
  """

  prompt: tuple[int, ...]
  ids: tuple[int, ...]
  sampled: tuple[bool, ...]
  logprobs: tuple[float, ...] | None
  stopped: bool
  logged: offline_completions.Completion
  num_lost: int = 0


class _LeftOutError(ValueError):
  """Reason why a completion cannot be used."""


class Log:
  """Logged completions by prompt.

  The prompts are the task's. Environments have none before they run, so the
  log's prompts are numbered in their order instead, after the seeds that are
  sampled.

  share: fraction of prompts that get logged completions, if the log has any; 1
    if nothing is sampled.
  prompt_ids: training prompts with completions in the log, ascending.
  prompt_tokens: [P] int32 by prompt id, where the log's tokens replace the
    task's: prompts of environments, and prompts with tools.
  left_out: number of unused completions by reason.
  num_lost: number of completions used without their logged log-probs, because
    these do not match the tokens.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      task: base.PromptSet,
      tokenizer: Any,
      *,
      needs_logprobs: bool,
  ):
    """Reads the log.

    Args:
      config: reads `offline`, `sampling.max_prompt_tokens`,
        `sampling.max_completion_tokens` and `seed`.
      task: source of the training prompts to find in the log.
      needs_logprobs: whether completions without log-probs are left out.

    Raises:
      ValueError: a line of the file is wrong, or no completion is usable.
      OSError: the file cannot be read.
    """
    c = config.offline
    self.share = c.fraction
    self._has_rewards = bool(c.reward_field)
    self._seed = config.seed
    self._P = config.sampling.max_prompt_tokens
    self._T = config.sampling.max_completion_tokens
    self._pad_id = tokenizer.pad_id
    self._tokenizer = tokenizer
    self._needs_logprobs = needs_logprobs
    self.left_out: collections.Counter[str] = collections.Counter()
    self.num_lost = 0
    self.prompt_tokens: dict[int, np.ndarray] = {}
    completions = offline_completions.read(
        c.path, c.reward_field, needs_logprobs=needs_logprobs
    )
    every = [one for some in completions.values() for one in some]
    self._formats = collections.Counter(one.format for one in every)
    self._completions: dict[int, list[_Encoded]] = {}
    others: list[offline_completions.Completion] = []
    if task.has_turns:
      first = 0 if self.share == 1 else task.num_prompts(base.TRAIN)
      self._number_prompts(completions, first, task.is_held_out)
    else:
      others = self._find_prompts(completions, task)
    self.prompt_ids = sorted(self._completions)
    if not self.prompt_ids and self.left_out and not others:
      raise ValueError(
          f"config.offline.path = {c.path!r}: no completion of training prompts"
          f" is usable: {self._reasons()}"
      )
    if not self.prompt_ids:
      raise ValueError(
          f"config.offline.path = {c.path!r}: must be a file with completions"
          f" of the task's training prompts; its {len(completions)} prompts"
          f" begin with {next(iter(completions))[:80]!r}, the task's with"
          f" {base.plain_text(task.prompt(base.TRAIN, 0))[:80]!r}"
      )
    if others:
      self.left_out["are of other prompts"] = len(others)

  def _find_prompts(
      self,
      completions: Mapping[str, Sequence[offline_completions.Completion]],
      task: base.Task,
  ) -> list[offline_completions.Completion]:
    """Adds completions of the task's prompts; returns all others."""
    tokenizer = self._tokenizer
    by_prompt_id = offline_completions.by_prompt_id(
        completions, task, tokenizer
    )
    seen = set()
    for prompt_id, some in by_prompt_id.items():
      prompt = task.prompt(base.TRAIN, prompt_id)
      before = tuple(tokenizer.encode_prompt(prompt))
      stop_id = tokenizer.stop_id(prompt)
      for one in some:
        seen.add(id(one))
        self._add(self._encode(one, before, stop_id), prompt_id)
      added = self._completions.get(prompt_id)
      if added and added[0].prompt != before:
        self.prompt_tokens[prompt_id] = np.array(added[0].prompt, np.int32)
    others = [
        one
        for some in completions.values()
        for one in some
        if id(one) not in seen
    ]
    self.left_out.update(one.unusable for one in others if one.unusable)
    return [one for one in others if not one.unusable]

  def _number_prompts(
      self,
      completions: Mapping[str, Sequence[offline_completions.Completion]],
      first: int,
      is_held_out: Callable[[int], bool],
  ) -> None:
    """Adds completions, grouped by their prompts, numbered from `first`."""
    tokenizer = self._tokenizer
    numbers: dict[tuple[tuple[int, ...], str], int] = {}
    for text, some in completions.items():
      # Decoded tokens include what the chat template writes.
      encode = tokenizer.encode
      if tokenizer.messages(text) is None:
        encode = tokenizer.encode_prompt
      before = tuple(encode(text))
      stop_id = tokenizer.stop_id(text)
      for one in some:
        made, number = self._encode(one, before, stop_id), -1
        if one.seed is not None and is_held_out(one.seed):
          made = "are of held-out seeds"
        if isinstance(made, _Encoded):
          key = made.prompt, one.group
          number = numbers.setdefault(key, first + len(numbers))
        self._add(made, number)
    for prompt_id, some in self._completions.items():
      self.prompt_tokens[prompt_id] = np.array(some[0].prompt, np.int32)

  def _add(self, made: _Encoded | str, prompt_id: int) -> None:
    """Adds a completion, or counts why it is left out."""
    if isinstance(made, _Encoded):
      first, *_ = self._completions.get(prompt_id, [made])
      if made.prompt != first.prompt:
        made = "have other tools than the first one of their prompt"
    if isinstance(made, str):
      self.left_out[made] += 1
      return
    self._completions.setdefault(prompt_id, []).append(made)
    logged = made.logged
    has_logprobs = logged.logprobs is not None or logged.lacks_logprobs
    self.num_lost += has_logprobs and made.logprobs is None

  def summary(self) -> str:
    """Returns a sentence on which completions are used."""
    used = sum(map(len, self._completions.values()))
    text = f"{used} completions of {len(self.prompt_ids)} training prompts"
    if self.num_lost:
      text += (
          f", {self.num_lost} without their log-probs, which may not match the"
          " tokens"
      )
    return f"{text}; left out: {self._reasons() or 'none'}"

  def report(self) -> list[str]:
    """Returns lines on what the log can teach, `summary` first."""
    every = self._used()
    formats = ", ".join(f"{n} {f}" for f, n in self._formats.most_common())
    missing = sum(one.logprobs is None for one in every) / len(every)
    sampled = sum(sum(one.sampled) for one in every)
    lost = sum(one.num_lost for one in every)
    lines = [
        self.summary(),
        f"read: {formats}; {missing:.0%} without log-probs; {sampled} learned"
        f" tokens, {lost} lost by re-rendering; the longest completion has"
        f" {max(len(one.ids) for one in every)} of at most {self._T} tokens"
        " (sampling.max_completion_tokens)",
    ]
    if self._has_rewards:
      rewards = [
          [one.logged.reward for one in some]
          for some in self._completions.values()
      ]
      spread = [max(some) - min(some) for some in rewards]
      flat = [reward for some in rewards for reward in some]
      lines.append(
          f"rewards: {min(flat):.4g} to {max(flat):.4g}, mean"
          f" {np.mean(flat):.4g}; they differ for {np.count_nonzero(spread)} of"
          f" {len(spread)} prompts, on average by {np.mean(spread):.4g}"
      )
    return lines

  def pairs(self) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Returns the ids of prompt and completion of each used completion."""
    return [(one.prompt, one.ids) for one in self._used()]

  def coverage(self, logprobs: Sequence[np.ndarray]) -> list[str]:
    """Returns lines on how likely a policy is to sample the log.

    Args:
      logprobs: [T] of each of `pairs`, under the policy, nats.
    """
    sampled = [
        logprobs_T[np.asarray(one.sampled)]
        for one, logprobs_T in zip(self._used(), logprobs, strict=True)
    ]
    least = np.array([logprobs_T.min() for logprobs_T in sampled])
    sums = np.array([logprobs_T.sum() for logprobs_T in sampled])
    tokens = np.concatenate(sampled)
    lines = []
    for what, values, lowest, verb in (
        ("tokens", tokens, tokens, "are"),
        ("completions", sums, least, "have a token"),
    ):
      low, tenth, median = np.quantile(values, (0.01, 0.1, 0.5))
      lines.append(
          f"log-probs of {what}, nats: mean {np.mean(values):.4g}, median"
          f" {median:.4g}, 10% quantile {tenth:.4g}, 1% quantile {low:.4g};"
          f" {np.mean(lowest < _RARE):.2%} {verb} below {_RARE:g}"
      )
    return lines

  def _used(self) -> list[_Encoded]:
    return [one for some in self._completions.values() for one in some]

  def _reasons(self) -> str:
    return "; ".join(f"{n} {why}" for why, n in self.left_out.most_common())

  def has(self, position: int, prompt_id: int) -> bool:
    """Returns whether a prompt is answered from the log."""
    return prompt_id in self._completions and is_logged(
        self._seed, self.share, position
    )

  def draw(
      self, prompt_id: int, visit: int, num_completions: int, version: int
  ) -> types.Completions:
    """Returns S completions of a prompt, with rewards if they are read.

    Visits cycle through the log; fewer than S completions are repeated. An
    unknown or future version becomes -1, one step older than the first params.

    Args:
      prompt_id: training prompt with completions in the log.
      visit: number of earlier visits to the prompt.
      num_completions: S.
      version: newest version of the params.
    """
    every = self._completions[prompt_id]
    first = visit * num_completions
    some = [every[(first + s) % len(every)] for s in range(num_completions)]
    S, T = num_completions, self._T
    tokens = np.full((S, T), self._pad_id, np.int32)
    logprobs = np.zeros((S, T), np.float32)
    mask = np.zeros((S, T), bool)
    for s, one in enumerate(some):
      length = len(one.ids)
      tokens[s, :length], mask[s, :length] = one.ids, one.sampled
      if one.logprobs is not None:
        # All zeros would mean unknown log-probs.
        known = np.asarray(one.logprobs, np.float32)
        known = np.where(known == 0, _ALMOST_ZERO, known)
        logprobs[s, :length] = np.where(one.sampled, known, 0)
    versions = np.array([one.logged.version for one in some], np.int64)
    versions = np.where(versions <= version, versions, -1).astype(np.int32)
    rewards = None
    if self._has_rewards:
      rewards = np.array([one.logged.reward for one in some], np.float32)
    return types.Completions(
        tokens=tokens,
        lengths=np.array([len(one.ids) for one in some], np.int32),
        sampled_mask=mask,
        logprobs=logprobs,
        plain_logprobs=logprobs,
        stopped=np.array([one.stopped for one in some]),
        versions=versions,
        token_versions=np.where(mask, versions[:, None], -1),
        rewards=rewards,
    )

  def _encode(
      self,
      one: offline_completions.Completion,
      before: tuple[int, ...],
      stop_id: int,
  ) -> _Encoded | str:
    """Returns the ids of a completion, or why it is left out.

    Args:
      before: ids of its prompt, unless its episode has others.
      stop_id: token appended to a text that stopped.
    """
    try:
      if one.unusable:
        raise _LeftOutError(one.unusable)
      if one.episode is None:
        made = self._encode_text(one, before, stop_id)
      else:
        made = self._encode_episode(one, one.episode)
      if not any(made.sampled):
        raise _LeftOutError(
            "have no turn that the chat template writes as logged"
        )
      if not self._has_rewards and not all(made.sampled):
        raise _LeftOutError(
            "have several turns, which only offline.reward_field can reward"
        )
      if not 1 <= len(made.ids) <= self._T:
        raise _LeftOutError(
            f"have more than {self._T} tokens"
            " (sampling.max_completion_tokens)"
        )
      if not 1 <= len(made.prompt) <= self._P:
        raise _LeftOutError(
            f"have a prompt of more than {self._P} tokens"
            " (sampling.max_prompt_tokens)"
        )
      if max(*made.ids, *made.prompt) >= self._tokenizer.vocab_size:
        raise _LeftOutError(_OUTSIDE)
      if self._needs_logprobs and made.logprobs is None:
        raise _LeftOutError("lack log-probs of their own tokens")
    except _LeftOutError as error:
      return str(error)
    return made

  def _encode_text(
      self,
      one: offline_completions.Completion,
      before: tuple[int, ...],
      stop_id: int,
  ) -> _Encoded:
    tokenizer, stopped, logprobs = self._tokenizer, one.stopped, one.logprobs
    ids = one.token_ids
    if ids is None and one.tokens is not None:
      ids = tokenizer.ids_of(one.tokens)
      if ids is not None and not tokenizer.decode(ids, within=True).startswith(
          one.text
      ):
        ids = None  # The strings come from another tokenizer.
    if ids is None and one.sampled is not None:
      raise _LeftOutError("have tokens of an environment but no token_ids")
    if ids is None:
      stop = tokenizer.decode([stop_id])
      if stopped is None:
        stopped = one.tokens is None or one.tokens[-1] == stop
      ids = (*tokenizer.encode(one.text, before), *[stop_id] * stopped)
      if list(one.tokens or ()) != [tokenizer.decode([i]) for i in ids]:
        logprobs = None
    if one.token_ids is not None and not self._matches(ids, one.text):
      raise _LeftOutError("have token_ids that are not their text")
    if stopped is None:
      stopped = self._is_stopped(ids)
    sampled = one.sampled or (True,) * len(ids)
    return _Encoded(before, tuple(ids), sampled, logprobs, stopped, one)

  def _encode_episode(
      self,
      one: offline_completions.Completion,
      episode: episode_formats.Episode,
  ) -> _Encoded:
    """Returns the logged ids, or else the ids of the messages."""
    tokens = episode.tokens
    if episode.prompt is None and not self._is_in_vocabulary(tokens):
      raise _LeftOutError(_OUTSIDE)
    if tokens is not None and self._is_written(episode):
      stopped = one.stopped
      if stopped is None:
        stopped = self._is_stopped(tokens.ids)
      return _Encoded(
          tokens.prompt,
          tokens.ids,
          tokens.sampled,
          tokens.logprobs,
          stopped,
          one,
          tokens.num_lost,
      )
    stopped = one.stopped is not False
    try:
      made = dialogue.encode(
          self._tokenizer,
          episode.prompt,
          episode.turns,
          episode.tools,
          stopped=stopped,
      )
    except ValueError as error:
      raise _LeftOutError(
          f"cannot be written as tokens ({str(error)[:_MAX_ERROR]})"
      ) from error
    return _Encoded(
        tuple(made.prompt),
        tuple(made.ids),
        tuple(made.sampled),
        None,
        stopped,
        one,
        made.num_lost,
    )

  def _is_stopped(self, ids: Sequence[int]) -> bool:
    text = self._tokenizer.decode(ids, within=True)
    return self._tokenizer.split_stop(ids)[1] is not None or any(
        string in text for string in self._tokenizer.stop_strings
    )

  def _is_in_vocabulary(self, tokens: episode_formats.Tokens) -> bool:
    return max(*tokens.ids, *tokens.prompt) < self._tokenizer.vocab_size

  def _is_written(self, episode: episode_formats.Episode) -> bool:
    """Returns whether logged ids are the turns' texts in this vocabulary.

    Ids without messages are always taken as they are. If some turns are lost,
    the first one decides.
    """
    if episode.prompt is None:
      return True
    tokens = episode.tokens
    if not self._is_in_vocabulary(tokens):
      return False
    parts = []
    for turn in episode.turns[: 1 if tokens.num_lost else None]:
      message = turn.message
      calls = message.get("tool_calls", ())
      parts += [message.get("reasoning_content", ""), message["content"]]
      parts += [call["function"]["name"] for call in calls]
    parts = list(filter(None, ("".join(part.split()) for part in parts)))
    text = "".join(self._tokenizer.decode(tokens.ids).split())
    at = 0
    for part in parts:
      at = text.find(part, at)
      if at < 0:
        return False
      at += len(part)
    return bool(parts)

  def _matches(self, ids: Sequence[int], text: str | None) -> bool:
    """Returns whether the decoded tokens begin with a text.

    The text may lack white space, special tokens and everything after a stop
    string.
    """
    if text is None:
      return True
    text = "".join(text.split())
    decode = lambda ids: "".join(self._tokenizer.decode(ids).split())
    return decode(ids).startswith(text) or decode(
        self._tokenizer.without_special(ids)
    ).startswith(text)


def is_logged(seed: int, share: float, position: int) -> bool:
  """Returns whether a position is answered from the log, by chance."""
  rng = np.random.default_rng([seed, _STREAM, position])
  return rng.random() < share


def make(
    config: ml_collections.ConfigDict, task: base.Task, tokenizer: Any
) -> Log | None:
  """Returns the completions of `config.offline`, or None.

  Raises:
    ValueError: the file is wrong, or has none of the task's prompts.
  """
  if not config.offline.path:
    return None
  return Log(
      config,
      task,
      tokenizer,
      needs_logprobs=objective_table.needs_logprobs(
          config.loss, config.optimizer
      ),
  )

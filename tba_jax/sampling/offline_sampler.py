# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampler that replaces sampling by logged completions."""

import collections
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import objective_table as losses
from tba_jax.sampling import requests
from tba_jax.tasks import base
from tba_jax.tasks import offline_completions

# Separates these random numbers from others with the same seed.
_STREAM = 0x106
# Nats; stands for a logged 0, which greedy decoding reports.
_ALMOST_ZERO = -1e-30


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


class Log:
  """Logged completions by prompt.

  share: fraction of prompts that get logged completions, if the log has any; 1
    if nothing is sampled.
  prompt_ids: training prompts with completions in the log, ascending.
  left_out: number of unused completions by reason.
  num_lost: number of completions used without their logged log-probs, because
    these do not match the tokens.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      task: base.Task,
      tokenizer: Any,
      *,
      needs_logprobs: bool,
  ):
    """Reads the log.

    Args:
      config: reads `offline`, `sampling.max_completion_tokens` and `seed`.
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
    self._T = config.sampling.max_completion_tokens
    self._pad_id = tokenizer.pad_id
    self._tokenizer = tokenizer
    self._needs_logprobs = needs_logprobs
    self.left_out: collections.Counter[str] = collections.Counter()
    self.num_lost = 0
    completions = offline_completions.read(
        c.path, c.reward_field, needs_logprobs=needs_logprobs
    )
    by_prompt_id = offline_completions.by_prompt_id(
        completions, task, tokenizer
    )
    self._completions = {}
    for prompt_id, some in by_prompt_id.items():
      prompt = task.prompt(base.TRAIN, prompt_id)
      before = tokenizer.encode_prompt(prompt)
      stop_id = tokenizer.stop_id(prompt)
      made = [self._encode(one, before, stop_id) for one in some]
      if usable := [one for one in made if one is not None]:
        self._completions[prompt_id] = usable
    self.prompt_ids = sorted(self._completions)
    if not self.prompt_ids and self.left_out:
      raise ValueError(
          f"config.offline.path = {c.path!r}: no completion of the task's"
          f" training prompts is usable: {self._reasons()}"
      )
    if not self.prompt_ids:
      raise ValueError(
          f"config.offline.path = {c.path!r}: must be a file with completions"
          f" of the task's training prompts; its {len(completions)} prompts"
          f" begin with {next(iter(completions))[:80]!r}, the task's with"
          f" {base.plain_text(task.prompt(base.TRAIN, 0))[:80]!r}"
      )
    known = {id(some) for some in by_prompt_id.values()}
    others = [some for some in completions.values() if id(some) not in known]
    if others:
      self.left_out["are of other prompts"] = sum(map(len, others))

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

  def _reasons(self) -> str:
    return "; ".join(f"{n} {why}" for why, n in self.left_out.most_common())

  def has(self, position: int, prompt_id: int) -> bool:
    """Returns whether a prompt is answered from the log.

    A function of the seed and the position, as sampling is.
    """
    if prompt_id not in self._completions:
      return False
    rng = np.random.default_rng([self._seed, _STREAM, position])
    return rng.random() < self.share

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
    lengths = np.array([len(ids) for ids, _ in some], np.int32)
    for s, (ids, one) in enumerate(some):
      tokens[s, : len(ids)] = ids
      if one.logprobs is not None:
        # All zeros would mean unknown log-probs.
        known = np.asarray(one.logprobs, np.float32)
        logprobs[s, : len(ids)] = np.where(known == 0, _ALMOST_ZERO, known)
    mask = np.arange(T) < lengths[:, None]
    versions = np.array(
        [one.version if one.version <= version else -1 for _, one in some],
        np.int32,
    )
    return types.Completions(
        tokens=tokens,
        lengths=lengths,
        sampled_mask=mask,
        logprobs=logprobs,
        plain_logprobs=logprobs,
        stopped=np.array([bool(one.stopped) for _, one in some]),
        versions=versions,
        token_versions=np.where(mask, versions[:, None], -1),
        rewards=self._rewards(some),
    )

  def _rewards(
      self,
      some: Sequence[tuple[tuple[int, ...], offline_completions.Completion]],
  ) -> np.ndarray | None:
    """Returns the logged rewards, or None if a judge scores completions."""
    if not self._has_rewards:
      return None
    return np.array([one.reward for _, one in some], np.float32)

  def _encode(
      self,
      one: offline_completions.Completion,
      before: Sequence[int],
      stop_id: int,
  ) -> tuple[tuple[int, ...], offline_completions.Completion] | None:
    """Returns ids and the completed record; None leaves the completion out."""
    tokenizer, stopped, logprobs = self._tokenizer, one.stopped, one.logprobs
    ids = one.token_ids
    if ids is None and one.tokens is not None:
      ids = tokenizer.ids_of(one.tokens)
      if ids is not None and not tokenizer.decode(ids, within=True).startswith(
          one.text
      ):
        ids = None  # The strings come from another tokenizer.
    if ids is None and one.text is not None:
      stop = tokenizer.decode([stop_id])
      if stopped is None:
        stopped = one.tokens is None or one.tokens[-1] == stop
      ids = (*tokenizer.encode(one.text, before), *[stop_id] * stopped)
      if list(one.tokens or ()) != [tokenizer.decode([i]) for i in ids]:
        logprobs = None
    elif stopped is None:
      text = tokenizer.decode(ids, within=True)
      stopped = tokenizer.split_stop(ids)[1] is not None or any(
          string in text for string in tokenizer.stop_strings
      )
    why = None
    if one.has_turns:
      why = "have tokens of an environment"
    elif one.token_ids is not None and not self._matches(ids, one.text):
      why = "have token_ids that are not their text"
    elif not 1 <= len(ids) <= self._T:
      why = f"have more than {self._T} tokens (sampling.max_completion_tokens)"
    elif max(ids) >= tokenizer.vocab_size:
      why = "have tokens outside the vocabulary"
    elif self._needs_logprobs and logprobs is None:
      why = "lack log-probs of their own tokens"
    if why is not None:
      self.left_out[why] += 1
      return None
    has_logprobs = one.logprobs is not None or one.lacks_logprobs
    self.num_lost += has_logprobs and logprobs is None
    return tuple(ids), dataclasses.replace(
        one, logprobs=logprobs, stopped=stopped
    )

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
      needs_logprobs=losses.needs_logprobs(config.loss, config.optimizer),
  )

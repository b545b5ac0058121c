# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions of a log, where a sampler's would be."""

from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.tasks import base
from tba_jax.tasks import logged

# Separates these random numbers from others of the same seed.
_STREAM = 0x106
# Nats; the log-prob of a token that greedy decoding chose, told as 0.
_ALMOST_ZERO = -1e-30


class LoggedSampler:
  """Gives prompts the completions that a log has of them.

  share: share of the prompts that get them, if the log has any; 1 if nothing
    is sampled.
  prompt_ids: training prompts with completions in the log, in their order.
  num_left_out: completions that are too long, or whose log-probs are needed
    and belong to other tokens.
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
      config: reads `logged`, `sampling.max_completion_tokens` and `seed`.
      task: task whose training prompts the log has.
      tokenizer: tokenizer of completions.
      needs_logprobs: whether completions without log-probs are left out.

    Raises:
      ValueError: a line of the file is wrong, or no completion can be used.
      OSError: the file cannot be read.
    """
    c = config.logged
    self.share = c.share
    self._has_rewards = bool(c.reward_field)
    self._seed = config.seed
    self._T = config.sampling.max_completion_tokens
    self._pad_id = tokenizer.pad_id
    self.num_left_out = 0
    completions = logged.read(
        c.path, c.reward_field, needs_logprobs=needs_logprobs
    )
    self._completions = {}
    for prompt_id, some in logged.by_prompt_id(
        completions, task, tokenizer
    ).items():
      stop_id = tokenizer.stop_id(task.prompt(base.TRAIN, prompt_id))
      made = [
          self._encode(one, tokenizer, stop_id, needs_logprobs) for one in some
      ]
      if usable := [one for one in made if one is not None]:
        self._completions[prompt_id] = usable
      self.num_left_out += len(made) - len(usable)
    self.prompt_ids = sorted(self._completions)
    if not self.prompt_ids and self.num_left_out:
      needed = ", or come without log-probs of their own tokens"
      raise ValueError(
          f"config.logged.path = {c.path!r}: all {self.num_left_out}"
          " completions of the task's training prompts are longer than"
          f" config.sampling.max_completion_tokens = {self._T}, have tokens"
          f" outside the vocabulary{needed * needs_logprobs}"
      )
    if not self.prompt_ids:
      raise ValueError(
          f"config.logged.path = {c.path!r}: allowed a file with completions of"
          f" the task's training prompts; it has {len(completions)} other"
          f" prompts, the first is {next(iter(completions))[:80]!r}, where the"
          f" task's is {base.plain_text(task.prompt(base.TRAIN, 0))[:80]!r}"
      )

  def has(self, position: int, prompt_id: int) -> bool:
    """Returns whether a position gets completions of the log.

    It is a function of the seed and the position, as what is sampled is.
    """
    if prompt_id not in self._completions:
      return False
    rng = np.random.default_rng([self._seed, _STREAM, position])
    return rng.random() < self.share

  def draw(
      self, prompt_id: int, visit: int, num_completions: int, version: int
  ) -> tuple[types.Completions, np.ndarray | None]:
    """Returns S completions of a prompt, and their rewards, None if not read.

    Visits take turns through the log; fewer than S are repeated. A version that
    is not known, or is yet to come, is -1: one step older than the first
    params.

    Args:
      prompt_id: training prompt with completions in the log.
      visit: times that the prompt came before.
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
        # Zeros throughout are log-probs that nobody knows.
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
    ), self._rewards(some)

  def _rewards(
      self, some: Sequence[tuple[tuple[int, ...], logged.Completion]]
  ) -> np.ndarray | None:
    """Returns the rewards of completions, None if the log's are not read."""
    if not self._has_rewards:
      return None
    return np.array([one.reward for _, one in some], np.float32)

  def _encode(
      self,
      one: logged.Completion,
      tokenizer: Any,
      stop_id: int,
      needs_logprobs: bool,
  ) -> tuple[tuple[int, ...], logged.Completion] | None:
    """Returns ids and completion with what is known; None to leave it out."""
    ids, logprobs, stopped = one.token_ids, one.logprobs, one.stopped
    if ids is None:
      ids = tuple(tokenizer.encode(one.text))
      count = len(ids) if logprobs is None else len(logprobs)
      if stopped is None:
        stopped = logprobs is None or count == len(ids) + 1
      if stopped:
        ids = (*ids, stop_id)
      if logprobs is not None and count != len(ids):
        logprobs = None
    elif stopped is None:
      stopped = ids[-1] in tokenizer.stop_ids
    fits = 1 <= len(ids) <= self._T and max(ids) < tokenizer.vocab_size
    if not fits or (needs_logprobs and logprobs is None):
      return None
    return ids, logged.Completion(
        one.text, ids, one.reward, logprobs, one.version, stopped
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What supervised fine-tuning learns from."""

import numpy as np

from tba_jax import offline_batches
from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.tasks import base

# Tells these random numbers from others of the same seed.
_STREAM = 0x5F7


class Examples:
  """Batches of prompts and right completions, a pure function of the step."""

  def __init__(
      self,
      task: base.Task,
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      seed: int,
      batch_size: int,
      max_prompt_tokens: int,
      max_completion_tokens: int,
  ):
    """Takes the settings.

    Args:
      task: its training prompts and reference completions are drawn.
      tokenizer: of both; its stop token ends a completion.
      seed: of the run.
      batch_size: B.
      max_prompt_tokens: P.
      max_completion_tokens: T, with the stop token.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._seed = seed
    self._batch_size = batch_size
    self._max_prompt_tokens = max_prompt_tokens
    self._max_completion_tokens = max_completion_tokens

  def chunk(self, first: int, last: int, size: int) -> types.Batch:
    """Returns the batches of steps first … last - 1, on the host.

    Args:
      first: step.
      last: step after the last one, at most first + size.
      size: C, batches that the result has room for.

    Returns:
      A batch whose leaves are [C, B, …], with K = 1; what no step fills is 0,
      as are the fields that the supervised loss does not read.

    Raises:
      ValueError: a prompt or completion is longer than `config.sampling` says.
    """
    rows = []
    num_prompts = self._task.num_prompts(base.TRAIN)
    for step in range(first, last):
      rng = np.random.default_rng([self._seed, _STREAM, step])
      for index in rng.integers(num_prompts, size=self._batch_size):
        prompt, completion = self._tokens(int(index), rng)
        rows.append((prompt, [completion]))
    return offline_batches.pad(
        rows,
        (size, self._batch_size),
        num_completions=1,
        max_prompt_tokens=self._max_prompt_tokens,
        max_completion_tokens=self._max_completion_tokens,
    )

  def _tokens(
      self, index: int, rng: np.random.Generator
  ) -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt, and of a completion with its stop token."""
    task, tokenizer = self._task, self._tokenizer
    prompt = tokenizer.encode_prompt(task.prompt(base.TRAIN, index))
    completion = tokenizer.encode(
        task.reference_completion(base.TRAIN, index, rng)
    )
    completion.append(self._tokenizer.eos_id)
    for name, tokens, limit in (
        ("max_prompt_tokens", prompt, self._max_prompt_tokens),
        ("max_completion_tokens", completion, self._max_completion_tokens),
    ):
      if len(tokens) > limit:
        raise ValueError(
            f"config.sampling.{name} = {limit}: allowed {len(tokens)} or more,"
            f" which training prompt {index} of the task needs"
        )
    return prompt, completion

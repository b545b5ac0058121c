# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is asked of the sampler and what it gives back: host arrays only."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from tba_jax import types

UINT32 = 2**32


@dataclasses.dataclass(frozen=True)
class Request:
  """Completions to sample for one prompt.

  prompt_tokens: [P] int, without padding.
  prompt_id: index of the prompt in its split, below 2^32.
  visit: how often the prompt was visited before, below 2^32; another visit has
    other random numbers.
  num_completions: S, at least 1.
  first_sample: sample index of the first completion; the others follow.
  seed: of its random numbers, below 2^32; None takes the sampler's.
  """

  prompt_tokens: np.ndarray
  prompt_id: int
  visit: int
  num_completions: int
  first_sample: int = 0
  seed: int | None = None


def check(request: Request, *, max_prompt_tokens: int, vocab_size: int) -> None:
  """Raises ValueError, naming the prompt id, where a request is not valid."""
  tokens_P = np.asarray(request.prompt_tokens)
  last_sample = request.first_sample + request.num_completions - 1
  numbers = [request.prompt_id, request.visit, request.first_sample]
  problem = None
  if tokens_P.ndim != 1 or not 1 <= len(tokens_P) <= max_prompt_tokens:
    problem = (
        f"prompt tokens of shape {tokens_P.shape}: allowed 1 to"
        f" sampling.max_prompt_tokens={max_prompt_tokens} tokens"
    )
  elif tokens_P.dtype.kind not in "iu":
    problem = f"prompt tokens of dtype {tokens_P.dtype}: allowed integers"
  elif tokens_P.min() < 0 or tokens_P.max() >= vocab_size:
    problem = (
        f"prompt tokens from {tokens_P.min()} to {tokens_P.max()}: allowed 0"
        f" to {vocab_size - 1}"
    )
  elif request.num_completions < 1:
    problem = f"num_completions={request.num_completions}: allowed 1 or more"
  elif min(numbers) < 0 or max(*numbers, last_sample) >= UINT32:
    problem = (
        f"visit {request.visit}, samples {request.first_sample} to"
        f" {last_sample}: allowed 0 to 2^32 - 1, as for the prompt id"
    )
  elif request.seed is not None and not 0 <= request.seed < UINT32:
    problem = f"seed={request.seed}: allowed 0 to 2^32 - 1"
  if problem is not None:
    raise ValueError(f"prompt {request.prompt_id}: {problem}")


class Results:
  """The completions of all requests, filled in as their rows end."""

  def __init__(self, prompts: Sequence[Request], *, max_completion_tokens: int):
    shapes = [(r.num_completions, max_completion_tokens) for r in prompts]
    self._tokens = [np.zeros(shape, np.int32) for shape in shapes]
    self._logprobs = [np.zeros(shape, np.float32) for shape in shapes]
    self._lengths = [np.zeros(shape[0], np.int32) for shape in shapes]
    self._stopped = [np.zeros(shape[0], bool) for shape in shapes]

  def add(
      self,
      collected: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
      owned: Mapping[int, tuple[int, int]],
  ) -> None:
    """Enters rows that ended.

    Args:
      collected: tokens [R, T], log-probs [R, T], lengths [R], stopped [R].
      owned: row -> (index of its request, number of the completion in it).
    """
    tokens_RxT, logprobs_RxT, lengths_R, stopped_R = collected
    for row, (index, sample) in owned.items():
      self._tokens[index][sample] = tokens_RxT[row]
      self._logprobs[index][sample] = logprobs_RxT[row]
      self._lengths[index][sample] = lengths_R[row]
      self._stopped[index][sample] = stopped_R[row]

  def completions(self, version: int) -> list[types.Completions]:
    """Returns the completions by request, all of one version."""
    return [
        types.Completions(
            tokens=tokens_SxT,
            lengths=lengths_S,
            logprobs=logprobs_SxT,
            stopped=stopped_S,
            versions=np.full(len(lengths_S), version, np.int32),
        )
        for tokens_SxT, lengths_S, logprobs_SxT, stopped_S in zip(
            self._tokens, self._lengths, self._logprobs, self._stopped
        )
    ]

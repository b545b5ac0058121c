# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is asked of the sampler and what it gives back: host arrays only."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
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
  max_tokens: at which a completion ends, unstopped; None takes the sampler's.
  """

  prompt_tokens: np.ndarray
  prompt_id: int
  visit: int
  num_completions: int
  first_sample: int = 0
  seed: int | None = None
  max_tokens: int | None = None


def check_request(
    request: Request,
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    vocab_size: int,
) -> None:
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
  elif request.max_tokens is not None and (
      not 1 <= request.max_tokens <= max_completion_tokens
  ):
    problem = (
        f"max_tokens={request.max_tokens}: allowed 1 to"
        f" sampling.max_completion_tokens={max_completion_tokens}"
    )
  if problem is not None:
    raise ValueError(f"prompt {request.prompt_id}: {problem}")


def check_sizes(
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    num_rows: int,
    chunk_steps: int,
    prompt_buckets: int,
    max_positions: int,
) -> None:
  """Raises ValueError naming the first size of a sampler that is wrong."""
  for name, value in (
      ("max_prompt_tokens", max_prompt_tokens),
      ("max_completion_tokens", max_completion_tokens),
      ("num_rows", num_rows),
      ("chunk_steps", chunk_steps),
      ("prompt_buckets", prompt_buckets),
  ):
    if value < 1:
      raise ValueError(f"sampling.{name}={value}: allowed 1 or above")
  if max_prompt_tokens + max_completion_tokens > max_positions:
    raise ValueError(
        f"sampling.max_prompt_tokens={max_prompt_tokens} and"
        f" sampling.max_completion_tokens={max_completion_tokens}: allowed at"
        f" most model.max_positions={max_positions} together"
    )


class Assignment:
  """Which completion each of R rows decodes, and which ones wait.

  A completion is (index of its request, number of the completion in it).

  queue: those that wait, in the order of `order`.
  owners: row -> the completion that it decodes.
  """

  def __init__(
      self,
      prompts: Sequence[Request],
      *,
      order: Sequence[int],
      num_rows: int,
      max_completion_tokens: int,
      seed: int,
  ):
    """Makes it, with all rows free.

    Args:
      prompts: all requests.
      order: their indices, as their completions are to be begun.
      num_rows: R.
      max_completion_tokens: of a request that names no number of its own.
      seed: of a request that has none.
    """
    self.queue = collections.deque(
        (index, sample)
        for index in order
        for sample in range(prompts[index].num_completions)
    )
    self.owners: dict[int, tuple[int, int]] = {}
    self._prompts = prompts
    self._seed = seed
    self._max_completion_tokens = max_completion_tokens
    # Tokens that each row has sampled, unless it ended before.
    self._lengths_R = np.ones(num_rows, np.int32)

  @property
  def num_rows(self) -> int:
    """Rows, in use and free."""
    return len(self._lengths_R)

  @property
  def can_place(self) -> bool:
    """Whether completions wait and rows are free."""
    return bool(self.queue) and len(self.owners) < self.num_rows

  @property
  def longest(self) -> int:
    """The most tokens that a row in use may have sampled."""
    return int(max(self._lengths_R[row] for row in self.owners))

  def place(
      self, slots: Mapping[int, int]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives free rows to the head of the queue, as far as it is prefilled.

    Args:
      slots: index of a request -> its place in the prefill.

    Returns:
      slot_R: [R] int32, place in the prefill; -1 keeps the row as it is.
      ids_Rx4: [R, 4] uint32, seed, prompt id, visit and sample index.
      limit_R: [R] int32, tokens at which the row ends, unstopped.
    """
    num_rows = self.num_rows
    slot_R = np.full(num_rows, -1, np.int32)
    ids_Rx4 = np.zeros((num_rows, 4), np.uint32)
    limit_R = np.full(num_rows, self._max_completion_tokens, np.int32)
    for row in range(num_rows):
      if not self.queue or self.queue[0][0] not in slots:
        break
      if row in self.owners:
        continue
      index, sample = self.owners[row] = self.queue.popleft()
      request = self._prompts[index]
      slot_R[row] = slots[index]
      sample_index = request.first_sample + sample
      seed = self._seed if request.seed is None else request.seed
      ids_Rx4[row] = seed, request.prompt_id, request.visit, sample_index
      if request.max_tokens is not None:
        limit_R[row] = request.max_tokens
      self._lengths_R[row] = 1
    return slot_R, ids_Rx4, limit_R

  def keep(self, num_rows: int) -> np.ndarray:
    """Drops free rows, so that `num_rows` are left, and numbers those anew.

    Args:
      num_rows: at least as many as are in use.

    Returns:
      [num_rows] int32, what number each had.
    """
    used = [*self.owners]
    free = (r for r in range(self.num_rows) if r not in self.owners)
    rows = np.array([*used, *free][:num_rows], np.int32)
    self.owners = {new: self.owners[old] for new, old in enumerate(used)}
    self._lengths_R = self._lengths_R[rows]
    return rows

  def advance(self, num_steps: int) -> None:
    """Notes that every row samples up to `num_steps` tokens."""
    self._lengths_R += num_steps

  def release(self, done_R: np.ndarray) -> dict[int, tuple[int, int]]:
    """Frees the rows that are done; returns who owned them."""
    rows = [row for row in np.flatnonzero(done_R) if row in self.owners]
    return {row: self.owners.pop(row) for row in rows}


class Results:
  """The completions of all requests, filled in as their rows end."""

  def __init__(
      self,
      prompts: Sequence[Request],
      *,
      max_completion_tokens: int,
      version: int,
  ):
    """Takes what was asked, and the version of the first params."""
    shapes = [(r.num_completions, max_completion_tokens) for r in prompts]
    zeros = lambda dtype: [np.zeros(shape, dtype) for shape in shapes]
    each = lambda dtype: [np.zeros(shape[0], dtype) for shape in shapes]
    self._tokens = zeros(np.int32)
    self._logprobs = zeros(np.float32)
    self._plain: list[np.ndarray] | None = None
    self._lengths = each(np.int32)
    self._stopped = each(bool)
    self._cut = each(bool)
    self._versions = [np.full(shape, version, np.int32) for shape in shapes]

  def swap(self, version: int, sampled: Mapping[tuple[int, int], int]) -> None:
    """Notes that tokens from here on are drawn with other params.

    Args:
      version: of the params.
      sampled: tokens so far, of all completions that are begun and not `add`ed.
    """
    for index, versions_SxT in enumerate(self._versions):
      for sample in np.flatnonzero(self._lengths[index] == 0):
        versions_SxT[sample, sampled.get((index, sample), 0) :] = version

  def note_cuts(self, owners: Iterable[tuple[int, int]]) -> None:
    """Notes whose completions end with a stop string."""
    for index, sample in owners:
      self._cut[index][sample] = True

  def add(
      self,
      collected: tuple[
          np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, np.ndarray
      ],
      owned: Mapping[int, tuple[int, int]],
  ) -> None:
    """Enters rows that ended.

    Args:
      collected: tokens and log-probs [R, T], plain log-probs [R, T] or None
        where they are the same, lengths [R], stopped [R].
      owned: row -> (index of its request, number of the completion in it).
    """
    tokens_RxT, logprobs_RxT, plain_RxT, lengths_R, stopped_R = collected
    if plain_RxT is not None and self._plain is None:
      self._plain = [np.zeros_like(array) for array in self._logprobs]
    for row, (index, sample) in owned.items():
      self._tokens[index][sample] = tokens_RxT[row]
      self._logprobs[index][sample] = logprobs_RxT[row]
      if plain_RxT is not None:
        self._plain[index][sample] = plain_RxT[row]
      self._lengths[index][sample] = lengths_R[row]
      self._stopped[index][sample] = stopped_R[row]

  def completions(self) -> list[types.Completions]:
    """Returns the completions by request."""
    plain = self._logprobs if self._plain is None else self._plain
    return [
        self._completion(index, plain[index])
        for index in range(len(self._tokens))
    ]

  def _completion(self, index: int, plain_SxT: np.ndarray) -> types.Completions:
    tokens_SxT, lengths_S = self._tokens[index], self._lengths[index]
    stopped_S, cut_S = self._stopped[index], self._cut[index]
    sampled_SxT = np.arange(tokens_SxT.shape[1]) < lengths_S[:, None]
    return types.Completions(
        tokens=tokens_SxT,
        lengths=lengths_S,
        logprobs=self._logprobs[index],
        plain_logprobs=plain_SxT,
        stopped=stopped_S | cut_S,
        # They only grow, so the first token's are the oldest.
        versions=self._versions[index][:, 0].copy(),
        token_versions=np.where(sampled_SxT, self._versions[index], -1),
    )


# Where a completion is cut by a stop string: host arrays only.
#
# A completion ends with the first token at which its text holds a stop string,
# wherever in its tokens the string begins and ends. That is a rule on tokens
# alone, so where it is looked for, after each token or after each chunk,
# changes
# nothing, and the log-probs of the tokens kept are exact.


# What a tokenizer writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Index of a request, number of the completion in it.
Owner = tuple[int, int]


class StopStringWatch:
  """Looks for stop strings in completions as they grow, each token once."""

  def __init__(self, stop_strings: Sequence[str], decode: Callable[..., str]):
    """Takes the strings, none empty, and ids -> text."""
    self._strings = tuple(stop_strings)
    self._decode = decode
    # A token has at least one byte, so what ends at a token began at most so
    # many before it; the first of a window may be written otherwise (without
    # its leading space), so it is one more.
    self._window = 1 + max(len(text.encode()) for text in self._strings)
    self._seen: dict[Owner, int] = {}

  def cut(self, owner: Owner, ids: np.ndarray) -> int | None:
    """Returns the number of tokens to keep, None to keep all so far.

    Args:
      owner: of the completion; later calls have the same ids and more.
      ids: [n] int, the completion's tokens so far, without its stop token.
    """
    seen = self._seen.get(owner, 0)
    self._seen[owner] = len(ids)
    if len(ids) <= seen:
      return None
    text = self._text(ids[max(0, seen - self._window) :])
    if _REPLACEMENT not in text and not self._holds(text):
      return None
    # Bytes that are no character yet may change what stands before them, so
    # then every token is looked at.
    for length in range(seen + 1, len(ids) + 1):
      if self._holds(self._text(ids[:length])):
        return length
    return None

  def cuts(
      self,
      rows: Iterable[tuple[int, Owner]],
      tokens_RxT: np.ndarray,
      lengths_R: np.ndarray,
      stopped_R: np.ndarray,
  ) -> np.ndarray:
    """Returns [R] int32, tokens to keep of each row; -1 keeps it as it is.

    Args:
      rows: those in use, with the owners of their completions.
      tokens_RxT: [R, T] int32.
      lengths_R: [R] int32.
      stopped_R: [R] bool, the last token is a stop token.
    """
    cut_R = np.full(len(lengths_R), -1, np.int32)
    for row, owner in rows:
      length = lengths_R[row] - int(stopped_R[row])
      cut = self.cut(owner, tokens_RxT[row, :length])
      if cut is not None:
        cut_R[row] = cut
    return cut_R

  def _text(self, ids: np.ndarray) -> str:
    return self._decode(ids.tolist())

  def _holds(self, text: str) -> bool:
    return any(string in text for string in self._strings)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler's interface, settings, requests and host-side bookkeeping."""

import collections
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
import dataclasses
from typing import Any, Protocol

import numpy as np

from tba_jax import types

UINT32 = 2**32

# A prefill batch has one prompt per this many rows: with 16 completions each, a
# prefill fills all rows.
ROWS_PER_PREFILL = 16
# Environment tokens that one call of the model feeds. Each length is another
# program and at most half a completion. Fewer than FEWEST_FED tokens are left
# to decode steps.
FEED_LENGTHS = (32, 256)
FEWEST_FED = 16


@dataclasses.dataclass(frozen=True)
class Explore:
  """Exploration: changes to the sampling distribution.

  Source: Lee et al. 2025 (arXiv:2405.18540), with one temperature per
  completion instead of per batch.

  fraction: share of completions with a random temperature; 0 is off.
  min_temperature, max_temperature: uniform range of these temperatures.
  min_tokens: tokens before a stop token may be drawn.
  max_tokens: tokens after which only stop tokens are drawn; 0 is off.
  """

  fraction: float = 0.0
  min_temperature: float = 1.0
  max_temperature: float = 1.0
  min_tokens: int = 0
  max_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
  """Compile-time settings of a sampler.

  temperature: divisor of the logits; 0 is greedy and excludes `explore`.
  plain_temperature: temperature of `Completions.plain_logprobs`; None is the
    sampling temperature, or 1 for greedy decoding.
  top_k, top_p, min_p: arguments of `logits.process`.
  num_kept: C, most tokens that these keep; completions record the ids of the
    kept tokens. 0 has no limit and records none.
  max_prompt_tokens: P.
  max_completion_tokens: T; longer completions are truncated.
  num_rows: R, completions decoded at the same time.
  chunk_steps: decode steps between refills while requests wait.
  most_rows_per_prompt: most adjacent rows that share a prompt's cache on
    accelerators (`sharing.py`).
  pad_id: padding token after a completion's end.
  seed: default for requests without a seed, in [0, 2^32).
  stop_ids: tokens that end a completion.
  stop_strings: texts; the token that completes one ends the completion.
    Checked every `chunk_steps` tokens.
  text_fn: (ids) -> text; required with stop strings.
  recompute_cache: whether newer params recompute the KV cache of completions
    in flight.
  has_routes: whether completions record the experts of their tokens.
  has_turns: whether completions may have several turns, see `Turns`.
  num_waiting: completions that may give up their row, with their cache, while
    their environment runs; 0, or at least 2 per device that splits the rows.
  prompt_buckets: number of padded prompt lengths: P, P / 2, P / 4, …
  explore: changes to the sampling distribution, see `Explore`.
  weights: dtype of matrices, "int8", or "" for the model's compute dtype.
  """

  temperature: float
  top_k: int
  top_p: float
  max_prompt_tokens: int
  max_completion_tokens: int
  num_rows: int
  chunk_steps: int
  pad_id: int
  seed: int
  min_p: float = 0.0
  num_kept: int = 0
  stop_ids: Collection[int] = ()
  stop_strings: Sequence[str] = ()
  text_fn: Callable[[Sequence[int]], str] | None = None
  recompute_cache: bool = False
  has_routes: bool = False
  has_turns: bool = False
  num_waiting: int = 0
  prompt_buckets: int = 1
  most_rows_per_prompt: int = 1
  explore: Explore = Explore()
  weights: str = ""
  plain_temperature: float | None = None

  @property
  def samples_plainly(self) -> bool:
    """Whether plain log-probs equal the sampling log-probs."""
    return self.temperature > 0 and (
        (self.top_k, self.top_p, self.min_p) == (0, 1, 0)
        and self.explore == Explore()
        and self.plain_temperature in (None, self.temperature)
    )

  @property
  def prefill_size(self) -> int:
    """B, prompts per prefill."""
    return max(1, self.num_rows // ROWS_PER_PREFILL)

  @property
  def buckets(self) -> tuple[int, ...]:
    """Padded prompt lengths, ascending."""
    counts = range(self.prompt_buckets)
    return tuple(sorted({-(-self.max_prompt_tokens // 2**i) for i in counts}))

  @property
  def feed_lengths(self) -> tuple[int, ...]:
    """Lengths of `slots.feed` calls, ascending; () = off."""
    T = self.max_completion_tokens if self.has_turns else 0
    return tuple(length for length in FEED_LENGTHS if 2 * length <= T)

  def bucket_of(self, request: "Request") -> int:
    """Returns the shortest bucket that fits a request's prompt."""
    return min(b for b in self.buckets if b >= len(request.prompt_tokens))


@dataclasses.dataclass(frozen=True)
class Request:
  """Completions to sample for one prompt.

  prompt_tokens: [P] int, unpadded prompt.
  prompt_id: index of the prompt in its split, below 2^32.
  visit: number of earlier visits to the prompt, below 2^32; every visit has
    fresh random numbers.
  num_completions: S, at least 1.
  first_sample: sample index of the first completion; the others follow.
  position: place in the prompt order.
  seed: random seed below 2^32; None takes the sampler's.
  max_tokens: most tokens of each completion; None takes the sampler's T.
  """

  prompt_tokens: np.ndarray
  prompt_id: int
  visit: int
  num_completions: int
  first_sample: int = 0
  position: int = 0
  seed: int | None = None
  max_tokens: int | None = None

  def check(self, settings: SamplingSettings, vocab_size: int) -> None:
    """Raises ValueError with the prompt id if a field is out of range."""
    tokens_P, P = np.asarray(self.prompt_tokens), settings.max_prompt_tokens
    T = settings.max_completion_tokens
    numbers = {
        "prompt_id": self.prompt_id,
        "visit": self.visit,
        "first_sample": self.first_sample,
        "last sample": self.first_sample + self.num_completions - 1,
        "seed": self.seed or 0,
    }
    problem = None
    if tokens_P.ndim != 1 or not 1 <= len(tokens_P) <= P:
      problem = (
          f"prompt_tokens of shape {tokens_P.shape}: must be 1 to"
          f" sampling.max_prompt_tokens={P} tokens"
      )
    elif tokens_P.dtype.kind not in "iu" or not (
        0 <= tokens_P.min() <= tokens_P.max() < vocab_size
    ):
      problem = f"prompt_tokens: must be integers from 0 to {vocab_size - 1}"
    elif self.num_completions < 1:
      problem = f"num_completions={self.num_completions}: must be 1 or more"
    elif self.max_tokens is not None and not 1 <= self.max_tokens <= T:
      problem = (
          f"max_tokens={self.max_tokens}: must be 1 to"
          f" sampling.max_completion_tokens={T}"
      )
    for name, number in numbers.items():
      if problem is None and not 0 <= number < UINT32:
        problem = f"{name}={number}: must be 0 to 2^32 - 1"
    if problem is not None:
      raise ValueError(f"prompt {self.prompt_id}: {problem}")


# Index of a request, and of the completion within it.
Owner = tuple[int, int]


class Turns(Protocol):
  """Environments that answer the turns of completions.

  A turn ends at a stop token or stop string. The ids of the answer follow, and
  the policy samples the next turn.
  """

  def end(self, owner: Owner, tokens: np.ndarray) -> None:
    """Registers a completion whose turn has ended; does not wait.

    Args:
      tokens: [n] int32, its tokens so far, answers included.
    """

  def cut(self, owner: Owner, tokens: np.ndarray | None) -> None:
    """Notes that a completion was cut off at its maximum length.

    Args:
      tokens: [n] int32, its tokens; None if an answer had no room.
    """

  def answers(self, wait_s: float) -> list[tuple[Owner, np.ndarray | None]]:
    """Returns the answers since the last call; waits up to `wait_s` for one.

    Returns:
      The completion and the [m] int ids of its answer; None ends it.
    """


# Returns newer (version, params), or None.
NewerFn = Callable[[], tuple[int, types.PyTree] | None]
# Returns further requests, or None without any at present.
MoreFn = Callable[[], Sequence[Request] | None]


class Sampler(Protocol):
  """Samples completions with the params passed to each call.

  Not thread-safe. `samplers.py` lists what each sampler supports.

  platform: JAX backend, or the name of the program that computes log-probs.
  """

  settings: SamplingSettings
  platform: str

  def put(self, params: types.PyTree, shardings: types.PyTree = None) -> Any:
    """Returns params in the form that `sample` takes; does not modify them.

    Args:
      params: model params, or the result of an earlier `put`.
      shardings: placement of the model's params; None leaves them on their
        devices, and puts host arrays on the first.
    """

  def warm_up(self, params: Any) -> None:
    """Compiles everything that `sample` needs, or fails early."""

  def sample(
      self,
      params: Any,
      prompts: Sequence[Request],
      *,
      version: int,
      newer: NewerFn | None = None,
      turns: Turns | None = None,
  ) -> list[types.Completions]:
    """Returns the completions of each prompt, in the order of `prompts`.

    Args:
      params: result of `put`.
      prompts: any number of requests with any number of completions.
      version: policy version of `params`, recorded with every token.
      newer: polled function; sampling continues with the params it returns,
        which come from `put`. A token's log-prob is under the params that
        sampled it, given the KV cache at that time.
      turns: environments that answer. None ends each completion with its first
        turn.

    Raises:
      ValueError: a request is empty, overlong or out of range; the message
        names its prompt id.
    """

  def stream(
      self,
      params: Any,
      more: MoreFn,
      *,
      version: int,
      newer: NewerFn | None = None,
      turns: Turns | None = None,
  ) -> Iterator[list[tuple[int, types.Completions]]]:
    """Samples a stream of requests and yields each as soon as it is finished.

    Args:
      params, version, newer: arguments of `sample`.
      more: polled function that returns further requests whenever new
        completions could start.
      turns: environments that answer. Requests are numbered from 0 in the order
        in which `more` returned them.

    Yields:
      Numbers and completions of finished requests. Ends once all requests are
      finished and `more` returns None; a sampler may also end before asking.

    Raises:
      ValueError: a request is wrong; the message names its prompt id.
    """

  def token_logprobs(self, params: Any, tokens_BxL: np.ndarray) -> Any:
    """Returns [B, L - 1] float32, log π of each token after the first, nats.

    Temperature is 1.

    Args:
      params: result of `put`.
      tokens_BxL: [B, L] int32 in [0, V), L up to P + T.
    """


def in_one_batch(
    sample: Callable[..., list[types.Completions]],
    params: Any,
    more: MoreFn,
    **options: Any,
) -> Iterator[list[tuple[int, types.Completions]]]:
  """Implements `Sampler.stream` by one call of `sample` for the first batch."""
  if (batch := more()) is not None:
    holder = [params]
    # No frame keeps a reference, so newer params free these.
    del params
    yield list(enumerate(sample(holder.pop(), batch, **options)))


class Slots:
  """Assigns completions to the R rows of a decode state.

  Adjacent rows that share a prompt serve one request at a time: the next one
  waits until all of them are free.

  While its environment runs, a completion may be parked in one of W spare rows,
  so that its row can decode another. Once answered it returns to a free row,
  ahead of completions that have not started. Spare rows are split over devices
  as rows are, and completions stay on their device.

  queue: completions that wait for a row.
  owners: row -> completion in it.
  aside: spare row -> parked completion.
  waiting: completion whose turn has ended -> its length in tokens.
  """

  def __init__(
      self,
      requests: Mapping[int, Request],
      settings: SamplingSettings,
      rows_per_prompt: int = 1,
      num_shards: int = 1,
  ):
    """Initializes free slots and an empty queue.

    Args:
      requests: the sampler's requests by index; the caller adds to them.
      settings: the sampler's settings.
      num_shards: devices that split the rows.
    """
    self.queue: collections.deque[Owner] = collections.deque()
    self.owners: dict[int, Owner] = {}
    self.aside: dict[int, Owner] = {}
    self.waiting: dict[Owner, int] = {}
    # Answered completions, oldest first -> their length and the answer's ids.
    self._ready: dict[Owner, tuple[int, np.ndarray]] = {}
    self._num_shards = num_shards
    self._requests = requests
    self._settings = settings
    self._rows_per_prompt = rows_per_prompt
    # Tokens sampled in each row, an upper bound for finished rows.
    self._lengths_R = np.ones(settings.num_rows, np.int32)

  @property
  def num_rows(self) -> int:
    """Number of rows, used or free."""
    return len(self._lengths_R)

  @property
  def can_refill(self) -> bool:
    """Whether completions wait and all rows of some prompt are free."""
    used = {row // self._rows_per_prompt for row in self.owners}
    free = self.num_rows // self._rows_per_prompt - len(used)
    return bool(self.queue) and free > 0

  @property
  def longest(self) -> int:
    """Upper bound of the tokens in a used row."""
    return int(
        max(
            self.waiting.get(owner, self._lengths_R[row])
            for row, owner in self.owners.items()
        )
    )

  @property
  def num_left(self) -> int:
    """Number of started, unfinished completions."""
    return len(self.owners) + len(self.aside)

  @property
  def num_decoding(self) -> int:
    """Number of used rows that do not wait for an environment."""
    return sum(owner not in self.waiting for owner in self.owners.values())

  @property
  def lengths_aside(self) -> dict[Owner, int]:
    """Lengths of the parked completions, in tokens."""
    return {
        owner: self._ready[owner][0]
        if owner in self._ready
        else self.waiting[owner]
        for owner in self.aside.values()
    }

  def enqueue(self, indices: Iterable[int]) -> None:
    """Queues all completions of the given requests, in order."""
    self.queue.extend(
        (index, sample)
        for index in indices
        for sample in range(self._requests[index].num_completions)
    )

  def limit(self, owner: Owner) -> int:
    """Returns the most tokens of a completion."""
    limit = self._requests[owner[0]].max_tokens
    return self._settings.max_completion_tokens if limit is None else limit

  def resume(self, owner: Owner, ids: np.ndarray | None) -> None:
    """Marks a waiting completion as answered; `ids` None ends it.

    Args:
      ids: [m] int, its environment's answer, which fits into T.
    """
    length = self.waiting.pop(owner)
    if ids is not None:
      self._ready[owner] = length, ids
      return
    for places in (self.owners, self.aside):
      for place in [p for p, other in places.items() if other == owner]:
        del places[place]

  def go_on(self) -> dict[int, tuple[int, np.ndarray]]:
    """Returns answered rows -> their length and the ids to append."""
    out = {}
    for row, owner in self.owners.items():
      if owner in self._ready:
        out[row] = self._ready.pop(owner)
        self._lengths_R[row] = out[row][0]
    return out

  def exchange(self) -> tuple[np.ndarray, np.ndarray] | None:
    """Parks waiting completions to give their rows to others.

    Answered completions return from the spare rows, then queued ones start. On
    each device one spare row is reserved for exchanges with answered
    completions; without it waiting completions could fill all rows while
    answered ones fill all spare rows.

    Returns:
      source_W: [W] int32, row that moves to each spare row, counted on its
        device; -1 for none.
      source_R: [R] int32, spare row that moves to each row afterwards.
      None if nothing moves.
    """
    source_W = np.full(self._settings.num_waiting, -1, np.int32)
    source_R = np.full(self.num_rows, -1, np.int32)
    num_rows = self.num_rows // self._num_shards
    num_places = len(source_W) // self._num_shards
    shards = self._shards()
    num_queued = len(self.queue)
    for free_rows, _, ready, _ in shards:
      num_queued -= max(0, len(free_rows) - len(ready))
    for free_rows, waiting, ready, free_places in shards:
      num_ready = max(0, len(ready) - len(free_rows))
      num_ready = min(num_ready, len(waiting), len(free_places))
      most = min(len(waiting), len(free_places) - 1)
      num_fresh = max(0, min(num_queued, most - num_ready))
      num_queued -= num_fresh
      leaving = waiting[: num_ready + num_fresh]
      for row, place in zip(leaving, free_places):
        source_W[place] = row % num_rows
        self.aside[place] = self.owners.pop(row)
      for row, place in zip(sorted(free_rows + leaving), ready):
        source_R[row] = place % num_places
        self.owners[row] = self.aside.pop(place)
    if (source_W < 0).all() and (source_R < 0).all():
      return None
    return source_W, source_R

  def _shards(self) -> list[tuple[list[int], ...]]:
    """Returns by device: free and waiting rows, ready and free spare rows."""
    num_rows = self.num_rows // self._num_shards
    num_places = self._settings.num_waiting // self._num_shards
    place_of = {owner: place for place, owner in self.aside.items()}
    ready = [place_of[owner] for owner in self._ready if owner in place_of]
    out = []
    for shard in range(self._num_shards if num_places else 0):
      rows = range(shard * num_rows, (shard + 1) * num_rows)
      places = range(shard * num_places, (shard + 1) * num_places)
      out.append(
          (
              [row for row in rows if row not in self.owners],
              [row for row in rows if self.owners.get(row) in self.waiting],
              [place for place in ready if place in places],
              [place for place in places if place not in self.aside],
          )
      )
    return out

  def refill(
      self, prefilled: Mapping[int, int]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assigns free rows to prefilled completions at the head of the queue.

    Args:
      prefilled: request index -> its row in the prefilled batch.

    Returns:
      source_R: [R] int32, row in the prefilled batch; -1 is not refilled. If
        any of the rows that share a prompt is refilled, so is the first.
      ids_Rx4: [R, 4] uint32, seed, prompt id, visit and sample index.
      limit_R: [R] int32, most tokens of the completion.
    """
    source_R = np.full(self.num_rows, -1, np.int32)
    ids_Rx4 = np.zeros((self.num_rows, 4), np.uint32)
    limit_R = np.full(
        self.num_rows, self._settings.max_completion_tokens, np.int32
    )
    serves = -1
    for row in range(self.num_rows):
      if not self.queue or self.queue[0][0] not in prefilled:
        break
      if row % self._rows_per_prompt == 0:
        rows = range(row, row + self._rows_per_prompt)
        serves = -1 if self.owners.keys() & rows else self.queue[0][0]
      if self.queue[0][0] != serves:
        continue
      index, sample = self.owners[row] = self.queue.popleft()
      request = self._requests[index]
      seed = self._settings.seed if request.seed is None else request.seed
      source_R[row] = prefilled[index]
      ids_Rx4[row] = (
          seed,
          request.prompt_id,
          request.visit,
          request.first_sample + sample,
      )
      if request.max_tokens is not None:
        limit_R[row] = request.max_tokens
      self._lengths_R[row] = 1
    return source_R, ids_Rx4, limit_R

  def keep(self, num_rows: int) -> np.ndarray:
    """Drops free rows and renumbers the others.

    Returns:
      [num_rows] int32, the old index of each row.
    """
    free = (r for r in range(self.num_rows) if r not in self.owners)
    rows = np.array([*self.owners, *free][:num_rows], np.int32)
    self.owners = dict(enumerate(self.owners.values()))
    self._lengths_R = self._lengths_R[rows]
    return rows

  def grow(self) -> None:
    """Doubles the number of rows."""
    self._lengths_R = np.pad(
        self._lengths_R, (0, self.num_rows), constant_values=1
    )

  def advance(self, num_steps: int) -> None:
    """Adds a chunk's steps to the length of every row."""
    self._lengths_R += num_steps

  def note_fed(self, counts: Mapping[int, int]) -> None:
    """Adds the fed tokens to the lengths of rows."""
    for row, count in counts.items():
      self._lengths_R[row] += count

  def release(self, rows: Iterable[int]) -> None:
    """Frees the rows whose completion does not wait for an environment."""
    for row in rows:
      if self.owners[row] not in self.waiting:
        del self.owners[row]


class Results:
  """Completions of requests, filled in as they end."""

  def __init__(
      self, requests: Mapping[int, Request], max_completion_tokens: int
  ):
    """Initializes empty results.

    Args:
      requests: the sampler's requests by index; the caller adds to them.
      max_completion_tokens: T.
    """
    self._requests = requests
    self._max_completion_tokens = max_completion_tokens
    self._tokens: dict[int, np.ndarray] = {}
    self._logprobs: dict[int, np.ndarray] = {}
    self._plain: dict[int, np.ndarray] = {}
    self._lengths: dict[int, np.ndarray] = {}
    self._stopped: dict[int, np.ndarray] = {}
    self._given: dict[int, np.ndarray] = {}
    self._versions: dict[int, np.ndarray] = {}
    self._routes: dict[int, np.ndarray] = {}
    self._prompt_routes: dict[int, np.ndarray] = {}
    self._kept: dict[int, np.ndarray] = {}
    self._at_strings: set[Owner] = set()

  def begin(self, index: int, version: int) -> None:
    """Allocates a request's arrays; `version` samples its first tokens."""
    S = self._requests[index].num_completions
    shape = S, self._max_completion_tokens
    self._tokens[index] = np.zeros(shape, np.int32)
    self._logprobs[index] = np.zeros(shape, np.float32)
    self._plain[index] = np.zeros(shape, np.float32)
    self._lengths[index] = np.zeros(S, np.int32)
    self._stopped[index] = np.zeros(S, bool)
    self._given[index] = np.zeros(shape, bool)
    self._versions[index] = np.full(shape, version, np.int32)

  def set_version(self, version: int, sampled: Mapping[Owner, int]) -> None:
    """Sets the version of all future tokens.

    Args:
      version: policy version that samples them.
      sampled: unfinished completion -> its length in tokens.
    """
    for (index, sample), length in sampled.items():
      self._versions[index][sample, length:] = version

  def note_stop_strings(self, owners: Iterable[Owner]) -> None:
    """Marks completions that stopped at a stop string; call before `add`."""
    self._at_strings.update(owners)

  def note_given(self, owner: Owner, start: int, stop: int) -> None:
    """Marks tokens `start` to `stop` as written by an environment."""
    index, sample = owner
    self._given[index][sample, start:stop] = True

  def note_cut_off(self, owner: Owner) -> None:
    """Marks a finished completion as cut off, even if its last turn ended."""
    index, sample = owner
    self._stopped[index][sample] = False

  def add(
      self,
      collected: Sequence[np.ndarray | None],
      owners: Mapping[int, Owner],
  ) -> None:
    """Adds finished completions or turns.

    Args:
      collected: result of `slots.collect`.
      owners: row -> completion. Earlier turns are rewritten with equal values.
    """
    tokens_RxT, logprobs_RxT, plain_RxT, lengths_R, stopped_R = collected[:5]
    routes, kept_RxTxC = collected[5:]
    if plain_RxT is None:
      plain_RxT = logprobs_RxT
    for row, (index, sample) in owners.items():
      self._tokens[index][sample] = tokens_RxT[row]
      self._logprobs[index][sample] = logprobs_RxT[row]
      self._plain[index][sample] = plain_RxT[row]
      self._lengths[index][sample] = lengths_R[row]
      at_string = (index, sample) in self._at_strings
      self._stopped[index][sample] = stopped_R[row] or at_string
      if kept_RxTxC is not None:
        shape = len(self._tokens[index]), *kept_RxTxC.shape[1:]
        if index not in self._kept:
          self._kept[index] = np.empty(shape, np.int32)
        self._kept[index][sample] = kept_RxTxC[row]
      if routes is not None:
        self._add_routes(*routes, row, (index, sample), lengths_R[row])
    self._at_strings.difference_update(owners.values())

  def _add_routes(
      self,
      prompts_UxPxNxA: np.ndarray,
      own_RxTxNxA: np.ndarray,
      row: int,
      owner: Owner,
      length: int,
  ) -> None:
    """Adds the experts of a row's tokens; R rows share U prompts."""
    index, sample = owner
    own_TxNxA = own_RxTxNxA[row]
    if index not in self._routes:
      shape = (len(self._tokens[index]), *own_TxNxA.shape)
      self._routes[index] = np.zeros(shape, own_TxNxA.dtype)
    # The last token is not fed to the model.
    self._routes[index][sample, : length - 1] = own_TxNxA[: length - 1]
    if sample == 0:
      shared = len(own_RxTxNxA) // len(prompts_UxPxNxA)
      prompt_PxNxA = prompts_UxPxNxA[row // shared]
      start = len(prompt_PxNxA) - len(self._requests[index].prompt_tokens)
      self._prompt_routes[index] = prompt_PxNxA[start:].copy()

  def pop(self, index: int) -> types.Completions:
    """Removes and returns a request's completions, all of them finished."""
    tokens_SxT, lengths_S = self._tokens.pop(index), self._lengths.pop(index)
    versions_SxT = self._versions.pop(index)
    sampled_SxT = np.arange(tokens_SxT.shape[1]) < lengths_S[:, None]
    sampled_SxT &= ~self._given.pop(index)
    kept_ids = self._kept.pop(index, None)
    if kept_ids is not None:
      kept_ids[~sampled_SxT] = -1
    return types.Completions(
        tokens=tokens_SxT,
        lengths=lengths_S,
        sampled_mask=sampled_SxT,
        logprobs=self._logprobs.pop(index),
        plain_logprobs=self._plain.pop(index),
        stopped=self._stopped.pop(index),
        # Versions never decrease, so the first token has the oldest.
        versions=versions_SxT[:, 0].copy(),
        token_versions=np.where(sampled_SxT, versions_SxT, -1),
        routes=self._routes.pop(index, None),
        prompt_routes=self._prompt_routes.pop(index, None),
        kept_ids=kept_ids,
    )


# Decoding of bytes that do not form a character, or not yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StopStringWatch:
  """Finds stop strings in growing completions, decoding each token once.

  A completion ends with the first token whose text completes a stop string. The
  result does not depend on the chunks.
  """

  def __init__(self, stop_strings: Sequence[str], text_fn: Callable[..., str]):
    self._strings = tuple(stop_strings)
    self._text_fn = text_fn
    # A token has at least one byte, so a stop string spans at most this many
    # tokens, plus one: the first token of a window may lose its leading space.
    self._window = 1 + max(len(text.encode()) for text in self._strings)
    self._seen: dict[Owner, int] = {}
    self._starts: dict[Owner, int] = {}

  def begin_turn(self, owner: Owner, start: int) -> None:
    """Ignores tokens before `start`, up to where an environment wrote."""
    self._starts[owner], self._seen[owner] = start, 0

  def forget(self, owner: Owner) -> None:
    """Drops the state of a finished completion."""
    self._seen.pop(owner, None)
    self._starts.pop(owner, None)

  def cut(self, owner: Owner, ids: np.ndarray) -> int | None:
    """Returns the number of tokens to keep, None to keep all so far.

    Args:
      ids: [n] int, tokens of the turn so far, without its stop token.
    """
    seen = self._seen.get(owner, 0)
    self._seen[owner] = len(ids)
    if len(ids) <= seen:
      return None
    text = self._text(ids[max(0, seen - self._window) :])
    if _REPLACEMENT not in text and not self._contains_stop(text):
      return None
    # An incomplete character may change the preceding text, so check every
    # token.
    for length in range(seen + 1, len(ids) + 1):
      if self._contains_stop(self._text(ids[:length])):
        return length
    return None

  def cuts(
      self,
      owners: Mapping[int, Owner],
      tokens_RxT: np.ndarray,
      lengths_R: np.ndarray,
      stopped_R: np.ndarray,
  ) -> np.ndarray:
    """Returns [R] int32, the number of tokens to keep per row; -1 keeps all.

    Args:
      owners: row -> completion in it.
      tokens_RxT: [R, T] int32.
      lengths_R: [R] int32.
      stopped_R: [R] bool, whether the last token is a stop token.
    """
    cut_R = np.full(len(lengths_R), -1, np.int32)
    for row, owner in owners.items():
      length = lengths_R[row] - int(stopped_R[row])
      start = self._starts.get(owner, 0)
      cut = self.cut(owner, tokens_RxT[row, start:length])
      if cut is not None:
        cut_R[row] = start + cut
    return cut_R

  def _text(self, ids: np.ndarray) -> str:
    return self._text_fn(ids.tolist())

  def _contains_stop(self, text: str) -> bool:
    return any(string in text for string in self._strings)

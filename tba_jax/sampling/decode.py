# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler: continuous batching with prefix sharing.

R rows decode at the same time, one completion each. A prompt is prefilled once.
Its KV cache is copied into the rows of its completions or, on accelerators,
shared by them. Between chunks of decode steps, finished rows are refilled from
the queue, and a stream polls for requests once the queue is empty. Without new
requests the last completions may continue in half the rows, then in a quarter.

    prompts → prefill [B, P] → first tokens → R rows → chunk of steps ┐
                                               ▲                      │
                                               └──── finished rows  ◄─┘

The host reads R flags per chunk, and tokens only of finished rows (of all rows
with stop strings). All shapes are fixed: `prefill` compiles once per bucket,
`decode_chunk` once per number of cache segments and of rows, the others once.

A completion may have several turns. Between turns its environment answers while
other rows decode. The answer is appended as token ids, which regular decode
steps feed, or a separate call if they are many. With
`SamplingSettings.num_waiting` the row is meanwhile parked with its cache.

The random number of a token is a pure function of (seed, prompt id, visit,
sample index, position), and no operation mixes rows. So a completion, down to
the bits of its log-probs, does not depend on its batch mates, its row, the
chunks or the order of the requests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models.net import transformer
from tba_jax.sampling import requests
from tba_jax.sampling import samplers
from tba_jax.sampling import slots as slots_lib

# While completions wait, a chunk ends once 1 in REFILL_SHARE rows is free: a
# refill then costs about as much as the idle rows.
REFILL_SHARE = 8
# With environments, a chunk ends once 1 in TURN_SHARE decoding rows has ended
# its turn: rows may then also be parked, which costs more.
TURN_SHARE = 4
# Completions of at most this many chunks are short: their lengths differ by
# less than polling in between would cost.
_FEW_CHUNKS = 4
# Seconds between polls for requests and answers while nothing is decoded.
_LOOK_EVERY_S = 0.05

Request = requests.Request
Settings = requests.SamplingSettings
NewerFn = requests.NewerFn
MoreFn = requests.MoreFn


class JaxSampler:
  """Samples completions with the params passed to each call.

  The devices hold one copy of the params, in the form that `put` returns. Newer
  params may arrive during sampling; switching to them drops the old ones.

  Not thread-safe. `sample` is deterministic in params, settings and requests.
  With params on a mesh, rows are split over its data and fsdp axes and KV heads
  over its tensor axis, if divisible.
  """

  def __init__(
      self,
      model: transformer.Model,
      settings: Settings,
      on_progress: Callable[[], None] = lambda: None,
  ):
    """Initializes the sampler; compiles and allocates nothing.

    Args:
      on_progress: function called after each chunk of tokens.

    Raises:
      ValueError: the model has too few positions.
    """
    P, T = settings.max_prompt_tokens, settings.max_completion_tokens
    if P + T > model.config.max_positions:
      raise ValueError(
          f"sampling.max_prompt_tokens={P} and"
          f" sampling.max_completion_tokens={T}: must be at most"
          f" model.max_positions={model.config.max_positions} together"
      )
    if model.config.has_states and settings.has_turns and settings.stop_strings:
      raise ValueError(
          f"sampling.stop_strings={settings.stop_strings!r}: must be () for an"
          " environment's turns and a model with delta nets, whose states"
          " include the tokens that a stop string cuts off; its stop tokens end"
          " turns too"
      )
    self._model = model
    self._settings, self._on_progress = settings, on_progress
    self._convert_on_device = jax.jit(
        functools.partial(slots_lib.decode_params, model, settings),
        static_argnums=1,
    )
    self._quantize = jax.jit(model.quantize) if settings.weights else None
    self._programs: dict[jax.sharding.Sharding, slots_lib.SlotPrograms] = {}

  @property
  def settings(self) -> Settings:
    return self._settings

  @property
  def platform(self) -> str:
    return jax.default_backend()

  def put(
      self, params: types.PyTree, shardings: types.PyTree = None
  ) -> types.PyTree:
    """Puts params on the devices, in the form that `sample` takes.

    Host arrays are cast before the transfer; rounding to int8 happens on the
    devices, layer by layer. Device arrays are converted by a program, so both
    copies exist until the caller drops the original.

    Args:
      params: model params, or the result of an earlier `put`, which is returned
        unchanged.
      shardings: placement of the model's params; None leaves them on their
        devices, and puts host arrays on the first.
    """
    if isinstance(params, transformer.DecodeParams):
      return params
    sharding = slots_lib.params_sharding(params)
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params)):
      place = sharding
      if shardings is not None:
        sharding = slots_lib.decode_shardings(shardings, self._model)
        place = sharding.tables
      cast = slots_lib.cast_params(self._model, self._settings, params, place)
      if self._settings.weights:
        return self._put_quantized(cast, sharding)
      return jax.device_put(cast, sharding)
    if shardings is None:
      # Uncommitted arrays would trigger a second compilation.
      shardings = jax.tree.map(
          lambda leaf: getattr(leaf, "sharding", sharding), params
      )
    params = jax.device_put(params, shardings)
    return self._convert_on_device(params, slots_lib.params_sharding(params))

  def _put_quantized(
      self,
      params: transformer.DecodeParams,
      sharding: jax.sharding.Sharding | transformer.DecodeParams,
  ) -> transformer.DecodeParams:
    """Returns host params on the devices, in int8."""
    if not isinstance(sharding, transformer.DecodeParams):
      sharding = transformer.DecodeParams(
          [sharding] * len(params.layers), sharding, sharding
      )

    def put(params: types.PyTree, place: types.PyTree) -> types.PyTree:
      # Waits, so that at most one layer is on the devices in floats.
      params = jax.device_put(params, place)
      return jax.block_until_ready(self._quantize(params))

    make = transformer.DecodeParams
    layers = [
        put(make([layer], {}, {}), make([place], {}, {})).layers[0]
        for layer, place in zip(params.layers, sharding.layers)
    ]
    rest = put(
        make([], params.others, params.tables),
        make([], sharding.others, sharding.tables),
    )
    return dataclasses.replace(rest, layers=layers)

  def warm_up(self, params: types.PyTree) -> None:
    """Compiles and runs every program once, so that `sample` never compiles.

    Later params must have the same shapes, dtypes and devices.
    """
    params = self.put(params)
    each_bucket = [
        # One token each: `_DecodeLoop.warm_up` runs the decode steps.
        Request(
            np.zeros(length, np.int32), length, 0, num_completions=1,
            max_tokens=1,
        )
        for length in self._settings.buckets
    ]  # fmt: skip
    self.sample(params, each_bucket, version=0)
    self._loop(params, 0, None).warm_up()

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[Request],
      *,
      version: int,
      newer: NewerFn | None = None,
      turns: requests.Turns | None = None,
  ) -> list[types.Completions]:
    """Returns the completions of each prompt; see `requests.Sampler`.

    Blocks until all are sampled. Compiles unless `warm_up` was called.

    Args:
      params: model params, with or without `put`.
      prompts, version: arguments of `requests.Sampler`.
      newer: function polled between chunks; its params are sharded as `params`.
      turns: environments that answer; requires `Settings.has_turns`.
    """
    loop = self._loop(self.put(params), version, newer, turns)
    # Drops the reference, so that old params can be freed.
    del params
    loop.begin(prompts)
    completions = dict(itertools.chain(*loop.run()))
    return [completions[index] for index in range(len(prompts))]

  def stream(
      self,
      params: types.PyTree,
      more: MoreFn,
      *,
      version: int,
      newer: NewerFn | None = None,
      turns: requests.Turns | None = None,
  ) -> Iterator[list[tuple[int, types.Completions]]]:
    """Samples requests as rows become free; see `requests.Sampler`.

    Args:
      params, version, newer: arguments of `sample`.
      more: function polled while no completion waits for a row.
    """
    loop = self._loop(self.put(params), version, newer, turns, more)
    del params
    return loop.run()

  def token_logprobs(
      self, params: types.PyTree, tokens_BxL: np.ndarray
  ) -> jax.Array:
    """Returns [B, L - 1] float32, log-probs; see `requests.Sampler`.

    Compiles once per shape; does not wait for the devices.
    """
    params = self.put(params)
    return self.programs(params).token_logprobs(params, tokens_BxL)

  def _loop(
      self,
      params: types.PyTree,
      version: int,
      newer: NewerFn | None,
      turns: requests.Turns | None = None,
      more: MoreFn | None = None,
  ) -> "_DecodeLoop":
    return _DecodeLoop(
        self.programs(params),
        self._settings,
        self._model.config.vocab_size,
        params,
        version,
        newer,
        turns,
        more,
        self._on_progress,
    )

  def programs(self, params: types.PyTree) -> slots_lib.SlotPrograms:
    """Returns the jitted programs for params with this placement."""
    sharding = slots_lib.params_sharding(params)
    if sharding not in self._programs:
      self._programs[sharding] = slots_lib.SlotPrograms(
          self._model, self._settings, sharding
      )
    return self._programs[sharding]


def make(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    settings: Settings,
    home: samplers.SamplerHome | None,
) -> JaxSampler:
  """Returns a sampler; see `samplers.make`."""
  del config
  if home is None:
    return JaxSampler(model, settings)
  return JaxSampler(model, settings, home.on_progress)


class _DecodeLoop:
  """Host side of one call of the sampler."""

  def __init__(
      self,
      programs: slots_lib.SlotPrograms,
      settings: Settings,
      vocab_size: int,
      params: types.PyTree,
      version: int,
      newer: NewerFn | None,
      turns: requests.Turns | None,
      more: MoreFn | None,
      on_progress: Callable[[], None],
  ):
    self._on_progress = on_progress
    self._programs = programs
    self._settings = settings
    self._vocab_size = vocab_size
    self._segments = programs.segment_lengths
    self._requests: dict[int, Request] = {}
    self._num_requests = 0
    # Number of unfinished completions by request, and finished requests.
    self._num_left: dict[int, int] = {}
    self._over: list[int] = []
    self._newer = newer
    self._turns = turns
    self._more = more
    self._params, self._version = params, version
    self._state = programs.empty_state()
    # Spare rows for parked completions; None if nothing is ever parked.
    self._aside = None
    if turns is not None and settings.num_waiting:
      self._aside = programs.empty_aside()
    self._slots = requests.Slots(
        self._requests,
        settings,
        programs.rows_per_prompt,
        programs.num_row_shards,
    )
    # Request index -> row in the last prefilled batch, and the outputs of
    # `slots_lib.prefill`.
    self._prefilled: dict[int, int] = {}
    self._prefill_outputs: tuple[Any, ...] = ()
    self._watch = None
    if settings.stop_strings:
      self._watch = requests.StopStringWatch(
          settings.stop_strings, settings.text_fn
      )
    # At most one pair of rows collected on the device and their owners, whose
    # completion or turn has ended.
    self._unread: list[tuple[Any, dict[int, requests.Owner]]] = []
    self._results = requests.Results(
        self._requests, settings.max_completion_tokens
    )

  def begin(self, batch: Sequence[Request]) -> None:
    """Queues requests.

    Raises:
      ValueError: a request is empty, overlong or out of range.
    """
    for request in batch:
      request.check(self._settings, self._vocab_size)
    first = self._num_requests
    self._num_requests += len(batch)
    indices = range(first, self._num_requests)
    self._requests.update(zip(indices, batch))
    for index, request in zip(indices, batch):
      self._results.begin(index, self._version)
      self._num_left[index] = request.num_completions
    # Prompts of one bucket are adjacent, so that they share a prefill.
    self._slots.enqueue(sorted(indices, key=self._bucket_of))

  def run(self) -> Iterator[list[tuple[int, types.Completions]]]:
    """Samples until nothing is left; yields requests as they finish."""
    slots = self._slots
    self._take_more()
    while True:
      if not (slots.queue or slots.owners or slots.aside):
        self._read()
        yield from self._done()
        self._take_more()
        if not slots.queue:
          return
        continue
      newer = None if self._newer is None else self._newer()
      if newer is not None:
        self._swap(*newer)
      if self._turns is not None:
        self._take_answers(0.0)
        self._move()
      self._refill()
      if not slots.num_decoding:
        self._read()
        # Yields finished requests before it waits.
        yield from self._done()
        self._take_answers(_LOOK_EVERY_S if self._more else math.inf)
        self._take_more()
        continue
      while self._shrink():
        pass
      self._state, (num_steps, ends) = self._decode(*self._plan())
      # Reads rows that ended in the previous chunk while this one computes.
      self._read()
      yield from self._done()
      slots.advance(int(num_steps))
      self._on_progress()
      cut_R = None
      if self._watch is not None:
        cut_R, ends = self._cut_at_stop_strings()
      self._end(ends, cut_R)
      self._take_more()

  def _take_more(self) -> None:
    """Starts further requests if rows are free for them."""
    slots = self._slots
    if self._more is None or slots.queue:
      return
    if slots.num_decoding == self._settings.num_rows:
      return
    batch = self._more()
    if batch:
      self.begin(batch)
      self._grow()

  def _done(self) -> Iterator[list[tuple[int, types.Completions]]]:
    """Yields the finished requests, if any."""
    over, self._over = self._over, []
    if over:
      yield [(index, self._results.pop(index)) for index in over]

  def _finish(self, owner: requests.Owner) -> None:
    """Marks a completion as finished."""
    index, _ = owner
    self._num_left[index] -= 1
    if not self._num_left[index]:
      del self._num_left[index], self._requests[index]
      self._over.append(index)
    if self._watch is not None:
      self._watch.forget(owner)

  def _end(self, ends: slots_lib.Ends, cut_R: np.ndarray | None) -> None:
    """Queues finished rows for reading; frees those without another turn."""
    slots = self._slots
    if self._turns is None:
      ends = ends._replace(idle=np.asarray(ends.idle))
    else:
      ends = jax.device_get(ends)
    ended = {
        row: slots.owners[row]
        for row in np.flatnonzero(ends.idle).tolist()
        if row in slots.owners and slots.owners[row] not in slots.waiting
    }
    if not ended:
      return
    self._unread.append((self._programs.collect(self._state), ended))
    if self._turns is not None:
      for row, owner in ended.items():
        if ends.stopped[row] or (cut_R is not None and cut_R[row] >= 0):
          slots.waiting[owner] = int(ends.lengths[row])
    slots.release(ended)

  def _take_answers(self, wait_s: float) -> None:
    """Collects environments' answers; ends completions without one."""
    slots = self._slots
    if not slots.waiting:
      return
    for owner, ids in self._turns.answers(wait_s):
      length = slots.waiting[owner]
      # An answer without room for a further token is dropped.
      if ids is not None and length + len(ids) >= slots.limit(owner):
        self._turns.cut(owner, None)
        self._results.note_cut_off(owner)
        ids = None
      slots.resume(owner, ids)
      if ids is None:
        self._finish(owner)
      else:
        end = length + len(ids)
        self._results.note_given(owner, length, end)
        if self._watch is not None:
          self._watch.begin_turn(owner, end)

  def _move(self) -> None:
    """Parks rows, brings them back, and resumes answered ones."""
    slots = self._slots
    # An exchange may free the spare row that another one needs.
    while (moves := slots.exchange()) is not None:
      self._state, self._aside = self._programs.exchange(
          self._state, self._aside, *moves
      )
    answered = slots.go_on()
    if not answered:
      return
    given_R = np.full(slots.num_rows, -1, np.int32)
    tokens_RxT = np.zeros(
        (slots.num_rows, self._settings.max_completion_tokens), np.int32
    )
    for row, (length, ids) in answered.items():
      given_R[row] = end = length + len(ids)
      tokens_RxT[row, length:end] = ids
    self._state = self._programs.give(self._state, tokens_RxT, given_R)
    self._feed({row: len(ids) for row, (_, ids) in answered.items()})

  def _feed(self, counts: Mapping[int, int]) -> None:
    """Feeds long answers in a few calls; leaves short ones to decode steps."""
    lengths = self._programs.feed_lengths
    if not lengths:
      return
    left = {r: n for r, n in counts.items() if n >= requests.FEWEST_FED}
    while left:
      pieces = {row: min(count, lengths[-1]) for row, count in left.items()}
      # The program, and so the bits, of a row depend on its answer alone.
      by_length: dict[int, list[int]] = {}
      for row, count in pieces.items():
        length = next(length for length in lengths if length >= count)
        by_length.setdefault(length, []).append(row)
      for length, rows in by_length.items():
        size = self._settings.prefill_size
        for first in range(0, len(rows), size):
          batch = rows[first : first + size]
          self._run_feed([(row, pieces[row]) for row in batch], length)
      self._slots.note_fed(pieces)
      left = {
          row: count - pieces[row]
          for row, count in left.items()
          if count - pieces[row] >= requests.FEWEST_FED
      }

  def _run_feed(self, pieces: Sequence[tuple[int, int]], length: int) -> None:
    size = self._settings.prefill_size
    # Indices past the last row are unused.
    rows_B = np.full(size, self._slots.num_rows, np.int32)
    count_B = np.zeros(size, np.int32)
    for b, (row, count) in enumerate(pieces):
      rows_B[b], count_B[b] = row, count
    self._state = self._programs.feed(
        self._params, self._state, rows_B, count_B, length
    )

  def warm_up(self) -> None:
    """Compiles the programs that `run` did not need."""
    while True:
      for num_segments in range(2, len(self._segments) + 1):
        self._state, _ = self._decode(0, 1, num_segments)
      if self._settings.recompute_cache:
        self._state = self._recompute(self._state, {})
      if self._watch is not None:
        self._cut_at_stop_strings()
      if self._settings.has_turns:
        self._state = self._programs.give(
            self._state,
            np.zeros(self._state.tokens.shape, np.int32),
            np.full(self._slots.num_rows, -1, np.int32),
        )
      for length in self._programs.feed_lengths:
        self._run_feed([], length)
      if self._settings.num_waiting:
        self._warm_up_aside()
      self._programs.collect(self._state)
      if not self._shrink():
        break
    self._grow()

  def _warm_up_aside(self) -> None:
    aside = self._programs.empty_aside()
    none = lambda state: np.full(len(state.lengths), -1, np.int32)
    self._state, aside = self._programs.exchange(
        self._state, aside, none(aside), none(self._state)
    )
    if self._settings.recompute_cache:
      self._recompute(aside, {})

  def _plan(self) -> tuple[int, int, int]:
    """Plans a chunk: most steps, idle rows that end it early, and segments."""
    slots = self._slots
    num_rows = num_idle = slots.num_rows
    # Newer params, stop strings, answers and requests are polled at intervals.
    polls = self._watch or self._newer or self._turns or self._more
    if self._turns:
      # Ends early, so that environments start as soon as some turns have ended.
      decoding = slots.num_decoding
      num_idle -= decoding + -decoding // TURN_SHARE
    elif self._more or (slots.queue and not polls):
      # Free rows may wait for the other rows of their prompt.
      free = num_rows - len(slots.owners)
      num_idle = min(num_rows, free - (-num_rows // REFILL_SHARE))
    elif not polls:
      num_idle -= self._programs.fewer_rows(num_rows)
    # A chunk fills its segments unless something must be polled meanwhile. It
    # also may if it ends early once rows are free for other completions.
    waits = slots.queue or polls
    settings = self._settings
    most = _FEW_CHUNKS * settings.chunk_steps
    if settings.max_completion_tokens <= most:
      waits = self._watch or self._newer or self._turns
    num_steps, num_segments = slots_lib.plan_chunk(
        self._segments,
        slots.longest,
        chunk_steps=self._settings.chunk_steps if waits else None,
    )
    return num_steps, num_idle, num_segments

  def _decode(
      self, num_steps: int, num_idle: int, num_segments: int
  ) -> tuple[slots_lib.DecodeState, tuple[jax.Array, slots_lib.Ends]]:
    return self._programs.decode_chunk(
        self._params,
        self._state,
        np.int32(num_steps),
        np.int32(num_idle),
        num_segments,
    )

  def _shrink(self) -> bool:
    """Drops free rows that nothing needs; returns whether it did."""
    slots, programs = self._slots, self._programs
    fewer = programs.fewer_rows(slots.num_rows)
    if not fewer or slots.queue or slots.num_left > fewer:
      return False
    if not programs.same_bits(self._params, slots.num_rows, fewer):
      return False
    self._state = programs.take(self._state, slots.keep(fewer))
    return True

  def _grow(self) -> None:
    """Restores all dropped rows, because a refill needs all rows."""
    while self._slots.num_rows < self._settings.num_rows:
      self._state = self._programs.grow(self._state)
      self._slots.grow()

  def _swap(self, version: int, params: types.PyTree) -> None:
    """Switches to newer params and drops prefilled prompts."""
    self._read()
    self._params, self._version = params, version
    self._prefilled, self._prefill_outputs = {}, ()
    slots = self._slots
    lengths_R = jax.device_get(self._state.lengths).tolist()
    self._results.set_version(
        version,
        {owner: 0 for owner in slots.queue}
        | {owner: lengths_R[row] for row, owner in slots.owners.items()}
        | slots.lengths_aside,
    )
    if self._settings.recompute_cache:
      self._state = self._recompute(self._state, slots.owners)
      if self._aside is not None:
        self._aside = self._recompute(self._aside, slots.aside)

  def _recompute(
      self, state: slots_lib.DecodeState, owners: Mapping[int, requests.Owner]
  ) -> slots_lib.DecodeState:
    """Recomputes the KV cache of the used rows, batch by batch."""
    P, T = (
        self._settings.max_prompt_tokens,
        self._settings.max_completion_tokens,
    )
    size = self._settings.prefill_size
    tokens_RxT, lengths_R = jax.device_get((state.tokens, state.lengths))
    rows = [*owners.items()]
    # Runs once even without rows, to compile the program.
    for first in range(0, len(rows) or 1, size):
      tokens_BxL, mask_BxL = self._padding(P + T)
      source_R = np.full(len(lengths_R), -1, np.int32)
      for b, (row, (index, _)) in enumerate(rows[first : first + size]):
        self._put_prompt(index, tokens_BxL[b, :P], mask_BxL[b, :P])
        fed = lengths_R[row] - 1
        tokens_BxL[b, P : P + fed] = tokens_RxT[row, :fed]
        mask_BxL[b, P : P + fed] = 1
        source_R[row] = b
      state = self._programs.recompute_cache(
          self._params, state, tokens_BxL, mask_BxL, source_R
      )
    return state

  def _refill(self) -> None:
    """Starts completions in all free slots."""
    while self._slots.can_refill:
      if self._slots.queue[0][0] not in self._prefilled:
        self._prefill()
      self._state = self._programs.refill(
          self._state,
          self._prefill_outputs,
          *self._slots.refill(self._prefilled),
      )

  def _prefill(self) -> None:
    """Prefills the prompts at the head of the queue that share a bucket."""
    queued = dict.fromkeys(index for index, _ in self._slots.queue)
    bucket = self._bucket_of(next(iter(queued)))
    tokens_BxQ, mask_BxQ = self._padding(bucket)
    self._prefilled = {}
    for b, index in enumerate(itertools.islice(queued, len(tokens_BxQ))):
      if self._bucket_of(index) != bucket:
        break
      self._put_prompt(index, tokens_BxQ[b], mask_BxQ[b])
      self._prefilled[index] = b
    self._prefill_outputs = self._programs.prefill(
        self._params, tokens_BxQ, mask_BxQ
    )

  def _bucket_of(self, index: int) -> int:
    return self._settings.bucket_of(self._requests[index])

  def _padding(self, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns [B, length] pad tokens and a mask of zeros."""
    shape = (self._settings.prefill_size, length)
    tokens = np.full(shape, self._settings.pad_id, np.int32)
    return tokens, np.zeros(shape, np.float32)

  def _put_prompt(self, index: int, tokens: np.ndarray, mask: np.ndarray):
    """Writes a prompt to the end of `tokens` and `mask`."""
    prompt_tokens = self._requests[index].prompt_tokens
    start = len(tokens) - len(prompt_tokens)
    tokens[start:], mask[start:] = prompt_tokens, 1

  def _cut_at_stop_strings(self) -> tuple[np.ndarray, slots_lib.Ends]:
    """Ends turns at stop strings; returns `cuts` and the rows' progress."""
    state, owners = self._state, self._slots.owners
    read = jax.device_get((state.tokens, state.lengths, state.stopped))
    cut_R = self._watch.cuts(owners, *read)
    self._results.note_stop_strings(
        owners[row] for row in np.flatnonzero(cut_R >= 0)
    )
    self._state, ends = self._programs.cut(state, cut_R)
    return cut_R, ends

  def _read(self) -> None:
    """Copies ended rows to the host and passes turns to environments."""
    for collected, ended in self._unread:
      arrays = jax.device_get(collected)
      self._results.add(arrays, ended)
      tokens_RxT, lengths_R = arrays[0], arrays[3]
      for row, owner in ended.items():
        tokens = tokens_RxT[row, : lengths_R[row]]
        if owner in self._slots.waiting:
          self._turns.end(owner, tokens)
          continue
        if self._turns is not None:
          self._turns.cut(owner, tokens)
        self._finish(owner)
    self._unread.clear()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler: many completions of many prompts, decoded side by side.

R rows decode at the same time, each one completion. A prompt is prefilled once
and its keys and values are copied into the rows of its completions. Between
chunks of decode steps the rows that ended take the next completions of the
queue, so a long completion does not hold up the others. When none is left, the
last completions go on in half the rows, and then in a quarter.

    prompts → prefill [B, P] → first tokens → R rows → chunk of steps ┐
                                               ▲                      │
                                               └── rows that ended ◄──┘

The host (`flight.py`) sees R flags per chunk; tokens come over when rows are
reused and at the end, and with stop strings after each chunk. All shapes are
fixed: each program (`rows.py`) compiles once, a prefill once a bucket, and that
of decode steps once for each number of cache blocks that it may read.

Randomness: the uniform number of a token is a pure function of (seed, prompt
id, visit, sample index, position), and no operation mixes rows. So a
completion, the bits of its log-probs included, does not depend on its batch
mates, its row, the chunks or the order of the requests.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, TYPE_CHECKING

import jax
import numpy as np

from tba_jax import types
from tba_jax.sampling import logits
from tba_jax.sampling import requests
from tba_jax.sampling import rows as rows_lib

if TYPE_CHECKING:
  from tba_jax.models import transformer


# Where the arrays of a sampler lie.


# Axes of a mesh that prompts are split over: a sampler's rows are, too.
_BATCH_AXES = ("data", "fsdp")


def params_shardings(params: types.PyTree) -> jax.sharding.Sharding:
  """Returns where the sampler's own arrays lie: with the params, replicated."""
  for leaf in jax.tree.leaves(params):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
          sharding.mesh, jax.sharding.PartitionSpec()
      )
    if sharding is not None:
      return sharding
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def rows_sharding(
    place: jax.sharding.Sharding, num_rows: int
) -> jax.sharding.Sharding:
  """Returns where rows [R, ...] lie: split over the axes of a batch.

  They are whole on every device where they do not divide over these.
  """
  if not isinstance(place, jax.sharding.NamedSharding):
    return place
  axes = tuple(a for a in _BATCH_AXES if place.mesh.shape.get(a, 1) > 1)
  if num_rows % math.prod(place.mesh.shape[a] for a in axes):
    return place
  return jax.sharding.NamedSharding(
      place.mesh, jax.sharding.PartitionSpec(axes or None)
  )


def state_shardings(place: jax.sharding.Sharding, state: Any) -> Any:
  """Returns where the leaves of a decode state lie, or where all do.

  Rows lie as `of_rows`; the heads of caches are split over `tensor`, as those
  of params are, where they divide.

  Args:
    place: from `of_params`.
    state: shapes of a `rows.DecodeState`.
  """
  rows = rows_sharding(place, state.active.shape[0])
  if not isinstance(place, jax.sharding.NamedSharding):
    return rows
  tensor = place.mesh.shape.get("tensor", 1)

  def sharding(leaf: Any) -> jax.sharding.NamedSharding:
    # Keys and values alone have four axes, the second of heads.
    if leaf.ndim < 4 or tensor == 1 or leaf.shape[1] % tensor:
      return rows
    parts = (*rows.spec, *[None] * (1 - len(rows.spec)), "tensor")
    return jax.sharding.NamedSharding(
        place.mesh, jax.sharding.PartitionSpec(*parts)
    )

  return jax.tree.map(sharding, state)


def put_rows(
    params: types.PyTree, place: jax.sharding.Sharding
) -> types.PyTree:
  """Returns the params as device arrays; those that are lie where they lay."""
  # An array that was never put anywhere counts as another kind of input, and
  # would be compiled for once more.
  return jax.tree.map(
      lambda leaf: jax.device_put(leaf, getattr(leaf, "sharding", place)),
      params,
  )


# One call of the sampler: completions on their way through the rows.
#
# The host's side: which completion sits in which row, what is done between two
# chunks of decode steps, and what comes back. The programs on the devices are
# given; nothing here compiles.


# A chunk ends when one of so many rows is free and a completion waits for it:
# what a refill costs is then about what the free rows would.
_REFILL_SHARE = 8

# Returns (version, params) of a higher version, or None where there is none.
NewerFn = Callable[[], tuple[int, types.PyTree] | None]


@dataclasses.dataclass(frozen=True)
class FlightSettings:
  """What the host does between chunks.

  buckets: lengths that prompts are padded to for their prefill, the longest P.
  prefill_size: B, prompts that are prefilled together.
  chunk_steps: decode steps between refills.
  seed: of requests that have none.
  stop_strings: texts that end a completion.
  text_fn: ids -> text; needed with stop strings.
  recompute_cache: whether newer params make the caches of rows in flight again.
  """

  buckets: tuple[int, ...]
  prefill_size: int
  chunk_steps: int
  seed: int
  stop_strings: tuple[str, ...]
  text_fn: Callable[[Sequence[int]], str] | None
  recompute_cache: bool

  def __post_init__(self):
    strings = self.stop_strings
    if strings and (self.text_fn is None or not all(strings)):
      raise ValueError(
          f"sampling.stop_strings={list(strings)}: allowed texts that are not"
          " empty, with a text_fn"
      )

  def bucket(self, request: requests.Request) -> int:
    """Returns what a prompt is padded to: a function of its length alone."""
    return min(b for b in self.buckets if b >= len(request.prompt_tokens))


def bucket_lengths(max_prompt_tokens: int, num_buckets: int) -> tuple[int, ...]:
  """Returns P, half of it, a quarter, …: at most so many, the longest last."""
  halves = (-(-max_prompt_tokens // 2**i) for i in range(num_buckets))
  return tuple(sorted(set(halves)))


@dataclasses.dataclass(frozen=True)
class _Prefill:
  """Prompts that were prefilled together.

  slots: index of the request -> place in the batch.
  outputs: logits [B, V], cache, mask [B, P].
  """

  slots: dict[int, int]
  outputs: tuple[Any, ...]


class Flight:
  """The completions of some requests under way. `run` brings them in."""

  def __init__(
      self,
      programs: "Programs",
      rows: "rows_lib.Settings",
      settings: FlightSettings,
      params: types.PyTree,
      prompts: Sequence[requests.Request],
      *,
      version: int,
      newer: NewerFn | None,
  ):
    """Takes what `Sampler.sample` takes, and allocates the rows."""
    self._programs = programs
    self._rows = rows
    self._settings = settings
    self._prompts = prompts
    self._newer = newer
    self._place = params_shardings(params)
    self._use(params)
    self._state = programs.empty_state()
    # Prompts of one bucket follow each other: they share a prefill.
    self._order = sorted(
        range(len(prompts)), key=lambda i: settings.bucket(prompts[i])
    )
    self._assigned = requests.Assignment(
        prompts,
        order=self._order,
        num_rows=rows.num_rows,
        max_completion_tokens=rows.max_completion_tokens,
        seed=settings.seed,
    )
    self._prefilled = _Prefill({}, ())
    self._watch = None
    if settings.stop_strings:
      self._watch = requests.StopStringWatch(
          settings.stop_strings, settings.text_fn
      )
    # At most one (collected rows on the device, their owners).
    self._unread: list[tuple[Any, dict[int, tuple[int, int]]]] = []
    self._results = requests.Results(
        prompts,
        max_completion_tokens=rows.max_completion_tokens,
        version=version,
    )

  def run(self) -> list[types.Completions]:
    """Returns the completions by request; blocks until all are sampled."""
    assigned = self._assigned
    while assigned.queue or assigned.owners:
      found = None if self._newer is None else self._newer()
      if found is not None:
        self._swap(*found)
      self._refill()
      self._shrink()
      self._state, (num_steps, done_R) = self._decode(*self._plan())
      # Rows that ended a chunk ago are read while this one computes.
      self._read()
      assigned.advance(int(num_steps))
      if self._watch is not None:
        done_R = self._cut_rows(self._watch)
      owned = assigned.release(np.asarray(done_R))
      if owned:
        self._unread.append((self._programs.collect(self._state), owned))
    self._read()
    return self._results.completions()

  def warm_up(self) -> None:
    """Compiles what a run may need and has not met."""
    for num_rows in self._programs.row_counts:
      if num_rows < self._assigned.num_rows:
        self._keep(num_rows)
      for num_blocks in range(2, len(self._rows.block_lengths) + 1):
        self._state, _ = self._decode(0, 1, num_blocks)
      if self._settings.recompute_cache:
        self._recompute()
      if self._watch is not None:
        self._cut_rows(self._watch)
      self._programs.collect(self._state)

  def _plan(self) -> tuple[int, int, int]:
    """Returns the most steps of a chunk, idle rows that end it, and blocks."""
    assigned = self._assigned
    num_idle = assigned.num_rows
    # Newer params and stop strings are looked for at even distances.
    looks = self._watch or self._newer
    if not looks and assigned.queue:
      num_idle = -(-num_idle // _REFILL_SHARE)
    elif not looks:
      num_idle -= self._fewer
    # With nothing to do between chunks, one goes as far as its blocks.
    waits = assigned.queue or looks
    num_steps, num_blocks = rows_lib.plan_chunk(
        self._rows.block_lengths,
        assigned.longest,
        chunk_steps=self._settings.chunk_steps if waits else None,
    )
    return num_steps, num_idle, num_blocks

  @property
  def _fewer(self) -> int:
    """The next lower number of rows that there may be; 0: none."""
    counts = self._programs.row_counts
    return max((n for n in counts if n < self._assigned.num_rows), default=0)

  def _shrink(self) -> None:
    """Drops rows where few are in use and nothing waits for the others."""
    assigned = self._assigned
    while not assigned.queue and len(assigned.owners) <= self._fewer:
      self._keep(self._fewer)

  def _keep(self, num_rows: int) -> None:
    rows = self._assigned.keep(num_rows)
    self._state = self._programs.take(self._state, rows)

  def _decode(
      self, num_steps: int, num_idle: int, num_blocks: int
  ) -> tuple["rows_lib.DecodeState", tuple[jax.Array, jax.Array]]:
    return self._programs.decode_chunk(
        self._decode_params,
        self._state,
        np.int32(num_steps),
        np.int32(num_idle),
        num_blocks,
    )

  def _recompute(self) -> None:
    """Makes the caches of the rows in flight again, a batch at a time."""
    P, T = self._rows.max_prompt_tokens, self._rows.max_completion_tokens
    size = self._settings.prefill_size
    read = self._state.tokens, self._state.lengths
    tokens_RxT, lengths_R = jax.device_get(read)
    owned = [*self._assigned.owners.items()]
    # Without any, once: it is how the program is compiled ahead.
    for first in range(0, len(owned) or 1, size):
      tokens_BxL, mask_BxL = self._padding(size, P + T)
      slot_R = np.full(self._assigned.num_rows, -1, np.int32)
      for slot, (row, (index, _)) in enumerate(owned[first : first + size]):
        prompt = self._prompts[index].prompt_tokens
        fed = lengths_R[row] - 1
        tokens_BxL[slot, P - len(prompt) : P] = prompt
        tokens_BxL[slot, P : P + fed] = tokens_RxT[row, :fed]
        mask_BxL[slot, P - len(prompt) : P + fed] = 1
        slot_R[row] = slot
      self._state = self._programs.recompute(
          self._params, self._state, tokens_BxL, mask_BxL, slot_R
      )

  def _use(self, params: types.PyTree) -> None:
    self._params = put_rows(params, self._place)
    self._decode_params = self._programs.decode_params(self._params)

  def _swap(self, version: int, params: types.PyTree) -> None:
    """Goes on with newer params; what is prefilled with the old ones goes."""
    self._read()
    self._use(params)
    self._prefilled = _Prefill({}, ())
    lengths_R = jax.device_get(self._state.lengths)
    self._results.swap(
        version,
        {o: lengths_R[row] for row, o in self._assigned.owners.items()},
    )
    if self._settings.recompute_cache:
      self._recompute()

  def _refill(self) -> None:
    """Starts completions in all free rows."""
    while self._assigned.can_place:
      if self._assigned.queue[0][0] not in self._prefilled.slots:
        self._prefilled = self._prefill()
      placed = self._assigned.place(self._prefilled.slots)
      self._state = self._programs.refill(
          self._state, *self._prefilled.outputs, *placed
      )

  def _prefill(self) -> _Prefill:
    """Prefills the prompts at the head of the queue that share a bucket."""
    first, size = (
        self._order.index(self._assigned.queue[0][0]),
        self._settings.prefill_size,
    )
    width = self._settings.bucket(self._prompts[self._order[first]])
    tokens_BxP, mask_BxP = self._padding(size, width)
    slots = {}
    for slot, index in enumerate(self._order[first : first + size]):
      prompt = self._prompts[index]
      if self._settings.bucket(prompt) != width:
        break
      tokens_BxP[slot, -len(prompt.prompt_tokens) :] = prompt.prompt_tokens
      mask_BxP[slot, -len(prompt.prompt_tokens) :] = 1
      slots[index] = slot
    outputs = self._programs.prefill(self._params, tokens_BxP, mask_BxP)
    return _Prefill(slots, outputs)

  def _padding(self, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns [B, L] tokens that are all padding, and their mask of zeros."""
    shape = (size, length)
    tokens_BxL = np.full(shape, self._rows.pad_id, np.int32)
    return tokens_BxL, np.zeros(shape, np.float32)

  def _cut_rows(self, watch: requests.StopStringWatch) -> jax.Array:
    """Ends the rows whose completions hold a stop string.

    Returns:
      [R] bool, True in the rows that are not active.
    """
    state = self._state
    read = jax.device_get((state.tokens, state.lengths, state.stopped))
    owners = self._assigned.owners
    cut_R = watch.cuts(owners.items(), *read)
    self._results.note_cuts(owners[row] for row in np.flatnonzero(cut_R >= 0))
    self._state, done_R = self._programs.cut(state, cut_R)
    return done_R

  def _read(self) -> None:
    """Enters the rows that ended into the results."""
    for collected, owned in self._unread:
      self._results.add(jax.device_get(collected), owned)
    self._unread.clear()


# Rows per prompt of a prefill: with 16 completions a prompt, one prefill fills
# all rows.
_ROWS_PER_PREFILL = 16

Request = requests.Request


@dataclasses.dataclass(frozen=True)
class Programs:
  """The jitted programs for params that lie in one place.

  row_counts: R, and the fewer that rows may be cut down to.
  """

  empty_state: Callable[..., rows_lib.DecodeState]
  decode_params: Callable[[types.PyTree], types.PyTree]
  prefill: Callable[..., tuple[jax.Array, types.PyTree, jax.Array]]
  refill: Callable[..., rows_lib.DecodeState]
  decode_chunk: Callable[..., tuple[rows_lib.DecodeState, tuple[Any, ...]]]
  recompute: Callable[..., rows_lib.DecodeState]
  cut: Callable[..., tuple[rows_lib.DecodeState, jax.Array]]
  collect: Callable[..., tuple[jax.Array, ...]]
  take: Callable[..., rows_lib.DecodeState]
  row_counts: tuple[int, ...]


class Sampler:
  """Samples completions with a model whose params come with each call.

  One thread at a time may call it. `sample` is deterministic: the same params,
  settings, seed and requests give the same completions. With params
  on a mesh, rows are split over its data and fsdp axes, where they divide, and
  so are the heads of their caches over its tensor axis.
  """

  def __init__(
      self,
      model: "transformer.Model",
      *,
      temperature: float,
      top_k: int,
      top_p: float,
      max_prompt_tokens: int,
      max_completion_tokens: int,
      num_rows: int,
      chunk_steps: int,
      eos_id: int | None,
      pad_id: int,
      seed: int,
      min_p: float = 0.0,
      stop_ids: Sequence[int] = (),
      stop_strings: Sequence[str] = (),
      text_fn: Callable[[Sequence[int]], str] | None = None,
      recompute_cache: bool = False,
      prompt_buckets: int = 1,
      explore: logits.Explore = logits.NONE,
  ):
    """Makes a sampler; nothing is compiled or allocated yet.

    Args:
      model: the model's pure functions.
      temperature: of token sampling; 0 is greedy.
      top_k: how many of the likeliest tokens to sample from; 0 is off.
      top_p: the probability that the tokens sampled from reach; 1 is off.
      max_prompt_tokens: P, what prompts are padded to.
      max_completion_tokens: T; a completion ends there, unstopped.
      num_rows: R, completions decoded at the same time.
      chunk_steps: decode steps between refills while completions wait.
      eos_id: the stop token; None decodes all completions to T tokens.
      pad_id: what fills a completion after its end.
      seed: of all random numbers of this sampler, in [0, 2^32), but those of a
        request that has its own.
      min_p: the least probability, as a share of the likeliest token's; 0 is
        off.
      stop_ids: other tokens that end a completion, beside eos_id.
      stop_strings: end a completion with the token at which its text holds one
        of them; they are looked for every `chunk_steps` tokens.
      text_fn: ids -> text; needed with stop strings.
      recompute_cache: whether newer params, swapped in under way, make the
        caches of the rows in flight again.
      prompt_buckets: number of lengths that prompts are padded to for their
        prefill: P, half of it, a quarter, …
      explore: what is drawn from instead of the model, as `sampling/explore.py`
        has it; nothing where it is greedy.

    Raises:
      ValueError: a setting is out of range.
    """
    logits.check_settings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    requests.check_sizes(
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        num_rows=num_rows,
        chunk_steps=chunk_steps,
        prompt_buckets=prompt_buckets,
        max_positions=model.config.max_positions,
    )
    if not 0 <= seed < requests.UINT32:
      raise ValueError(f"seed={seed} of a sampler: allowed 0 to 2^32 - 1")
    self._model = model
    self._settings = rows_lib.Settings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_rows=num_rows,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        pad_id=pad_id,
        min_p=min_p,
        stop_ids=tuple(sorted({*stop_ids, eos_id} - {None})),
        explore=explore if temperature else logits.NONE,
    )
    self._host = FlightSettings(
        buckets=bucket_lengths(max_prompt_tokens, prompt_buckets),
        prefill_size=max(1, num_rows // _ROWS_PER_PREFILL),
        chunk_steps=chunk_steps,
        seed=seed,
        stop_strings=tuple(stop_strings),
        text_fn=text_fn,
        recompute_cache=recompute_cache,
    )
    self._programs: dict[jax.sharding.Sharding, Programs] = {}

  def warm_up(self, params: types.PyTree) -> None:
    """Compiles everything, so that `sample` never does.

    Blocks until the programs have run once. Later params must have the same
    shapes, dtypes and devices.
    """
    requests_of_each_bucket = [
        Request(np.zeros(length, np.int32), length, 0, num_completions=1)
        for length in self._host.buckets
    ]
    self.sample(params, requests_of_each_bucket, version=0)
    self._flight(params, [], 0, None).warm_up()

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[Request],
      *,
      version: int,
      newer: NewerFn | None = None,
  ) -> list[types.Completions]:
    """Returns the completions of each prompt, in the order of `prompts`.

    Blocks until all are sampled. Compiles in the first call, if `warm_up` was
    not called.

    Args:
      params: of the model; host arrays are copied to the device once.
      prompts: any number of requests with any number of completions.
      version: of `params`, noted with every token.
      newer: called between chunks; the params it returns are gone on with, and
        must lie where `params` do. A token's log-prob is under the params that
        drew it, with the cache that they found or made again.

    Raises:
      ValueError: a request is empty, too long or out of range; the message
        names its prompt id.
    """
    for request in prompts:
      requests.check_request(
          request,
          max_prompt_tokens=self._settings.max_prompt_tokens,
          max_completion_tokens=self._settings.max_completion_tokens,
          vocab_size=self._model.config.vocab_size,
      )
    return self._flight(params, prompts, version, newer).run()

  def _flight(
      self,
      params: types.PyTree,
      prompts: Sequence[Request],
      version: int,
      newer: NewerFn | None,
  ) -> Flight:
    return Flight(
        self._get_programs(params_shardings(params)),
        self._settings,
        self._host,
        params,
        prompts,
        version=version,
        newer=newer,
    )

  def _get_programs(self, place: jax.sharding.Sharding) -> Programs:
    """Returns the programs for params at `place`; they compile when called."""
    if place not in self._programs:
      model, settings = self._model, self._settings
      bind = functools.partial
      num_positions = (
          settings.max_prompt_tokens + settings.max_completion_tokens
      )
      # Outputs are told where to lie: a program whose inputs lie where they did
      # before is not compiled again.
      empty_state = bind(rows_lib.empty_state, model.init_cache, settings)
      rows = state_shardings(place, jax.eval_shape(empty_state))
      jit = functools.partial(jax.jit, out_shardings=place)
      rows_jit = functools.partial(jax.jit, out_shardings=rows)
      pair_jit = functools.partial(jax.jit, out_shardings=(rows, place))
      self._programs[place] = Programs(
          empty_state=rows_jit(empty_state),
          decode_params=jax.jit(
              bind(model.decode_params, num_positions=num_positions)
          ),
          prefill=jit(
              bind(rows_lib.prefill, model.prefill, settings.max_prompt_tokens)
          ),
          refill=rows_jit(
              bind(rows_lib.refill, model.fill_cache, settings),
              donate_argnums=0,
          ),
          decode_chunk=pair_jit(
              bind(rows_lib.decode_chunk, model.decode_step, settings),
              donate_argnums=1,
              static_argnums=4,
          ),
          recompute=rows_jit(
              bind(rows_lib.recompute_cache, model.prefill, model.fill_cache),
              donate_argnums=1,
          ),
          cut=pair_jit(rows_lib.cut, donate_argnums=0),
          collect=jit(bind(rows_lib.collect, settings)),
          take=rows_jit(rows_lib.take_rows),
          row_counts=rows_lib.row_counts(place, settings.num_rows),
      )
    return self._programs[place]

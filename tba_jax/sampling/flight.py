# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of the sampler: completions on their way through the rows.

The host's side: which completion sits in which row, what is done between two
chunks of decode steps, and what comes back. The programs on the devices are
given; nothing here compiles.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, TYPE_CHECKING

import jax
import numpy as np

from tba_jax import types
from tba_jax.sampling import blocks
from tba_jax.sampling import placement
from tba_jax.sampling import requests
from tba_jax.sampling import stop_strings as stop_strings_lib

if TYPE_CHECKING:
  from tba_jax.sampling import decode
  from tba_jax.sampling import rows as rows_lib

# A chunk ends when one of so many rows is free and a completion waits for it:
# what a refill costs is then about what the free rows would.
_REFILL_SHARE = 8

# Returns (version, params) of a higher version, or None where there is none.
NewerFn = Callable[[], tuple[int, types.PyTree] | None]


@dataclasses.dataclass(frozen=True)
class Settings:
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
      programs: "decode.Programs",
      rows: "rows_lib.Settings",
      settings: Settings,
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
    self._place = placement.of_params(params)
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
      self._watch = stop_strings_lib.Watch(
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
    num_steps, num_blocks = blocks.plan_chunk(
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
    self._params = placement.put(params, self._place)
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

  def _cut_rows(self, watch: stop_strings_lib.Watch) -> jax.Array:
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

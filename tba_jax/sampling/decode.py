# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler: many completions of many prompts, decoded side by side.

R rows decode at the same time, each one completion. A prompt is prefilled once
and its keys and values are copied into the rows of its completions. Between
chunks of decode steps the rows that ended take the next completions of the
queue, so a long completion does not hold up the others.

    prompts → prefill [B, P] → first tokens → R rows → chunk of steps ┐
                                               ▲                      │
                                               └── rows that ended ◄──┘

The host sees R flags per chunk; tokens come over when rows are reused and at
the end. All shapes are fixed: the programs compile once, that of decode steps
once for each number of cache blocks that it may read.

Randomness: the uniform number of a token is a pure function of (seed, prompt
id, visit, sample index, position), and no operation mixes rows. So a
completion, the bits of its log-probs included, does not depend on its batch
mates, its row, the chunks or the order of the requests.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import numpy as np

from tba_jax import types
from tba_jax.sampling import blocks
from tba_jax.sampling import logits as logits_lib
from tba_jax.sampling import placement
from tba_jax.sampling import requests
from tba_jax.sampling import rows as rows_lib
from tba_jax.sampling import stop_strings as stop_strings_lib

if TYPE_CHECKING:
  from tba_jax.models import build

# Rows per prompt of a prefill: with 16 completions a prompt, one prefill fills
# all rows.
_ROWS_PER_PREFILL = 16

Request = requests.Request


@dataclasses.dataclass(frozen=True)
class _Programs:
  """The jitted programs for params that lie in one place."""

  empty_state: Callable[..., rows_lib.DecodeState]
  decode_params: Callable[[types.PyTree], types.PyTree]
  prefill: Callable[..., tuple[jax.Array, types.PyTree]]
  refill: Callable[..., rows_lib.DecodeState]
  decode_chunk: Callable[..., tuple[rows_lib.DecodeState, jax.Array]]
  cut: Callable[..., tuple[rows_lib.DecodeState, jax.Array]]
  collect: Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class _Prefill:
  """Prompts that were prefilled together.

  slots: index of the request -> place in the batch.
  outputs: logits [B, V], cache, mask [B, P].
  """

  slots: dict[int, int]
  outputs: tuple


class Sampler:
  """Samples completions with a model whose params come with each call.

  One thread at a time may call it. `sample` is deterministic: the same params,
  settings, seed and requests give the same completions. Rows are not split over
  devices: with params on a mesh, every device decodes all rows.
  """

  def __init__(
      self,
      model: "build.Model",
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

    Raises:
      ValueError: a setting is out of range.
    """
    logits_lib.check_settings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    requests.check_sizes(
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        num_rows=num_rows,
        chunk_steps=chunk_steps,
        max_positions=model.config.max_positions,
    )
    if stop_strings and (text_fn is None or not all(stop_strings)):
      raise ValueError(
          f"sampling.stop_strings={list(stop_strings)}: allowed texts that are"
          " not empty, with a text_fn"
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
        eos_id=eos_id,
        pad_id=pad_id,
        min_p=min_p,
        stop_ids=tuple(sorted(set(stop_ids))),
    )
    self._stop_strings = tuple(stop_strings)
    self._text_fn = text_fn
    self._seed = seed
    self._chunk_steps = chunk_steps
    self._prefill_size = max(1, num_rows // _ROWS_PER_PREFILL)
    self._programs: dict[jax.sharding.Sharding, _Programs] = {}

  def warm_up(self, params: types.PyTree) -> None:
    """Compiles everything, so that `sample` never does.

    Blocks until the programs have run once. Later params must have the same
    shapes, dtypes and devices.
    """
    token = np.zeros(1, np.int32)
    self.sample(params, [Request(token, 0, 0, num_completions=1)], version=0)
    place = placement.of_params(params)
    programs = self._get_programs(place)
    decode_params = programs.decode_params(placement.put(params, place))
    state = programs.empty_state()
    for num_blocks in range(2, len(self._settings.block_lengths) + 1):
      state, _ = programs.decode_chunk(
          decode_params, state, np.int32(0), num_blocks
      )

  def sample(
      self, params: types.PyTree, prompts: Sequence[Request], *, version: int
  ) -> list[types.Completions]:
    """Returns the completions of each prompt, in the order of `prompts`.

    Blocks until all are sampled. Compiles in the first call, if `warm_up` was
    not called.

    Args:
      params: of the model; host arrays are copied to the device once.
      prompts: any number of requests with any number of completions.
      version: of `params`, noted with every completion.

    Raises:
      ValueError: a request is empty, too long or out of range; the message
        names its prompt id.
    """
    for request in prompts:
      requests.check(
          request,
          max_prompt_tokens=self._settings.max_prompt_tokens,
          max_completion_tokens=self._settings.max_completion_tokens,
          vocab_size=self._model.config.vocab_size,
      )
    place = placement.of_params(params)
    params = placement.put(params, place)
    programs = self._get_programs(place)
    decode_params = programs.decode_params(params)
    state = programs.empty_state()
    results = requests.Results(
        prompts,
        max_completion_tokens=self._settings.max_completion_tokens,
    )
    rows = requests.Assignment(
        prompts,
        num_rows=self._settings.num_rows,
        max_completion_tokens=self._settings.max_completion_tokens,
        seed=self._seed,
    )
    unread = []  # At most one (collected rows on the device, their owners).
    prefill = _Prefill({}, ())
    watch = self._make_watch()
    while rows.queue or rows.owners:
      while rows.can_place:
        if rows.queue[0][0] not in prefill.slots:
          prefill = self._prefill(programs, params, prompts, rows.queue[0][0])
        placed = rows.place(prefill.slots)
        state = programs.refill(state, *prefill.outputs, *placed)
      # With nothing left to do between chunks, one goes as far as its blocks.
      num_steps, num_blocks = blocks.plan_chunk(
          self._settings.block_lengths,
          rows.longest,
          chunk_steps=self._chunk_steps if rows.queue or watch else None,
      )
      rows.advance(num_steps)
      state, done_R = programs.decode_chunk(
          decode_params, state, np.int32(num_steps), num_blocks
      )
      # Rows that ended a chunk ago are read while this one computes.
      for collected, owned in unread:
        results.add(jax.device_get(collected), owned)
      unread.clear()
      if watch is not None:
        state, done_R = _cut_rows(programs, state, watch, rows.owners, results)
      owned = rows.release(np.asarray(done_R))
      if owned:
        unread.append((programs.collect(state), owned))
    for collected, owned in unread:
      results.add(jax.device_get(collected), owned)
    return results.completions(version)

  def _make_watch(self) -> stop_strings_lib.Watch | None:
    if not self._stop_strings:
      return None
    return stop_strings_lib.Watch(self._stop_strings, self._text_fn)

  def _get_programs(self, place: jax.sharding.Sharding) -> _Programs:
    """Returns the programs for params at `place`; they compile when called."""
    if place not in self._programs:
      model, settings = self._model, self._settings
      bind = functools.partial
      # Outputs are told where to lie: a program whose inputs lie where they did
      # before is not compiled again.
      jit = functools.partial(jax.jit, out_shardings=place)
      self._programs[place] = _Programs(
          empty_state=jit(
              bind(rows_lib.empty_state, model.init_cache, settings)
          ),
          decode_params=jax.jit(model.decode_params),
          prefill=jit(model.prefill),
          refill=jit(
              bind(rows_lib.refill, model.fill_cache, settings),
              donate_argnums=0,
          ),
          decode_chunk=jit(
              bind(rows_lib.decode_chunk, model.decode_step, settings),
              donate_argnums=1,
              static_argnums=3,
          ),
          cut=jit(rows_lib.cut, donate_argnums=0),
          collect=jit(bind(rows_lib.collect, settings)),
      )
    return self._programs[place]

  def _prefill(
      self,
      programs: _Programs,
      params: types.PyTree,
      prompts: Sequence[Request],
      first: int,
  ) -> _Prefill:
    """Prefills the prompts from `first` on, as many as one batch holds."""
    batch = prompts[first : first + self._prefill_size]
    shape = (self._prefill_size, self._settings.max_prompt_tokens)
    tokens_BxP = np.full(shape, self._settings.pad_id, np.int32)
    mask_BxP = np.zeros(shape, np.float32)
    for slot, request in enumerate(batch):
      length = len(request.prompt_tokens)
      tokens_BxP[slot, -length:] = request.prompt_tokens
      mask_BxP[slot, -length:] = 1
    outputs = programs.prefill(params, tokens_BxP, mask_BxP)
    slots = {first + slot: slot for slot in range(len(batch))}
    return _Prefill(slots, (*outputs, mask_BxP))


def _cut_rows(
    programs: _Programs,
    state: rows_lib.DecodeState,
    watch: stop_strings_lib.Watch,
    owners: dict[int, tuple[int, int]],
    results: requests.Results,
) -> tuple[rows_lib.DecodeState, jax.Array]:
  """Ends the rows whose completions hold a stop string.

  Returns:
    The state, and [R] bool, True in the rows that are not active.
  """
  read = state.tokens, state.lengths, state.stopped
  cut_R = watch.cuts(owners.items(), *jax.device_get(read))
  results.note_cuts(owners[row] for row in np.flatnonzero(cut_R >= 0))
  return programs.cut(state, cut_R)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Device side of the sampler: R rows, each decoding one completion.

`refill` starts rows, `decode_chunk` advances all of them, `give` appends an
environment's tokens, `feed` runs many of these in one call, `exchange` parks
rows and brings them back, and `collect` reads them out. All are pure functions
of fixed shapes; `SlotPrograms` compiles them.

Axes: B prompts of a prefill, Q their padded length, R rows, U prompts shared by
rows, P prompt tokens, T completion tokens, L = P + T, C columns of the cache,
V vocabulary, N layers, A experts per token, and in `kept_RxTxC` C tokens that
truncated sampling keeps.
"""

import bisect
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.losses import logprobs
from tba_jax.models.kernels import ragged_attention
from tba_jax.models.net import cache as cache_lib
from tba_jax.models.net import sequence
from tba_jax.models.net import spread
from tba_jax.models.net import stacks
from tba_jax.models.net import transformer
from tba_jax.sampling import logits
from tba_jax.sampling import requests
from tba_jax.sampling import sharing

Settings = requests.SamplingSettings
Sharding = jax.sharding.Sharding
Spec = jax.sharding.PartitionSpec

# Explicit, so that no JAX flag changes the samples.
_RNG_IMPL = "threefry2x32"
# Mesh axes that split prompts and rows.
_BATCH_AXES = ("data", "fsdp")
# Mesh axis that splits heads and vocabulary.
_TENSOR = "tensor"
# The cache's columns are cut into segments. A decode step reads only the first
# few, so its cost grows with the tokens in use. Each number of segments is
# another program, so there are few.
_MOST_SEGMENTS = 3
_SHORTEST_SEGMENT = 32
# XLA options for decode steps, by platform. On GPUs, XLA would merge the
# products of queries, keys and values and copy their weights in each step.
_OPTIONS = {"gpu": {"xla_gpu_dot_merger_threshold_mb": 0}}
# A decode loop may shrink to R / 2 and R / 4 rows, but not below 16.
_MOST_SHRINKING = 4
_FEWEST_ROWS = 16


def segment_lengths(
    max_prompt_tokens: int, max_completion_tokens: int, kernel: str = "plain"
) -> tuple[int, ...]:
  """Returns the columns of each segment: P, then lengths that sum to T.

  Kernels read only a row's tokens and take a single segment of T columns.
  """
  if kernel != "plain":
    return max_prompt_tokens, max_completion_tokens
  segments, rest = [], max_completion_tokens
  while rest > _SHORTEST_SEGMENT and len(segments) < _MOST_SEGMENTS - 1:
    segments.insert(0, rest // 2)
    rest -= rest // 2
  return max_prompt_tokens, rest, *segments


def plan_chunk(
    lengths: Sequence[int], longest: int, *, chunk_steps: int | None
) -> tuple[int, int]:
  """Returns a chunk's number of steps and of cache segments.

  Args:
    lengths: columns of each segment, prompts first.
    longest: tokens of the longest row, at least 1.
    chunk_steps: number of steps; None takes as many as fit into the fewest
      segments.
  """
  ends = list(itertools.accumulate(lengths[1:]))
  # A step writes the previous token, so the last one needs no column.
  last_column = longest - 1 + (chunk_steps or 1)
  num_own = min(bisect.bisect_left(ends, last_column), len(ends) - 1)
  steps = chunk_steps or max(1, ends[num_own] - longest + 1)
  return steps, num_own + 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """State of R rows, each decoding a completion.

  cache: the model's KV cache: the left-padded prompt, then token t of the
    completion in column P + t. All prompts end in column P - 1, because
    attention measures distances in columns.
  prompt_mask: [U, P] float32, 1 on tokens of the prompts, each shared by R / U
    adjacent rows.
  key_data: [R, 2] uint32, random key of each row.
  tokens: [R, T] int32, sampled so far.
  logprobs: [R, T] float32, nats, of the sampled tokens.
  plain_logprobs: [R, T] float32, nats, under the untruncated model; None if it
    is the sampling distribution.
  kept: [R, T, C] int32, ids of the tokens that truncated sampling kept for each
    sampled one, -1 after the last; None if they are not recorded.
  limits: [R] int32, most tokens of the completion.
  last_token: [R] int32, the newest token, not yet fed to the model.
  lengths: [R] int32, tokens so far, at least 1 in a used row.
  given: [R] int32, end of the environment's tokens that come next; None if
    all tokens are sampled.
  stopped: [R] bool, whether the newest token is a stop token.
  active: [R] bool, whether the row has tokens left to sample.
  """

  cache: types.PyTree
  prompt_mask: jax.Array
  key_data: jax.Array
  tokens: jax.Array
  logprobs: jax.Array
  plain_logprobs: jax.Array | None
  kept: jax.Array | None
  limits: jax.Array
  last_token: jax.Array
  lengths: jax.Array
  given: jax.Array | None
  stopped: jax.Array
  active: jax.Array


class Ends(NamedTuple):
  """Progress of rows after a chunk.

  idle: [R] bool, whether the row has no token left to sample.
  lengths: [R] int32, tokens so far.
  stopped: [R] bool, whether the newest token is a stop token.
  """

  idle: jax.Array
  lengths: jax.Array
  stopped: jax.Array


def empty_state(
    model: transformer.Model,
    settings: Settings,
    sharding: Sharding,
    num_rows: int | None = None,
) -> DecodeState:
  """Returns a state without used rows; `num_rows` defaults to the setting."""
  R, P = num_rows or settings.num_rows, settings.max_prompt_tokens
  T = settings.max_completion_tokens
  plain = settings.samples_plainly
  head_shards = num_head_shards(sharding, model.config)
  shared = rows_per_prompt(settings, sharding)
  lengths = segment_lengths(P, T, decode_kernel(model, settings, sharding))
  return DecodeState(
      cache=model.init_cache(
          *(R, lengths, head_shards, shared), settings.has_routes
      ),
      prompt_mask=jnp.zeros((R // shared, P), jnp.float32),
      key_data=jnp.zeros((R, 2), jnp.uint32),
      tokens=jnp.zeros((R, T), jnp.int32),
      logprobs=jnp.zeros((R, T), jnp.float32),
      plain_logprobs=None if plain else jnp.zeros((R, T), jnp.float32),
      kept=(
          jnp.full((R, T, settings.num_kept), -1, jnp.int32)
          if settings.num_kept
          else None
      ),
      limits=jnp.zeros((R,), jnp.int32),
      last_token=jnp.zeros((R,), jnp.int32),
      lengths=jnp.ones((R,), jnp.int32),
      given=jnp.zeros((R,), jnp.int32) if settings.has_turns else None,
      stopped=jnp.zeros((R,), bool),
      active=jnp.zeros((R,), bool),
  )


def prefill(
    model: transformer.Model,
    settings: Settings,
    sharding: Sharding,
    decode_params: types.PyTree,
    tokens_BxQ: jax.Array,
    mask_BxQ: jax.Array,
) -> tuple[jax.Array, types.PyTree, jax.Array]:
  """Runs prompts left-padded to Q <= P tokens.

  Returns:
    Logits [B, V] float32, the prompts' cache and mask [B, P], left-padded with
    masked columns.
  """
  P = settings.max_prompt_tokens
  run = _prompt_pass(model, sharding, len(tokens_BxQ))
  outputs = *run(decode_params, tokens_BxQ, mask_BxQ), mask_BxQ
  if mask_BxQ.shape[1] == P:
    return outputs
  widest = lambda x_BxQ: jnp.zeros((x_BxQ.shape[0], P), x_BxQ.dtype)
  shapes = jax.eval_shape(
      run, decode_params, widest(tokens_BxQ), widest(mask_BxQ)
  )
  fill = lambda leaf, shape: jnp.pad(
      leaf, [(n - m, 0) for m, n in zip(leaf.shape, shape.shape)]
  )
  return jax.tree.map(fill, outputs, (*shapes, widest(mask_BxQ)))


def refill(
    model: transformer.Model,
    settings: Settings,
    sharding: Sharding,
    state: DecodeState,
    prefilled: tuple[jax.Array, types.PyTree, jax.Array],
    source_R: jax.Array,
    ids_Rx4: jax.Array,
    limit_R: jax.Array,
) -> DecodeState:
  """Starts rows: copies the prompt's cache and draws the first token.

  Args:
    model, settings, sharding, state: the sampler's.
    prefilled: outputs of `prefill`.
    source_R: [R] int32, each row's prompt in the prefill; -1 keeps the row.
    ids_Rx4: [R, 4] uint32, seed, prompt id, visit and sample index.
    limit_R: [R] int32, most tokens of the completion, 1 to T.
  """
  logits_BxV, prompt_cache, mask_BxP = prefilled
  shared = len(source_R) // len(state.prompt_mask)
  cache = _fill_cache(model, sharding, state.cache, prompt_cache, source_R)
  fills_U = source_R[::shared, None]
  new_R = source_R >= 0
  source_R = jnp.maximum(source_R, 0)
  select = lambda new, old: jnp.where(
      new_R.reshape(-1, *[1] * (old.ndim - 1)), new, old
  )
  key_data_Rx2 = _row_keys(ids_Rx4)
  start_R = jnp.zeros_like(source_R)
  drawn = draw(settings, sharding, logits_BxV[source_R], key_data_Rx2, start_R)
  state = dataclasses.replace(
      state,
      cache=cache,
      prompt_mask=jnp.where(
          fills_U >= 0, mask_BxP[source_R[::shared]], state.prompt_mask
      ),
      key_data=select(key_data_Rx2, state.key_data),
      limits=select(limit_R, state.limits),
      lengths=select(start_R, state.lengths),
      given=None if state.given is None else select(start_R, state.given),
      stopped=state.stopped & ~new_R,
      active=state.active | new_R,
  )
  return _append(settings, state, new_R, *drawn)


def decode_chunk(
    model: transformer.Model,
    settings: Settings,
    sharding: Sharding,
    decode_params: types.PyTree,
    state: DecodeState,
    num_steps: jax.Array,
    num_idle: jax.Array,
    num_segments: int,
) -> tuple[DecodeState, tuple[jax.Array, Ends]]:
  """Samples up to `num_steps` tokens in each active row.

  Stops early once `num_idle` rows, or all of them, are idle.

  Args:
    model, settings, sharding: the sampler's.
    num_steps, num_idle: [] int32; arrays, so that one program serves all.
    num_segments: static; cache segments to read and write, with room for all
      tokens of active rows at the end.

  Returns:
    The state, the number of steps taken, and the progress of the rows.
  """
  P, T = settings.max_prompt_tokens, settings.max_completion_tokens
  num_rows = settings.num_rows
  kernel = decode_kernel(model, settings, sharding)
  if kernel == "plain":
    decode_step = _of_experts(model, model.decode_step, sharding, num_rows)
  else:
    run = functools.partial(model.decode_step, kernel=kernel)
    decode_step = _on_mesh(run, sharding, num_rows)
  num_columns = sum(segment_lengths(P, T, kernel)[:num_segments])

  def body(carry):
    step, state = carry
    # An idle row feeds its last token again, which leaves a KV cache unchanged.
    last_R = state.lengths - 1
    shared = len(last_R) // len(state.prompt_mask)
    prompt_mask_RxP = jnp.repeat(state.prompt_mask, shared, axis=0)
    prompt_lengths_R = jnp.sum(prompt_mask_RxP, axis=-1).astype(jnp.int32)
    # Token t has the same column in every row. Otherwise the summation order of
    # a row's keys, and so the last bit of its log-probs, would depend on when
    # the row started.
    seen_RxC = jnp.concatenate(
        [prompt_mask_RxP > 0, _columns(state) <= last_R[:, None]], axis=1
    )
    if kernel != "plain":
      # Kernels skip idle rows, which write garbage to the column of their last
      # token. A row that continues feeds that token again.
      seen_RxC &= state.active[:, None]
    write_R = P + last_R
    if model.config.has_states:
      # A state would have the token twice: past the end nothing is written.
      write_R = jnp.where(state.active, write_R, P + T)
    logits_RxV, cache = decode_step(
        decode_params,
        state.last_token,
        prompt_lengths_R + last_R,
        state.cache[:num_segments],
        seen_RxC[:, :num_columns],
        write_R,
    )
    state = dataclasses.replace(
        state, cache=[*cache, *state.cache[num_segments:]]
    )
    drawn = draw(settings, sharding, logits_RxV, state.key_data, state.lengths)
    state = _append(settings, state, state.active, *drawn)
    return step + 1, state

  def unfinished(carry):
    step, state = carry
    idle = jnp.sum(~state.active, dtype=jnp.int32)
    return (step < num_steps) & (idle < num_idle)

  steps, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))
  return state, (steps, _ends(state))


def recompute_cache(
    model: transformer.Model,
    sharding: Sharding,
    decode_params: types.PyTree,
    state: DecodeState,
    tokens_BxL: jax.Array,
    mask_BxL: jax.Array,
    source_R: jax.Array,
) -> DecodeState:
  """Recomputes the KV cache of some rows with newer params.

  Args:
    model, sharding: the sampler's.
    tokens_BxL: [B, P + T] int32, tokens in the cache's columns: prompts, and
      completions without the last token, which is not fed yet.
    mask_BxL: [B, P + T] float32, 1 on these tokens.
    source_R: [R] int32, each row's index in the batch; -1 keeps the row.
  """
  run = _prompt_pass(model, sharding, len(tokens_BxL))
  _, cache = run(decode_params, tokens_BxL, mask_BxL)
  cache = _fill_cache(model, sharding, state.cache, cache, source_R)
  return dataclasses.replace(state, cache=cache)


def cut(state: DecodeState, cut_R: jax.Array) -> tuple[DecodeState, Ends]:
  """Ends rows after `cut_R` tokens, [R] int32; negative values keep a row.

  Returns:
    The state and the progress of the rows.
  """
  is_cut_R = cut_R >= 0
  # An idle row feeds its last token again, now in the column of the last kept
  # token, which is no longer read.
  state = dataclasses.replace(
      state,
      lengths=jnp.where(is_cut_R, cut_R, state.lengths),
      stopped=state.stopped & ~is_cut_R,
      active=state.active & ~is_cut_R,
  )
  return state, _ends(state)


def give(
    state: DecodeState, tokens_RxT: jax.Array, given_R: jax.Array
) -> DecodeState:
  """Appends an environment's tokens to rows, which then continue.

  Unless `feed` runs them, decode steps feed these tokens to the model in place
  of sampled ones. So cache and log-probs have the same bits as in a row that
  was never interrupted.

  Args:
    state: row state; rows that will continue are idle.
    tokens_RxT: [R, T] int32, the environment's tokens in their columns.
    given_R: [R] int32, end of these tokens, which begin at the row's length;
      -1 keeps the row.
  """
  new_R, columns_RxT = given_R >= 0, _columns(state)
  is_new_RxT = new_R[:, None] & (columns_RxT < given_R[:, None])
  is_new_RxT &= columns_RxT >= state.lengths[:, None]
  last_R = _token_at(state, state.lengths - 1)
  return dataclasses.replace(
      state,
      tokens=jnp.where(is_new_RxT, tokens_RxT, state.tokens),
      # After a cut, the state's last token lies beyond the cut.
      last_token=jnp.where(new_R, last_R, state.last_token),
      given=jnp.where(new_R, given_R, state.given),
      stopped=state.stopped & ~new_R,
      active=state.active | new_R,
  )


def feed(
    model: transformer.Model,
    settings: Settings,
    sharding: Sharding,
    decode_params: types.PyTree,
    state: DecodeState,
    rows_B: jax.Array,
    count_B: jax.Array,
    length: int,
) -> DecodeState:
  """Feeds an environment's tokens in one call instead of many decode steps.

  Later log-probs equal those after decode steps up to rounding, and do not
  depend on the other rows.

  Args:
    model, settings, sharding: the sampler's.
    state: row state from `give`.
    rows_B: [B] int32, rows to feed; indices from R on are unused.
    count_B: [B] int32, tokens to feed per row, up to `length`.
    length: static; Q, capacity of the call in tokens.
  """
  P, (R, T) = settings.max_prompt_tokens, state.tokens.shape
  # Rows may share prompts.
  rows_of = lambda leaf: leaf[jnp.minimum(rows_B, R - 1) // (R // len(leaf))]
  own_tokens_BxT = rows_of(state.tokens)
  last_B = rows_of(state.lengths) - 1
  token_at = lambda column_BxN: jnp.take_along_axis(
      own_tokens_BxT, jnp.minimum(column_BxN, T - 1), axis=1
  )
  columns_BxQ = last_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
  is_fed_BxQ = columns_BxQ < (last_B + count_B)[:, None]
  prompt_mask_BxP = rows_of(state.prompt_mask)
  prompt_lengths_B = jnp.sum(prompt_mask_BxP, axis=-1).astype(jnp.int32)
  B = len(rows_B)
  seen_BxQxC = jnp.concatenate(
      [
          jnp.broadcast_to(prompt_mask_BxP[:, None] > 0, (B, length, P)),
          jnp.arange(T)[None, None] <= columns_BxQ[..., None],
      ],
      axis=-1,
  )
  positions_BxQ = prompt_lengths_B[:, None] + columns_BxQ
  _, *fed = _of_experts(model, model.feed, sharding, B)(
      decode_params,
      token_at(columns_BxQ),
      jnp.minimum(positions_BxQ, P + T - 1),
      jax.tree.map(rows_of, state.cache),
      seen_BxQxC,
      # Writes past the last column are dropped.
      jnp.where(is_fed_BxQ, P + columns_BxQ, P + T),
  )
  prompts, *own = state.cache
  put = lambda leaf, new: leaf.at[rows_B].set(
      new.astype(leaf.dtype), mode="drop"
  )
  lengths_R = state.lengths.at[rows_B].add(count_B, mode="drop")
  columns_RxT = _columns(state)
  is_given_RxT = columns_RxT >= state.lengths[:, None]
  is_given_RxT &= columns_RxT < lengths_R[:, None]
  clear = lambda x_RxT: jnp.where(is_given_RxT, 0.0, x_RxT)
  plain_RxT = state.plain_logprobs
  return dataclasses.replace(
      state,
      cache=[prompts, *jax.tree.map(put, own, fed)],
      logprobs=clear(state.logprobs),
      plain_logprobs=None if plain_RxT is None else clear(plain_RxT),
      last_token=put(
          state.last_token, token_at((last_B + count_B)[:, None])[:, 0]
      ),
      lengths=lengths_R,
  )


def exchange(
    sharding: Sharding,
    state: DecodeState,
    aside: DecodeState,
    source_W: jax.Array,
    source_R: jax.Array,
) -> tuple[DecodeState, DecodeState]:
  """Copies rows of `state` to `aside`, then rows of `aside` to `state`.

  Args:
    sharding: placement of the params. On a mesh each device moves its own rows.
    state, aside: states of R rows and W spare rows, without shared prompts.
    source_W: [W] int32, row of `state` that moves to each row of `aside`,
      counted on its device; -1 for none.
    source_R: [R] int32, row of `aside` that moves to each row of `state`.

  Returns:
    The two states.
  """

  def move(state, aside, source_W, source_R):
    aside = _move(aside, state, source_W)
    return _move(state, aside, source_R), aside

  if not isinstance(sharding, jax.sharding.NamedSharding):
    return move(state, aside, source_W, source_R)
  specs_of = lambda state: jax.tree.map(
      lambda of_leaf: of_leaf.spec,
      _shardings(sharding, len(state.lengths), state),
  )
  rows_of = lambda source: _row_spec(sharding, len(source))
  specs = specs_of(state), specs_of(aside)
  return jax.shard_map(
      move,
      mesh=sharding.mesh,
      in_specs=(*specs, rows_of(source_W), rows_of(source_R)),
      out_specs=specs,
      check_vma=False,
  )(state, aside, source_W, source_R)


def _move(
    target: DecodeState,
    source: DecodeState,
    source_R: jax.Array,
) -> DecodeState:
  """Copies rows of `source` to `target`, with the used part of their cache."""
  lengths_R = jnp.where(source_R >= 0, source.lengths[source_R], 0)
  # Rows with the most tokens come first.
  rows_R = jnp.argsort(-lengths_R)

  def copy(
      target: types.PyTree, source: types.PyTree, used: int
  ) -> types.PyTree:
    """Copies the rows that have more than `used` tokens."""

    def copy_row(i: jax.Array, target: types.PyTree) -> types.PyTree:
      row = rows_R[i]
      put = lambda leaf, other: jax.lax.dynamic_update_index_in_dim(
          leaf, other[source_R[row]], row, 0
      )
      return jax.tree.map(put, target, source)

    count = jnp.sum(lengths_R > used)
    return jax.lax.fori_loop(0, count, copy_row, target)

  prompts, *own = target.cache
  columns = map(cache_lib.num_columns, own)
  starts = itertools.accumulate(columns, initial=0)
  without_own = lambda state: dataclasses.replace(state, cache=state.cache[:1])
  moved = copy(without_own(target), without_own(source), 0)
  segments = [
      copy(segment, other, start)
      for segment, other, start in zip(own, source.cache[1:], starts)
  ]
  return dataclasses.replace(moved, cache=[*moved.cache, *segments])


def take(state: DecodeState, rows: jax.Array) -> DecodeState:
  """Returns the state of the rows with indices `rows`, int32."""
  return jax.tree.map(lambda leaf: leaf[rows], state)


def grow(state: DecodeState) -> DecodeState:
  """Returns the state with twice as many rows; the new ones are unused."""
  state = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), state)
  return dataclasses.replace(state, lengths=jnp.maximum(state.lengths, 1))


def collect(settings: Settings, state: DecodeState) -> tuple[Any, ...]:
  """Returns tokens, log-probs, plain log-probs [R, T], lengths and stopped [R].

  Plain log-probs are None if they equal the log-probs. The sixth item is None,
  or the recorded experts of prompts [U, P, N, A] and completions [R, T, N, A]
  in the N layers with experts, in bytes, undefined for tokens not fed yet; the
  seventh is None, or the kept tokens [R, T, C], undefined for tokens that are
  not sampled.
  """
  routes = None
  if settings.has_routes:
    prompts, *own = (
        jnp.stack(
            [x["routes"] for x in segment["layers"] if "routes" in x], axis=2
        )
        for segment in state.cache
    )
    in_bytes = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(
        *x.shape[:-1], -1
    )
    routes = in_bytes(prompts), in_bytes(jnp.concatenate(own, axis=1))
  sampled_RxT = _columns(state) < state.lengths[:, None]
  plain_RxT = state.plain_logprobs
  return (
      jnp.where(sampled_RxT, state.tokens, settings.pad_id),
      jnp.where(sampled_RxT, state.logprobs, 0.0),
      None if plain_RxT is None else jnp.where(sampled_RxT, plain_RxT, 0.0),
      # Copies, since the state itself is donated to the next program.
      jnp.copy(state.lengths),
      jnp.copy(state.stopped),
      routes,
      None if state.kept is None else jnp.copy(state.kept),
  )


def _ends(state: DecodeState) -> Ends:
  # Copies, since the state itself is donated to the next program.
  return Ends(~state.active, jnp.copy(state.lengths), jnp.copy(state.stopped))


def _columns(state: DecodeState) -> jax.Array:
  """Returns [R, T] int32, the column of each entry."""
  return jax.lax.broadcasted_iota(jnp.int32, state.tokens.shape, 1)


def _token_at(state: DecodeState, column_R: jax.Array) -> jax.Array:
  """Returns [R] int32, the token of each row in a column; 0 past the end."""
  here_RxT = _columns(state) == column_R[:, None]
  return jnp.sum(jnp.where(here_RxT, state.tokens, 0), axis=1)


def _row_keys(ids_Rx4: jax.Array) -> jax.Array:
  """Returns [R, 2] uint32: the key of (seed, prompt id, visit, sample)."""

  def fold(ids_4: jax.Array) -> jax.Array:
    seed, *others = ids_4
    root = jax.random.key(seed, impl=_RNG_IMPL)
    return functools.reduce(jax.random.fold_in, others, root)

  return jax.random.key_data(jax.vmap(fold)(ids_Rx4))


def token_logprobs(
    model: transformer.Model,
    sharding: Sharding,
    decode_params: types.PyTree,
    tokens_BxL: jax.Array,
) -> jax.Array:
  """Returns [B, L - 1] float32, log π of each token after the first, nats.

  Temperature is 1, and nothing is truncated. L is at most P + T.
  """
  run = _forward_pass(model, model.logits, sharding, len(tokens_BxL))
  logits_BxLxV = run(decode_params, tokens_BxL, jnp.ones_like(tokens_BxL))
  return logprobs.token_logprobs(
      logits_BxLxV[:, :-1], tokens_BxL[:, 1:], temperature=1.0
  )


def _prompt_pass(
    model: transformer.Model, sharding: Sharding, num_prompts: int
) -> Callable[..., tuple[jax.Array, types.PyTree]]:
  return _forward_pass(model, model.prefill, sharding, num_prompts)


def _forward_pass(
    model: transformer.Model,
    fn: Callable[..., Any],
    sharding: Sharding,
    num_rows: int,
) -> Callable[..., Any]:
  """Wraps a forward pass to run on the sampler's mesh, with its kernels."""
  if platform_of(sharding) == "cpu" and not model.config.num_experts:
    return fn
  return _on_mesh(fn, sharding, num_rows)


def _of_experts(
    model: transformer.Model,
    fn: Callable[..., Any],
    sharding: Sharding,
    num_rows: int,
) -> Callable[..., Any]:
  """Wraps a function of the model; models with experts get the mesh.

  The compiler shards the others automatically.
  """
  return _on_mesh(fn, sharding, num_rows) if model.config.num_experts else fn


def _on_mesh(
    fn: Callable[..., Any], sharding: Sharding, num_rows: int
) -> Callable[..., Any]:
  """Wraps a function of rows to be traced with the sampler's mesh."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    mesh = jax.sharding.Mesh(np.array([*sharding.device_set]), (_TENSOR,))
    sharding = jax.sharding.NamedSharding(mesh, Spec())
  axes = _row_axes(sharding, num_rows)
  split = (_TENSOR,)
  return sequence.split_tokens(fn, sharding.mesh, axes, (), split, split)


def _fill_cache(
    model: transformer.Model,
    sharding: Sharding,
    cache: types.PyTree,
    prompt_cache: types.PyTree,
    source_R: jax.Array,
) -> types.PyTree:
  """Returns `model.fill_cache`; on a mesh each device fills its own rows."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return model.fill_cache(cache, prompt_cache, source_R)
  num_rows = len(source_R)
  shardings = _shardings(sharding, num_rows, cache)
  specs = jax.tree.map(lambda of_leaf: of_leaf.spec, shardings)
  heads = _splits_heads(sharding, model.config.cached_heads)
  of_prompts = Spec(None, None, _TENSOR) if heads else Spec()

  def spec_of(path: Any, x: jax.Array) -> Spec:
    if path[-1].key == "state":
      return (
          Spec(None, _TENSOR) if _splits_heads(sharding, x.shape[1]) else Spec()
      )
    return of_prompts if x.ndim == 4 else Spec()

  return jax.shard_map(
      model.fill_cache,
      mesh=sharding.mesh,
      in_specs=(
          specs,
          jax.tree_util.tree_map_with_path(spec_of, prompt_cache),
          _row_spec(sharding, num_rows),
      ),
      out_specs=specs,
      check_vma=False,
  )(cache, prompt_cache, source_R)


def draw(
    settings: Settings,
    sharding: Sharding,
    logits_RxV: jax.Array,
    key_data_Rx2: jax.Array,
    position_R: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Returns the next tokens, their log-probs and plain log-probs, [R].

  The last item is None, or the kept tokens, [R, C]. If devices split the
  vocabulary, each keeps its shard of the logits.
  """
  num_rows, num_tokens = logits_RxV.shape
  num_shards = _tensor_size(sharding)
  if num_shards == 1 or num_tokens % num_shards:
    return _draw_shard(settings, None, logits_RxV, key_data_Rx2, position_R)
  rows = _row_spec(sharding, num_rows)
  return jax.shard_map(
      functools.partial(_draw_shard, settings, _TENSOR),
      mesh=sharding.mesh,
      in_specs=(_row_spec(sharding, num_rows, _TENSOR), rows, rows),
      out_specs=rows,
      check_vma=False,
  )(logits_RxV, key_data_Rx2, position_R)


def _draw_shard(
    settings: Settings,
    axis: str | None,
    logits_RxV: jax.Array,
    key_data_Rx2: jax.Array,
    position_R: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Returns `draw`; the vocabulary is split over the mesh axis `axis`."""
  keys_R = jax.random.wrap_key_data(key_data_Rx2, impl=_RNG_IMPL)
  folded_R = jax.vmap(jax.random.fold_in)(keys_R, position_R)
  # The folded key is 64 random bits; 24 of them make a float in [0, 1).
  bits_R = jax.random.key_data(folded_R)[:, 0]
  uniform_R = (bits_R >> 8).astype(jnp.float32) * 2.0**-24
  logprobs_RxV = logits.process(
      logits.explored_logits(settings, logits_RxV, keys_R, position_R, axis),
      temperature=settings.temperature,
      top_k=settings.top_k,
      top_p=settings.top_p,
      min_p=settings.min_p,
      axis=axis,
  )
  kept_RxC = None
  if settings.num_kept:
    logprobs_RxC, kept_RxC = logits.keep_likeliest(
        logprobs_RxV, settings.num_kept, axis
    )
    place_R, logprob_R = logits.sample(logprobs_RxC, uniform_R)
    token_R = jnp.take_along_axis(kept_RxC, place_R[:, None], axis=1)[:, 0]
  else:
    token_R, logprob_R = logits.sample(logprobs_RxV, uniform_R, axis)
  if settings.samples_plainly:
    return token_R, logprob_R, None, kept_RxC
  temperature = settings.plain_temperature or settings.temperature or 1.0
  plain_R = logits.plain_logprob(
      logits_RxV, token_R, temperature=temperature, axis=axis
  )
  return token_R, logprob_R, plain_R, kept_RxC


def _append(
    settings: Settings,
    state: DecodeState,
    rows_R: jax.Array,
    token_R: jax.Array,
    logprob_R: jax.Array,
    plain_R: jax.Array | None,
    kept_RxC: jax.Array | None,
) -> DecodeState:
  """Appends a token to the rows in `rows_R` and ends completed ones.

  Pending environment tokens replace sampled ones and never stop a row.
  """
  here_RxT = (_columns(state) == state.lengths[:, None]) & rows_R[:, None]
  lengths_R = state.lengths + rows_R
  may_stop_R = rows_R
  if state.given is not None:
    given_R = state.lengths < state.given
    token_R = jnp.where(given_R, _token_at(state, state.lengths), token_R)
    logprob_R = jnp.where(given_R, 0.0, logprob_R)
    plain_R = None if plain_R is None else jnp.where(given_R, 0.0, plain_R)
    may_stop_R = rows_R & ~given_R
  stopped_R = state.stopped
  for stop_id in settings.stop_ids:
    stopped_R |= may_stop_R & (token_R == stop_id)
  full_R = lengths_R >= state.limits
  write = lambda old_RxT, new_R: jnp.where(here_RxT, new_R[:, None], old_RxT)
  plain_RxT, kept_RxTxC = state.plain_logprobs, state.kept
  if kept_RxTxC is not None:
    # A scatter, so that a step writes C numbers per row.
    column_R = jnp.where(rows_R, state.lengths, kept_RxTxC.shape[1])
    kept_RxTxC = jax.vmap(
        lambda old, column, new: old.at[column].set(new, mode="drop")
    )(kept_RxTxC, column_R, kept_RxC)
  return dataclasses.replace(
      state,
      kept=kept_RxTxC,
      tokens=write(state.tokens, token_R),
      logprobs=write(state.logprobs, logprob_R),
      plain_logprobs=None if plain_RxT is None else write(plain_RxT, plain_R),
      last_token=jnp.where(rows_R, token_R, state.last_token),
      lengths=lengths_R,
      stopped=stopped_R,
      active=state.active & ~stopped_R & ~full_R,
  )


def params_sharding(params: types.PyTree) -> jax.sharding.Sharding:
  """Returns the replicated sharding on the params' devices."""
  for leaf in jax.tree.leaves(params):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(sharding.mesh, Spec())
    if sharding is not None:
      return sharding
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def cast_params(
    model: transformer.Model,
    settings: Settings,
    params: types.PyTree,
    sharding: Sharding,
) -> transformer.DecodeParams:
  """Returns `decode_params` before they are rounded to int8."""
  num_positions = settings.max_prompt_tokens + settings.max_completion_tokens
  cast = model.decode_params(params, num_positions)
  parts = _head_split(sharding)
  if parts.head_count == 1:
    return cast
  axes = model.logical_axes["blocks"]
  layers = [
      spread.layer_params(model.config, layer, axes, parts)
      for layer in cast.layers
  ]
  return dataclasses.replace(cast, layers=layers)


def decode_params(
    model: transformer.Model,
    settings: Settings,
    params: types.PyTree,
    sharding: Sharding,
) -> transformer.DecodeParams:
  """Converts params to the form for decoding with these settings.

  Layers have the heads of `SlotPrograms.model`.

  Args:
    sharding: result of `params_sharding` for the devices that decode.
  """
  cast = cast_params(model, settings, params, sharding)
  if not settings.weights:
    return cast
  # The barrier rounds the cast values, as two separate programs would.
  return model.quantize(jax.lax.optimization_barrier(cast))


def decode_shardings(
    shardings: types.PyTree, model: transformer.Model
) -> transformer.DecodeParams:
  """Returns the shardings of decode params in the compute dtype.

  Tables, a single leaf here, are replicated.

  Args:
    shardings: placement of the model's params on a mesh.
  """
  place = lambda mesh, *axes: jax.sharding.NamedSharding(mesh, Spec(*axes))
  each = jax.tree.map(lambda s: place(s.mesh, *s.spec[1:]), shardings["blocks"])
  each = spread.layer_shardings(each, model.logical_axes["blocks"])
  config = model.config
  layers = [stacks.of_kind(config, each, kind) for kind in config.kinds]
  others = {name: s for name, s in shardings.items() if name != "blocks"}
  whole = place(jax.tree.leaves(each)[0].mesh)
  return transformer.DecodeParams(layers, others, whole)


def rows_sharding(sharding: Sharding, num_rows: int) -> Sharding:
  """Returns the sharding of arrays [R, ...] on the devices of `sharding`."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  spec = _row_spec(sharding, num_rows)
  return jax.sharding.NamedSharding(sharding.mesh, spec)


def _row_spec(
    sharding: jax.sharding.NamedSharding, num_rows: int, *others: str
) -> Spec:
  """Returns the spec of arrays [R, ...]; `others` shard the axes after R.

  Rows are split over the mesh's batch axes, or replicated if not divisible.
  """
  return Spec(_row_axes(sharding, num_rows) or None, *others)


def _row_axes(
    sharding: jax.sharding.NamedSharding, num_rows: int
) -> tuple[str, ...]:
  """Returns the mesh axes that split rows; none if R is not divisible."""
  sizes = sharding.mesh.shape
  axes = tuple(a for a in _BATCH_AXES if sizes.get(a, 1) > 1)
  return () if num_rows % math.prod(sizes[a] for a in axes) else axes


def device_of(sharding: Sharding) -> Any:
  """Returns one of a sharding's devices, which may be abstract."""
  mesh = getattr(sharding, "mesh", None)
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return mesh.abstract_device
  return next(iter(sharding.device_set))


def platform_of(sharding: Sharding) -> str:
  """Returns the platform of a sharding's devices."""
  return device_of(sharding).platform


def decode_kernel(
    model: transformer.Model, settings: Settings, sharding: Sharding
) -> str:
  """Returns the attention kernel of decode steps: "plain" or another.

  Rows that share a prompt use the plain step: it reads the prompt once, and the
  rows, which start together, have similar lengths. For other rows
  `ragged_attention.choose` decides.
  """
  if rows_per_prompt(settings, sharding) > 1:
    return "plain"
  return ragged_attention.choose(
      model.config,
      device_of(sharding),
      (settings.max_prompt_tokens, settings.max_completion_tokens),
      settings.num_rows // num_row_shards(settings, sharding),
      num_head_shards(sharding, model.config) or 1,
  )


def rows_per_prompt(settings: Settings, sharding: Sharding) -> int:
  """Returns the number of adjacent rows that share a prompt's cache.

  With parked rows it is 1, because each needs a copy of its prompt.
  """
  if settings.num_waiting:
    return 1
  (device_rows,) = rows_sharding(sharding, settings.num_rows).shard_shape(
      (settings.num_rows,)
  )
  return sharing.rows_per_prompt(
      settings.most_rows_per_prompt, device_rows, platform_of(sharding)
  )


def num_row_shards(settings: Settings, sharding: Sharding) -> int:
  """Returns the number of devices that split the rows."""
  (device_rows,) = rows_sharding(sharding, settings.num_rows).shard_shape(
      (settings.num_rows,)
  )
  return settings.num_rows // device_rows


def _tensor_size(sharding: Sharding) -> int:
  """Returns the size of the mesh axis that splits heads and vocabulary."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return 1
  return sharding.mesh.shape.get(_TENSOR, 1)


def _splits_heads(sharding: Sharding, num_kv_heads: int) -> bool:
  return (
      _tensor_size(sharding) > 1 and num_kv_heads % _tensor_size(sharding) == 0
  )


def num_head_shards(
    sharding: Sharding, config: transformer.ModelConfig
) -> int | None:
  """Returns the `num_parts` of `cache.empty` for the sampler's devices."""
  platform = platform_of(sharding)
  if platform != "tpu":
    return None if platform == "cpu" else config.cached_heads
  splits = _splits_heads(sharding, config.cached_heads)
  return _tensor_size(sharding) if splits else 1


def _shardings(sharding: Sharding, num_rows: int, tree: Any) -> Any:
  """Returns the shardings of arrays [R, ...], given their shapes.

  KV heads are split over `tensor` if divisible.
  """
  rows, num_shards = rows_sharding(sharding, num_rows), _tensor_size(sharding)

  def of_leaf(leaf: Any) -> Sharding:
    # Only keys, values and states have four axes; the second is heads.
    if leaf.ndim < 4 or num_shards == 1 or leaf.shape[1] % num_shards:
      return rows
    spec = _row_spec(sharding, num_rows, _TENSOR)
    return jax.sharding.NamedSharding(sharding.mesh, spec)

  return jax.tree.map(of_leaf, tree)


def _head_split(sharding: Sharding) -> sequence.Split:
  """Returns the split of heads alone."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sequence.WHOLE
  return sequence.Split(sharding.mesh, (), (), (_TENSOR,))


class SlotPrograms:
  """The functions above, compiled for params with one sharding.

  model: shape and functions, with more heads if the mesh does not divide them
    (`models/net/spread.py`).
  """

  def __init__(
      self,
      model: transformer.Model,
      settings: Settings,
      sharding: jax.sharding.Sharding,
  ):
    """Creates jitted functions; `sharding` comes from `params_sharding`."""
    P, T = settings.max_prompt_tokens, settings.max_completion_tokens
    shape = spread.model_over(model.config, _head_split(sharding))
    if shape != model.config:
      model = transformer.make_model(shape)
    self.model = model
    kernel = decode_kernel(model, settings, sharding)
    self._settings = settings
    self.segment_lengths = segment_lengths(P, T, kernel)
    self.num_segments = len(self.segment_lengths)
    self.rows_per_prompt = rows_per_prompt(settings, sharding)
    self.num_row_shards = num_row_shards(settings, sharding)
    self.sharding = sharding
    placed = lambda fn: functools.partial(fn, model, settings, sharding)
    # Fixed output shardings, so that consumers compile only once.
    self._state_shapes = jax.eval_shape(placed(empty_state))
    state = _shardings(sharding, settings.num_rows, self._state_shapes)
    self._state_shardings = state
    # State of the spare rows.
    empty_aside = functools.partial(
        placed(empty_state), num_rows=settings.num_waiting
    )
    self._aside_shapes = None
    if settings.num_waiting:
      self._aside_shapes = jax.eval_shape(empty_aside)
    jit = functools.partial(jax.jit, out_shardings=sharding)
    jit_state = functools.partial(jax.jit, out_shardings=state)
    jit_pair = functools.partial(jax.jit, out_shardings=(state, sharding))
    self.empty_state = jit_state(placed(empty_state))
    self.empty_aside = jit_state(empty_aside)
    self.prefill = jit(placed(prefill))
    over_rows = rows_sharding(sharding, settings.prefill_size)
    if over_rows != sharding:
      # Each device runs its share of the prompts and gets every prompt's cache.
      self.prefill = jit(
          placed(prefill), in_shardings=(None, over_rows, over_rows)
      )
    self.refill = jit_state(placed(refill), donate_argnums=0)
    self.decode_chunk = jit_pair(
        placed(decode_chunk),
        donate_argnums=1,
        static_argnums=4,
        compiler_options=_OPTIONS.get(platform_of(sharding)),
    )
    self.recompute_cache = jit_state(
        functools.partial(recompute_cache, model, sharding), donate_argnums=1
    )
    self.cut = jit_pair(cut, donate_argnums=0)
    self.give = jit_state(give, donate_argnums=0)
    # If several devices split the rows, decode steps feed all tokens.
    self.feed_lengths = (
        settings.feed_lengths if self.num_row_shards == 1 else ()
    )
    self.feed = jit_state(
        functools.partial(feed, model, settings, sharding),
        donate_argnums=1,
        static_argnums=4,
    )
    self.exchange = jax.jit(
        functools.partial(exchange, sharding),
        donate_argnums=(0, 1),
        out_shardings=(state, state),
    )
    self.collect = jit(functools.partial(collect, settings))
    self.token_logprobs = jit(
        functools.partial(token_logprobs, model, sharding)
    )
    self.take, self.grow = jit_state(take), jit_state(grow)
    self.known_same_bits: dict[int, bool] = {}

  @property
  def abstract_state(self) -> DecodeState:
    """Shapes and shardings of the decode state."""
    return self._abstract(self._state_shapes)

  @property
  def abstract_aside(self) -> DecodeState | None:
    """Shapes and shardings of the spare rows; None without any."""
    shapes = self._aside_shapes
    return None if shapes is None else self._abstract(shapes)

  def _abstract(self, shapes: DecodeState) -> DecodeState:
    make = lambda x, sharding: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding
    )
    return jax.tree.map(make, shapes, self._state_shardings)

  def fewer_rows(self, num_rows: int) -> int:
    """Returns half the rows if a decode loop may shrink to them, otherwise 0.

    Only a single CPU shrinks: elsewhere fewer rows make no step faster, and
    rows may share prompts.
    """
    *others, device = self.sharding.device_set
    least = self._settings.num_rows // _MOST_SHRINKING
    half = num_rows // 2
    if device.platform != "cpu" or others or self.rows_per_prompt > 1:
      return 0
    if num_rows % 2:
      return 0
    if half < max(least, _FEWEST_ROWS) or not self.known_same_bits.get(
        half, True
    ):
      return 0
    return half

  def same_bits(
      self, params: types.PyTree, num_rows: int, fewer_rows: int
  ) -> bool:
    """Returns whether a program with fewer rows computes the same bits.

    A matrix product of fewer rows may use another kernel with another summation
    order, depending on the CPU. So two decode steps over random caches are
    compared, once per number of rows.
    """
    if fewer_rows not in self.known_same_bits:
      self.known_same_bits[fewer_rows] = all(
          self._compare(params, num_rows, fewer_rows, num_segments)
          for num_segments in range(2, self.num_segments + 1)
      )
    return self.known_same_bits[fewer_rows]

  def _compare(
      self,
      params: types.PyTree,
      num_rows: int,
      fewer_rows: int,
      num_segments: int,
  ) -> bool:
    step = lambda state: self.decode_chunk(
        params, state, np.int32(2), np.int32(num_rows + 1), num_segments
    )[0]
    rows = np.arange(num_rows - fewer_rows, num_rows, dtype=np.int32)
    fewer = step(self.take(self._random_state(num_rows), rows))
    whole = self.take(step(self._random_state(num_rows)), rows)
    pairs = zip(jax.tree.leaves(fewer), jax.tree.leaves(whole), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)

  def _random_state(self, num_rows: int) -> DecodeState:
    """Returns a state with active rows, all at least half full."""
    rng = np.random.default_rng(0)
    T = self._settings.max_completion_tokens

    def fill(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
      shape = (num_rows, *leaf.shape[1:])
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        return rng.standard_normal(shape).astype(leaf.dtype)
      return np.zeros(shape, leaf.dtype)

    state = jax.tree.map(fill, self._state_shapes)
    state = dataclasses.replace(
        state,
        prompt_mask=np.ones_like(state.prompt_mask),
        lengths=rng.integers(1 + T // 2, T + 1, num_rows, np.int32),
        limits=np.full(num_rows, T + 2, np.int32),
        active=np.ones(num_rows, bool),
    )
    return jax.device_put(state, self.sharding)

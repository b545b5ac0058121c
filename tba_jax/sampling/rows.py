# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The device side of the sampler: rows in flight and what is done to them.

`refill` starts rows, `decode_chunk` advances all of them, `collect` reads them
out. All are pure functions of fixed shapes, to be jitted by their caller.

Axes: B prompts of a prefill, R rows, P prompt tokens, T completion tokens, V
vocabulary; N layers, G key-value heads and Dh head width in the caches.
"""

import bisect
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.sampling import logits

# How the cache's columns are cut into blocks, and which a chunk reads.
#
# A decode step reads the prompts' block and the first blocks of sampled tokens,
# as many as hold what is there: its cost grows with the tokens that are live,
# not
# with the most that there may be.


# Each number of blocks is a program of its own, so they are few: at most so
# many for sampled tokens, and none halved below this length.
_MOST_BLOCKS = 3
_SHORTEST_BLOCK = 32


def block_lengths(
    max_prompt_tokens: int, max_completion_tokens: int
) -> tuple[int, ...]:
  """Returns the columns of each block: P, then lengths that sum to T."""
  blocks, rest = [], max_completion_tokens
  while rest > _SHORTEST_BLOCK and len(blocks) < _MOST_BLOCKS - 1:
    blocks.insert(0, rest // 2)
    rest -= rest // 2
  return max_prompt_tokens, rest, *blocks


def plan_chunk(
    lengths: Sequence[int], longest: int, *, chunk_steps: int | None
) -> tuple[int, int]:
  """Returns how many steps a chunk takes and how many blocks it reads.

  Args:
    lengths: columns of each block, the prompts' first.
    longest: tokens that the longest row has sampled, at least 1.
    chunk_steps: steps to take; None: as many as the fewest blocks allow.
  """
  ends = list(itertools.accumulate(lengths[1:]))
  # A step writes the token sampled before it, so the last one needs no column.
  last_column = longest - 1 + (chunk_steps or 1)
  num_own = min(bisect.bisect_left(ends, last_column), len(ends) - 1)
  steps = chunk_steps or max(1, ends[num_own] - longest + 1)
  return steps, num_own + 2


# Named, so that no flag of JAX changes what is sampled.
_RNG_IMPL = "threefry2x32"


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a row program is compiled for.

  temperature, top_k, top_p: as in `sampling/logits.py`.
  num_rows: R.
  max_prompt_tokens: P.
  max_completion_tokens: T.
  pad_id: fills a completion after its end.
  min_p: as in `sampling/logits.py`.
  stop_ids: tokens that end a row; (): it ends at T tokens only.
  explore: what is drawn from instead of the model.
  """

  temperature: float
  top_k: int
  top_p: float
  num_rows: int
  max_prompt_tokens: int
  max_completion_tokens: int
  pad_id: int
  min_p: float = 0.0
  stop_ids: tuple[int, ...] = ()
  explore: logits.Explore = logits.NONE

  @property
  def is_plain(self) -> bool:
    """Whether what is sampled from is the tempered model itself."""
    return self.temperature > 0 and (
        (self.top_k, self.top_p, self.min_p) == (0, 1, 0)
        and self.explore == logits.NONE
    )

  @property
  def block_lengths(self) -> tuple[int, ...]:
    """Columns of each block of the cache, the prompts' first."""
    return block_lengths(self.max_prompt_tokens, self.max_completion_tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """R rows in flight.

  cache: the model's, R rows of P + T columns in `Settings.block_lengths`: the
    left-padded prompt, then position t of the completion in column P + t.
  prompt_mask: [R, P] float32, 1 on the tokens of the row's prompt.
  key_data: [R, 2] uint32, the row's random key.
  tokens: [R, T] int32, sampled so far.
  logprobs: [R, T] float32, nats, of the sampled tokens.
  plain_logprobs: [R, T] float32, nats, under the tempered model; None where
    that is what is sampled from.
  limits: [R] int32, tokens at which the row ends, unstopped.
  last_token: [R] int32, sampled last and not yet fed to the model.
  lengths: [R] int32, tokens sampled so far, at least 1 in a row in use.
  stopped: [R] bool, the stop token was sampled.
  active: [R] bool, the row has tokens left to sample.
  """

  cache: types.PyTree
  prompt_mask: jax.Array
  key_data: jax.Array
  tokens: jax.Array
  logprobs: jax.Array
  plain_logprobs: jax.Array | None
  limits: jax.Array
  last_token: jax.Array
  lengths: jax.Array
  stopped: jax.Array
  active: jax.Array


def empty_state(
    init_cache: Callable[[int, Sequence[int]], types.PyTree],
    settings: Settings,
) -> DecodeState:
  """Returns a state with no row in use; `init_cache` is the model's."""
  R, P = settings.num_rows, settings.max_prompt_tokens
  T = settings.max_completion_tokens
  return DecodeState(
      cache=init_cache(R, settings.block_lengths),
      prompt_mask=jnp.zeros((R, P), jnp.float32),
      key_data=jnp.zeros((R, 2), jnp.uint32),
      tokens=jnp.zeros((R, T), jnp.int32),
      logprobs=jnp.zeros((R, T), jnp.float32),
      plain_logprobs=(
          None if settings.is_plain else jnp.zeros((R, T), jnp.float32)
      ),
      limits=jnp.zeros((R,), jnp.int32),
      last_token=jnp.zeros((R,), jnp.int32),
      lengths=jnp.ones((R,), jnp.int32),
      stopped=jnp.zeros((R,), bool),
      active=jnp.zeros((R,), bool),
  )


def refill(
    fill_cache: Callable[..., types.PyTree],
    settings: Settings,
    state: DecodeState,
    logits_BxV: jax.Array,
    prompt_cache: types.PyTree,
    mask_BxP: jax.Array,
    slot_R: jax.Array,
    ids_Rx4: jax.Array,
    limit_R: jax.Array,
) -> DecodeState:
  """Starts rows: the prompt's cache, the random key and the first token.

  Args:
    fill_cache: the model's.
    settings: of the sampler.
    state: of the rows; those with slot_R < 0 stay as they are.
    logits_BxV: [B, V] float32, after each prefilled prompt.
    prompt_cache: of the prefilled prompts.
    mask_BxP: [B, P] float32, of the prefilled prompts.
    slot_R: [R] int32, the row's prompt in the prefill; -1: not started.
    ids_Rx4: [R, 4] uint32, seed, prompt id, visit and sample index of the row.
    limit_R: [R] int32, tokens at which the row ends, 1 to T.

  Returns:
    The state; a row whose first token ends it is not active.
  """
  cache = fill_cache(state.cache, prompt_cache, slot_R)
  new_R = slot_R >= 0
  slot_R = jnp.maximum(slot_R, 0)
  select = lambda new, old: jnp.where(
      new_R.reshape(-1, *[1] * (old.ndim - 1)), new, old
  )
  key_data_Rx2 = _row_keys(ids_Rx4)
  start_R = jnp.zeros_like(slot_R)
  drawn = _draw(settings, logits_BxV[slot_R], key_data_Rx2, start_R)
  state = dataclasses.replace(
      state,
      cache=cache,
      prompt_mask=select(mask_BxP[slot_R], state.prompt_mask),
      key_data=select(key_data_Rx2, state.key_data),
      limits=select(limit_R, state.limits),
      lengths=select(start_R, state.lengths),
      stopped=state.stopped & ~new_R,
      active=state.active | new_R,
  )
  return _append(settings, state, new_R, *drawn)


def decode_chunk(
    decode_step: Callable[..., tuple[jax.Array, types.PyTree]],
    settings: Settings,
    params: types.PyTree,
    state: DecodeState,
    num_steps: jax.Array,
    num_idle: jax.Array,
    num_blocks: int,
) -> tuple[DecodeState, tuple[jax.Array, jax.Array]]:
  """Samples up to `num_steps` tokens in each active row.

  It ends early when `num_idle` rows are not active, or none is. Both numbers
  are arguments, so that one program serves chunks of any length. `decode_step`
  is the model's and `params` are its decode params. Of the cache the first
  `num_blocks` blocks are read and written: they must hold every token that an
  active row has sampled at the end.

  Returns:
    The state; the steps that were taken, and [R] bool, True in the rows that
    are not active.
  """

  num_columns = sum(settings.block_lengths[:num_blocks])

  def body(carry):
    step, state = carry
    # A row that ended feeds its last token again: the same column is written
    # with the same values, and nothing else of the row changes.
    last_R = state.lengths - 1
    prompt_lengths_R = jnp.sum(state.prompt_mask, axis=-1).astype(jnp.int32)
    # Each row writes a column of its own, so that position t of every row
    # stands in one place: in a column that rows share, the order in which a
    # row's keys are summed, and with it the last bit of its log-probs, would
    # depend on when the row was started.
    seen_RxC = jnp.concatenate(
        [state.prompt_mask > 0, _columns(state) <= last_R[:, None]], axis=1
    )
    logits_RxV, cache = decode_step(
        params,
        state.last_token,
        prompt_lengths_R + last_R,
        state.cache[:num_blocks],
        seen_RxC[:, :num_columns],
        settings.max_prompt_tokens + last_R,
    )
    state = dataclasses.replace(
        state, cache=[*cache, *state.cache[num_blocks:]]
    )
    drawn = _draw(settings, logits_RxV, state.key_data, state.lengths)
    state = _append(settings, state, state.active, *drawn)
    return step + 1, state

  def unfinished(carry):
    step, state = carry
    idle = jnp.sum(~state.active, dtype=jnp.int32)
    return (step < num_steps) & (idle < num_idle)

  steps, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))
  return state, (steps, ~state.active)


def cut(state: DecodeState, cut_R: jax.Array) -> tuple[DecodeState, jax.Array]:
  """Ends rows after fewer tokens than they have.

  Args:
    state: of the rows; those with cut_R < 0 stay as they are.
    cut_R: [R] int32, tokens to keep, at least 1.

  Returns:
    The state, and [R] bool, True in the rows that are not active.
  """
  is_cut_R = cut_R >= 0
  # A row that ended feeds its last token again, now in the column of the last
  # one kept: what is there is not read any more.
  state = dataclasses.replace(
      state,
      lengths=jnp.where(is_cut_R, cut_R, state.lengths),
      stopped=state.stopped & ~is_cut_R,
      active=state.active & ~is_cut_R,
  )
  return state, ~state.active


def collect(
    settings: Settings, state: DecodeState
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]:
  """Returns tokens, log-probs and plain ones, [R, T], lengths, stopped, [R].

  All are new arrays; the plain log-probs are None where the state has none.
  """
  sampled_RxT = _columns(state) < state.lengths[:, None]
  plain_RxT = state.plain_logprobs
  return (
      jnp.where(sampled_RxT, state.tokens, settings.pad_id),
      jnp.where(sampled_RxT, state.logprobs, 0.0),
      None if plain_RxT is None else jnp.where(sampled_RxT, plain_RxT, 0.0),
      # Copies: the state's own buffers are given to the next program.
      jnp.copy(state.lengths),
      jnp.copy(state.stopped),
  )


def _columns(state: DecodeState) -> jax.Array:
  """Returns [R, T] int32, the column of each entry."""
  return jax.lax.broadcasted_iota(jnp.int32, state.tokens.shape, 1)


def _row_keys(ids_Rx4: jax.Array) -> jax.Array:
  """Returns [R, 2] uint32: the key of (seed, prompt id, visit, sample)."""

  def fold(ids_4: jax.Array) -> jax.Array:
    seed, *others = ids_4
    root = jax.random.key(seed, impl=_RNG_IMPL)
    return functools.reduce(jax.random.fold_in, others, root)

  return jax.random.key_data(jax.vmap(fold)(ids_Rx4))


def _draw(
    settings: Settings,
    logits_RxV: jax.Array,
    key_data_Rx2: jax.Array,
    position_R: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns the tokens at `position_R`, their log-probs, the plain ones, [R].

  The last is None where both are the same.
  """
  keys_R = jax.random.wrap_key_data(key_data_Rx2, impl=_RNG_IMPL)
  folded_R = jax.vmap(jax.random.fold_in)(keys_R, position_R)
  # The folded key is itself 64 random bits; 24 of them fill a float in [0, 1).
  bits_R = jax.random.key_data(folded_R)[:, 0]
  uniform_R = (bits_R >> 8).astype(jnp.float32) * 2.0**-24
  logprobs_RxV = logits.process(
      logits.explored_logits(settings, logits_RxV, keys_R, position_R),
      temperature=settings.temperature,
      top_k=settings.top_k,
      top_p=settings.top_p,
      min_p=settings.min_p,
  )
  token_R, logprob_R = logits.sample(logprobs_RxV, uniform_R)
  if settings.is_plain:
    return token_R, logprob_R, None
  plain_R = logits.plain_logprob(
      logits_RxV, token_R, temperature=settings.temperature
  )
  return token_R, logprob_R, plain_R


def _append(
    settings: Settings,
    state: DecodeState,
    rows_R: jax.Array,
    token_R: jax.Array,
    logprob_R: jax.Array,
    plain_R: jax.Array | None,
) -> DecodeState:
  """Writes the next token of `rows_R` and ends the rows that it completes."""
  here_RxT = (_columns(state) == state.lengths[:, None]) & rows_R[:, None]
  lengths_R = state.lengths + rows_R
  stopped_R = state.stopped
  for stop_id in settings.stop_ids:
    stopped_R |= rows_R & (token_R == stop_id)
  full_R = lengths_R >= state.limits
  write = lambda old_RxT, new_R: jnp.where(here_RxT, new_R[:, None], old_RxT)
  plain_RxT = state.plain_logprobs
  return dataclasses.replace(
      state,
      tokens=write(state.tokens, token_R),
      logprobs=write(state.logprobs, logprob_R),
      plain_logprobs=None if plain_RxT is None else write(plain_RxT, plain_R),
      last_token=jnp.where(rows_R, token_R, state.last_token),
      lengths=lengths_R,
      stopped=stopped_R,
      active=state.active & ~stopped_R & ~full_R,
  )


# Caches of many tokens at once: of prompts, and of rows with newer params.
#
# Axes: B prompts, Q tokens they are padded to, P the most of them, T completion
# tokens, L = P + T, R rows, V vocabulary.


def prefill(
    model_prefill: Callable[..., tuple[jax.Array, types.PyTree]],
    max_prompt_tokens: int,
    params: types.PyTree,
    tokens_BxQ: jax.Array,
    mask_BxQ: jax.Array,
) -> tuple[jax.Array, types.PyTree, jax.Array]:
  """Runs prompts that are padded to Q tokens, up to P, as `refill` takes them.

  Returns:
    Logits [B, V] float32, the prompts' cache and their mask [B, P]: columns
    from Q on are padding, which nothing sees.
  """
  P = max_prompt_tokens
  outputs = *model_prefill(params, tokens_BxQ, mask_BxQ), mask_BxQ
  if mask_BxQ.shape[1] == P:
    return outputs
  whole = lambda x_BxQ: jnp.zeros((x_BxQ.shape[0], P), x_BxQ.dtype)
  shapes = jax.eval_shape(
      model_prefill, params, whole(tokens_BxQ), whole(mask_BxQ)
  )
  fill = lambda leaf, shape: jnp.pad(
      leaf, [(0, n - m) for m, n in zip(leaf.shape, shape.shape)]
  )
  return jax.tree.map(fill, outputs, (*shapes, whole(mask_BxQ)))


def recompute_cache(
    model_prefill: Callable[..., tuple[jax.Array, types.PyTree]],
    fill_cache: Callable[..., types.PyTree],
    params: types.PyTree,
    state: "DecodeState",
    tokens_BxL: jax.Array,
    mask_BxL: jax.Array,
    slot_R: jax.Array,
) -> "DecodeState":
  """Makes the caches of some rows again, with other params.

  Args:
    model_prefill: the model's, as `fill_cache`.
    fill_cache: the model's.
    params: of the model.
    state: of the rows; those with slot_R < 0 stay as they are.
    tokens_BxL: [B, P + T] int32, as the cache's columns: prompts, and
      completions but for the last token, which is not fed yet.
    mask_BxL: [B, P + T] float32, 1 on these tokens.
    slot_R: [R] int32, the row's place among the B; -1: not made again.
  """
  _, cache = model_prefill(params, tokens_BxL, mask_BxL)
  return dataclasses.replace(
      state, cache=fill_cache(state.cache, cache, slot_R)
  )


# Fewer rows where few completions are left, so that steps cost less.
#
# Axes: R rows.


# Rows come in multiples of this: the CPU backend's products work on so many at
# once, so a row has the same bits in a program of fewer rows.
_MULTIPLE = 16
# Each count is some programs more, so they are few.
_MOST_COUNTS = 3


def row_counts(place: jax.sharding.Sharding, num_rows: int) -> tuple[int, ...]:
  """Returns R and what rows in flight may be cut down to: R / 2, R / 4.

  R alone on other than one CPU: there a step reads the weights for as long as
  it works on a row, and products of fewer rows may have other bits.
  """
  counts = [num_rows]
  *others, device = place.device_set
  if device.platform == "cpu" and not others:
    while len(counts) < _MOST_COUNTS and counts[-1] % (2 * _MULTIPLE) == 0:
      counts.append(counts[-1] // 2)
  return tuple(counts)


def take_rows(state: "DecodeState", rows: jax.Array) -> "DecodeState":
  """Returns a state of the rows at `rows`, [fewer than R] int32."""
  return jax.tree.map(lambda leaf: leaf[rows], state)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta net: linear attention with a state in place of a KV cache.

Each head has a matrix S that maps keys to values. A token decays it, corrects
it towards the token's value, and reads it:

    S_t = α_t S_{t-1} + β_t k_t (v_t - α_t S_{t-1}ᵀ k_t)ᵀ,   o_t = S_tᵀ q_t

Queries, keys and values come from a causal convolution of a few tokens; queries
and keys have length 1, and queries are divided by sqrt(Dk). S is float32.

Decode steps run these equations (`step`). A pass over rows runs chunks of C
tokens in sequence (`over_rows`): with γ_t the product of the decays from the
chunk's start up to t, and u_t = β_t (v_t - α_t S_{t-1}ᵀ k_t),

    u_t + β_t Σ_{s<t} γ_t/γ_s (k_t·k_s) u_s = β_t (v_t - γ_t S_0ᵀ k_t)
    o_t = γ_t S_0ᵀ q_t + Σ_{s≤t} γ_t/γ_s (q_t·k_s) u_s
    S_C = γ_C S_0 + Σ_s γ_C/γ_s k_s u_sᵀ

a triangular system and matrix products. In a packed row (`packed.py`) "before"
means "seen": a completion's tokens follow its prompt's, whatever lies between
them. Both sums, γ, and the convolution run along that path, and S_0 is the
path's state at the chunk's start: the state of the sequence in which the
previous chunk ended, of its prompt, or zero. So each completion starts from its
prompt's state, which is computed once.

Source: Yang et al. 2024 (arXiv:2412.06464), eq. 10 and §3.3, as computed by
Hugging Face's `Qwen3_5GatedDeltaNet` and `Qwen3NextGatedDeltaNet`.

Axes: R rows, L places of a row, C tokens of a chunk, T taps and X channels of
the convolution, G key heads, M value heads per key head, H = G * M, Dk and Dv
head widths, D width, S states that a chunk may start from. Leading axes written
`...` are free.
"""

from collections.abc import Callable
import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.net import layers
from tba_jax.models.net import packed
from tba_jax.models.net import products

ModelConfig = config_lib.ModelConfig
PyTree = types.PyTree

# Maximum number of tokens of a chunk, a power of 2.
CHUNK = 64
_EPSILON = 1e-6

# (mixed_...xX, conv_XxT, log_decay_...xH, beta_...xH) -> (out_...xHxDv, what
# the caller keeps).
RecurFn = Callable[..., tuple[jax.Array, PyTree]]

# The state is a sum over all tokens: its products are float32 on every backend.
_product = functools.partial(
    jnp.einsum,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)


class GatedDeltaNet(nnx.Module):
  """out(norm(o) * silu(z)), where o is the output of the delta rule.

  The caller's `recur` manages the states, so that one module serves training,
  prefill and decoding.

  in_qkv: [X, D], queries, keys and values before the convolution.
  in_z: [H, Dv, D]. in_b, in_a: [H, D].
  in_qkvz, in_ba: [G, 2 Dk + 2 M Dv, D] and [G, 2 M, D], in place of these four
    in families with `fuses_delta_inputs`.
  conv: [X, T]; the last column applies to the token itself.
  log_rate, step_bias: [H], log α = -exp(log_rate) softplus(in_a x + step_bias).
  norm: scale [Dv].
  out: [D, H, Dv].
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, out_scale: float):
    self.config = config
    D, H = config.width, config.delta_value_heads
    Dv, X = config.delta_value_dim, config.delta_channels
    dtype = jnp.dtype(config.param_dtype)
    make = functools.partial(layers.Linear, rngs=rngs, param_dtype=dtype)
    self.is_fused = family_lib.FAMILIES[config.family].fuses_delta_inputs
    if self.is_fused:
      G, qkvz, ba = config.delta_fused
      self.in_qkvz = make(
          (D,), (G, qkvz), ("delta_groups", "delta_qkvz", "width")
      )
      self.in_ba = make((D,), (G, ba), ("delta_groups", "delta_ba", "width"))
    else:
      self.in_qkv = make((D,), (X,), ("delta_channels", "width"))
      self.in_z = make((D,), (H, Dv), ("delta_heads", "delta_dim", "width"))
      self.in_b = make((D,), (H,), ("delta_heads", "width"))
      self.in_a = make((D,), (H,), ("delta_heads", "width"))
    taps = config.delta_taps
    value = jax.random.normal(rngs.params(), (X, taps), jnp.float32)
    self.conv = nnx.Param(
        (value / math.sqrt(taps)).astype(dtype),
        logical_axes=("delta_channels", "taps"),
    )
    # Decays from nearly 1 to nearly 0, initialized as in Hugging Face's class.
    rates = jax.random.uniform(rngs.params(), (H,), minval=0.01, maxval=16.0)
    of_heads = dict(logical_axes=("delta_heads",))
    self.log_rate = nnx.Param(jnp.log(rates).astype(dtype), **of_heads)
    self.step_bias = nnx.Param(jnp.ones((H,), dtype), **of_heads)
    self.norm = layers.RMSNorm(
        Dv,
        epsilon=config.norm_epsilon,
        param_dtype=dtype,
        logical_axis="delta_dim",
    )
    axes = ("width", "delta_heads", "delta_dim")
    self.out = make((H, Dv), (D,), axes, scale=out_scale)

  def __call__(self, x: jax.Array, recur: RecurFn) -> tuple[jax.Array, PyTree]:
    """Returns [..., D] and the second output of `recur`, for x [..., D]."""
    of_heads = lambda p: products.expand_to(p[...].astype(jnp.float32), x.ndim)
    qkv, z, b, a = self._inputs(x)
    steps = jax.nn.softplus(a + of_heads(self.step_bias))
    log_decay = -jnp.exp(of_heads(self.log_rate)) * steps
    beta = jax.nn.sigmoid(b)
    conv = self.conv.get_value().astype(x.dtype)
    out, kept = recur(qkv, conv, log_decay, beta)
    gate = jax.nn.silu(z.astype(jnp.float32))
    return self.out((self.norm(out) * gate).astype(x.dtype)), kept

  def _inputs(
      self, x: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns q, k and v together [..., X], z [..., H, Dv], b and a [..., H].

    b and a are float32.
    """
    if not self.is_fused:
      b, a = (product(x, jnp.float32) for product in (self.in_b, self.in_a))
      return self.in_qkv(x), self.in_z(x), b, a
    c, lead = self.config, x.shape[:-1]
    keys = c.delta_key_dim
    values = c.delta_value_heads // c.delta_key_heads * c.delta_value_dim
    *qkv, z = jnp.split(
        self.in_qkvz(x), (keys, 2 * keys, 2 * keys + values), axis=-1
    )
    b, a = jnp.split(self.in_ba(x, jnp.float32), 2, axis=-1)
    qkv = jnp.concatenate([y.reshape(*lead, -1) for y in qkv], axis=-1)
    z = z.reshape(*lead, c.delta_value_heads, c.delta_value_dim)
    return qkv, z, b.reshape(*lead, -1), a.reshape(*lead, -1)


def _heads(
    config: ModelConfig, mixed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits convolved inputs into q, k [..., G, Dk] and v [..., G, M, Dv]."""
  c = config
  lead, keys = mixed.shape[:-1], c.delta_key_heads * c.delta_key_dim
  q, k, v = jnp.split(jax.nn.silu(mixed), (keys, 2 * keys), axis=-1)
  q, k = (x.reshape(*lead, c.delta_key_heads, -1) for x in (q, k))
  v = v.reshape(*lead, c.delta_key_heads, -1, c.delta_value_dim)
  unit = lambda x: x * jax.lax.rsqrt(
      jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON
  )
  return unit(q) / math.sqrt(c.delta_key_dim), unit(k), v


def over_rows(
    config: ModelConfig,
    places: packed.Places,
    has_completions: bool,
    mixed_RxLxX: jax.Array,
    conv_XxT: jax.Array,
    log_decay_RxLxH: jax.Array,
    beta_RxLxH: jax.Array,
) -> tuple[jax.Array, PyTree]:
  """Runs the delta rule over rows; returns its output and final states.

  Args:
    config: shape of the model.
    places: description of each place, [R, L] per field.
    has_completions: whether a row may hold more than one sequence.
    mixed_RxLxX: queries, keys and values before the convolution.
    conv_XxT: kernel of the convolution.
    log_decay_RxLxH: float32, log α.
    beta_RxLxH: float32.

  Returns:
    [R, L, H, Dv] float32, finite but meaningless at places without a token; and
    the rows' "state" and "conv" after the last token, as in `step`.
  """
  R, L, _ = mixed_RxLxX.shape
  G, taps = config.delta_key_heads, conv_XxT.shape[1]
  q, k, v = _heads(config, _convolve(mixed_RxLxX, conv_XxT, places))
  by_head = lambda x: x.reshape(R, L, G, -1)
  inputs = q, k, v, by_head(log_decay_RxLxH), by_head(beta_RxLxH)
  size = min(CHUNK, 1 << (L - 1).bit_length())
  count = -(-L // size)

  def cut(x: jax.Array) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, count * size - L)
    # Fields of places are integers, where group -1 means no token.
    is_place = jnp.issubdtype(x.dtype, jnp.integer)
    x = jnp.pad(x, padding, constant_values=-1 if is_place else 0)
    return jnp.moveaxis(x.reshape(R, count, size, *x.shape[2:]), 1, 0)

  inputs, cut_places = jax.tree.map(cut, (inputs, places))
  paths = _paths(cut_places, 2 if has_completions else 1)
  # The backward pass recomputes what the inverse does not need.
  chunks = jax.checkpoint(_within)(*inputs, paths)
  inverse = _inverse(jax.lax.stop_gradient(chunks.system))
  begins = jnp.repeat(paths.begins, G, axis=1)
  state, out = _over_chunks(chunks, inverse, begins)
  out = out.reshape(count, R, -1, size, v.shape[-1])
  out = out.transpose(1, 0, 3, 2, 4).reshape(R, count * size, *out.shape[2::2])
  state = jnp.swapaxes(state, 1, 2).reshape(R, -1, q.shape[-1], v.shape[-1])
  recent = _recent(mixed_RxLxX, places, taps - 1)
  return out[:, :L], {"state": state, "conv": recent}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Paths:
  """Where the paths of a chunk's places begin and end, for N chunks.

  There are S states: of the sequence that a chunk ends in, and of its prompt.

  seen: [N, R, C, C] bool, places on the path of each.
  begins: [N, R, C, S] float32, 1 at the state that a place's path starts from;
    zeros if it starts in this chunk.
  ends: [N, R, S, C] float32, 1 at the place whose state a later chunk may start
    from.
  moves: [N, R, S, S] float32, 1 where a state follows from an earlier one.
  """

  seen: jax.Array
  begins: jax.Array
  ends: jax.Array
  moves: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Chunk:
  """What the scan reads of a chunk; of N chunks with an axis N in front.

  Axes: B = R * G, and A = B * M. A product of matrices with one batch axis
  needs no copy of its operands in another order.

  keys: [B, 2 C, Dk], keys before queries.
  values: [B, C, M, Dv].
  decay, beta: [B, C, M], γ and β.
  system: [A, C, C], β_t γ_t/γ_s (k_t·k_s) below the diagonal.
  scores: [A, C, C], γ_t/γ_s (q_t·k_s).
  weights: [B, C, S, M], γ_C/γ_s for the end of each state.
  faded: [B, S, S, M], factors of the old states in each new one.
  """

  keys: jax.Array
  values: jax.Array
  decay: jax.Array
  beta: jax.Array
  system: jax.Array
  scores: jax.Array
  weights: jax.Array
  faded: jax.Array


def _paths(places: packed.Places, num_states: int) -> _Paths:
  """Returns the paths of chunks, given their places [N, R, C]."""
  N, _, C = places.group.shape
  is_real = places.group >= 0
  seen = packed.sees(places, places, 0)
  index_C = jnp.arange(C)[None, None]
  last_of = lambda is_so: jnp.max(jnp.where(is_so, index_C, -1), axis=-1)
  ends = [last_of(is_real)]
  at = jnp.maximum(ends[0], 0)[..., None]
  place = lambda x: jnp.take_along_axis(x, at, axis=-1)
  group_NxRx1, owner_NxRx1 = place(places.group), place(places.owner)
  # The last chunk before each that has a token; -1 if there is none.
  numbers_Nx1 = jnp.arange(N)[:, None]
  filled = jax.lax.cummax(jnp.where(ends[0] >= 0, numbers_Nx1, -1), axis=0)
  before = jnp.pad(filled[:-1], ((1, 0), (0, 0)), constant_values=-1)[..., None]
  last = lambda x: jnp.where(
      before >= 0, jnp.take_along_axis(x, jnp.maximum(before, 0), axis=0), -1
  )
  is_group = places.group == last(group_NxRx1)
  is_same = is_group & (places.owner == last(owner_NxRx1))
  begins = jnp.stack([is_same, is_group & ~is_same], axis=-1)[..., :num_states]
  if num_states > 1:
    is_last_group = is_real & (places.group == group_NxRx1)
    ends.append(last_of(is_last_group & (places.owner == 0)))
  is_end = jnp.stack(ends, axis=-1)[..., None] == index_C[:, :, None]
  has_end = jnp.any(is_end, axis=-1)
  moves = jnp.any(is_end[..., None] & begins[:, :, None], axis=3)
  # A state without a place in this chunk stays, unless its group has ended.
  stays = ~has_end & (~has_end[..., :1] | place(is_group))
  moves |= stays[..., None] & jnp.eye(num_states, dtype=bool)[None, None]
  as_float = lambda x: x.astype(jnp.float32)
  return _Paths(seen, *map(as_float, (begins, is_end, moves)))


def _within(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    paths: _Paths,
) -> _Chunk:
  """Returns what the scan reads of N chunks, all that needs no state.

  Args:
    q, k: [N, R, C, G, Dk].
    v: [N, R, C, G, M, Dv].
    log_decay, beta: [N, R, C, G, M], log α and β.
    paths: result of `_paths`.
  """
  by_head = lambda x: jnp.moveaxis(x, 2, 3)
  k, q, v, beta = map(by_head, (k, q, v, beta))
  seen = paths.seen.astype(jnp.float32)
  log_decay = _product("nrcs,nrsgm->nrgcm", seen, log_decay)
  seen = seen[:, :, None]
  of_head = jnp.swapaxes(log_decay, 3, 4)
  # γ_t / γ_s, [N, R, G, M, C, C].
  between = of_head[..., :, None] - of_head[..., None, :]
  between = jnp.where(seen[:, :, :, None] > 0, between, -jnp.inf)
  between = jnp.exp(between)
  keys = jnp.concatenate([k, q], axis=3)
  dots = _product("nrgik,nrgsk->nrgis", keys, k)[:, :, :, None]
  similar, scores = jnp.split(dots, 2, axis=4)
  below = jnp.tril(jnp.swapaxes(beta, 3, 4)[..., None] * similar * between, -1)
  ends = paths.ends[:, :, None, :, :, None]
  last = jnp.sum(ends * log_decay[:, :, :, None], axis=4)  # [N, R, G, S, M]
  seen_last = jnp.sum(ends * seen[:, :, :, None], axis=4) > 0
  seen_last = jnp.swapaxes(seen_last, 3, 4)[..., None]  # [N, R, G, C, S, 1]
  weights = last[:, :, :, None] - log_decay[:, :, :, :, None]
  weights = jnp.exp(jnp.where(seen_last, weights, -jnp.inf))
  moves = paths.moves[:, :, None, ..., None]
  merged = lambda x, axes: x.reshape(len(x), -1, *x.shape[2 + axes :])
  return _Chunk(
      keys=merged(keys, 1),
      values=merged(v, 1),
      decay=merged(jnp.exp(log_decay), 1),
      beta=merged(beta, 1),
      system=merged(below, 2),
      scores=merged(scores * between, 2),
      weights=merged(weights, 1),
      faded=merged(jnp.exp(last)[:, :, :, :, None] * moves, 1),
  )


def _by_head(x: jax.Array) -> jax.Array:
  """Returns [B * M, C, Dv] for [B, C, M, Dv]."""
  x = jnp.swapaxes(x, 1, 2)
  return x.reshape(-1, *x.shape[2:])


def _by_place(x: jax.Array, num_heads: int) -> jax.Array:
  """Returns [B, C, M, Dv] for [B * M, C, Dv]."""
  return jnp.swapaxes(x.reshape(-1, num_heads, *x.shape[1:]), 1, 2)


def _flat(x: jax.Array) -> jax.Array:
  """Returns [B, C, ...] with the last axes merged."""
  return x.reshape(*x.shape[:2], -1)


# Products of matrices [B, ., .]: x y, xᵀ y and x yᵀ.
_times = functools.partial(_product, "bij,bjk->bik")
_turned_times = functools.partial(_product, "bji,bjk->bik")
_times_turned = functools.partial(_product, "bij,bkj->bik")


@jax.custom_vjp
def _over_chunks(
    chunks: _Chunk, inverse: jax.Array, begins: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Runs chunks in sequence.

  XLA's triangular solver is no alternative to an inverse: on a CPU each call
  waits for threads that run other calls, which can stop the program forever.

  Args:
    chunks: N chunks.
    inverse: [N, A, C, C], (I + system)⁻¹, without a gradient.
    begins: [N, B, C, S], `_Paths.begins`.

  Returns:
    The state of the last sequence, [B, Dk, M, Dv], and [N, A, C, Dv].
  """
  return _forward(chunks, inverse, begins)[0]


def _forward(chunks, inverse, begins):
  """Returns the results of `_over_chunks`, and what its gradient reads."""
  _, B, _, Dk = chunks.keys.shape
  C, M, Dv = chunks.values.shape[2:]
  S = begins.shape[-1]

  def run(states: jax.Array, inputs: PyTree) -> PyTree:
    chunk, inverse, begins = inputs
    read = _read(chunk.keys, states, begins, M)
    of_key, of_query = jnp.moveaxis(
        read * chunk.decay[:, None, ..., None], 1, 0
    )
    wanted = chunk.beta[..., None] * (chunk.values - of_key)
    u = _times(inverse, _by_head(wanted))
    out = _by_head(of_query) + _times(chunk.scores, u)
    weighted = chunk.weights[..., None] * _by_place(u, M)[:, :, None]
    added = _turned_times(chunk.keys[:, :C], _flat(weighted))
    return _moved(chunk.faded, states) + added, (out, (states, u))

  start = jnp.zeros((B, Dk, S * M * Dv), jnp.float32)
  inputs = chunks, inverse, begins
  states, (out, kept) = jax.lax.scan(run, start, inputs)
  state = states.reshape(B, Dk, S, M, Dv)[:, :, 0]
  return (state, out), (inputs, kept)


def _read(
    keys: jax.Array, states: jax.Array, begins: jax.Array, num_heads: int
) -> jax.Array:
  """Returns [B, 2, C, M, Dv], what each place reads of its own state."""
  B, C, S = begins.shape
  read = _times(keys, states).reshape(B, 2, C, S, num_heads, -1)
  return jnp.sum(read * begins[:, None, ..., None, None], axis=3)


def _moved(faded_BxSxSxM: jax.Array, states: jax.Array) -> jax.Array:
  """Returns sums of states [B, Dk, S * M * Dv] with factors."""
  B, S, _, M = faded_BxSxSxM.shape
  parts = states.reshape(B, -1, S, M, states.shape[2] // (S * M))
  moved = sum(
      faded_BxSxSxM[:, None, :, old, :, None] * parts[:, :, old, None]
      for old in range(S)
  )
  return moved.reshape(states.shape)


def _backward(residuals, grads):
  """Returns the gradient of `_over_chunks`."""
  inputs, kept = residuals
  B, C, M, Dv = inputs[0].values.shape[1:]
  S = inputs[2].shape[-1]

  def run(d_new: jax.Array, inputs: PyTree) -> PyTree:
    (chunk, inverse, begins), (states, u), d_out = inputs
    # Not kept: one product makes it from the states.
    read = _read(chunk.keys, states, begins, M)
    key = chunk.keys[:, :C]
    at_keys = _times(key, d_new).reshape(B, C, S, M, Dv)
    d_u = jnp.sum(chunk.weights[..., None] * at_keys, axis=2)
    d_u = _by_head(d_u) + _turned_times(chunk.scores, d_out)
    d_wanted = _turned_times(inverse, d_u)
    d_scores = _times_turned(d_out, u)
    d_system = -_times_turned(d_wanted, u)
    u, d_wanted, d_out = (_by_place(x, M) for x in (u, d_wanted, d_out))
    decay = chunk.decay[..., None]
    error = chunk.values - read[:, 0] * decay
    d_values = chunk.beta[..., None] * d_wanted
    d_read = jnp.stack([-d_values, d_out], axis=1)
    d_decay = jnp.sum(jnp.sum(d_read * read, axis=-1), axis=1)
    d_read = (d_read * decay[:, None])[:, :, :, None]
    d_read *= begins[:, None, ..., None, None]
    d_read = d_read.reshape(B, 2 * C, -1)
    d_keys = _times_turned(d_read, states)
    weighted = chunk.weights[..., None] * u[:, :, None]
    d_key = _times_turned(_flat(weighted), d_new)
    d_keys += jnp.pad(d_key, ((0, 0), (0, C), (0, 0)))
    d_states = _turned_times(chunk.keys, d_read)
    d_states += _moved(jnp.swapaxes(chunk.faded, 1, 2), d_new)
    apart = lambda x: x.reshape(B, -1, S, M, Dv)
    d_faded = [
        jnp.sum(apart(d_new) * apart(states)[:, :, old, None], axis=-1)
        for old in range(S)
    ]
    d_chunk = _Chunk(
        keys=d_keys,
        values=d_values,
        decay=d_decay,
        beta=jnp.sum(d_wanted * error, axis=-1),
        system=d_system,
        scores=d_scores,
        weights=jnp.sum(at_keys * u[:, :, None], axis=-1),
        faded=jnp.sum(jnp.stack(d_faded, axis=3), axis=1),
    )
    return d_states, d_chunk

  d_last, d_out = grads
  # Nothing follows the other states.
  d_states = jnp.pad(
      d_last[:, :, None], ((0, 0), (0, 0), (0, S - 1), (0, 0), (0, 0))
  )
  _, d_chunks = jax.lax.scan(
      run, _flat(d_states), (inputs, kept, d_out), reverse=True
  )
  return d_chunks, None, None


_over_chunks.defvjp(_forward, _backward)


def _inverse(below: jax.Array) -> jax.Array:
  """Returns the inverse of I + `below`, strictly lower triangular [..., C, C].

  Inverts blocks on the diagonal, each made of two of half its size:

      [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]
  """
  *lead, C, _ = below.shape
  blocks = jnp.ones((*lead, C, 1, 1), below.dtype)
  size = 1
  while size < C:
    count = C // (2 * size)
    pairs = below.reshape(*lead, count, 2, size, count, 2, size)
    lower = jnp.einsum("...iasibt->...iabst", pairs)[..., 1, 0, :, :]
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    corner = -_product("...ab,...bc,...cd->...ad", second, lower, first)
    blocks = jnp.block([[first, jnp.zeros_like(first)], [corner, second]])
    size *= 2
  return blocks[..., 0, :, :]


def _convolve(
    x_RxLxX: jax.Array, conv_XxT: jax.Array, places: packed.Places
) -> jax.Array:
  """Returns the causal convolution along each place's path, float32."""
  conv_Tx1x1xX = conv_XxT.T.astype(jnp.float32)[:, None, None]
  taps = len(conv_Tx1x1xX)
  out = 0.0
  for back in range(taps):
    earlier = _take(x_RxLxX, packed.before(places, back)) if back else x_RxLxX
    out += earlier.astype(jnp.float32) * conv_Tx1x1xX[taps - 1 - back]
  return out


def _take(x_RxLxX: jax.Array, at_RxN: jax.Array) -> jax.Array:
  """Returns [R, N, X], places of each row by index; 0 at negative indices."""
  taken = jnp.take_along_axis(x_RxLxX, jnp.maximum(at_RxN, 0)[..., None], 1)
  return jnp.where(at_RxN[..., None] >= 0, taken, jnp.zeros((), x_RxLxX.dtype))


def _recent(x_RxLxX: jax.Array, places: packed.Places, count: int) -> jax.Array:
  """Returns [R, count, X], inputs of the last tokens on each row's path."""
  is_real = places.group >= 0
  last_Rx1 = jnp.max(
      jnp.where(is_real, places.index, -1), axis=1, keepdims=True
  )
  own = jax.tree.map(
      lambda x: jnp.take_along_axis(x, jnp.maximum(last_Rx1, 0), axis=1), places
  )
  back = reversed(range(count))
  at_RxN = jnp.concatenate([packed.before(own, n) for n in back], axis=1)
  return _take(x_RxLxX, jnp.where(last_Rx1 >= 0, at_RxN, -1))


def step(
    config: ModelConfig,
    held: PyTree,
    is_fed_R: jax.Array,
    mixed_RxX: jax.Array,
    conv_XxT: jax.Array,
    log_decay_RxH: jax.Array,
    beta_RxH: jax.Array,
) -> tuple[jax.Array, PyTree]:
  """Runs one token of each row.

  Args:
    config: shape of the model.
    held: "state" [R, H, Dk, Dv] float32, and "conv" [R, T - 1, X], convolution
      inputs of the last tokens.
    is_fed_R: bool, False keeps a row's state unchanged.
    mixed_RxX: queries, keys and values before the convolution.
    conv_XxT: kernel of the convolution.
    log_decay_RxH: float32, log α.
    beta_RxH: float32.

  Returns:
    [R, H, Dv] float32, and the states after the token.
  """
  recent = held["conv"].astype(mixed_RxX.dtype)
  window_RxTxX = jnp.concatenate([recent, mixed_RxX[:, None]], axis=1)
  conv_TxX = conv_XxT.T.astype(jnp.float32)[None]
  mixed = jnp.sum(window_RxTxX.astype(jnp.float32) * conv_TxX, axis=1)
  q, k, v = _heads(config, mixed)
  R, G, M, Dv = v.shape
  # For each value head: XLA would transpose the states to share a product.
  both = jnp.stack([k, q], axis=2)[:, :, None]
  both = jnp.broadcast_to(both, (R, G, M, 2, both.shape[-1]))
  state = held["state"].reshape(R, G, M, -1, Dv)
  by_head = lambda x: x.reshape(R, G, M, 1)
  decay = by_head(jnp.exp(log_decay_RxH))
  # Both products use the old state, so that the new one is never read.
  of_key, of_query = jnp.moveaxis(
      _product("rgmkv,rgmnk->rgmnv", state, both) * decay[..., None], 3, 0
  )
  u = by_head(beta_RxH) * (v - of_key)
  out = of_query + jnp.sum(q * k, axis=-1)[..., None, None] * u
  is_fed = is_fed_R[:, None, None, None]
  u, decay = jnp.where(is_fed, u, 0.0), jnp.where(is_fed, decay, 1.0)
  state = decay[..., None] * state + k[:, :, None, :, None] * u[..., None, :]
  recent = jnp.where(is_fed_R[:, None, None], window_RxTxX[:, 1:], recent)
  held = {
      "state": state.reshape(held["state"].shape),
      "conv": recent.astype(held["conv"].dtype),
  }
  return out.reshape(R, G * M, Dv), held


def steps(
    config: ModelConfig,
    held: PyTree,
    is_fed_RxQ: jax.Array,
    *inputs: jax.Array,
) -> tuple[jax.Array, PyTree]:
  """Runs Q tokens of each row, equivalent to Q calls of `step`.

  All arguments except `held` and the kernel have an axis Q after R.
  """
  mixed, conv, *others = inputs
  first = lambda x: jnp.moveaxis(x, 1, 0)

  def run(
      held: PyTree, token: tuple[jax.Array, ...]
  ) -> tuple[PyTree, jax.Array]:
    is_fed, mixed, *others = token
    out, held = step(config, held, is_fed, mixed, conv, *others)
    return held, out

  tokens = tuple(map(first, (is_fed_RxQ, mixed, *others)))
  held, out = jax.lax.scan(run, held, tokens)
  return jnp.moveaxis(out, 0, 1), held

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

  num_states = 2 if has_completions else 1
  shape = R, num_states, *v.shape[2:4], config.delta_key_dim, v.shape[-1]
  start = jnp.zeros(shape, jnp.float32), jnp.full((R, 2), -1, jnp.int32)
  # The backward pass recomputes each chunk.
  (states, _), out = jax.lax.scan(
      jax.checkpoint(_chunk), start, jax.tree.map(cut, (inputs, places))
  )
  out = jnp.moveaxis(out, 0, 1).reshape(R, count * size, -1, v.shape[-1])
  states = states[:, 0].reshape(R, -1, *shape[-2:])
  recent = _recent(mixed_RxLxX, places, taps - 1)
  return out[:, :L], {"state": states, "conv": recent}


def _chunk(
    carry: tuple[jax.Array, jax.Array], chunk: tuple[PyTree, packed.Places]
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Runs one chunk.

  Args:
    carry: states [R, S, G, M, Dk, Dv] of the sequence that the previous chunk
      ended in, and of its prompt unless S is 1; and the group and owner of that
      sequence, [R, 2] int32.
    chunk: q and k [R, C, G, Dk], v [R, C, G, M, Dv], log α and β [R, C, G, M],
      and places [R, C].

  Returns:
    The carry after the chunk, and [R, C, G, M, Dv].
  """
  (states, last_Rx2), ((q, k, v, log_decay, beta), places) = carry, chunk
  S, C = states.shape[1], q.shape[1]
  is_real_RxC = places.group >= 0
  seen_RxCxC = packed.sees(places, places, 0)
  # Places without a token see only each other.
  # [R, C, S], which state a place's path starts from; if none, from zero.
  is_group = places.group == last_Rx2[:, :1]
  is_same = is_group & (places.owner == last_Rx2[:, 1:])
  begins = jnp.stack([is_same, is_group & ~is_same], axis=-1)[..., :S]

  seen = seen_RxCxC.astype(jnp.float32)
  log_decay = _product("rcs,rsgm->rgmc", seen, log_decay)
  decay = jnp.exp(log_decay)
  between = log_decay[..., :, None] - log_decay[..., None, :]
  between = jnp.where(seen_RxCxC[:, None, None], between, -jnp.inf)
  between = jnp.exp(between)  # [R, G, M, C, C], γ_t / γ_s.
  beta = jnp.moveaxis(beta, 1, -1)[..., None]

  def read(x: jax.Array) -> jax.Array:
    """Returns γ S_0ᵀ x, [R, G, M, C, Dv]."""
    each = _product("rcgk,rsgmkv->rsgmcv", x, states)
    own = jnp.moveaxis(begins, 2, 1)[:, :, None, None, :, None]
    return decay[..., None] * jnp.sum(jnp.where(own, each, 0.0), axis=1)

  similar = _product("rcgk,rsgk->rgcs", k, k)[:, :, None]
  wanted = beta * (jnp.moveaxis(v, 1, 3) - read(k))
  u = _solve(beta * similar * between, wanted)
  scores = _product("rcgk,rsgk->rgcs", q, k)[:, :, None] * between
  out = read(q) + _product("rgmcs,rgmsv->rgmcv", scores, u)

  # The places whose states the next chunk may start from.
  index_1xC = jnp.arange(C)[None]
  last_of = lambda is_so: jnp.max(jnp.where(is_so, index_1xC, -1), axis=1)
  ends = [last_of(is_real_RxC)]
  at = jnp.maximum(ends[0], 0)[:, None]
  place = lambda x: jnp.take_along_axis(x, at, axis=1)
  is_last_group = is_real_RxC & (places.group == place(places.group))
  if S > 1:
    ends.append(last_of(is_last_group & (places.owner == 0)))
  is_end = jnp.stack(ends, axis=1)[..., None] == index_1xC[None]
  end = is_end.astype(jnp.float32)
  has_end = jnp.any(is_end, axis=-1)
  moves = jnp.any(is_end[..., None] & begins[:, None], axis=2)  # [R, S, S]
  # A state without a place in this chunk stays, unless its group has ended.
  stays = ~has_end & (~has_end[:, :1] | place(is_group))
  moves |= stays[..., None] & jnp.eye(S, dtype=bool)[None]
  faded = jnp.exp(_product("rsc,rgmc->rsgm", end, log_decay))
  weights = _product("rnc,rgmcs->rngms", end, between)
  added = _product("rngms,rsgk,rgmsv->rngmkv", weights, k, u)
  moved = _product("rns,rsgmkv->rngmkv", moves.astype(jnp.float32), states)
  states = faded[..., None, None] * moved + added
  new_Rx2 = jnp.concatenate([place(places.group), place(places.owner)], axis=1)
  last_Rx2 = jnp.where(has_end[:, :1], new_Rx2, last_Rx2)
  return (states, last_Rx2), jnp.moveaxis(out, 3, 1)


def _solve(system: jax.Array, wanted: jax.Array) -> jax.Array:
  """Returns u of (I + N) u = `wanted`, with N the part below the diagonal.

  XLA's solver is no alternative: on a CPU each call waits for threads that run
  other calls, which can stop the program forever.

  Args:
    system: matrix [..., C, C] whose part below the diagonal is N; C is a power
      of 2.
    wanted: right-hand sides [..., C, Dv].
  """
  below = jnp.tril(system, -1)
  inverse = _inverse(jax.lax.stop_gradient(below))
  times = functools.partial(_product, "...cs,...sv->...cv")
  transposed = jnp.matrix_transpose(inverse)

  def refined(inverse: jax.Array) -> Callable[..., jax.Array]:
    """Returns a solver with one step of iterative refinement."""

    def solve(matvec: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
      u = times(inverse, x)
      return u + times(inverse, x - matvec(u))

    return solve

  return jax.lax.custom_linear_solve(
      lambda u: u + times(below, u),
      wanted,
      solve=refined(inverse),
      transpose_solve=refined(transposed),
  )


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

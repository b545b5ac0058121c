# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: keys and values are made of a latent per token.

A token x has a latent c and a rotated key r that all heads share; each head h
has matrices U_h and V_h, and a query of a plain part p and a rotated part:

    c = norm(W x),  k_h = [U_h c, r],  v_h = V_h c,  q_h = [p_h, rotated part]

Passes over rows expand keys and values. Decode steps cache only c and r: with

    p_h · U_h c = (U_hᵀ p_h) · c,    Σ w V_h c = V_h Σ w c

they are attention with one key-value head, whose keys are [c, r] and whose
values are c, since U_h moves to the queries and V_h to the results.

Source: DeepSeek-AI 2024 (arXiv:2405.04434, section 2.1), as computed by Hugging
Face's `DeepseekV3Attention`.

Axes: D width, H heads, C width of the latent, E width of latent and rotated
key. Leading axes written `...` are free.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as config_lib
from tba_jax.models.net import layers
from tba_jax.models.net import products

# The norms of latents have this term whatever `config.norm_epsilon` is.
_EPSILON = 1e-6


class LatentAttention(nnx.Module):
  """Latent attention. Queries have a latent of their own if `query_rank` > 0.

  q_a, q_a_norm, q_b: maps to the latent of queries and to queries; without a
    latent, `q` alone.
  kv_a, kv_a_norm: map to latent and rotated key, and the latent's norm.
  kv_b: [H, U_h's rows and V_h's rows, C].
  o: map from all heads' results to the stream.
  """

  def __init__(
      self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs, out_scale: float
  ):
    self.config = c = config
    dtype = jnp.dtype(c.param_dtype)

    def make(inputs, outputs, *axes, bias=False, scale=1.0) -> layers.Linear:
      return layers.Linear(
          *(inputs, outputs, axes),
          rngs=rngs,
          param_dtype=dtype,
          bias=bias,
          scale=scale,
      )

    def norm(size: int, axis: str) -> layers.RMSNorm:
      return layers.RMSNorm(
          size, epsilon=_EPSILON, param_dtype=dtype, logical_axis=axis
      )

    D, H, C, bias = c.width, c.num_heads, c.latent_rank, c.attention_bias
    query, key_and_value = (H, c.head_dim), c.nope_dim + c.value_dim
    if c.query_rank:
      rank = (c.query_rank,)
      self.q_a = make((D,), rank, "query_rank", "width", bias=bias)
      self.q_a_norm = norm(c.query_rank, "query_rank")
      self.q_b = make(rank, query, "heads", "head_dim", "query_rank")
    else:
      self.q = make((D,), query, "heads", "head_dim", "width")
    both = (C + c.rope_dim,)
    self.kv_a = make((D,), both, "latent_and_key", "width", bias=bias)
    self.kv_a_norm = norm(C, "latent")
    self.kv_b = make(
        *((C,), (H, key_and_value), "heads", "key_and_value", "latent")
    )
    self.o = make(
        *((H, c.value_dim), (D,), "width", "heads", "value_dim"),
        bias=bias,
        scale=out_scale,
    )

  def __call__(
      self,
      x: jax.Array,
      tables: tuple[jax.Array, ...],
      attend: layers.AttendFn,
      absorbs: bool = False,
  ) -> tuple[jax.Array, object]:
    """Returns [..., D], and what the KV cache keeps, for x [..., D].

    Args:
      x: [..., D].
      tables: result of `layers.rotary_tables`.
      attend: attention over expanded keys and values, or over latents.
      absorbs: whether it is over latents, and its second result is returned; if
        not, that is {"v": latents with rotated keys, [..., 1, E]}.
    """
    c = self.config
    if c.query_rank:
      q = self.q_b(self.q_a_norm(self.q_a(x)))
    else:
      q = self.q(x)
    plain, rotated = jnp.split(q, [c.nope_dim], axis=-1)
    rotated = _rotate_pairs(rotated, tables)
    latent, key = jnp.split(self.kv_a(x), [c.latent_rank], axis=-1)
    latent = self.kv_a_norm(latent)
    key = _rotate_pairs(key[..., None, :], tables)
    cached = jnp.concatenate([latent[..., None, :], key], axis=-1)
    if absorbs:
      out, kept = self._attend_latents(plain, rotated, cached, attend)
    else:
      out = self._attend_expanded(plain, rotated, latent, key, attend)
      kept = {"v": cached}
    return self.o(out), kept

  def _attend_expanded(self, plain, rotated, latent, key, attend):
    """Returns the heads' results with keys and values of each head."""
    c = self.config
    keys, v = jnp.split(self.kv_b(latent), [c.nope_dim], axis=-1)
    key = jnp.broadcast_to(key, (*keys.shape[:-1], c.rope_dim))
    k = jnp.concatenate([keys, key], axis=-1)
    q = jnp.concatenate([plain, rotated], axis=-1)
    q, k, v = (_pad(x, c.attended_dim) for x in (self._scaled(q), k, v))
    out, _ = attend(q[..., None, :], k, v, None)
    return out[..., 0, : c.value_dim]

  def _attend_latents(self, plain, rotated, cached, attend):
    """Returns the heads' results with one key of all heads."""
    c = self.config
    both = self.kv_b.kernel[...].astype(plain.dtype)
    keys, values = jnp.split(both, [c.nope_dim], axis=1)
    dtype = plain.dtype
    plain = products.summed("...hk,hkc->...hc", plain, keys, dtype)
    q = self._scaled(jnp.concatenate([plain, rotated], axis=-1))
    out, kept = attend(q[..., None, :, :], cached, cached, None)
    # The rest of the values are the rotated keys.
    out = out[..., 0, :, : c.latent_rank]
    return products.summed("...hc,hvc->...hv", out, values, dtype), kept

  def _scaled(self, q: jax.Array) -> jax.Array:
    """Returns queries for scores that `attend` divides.

    It divides by the square root of the width that it gets, instead of the
    heads'.
    """
    c = self.config
    width = max(q.shape[-1], c.attended_dim)
    scale = math.sqrt(width / c.head_dim) * layers.score_scale(c)
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def _rotate_pairs(x: jax.Array, tables: tuple[jax.Array, ...]) -> jax.Array:
  """Returns x [..., heads, rope_dim] rotated, where 2i is paired with 2i + 1.

  The result has the first entries of all pairs before the second ones, which
  changes no product of a query and a key.
  """
  pairs = x.reshape(*x.shape[:-1], -1, 2)
  pairs = jnp.swapaxes(pairs, -1, -2)
  return layers.rotate(pairs.reshape(x.shape), tables[:2])


def _pad(x: jax.Array, width: int) -> jax.Array:
  """Returns x with zeros after the entries of its last axis, up to `width`."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

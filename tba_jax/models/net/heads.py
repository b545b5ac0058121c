# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scalar heads: reward models, value models and classifiers.

The stack is a policy's, but the token head is replaced by a linear map `score`
without bias to `num_labels` numbers per position, as in Hugging Face's
`AutoModelForSequenceClassification`. `hf.load` and `hf.save` handle both.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, L tokens,
C labels.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.net import transformer

PyTree = types.PyTree


def config_of(policy_config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """Returns the shape of a policy's stack with a scalar head."""
  return dataclasses.replace(policy_config, num_labels=1)


def _at(values_xLxC: jax.Array, index: jax.Array) -> jax.Array:
  """Returns values [..., C] at position index [...] of axis L."""
  index = index[..., None, None]
  return jnp.take_along_axis(values_xLxC, index, axis=-2)[..., 0, :]


def _last(mask: jax.Array) -> jax.Array:
  """Returns the index of the last real token [...]; 0 if there is none."""
  columns = jnp.arange(mask.shape[-1], dtype=jnp.int32)
  columns = jnp.expand_dims(columns, tuple(range(mask.ndim - 1)))
  return jnp.max(columns * mask.astype(jnp.int32), axis=-1)


class ScalarModel:
  """A model with a scalar head as pure functions; for masks, see `Model`.

  Values and rewards are the head's first output.

  config: the shape; num_labels is above 0.
  init: (rng) -> params; the head's leaf is params["score"]["kernel"] [C, D].
  logical_axes: params with a tuple of axis names in place of each leaf.
  """

  def __init__(self, config: config_lib.ModelConfig, *, remat: str = "none"):
    """Builds the model of a shape; ValueError if num_labels is 0.

    Args:
      config: the shape; `config_of` makes it from a policy's.
      remat: `config.train.remat`.
    """
    self.config = config
    self._stack = transformer.make_model(config, scalar=True, remat=remat)
    self.init = self._stack.init
    self.logical_axes = self._stack.logical_axes

  def from_policy(
      self, policy_params: PyTree, rng: jax.Array | None = None
  ) -> PyTree:
    """Returns a copy of a policy's params with a zero head.

    The copy has this model's dtype. Given a key, the head is random.
    """
    c = self.config
    shape, dtype = (c.num_labels, c.width), jnp.dtype(c.param_dtype)
    # A copy, so that either tree may be donated.
    params = jax.tree.map(lambda x: jnp.array(x, dtype), policy_params)
    params = {k: v for k, v in params.items() if k not in ("head", "score")}
    kernel = jnp.zeros(shape, dtype)
    if rng is not None:
      kernel = jax.random.normal(rng, shape, jnp.float32) / jnp.sqrt(c.width)
    return {**params, "score": {"kernel": kernel.astype(dtype)}}

  def label_scores(
      self, params: PyTree, tokens_BxL: jax.Array, mask_BxL: jax.Array
  ) -> jax.Array:
    """Returns the logits of `transformers`, [B, C], at the last real token."""
    scores_BxLxC = self._stack.logits(params, tokens_BxL, mask_BxL)
    return _at(scores_BxLxC, _last(mask_BxL))

  def rewards(self, *inputs: PyTree) -> jax.Array:
    """Returns the first of `label_scores`, [B]."""
    return self.label_scores(*inputs)[..., 0]

  def values(self, *inputs: PyTree) -> jax.Array:
    """Returns values [B, L] float32 for the inputs of `label_scores`.

    Entry l depends on tokens 0 to l; it is meaningless at padding.
    """
    return self._stack.logits(*inputs)[..., 0]

  def completion_values(self, *inputs: PyTree) -> jax.Array:
    """Returns values [B, K, T] float32; entry t does not depend on token t.

    Args:
      *inputs: arguments of `Model.completion_stream`; for packed rows the
        values are [R, L].
    """
    return self._stack.completion_logits(*inputs)[..., 0]

  def completion_rewards(
      self,
      params: PyTree,
      prompt_tokens: jax.Array,
      prompt_mask: jax.Array,
      completion_tokens: jax.Array,
      completion_mask: jax.Array,
  ) -> jax.Array:
    """Returns rewards [B, K] float32 at each completion's last real token.

    The reward of an empty completion is at the prompt's last token.
    """
    # The value after the last token is the value before one more token.
    tokens_BxKxT1 = jnp.pad(completion_tokens, ((0, 0), (0, 0), (0, 1)))
    values_BxKxT1 = self.completion_values(
        params, prompt_tokens, prompt_mask, tokens_BxKxT1
    )
    lengths_BxK = jnp.sum(completion_mask.astype(jnp.int32), axis=-1)
    return _at(values_BxKxT1[..., None], lengths_BxK)[..., 0]

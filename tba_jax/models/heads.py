# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scalar heads: reward models, value models and classifiers.

The stack is a policy's; in place of the token head is a linear map `score`,
without bias, to `num_labels` numbers per position, as in Hugging Face's
`AutoModelForSequenceClassification`. `hf.load` and `hf.save` handle both.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, L any run
of tokens, C labels.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models import transformer

PyTree = types.PyTree


@dataclasses.dataclass(frozen=True)
class ScalarModel:
  """A model with a scalar head as pure functions; masks are those of `Model`.

  If the head has several labels, values and rewards are those of one.

  config: the shape; num_labels is above 0.
  init: (rng) -> params; the head's leaf is params["score"]["kernel"] [C, D].
  from_policy: (policy_params, rng | None) -> params: a copy of a policy's
    params with a head of zeros, or a random head given a key.
  label_scores: (params, tokens_BxL, mask_BxL) -> scores_BxC float32 at the last
    real token, `transformers`' logits.
  rewards: as label_scores -> rewards_B.
  values: (params, tokens_BxL, mask_BxL) -> values_BxL float32; entry l has
    seen tokens 0 to l. Finite but meaningless at padding.
  completion_values: (params, prompt_tokens_BxP, prompt_mask_BxP,
    completion_tokens_BxKxT) -> values_BxKxT float32; entry t has seen the
    prompt and the tokens before t. Padding as in `Model.completion_stream`.
  completion_rewards: as completion_values and completion_mask_BxKxT ->
    rewards_BxK float32 at a completion's last real token, or at the prompt's
    if it is empty.
  logical_axes: params with a tuple of axis names in place of each leaf.
  """

  config: config_lib.ModelConfig
  init: Callable[[jax.Array], PyTree]
  from_policy: Callable[..., PyTree]
  label_scores: Callable[..., jax.Array]
  rewards: Callable[..., jax.Array]
  values: Callable[..., jax.Array]
  completion_values: Callable[..., jax.Array]
  completion_rewards: Callable[..., jax.Array]
  logical_axes: PyTree


def config_of(
    policy_config: config_lib.ModelConfig, num_labels: int = 1
) -> config_lib.ModelConfig:
  """Returns the shape of a policy's stack with a scalar head."""
  return dataclasses.replace(policy_config, num_labels=num_labels)


def _at(values_xLxC: jax.Array, index: jax.Array) -> jax.Array:
  """Returns values [..., C] at position index [...] of axis L."""
  index = index[..., None, None]
  return jnp.take_along_axis(values_xLxC, index, axis=-2)[..., 0, :]


def _last(mask: jax.Array) -> jax.Array:
  """Returns the index of the last real token [...]; 0 if there is none."""
  columns = jnp.arange(mask.shape[-1], dtype=jnp.int32)
  columns = jnp.expand_dims(columns, tuple(range(mask.ndim - 1)))
  return jnp.max(columns * mask.astype(jnp.int32), axis=-1)


class _Forward:
  """The forward passes of one shape and label."""

  def __init__(self, stack: transformer.Model, label: int):
    self.stack = stack
    self.label = label

  def from_policy(
      self, policy_params: PyTree, rng: jax.Array | None = None
  ) -> PyTree:
    # A copy, so that either tree may be donated.
    params = jax.tree.map(jnp.copy, policy_params)
    params = {k: v for k, v in params.items() if k not in ("head", "score")}
    c = self.stack.config
    shape, dtype = (c.num_labels, c.width), jnp.dtype(c.param_dtype)
    kernel = jnp.zeros(shape, dtype)
    if rng is not None:
      kernel = jax.random.normal(rng, shape, jnp.float32) / jnp.sqrt(c.width)
    return {**params, "score": {"kernel": kernel.astype(dtype)}}

  def label_scores(
      self, params: PyTree, tokens_BxL: jax.Array, mask_BxL: jax.Array
  ) -> jax.Array:
    scores_BxLxC = self.stack.logits(params, tokens_BxL, mask_BxL)
    return _at(scores_BxLxC, _last(mask_BxL))

  def rewards(self, *inputs: PyTree) -> jax.Array:
    return self.label_scores(*inputs)[..., self.label]

  def values(self, *inputs: PyTree) -> jax.Array:
    return self.stack.logits(*inputs)[..., self.label]

  def completion_values(self, *inputs: PyTree) -> jax.Array:
    return self.stack.completion_logits(*inputs)[..., self.label]

  def completion_rewards(
      self,
      params: PyTree,
      prompt_tokens: jax.Array,
      prompt_mask: jax.Array,
      completion_tokens: jax.Array,
      completion_mask: jax.Array,
  ) -> jax.Array:
    # The value after the last token is the one before a next token.
    tokens_BxKxT1 = jnp.pad(completion_tokens, ((0, 0), (0, 0), (0, 1)))
    values_BxKxT1 = self.completion_values(
        params, prompt_tokens, prompt_mask, tokens_BxKxT1
    )
    lengths_BxK = jnp.sum(completion_mask.astype(jnp.int32), axis=-1)
    return _at(values_BxKxT1[..., None], lengths_BxK)[..., 0]


def make_scalar_model(
    config: config_lib.ModelConfig, *, label: int = 0, remat: str = "none"
) -> ScalarModel:
  """Returns the model of a shape with a scalar head.

  Args:
    config: with num_labels above 0; `config_of` makes it from a policy's.
    label: output of the head that rewards and values are.
    remat: `config.train.remat`.

  Raises:
    ValueError: the head does not have that label.
  """
  if not 0 <= label < config.num_labels:
    raise ValueError(
        f"label={label}: allowed below num_labels={config.num_labels}"
    )
  stack = transformer.make_model(config, scalar=True, remat=remat)
  forward = _Forward(stack, label)
  return ScalarModel(
      config=config,
      init=stack.init,
      from_policy=forward.from_policy,
      label_scores=forward.label_scores,
      rewards=forward.rewards,
      values=forward.values,
      completion_values=forward.completion_values,
      completion_rewards=forward.completion_rewards,
      logical_axes=stack.logical_axes,
  )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A batch cut into micro-batches of whole prompts, and what they add up to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import batch_metrics
from tba_jax import sharding
from tba_jax import types

PyTree = types.PyTree


def cut(
    batch: types.Batch,
    micro_batch_prompts: int,
    mesh: jax.sharding.Mesh,
    rules: ml_collections.ConfigDict,
) -> types.Batch:
  """Returns the batch as [micro-batches, prompts of one, ...] leaves.

  Raises:
    ValueError: `micro_batch_prompts` does not divide the batch, or its shards
      do not divide it.
  """
  num_prompts = batch.rewards.shape[0]
  if num_prompts % micro_batch_prompts:
    raise ValueError(
        f"train.micro_batch_prompts={micro_batch_prompts}: must divide the"
        f" {num_prompts} prompts of the batch"
    )
  num_micro = num_prompts // micro_batch_prompts
  over_batch = sharding.batch_sharding(mesh, rules)
  num_shards = num_prompts // over_batch.shard_shape((num_prompts,))[0]
  if micro_batch_prompts % num_shards:
    raise ValueError(
        f"train.micro_batch_prompts={micro_batch_prompts}: must be a multiple"
        f" of the {num_shards} shards of config.sharding.batch"
    )
  over_prompts = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(None, *over_batch.spec)
  )

  def cut_leaf(x: jax.Array) -> jax.Array:
    # Strided, not contiguous: each data shard then holds its part of every
    # micro-batch already, and nothing moves.
    x = x.reshape(micro_batch_prompts, num_micro, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, over_prompts)

  return jax.tree.map(cut_leaf, batch)


def accumulate(
    value_fn: Callable[..., tuple[jax.Array, batch_metrics.Totals]],
    params: PyTree,
    micro_batches: types.Batch,
) -> tuple[jax.Array, batch_metrics.Totals, PyTree]:
  """Returns the mean loss, the summed totals and the mean gradient.

  Args:
    value_fn: (params, micro-batch) -> (loss, totals).
    params: the gradient is by them.
    micro_batches: leaves [M, ...] of M micro-batches, one after the other.
  """
  grad_fn = jax.value_and_grad(value_fn, has_aux=True)
  num_micro = micro_batches.rewards.shape[0]
  first = jax.tree.map(lambda x: x[0], micro_batches)
  if num_micro == 1:
    (loss, totals), grads = grad_fn(params, first)
    return loss, totals, grads

  def add(carry: PyTree, micro: types.Batch) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, carry, grad_fn(params, micro)), None

  # Sums in float32 at least, whatever the params are.
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
      jax.eval_shape(grad_fn, params, first),
  )
  ((loss, totals), grads), _ = jax.lax.scan(add, zeros, micro_batches)
  grads = jax.tree.map(
      lambda g, p: (g / num_micro).astype(p.dtype), grads, params
  )
  return loss / num_micro, totals, grads

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference policy that the KL is measured against: fixed, reset, EMA.

A moving reference is part of the train state, so that checkpoints contain it.
Its version is the step at which it last moved.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import types
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.mesh import sharding
from tba_jax.models.net import sequence


def moved(
    config_reference: ml_collections.ConfigDict,
    ref_params: types.PyTree,
    params: types.PyTree,
    step: jax.Array,
) -> types.PyTree:
  """Returns the reference's params after `step` steps.

      reset: θ_ref ← θ;   ema: θ_ref ← α θ_ref + (1 - α) θ

  if step is a multiple of every_steps; otherwise they stay as they are.

  Source: hard resets every 50 steps, Bartoldson et al. 2025 (arXiv:2503.18929)
  §6; the moving average with α = 0.9 is from the code that followed it.

  Args:
    config_reference: reads `mode`, `every_steps` and `ema_decay` (α).
    ref_params: `TrainState.ref_params`; {} if the reference is fixed.
    params: params of the policy after these steps.
    step: [] int32, steps done, at least 1.
  """
  c = config_reference
  if c.mode == "fixed":
    return ref_params
  decay = c.ema_decay if c.mode == "ema" else 0.0

  def mix(ref: jax.Array, new: jax.Array) -> jax.Array:
    if not decay:
      return jnp.copy(new)
    # A bfloat16 average would round small changes away.
    ref32, new32 = ref.astype(jnp.float32), new.astype(jnp.float32)
    return (decay * ref32 + (1 - decay) * new32).astype(ref.dtype)

  return jax.lax.cond(
      step % c.every_steps == 0,
      lambda: jax.tree.map(mix, ref_params, params),
      lambda: ref_params,
  )


def make_logprobs_fn(
    model: Any, *, temperature: float, micro_prompts: int = 0
) -> Callable[..., jax.Array]:
  """Returns the function of `Reference.logprobs`, of params and its inputs.

  Args:
    model: a `models.transformer.Model`.
    temperature: temperature of sampling.
    micro_prompts: prompts of a micro-batch; 0 computes all at a time, or the
      parts of the rows.
  """

  def run(
      params: types.PyTree,
      prompt_tokens_BxP: jax.Array,
      prompt_mask_BxP: jax.Array,
      completion_tokens_BxKxT: jax.Array,
      completion_mask_BxKxT: jax.Array,
      rows: types.Rows | None = None,
  ) -> jax.Array:
    B, K, _ = completion_tokens_BxKxT.shape
    if micro_prompts:
      rows = _in_micro_batches(rows, B, K, micro_prompts)
    logprobs_BxKxT = logprobs_lib.completion_logprobs(
        model,
        params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        temperature=temperature,
        rows=rows,
    )
    return jnp.where(completion_mask_BxKxT > 0, logprobs_BxKxT, 0.0)

  return run


def _in_micro_batches(
    rows: types.Rows | None, B: int, K: int, num_prompts: int
) -> types.Rows | None:
  """Returns the rows of a batch, with a part for each micro-batch.

  As in the train step, every nth row belongs to one of n micro-batches, so that
  the pass holds no more activations than a step.

  Args:
    rows: rows [R, 1, M] of whole micro-batches; None has a row a prompt.
    B, K: prompts, and completions of each.
    num_prompts: prompts of a micro-batch; without rows, a multiple of it that
      the shards of the batch divide.
  """
  if rows is None:
    num_prompts = math.lcm(num_prompts, sequence.current_split().batch_count)
  num_micro = max(B // num_prompts, 1)
  if num_micro == 1 or B % num_prompts:
    return rows
  if rows is None:
    order = jnp.arange(B * K, dtype=jnp.int32)
    rows = types.Rows(order.reshape(B, 1, K), order.reshape(B, K))
  R, _, M = rows.indices.shape
  row, place = rows.slots // M, rows.slots % M
  row = row % num_micro * (R // num_micro) + row // num_micro
  cut = lambda x: x.reshape(R // num_micro, num_micro, -1)
  tokens = None if rows.tokens is None else cut(rows.tokens)
  return types.Rows(cut(rows.indices), row * M + place, tokens)


class Reference:
  """Log-probs of completions under the reference policy.

  model: its `models.transformer.Model`.
  name: `lora.base_name` of a fixed one, "" where it is not known.
  """

  def __init__(
      self,
      model: Any,
      params: types.PyTree,
      *,
      temperature: float,
      every_steps: int = 0,
      name: str = "",
      micro_prompts: int = 0,
      mesh: jax.sharding.Mesh | None = None,
  ):
    """Initializes the reference.

    Args:
      model: a `models.transformer.Model`.
      params: params of a fixed π_ref, which nobody donates; None if it is not
        held here, and only its version is asked for.
      temperature: temperature of sampling; policy and reference are both
        tempered.
      every_steps: period of a moving reference; 0 if it is fixed.
      name: name that a checkpoint keeps, see the class.
      micro_prompts: argument of `make_logprobs_fn`.
      mesh: mesh over which tokens are split; None is one device.
    """
    self.model, self.name = model, name
    self._every_steps = every_steps
    self._params = None if every_steps else params
    run = make_logprobs_fn(
        model, temperature=temperature, micro_prompts=micro_prompts
    )
    if mesh is not None:
      run = sequence.split_tokens(run, mesh, *sharding.TOKEN_AXES)
    self._run = jax.jit(run)

  @property
  def params(self) -> types.PyTree:
    """Params of a fixed reference that is held here, else None."""
    return self._params

  def version(self, step: int) -> int:
    """Returns the last step up to `step` at which the reference moved, or 0.

    Log-probs cached under another version are stale.
    """
    every = self._every_steps
    return step // every * every if every else 0

  def logprobs(
      self,
      prompt_tokens_BxP: jax.Array,
      prompt_mask_BxP: jax.Array,
      completion_tokens_BxKxT: jax.Array,
      completion_mask_BxKxT: jax.Array,
      ref_params: types.PyTree = None,
      rows: types.Rows | None = None,
  ) -> jax.Array:
    """Returns [B, K, T] float32, log π_ref of each completion token in nats.

    It is 0 where the mask is 0. Prompts are left-padded, completions
    right-padded. Does not wait for the devices.

    Args:
      ref_params: `TrainState.ref_params`, of a moving reference.
      rows: packed rows of the batch.
    """
    return self._run(
        ref_params if self._every_steps else self._params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        completion_mask_BxKxT,
        rows,
    )

  def compile(
      self,
      prompt_tokens_BxP: jax.ShapeDtypeStruct,
      prompt_mask_BxP: jax.ShapeDtypeStruct,
      completion_tokens_BxKxT: jax.ShapeDtypeStruct,
      completion_mask_BxKxT: jax.ShapeDtypeStruct,
      ref_params: types.PyTree = None,
      rows: types.Rows | None = None,
  ) -> None:
    """Compiles `logprobs` for these shapes and shardings."""
    self._run.lower(
        ref_params if self._every_steps else self._params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        completion_mask_BxKxT,
        rows,
    ).compile()

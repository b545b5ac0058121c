# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference policy that the KL is measured against: fixed, reset, EMA.

A moving reference is part of the train state, so that checkpoints contain it.
Its version is the step at which it last moved.
"""

from collections.abc import Callable
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

  if step is a multiple of every_steps; otherwise θ_ref is unchanged.

  Source: hard resets every 50 steps, Bartoldson et al. 2025 (arXiv:2503.18929)
  §6; the moving average with α = 0.9 is from the code that followed it.

  Args:
    config_reference: reads `mode`, `every_steps` and `ema_decay` (α).
    ref_params: `TrainState.ref_params`; {} if the reference is fixed.
    params: policy params after these steps.
    step: [] int32, steps done, at least 1.
  """
  c = config_reference
  if c.mode == "fixed":
    return ref_params
  decay = c.ema_decay if c.mode == "ema" else 0.0

  def mix(ref: jax.Array, new: jax.Array) -> jax.Array:
    if not decay:
      return jnp.copy(new)
    # Averaging in bfloat16 would lose small changes.
    ref32, new32 = ref.astype(jnp.float32), new.astype(jnp.float32)
    return (decay * ref32 + (1 - decay) * new32).astype(ref.dtype)

  return jax.lax.cond(
      step % c.every_steps == 0,
      lambda: jax.tree.map(mix, ref_params, params),
      lambda: ref_params,
  )


def make_logprobs_fn(
    model: Any, *, temperature: float
) -> Callable[..., jax.Array]:
  """Returns the function of `Reference.logprobs`, of params and its inputs.

  Args:
    model: a `models.transformer.Model`.
  """

  def run(
      params: types.PyTree,
      prompt_tokens_BxP: jax.Array,
      prompt_mask_BxP: jax.Array,
      completion_tokens_BxKxT: jax.Array,
      completion_mask_BxKxT: jax.Array,
      rows: types.Rows | None = None,
      kept_BxKxTxC: jax.Array | None = None,
  ) -> jax.Array:
    logprobs_BxKxT = logprobs_lib.completion_logprobs(
        model,
        params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        temperature=temperature,
        rows=rows,
        kept_BxKxTxC=kept_BxKxTxC,
    )
    return jnp.where(completion_mask_BxKxT > 0, logprobs_BxKxT, 0.0)

  return run


class Reference:
  """Log-probs of completions under the reference policy.

  model: its `models.transformer.Model`.
  name: `lora.base_name` of a fixed reference, "" if unknown.
  """

  def __init__(
      self,
      model: Any,
      params: types.PyTree,
      *,
      temperature: float,
      every_steps: int = 0,
      name: str = "",
      mesh: jax.sharding.Mesh | None = None,
  ):
    """Initializes the reference.

    Args:
      model: a `models.transformer.Model`.
      params: fixed π_ref, never donated; None if another process holds it and
        only its version is needed here.
      temperature: sampling temperature, applied to policy and reference.
      every_steps: period of a moving reference; 0 if it is fixed.
      name: key in checkpoints, see the class.
      mesh: devices over which tokens are split; None is one device.
    """
    self.model, self.name = model, name
    self._every_steps = every_steps
    self._params = None if every_steps else params
    run = make_logprobs_fn(model, temperature=temperature)
    if mesh is not None:
      run = sequence.split_tokens(run, mesh, *sharding.TOKEN_AXES)
    self._run = jax.jit(run)

  @property
  def params(self) -> types.PyTree:
    """Params of a fixed reference in this process, else None."""
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
      kept_BxKxTxC: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, K, T] float32, log π_ref of each completion token in nats.

    It is 0 where the mask is 0 and for tokens that `rows` lack. Prompts are
    left-padded, completions right-padded. Does not wait for the devices.

    Args:
      ref_params: `TrainState.ref_params` of a moving reference.
      rows: packed rows of the batch or of some of its groups.
      kept_BxKxTxC: see `logprobs.map_logits`.
    """
    return self._run(
        ref_params if self._every_steps else self._params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        completion_mask_BxKxT,
        rows,
        kept_BxKxTxC,
    )

  def compile(
      self,
      prompt_tokens_BxP: jax.ShapeDtypeStruct,
      prompt_mask_BxP: jax.ShapeDtypeStruct,
      completion_tokens_BxKxT: jax.ShapeDtypeStruct,
      completion_mask_BxKxT: jax.ShapeDtypeStruct,
      ref_params: types.PyTree = None,
      rows: types.Rows | None = None,
      kept_BxKxTxC: jax.ShapeDtypeStruct | None = None,
  ) -> None:
    """Compiles `logprobs` for these shapes and shardings."""
    self._run.lower(
        ref_params if self._every_steps else self._params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        completion_mask_BxKxT,
        rows,
        kept_BxKxTxC,
    ).compile()

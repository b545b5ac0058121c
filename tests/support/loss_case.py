# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups and `config.loss` for tests of pure losses."""

import jax.numpy as jnp

from tba_jax.config import settings
from tba_jax.losses import groups as groups_lib


def make_settings(**changes):
  """Returns `config.loss` with changes."""
  c = settings.get_config().loss
  c.update(changes)
  return c


def of_tokens(logprobs, ref, mask, rewards, *, weights=None, **more):
  """Returns groups of arrays [B, K, T] and rewards [B, K]."""
  logprobs, ref = jnp.asarray(logprobs), jnp.asarray(ref)
  arrays = dict(
      logprobs_BxKxT=logprobs,
      kl_logprobs_BxKxT=logprobs,
      behavior_logprobs_BxKxT=ref,
      ref_logprobs_BxKxT=ref,
      mask_BxKxT=jnp.asarray(mask),
      weights_BxKxT=jnp.asarray(mask if weights is None else weights),
      rewards_BxK=jnp.asarray(rewards),
  )
  return groups_lib.Groups(**arrays | more)


def of_sequences(seq, ref_seq, rewards, **more):
  """Returns groups of completions of one token each, from arrays [B, K]."""
  one = lambda x: jnp.asarray(x)[..., None]
  mask = jnp.ones_like(one(rewards))
  return of_tokens(one(seq), one(ref_seq), mask, rewards, **more)


def run_sequences(loss_fn, seq, ref_seq, rewards, *, beta, **more):
  """Returns (loss, aux) of completions of one token each.

  Args:
    loss_fn: (groups, c, beta) -> (loss, aux).
    seq, ref_seq, rewards: [B, K].
    beta: KL coefficient.
    **more: arrays of `Groups`, and settings.
  """
  arrays = {name: more.pop(name) for name in list(more) if "_Bx" in name}
  groups = of_sequences(seq, ref_seq, rewards, **arrays)
  return loss_fn(groups, make_settings(**more), beta)

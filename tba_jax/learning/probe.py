# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Proof of the params that a searcher samples with.

Digests show that a version's leaves arrived as they were sent. They do not show
that the sampler has these leaves: a merge that keeps old adapters, another
base, shards in the wrong order or another rope scaling sample from some other
policy, and look like stale data.

So with each version the trainer publishes its own log-probs of a few fixed
tokens, and a searcher computes those of the params that its sampler would use,
after they were read, merged, cast and placed. It refuses a version if they
differ by more than rounding does.

Axes: B sequences, L tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import logprobs
from tba_jax.models import config as config_lib
from tba_jax.models import transformer
from tba_jax.policy import sharding

# Name of the probe among the published params, and its leaves there by path.
LEAF = "probe"
TOKENS, LOGPROBS, MAX_GAP = (
    f"['{LEAF}']['{name}']" for name in ("tokens", "logprobs", "max_gap")
)
_NUM_SEQUENCES, _NUM_TOKENS = 2, 16
# Limits of the mean gap, nats per token, for log-probs with a standard
# deviation of up to 1 nat. In bfloat16 those of SmolLM2-135M (30 layers; 2.7
# nats) are .096 off those in float32; rounding adds up over layers.
# Matrices of int8 are .22 off.
MAX_GAP_NATS = {"float32": 1e-3, "bfloat16": 0.3, "int8": 0.3}
# Answers with the same bits mean the same params, if the trainer's moved by
# this share of the limit: no rounding hides that from all tokens.
_STILL_SHARE = 1 / 100


def shape(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns B, L of the probe's tokens; a sampler has tables of no more."""
  sampling = config.sampling
  most = sampling.max_prompt_tokens + sampling.max_completion_tokens
  return _NUM_SEQUENCES, min(_NUM_TOKENS, most)


def abstract(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns shapes and dtypes of what is published under `LEAF`."""
  B, L = shape(config)
  return {
      "tokens": jax.ShapeDtypeStruct((B, L), jnp.int32),
      "logprobs": jax.ShapeDtypeStruct((B, L - 1), jnp.float32),
      "max_gap": jax.ShapeDtypeStruct((), jnp.float32),
  }


def is_of(path: str) -> bool:
  """Returns whether a published leaf is the probe's."""
  return path in (TOKENS, LOGPROBS, MAX_GAP)


def max_gap(config: ml_collections.ConfigDict, backend: str) -> float:
  """Returns the largest mean gap that is taken for rounding, nats per token.

  It is for log-probs with a standard deviation of up to 1 nat. The guard's
  setting can only raise it. How params are published does not matter: the
  trainer rounds them before it answers.

  Args:
    config: reads `model`, `lora`, `search` and `guards.max_logprob_gap`.
    backend: JAX's, of this process.
  """
  dtypes = [config_lib.compute_dtype(config.model, backend)]
  if config.lora.rank:  # Searchers round the merged kernels to it.
    dtypes.append(config.model.param_dtype)
  # Accelerators round products of float32, too.
  is_exact = backend == "cpu" and "bfloat16" not in dtypes
  limit = MAX_GAP_NATS[
      config.search.quantization or ("float32" if is_exact else "bfloat16")
  ]
  return max(limit, config.guards.max_logprob_gap)


def make_answer_fn(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    mesh: jax.sharding.Mesh,
    attach: Callable[[types.PyTree, types.PyTree], types.PyTree],
) -> Callable[[types.PyTree, types.PyTree], dict[str, jax.Array]]:
  """Returns the trainer's answer, (published params, base) -> `abstract`.

  It is a forward pass of B · L tokens, jitted, on all devices of the mesh; it
  does not wait for them. The tokens are drawn from the vocabulary once and for
  all.

  Args:
    config: reads `sampling`, `sharding` and what `max_gap` reads.
    model: model of the policy.
    mesh: mesh of the params.
    attach: (base, published params) -> params of the model.
  """
  rng = np.random.default_rng(0)
  vocab_size = model.config.vocab_size
  tokens = rng.integers(vocab_size, size=shape(config), dtype=np.int32)
  limit = max_gap(config, mesh.devices.flat[0].platform)

  def forward(params: types.PyTree, tokens_BxL: jax.Array) -> jax.Array:
    logits_BxLxV = model.logits(params, tokens_BxL, jnp.ones_like(tokens_BxL))
    return logprobs.token_logprobs(
        logits_BxLxV[:, :-1], tokens_BxL[:, 1:], temperature=1.0
    )

  split = sharding.split_rows(forward, mesh)

  def answer(params: types.PyTree, base: types.PyTree) -> dict[str, jax.Array]:
    tokens_BxL = jnp.asarray(tokens)
    return {
        "tokens": tokens_BxL,
        "logprobs": split(attach(base, params), tokens_BxL),
        "max_gap": jnp.float32(limit),
    }

  return jax.jit(answer, out_shardings=sharding.replicated(mesh))


class Check:
  """Compares a searcher's answers with the trainer's, version by version."""

  def __init__(
      self,
      answer: Callable[[types.PyTree, np.ndarray], jax.Array],
      limit: float,
  ):
    """Initializes the check.

    Args:
      answer: (params of the sampler, tokens [B, L]) -> [B, L - 1] float32, the
        log-probs of the tokens after the first; at temperature 1.
      limit: `max_gap` of this searcher; the trainer's may be larger.
    """
    self._answer = answer
    self._limit = limit
    # The trainer's and the own log-probs of the last version without a problem.
    self._last: tuple[np.ndarray, np.ndarray] | None = None

  def problem(self, leaves: Mapping[str, Any], params: types.PyTree) -> str:
    """Returns why the params are not the version's, "" if they are.

    Waits for the devices.

    Args:
      leaves: leaves of the version, by path.
      params: params that the sampler would use, made of these leaves.
    """
    wanted_BxL = np.asarray(leaves[LOGPROBS])
    own_BxL = np.asarray(self._answer(params, np.asarray(leaves[TOKENS])))
    limit = max(self._limit, float(np.asarray(leaves[MAX_GAP])))
    # Rounding grows with the logits.
    limit *= max(1.0, float(wanted_BxL.std()))
    gap = float(np.abs(own_BxL - wanted_BxL).mean())
    if not gap <= limit:  # A gap that is no number, too.
      return (
          f"its log-probs of the probe are {gap:.2g} nats a token off the"
          f" trainer's, above {limit:.2g}"
      )
    if self._last is not None:
      last_BxL, own_last_BxL = self._last
      moved = float(np.abs(wanted_BxL - last_BxL).mean())
      is_still = np.array_equal(own_BxL, own_last_BxL)
      if is_still and moved > limit * _STILL_SHARE:
        return (
            "its log-probs of the probe are those of the version before, bit"
            f" for bit, while the trainer's moved by {moved:.2g} nats a token"
        )
    self._last = wanted_BxL, own_BxL
    return ""

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Check of the params that a searcher samples with.

Digests show that a version's leaves arrived as they were sent. They do not show
that the sampler uses these leaves: with old adapters left in a merge, another
base, shards in the wrong order or another rope scaling, it samples from some
other policy, and the data only looks stale.

So with each version the trainer publishes its log-probs of a few fixed tokens.
A searcher computes the same log-probs with the params that its sampler would
use, after they were read, merged, cast and placed, and refuses the version if
the difference is larger than rounding explains.

Axes: B sequences, L tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types

# Name of the probe among the published params, and the paths of its leaves.
LEAF = "probe"
TOKENS, LOGPROBS, MAX_GAP = (
    f"['{LEAF}']['{name}']" for name in ("tokens", "logprobs", "max_gap")
)
_NUM_SEQUENCES, _NUM_TOKENS = 2, 16
# Limits of the mean gap, nats per token, for log-probs with a standard
# deviation of up to 1 nat. For SmolLM2-135M (30 layers; deviation 2.7 nats) the
# gap to float32 is .096 in bfloat16, as rounding adds up over layers, and .22
# with int8 matrices.
MAX_GAP_NATS = {"float32": 1e-3, "bfloat16": 0.3, "int8": 0.3}
# Bitwise equal log-probs mean unchanged params if the trainer's log-probs moved
# by this share of the limit: rounding cannot hide such a move in every token.
_STILL_SHARE = 1 / 100


def shape(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns B, L of the probe's tokens; L fits the sampler's tables."""
  sampling = config.sampling
  most = sampling.max_prompt_tokens + sampling.max_completion_tokens
  # vLLM samples one more; a single token has no log-probs.
  return _NUM_SEQUENCES, min(_NUM_TOKENS, max(most - 1, 2))


def abstract(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns shapes and dtypes of the leaves published under `LEAF`."""
  B, L = shape(config)
  return {
      "tokens": jax.ShapeDtypeStruct((B, L), jnp.int32),
      "logprobs": jax.ShapeDtypeStruct((B, L - 1), jnp.float32),
      "max_gap": jax.ShapeDtypeStruct((), jnp.float32),
  }


def is_of(path: str) -> bool:
  """Returns whether a published leaf is the probe's."""
  return path in (TOKENS, LOGPROBS, MAX_GAP)


def max_gap(
    config: ml_collections.ConfigDict, backend: str, compute_dtype: str
) -> float:
  """Returns the largest mean gap attributed to rounding, nats per token.

  The limit is for log-probs with a standard deviation of up to 1 nat; the
  guard's setting can only raise it. It does not depend on the published dtype:
  the trainer rounds its params before it computes its log-probs.

  Args:
    config: reads `model`, `lora`, `search` and `guards.max_logprob_gap`.
    backend: JAX backend of this process.
    compute_dtype: dtype that the model computes in on this backend.
  """
  dtypes = [compute_dtype]
  if config.lora.rank:  # Searchers round merged kernels to `param_dtype`.
    dtypes.append(config.model.param_dtype)
  # Accelerators also round float32 products.
  is_exact = backend == "cpu" and "bfloat16" not in dtypes
  limit = MAX_GAP_NATS[
      config.search.quantization or ("float32" if is_exact else "bfloat16")
  ]
  return max(limit, config.guards.max_logprob_gap)


def draw_tokens(
    config: ml_collections.ConfigDict, vocab_size: int
) -> np.ndarray:
  """Returns the probe's tokens, [B, L] int32, the same for every version."""
  rng = np.random.default_rng(0)
  return rng.integers(vocab_size, size=shape(config), dtype=np.int32)


class Check:
  """Compares a searcher's log-probs with the trainer's, version by version."""

  def __init__(
      self,
      answer: Callable[[types.PyTree, np.ndarray], jax.Array],
      limit: float,
  ):
    """Initializes the check.

    Args:
      answer: (params of the sampler, tokens [B, L]) -> [B, L - 1] float32, the
        log-probs of the tokens after the first; at temperature 1.
      limit: `max_gap` of this searcher; the trainer's counts if larger.
    """
    self._answer = answer
    self._limit = limit
    # The trainer's and this searcher's log-probs of the last accepted version.
    self._last: tuple[np.ndarray, np.ndarray] | None = None

  def problem(self, leaves: Mapping[str, Any], params: types.PyTree) -> str:
    """Returns why the params are not the version's, "" if they are.

    Waits for the devices.

    Args:
      leaves: the version's arrays, by path.
      params: sampler's params, made of these leaves.
    """
    wanted_BxL = np.asarray(leaves[LOGPROBS])
    own_BxL = np.asarray(self._answer(params, np.asarray(leaves[TOKENS])))
    limit = max(self._limit, float(np.asarray(leaves[MAX_GAP])))
    # Rounding grows with the logits.
    limit *= max(1.0, float(wanted_BxL.std()))
    gap = float(np.abs(own_BxL - wanted_BxL).mean())
    if not gap <= limit:  # NaN is a problem as well.
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
            "its log-probs of the probe equal the previous version's, bit for"
            f" bit, while the trainer's moved by {moved:.2g} nats a token"
        )
    self._last = wanted_BxL, own_BxL
    return ""

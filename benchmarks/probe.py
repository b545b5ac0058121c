# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of a version's probe, and the log-prob gap due to rounding.

Times the log-probs that the trainer's devices compute with each version, and
those that a searcher computes before it samples, for the model of `init` or a
random one of the config's shape. Each time is the fastest of several repeats
(the operand, default 20), which excludes other load. Compare them with the
times of a step and of a round.
"""

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax.learning import published
from tba_jax.learning import work_parts
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.transport.params import probe

_REPEATS = 20


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns times in ms, the mean gap and its limit in nats a token.

  Args:
    config: settings of the model.
    operands: number of repeats, if any.

  Raises:
    ValueError: an operand is not a number of 1 or more.
  """
  repeats = int(operands[0]) if operands else _REPEATS
  if repeats < 1:
    raise ValueError(f"operands {list(operands)}: must be a number >= 1")
  if config.init == "sft":
    config.init = "scratch"
  policy = policy_lib.make_policy(config, "")
  mesh = sharding.make_mesh(config.mesh)
  base = policy_lib.initial_params(policy, config.seed)
  params, merge = base, lambda _, trained: trained
  if policy.adapters is not None:
    params = policy.adapters.init(jax.random.key(config.seed))
    merge = policy.adapters.merge
  answer = work_parts.make_answer_fn(config, policy, mesh)
  ask = lambda: jax.block_until_ready(answer(params, base))
  leaves = published.by_path({probe.LEAF: ask()})
  sampler = policy_samplers.make_searcher_sampler(config, policy)
  params_used = jax.block_until_ready(sampler.put(merge(base, params)))
  backend = jax.default_backend()
  compute_dtype = config_lib.compute_dtype(config.model, backend)
  limit = probe.max_gap(config, backend, compute_dtype)
  check = probe.Check(sampler.token_logprobs, limit)
  if problem := check.problem(leaves, params_used):
    raise RuntimeError(f"correct params were rejected: {problem}")
  tokens_BxL, logprobs_BxL = (
      np.asarray(leaves[f"['probe']['{name}']"])
      for name in ("tokens", "logprobs")
  )
  own_BxL = np.asarray(sampler.token_logprobs(params_used, tokens_BxL))
  return {
      "num_params": sum(leaf.size for leaf in jax.tree.leaves(base)),
      "tokens": tokens_BxL.size,
      "trainer_ms": _fastest_ms(ask, repeats),
      "searcher_ms": _fastest_ms(
          lambda: check.problem(leaves, params_used), repeats
      ),
      "gap": float(np.abs(own_BxL - logprobs_BxL).mean()),
      "limit": limit,
  }


def _fastest_ms(fn: Callable[[], Any], repeats: int) -> float:
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    fn()
    times.append(1e3 * (time.perf_counter() - start))
  return min(times)

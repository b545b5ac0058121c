# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: divergence from a teacher's next-token distribution.

The reference is the teacher. Trajectory balance compares one number per
completion with the reference; distillation compares the full distribution at
each token and ignores rewards. Prefixes may have any staleness, because the
divergence of two distributions needs no behavior log-probs.

Axes: B prompts, K completions, T completion tokens, D and E widths of policy
and teacher, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import logprobs

PyTree = types.PyTree


@dataclasses.dataclass(frozen=True)
class SideBySide:
  """Policy and teacher as one model, for `logprobs.map_logits`.

  Its params are a `pair`, its stream concatenates both streams, [..., D + E],
  and its logits both logits, [..., 2 V]. The teacher's logits have no gradient.
  Logits beyond the smaller vocabulary, which covers the tokenizer, are dropped.

  policy, teacher: `models.transformer.Model`s.
  """

  policy: Any
  teacher: Any

  @property
  def config(self) -> Any:
    return self.policy.config

  @property
  def stream_and_routes(self) -> Callable[..., Any] | None:
    own = self.policy.stream_and_routes
    if own is None:
      return None

    def both(params: PyTree, *inputs: Any, **others: Any) -> Any:
      stream, chosen = own(_of_policy(params), *inputs, **others)
      return self._join(params, stream, inputs, **others), chosen

    return both

  def completion_stream(
      self, params: PyTree, *inputs: Any, **others: Any
  ) -> jax.Array:
    """Returns the joint stream; `routes` apply only to the policy."""
    own = self.policy.completion_stream(_of_policy(params), *inputs, **others)
    return self._join(params, own, inputs, **others)

  def _join(
      self,
      params: PyTree,
      own: jax.Array,
      inputs: tuple[Any, ...],
      routes: Any = None,
      **others: Any,
  ) -> jax.Array:
    del routes
    other = self.teacher.completion_stream(
        _of_teacher(params), *inputs, **others
    )
    return jnp.concatenate([own, jax.lax.stop_gradient(other)], axis=-1)

  def unembed(self, params: PyTree, stream: jax.Array) -> jax.Array:
    """Returns [..., 2 V] float32, the policy's logits and the teacher's."""
    width = self.policy.config.width
    dtypes = [
        jnp.dtype(model.config.compute_dtype)
        for model in (self.policy, self.teacher)
    ]
    own = self.policy.unembed(
        _of_policy(params), stream[..., :width].astype(dtypes[0])
    )
    other = self.teacher.unembed(
        _of_teacher(params), stream[..., width:].astype(dtypes[1])
    )
    V = min(own.shape[-1], other.shape[-1])
    return jnp.concatenate(
        [own[..., :V], jax.lax.stop_gradient(other[..., :V])], axis=-1
    )


def pair(params: PyTree, teacher_params: PyTree) -> PyTree:
  """Returns the params of a `SideBySide` model."""
  names = ("policy", "teacher")
  both = dict(zip(names, (params, jax.lax.stop_gradient(teacher_params))))
  others = {
      name: {k: v for k, v in both[name].items() if k != "blocks"}
      for name in names
  }
  return {"blocks": {name: both[name]["blocks"] for name in names}, **others}


def _of_policy(params: PyTree) -> PyTree:
  return {**params["policy"], "blocks": params["blocks"]["policy"]}


def _of_teacher(params: PyTree) -> PyTree:
  return {**params["teacher"], "blocks": params["blocks"]["teacher"]}


def divergence(
    logits: jax.Array,
    teacher_logits: jax.Array,
    *,
    temperature: float,
    gkd_beta: float,
) -> jax.Array:
  """Returns [...] float32, the divergence of next-token distributions, nats.

      0 < β < 1   β KL(p ‖ m) + (1 - β) KL(q ‖ m),   m = β p + (1 - β) q
      β = 0       KL(p ‖ q), forward
      β = 1       KL(q ‖ p), reverse

  with the teacher's distribution p and the policy's q. Source: GKD, Agarwal et
  al. 2023 (arXiv:2306.13649), §3 and eq. 1.

  Args:
    logits: [..., V] float, logits of the policy, with gradient.
    teacher_logits: [..., V] float.
    temperature: sampling temperature, applied to both.
    gkd_beta: β, from 0 to 1.
  """
  log_q = logprobs.log_softmax(logits, temperature=temperature)
  log_p = logprobs.log_softmax(teacher_logits, temperature=temperature)
  if gkd_beta == 0:
    return _kl(log_p, log_q)
  if gkd_beta == 1:
    return _kl(log_q, log_p)
  log_m = jnp.logaddexp(log_p + jnp.log(gkd_beta), log_q + jnp.log1p(-gkd_beta))
  return gkd_beta * _kl(log_p, log_m) + (1 - gkd_beta) * _kl(log_q, log_m)


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def gkd_loss(
    groups: groups_lib.Groups, c: Any, beta: jax.Array
) -> groups_lib.Loss:
  """Returns the divergence from the teacher, a mean over completions.

      loss = 1/(BK) Σ_b Σₖ 1/|y| Σ_t D(π_ref, π)(· | x, y_<t)

  with D = `divergence`. Source: GKD (arXiv:2306.13649), eq. 2 and 3, on
  samples of the policy.
  """
  del c, beta
  sums_BxK = groups_lib.weighted_sums(
      groups.divergences_BxKxT, groups.weights_BxKxT
  )
  return jnp.mean(sums_BxK), {}

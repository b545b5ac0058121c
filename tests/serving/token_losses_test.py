# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of the Tinker API against written-out numbers and their gradients."""

import math

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.serving import token_losses

# Ratios of 2, 1/2 and 1, the third with a negative advantage.
_SAMPLED = np.array([[-1.0, -1.0, -1.0]], np.float32)
_LOGPROBS = _SAMPLED + np.log(np.array([[2.0, 0.5, 1.0]], np.float32))
_INPUTS = {
    "weights": np.array([[1.0, 0.0, 2.0]], np.float32),
    "logprobs": _SAMPLED,
    "advantages": np.array([[1.0, 1.0, -3.0]], np.float32),
}
_TWO, _HALF, _ONE = math.log(2) - 1, -math.log(2) - 1, -1.0
# Name -> losses, and their gradients by the log-probs.
_WANTED = {
    "cross_entropy": ([-_TWO, 0.0, 2.0], [-1.0, 0.0, -2.0]),
    "importance_sampling": ([-2.0, -0.5, 3.0], [-2.0, -0.5, 3.0]),
    # The first is cut at 1.2, and has no gradient there.
    "ppo": ([-1.2, -0.5, 3.0], [0.0, -0.5, 3.0]),
    # Weights of 2, 1/2 and 1: the first is below 4, the second has no bound.
    "cispo": ([-2 * _TWO, -0.5 * _HALF, 3 * _ONE], [-2.0, -0.5, 3.0]),
}


def _run(name, logprobs, config=None):
  loss = token_losses.LOSSES[name]
  return loss.fn(logprobs, _INPUTS, {**loss.config, **(config or {})})


class TokenLossesTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_WANTED)
  def test_equals_known_numbers(self, name):
    losses, _ = _WANTED[name]
    result = self.variant(lambda x: _run(name, x))(_LOGPROBS)
    np.testing.assert_allclose(result, [losses], rtol=1e-6)

  @parameterized.parameters(*_WANTED)
  def test_gradient_equals_closed_form(self, name):
    _, grads = _WANTED[name]
    result = jax.grad(lambda x: _run(name, x).sum())(jnp.asarray(_LOGPROBS))
    np.testing.assert_allclose(result, [grads], rtol=1e-6)

  @parameterized.parameters("ppo", "cispo")
  def test_thresholds_bound_ratio(self, name):
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    result = _run(name, _LOGPROBS, config)[0]
    factor = _LOGPROBS[0, 0] if name == "cispo" else 1.0
    np.testing.assert_allclose(result[0], -1.1 * factor, rtol=1e-6)

  def test_on_policy_gradient_is_policy_gradient(self):
    """On-policy all three have the gradient -A."""
    for name in ("importance_sampling", "ppo", "cispo"):
      grad = jax.grad(lambda x, name=name: _run(name, x).sum())(
          jnp.asarray(_SAMPLED)
      )
      np.testing.assert_allclose(grad, -_INPUTS["advantages"], rtol=1e-6)

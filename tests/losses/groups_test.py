# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of sums over the tokens of a completion."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import groups

MASK = jnp.array([[[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
VALUES = jnp.array([[[-1.0, -2.0, -3.0, jnp.nan], [-4.0, 9.0, 9.0, -jnp.inf]]])


class LengthTest(parameterized.TestCase):

  @parameterized.parameters(
      ("none", [-6.0, -4.0]),
      ("tokens", [-2.0, -4.0]),
      ("max_tokens", [-1.5, -1.0]),
  )
  def test_weights_match_known_numbers(self, length_norm, expected):
    weights = groups.length_weights(MASK, length_norm)
    sums = groups.weighted_sums(VALUES, weights)
    np.testing.assert_allclose(sums, [expected], rtol=1e-6)

  def test_hidden_tokens_have_no_gradient(self):
    grad = jax.grad(lambda v: groups.weighted_sums(v, MASK).sum())(VALUES)
    chex.assert_trees_all_equal(grad, MASK)

  def test_a_completion_without_tokens_weighs_nothing(self):
    weights = groups.length_weights(jnp.zeros((1, 2, 3)), "tokens")
    chex.assert_trees_all_equal(weights, jnp.zeros((1, 2, 3)))


class GroupsTest(absltest.TestCase):

  def test_the_kl_of_the_sampler_is_of_whole_sums(self):
    some = groups.Groups(
        logprobs_BxKxT=VALUES,
        kl_logprobs_BxKxT=VALUES,
        behavior_logprobs_BxKxT=VALUES,
        ref_logprobs_BxKxT=VALUES - 0.5,
        mask_BxKxT=MASK,
        weights_BxKxT=groups.length_weights(MASK, "tokens"),
        rewards_BxK=jnp.zeros((1, 2)),
    )
    np.testing.assert_allclose(some.behavior_kl_BxK, [[1.5, 0.5]])
    np.testing.assert_allclose(some.seq_BxK, [[-2.0, -4.0]])
    np.testing.assert_allclose(some.ref_seq_BxK, [[-2.5, -4.5]])

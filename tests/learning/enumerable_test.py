# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives against the exact target, through corrections and optimizer."""

import functools

from absl.testing import absltest
import numpy as np

from tba_jax.config import settings
from tba_jax.learning import enumerable

N = 6
BETA = 0.5
NUM_STEPS = 300
SPACE = enumerable.make_space(N, seed=0)
UNIFORM_N = np.full(N, 1 / N)


def make_config(name, baseline_shift=0.0):
  config = settings.get_config()
  config.loss.name = name
  config.loss.baseline_shift = baseline_shift
  config.loss.beta = BETA
  config.optimizer.learning_rate = 0.05
  config.optimizer.learning_rate_final = 0.0
  config.train.num_steps = NUM_STEPS
  config.train.prompts_per_batch = 8
  config.loss.log_z_learning_rate = 0.05
  return config


@functools.cache
def learner(name):
  """Returns an objective's learner, compiled by the first test that uses it."""
  return enumerable.make_learner(make_config(name), SPACE)


def end_of(name, **data):
  """Returns how far the learned policy is from the target at the end."""
  target_N = enumerable.target(SPACE, beta=BETA)
  return enumerable.distance(learner(name)(**data), target_N)[-1]


class EnumerableTest(absltest.TestCase):

  def test_target_and_distance_match_numbers_by_hand(self):
    space = enumerable.Space(
        np.log(np.array([0.5, 0.25, 0.25], np.float32)),
        np.array([0.0, 1.0, 2.0], np.float32),
    )
    target_N = enumerable.target(space, beta=1 / np.log(2))
    # 1/2, 1/4 · 2 and 1/4 · 4 over their sum.
    np.testing.assert_allclose(target_N, [0.25, 0.25, 0.5], rtol=1e-6)
    np.testing.assert_allclose(
        enumerable.distance(np.array([[0.5, 0.25, 0.25], target_N]), target_N),
        [0.25, 0.0],
        atol=1e-12,
    )

  def test_a_space_is_normalized_and_depends_on_its_seed(self):
    self.assertAlmostEqual(np.exp(SPACE.ref_logprobs_N).sum(), 1, places=6)
    again, other = (enumerable.make_space(N, seed=s) for s in (0, 1))
    np.testing.assert_array_equal(again.rewards_N, SPACE.rewards_N)
    self.assertFalse((other.rewards_N == SPACE.rewards_N).any())

  def test_a_run_starts_from_the_reference_and_moves(self):
    probs_SxN = learner("tb")()
    self.assertEqual(probs_SxN.shape, (NUM_STEPS + 1, N))
    np.testing.assert_allclose(
        probs_SxN[0], np.exp(SPACE.ref_logprobs_N), rtol=1e-5
    )
    np.testing.assert_allclose(probs_SxN.sum(axis=1), 1, rtol=1e-5)
    self.assertGreater(np.abs(probs_SxN[1] - probs_SxN[0]).max(), 1e-3)

  def test_tb_reaches_the_target_off_policy(self):
    target_N = enumerable.target(SPACE, beta=BETA)
    start = enumerable.distance(np.exp(SPACE.ref_logprobs_N), target_N)
    self.assertGreater(start, 0.1)
    self.assertLess(end_of("tb", behavior_N=UNIFORM_N), 0.02)

  def test_a_lower_baseline_keeps_the_target_of_the_policy_s_own_data(self):
    learn = enumerable.make_learner(make_config("tb", -0.1), SPACE)
    target_N = enumerable.target(SPACE, beta=BETA)
    for data, least, most in (
        ({}, 0, 0.02), ({"behavior_N": UNIFORM_N}, 0.02, 0.06),
    ):  # fmt: skip
      gap = enumerable.distance(learn(**data), target_N)[-1]
      self.assertBetween(gap, least, most)

  def test_tb_with_learned_log_z_reaches_the_target(self):
    self.assertLess(end_of("tb_learned_z", behavior_N=UNIFORM_N), 0.02)

  def test_reinforce_needs_on_policy_data(self):
    self.assertLess(end_of("reinforce"), 0.05)
    self.assertGreater(end_of("reinforce", behavior_N=UNIFORM_N), 0.2)

  def test_the_sampler_lags_by_lag_steps(self):
    learn = learner("tb")
    fresh, one, three = (learn(lag_steps=lag) for lag in (0, 1, 3))
    # The last step that the reference samples for: the first, the second, the
    # fourth.
    ref_N = np.exp(SPACE.ref_logprobs_N)
    only_ref = learn(behavior_N=ref_N / ref_N.sum(dtype=float))
    for probs_SxN, same in ((fresh, 1), (one, 2), (three, 4)):
      np.testing.assert_allclose(
          probs_SxN[: same + 1], only_ref[: same + 1], atol=1e-6
      )
      self.assertGreater(
          np.abs(probs_SxN[same + 1] - only_ref[same + 1]).max(), 1e-5
      )

  def test_refuses_invalid_arguments(self):
    learn = learner("tb")
    for wrong in (UNIFORM_N[1:], np.ones(N), np.eye(N)[0]):
      with self.assertRaisesRegex(ValueError, "must be 6 probabilities above"):
        learn(behavior_N=wrong)
    with self.assertRaisesRegex(ValueError, "lag_steps=-1: must be 0 or more"):
      learn(lag_steps=-1)

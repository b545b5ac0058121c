# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance corrections: the factor of each ratio, by hand."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings
from tba_jax.losses import corrections
from tba_jax.losses import objective_table

# Ratios of tokens, and of the two completions: 1.5 * 0.5 and 0.9 * 4.
RATIO_BxKxT = jnp.array([[[1.5, 0.5], [0.9, 4.0]]])
RATIO_BxK = jnp.array([[0.75, 3.6]])
UP, DOWN = jnp.ones((1, 2, 2)), -jnp.ones((1, 2, 2))


# Probabilities of the policy: .15, .4, .72 and .8.
BEHAVIOR_BxKxT = jnp.log(jnp.array([[[0.1, 0.8], [0.8, 0.2]]]))


def run(correction, push_BxKxT, clip_high=0.0):
  return corrections.factors(
      RATIO_BxKxT,
      RATIO_BxK,
      push_BxKxT,
      correction=correction,
      ratio_clip=0.2,
      clip_high=clip_high,
      ratio_cap=3.0,
      ratio_floor=0.8,
      moment_cap=0.5,
      divergence_cap=0.3,
      behavior_logprobs_BxKxT=BEHAVIOR_BxKxT,
  )


class FactorsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      ("none", UP, [[1.0, 1.0], [1.0, 1.0]], 0),
      ("clip_token", UP, [[0.0, 0.5], [0.9, 0.0]], 2),
      ("clip_token", DOWN, [[1.5, 0.0], [0.9, 4.0]], 1),
      # Tokens that nothing pushes are not cut.
      ("clip_token", 0 * UP, [[1.5, 0.5], [0.9, 4.0]], 0),
      ("clip_sequence", UP, [[0.75, 0.75], [0.0, 0.0]], 2),
      ("clip_sequence", DOWN, [[0.0, 0.0], [3.6, 3.6]], 2),
      ("truncate_token", UP, [[1.5, 0.5], [0.9, 3.0]], 1),
      ("truncate_sequence", DOWN, [[0.75, 0.75], [3.0, 3.0]], 2),
      # IcePop drops tokens on either side, whatever their advantage.
      ("mask_token", UP, [[1.5, 0.0], [0.9, 0.0]], 2),
      ("mask_token", DOWN, [[1.5, 0.0], [0.9, 0.0]], 2),
      ("mask_sequence", UP, [[0.0, 0.0], [0.0, 0.0]], 4),
      # The roots of .75 and 3.6 are .866 and 1.897.
      ("gspo", UP, [[0.75**0.5, 0.75**0.5], [0.0, 0.0]], 2),
      ("gspo", DOWN, [[0.75**0.5] * 2, [3.6**0.5] * 2], 0),
      # Probabilities change by .05, .4, .08 and .6; the cap is .3.
      ("dppo_tv", UP, [[1.5, 0.5], [0.9, 0.0]], 1),
      ("dppo_tv", DOWN, [[1.5, 0.0], [0.9, 4.0]], 1),
      # .8 log 2 + .2 log(.2 / .6) = .335, .2 log(1/4) + .8 log(.8 / .2) = .832.
      ("dppo_kl", UP, [[1.5, 0.5], [0.9, 0.0]], 1),
      ("dppo_kl", DOWN, [[1.5, 0.0], [0.9, 4.0]], 1),
      ("cispo", DOWN, [[1.2, 0.8], [0.9, 1.2]], 3),
      # Only completions that lose are weighted, by at most 1.
      ("topr", UP, [[1.0, 1.0], [1.0, 1.0]], 4),
      ("topr", DOWN, [[0.75, 0.75], [1.0, 1.0]], 2),
      ("bounded_token", UP, [[1.5, 0.5], [0.9, 2.0]], 1),
      ("bounded_sequence", DOWN, [[0.75, 0.75], [2.0, 2.0]], 2),
      # The cap alone is left where the policy is the proximal one.
      ("decoupled", UP, [[1.5, 0.5], [0.9, 3.0]], 1),
      # (log w)² is .164, .480, .011 and 1.922: the mean of three is .219.
      ("m2_mask", UP, [[1.5, 0.5], [0.9, 0.0]], 1),
  )
  def test_factor_matches_known_numbers(
      self, correction, push, expected, num_changed
  ):
    factor, changed = self.variant(functools.partial(run, correction))(push)
    np.testing.assert_allclose(factor[0], expected, rtol=1e-6)
    self.assertEqual(changed.sum(), num_changed)

  def test_bounded_factors_stay_above_zero_far_from_the_data(self):
    tiny = jnp.full((1, 1, 2), 1e-6)
    for correction in ("bounded_token", "bounded_sequence"):
      for push, expected in ((1.0, 0.5), (-1.0, 0.25)):
        factor, _ = corrections.factors(
            tiny,
            tiny[..., 0],
            jnp.full((1, 1, 2), push),
            correction=correction,
            ratio_clip=0.0,
            ratio_cap=1.0,
        )
        np.testing.assert_allclose(factor[0], [[expected] * 2])

  @parameterized.parameters((UP, 1.0), (DOWN, 1.05))
  def test_sapo_is_the_gradient_of_its_gate(self, push, tau):
    # sigmoid(.5) is .62246: 4 · .62246 · .37754 · 1.5 = 1.41002.
    factor, changed = run("sapo", UP)
    np.testing.assert_allclose(factor[0, 0, 0], 1.41002, rtol=1e-5)
    self.assertEqual(changed.sum(), 4)
    gate = lambda x: 4 / tau * jax.nn.sigmoid(tau * (jnp.exp(x) - 1)).sum()
    np.testing.assert_allclose(
        run("sapo", push)[0], jax.grad(gate)(jnp.log(RATIO_BxKxT)), rtol=1e-5
    )

  @parameterized.parameters((0.04, 0.0, 1.0), (0.05, 1.0, 1.0))
  def test_binary_kl_matches_known_numbers(self, cap, up, down):
    """.2 log(.2 / .3) + .8 log(.8 / .7) = .0257; .6 to .45: .0460."""
    factor = lambda push: corrections.factors(
        jnp.array([[[1.5, 0.75]]]),
        jnp.ones((1, 1)),
        push * jnp.ones((1, 1, 2)),
        correction="dppo_kl",
        ratio_clip=0.0,
        ratio_cap=1.0,
        divergence_cap=cap,
        behavior_logprobs_BxKxT=jnp.log(jnp.array([[[0.2, 0.6]]])),
    )[0][0, 0]
    np.testing.assert_allclose(factor(1.0), [1.5, 0.75])
    np.testing.assert_allclose(factor(-1.0), [1.5 * down, 0.75 * up])

  def test_divergences_of_certain_tokens_are_finite(self):
    for correction in ("dppo_tv", "dppo_kl"):
      factor, _ = corrections.factors(
          jnp.array([[[1.0, 0.5, 1.2]]]),
          jnp.ones((1, 1)),
          jnp.ones((1, 1, 3)),
          correction=correction,
          ratio_clip=0.0,
          ratio_cap=1.0,
          divergence_cap=0.1,
      )
      np.testing.assert_allclose(factor[0, 0, :2], [1.0, 0.5])
      self.assertTrue(np.isfinite(factor).all())

  def test_gspo_counts_the_tokens_of_the_mask(self):
    """The root of a long completion's ratio may exceed e^20 before it."""
    logs = jnp.full((1, 1, 400), 0.1).at[0, 0, 300:].set(0.0)
    _, whole = corrections.ratios(logs, 0 * logs, jnp.ones_like(logs))
    factor, _ = corrections.factors(
        jnp.exp(logs),
        whole,
        jnp.ones_like(logs),
        correction="gspo",
        ratio_clip=0.2,
        ratio_cap=1.0,
        mask_BxKxT=jnp.ones_like(logs).at[0, 0, 300:].set(0.0),
    )
    np.testing.assert_allclose(factor, jnp.exp(0.1), rtol=1e-5)

  def test_vespo_matches_known_numbers(self):
    for push, gain, loss in (
        (UP, 0.75**2 * np.exp(0.75), 3.6**2 * np.exp(-7.8)),
        (DOWN, 0.75**3 * np.exp(0.5), 3.6**3 * np.exp(-5.2)),
    ):
      factor, changed = run("vespo", push)
      np.testing.assert_allclose(
          factor[0], [[gain, gain], [loss, loss]], rtol=1e-5
      )
      self.assertEqual(changed.sum(), 4)

  def test_m2_mask_leaves_the_most_tokens_of_a_prompt_up_to_the_cap(self):
    logs = jnp.array([[[0.1, -2.0, 0.3], [0.0, 0.2, 9.0]]])
    mask = jnp.array([[[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]])
    kept = (
        lambda cap: corrections.factors(
            jnp.exp(logs),
            jnp.ones((1, 2)),
            jnp.ones_like(logs),
            correction="m2_mask",
            ratio_clip=0.0,
            ratio_cap=1.0,
            moment_cap=cap,
            mask_BxKxT=mask,
        )[0][0]
        > 0
    )
    # Squares 0, .01, .04, .09 and 4: means 0, .005, .0167, .035 and .828.
    np.testing.assert_array_equal(kept(0.02), [[1, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(kept(0.036), [[1, 0, 1], [1, 1, 0]])
    np.testing.assert_array_equal(kept(0.9), [[1, 1, 1], [1, 1, 0]])
    # Squares that tie are left out together: three of .09 have a mean of .09.
    logs = jnp.array([[[0.3, 0.1, 0.3], [0.0, 0.3, 9.0]]])
    np.testing.assert_array_equal(kept(0.04), [[0, 1, 0], [1, 0, 0]])

  @parameterized.parameters(
      (UP, [[1.0, 0.625], [0.9, 0.0]], 1),
      (DOWN, [[1.0, 0.0], [0.9, 3.0 * 1.3]], 2),
  )
  def test_decoupled_clips_around_the_proximal_policy(self, push, expected, n):
    from_proximal = jnp.array([[[1.0, 0.625], [0.9, 1.3]]])
    factor, changed = corrections.factors(
        RATIO_BxKxT,
        RATIO_BxK,
        push,
        correction="decoupled",
        ratio_clip=0.2,
        ratio_cap=3.0,
        proximal=(from_proximal, jnp.array([[[1.0, 1.0], [1.0, 4.0]]])),
    )
    np.testing.assert_allclose(factor[0], expected, rtol=1e-6)
    self.assertEqual(changed.sum(), n)

  def test_all_corrections_are_tried_above(self):
    for name in objective_table.CORRECTIONS:
      factor, _ = corrections.factors(
          jnp.ones((1, 2, 2)),
          jnp.ones((1, 2)),
          UP,
          correction=name,
          ratio_clip=0.2,
          ratio_cap=3.0,
          moment_cap=0.04,
          divergence_cap=0.1,
      )
      chex.assert_trees_all_equal(factor, UP)  # at ratio 1: as without

  @parameterized.parameters(1.0, -1.0)
  def test_clip_token_is_the_gradient_of_the_clipped_surrogate(self, sign):
    """Whose value PPO writes as min(w A, clip(w) A)."""
    logs = jnp.log(RATIO_BxKxT)

    def surrogate(x):
      w = jnp.exp(x)
      return jnp.minimum(w * sign, jnp.clip(w, 0.8, 1.2) * sign).sum()

    factor, _ = run("clip_token", sign * UP)
    np.testing.assert_allclose(
        jax.grad(surrogate)(logs), factor * sign, rtol=1e-5
    )

  @parameterized.parameters(1.0, -1.0)
  def test_clip_sequence_equals_proximal_rloo(self, sign):
    logs = jnp.log(RATIO_BxKxT)

    def surrogate(x):
      w = jnp.exp(x.sum(axis=2))
      return jnp.minimum(w * sign, jnp.clip(w, 0.8, 1.2) * sign).sum()

    factor, _ = run("clip_sequence", sign * UP)
    np.testing.assert_allclose(
        jax.grad(surrogate)(logs), factor * sign, rtol=1e-4
    )

  @parameterized.parameters(
      ("clip_token", UP, [[1.5, 0.5], [0.9, 0.0]]),
      ("clip_token", DOWN, [[1.5, 0.0], [0.9, 4.0]]),
      ("clip_sequence", UP, [[0.75, 0.75], [0.0, 0.0]]),
      ("cispo", UP, [[1.5, 0.8], [0.9, 1.6]]),
      ("decoupled", UP, [[1.5, 0.5], [0.9, 3.0]]),
  )
  def test_the_upper_bound_may_be_wider(self, correction, push, expected):
    factor, _ = run(correction, push, clip_high=0.6)
    np.testing.assert_allclose(factor[0], expected, rtol=1e-6)


class RatiosTest(absltest.TestCase):

  def test_ratios_match_known_numbers(self):
    logprobs = jnp.log(jnp.array([[[0.3, 0.2, 0.5]]]))
    behavior = jnp.log(jnp.array([[[0.2, 0.4, 0.1]]]))
    mask = jnp.array([[[1.0, 1.0, 0.0]]])
    tokens, whole = corrections.ratios(logprobs, behavior, mask)
    np.testing.assert_allclose(tokens, [[[1.5, 0.5, 1.0]]], rtol=1e-6)
    np.testing.assert_allclose(whole, [[0.75]], rtol=1e-6)

  def test_stay_finite_whatever_was_sampled(self):
    behavior = jnp.array([[[-500.0, 500.0, jnp.nan]]])
    tokens, whole = corrections.ratios(
        jnp.zeros((1, 1, 3)), behavior, jnp.array([[[1.0, 1.0, 0.0]]])
    )
    chex.assert_tree_all_finite((tokens, whole, jnp.square(tokens)))
    np.testing.assert_allclose(tokens, [[[np.exp(20), 0.0, 1.0]]], rtol=1e-5)
    # 0.5 nats a token are harmless, and those of 400 tokens are not.
    _, whole = corrections.ratios(
        jnp.zeros((1, 1, 400)),
        jnp.full((1, 1, 400), -0.5),
        jnp.ones((1, 1, 400)),
    )
    np.testing.assert_allclose(whole, [[np.exp(20)]], rtol=1e-5)

  def test_ratios_have_no_gradient(self):
    x, behavior = jnp.full((1, 1, 2), -1.0), jnp.full((1, 1, 2), -1.5)

    def total(x, behavior):
      tokens, whole = corrections.ratios(x, behavior, jnp.ones_like(x))
      return tokens.sum() + whole.sum()

    for grad in jax.grad(total, argnums=(0, 1))(x, behavior):
      chex.assert_trees_all_equal(grad, jnp.zeros_like(x))


class ScaleGradientTest(absltest.TestCase):

  def test_value_stays_and_gradient_is_scaled(self):
    x, factor = jnp.array([1.0, 2.0]), jnp.array([0.0, 3.0])
    run = lambda x: jnp.square(corrections.scale_gradient(x, factor)).sum()
    value, grad = jax.value_and_grad(run)(x)
    np.testing.assert_allclose(value, 5.0)
    np.testing.assert_allclose(grad, [0.0, 12.0])


class ReadTest(parameterized.TestCase):
  """The table of settings that only some corrections read."""

  @parameterized.parameters(
      ("ratio_clip", 0.5),
      ("clip_high", 0.9),
      ("ratio_cap", 1.05),
      ("ratio_floor", 0.9),
      ("moment_cap", 0.5),
      ("divergence_cap", 0.8),
  )
  def test_parameter_affects_its_corrections(self, key, value):
    rng = np.random.default_rng(0)
    ratio, to_proximal, push = rng.uniform(0.3, 3, (3, 2, 8, 4))
    ratio_BxK = rng.uniform(0.3, 3, (2, 8))

    def factors(correction, **changes):
      fixed = dict(
          ratio_clip=0.2,
          clip_high=0.3,
          ratio_cap=2.0,
          moment_cap=0.1,
          divergence_cap=0.05,
          behavior_logprobs_BxKxT=jnp.full(ratio.shape, -1.5),
      )
      return corrections.factors(
          *map(jnp.asarray, (ratio, ratio_BxK, push - 1.5)),
          correction=correction,
          **{**fixed, **changes},
          proximal=(jnp.asarray(to_proximal), jnp.asarray(ratio)),
      )[0]

    readers = [
        name
        for name in objective_table.CORRECTIONS
        if not np.array_equal(factors(name), factors(name, **{key: value}))
    ]
    self.assertCountEqual(readers, objective_table.READ_BY_CORRECTIONS[key])

  def test_a_clip_of_the_objective_s_own_needs_its_bound(self):
    c = settings.get_config().loss
    for name, clip, expected in (
        ("grpo", 0.0, "none"),
        ("grpo", 0.2, "clip_token"),
        ("flowrl", 0.0, "truncate_sequence"),
    ):
      c.update(name=name, ratio_clip=clip)
      self.assertEqual(objective_table.correction(c), expected)

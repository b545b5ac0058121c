# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the family of squared residuals and of its members."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import residual
from tba_jax.losses import tb
from tests.support import loss_case

B, K = 3, 5
BETA = 0.3
LN2 = np.log(2.0)
MEMBERS = {
    "tb": tb.tb_loss,
    "tb_learned_z": tb.tb_learned_z_loss,
    "gvpo": tb.gvpo_loss,
    "oapl": residual.oapl_loss,
    "ema_tb": residual.ema_tb_loss,
    "a_star_po": residual.a_star_po_loss,
    "flowrl": residual.flowrl_loss,
}


def make_groups(dtype=np.float32, **changes):
  """Returns groups of completions of one token, which an old policy sampled."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(-2, 1, shape), dtype)
  arrays = dict(
      behavior_logprobs_BxKxT=draw(B, K, 1),
      log_z_Bx1=draw(B, 1),
      values_BxKxT=draw(B, K, 1),
      staleness_BxK=jnp.asarray(rng.integers(0, 5, (B, K)), dtype),
      baselines_Bx1=draw(B, 1),
  )
  return loss_case.of_sequences(
      draw(B, K), draw(B, K), draw(B, K), **arrays | changes
  )


def run(name, groups, *, beta=BETA, **settings):
  """Returns (loss, gradient by log π) of a member."""
  c = loss_case.make_settings(**settings)

  def loss_of(x):
    return MEMBERS[name](
        dataclasses.replace(groups, logprobs_BxKxT=x), c, beta
    )[0]

  return jax.value_and_grad(loss_of)(groups.logprobs_BxKxT)


def advantages(gradient_BxKxT):
  return -B * K * gradient_BxKxT[..., 0]


class FamilyTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    """β (log π - log a) - (r - V̂) is [-.5, .5] and, with β_i = 2β, [0, .5]."""
    log_ratio, rewards = jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 0.0]])
    log_z = jnp.array([[1.0]])
    fn = self.variant(residual.squared_residual)
    loss, aux = fn(log_ratio, rewards, 0 * log_z, 0.5)
    np.testing.assert_allclose(aux["residual_BxK"], [[-1.0, 0.0]])
    np.testing.assert_allclose(loss, 0.5**2 / (2 * 0.5) / 2)
    loss, aux = fn(log_ratio, rewards, log_z, 0.5)
    np.testing.assert_allclose(aux["residual_BxK"], [[0.0, 1.0]])
    np.testing.assert_allclose(aux["log_z_Bx1"], [[1.0]])
    np.testing.assert_allclose(loss, 0.5**2 / (2 * 0.5) / 2)
    loss, aux = fn(
        log_ratio, rewards, log_z, 0.5, share_BxK=jnp.array([[2.0, 1.0]])
    )
    # (1 - (1 - .5))² / (2 · 1), (0 - (0 - .5))² / (2 · .5).
    np.testing.assert_allclose(aux["residual_BxK"], [[1.0, 1.0]])
    np.testing.assert_allclose(loss, (0.25 / 2 + 0.25) / 2)

  def test_metrics_have_no_gradient(self):
    grad = jax.grad(
        lambda x: residual.squared_residual(x, x, x[:, :1], BETA)[1][
            "residual_BxK"
        ].sum()
    )(jnp.ones((B, K)))
    chex.assert_trees_all_equal(grad, jnp.zeros((B, K)))


class UncountedTest(parameterized.TestCase):

  @parameterized.parameters(*(
      name for name in MEMBERS if name != "oapl"
  ))  # fmt: skip
  def test_completion_without_tokens_is_left_out(self, name):
    """The others have the gradient of a group without it, but for 1/K."""
    groups = make_groups()
    mask = groups.mask_BxKxT.at[:, 1].set(0.0)
    _, masked = run(
        name, dataclasses.replace(groups, mask_BxKxT=mask, weights_BxKxT=mask)
    )
    others = np.delete(np.arange(K), 1)
    take = lambda x: x[:, others] if x.shape[1] == K else x
    _, without = run(name, jax.tree.map(take, groups))
    factor = (K - 1) / K
    if name == "gvpo":  # Its own factor is K/(K - 1).
      factor = (K - 2) / (K - 1)
    np.testing.assert_allclose(
        masked[:, others], factor * without, rtol=1e-4, atol=1e-7
    )
    chex.assert_trees_all_equal(masked[:, 1], jnp.zeros_like(masked[:, 1]))


class LogRatioTest(parameterized.TestCase):

  def test_anchors_match_known_numbers(self):
    one = lambda *x: jnp.array([[[v] for v in x]])
    groups = loss_case.of_tokens(
        one(-1.0, -15.0, -3.0),
        one(-2.0, -2.0, -2.0),
        jnp.ones((1, 3, 1)),
        jnp.zeros((1, 3)),
        behavior_logprobs_BxKxT=one(-4.0, -4.0, -3.0),
        staleness_BxK=jnp.array([[2.0, 1.0, 0.0]]),
    )
    for anchor, value, share in (
        ("reference", [[1.0, -13.0, -1.0]], None),
        ("behavior", [[3.0, -11.0, 0.0]], None),
        # A token counts for 10 nats at most; fresh ones as one step old.
        ("ema", [[3.0, -10.0, 0.0]], [[1.5, 3.0, 3.0]]),
    ):
      with self.subTest(anchor):
        ratio, found = residual.log_ratio(groups, anchor, 0.75)
        np.testing.assert_allclose(ratio, value)
        if share is None:
          self.assertIsNone(found)
        else:
          np.testing.assert_allclose(found, share)

  def test_the_clip_of_a_token_leaves_the_gradient(self):
    groups = make_groups()
    grad = jax.grad(
        lambda x: residual.log_ratio(
            dataclasses.replace(groups, logprobs_BxKxT=x), "ema", 0.9
        )[0].sum()
    )(groups.logprobs_BxKxT - 30)
    chex.assert_trees_all_equal(grad, jnp.ones_like(grad))


class BaselineTest(absltest.TestCase):

  def test_matches_known_numbers(self):
    groups = loss_case.of_sequences(
        jnp.array([[-1.0, -2.0]]),
        jnp.array([[-2.0, -2.0]]),
        jnp.array([[LN2, 0.0]]),
        baselines_Bx1=jnp.array([[0.25]]),
        log_z_Bx1=jnp.array([[7.0]]),
        values_BxKxT=jnp.array([[[1.0], [1.5]]]),
    )
    find = functools.partial(
        residual.log_z, groups, kl_BxK=groups.rho_BxK, beta=0.5
    )
    for name, value in (
        ("group", [[LN2 - 0.5]]),
        ("mean", [[LN2]]),
        # log (2 + 1)/2 and, of a temperature of ½, ½ log (4 + 1)/2, over β.
        ("log_mean_exp", [[2 * np.log(1.5)]]),
        ("file", [[0.5]]),
        ("learned", [[7.0]]),
        ("value", [[2.0, 3.0]]),
    ):
      with self.subTest(name):
        found = find(baseline=name, baseline_temperature=1.0)
        np.testing.assert_allclose(found, value, rtol=1e-6)
    found = find(baseline="log_mean_exp", baseline_temperature=0.5)
    np.testing.assert_allclose(found, [[np.log(2.5)]], rtol=1e-6)


class MembersTest(parameterized.TestCase):

  def test_tb_and_gvpo_keep_their_bits(self):
    """They are those of the formulas that runs were made with."""

    def old_tb(groups, c, beta):
      log_z = jax.lax.stop_gradient(
          jnp.mean(
              groups.rewards_BxK / beta - groups.rho_BxK, axis=1, keepdims=True
          )
      )
      return old_square(groups, log_z, c, beta)

    def old_square(groups, log_z, c, beta):
      left = log_z + groups.rho_BxK - groups.rewards_BxK / beta
      loss = beta * jnp.mean(jnp.square(left)) / 2
      return 2 / beta * loss if c.scale == "paper" else loss

    def old_gvpo(groups, c, beta):
      left = groups.rewards_BxK - beta * groups.rho_BxK
      centered = left - left.mean(axis=1, keepdims=True)
      loss = jnp.mean(jnp.square(centered).sum(axis=1)) / (2 * (K - 1))
      return loss / beta if c.scale == "unit" else loss

    old = {
        "tb": old_tb,
        "tb_learned_z": lambda g, c, b: old_square(g, g.log_z_Bx1, c, b),
        "gvpo": old_gvpo,
    }
    groups = make_groups()
    for name, old_fn in old.items():
      for scale in ("unit", "paper"):
        c = loss_case.make_settings(scale=scale)
        new_fn = lambda *args, name=name: MEMBERS[name](*args)[0]
        values = [
            jax.jit(
                lambda x, beta, fn=fn, c=c: jax.value_and_grad(
                    lambda x: fn(
                        dataclasses.replace(groups, logprobs_BxKxT=x), c, beta
                    )
                )(x)
            )(groups.logprobs_BxKxT, jnp.float32(BETA))
            for fn in (old_fn, new_fn)
        ]
        chex.assert_trees_all_equal(*values)

  def test_oapl_matches_known_numbers(self):
    """V̂ = log (e^0 + e^1)/2 = .6201: (.5 · 1 - (1 - V̂))² and (0 - (0 - V̂))²."""
    groups = loss_case.of_sequences(
        jnp.array([[-1.0, -2.0]]),
        jnp.zeros((1, 2)),
        jnp.array([[1.0, 0.0]]),
        behavior_logprobs_BxKxT=jnp.array([[[-2.0], [-2.0]]]),
    )
    loss, _ = run("oapl", groups, beta=0.5, scale="paper")
    value = np.log((1 + np.e) / 2)
    expected = ((0.5 - (1 - value)) ** 2 + value**2) / 2
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    self.assertAlmostEqual(float(loss), 0.1995, places=4)

  def test_ema_tb_matches_known_numbers(self):
    """c = 9/Δ; kl = 9 / 3 and -9 · 2/9: A = (1 - 3β) and 2β, less the mean."""
    groups = loss_case.of_sequences(
        jnp.array([[-1.0, -4.0]]),
        jnp.zeros((1, 2)),
        jnp.array([[1.0, 0.0]]),
        behavior_logprobs_BxKxT=jnp.array([[[-2.0], [-2.0]]]),
        staleness_BxK=jnp.array([[3.0, 9.0]]),
    )
    _, grad = run("ema_tb", groups, beta=0.1)
    # 1 - .3 = .7 and .2, whose mean is .45.
    np.testing.assert_allclose(-2 * grad[..., 0], [[0.25, -0.25]], rtol=1e-5)

  def test_a_star_po_matches_known_numbers(self):
    """(.5 · 1 - (1 - .25))² and (.5 · 0 - (0 - .25))²."""
    groups = loss_case.of_sequences(
        jnp.array([[-1.0, -2.0]]),
        jnp.array([[-2.0, -2.0]]),
        jnp.array([[1.0, 0.0]]),
        baselines_Bx1=jnp.array([[0.25]]),
    )
    loss, _ = run("a_star_po", groups, beta=0.5, scale="paper")
    np.testing.assert_allclose(loss, 0.0625, rtol=1e-6)

  def test_flowrl_matches_known_numbers(self):
    """log Z = 1/.5, means of tokens: (2 + 1 - 2)² and (2 + 0 - 0)²."""
    mask = jnp.ones((1, 2, 2))
    groups = loss_case.of_tokens(
        jnp.array([[[-1.0, -1.0], [-2.0, -2.0]]]),
        jnp.array([[[-2.0, -2.0], [-1.0, -3.0]]]),
        mask,
        jnp.array([[1.0, 0.0]]),
        weights=mask / 2,
        values_BxKxT=jnp.array([[[1.0, 9.0], [1.0, 9.0]]]),
    )
    loss, _ = run("flowrl", groups, beta=0.5, scale="paper")
    np.testing.assert_allclose(loss, 2.5, rtol=1e-6)

  @parameterized.parameters(*MEMBERS)
  def test_the_gradient_is_an_advantage(self, name):
    """A = (r - V̂) - β_i (log π - log a), K/(K - 1) times for gvpo."""
    groups = make_groups()
    anchor, baseline = {
        "oapl": ("behavior", "log_mean_exp"),
        "ema_tb": ("ema", "group"),
        "a_star_po": ("reference", "file"),
        "tb_learned_z": ("reference", "learned"),
        "flowrl": ("reference", "value"),
    }.get(name, ("reference", "group"))
    ratio, share = residual.log_ratio(groups, anchor, 0.9)
    kl = ratio if share is None else share * ratio
    value = BETA * residual.log_z(groups, baseline, kl, BETA, 1.0)
    expected = groups.rewards_BxK - value - BETA * kl
    if name == "gvpo":
      expected = K / (K - 1) * expected
    np.testing.assert_allclose(
        advantages(run(name, groups)[1]), expected, rtol=1e-4, atol=1e-5
    )

  @parameterized.parameters(
      ("tb", 1.0),
      ("oapl", 1.0),
      ("ema_tb", 1.0),
      ("a_star_po", 1.0),
      ("tb", 2 / BETA, "paper"),
      ("oapl", 2 * BETA, "paper"),
      ("a_star_po", 2 * BETA, "paper"),
  )
  def test_a_lower_baseline_raises_each_advantage(
      self, name, size, scale="unit"
  ):
    groups = make_groups()
    plain = advantages(run(name, groups, scale=scale)[1])
    low = run(name, groups, scale=scale, baseline_shift=-0.3)[1]
    np.testing.assert_allclose(
        advantages(low), plain + 0.3 * size, rtol=1e-5, atol=1e-5
    )

  @parameterized.parameters("tb", "gvpo", "oapl", "ema_tb")
  def test_a_shift_of_a_prompt_s_rewards_changes_nothing(self, name):
    groups = make_groups()
    shift = jnp.array([[0.0], [5.0], [-2.0]])
    moved = dataclasses.replace(groups, rewards_BxK=groups.rewards_BxK + shift)
    chex.assert_trees_all_close(
        run(name, moved), run(name, groups), rtol=1e-4, atol=1e-5
    )

  @parameterized.parameters("a_star_po", "tb_learned_z", "flowrl")
  def test_a_shift_of_rewards_and_of_the_value_changes_nothing(self, name):
    groups = make_groups()
    moved = dataclasses.replace(
        groups,
        rewards_BxK=groups.rewards_BxK + 2.0,
        baselines_Bx1=groups.baselines_Bx1 + 2.0,
        log_z_Bx1=groups.log_z_Bx1 + 2.0 / BETA,
        values_BxKxT=groups.values_BxKxT + 2.0,
    )
    chex.assert_trees_all_close(
        run(name, moved), run(name, groups), rtol=1e-4, atol=1e-5
    )

  @parameterized.parameters(
      ("oapl", dict(anchor="behavior", baseline="log_mean_exp")),
      ("ema_tb", dict(anchor="ema")),
      ("a_star_po", dict(baseline="file")),
  )
  def test_members_are_tb_with_other_settings(self, name, settings):
    groups = make_groups()
    chex.assert_trees_all_equal(
        run(name, groups), run("tb", groups, **settings)
    )

  def test_gvpo_weighs_the_kl_by_lag_at_the_anchor_ema(self):
    groups = make_groups()
    gradient = run("gvpo", groups, anchor="ema", scale="unit")[1]
    np.testing.assert_allclose(
        gradient, K / (K - 1) * run("ema_tb", groups)[1], rtol=1e-5
    )

  @parameterized.parameters("oapl", "ema_tb")
  def test_the_reference_does_not_matter(self, name):
    groups = make_groups()
    other = dataclasses.replace(
        groups, ref_logprobs_BxKxT=jnp.full((B, K, 1), jnp.nan)
    )
    chex.assert_trees_all_equal(run(name, other), run(name, groups))

  def test_at_the_behavior_anchor_the_sampled_policy_has_no_kl(self):
    groups = make_groups()
    fresh = dataclasses.replace(
        groups, behavior_logprobs_BxKxT=groups.logprobs_BxKxT
    )
    for name in ("oapl", "ema_tb"):
      chex.assert_trees_all_close(
          run(name, fresh, beta=0.01)[1],
          run(name, fresh, beta=1.0)[1],
          rtol=1e-4,
          atol=1e-6,
      )

  def test_a_gradient_equals_finite_differences(self):
    with jax.enable_x64(True):
      groups = make_groups(np.float64)
      groups = jax.tree.map(lambda x: x.astype(jnp.float64), groups)
      direction = np.random.default_rng(1).normal(size=(B, K, 1))
      for name in ("oapl", "a_star_po", "flowrl"):
        _, grad = run(name, groups)
        ends = [
            run(
                name,
                dataclasses.replace(
                    groups,
                    logprobs_BxKxT=groups.logprobs_BxKxT + h * direction,
                ),
            )[0]
            for h in (1e-5, -1e-5)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-6)


class MasksTest(absltest.TestCase):

  def test_flowrl_uses_value_before_first_counted_token(self):
    groups = make_groups()
    mask = jnp.array([[[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]])
    values = jnp.array([[[9.0, 2.0, 3.0], [9.0, 9.0, 9.0]]])
    groups = groups_lib.Groups(
        **{
            **{f.name: None for f in dataclasses.fields(groups)},
            "mask_BxKxT": mask,
            "values_BxKxT": values,
            "rewards_BxK": jnp.zeros((1, 2)),
        }
    )
    found = residual.log_z(groups, "value", None, 0.5, 1.0)
    np.testing.assert_allclose(found, [[4.0, 0.0]])

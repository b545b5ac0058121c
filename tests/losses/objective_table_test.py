# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of equalities between gradients of objectives, in float64."""

import dataclasses
import pathlib

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import objective_table
from tba_jax.losses import residual
from tba_jax.losses import tb
from tests.support import loss_case

# The example of a loss of one's own.
COPG = f"{pathlib.Path(__file__).parents[2]}/examples/copg.py:copg_loss"

B, K, T = 3, 5, 4
BETA = 0.3


def make_groups(*, on_policy=True, seed=0, **changes):
  rng = np.random.default_rng(seed)
  logprobs = rng.normal(-2, 1, (B, K, T))
  lengths_BxK = rng.integers(1, T + 1, (B, K))
  mask = (np.arange(T) < lengths_BxK[:, :, None]).astype(np.float64)
  behavior = logprobs if on_policy else rng.normal(-2, 1, (B, K, T))
  arrays = dict(
      logprobs_BxKxT=logprobs,
      kl_logprobs_BxKxT=logprobs,
      behavior_logprobs_BxKxT=behavior,
      ref_logprobs_BxKxT=rng.normal(-2, 1, (B, K, T)),
      mask_BxKxT=mask,
      weights_BxKxT=mask,
      rewards_BxK=rng.normal(size=(B, K)),
      log_z_Bx1=rng.normal(size=(B, 1)),
      values_BxKxT=rng.normal(size=(B, K, T)),
      targets=groups_lib.Targets(*rng.normal(size=(3, B, K, T))),
      staleness_BxK=rng.integers(0, 5, (B, K)).astype(np.float64),
      baselines_Bx1=rng.normal(size=(B, 1)),
      divergences_BxKxT=rng.uniform(size=(B, K, T)),
  )
  return groups_lib.Groups(**jax.tree.map(jnp.asarray, arrays | changes))


def gradient(name, groups, *, scale="unit", beta=BETA):
  row = objective_table.find(name)

  def loss_of(x):
    some = dataclasses.replace(groups, logprobs_BxKxT=x, kl_logprobs_BxKxT=x)
    return row.loss(some, loss_case.make_settings(scale=scale), beta)[0]

  return jax.grad(loss_of)(groups.logprobs_BxKxT)


class EquivalenceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  def check(self, actual, expected):
    self.assertEqual(actual.dtype, jnp.float64)
    self.assertGreater(jnp.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)

  def test_on_policy_tb_is_reinforce_with_the_kl_in_the_reward(self):
    groups = make_groups()
    self.check(gradient("tb", groups), gradient("reinforce", groups))

  def test_off_policy_it_is_not(self):
    groups = make_groups(on_policy=False)
    difference = gradient("tb", groups) - gradient("reinforce", groups)
    self.assertGreater(jnp.abs(difference).max(), 1e-2)

  def test_rloo_is_reinforce_up_to_a_factor(self):
    groups = make_groups(on_policy=False)
    factor = K / (K - 1)
    self.check(gradient("rloo", groups), factor * gradient("reinforce", groups))

  def test_grpo_without_std_is_reinforce_without_a_kl(self):
    groups = make_groups(on_policy=False)
    self.check(
        gradient("dr_grpo", groups, beta=0.0),
        gradient("reinforce", groups, beta=0.0),
    )

  def test_grpo_s_std_is_a_factor_of_a_group(self):
    groups = make_groups()
    std_B = np.std(groups.rewards_BxK, axis=1) + 1e-4
    self.check(
        gradient("grpo", groups, beta=0.0) * std_B[:, None, None],
        gradient("dr_grpo", groups, beta=0.0),
    )

  @parameterized.parameters(True, False)
  def test_tba_prime_at_ratio_one_is_tb(self, on_policy):
    groups = make_groups(on_policy=on_policy)
    self.check(gradient("tba_prime", groups), gradient("tb", groups))

  def test_learned_z_at_the_optimal_z_is_vargrad(self):
    groups = make_groups(on_policy=False, seed=3)
    one = jax.tree.map(lambda x: x[:1], groups)  # one prompt, one log Z
    log_z_Bx1 = residual.log_z(one, "group", one.rho_BxK, BETA, 1.0)
    self.check(
        gradient("tb_learned_z", dataclasses.replace(one, log_z_Bx1=log_z_Bx1)),
        gradient("tb", one),
    )

  @parameterized.parameters(
      (COPG, BETA**2 * K**2 / (K - 1)),
      ("gvpo", BETA**2 * K / (2 * (K - 1))),
  )
  def test_copg_and_gvpo_are_tb_up_to_a_factor(self, name, factor):
    groups = make_groups(on_policy=False)
    paper = gradient("tb", groups, scale="paper")
    self.check(gradient(name, groups, scale="paper"), factor * paper)
    self.check(gradient(name, groups), K / (K - 1) * gradient("tb", groups))

  def test_ipo_with_pairs_is_copg_of_a_reward_gap_of_half(self):
    groups = jax.tree.map(lambda x: x[:, :2], make_groups(on_policy=False))
    best_BxK = groups.rewards_BxK == groups.rewards_BxK.max(axis=1)[:, None]
    half = dataclasses.replace(groups, rewards_BxK=jnp.where(best_BxK, 0.5, 0))
    self.check(
        BETA**2 * gradient("ipo", groups),
        gradient(COPG, half, scale="paper"),
    )

  def test_tb_with_and_without_the_stopped_gradient(self):
    groups = make_groups(on_policy=False)

    def not_stopped(x):
      some = dataclasses.replace(groups, logprobs_BxKxT=x)
      log_z_Bx1 = jnp.mean(
          some.rewards_BxK / BETA - some.rho_BxK, axis=1, keepdims=True
      )
      some = dataclasses.replace(some, log_z_Bx1=log_z_Bx1)
      return tb.tb_learned_z_loss(some, loss_case.make_settings(), BETA)[0]

    self.check(
        jax.grad(not_stopped)(groups.logprobs_BxKxT), gradient("tb", groups)
    )


class TableTest(parameterized.TestCase):

  def losses(self, groups):
    for name, row in objective_table.OBJECTIVES.items():

      def loss_of(groups, row=row):
        return row.loss(groups, loss_case.make_settings(), BETA)[0]

      own = "divergences_BxKxT" if row.has_teacher else "logprobs_BxKxT"
      yield name, jax.value_and_grad(
          lambda x, loss_of=loss_of, own=own: loss_of(
              dataclasses.replace(groups, **{own: x})
          )
      )(getattr(groups, own))

  def test_all_equal_rewards_give_finite_gradients(self):
    groups = make_groups(rewards_BxK=np.ones((B, K)))
    for name, values in self.losses(groups):
      with self.subTest(name):
        chex.assert_tree_all_finite(values)

  def test_masked_tokens_do_not_matter(self):
    groups = make_groups(on_policy=False)
    hide = lambda x: jnp.where(groups.mask_BxKxT > 0, x, jnp.nan)
    hidden = dataclasses.replace(
        groups,
        logprobs_BxKxT=hide(groups.logprobs_BxKxT),
        kl_logprobs_BxKxT=hide(groups.kl_logprobs_BxKxT),
        behavior_logprobs_BxKxT=hide(groups.behavior_logprobs_BxKxT),
        ref_logprobs_BxKxT=hide(groups.ref_logprobs_BxKxT),
        values_BxKxT=hide(groups.values_BxKxT),
        divergences_BxKxT=hide(groups.divergences_BxKxT),
    )
    chex.assert_trees_all_equal(
        dict(self.losses(hidden)), dict(self.losses(groups))
    )

  def test_tokens_of_an_environment_do_not_matter(self):
    """The loss is that of the completions without them."""
    groups = make_groups(on_policy=False)
    # Before the columns 0, 2 and 3, and twice before column 1.
    columns = np.array([-1, 0, -1, -1, 1, -1, 2, -1, 3])

    def insert(x, value=jnp.nan):
      wide = jnp.where(columns >= 0, x[..., columns], value)
      return wide.astype(x.dtype)

    mask = insert(groups.mask_BxKxT, 0.0)
    wide = dataclasses.replace(
        groups,
        mask_BxKxT=mask,
        weights_BxKxT=mask,
        logprobs_BxKxT=insert(groups.logprobs_BxKxT),
        kl_logprobs_BxKxT=insert(groups.kl_logprobs_BxKxT),
        behavior_logprobs_BxKxT=insert(groups.behavior_logprobs_BxKxT),
        ref_logprobs_BxKxT=insert(groups.ref_logprobs_BxKxT),
        values_BxKxT=insert(groups.values_BxKxT),
        divergences_BxKxT=insert(groups.divergences_BxKxT),
        targets=jax.tree.map(lambda x: insert(x, 0.0), groups.targets),
    )
    expected = dict(self.losses(groups))
    for name, (loss, grad) in self.losses(wide):
      with self.subTest(name):
        np.testing.assert_allclose(loss, expected[name][0], rtol=1e-5)
        np.testing.assert_allclose(
            grad[..., columns >= 0], expected[name][1], rtol=1e-4, atol=1e-6
        )
        self.assertFalse(np.any(grad[..., columns < 0]))

  def test_every_objective_moves_the_policy(self):
    for name, (_, grad) in self.losses(make_groups(on_policy=False)):
      with self.subTest(name):
        self.assertGreater(jnp.abs(grad).max(), 1e-3)

  def test_defaults_are_allowed_values(self):
    for name, row in objective_table.OBJECTIVES.items():
      with self.subTest(name):
        self.assertIn(row.correction, objective_table.CORRECTIONS)
        self.assertIn(row.length_norm, (None, *objective_table.LENGTH_NORMS))
        for key in row.reads:
          self.assertIn(f"loss.{key}", settings.SETTINGS)

  def test_finds_a_loss_of_the_user_s_own(self):
    path = self.create_tempfile(
        "own.py", "def my_loss(groups, c, beta):\n  return beta, {}\n"
    ).full_path
    row = objective_table.find(f"{path}:my_loss")
    self.assertEqual(row.loss(None, None, 3.0), (3.0, {}))
    with self.assertRaisesRegex(ValueError, "config.loss.name=.*other"):
      _ = objective_table.find(f"{path}:other").loss

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of trajectory balance: known numbers, gradients, convergence."""

from collections.abc import Callable
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import copg
from tba_jax.losses import policy_gradient
from tba_jax.losses import tb
from tests.support import loss_case

B, K = 3, 5
BETA = 0.3


def make_groups(seed=0, dtype=np.float32):
  """Returns log-probs [B, K], reference log-probs [B, K], rewards [B, K]."""
  rng = np.random.default_rng(seed)
  seq = rng.normal(-10, 3, (B, K)).astype(dtype)
  ref_seq = rng.normal(-10, 3, (B, K)).astype(dtype)
  return seq, ref_seq, rng.normal(size=(B, K)).astype(dtype)


vargrad = functools.partial(loss_case.run_sequences, tb.tb_loss)


def learned_z(seq, ref_seq, rewards, log_z, **kwargs):
  return loss_case.run_sequences(
      tb.tb_learned_z_loss, seq, ref_seq, rewards, log_z_Bx1=log_z, **kwargs
  )


class VargradTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    seq = jnp.array([[-1.0, -2.0], [-3.0, -3.0]])
    ref_seq = jnp.array([[-2.0, -2.0], [-4.0, -5.0]])
    rewards = jnp.array([[1.0, 0.0], [0.5, 0.5]])
    run = self.variant(functools.partial(vargrad, scale="paper"))
    loss, aux = run(seq, ref_seq, rewards, beta=0.5)
    # r/β - ρ: [2 - 1, 0 - 0] and [1 - 1, 1 - 2].
    np.testing.assert_allclose(aux["log_z_Bx1"], [[0.5], [-0.5]], atol=1e-6)
    np.testing.assert_allclose(
        aux["residual_BxK"], [[-0.5, 0.5], [-0.5, 0.5]], atol=1e-6
    )
    np.testing.assert_allclose(loss, 0.25, rtol=1e-6)
    unit = self.variant(functools.partial(vargrad, scale="unit"))
    np.testing.assert_allclose(
        unit(seq, ref_seq, rewards, beta=0.5)[0], 0.25 * 0.25, rtol=1e-6
    )

  def test_is_the_mean_group_variance(self):
    seq, ref_seq, rewards = make_groups()
    loss, _ = vargrad(seq, ref_seq, rewards, beta=BETA, scale="paper")
    variances_B = np.var(seq - ref_seq - rewards / BETA, axis=1)
    np.testing.assert_allclose(loss, variances_B.mean(), rtol=1e-5)

  def test_scales_differ_by_half_beta_in_value_and_gradient(self):
    seq, ref_seq, rewards = make_groups()
    run = lambda scale: jax.value_and_grad(
        lambda s: vargrad(s, ref_seq, rewards, beta=BETA, scale=scale)[0]
    )(seq)
    chex.assert_trees_all_close(
        run("unit"),
        jax.tree.map(lambda x: x * BETA / 2, run("paper")),
        rtol=1e-5,
    )

  def test_stopped_log_z_leaves_the_gradient_of_a_full_group(self):
    seq, ref_seq, rewards = make_groups()
    stopped = lambda s: vargrad(s, ref_seq, rewards, beta=BETA, scale="unit")[0]

    def not_stopped(s):
      groups = loss_case.of_sequences(s, ref_seq, rewards)
      log_z = jnp.mean(
          groups.rewards_BxK / BETA - groups.rho_BxK, axis=1, keepdims=True
      )
      return learned_z(s, ref_seq, rewards, log_z, beta=BETA, scale="unit")[0]

    chex.assert_trees_all_close(
        jax.grad(stopped)(seq), jax.grad(not_stopped)(seq), atol=1e-6
    )

  def test_metrics_have_no_gradient(self):
    seq, ref_seq, rewards = make_groups()

    def sum_of_metrics(s):
      _, aux = vargrad(s, ref_seq, rewards, beta=1.0, scale="unit")
      return aux["log_z_Bx1"].sum() + aux["residual_BxK"][0, 0]

    chex.assert_trees_all_equal(
        jax.grad(sum_of_metrics)(seq), jnp.zeros_like(seq)
    )

  def test_reward_shift_of_a_prompt_changes_nothing(self):
    seq, ref_seq, rewards = make_groups()
    shift = np.array([[0.0], [5.0], [-2.0]], np.float32)
    run = jax.value_and_grad(
        lambda s, r: vargrad(s, ref_seq, r, beta=BETA, scale="unit")[0]
    )
    chex.assert_trees_all_close(
        run(seq, rewards), run(seq, rewards + shift), rtol=1e-4, atol=1e-6
    )

  def test_order_of_prompts_and_completions_changes_nothing(self):
    seq, ref_seq, rewards = make_groups()
    order = np.random.default_rng(1)
    rows, columns = order.permutation(B), order.permutation(K)
    shuffle = lambda x: x[rows][:, columns]
    run = jax.value_and_grad(
        lambda s, f, r: vargrad(s, f, r, beta=BETA, scale="unit")[0]
    )
    loss, grad = run(seq, ref_seq, rewards)
    loss_shuffled, grad_shuffled = run(*map(shuffle, (seq, ref_seq, rewards)))
    np.testing.assert_allclose(loss_shuffled, loss, rtol=1e-6)
    np.testing.assert_allclose(grad_shuffled, shuffle(grad), atol=1e-7)

  def test_at_the_reference_the_residual_is_the_centered_reward(self):
    _, ref_seq, rewards = make_groups()
    _, aux = vargrad(ref_seq, ref_seq, rewards, beta=BETA, scale="unit")
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(-BETA * aux["residual_BxK"], centered, atol=1e-5)

  def test_gradient_is_the_advantage_by_finite_differences(self):
    with jax.enable_x64(True):
      seq, ref_seq, rewards = make_groups(dtype=np.float64)
      # Logits -> log-probs: the chain that the advantage form speaks of.
      weights = np.random.default_rng(2).normal(size=(B, K, 6))
      logprobs = lambda theta: seq + jnp.einsum("bkd,d->bk", weights, theta)
      loss = lambda theta: vargrad(
          logprobs(theta),
          jnp.asarray(ref_seq),
          jnp.asarray(rewards),
          beta=BETA,
          scale="paper",
      )[0]
      theta = np.random.default_rng(3).normal(size=6)
      step = 1e-6
      differences = np.array(
          [
              (loss(theta + step * e) - loss(theta - step * e)) / (2 * step)
              for e in np.eye(6)
          ]
      )
      rho = np.asarray(logprobs(theta)) - ref_seq
      center = lambda x: x - x.mean(axis=1, keepdims=True)
      advantages = center(rewards) - BETA * center(rho)
      closed_form = (
          -2 / BETA * np.einsum("bk,bkd->d", advantages, weights) / (B * K)
      )
      np.testing.assert_allclose(differences, closed_form, rtol=1e-6)
      np.testing.assert_allclose(jax.grad(loss)(theta), closed_form, rtol=1e-9)

  def test_unit_scale_is_a_policy_gradient_whatever_beta_is(self):
    seq, ref_seq, rewards = make_groups()
    center = lambda x: x - x.mean(axis=1, keepdims=True)
    for beta in (0.01, 0.3, 2.0):
      grad = jax.grad(
          lambda s, beta=beta: vargrad(
              s, ref_seq, rewards, beta=beta, scale="unit"
          )[0]
      )(seq)
      advantages = center(rewards) - beta * center(seq - ref_seq)
      np.testing.assert_allclose(grad, -advantages / (B * K), atol=1e-5)

  def test_reference_gets_no_gradient(self):
    seq, ref_seq, rewards = make_groups()
    grad = jax.grad(
        lambda f: vargrad(seq, f, rewards, beta=BETA, scale="unit")[0]
    )(ref_seq)
    chex.assert_trees_all_equal(grad, jnp.zeros_like(grad))

  def test_vmap_over_betas_equals_each_beta(self):
    seq, ref_seq, rewards = make_groups()
    run = lambda beta: vargrad(seq, ref_seq, rewards, beta=beta, scale="paper")[
        0
    ]
    betas = jnp.array([0.1, 1.0])
    np.testing.assert_allclose(
        jax.vmap(run)(betas), [run(0.1), run(1.0)], rtol=1e-5
    )


class LearnedZTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    run = self.variant(functools.partial(learned_z, scale="paper"))
    loss, aux = run(
        jnp.array([[-1.0, -2.0]]),
        jnp.array([[-2.0, -2.0]]),
        jnp.array([[1.0, 0.0]]),
        jnp.array([[2.0]]),
        beta=0.5,
    )
    np.testing.assert_allclose(aux["residual_BxK"], [[1.0, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(loss, 2.5, rtol=1e-6)

  def test_gradient_of_log_z_is_twice_the_mean_residual(self):
    seq, ref_seq, rewards = make_groups()
    log_z = np.array([[1.0], [-2.0], [0.5]], np.float32)
    run = lambda z: learned_z(
        seq, ref_seq, rewards, z, beta=BETA, scale="paper"
    )
    grad, aux = jax.grad(run, has_aux=True)(log_z)
    np.testing.assert_allclose(
        grad, 2 * aux["residual_BxK"].mean(axis=1, keepdims=True) / B, rtol=1e-5
    )

  def test_is_zero_at_the_optimum(self):
    # Four outcomes, policy π_ref exp(r/β) / Z.
    rewards = np.array([[0.0, 1.0, 0.3, 0.7]], np.float32)
    ref = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    log_z = jax.nn.logsumexp(ref + rewards / BETA, axis=1, keepdims=True)
    loss, _ = learned_z(
        ref + rewards / BETA - log_z,
        ref,
        rewards,
        log_z,
        beta=BETA,
        scale="paper",
    )
    np.testing.assert_allclose(loss, 0.0, atol=1e-10)


T = 5
SUBTB_BETA = 0.5
# One completion is empty.
LENGTHS = np.array([[5, 1, 3], [2, 0, 4]])


def subtb(logprobs, ref, mask, rewards, values, *, beta, scale, lam):
  groups = loss_case.of_tokens(
      logprobs, ref, mask, rewards, values_BxKxT=jnp.asarray(values)
  )
  c = loss_case.make_settings(scale=scale, subtb_lambda=lam)
  return tb.subtb_loss(groups, c, beta)


def make_token_arrays(seed=0):
  """Log-probs, the reference's, mask (one completion is empty), r, values."""
  rng = np.random.default_rng(seed)
  mask = (np.arange(T) < LENGTHS[:, :, None]).astype(np.float32)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hide = lambda x: np.where(mask > 0, x, np.nan)
  return (
      hide(draw(*LENGTHS.shape, T)),
      hide(draw(*LENGTHS.shape, T)),
      mask,
      draw(*LENGTHS.shape),
      hide(draw(*LENGTHS.shape, T)),
  )


def all_pairs(logprobs, ref, mask, rewards, values, lam):
  """Returns the loss in the paper's scale, pair by pair."""
  losses = []
  for index in np.ndindex(*LENGTHS.shape):
    n = int(mask[index].sum())
    u = np.append(values[index][:n], rewards[index]) / SUBTB_BETA
    rho = (logprobs - ref)[index]
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n + 1)]
    weights = [lam ** (j - i) for i, j in pairs]
    squares = [(u[i] - u[j] + rho[i:j].sum()) ** 2 for i, j in pairs]
    losses.append(np.average(squares, weights=weights) if n else 0.0)
  return np.mean(losses)


class SubTrajectoryTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1.0, 0.5)
  def test_is_all_pairs(self, lam):
    arrays = make_token_arrays()
    run = self.variant(
        functools.partial(subtb, beta=SUBTB_BETA, scale="paper", lam=lam)
    )
    loss, aux = run(*arrays)
    np.testing.assert_allclose(loss, all_pairs(*arrays, lam), rtol=1e-5)
    logprobs, ref, mask, rewards, values = arrays
    rho = np.where(mask > 0, logprobs - ref, 0).sum(axis=2)
    flow = np.where(mask > 0, values, 0)[:, :, 0] / SUBTB_BETA
    whole = np.where(mask[:, :, 0] > 0, flow + rho - rewards / SUBTB_BETA, 0)
    np.testing.assert_allclose(aux["residual_BxK"], whole, atol=1e-5)
    np.testing.assert_allclose(aux["log_z_Bx1"], flow[:, :1], rtol=1e-6)

  def test_scales_differ_by_half_beta(self):
    arrays = make_token_arrays()
    run = lambda scale: subtb(*arrays, beta=SUBTB_BETA, scale=scale, lam=0.9)[0]
    np.testing.assert_allclose(
        run("unit"), SUBTB_BETA / 2 * run("paper"), rtol=1e-6
    )

  def test_loss_of_one_token_is_trajectory_balance(self):
    logprobs, ref, _, rewards, values = make_token_arrays()
    one = lambda x: jnp.asarray(x[..., :1])
    fixed = dict(beta=SUBTB_BETA, scale="unit")
    logprobs, ref, values = (
        jnp.nan_to_num(one(x)) for x in (logprobs, ref, values)
    )
    values = jnp.broadcast_to(values[:, :1], values.shape)
    run = lambda x: subtb(
        x, ref, jnp.ones((*LENGTHS.shape, 1)), rewards, values, lam=0.9, **fixed
    )[0]
    expected = lambda x: learned_z(
        x[..., 0], ref[..., 0], rewards, values[:, :1, 0] / SUBTB_BETA, **fixed
    )[0]
    chex.assert_trees_all_close(
        jax.value_and_grad(run)(logprobs),
        jax.value_and_grad(expected)(logprobs),
        rtol=1e-5,
    )

  def test_is_zero_at_the_soft_values_of_the_target(self):
    """Two tokens of two words; the target is π_ref exp(r/β)/Z."""
    rng = np.random.default_rng(3)
    ref = np.log(rng.dirichlet([1, 1], size=3))  # start, after 0, after 1
    rewards = rng.normal(size=(2, 2))
    inner = SUBTB_BETA * np.log(
        (np.exp(ref[1:] + rewards / SUBTB_BETA)).sum(axis=1)
    )
    first = SUBTB_BETA * np.log(np.exp(ref[0] + inner / SUBTB_BETA).sum())
    policy = np.stack(
        [
            ref[0] + (inner - first) / SUBTB_BETA,
            *(ref[1:] + (rewards - inner[:, None]) / SUBTB_BETA),
        ]
    )
    words = [(a, b) for a in range(2) for b in range(2)]
    take = lambda x: np.array([[[x[0][a], x[1 + a][b]] for a, b in words]])
    with jax.enable_x64(True):
      loss, _ = subtb(
          take(policy),
          take(ref),
          np.ones((1, 4, 2)),
          rewards.reshape(1, 4),
          np.array([[[first, inner[a]] for a, _ in words]]),
          beta=SUBTB_BETA,
          scale="paper",
          lam=0.7,
      )
    np.testing.assert_allclose(loss, 0.0, atol=1e-20)

  def test_gradient_equals_finite_differences(self):
    with jax.enable_x64(True):
      logprobs, ref, mask, rewards, values = map(
          lambda x: jnp.nan_to_num(jnp.asarray(x, jnp.float64)),
          make_token_arrays(),
      )
      steps = np.random.default_rng(2).normal(size=(2, *LENGTHS.shape, T))

      def along(x):
        return subtb(
            logprobs + x * steps[0],
            ref,
            mask,
            rewards,
            values + x * steps[1],
            beta=SUBTB_BETA,
            scale="unit",
            lam=0.8,
        )[0]

      slope = (along(1e-5) - along(-1e-5)) / 2e-5
      np.testing.assert_allclose(jax.grad(along)(0.0), slope, rtol=1e-6)


SEQ = jnp.array([[-1.0, -3.0, -2.0]])
REF_SEQ = jnp.array([[-2.0, -1.0, -2.0]])
REWARDS = jnp.array([[1.5, 1.0, 0.0]])
# Residuals r - β ρ at β = 0.5 are 1, 2, 0: pairs apart by 1, 1, 2; mean 1.
LOSSES = {"copg": copg.copg_loss, "gvpo": tb.gvpo_loss}


class PairsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      # r/β is 3, 2, 0: pairs apart by 1, 3, 2. δ is -2, -4, 0.
      (0.0, [4, 4, 16]),
      (1.5, [4, 16]),
      (2.0, [4, 16]),
      (2.5, [4]),
      (4.0, []),
  )
  def test_matches_known_numbers(self, least, squares):
    run = lambda scale: self.variant(
        functools.partial(
            loss_case.run_sequences,
            tb.ctb_loss,
            beta=0.5,
            scale=scale,
            pair_contrast=least,
        )
    )(SEQ, REF_SEQ, REWARDS)
    loss, aux = run("paper")
    # Each pair counts in both orders, of 2 K².
    np.testing.assert_allclose(loss, sum(squares) / 9, rtol=1e-6)
    np.testing.assert_allclose(run("unit")[0], loss / 4, rtol=1e-6)
    np.testing.assert_allclose(aux["log_z_Bx1"], [[2.0]], rtol=1e-6)
    np.testing.assert_allclose(aux["residual_BxK"], [[0, -2, 2]], atol=1e-6)

  @parameterized.parameters("unit", "paper")
  def test_all_pairs_are_tb(self, scale):
    arrays = make_groups()
    mask = np.ones((B, K, 1), np.float32)
    mask[0, 1] = mask[2, :] = 0  # Completions without a counted token.
    run = lambda loss_fn: jax.value_and_grad(
        lambda seq: loss_case.run_sequences(
            loss_fn, seq, *arrays[1:], beta=BETA, scale=scale,
            mask_BxKxT=mask, weights_BxKxT=mask,
        )[0]
    )(arrays[0])  # fmt: skip
    chex.assert_trees_all_close(run(tb.ctb_loss), run(tb.tb_loss), rtol=1e-4)

  def test_pruned_completion_has_no_gradient(self):
    # Only the first and the last are 5.05 or more apart.
    rewards = jnp.array([[0.0, 0.1, 5.0, 5.1]])
    grad = jax.grad(
        lambda seq: loss_case.run_sequences(
            tb.ctb_loss, seq, seq, rewards, beta=1.0, pair_contrast=5.05
        )[0]
    )(jnp.full((1, 4), -1.0))
    self.assertEqual([*(grad[0] != 0)], [True, False, False, True])


class GroupVarianceTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      ("copg", "paper", 6 / 2),
      ("copg", "unit", 6 / 2 / (2 * 0.5 * 3)),
      ("gvpo", "paper", 2 / 4),
      ("gvpo", "unit", 2 / 4 / 0.5),
  )
  def test_matches_known_numbers(self, name, scale, expected):
    run = self.variant(
        functools.partial(loss_case.run_sequences, LOSSES[name], scale=scale)
    )
    loss, _ = run(SEQ, REF_SEQ, REWARDS, beta=0.5)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

  @parameterized.parameters(*LOSSES.values())
  def test_shift_and_order_change_nothing(self, loss_fn):
    run = functools.partial(
        loss_case.run_sequences, loss_fn, beta=0.5, scale="unit"
    )
    loss, _ = run(SEQ, REF_SEQ, REWARDS)
    np.testing.assert_allclose(
        run(SEQ, REF_SEQ, REWARDS + 3.0)[0], loss, rtol=1e-5
    )
    order = np.array([2, 0, 1])
    np.testing.assert_allclose(
        run(SEQ[:, order], REF_SEQ[:, order], REWARDS[:, order])[0],
        loss,
        rtol=1e-6,
    )


# What is learned where all outcomes can be enumerated. The behavior policy is
# uniform and never changes.

NUM_OUTCOMES = 8
NUM_SAMPLES = 16
TARGET_BETA = 0.5
REF_LOGPROBS = jax.nn.log_softmax(
    jnp.asarray(np.random.default_rng(0).normal(size=NUM_OUTCOMES), jnp.float32)
)
OUTCOME_REWARDS = jnp.asarray(
    np.random.default_rng(1).uniform(size=NUM_OUTCOMES), jnp.float32
)
TARGET = jax.nn.softmax(REF_LOGPROBS + OUTCOME_REWARDS / TARGET_BETA)


def train(loss_fn: Callable[..., jax.Array], num_steps: int = 3000):
  """Returns the policy learned from uniform samples, and its TV distance."""
  tx = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
  params = {"logits": jnp.zeros(NUM_OUTCOMES), "log_z": jnp.zeros((1, 1))}

  def loss_of(params, outcomes_1xS):
    logprobs = jax.nn.log_softmax(params["logits"])
    take = lambda x: x[outcomes_1xS]
    return loss_fn(
        take(logprobs),
        take(REF_LOGPROBS),
        take(OUTCOME_REWARDS),
        params["log_z"],
    )

  def step(carry, rng):
    params, opt_state = carry
    outcomes_1xS = jax.random.randint(rng, (1, NUM_SAMPLES), 0, NUM_OUTCOMES)
    grads = jax.grad(loss_of)(params, outcomes_1xS)
    updates, opt_state = tx.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), None

  (params, _), _ = jax.jit(
      lambda: jax.lax.scan(
          step,
          (params, tx.init(params)),
          jax.random.split(jax.random.PRNGKey(2), num_steps),
      )
  )()
  learned = jax.nn.softmax(params["logits"])
  return params, float(jnp.abs(learned - TARGET).sum() / 2)


class TbConvergenceTest(absltest.TestCase):

  def test_the_start_is_far_from_the_target(self):
    uniform = np.full(NUM_OUTCOMES, 1 / NUM_OUTCOMES)
    self.assertGreater(np.abs(uniform - TARGET).sum() / 2, 0.2)

  def test_vargrad_reaches_the_target(self):
    for scale in ("unit", "paper"):
      with self.subTest(scale):
        _, distance = train(
            lambda s, f, r, z, scale=scale: vargrad(
                s, f, r, beta=TARGET_BETA, scale=scale
            )[0]
        )
        self.assertLess(distance, 0.01)

  def test_other_forms_reach_the_target(self):
    for loss_fn in (
        policy_gradient.tba_prime_loss,
        copg.copg_loss,
        tb.gvpo_loss,
    ):
      with self.subTest(loss_fn.__name__):
        _, distance = train(
            lambda s, f, r, z, loss_fn=loss_fn: loss_case.run_sequences(
                loss_fn, s, f, r, beta=TARGET_BETA
            )[0]
        )
        self.assertLess(distance, 0.01)

  def test_pruned_pairs_reach_the_target(self):
    _, distance = train(
        lambda s, f, r, z: loss_case.run_sequences(
            tb.ctb_loss, s, f, r, beta=TARGET_BETA, pair_contrast=0.5
        )[0]
    )
    self.assertLess(distance, 0.01)

  def test_learned_z_reaches_the_target_and_its_normalizer(self):
    params, distance = train(
        lambda s, f, r, z: learned_z(
            s, f, r, z, beta=TARGET_BETA, scale="paper"
        )[0]
    )
    self.assertLess(distance, 0.01)
    log_z = jax.nn.logsumexp(REF_LOGPROBS + OUTCOME_REWARDS / TARGET_BETA)
    self.assertAlmostEqual(params["log_z"][0, 0], log_z, delta=0.05)

  def test_reinforce_without_a_ratio_does_not(self):
    _, distance = train(
        lambda s, f, r, z: loss_case.run_sequences(
            policy_gradient.reinforce_loss, s, f, r, beta=0.0
        )[0]
    )
    self.assertGreater(distance, 0.2)

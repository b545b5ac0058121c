# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""All objectives through the common path: corrections, norms, metrics."""

import dataclasses
import functools
import itertools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import types
from tba_jax.learning import train_step
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.losses import ppo
from tba_jax.sampling import logits as logits_lib
from tests.support import rows
from tests.support import table_policy

K = table_policy.K
BETA = table_policy.BETA


@jax.jit
def evaluate_all(params, batches):
  """Returns (loss, metrics, gradient) by objective, of a batch for each."""
  return {
      name: table_policy.evaluate(
          table_policy.make_config(name=name, ratio_clip=0.2),
          params,
          batches[name],
      )
      for name in objective_table.OBJECTIVES
  }


@functools.partial(jax.jit, static_argnames="cuts_groups")
def accumulate_all(params, batch, *, cuts_groups=False):
  """Returns (loss, metrics, gradient) by objective, as a step adds them up."""
  out = {}
  batch = train_step.in_rows(batch)
  for name in objective_table.OBJECTIVES:
    config = table_policy.make_config(name=name, ratio_clip=0.2)
    value_model = table_policy.value_model_of(config)
    loss_params = table_policy.make_loss_params(config)
    teacher, others = table_policy.teacher_of(config)
    whole = objective.make_objective(
        config, table_policy.MODEL, value_model, teacher
    )
    prepared = train_step.prepare(
        config, table_policy.MODEL, value_model, {}, loss_params, batch, BETA
    )

    def forward(params, tokens, whole=whole, prepared=prepared, others=others):
      teacher_params = others[0] if others else None
      return whole.forward(*params, prepared, teacher_params, tokens)

    loss, totals, grads = train_step.accumulate_micro_batches(
        whole,
        forward,
        (params, loss_params),
        prepared,
        BETA,
        needs_all=cuts_groups,
    )
    out[name] = loss, metrics_lib.finish(totals), grads
  return out


def make_batch():
  """Returns four groups: short and long ones, of turns, of equal rewards."""
  some = [
      table_policy.make_batch(
          behavior_params=table_policy.make_params(3), seed=seed
      )
      for seed in (1, 2)
  ]
  batch = jax.tree.map(lambda *x: jnp.concatenate(x), *some)
  first = batch.completion_mask[0] * (jnp.arange(table_policy.T) < 2)[None]
  # Losses ignore an environment's tokens.
  turns = batch.completion_mask[2] * (jnp.arange(table_policy.T) != 1)[None]
  mask = batch.completion_mask.at[0].set(first).at[2].set(turns)
  rng = np.random.default_rng(0)
  # Copies have masks and rewards of their own.
  tokens = batch.completion_tokens
  tokens = tokens.at[:, 2].set(tokens[:, 0]).at[:, 3].set(tokens[:, 1])
  return dataclasses.replace(
      batch,
      completion_tokens=tokens,
      completion_mask=mask,
      behavior_logprobs=batch.behavior_logprobs * mask,
      ref_logprobs=batch.ref_logprobs * mask,
      turn_rewards=mask * jnp.asarray(rng.normal(size=mask.shape), jnp.float32),
      rewards=batch.rewards.at[3].set(1.0),
      staleness_steps=jnp.arange(16.0).reshape(4, K),
      prepared={"baselines_Bx1": jnp.array([[0.1], [0.2], [0.3], [0.4]])},
  )


@pytest.mark.slow
class ObjectivesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.batch = make_batch()
    cls.params = table_policy.make_params(0)
    cls.found = evaluate_all(
        cls.params, dict.fromkeys(objective_table.OBJECTIVES, cls.batch)
    )

  def test_all_have_the_metrics_of_tb(self):
    names = {}
    for name, (loss, metrics, (grad, _)) in self.found.items():
      chex.assert_tree_all_finite((loss, metrics, grad))
      self.assertGreater(jnp.abs(grad["table"]).max(), 1e-4, name)
      names[name] = set(metrics)
    own = {
        "pair_margin",
        "pair_accuracy",
        "value_mean",
        "value_clip_share",
        "value_explained_variance",
        "return_mean",
    }
    for name, found in names.items():
      self.assertLessEqual(found - names["tb"], own, name)
      self.assertLessEqual(names["tb"], found, name)

  @parameterized.parameters(0, 1)
  def test_parts_change_nothing(self, micro_completions):
    batch = rows.pack(self.batch, 1, micro_completions)
    self.assertGreater(rows.num_micro_batches(batch), 1)
    found = accumulate_all(
        self.params, batch, cuts_groups=bool(micro_completions)
    )
    for name, whole in self.found.items():
      with self.subTest(name):
        chex.assert_trees_all_close(found[name], whole, rtol=1e-4, atol=1e-5)

  @parameterized.parameters("ppo", "subtb")
  def test_the_value_model_has_a_gradient(self, name):
    *_, (_, loss_grad) = self.found[name]
    self.assertGreater(jnp.abs(loss_grad["value"]["table"]).max(), 1e-3)

  def test_measures_pairs(self):
    batch = table_policy.make_batch()
    config = table_policy.make_config(name="online_dpo")
    ref = table_policy.make_params(9)
    # All margins are 0 at the reference.
    _, metrics, _ = table_policy.evaluate(config, ref, batch)
    np.testing.assert_allclose(metrics["pair_margin"], 0.0, atol=1e-5)
    none = dataclasses.replace(batch, rewards=jnp.ones_like(batch.rewards))
    loss, metrics, (grad, _) = table_policy.evaluate(
        config, table_policy.make_params(0), none
    )
    self.assertEqual(loss, 0.0)
    self.assertEqual(metrics["equal_reward_groups"], 1.0)
    self.assertEqual(metrics["pair_accuracy"], 0.0)
    chex.assert_trees_all_equal(grad, jax.tree.map(jnp.zeros_like, grad))

  def test_proximal_rloo_is_the_clipped_surrogate_of_whole_completions(self):
    behavior = jax.tree.map(
        lambda a, b: a + b / 8,
        table_policy.make_params(0),
        table_policy.make_params(3),
    )
    params, batch = table_policy.make_params(0), table_policy.make_batch(
        behavior_params=behavior
    )
    mask = batch.completion_mask
    kl = ((batch.behavior_logprobs - batch.ref_logprobs) * mask).sum(axis=2)
    returns = batch.rewards - BETA * kl
    others = (returns.sum(axis=1, keepdims=True) - returns) / (K - 1)
    advantages = returns - others

    def surrogate(params):
      delta = (
          table_policy.token_logprobs(params, batch) - batch.behavior_logprobs
      )
      w = jnp.exp((delta * mask).sum(axis=2))
      held = jnp.clip(w, 0.8, 1.2)
      return jnp.maximum(-advantages * w, -advantages * held).mean()

    config = table_policy.make_config(name="proximal_rloo", ratio_clip=0.2)
    _, metrics, (grad, _) = table_policy.evaluate(config, params, batch)
    self.assertBetween(metrics["ratio_clip_share"], 0.05, 0.95)
    chex.assert_trees_all_close(
        grad, jax.grad(surrogate)(params), rtol=1e-4, atol=1e-6
    )

  def test_ppo_is_the_clipped_surrogate_of_tokens(self):
    config = table_policy.make_config(
        name="ppo", ratio_clip=0.2, value_weight=0.0
    )
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    params = table_policy.make_params(0)
    loss_params = table_policy.make_loss_params(config)
    targets = ppo.make_targets(
        table_policy.completion_values(
            loss_params["value"],
            batch.prompt_tokens,
            None,
            batch.completion_tokens,
        ),
        batch.behavior_logprobs - batch.ref_logprobs,
        batch.completion_mask,
        batch.rewards,
        config.loss,
        BETA,
    )

    def surrogate(params):
      logprobs = table_policy.token_logprobs(params, batch)
      w = jnp.exp(logprobs - batch.behavior_logprobs)
      advantages = targets.advantages_BxKxT
      cut = jnp.maximum(-advantages * w, -advantages * jnp.clip(w, 0.8, 1.2))
      mask = batch.completion_mask
      return jnp.where(mask > 0, cut, 0.0).sum() / mask.sum()

    _, metrics, (grad, _) = table_policy.evaluate(
        config, params, batch, loss_params
    )
    self.assertBetween(metrics["ratio_clip_share"], 0.05, 0.95)
    chex.assert_trees_all_close(
        grad, jax.grad(surrogate)(params), rtol=1e-4, atol=1e-6
    )
    self.assertEqual(metrics["value_clip_share"], 0.0)

  @parameterized.parameters(
      # w = e^.3 = 1.35: cut by the clip, capped, masked, or as it is.
      (dict(ratio_clip=0.2), 0.0),
      (dict(ratio_clip=0.2, clip_high=0.5), np.exp(0.3)),
      (dict(correction="truncate_token", ratio_cap=1.1), 1.1),
      (dict(correction="truncate_sequence", ratio_cap=1.1), 1.1),
      (dict(correction="mask_token", ratio_cap=1.1), 0.0),
      (dict(correction="cispo", ratio_clip=0.2), 1.2),
      (dict(correction="decoupled", ratio_clip=0.2, ratio_cap=1.1), 1.1),
      (dict(), 1.0),
  )
  def test_the_kl_of_grpo_is_outside_ratio_and_clip(self, loss, factor):
    """L = 1/K Σₖ [-A f log π + β k3], d k3/d log π = 1 - e^(log π_ref - log π).

    With log π = -1, log π_behavior = -1.3, log π_ref = -2, A = 1 and β = .05
    the KL's gradient is .05 (1 - e^-1) = .0316, whatever the factor f is.
    """
    batch = dataclasses.replace(
        table_policy.make_batch(),
        completion_tokens=jnp.zeros((1, 2, 1), jnp.int32),
        completion_mask=jnp.ones((1, 2, 1)),
        prompt_mask=jnp.ones((1, 3)),
        behavior_logprobs=jnp.full((1, 2, 1), -1.3),
        ref_logprobs=jnp.full((1, 2, 1), -2.0),
        rewards=jnp.array([[1.0, -1.0]]),
        staleness_steps=jnp.ones((1, 2)),
    )
    for name in ("grpo", "dr_grpo"):
      pure_loss = objective.make_pure_loss(
          table_policy.make_config(name=name, **loss)
      )
      grad = jax.grad(
          lambda x, fn=pure_loss: fn(x, {}, batch, jnp.float32(0.05))[0]
      )(jnp.full((1, 2, 1), -1.0))
      # Gradient of the completion with A = 1; grpo divides by std = 1 (+ 1e-4).
      np.testing.assert_allclose(
          2 * grad[0, 0, 0], -factor + 0.05 * (1 - np.exp(-1)), atol=2e-4
      )

  @parameterized.parameters(
      "reinforce",
      "rloo",
      "proximal_rloo",
      "grpo",
      "dr_grpo",
      "tba_prime",
      "best_of_n",
      "ppo",
  )
  def test_beta_may_be_zero_outside_the_tb_family(self, name):
    config = table_policy.make_config(name=name, ratio_clip=0.2)
    loss_fn = objective.make_loss_fn(
        config, table_policy.MODEL, table_policy.value_model_of(config)
    )
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    loss_params = table_policy.make_loss_params(config)
    run = lambda batch: jax.value_and_grad(loss_fn, has_aux=True)(
        table_policy.make_params(0), loss_params, batch, jnp.float32(0.0)
    )
    (loss, totals), grad = run(batch)
    chex.assert_tree_all_finite((loss, metrics_lib.finish(totals), grad))
    # Without a KL term the reference does not matter.
    shifted = dataclasses.replace(
        batch, ref_logprobs=batch.ref_logprobs - batch.completion_mask
    )
    (other, _), other_grad = run(shifted)
    chex.assert_trees_all_close((other, other_grad), (loss, grad), rtol=1e-6)

  def test_applies_a_correction_from_the_config(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch(
        behavior_params=table_policy.make_params(3)
    )
    mask = batch.completion_mask
    run = lambda **loss: table_policy.evaluate(
        table_policy.make_config(**loss), params, batch
    )[2][0]
    config = dict(name="rloo", ratio_clip=0.2)
    chex.assert_trees_all_equal(
        run(correction="none", **config), run(name="rloo")
    )

    def truncated(params):
      logprobs = table_policy.token_logprobs(params, batch)
      w = jnp.minimum(jnp.exp(logprobs - batch.behavior_logprobs), 1.5)
      kl = ((batch.behavior_logprobs - batch.ref_logprobs) * mask).sum(axis=2)
      returns = batch.rewards - BETA * kl
      advantages = K / (K - 1) * (returns - returns.mean(axis=1, keepdims=True))
      w = jax.lax.stop_gradient(w)
      return -(advantages[:, :, None] * w * logprobs * mask).sum(axis=2).mean()

    chex.assert_trees_all_close(
        run(correction="truncate_token", ratio_cap=1.5, **config),
        jax.grad(truncated)(params),
        rtol=1e-4,
        atol=1e-6,
    )

  def test_length_norm_divides_by_tokens(self):
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    _, _, (own, _) = table_policy.evaluate(
        table_policy.make_config(name="grpo"),
        table_policy.make_params(0),
        batch,
    )
    config = table_policy.make_config(name="grpo", length_norm="none")
    _, _, (summed, _) = table_policy.evaluate(
        config, table_policy.make_params(0), batch
    )
    config = table_policy.make_config(name="grpo", length_norm="tokens")
    _, _, (divided, _) = table_policy.evaluate(
        config, table_policy.make_params(0), batch
    )
    chex.assert_trees_all_equal(own, divided)
    difference = jnp.abs(own["table"] - summed["table"]).max()
    self.assertGreater(difference, 1e-2)


class TruncatedSamplingTest(parameterized.TestCase):
  """Gradients of all completions that a truncated sampler can draw."""

  def setUp(self):
    super().setUp()
    V = table_policy.V
    self.params = table_policy.make_params()
    # Completions of two tokens after a prompt that ends in 3.
    self.prompt = jnp.array([[0, 2, 3]], jnp.int32)
    table_TxV = self.params["table"][3, :2]
    logprobs_TxV = logits_lib.process(
        table_TxV, temperature=0.7, top_k=0, top_p=0.8
    )
    logprobs_TxC, self.kept_TxC = logits_lib.keep_likeliest(logprobs_TxV, 3)
    self.assertGreater(jnp.isfinite(logprobs_TxV).sum(), 3)
    by_id = lambda t: dict(zip(self.kept_TxC[t].tolist(), logprobs_TxC[t]))
    self.logprobs = [
        {i: float(p) for i, p in by_id(t).items() if i >= 0} for t in (0, 1)
    ]
    self.rewards = np.random.default_rng(0).normal(size=(V, V))

  def make_groups(self):
    """Returns all groups of two completions, and the probability of each."""
    completions = list(itertools.product(*self.logprobs))
    pairs = np.array(list(itertools.product(completions, repeat=2)))
    N, T = len(pairs), table_policy.T
    tokens = np.zeros((N, 1, 2, T), np.int32)
    tokens[:, 0, :, :2] = pairs
    behavior = np.zeros(tokens.shape, np.float32)
    for t in (0, 1):
      behavior[..., t] = np.vectorize(self.logprobs[t].get)(tokens[..., t])
    kept = np.full((*tokens.shape, 3), -1, np.int32)
    kept[..., :2, :] = self.kept_TxC
    batch = types.Batch(
        prompt_tokens=jnp.broadcast_to(self.prompt, (N, 1, 3)),
        prompt_mask=jnp.ones((N, 1, 3)),
        completion_tokens=jnp.asarray(tokens),
        completion_mask=jnp.zeros(tokens.shape).at[..., :2].set(1.0),
        behavior_logprobs=jnp.asarray(behavior),
        ref_logprobs=jnp.asarray(behavior),
        rewards=jnp.asarray(
            self.rewards[tokens[..., 0], tokens[..., 1]], jnp.float32
        ),
        staleness_steps=jnp.zeros((N, 1, 2)),
        kept_ids=jnp.asarray(kept),
    )
    return batch, np.exp(behavior.sum(axis=(1, 2, 3)))

  def gradient(self, params, batch, shares, **loss):
    """Returns the mean gradient of a loss, by its probability."""
    config = table_policy.make_config(**loss)
    loss_fn = objective.make_loss_fn(config, table_policy.MODEL)
    run = jax.grad(lambda p, b: loss_fn(p, {}, b, jnp.float32(0.5))[0])
    each = jax.vmap(run, (None, 0))(params, batch)["table"]
    return np.tensordot(shares, each, 1), each

  def test_policy_gradient_with_a_clip_is_unbiased(self):
    batch, shares = self.make_groups()
    np.testing.assert_allclose(shares.sum(), 1.0, rtol=1e-5)

    def expected_reward(params):
      logits = params["table"][3, :2] / 0.7
      is_kept = jax.nn.one_hot(self.kept_TxC, table_policy.V).sum(axis=1) > 0
      first, second = jax.nn.softmax(jnp.where(is_kept, logits, -jnp.inf))
      return first @ jnp.asarray(self.rewards, jnp.float32) @ second

    expected = -jax.grad(expected_reward)(self.params)["table"]
    settings = dict(name="rloo", correction="clip_token", ratio_clip=0.1)
    batch = dataclasses.replace(batch, ref_logprobs=batch.behavior_logprobs)
    found, _ = self.gradient(self.params, batch, shares, **settings)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    self.assertGreater(np.abs(expected).max(), 0.05)
    # With log-probs of the whole vocabulary, the clip drops most tokens.
    whole = dataclasses.replace(batch, kept_ids=None)
    biased, _ = self.gradient(self.params, whole, shares, **settings)
    self.assertGreater(np.abs(biased - expected).max(), 0.05)

  def test_trajectory_balance_rests_at_its_target(self):
    """π ∝ π_ref exp(r/β) among the kept tokens, r the sum of two tokens'."""
    batch, shares = self.make_groups()
    bonus = np.random.default_rng(1).normal(size=(2, table_policy.V))
    table = self.params["table"].at[3, :2].add(0.7 * bonus / 0.5)
    rewards = sum(
        jnp.asarray(bonus[t], jnp.float32)[batch.completion_tokens[..., t]]
        for t in (0, 1)
    )
    batch = dataclasses.replace(batch, rewards=rewards)
    at = {**self.params, "table": table}
    _, each = self.gradient(at, batch, shares, name="tb")
    np.testing.assert_allclose(each, 0.0, atol=1e-5)
    _, each = self.gradient(self.params, batch, shares, name="tb")
    self.assertGreater(np.abs(each).max(), 0.05)

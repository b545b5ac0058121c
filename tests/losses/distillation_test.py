# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the divergence from a teacher, and of both models side by side."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from tba_jax.losses import distillation
from tba_jax.losses import logprobs
from tba_jax.losses import objective
from tests.support import rows
from tests.support import table_policy
from tests.support import tiny_model


def tempered(logits, temperature):
  return special.softmax(np.asarray(logits, np.float64) / temperature, axis=-1)


class DivergenceTest(parameterized.TestCase):

  @parameterized.parameters(0.0, 0.3, 1.0)
  def test_is_the_sum_over_the_vocabulary(self, gkd_beta):
    rng = np.random.default_rng(0)
    logits, teacher_logits = rng.normal(size=(2, 4, 3, 7)) * 2
    q, p = tempered(logits, 0.7), tempered(teacher_logits, 0.7)
    kl = lambda a, b: (a * np.log(a / b)).sum(axis=-1)
    m = gkd_beta * p + (1 - gkd_beta) * q
    expected = {
        0.0: kl(p, q),
        0.3: 0.3 * kl(p, m) + 0.7 * kl(q, m),
        1.0: kl(q, p),
    }[gkd_beta]
    found = distillation.divergence(
        logits, teacher_logits, temperature=0.7, gkd_beta=gkd_beta
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)

  @parameterized.parameters(0.0, 0.3, 1.0)
  def test_is_least_at_the_teacher(self, gkd_beta):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(5, 7)))
    of = lambda x: distillation.divergence(
        x, logits, temperature=1.0, gkd_beta=gkd_beta
    ).sum()
    value, grad = jax.value_and_grad(of)(logits + 3.0)
    np.testing.assert_allclose(value, 0.0, atol=1e-6)
    np.testing.assert_allclose(grad, 0.0, atol=1e-6)
    self.assertGreater(of(2 * logits), 0.1)


class LossTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.params = table_policy.make_params(0)
    self.config = table_policy.make_config(name="gkd")
    self.batch = table_policy.make_batch(table_policy.make_params(3))

  def expected(self, params, teacher_params):
    """The mean over completions of the mean reverse KL of their tokens."""
    table = lambda params: tempered(
        params["table"][self.batch.prompt_tokens[:, -1]], 0.7
    )
    q, p = table(params), table(teacher_params)
    kl_Bx1xT = (q * np.log(q / p)).sum(axis=-1)[:, None]
    mask_BxKxT = np.asarray(self.batch.completion_mask)
    return ((kl_Bx1xT * mask_BxKxT).sum(axis=2) / mask_BxKxT.sum(axis=2)).mean()

  def test_is_the_mean_over_the_tokens_of_completions(self):
    loss, metrics, _ = table_policy.evaluate(
        self.config, self.params, self.batch
    )
    np.testing.assert_allclose(
        loss,
        self.expected(self.params, table_policy.make_params(9)),
        rtol=1e-5,
    )
    self.assertEqual(metrics["ratio_clip_share"], 0.0)

  def test_reads_neither_rewards_nor_log_probs_of_a_batch(self):
    other = dataclasses.replace(
        self.batch,
        rewards=1 - self.batch.rewards,
        ref_logprobs=jnp.full_like(self.batch.ref_logprobs, jnp.nan),
        behavior_logprobs=self.batch.behavior_logprobs - 1,
    )
    first = table_policy.evaluate(self.config, self.params, self.batch)
    second = table_policy.evaluate(self.config, self.params, other)
    self.assertEqual(first[0], second[0])
    np.testing.assert_array_equal(first[2][0]["table"], second[2][0]["table"])
    self.assertEqual(first[1]["kl"], second[1]["kl"])

  def test_steps_lead_to_the_teacher(self):
    teacher_params = table_policy.make_params(9)
    teacher, _ = table_policy.teacher_of(self.config)
    loss_fn = objective.make_loss_fn(
        self.config, table_policy.MODEL, teacher=teacher
    )

    optimizer = optax.adam(0.1)

    @jax.jit
    def step(params, state):
      grads = jax.grad(loss_fn, has_aux=True)(
          params, {}, self.batch, jnp.float32(1.0), teacher_params
      )[0]
      updates, state = optimizer.update(grads, state)
      return optax.apply_updates(params, updates), state

    params, state = self.params, optimizer.init(self.params)
    before = self.expected(params, teacher_params)
    for _ in range(300):
      params, state = step(params, state)
    self.assertLess(self.expected(params, teacher_params), 0.01 * before)


class SideBySideTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # The teacher's vocabulary is padded, and its stream is another's width.
    shapes = {}, dict(width=24, num_heads=6, vocab_size=tiny_model.VOCAB + 8)
    self.models = [tiny_model.make_model(**shape) for shape in shapes]
    self.params = [
        tiny_model.init_params(model, seed)
        for seed, model in enumerate(self.models)
    ]
    self.batch = jax.tree.map(jnp.asarray, tiny_model.make_batch())

  def read(self, model, params, fn, **others):
    batch = self.batch
    return logprobs.map_logits(
        model,
        params,
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        fn,
        **others,
    )

  @parameterized.named_parameters(("at_once", None), ("in_chunks", 400))
  @pytest.mark.slow
  def test_logits_are_those_of_each_model(self, max_logits):
    both = distillation.SideBySide(*self.models)
    V = tiny_model.VOCAB
    read = lambda logits, tokens: logprobs.token_logprobs(
        logits, tokens, temperature=1.0
    )
    alone = [
        self.read(model, params, lambda x, tokens: read(x[..., :V], tokens))
        for model, params in zip(self.models, self.params)
    ]
    found = self.read(
        both,
        distillation.pair(*self.params),
        lambda x, tokens: (read(x[..., :V], tokens), read(x[..., V:], tokens)),
        max_logits=max_logits,
    )
    for mine, expected in zip(found, alone):
      np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)

  @pytest.mark.slow
  def test_only_policy_has_gradient(self):
    config = tiny_model.make_config(loss__name="gkd")
    loss_fn = objective.make_loss_fn(
        config, self.models[0], teacher=self.models[1]
    )
    packed = rows.pack(self.batch, 99, one_micro_batch=True)
    self.assertEqual(packed.rows.token_indices.shape[1], 1)
    whole = objective.make_objective(
        config, self.models[0], teacher=self.models[1]
    )

    def loss_of(params, is_packed):
      if not is_packed:
        return loss_fn(params[0], {}, self.batch, jnp.float32(1.0), params[1])[
            0
        ]
      outputs = logprobs.map_micro_batches(
          lambda tokens: whole.forward(
              params[0], {}, packed, params[1], tokens
          )[0],
          packed.rows,
          whole.placeholders(packed),
      )
      return whole.loss(outputs, {}, packed, jnp.float32(1.0))[0]

    grad = jax.jit(jax.value_and_grad(loss_of), static_argnums=1)
    loss, (own, other) = grad(self.params, False)
    chex.assert_trees_all_equal(other, jax.tree.map(jnp.zeros_like, other))
    self.assertGreater(optax.tree.norm(own), 1e-3)
    again, (packed_own, _) = grad(self.params, True)
    np.testing.assert_allclose(again, loss, rtol=1e-5)
    chex.assert_trees_all_close(packed_own, own, rtol=1e-3, atol=1e-6)

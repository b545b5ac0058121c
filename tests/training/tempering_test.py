# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tempered target: its schedules, and the loss against its formula."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.config import validate
from tba_jax.losses import objective
from tba_jax.training import schedules
from tba_jax.training import train_step
from tests.support import base_config

B, K, T = 2, 3, 4
TAU, GAMMA, BETA, LOG_Z = 1.6, 1.2, 0.05, 0.7


def _batch():
  rng = np.random.default_rng(0)
  mask = (rng.random((B, K, T)) < 0.8).astype(np.float32)
  numbers = lambda *shape: rng.normal(-2, 1, shape).astype(np.float32)
  batch = types.Batch(
      prompt_tokens=np.zeros((B, 2), np.int32),
      prompt_mask=np.ones((B, 2), np.float32),
      completion_tokens=np.zeros((B, K, T), np.int32),
      completion_mask=mask,
      behavior_logprobs=mask * numbers(B, K, T),
      ref_logprobs=mask * numbers(B, K, T),
      rewards=numbers(B, K),
      staleness_steps=np.zeros((B, K), np.float32),
  )
  return jax.tree.map(jnp.asarray, batch), jnp.asarray(numbers(B, K, T))


def _loss(name):
  config = base_config.make(loss__name=name, loss__scale="paper")
  batch, logprobs = _batch()
  batch, beta = train_step.temper(
      batch,
      jnp.float32(BETA),
      tau=jnp.float32(TAU),
      gamma=jnp.float32(GAMMA),
  )
  loss, totals = objective.make_pure_loss(config)(
      logprobs, {"log_z": jnp.array([LOG_Z])}, batch, beta
  )
  sums = lambda x: np.asarray((x * batch.completion_mask).sum(-1))
  seq, ref = sums(logprobs), sums(batch.ref_logprobs)
  log_r = (ref / GAMMA + np.asarray(batch.rewards) / BETA) / TAU
  return loss, totals, seq, ref, log_r


class TemperingTest(parameterized.TestCase):

  def test_learned_log_z_against_the_formula(self):
    loss, totals, seq, ref, log_r = _loss("tb_learned_z")
    np.testing.assert_allclose(
        loss, np.square(LOG_Z + seq - log_r).mean(), rtol=1e-4
    )
    # What is told of the KL is that to the reference itself.
    value, weight = totals["kl"]
    np.testing.assert_allclose(value / weight, (seq - ref).mean(), rtol=1e-4)

  def test_vargrad_against_the_formula(self):
    loss, _, seq, _, log_r = _loss("tb")
    np.testing.assert_allclose(
        loss, np.var(seq - log_r, axis=1).mean(), rtol=1e-4
    )

  def test_the_papers_schedules(self):
    section = base_config.make(
        tempering__tau=2.0,
        tempering__tau_decay_steps=500,
        tempering__gamma_final=1.2,
        tempering__gamma_decay_steps=2000,
    ).tempering
    schedule = schedules.tempering(section, per_round_steps=0)
    values = np.array([schedule(s) for s in (0, 250, 500, 1000, 2000, 9000)])
    np.testing.assert_allclose(
        values[:, 0], [2.0, 1.5, 1.0, 1.0, 1.0, 1.0], rtol=1e-6
    )
    np.testing.assert_allclose(
        values[:, 1], [1.0, 1.025, 1.05, 1.1, 1.2, 1.2], rtol=1e-6
    )
    held = schedules.tempering(section, per_round_steps=250)
    np.testing.assert_allclose(held(499)[0], 1.5)

  def test_the_plain_target_needs_nothing(self):
    plain = base_config.make().tempering
    self.assertIsNone(schedules.tempering(plain, per_round_steps=0))
    constant = base_config.make(tempering__tau=2.0).tempering
    self.assertEqual(
        schedules.tempering(constant, per_round_steps=0)(7)[0], 2.0
    )

  @parameterized.parameters(
      (dict(tempering__tau=2.0, loss__name="rloo"), "tempering.tau"),
      (dict(tempering__gamma_final=0.0), "tempering.gamma_final"),
      (dict(explore__min_tokens=24), "explore.min_tokens"),
      (dict(explore__min_temperature=2.0), "explore.min_temperature"),
      (
          dict(explore__fraction=0.5, loss__ratio_clip=0.2),
          "explore.fraction",
      ),
      (dict(explore__fraction=1.5), "explore.fraction"),
      (dict(replay_filter__similarity="cosine"), "replay_filter.similarity"),
      (dict(replay_filter__evict="newest"), "replay_filter.evict"),
      (
          dict(replay_filter__duplicates="oldest", replay__dedupe=False),
          "replay_filter.duplicates",
      ),
      (
          dict(replay_filter__freeze_step=3, rounds__mini_batches=2),
          "replay_filter.freeze_step",
      ),
  )
  def test_what_is_refused(self, changes, key):
    with self.assertRaises(ValueError) as caught:
      validate.validate(base_config.make(**changes))
    lines = str(caught.exception).splitlines()
    self.assertTrue(any(f"config.{key} = " in line for line in lines), lines)

  @parameterized.parameters(
      dict(tempering__tau=2.0, loss__name="tb"),
      dict(explore__fraction=0.5, explore__min_tokens=5),
      dict(replay_filter__similarity="edit", replay_filter__freeze_step=9),
      dict(replay_filter__evict="lowest_reward"),
  )
  def test_what_is_allowed(self, **changes):
    validate.validate(base_config.make(**changes))


if __name__ == "__main__":
  absltest.main()

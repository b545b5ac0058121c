# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is held of the params, and what a batch is given before it is cut."""

import dataclasses

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.training import train_step
from tests.support import table_policy

BETA = table_policy.BETA


def state_at(step, config):
  """The state before a step: all params are the step's number."""
  names = train_step.proximal_names(config)
  params = {"p": jnp.float32(step)}
  state = train_step.TrainState(
      step=jnp.int32(step),
      params=params,
      opt_state=(),
      loss_params={"value": jnp.float32(-step)},
      loss_opt_state=(),
      proximal_params={},
      ref_params={},
      sampling_params=params if train_step.keeps_params(config) else {},
      learning_rate_scale=jnp.float32(1),
  )
  held = {name: getattr(state, name) for name in names}
  return dataclasses.replace(state, proximal_params=held)


def held_steps(config, num_steps):
  """What is held at each step."""
  state, seen = state_at(0, config), []
  for step in range(num_steps):
    new = state_at(step, config)
    state = train_step.hold_params(
        config,
        dataclasses.replace(
            new,
            proximal_params=state.proximal_params,
            sampling_params=state.sampling_params,
        ),
    )
    seen.append(state)
  return seen


class HoldTest(absltest.TestCase):

  def test_nothing_where_nobody_reads_it(self):
    for loss in (
        dict(name="tb", proximal_every_steps=4),
        dict(name="ppo"),
        dict(name="tb", correction="decoupled"),
    ):
      config = table_policy.make_config(**loss)
      self.assertEqual(train_step.proximal_names(config), [])

  def test_is_renewed_after_so_many_steps(self):
    config = table_policy.make_config(
        name="ppo", proximal_every_steps=3, correction="decoupled"
    )
    held = [s.proximal_params for s in held_steps(config, 7)]
    self.assertEqual(
        [(h["params"]["p"], h["loss_params"]["value"]) for h in held],
        [(s, -s) for s in (0, 0, 0, 3, 3, 3, 6)],
    )

  def test_holds_only_what_is_read(self):
    values = table_policy.make_config(name="ppo", proximal_every_steps=2)
    self.assertEqual(train_step.proximal_names(values), ["loss_params"])
    policy = table_policy.make_config(
        name="rloo", proximal_every_steps=2, behavior_logprobs="recomputed"
    )
    self.assertEqual(train_step.proximal_names(policy), ["params"])

  def test_lasts_a_round_by_default(self):
    config = table_policy.make_config(name="ppo")
    config.rounds.mini_batches = config.rounds.passes = 2
    config.rounds.lag_rounds = 1
    self.assertEqual(train_step.held_steps(config), 4)
    seen = held_steps(config, 6)
    self.assertEqual(
        [s.proximal_params["loss_params"]["value"] for s in seen],
        [0, 0, 0, 0, -4, -4],
    )
    self.assertEqual([s.sampling_params["p"] for s in seen], [0] * 4 + [4] * 2)


class PrepareTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.batch = table_policy.make_batch(
        behavior_params=table_policy.make_params(3)
    )
    self.params = table_policy.make_params(0)
    self.held = {"params": table_policy.make_params(4)}
    self.proximal = table_policy.token_logprobs(self.held["params"], self.batch)

  def prepared(self, held, **loss):
    config = table_policy.make_config(**loss)
    out = train_step.prepare(
        config,
        table_policy.MODEL,
        table_policy.value_model_of(config),
        held,
        table_policy.make_loss_params(config),
        jax.tree.map(lambda x: x[None], self.batch),
        BETA,
    )
    return jax.tree.map(lambda x: x[0], out)

  def gradient(self, batch, **loss):
    config = table_policy.make_config(**loss)
    return table_policy.evaluate(config, self.params, batch)[2][0]

  def test_one_micro_batch_with_nothing_held_is_left_alone(self):
    for name in ("tb", "ppo"):
      self.assertEqual(self.prepared({}, name=name).prepared, {})

  def test_recomputed_takes_the_proximal_policy_s_place(self):
    changes = dict(name="rloo", ratio_clip=0.2, correction="clip_token")
    batch = self.prepared(self.held, behavior_logprobs="recomputed", **changes)
    np.testing.assert_allclose(
        batch.prepared["proximal_logprobs"], self.proximal, rtol=1e-5
    )
    other = dataclasses.replace(
        self.batch,
        behavior_logprobs=self.proximal * self.batch.completion_mask,
    )
    chex.assert_trees_all_close(
        self.gradient(batch, behavior_logprobs="recomputed", **changes),
        self.gradient(other, **changes),
        rtol=1e-5,
    )

  def test_decoupled_is_the_surrogate_written_out(self):
    """b max(-A v, -A clip(v)), v = π/π_p, b = min(π_p/π_behavior, cap)."""
    loss = dict(
        name="rloo", correction="decoupled", ratio_clip=0.2, ratio_cap=2.0
    )
    batch, mask = self.prepared(self.held, **loss), self.batch.completion_mask
    kl = (batch.behavior_logprobs - batch.ref_logprobs) * mask
    returns = batch.rewards - BETA * kl.sum(axis=2)
    K = table_policy.K
    advantages = K / (K - 1) * (returns - returns.mean(axis=1, keepdims=True))
    advantages = advantages[:, :, None]
    weight = jnp.minimum(jnp.exp(self.proximal - batch.behavior_logprobs), 2.0)

    def surrogate(params):
      v = jnp.exp(table_policy.token_logprobs(params, batch) - self.proximal)
      cut = jnp.maximum(-advantages * v, -advantages * jnp.clip(v, 0.8, 1.2))
      return (weight * cut * mask).sum(axis=2).mean()

    chex.assert_trees_all_close(
        self.gradient(batch, **loss),
        jax.grad(surrogate)(self.params),
        rtol=1e-4,
        atol=1e-6,
    )

  def test_advantages_come_of_the_held_values(self):
    config = table_policy.make_config(name="ppo")
    old = table_policy.make_loss_params(config, seed=8)
    loss = dict(name="ppo", ratio_clip=0.2)
    batch = self.prepared({"loss_params": old}, **loss)
    np.testing.assert_allclose(
        batch.prepared["old_values_BxKxT"],
        table_policy.completion_values(
            old["value"],
            batch.prompt_tokens,
            None,
            batch.completion_tokens,
        ),
    )
    _, metrics, _ = table_policy.evaluate(
        table_policy.make_config(**loss), self.params, batch
    )
    self.assertGreater(metrics["value_clip_share"], 0.0)


if __name__ == "__main__":
  absltest.main()

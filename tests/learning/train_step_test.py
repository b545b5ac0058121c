# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The jitted update: golden step, accumulation, donation, one compilation."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax import schedule
from tba_jax import types
from tba_jax.learning import checkpoint
from tba_jax.learning import train_step
from tba_jax.losses import objective
from tba_jax.mesh import sharding
from tba_jax.models.net import heads
from tests.support import base_config
from tests.support import rows
from tests.support import table_policy
from tests.support import tiny_model

# First loss and gradient norm of the tiny model. If they change, the same
# config trains differently than before: say so in the changelog, or find the
# bug.
GOLDEN_LOSS = 1.4332871
GOLDEN_GRAD_NORM = 2.890901

# Settings of the tempered target.
TAU, GAMMA, BETA, LOG_Z = 1.6, 1.2, 0.05, 0.7


def find_model(name):
  return tiny_model.make_model() if name == "llama" else tiny_model.BIGRAM


def make_run(name="bigram", **changes):
  """Returns (config, model, mesh, state) of a fresh run on one device."""
  config = tiny_model.make_config(**changes)
  model = find_model(name)
  mesh = sharding.make_mesh(config.mesh)
  params = tiny_model.init_params(model)
  return config, model, mesh, train_step.init_state(config, model, params, mesh)


@functools.cache
def make_step(name="bigram", **changes):
  """Returns the step of `make_run`, compiled once for all tests."""
  config = tiny_model.make_config(**changes)
  mesh = sharding.make_mesh(config.mesh)
  return train_step.make_train_step(config, find_model(name), mesh)


def run_steps(num_steps, name="bigram", *, batch_of=lambda step: 0, **changes):
  """Returns (state, metrics of each step)."""
  *_, state = make_run(name, **changes)
  step_fn = make_step(name, **changes)
  history = []
  for step in range(num_steps):
    batch = tiny_model.make_batch(seed=batch_of(step))
    state, metrics = step_fn(state, batch)
    history.append(jax.device_get(metrics))
  return state, history


class TrainStepTest(absltest.TestCase):

  def test_step_matches_golden_numbers(self):
    _, (metrics,) = run_steps(1, "llama")
    message = f"loss {metrics['loss']!r}, grad_norm {metrics['grad_norm']!r}"
    np.testing.assert_allclose(
        metrics["loss"], GOLDEN_LOSS, rtol=1e-4, err_msg=message
    )
    np.testing.assert_allclose(
        metrics["grad_norm"], GOLDEN_GRAD_NORM, rtol=1e-4, err_msg=message
    )

  def test_metric_names(self):
    _, (metrics,) = run_steps(1)
    self.assertContainsSubset(
        {
            "loss",
            "reward_mean",
            "kl",
            "entropy",
            "log_z_mean",
            "log_z_std",
            "residual_abs",
            "grad_norm",
            "learning_rate",
            "beta",
            "ratio_clip_share",
            "equal_reward_groups",
            "logprob_gap",
        },
        metrics,
    )
    for name, value in metrics.items():
      self.assertEqual(np.shape(value), (), name)
      self.assertTrue(np.isfinite(value), name)

  def test_is_the_update_written_out(self):
    config, model, _, state = make_run()
    params = jax.device_get(state.params)
    batch = tiny_model.make_batch()
    loss_fn = objective.make_loss_fn(config, model)
    (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
        params, {}, batch, jnp.float32(config.loss.beta)
    )
    c = config.optimizer
    tx = optax.chain(
        optax.clip_by_global_norm(c.grad_clip_norm),
        optax.adamw(c.learning_rate, b1=c.b1, b2=c.b2, weight_decay=0.0),
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    new_state, metrics = make_step()(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
        metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4
    )
    chex.assert_trees_all_close(
        new_state.params, optax.apply_updates(params, updates), atol=1e-5
    )
    self.assertEqual(new_state.step, 1)

  def test_micro_batches_of_whole_prompts_equal_one_batch(self):
    results = {
        size: run_steps(3, train__micro_batch_prompts=size)
        for size in (4, 2, 1)
    }
    whole_state, whole_history = results[4]
    for size in (2, 1):
      state, history = results[size]
      chex.assert_trees_all_close(
          state.params, whole_state.params, rtol=1e-3, atol=2e-5
      )
      for metrics, whole in zip(history, whole_history, strict=True):
        chex.assert_trees_all_close(metrics, whole, rtol=1e-3, atol=1e-5)

  def test_schedules_follow_the_step(self):
    _, history = run_steps(
        4,
        train__num_steps=4,
        optimizer__warmup_steps=2,
        optimizer__learning_rate=0.01,
        optimizer__learning_rate_final=0.0,
        loss__beta="1.0:0.2:4:3",
    )
    np.testing.assert_allclose(
        [m["learning_rate"] for m in history],
        [0.005, 0.01, 0.01, 0.005],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        [m["beta"] for m in history], [1.0, 0.8, 0.2, 0.2], rtol=1e-5
    )

  def test_learning_rate_scale_scales_the_update(self):
    def update_of(scale):
      *_, state = make_run()
      before = jax.device_get(state.params)
      state = dataclasses.replace(
          state, learning_rate_scale=state.learning_rate_scale * scale
      )
      state, metrics = make_step()(state, tiny_model.make_batch())
      change = jax.tree.map(lambda a, b: a - b, state.params, before)
      return change, metrics["learning_rate"]

    whole, learning_rate = update_of(1.0)
    half, half_learning_rate = update_of(0.5)
    np.testing.assert_allclose(half_learning_rate, learning_rate / 2, rtol=1e-6)
    chex.assert_trees_all_close(
        half, jax.tree.map(lambda x: x / 2, whole), rtol=1e-3, atol=1e-7
    )

  def test_is_traced_once(self):
    model = tiny_model.BigramModel()
    chex.clear_trace_counter()
    model.completion_stream = chex.assert_max_traces(
        model.completion_stream, n=1
    )
    config, _, mesh, state = make_run()
    step_fn = train_step.make_train_step(config, model, mesh)
    for step in range(3):
      # Batches from the host, and as placed by a trainer.
      batch = tiny_model.make_batch(seed=step)
      state, _ = step_fn(state, sharding.shard_batch(batch, mesh))
      state = dataclasses.replace(
          state, learning_rate_scale=state.learning_rate_scale * 0.5
      )
    self.assertEqual(state.step, 3)

  def test_donates_the_state_but_not_the_params_it_was_made_from(self):
    config, model, mesh, _ = make_run()
    # Already with the state's shardings, so that nothing must be moved.
    params = jax.device_put(
        tiny_model.init_params(model),
        sharding.param_shardings(mesh, model),
    )
    state = train_step.init_state(config, model, params, mesh)
    make_step()(state, tiny_model.make_batch())
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(state.params)))
    self.assertFalse(any(x.is_deleted() for x in jax.tree.leaves(params)))

  def test_nonfinite_step_only_advances_step_number(self):
    *_, state = make_run(optimizer__warmup_steps=4)
    step_fn = make_step(optimizer__warmup_steps=4)
    state, metrics = step_fn(state, tiny_model.make_batch(seed=0))
    self.assertEqual(metrics["nonfinite"], 0.0)
    before = jax.device_get(state)
    batch = tiny_model.make_batch(seed=1)
    rewards = np.array(batch.rewards)
    rewards[0, 0] = np.nan
    bad = dataclasses.replace(batch, rewards=rewards)
    state, metrics = step_fn(state, bad)
    self.assertEqual(metrics["nonfinite"], 1.0)
    chex.assert_trees_all_equal(
        jax.device_get(state), dataclasses.replace(before, step=np.int32(2))
    )
    # The learning rate follows the step: 3/4 of the warm-up.
    state, metrics = step_fn(state, batch)
    self.assertEqual(metrics["nonfinite"], 0.0)
    config = tiny_model.make_config()
    np.testing.assert_allclose(
        metrics["learning_rate"],
        0.75 * config.optimizer.learning_rate,
        rtol=1e-5,
    )

  def test_a_finite_loss_with_an_infinite_gradient_changes_nothing(self):
    config, model, mesh, state = make_run()

    def loss_fn(params, loss_params, batch, beta):
      # The square root of 0 has an infinite slope.
      return sum(jnp.sqrt(0.0 * x).sum() for x in jax.tree.leaves(params)), {}

    step_fn = train_step.make_train_step(config, model, mesh, loss_fn=loss_fn)
    before = jax.device_get(state.params)
    state, metrics = step_fn(state, tiny_model.make_batch())
    self.assertEqual((metrics["loss"], metrics["nonfinite"]), (0.0, 1.0))
    chex.assert_trees_all_equal(jax.device_get(state.params), before)

  def test_learned_log_z_has_its_own_learning_rate(self):
    state, _ = run_steps(
        2, loss__name="tb_learned_z", loss__log_z_learning_rate=0.5
    )
    # Two Adam steps of one sign.
    np.testing.assert_allclose(
        np.abs(state.loss_params["log_z"]), [1.0], rtol=1e-2
    )

  def test_lowers_the_loss_of_a_batch(self):
    _, history = run_steps(40)
    self.assertLess(history[-1]["loss"], 0.5 * history[0]["loss"])

  def test_trains_with_a_custom_loss(self):
    config, model, mesh, state = make_run()
    step_fn = train_step.make_train_step(
        config,
        model,
        mesh,
        loss_fn=objective.make_supervised_loss_fn(model),
    )
    batch = tiny_model.make_batch()
    first = None
    for _ in range(20):
      state, metrics = step_fn(state, batch)
      first = first if first is not None else float(metrics["loss"])
    self.assertLess(metrics["loss"], 0.9 * first)
    self.assertGreater(metrics["token_accuracy"], 0.0)

  def test_copies_and_cuts_change_nothing(self):
    batch = tiny_model.make_batch()
    tokens = np.array(batch.completion_tokens)
    tokens[:3, 1:] = tokens[:3, :1]  # Masks and rewards stay.
    batch = dataclasses.replace(batch, completion_tokens=tokens)

    # Nearly the gradient itself: Adam's own epsilon makes signs of it.
    plain = dict(optimizer__epsilon=1.0, optimizer__learning_rate=1.0)

    def update_of(batch, **changes):
      config, *_, state = make_run(**changes)
      before = jax.device_get(state.params)
      if changes != plain:
        train = config.train
        batch = rows.pack(
            batch, train.micro_batch_prompts, train.micro_batch_completions
        )
        self.assertGreater(rows.num_micro_batches(batch), 1)
      state, metrics = make_step(**changes)(state, batch)
      return jax.tree.map(jnp.subtract, state.params, before), metrics

    expected = update_of(batch, **plain)
    for changes in (
        # Copies are left out; groups are cut into parts.
        dict(train__micro_batch_prompts=1),
        dict(train__micro_batch_prompts=1, train__micro_batch_completions=2),
    ):
      with self.subTest(**changes):
        found = update_of(batch, **plain, **changes)
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)

  def test_custom_loss_may_relate_groups(self):
    path = self.create_tempfile(
        "related.py",
        "def related(groups, c, beta):\n"
        "  return groups.seq_BxK.mean() ** 2 / 100, {}\n",
    ).full_path
    changes = dict(
        loss__name=f"{path}:related",
        optimizer__epsilon=1.0,
        optimizer__learning_rate=1.0,
    )

    def update_of(micro_prompts=0):
      config, *_, state = make_run(**changes)
      before = jax.device_get(state.params)
      batch = tiny_model.make_batch()
      if micro_prompts:
        batch = rows.pack(batch, micro_prompts)
        self.assertGreater(rows.num_micro_batches(batch), 1)
      state, _ = make_step(**changes)(state, batch)
      return jax.tree.map(jnp.subtract, state.params, before)

    expected = update_of()
    chex.assert_trees_all_close(update_of(1), expected, rtol=1e-4, atol=1e-6)

  def test_refuses_an_indivisible_batch(self):
    config, model, mesh, state = make_run(train__micro_batch_prompts=3)
    step_fn = train_step.make_train_step(
        config,
        model,
        mesh,
        loss_fn=objective.make_supervised_loss_fn(model),
    )
    with self.assertRaisesRegex(ValueError, "train.micro_batch_prompts=3"):
      step_fn(state, tiny_model.make_batch())


class RestoreTest(parameterized.TestCase):

  def test_a_restored_run_continues_bit_for_bit(self):
    batch_of = lambda step: step
    whole, _ = run_steps(4, "llama", batch_of=batch_of)
    half, _ = run_steps(2, "llama", batch_of=batch_of)
    directory = self.create_tempdir().full_path
    saver = checkpoint.Checkpointer(directory, keep=1)
    saver.save(2, half, {}, wait=True)
    config, model, mesh, _ = make_run("llama")
    abstract = train_step.abstract_state(config, model, mesh)
    state, _ = saver.restore(abstract)
    saver.close()
    for step in (2, 3):
      batch = tiny_model.make_batch(seed=batch_of(step))
      state, _ = make_step("llama")(state, batch)
    chex.assert_trees_all_equal(state, whole)

  def test_a_moving_reference_is_restored_bit_for_bit(self):
    """At step 3 it is the policy of step 2; by step 5 that of step 4."""
    changes = dict(reference__mode="reset", reference__every_steps=2)
    config, model, mesh, state = make_run("llama", **changes)
    step_fn = train_step.make_train_step(config, model, mesh)
    policies, states = {}, {}
    for step in range(5):
      policies[step] = jax.device_get(state.params)
      state, _ = step_fn(state, tiny_model.make_batch(seed=step))
      states[step + 1] = jax.device_get(state)
    for done, last in ((1, 0), (2, 2), (3, 2), (4, 4), (5, 4)):
      chex.assert_trees_all_equal(states[done].ref_params, policies[last])
    saver = checkpoint.Checkpointer(self.create_tempdir().full_path, keep=1)
    abstract = train_step.abstract_state(config, model, mesh)
    saver.save(
        3,
        jax.device_put(states[3], jax.tree.map(lambda x: x.sharding, abstract)),
        {},
        wait=True,
    )
    restored, _ = saver.restore(abstract)
    saver.close()
    for step in (3, 4):
      restored, _ = step_fn(restored, tiny_model.make_batch(seed=step))
    chex.assert_trees_all_equal(jax.device_get(restored), states[5])

  @pytest.mark.slow
  def test_values_and_snapshots_are_restored_bit_for_bit(self):
    """At step 3 the held values are those of step 2; by step 4 of step 4."""
    changes = dict(
        loss__name="ppo",
        loss__ratio_clip=0.2,
        loss__correction="decoupled",
        loss__proximal_every_steps=2,
        loss__value_learning_rate=0.02,
    )
    config = tiny_model.make_config(**changes)
    model = tiny_model.make_model(num_layers=1)
    mesh = sharding.make_mesh(config.mesh)
    value_model = heads.ScalarModel(heads.config_of(model.config))
    params = tiny_model.init_params(model)
    own = dict(value_model=value_model)
    state = train_step.init_state(config, model, params, mesh, **own)
    abstract = train_step.abstract_state(config, model, mesh, **own)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, abstract)
    np.testing.assert_array_equal(
        state.loss_params["value"]["score"]["kernel"], 0.0
    )
    step_fn = train_step.make_train_step(config, model, mesh, **own)
    saver = checkpoint.Checkpointer(self.create_tempdir().full_path, keep=1)
    values = {}
    for step in range(4):
      values[step] = jax.device_get(state.loss_params)
      if step == 3:
        saver.save(3, state, {}, wait=True)
      state, metrics = step_fn(state, tiny_model.make_batch(seed=step))
      if step == 3:
        chex.assert_trees_all_equal(
            jax.device_get(state.proximal_params["loss_params"]), values[2]
        )
    self.assertGreater(metrics["value_grad_norm"], 0.0)
    np.testing.assert_allclose(
        metrics["value_learning_rate"], 2 * metrics["learning_rate"], rtol=1e-6
    )
    restored, _ = saver.restore(abstract)
    saver.close()
    restored, _ = step_fn(restored, tiny_model.make_batch(seed=3))
    chex.assert_trees_all_equal(restored, state)

  @parameterized.parameters(
      dict(loss__name="tb_learned_z", optimizer__grad_clip_norm=0.0),
      dict(reference__mode="ema"),
  )
  def test_abstract_state_matches_the_state(self, **changes):
    config, model, mesh, state = make_run(**changes)
    abstract = train_step.abstract_state(config, model, mesh)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, abstract)
    self.assertEqual(
        jax.tree.map(lambda x: x.sharding, state),
        jax.tree.map(lambda x: x.sharding, abstract),
    )


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
      sampling_params=params if schedule.make_schedule(config).is_late else {},
      learning_rate_scale=jnp.float32(1),
  )
  held = {name: getattr(state, name) for name in names}
  return dataclasses.replace(state, proximal_params=held)


def held_steps(config, num_steps):
  """Values held at each step."""
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

  def test_holds_no_snapshot_when_unused(self):
    for loss in (
        dict(name="tb", proximal_every_steps=4),
        dict(name="ppo"),
        dict(name="tb", correction="decoupled"),
    ):
      config = table_policy.make_config(**loss)
      self.assertEqual(train_step.proximal_names(config), [])

  def test_snapshots_are_refreshed_periodically(self):
    config = table_policy.make_config(
        name="ppo", proximal_every_steps=3, correction="decoupled"
    )
    held = [s.proximal_params for s in held_steps(config, 7)]
    self.assertEqual(
        [(h["params"]["p"], h["loss_params"]["value"]) for h in held],
        [(s, -s) for s in (0, 0, 0, 3, 3, 3, 6)],
    )

  def test_only_used_fields_are_held(self):
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
    loss_params = table_policy.make_loss_params(config)

    @jax.jit
    def run(held, batch):
      return train_step.prepare(
          config,
          table_policy.MODEL,
          table_policy.value_model_of(config),
          held,
          loss_params,
          train_step.in_rows(batch),
          table_policy.BETA,
      )

    return run(held, self.batch)

  def evaluate(self, batch, **loss):
    """Returns metrics and gradient."""
    config = table_policy.make_config(**loss)
    run = functools.partial(table_policy.evaluate, config)
    _, metrics, (grad, _) = jax.jit(run)(self.params, batch)
    return metrics, grad

  def test_one_micro_batch_needs_no_targets(self):
    for name in ("tb", "ppo"):
      self.assertEqual(self.prepared({}, name=name).prepared, {})

  def test_recomputed_log_probs_replace_the_behavior_policy(self):
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
        self.evaluate(batch, behavior_logprobs="recomputed", **changes)[1],
        self.evaluate(other, **changes)[1],
        rtol=1e-5,
    )

  def test_decoupled_is_the_surrogate_written_out(self):
    """b max(-A v, -A clip(v)), v = π/π_p, b = min(π_p/π_behavior, cap)."""
    loss = dict(
        name="rloo", correction="decoupled", ratio_clip=0.2, ratio_cap=2.0
    )
    batch, mask = self.prepared(self.held, **loss), self.batch.completion_mask
    kl = (batch.behavior_logprobs - batch.ref_logprobs) * mask
    returns = batch.rewards - table_policy.BETA * kl.sum(axis=2)
    K = table_policy.K
    advantages = K / (K - 1) * (returns - returns.mean(axis=1, keepdims=True))
    advantages = advantages[:, :, None]
    weight = jnp.minimum(jnp.exp(self.proximal - batch.behavior_logprobs), 2.0)

    def surrogate(params):
      v = jnp.exp(table_policy.token_logprobs(params, batch) - self.proximal)
      cut = jnp.maximum(-advantages * v, -advantages * jnp.clip(v, 0.8, 1.2))
      return (weight * cut * mask).sum(axis=2).mean()

    chex.assert_trees_all_close(
        self.evaluate(batch, **loss)[1],
        jax.jit(jax.grad(surrogate))(self.params),
        rtol=1e-4,
        atol=1e-6,
    )

  def test_advantages_use_the_held_values(self):
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
    metrics, _ = self.evaluate(batch, **loss)
    self.assertGreater(metrics["value_clip_share"], 0.0)


def _tempered_batch():
  B, K, T = 2, 3, 4
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


def _tempered_loss(name):
  config = base_config.make(loss__name=name, loss__scale="paper")
  batch, logprobs = _tempered_batch()

  @jax.jit
  def run(logprobs, batch):
    batch, beta = train_step.temper(
        batch,
        jnp.float32(BETA),
        tau=jnp.float32(TAU),
        gamma=jnp.float32(GAMMA),
    )
    return objective.make_pure_loss(config)(
        logprobs, {"log_z": jnp.array([LOG_Z])}, batch, beta
    )

  loss, totals = run(logprobs, batch)
  sums = lambda x: np.asarray((x * batch.completion_mask).sum(-1))
  seq, ref = sums(logprobs), sums(batch.ref_logprobs)
  log_r = (ref / GAMMA + np.asarray(batch.rewards) / BETA) / TAU
  return loss, totals, seq, ref, log_r


class TemperTest(absltest.TestCase):

  def test_learned_log_z_equals_the_formula(self):
    loss, totals, seq, ref, log_r = _tempered_loss("tb_learned_z")
    np.testing.assert_allclose(
        loss, np.square(LOG_Z + seq - log_r).mean(), rtol=1e-4
    )
    # The reported KL is to the untempered reference.
    value, weight = totals["kl"]
    np.testing.assert_allclose(value / weight, (seq - ref).mean(), rtol=1e-4)

  def test_vargrad_equals_the_formula(self):
    loss, _, seq, _, log_r = _tempered_loss("tb")
    np.testing.assert_allclose(
        loss, np.var(seq - log_r, axis=1).mean(), rtol=1e-4
    )

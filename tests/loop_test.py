# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop's lag is exact, and its parts compile once."""

import dataclasses
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from tba_jax import loop as loop_lib
from tba_jax import schedule as schedule_lib
from tba_jax.config import load
from tba_jax.config import variants
from tba_jax.learning import device_work
from tba_jax.learning import train_step
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.replay import prompt_order
from tba_jax.tasks import base
from tba_jax.tools import sweep
from tests.support import base_config

staleness = variants.import_config("configs/staleness.py")

_FILE = str(pathlib.Path(staleness.__file__))
_STEPS = 6


class LoopTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = load.load_config(
        f"{_FILE}:smoke",
        [
            "init=scratch",
            # Large steps distinguish versions.
            "sweep.objectives=rloo: loss.name=rloo"
            " optimizer.learning_rate=0.03;"
            "ppo: loss.name=ppo loss.ratio_clip=0.2;"
            # Splits groups, and has different batches.
            "cut: loss.name=rloo train.micro_batch_completions=1"
            " train.completions_per_prompt=2 train.prompts_per_batch=8",
            "sweep.staleness_steps=0,2",
            "sweep.mini_batches=3",
            "sweep.seeds=0,1",
            "evaluate.every_steps=0",
        ],
    )
    cls.runs = {run.name: run for run in sweep.expand_runs(cls.config)}
    cls.bench = sweep.Bench(cls.config, "")
    cls.addClassCleanup(cls.bench.close)

  def make_loop(self, name):
    run = self.runs[name]
    config = run.lag.apply(run.config)
    config.seed = run.seed
    return self.bench.loops.make(config, run.objective)

  def watch(self, name):
    """Trains; returns the params before each step, and the batches."""
    loop = self.make_loop(name)
    params, batches = [jax.device_get(loop.learner.params)], []
    place = device_work.DeviceWork.place

    def watched(work, *args):
      batch, computed = place(work, *args)
      batches.append(jax.device_get(batch))
      return batch, computed

    with mock.patch.object(device_work.DeviceWork, "place", watched):
      loop.train(lambda *_: params.append(jax.device_get(loop.learner.params)))
    return params, batches

  @parameterized.parameters(
      ("rloo-s0-seed0", [0, 1, 2, 3, 4, 5]),
      ("rloo-s2-seed0", [0, 0, 0, 1, 2, 3]),
      ("rloo-N3-seed0", [0, 0, 0, 3, 3, 3]),
  )
  def test_samples_each_batch_with_its_version(self, name, versions):
    params, batches = self.watch(name)
    self.assertLen(batches, _STEPS)
    model = self.bench.loops.policy.model

    @jax.jit
    def logprobs(params, batch):
      values_BxKxT = logprobs_lib.completion_logprobs(
          model,
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          temperature=1.0,
      )
      return values_BxKxT * batch.completion_mask

    gap = lambda version, batch: np.abs(
        logprobs(params[version], batch) - batch.behavior_logprobs
    ).max()
    for step, (version, batch) in enumerate(zip(versions, batches)):
      self.assertLess(gap(version, batch), 1e-4)
      for other in {*range(_STEPS)} - {version}:
        self.assertGreater(gap(other, batch), 1e-2)
      self.assertEqual(set(batch.staleness_steps.ravel()), {step - version})

  def test_each_objective_has_reference_of_its_batches(self):
    for name in ("rloo-s0-seed0", "cut-s0-seed0"):
      # The reference samples the first batch.
      _, (batch, *_) = self.watch(name)
      counted = batch.completion_mask > 0
      np.testing.assert_allclose(
          batch.ref_logprobs[counted],
          batch.behavior_logprobs[counted],
          atol=1e-4,
          err_msg=name,
      )

  def test_counts_only_sampled_tokens(self):
    loop = self.make_loop("rloo-s0-seed0")
    sampler = self.bench.loops.sampler
    masks, batches = [], []

    def sample(*args, **kwargs):
      # An environment wrote the first token of each completion.
      completions = [
          dataclasses.replace(
              c,
              sampled_mask=c.sampled_mask & (np.arange(c.tokens.shape[1]) > 0),
          )
          for c in inner(*args, **kwargs)
      ]
      masks.extend(c.sampled_mask for c in completions)
      return completions

    inner, place = sampler.sample, device_work.DeviceWork.place

    def watched(work, batch, num_missing):
      batches.append(batch)
      return place(work, batch, num_missing)

    with (
        mock.patch.object(sampler, "sample", sample),
        mock.patch.object(device_work.DeviceWork, "place", watched),
    ):
      loop.train()
    self.assertLen(batches, _STEPS)
    sampled = sum(mask.sum() for mask in masks)
    self.assertEqual(sum(b.completion_mask.sum() for b in batches), sampled)
    for batch in batches:
      self.assertEqual(batch.completion_mask[..., 0].sum(), 0)

  def test_compiles_once_for_all_lags_and_seeds(self):
    self.bench.run(self.runs["rloo-s0-seed0"])
    with mock.patch.object(train_step, "hold_params") as traced:
      for name in ("rloo-s2-seed1", "rloo-N3-seed0"):
        self.bench.run(self.runs[name])
    traced.assert_not_called()

  def test_prompts_and_samples_do_not_depend_on_lag(self):
    _, batches = self.watch("rloo-s0-seed0")
    _, late = self.watch("rloo-s2-seed0")
    for now, then in zip(batches, late):
      np.testing.assert_array_equal(now.prompt_tokens, then.prompt_tokens)
    np.testing.assert_array_equal(
        batches[0].completion_tokens, late[0].completion_tokens
    )
    _, other = self.watch("rloo-s0-seed1")
    self.assertNotEqual(
        batches[0].completion_tokens.tolist(),
        other[0].completion_tokens.tolist(),
    )

  def test_result_repeats_and_is_plain_json(self):
    run = self.runs["rloo-s2-seed0"]
    result = self.bench.run(run)
    again = self.bench.run(run)
    self.assertEqual(result["curve"], again["curve"])
    self.assertEqual(result, json.loads(json.dumps(result)))
    before, after = result["curve"]
    self.assertEqual((before["step"], after["step"]), (0, _STEPS))
    self.assertAlmostEqual(before["kl"], 0.0, places=4)
    self.assertGreater(after["kl"], 1e-3)
    # An untrained model is about uniform over 6 letters, ":" and other tokens.
    self.assertBetween(before["ref_perplexity"], 6, 12)
    self.assertIsNone(result["diverged_step"])

  def test_value_model_learns_at_each_step(self):
    loop = self.make_loop("ppo-s2-seed0")
    value = lambda: jax.device_get(loop.learner.work.state.loss_params["value"])
    values, nonfinite = [value()], []

    def watch(step, draw, metrics):
      values.append(value())
      nonfinite.append(metrics["nonfinite"])

    loop.train(watch)
    self.assertEqual(nonfinite, [0.0] * _STEPS)
    for before, after in zip(values, values[1:]):
      gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
      self.assertGreater(max(jax.tree.leaves(gaps)), 1e-5)

  def test_value_snapshot_lasts_one_round_at_round_lags(self):
    for name, held in (("s2", set()), ("N3", {"loss_params"}), ("s0", set())):
      state = self.make_loop(f"ppo-{name}-seed0").learner.work.state
      self.assertEqual(set(state.proximal_params), held, name)

  def test_refuses_group_of_another_version(self):
    loop = self.make_loop("rloo-s2-seed0")

    def too_late(prompts, params, version):
      return loop.collector(prompts, params, version + 1)

    with self.assertRaisesRegex(RuntimeError, r"position 0 .* \[1\], not 0"):
      dataclasses.replace(loop, collector=too_late).train()

  def log_config(self, rewards):
    """Returns the config of a run with logged completions."""
    task = self.bench.loops.policy.task
    lines = [
        json.dumps(
            {
                "prompt": task.prompt(base.TRAIN, i),
                "completions": ["a", "b"],
                **rewards,
            }
        )
        for i in range(task.num_prompts(base.TRAIN))
    ]
    run = self.runs["rloo-s2-seed0"]
    config = run.lag.apply(run.config)
    config.loss.name = "tb"
    config.offline.path = self.create_tempfile(
        content="\n".join(lines)
    ).full_path
    return config

  def test_task_judges_log_without_rewards(self):
    config = self.log_config({})
    config.offline.reward_field = ""
    config.loss.reward_weight = 0.5
    loop = self.bench.loops.make(config, "tb")
    task, groups = self.bench.loops.policy.task, []
    loop.watching(groups.extend).train(should_stop=lambda: bool(groups))
    rewards = np.concatenate([group.rewards for group in groups])
    expected = [
        0.5 * task.reward(base.TRAIN, group.prompt_id, "ab"[s % 2])
        for group in groups
        for s in range(group.num_completions)
    ]
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    self.assertGreater(len(set(expected)), 1)

  def test_mixes_offline_groups_with_fresh_ones(self):
    config = self.log_config({"rewards": [7.0, 7.0]})
    config.offline.fraction = 0.5
    loop = self.bench.loops.make(config, "tb")
    draws = []
    loop.train(lambda step, draw, metrics: draws.append(draw))
    num_logged = num_live = 0
    for step, draw in enumerate(draws):
      logged = draw.rewards == 7.0
      self.assertEqual(set(draw.versions[logged].tolist()) - {-1}, set())
      live = set(draw.versions[~logged].tolist())
      self.assertEqual(live - {max(step - 2, 0)}, set())
      num_logged += logged.sum()
      num_live += (~logged).sum()
    self.assertGreater(num_logged, 0)
    self.assertGreater(num_live, 0)

  def test_refuses_schedule_without_pinned_version(self):
    loop = self.make_loop("rloo-s2-seed0")
    free = dataclasses.replace(loop.schedule, lockstep=False)
    with self.assertRaisesRegex(ValueError, "search.lockstep = False"):
      dataclasses.replace(loop, schedule=free).train()

  def test_nonfinite_step_ends_run(self):
    name = "rloo-s0-seed0"
    train = device_work.DeviceWork.train

    def broken(work, batch):
      # A gradient may be infinite although the loss is finite.
      broken_now = int(work.state.step) == 2
      return train(work, batch) | ({"nonfinite": 1.0} if broken_now else {})

    with mock.patch.object(device_work.DeviceWork, "train", broken):
      result = self.bench.run(self.runs[name])
    self.assertEqual(result["diverged_step"], 2)
    self.assertEqual(result["versions"], [0, 1, 2])
    self.assertLen(result["curve"], 1)

  def test_stops_on_request(self):
    asked = iter([False, False, True])
    with self.assertRaisesRegex(sweep.SweepInterrupted, "at step 2"):
      self.bench.run(
          self.runs["rloo-s0-seed0"], should_stop=lambda: next(asked)
      )


class OrderTest(absltest.TestCase):

  def test_next_round_is_drawn_after_current_is_recorded(self):
    """As in the trainer's process; a round without prompts has no record."""
    calls = []
    order = mock.Mock(spec=prompt_order.PromptOrder)
    order.extend.side_effect = lambda limit: calls.append(("extend", limit))
    order.note.side_effect = lambda group: calls.append(
        ("note", group.position)
    )
    order.prompt.return_value = (0, 0)
    rounds = schedule_lib.Rounds(
        num_prompts=2, round_steps=2, lag_rounds=1, num_steps=4
    )

    def collect(prompts, params, version):
      del params
      return [
          mock.Mock(
              position=position, num_tokens=position % 2,
              versions=np.array([version]),
          )
          for position, *_ in prompts
      ]  # fmt: skip

    config, buffer = base_config.make(), mock.MagicMock()
    buffer.rewarded.side_effect = lambda group: group
    source = loop_lib.Inline(
        config, lambda: None, collect, rounds, buffer, order
    )
    self.assertLen(list(source), 4)
    changed = [call for i, call in enumerate(calls) if call not in calls[:i]]
    self.assertEqual(
        changed, [("extend", 2), ("note", 1), ("extend", 4), ("note", 3)]
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for the plan's bounds and for calibrating it by a run."""

import json
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import settings
from tba_jax.programs import plan
from tba_jax.training import shard_report
from tests.monitor.report import fake_run


class PlanSpeedTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()
    self.shape = plan.model_of(self.config)

  def test_bounds_by_hand(self):
    """The base config on one H100: 3 layers, width 64, 16 + 24 tokens."""
    vocab = self.shape.vocab_size
    # 4 projections of 64 x 64, 3 of 64 x 172, two norms; a norm and the head.
    matmul = 3 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 64 + 64 * vocab
    leaves = shard_report.model_leaves(self.shape)
    self.assertEqual(plan.matmul_params(leaves, self.shape), matmul)
    params_bytes = 4 * (matmul + 64 * vocab)
    speed = plan.bounds(self.config, self.shape, ("h100", "h100"))
    # A decode step is bound by memory: params, and 256 rows of 28 tokens' keys
    # and values of 3 layers in bfloat16.
    step_s = (params_bytes + 256 * 28 * 2 * 3 * 64 * 2) / 3350e9
    # 32 x 8 completions of 24 tokens are 24 steps; the prompts' 512 tokens.
    prompt_flops = 512 * (2 * matmul + 4 * 3 * 64 * 8)
    prompts_s = max(prompt_flops / 989e12, params_bytes / 3350e9)
    self.assertAlmostEqual(speed.sample_s / (24 * step_s + prompts_s), 1.0)
    # 4 forward passes over 512 + 256 x 24 tokens, bound by products.
    tokens = 512 + 256 * 24
    attention = 4 * 3 * 64 * (512 * 8 + 256 * 24 * 28)
    flops = 4 * (2 * matmul * tokens + attention)
    self.assertAlmostEqual(speed.train_s / (flops / 989e12), 1.0)

  def test_devices_share_the_work_of_a_step(self):
    one = plan.bounds(self.config, self.shape, ("v4", "v4"))
    self.config.mesh.data = 4
    four = plan.bounds(self.config, self.shape, ("v4", "l4"))
    self.assertAlmostEqual(four.train_s * 4 / one.train_s, 1.0)
    self.assertGreater(four.sample_s, one.sample_s)

  def test_a_searcher_s_devices_share_rows_and_products(self):
    self.config.sampling.num_rows = 2**16
    bound = lambda: plan.bounds(self.config, self.shape, ("v4", "v4"))
    one = bound().sample_s
    self.config.search.mesh.data = 4
    # All prefill all prompts, and read all params.
    self.assertBetween(4 * bound().sample_s / one, 1.0, 1.3)
    self.config.search.mesh.update(data=1, tensor=2)
    speed = bound()
    self.assertAlmostEqual(2 * speed.sample_s / one, 1.0)
    self.assertIn("searcher 2 of v4", dict(speed.rows)["devices"])

  def test_activations_by_remat(self):
    c = self.shape
    kept = [
        plan.activation_bytes(self.config, c, remat=name, dtype="bfloat16")[1]
        for name in ("full", "dots", "none")
    ]
    self.assertEqual(kept, sorted(kept))
    self.config.train.remat = "full"
    rows = dict(plan.trainer_rows(self.config, c, "h100"))
    words = rows["activations, remat full (estimate)"]
    self.assertStartsWith(words, f"{plan.format_bytes(kept[0])}; were it none ")
    # 32 x (16 + 8 x 24) tokens: the input of 3 layers of 64, and one layer of
    # 5 x 64 + 4 x 64 + 3 x 172 and 4 heads' weights to 40 tokens.
    tokens = 32 * (16 + 8 * 24)
    layer = tokens * (9 * 64 + 3 * 172) + 256 * 24 * 4 * 40
    self.assertEqual(kept[0], 2 * (3 * tokens * 64 + layer))

  def test_the_first_moment_may_be_smaller(self):
    name = "optimizer (Adam's two moments)"
    rows = lambda: dict(plan.trainer_rows(self.config, self.shape, ""))
    count = plan.num_params(shard_report.model_leaves(self.shape))
    self.assertEqual(rows()[name], plan.format_bytes(8 * count))
    self.config.optimizer.state_dtype = "bfloat16"
    self.assertEqual(rows()[name], plan.format_bytes(6 * count))

  def test_a_cpu_computes_in_float32(self):
    dtype = lambda kind: plan.compute_dtype(self.config, self.shape, kind)
    self.assertEqual((dtype("cpu"), dtype("l4")), ("float32", "bfloat16"))
    self.config.model.compute_dtype = "float32"
    self.assertEqual(dtype("l4"), self.shape.compute_dtype)

  def test_every_kind_has_a_plan(self):
    for kind in plan.DEVICES:
      rows = dict(plan.plan(self.config, None, [kind])[-1][1])
      self.assertIn("synchron", rows["asynchrony"])

  @parameterized.parameters(
      (8.0, 1.0, 1, "will not help: training is so short.* 8 searchers"),
      (1.0, 80.0, 4, "sampling is so short.* 1 searcher would do."),
      # None can be spared of one.
      (1.0, 8.0, 1, "will not help: sampling is so short.* as fast.$"),
      (8.0, 2.0, 4, "Asynchrony helps: a step takes 1/2.00"),
  )
  def test_the_verdict(self, sample_s, train_s, count, words):
    self.config.search.num_searchers = count
    rows = dict(
        plan.speed_rows(self.config, plan.Speed(sample_s, train_s, []), 4096)
    )
    self.assertRegex(rows["asynchrony"], words)

  def test_taking_turns_is_told(self):
    self.config.search.lockstep = True
    speed = plan.Speed(2.0, 2.0, [])
    rows = dict(plan.speed_rows(self.config, speed, 4096))
    # 32 groups in 4 s of 8 x 24 tokens of 8 bytes and 16 of 4.
    self.assertEqual(plan.group_bytes(self.config), 1600)
    self.assertEqual(
        rows["groups to the trainer"], "8 a second, 12.5 KB a second"
    )
    self.assertEqual(
        rows["versions to the searchers, at most"],
        "4 KB each, 1 KB a second to all of them",
    )
    self.assertRegex(rows["asynchrony"], "lockstep=True.* up to 2.00 times")
    self.assertEqual(rows["a step then takes"], "4 s with 1 searcher")
    self.assertEqual(rows["expected overlap"], "none")
    self.assertStartsWith(rows["expected staleness"], "0 steps")

  def test_rounds_sample_for_their_own_steps(self):
    self.config.rounds.mini_batches = 4
    self.config.rounds.passes = 2
    model = plan.make_pipeline(self.config, plan.Speed(16.0, 1.0, []))
    # 32 prompts a batch, each batch twice: 16 new prompts a step.
    self.assertEqual(model.groups_per_step, 16)
    self.assertEqual(model.sample_s, 1.0)
    self.assertEqual(model.ahead_groups, 2 * 4 * 32)


class CalibrateTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.config = settings.get_config()

  def _make_run(self, **summary):
    fake_run.make_run(self.workdir, num_steps=40)
    path = pathlib.Path(self.workdir)
    config = json.loads((path / "config.json").read_text())
    config["config"]["train"]["completions_per_prompt"] = 8
    (path / "config.json").write_text(json.dumps(config))
    (path / "summary.json").write_text(json.dumps(summary))

  def test_seconds_a_completion_are_those_of_the_run(self):
    self._make_run(generate_busy_s=64.0, train_busy_s=20.0)
    # Two searchers were busy 64 s for 512 x 40 completions, and the trainer 20
    # s for 32 x 8 x 40; this config samples and trains 256 a step.
    speed = plan.calibrated_speed(self.config, self.workdir)
    self.assertAlmostEqual(speed.sample_s, 2 * 64 / (512 * 40) * 256)
    self.assertAlmostEqual(speed.train_s, 20 / (256 * 40) * 256)

  def test_the_plan_takes_the_run_in_place_of_a_roofline(self):
    self._make_run(generate_busy_s=64.0, train_busy_s=20.0)
    operands = ["l4", f"--calibrate={self.workdir}"]
    sections = dict(plan.plan(self.config, None, operands))
    self.assertEqual(dict(sections["speed"])["measured in"], self.workdir)
    self.assertIn(
        "160.0 completions/s", dict(sections["speed"])["one searcher"]
    )
    self.assertNotIn("speed at most (roofline)", sections)
    rows = dict(sections["asynchrony"])
    self.assertStartsWith(rows["searchers that balance one trainer"], "4;")

  def test_a_run_without_measurements_is_refused(self):
    with self.assertRaisesRegex(ValueError, "nothing is measured there"):
      plan.read_measured(self.workdir)
    with self.assertRaisesRegex(ValueError, "no run directory"):
      plan.read_measured(os.path.join(self.workdir, "none"))


if __name__ == "__main__":
  absltest.main()

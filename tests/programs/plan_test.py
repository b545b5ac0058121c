# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for plan."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax

from tba_jax import types
from tba_jax.config import settings
from tba_jax.models import hf_config
from tba_jax.models import transformer
from tba_jax.programs import plan
from tba_jax.training import shard_report
from tests.monitor.report import fake_run


def _rows(config, workdir=None, operands=()):
  sections = plan.plan(config, workdir, operands)
  return {name: value for _, rows in sections for name, value in rows}


class PlanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()

  @parameterized.parameters(1, 2)
  def test_what_process_0_sends(self, num_processes):
    config = self.config
    config.trainer.num_processes = num_processes
    config.mesh.data = 8
    B, K = config.train.prompts_per_batch, config.train.completions_per_prompt
    P = config.sampling.max_prompt_tokens
    T = config.sampling.max_completion_tokens
    draw = {"prompt": (B, P), "completion": (B, K, T), "number": (B, K)}
    arrays = types.Batch(
        **dict.fromkeys(("prompt_tokens", "prompt_mask"), draw["prompt"]),
        **dict.fromkeys(
            ("completion_tokens", "completion_mask", "behavior_logprobs",
             "ref_logprobs"), draw["completion"]
        ),
        **dict.fromkeys(("rewards", "staleness_steps"), draw["number"]),
    )  # fmt: skip
    shapes = [shape for shape in vars(arrays).values() if shape]
    batch = 4 * sum(math.prod(shape) for shape in shapes)
    self.assertEqual(plan.sent_bytes(config), batch)
    shown = "batch that process 0 sends" in _rows(config)
    self.assertEqual(shown, num_processes > 1)

  @parameterized.product(tie=(False, True), kv_heads=(4, 2))
  def test_parameters_are_those_of_the_model(self, tie, kv_heads):
    self.config.model.tie_embeddings = tie
    self.config.model.num_kv_heads = kv_heads
    shape = plan.model_of(self.config)
    model = transformer.make_model(shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    leaves = shard_report.model_leaves(shape)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    self.assertEqual(plan.num_params(leaves), count)
    # Shapes with their axes, not only their sum.
    is_axes = lambda node: isinstance(node, tuple)
    axes = jax.tree.leaves(model.logical_axes, is_leaf=is_axes)
    actual = sorted(
        (leaf.shape, names)
        for leaf, names in zip(jax.tree.leaves(params), axes, strict=True)
    )
    self.assertEqual(sorted(leaves.values()), actual)

  def test_memory_is_by_device(self):
    alone = _rows(self.config)
    self.config.mesh.fsdp = 2
    shared = _rows(self.config)
    self.assertEqual(alone["parameters"], shared["parameters"])
    self.assertNotEqual(alone["params"], shared["params"])
    self.assertIn(
        "2: data 1 x fsdp 2 x sequence 1 x tensor 1", shared["devices"]
    )

  def test_what_a_mesh_does_not_split_is_told(self):
    self.assertNotIn("whole on every device", _rows(self.config))
    self.config.mesh.tensor = 2
    rows = _rows(self.config)
    self.assertEqual(
        rows["final_norm.scale"],
        "64, 0.00 MB; config.sharding.width=tensor would split it",
    )
    self.assertStartsWith(rows["whole on every device"], "3 of 12 leaves")
    self.config.mesh.tensor = 5
    self.assertEqual(
        _rows(self.config)[""],
        "NO: head.kernel: vocab of 17 does not divide by 5",
    )
    with contextlib.redirect_stdout(io.StringIO()):
      self.assertEqual(plan.run(self.config, None), 2)

  def test_tokens_are_split_over_devices(self):
    name = "logits of a micro-batch, with gradient"
    count = lambda: plan.activation_bytes(
        self.config, plan.model_of(self.config), remat="full", dtype="float32"
    )
    self.config.sampling.max_prompt_tokens = 16
    self.config.sampling.max_completion_tokens = 18
    logits, kept = count()
    self.assertNotIn("sampling.max_prompt_tokens", _rows(self.config))
    self.config.mesh.sequence = 4
    # 18 tokens are padded to 20: 5 of 18 a device.
    self.assertEqual(count()[0], logits * 5 // 18)
    self.assertBetween(count()[1], 0.2 * kept, 0.5 * kept)
    rows = _rows(self.config)
    self.assertEqual(rows[name], plan.format_bytes(count()[0]))
    self.assertEqual(
        rows["sampling.max_prompt_tokens"], "16 tokens, 4 a device"
    )
    self.assertEqual(
        rows["sampling.max_completion_tokens"],
        "18 tokens, 5 a device: 18 does not divide by 4, so it is padded to 20",
    )
    # An axis that prompts are split over has no tokens.
    self.config.sharding.batch = "data,fsdp,sequence"
    self.assertEqual(count()[0], logits // 4)

  def test_a_searcher_s_devices_are_counted_and_share_memory(self):
    sampling, mesh = self.config.sampling, self.config.search.mesh
    length = sampling.max_prompt_tokens + sampling.max_completion_tokens
    rows = lambda: dict(
        plan.searcher_rows(self.config, plan.model_of(self.config), "cpu")
    )
    params = "params, twice while a version comes in"
    cache = lambda count: f"cache of {count} rows of {length} tokens"
    c = plan.model_of(self.config)
    self.assertNotIn("in all", _rows(self.config)["searchers"])
    each = 2 * 3 * 64 * 4 * length  # keys and values of 3 layers, float32
    self.assertEqual(rows()[cache(256)], plan.format_bytes(256 * each))
    self.config.search.num_searchers = 3
    mesh.update(data=2, tensor=2)
    self.assertStartsWith(
        _rows(self.config)["searchers"],
        "3 of one process each with 4 devices, 12 in all",
    )
    self.assertEqual(rows()[cache(128)], plan.format_bytes(64 * each))
    count = plan.searcher_params(self.config, c)
    whole = plan.num_params(shard_report.model_leaves(c))
    self.assertBetween(count / whole, 0.5, 0.6)
    self.assertEqual(rows()[params], plan.format_bytes(2 * 4 * count))

  def test_adapters_have_the_moments(self):
    name = "optimizer (Adam's two moments)"
    self.assertIn("reference", _rows(self.config))
    self.config.lora.rank = 2
    self.config.lora.targets = "q,down"
    rows = _rows(self.config)
    self.assertNotIn("reference", rows)
    # 3 layers, of each 2 (64 + 4 x 16) and 2 (172 + 64), two moments.
    count = 3 * (2 * 128 + 2 * 236)
    self.assertEqual(rows["adapters"], plan.format_bytes(4 * count))
    self.assertEqual(rows[name], plan.format_bytes(8 * count))

  def test_half_the_first_moment(self):
    name = "optimizer (Adam's two moments)"
    whole = _rows(self.config)[name]
    self.config.optimizer.state_dtype = "bfloat16"
    self.assertNotEqual(_rows(self.config)[name], whole)

  def test_a_value_model_needs_memory_too(self):
    name = "value model, all of it (estimate)"
    plain = _rows(self.config)
    self.assertNotIn(name, plain)
    self.config.loss.name = "ppo"
    rows = _rows(self.config)
    self.assertIn(name, rows)
    self.assertNotEqual(
        rows["sum a device (estimate)"], plain["sum a device (estimate)"]
    )

  def test_batches_that_do_not_divide_are_told(self):
    self.assertEqual(_rows(self.config)["micro-batches a step"],
                     "1 of 32 prompts")  # fmt: skip
    self.config.train.micro_batch_prompts = 12
    self.assertStartsWith(_rows(self.config)["micro-batches a step"], "NO: 32")
    with contextlib.redirect_stdout(io.StringIO()):
      self.assertEqual(plan.run(self.config, None), 2)
    self.config.train.micro_batch_prompts = 16
    self.config.mesh.data = 3
    self.assertStartsWith(_rows(self.config)["shards of a micro-batch"], "NO")

  def test_staleness_bound(self):
    self.config.search.lead_steps = 2
    self.config.publish.every_steps = 3
    self.assertStartsWith(plan.staleness_bound(self.config), "5 steps")
    self.config.replay.recent_fraction = 0.5
    self.assertIn("replayed data is older", plan.staleness_bound(self.config))
    self.config.search.lockstep = True
    self.assertStartsWith(plan.staleness_bound(self.config), "0 steps")

  def test_searchers_are_unknown_without_a_measured_run(self):
    self.assertStartsWith(plan.expected_searchers(None), "unknown")
    with tempfile.TemporaryDirectory() as workdir:
      self.assertStartsWith(plan.expected_searchers(workdir), "unknown")

  def test_searchers_follow_from_an_earlier_run(self):
    with tempfile.TemporaryDirectory() as workdir:
      fake_run.make_run(workdir, num_steps=50)
      # Two searchers busy 70 % beside a trainer busy 95 % of the time.
      self.assertStartsWith(plan.expected_searchers(workdir), "2, measured")
      with open(os.path.join(workdir, "summary.json"), "w") as f:
        json.dump({"generate_busy_s": 30.0, "train_busy_s": 14.0}, f)
      self.assertStartsWith(plan.expected_searchers(workdir), "5, measured")

  def test_a_hugging_face_folder_gives_the_shape(self):
    with tempfile.TemporaryDirectory() as folder:
      shape = plan.model_of(self.config)
      with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**hf_config.to_hf(shape), "vocab_size": 999}, f)
      self.config.init = folder
      self.assertEqual(plan.model_of(self.config).vocab_size, 999)
      # A folder that fine-tuning starts from, damaged: named, with its key.
      with open(os.path.join(folder, "config.json"), "w") as f:
        f.write("{")
      self.config.init, self.config.sft.init = "sft", folder
      with self.assertRaisesRegex(ValueError, f"config.sft.init='{folder}'"):
        plan.model_of(self.config)
      self.config.init = folder
    with self.assertRaisesRegex(ValueError, "config.init="):
      plan.model_of(self.config)

  def test_the_program_prints_the_plan(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(plan.run(self.config, None), 0)
    self.assertIn("staleness of fresh data", out.getvalue())
    with contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(plan.run(self.config, None, ["x"]), 2)

  @parameterized.parameters(
      ([], ("", ""), ""),
      (["H100"], ("h100", "h100"), ""),
      (["v5p", "v5e", "--calibrate=a"], ("v5p", "v5e"), "a"),
      (["--calibrate", "a", "l4"], ("l4", "l4"), "a"),
  )
  def test_operands(self, operands, kinds, run):
    self.assertEqual(plan.parse(operands), (kinds, run))

  def test_operands_that_are_refused(self):
    with self.assertRaisesRegex(ValueError, "'b200': allowed are a100-40, a1"):
      plan.parse(["b200"])
    with self.assertRaisesRegex(ValueError, "one kind of device"):
      plan.parse(["v4", "v4", "v4"])
    with self.assertRaisesRegex(ValueError, "--calibrate: needs"):
      plan.parse(["v4", "--calibrate"])

  def test_a_kind_says_what_fits(self):
    self.assertNotIn("fits", _rows(self.config))
    self.assertStartsWith(_rows(self.config, None, ["l4"])["fits"], "yes: ")
    self.config.train.prompts_per_batch = 2**20
    self.config.train.micro_batch_prompts = 2**20
    sections = dict(plan.plan(self.config, None, ["l4"]))
    fits = dict(sections["memory of a trainer device"])["fits"]
    self.assertStartsWith(fits, "NO: ")
    with contextlib.redirect_stdout(io.StringIO()):
      self.assertEqual(plan.run(self.config, None, ["l4"]), 2)

  @parameterized.parameters(
      (12, "12 B"), (2048, "2 KB"), (3 * 2**30, "3 GB"), (5000 * 2**30,
                                                          "5,000 GB")
  )  # fmt: skip
  def test_size(self, num_bytes, shown):
    self.assertEqual(plan.format_bytes(num_bytes), shown)

  def test_no_device_is_touched(self):
    code = (
        "import sys\nfrom tba_jax.config import settings\n"
        "from tba_jax.programs import plan\n"
        "plan.plan(settings.get_config(), None)\nsys.exit('jax' in sys.modules)"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes, divisibility, staleness and balance, worked out by hand."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
from safetensors import numpy

from tba_jax.config import settings
from tba_jax.models import hf_config
from tba_jax.models import transformer
from tba_jax.programs import plan
from tba_jax.programs import sizes
from tba_jax.system import accelerators
from tba_jax.tasks import red_team
from tba_jax.training import sharding
from tests.monitor.report import fake_run
from tests.support import tiny_model


def _rows(config, workdir=None, operands=()):
  sections = plan.plan(config, workdir, operands)
  return {name: value for _, rows in sections for name, value in rows}


class PlanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()

  @parameterized.product(tie=(False, True), kv_heads=(4, 2))
  def test_parameters_are_those_of_the_model(self, tie, kv_heads):
    self.config.model.tie_embeddings = tie
    self.config.model.num_kv_heads = kv_heads
    shape = sizes.model_of(self.config)
    model = transformer.make_model(shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    leaves = sizes.model_leaves(shape)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    self.assertEqual(
        sum(math.prod(shape) for shape, _ in leaves.values()), count
    )
    # Shapes with their axes, not only their sum.
    is_axes = lambda node: isinstance(node, tuple)
    axes = jax.tree.leaves(model.logical_axes, is_leaf=is_axes)
    actual = sorted(
        (leaf.shape, names)
        for leaf, names in zip(jax.tree.leaves(params), axes, strict=True)
    )
    self.assertEqual(sorted(leaves.values()), actual)

  def test_roles_on_a_single_gpu_share_a_process(self):
    found = accelerators.Accelerators("gpu", ("0",))
    with mock.patch.object(accelerators, "find", return_value=found):
      rows = _rows(self.config)
    self.assertStartsWith(rows["processes of `train`"], "one for trainer and")
    self.assertEqual(rows["trainer on this machine's gpus"], "0")
    self.assertNotIn("searcher on this machine's gpus", rows)

  @parameterized.parameters(
      ("cpu", True, 256, "auto", "bfloat16: width 256 on a CPU with"),
      ("cpu", True, 255, "auto", "float32: width 255"),
      ("cpu", True, 512, "float32", "float32: as set"),
      ("cpu", False, 512, "auto", "float32: this CPU has no AVX512_BF16"),
      ("gpu", True, 512, "auto", "auto: by the device, gpu"),
  )
  def test_the_dtype_that_is_computed_in(self, kind, fast, width, dtype, text):
    self.config.model.update(width=width, compute_dtype=dtype)
    found = accelerators.Accelerators(kind, ("0",) * (kind == "gpu"))
    with mock.patch.multiple(
        accelerators,
        find=lambda: found,
        multiplies_bfloat16=lambda: fast,
    ):
      self.assertStartsWith(_rows(self.config)["computes in"], text)

  def test_a_folder_s_width_counts(self):
    shape = tiny_model.make_model(width=512).config
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
    self.config.init = str(folder)
    with mock.patch.object(accelerators, "multiplies_bfloat16", lambda: True):
      self.assertEqual(sizes.compute_dtype(self.config)[0], "bfloat16")

  def test_parameters_that_a_mesh_does_not_split(self):
    self.assertNotIn("replicated on every device", _rows(self.config))
    self.config.mesh.tensor = 2
    rows = _rows(self.config)
    self.assertEqual(
        rows["trainer"], "2: data 1 x fsdp 1 x sequence 1 x tensor 2"
    )
    self.assertStartsWith(rows["replicated on every device"], "3 of 12 leaves")
    self.config.mesh.tensor = 5
    self.assertEqual(
        _rows(self.config)["head.kernel"],
        "NO: vocab of 17 does not divide by 5",
    )
    with contextlib.redirect_stdout(io.StringIO()):
      self.assertEqual(plan.run(self.config, None), 2)

  def test_groups_that_are_cut_are_told(self):
    name = "micro-batches a step"
    self.assertEqual(_rows(self.config)[name], "1 of 32 prompts")
    self.config.train.micro_batch_prompts = 12
    self.assertIn("12 prompts with 8 completions", _rows(self.config)[name])
    self.config.train.micro_batch_prompts = 16
    self.config.train.micro_batch_completions = 2
    self.assertIn("16 prompts with 2 completions", _rows(self.config)[name])

  def test_staleness_bound(self):
    self.config.search.lead_steps = 2
    self.config.publish.every_steps = 3
    self.assertStartsWith(plan.staleness_bound(self.config), "5 steps")
    self.config.replay.recent_fraction = 0.5
    self.assertIn("replayed data is older", plan.staleness_bound(self.config))
    self.config.search.lockstep = True
    self.assertStartsWith(plan.staleness_bound(self.config), "0 steps")

  def test_a_hugging_face_folder_gives_the_shape(self):
    with tempfile.TemporaryDirectory() as folder:
      shape = sizes.model_of(self.config)
      with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**hf_config.to_hf(shape), "vocab_size": 999}, f)
      self.config.init = folder
      self.assertEqual(sizes.model_of(self.config).vocab_size, 999)
      # A folder that fine-tuning starts from, damaged: named, with its key.
      with open(os.path.join(folder, "config.json"), "w") as f:
        f.write("{")
      self.config.init, self.config.sft.init = "sft", folder
      with self.assertRaisesRegex(ValueError, f"config.sft.init='{folder}'"):
        sizes.model_of(self.config)
      self.config.init = folder
    with self.assertRaisesRegex(ValueError, "config.init="):
      sizes.model_of(self.config)

  def test_the_program_prints_the_plan(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(plan.run(self.config, None), 0)
    self.assertIn("staleness of fresh data", out.getvalue())
    with contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(plan.run(self.config, None, ["x"]), 2)

  def test_a_kind_says_what_fits(self):
    self.assertNotIn("fits", _rows(self.config))
    self.assertStartsWith(_rows(self.config, None, ["l4"])["fits"], "yes: ")
    self.config.sampling.num_rows = 2**24
    self.assertStartsWith(_rows(self.config, None, ["l4"])["fits"], "NO: ")
    with contextlib.redirect_stdout(io.StringIO()):
      self.assertEqual(plan.run(self.config, None, ["l4"]), 2)

  @parameterized.parameters(
      ([], [], ""),
      (["H100"], ["h100"], ""),
      (["v5p", "v5e", "--calibrate=a"], ["v5p", "v5e"], "a"),
      (["v5e:4x4", "v5e:2x2"], ["v5e:4x4", "v5e:2x2"], ""),
  )
  def test_operands(self, operands, kinds, run):
    self.assertEqual(plan.parse(operands), (kinds, run))

  @parameterized.parameters(
      (["b200"],), (["v4", "v4", "v4"],), (["v4", "v5e:4x4"],)
  )
  def test_operands_that_are_refused(self, operands):
    with self.assertRaises(ValueError):
      plan.parse(operands)

  def test_no_device_is_touched(self):
    code = (
        "import sys\nfrom tba_jax.config import settings\n"
        "from tba_jax.programs import plan\n"
        "list(plan.plan(settings.get_config(), None))\n"
        "sys.exit('jax' in sys.modules)"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)


_LEAVES = {
    "a": ((4, 6, 8), ("layers", "width", "mlp")),
    "b": ((8,), ("x",)),
    "c": ((3,), ("x",)),
}
_RULES = {"layers": "", "width": "fsdp", "mlp": "tensor,fsdp", "x": ""}
_MESH = {"data": 1, "fsdp": 2, "tensor": 4}


class ShardTest(absltest.TestCase):

  def test_a_mesh_axis_splits_a_leaf_once(self):
    a, b, _ = sizes.shard(_LEAVES, _RULES, _MESH)
    # fsdp splits width, so that tensor alone splits mlp.
    self.assertEqual(a.parts, (1, 2, 4))
    self.assertEqual(a.device_size, 4 * 3 * 2)
    self.assertEqual(b.device_size, 8)

  def test_agrees_with_the_shardings_of_the_trainer(self):
    model = tiny_model.make_model()
    rules = settings.get_config().sharding
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    is_axes = lambda node: isinstance(node, tuple)
    axes, _ = jax.tree_util.tree_flatten_with_path(
        model.logical_axes, is_leaf=is_axes
    )
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="."): sharding._spec(
            rules, names
        )
        for path, names in axes
    }
    found = sizes.shard(sizes.model_leaves(model.config), rules, mesh)
    self.assertLen(found, len(specs))
    for leaf in found:
      parts = [
          math.prod(mesh[a] for a in ([p] if isinstance(p, str) else p or ()))
          for p in specs[leaf.name]
      ]
      self.assertEqual(leaf.parts, tuple(parts), leaf.name)


class MemoryTest(parameterized.TestCase):
  """All that a device holds counts towards whether a run fits."""

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()
    self.config.evaluate.every_steps = 0
    self.shape = sizes.model_of(self.config)
    self.params = 4 * sizes.device_size(
        sizes.model_leaves(self.shape), self.config.sharding, self.config.mesh
    )

  def trainer(self, kind="cpu"):
    return plan.trainer_memory(self.config, self.shape, kind)

  def searcher(self, kind="cpu"):
    return plan.searcher_memory(self.config, self.shape, kind)

  def totals(self):
    """Returns the bytes of a trainer's and of a searcher's device."""
    return sum(self.trainer().values()), sum(self.searcher().values())

  def make_folder(self, name, dtype="float32"):
    """Makes a folder without weights, of a model of half the policy's layers.

    Returns it and the bytes of its params.
    """
    shape = dataclasses.replace(
        self.shape, num_layers=1, num_labels=1, param_dtype=dtype
    )
    folder = pathlib.Path(self.create_tempdir().full_path, name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
    leaves = sizes.model_leaves(shape)
    return str(folder), sizes.BYTES[dtype] * sum(
        math.prod(shape) for shape, _ in leaves.values()
    )

  def make_encoder(self, num_params):
    folder = pathlib.Path(self.create_tempdir().full_path)
    # Encoders are float32 whatever the file has.
    tensors = {"a": np.zeros(num_params, np.float16)}
    numpy.save_file(tensors, folder / "model.safetensors")
    return str(folder)

  def added(self, before):
    return tuple(now - was for now, was in zip(self.totals(), before))

  def test_params_are_split_over_the_mesh(self):
    before = self.trainer()
    self.assertEqual(before["params"], self.params)
    self.assertEqual(before["optimizer (Adam's two moments)"], 2 * self.params)
    self.config.mesh.fsdp = 2
    self.assertBetween(self.trainer()["params"] / self.params, 0.5, 0.6)

  def test_an_evaluation_runs_on_the_devices_of_one_process(self):
    self.config.evaluate.update(batch_prompts=4096, num_completions=64)
    self.config.mesh.fsdp = 8
    alone = self.trainer()
    self.config.trainer.num_processes = 4
    held = self.trainer()
    name = "params that an evaluation decodes with"
    self.assertBetween(held[name] / alone[name], 3.0, 4.0)
    self.assertBetween(held[name] / self.params, 0.5, 0.6)
    self.assertEqual(held["params, gathered for an evaluation"], held[name])
    rows = "KV cache of an evaluation, 262144 rows"
    self.assertEqual(held[rows], 4 * alone[rows])

  def test_a_sampler_does_not_split_layers(self):
    self.config.search.mesh.data = 3
    self.config.sharding.layers = "data"
    params = self.searcher()["params, twice while a version comes in"]
    self.assertEqual(params, 2 * self.params)

  def test_the_reference_is_where_its_role_is(self):
    self.assertEqual(self.trainer()["reference"], self.params)
    self.assertNotIn("reference", self.searcher())
    self.config.reference.role = "searcher"
    self.assertNotIn("reference", self.trainer())
    self.assertEqual(self.searcher()["reference"], self.params)
    # Adapters have their base there already.
    self.config.lora.rank = 2
    self.assertNotIn("reference", self.searcher())

  def test_adapters_have_the_moments(self):
    self.config.lora.rank = 2
    self.config.lora.targets = "q,down"
    held = self.trainer()
    self.assertNotIn("reference", held)
    # 3 layers, of each 2 (64 + 4 x 16) and 2 (172 + 64), two moments.
    count = 3 * (2 * 128 + 2 * 236)
    self.assertEqual(held["adapters"], 4 * count)
    self.assertEqual(held["optimizer (Adam's two moments)"], 8 * count)

  def test_a_searcher_s_devices_share_cache_and_params(self):
    mesh = self.config.search.mesh
    # Keys and values of 3 layers of 64, float32.
    token = 2 * 3 * 64 * 4
    self.assertEqual(self.searcher()["KV cache of 256 rows"], 256 * 40 * token)
    # Where 8 completions share a prompt, of 16 tokens, in bfloat16.
    self.config.search.prompts_per_round = 32
    shared = self.searcher("h100")["KV cache of 256 rows"]
    self.assertEqual(shared, (32 * 16 + 256 * 24) * token // 2)
    # More completions than rows take turns, each row by itself.
    self.config.search.prompts_per_round = 33
    shared = self.searcher("h100")["KV cache of 256 rows"]
    self.assertEqual(shared, 256 * 40 * token // 2)
    mesh.update(data=2, tensor=2)
    held = self.searcher()
    self.assertEqual(held["KV cache of 128 rows"], 64 * 40 * token)
    params = held["params, twice while a version comes in"]
    self.assertBetween(params / self.params, 1.0, 1.2)

  def test_reward_model(self):
    before = self.totals()
    self.config.reward.where = "model"
    self.config.reward.model, size = self.make_folder("rm", "bfloat16")
    self.assertEqual(self.added(before), (size, size))
    # The trainer then holds two, and searchers none.
    self.config.reward.role = "trainer"
    self.assertEqual(self.added(before), (2 * size, 0))
    # Its devices share them; of the policy's vocabulary of 17, none is split.
    self.config.reward.where = "process"
    self.config.mesh.tensor = 2
    before = self.totals()
    self.config.reward.where = "model"
    self.assertBetween(self.added(before)[0] / size, 1.0, 1.1)

  def test_a_reward_model_that_is_not_trained_yet(self):
    before = self.totals()
    self.config.reward.where = "model"
    # As the policy, with a head of one row in place of 17.
    size = self.params - 4 * 16 * 64
    self.assertEqual(self.added(before), (size, size))

  def test_gold_model(self):
    before = self.totals()
    self.config.evaluate.judge, size = self.make_folder("gold")
    self.assertEqual(self.added(before), (size, 0))

  def test_models_of_red_teaming(self):
    with self.config.unlocked():
      self.config.task = {"name": "red_team", **red_team.RedTeam.FIELDS}
    before = self.totals()
    self.config.task.victim, victim = self.make_folder("victim")
    self.assertEqual(self.added(before), (victim, victim))
    self.config.task.classifier = "first_token"
    self.config.task.classifier_folder, guard = self.make_folder("guard")
    self.assertEqual(self.added(before), (victim + guard, victim + guard))
    self.config.task.classifier = "sequence"
    self.config.task.classifier_folder = self.make_encoder(1000)
    self.assertEqual(self.added(before), (victim + 4000, victim + 4000))
    self.config.task.encoder = self.make_encoder(100)
    self.assertEqual(self.added(before), (victim + 4400, victim + 4400))
    self.config.replay_filter.similarity = "cosine"
    self.assertEqual(self.added(before), (victim + 4800, victim + 4400))

  def test_value_model(self):
    before = self.totals()
    self.config.loss.name = "ppo"
    # Params, gradients and two moments; one row of a head in place of 17.
    self.assertEqual(self.added(before), (4 * (self.params - 4 * 16 * 64), 0))
    shape = dataclasses.replace(self.shape, num_layers=1, num_labels=1)
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
    self.config.loss.value_init = str(folder)
    self.assertBetween(self.added(before)[0], self.params, 3 * self.params)

  def test_an_evaluation_beside_training(self):
    self.config.evaluate.every_steps = 10
    rows = 64 * self.config.evaluate.num_completions
    name = f"KV cache of an evaluation, {rows} rows"
    # Keys and values in 3 layers of 64, float32, of 40 tokens.
    cache = rows * 40 * 2 * 3 * 64 * 4
    held = self.trainer()
    self.assertEqual(held[name], cache)
    self.assertEqual(held["params, copied for an evaluation"], self.params)
    decoding = held["params that an evaluation decodes with"]
    self.assertEqual(decoding, self.params)
    # A CPU's cache is float32 whatever it computes in.
    self.config.model.compute_dtype = "bfloat16"
    self.assertEqual(self.trainer()[name], cache)
    # In lockstep it takes turns with training, which needs more in bfloat16.
    self.config.search.lockstep = True
    self.config.evaluate.batch_prompts = 1
    self.assertIn("gradients", self.trainer("h100"))
    self.config.evaluate.batch_prompts = 2**20
    held = "\n".join(self.trainer())
    self.assertIn("KV cache", held)
    self.assertNotIn("gradients", held)

  def test_a_folder_without_a_model_is_refused(self):
    self.config.evaluate.judge = self.create_tempdir().full_path
    with self.assertRaisesRegex(ValueError, "config.evaluate.judge="):
      self.totals()


class BalanceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.config = settings.get_config()

  def make_run(self, generate_s, train_s):
    fake_run.make_run(self.workdir, num_steps=40)
    path = pathlib.Path(self.workdir)
    config = json.loads((path / "config.json").read_text())
    config["config"]["train"]["completions_per_prompt"] = 8
    (path / "config.json").write_text(json.dumps(config))
    summary = {"generate_busy_s": generate_s, "train_busy_s": train_s}
    (path / "summary.json").write_text(json.dumps(summary))

  def balance(self):
    return dict(plan.balance_rows(self.config, self.workdir))

  def make_step(self, sample_s, train_s):
    """Makes a run in which a step of this config takes these seconds."""
    # Two searchers sampled 512 x 40 completions, the trainer 32 x 8 x 40; this
    # config samples and trains 256 a step.
    self.make_run(sample_s * 40, train_s * 40)

  def test_seconds_of_an_unfinished_run_are_those_of_its_spans(self):
    fake_run.make_run(self.workdir, num_steps=40, finished=False)
    pathlib.Path(self.workdir, "status.json").unlink()
    config = fake_run.config()
    config["config"]["train"]["completions_per_prompt"] = 8
    pathlib.Path(self.workdir, "config.json").write_text(json.dumps(config))
    sample_s, train_s = plan.read_measured(self.workdir)
    # A step works for about 0.75 s, a searcher for two thirds of the time.
    self.assertBetween(train_s * 256, 0.6, 1.0)
    self.assertBetween(sample_s * 512, 0.8, 1.4)

  def test_seconds_a_completion_are_those_of_the_run(self):
    self.make_run(64.0, 20.0)
    sample_s, train_s = plan.read_measured(self.workdir)
    self.assertAlmostEqual(sample_s, 2 * 64 / (512 * 40))
    self.assertAlmostEqual(train_s, 20 / (256 * 40))
    operands = ["l4", f"--calibrate={self.workdir}"]
    rows = dict(dict(plan.plan(self.config, None, operands))["balance"])
    self.assertStartsWith(rows["searchers that balance one trainer"], "4;")

  @parameterized.parameters(
      (8.0, 1.0, 1, "hardly helps: 1.12", "8;"),
      (1.0, 80.0, 4, "hardly helps: 1.00", "1;"),
      (8.0, 2.0, 4, "helps: 2.00", "4;"),
  )
  def test_the_verdict(self, sample_s, train_s, count, words, balanced):
    self.config.search.num_searchers = count
    self.make_step(sample_s, train_s)
    rows = self.balance()
    self.assertStartsWith(rows["asynchrony"], words)
    self.assertStartsWith(rows["searchers that balance one trainer"], balanced)

  def test_taking_turns(self):
    self.config.search.lockstep = True
    self.make_step(2.0, 2.0)
    rows = self.balance()
    self.assertRegex(rows["asynchrony"], "search.lockstep=True.* 2.00 times")
    self.assertStartsWith(rows["a step then takes"], "4.0 s")
    self.assertStartsWith(rows["expected staleness of fresh data"], "0 steps")

  @parameterized.parameters(
      # One searcher's round of 32 is under way, of 32 a step.
      (1, 1, 1, 1.0),
      # The lead allows two steps.
      (3, 1, 1, 2.0),
      # A version in four steps is 1.5 steps old when it is taken.
      (1, 1, 4, 2.5),
      # The trainer is the slowest: all that is granted waits.
      (8, 3, 1, 4.0),
  )
  def test_staleness(self, num_searchers, lead, period, steps):
    search = self.config.search
    search.update(num_searchers=num_searchers, lead_steps=lead)
    search.prompts_per_round = search.prompts_per_step
    self.config.publish.every_steps = period
    self.assertAlmostEqual(
        plan.expected_staleness(self.config, 12.8, 3.2), steps
    )

  def test_rounds_sample_for_their_own_steps(self):
    self.config.rounds.mini_batches = 4
    self.config.rounds.passes = 2
    self.config.search.prompts_per_round = 1000
    # 32 prompts a batch, each batch twice: 16 new prompts a step, and a round
    # of 4 batches ahead of one that is trained on.
    self.assertEqual(plan._num_prompts(self.config), 16)
    lag = self.config.rounds.lag_rounds + 1
    self.assertEqual(
        plan.expected_staleness(self.config, 1.0, 1.0), lag * 4 * 32 / 16
    )

  def test_a_run_without_measurements_is_refused(self):
    for folder in (self.workdir, os.path.join(self.workdir, "none")):
      with self.assertRaisesRegex(ValueError, folder):
        plan.read_measured(folder)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What fits, staleness and balance, worked out by hand."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from configs import guess
from tba_jax import types
from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.learning import packing
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf_config
from tba_jax.programs import model_sizes
from tba_jax.programs import titled_rows
from tba_jax.system import accelerators
from tba_jax.system import processes
from tba_jax.tools import memory_model
from tba_jax.tools import plan
from tba_jax.transport.groups import messages
from tests.report import fake_run
from tests.support import tiny_model


def _rows(config, workdir=None, operands=()):
  sections = plan.plan(config, workdir, operands)
  return {name: value for _, rows in sections for name, value in rows}


class PlanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = settings.get_config()

  def test_disk_of_journal(self):
    config = self.config
    config.sampling.update(max_prompt_tokens=100, max_completion_tokens=1000)
    config.search.update(
        prompts_per_step=32, prompts_per_round=16, samples_per_prompt=8
    )
    config.train.num_steps = 1000
    config.checkpoint.update(every_steps=50, keep=2)
    config.replay.max_segment_mb = 64
    rows = dict(plan.disk_rows(config))
    # 32 (8 · 9,013 + 400 + 125) bytes.
    self.assertStartsWith(rows["journal of a step"], "2.216 MB")
    self.assertEqual(
        rows["journal, at most (since the oldest of 2 checkpoints)"],
        "393.5 MB",
    )
    config.checkpoint.keep_journal = True
    rows = dict(plan.disk_rows(config))
    self.assertEqual(rows["journal, at most (all of the run)"], "2.165 GB")
    config.reference.role = "searcher"
    self.assertStartsWith(
        dict(plan.disk_rows(config))["journal of a step"], "3.193 MB"
    )

  @parameterized.parameters((4, 1), (300, 2))
  def test_disk_estimate_covers_all_group_fields(self, num_experts, size):
    S, T, P, N, A = 2, 30, 20, 3, 2
    config = guess.get_config("smoke")
    config.loss.name = "ppo"
    config.model.update(
        family="qwen3_moe",
        num_layers=N,
        num_experts=num_experts,
        experts_per_token=A,
    )
    config.train.router_replay = True
    config.reference.role = "searcher"
    config.sampling.update(max_prompt_tokens=P, max_completion_tokens=T)
    config.search.update(
        prompts_per_step=1, prompts_per_round=1, samples_per_prompt=S
    )
    logprobs, counts = np.zeros((S, T), np.float32), np.zeros(S, np.int32)
    group = types.Group(
        prompt_id=0,
        visit=0,
        position=0,
        prompt_tokens=np.zeros(P, np.int32),
        completion_tokens=np.zeros((S, T), np.int32),
        completion_lengths=counts,
        sampled_mask=np.zeros((S, T), bool),
        stopped=np.zeros(S, bool),
        behavior_logprobs=logprobs,
        rewards=np.zeros(S, np.float32),
        versions=counts,
        epoch=0,
        ref_logprobs=logprobs,
        routes=np.zeros((S, T, N, A * size), np.uint8),
        prompt_routes=np.zeros((P, N, A * size), np.uint8),
        turn_rewards=logprobs,
    )
    _, arrays = messages.pack_groups([group])
    size = sum(array.nbytes for array in arrays.values())
    self.assertStartsWith(
        dict(plan.disk_rows(config))["journal of a step"],
        titled_rows.format_bytes(size + plan.HEADER_BYTES),
    )

  def test_roles_on_single_gpu_share_process(self):
    result = accelerators.Accelerators("gpu", ("0",))
    with mock.patch.object(accelerators, "find", return_value=result):
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
  @pytest.mark.slow
  def test_shows_compute_dtype(self, kind, fast, width, dtype, text):
    self.config.model.update(width=width, compute_dtype=dtype)
    result = accelerators.Accelerators(kind, ("0",) * (kind == "gpu"))
    with mock.patch.multiple(
        accelerators,
        find=lambda: result,
        multiplies_bfloat16=lambda: fast,
    ):
      self.assertStartsWith(_rows(self.config)["computes in"], text)
      # This processor does not matter to another machine.
      if dtype == "auto":
        rows = _rows(self.config, operands=["h100"])
        text = "bfloat16: by the device, h100"
        self.assertEqual(rows["computes in"], text)

  def test_folder_s_width_counts(self):
    shape = tiny_model.make_model(width=512).config
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
    self.config.init = str(folder)
    with mock.patch.object(accelerators, "multiplies_bfloat16", lambda: True):
      self.assertEqual(model_sizes.compute_dtype(self.config)[0], "bfloat16")

  def test_shows_how_mesh_splits_params(self):
    self.assertNotIn("replicated on every device", _rows(self.config))
    self.config.mesh.tensor = 3
    with self.assertRaisesRegex(ValueError, "up/kernel: .* does not divide"):
      _rows(self.config)
    with contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(plan.run(self.config, None), 2)
    self.config.mesh.tensor = 2
    rows = _rows(self.config, None, ["l4"])
    self.assertEqual(
        rows["trainer"], "2: data 1 x fsdp 1 x sequence 1 x tensor 2"
    )
    self.assertStartsWith(rows["replicated on every device"], "5 of 12 leaves")

  def test_shows_rows_of_forward_backward(self):
    name, row = "rows of a forward-backward", "of {} tokens, at most {} times"
    for micro_prompts, micro_completions in ((32, 0), (12, 0), (16, 2)):
      self.config.train.micro_batch_prompts = micro_prompts
      self.config.train.micro_batch_completions = micro_completions
      size = packing.make(self.config).sizes()[0]
      found = _rows(self.config)[name]
      expected = row.format(f"{size.length:,}", size.micro_batches)
      self.assertStartsWith(found, f"{size.rows} {expected} a step")
      self.assertEqual("groups are cut" in found, micro_completions > 0)

  def test_staleness_bound(self):
    self.config.search.lead_steps = 2
    self.config.publish.every_steps = 3
    self.assertStartsWith(plan.staleness_bound(self.config), "5 steps")
    self.config.replay.recent_fraction = 0.5
    self.assertIn("replayed data is older", plan.staleness_bound(self.config))
    self.config.search.lockstep = True
    self.assertEqual(plan.staleness_bound(self.config), "2 steps (lockstep)")

  def test_hugging_face_folder_gives_shape(self):
    with tempfile.TemporaryDirectory() as folder:
      shape = model_sizes.model_of(self.config)
      with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**hf_config.to_hf(shape), "vocab_size": 999}, f)
      self.config.init = folder
      self.assertEqual(model_sizes.model_of(self.config).vocab_size, 999)
      # A folder that fine-tuning starts from, damaged: named, with its key.
      with open(os.path.join(folder, "config.json"), "w") as f:
        f.write("{")
      self.config.init, self.config.sft.init = "sft", folder
      with self.assertRaisesRegex(ValueError, f"config.sft.init='{folder}'"):
        model_sizes.model_of(self.config)
      self.config.init = folder
    with self.assertRaisesRegex(ValueError, "config.init="):
      model_sizes.model_of(self.config)

  def test_program_prints_plan(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(plan.run(self.config, None), 0)
    self.assertIn("staleness of fresh data", out.getvalue())
    with contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(plan.run(self.config, None, ["x"]), 2)

  def test_hardware_kind_shows_whether_run_fits(self):
    self.assertStartsWith(_rows(self.config, None, ["l4"])["fits"], "yes: ")
    self.config.sampling.num_slots = 2**24
    self.assertStartsWith(_rows(self.config, None, ["l4"])["fits"], "NO: ")
    with contextlib.redirect_stdout(io.StringIO()):
      self.assertEqual(plan.run(self.config, None, ["l4"]), 2)

  @parameterized.parameters(([],), (["cpu"],))
  @pytest.mark.slow
  def test_reads_memory_and_cores_of_this_machine(self, operands):
    gib = 2**30
    with mock.patch.multiple(
        processes,
        memory=lambda: (24 * gib, "limit in a file"),
        num_cores=lambda: (1.5, "quota in a file"),
    ):
      rows = _rows(self.config, None, operands)
      self.assertEqual(rows["memory"], "24 GB: limit in a file")
      self.assertEqual(rows["cores"], "1.5: quota in a file")
      self.assertRegex(rows["fits"], "^yes: .* of 24 GB of this machine")
      # A role runs as often as it has processes.
      one = rows["searchers, 1"]
      self.config.search.num_searchers = 4
      rows = _rows(self.config, None, operands)
      four = float(rows["searchers, 4"].split()[0])
      self.assertAlmostEqual(four, 4 * float(one.split()[0]), delta=0.01 * four)
    with mock.patch.object(processes, "memory", lambda: (2**20, "a test")):
      self.assertStartsWith(_rows(self.config, None, operands)["fits"], "NO: ")
    # The plan of other machines is none of this one.
    self.assertNotIn("fits", _rows(self.config, None, ["--elsewhere"]))

  def start_from(self, name):
    """Has the config start from a published model's config.json."""
    published = pathlib.Path(__file__).parents[1] / "models"
    shapes = json.loads((published / "published_configs.json").read_text())
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "config.json").write_text(json.dumps(shapes[name]))
    self.config.init = str(folder)

  def test_real_model_fits_into_24_gb(self):
    self.start_from("HuggingFaceTB/SmolLM2-135M")
    memory = lambda: (24 * 10**9, "a test")
    with mock.patch.object(processes, "memory", memory):
      self.assertStartsWith(_rows(self.config, None, ["cpu"])["fits"], "yes: ")

  def test_adapters_of_gpt_oss_fit_into_eight_h100(self):
    self.start_from("openai/gpt-oss-20b")
    self.config.lora.update(rank=16, targets="q,k,v,o")
    self.config.model.param_dtype = "bfloat16"
    self.config.mesh.update(data=1, fsdp=4, tensor=1)
    self.config.search.mesh.update(data=1, fsdp=1, tensor=4)
    size = hardware.bytes_a_param(self.config, hardware.HARDWARE["8xh100"])
    self.assertEqual((size["trainer"], size["searcher"]), (6, 8))
    rows = _rows(self.config, None, ["h100"])
    # OpenAI's model card: 20.9B params.
    self.assertStartsWith(rows["parameters"], "20,914,757,184, bfloat16")
    self.assertStartsWith(rows["fits"], "yes: 39.")

  @parameterized.parameters(("q,k,v,o", 0), ("all", 4))
  def test_searcher_with_vllm_holds_params_to_merge_adapters_alone(
      self, targets, per_param
  ):
    self.start_from("openai/gpt-oss-20b")
    self.config.lora.update(rank=16, targets=targets)
    self.config.model.param_dtype = "bfloat16"
    self.config.search.sampler = "vllm"
    here = hardware.HARDWARE["8xh100"]
    size = hardware.bytes_a_param(self.config, here)
    self.assertEqual((size["searcher"], size["server"]), (per_param, 2))
    mesh = memory_model.searcher_sizes(self.config)
    mesh = sharding.abstract_mesh(mesh, "gpu")
    memory = memory_model.searcher(self.config, mesh)
    count = sum(x.size for x in jax.tree.leaves(memory.params))
    held = sum(memory.resident.values())
    self.assertAlmostEqual(held / count, per_param, delta=0.01)

  def test_proposes_vllm_if_memory_limits_slots(self):
    self.start_from("Qwen/Qwen3-8B")
    lengths = dict(max_prompt_tokens=1024, max_completion_tokens=4096)
    self.config.sampling.update(lengths)
    row = lambda name: dict(plan.sampler_rows(self.config, name))
    words = row("8xh100")["proposed sampler"]
    # Params of a searcher take 4 x 8.19 of 60.4 GB, of a server 2 x 8.19; 80 %
    # of the rest are for caches. A token takes 2 x 36 x 8 x 128 x 2 bytes, a
    # slot has 5,120 tokens, a completion in pages 2,048.
    self.assertIn("average 1,024 tokens, 25% of the limit", words)
    self.assertIn("holds 116 at once, this package's 24", words)
    # n / (16.4 + .302 n) of 116 and of 24.
    self.assertIn("2.2 times the tokens/s", words)
    self.config.explore.fraction = 0.5  # Not supported by vLLM.
    self.assertEqual(row("8xh100"), {})
    self.config.explore.fraction = 0.0
    self.assertEqual(row("v5p-16"), {})
    self.config.sampling.max_completion_tokens = 256
    self.assertEqual(row("8xh200"), {})

  @parameterized.parameters(
      ([], [], "", False),
      (["H100", "--elsewhere"], ["h100"], "", True),
      (["v5p", "v5e", "--calibrate=a"], ["v5p", "v5e"], "a", False),
      (["v5e:4x4", "v5e:2x2"], ["v5e:4x4", "v5e:2x2"], "", False),
  )
  def test_operands(self, operands, kinds, run, elsewhere):
    self.assertEqual(plan.parse(operands), (kinds, run, elsewhere))

  @parameterized.parameters(
      (["b200"],), (["v4", "v4", "v4"],), (["v4", "v5e:4x4"],)
  )
  def test_refuses_operands(self, operands):
    with self.assertRaises(ValueError):
      plan.parse(operands)

  @pytest.mark.slow
  def test_touches_no_accelerator(self):
    code = (
        "import jax\nfrom tba_jax.config import settings\n"
        "from tba_jax.tools import plan\n"
        "list(plan.plan(settings.get_config(), None))\n"
        "assert {d.platform for d in jax.devices()} == {'cpu'}"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        # A platform that JAX would fail to initialize here.
        env={**os.environ, "JAX_PLATFORMS": "rocm"},
        timeout=120,
    )
    self.assertEqual(process.returncode, 0)


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

  def test_seconds_of_unfinished_run_match_its_spans(self):
    fake_run.make_run(self.workdir, num_steps=40, finished=False)
    pathlib.Path(self.workdir, "status.json").unlink()
    config = fake_run.config()
    config["config"]["train"]["completions_per_prompt"] = 8
    pathlib.Path(self.workdir, "config.json").write_text(json.dumps(config))
    sample_s, train_s = plan.read_measured(self.workdir)
    # A step works for about 0.75 s, a searcher for two thirds of the time.
    self.assertBetween(train_s * 256, 0.6, 1.0)
    self.assertBetween(sample_s * 512, 0.8, 1.4)

  def test_seconds_completion_match_run(self):
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
  def test_verdict(self, sample_s, train_s, count, words, balanced):
    self.config.search.num_searchers = count
    self.make_step(sample_s, train_s)
    rows = self.balance()
    self.assertStartsWith(rows["asynchrony"], words)
    self.assertStartsWith(rows["searchers that balance one trainer"], balanced)

  def test_taking_turns(self):
    self.config.search.update(lockstep=True, lead_steps=0)
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
      # The trainer is the slowest: a step's groups are sampled 3 steps before.
      (8, 3, 1, 3.5),
  )
  def test_staleness(self, num_searchers, lead, period, steps):
    search = self.config.search
    search.update(num_searchers=num_searchers, lead_steps=lead)
    search.prompts_per_round = search.prompts_per_step
    self.config.publish.every_steps = period
    self.assertAlmostEqual(
        plan.expected_staleness(self.config, 12.8, 3.2), steps
    )

  @parameterized.parameters(
      # A step's groups wait for a trainer that is slower.
      (0.8, 32, 1.0, 2.5),
      # A round is rewarded while the next is decoded.
      (12.8, 32, 2.0, 2.0),
      (12.8, 32, 1.5, 1.5),
      # Free: a round of 32 takes four steps, and on average a fifth begins
      # before it is used.
      (12.8, 0, 1.0, 5.0),
  )
  def test_staleness_of_one_searcher(self, sample_s, fresh, w, steps):
    search = self.config.search
    search.update(
        num_searchers=1,
        lead_steps=2,
        prompts_per_step=fresh,
        prompts_per_round=32,
        samples_per_prompt=8,
    )
    self.config.train.update(prompts_per_batch=32, completions_per_prompt=8)
    self.config.publish.every_steps = 1
    self.assertAlmostEqual(
        plan.expected_staleness(self.config, sample_s, 3.2, w), steps
    )

  def test_run_shows_safe_learning_rate(self):
    self.make_step(12.8, 3.2)
    path = pathlib.Path(self.workdir)
    records = [
        json.dumps({"step": step, "replay/staleness_steps": 1.0})
        for step in range(40)
    ]
    (path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    config = json.loads((path / "config.json").read_text())
    config["config"]["optimizer"] = {"learning_rate": 1e-3}
    (path / "config.json").write_text(json.dumps(config))
    self.config.train.num_steps = 160
    rows = dict(plan.staleness_rows(self.config, self.workdir, 4.0))
    self.assertRegex(
        rows["learning rate that it shows to be safe"],
        "0.00025 by staleness, 0.00025 by the number of steps",
    )
    self.config.train.num_steps = 20
    rows = dict(plan.staleness_rows(self.config, self.workdir, 0.5))
    self.assertRegex(
        rows["learning rate that it shows to be safe"],
        "0.002 by staleness, 0.002 by the number of steps",
    )

  def test_run_on_policy_shows_no_rate_for_stale_data(self):
    self.make_step(12.8, 3.2)
    path = pathlib.Path(self.workdir)
    (path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "replay/staleness_steps": 0.0}) + "\n"
    )
    config = json.loads((path / "config.json").read_text())
    config["config"]["optimizer"] = {"learning_rate": 1e-3}
    (path / "config.json").write_text(json.dumps(config))
    rows = dict(plan.staleness_rows(self.config, self.workdir, 4.0))
    self.assertStartsWith(
        rows["learning rate that it shows to be safe"], "not known"
    )

  def test_rounds_sample_for_their_own_steps(self):
    self.config.rounds.mini_batches = 4
    self.config.rounds.passes = 2
    self.config.search.prompts_per_round = 1000
    # 32 prompts a batch, each batch twice: 16 new prompts a step, and a round
    # of 4 batches ahead of one that is trained on.
    self.assertEqual(plan.num_prompts(self.config), 16)
    lag = self.config.rounds.lag_rounds + 1
    self.assertEqual(
        plan.expected_staleness(self.config, 1.0, 1.0), lag * 4 * 32 / 16
    )

  def test_run_without_measurements_is_refused(self):
    for folder in (self.workdir, os.path.join(self.workdir, "none")):
      with self.assertRaisesRegex(ValueError, folder):
        plan.read_measured(folder)

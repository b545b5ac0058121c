# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `compile` program: tiny models for slices that are not here."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from jax.experimental import topologies
import ml_collections

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf_config
from tba_jax.programs import model_sizes
from tba_jax.tools import compile as compile_lib
from tba_jax.tools import memory_model
from tba_jax.tools import targets
from tests.support import tiny_model

_ROOT = pathlib.Path(__file__).parents[2]
_PUBLISHED = _ROOT / "tests" / "models" / "published_configs.json"
_CONFIG = "--config=configs/arithmetic.py:smoke"
# A paper config at the size of a test; its model is a folder.
_TINY = (
    "sampling.max_prompt_tokens=32",
    "sampling.max_completion_tokens=32",
    "sampling.num_slots=16",
)
# Llama, in the names of docs/results/devices.md: a prompt of 32 tokens and two
# completions of 128, of which the last token of each is not read.
_VOCABULARY, _LAYERS, _WIDTH, _MLP, _TOKENS = 2048, 2, 256, 1024, 32 + 2 * 127
_WEIGHTS = _LAYERS * (4 * _WIDTH**2 + 3 * _WIDTH * _MLP) + _VOCABULARY * _WIDTH
_MESHES = (
    dict(fsdp=8),
    dict(fsdp=4, tensor=2),
    dict(data=2, fsdp=4),
    dict(fsdp=4, sequence=2),
)
# Prints the bytes that a device receives in a train step, and its FLOPs; of
# fsdp=8 also those of rows of half the tokens.
_TRAIN_STEP = """
import json, sys
from tba_jax.config import settings
from tba_jax.learning import packing, train_step
from tba_jax.mesh import sharding
from tba_jax.tools import compile, memory_model
from tba_jax.system import hlo
config = settings.get_config()
config.init = sys.argv[2]
config.train.remat = "full"
config.sampling.max_prompt_tokens = 32
config.sampling.max_completion_tokens = 128
config.train.completions_per_prompt = 2
config.mesh.update(json.loads(sys.argv[1]))
rows = config.mesh.data * config.mesh.fsdp
config.train.prompts_per_batch = config.train.micro_batch_prompts = rows
(_, chips), _ = compile.devices_of(config, ["v5e:2x4", "v5e:2x2"])
def tell(lowered):
  costs = hlo.costs(lowered.compile().as_text())
  print(costs.collective_bytes, costs.flops)
tell(compile.trainer(config, chips).programs["train_step"].lower())
if config.mesh.fsdp == 8:
  own = memory_model.trainer(config, sharding.make_mesh(config.mesh, chips))
  size = packing.Size(rows, 1, packing.make(config).length // 2)
  batch = packing.abstract_batch(config, own.mesh, size)
  step = train_step.make_train_step(config, own.model, own.mesh)
  tell(step.lower(own.state, batch))
"""
# Config of a paper, model, devices of the trainer and of a searcher, judge.
_HARDWARE = (
    ("configs/no_robots.py:hardware=8xh100", "meta-llama/Llama-3.1-8B", 4, 2,
     "reward_model"),
    ("configs/math.py:hardware=v5p-16", "Qwen/Qwen2.5-7B", 8, 4),
    ("configs/gsm8k/async_rlhf.py:method=ppo,hardware=v6e-8",
     "microsoft/rho-math-1b-v0.1", 4, 1),
    ("configs/tldr/async_rlhf.py:method=online_dpo,hardware=v5e-16",
     "EleutherAI/pythia-410m-deduped", 16, 1, "reward_model"),
)  # fmt: skip
# Lowers every program of configs on virtual CPU devices, and prints names.
_LOWERED = """
import math, sys
import jax
jax.config.update("jax_num_cpu_devices", 16)
from tba_jax.config import load
from tba_jax.tools import compile
for row in sys.argv[1:]:
  name, *overrides = row.split()
  config = load.load_config(name, overrides)
  print(name)
  for make, mesh in (
      (compile.trainer, config.mesh), (compile.searcher, config.search.mesh)
  ):
    chips = jax.devices()[:math.prod(mesh.values())]
    for name, program in make(config, chips).programs.items():
      program.lower()
      print(len(chips), name)
"""


def run(*args: str) -> subprocess.CompletedProcess:
  """Runs the program, or `-c`, in a process: it makes JAX's backends once."""
  program = ("-m", "tba_jax.main", "--program=compile")
  return subprocess.run(
      [sys.executable, *(() if args[0] == "-c" else program), *args],
      cwd=_ROOT,
      env={**os.environ, "COLUMNS": "80"},
      capture_output=True,
      text=True,
      timeout=600,
      check=False,
  )


def make_folder(test: absltest.TestCase) -> str:
  """Returns a model's folder with a config.json alone."""
  folder = pathlib.Path(test.create_tempdir().full_path)
  shape = tiny_model.make_model(
      vocab_size=_VOCABULARY, num_layers=_LAYERS, width=_WIDTH, num_heads=4,
      num_kv_heads=4, head_dim=64, mlp_width=_MLP, max_positions=256,
  ).config  # fmt: skip
  (folder / "config.json").write_text(json.dumps(hf_config.to_hf(shape)))
  return str(folder)


def check_agreement(
    test: absltest.TestCase,
    compiled: dict[str, Any],
    config: ml_collections.ConfigDict,
    platform: str,
) -> None:
  """Checks the compiler's bytes against `memory_model`, on an abstract mesh."""
  mesh = sharding.abstract_mesh(config.mesh, platform)
  trainer = memory_model.trainer(config, mesh)
  mesh_sizes = memory_model.searcher_sizes(config)
  searcher = memory_model.searcher(
      config, sharding.abstract_mesh(mesh_sizes, platform)
  )
  test.assertEqual(compiled["held"]["trainer"], trainer.resident)
  test.assertEqual(compiled["held"]["searcher"], searcher.resident)
  programs = compiled["programs"]
  # A TPU pads small arrays to tiles.
  arguments = {
      "train_step": (trainer.state, trainer.batch),
      "decode_chunk": (
          searcher.decode_params,
          searcher.programs.abstract_state,
      ),
  }
  for name, trees in arguments.items():
    size = programs[name]["argument_bytes"] / memory_model.num_bytes(trees)
    test.assertBetween(size, 1.0, 1.01 if platform == "cpu" else 1.5, name)
  # Gradients and activations are among the temporaries.
  least = sum(trainer.resident.values()) + sum(trainer.step.values())
  test.assertBetween(programs["train_step"]["peak_bytes"] / least, 1.0, 4.0)


class HardwareTest(absltest.TestCase):

  def test_programs_of_name_are_lowered_on_its_meshes(self):
    """Models have the published heads and vocabulary, and one thin layer."""
    published = json.loads(_PUBLISHED.read_text())
    rows, expected = [], []
    for config, model, trainer, searcher, *judge in _HARDWARE:
      folder = pathlib.Path(self.create_tempdir().full_path)
      shape = {"num_hidden_layers": 1, "intermediate_size": 64}
      shape["hidden_size"] = 8 * published[model]["num_attention_heads"]
      (folder / "config.json").write_text(json.dumps(published[model] | shape))
      rows.append(" ".join((config, f"init={folder}", *_TINY)))
      expected += [config, f"{trainer} train_step", f"{trainer} reference",
                   f"{trainer} publish", *(f"{trainer} {j}" for j in judge),
                   f"{searcher} prefill", f"{searcher} decode_chunk",
                   *(f"{searcher} {j}" for j in judge)]  # fmt: skip
    # The last one again.
    rows.append(f"{rows[-1]} reference.role=searcher")
    expected += [config, f"{trainer} train_step", f"{trainer} publish",
                 *(f"{trainer} {j}" for j in judge), f"{searcher} prefill",
                 f"{searcher} decode_chunk", f"{searcher} reference",
                 *(f"{searcher} {j}" for j in judge)]  # fmt: skip
    done = run("-c", _LOWERED, *rows)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout.split("\n")[:-1], expected)


class TopologyTest(parameterized.TestCase):

  def find(self, needed, operands):
    """Returns the chips of a mesh; a slice is a name and a list of numbers."""
    config = settings.get_config()
    config.mesh.fsdp = needed
    describe = lambda topology_name="", topology="", **_: mock.Mock(
        devices=range(
            math.prod(
                map(
                    int,
                    (topology_name.partition(":")[2] or topology).split("x"),
                )
            )
        )
    )
    with (
        mock.patch.object(importlib.util, "find_spec"),
        mock.patch.object(topologies, "get_topology_desc", describe),
        mock.patch.dict(os.environ),
    ):
      (name, chips), _ = compile_lib.devices_of(config, operands)
    return name, len(chips)

  @parameterized.parameters(
      (1, (), "v5e:2x2"),
      (2, ("v6e:2x4", "v6e:2x2"), "v6e:2x4"),
      (16, (), "v5e:4x4"),
      (4, ("h100:8", "a100-40:1"), "h100:8"),
      (64, ("h200:8x8", "h200:8"), "h200:8x8"),
  )
  def test_trainer_may_share_machine(self, needed, operands, name):
    self.assertEqual(self.find(needed, operands), (name, needed))

  @parameterized.parameters(
      (16, "v5e:2x4"),
      (8, "v5e:4x4"),
      (4, "v5p:2x2x2"),
      (8, "a100:4"),
      (8, "h100:2x8"),
  )
  def test_other_slices_are_refused(self, needed, name):
    with self.assertRaisesRegex(ValueError, f"needs {needed} devices, {name}"):
      self.find(needed, (name,))

  @parameterized.parameters(
      (False, "h100:8", "GPUs is not installed: pip install 'tba_jax.cuda.'"),
      (False, "v5e:2x2", "libtpu is not installed: pip install 'tba_jax.tpu.'"),
      (
          True,
          "b300:8",
          "topology 'b300:8': unknown; must be one such as v5e:2x2",
      ),
      (True, "h100", "topology 'h100': .*must be .*h100:8 for eight GPUs"),
      (True, "h100:0", "topology 'h100:0': .*must be .*h100:8 for eight GPUs"),
  )
  def test_unknown_targets_are_refused(self, is_installed, name, message):
    unknown = mock.patch.object(
        topologies, "get_topology_desc", side_effect=ValueError("unknown")
    )
    with (
        mock.patch.object(
            importlib.util, "find_spec", lambda _: is_installed or None
        ),
        unknown,
        mock.patch.dict(os.environ),
        self.assertRaisesRegex(ValueError, message),
    ):
      targets.devices(name)

  def test_cpu_serves_both_roles(self):
    with self.assertRaisesRegex(ValueError, "must be 'cpu' for both roles"):
      self.find(1, ("v5e:2x2", "cpu"))


class CpuTest(absltest.TestCase):

  def test_agrees_with_plan(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    settings_of = ("mesh.fsdp=2", "reference.role=searcher", *_TINY)
    overrides = [f"--config.{text}" for text in settings_of]
    done = run(_CONFIG, f"--workdir={workdir}", *overrides, "cpu")
    self.assertEqual(done.returncode, 0, done.stderr)
    compiled = json.loads((workdir / "compile.json").read_text())
    config = load.load_config(_CONFIG.partition("=")[2], settings_of)
    check_agreement(self, compiled, model_sizes.on_cpu(config), "cpu")


@absltest.skipIf(
    importlib.util.find_spec("libtpu") is None,
    "libtpu (650 MB) is not installed: pip install 'tba_jax[tpu]'",
)
class CompileTest(parameterized.TestCase):

  def test_compiles_every_program_of_tiny_config(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    folder = make_folder(self)
    overrides = (f"init={folder}", f"tokenizer.source={folder}",
                 "reward_model.relabel=", "reference.role=trainer",
                 *_TINY)  # fmt: skip
    done = run(
        "--config=configs/tldr/tba.py:hardware=v5e-16",
        f"--workdir={workdir}",
        *(f"--config.{override}" for override in overrides),
        *("v5e:4x4", "v5e:2x2"),
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    result = json.loads((workdir / "compile.json").read_text())
    self.assertEqual(
        result["topology"], {"trainer": "v5e:4x4", "searcher": "v5e:2x2"}
    )
    of_trainer = ["train_step", "reference", "publish", "reward_model"]
    names = [*of_trainer, "prefill", "decode_chunk", "searcher_reward_model"]
    self.assertEqual(list(result["programs"]), names)
    parts = result["held"]["searcher"]
    # Float32, less the policy's head, beside params published in bfloat16.
    self.assertBetween(parts["reward_model"] / parts["params"], 1.6, 2.0)
    config = load.load_config("configs/tldr/tba.py:hardware=v5e-16", overrides)
    check_agreement(self, result, config, "tpu")
    for name, program in result["programs"].items():
      self.assertIn(name, done.stdout)
      self.assertTrue(program["fits"])
      self.assertGreater(program["argument_bytes"], 0)
      # Holdings of the role count, whoever's argument they are.
      role = "trainer" if name in of_trainer else "searcher"
      self.assertGreaterEqual(
          program["peak_bytes"], sum(result["held"][role].values())
      )
      # Only the trainer's params are split.
      split = name in of_trainer
      self.assertEqual(program["collective_bytes"] > 0, split)
      self.assertEqual(program["flops"] > 0, name != "publish")
      self.assertIn("ENTRY", (workdir / "hlo" / f"{name}.txt").read_text())
    # The state is updated in place.
    self.assertGreater(result["programs"]["train_step"]["alias_bytes"], 0)

  def test_refuses_indivisible_mesh(self):
    done = run(_CONFIG, "--config.init=scratch", "--config.mesh.tensor=4")
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, "multiple of config.mesh.tensor = 4")

  @parameterized.parameters(*_MESHES)
  def test_train_step_receives_little_more_than_ideal(self, **mesh):
    """At most 1.3 of what docs/results/devices.md derives."""
    done = run("-c", _TRAIN_STEP, json.dumps(mesh), make_folder(self))
    self.assertEqual(done.returncode, 0, done.stderr)
    received, flops = map(float, done.stdout.splitlines()[0].split())
    self.assertLess(received / ideal_bytes(**mesh), 1.3)
    if mesh == dict(fsdp=8):
      params = _WEIGHTS + _VOCABULARY * _WIDTH
      self.assertLess(received / params, 10.5)
      # Padding that is left out costs nothing, and moves nothing.
      result = done.stdout.splitlines()[1].split()
      self.assertAlmostEqual(float(result[0]) / received, 1, delta=0.02)
      self.assertLess(float(result[1]) / flops, 0.5)


def ideal_bytes(data=1, fsdp=1, sequence=1, tensor=1):
  """Returns the bytes a device must receive, by docs/results/devices.md."""
  others = lambda count: (count - 1) / count
  weights = 6 * others(fsdp * sequence) * _WEIGHTS / tensor
  copies = 4 * others(data) * _WEIGHTS / (fsdp * sequence * tensor)
  sums = (5 * _LAYERS + 2) * 4 * others(tensor) * _TOKENS * _WIDTH
  keys_and_values = 3 * _LAYERS * 4 * others(sequence) * _TOKENS * _WIDTH
  return weights + copies + sums + keys_and_values

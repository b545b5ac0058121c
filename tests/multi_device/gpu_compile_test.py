# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of a train step and a decode step for GPUs, without one.

The compiler of GPUs is in the environment, or, as in CI, in a folder of its own
beside it: from the environment JAX would load it into every process.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

from tests.multi_device import compile_test

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = pathlib.Path(sys.prefix, "gpu_compiler")
# Tokens of a completion; a prompt has 32.
_LENGTHS = (128, 127)
# Forward, forward again for the gradient, and two of the gradient.
_NUM_KERNELS = 4
# Prints a train step with tokens split over GPUs; by target and length, others;
# then prefill and decode steps on one and two GPUs, with the bytes of weights
# and cache on each, and decode steps with a kernel, for multiples of 16 tokens;
# at last products of 8 experts, with their gradients.
_PROGRAM = """
import dataclasses, json, sys
import jax
from jax import numpy as jnp
from tba_jax.config import settings
from tba_jax.models.kernels import grouped_matmul
from tba_jax.system import hlo
from tba_jax.tools import compile

def make(num_devices, length, folder):
  config = settings.get_config()
  config.init = folder
  config.train.remat = "full"
  config.sampling.max_prompt_tokens = 32
  config.sampling.max_completion_tokens = length
  config.sampling.num_slots = 16
  config.train.completions_per_prompt = 2
  config.search.samples_per_prompt = 1
  config.mesh.fsdp = num_devices
  config.search.mesh.tensor = min(num_devices, 2)
  config.train.prompts_per_batch = num_devices
  config.train.micro_batch_prompts = num_devices
  target = f"h100:{num_devices}"
  return config, target, compile.devices_of(config, [target])

out = {}
config, target, ((_, chips), _) = make(8, int(sys.argv[2]), sys.argv[1])
config.mesh.update(fsdp=4, sequence=2)
config.train.prompts_per_batch = config.train.micro_batch_prompts = 4
step = compile.trainer(config, chips).programs["train_step"]
found, _ = compile.compile_program(step, 0, chips[0])
out["sequence"] = dataclasses.asdict(found)
for num_devices in (1, 8):
  for length in map(int, sys.argv[2:]):
    config, target, ((_, chips), _) = make(num_devices, length, sys.argv[1])
    step = compile.trainer(config, chips).programs["train_step"]
    found, _ = compile.compile_program(step, 0, chips[0])
    out[f"{target} {length}"] = dataclasses.asdict(found)
  config, target, (_, (_, chips)) = make(num_devices, length, sys.argv[1])
  programs = compile.searcher(config, chips).programs
  found, _ = compile.compile_program(programs["prefill"], 0, chips[0])
  out[f"{target} prefill"] = dataclasses.asdict(found)
  step = programs["decode_chunk"]
  found, _ = compile.compile_program(step, 0, chips[0])
  out[f"{target} decode"] = dataclasses.asdict(found)
  out[f"{target} needs"] = step.argument_bytes
  config, target, (_, (_, chips)) = make(num_devices, 128, sys.argv[1])
  step = compile.searcher(config, chips).programs["decode_chunk"]
  found, _ = compile.compile_program(step, 0, chips[0])
  out[f"{target} ragged"] = dataclasses.asdict(found)

def experts(x, kernels, sizes, grad):
  run = lambda x, kernels: grouped_matmul.product("gpu", x, kernels, sizes)
  result, pull = jax.vjp(run, x, kernels)
  return result, *pull(grad)

place = jax.sharding.SingleDeviceSharding(chips[0])
arrays = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    for shape, dtype in (
        ((4000, 512), jnp.bfloat16),
        ((8, 200, 512), jnp.bfloat16),
        ((8,), jnp.int32),
        ((4000, 200), jnp.bfloat16),
    )
]
text = jax.jit(experts).lower(*arrays).compile().as_text()
out["experts"] = dataclasses.asdict(hlo.costs(text))
print(json.dumps(out))
"""


@absltest.skipIf(
    not _FOLDER.is_dir() and not importlib.util.find_spec("jax_cuda12_plugin"),
    "the compiler of GPUs (900 MB) is not installed: .ci/run has the command",
)
class GpuCompileTest(absltest.TestCase):

  def test_programs_of_one_gpu_and_of_eight(self):
    process = subprocess.run(
        [
            *(sys.executable, "-c", _PROGRAM, compile_test.make_folder(self)),
            *map(str, _LENGTHS),
        ],
        env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_FOLDER}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    result = json.loads(process.stdout)
    for length in _LENGTHS:
      whole, part = (result[f"h100:{n} {length}"] for n in (1, 8))
      for step in (whole, part):
        # Attention of packed rows, and its gradients.
        self.assertEqual(step["kernels"]["gpu$xla.gpu.triton"], _NUM_KERNELS)
        self.assertLess(step["temporary_bytes"], step["peak_bytes"])
      # Each GPU has a prompt; it gets weights, and no queries of the others.
      self.assertAlmostEqual(part["flops"] / whole["flops"], 1, delta=0.01)
      ideal = compile_test.ideal_bytes(fsdp=8)
      self.assertBetween(part["collective_bytes"] / ideal, 0.9, 1.15)
    split = result["sequence"]
    self.assertEqual(split["kernels"]["gpu$xla.gpu.triton"], _NUM_KERNELS)
    ideal = compile_test.ideal_bytes(fsdp=4, sequence=2)
    self.assertBetween(split["collective_bytes"] / ideal, 0.9, 1.3)
    # Weights that are copied in each step make it 1.66 and 1.81.
    for target in ("h100:1", "h100:8"):
      prefill = result[f"{target} prefill"]
      self.assertIn("cudnn$fmhaSoftmax", prefill["kernels"])
      moved = result[f"{target} decode"]["memory_bytes"]
      self.assertBetween(moved / result[f"{target} needs"], 0.9, 1.4)
      self.assertEqual(result[f"{target} decode"]["cache_bytes"], 0)
      # Keys and values of 16 rows in two layers; 2 of 4 heads on two GPUs.
      heads = 4 if target == "h100:1" else 2
      cache = 2 * 2 * 16 * (32 + 128) * heads * 64 * 2
      self.assertEqual(result[f"{target} ragged"]["cache_bytes"], cache)
    # Each of three products reads two arrays and writes one, 2 bytes each.
    self.assertEqual(result["experts"]["flops"], 3 * 2 * 4000 * 200 * 512)
    needed = 3 * 2 * (4000 * 512 + 8 * 200 * 512 + 4000 * 200)
    self.assertBetween(result["experts"]["memory_bytes"] / needed, 1, 1.01)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What decoding moves on a TPU, from what its compiler makes of it."""

import importlib.util
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]
# Prints the bytes of a step's arguments and traffic, in units of those that it
# must read, and the caches that kernels read in part, for heads of 64: first of
# 32 rows of 256 + 256 tokens, each with its own prompt; then of 64 of 512 +
# 512, a prompt for 8, too much for fast memory, also with int8 weights; at last
# of the first rows on one of four devices, which split rows and heads.
_PROGRAM = """
import os
os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
import jax
jax.config.update("jax_platforms", "cpu")
from jax.experimental import topologies
import numpy as np
from tba_jax.sampling import requests
from tba_jax.sampling import slots as slots_lib
from tba_jax.system import hlo
from tests.support import tiny_model

devices = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:2x2").devices
on_device = jax.sharding.SingleDeviceSharding(devices[0])
mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"))
on_mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
for num_layers, scale, shared, weights, place in (
    (2, 1, 1, "", on_device), (6, 2, 8, "", on_device),
    (6, 2, 8, "int8", on_device), (2, 1, 1, "", on_mesh)):
  model = tiny_model.make_model(
      num_layers=num_layers, width=1024 * scale, num_heads=16 * scale,
      num_kv_heads=8, head_dim=64, mlp_width=4096 * scale, vocab_size=1024,
      max_positions=512 * scale, compute_dtype="bfloat16")
  params = jax.eval_shape(model.init, jax.random.key(0))
  settings = requests.SamplingSettings(
      temperature=1.0, top_k=0, top_p=1.0, max_prompt_tokens=256 * scale,
      max_completion_tokens=256 * scale, num_rows=32 * scale, chunk_steps=8,
      pad_id=0, seed=0, most_rows_per_prompt=shared, weights=weights)
  put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  decode_params = jax.tree.map(put, jax.eval_shape(
      lambda x: slots_lib.decode_params(model, settings, x, place), params))
  programs = slots_lib.SlotPrograms(model, settings, place)
  state, count = programs.abstract_state, np.int32(8)
  compiled = programs.decode_chunk.lower(
      decode_params, state, count, count, programs.num_segments).compile()
  num_bytes = lambda tree: sum(
      np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(tree))
  needed = num_bytes((decode_params, state.cache))
  costs = hlo.costs(compiled.as_text())
  moved = costs.memory_bytes
  print(len(state.prompt_mask))
  print(compiled.memory_analysis().argument_size_in_bytes / needed)
  print(moved / needed)
  print(costs.cache_bytes / num_bytes(state.cache))
shape = settings.prefill_size, settings.max_prompt_tokens
prefill = programs.prefill.lower(
    decode_params, np.zeros(shape, np.int32), np.zeros(shape, np.float32))
print(prefill.as_text().count("tpu_custom_call"))
"""


@absltest.skipIf(
    importlib.util.find_spec("libtpu") is None,
    "libtpu (650 MB) is not installed: pip install 'tba_jax[tpu]'",
)
class TpuDecodeTest(absltest.TestCase):

  def test_step_reads_weights_and_cache_once_and_copies_neither(self):
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    *numbers, num_kernels = map(float, process.stdout.split())
    self.assertGreater(num_kernels, 0)  # Splash attention of the prefill.
    self.assertEqual(numbers[::4], [32, 8, 8, 32])
    for arguments in numbers[1::4]:
      self.assertLess(arguments, 1.1)
    # A kernel reads the cache where prompts are not shared, but for what the
    # compiler brings to fast memory before: of caches so small, some blocks.
    one, *plain, four = numbers[3::4]
    self.assertEqual(plain, [0, 0])
    self.assertBetween(min(one, four), 0.7, 1.0)
    for moved in numbers[2::4]:
      self.assertLess(moved, 1.1)


def _path() -> str:
  return os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading a checkpoint of 1 GB takes the memory of what a process owns."""

import json
import math
import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.models import config
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_names
from tba_jax.system import processes
from tests.multi_process import loading_child
from tests.support import harness

_CONFIG = config.ModelConfig(
    family="llama",
    vocab_size=32_000,
    num_layers=12,
    width=1024,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    mlp_width=4096,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    tie_embeddings=False,
    max_positions=64,
    param_dtype="float32",
    compute_dtype="float32",
    pad_id=0,
    bos_id=None,
    eos_id=1,
)


def _shapes() -> dict[str, tuple[int, ...]]:
  return {
      name: row.hf_shape
      for row in hf_names.rows(_CONFIG)
      for name in row.hf_names(_CONFIG.num_layers)
  }


def _make(folder: pathlib.Path) -> None:
  """Writes a model of 1 GB in several files, without holding it."""
  shapes = _shapes()
  rng = np.random.default_rng(0)

  def make(name: str) -> np.ndarray:
    if name == "lm_head.weight":  # Any slice of it is known.
      rows = np.arange(shapes[name][0], dtype=np.float32)[:, None]
      return rows + np.arange(shapes[name][1], dtype=np.float32) / 1024
    return rng.random(shapes[name], dtype=np.float32)

  hf_files.write_json(folder / "config.json", hf_config.to_hf(_CONFIG))
  sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
  hf_files.write_files(folder, sizes, make, max_file_bytes=300 * 10**6)


class MemoryTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not os.access("/proc/self/clear_refs", os.W_OK):
      raise absltest.SkipTest("the peak of a process's memory cannot be read")
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(directory)
    _make(cls.folder)

  def load(self, dtype, num_processes):
    """Returns what each of the processes tells."""
    port = processes.free_port()
    result = harness.run_together(
        [loading_child.__file__, self.folder, dtype, num_processes, i, port]
        for i in range(num_processes)
    )
    return [json.loads(out) for out, _, _ in result]

  @parameterized.parameters(("float32", 1), ("float32", 2), ("bfloat16", 1))
  def test_holds_no_more_than_owned_parts(self, dtype, num_processes):
    count = sum(math.prod(shape) for shape in _shapes().values())
    tensor = 4 * max(math.prod(shape) for shape in _shapes().values())
    total = count * (4 if dtype == "float32" else 2)
    self.assertGreater(4 * count, 10**9)
    reports = self.load(dtype, num_processes)
    for report in reports:
      self.assertEqual(report["devices"], 8 // num_processes)
      self.assertAlmostEqual(
          report["owned"] / total, 1 / num_processes, places=2
      )
      self.assertLess(report["peak"], 1.3 * report["owned"] + tensor)
    # Rows are over `tensor`, columns over `fsdp`, as the processes are.
    rows, columns = _CONFIG.vocab_size // 4, _CONFIG.width // 2
    for process, report in enumerate(reports):
      last = (rows - 1) + ((process + 1) * columns - 1) / 1024
      # Whole numbers of this size are 32 apart in bfloat16.
      delta = 0 if dtype == "float32" else 32
      self.assertAlmostEqual(report["head"], last, delta=delta)

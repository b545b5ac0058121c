# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a GPU, with small work on a CPU."""

from unittest import mock

from absl.testing import absltest
import pytest

from benchmarks import gpu
from benchmarks import real_speed
from tests.support import kernels_on_cpu

_WORK = gpu.Work(
    product_size=16,
    copied=1024,
    attention=((2, 8, 5, 1, 2, 8, 0), (2, 8, 8, 1, 2, 8, 6)),
    rows=((8, 20, 1, 2, 8, 0),),
    decode=(("microsoft/rho-math-1b-v0.1", 1, 2, 4, 4),),
    steps=(("microsoft/rho-math-1b-v0.1", 2, 1, 2, 4, 5),),
    runs=1,
    shape=dict(
        num_layers=1,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_width=32,
        vocab_size=64,
    ),
)


class GpuTest(absltest.TestCase):

  @pytest.mark.slow
  def test_parts_have_their_figures(self):
    peers = []

    def run_peer(python, program, folder, dtype, shape, runs):
      del python, folder
      peers.append((program, dtype, *shape, runs))
      return 2.0

    with (
        kernels_on_cpu.patch("cudnn"),
        mock.patch.object(gpu.importlib.util, "find_spec", lambda _: True),
        mock.patch.object(real_speed, "run_peer", run_peer),
    ):
      out = gpu.run(None, [], _WORK)
    generate, gradient = out["peers"]
    self.assertEqual(
        peers,
        [
            ("generate", "bfloat16", 1, 2, 4, 4, 1),
            ("gradient", "bfloat16", 1, 2, 4, 5, 1),
        ],
    )
    self.assertEqual(generate["tokens_per_s"], 4)
    self.assertEqual(gradient["completion_tokens_per_s"], 5)
    for row in out["values"]:
      for error in (*row["kernel"], *row["plain"]):
        self.assertBetween(error, 1e-5, 2e-2)
    (step,) = out["step"]
    self.assertAlmostEqual(
        step["completion_tokens_per_s"] * step["step_s"], 2 * 2 * 5
    )
    self.assertAlmostEqual(step["flops_per_s"] * step["step_s"], step["flops"])
    (decode,) = out["decode"]
    # A prompt of 4, two completions half full, and all weights but the
    # embedding, two bytes each.
    cache = 4 * 16 * (4 + 2 * 4 / 2)
    layer = 32 * (2 * 16 + 2 * 16 + 2 * 16) + 3 * 32 * 32 + 2 * 32
    weights = 2 * (layer + 64 * 32 + 32)
    self.assertEqual(decode["weights_and_cache_bytes"], weights + cache)

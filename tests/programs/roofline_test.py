# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for roofline and devices, against numbers worked out by hand."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.programs import plan
from tests.support import tiny_model

# 1 GiB, 100 bytes/s, 1000 flops/s of bfloat16 and 500 of float32.
_DEVICE = plan.Device(2**30, 100.0, 1000.0, 500.0, "")


class RooflineTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # 2 layers of 4 heads, 2 for keys and values, of width 8.
    self.c = tiny_model.make_model(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    ).config

  def test_attention(self):
    # 2 flops each for q·k and p·v, 2 layers, 4 heads of 8, 10 tokens.
    self.assertEqual(plan.attention_flops(self.c, 10), 4 * 2 * 4 * 8 * 10)

  def test_cache(self):
    # Keys and values, 2 layers, 2 heads of 8, 2 bytes each.
    self.assertEqual(plan.cache_bytes_per_token(self.c, 2), 128)

  def test_a_decode_step(self):
    work = plan.decode_step_work(
        self.c,
        matmul_params=1000,
        params_bytes=4000,
        cache_token_bytes=128,
        num_rows=3,
        context=10,
    )
    self.assertEqual(work, plan.Work(3 * (2000 + 2560), 4000 + 3840))

  def test_a_prefill(self):
    work = plan.prefill_work(
        self.c,
        matmul_params=1000,
        params_bytes=4000,
        num_prompts=5,
        prompt_tokens=20,
    )
    # A token attends to half of the prompt: 10 tokens, 2560 flops.
    self.assertEqual(work, plan.Work(100 * (2000 + 2560), 4000))

  @parameterized.parameters(("none", 1, 4), ("full", 1, 5), ("dots", 2, 7))
  def test_a_train_step(self, remat, num_models, passes):
    work = plan.train_step_work(
        self.c,
        matmul_params=1000,
        params_bytes=4000,
        num_prompts=2,
        num_completions=3,
        prompt_tokens=20,
        completion_tokens=10,
        num_micro_batches=2,
        remat=remat,
        num_models=num_models,
    )
    # 40 prompt tokens see 10 on average, 60 completion tokens 25: 256 flops
    # of attention for each token seen.
    forward = 2000 * 100 + 40 * 2560 + 60 * 6400
    self.assertEqual(work.flops, passes * forward)
    self.assertEqual(work.bytes, (2 * passes + 7 * num_models) * 4000)

  def test_the_slower_side_counts(self):
    self.assertEqual(plan.Work(1000, 50).seconds(_DEVICE, "bfloat16"), 1.0)
    self.assertEqual(plan.Work(1000, 50).seconds(_DEVICE, "float32"), 2.0)
    self.assertEqual(plan.Work(1000, 300).seconds(_DEVICE, "bfloat16"), 3.0)
    self.assertEqual(plan.Work(1000, 300).seconds(_DEVICE, "bfloat16", 4), 0.75)

  def test_devices(self):
    v5e = plan.device_of_kind("V5e")
    self.assertEqual(v5e.memory_bytes, 16 * 2**30)
    self.assertEqual(v5e.bytes_per_s, 819e9)
    self.assertEqual(v5e.flops("bfloat16"), 197e12)
    self.assertEqual(plan.device_of_kind("a100-80").flops("float32"), 156e12)
    for device in plan.DEVICES.values():
      self.assertStartsWith(device.source, "https://")
      self.assertLessEqual(device.float32_flops, device.bfloat16_flops)
    with self.assertRaisesRegex(ValueError, "'tpu': allowed are .*h200, l4"):
      plan.device_of_kind("tpu")


if __name__ == "__main__":
  absltest.main()

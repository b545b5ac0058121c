# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4, as a folder has them, against `transformers`."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_tensors
from tba_jax.models.hf import mxfp4_tensors

try:
  import torch
  from transformers.integrations import mxfp4
except ImportError:
  torch = None

# Experts, outputs, blocks of inputs.
_SHAPE = (3, 10, 4)
_NAME = "model.layers.0.mlp.experts.down_proj"


def _packed() -> tuple[np.ndarray, np.ndarray]:
  """Returns blocks with all bytes, and scales."""
  rng = np.random.default_rng(0)
  blocks = np.arange(np.prod(_SHAPE) * 16) % 256
  blocks = rng.permutation(blocks).astype(np.uint8).reshape(*_SHAPE, 16)
  return blocks, rng.integers(1, 250, _SHAPE, dtype=np.uint8)


class DequantizeTest(parameterized.TestCase):

  def test_the_first_number_is_in_the_lower_bits(self):
    blocks = np.zeros((1, 1, 1, 16), np.uint8)
    blocks[..., 0], blocks[..., 15] = 0x72, 0xD0
    values = mxfp4_tensors.dequantize(blocks, np.full((1, 1, 1), 128, np.uint8))
    expected = np.zeros((1, 32, 1), np.float32)
    # 1 and 6, 0 and -3, times 2.
    expected[0, [0, 1, 31], 0] = 2, 12, -6
    np.testing.assert_array_equal(values, expected)

  @absltest.skipIf(torch is None, "torch is not installed")
  def test_equals_transformers(self):
    blocks, scales = _packed()
    expected = mxfp4.convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    found = mxfp4_tensors.dequantize(blocks, scales)
    np.testing.assert_array_equal(found, expected.numpy(), strict=True)

  def test_scales_of_nan_give_no_numbers(self):
    blocks, scales = _packed()
    scales[1, 2, 3] = 255
    finite = np.isfinite(mxfp4_tensors.dequantize(blocks, scales))
    self.assertEqual(np.argwhere(~finite).min(0).tolist(), [1, 96, 2])
    self.assertEqual((~finite).sum(), 32)


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def write(self, **parts) -> hf_tensors.AnyFiles:
    tensors = {f"{_NAME}_{part}": x for part, x in parts.items()}
    path = self.folder / hf_files.WEIGHTS
    safetensors.numpy.save_file(tensors, path)
    return hf_tensors.open_files(self.folder)

  def test_slices_are_those_of_the_whole(self):
    blocks, scales = _packed()
    bias = np.ones((3, 10), np.float32)
    files = self.write(blocks=blocks, scales=scales, bias=bias)
    self.assertEqual(
        files.shapes, {_NAME: (3, 128, 10), f"{_NAME}_bias": (3, 10)}
    )
    whole = mxfp4_tensors.dequantize(blocks, scales)
    for index in (
        (slice(0, 3), slice(0, 128), slice(0, 10)),
        (slice(1, 2), slice(33, 95), slice(2, 9)),
        (slice(2, 3), slice(31, 32), slice(None)),
        (slice(0, 1), slice(64, 96), slice(0, 1)),
    ):
      np.testing.assert_array_equal(files.read(_NAME, index), whole[index])

  @parameterized.parameters(
      (dict(scales=None), r"scales \[\]; must be \[E, F, N, 16\]"),
      (dict(blocks=None), r"_blocks has shape \[\] and"),
      (
          dict(scales=np.zeros((3, 10, 5), np.uint8)),
          r"blocks has shape \[3, 10, 4, 16\] and .*_scales \[3, 10, 5\]",
      ),
      (
          dict(scales=np.zeros(_SHAPE, np.float32)),
          "must be .* of U8",
      ),
  )
  def test_refuses_parts_of_other_shapes(self, changes, message):
    blocks, scales = _packed()
    parts = dict(blocks=blocks, scales=scales) | changes
    with self.assertRaisesRegex(ValueError, f"{_NAME}.*{message}"):
      self.write(**{k: v for k, v in parts.items() if v is not None})


if __name__ == "__main__":
  absltest.main()

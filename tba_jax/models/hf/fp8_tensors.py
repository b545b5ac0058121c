# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads slices of FP8 matrices, in which DeepSeek-V3 is published, as floats.

A tensor `NAME` of 8-bit numbers (e4m3) has a factor for each block of 128 x 128
entries of its last two axes, in the tensor `NAME_scale_inv`. Blocks at the
edges may be smaller.

Source: DeepSeek-AI 2024 (arXiv:2412.19437, section 3.3.2), as read by Hugging
Face's `Fp8Dequantize`. Does not import JAX.
"""

from typing import Any

import numpy as np

BLOCK = 128
# Names that safetensors gives to FP8, and to the types of factors.
TYPE = "F8_E4M3"
_FLOATS = ("BF16", "F16", "F32")
_SCALE = "_scale_inv"


def _values() -> np.ndarray:
  """Returns the 256 numbers: sign, 4 exponent bits and 3 mantissa bits."""
  exponent, mantissa = np.divmod(np.arange(128), 8)
  values = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1))
  values[-1] = np.nan
  return np.float32(np.concatenate([values, -values]) / 2.0**10)


_VALUES = _values()


def dequantize(
    codes: np.ndarray, scales: np.ndarray, first: tuple[int, int] = (0, 0)
) -> np.ndarray:
  """Returns [..., F, D] float32.

  Args:
    codes: [..., F, D] uint8, part of a matrix.
    scales: [..., f, d], factors of the blocks that the part reaches into.
    first: row and column of the part's first entry in its first block.
  """
  rows, columns = (
      (np.arange(size) + start) // BLOCK
      for size, start in zip(codes.shape[-2:], first)
  )
  factors = scales.astype(np.float32)[..., rows, :][..., columns]
  return _VALUES[codes] * factors


class Fp8Files:
  """The tensors of a folder, with floats in place of FP8.

  Tensors that are not in FP8 are read as by `hf_files.WeightFiles`.

  shapes: tensor name -> dimensions.
  dtypes: tensor name -> safetensors' name of the type.
  """

  def __init__(self, files: Any):
    """Wraps a folder's tensors, such as `hf_files.WeightFiles`.

    Raises:
      ValueError: a tensor's factors are missing or do not match.
    """
    self._files = files
    self.shapes, self.dtypes = dict(files.shapes), dict(files.dtypes)
    packed = [n for n, dtype in files.dtypes.items() if dtype == TYPE]
    self._packed = set(packed)
    for name in sorted(packed):
      shape = files.shapes[name]
      blocks = *shape[:-2], *(-(-size // BLOCK) for size in shape[-2:])
      scales = self.shapes.pop(name + _SCALE, None)
      dtype = self.dtypes.pop(name + _SCALE, None)
      if scales != blocks or dtype not in _FLOATS or len(shape) < 2:
        actual = "missing" if scales is None else f"{list(scales)} of {dtype}"
        raise ValueError(
            f"tensor {name} {list(shape)} in FP8: {name}{_SCALE} is {actual};"
            f" must be {list(blocks)} of {', '.join(_FLOATS)}, with a"
            f" factor per block of {BLOCK} x {BLOCK}"
        )
      self.dtypes[name] = "F32"

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor, as a copy."""
    codes = self._files.read(name, index)
    if name not in self._packed:
      return codes
    ranges = [s.indices(n) for s, n in zip(index, self.shapes[name])][-2:]
    blocks = [slice(a // BLOCK, -(-b // BLOCK)) for a, b, _ in ranges]
    scales = self._files.read(name + _SCALE, (*index[:-2], *blocks))
    return dequantize(codes, scales, tuple(a % BLOCK for a, _, _ in ranges))

  def damaged(self, part: int = 0, num_parts: int = 1) -> list[str]:
    """Returns the names of tensors that changed since they were written."""
    return self._files.damaged(part, num_parts)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads slices of MXFP4 experts, in which gpt-oss is published, as floats.

Two tensors store the experts' matrices: `NAME_blocks` has blocks of 32 4-bit
numbers along the inputs, two per byte, the lower four bits first;
`NAME_scales` has each block's exponent of 2, plus 127. They appear here as one
tensor `NAME`, whose inputs come before the outputs.

Source: Open Compute Project 2023, "OCP Microscaling Formats (MX)
Specification", as read by Hugging Face's `convert_moe_packed_tensors`.

Axes: E experts, F outputs, D inputs, N = D / 32 blocks of an output. Does not
import JAX.
"""

from typing import Any

import numpy as np

# Numbers per block, and bytes per block.
BLOCK = 32
_BYTES = 16
_BIAS = 127
_PARTS = ("blocks", "scales")
# The 4-bit numbers: one sign bit, two exponent bits and one mantissa bit.
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_HALF, *(-x for x in _HALF)], np.float32)
# The two numbers in each byte, viewed as one 8-byte integer.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
_PAIRS = np.ascontiguousarray(_PAIRS).view(np.uint64)[:, 0]


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns [E, D, F] float32; entries whose scale means NaN are not finite.

  Args:
    blocks: [E, F, N, 16] uint8.
    scales: [E, F, N] uint8.
  """
  values = _PAIRS[blocks].view(np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    values *= powers[..., None]
  return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


class Mxfp4Files:
  """The tensors of a folder, with floats in place of MXFP4.

  Tensors that are not in MXFP4 are read as by `hf_files.WeightFiles`.

  shapes: tensor name -> dimensions.
  dtypes: tensor name -> safetensors' name of the type.
  """

  def __init__(self, files: Any):
    """Wraps a folder's tensors, such as `hf_files.WeightFiles`.

    Raises:
      ValueError: the blocks and scales of a tensor do not match.
    """
    self._files = files
    self.shapes, self.dtypes = dict(files.shapes), dict(files.dtypes)
    ends = tuple(f"_{part}" for part in _PARTS)
    packed = [name for name in files.shapes if name.endswith(ends)]
    self._packed = {name.rpartition("_")[0] for name in packed}
    for name in sorted(self._packed):
      blocks, scales = (files.shapes.get(f"{name}{end}", ()) for end in ends)
      dtypes = {files.dtypes.get(f"{name}{end}") for end in ends}
      if len(scales) != 3 or blocks != (*scales, _BYTES) or dtypes != {"U8"}:
        raise ValueError(
            f"tensor {name} in MXFP4: {name}_blocks has shape {list(blocks)}"
            f" and {name}_scales {list(scales)}; must be [E, F, N, {_BYTES}]"
            " and [E, F, N] of U8"
        )
      E, F, N = scales
      self.shapes[name], self.dtypes[name] = (E, N * BLOCK, F), "F32"
    for name in packed:
      del self.shapes[name], self.dtypes[name]

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor, as a copy."""
    if name not in self._packed:
      return self._files.read(name, index)
    experts, inputs, outputs = index
    first, stop, _ = inputs.indices(self.shapes[name][1])
    start = first // BLOCK
    own = (experts, outputs, slice(start, -(-stop // BLOCK)), slice(None))
    values = dequantize(
        self._files.read(f"{name}_blocks", own),
        self._files.read(f"{name}_scales", own[:3]),
    )
    return values[:, first - start * BLOCK : stop - start * BLOCK]

  def damaged(self, part: int = 0, num_parts: int = 1) -> list[str]:
    """Returns the names of tensors that changed since they were written."""
    return self._files.damaged(part, num_parts)

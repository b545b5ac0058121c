# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4 as tensors of floats, in slices; as gpt-oss is published.

A matrix of experts is two tensors: `NAME_blocks` has blocks of 32 numbers of 4
bits along the inputs, of which a byte holds two, the lower four bits first;
`NAME_scales` has the exponent of 2 of each block, plus 127. They take the place
of a tensor `NAME`, whose inputs come before the outputs.

Source: Open Compute Project 2023, "OCP Microscaling Formats (MX)
Specification", as read by Hugging Face's `convert_moe_packed_tensors`.

Axes: E experts, F outputs, D inputs, N = D / 32 blocks of an output. Does not
import JAX.
"""

import numpy as np

from tba_jax.models.hf import hf_files

# Numbers of a block, and its bytes.
BLOCK = 32
_BYTES = 16
_BIAS = 127
_PARTS = ("blocks", "scales")
# Numbers of 4 bits: a sign, two bits of exponent and one of mantissa.
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_HALF, *(-x for x in _HALF)], np.float32)
# Both numbers of each byte, as one of 8 bytes.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
_PAIRS = np.ascontiguousarray(_PAIRS).view(np.uint64)[:, 0]


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns [E, D, F] float32, not finite where a scale stands for NaN.

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

  Others are as in `hf_files.WeightFiles`.

  shapes: sizes of axes by tensor name.
  dtypes: safetensors' names of number formats by tensor name.
  """

  def __init__(self, files: hf_files.AnyFiles):
    """Takes the folder's tensors.

    Raises:
      ValueError: blocks and scales of a tensor do not fit each other.
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
    """Returns the tensors that changed since they were written, by name."""
    return self._files.damaged(part, num_parts)

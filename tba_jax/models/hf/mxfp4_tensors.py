# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4 as tensors of floats, in slices; as gpt-oss is published.

A matrix of experts is two tensors: `NAME_blocks` has blocks of 32 numbers of 4
bits along the inputs, of which a byte holds two, the lower four bits first;
`NAME_scales` has the exponent of 2 of each block, plus 127. They take the place
of a tensor `NAME`, whose inputs come before the outputs.

Source: Open Compute Project 2023, "OCP Microscaling Formats (MX)
Specification", §5.1 and §6.3, as read by Hugging Face's
`convert_moe_packed_tensors`.

Axes: E experts, F outputs, D inputs, N = D / 32 blocks of an output. Does not
import JAX.
"""

from collections.abc import Callable, Mapping

import numpy as np

# Numbers of a block, and its bytes.
BLOCK = 32
_BYTES = 16
_BIAS = 127
# Numbers of 4 bits: a sign, two bits of exponent and one of mantissa.
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_HALF, *(-x for x in _HALF)], np.float32)
# Both numbers of each byte, as one of 8 bytes.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
_PAIRS = np.ascontiguousarray(_PAIRS).view(np.uint64)[:, 0]

Shape = tuple[int, ...]


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


def unpacked_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
  """Returns the shape [E, D, F] of each tensor in MXFP4, by its `NAME`.

  Args:
    shapes: shapes of all tensors of a folder.

  Raises:
    ValueError: blocks and scales of a tensor do not fit each other.
  """
  names = {
      name.removesuffix(end)
      for name in shapes
      for end in ("_blocks", "_scales")
      if name.endswith(end)
  }
  out = {}
  for name in sorted(names):
    blocks, scales = (
        shapes.get(f"{name}_{part}", ()) for part in ("blocks", "scales")
    )
    if len(scales) != 3 or blocks != (*scales, _BYTES):
      raise ValueError(
          f"tensor {name} in MXFP4: {name}_blocks has shape {list(blocks)} and"
          f" {name}_scales {list(scales)}; must be [E, F, N, {_BYTES}] and [E,"
          " F, N]"
      )
    E, F, N = scales
    out[name] = (E, N * BLOCK, F)
  return out


def read(
    read_raw: Callable[[str, tuple[slice, ...]], np.ndarray],
    name: str,
    shape: Shape,
    index: tuple[slice, ...],
) -> np.ndarray:
  """Returns a slice of a tensor as float32.

  Args:
    read_raw: (name, index) -> slice of a tensor of the folder.
    name: name of the tensor, without "_blocks".
    shape: its shape, of `unpacked_shapes`.
    index: slice of it.
  """
  experts, inputs, outputs = index
  first, stop, _ = inputs.indices(shape[1])
  start = first // BLOCK
  own = (experts, outputs, slice(start, -(-stop // BLOCK)))
  values = dequantize(
      read_raw(f"{name}_blocks", (*own, slice(None))),
      read_raw(f"{name}_scales", own),
  )
  return values[:, first - start * BLOCK : stop - start * BLOCK]

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of meshes, without JAX."""

from collections.abc import Mapping
import math


def cut_rows(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Returns the axis sizes of a smaller mesh for the same params.

  `tensor` and `fsdp` are the largest divisors of the larger mesh's that fit,
  so params that divide there divide here; `data` takes the other devices.

  Args:
    sizes: axis sizes of the larger mesh.
    num_devices: number of devices of the smaller mesh.
  """
  tensor = math.gcd(sizes["tensor"], num_devices)
  fsdp = math.gcd(sizes["fsdp"], num_devices // tensor)
  data = num_devices // tensor // fsdp
  return {"data": data, "fsdp": fsdp, "sequence": 1, "tensor": tensor}

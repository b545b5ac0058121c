# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of devices as their makers describe them: memory, bandwidth, flops.

Peaks of dense products. A program reaches a part of them; `plan` says "at
most". No JAX here.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
  """One kind of device.

  memory_bytes: of one device. A program gets some percent less.
  bytes_per_s: between memory and the units that compute.
  bfloat16_flops: a second, of products of bfloat16.
  float32_flops: the same of float32 as JAX multiplies them by default: in
    bfloat16 passes on a TPU, in TF32 on a GPU.
  source: where these figures are published.
  """

  memory_bytes: float
  bytes_per_s: float
  bfloat16_flops: float
  float32_flops: float
  source: str

  def flops(self, dtype: str) -> float:
    """Returns the flops a second of products of a dtype."""
    return self.float32_flops if dtype == "float32" else self.bfloat16_flops


def _device(
    gib: float, gb_per_s: float, bfloat16: float, float32: float, source: str
) -> Device:
  return Device(
      gib * 2**30, gb_per_s * 1e9, bfloat16 * 1e12, float32 * 1e12, source
  )


_TPU = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# GiB, GB/s, teraflops of bfloat16 and float32.
DEVICES = {
    "v4": _device(32, 1200, 275, 275, _TPU + "v4"),
    "v5e": _device(16, 819, 197, 197, _TPU + "v5e"),
    "v5p": _device(95, 2765, 459, 459, _TPU + "v5p"),
    "v6e": _device(32, 1640, 918, 918, _TPU + "v6e"),
    # The SXM modules; makers' figures "with sparsity" are twice these.
    "a100-40": _device(40, 1555, 312, 156, _NVIDIA + "a100/"),
    "a100-80": _device(80, 2039, 312, 156, _NVIDIA + "a100/"),
    "h100": _device(80, 3350, 989, 494, _NVIDIA + "h100/"),
    "h200": _device(141, 4800, 989, 494, _NVIDIA + "h200/"),
    "l4": _device(24, 300, 121, 60, _NVIDIA + "l4/"),
    # One core at 2.45 GHz with two 8-lane multiply-adds a cycle, one channel of
    # DDR4-3200, and the 4 GB a core of a usual cloud machine.
    "cpu": _device(
        *(4, 25.6, 0.0784, 0.0784),
        "https://www.amd.com/en/products/processors/server/epyc/7003-series"
        "/amd-epyc-7763.html",
    ),
}


def of_kind(kind: str) -> Device:
  """Returns a kind of device.

  Raises:
    ValueError: it is not in the table; the message lists what is.
  """
  if kind.lower() not in DEVICES:
    raise ValueError(
        f"device kind {kind!r}: allowed are {', '.join(sorted(DEVICES))}"
    )
  return DEVICES[kind.lower()]

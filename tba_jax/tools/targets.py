# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Accelerators that `compile` can target; none needs to be present.

A target is a generation and a shape: a TPU slice such as "v5e:4x4", or GPUs,
such as "h100:8" of one host and "h100:8x8", eight hosts of eight.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.util
import math
import os
import re

import jax
from jax.experimental import topologies

from tba_jax.system import accelerators


@dataclasses.dataclass(frozen=True)
class Chip:
  """Memory and peak rates of a kind of chip.

  hbm_bytes: memory that programs may use: for a TPU as its compiler reports it,
    for a GPU the share that JAX takes (`accelerators.GPU_MEMORY`).
  flops_per_s: peak rate in bfloat16.
  memory_bytes_per_s: peak rate of the main memory.
  link_bytes_per_s: rate at which the links receive: half of the bidirectional
    bandwidth; for GPUs this is NVLink, which does not leave the host.
  network_bytes_per_s: rate at which a GPU receives from other hosts over its
    own network card; the links of a TPU slice connect all of its hosts.
  """

  hbm_bytes: int
  flops_per_s: float
  memory_bytes_per_s: float
  link_bytes_per_s: float
  network_bytes_per_s: float = math.inf


@dataclasses.dataclass(frozen=True)
class _Gpu:
  """A GPU's specification.

  name: JAX's device kind.
  major: CUDA compute capability; its minor number is 0.
  cores: number of streaming multiprocessors.
  lanes: float32 lanes per multiprocessor.
  shared_kib: shared memory per multiprocessor; a block may use all but 1 KiB.
  l2_mib, memory_gib: L2 cache, and memory as the driver reports it.
  memory_bytes_per_s, clock_ghz: bandwidth of the memory, and boost clock.
  flops_per_s, link_bytes_per_s, network_bytes_per_s: fields of `Chip`.
  """

  name: str
  major: int
  cores: int
  lanes: int
  shared_kib: int
  l2_mib: int
  memory_gib: float
  memory_bytes_per_s: float
  clock_ghz: float
  flops_per_s: float
  link_bytes_per_s: float
  network_bytes_per_s: float


# Sources: NVIDIA's architecture white papers and data sheets of A100 (SXM4),
# H100 (SXM5) and H200, without sparsity. Networks as of DGX A100 and
# H100, with one card per GPU of 200 and 400 Gb/s.
_A100 = _Gpu(
    "NVIDIA A100-SXM4-80GB", 8, 108, 64, 164, 40, 79.2, 2.04e12, 1.41,
    312e12, 300e9, 25e9,
)  # fmt: skip
_H100 = _Gpu(
    "NVIDIA H100 80GB HBM3", 9, 132, 128, 228, 50, 79.1, 3.35e12, 1.98,
    989e12, 450e9, 50e9,
)  # fmt: skip
_GPUS = {
    "a100": _A100,
    "a100-40": dataclasses.replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory_gib=39.4,
        memory_bytes_per_s=1.56e12,
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100, name="NVIDIA H200", memory_gib=139.8, memory_bytes_per_s=4.8e12
    ),
}  # fmt: skip
# Maximum chips per machine, by generation.
_MACHINE = {"v4": 4, "v5e": 8, "v5p": 4, "v6e": 8}

# Chips by JAX's device kind. Rates of TPUs: docs.cloud.google.com/tpu/docs/v4,
# v5e, v5p, v6e.
CHIPS = {
    "TPU v4": Chip(int(30.75 * 2**30), 275e12, 1.228e12, 300e9),
    "TPU v5 lite": Chip(int(15.75 * 2**30), 197e12, 0.819e12, 200e9),
    "TPU v5": Chip(int(95.74 * 2**30), 459e12, 2.765e12, 600e9),
    "TPU v6 lite": Chip(int(31.25 * 2**30), 918e12, 1.64e12, 400e9),
} | {
    gpu.name: Chip(
        int(accelerators.GPU_MEMORY * gpu.memory_gib * 2**30),
        gpu.flops_per_s,
        gpu.memory_bytes_per_s,
        gpu.link_bytes_per_s,
        gpu.network_bytes_per_s,
    )
    for gpu in _GPUS.values()
}

# Options for compiling without a device to time kernels on.
_GPU_OPTIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}
# Template of XLA's GpuTargetConfigProto with the values that all GPUs here
# share.
_DESCRIPTION = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} {features} }}
  core_count: {cores}
  fpus_per_core: {lanes}
  clock_rate_ghz: {clock_ghz}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_bytes}
  shared_memory_per_core: {core_bytes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  l2_cache_size: {l2_bytes}
  memory_bandwidth: {memory_bytes_per_s:.0f}
  device_memory_size: {memory_bytes}
  driver_version: "12.8.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def describe(kind: str) -> str:
  """Returns the text of XLA's GpuTargetConfigProto for a kind of GPU."""
  gpu = _GPUS[kind]
  return _DESCRIPTION.format(
      **dataclasses.asdict(gpu),
      # Hopper only: "sm_90a", which enables its asynchronous matrix products.
      features="feature_extension: ACCELERATED_FEATURES" * (gpu.major == 9),
      block_bytes=(gpu.shared_kib - 1) * 2**10,
      core_bytes=gpu.shared_kib * 2**10,
      l2_bytes=gpu.l2_mib * 2**20,
      memory_bytes=int(gpu.memory_gib * 2**30),
  )


def devices(name: str) -> list[jax.Device]:
  """Returns the devices of a target to compile for.

  Raises:
    ValueError: the target is unknown, or its compiler is not installed.
  """
  kind, _, shape = name.partition(":")
  # JAX must not initialize any accelerator.
  jax.config.update("jax_platforms", "cpu")
  try:
    if kind in _GPUS:
      return _gpu_devices(kind, shape)
    return _tpu_devices(name)
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise ValueError(
        f"topology {name!r}: {error}; must be one such as v5e:2x2, v5e:4x4,"
        " v6e:2x4, v5p:2x2x1, v4:2x2x1, or h100:8 for eight GPUs of a host and"
        f" h100:8x8 for eight such hosts, of {', '.join(_GPUS)}"
    ) from error


def _gpu_devices(kind: str, shape: str) -> list[jax.Device]:
  plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
  if not any(map(importlib.util.find_spec, plugins)):
    raise ValueError(
        "the compiler of GPUs is not installed: pip install 'tba_jax[cuda]'"
    )
  if not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", shape):
    raise ValueError("names no number of GPUs")
  hosts = shape if "x" in shape else f"1x{shape}"
  return list(
      topologies.get_topology_desc(
          platform="cuda", target_config=describe(kind), topology=f"1x{hosts}"
      ).devices
  )


def _tpu_devices(name: str) -> list[jax.Device]:
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("libtpu is not installed: pip install 'tba_jax[tpu]'")
  # The compiler must not look for a TPU.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  return list(
      topologies.get_topology_desc(platform="tpu", topology_name=name).devices
  )


def host_size(chips: Sequence[jax.Device]) -> int:
  """Returns the GPUs per host; 0 if no network connects the devices."""
  hosts = {chip.process_index for chip in chips}
  if chips[0].platform != "gpu" or len(hosts) == 1:
    return 0
  return len(chips) // len(hosts)


def machine_size(name: str) -> int:
  """Returns the maximum chips per machine; a trainer may use only some."""
  kind, _, shape = name.partition(":")
  if kind not in _GPUS:
    return _MACHINE.get(kind, 1)
  return int(shape) if shape.isdigit() else 1


def compiler_options(device: jax.Device) -> Mapping[str, object]:
  """Returns the options for compiling for an absent device."""
  return _GPU_OPTIONS if device.platform == "gpu" else {}

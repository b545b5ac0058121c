# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Accelerators of this machine, and their split over the processes of a run.

Accelerators are counted without initializing them: a TPU chip serves one
process, and a process that initializes all GPUs takes memory on each.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import ml_collections

from tba_jax.system import processes

CPU = "cpu"
# Memory of one device in GiB, as published by its maker.
DEVICE_GIB = {
    "v4": 32,
    "v5e": 16,
    "v5p": 95,
    "v6e": 32,
    "a100-40": 40,
    "a100-80": 80,
    "h100": 80,
    "h200": 141,
    "l4": 24,
    "t4": 16,
}
# Number of a process's chips on one host -> their shape.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_FIRST_TPU_PORT = 8476
# Share of a GPU's memory that the processes on it take together.
GPU_MEMORY = 0.9
_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
DEV = pathlib.Path("/dev")
_CUDA = tuple(f"jax_cuda{n}_plugin" for n in (12, 13, 14))
# Name in JAX_PLATFORMS -> packages, any one of which is enough.
_PACKAGES = {"cpu": (), "cuda": _CUDA, "gpu": _CUDA, "tpu": ("libtpu",)}
_NVIDIA_SMI = [
    "nvidia-smi",
    "--query-gpu=index,memory.total,name",
    "--format=csv,noheader,nounits",
]
# Prints the same from CUDA's driver. It makes no context, which would take
# memory on each GPU, and prints nothing without a driver.
ASK_CUDA = """
import ctypes
try:
  cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
  raise SystemExit
def call(name, *args):
  status = getattr(cuda, name)(*args)
  if status == 100:  # CUDA_ERROR_NO_DEVICE
    raise SystemExit
  if status:
    raise SystemExit(f"{name}: CUDA error {status}")
count, device = ctypes.c_int(), ctypes.c_int()
size, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
for i in range(count.value):
  call("cuDeviceGet", ctypes.byref(device), i)
  call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
  call("cuDeviceGetName", name, len(name), device)
  print(i, size.value >> 20, name.value.decode(), sep=", ")
"""
_CPUINFO = pathlib.Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Accelerators:
  """The accelerators that JAX would find here.

  kind: "gpu", "tpu" or "cpu" (none).
  ids: values for CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS.
  """

  kind: str
  ids: tuple[str, ...] = ()


def find(environment: Mapping[str, str] = os.environ) -> Accelerators:
  """Returns the accelerators that a process with this environment would use."""
  platforms = environment.get("JAX_PLATFORMS") or "tpu,cuda,gpu"
  if "tpu" in platforms and importlib.util.find_spec("libtpu"):
    chips = environment.get("TPU_VISIBLE_CHIPS")
    chips = _tpu_chips() if chips is None else chips.split(",")
    if chips:
      return Accelerators("tpu", tuple(chips))
  if "cuda" in platforms or "gpu" in platforms:
    if any(map(_is_installed, _CUDA)):
      gpus = environment.get("CUDA_VISIBLE_DEVICES")
      if gpus is None:
        gpus = [index for index, *_ in list_gpus()]
      else:
        gpus = [index for index in gpus.split(",") if index]
      if gpus:
        return Accelerators("gpu", tuple(gpus))
  return Accelerators(CPU)


def memory() -> tuple[str, int, int, str]:
  """Returns kind, GiB per device, number and description of devices here.

  The kind is "cpu", "gpu", or a TPU generation such as "v5e", which also stands
  for unknown generations.
  """
  machine = find()
  if machine.kind == CPU:
    gib = processes.memory()[0] // 2**30
    return CPU, gib, 1, f"this machine's CPU, {gib} GiB"
  count = len(machine.ids)
  if machine.kind == "gpu":
    unknown = "", 16 * 1024, "GPU of unknown memory"
    _, mib, name = min(list_gpus() or [unknown], key=lambda gpu: gpu[1])
    gib = round(mib / 1024)
    return "gpu", gib, count, f"{count} x {name}, {gib} GiB each"
  text = os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
  kind = text.replace("v5litepod", "v5e")
  kind = kind if kind in DEVICE_GIB else "v5e"
  gib = DEVICE_GIB[kind]
  return kind, gib, count, f"{count} x TPU {kind}, {gib} GiB each"


def check_platforms() -> None:
  """Raises ValueError if JAX_PLATFORMS names an uninstalled platform."""
  available = [
      name
      for name, packages in _PACKAGES.items()
      if not packages or any(map(_is_installed, packages))
  ]
  for name in filter(None, os.environ.get("JAX_PLATFORMS", "").split(",")):
    # Another plug-in may have any name.
    is_known = name in _PACKAGES or not _has_other_plugins()
    if is_known and name not in available:
      raise ValueError(
          f"JAX_PLATFORMS={name!r}: not installed here; must be one of"
          f" {', '.join(available)}, or '' for what JAX finds"
      )


def prepare() -> None:
  """Sets variables that JAX reads at its start on a GPU, if not set already.

  This process may take most of the memory; JAX's default is 3/4. The rest is
  for libraries and for CUDA itself.

  XLA's command buffers (CUDA graphs) are off: while one thread records a graph,
  CUDA refuses calls from other threads, and our threads share a GPU.
  """
  os.environ.setdefault(_MEMORY_SHARE, str(GPU_MEMORY))
  flags = os.environ.get("XLA_FLAGS", "")
  if find().kind == "gpu" and _COMMAND_BUFFERS not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {_COMMAND_BUFFERS}".strip()


def _has_other_plugins() -> bool:
  """Returns whether JAX has plug-ins for devices other than NVIDIA GPUs."""
  names = [p.name for p in importlib.metadata.entry_points(group="jax_plugins")]
  spec = importlib.util.find_spec("jax_plugins")
  folders = spec.submodule_search_locations if spec else []
  names += [module.name for module in pkgutil.iter_modules(folders)]
  return not all("cuda" in name for name in names)


def _is_installed(package: str) -> bool:
  return bool(importlib.util.find_spec(package))


def multiplies_bfloat16(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
  """Returns whether the CPU has instructions for bfloat16 products."""
  try:
    match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M)
  except OSError:
    return False
  flags = match[1].split() if match else []
  return "avx512_bf16" in flags or "amx_bf16" in flags


def _tpu_chips() -> list[str]:
  """Returns the indices of the host's TPU chips."""
  # /dev/vfio has a file for each chip of newer generations, and one "vfio".
  for folder, prefix in ((DEV, "accel"), (DEV / "vfio", "")):
    names = [p.name.removeprefix(prefix) for p in folder.glob(f"{prefix}*")]
    count = sum(name.isdigit() for name in names)
    if count:
      return [str(i) for i in range(count)]
  return []


@functools.cache
def list_gpus() -> list[tuple[str, int, str]]:
  """Returns index, MiB and name of each GPU; cached.

  Containers may lack nvidia-smi, or have it in a folder outside PATH: then the
  CUDA driver is queried for the GPUs that JAX would find.
  """
  commands = _NVIDIA_SMI, [sys.executable, "-c", ASK_CUDA]
  for command in commands:
    try:
      listed = subprocess.run(
          command, capture_output=True, check=True, text=True, timeout=30
      )
    except FileNotFoundError:
      continue
    except (OSError, subprocess.SubprocessError) as error:
      print(
          f"warning: no GPU is used, since {command[0]} failed ({error});"
          " CUDA_VISIBLE_DEVICES=0,1 names GPUs without it",
          file=sys.stderr,
      )
      return []
    rows = [x.split(", ", 2) for x in listed.stdout.splitlines() if x]
    return [(index, int(mib), name) for index, mib, name in rows]
  return []


def assign(
    machine: Accelerators,
    devices: Mapping[str, str],
    trainers: Sequence[int],
    searchers: Sequence[int],
) -> dict[str, list[dict[str, str]]]:
  """Splits the accelerators over the processes of a run.

  By default the trainer takes the first accelerators and each searcher the next
  ones. With run.processes="many", all processes share a single GPU; with a
  single TPU chip, searchers use the CPU.

  Args:
    devices: settings `trainer` and `searcher`: "" for the default, "cpu", or
      indices of accelerators such as "0", "0,1" or "0-3".

  Returns:
    For `trainer` and `searcher`, the environment of each of their processes.

  Raises:
    ValueError: an accelerator does not exist, or there are too few.
  """
  if machine.kind == CPU:
    for role in ("trainer", "searcher"):
      if devices[role] not in ("", CPU):
        raise ValueError(
            f"config.devices.{role}={devices[role]!r}: JAX finds no accelerator"
            " on this machine; must be '' or 'cpu'"
        )
    return {"trainer": [{}] * len(trainers), "searcher": [{}] * len(searchers)}
  if machine.kind == "tpu" and len(trainers) > 1:
    raise ValueError(
        f"config.trainer.num_processes={len(trainers)}: must be 1 on a TPU host"
    )
  count, chosen = len(machine.ids), dict(devices)
  if count == 1 and not any(chosen.values()) and searchers:
    if machine.kind == "tpu":
      chosen["searcher"] = CPU
    elif max(*trainers, *searchers) == 1:
      env = _environment(machine, [0], len(trainers) + len(searchers))
      return {
          "trainer": [env] * len(trainers),
          "searcher": [env] * len(searchers),
      }
  requested = {
      role: processes.parse_cores(text) if text not in ("", CPU) else []
      for role, text in chosen.items()
  }
  # By default, roles take accelerators that no setting names.
  free = [i for i in range(count) if i not in sum(requested.values(), [])]
  out = {}
  for role, sizes in (("trainer", trainers), ("searcher", searchers)):
    if chosen[role] == CPU:
      out[role] = [{"JAX_PLATFORMS": CPU}] * len(sizes)
      continue
    pool = [i for i in requested[role] if i < count] or free
    if sum(sizes) > len(pool) or max(requested[role], default=0) >= count:
      raise ValueError(
          f"config.devices.{role}={devices[role]!r}: {len(sizes)} process(es)"
          f" need {sum(sizes)} {machine.kind} device(s) in all; this machine"
          f" has {count}, and {len(pool)} for them. Allowed: fewer searchers"
          " (search.num_searchers), a smaller mesh, or 'cpu'"
      )
    ends = itertools.accumulate(sizes)
    out[role] = [
        _environment(machine, pool[end - size : end], 1)
        for size, end in zip(sizes, ends)
    ]
    free = [i for i in free if i not in pool[: sum(sizes)]]
  return out


def _environment(
    machine: Accelerators, indices: Sequence[int], sharing: int
) -> dict[str, str]:
  """Returns the variables that show a process only these accelerators."""
  ids = ",".join(machine.ids[i] for i in indices)
  if machine.kind == "gpu":
    out = {"CUDA_VISIBLE_DEVICES": ids}
    # Keep a share that the user has set.
    if sharing > 1 and _MEMORY_SHARE not in os.environ:
      out[_MEMORY_SHARE] = f"{GPU_MEMORY / sharing:.3f}"
    return out
  if len(indices) == len(machine.ids):
    return {}
  bounds = _TPU_BOUNDS.get(len(indices))
  if bounds is None:
    raise ValueError(
        f"{len(indices)} TPU chips for one process: must be one of"
        f" {', '.join(map(str, _TPU_BOUNDS))}, or all of the host"
    )
  port = str(_FIRST_TPU_PORT + indices[0])
  return {
      "TPU_VISIBLE_CHIPS": ids,
      "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
      "TPU_PROCESS_BOUNDS": "1,1,1",
      "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
      "TPU_PROCESS_PORT": port,
      "CLOUD_TPU_TASK_ID": "0",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }


def of_run(
    config: ml_collections.ConfigDict, *, alone: bool = False
) -> dict[str, list[dict[str, str]]]:
  """Returns the environments that give a run's processes their accelerators.

  Args:
    config: only `devices`, `mesh`, `trainer` and `search` are read.
    alone: whether one process takes all of the trainer's devices and there are
      no searchers, as in fine-tuning.

  Raises:
    ValueError: the machine has too few accelerators, or lacks named ones.
  """
  trainer, search = config.trainer, config.search
  devices = config.devices.to_dict()
  for role, section in (("trainer", trainer), ("searcher", search)):
    if section.cpu_devices:
      devices[role] = CPU
  size = math.prod(config.mesh.values())
  trainers = [size // trainer.num_processes] * trainer.num_processes
  searchers = [math.prod(search.mesh.values())] * search.num_searchers
  return assign(
      find(),
      devices,
      [size] if alone else trainers,
      [] if alone else searchers,
  )


def one_process(config: ml_collections.ConfigDict) -> tuple[bool, str]:
  """Returns whether `train` runs the roles in one process, and why.

  With "auto", one process if this machine has a single accelerator: a TPU chip
  serves one process, and two processes would split a GPU's memory.
  """
  setting = config.run.processes
  if setting != "auto":
    return setting == "one", f"config.run.processes={setting!r}"
  machine, trainer, search = find(), config.trainer, config.search
  sizes = *config.mesh.values(), *search.mesh.values(), trainer.num_processes
  if machine.kind == CPU:
    return False, "no accelerator here"
  if len(machine.ids) > 1:
    return False, f"{len(machine.ids)} {machine.kind}s here"
  if math.prod(sizes) > 1:
    return False, "a role of several devices"
  assigned = *config.devices.values(), trainer.cpu_devices, search.cpu_devices
  if any(assigned):
    return False, "config.devices or cpu_devices assign devices to roles"
  if config.store.address or config.store.locator:
    return False, "config.store lets searchers of other hosts join"
  return True, f"a single {machine.kind} here"


def describe(environments: Sequence[Mapping[str, str]]) -> str:
  """Returns the accelerators of a role's processes in words."""
  names = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "JAX_PLATFORMS")
  return "; ".join(
      next((env[name] for name in names if name in env), "all")
      for env in environments
  )

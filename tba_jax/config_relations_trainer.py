# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the processes of a trainer must be to its mesh. No JAX here."""

from collections.abc import Iterator, Mapping
import math
from typing import Any


def problems(c: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """The mesh is of all devices of all processes of the trainer."""
  size = math.prod(c[f"mesh.{axis}"] for axis in ("data", "fsdp", "tensor"))
  num_processes, cpu_devices = (
      c["trainer.num_processes"],
      c["trainer.cpu_devices"],
  )
  if size % num_processes:
    yield "trainer.num_processes", (
        f"allowed a divisor of {size}, the devices of config.mesh"
    )
  elif cpu_devices and cpu_devices * num_processes != size:
    yield "trainer.cpu_devices", (
        f"allowed 0 or {size // num_processes}: the devices of all processes"
        f" are the {size} of config.mesh"
    )

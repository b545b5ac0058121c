# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several CPU devices in one process, for tests of meshes.

JAX makes its devices once, so a file that needs several runs in its own
process.
"""

import os

from absl.testing import absltest
import jax

# Devices that meet in a collective each hold a thread. On few cores XLA has no
# more threads than devices, and it ends a process whose devices wait for long.
_THREADS_PER_DEVICE = 2
# Below the time limit of a test, which tells where it stands.
_COLLECTIVE_DEADLINE_S = 240


def make(count: int) -> None:
  """Lets JAX make `count` devices; call it when the test file is imported."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["NPROC"] = str(_THREADS_PER_DEVICE * count)
  flags = (
      f"--xla_force_host_platform_device_count={count}",
      "--xla_cpu_collective_call_terminate_timeout_seconds"
      f"={_COLLECTIVE_DEADLINE_S}",
  )
  os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))


def skip_without(count: int) -> None:
  """Skips the tests of a module if another file has made JAX's devices."""
  if jax.device_count() != count:
    raise absltest.SkipTest(
        f"jax was started without {count} devices: run this file alone"
    )

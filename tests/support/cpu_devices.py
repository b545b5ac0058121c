# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several CPU devices in one process, for tests of meshes.

JAX creates devices once per process, so a test file that needs several runs in
a separate process.
"""

import os

from absl.testing import absltest
import jax

# Each device in a collective blocks a thread. On few cores XLA has no more
# threads than devices, and aborts if devices wait for too long.
_THREADS_PER_DEVICE = 2
# Below the time limit of tests, which reports the position of a hang.
_COLLECTIVE_DEADLINE_S = 240


def make(count: int) -> None:
  """Gives JAX `count` devices; call it while the test file is imported."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["NPROC"] = str(_THREADS_PER_DEVICE * count)
  flags = (
      f"--xla_force_host_platform_device_count={count}",
      "--xla_cpu_collective_call_terminate_timeout_seconds"
      f"={_COLLECTIVE_DEADLINE_S}",
  )
  os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))


def skip_without(count: int) -> None:
  """Skips a module's tests if JAX has another number of devices."""
  if jax.device_count() != count:
    raise absltest.SkipTest(
        f"jax was started without {count} devices: run this file alone"
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs for all batch sizes while the first data is sampled.

Packed batches come in a few sizes (`packing.Packing.sizes`). Without this
thread, the first batch of each size would compile while all devices idle, for
minutes on a TPU slice.

The thread only fills jit's cache: every process runs the same programs, whether
or not the thread finishes in time.
"""

from collections.abc import Callable, Sequence
from concurrent import futures

from absl import logging

from tba_jax.learning import packing
from tba_jax.system import processes


class CompileAhead:
  """Compiles for each size in a background thread.

  Args:
    sizes: packed shapes, largest first.
  """

  def __init__(
      self,
      sizes: Sequence[packing.Size],
      compile_size: Callable[[packing.Size], None],
  ):
    self._compile_size = compile_size
    self._thread = futures.ThreadPoolExecutor(1, processes.LEFT_BEHIND)
    self.jobs = {
        size: self._thread.submit(self._compile, size) for size in sizes
    }

  def wait(self, size: packing.Size) -> None:
    """Waits until the thread has compiled for `size`.

    If that failed, the step compiles by itself and raises the error.
    """
    if size in self.jobs:
      futures.wait([self.jobs[size]])

  def wait_all(self) -> None:
    """Waits until the thread has compiled for all sizes."""
    futures.wait(list(self.jobs.values()))

  def close(self) -> None:
    """Cancels pending compilations; one in progress cannot be stopped."""
    self._thread.shutdown(wait=False, cancel_futures=True)

  def _compile(self, size: packing.Size) -> None:
    try:
      self._compile_size(size)
    except Exception as error:  # The size may never be used.
      logging.warning("compiling ahead for rows %s failed: %s", size, error)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles for the next sizes of a batch while the devices train on this one.

The rows of a batch have few sizes (`packing.sizes`). A jitted function compiles
when it first meets one, minutes on a slice, and no device works meanwhile. The
sizes of a run drift, as its policy repeats itself more often: where one stays,
a thread compiles for its neighbors. It begins with the largest, while the first
data is sampled.

The thread only fills the cache of jit: the same program runs, in every process,
whether or not the thread was in time.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures

from absl import logging

from tba_jax.learning import packing
from tba_jax.system import processes

# Shorter runs compile nothing that they do not use.
STEPS_BEFORE_NEXT = 10


class CompileAhead:
  """Compiles in a thread for the first size, and for neighbors of used ones.

  Args:
    sizes: sizes of the packed rows, from large to small.
    compile_size: function that compiles all programs that depend on the size.
    neighbors: whether to compile for neighbors too. Where the devices are the
      host's own cores, compiling beside a step makes both slower.
  """

  def __init__(
      self,
      sizes: Sequence[packing.Size],
      compile_size: Callable[[packing.Size], None],
      *,
      neighbors: bool,
  ):
    self._sizes = sizes
    self._compile_size = compile_size
    self._neighbors = neighbors
    self._thread = futures.ThreadPoolExecutor(1, processes.LEFT_BEHIND)
    self.jobs = {sizes[0]: self._thread.submit(self._compile, sizes[0])}
    self._steps: collections.Counter[packing.Size] = collections.Counter()

  def wait(self, size: packing.Size) -> None:
    """Waits until the thread has compiled for `size`, if it is asked to.

    After a failure the step tries, and shows its error.
    """
    if size in self.jobs:
      futures.wait([self.jobs[size]])

  def wait_all(self) -> None:
    """Waits for all that the thread is asked to compile so far."""
    futures.wait(list(self.jobs.values()))

  def count(self, size: packing.Size) -> None:
    """Counts a step; after a few, compiles for the size's neighbors."""
    self._steps[size] += 1
    if not self._neighbors or self._steps[size] != STEPS_BEFORE_NEXT:
      return
    i = self._sizes.index(size)
    for near in (*self._sizes[i + 1 : i + 2], *self._sizes[max(i - 1, 0) : i]):
      if near not in self._steps and near not in self.jobs:
        self.jobs[near] = self._thread.submit(self._compile, near)

  def close(self) -> None:
    """Starts no other compilation; one in progress cannot be stopped."""
    self._thread.shutdown(wait=False, cancel_futures=True)

  def _compile(self, size: packing.Size) -> None:
    try:
      self._compile_size(size)
    except Exception as error:  # The size may never be used.
      logging.warning("compiling ahead for rows %s failed: %s", size, error)

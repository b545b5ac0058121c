# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer's other processes, which train on the batches of process 0."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from tba_jax import loop
from tba_jax import types
from tba_jax.learning import device_work
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.system import heartbeat
from tba_jax.system import processes


class Replica:
  """Source and learner of a process that repeats the calls of process 0."""

  def __init__(
      self, cluster: cluster_lib.Cluster, work: device_work.DeviceWork
  ):
    self._cluster = cluster
    self._work = work
    self._first = int(work.state.step)
    self._status = processes.EXIT_OK

  def __call__(self, should_stop: Callable[[], bool]) -> bool:
    """Returns True at the end of the run, False if it was interrupted.

    Raises:
      Ended: process 0 ended with an error.
      TransportError: process 0 is lost.
    """
    loop.run(self._batches(should_stop), self)
    if self._status not in (processes.EXIT_OK, processes.EXIT_INTERRUPTED):
      raise cluster_lib.Ended(self._status)
    return self._status == processes.EXIT_OK

  def step(self, batch: types.Batch) -> dict[str, jax.Array]:
    processes.note_begun("trainer")
    return self._work.train(batch)

  def _batches(
      self, should_stop: Callable[[], bool]
  ) -> Iterator[tuple[int, Any]]:
    """Yields the placed batch of each step; repeats the calls between steps."""
    activity = heartbeat.Activity(f"trainer-{self._cluster.process}")
    step, batch = self._first, None
    while True:
      activity.mark("wait_command", waits=True)
      command = self._cluster.receive(should_stop)
      activity.mark(command.name)
      if command.name == "end":
        self._status = command.fields["status"]
        return
      if command.name == "train":
        yield step, batch
        step += 1
      else:
        batch = device_work.follow(self._work, command, batch)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Train state owner; runs in lockstep on every process of the trainer.

The trainer's loop in process 0 calls `DeviceWork`; each method first broadcasts
a command, on which `Follower` in the other processes makes the same call.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax

from tba_jax import types
from tba_jax.system import processes
from tba_jax.training import checkpoint
from tba_jax.training import cluster as cluster_lib
from tba_jax.training import lora
from tba_jax.training import train_step as train_step_lib
from tba_jax.transport import carrier_orbax


class DeviceWork:
  """Owns the train state.

  Args:
    state: before the next step.
    train_step: jitted; donates the state.
    whole: merges adapters into the model's params.
    checkpointer: of this run.
    mesh: of all processes.
    cluster: connection to the other processes.
    peers: writes this process's shards of published params; None if process 0
      publishes everything.
  """

  def __init__(
      self,
      *,
      state: train_step_lib.TrainState,
      train_step: train_step_lib.TrainStep,
      whole: lora.ParamsMerger,
      checkpointer: checkpoint.Checkpointer,
      mesh: jax.sharding.Mesh,
      cluster: cluster_lib.Cluster,
      peers: carrier_orbax.Leader | carrier_orbax.Helper | None = None,
  ):
    self.peers = peers
    self._state = state
    self._train_step = train_step
    self._whole = whole
    self._checkpointer = checkpointer
    self._cluster = cluster
    self._gather = cluster.params_gatherer(mesh)

  @property
  def state(self) -> train_step_lib.TrainState:
    return self._state

  @property
  def may_leave_out(self) -> bool:
    """Whether training may continue without a checkpoint that failed.

    Not with several processes, since the others wait for this one's part.
    """
    return self._cluster.num_processes == 1

  @property
  def base(self) -> str:
    """Name of the adapters' base params; "" without adapters."""
    return self._whole.base

  def train(self, batch: types.Batch) -> dict[str, jax.Array]:
    """Dispatches a step on a placed batch; returns its metrics."""
    self._cluster.broadcast("train")
    self._state, metrics = self._train_step(self._state, batch)
    return metrics

  def gather(self, field: str = "params") -> types.PyTree:
    """Returns a field of the state, gathered to devices of this process.

    With one process this is the field itself, which the next step donates.
    """
    self._cluster.broadcast("gather", {"field": field})
    return self._gather(getattr(self._state, field))

  def publish(
      self,
      submit: Callable[[int, types.PyTree], int | None],
      version: int,
      field: str = "params",
  ) -> None:
    """Publishes a field of the state as a version.

    `submit` is `Publisher.submit` in process 0, `peers.submit` in the others.
    """
    if self.peers is None:
      submit(version, self.gather(field))
      return
    self._cluster.broadcast("publish", {"version": version, "field": field})
    replaced = submit(version, getattr(self._state, field))
    if replaced is not None:
      self._cluster.broadcast("forget", {"version": replaced})

  def gather_model(self) -> types.PyTree:
    """Returns the model's params with merged adapters, gathered as `gather`."""
    self._cluster.broadcast("gather_model")
    return self._gather(self._whole.params(self._state.params))

  def scale_learning_rate(self, factor: float) -> None:
    self._cluster.broadcast("scale", {"factor": factor})
    scale = self._state.learning_rate_scale * factor
    self._state = dataclasses.replace(self._state, learning_rate_scale=scale)

  def save(self, step: int, host_state: dict[str, Any], *, wait: bool) -> None:
    """Saves a checkpoint; raises OSError as `Checkpointer.save`."""
    self._cluster.broadcast("save", {"step": step, "wait": wait})
    host_state = {**host_state, "base": self._whole.base}
    self._checkpointer.save(step, self._state, host_state, wait=wait)

  def close(self) -> None:
    if self.peers is not None:
      self.peers.close()


class Follower:
  """Repeats the calls of process 0 in another process.

  Args:
    cluster: connection to the other processes.
    work: of this process.
    put_along: `batches.Placer.put_along`.
  """

  def __init__(
      self,
      cluster: cluster_lib.Cluster,
      work: DeviceWork,
      put_along: Callable[..., types.Batch],
  ):
    self._cluster = cluster
    self._work = work
    self._put_along = put_along
    self._batch: types.Batch | None = None

  def run(self, should_stop: Callable[[], bool]) -> bool:
    """Returns True at the end of the run, False if it was interrupted.

    Raises:
      Ended: process 0 ended with an error.
      TransportError: process 0 is lost.
    """
    while True:
      command = self._cluster.receive(should_stop)
      if command.name == "end":
        status = command.fields["status"]
        if status in (processes.EXIT_OK, processes.EXIT_INTERRUPTED):
          return status == processes.EXIT_OK
        raise cluster_lib.Ended(status)
      self._execute(command)

  def _execute(self, command: cluster_lib.Command) -> None:
    work, fields = self._work, command.fields
    if command.name == "place":
      self._batch = self._put_along(ref_params=work.state.ref_params, **fields)
    elif command.name == "train":
      work.train(self._batch)
    elif command.name == "gather":
      work.gather(fields["field"])
    elif command.name == "publish":
      work.publish(work.peers.submit, **fields)
    elif command.name == "forget":
      work.peers.forget(fields["version"])
    elif command.name == "gather_model":
      work.gather_model()
    elif command.name == "scale":
      work.scale_learning_rate(fields["factor"])
    elif command.name == "save":
      work.save(host_state={}, **fields)
    else:
      raise ValueError(f"unknown command {command.name!r} of process 0")

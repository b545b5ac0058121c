# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Owner of the train state, in lockstep on all trainer processes.

The learner in process 0 calls `DeviceWork`. Each method first broadcasts a
command, and `follow` makes the same call in the other processes.
"""

from collections.abc import Callable
import dataclasses
import functools
import os
import socket
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import types
from tba_jax.learning import checkpoint
from tba_jax.learning import compile_ahead
from tba_jax.learning import packing
from tba_jax.learning import published
from tba_jax.learning import train_step as train_step_lib
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.mesh import sharding
from tba_jax.policy import lora
from tba_jax.policy import reference_policy as reference_lib
from tba_jax.system import processes
from tba_jax.transport.params import peers as peers_lib
from tba_jax.transport.params import probe

# Answer to the probe: (params of the state, adapters' base) -> leaves.
Answer = Callable[[types.PyTree, types.PyTree], types.PyTree]


class DeviceWork:
  """Owns the train state and the reference policy.

  learning_rate_scale: factor on the learning rate of the next step.

  Args:
    config: reads `mesh` and the settings of `published.computed_dtypes`.
    state: train state before the next step.
    train_step: jitted step; donates the state.
    reference: policy that the KL is measured against.
    merger: function that adds adapters to the model's params.
    task: digest of the task's prompts for checkpoints; "" if environments
      provide the prompts.
    peers: helper that writes this process's shards of published params; None if
      process 0 publishes everything.
    answer: result of `work_parts.make_answer_fn`; None publishes no probe.
    ahead: thread that compiles ahead; None compiles at each size's first step.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      *,
      state: train_step_lib.TrainState,
      train_step: train_step_lib.TrainStep,
      reference: reference_lib.Reference,
      merger: lora.ParamsMerger,
      checkpointer: checkpoint.Checkpointer,
      cluster: cluster_lib.Cluster,
      task: str = "",
      peers: peers_lib.Leader | peers_lib.Helper | None = None,
      answer: Answer | None = None,
      ahead: compile_ahead.CompileAhead | None = None,
  ):
    self.reference = reference
    self.peers = peers
    self.set_state(state)
    self._answer = answer
    self._ahead = ahead
    self._train_step = train_step
    self.merger = merger
    self._task = task
    self._checkpointer = checkpointer
    self._cluster = cluster
    mesh = sharding.make_mesh(config.mesh)
    if cluster.num_processes > 1:
      self._put = sharding.make_spread(mesh)
      self._gather = sharding.make_gather(mesh)
      self._narrow = functools.partial(
          published.snapshot, dtypes=published.computed_dtypes(config)
      )
    else:
      self._put = functools.partial(sharding.shard_batch, mesh=mesh)
      self._gather = self._narrow = lambda tree: tree
    self._replicate = jax.jit(
        lambda x: x, out_shardings=sharding.replicated(mesh)
    )
    self._fill = jax.jit(_fill)

  @property
  def state(self) -> train_step_lib.TrainState:
    return self._state

  def set_state(self, state: train_step_lib.TrainState | None) -> None:
    """Replaces the train state, or frees it until the next one is set."""
    self._state = state
    if state is not None:
      self.learning_rate_scale = float(state.learning_rate_scale)

  @property
  def base_params(self) -> types.PyTree:
    """Frozen base params of the adapters, or None."""
    return self._train_step.base

  @property
  def teacher_params(self) -> types.PyTree:
    """Reference params if the loss compares distributions, else None."""
    return self._train_step.teacher_params

  @property
  def may_leave_out(self) -> bool:
    """Whether training may continue after a failed checkpoint.

    False with several processes: the others would wait for missing shards.
    """
    return self._cluster.num_processes == 1

  @property
  def base(self) -> str:
    """Name of the adapters' base params, or ""."""
    return self.merger.base

  def place(
      self, batch: types.Batch, missing: types.Rows | None
  ) -> tuple[types.Batch, jax.Array | None]:
    """Puts a batch onto the mesh and fills in its reference log-probs.

    Args:
      batch: [B, ...] on the host; `jax.ShapeDtypeStruct`s in processes other
        than 0.
      missing: packed rows of the groups without reference log-probs, or None.

    Returns:
      The batch, and its [B, K, T] reference log-probs on this process if any
      were computed, else None.
    """
    shapes_of = lambda tree: {
        name: [list(x.shape), x.dtype.name]
        for name, x in types.named_leaves(tree).items()
    }
    self._cluster.broadcast(
        "place",
        {
            "arrays": shapes_of(batch),
            "missing": None if missing is None else shapes_of(missing),
        },
    )
    if self._ahead is not None:
      for rows in (batch.rows, missing):
        if rows is not None:
          self._ahead.wait(packing.size_of(rows))
    batch = self._put(batch)
    if missing is None:
      return batch, None
    missing = self._put(missing)
    computed = self.reference.logprobs(
        *(*reference_inputs(batch), self._state.ref_params, missing),
        batch.kept_ids,
    )
    ref_logprobs = own = self._fill(
        batch.ref_logprobs,
        computed,
        missing.place_indices,
        missing.token_indices.size,
    )
    if self._cluster.num_processes > 1:
      own = self._replicate(own).addressable_data(0)
    return dataclasses.replace(batch, ref_logprobs=ref_logprobs), own

  def train(self, batch: types.Batch) -> dict[str, jax.Array]:
    """Dispatches a step on a placed batch; returns its metrics."""
    self._cluster.broadcast("train")
    self._state, metrics = self._train_step(self._state, batch)
    return metrics

  def publish(
      self,
      submit: Callable[[int, types.PyTree], int | None],
      version: int,
      field: str = "params",
  ) -> None:
    """Publishes a field of the state as a version, with its probe.

    `submit` is `Publisher.submit` in process 0; in the others it is
    `peers.submit`, or does nothing.
    """
    self._cluster.broadcast("publish", {"version": version, "field": field})
    params = getattr(self._state, field)
    if self._answer is not None:
      params = {**params, probe.LEAF: self._answer(params, self.base_params)}
    if self.peers is None:
      submit(version, self._gather(params))
      return
    replaced = submit(version, params)
    if replaced is not None:
      self._cluster.broadcast("forget", {"version": replaced})

  def gather_model(self) -> types.PyTree:
    """Returns the model's params, adapters merged, on this process.

    With one process, these may be the state's own arrays, which the next step
    donates. With several, matrices are in the compute dtype.
    """
    self._cluster.broadcast("gather_model")
    return self._gather(self._narrow(self.merger.params(self._state.params)))

  def scale_learning_rate(self, factor: float) -> None:
    self._cluster.broadcast("scale", {"factor": factor})
    self.learning_rate_scale *= factor
    scale = self._state.learning_rate_scale * factor
    self._state = dataclasses.replace(self._state, learning_rate_scale=scale)

  def save(self, step: int, host_state: dict[str, Any], *, wait: bool) -> None:
    """Saves a checkpoint; raises OSError as `Checkpointer.save`."""
    self._cluster.broadcast("save", {"step": step, "wait": wait})
    names = {
        "base": self.merger.base,
        "reference": self.reference.name,
        "task": self._task,
    }
    host_state = {**host_state, **names}
    self._checkpointer.save(step, self._state, host_state, wait=wait)

  def wait_compiled(self) -> None:
    """Waits for the thread that compiles ahead, if any."""
    if self._ahead is not None:
      self._ahead.wait_all()

  def close(self) -> None:
    if self.peers is not None:
      self.peers.close()
    if self._ahead is not None:
      self._ahead.close()


def follow(
    work: DeviceWork, command: cluster_lib.Command, batch: types.Batch | None
) -> types.Batch | None:
  """Repeats a call of process 0, except `train`, in another process.

  Returns the batch of the next step: `batch`, unless the call placed a new one.
  """
  fields = command.fields
  if command.name == "place":
    arrays = {
        name: jax.ShapeDtypeStruct(*x) for name, x in fields["arrays"].items()
    }
    missing = fields["missing"]
    if missing is not None:
      missing = types.Rows(
          **{name: jax.ShapeDtypeStruct(*x) for name, x in missing.items()}
      )
    batch, _ = work.place(types.batch_of(arrays), missing)
  elif command.name == "publish":
    submit = lambda *_: None
    work.publish(work.peers.submit if work.peers else submit, **fields)
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
  return batch


def reference_inputs(batch: types.Batch) -> tuple[Any, ...]:
  return (
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
  )


def _fill(
    known_BxKxT: jax.Array,
    computed_BxKxT: jax.Array,
    place_indices_BxKxT: jax.Array,
    num_places: int,
) -> jax.Array:
  """Returns computed values where a place computed one, else known values."""
  return jnp.where(
      place_indices_BxKxT < num_places, computed_BxKxT, known_BxKxT
  )


def machine() -> dict[str, Any]:
  """Returns properties of this machine that affect the bits of a step."""
  devices = jax.devices()
  return {
      "host": socket.gethostname(),
      # The number of CPU threads affects summation.
      "cores": len(processes.available_cores()),
      "devices": f"{len(devices)} {devices[0].device_kind}",
      "jax": jax.__version__,
      "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
  }

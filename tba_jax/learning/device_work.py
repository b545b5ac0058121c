# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Train state owner; runs in lockstep on every process of the trainer.

The learner in process 0 calls `DeviceWork`; each method first broadcasts a
command, on which `follow` in the other processes makes the same call.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import os
import socket
from typing import Any

import jax
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
# Rows of a batch (as a slice), and their reference log-probs.
Computed = list[tuple[slice, jax.Array]]


class DeviceWork:
  """Owns the train state and the reference policy.

  learning_rate_scale: factor on the learning rate of the next step.

  Args:
    config: reads `mesh`, `sharding`, `train` and `replay`.
    state: state before the next step.
    train_step: jitted step, which donates the state.
    reference: policy that the KL is measured against.
    merger: merger of adapters into the model's params.
    checkpointer: checkpointer of this run.
    cluster: connection to the other processes.
    task: digest of the task's prompts, kept in checkpoints; "" if environments
      say them.
    peers: helper that writes this process's shards of published params; None if
      process 0 publishes everything.
    answer: result of `work_parts.make_answer_fn`; None publishes no probe.
    ahead: thread that compiles for the next sizes of a batch; None leaves it to
      each size's first step.
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
    self.learning_rate_scale = float(state.learning_rate_scale)
    self._answer = answer
    self._ahead = ahead
    self._state = state
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
    self._part_prompts = reference_prompts(config)
    self._slice = jax.jit(_slice, static_argnums=2)
    self._update = jax.jit(_update)

  @property
  def state(self) -> train_step_lib.TrainState:
    return self._state

  @property
  def base_params(self) -> types.PyTree:
    """Params that adapters adapt, None without adapters."""
    return self._train_step.base

  @property
  def teacher_params(self) -> types.PyTree:
    """Params that the loss compares distributions with, or None."""
    return self._train_step.teacher_params

  @property
  def may_leave_out(self) -> bool:
    """Whether training may continue after a checkpoint failed.

    Not with several processes: the others wait for this one's part.
    """
    return self._cluster.num_processes == 1

  @property
  def base(self) -> str:
    """Name of the adapters' base params; "" without adapters."""
    return self.merger.base

  def place(
      self, batch: types.Batch, num_missing: int
  ) -> tuple[types.Batch, Computed]:
    """Puts a batch onto the mesh with all reference log-probs.

    Args:
      batch: [B, ...] on the host; in processes other than 0, of
        `jax.ShapeDtypeStruct`.
      num_missing: prompts at the head of the batch without reference log-probs.

    Returns:
      The batch, and the log-probs that were computed, on this process.
    """
    self._cluster.broadcast(
        "place",
        {
            "arrays": {
                name: [list(x.shape), x.dtype.name]
                for name, x in types.named_leaves(batch).items()
            },
            "num_missing": num_missing,
        },
    )
    num_prompts = batch.rewards.shape[0]
    part = min(self._part_prompts, num_prompts)
    if self._ahead is not None:
      self._ahead.wait(packing.size_of(batch.rows))
    batch = self._put(batch)
    ref_logprobs, computed = batch.ref_logprobs, []
    for start in range(0, num_missing, part):
      # The last part overlaps the one before, so that all have one shape.
      start = min(start, num_prompts - part)
      inputs = reference_inputs(batch)
      if part < num_prompts:
        inputs = self._slice(inputs, start, part)
      values_bxKxT = self.reference.logprobs(
          *inputs,
          self._state.ref_params,
          batch.rows if part == num_prompts else None,
      )
      ref_logprobs = self._update(ref_logprobs, values_bxKxT, start)
      if self._cluster.num_processes > 1:
        values_bxKxT = self._replicate(values_bxKxT).addressable_data(0)
      computed.append((slice(start, start + part), values_bxKxT))
    return dataclasses.replace(batch, ref_logprobs=ref_logprobs), computed

  def train(self, batch: types.Batch) -> dict[str, jax.Array]:
    """Dispatches a step on a placed batch; returns its metrics."""
    self._cluster.broadcast("train")
    self._state, metrics = self._train_step(self._state, batch)
    if self._ahead is not None:
      self._ahead.count(packing.size_of(batch.rows))
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
    """Returns the model's params with merged adapters, on this process.

    With one process they may be the state's own, which the next step donates;
    of several, matrices are in the dtype that is computed in.
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
    """Waits for what compiles ahead, if anything does."""
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
  """Repeats a call of process 0, other than `train`, in another process.

  Returns the batch of the next step: a placed one, or the one given.
  """
  fields = command.fields
  if command.name == "place":
    arrays = {
        name: jax.ShapeDtypeStruct(*x) for name, x in fields["arrays"].items()
    }
    batch, _ = work.place(types.batch_of(arrays), fields["num_missing"])
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


def _slice(
    arrays: tuple[jax.Array, ...], start: int, size: int
) -> tuple[jax.Array, ...]:
  return tuple(
      jax.lax.dynamic_slice_in_dim(array, start, size) for array in arrays
  )


def _update(
    all_BxKxT: jax.Array, part_bxKxT: jax.Array, start: int
) -> jax.Array:
  return jax.lax.dynamic_update_slice(all_BxKxT, part_bxKxT, (start, 0, 0))


def reference_prompts(config: ml_collections.ConfigDict) -> int:
  """Returns the prompts whose reference log-probs are computed at a time."""
  num_prompts, micro = config.train.prompts_per_batch, micro_prompts(config)
  # Groups that are cut are computed part by part, as rows of the whole batch.
  if config.replay.recent_fraction == 1 or not micro:
    return num_prompts
  shards = config.mesh.data * config.mesh.fsdp
  # Only fresh groups lack reference log-probs; redrawn ones have them cached.
  part = math.ceil(num_prompts / 4 / shards) * shards
  if part > micro:
    unit = math.lcm(micro, shards)
    part = math.ceil(part / unit) * unit
  return min(part, num_prompts)


def micro_prompts(config: ml_collections.ConfigDict) -> int:
  """Returns the prompts of a micro-batch; 0 if groups are cut."""
  train = config.train
  whole = packing.num_micro_batches(
      train, train.prompts_per_batch, train.completions_per_prompt
  )
  return train.micro_batch_prompts if whole else 0


def machine() -> dict[str, Any]:
  """Returns facts of this process on which the bits of a step depend."""
  devices = jax.devices()
  return {
      "host": socket.gethostname(),
      # The CPU's threads split sums.
      "cores": len(processes.available_cores()),
      "devices": f"{len(devices)} {devices[0].device_kind}",
      "jax": jax.__version__,
      "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
  }

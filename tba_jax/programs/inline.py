# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wires `loop.run` with sampling in the training thread, as for sweeps."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import collect
from tba_jax import loop
from tba_jax import schedule as schedule_lib
from tba_jax import types
from tba_jax.environments import build as environments_build
from tba_jax.evaluation import reward_judge
from tba_jax.learning import buffers
from tba_jax.learning import device_work
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import train_step
from tba_jax.learning import work_parts
from tba_jax.losses import objective_table
from tba_jax.mesh import cluster
from tba_jax.mesh import sharding
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import curriculum
from tba_jax.replay import prompt_order
from tba_jax.sampling import offline_sampler


@dataclasses.dataclass(frozen=True)
class Loop:
  """Components of `loop.run` with sampling in the training thread."""

  config: ml_collections.ConfigDict
  learner: learner_lib.Learner
  collector: loop.CollectFn
  schedule: schedule_lib.Schedule
  buffer: buffer_lib.ReplayBuffer
  order: prompt_order.PromptOrder

  def train(
      self,
      *hooks: loop.Hook,
      should_stop: Callable[[], bool] = lambda: False,
  ) -> None:
    """Trains to the last step.

    Args:
      *hooks: functions called after each step with its number, batch and
        metrics, which are on the host.
    """
    learner = self.learner

    def read(
        step: int, draw: types.Draw, metrics: Mapping[str, jax.Array]
    ) -> None:
      values = learner.read(metrics)
      learner.finish()
      for hook in hooks:
        hook(step, draw, values)

    source = loop.Inline(
        self.config,
        lambda: learner.params,
        self.collector,
        self.schedule,
        self.buffer,
        self.order,
        should_stop,
    )
    loop.run(source, learner, [read])

  def watching(self, on_groups: Callable[[list[types.Group]], None]) -> "Loop":
    """Returns the loop such that it calls `on_groups` with collected groups."""

    def collector(*args: Any) -> list[types.Group]:
      groups = self.collector(*args)
      on_groups(groups)
      return groups

    return dataclasses.replace(self, collector=collector)


class LoopMaker:
  """Makes single-process loops one after another, without compiling twice.

  All loops share policy, sampler and judge. Loops with the same name share the
  train step, unless it keeps a proximal policy or values for a different number
  of steps. Loops with the same number of prompts per micro-batch share the
  reference, which has separate params.

  reference: initial policy, for all loops and the evaluator.
  evaluator: held-out evaluator of `Loop.learner.params`, with the KL if the run
    has a reference.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str = ""):
    """Loads the initial policy of all loops.

    Args:
      workdir: run directory that may contain the policy.

    Raises:
      ValueError: the policy is missing or disagrees with the config.
    """
    self._workdir = workdir
    self.policy = policy_lib.make_policy(config, workdir)
    self._mesh = sharding.make_mesh(config.mesh)
    self._params = policy_lib.initial_params(self.policy, config.seed)
    self.sampler = policy_samplers.make_sampler(config, self.policy)
    self.reference = work_parts.make_reference(
        config, self.policy, self._params, self._mesh
    )
    self.judge = reward_judge.make_judge(config, workdir, self.policy.task)
    self._environments = environments_build.make(
        config, workdir, self.policy.task, self.policy.tokenizer
    )
    self.evaluator = reward_judge.make_evaluator(
        config,
        workdir,
        self.policy,
        reference=self.reference
        if objective_table.has_reference(config)
        else None,
    )
    # Keys: name, and the lifetime of a snapshot in steps or None.
    self._steps: dict[
        tuple[str, int], tuple[train_step.TrainStep, train_step.TrainState]
    ] = {}

  def make(self, config: ml_collections.ConfigDict, name: str = "") -> Loop:
    """Returns a loop that has not started.

    Args:
      config: run config with the same policy as the other loops.
      name: key of the train step: loops with the same name may only differ in
        seed, lag and replay.
    """
    policy, reference = self.policy, self.reference
    sampler = self.sampler
    log = offline_sampler.make(config, policy.task, policy.tokenizer)
    if log is not None:
      sampler = offline_sampler.OfflineSampler(log, sampler)
    snapshot_steps = train_step.held_steps(config)
    key = name, snapshot_steps if train_step.proximal_names(config) else 1
    if key not in self._steps:
      step_policy = dataclasses.replace(
          policy,
          value_folder=policy_lib.find_value_folder(config, self._workdir),
      )
      self._steps[key] = (
          work_parts.make_train_step(
              config, step_policy, self._mesh, self._params, reference
          ),
          work_parts.init_state(config, step_policy, self._params, self._mesh),
      )
    step, state = self._steps[key]
    work = device_work.DeviceWork(
        config,
        # The step donates its state, but the next loop needs the original.
        state=jax.tree.map(jnp.copy, state),
        train_step=step,
        reference=reference,
        merger=work_parts.make_merger(config, policy, self._params),
        checkpointer=None,
        cluster=cluster.Cluster(),
    )
    buffer = buffers.make_buffer(config, policy, self._mesh)
    return Loop(
        config=config,
        learner=learner_lib.make_learner(config, policy, buffer, work),
        collector=collect.make_collector(
            config,
            policy,
            sampler,
            self.judge,
            # A log's episodes have been played.
            environments=(
                None if log and log.share == 1 else self._environments
            ),
            prompt_tokens=log and log.prompt_tokens,
        ),
        schedule=schedule_lib.make_schedule(config),
        buffer=buffer,
        order=curriculum.make_order(config, policy.task, policy.tokenizer),
    )

  def close(self) -> None:
    """Stops the processes of judges and environments."""
    self.judge.close()
    if self._environments is not None:
      self._environments.close()
    self.evaluator.close()

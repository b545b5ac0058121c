# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wires the loop of one process."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import collect
from tba_jax import loop
from tba_jax import schedule as schedule_lib
from tba_jax import types
from tba_jax.evaluation import reward_judge
from tba_jax.learning import cluster
from tba_jax.learning import device_work
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import schedules
from tba_jax.learning import train_step
from tba_jax.losses import build as losses
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import reference as reference_lib
from tba_jax.policy import sharding
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import difficulty
from tba_jax.replay import prompt_order
from tba_jax.rewards import environments
from tba_jax.sampling import logged
from tba_jax.tasks import base as tasks_base
from tba_jax.tasks import logged as tasks_logged


def make_prompt_order(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    folder: pathlib.Path | None = None,
) -> prompt_order.PromptOrder:
  """Returns the order of the task's training prompts.

  If nothing is sampled, it has those with logged completions alone.

  Args:
    config: reads `seed`, `search` and `logged`.
    policy: policy with the task.
    folder: folder of the run's replay; None if nothing is to outlive the
      process.

  Raises:
    ValueError: a file in the folder is damaged, or of another order.
  """
  size, prompt_ids = policy.task.num_prompts(tasks_base.TRAIN), None
  log = make_logged(config, policy)
  if log is not None and log.share == 1:
    prompt_ids = log.prompt_ids
    size = len(prompt_ids)
  common = {"seed": config.seed, "prompt_ids": prompt_ids}
  if config.search.order == "shuffled":
    return prompt_order.PromptOrder(size, **common)
  return difficulty.DifficultyOrder(
      size,
      weight=config.search.order,
      solved_from=config.search.solved_from,
      folder=folder,
      **common,
  )


def make_logged(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> logged.LoggedSampler | None:
  """Returns the completions of `config.logged`, or None.

  Raises:
    ValueError: the file is wrong, or has none of the task's prompts.
  """
  if not config.logged.path:
    return None
  return logged.LoggedSampler(
      config,
      policy.task,
      policy.tokenizer,
      needs_logprobs=losses.needs_logprobs(config.loss, config.optimizer),
  )


def part_weights(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> Mapping[str, float] | None:
  """Returns the weights of the parts of the reward, if they are normalized."""
  if not config.reward.normalize_parts:
    return None
  return policy.task.part_weights


def make_baselines(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> np.ndarray | None:
  """Returns [prompts] float32 of `loss.baseline_file`, None if none is read.

  Raises:
    ValueError: the file is wrong, or lacks a prompt.
  """
  if losses.baseline(config.loss) != "file":
    return None
  return tasks_logged.values(
      config.loss.baseline_file,
      policy.task,
      policy.tokenizer,
      reward_field=config.logged.reward_field,
      temperature=config.loss.baseline_temperature,
  )


def make_buffer(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> buffer_lib.ReplayBuffer:
  """Returns an empty buffer.

  `policy` is for `replay_filter.similarity` and `train.router_replay`.
  """
  embed, content_mask = None, None
  if config.replay_filter.similarity != "none":
    content_mask = functools.partial(
        tokenizer_lib.content_mask, policy.tokenizer
    )
  if config.replay_filter.similarity == "cosine":
    embed = reward_judge.make_embed(config, policy, mesh)
  fallback = config.reward.fallback
  if fallback is not None:
    fallback *= config.loss.reward_weight
  return buffer_lib.ReplayBuffer(
      config,
      reward_temperature=schedules.reward_temperature(
          config.replay, per_round_steps=config.train.per_round_steps
      ),
      embed=embed,
      content_mask=content_mask,
      routes_shape=(policy and policy_lib.routes_shape(config, policy.model)),
      has_turn_rewards=policy_lib.has_turn_rewards(config),
      fallback=fallback,
  )


def set_exact_lag(
    config: ml_collections.ConfigDict, lag_steps: int
) -> ml_collections.ConfigDict:
  """Returns a copy in lockstep, `lag_steps` behind, on one process's parts."""
  config = config.copy_and_resolve_references()
  config.search.update(lockstep=True, lead_steps=lag_steps, wait_for_fresh=True)
  if config.reference.role == "searcher":
    config.reference.role = "trainer"
  return config


@dataclasses.dataclass(frozen=True)
class Loop:
  """The parts of `loop.run` with a source in its own thread.

  config: config of the run.
  learner: learner, whose state is before step 0.
  collector: collector of training prompts.
  """

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
      *hooks: called after each step with its number, batch and metrics, which
        are on the host.
      should_stop: checked before each step.
    """
    learner = self.learner

    def read(
        step: int, draw: buffer_lib.Draw, metrics: Mapping[str, jax.Array]
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
    """Returns the loop with a call for the groups that are collected."""

    def collector(*args: Any) -> list[types.Group]:
      groups = self.collector(*args)
      on_groups(groups)
      return groups

    return dataclasses.replace(self, collector=collector)


class LoopMaker:
  """Makes loops of one process, one after the other; compiles nothing twice.

  All loops share policy, sampler and judge; those of one name share the train
  step, unless it holds a proximal policy or values for another number of steps,
  and those whose micro-batches have as many prompts share the reference, which
  holds params of its own.

  policy: policy that all start from.
  sampler: sampler of training prompts.
  judge: judge of their completions.
  evaluator: evaluator of `Loop.learner.params`, with the KL if there is a
    reference.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str = ""):
    """Loads the policy that all loops start from.

    Args:
      config: settings common to the loops.
      workdir: run directory, if the policy is in one.

    Raises:
      ValueError: the policy is missing or disagrees with the config.
    """
    self._workdir = workdir
    self.policy = policy_lib.make_policy(config, workdir)
    self._mesh = sharding.make_mesh(config.mesh)
    self._params = policy_lib.initial_params(self.policy, config.seed)
    self.sampler = policy_lib.make_sampler(config, self.policy)
    # By the prompts of a micro-batch, in which each computes.
    self._references: dict[int, reference_lib.Reference] = {}
    self.judge = reward_judge.make_judge(config, workdir, self.policy.task)
    has_reference = config.reference.role != "none"
    self._environments = environments.make(
        config, workdir, self.policy.task, self.policy.tokenizer
    )
    self.evaluator = reward_judge.make_evaluator(
        config,
        workdir,
        self.policy,
        reference=self._reference_of(config) if has_reference else None,
    )
    # By name and the number of steps that a snapshot is held, if there is one.
    self._steps: dict[
        tuple[str, int], tuple[train_step.TrainStep, train_step.TrainState]
    ] = {}

  def make(self, config: ml_collections.ConfigDict, name: str = "") -> Loop:
    """Returns a loop that has not begun.

    Args:
      config: config of the loop, with the policy of the others.
      name: key of the train step: loops of one name differ in seed, lag and
        replay alone.
    """
    policy, reference = self.policy, self._reference_of(config)
    held = train_step.held_steps(config)
    key = name, held if train_step.proximal_names(config) else 1
    if key not in self._steps:
      own = dataclasses.replace(
          policy,
          value_folder=policy_lib.find_value_folder(config, self._workdir),
      )
      self._steps[key] = (
          device_work.make_train_step(
              config, own, self._mesh, self._params, reference
          ),
          device_work.init_state(config, own, self._params, self._mesh),
      )
    step, state = self._steps[key]
    work = device_work.DeviceWork(
        config,
        # The step donates its state; the next loop needs this one.
        state=jax.tree.map(jnp.copy, state),
        train_step=step,
        reference=reference,
        merger=device_work.make_merger(config, policy, self._params),
        checkpointer=None,
        cluster=cluster.Cluster(),
    )
    buffer = make_buffer(config, policy, self._mesh)
    return Loop(
        config=config,
        learner=learner_lib.Learner(
            config,
            policy.tokenizer,
            buffer,
            work,
            baselines=make_baselines(config, policy),
        ),
        collector=collect.Collector(
            policy.task,
            policy.tokenizer,
            self.sampler,
            self.judge,
            num_completions=config.search.samples_per_prompt,
            loss=config.loss,
            part_weights=part_weights(config, policy),
            seed=config.seed,
            logged=make_logged(config, policy),
            environments=self._environments,
            by_turn=policy_lib.has_turn_rewards(config),
        ),
        schedule=schedule_lib.make_schedule(config),
        buffer=buffer,
        order=make_prompt_order(config, policy),
    )

  def _reference_of(
      self, config: ml_collections.ConfigDict
  ) -> reference_lib.Reference:
    size = device_work.micro_prompts(config)
    if size not in self._references:
      self._references[size] = device_work.make_reference(
          config, self.policy, self._params, self._mesh
      )
    return self._references[size]

  def close(self) -> None:
    """Ends the processes of judges and environments."""
    self.judge.close()
    if self._environments is not None:
      self._environments.close()
    self.evaluator.close()

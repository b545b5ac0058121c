# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the training loop, each made from its section of a config."""

from collections.abc import Callable
import functools
import math
import pathlib
import signal
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import batches
from tba_jax import best_model
from tba_jax import checkpoint as checkpoint_lib
from tba_jax import cluster as cluster_lib
from tba_jax import device_work
from tba_jax import evaluations as evaluations_lib
from tba_jax import evaluator as evaluator_lib
from tba_jax import lora
from tba_jax import periods
from tba_jax import policy as policy_lib
from tba_jax import recorder as recorder_lib
from tba_jax import reference as reference_lib
from tba_jax import run_directory
from tba_jax import sample_log
from tba_jax import shard_report
from tba_jax import sharding
from tba_jax import train_step as train_step_lib
from tba_jax import types
from tba_jax import value_model as value_model_lib
from tba_jax import versions
from tba_jax import writers
from tba_jax.carriers import build as carriers_build
from tba_jax.models import hf
from tba_jax.models import split_tokens
from tba_jax.replay import buffer as buffer_lib
from tba_jax.rewards import judges


def make_reference(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    mesh: jax.sharding.Mesh,
) -> reference_lib.Reference:
  """Returns the reference policy, which starts from the params on a mesh."""
  moves = config.reference.mode != "fixed"
  return reference_lib.Reference(
      policy.model,
      params,
      temperature=config.sampling.temperature,
      every_steps=config.reference.every_steps if moves else 0,
      # No step donates the base of adapters: it is the reference too.
      copy=policy.adapters is None,
      split_tokens=lambda fn: split_tokens.split_tokens(
          fn, mesh, *sharding.token_axes(config.sharding)
      ),
  )


def log_sharding(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> None:
  """Logs what of the policy a mesh of several devices does not split."""
  if math.prod(config.mesh.values()) == 1:
    return
  shape = policy.model.config
  found = shard_report.of_leaves(
      shard_report.model_leaves(shape), config.sharding, config.mesh
  )
  logging.info(
      "mesh %s:\n%s",
      dict(config.mesh),
      shard_report.text(
          found,
          jnp.dtype(shape.param_dtype).itemsize,
          shard_report.length_rows(config),
      ),
  )


def init_state(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    mesh: jax.sharding.Mesh,
) -> train_step_lib.TrainState:
  """Returns the state before step 0 from the policy's params."""
  value_model = value_model_lib.make(config, policy.model)
  value_params = value_model_lib.load(config)
  if policy.adapters is not None:
    if value_model is not None and value_params is None:
      value_params = value_model.from_policy(params)
    params = jax.jit(policy.adapters.init)(jax.random.PRNGKey(config.seed))
  return train_step_lib.init_state(
      config,
      policy.trained,
      params,
      mesh,
      value_model=value_model,
      value_params=value_params,
  )


def make_work(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    checkpointer: checkpoint_lib.Checkpointer,
    cluster: cluster_lib.Cluster,
    secret: bytes,
) -> tuple[device_work.DeviceWork, batches.Placer, dict[str, Any]]:
  """Returns what a trainer's processes do together, and what was saved with it.

  Its state is the newest checkpoint's where there is one.
  """
  mesh = sharding.make_mesh(config.mesh)
  log_sharding(config, policy)
  shardings = sharding.param_shardings(
      mesh, config.sharding, policy.model.logical_axes
  )
  params = jax.device_put(
      policy_lib.initial_params(policy, config.seed, shardings), shardings
  )
  reference = make_reference(config, policy, params, mesh)
  whole = lora.make_whole(
      policy.adapters, policy.folder, config.seed, lambda: params
  )
  if checkpointer.latest_step() is None:
    state, saved = init_state(config, policy, params, mesh), {}
  else:
    state, saved = checkpointer.restore(abstract_state(config, policy, mesh))
    lora.check_base(saved.get("base", ""), whole.base)
  work = device_work.DeviceWork(
      state=state,
      train_step=make_train_step(config, policy, mesh, params),
      whole=whole,
      checkpointer=checkpointer,
      mesh=mesh,
      cluster=cluster,
      peers=carriers_build.make_peers(
          config,
          _published(config, state.params),
          cluster,
          secret=secret,
          copy=_copier(config),
      ),
  )
  return work, make_placer(config, reference, mesh, cluster), saved


def abstract_state(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> train_step_lib.TrainState:
  """Returns shapes, dtypes and shardings of the state."""
  value_model = value_model_lib.make(config, policy.model)
  return train_step_lib.abstract_state(
      config, policy.trained, mesh, value_model=value_model
  )


def make_train_step(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
    params: types.PyTree,
) -> train_step_lib.TrainStep:
  """Returns the jitted step of a config's objective.

  Args:
    config, policy: of the run.
    mesh: of the state.
    params: that training starts from, on the mesh; kept where they are the base
      of adapters.
  """
  return train_step_lib.make_train_step(
      config,
      policy.model,
      mesh,
      value_model=value_model_lib.make(config, policy.model),
      adapters=policy.adapters,
      base=None if policy.adapters is None else params,
  )


def make_batch_maker(
    config: ml_collections.ConfigDict,
    buffer: buffer_lib.ReplayBuffer,
    placer: batches.Placer,
) -> batches.BatchMaker:
  """Returns the maker of batches."""
  return batches.BatchMaker(
      buffer,
      placer,
      include_stop_token=config.loss.include_stop_token,
      missing_stop=config.loss.missing_stop,
      missing_stop_reward=config.loss.missing_stop_reward,
  )


def make_placer(
    config: ml_collections.ConfigDict,
    reference: reference_lib.Reference,
    mesh: jax.sharding.Mesh,
    cluster: cluster_lib.Cluster,
) -> batches.Placer:
  """Returns what puts batches onto a mesh, that of a cluster's processes."""
  num_prompts = config.train.prompts_per_batch
  shards = config.mesh.data * config.mesh.fsdp
  # Fresh groups miss their reference log-probs; drawn again, they have them.
  quarter = math.ceil(num_prompts / 4 / shards) * shards
  if cluster.num_processes > 1:
    place = sharding.make_spread(mesh, config.sharding)
  else:
    place = functools.partial(
        sharding.shard_batch, mesh=mesh, rules=config.sharding
    )
  return batches.Placer(
      reference,
      part_prompts=num_prompts
      if config.replay.recent_fraction == 1
      else quarter,
      place=place,
      gather=cluster.gatherer(mesh),
      tell=lambda **fields: cluster.tell("place", fields),
  )


def _published(
    config: ml_collections.ConfigDict, params: types.PyTree
) -> versions.Specs:
  """Returns what is published of params, which may be abstract."""
  expected = versions.expected_leaves(params)
  return versions.published(expected, config.publish.dtype)


def _copier(
    config: ml_collections.ConfigDict,
) -> Callable[[types.PyTree], dict[str, jax.Array]]:
  """Returns what copies params as they are published, by path."""
  dtype = config.publish.dtype
  copy = jax.jit(functools.partial(versions.snapshot, dtype=dtype))
  return lambda params: versions.by_path(copy(params))


def make_sample_log(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    workdir: pathlib.Path,
    judge: judges.Judge,
) -> sample_log.SampleLog:
  """Returns what writes samples of the batches."""
  return sample_log.SampleLog(
      workdir / "samples.jsonl",
      num_samples=config.log.num_samples,
      tokenizer=policy.tokenizer,
      judge=judge,
  )


def make_writers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    epoch: int,
    on_event: Callable[[str, str], None],
) -> writers.Writers:
  """Returns the writers of a run; SIGUSR1 has them capture the next steps.

  To be called in the main thread, as for every handler of a signal.
  """
  made = writers.make(config, run.workdir, epoch, on_event)
  signal.signal(signal.SIGUSR1, lambda *_: made.capture())
  return made


def make_evaluations(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    evaluator: evaluator_lib.Evaluator,
    workdir: pathlib.Path,
    recorder: recorder_lib.Recorder,
) -> evaluations_lib.Evaluations:
  """Returns what evaluates before, while and after training.

  In lockstep the steps wait, so that guards act at the same step in every run.
  So they do on several devices: two threads that start programs with
  collectives there may start them in another order on each.
  """

  def save(folder: pathlib.Path, params: types.PyTree) -> None:
    hf.save(folder, policy.model.config, params, policy.tokenizer)

  one_device = math.prod(config.mesh.values()) == 1
  return evaluations_lib.Evaluations(
      evaluator=evaluator,
      validator=evaluator.while_training(),
      best=best_model.BestModel(
          workdir / "best", save if config.checkpoint.keep_best else None
      ),
      recorder=recorder,
      periods=periods.make(config, policy.task),
      beside=config.evaluate.beside
      and not config.search.lockstep
      and one_device,
      deadline_s=config.evaluate.deadline_s,
  )


def stopped_by(
    config: ml_collections.ConfigDict, saved: dict[str, Any]
) -> str | None:
  """Returns what ended the run that is continued; None: nothing."""
  # A run that is made longer goes on in spite of it.
  same = saved.get("num_steps") == config.train.num_steps
  return saved.get("stopped_by") if same else None

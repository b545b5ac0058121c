# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes `DeviceWork` and its parts from a config."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import collect
from tba_jax import types
from tba_jax.learning import checkpoint
from tba_jax.learning import compile_ahead
from tba_jax.learning import device_work
from tba_jax.learning import packing
from tba_jax.learning import published
from tba_jax.learning import train_step as train_step_lib
from tba_jax.losses import logprobs
from tba_jax.losses import objective_table
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models.kernels import kernels
from tba_jax.models.net import sequence
from tba_jax.policy import frozen_models
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import reference_policy as reference_lib
from tba_jax.policy import value_model as value_model_lib
from tba_jax.run import run_directory
from tba_jax.transport.params import peers as peers_lib
from tba_jax.transport.params import probe


def make_work(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    policy: policy_lib.Policy,
    cluster: cluster_lib.Cluster,
    checkpointer: checkpoint.Checkpointer | None,
    step: int | None = None,
) -> tuple[device_work.DeviceWork, dict[str, Any]]:
  """Returns the state owner and the restored host state, or {}.

  Args:
    checkpointer: source of checkpoints; None if nothing is saved.
    step: checkpoint to restore, 0 for the initial state; None for the newest
      checkpoint, or the initial state if there is none.

  Raises:
    FileNotFoundError: there is no checkpoint of that step.
    ValueError: a checkpoint, model, mesh or kernel does not fit the config.
  """
  mesh = sharding.make_mesh(config.mesh)
  # Rejects an unsupported kernel before loading params.
  kernels.choose(
      policy.model.config, sequence.Split(mesh, *sharding.TOKEN_AXES)
  )
  shardings = sharding.param_shardings(mesh, policy.model)
  params = jax.device_put(
      policy_lib.initial_params(policy, config.seed, shardings), shardings
  )
  merger = make_merger(config, policy, params)
  reference = make_reference(config, policy, params, mesh)
  # Prompts of environments come from code, which may be fixed during a run.
  is_fixed = not policy.task.has_turns
  task = policy.task.digest() if is_fixed else ""
  if step == 0 or not checkpointer or checkpointer.latest_step() is None:
    state, saved = init_state(config, policy, params, mesh), {}
  else:
    state, saved = checkpointer.restore(
        abstract_state(config, policy, mesh), step
    )
    if saved:  # Only process 0 has the host state; it checks for all.
      lora.check_base(saved.get("base", ""), merger.base)
      # Older checkpoints lack these names.
      _check_reference(saved.get("reference", ""), reference.name)
      _check_task(saved.get("task", ""), task)
  train_step = make_train_step(config, policy, mesh, params, reference)
  ahead = None
  # CPU processes share cores: one that compiles may join a collective so late
  # that the others time out.
  if cluster.num_processes == 1 or jax.default_backend() != "cpu":
    ahead = make_ahead(config, policy, mesh, train_step, reference)
  work = device_work.DeviceWork(
      config,
      state=state,
      train_step=train_step,
      reference=reference,
      merger=merger,
      checkpointer=checkpointer,
      cluster=cluster,
      task=task,
      peers=peers_lib.make_peers(
          config,
          run,
          published.make_copy(config),
          state.params,
          client=cluster.client,
          process=cluster.process,
      ),
      answer=(
          make_answer_fn(config, policy, mesh)
          if has_probe(config, run)
          else None
      ),
      ahead=ahead,
  )
  return work, saved


def restore(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    work: device_work.DeviceWork,
    checkpointer: checkpoint.Checkpointer,
    step: int,
) -> dict[str, Any]:
  """Restores a step's state into work that has none; returns its host state."""
  abstract = abstract_state(config, policy, sharding.make_mesh(config.mesh))
  state, saved = checkpointer.restore(abstract, step)
  work.set_state(state)
  return saved


def reference_name(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> str:
  """Returns `lora.base_name` of a fixed reference, else ""."""
  c = config.reference
  if c.mode != "fixed" or c.role == "none":
    return ""
  return lora.base_name(c.init or policy.folder, config.seed)


def _check_reference(saved: str, present: str) -> None:
  """Raises ValueError if the run started with another fixed reference."""
  if saved and saved != present:
    raise ValueError(
        "config.init or config.reference.init: the checkpoint's reference is"
        f" {saved!r}, not {present!r}; restore the model that the run started"
        " with"
    )


def _check_task(saved: str, present: str) -> None:
  """Raises ValueError if the run started with other training prompts."""
  if saved and present and saved != present:
    raise ValueError(
        "config.task: the training prompts differ from the ones that the run"
        " started with, but prompt order and replay refer to them by index;"
        " restore the data, or give another --workdir"
    )


def make_merger(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
) -> lora.ParamsMerger:
  """Returns the merger of adapters into their base, `params`."""
  return lora.make_merger(
      policy.adapters, policy.folder, config.seed, lambda: params
  )


def has_probe(
    config: ml_collections.ConfigDict, run: run_directory.RunInfo
) -> bool:
  """Returns whether published params carry a probe for searchers to check.

  In-memory searchers use the trainer's own arrays and need none, unless another
  program samples.
  """
  return run.memory is None or config.search.sampler != "jax"


def make_answer_fn(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> device_work.Answer:
  """Returns a jitted function that answers the probe with published params.

  It dispatches a forward pass of B · L tokens on all devices of the mesh.

  Args:
    config: reads `publish`, `sampling` and the settings of `probe.max_gap`.

  Returns:
    (published params, base) -> leaves of `probe.abstract`.
  """
  model, platform = policy.model, mesh.devices.flat[0].platform
  tokens = probe.draw_tokens(config, model.config.vocab_size)
  compute_dtype = config_lib.compute_dtype(config.model, platform)
  limit = probe.max_gap(config, platform, compute_dtype)
  # "auto" rounds only what the forward pass rounds anyway, "" rounds nothing.
  dtypes = published.Dtypes("", "")
  if config.publish.dtype not in ("auto", ""):
    dtypes = published.published_dtypes(config)

  def attach(base: types.PyTree, params: types.PyTree) -> types.PyTree:
    params = published.snapshot(params, dtypes=dtypes)
    if policy.adapters is None:
      return params
    return policy.adapters.attach(base, params)

  def forward(params: types.PyTree, tokens_BxL: jax.Array) -> jax.Array:
    logits_BxLxV = model.logits(params, tokens_BxL, jnp.ones_like(tokens_BxL))
    return logprobs.token_logprobs(
        logits_BxLxV[:, :-1], tokens_BxL[:, 1:], temperature=1.0
    )

  split = sharding.split_rows(forward, mesh)

  def answer(params: types.PyTree, base: types.PyTree) -> dict[str, jax.Array]:
    tokens_BxL = jnp.asarray(tokens)
    return {
        "tokens": tokens_BxL,
        "logprobs": split(attach(base, params), tokens_BxL),
        "max_gap": jnp.float32(limit),
    }

  return jax.jit(answer, out_shardings=sharding.replicated(mesh))


def make_ahead(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
    train_step: train_step_lib.TrainStep,
    reference: reference_lib.Reference,
) -> compile_ahead.CompileAhead:
  """Starts the thread that compiles the step and the reference pass."""
  state = abstract_state(config, policy, mesh)

  def compile_size(size: packing.Size) -> None:
    batch = packing.abstract_batch(
        config,
        mesh,
        size,
        collect.optional_columns(config, policy.model.config),
    )
    if objective_table.has_reference_pass(config):
      reference.compile(
          *device_work.reference_inputs(batch),
          state.ref_params,
          batch.rows,
          batch.kept_ids,
      )
    train_step.lower(state, batch).compile()

  return compile_ahead.CompileAhead(packing.make(config).sizes(), compile_size)


def make_reference(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    mesh: jax.sharding.Mesh,
) -> reference_lib.Reference:
  """Returns the reference: `params`, the model of `reference.init`, or none.

  If searchers hold the reference, the result has no params and only tracks the
  version.

  Raises:
    ValueError: the model of `reference.init` cannot be read or does not fit.
  """
  moves = config.reference.mode != "fixed"
  model = policy.model
  if not objective_table.holds_reference(config, "trainer"):
    params = None
  elif config.reference.init:
    model, params = frozen_models.load_reference(config, policy.tokenizer, mesh)
    params = published.computed(config, params)
  elif policy.adapters is None and not moves:
    # A copy, because the step donates the given params. The base of adapters is
    # shared.
    params = published.computed(config, params)
  return reference_lib.Reference(
      model,
      params,
      temperature=config.sampling.temperature,
      every_steps=config.reference.every_steps if moves else 0,
      name=reference_name(config, policy),
      mesh=mesh,
  )


def init_state(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    mesh: jax.sharding.Mesh,
) -> train_step_lib.TrainState:
  """Returns the train state before step 0."""
  value_model = value_model_lib.make_model(
      config, policy.model, policy.value_folder
  )
  value_params = None
  if policy.value_folder is not None:
    value_params = frozen_models.load_params(
        policy.value_folder, value_model, mesh
    )
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


def abstract_state(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> train_step_lib.TrainState:
  """Returns shapes, dtypes and shardings of the train state."""
  value_model = value_model_lib.make_model(
      config, policy.model, policy.value_folder
  )
  return train_step_lib.abstract_state(
      config, policy.trained, mesh, value_model=value_model
  )


def make_train_step(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
    params: types.PyTree,
    reference: reference_lib.Reference | None = None,
) -> train_step_lib.TrainStep:
  """Returns the jitted step.

  Args:
    mesh: trainer's mesh.
    reference: π_ref; required if the loss compares distributions with it.
  """
  has_teacher = objective_table.find(config.loss.name).has_teacher
  return train_step_lib.make_train_step(
      config,
      policy.model,
      mesh,
      value_model=value_model_lib.make_model(
          config, policy.model, policy.value_folder
      ),
      adapters=policy.adapters,
      base=None if policy.adapters is None else params,
      teacher=reference.model if has_teacher else None,
      teacher_params=reference.params if has_teacher else None,
  )

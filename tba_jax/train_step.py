# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: its state, how that is sharded, and the jitted update.

`train_step(state, batch) -> (state, metrics)` donates the state. The params,
and the optimizer's moments with them, are sharded by the config's rules; a
batch is split over its prompts, so a group never straddles two shards and the
group means of the loss need no communication.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from tba_jax import batch_metrics
from tba_jax import objective
from tba_jax import optimizer
from tba_jax import reference
from tba_jax import rounds
from tba_jax import schedules
from tba_jax import sharding
from tba_jax import types

PyTree = types.PyTree
TrainStep = Callable[
    ["TrainState", types.Batch], tuple["TrainState", dict[str, jax.Array]]
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that an optimizer step changes or depends on, beside its batch.

  step: [] int32, optimizer steps done; also the version of `params`.
  params: PyTree, the policy.
  opt_state: PyTree, of the policy's optimizer.
  loss_params: PyTree, what the loss learns itself; {} or {"log_z": [1]}.
  loss_opt_state: PyTree, of their optimizer.
  ref_params: PyTree, the reference policy where it moves; {} where it is fixed.
  sampling_params: PyTree, the policy that began the last begun round, where
    rounds have a lag; else {}.
  learning_rate_scale: [] float32, factor on the schedule's learning rate of the
    policy; 1 unless a guard lowered it.
  rng: [2] uint32, the run's key; a step uses fold_in(rng, step).
  """

  step: Any
  params: PyTree
  opt_state: PyTree
  loss_params: PyTree
  loss_opt_state: PyTree
  ref_params: PyTree
  sampling_params: PyTree
  learning_rate_scale: Any
  rng: Any


def init_state(
    config: ml_collections.ConfigDict,
    model: Any,
    params: PyTree,
    mesh: jax.sharding.Mesh,
) -> TrainState:
  """Returns the state before step 0, sharded over the mesh.

  The params are copied, so the caller may keep using its own after the state
  was donated.

  Args:
    config: reads `optimizer`, `loss`, `reference`, `train`, `sharding`, `seed`.
    model: a `models.build.Model`; its `logical_axes` is read.
    params: of the policy, on the host or on devices.
    mesh: with the axes data, fsdp, tensor.

  Raises:
    ValueError: a setting is out of its range.
  """
  make = _state_maker(config)
  shardings = _state_shardings(
      config, model, jax.eval_shape(make, params), mesh
  )
  placed = jax.device_put(params, shardings.params)
  # With its output shardings given, jit makes new buffers for all, the params
  # too, so donating the state later does not take the caller's.
  return jax.jit(make, out_shardings=shardings)(placed)


def abstract_state(
    config: ml_collections.ConfigDict, model: Any, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the state's shapes, dtypes and shardings; allocates nothing.

  It is what `checkpoint.Checkpointer.restore` needs, on whatever mesh.

  Args and raises: as `init_state`.
  """
  make = _state_maker(config)
  params = jax.eval_shape(model.init, jax.ShapeDtypeStruct((2,), jnp.uint32))
  shapes = jax.eval_shape(make, params)
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      _state_shardings(config, model, shapes, mesh),
  )


def make_train_step(
    config: ml_collections.ConfigDict,
    model: Any,
    mesh: jax.sharding.Mesh,
    *,
    loss_fn: objective.LossFn | None = None,
) -> TrainStep:
  """Returns the jitted step, compiled once for each shape of batch.

  The batch is cut into micro-batches of `train.micro_batch_prompts` whole
  prompts, one after the other; their gradients are averaged before the one
  optimizer update. Any cut gives the same update, up to rounding, where the
  loss is a mean over groups.

  Args:
    config: reads `optimizer`, `loss`, `reference`, `train`, `sharding`, and
      what the loss reads.
    model: a `models.build.Model`.
    mesh: with the axes data, fsdp, tensor.
    loss_fn: in place of the one of `config.loss`, for other objectives.

  Returns:
    train_step(state, batch) -> (state, metrics). The given state is donated:
    use the returned one. The batch has B prompts, a multiple of
    `train.micro_batch_prompts`, each micro-batch a multiple of the data shards.
    Metrics, [] float32: `loss`, `grad_norm` (before clipping), `learning_rate`,
    `beta`, and those of the loss. Nothing is raised for a non-finite loss: the
    caller reads it, a step later, without stopping the device.

  Raises:
    ValueError: a setting is out of its range; from the step, a batch that does
      not divide into micro-batches.
  """
  c = config
  loss_fn = loss_fn or objective.make_loss_fn(c, model)
  optimizers = _make_optimizers(c)
  beta_fn = schedules.beta(c.loss, per_round_steps=c.train.per_round_steps)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(c, model, mesh))

  def step_fn(
      state: TrainState, batch: types.Batch
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    held = rounds.hold(c, state.sampling_params, state.params, state.step)
    state = dataclasses.replace(state, sampling_params=held)
    beta = beta_fn(state.step)
    loss, totals, grads = _accumulate(
        lambda params, micro: loss_fn(*params, micro, beta),
        (state.params, state.loss_params),
        _cut(batch, c.train.micro_batch_prompts, mesh, c.sharding),
    )
    learning_rate = optimizers.learning_rate_fn(state.step)
    metrics = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads[0]),
        "learning_rate": learning_rate * state.learning_rate_scale,
        "beta": beta,
        **batch_metrics.finish(totals),
    }
    return _apply(optimizers, c.reference, state, *grads), metrics

  return jax.jit(
      step_fn,
      donate_argnums=0,
      in_shardings=(shardings, sharding.batch_sharding(mesh, c.sharding)),
      out_shardings=(shardings, sharding.replicated(mesh)),
  )


@dataclasses.dataclass(frozen=True)
class _Optimizers:
  """The policy's optimizer with its learning rate, and that of the loss."""

  tx: optax.GradientTransformation
  learning_rate_fn: schedules.Schedule
  loss_tx: optax.GradientTransformation


def _make_optimizers(config: ml_collections.ConfigDict) -> _Optimizers:
  tx, learning_rate_fn = optimizer.make_optimizer(
      config.optimizer,
      config.train.num_steps,
      per_round_steps=config.train.per_round_steps,
  )
  # log Z starts far from where it belongs, so it moves at its own rate.
  loss_tx = optax.adam(config.loss.log_z_learning_rate)
  return _Optimizers(tx, learning_rate_fn, loss_tx)


def _apply(
    optimizers: _Optimizers,
    config_reference: ml_collections.ConfigDict,
    state: TrainState,
    grads: PyTree,
    loss_grads: PyTree,
) -> TrainState:
  """Returns the state after one update."""
  updates, opt_state = optimizers.tx.update(
      grads, state.opt_state, state.params
  )
  scale = state.learning_rate_scale
  updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
  loss_updates, loss_opt_state = optimizers.loss_tx.update(
      loss_grads, state.loss_opt_state, state.loss_params
  )
  params = optax.apply_updates(state.params, updates)
  step = state.step + 1
  return dataclasses.replace(
      state,
      step=step,
      params=params,
      ref_params=reference.moved(
          config_reference, state.ref_params, params, step
      ),
      opt_state=opt_state,
      loss_params=optax.apply_updates(state.loss_params, loss_updates),
      loss_opt_state=loss_opt_state,
  )


def _state_maker(
    config: ml_collections.ConfigDict,
) -> Callable[[PyTree], TrainState]:
  """Returns params -> state, to be traced."""
  optimizers = _make_optimizers(config)

  def make(params: PyTree) -> TrainState:
    loss_params = objective.make_loss_params(config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizers.tx.init(params),
        loss_params=loss_params,
        loss_opt_state=optimizers.loss_tx.init(loss_params),
        ref_params=reference.own_params(config.reference, params),
        sampling_params=jax.tree.map(jnp.copy, params)
        if rounds.keep_params(config)
        else {},
        learning_rate_scale=jnp.ones((), jnp.float32),
        rng=jax.random.PRNGKey(config.seed),
    )

  return make


def _state_shardings(
    config: ml_collections.ConfigDict,
    model: Any,
    shapes: TrainState,
    mesh: jax.sharding.Mesh,
) -> TrainState:
  """Returns the state's shardings: moments as their params, the rest whole."""
  params = sharding.param_shardings(mesh, config.sharding, model.logical_axes)
  sharding.check_divisible(shapes.params, params)
  whole = sharding.replicated(mesh)
  opt_state = optax.tree_map_params(
      _make_optimizers(config).tx,
      lambda _, param_sharding: param_sharding,
      shapes.opt_state,
      params,
      transform_non_params=lambda _: whole,
  )
  everywhere = jax.tree.map(lambda _: whole, shapes)
  return dataclasses.replace(
      everywhere,
      params=params,
      opt_state=opt_state,
      ref_params=params if shapes.ref_params else {},
      sampling_params=params if shapes.sampling_params else {},
  )


def _cut(
    batch: types.Batch,
    micro_batch_prompts: int,
    mesh: jax.sharding.Mesh,
    rules: ml_collections.ConfigDict,
) -> types.Batch:
  """Returns the batch as [micro-batches, prompts of one, ...] leaves."""
  num_prompts = batch.rewards.shape[0]
  if num_prompts % micro_batch_prompts:
    raise ValueError(
        f"train.micro_batch_prompts={micro_batch_prompts}: must divide the"
        f" {num_prompts} prompts of the batch"
    )
  num_micro = num_prompts // micro_batch_prompts
  over_batch = sharding.batch_sharding(mesh, rules)
  num_shards = num_prompts // over_batch.shard_shape((num_prompts,))[0]
  if micro_batch_prompts % num_shards:
    raise ValueError(
        f"train.micro_batch_prompts={micro_batch_prompts}: must be a multiple"
        f" of the {num_shards} shards of config.sharding.batch"
    )
  over_prompts = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(None, *over_batch.spec)
  )

  def cut(x: jax.Array) -> jax.Array:
    # Strided, not contiguous: each data shard then holds its part of every
    # micro-batch already, and nothing moves.
    x = x.reshape(micro_batch_prompts, num_micro, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, over_prompts)

  return jax.tree.map(cut, batch)


def _accumulate(
    value_fn: Callable[..., tuple[jax.Array, objective.Totals]],
    params: PyTree,
    micro_batches: types.Batch,
) -> tuple[jax.Array, objective.Totals, PyTree]:
  """Returns the mean loss, the summed totals and the mean gradient."""
  grad_fn = jax.value_and_grad(value_fn, has_aux=True)
  num_micro = micro_batches.rewards.shape[0]
  first = jax.tree.map(lambda x: x[0], micro_batches)
  if num_micro == 1:
    (loss, totals), grads = grad_fn(params, first)
    return loss, totals, grads

  def add(carry: PyTree, micro: types.Batch) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, carry, grad_fn(params, micro)), None

  # Sums in float32 at least, whatever the params are.
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
      jax.eval_shape(grad_fn, params, first),
  )
  ((loss, totals), grads), _ = jax.lax.scan(add, zeros, micro_batches)
  grads = jax.tree.map(
      lambda g, p: (g / num_micro).astype(p.dtype), grads, params
  )
  return loss / num_micro, totals, grads

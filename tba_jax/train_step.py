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
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from tba_jax import batch_metrics
from tba_jax import lora
from tba_jax import micro_batches
from tba_jax import objective
from tba_jax import optimizer
from tba_jax import preparation
from tba_jax import reference
from tba_jax import rounds
from tba_jax import schedules
from tba_jax import sharding
from tba_jax import types
from tba_jax.models import split_tokens

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
  loss_params: PyTree, what the loss learns itself; {}, {"log_z": [1]}, or
    {"value": params of the value model}.
  loss_opt_state: PyTree, of their optimizer.
  proximal_params: PyTree, what is held for some steps of `params`,
    `loss_params`, both or neither, by these names.
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
  proximal_params: PyTree
  ref_params: PyTree
  sampling_params: PyTree
  learning_rate_scale: Any
  rng: Any


def init_state(
    config: ml_collections.ConfigDict,
    model: Any,
    params: PyTree,
    mesh: jax.sharding.Mesh,
    *,
    value_model: Any = None,
    value_params: PyTree = None,
) -> TrainState:
  """Returns the state before step 0, sharded over the mesh.

  The params are copied: the caller's outlive a donated state.

  Args:
    config: reads `optimizer`, `loss`, `reference`, `train`, `sharding`, `seed`.
    model: a `models.build.Model`; its `logical_axes` is read.
    params: of the policy, on the host or on devices.
    mesh: with the axes of `sharding.MESH_AXES`.
    value_model: a `models.heads.ScalarModel` where the objective learns one.
    value_params: that it starts from; None is the policy's with a new head.

  Raises:
    ValueError: a setting is out of its range.
  """
  make = _state_maker(config, value_model)
  shapes = jax.eval_shape(make, params, value_params)
  shardings = _state_shardings(config, model, shapes, mesh, value_model)
  placed = [jax.device_put(params, shardings.params), None]
  if value_params is not None:
    placed[1] = jax.device_put(value_params, shardings.loss_params["value"])
  # With its output shardings given, jit makes new buffers for all, the params
  # too, so donating the state later does not take the caller's.
  return jax.jit(make, out_shardings=shardings)(*placed)


def abstract_state(
    config: ml_collections.ConfigDict,
    model: Any,
    mesh: jax.sharding.Mesh,
    *,
    value_model: Any = None,
) -> TrainState:
  """Returns the state's shapes, dtypes and shardings; allocates nothing.

  It is what `checkpoint.Checkpointer.restore` needs, on whatever mesh.

  Args and raises: as `init_state`.
  """
  make = _state_maker(config, value_model)
  rng = jax.ShapeDtypeStruct((2,), jnp.uint32)
  params = jax.eval_shape(model.init, rng)
  value_params = value_model and jax.eval_shape(value_model.init, rng)
  shapes = jax.eval_shape(make, params, value_params)
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      _state_shardings(config, model, shapes, mesh, value_model),
  )


def make_train_step(
    config: ml_collections.ConfigDict,
    model: Any,
    mesh: jax.sharding.Mesh,
    *,
    loss_fn: objective.LossFn | None = None,
    value_model: Any = None,
    adapters: lora.Adapters | None = None,
    base: PyTree = None,
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
    mesh: with the axes of `sharding.MESH_AXES`.
    loss_fn: in place of the one of `config.loss`, for other objectives.
    value_model: a `models.heads.ScalarModel` where the objective learns one.
    adapters: of the model, where they alone are trained.
    base: params that they belong to, on the mesh; never donated.

  Returns:
    train_step(state, batch) -> (state, metrics). The given state is donated:
    use the returned one. The batch has B prompts, a multiple of
    `train.micro_batch_prompts`, each micro-batch a multiple of the data shards.
    Metrics, [] float32: `loss`, `grad_norm` (before clipping), `learning_rate`,
    `beta` (times `tau`, which is there with `gamma` where the target is
    tempered), and those of the loss; with a value model also `value_grad_norm`
    and `value_learning_rate`. Nothing is raised for a non-finite loss: the
    caller reads it, a step later, without stopping the device.

  Raises:
    ValueError: a setting is out of its range; from the step, a batch that does
      not divide into micro-batches.
  """
  c = config
  loss_fn = loss_fn or objective.make_loss_fn(c, model, value_model)
  prepare = preparation.make(c, model, value_model)
  optimizers = optimizer.make_optimizers(c, has_values=value_model is not None)
  beta_fn = schedules.beta(c.loss, per_round_steps=c.train.per_round_steps)
  tempering_fn = schedules.tempering(
      c.tempering, per_round_steps=c.train.per_round_steps
  )
  shardings = jax.tree.map(
      lambda x: x.sharding,
      abstract_state(c, adapters or model, mesh, value_model=value_model),
  )
  attach, attach_held = lora.attachers(adapters)

  def step_fn(
      state: TrainState, batch: types.Batch, base: PyTree = None
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    state = preparation.hold_of_state(c, state)
    whole = functools.partial(attach, base)
    held = attach_held(base, state.proximal_params)
    beta, tempered = beta_fn(state.step), {}
    if tempering_fn is not None:
      tempered["tau"], tempered["gamma"] = tempering_fn(state.step)
      batch, beta = preparation.temper(batch, beta, **tempered)
    size = c.train.micro_batch_prompts
    parts = micro_batches.cut(batch, size, mesh, c.sharding)
    loss, totals, grads = micro_batches.accumulate(
        lambda params, micro: loss_fn(whole(params[0]), params[1], micro, beta),
        (state.params, state.loss_params),
        prepare(held, state.loss_params, parts, beta),
    )
    metrics = {
        "loss": loss,
        **_norms_and_rates(optimizers, state, grads, value_model is not None),
        "beta": beta,
        **tempered,
        **batch_metrics.finish(totals),
    }
    return _apply(optimizers, c.reference, state, *grads), metrics

  axes = sharding.token_axes(c.sharding)
  return lora.jit_step(
      split_tokens.split_tokens(step_fn, mesh, *axes),
      adapters,
      base,
      in_shardings=(shardings, sharding.batch_sharding(mesh, c.sharding)),
      out_shardings=(shardings, sharding.replicated(mesh)),
  )


def _norms_and_rates(
    optimizers: optimizer.Optimizers,
    state: TrainState,
    grads: tuple[PyTree, PyTree],
    has_values: bool,
) -> dict[str, jax.Array]:
  """Returns the metrics of an update."""
  rate = optimizers.learning_rate_fn(state.step)
  found = {
      "grad_norm": optax.tree.norm(grads[0]),
      "learning_rate": rate * state.learning_rate_scale,
  }
  if has_values:
    found["value_grad_norm"] = optax.tree.norm(grads[1])
    found["value_learning_rate"] = optimizers.value_learning_rate_fn(state.step)
  return found


def _apply(
    optimizers: optimizer.Optimizers,
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
    config: ml_collections.ConfigDict, value_model: Any
) -> Callable[..., TrainState]:
  """Returns (params, value_params) -> state, to be traced."""
  optimizers = optimizer.make_optimizers(
      config, has_values=value_model is not None
  )

  def make(params: PyTree, value_params: PyTree) -> TrainState:
    loss_params = objective.make_loss_params(
        config, value_model, params, value_params
    )
    step = jnp.zeros((), jnp.int32)
    return TrainState(
        step=step,
        params=params,
        opt_state=optimizers.tx.init(params),
        loss_params=loss_params,
        loss_opt_state=optimizers.loss_tx.init(loss_params),
        proximal_params=preparation.hold(
            config, None, params, loss_params, step
        ),
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
    value_model: Any,
) -> TrainState:
  """Returns the state's shardings: moments as their params, the rest whole."""
  of = functools.partial(sharding.param_shardings, mesh, config.sharding)
  params = of(model.logical_axes)
  sharding.check_divisible(shapes.params, params)
  whole = sharding.replicated(mesh)
  everywhere = jax.tree.map(lambda _: whole, shapes)
  loss_params = everywhere.loss_params
  if value_model is not None:
    loss_params = {**loss_params, "value": of(value_model.logical_axes)}
    sharding.check_divisible(shapes.loss_params, loss_params)

  def moments(
      tx: optax.GradientTransformation, opt_state: PyTree, like: PyTree
  ) -> PyTree:
    return optax.tree_map_params(
        tx,
        lambda _, param_sharding: param_sharding,
        opt_state,
        like,
        transform_non_params=lambda _: whole,
    )

  optimizers = optimizer.make_optimizers(
      config, has_values=value_model is not None
  )
  held = {"params": params, "loss_params": loss_params}
  return dataclasses.replace(
      everywhere,
      params=params,
      opt_state=moments(optimizers.tx, shapes.opt_state, params),
      loss_params=loss_params,
      loss_opt_state=moments(
          optimizers.loss_tx, shapes.loss_opt_state, loss_params
      ),
      proximal_params={name: held[name] for name in shapes.proximal_params},
      ref_params=params if shapes.ref_params else {},
      sampling_params=params if shapes.sampling_params else {},
  )

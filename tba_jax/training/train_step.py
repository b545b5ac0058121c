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

from tba_jax import types
from tba_jax.losses import build
from tba_jax.losses import groups
from tba_jax.losses import logprobs
from tba_jax.losses import objective
from tba_jax.losses import ppo
from tba_jax.models import sequence
from tba_jax.training import lora
from tba_jax.training import optimizer
from tba_jax.training import reference
from tba_jax.training import schedules
from tba_jax.training import sharding

# A batch cut into micro-batches of whole prompts, and what they add up to.


PyTree = types.PyTree


def cut_micro_batches(
    batch: types.Batch,
    micro_batch_prompts: int,
    mesh: jax.sharding.Mesh,
    rules: ml_collections.ConfigDict,
) -> types.Batch:
  """Returns the batch as [micro-batches, prompts of one, ...] leaves.

  Raises:
    ValueError: `micro_batch_prompts` does not divide the batch, or its shards
      do not divide it.
  """
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

  def cut_leaf(x: jax.Array) -> jax.Array:
    # Strided, not contiguous: each data shard then holds its part of every
    # micro-batch already, and nothing moves.
    x = x.reshape(micro_batch_prompts, num_micro, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, over_prompts)

  return jax.tree.map(cut_leaf, batch)


def accumulate(
    value_fn: Callable[..., tuple[jax.Array, objective.Totals]],
    params: PyTree,
    micro_batches: types.Batch,
) -> tuple[jax.Array, objective.Totals, PyTree]:
  """Returns the mean loss, the summed totals and the mean gradient.

  Args:
    value_fn: (params, micro-batch) -> (loss, totals).
    params: the gradient is by them.
    micro_batches: leaves [M, ...] of M micro-batches, one after the other.
  """
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


# Rounds of Asynchronous RLHF: their steps, and the params that a lag needs.
#
# Source: Noukhovitch et al. 2025 (arXiv:2410.18252), in the order of Cleanba
# (arXiv:2310.00036): round r (from 1) trains on what θ of round r-2 sampled.


def round_steps(config: ml_collections.ConfigDict) -> int:
  """Returns the optimizer steps of a round, N T; 1 without rounds."""
  return max(config.rounds.mini_batches, 1) * config.rounds.passes


def keeps_params(config: ml_collections.ConfigDict) -> bool:
  """True where a restart may need params that are a round old."""
  return config.rounds.mini_batches > 0 and config.rounds.lag_rounds > 0


def hold_round_params(
    config: ml_collections.ConfigDict,
    held: types.PyTree,
    params: types.PyTree,
    step: jax.Array,
) -> types.PyTree:
  """Returns the params that began the last begun round.

  Args:
    config: reads `rounds`.
    held: those of the step before; {} where none are kept.
    params: before the step.
    step: [] int32, about to be made.
  """
  if not keeps_params(config):
    return held
  return jax.lax.cond(
      step % round_steps(config) == 0,
      lambda: jax.tree.map(jnp.copy, params),
      lambda: held,
  )


# What is known of a whole batch before it is cut: advantages, proximal policy.
#
# A proximal policy is one that is held for some steps while the policy moves
# away
# from it: the one that a trust region is around ("decoupled"), or that stands
# for
# the one that sampled (`loss.behavior_logprobs`). The values of which PPO makes
# its advantages are held as long. Within rounds that is a round.


Prepare = Callable[[PyTree, PyTree, types.Batch, jax.Array], types.Batch]

BEHAVIORS = ("sampler", "recomputed")


def held_steps(config: ml_collections.ConfigDict) -> int:
  """Returns for how many steps a proximal policy is held."""
  return config.loss.proximal_every_steps or round_steps(config)


def hold_prepared(
    config: ml_collections.ConfigDict,
    held: PyTree | None,
    params: PyTree,
    loss_params: PyTree,
    step: jax.Array,
) -> PyTree:
  """Returns what is held at a step: `params`, `loss_params`, both or neither.

  Args:
    config: reads `loss` and `rounds`.
    held: at the step before; None before the first one.
    params, loss_params: before the step.
    step: [] int32, about to be made.

  Raises:
    ValueError: a setting of `config.loss` is out of its range.
  """
  c, every = config.loss, held_steps(config)
  if c.behavior_logprobs not in BEHAVIORS:
    raise ValueError(
        f"loss.behavior_logprobs={c.behavior_logprobs!r}: allowed {BEHAVIORS}"
    )
  recomputed = c.behavior_logprobs == "recomputed"
  if every == 1:
    if recomputed:
      raise ValueError(
          f"loss.behavior_logprobs={c.behavior_logprobs!r}: the proximal policy"
          " must be held for more than one step"
      )
    # The policy itself is the proximal one.
    return {}
  new = {}
  if recomputed or c.correction == "decoupled":
    new["params"] = params
  if build.find(c.name).has_targets:
    new["loss_params"] = loss_params
  copy = lambda: jax.tree.map(jnp.copy, new)
  if held is None or not new:
    return copy()
  return jax.lax.cond(step % every == 0, copy, lambda: held)


def hold_of_state(config: ml_collections.ConfigDict, state: Any) -> Any:
  """Returns a `TrainState` whose held params are those of its step."""
  return dataclasses.replace(
      state,
      sampling_params=hold_round_params(
          config, state.sampling_params, state.params, state.step
      ),
      proximal_params=hold_prepared(
          config,
          state.proximal_params,
          state.params,
          state.loss_params,
          state.step,
      ),
  )


def temper(
    batch: types.Batch, beta: jax.Array, *, tau: jax.Array, gamma: jax.Array
) -> tuple[types.Batch, jax.Array]:
  """Returns the batch and β of a tempered target.

      (log π_ref/γ + r/β) / τ = log π_ref · 1/(γ τ) + r/(β τ)

  so the loss takes β τ, and log π_ref times a weight that goes with the batch:
  what is told of the KL stays that to π_ref itself.

  Args:
    batch: of B prompts, nothing prepared yet.
    beta, tau, gamma: [] float32, above 0.
  """
  weight_B = jnp.broadcast_to(1 / (gamma * tau), batch.rewards.shape[:1])
  prepared = {**batch.prepared, "ref_weight": weight_B}
  return dataclasses.replace(batch, prepared=prepared), beta * tau


def make_preparation(
    config: ml_collections.ConfigDict,
    model: Any,
    value_model: Any,
) -> Prepare:
  """Returns what fills `Batch.prepared` of the micro-batches of a batch.

  What one micro-batch can work out for itself is left to it, so that nothing is
  computed twice: with one, and nothing held, that is all.

  Args:
    config: reads `loss`, `rounds` and `sampling.temperature`.
    model: of the policy, a `models.build.Model`.
    value_model: a `models.heads.ScalarModel` where the objective learns one.

  Returns:
    prepare(held, loss_params, micro_batches, beta) -> micro_batches, with held
    of `hold` and leaves [M, B, ...] of M micro-batches.
  """
  c, row = config.loss, build.find(config.loss.name)
  length_norm = c.length_norm or row.length_norm
  by_batch = lambda x: x.reshape(-1, *x.shape[2:])

  def proximal(params: PyTree, micro: types.Batch) -> jax.Array:
    return logprobs.completion_logprobs(
        model,
        params,
        micro.prompt_tokens,
        micro.prompt_mask,
        micro.completion_tokens,
        temperature=config.sampling.temperature,
    )

  def prepare(
      held: PyTree,
      loss_params: PyTree,
      micro_batches: types.Batch,
      beta: jax.Array,
  ) -> types.Batch:
    num_micro, num_prompts = micro_batches.rewards.shape[:2]
    behavior = micro_batches.behavior_logprobs
    prepared = dict(micro_batches.prepared)
    if "params" in held:
      prepared["proximal_logprobs"] = jax.lax.map(
          lambda micro: proximal(held["params"], micro), micro_batches
      )
      if c.behavior_logprobs == "recomputed":
        behavior = prepared["proximal_logprobs"]
    if row.has_targets and (num_micro > 1 or "loss_params" in held):
      old = held.get("loss_params", loss_params)
      values = jax.lax.map(
          lambda micro: logprobs.completion_values(value_model, old, micro),
          micro_batches,
      )
      found = ppo.make_targets(
          by_batch(values),
          by_batch(behavior - micro_batches.ref_logprobs),
          by_batch(micro_batches.completion_mask),
          by_batch(micro_batches.rewards),
          beta=beta,
          **{name: c[name] for name in ppo.TARGET_SETTINGS},
      )
      prepared |= {
          field.name: getattr(found, field.name).reshape(values.shape)
          for field in dataclasses.fields(found)
      }
    if length_norm == "mean_tokens" and num_micro > 1:
      prepared["mean_tokens"] = jnp.broadcast_to(
          groups.mean_tokens(micro_batches.completion_mask),
          (num_micro, num_prompts),
      )
    return dataclasses.replace(micro_batches, prepared=prepared)

  return prepare


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
  prepare = make_preparation(c, model, value_model)
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
    state = hold_of_state(c, state)
    whole = functools.partial(attach, base)
    held = attach_held(base, state.proximal_params)
    beta, tempered = beta_fn(state.step), {}
    if tempering_fn is not None:
      tempered["tau"], tempered["gamma"] = tempering_fn(state.step)
      batch, beta = temper(batch, beta, **tempered)
    size = c.train.micro_batch_prompts
    parts = cut_micro_batches(batch, size, mesh, c.sharding)
    loss, totals, grads = accumulate(
        lambda params, micro: loss_fn(whole(params[0]), params[1], micro, beta),
        (state.params, state.loss_params),
        prepare(held, state.loss_params, parts, beta),
    )
    metrics = {
        "loss": loss,
        **_norms_and_rates(optimizers, state, grads, value_model is not None),
        "beta": beta,
        **tempered,
        **objective.finish_totals(totals),
    }
    return _apply(optimizers, c.reference, state, *grads), metrics

  axes = sharding.token_axes(c.sharding)
  return lora.jit_step(
      sequence.split_tokens(step_fn, mesh, *axes),
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
        proximal_params=hold_prepared(config, None, params, loss_params, step),
        ref_params=reference.own_params(config.reference, params),
        sampling_params=jax.tree.map(jnp.copy, params)
        if keeps_params(config)
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

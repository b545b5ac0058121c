# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Train state and the jitted optimizer step.

`train_step(state, batch) -> (state, metrics)` donates the state. Params and
optimizer moments are sharded by `sharding.RULES`, batches over their prompts
and packed rows.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from tba_jax import schedule as schedule_lib
from tba_jax import types
from tba_jax.learning import optimizer as optimizer_lib
from tba_jax.learning import packing
from tba_jax.learning import schedules
from tba_jax.losses import groups
from tba_jax.losses import logprobs
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.losses import ppo
from tba_jax.mesh import sharding
from tba_jax.models.net import packed
from tba_jax.models.net import sequence
from tba_jax.policy import lora
from tba_jax.policy import reference_policy

PyTree = types.PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything an optimizer step changes or depends on, except its batch.

  step: [] int32, optimizer steps done; also the version of `params`.
  params: policy params, or adapters if only these are trained.
  opt_state: state of the policy's optimizer.
  loss_params: {}, {"log_z": [1]}, or {"value": params of the value model}.
  loss_opt_state: moments of `loss_params`.
  proximal_params: snapshots of `params` and `loss_params` by name, as far as
    the loss needs them, refreshed every `held_steps` steps.
  ref_params: the reference policy if it moves, else {}.
  sampling_params: the policy at the start of the current round if rounds have
    a lag, else {}.
  learning_rate_scale: [] float32, factor on the policy's learning rate; 1
    unless a guard lowered it.
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


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """The step of `make_train_step`, (state, batch) -> (state, metrics).

  jitted: (state, batch, base, teacher_params) -> (state, metrics).
  base: frozen base params of the adapters, or None; an argument, so that the
    compiled program does not contain them as constants.
  teacher_params: reference params if the loss compares distributions, or None.
  """

  jitted: Callable[..., Any]
  base: PyTree
  teacher_params: PyTree = None

  def __call__(
      self, state: TrainState, batch: types.Batch
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    return self.jitted(state, batch, self.base, self.teacher_params)

  def lower(self, state: TrainState, batch: types.Batch) -> jax.stages.Lowered:
    """Lowers the step for these shapes; later calls reuse the compilation."""
    return self.jitted.lower(state, batch, self.base, self.teacher_params)


def make_train_step(
    config: ml_collections.ConfigDict,
    model: Any,
    mesh: jax.sharding.Mesh,
    *,
    loss_fn: objective.LossFn | None = None,
    value_model: Any = None,
    adapters: lora.Adapters | None = None,
    base: PyTree = None,
    teacher: Any = None,
    teacher_params: PyTree = None,
) -> TrainStep:
  """Returns the jitted step.

  Gradients are accumulated over the non-empty micro-batches. For losses that
  are means over groups, the micro-batch size affects the update only through
  rounding. If the loss or a gradient norm is not finite, the update is skipped:
  params and optimizer states stay the same, and the metric `nonfinite` is 1.

  Args:
    model: a `models.transformer.Model`.
    mesh: trainer's mesh, with the axes of `sharding.MESH_AXES`.
    loss_fn: loss to use instead of `config.loss`, for batches without rows, in
      micro-batches of `train.micro_batch_prompts` prompts.
    value_model: a `models.heads.ScalarModel` if the objective learns one.
    adapters: LoRA adapters if only these are trained.
    base: frozen base params of the adapters on the mesh, or their shapes; never
      donated.
    teacher: the reference's `models.transformer.Model` if the loss compares
      distributions.
    teacher_params: pytree for `teacher`, placed like `base`.

  Returns:
    train_step(state, batch) -> (state, metrics). The state is donated. Metrics,
    [] float32: `loss`, `nonfinite`, `grad_norm` (before clipping),
    `learning_rate`, `beta` and the loss's metrics; with a tempered target `tau`
    and `gamma`; with a value model `value_grad_norm` and `value_learning_rate`.

  Raises (when the step is called):
    ValueError: a batch for `loss_fn` is not divisible into micro-batches, or a
      micro-batch into data shards.
  """
  c, has_values = config, value_model is not None
  per_round_steps = c.train.per_round_steps
  if loss_fn is None:
    functions = objective.make_objective(c, model, value_model, teacher)
  policy_opt, loss_opt = optimizer_lib.make_optimizers(c, has_values=has_values)
  beta_fn = schedules.beta(c.loss, per_round_steps=per_round_steps)
  tempering_fn = schedules.tempering(
      c.tempering, per_round_steps=per_round_steps
  )
  follows_lag = c.optimizer.full_lag_steps or c.optimizer.sample_share_power
  shardings = jax.tree.map(
      lambda x: x.sharding,
      abstract_state(c, adapters or model, mesh, value_model=value_model),
  )
  attach = adapters.attach if adapters else lambda _, params: params

  def step_fn(
      state: TrainState,
      batch: types.Batch,
      base: PyTree,
      teacher_params: PyTree,
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    state = hold_params(c, state)
    beta, tempered = beta_fn(state.step), {}
    if tempering_fn is not None:
      tempered["tau"], tempered["gamma"] = tempering_fn(state.step)
      batch, beta = temper(batch, beta, **tempered)

    params = state.params, state.loss_params
    if loss_fn is not None:
      loss, totals, (grads, loss_grads) = accumulate(
          lambda params, micro: loss_fn(
              attach(base, params[0]), params[1], micro, beta
          ),
          params,
          cut_micro_batches(batch, c.train, mesh),
      )
    else:
      held = dict(state.proximal_params)
      if "params" in held:
        held["params"] = attach(base, held["params"])
      batch = prepare(
          c, model, value_model, held, state.loss_params, in_rows(batch), beta
      )
      loss, totals, (grads, loss_grads) = accumulate_micro_batches(
          functions,
          lambda params, token_indices_RxL: functions.forward(
              attach(base, params[0]),
              params[1],
              batch,
              teacher_params,
              token_indices_RxL,
          ),
          params,
          batch,
          beta,
          # A custom loss may compare groups with each other.
          needs_all=packing.make(c).cuts_groups or ".py:" in c.loss.name,
      )

    grad_norm, loss_grad_norm = map(optax.tree.norm, (grads, loss_grads))
    finite = jnp.isfinite(jnp.stack([loss, grad_norm, loss_grad_norm])).all()
    finished = metrics_lib.finish(totals)
    learning_rate = policy_opt.learning_rate(state.step)
    learning_rate = learning_rate * state.learning_rate_scale
    if follows_lag:
      learning_rate = learning_rate * schedules.lag_scale(
          c.optimizer, batch.staleness_steps, finished["effective_sample_share"]
      )
    loss_learning_rate = loss_opt.learning_rate(state.step)
    metrics = {
        "loss": loss,
        "nonfinite": 1.0 - finite.astype(jnp.float32),
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "beta": beta,
        **tempered,
        **finished,
    }
    if has_values:
      metrics["value_grad_norm"] = loss_grad_norm
      metrics["value_learning_rate"] = loss_learning_rate

    params, opt_state = policy_opt.update(
        grads, state.opt_state, state.params, learning_rate
    )
    loss_params, loss_opt_state = loss_opt.update(
        loss_grads, state.loss_opt_state, state.loss_params, loss_learning_rate
    )
    new = dict(
        params=params,
        opt_state=opt_state,
        loss_params=loss_params,
        loss_opt_state=loss_opt_state,
    )
    old = {name: getattr(state, name) for name in new}
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    step = state.step + 1
    ref_params = reference_policy.moved(
        c.reference, state.ref_params, new["params"], step
    )
    return (
        dataclasses.replace(state, step=step, ref_params=ref_params, **new),
        metrics,
    )

  jitted = jax.jit(
      sequence.split_tokens(step_fn, mesh, *sharding.TOKEN_AXES),
      donate_argnums=0,
      in_shardings=(
          shardings,
          sharding.batch_shardings(c.train.prompts_per_batch, mesh),
          None,
          None,
      ),
      out_shardings=(shardings, sharding.replicated(mesh)),
  )
  return TrainStep(jitted, base, teacher_params)


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

  Copies the params, so that donating the state leaves the caller's intact.

  Args:
    model: source of the `logical_axes` of `params`.
    params: initial trained params, on the host or on devices.
    mesh: trainer's mesh, with the axes of `sharding.MESH_AXES`.
    value_model: a `models.heads.ScalarModel` if the objective learns one.
    value_params: initial params of the value model; None copies the policy and
      adds a zero head.
  """
  make = _state_maker(config, value_model)
  shapes = jax.eval_shape(make, params, value_params)
  shardings = _state_shardings(config, model, shapes, mesh, value_model)
  params = jax.device_put(params, shardings.params)
  if value_params is not None:
    value_params = jax.device_put(value_params, shardings.loss_params["value"])
  # jit with output shardings allocates new buffers for the params too, so
  # donating the state never frees the caller's.
  return jax.jit(make, out_shardings=shardings)(params, value_params)


def abstract_state(
    config: ml_collections.ConfigDict,
    model: Any,
    mesh: jax.sharding.Mesh,
    *,
    value_model: Any = None,
) -> TrainState:
  """Returns shapes, dtypes and shardings of the state; allocates nothing."""
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


def _state_maker(
    config: ml_collections.ConfigDict, value_model: Any
) -> Callable[..., TrainState]:
  """Returns (params, value_params) -> state, to be traced."""
  policy_opt, loss_opt = optimizer_lib.make_optimizers(
      config, has_values=value_model is not None
  )

  is_late = schedule_lib.make_schedule(config).is_late

  def make(params: PyTree, value_params: PyTree) -> TrainState:
    copy = lambda tree: jax.tree.map(jnp.copy, tree)
    loss_params = objective.make_loss_params(
        config, value_model, params, value_params
    )
    held = {"params": params, "loss_params": loss_params}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=policy_opt.tx.init(params),
        loss_params=loss_params,
        loss_opt_state=loss_opt.tx.init(loss_params),
        proximal_params=copy({n: held[n] for n in proximal_names(config)}),
        ref_params={} if config.reference.mode == "fixed" else copy(params),
        # A restart may need the params from the start of the round.
        sampling_params=copy(params) if is_late else {},
        learning_rate_scale=jnp.ones((), jnp.float32),
    )

  return make


def _state_shardings(
    config: ml_collections.ConfigDict,
    model: Any,
    shapes: TrainState,
    mesh: jax.sharding.Mesh,
    value_model: Any,
) -> TrainState:
  """Returns the shardings: moments like their params, the rest replicated.

  Raises:
    ValueError: a leaf does not divide over the mesh; names the leaves.
  """
  params = sharding.param_shardings(mesh, model)
  replicated = sharding.replicated(mesh)
  all_replicated = jax.tree.map(lambda _: replicated, shapes)
  loss_params = all_replicated.loss_params
  if value_model is not None:
    loss_params = {"value": sharding.param_shardings(mesh, value_model)}

  def moments(
      opt: optimizer_lib.Optimizer, opt_state: PyTree, like: PyTree
  ) -> PyTree:
    return optax.tree_map_params(
        opt.tx,
        lambda _, param_sharding: param_sharding,
        opt_state,
        like,
        transform_non_params=lambda _: replicated,
    )

  policy_opt, loss_opt = optimizer_lib.make_optimizers(
      config, has_values=value_model is not None
  )
  held = {"params": params, "loss_params": loss_params}
  return dataclasses.replace(
      all_replicated,
      params=params,
      opt_state=moments(policy_opt, shapes.opt_state, params),
      loss_params=loss_params,
      loss_opt_state=moments(loss_opt, shapes.loss_opt_state, loss_params),
      proximal_params={name: held[name] for name in shapes.proximal_params},
      ref_params=params if shapes.ref_params else {},
      sampling_params=params if shapes.sampling_params else {},
  )


def held_steps(config: ml_collections.ConfigDict) -> int:
  """Returns for how many steps the proximal policy stays fixed."""
  schedule = schedule_lib.make_schedule(config)
  return config.loss.proximal_every_steps or schedule.round_steps


def proximal_names(config: ml_collections.ConfigDict) -> list[str]:
  """Returns the state fields that the proximal snapshot contains."""
  c = config.loss
  if held_steps(config) == 1:  # The policy itself is the proximal one.
    return []
  policy = c.behavior_logprobs == "recomputed" or c.correction == "decoupled"
  values = objective_table.find(c.name).has_targets
  return ["params"] * policy + ["loss_params"] * values


def hold_params(
    config: ml_collections.ConfigDict, state: TrainState
) -> TrainState:
  """Refreshes the snapshots of the state that are due."""

  def refreshed(held: PyTree, new: PyTree, every: int) -> PyTree:
    if not held:
      return held
    return jax.lax.cond(
        state.step % every == 0,
        lambda: jax.tree.map(jnp.copy, new),
        lambda: held,
    )

  current = {name: getattr(state, name) for name in state.proximal_params}
  return dataclasses.replace(
      state,
      sampling_params=refreshed(
          state.sampling_params,
          state.params,
          schedule_lib.make_schedule(config).round_steps,
      ),
      proximal_params=refreshed(
          state.proximal_params, current, held_steps(config)
      ),
  )


def temper(
    batch: types.Batch, beta: jax.Array, *, tau: jax.Array, gamma: jax.Array
) -> tuple[types.Batch, jax.Array]:
  """Returns the batch and β of a tempered target.

      (log π_ref/γ + r/β) / τ = log π_ref · 1/(γ τ) + r/(β τ)

  The loss uses β τ and a weighted log π_ref; the reported KL still is to π_ref.
  """
  weight_B = jnp.broadcast_to(1 / (gamma * tau), batch.rewards.shape[:1])
  prepared = {**batch.prepared, "ref_weight": weight_B}
  return dataclasses.replace(batch, prepared=prepared), beta * tau


def in_rows(batch: types.Batch) -> types.Batch:
  """Returns the batch with rows: its own, or one padded row per group."""
  if batch.rows is not None:
    return batch
  shape, P = batch.completion_mask.shape, batch.prompt_mask.shape[1]
  count = sequence.current_split().count
  tokens_BxL = packed.unpacked(batch.prompt_mask, shape, count)
  (B, K, T), L = shape, tokens_BxL.shape[1]
  starts_Bx1 = jnp.arange(B, dtype=jnp.int32)[:, None] * L + P - 1
  place_indices_BxKT = starts_Bx1 + jnp.arange(K * T, dtype=jnp.int32)[None]
  rows = types.Rows(tokens_BxL[:, None], place_indices_BxKT.reshape(shape))
  return dataclasses.replace(batch, rows=rows)


def cut_micro_batches(
    batch: types.Batch,
    train: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
) -> types.Batch:
  """Splits a batch without rows; leaves [micro-batches, prompts each, ...].

  Raises:
    ValueError: `train.micro_batch_prompts` does not divide the batch, or is not
      a multiple of its shards.
  """
  num_prompts, num_each = len(batch.rewards), train.micro_batch_prompts
  num_shards = sharding.num_batch_shards(mesh)
  if num_prompts % num_each or num_each % num_shards:
    raise ValueError(
        f"train.micro_batch_prompts={num_each}: must divide the {num_prompts}"
        f" prompts of a batch and be a multiple of its {num_shards} shards"
        " (config.mesh)"
    )
  num_micro = num_prompts // num_each

  def cut_leaf(x: jax.Array) -> jax.Array:
    # Strided, not contiguous: each shard already holds its part of every
    # micro-batch, so no data moves.
    x = x.reshape(-1, num_micro, *x.shape[1:]).swapaxes(0, 1)
    spec = jax.sharding.PartitionSpec(None, *sharding.batch_sharding(mesh).spec)
    return jax.lax.with_sharding_constraint(
        x, jax.sharding.NamedSharding(mesh, spec)
    )

  if num_micro > 1:
    number = groups.mean_tokens(batch.completion_mask)
    prepared = {"mean_tokens": jnp.broadcast_to(number, (num_prompts,))}
    batch = dataclasses.replace(batch, prepared=batch.prepared | prepared)
  return jax.tree.map(cut_leaf, batch)


def prepare(
    config: ml_collections.ConfigDict,
    model: Any,
    value_model: Any,
    held: PyTree,
    loss_params: PyTree,
    batch: types.Batch,
    beta: jax.Array,
) -> types.Batch:
  """Adds to `batch.prepared` what losses compute from the whole batch.

  Args:
    model: the policy's `models.transformer.Model`.
    value_model: a `models.heads.ScalarModel` if the objective learns one.
    held: `TrainState.proximal_params`, with adapters attached.
    batch: data of the step, with rows.
    beta: [] float32.
  """
  c, row = config.loss, objective_table.find(config.loss.name)
  behavior = batch.behavior_logprobs
  prepared = dict(batch.prepared)
  if "params" in held:
    prepared["proximal_logprobs"] = logprobs.completion_logprobs(
        model,
        held["params"],
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        temperature=config.sampling.temperature,
        rows=batch.rows,
        routes=batch.experts,
        kept_BxKxTxC=batch.kept_ids,
    )
    if c.behavior_logprobs == "recomputed":
      behavior = prepared["proximal_logprobs"]
  several = batch.rows.token_indices.shape[1] > 1
  if row.has_targets and (several or "loss_params" in held):
    old = held.get("loss_params", loss_params)
    values_BxKxT = logprobs.map_micro_batches(
        lambda token_indices_RxL: objective.completion_values(
            value_model, old, batch, token_indices_RxL
        ),
        batch.rows,
        jnp.zeros_like(behavior),
    )
    targets = ppo.make_targets(
        values_BxKxT,
        behavior - batch.ref_logprobs,
        batch.completion_mask,
        batch.rewards,
        c,
        beta,
        batch.turn_rewards,
    )
    prepared |= vars(targets)
  return dataclasses.replace(batch, prepared=prepared)


def accumulate_micro_batches(
    functions: objective.Objective,
    forward: Callable[..., tuple[PyTree, metrics_lib.Totals]],
    params: tuple[PyTree, PyTree],
    batch: types.Batch,
    beta: jax.Array,
    *,
    needs_all: bool,
) -> tuple[jax.Array, metrics_lib.Totals, PyTree]:
  """Returns the loss, its totals and its gradient over all micro-batches.

  Each micro-batch differentiates its own completions and treats all others as
  constants. These constants do not affect the gradient if groups are whole and
  the loss is a mean over groups. Otherwise (`needs_all`), a forward pass over
  all micro-batches computes them first.

  Args:
    functions: loss of the batch, and placeholder outputs.
    forward: (params, token_indices_RxL) -> (outputs, totals).
    batch: data of the step, with rows.
    beta: [] float32.
    needs_all: whether gradients depend on outputs of other micro-batches.
  """
  rows = batch.rows
  outputs = functions.placeholders(batch)
  if needs_all and rows.token_indices.shape[1] > 1:
    outputs = logprobs.map_micro_batches(
        lambda token_indices_RxL: forward(params, token_indices_RxL)[0],
        rows,
        outputs,
    )

  def backward_of(n: jax.Array | int, before: PyTree) -> PyTree:
    """Returns the outputs, gradients and totals after micro-batch `n`."""
    own, backward, totals = jax.vjp(
        lambda params: forward(params, rows.token_indices[:, n]),
        params,
        has_aux=True,
    )

    def loss_of(own: PyTree) -> tuple[jax.Array, PyTree]:
      outputs = jax.tree.map(
          lambda x, before: packed.merge(x, rows, n, before), own, before
      )
      return functions.loss(outputs, params[1], batch, beta)[0], outputs

    cotangent, outputs = jax.grad(loss_of, has_aux=True)(own)
    (grads,) = backward(cotangent)
    return outputs, grads, totals

  if rows.token_indices.shape[1] == 1:
    outputs, grads, totals = backward_of(0, outputs)
  else:
    # Sum in at least float32, whatever the dtype of the params.
    shapes = jax.eval_shape(backward_of, 0, outputs)[1:]
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
        shapes,
    )

    def add(n: jax.Array, carry: PyTree) -> PyTree:
      outputs, *new = backward_of(n, carry[0])
      return outputs, *jax.tree.map(jnp.add, carry[1:], tuple(new))

    outputs, grads, totals = jax.lax.fori_loop(
        0, packed.num_micro_batches(rows), add, (outputs, *zeros)
    )
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

  # Loss params that the loss reads directly get their gradient from all groups
  # at once.
  (loss, others), own_grads = jax.value_and_grad(
      lambda own: functions.loss(outputs, own, batch, beta), has_aux=True
  )(params[1])
  grads = grads[0], jax.tree.map(jnp.add, grads[1], own_grads)
  return loss, totals | others, grads


def accumulate(
    value_fn: Callable[..., tuple[jax.Array, metrics_lib.Totals]],
    params: PyTree,
    micro_batches: types.Batch,
) -> tuple[jax.Array, metrics_lib.Totals, PyTree]:
  """Returns the mean loss, the summed totals and the mean gradient.

  Args:
    value_fn: (params, micro-batch) -> (loss, totals).
    params: variables of the gradient.
    micro_batches: leaves [M, ...], processed one after the other.
  """
  grad_fn = jax.value_and_grad(value_fn, has_aux=True)
  num_micro = micro_batches.rewards.shape[0]
  first = jax.tree.map(lambda x: x[0], micro_batches)
  if num_micro == 1:
    (loss, totals), grads = grad_fn(params, first)
    return loss, totals, grads

  def add(carry: PyTree, micro: types.Batch) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, carry, grad_fn(params, micro)), None

  # Sum in at least float32, whatever the dtype of the params.
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
      jax.eval_shape(grad_fn, params, first),
  )
  ((loss, totals), grads), _ = jax.lax.scan(add, zeros, micro_batches)
  grads = jax.tree.map(
      lambda g, p: (g / num_micro).astype(p.dtype), grads, params
  )
  return loss / num_micro, totals, grads

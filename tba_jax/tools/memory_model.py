# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a trainer and a searcher per device, from shapes and shardings.

The only source of these figures: `plan` adds them up, and `compile` compiles a
role's programs for them. Nothing is allocated, and the mesh may be abstract and
for any platform: the shapes come from the roles' own code.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import ml_collections

from tba_jax import collect
from tba_jax import types
from tba_jax.config import hardware
from tba_jax.evaluation import evaluations
from tba_jax.learning import packing
from tba_jax.learning import published as published_lib
from tba_jax.learning import train_step
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import encoder as encoder_lib
from tba_jax.models.net import heads
from tba_jax.models.net import quantized
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.policy import value_model as value_model_lib
from tba_jax.programs import model_sizes
from tba_jax.programs import titled_rows
from tba_jax.sampling import requests
from tba_jax.sampling import samplers
from tba_jax.sampling import slots as slots_lib
from tba_jax.system import accelerators
from tba_jax.system import processes

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# Part of the memory -> its bytes on each device.
Parts = dict[str, int]


@dataclasses.dataclass(frozen=True)
class FrozenShapes:
  """A frozen model of a role.

  source: name, key and kind of the model.
  fn: (params, tokens, mask) -> scores.
  params: shapes with dtypes and shardings.
  shape: number of texts scored at a time, and of their tokens.
  """

  source: model_sizes.FrozenModel
  fn: Callable[..., Any]
  params: types.PyTree
  shape: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleMemory:
  """Memory of a role; arrays are shapes with dtypes and shardings.

  params: shapes of the policy's params.
  frozen: models other than the policy and its reference.
  resident: bytes that are always held; for a searcher, while it receives a
    version.
  peak: `resident`, and the maximum that is added to it.
  """

  mesh: Mesh
  model: transformer.Model
  params: types.PyTree
  frozen: list[FrozenShapes]
  resident: Parts
  peak: Parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerMemory(RoleMemory):
  """Memory of a trainer.

  adapters: LoRA adapters; None if all params are trained.
  value_model: learned value model; None if the objective has none.
  batch: shapes of the largest batch of a train step.
  step: bytes that a train step adds.
  """

  adapters: lora.Adapters | None
  value_model: heads.ScalarModel | None
  state: train_step.TrainState
  batch: types.Batch
  step: Parts
  evaluation: Parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearcherMemory(RoleMemory):
  """Memory of a searcher.

  programs: compiled functions of the sampler; their state has the KV cache.
  decode_params: params in the form used for decoding.
  """

  programs: slots_lib.SlotPrograms
  settings: requests.SamplingSettings
  decode_params: types.PyTree


def num_bytes(tree: types.PyTree, dtype: str | None = None) -> int:
  """Returns a tree's bytes on each device, in its dtypes or in `dtype`."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape))
      * jnp.dtype(dtype or x.dtype).itemsize
      for x in jax.tree.leaves(tree)
  )


def trainer(
    config: ml_collections.ConfigDict, mesh: Mesh, workdir: str | None = None
) -> TrainerMemory:
  """Returns a trainer's memory on a mesh of the size of `config.mesh`.

  Args:
    mesh: result of `sharding.make_mesh` or `abstract_mesh`.
    workdir: run directory, which may have the reward model.

  Raises:
    ValueError: a model cannot be read, or does not divide over the mesh.
  """
  model = _policy(config, mesh)
  adapters = lora.make(config.lora, model)
  params = sharding.abstract_params(model, mesh)
  folder = policy_lib.find_value_folder(config, workdir or ".")
  if config.loss.value_init == "reward_model" and folder:
    folder = folder if folder.is_dir() else None  # Same size, trained later.
  value_model = value_model_lib.make_model(config, model, folder)
  state = train_step.abstract_state(
      config, adapters or model, mesh, value_model=value_model
  )
  frozen = _frozen(config, mesh, workdir, "trainer")
  fields = {
      "adapters" if adapters else "params": state.params,
      "params of the proximal policy": state.proximal_params,
      "reference that moves": state.ref_params,
      "params of a round ago": state.sampling_params,
  }
  if value_model:
    value_state = state.loss_params, state.loss_opt_state
    fields["value model with its optimizer"] = value_state
  resident = {name: num_bytes(tree) for name, tree in fields.items() if tree}
  resident["optimizer"] = num_bytes(state) - sum(resident.values())
  if adapters:
    resident["base of the adapters"] = num_bytes(params)
  # The adapters' base serves as the reference, unless another model is named.
  shares = adapters and not config.reference.init
  is_here = objective_table.holds_reference(config, "trainer")
  if config.reference.mode == "fixed" and is_here and not shares:
    resident["reference"] = num_bytes(reference(config, mesh, model, params)[1])
  resident["copy that is published"] = num_bytes(
      published(config, state.params)
  )
  resident |= _frozen_bytes(frozen)
  size = packing.make(config).sizes()[0]
  columns = collect.optional_columns(config, model.config)
  batch = packing.abstract_batch(config, mesh, size, columns)
  # Gradients are summed over micro-batches in float32.
  trained = state.params, state.loss_params
  step = {
      "gradients": num_bytes(trained, "float32"),
      "activations kept for them, at least": _activations(
          config, mesh, model, adapters, value_model, params, state, batch
      ),
  }
  evaluation = _evaluation(config, model, params, mesh, bool(adapters))
  is_concurrent = evaluations.is_in_background(config, mesh.size)
  if is_concurrent and config.evaluate.every_steps:
    copy = {"params, copied for an evaluation": num_bytes(params)}
    peak = resident | step | evaluation | copy
  else:
    # Steps and evaluations take turns: the larger one counts.
    peak = resident | max(step, evaluation, key=lambda part: sum(part.values()))
  return TrainerMemory(
      mesh=mesh, model=model, params=params, frozen=frozen, resident=resident,
      peak=peak, adapters=adapters, value_model=value_model, state=state,
      batch=batch, step=step, evaluation=evaluation,
  )  # fmt: skip


def searcher(
    config: ml_collections.ConfigDict, mesh: Mesh, workdir: str | None = None
) -> SearcherMemory:
  """Returns a searcher's memory on a mesh of the size of `config.search.mesh`.

  For arguments and errors, see `trainer`.
  """
  model = _policy(config, mesh)
  params = sharding.abstract_params(model, mesh, "search.mesh")
  policy = _as_policy(model)
  settings = policy_samplers.searcher_settings(config, policy)
  source = params if config.lora.rank else published(config, params)
  programs, decode_params = _sampler(model, settings, source, mesh)
  sizes = {"decode": num_bytes(decode_params), "param": num_bytes(params)}
  copies = hardware.searcher_copies(config)
  resident = {name: sizes[dtypes] for name, dtypes in copies.items()}
  if samplers.SAMPLERS[config.search.sampler].is_here:
    resident["rows and KV cache"] = num_bytes(programs.abstract_state)
  if settings.num_waiting:
    aside = num_bytes(programs.abstract_aside)
    resident["rows that wait for environments"] = aside
  # The base, if the searcher has it, serves as the reference.
  shares = "base of the adapters" in copies and not config.reference.init
  if objective_table.holds_reference(config, "searcher") and not shares:
    resident["reference"] = num_bytes(reference(config, mesh, model, params)[1])
  frozen = _frozen(config, mesh, workdir, "searcher")
  resident |= _frozen_bytes(frozen)
  return SearcherMemory(
      mesh=mesh, model=model, params=params, frozen=frozen, resident=resident,
      peak=resident, programs=programs, settings=settings,
      decode_params=decode_params,
  )  # fmt: skip


def searcher_sizes(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the size of each axis of a searcher's mesh."""
  return {"sequence": 1, **config.search.mesh}


def platform_of(mesh: Mesh) -> str:
  """Returns "cpu", "gpu" or "tpu"."""
  return slots_lib.platform_of(sharding.replicated(mesh))


def published(
    config: ml_collections.ConfigDict, params: types.PyTree
) -> types.PyTree:
  """Returns abstract params in the dtypes in which they are published."""
  place = jax.tree.leaves(params)[0].sharding
  dtypes = published_lib.published_dtypes(config, slots_lib.platform_of(place))
  return _in_dtypes(params, dtypes)


def place_of(mesh: Mesh) -> jax.sharding.Sharding:
  """Returns the sharding of an array that is replicated over a mesh."""
  if mesh.size > 1 or isinstance(mesh, jax.sharding.AbstractMesh):
    return sharding.replicated(mesh)
  return jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])


def placed(shapes: types.PyTree, place: jax.sharding.Sharding) -> types.PyTree:
  """Returns abstract arrays, all with the same sharding."""
  return sharding.with_shardings(shapes, jax.tree.map(lambda _: place, shapes))


def _decode_placed(
    place: jax.sharding.NamedSharding,
    shapes: types.PyTree,
    logical_axes: tuple[str, ...],
) -> types.PyTree:
  """Returns a decode param, or all tables, with a kernel's sharding.

  The scale of a quantized kernel is sharded like those axes that it has.
  """
  if not isinstance(shapes, quantized.Quantized):
    return placed(shapes, place)
  ndim = len(shapes.values.shape)
  num_out = quantized.num_out(logical_axes[-ndim:])  # Without the layers.
  axes = range(num_out) if num_out != quantized.OF_INPUTS else (0, ndim - 1)
  specs = dict(enumerate(place.spec))
  spec = jax.sharding.PartitionSpec(*map(specs.get, axes))
  of_scale = jax.sharding.NamedSharding(place.mesh, spec)
  return quantized.Quantized(
      placed(shapes.values, place), placed(shapes.scale, of_scale)
  )


def _in_dtypes(
    params: types.PyTree, dtypes: published_lib.Dtypes
) -> types.PyTree:
  return jax.tree_util.tree_map_with_path(
      lambda path, x: jax.ShapeDtypeStruct(
          x.shape,
          dtypes.of(jax.tree_util.keystr(path), x),
          sharding=x.sharding,
      ),
      params,
  )


def machine_rows(
    config: ml_collections.ConfigDict,
    trainer: TrainerMemory | None = None,
    searcher: SearcherMemory | None = None,
) -> titled_rows.TableRows:
  """Returns the memory of all roles on this machine's CPU, and its size.

  A role that runs elsewhere is None.
  """
  size = titled_rows.format_bytes
  memory, source = processes.memory()
  cores, source_of_cores = processes.num_cores()
  parts = {}
  if trainer:
    num_devices = trainer.mesh.size
    parts["trainer"] = num_devices * sum(trainer.peak.values())
    state = num_devices * num_bytes(trainer.state)
    parts["train state, copied while it is saved"] = state
    versions = published(config, trainer.state.params)
    versions = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(versions))
    count = config.publish.keep_versions
    parts[f"published versions, {count}"] = count * versions
  if searcher:
    count = config.search.num_searchers
    searcher_bytes = searcher.mesh.size * sum(searcher.peak.values())
    parts[f"searchers, {count}"] = count * searcher_bytes
  total = sum(parts.values())
  return [
      *((name, size(value)) for name, value in parts.items()),
      ("sum", size(total)),
      ("memory", f"{size(memory)}: {source}"),
      ("cores", f"{cores:g}: {source_of_cores}"),
      *titled_rows.fits_rows(total, memory, "this machine"),
  ]


def _policy(config: ml_collections.ConfigDict, mesh: Mesh) -> transformer.Model:
  platform = platform_of(mesh)
  shape = dataclasses.replace(
      model_sizes.model_of(config),
      compute_dtype=config_lib.compute_dtype(config.model, platform),
      attention=config.model.attention,
  )
  return transformer.make_model(shape, remat=config.train.remat)


@dataclasses.dataclass(frozen=True)
class _Tokenizer:
  """Stand-in for a tokenizer, since a folder may only have config.json."""

  pad_id: int
  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...] = ()

  def decode(self, ids: Any) -> str:
    raise NotImplementedError("its shapes count, it is not run")


def _as_policy(model: transformer.Model) -> policy_lib.Policy:
  """Returns a policy that can make samplers."""
  c = model.config
  tokenizer = _Tokenizer(c.pad_id or 0, c.stop_ids or (c.eos_id or 0,))
  return policy_lib.Policy(None, tokenizer, model, None, None)


def _sampler(
    model: transformer.Model,
    settings: requests.SamplingSettings,
    params: types.PyTree,
    mesh: Mesh,
) -> tuple[slots_lib.SlotPrograms, types.PyTree]:
  """Returns a sampler's programs and the params that it decodes with."""
  place = place_of(mesh)
  decode_params = jax.eval_shape(
      lambda params: slots_lib.decode_params(model, settings, params, place),
      params,
  )
  if not isinstance(place, jax.sharding.NamedSharding):
    decode_params = placed(decode_params, place)
  else:
    shardings = slots_lib.decode_shardings(
        jax.tree.map(lambda x: x.sharding, params), model
    )
    axes = model.logical_axes
    logical_axes = transformer.DecodeParams(
        [{k: axes["blocks"][k] for k in p} for p in decode_params.layers],
        {name: axes[name] for name in decode_params.others},
        (),
    )
    decode_params = jax.tree.map(
        _decode_placed, shardings, decode_params, logical_axes
    )
  return slots_lib.SlotPrograms(model, settings, place), decode_params


def _activations(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    model: transformer.Model,
    adapters: lora.Adapters | None,
    value_model: heads.ScalarModel | None,
    params: types.PyTree,
    state: train_step.TrainState,
    batch: types.Batch,
) -> int:
  """Returns a lower bound on the bytes that a micro-batch keeps for gradients.

  These are the residuals of its forward pass, without its arguments, as if all
  were split over all devices. The compiler also needs workspace.
  """
  if platform_of(mesh) != accelerators.CPU and config.train.remat == "none":
    # Accelerator kernels save no attention weights, so "dots" describes them.
    model = transformer.make_model(model.config, remat="dots")
  attach = adapters.attach if adapters else lambda _, trained: trained
  other, other_params = teacher(config, mesh, model, params)
  forward = objective.make_objective(config, model, value_model, other).forward

  def saved(
      trained: types.PyTree,
      base: types.PyTree,
      batch: types.Batch,
      teacher_params: types.PyTree,
  ) -> Any:
    of_part = lambda params, own: forward(
        attach(base, params),
        own,
        batch,
        teacher_params,
        batch.rows.token_indices[:, 0],
    )
    return jax.vjp(of_part, *trained, has_aux=True)[1]

  inputs = (state.params, state.loss_params), params, batch, other_params
  shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs
  )
  traced = jax.make_jaxpr(saved)(*shapes).jaxpr
  variables = {x for x in traced.outvars if not isinstance(x, jax_core.Literal)}
  residuals = variables - set(traced.invars)
  return (
      sum(x.aval.size * x.aval.dtype.itemsize for x in residuals) // mesh.size
  )


def _evaluation(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    params: types.PyTree,
    mesh: Mesh,
    has_adapters: bool,
) -> Parts:
  """Returns the memory that an evaluation adds on a device of process 0."""
  out = {}
  if has_adapters:
    out["base with adapters merged"] = num_bytes(params)
  platform = platform_of(mesh)
  if config.trainer.num_processes > 1:
    # It runs on the devices of process 0, which hold a complete copy.
    num_devices = mesh.size // config.trainer.num_processes
    sizes = sharding.cut_rows(mesh.shape, num_devices)
    mesh = sharding.abstract_mesh(sizes, platform)
    params = _in_dtypes(
        sharding.abstract_params(model, mesh),
        published_lib.computed_dtypes(config, platform),
    )
    out["params, gathered for an evaluation"] = num_bytes(params)
  sampler = policy_samplers.make_evaluation_sampler(config, _as_policy(model))
  programs, decode_params = _sampler(model, sampler.settings, params, mesh)
  out["params that an evaluation decodes with"] = num_bytes(decode_params)
  name = f"KV cache of an evaluation, {sampler.settings.num_rows} rows"
  return out | {name: num_bytes(programs.abstract_state)}


def _frozen(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    workdir: str | None,
    role: str,
) -> list[FrozenShapes]:
  """Returns a role's frozen models; axes that do not divide are not split."""
  out, policy = [], model_sizes.model_of(config)
  platform = platform_of(mesh)
  dtype = config_lib.compute_dtype(config.model, platform)
  for source in model_sizes.frozen_models(config, workdir, role):
    num_rows = config.reward.batch_size
    length = config.sampling.max_prompt_tokens
    length += config.sampling.max_completion_tokens
    if source.key.startswith("task."):
      num_rows = config.task.classifier_rows
      length = config.task.classifier_max_tokens
    if source.key == "task.encoder":
      length = config.task.encoder_max_tokens
    if source.kind == "scalar":
      shape = dataclasses.replace(source.shape(policy), compute_dtype=dtype)
      model = _cached_model(heads.ScalarModel, shape)
      fn = model.rewards
    elif source.kind == "policy":
      model = _cached_model(transformer.make_model, source.shape(policy))
      fn = model.last_logits
    else:
      model = _cached_model(encoder_lib.Encoder, _encoder_shape(source))
      fn = model.label_scores
      if source.key == "task.encoder":
        fn = model.mean_pooled
    params = _frozen_params(mesh, model)
    out.append(FrozenShapes(source, fn, params, (num_rows, length)))
  return out


@functools.lru_cache(maxsize=16)
def _cached_model(make: Callable[[Any], Any], shape: Any) -> Any:
  """Returns the same model for the same shape, so that it is traced once."""
  return make(shape)


def _frozen_params(mesh: Mesh, model: Any) -> types.PyTree:
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  shardings = sharding.frozen_shardings(mesh, model)
  if shardings is None:
    return placed(shapes, place_of(mesh))
  return sharding.with_shardings(shapes, shardings)


def reference(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    model: transformer.Model,
    params: types.PyTree,
) -> tuple[transformer.Model, types.PyTree]:
  """Returns the reference: the given policy, or `reference.init`.

  A fixed reference is in the compute dtypes, unless adapters share it.
  """
  dtypes = published_lib.computed_dtypes(config, platform_of(mesh))
  if not config.reference.init:
    if config.lora.rank or config.reference.mode != "fixed":
      return model, params
    return model, _in_dtypes(params, dtypes)
  shape = dataclasses.replace(
      model_sizes.read_shape("reference.init", config.reference.init),
      compute_dtype=config_lib.compute_dtype(config.model, platform_of(mesh)),
  )
  model = transformer.make_model(shape)
  return model, _in_dtypes(_frozen_params(mesh, model), dtypes)


def teacher(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    model: transformer.Model,
    params: types.PyTree,
) -> tuple[transformer.Model | None, types.PyTree]:
  """Returns the reference if the loss has a teacher, else (None, None)."""
  if not objective_table.find(config.loss.name).has_teacher:
    return None, None
  return reference(config, mesh, model, params)


def _encoder_shape(
    source: model_sizes.FrozenModel,
) -> encoder_lib.EncoderConfig:
  """Returns an encoder's shape; raises ValueError that names its key."""
  try:
    path = hf_hub.find(source.folder, weights=False) / "config.json"
    return encoder_lib.encoder_config_from_hf(hf_files.read_json(path))
  except ValueError as error:
    raise ValueError(
        f"config.{source.key}={source.folder!r}: {error}"
    ) from error


def _frozen_bytes(frozen: list[FrozenShapes]) -> Parts:
  """Returns the bytes of frozen models by name; names may occur twice."""
  out: Parts = {}
  for model in frozen:
    name = model.source.name
    size = num_bytes(model.params)
    out[name] = out.get(name, 0) + size
  return out

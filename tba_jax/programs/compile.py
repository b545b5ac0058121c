# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `compile` program: compiles a config's programs for a TPU slice.

    python -m tba_jax.main --program=compile --config=FILE --workdir=DIR \\
        [TRAINER_TOPOLOGY [SEARCHER_TOPOLOGY]]

It needs libtpu (`pip install 'tba_jax[tpu]'`), but neither accelerator nor
weights: arguments are shapes, and of a Hugging Face folder in `init` only
config.json is read. A topology is a generation and a shape, such as "v5e:4x4";
without one, it is the smallest slice of v5e that holds the mesh.

What a role keeps on its devices beside a program's arguments counts towards
whether the program fits.

It prints a table, and writes WORKDIR/compile.json and the compiled modules,
WORKDIR/hlo/NAME.txt.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import build as losses_build
from tba_jax.models import config as config_lib
from tba_jax.models import encoder as encoder_lib
from tba_jax.models import heads
from tba_jax.models import hf_files
from tba_jax.models import hf_hub
from tba_jax.models import sequence
from tba_jax.models import transformer
from tba_jax.programs import sections
from tba_jax.programs import sizes
from tba_jax.sampling import rows
from tba_jax.system import hlo
from tba_jax.training import device_work
from tba_jax.training import group_reference
from tba_jax.training import lora
from tba_jax.training import packing
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reference
from tba_jax.training import sharding
from tba_jax.training import train_step

_PLATFORM = "tpu"
# Most chips of one machine, by generation.
_MACHINE = {"v4": 4, "v5e": 8, "v5p": 4, "v6e": 8}
# Shapes of v5e slices, by their number of chips.
_SLICES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Changes that help a program that needs too much memory.
_TRAINER_REMEDIES = (
    "a smaller train.micro_batch_prompts or micro_batch_completions,"
    " train.remat='full', a larger mesh.fsdp, mesh.sequence or mesh.tensor"
)
_SEARCHER_REMEDIES = "a smaller sampling.num_rows, a larger search.mesh.tensor"
_REMEDIES = {
    "train_step": _TRAINER_REMEDIES,
    "reference": "train.micro_batch_completions below the completions of a"
    " prompt, a smaller train.prompts_per_batch, a larger mesh.fsdp,"
    " mesh.sequence or mesh.tensor",
    "prefill": _SEARCHER_REMEDIES,
    "decode_chunk": _SEARCHER_REMEDIES,
    "publish": "a larger mesh.fsdp, publish.dtype='auto'",
    "scalar": "a smaller reward.batch_size, a larger mesh.fsdp or .tensor",
    "policy": "a smaller task.classifier_rows, a larger mesh.fsdp or .tensor",
    "encoder": "a smaller task.classifier_rows",
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """Memory and peak rates of a kind of chip.

  hbm_bytes: memory that programs may use, according to the compiler.
  flops_per_s: peak rate in bfloat16.
  link_bytes_per_s: rate at which its links receive: half of the bidirectional
    bandwidth.
  """

  hbm_bytes: int
  flops_per_s: float
  link_bytes_per_s: float


# Chips by JAX's device kind. Rates: docs.cloud.google.com/tpu/docs/v4, v5e,
# v5p, v6e.
CHIPS = {
    "TPU v4": Chip(int(30.75 * 2**30), 275e12, 300e9),
    "TPU v5 lite": Chip(int(15.75 * 2**30), 197e12, 200e9),
    "TPU v5": Chip(int(95.74 * 2**30), 459e12, 600e9),
    "TPU v6 lite": Chip(int(31.25 * 2**30), 918e12, 400e9),
}


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a role, to be compiled.

  lower: function that returns the lowered program.
  own_bytes: bytes of its role's holdings that are its arguments.
  remedy: settings to change if it does not fit.
  """

  lower: Callable[[], Any]
  own_bytes: int
  remedy: str


@dataclasses.dataclass(frozen=True)
class Role:
  """A role's programs, and what it holds on a device between them, in bytes."""

  programs: dict[str, Program]
  held: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The compiler's figures for one program; bytes are of one device.

  None where the program does not compile. `peak_bytes` includes arguments,
  outputs and what else the role holds. `arithmetic_s` and `links_s` are what
  FLOP and collectives take at the chip's peak rates. Of a chunk of decode
  steps, `flops`, `memory_bytes`, `collective_bytes` and both times are of one
  step.
  """

  fits: bool
  argument_bytes: int | None = None
  output_bytes: int | None = None
  alias_bytes: int | None = None
  temporary_bytes: int | None = None
  peak_bytes: int | None = None
  collective_bytes: float | None = None
  collectives: dict[str, float] | None = None
  flops: float | None = None
  memory_bytes: float | None = None
  compile_s: float | None = None
  arithmetic_s: float | None = None
  links_s: float | None = None
  error: str = ""


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Compiles all programs of a config.

  Returns:
    0; 2 where the config can't be used, does not divide or does not fit.
  """
  return sections.show(sections_of(config, workdir, operands))


def sections_of(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> Iterator[tuple[str, sections.TableRows]]:
  """Compiles all programs, and yields each role's figures as titled rows.

  Raises:
    ValueError: the config can't be used, or does not divide.
  """
  (trainer_name, chips), (searcher_name, own) = devices_of(config, operands)
  roles = {
      "trainer": (trainer_name, chips[0], trainer(config, chips, workdir)),
      "searcher": (searcher_name, own[0], searcher(config, own, workdir)),
  }
  found = {
      "topology": {name: role[0] for name, role in roles.items()},
      "model": _describe_model(config),
      "held": {name: role[2].held for name, role in roles.items()},
      "programs": {},
  }
  for name, (topology, device, role) in roles.items():
    out = [
        (f"held: {part}", sections.format_bytes(size))
        for part, size in role.held.items()
    ]
    chip = CHIPS.get(device.device_kind)
    for program_name, program in role.programs.items():
      # Judges of evaluations are the trainer's, whoever gives rewards.
      if program_name in found["programs"]:
        program_name = f"{name}_{program_name}"
      print(f"compiling {program_name} …", file=sys.stderr, flush=True)
      others = sum(role.held.values()) - program.own_bytes
      result, text = _compile(program, others, chip)
      found["programs"][program_name] = dataclasses.asdict(result)
      out.append((program_name, _describe(result, chip)))
      if workdir is not None:
        _write(pathlib.Path(workdir), program_name, text, found)
    yield f"{name} on {topology}, each device", out
  bound = found["programs"]["train_step"]
  if bound["arithmetic_s"]:
    longest_s = max(bound["arithmetic_s"], bound["links_s"])
    flops = 6 * found["model"]["params"] * found["model"]["step_tokens"]
    chip = CHIPS[chips[0].device_kind]
    share = flops / len(chips) / chip.flops_per_s / longest_s
    yield "train step", [
        ("arithmetic takes at least", f"{bound['arithmetic_s']:.3g} s"),
        ("links take at least", f"{bound['links_s']:.3g} s"),
        ("utilization, 6 · params · tokens, at most", f"{share:.0%}"),
    ]


def _describe_model(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the number of params, and of tokens of a train step at most."""
  leaves = sizes.model_leaves(sizes.model_of(config))
  sampling, train = config.sampling, config.train
  completions = train.completions_per_prompt * sampling.max_completion_tokens
  return {
      "params": sum(math.prod(shape) for shape, _ in leaves.values()),
      "step_tokens": train.prompts_per_batch
      * (sampling.max_prompt_tokens + completions),
  }


def devices_of(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> list[tuple[str, list[jax.Device]]]:
  """Returns the trainer's and a searcher's topology, each with its devices.

  Raises:
    ValueError: libtpu is missing, or a topology is unknown or too small.
  """
  if len(operands) > 2:
    raise ValueError(
        f"operands {' '.join(operands)}: allowed the trainer's topology and a"
        " searcher's"
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("libtpu is not installed: pip install 'tba_jax[tpu]'")
  # The compiler must not look for a TPU, nor JAX initialize one.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  jax.config.update("jax_platforms", "cpu")
  out = []
  for key, mesh in (("mesh", config.mesh), ("search.mesh", config.search.mesh)):
    needed = math.prod(mesh.values())
    name = operands[min(len(out), len(operands) - 1)] if operands else None
    name = name or f"v5e:{_slice(key, needed)}"
    try:
      devices = topologies.get_topology_desc(
          platform=_PLATFORM, topology_name=name
      ).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
      raise ValueError(
          f"topology {name!r}: {error}; allowed such as v5e:2x2, v5e:4x4,"
          " v6e:2x4, v5p:2x2x1, v4:2x2x1"
      ) from error
    # The trainer may share a machine; of a larger slice it takes all chips.
    most = max(needed, _MACHINE.get(name.partition(":")[0], 1))
    if len(devices) < needed or (key == "mesh" and len(devices) > most):
      raise ValueError(
          f"config.{key}={mesh.to_dict()} needs {needed} devices, {name} has"
          f" {len(devices)}"
      )
    out.append((name, list(devices)[:needed]))
  return out


def _slice(key: str, num_devices: int) -> str:
  """Returns the smallest v5e slice with so many chips."""
  for shape in _SLICES:
    if math.prod(map(int, shape.split("x"))) >= num_devices:
      return shape
  raise ValueError(
      f"config.{key}: {num_devices} devices are more than a slice of v5e has;"
      " name a topology"
  )


def trainer(
    config: ml_collections.ConfigDict,
    devices: Sequence[jax.Device],
    workdir: str | None = None,
) -> Role:
  """Returns the trainer's programs on the devices of `config.mesh`.

  Raises:
    ValueError: a model cannot be read, or does not divide over the mesh.
  """
  model = _policy(config)
  mesh = sharding.make_mesh(config.mesh, devices)
  adapters = lora.make(config.lora, model)
  params = _abstract_params(model, mesh, config.sharding)
  value_model = None
  if losses_build.find(config.loss.name).has_values:
    value_model = heads.ScalarModel(
        sizes.value_shape(config, model.config, workdir),
        remat=config.train.remat,
    )
  state = train_step.abstract_state(
      config, adapters or model, mesh, value_model=value_model
  )
  published = _published(config, state.params)
  held = {"train state": _num_bytes(state)}
  if adapters:
    held["base of the adapters"] = _num_bytes(params)
  elif config.reference.mode == "fixed" and (
      config.reference.role == "trainer"
  ):
    held["reference"] = _num_bytes(params)
  held["copy that is published"] = _num_bytes(published)

  def lower_step() -> Any:
    step = train_step.make_train_step(
        config,
        model,
        mesh,
        value_model=value_model,
        adapters=adapters,
        base=params if adapters else None,
    )
    size = packing.sizes(config, packing.batch_shape(config))[0]
    batch = packing.abstract_batch(
        config, mesh, config.train.prompts_per_batch, size
    )
    return step.lower(state, batch)

  own_bytes = held["train state"] + bool(adapters) * _num_bytes(params)
  programs = {
      "train_step": Program(lower_step, own_bytes, _REMEDIES["train_step"])
  }
  if config.reference.role == "trainer":
    num_prompts = device_work.reference_prompts(config)
    size = None
    if num_prompts == config.train.prompts_per_batch:
      size = packing.sizes(config, packing.batch_shape(config))[0]
    batch = packing.abstract_batch(config, mesh, num_prompts, size)
    programs["reference"] = Program(
        functools.partial(_lower_reference, config, model, mesh, params, batch),
        _num_bytes(params),
        _REMEDIES["reference"],
    )
  programs["publish"] = Program(
      functools.partial(_lower_publish, config, adapters or model, mesh),
      _num_bytes(state.params) + held["copy that is published"],
      _REMEDIES["publish"],
  )
  return _with_frozen(Role(programs, held), config, workdir, "trainer", mesh)


def searcher(
    config: ml_collections.ConfigDict,
    devices: Sequence[jax.Device],
    workdir: str | None = None,
) -> Role:
  """Returns a searcher's programs on the devices of `config.search.mesh`.

  Raises: see `trainer`.
  """
  model = _policy(config)
  mesh = sharding.make_mesh({"sequence": 1, **config.search.mesh}, devices)
  if mesh.size == 1:
    place = jax.sharding.SingleDeviceSharding(devices[0])
    params = _placed(jax.eval_shape(model.init, jax.random.key(0)), place)
  else:
    place = sharding.replicated(mesh)
    params = _abstract_params(model, mesh, config.sharding, "search.mesh")
  shape = model.config
  tokenizer = _Tokenizer(
      pad_id=shape.pad_id or 0,
      stop_ids=shape.stop_ids or (shape.eos_id or 0,),
  )
  policy = policy_lib.Policy(None, tokenizer, model, None, None)
  settings = policy_lib.make_searcher_sampler(config, policy).settings
  programs = rows.Programs(model, settings, place)

  decode_params = jax.eval_shape(
      functools.partial(
          model.decode_params,
          num_positions=settings.max_prompt_tokens
          + settings.max_completion_tokens,
      ),
      params if config.lora.rank else _published(config, params),
  )
  if mesh.size == 1:
    decode_params = _placed(decode_params, place)
  else:
    shardings = rows.decode_shardings(
        jax.tree.map(lambda x: x.sharding, params), model.config.num_layers
    )
    decode_params = jax.tree.map(
        lambda s, shapes: _placed(shapes, s), shardings, decode_params
    )

  def lower_prefill() -> Any:
    shape = settings.prefill_size, settings.max_prompt_tokens
    return programs.prefill.lower(
        decode_params, np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    )

  def lower_chunk() -> Any:
    return programs.decode_chunk.lower(
        decode_params,
        programs.abstract_state,
        np.int32(settings.chunk_steps),
        np.int32(settings.num_rows),
        programs.num_blocks,
    )

  held = {
      "params": _num_bytes(decode_params),
      "params of a version that comes in": _num_bytes(decode_params),
      "rows and KV cache": _num_bytes(programs.abstract_state),
  }
  if config.lora.rank:
    held["base of the adapters"] = _num_bytes(params)
    held["base with a version's adapters merged"] = _num_bytes(params)
  in_use = _num_bytes(decode_params) + _num_bytes(programs.abstract_state)
  out = {
      "prefill": Program(
          lower_prefill, _num_bytes(decode_params), _REMEDIES["prefill"]
      ),
      "decode_chunk": Program(lower_chunk, in_use, _REMEDIES["decode_chunk"]),
  }
  if config.reference.role == "searcher":
    if not config.lora.rank:
      held["reference"] = _num_bytes(params)
    groups = config.copy_and_resolve_references()
    groups.train.completions_per_prompt = config.search.samples_per_prompt
    batch = packing.abstract_batch(
        groups, mesh, group_reference.prompts_at_a_time(config), None
    )
    out["reference"] = Program(
        functools.partial(_lower_reference, config, model, mesh, params, batch),
        _num_bytes(params),
        _SEARCHER_REMEDIES,
    )
  return _with_frozen(Role(out, held), config, workdir, "searcher", mesh)


def _policy(config: ml_collections.ConfigDict) -> transformer.Model:
  shape = dataclasses.replace(
      sizes.model_of(config),
      compute_dtype=config_lib.compute_dtype(config.model, _PLATFORM),
      attention=config.model.attention,
  )
  return transformer.make_model(shape, remat=config.train.remat)


def _with_frozen(
    role: Role,
    config: ml_collections.ConfigDict,
    workdir: str | None,
    name: str,
    mesh: jax.sharding.Mesh,
) -> Role:
  """Returns the role with its frozen models.

  A victim's sampler is left out; a model that is held twice is compiled once.
  """
  programs, held = dict(role.programs), dict(role.held)
  policy = sizes.model_of(config)
  dtype = config_lib.compute_dtype(config.model, _PLATFORM)
  compiled = {"task.victim"}
  for frozen in sizes.frozen_models(config, workdir, name):
    if frozen.kind == "scalar":
      shape = dataclasses.replace(frozen.shape(policy), compute_dtype=dtype)
      model = heads.ScalarModel(shape)
      fn, num_rows = model.rewards, config.reward.batch_size
      sampling = config.sampling
      length = sampling.max_prompt_tokens + sampling.max_completion_tokens
    elif frozen.kind == "policy":
      model = transformer.make_model(frozen.shape(policy))
      fn = model.last_logits
      num_rows = config.task.classifier_rows
      length = config.task.classifier_max_tokens
    else:
      path = hf_hub.find(frozen.folder, weights=False) / "config.json"
      model = encoder_lib.Encoder(
          encoder_lib.encoder_config_from_hf(hf_files.read_json(path))
      )
      is_classifier = frozen.key == "task.classifier_folder"
      fn = model.label_scores if is_classifier else model.mean_pooled
      num_rows = config.task.classifier_rows
      length = config.task[
          "classifier_max_tokens" if is_classifier else "encoder_max_tokens"
      ]
    params = _frozen_params(model, mesh, config.sharding)
    size = frozen.copies * _num_bytes(params)
    held[frozen.name] = held.get(frozen.name, 0) + size
    if frozen.key in compiled:
      continue
    compiled.add(frozen.key)
    tokens = _placed(
        jax.ShapeDtypeStruct((num_rows, length), jnp.int32),
        jax.tree.leaves(params)[0].sharding
        if mesh.size == 1
        else sharding.replicated(mesh),
    )
    programs[frozen.name] = Program(
        functools.partial(
            jax.jit(sharding.split_rows(fn, mesh, config.sharding)).lower,
            params,
            tokens,
            tokens,
        ),
        _num_bytes(params),
        _REMEDIES[frozen.kind],
    )
  return Role(programs, held)


def _frozen_params(
    model: Any, mesh: jax.sharding.Mesh, rules: ml_collections.ConfigDict
) -> types.PyTree:
  """Returns shapes and shardings of a frozen model's params."""
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  shardings = sharding.frozen_shardings(mesh, rules, model)
  if shardings is None:
    return _placed(
        shapes, jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
    )
  return _sharded(shapes, shardings)


def _num_bytes(tree: types.PyTree) -> int:
  """Returns the bytes of a tree on each device."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
      for x in jax.tree.leaves(tree)
  )


def _abstract_params(
    model: Any, mesh: jax.sharding.Mesh, rules: Any, key: str = "mesh"
) -> types.PyTree:
  """Returns shapes and shardings of a model's or adapters' params."""
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  shardings = sharding.param_shardings(mesh, rules, model.logical_axes)
  sharding.check_divisible(shapes, shardings, key=key)
  return _sharded(shapes, shardings)


def _placed(shapes: types.PyTree, place: jax.sharding.Sharding) -> types.PyTree:
  return _sharded(shapes, jax.tree.map(lambda _: place, shapes))


def _sharded(shapes: types.PyTree, shardings: types.PyTree) -> types.PyTree:
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
  )


def _published(
    config: ml_collections.ConfigDict, params: types.PyTree
) -> types.PyTree:
  """Returns abstract params in the dtypes that are published."""
  dtypes = publication.published_dtypes(config, _PLATFORM)
  return jax.tree_util.tree_map_with_path(
      lambda path, x: jax.ShapeDtypeStruct(
          x.shape,
          dtypes.of(jax.tree_util.keystr(path), x),
          sharding=x.sharding,
      ),
      params,
  )


def _lower_reference(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    mesh: jax.sharding.Mesh,
    params: types.PyTree,
    batch: types.Batch,
) -> Any:
  logprobs_fn = reference.make_logprobs_fn(
      model, temperature=config.sampling.temperature
  )
  axes = sharding.token_axes(config.sharding)
  return jax.jit(sequence.split_tokens(logprobs_fn, mesh, *axes)).lower(
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
      batch.rows,
  )


@dataclasses.dataclass(frozen=True)
class _Tokenizer:
  """Stands in for a tokenizer: a folder may have config.json alone."""

  pad_id: int
  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...] = ()

  def decode(self, ids: Sequence[int]) -> str:
    raise NotImplementedError("compiled, not run")


def _lower_publish(
    config: ml_collections.ConfigDict, trained: Any, mesh: jax.sharding.Mesh
) -> Any:
  """Lowers the copy that is published, gathered onto each process's devices."""
  by_process = sharding.mesh_by_process(mesh)
  # A program has one order of devices, here that of their processes.
  mesh = jax.sharding.Mesh(
      by_process.devices.reshape(mesh.devices.shape), mesh.axis_names
  )
  params = _abstract_params(trained, mesh, config.sharding)
  copy = functools.partial(
      publication.snapshot,
      dtypes=publication.published_dtypes(config, _PLATFORM),
  )
  places = jax.tree.map(
      lambda x: jax.sharding.NamedSharding(by_process, x.sharding.spec), params
  )
  return jax.jit(copy, out_shardings=places).lower(params)


def _compile(
    program: Program, others: int, chip: Chip | None
) -> tuple[Compiled, str]:
  """Returns the compiler's figures, and the text of the module.

  Args:
    program: program to compile.
    others: bytes that its role holds beside the program's arguments.
    chip: chip of the role; None if the table lacks it.
  """
  start = time.perf_counter()
  try:
    lowered = program.lower()
    start = time.perf_counter()
    compiled = lowered.compile()
  except ValueError as error:
    return Compiled(fits=False, error=str(error)), ""
  except jax.errors.JaxRuntimeError as error:
    if "memory" not in str(error).lower():
      raise
    took = time.perf_counter() - start
    return _does_not_fit(program, others, str(error), took), ""
  memory, text = compiled.memory_analysis(), compiled.as_text()
  costs = hlo.costs(text)
  peak = memory.peak_memory_in_bytes + others
  fits = chip is None or peak <= chip.hbm_bytes
  error = f"needs {sections.format_bytes(peak)}; try {program.remedy}"
  found = Compiled(
      fits=fits,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      alias_bytes=memory.alias_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes,
      peak_bytes=peak,
      collective_bytes=costs.collective_bytes,
      collectives=costs.collectives,
      flops=costs.flops,
      memory_bytes=costs.memory_bytes,
      compile_s=time.perf_counter() - start,
      arithmetic_s=chip and costs.flops / chip.flops_per_s,
      links_s=chip and costs.collective_bytes / chip.link_bytes_per_s,
      error="" if fits else error,
  )
  return found, text


def _does_not_fit(
    program: Program, others: int, message: str, compile_s: float
) -> Compiled:
  """Returns the result of a program that alone needs too much memory."""
  used = re.search(r"Used ([\d.]+)([KMGT]) of ", message)
  peak, words = None, "more memory than a device has"
  if used:
    peak = int(float(used[1]) * _UNITS[used[2]]) + others
    words = sections.format_bytes(peak)
  return Compiled(
      fits=False,
      peak_bytes=peak,
      compile_s=compile_s,
      error=f"needs {words}; try {program.remedy}",
  )


def _write(
    workdir: pathlib.Path, name: str, text: str, found: dict[str, Any]
) -> None:
  folder = workdir / "hlo"
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f"{name}.txt").write_text(text, "utf-8")
  (workdir / "compile.json").write_text(json.dumps(found, indent=2), "utf-8")


def _describe(result: Compiled, chip: Chip | None) -> str:
  """Returns a program's figures in a line; NO… if it does not fit."""
  if not result.fits:
    return f"NO: {result.error}"
  size = sections.format_bytes
  of = f" of {size(chip.hbm_bytes)}" if chip else ""
  return (
      f"peak {size(result.peak_bytes)}{of} (temporaries"
      f" {size(result.temporary_bytes)}), receives"
      f" {size(result.collective_bytes)}, {result.flops:.2e} FLOP, compiled in"
      f" {result.compile_s:.0f} s"
  )

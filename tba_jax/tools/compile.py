# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `compile` program: a config's programs, compiled for TPUs, GPUs or a CPU.

    python -m tba_jax.main --program=compile --config=FILE --workdir=DIR \\
        [TRAINER_TOPOLOGY [SEARCHER_TOPOLOGY]]

It needs the compiler (`pip install 'tba_jax[tpu]'` or `'tba_jax[cuda]'`), but
neither accelerator nor weights: arguments are shapes, and of a Hugging Face
folder in `init` only config.json is read. A topology is a generation and a
shape, such as "v5e:4x4", "h100:8" or "h100:8x8" (`targets`), or "cpu", this
machine; without one, it is the smallest slice of v5e that holds the mesh.

Whatever a role keeps on its devices in addition to a program's arguments counts
towards whether the program fits.

It prints a table, and writes WORKDIR/compile.json and the compiled modules,
WORKDIR/hlo/NAME.txt.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.learning import group_reference
from tba_jax.learning import packing
from tba_jax.learning import published
from tba_jax.learning import train_step
from tba_jax.losses import objective_table
from tba_jax.mesh import sharding
from tba_jax.models.net import sequence
from tba_jax.models.net import transformer
from tba_jax.policy import reference_policy
from tba_jax.programs import model_sizes
from tba_jax.programs import titled_rows
from tba_jax.system import accelerators
from tba_jax.system import hlo
from tba_jax.tools import memory_model
from tba_jax.tools import targets

# Shapes of v5e slices, in increasing order of size.
_SLICES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Changes that help if a program needs too much memory.
_TRAINER_REMEDIES = (
    "a smaller train.micro_batch_prompts or micro_batch_completions,"
    " train.remat='full', a larger mesh.fsdp, mesh.tensor or mesh.sequence"
)
_SEARCHER_REMEDIES = "a smaller sampling.num_slots, a larger search.mesh.tensor"
_REMEDIES = {
    "train_step": _TRAINER_REMEDIES,
    "prefill": _SEARCHER_REMEDIES,
    "decode_chunk": _SEARCHER_REMEDIES,
    "publish": "a larger mesh.fsdp, publish.dtype='auto'",
    "scalar": "a smaller reward.batch_size, a larger mesh.fsdp or .tensor",
    "policy": "a smaller task.classifier_rows, a larger mesh.fsdp or .tensor",
    "encoder": "a smaller task.classifier_rows",
}


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a role, to be compiled.

  argument_bytes: bytes of the role's resident arrays that are its arguments.
  remedy: settings to change if it does not fit.
  micro_batches: micro-batches of packed rows per call, at full length.
  """

  lower: Callable[[], Any]
  argument_bytes: int
  remedy: str
  micro_batches: int = 1


@dataclasses.dataclass(frozen=True)
class RolePrograms:
  """A role's programs, and its resident bytes per device, by part."""

  programs: dict[str, Program]
  resident: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The compiler's figures for one program; bytes are per device.

  Figures are None if the program does not compile. `peak_bytes` includes
  arguments, outputs and everything else that the role holds. `arithmetic_s` and
  `links_s` are the times of FLOP and collectives at the chip's peak rates;
  `network_bytes` are the bytes that a device receives from other hosts. For a
  chunk of decode steps, `flops`, `memory_bytes`, `collective_bytes` and both
  times are per step. Up to `cache_bytes` of `memory_bytes` are read by kernels
  that read no more of a cache than its rows hold. `kernels` maps each kernel
  that XLA calls but did not generate to its number of call sites.
  """

  fits: bool
  argument_bytes: int | None = None
  output_bytes: int | None = None
  alias_bytes: int | None = None
  temporary_bytes: int | None = None
  peak_bytes: int | None = None
  collective_bytes: float | None = None
  collectives: dict[str, float] | None = None
  network_bytes: float | None = None
  flops: float | None = None
  memory_bytes: float | None = None
  cache_bytes: float | None = None
  kernels: dict[str, int] | None = None
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
    0; 2 if the config cannot be used, does not divide or does not fit.
  """
  return titled_rows.show(sections_of(config, workdir, operands))


def sections_of(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> Iterator[tuple[str, titled_rows.TableRows]]:
  """Compiles all programs, and yields each role's figures as titled rows.

  Raises:
    ValueError: the config cannot be used, or does not divide.
  """
  (trainer_name, chips), (searcher_name, searcher_chips) = devices_of(
      config, operands
  )
  if chips[0].platform == accelerators.CPU:
    config = model_sizes.on_cpu(config)
  roles = {
      "trainer": (trainer_name, chips, trainer(config, chips, workdir)),
      "searcher": (
          searcher_name,
          searcher_chips,
          searcher(config, searcher_chips, workdir),
      ),
  }
  report = {
      "topology": {name: role[0] for name, role in roles.items()},
      "model": _describe_model(config),
      "held": {name: role[2].resident for name, role in roles.items()},
      "programs": {},
  }
  for name, (topology, devices, role) in roles.items():
    device, host_size = devices[0], targets.host_size(devices)
    out = [
        (f"held: {part}", titled_rows.format_bytes(size))
        for part, size in role.resident.items()
    ]
    chip = targets.CHIPS.get(device.device_kind)
    for program_name, program in role.programs.items():
      # The trainer has the judges of evaluations, whichever role gives rewards.
      if program_name in report["programs"]:
        program_name = f"{name}_{program_name}"
      print(f"compiling {program_name} …", file=sys.stderr, flush=True)
      other_bytes = sum(role.resident.values()) - program.argument_bytes
      result, text = compile_program(program, other_bytes, device, host_size)
      report["programs"][program_name] = dataclasses.asdict(result)
      out.append((program_name, _describe(result, chip)))
      if workdir is not None:
        _write(pathlib.Path(workdir), program_name, text, report)
    yield f"{name} on {topology}, each device", out
  bound = report["programs"]["train_step"]
  if bound["arithmetic_s"]:
    longest_s = max(bound["arithmetic_s"], bound["links_s"])
    flops = (
        6 * report["model"]["active_params"] * report["model"]["step_tokens"]
    )
    chip = targets.CHIPS[chips[0].device_kind]
    share = flops / len(chips) / chip.flops_per_s / longest_s
    yield "train step", [
        ("arithmetic takes at least", f"{bound['arithmetic_s']:.3g} s"),
        ("links take at least", f"{bound['links_s']:.3g} s"),
        ("utilization, 6 · active params · tokens, at most", f"{share:.0%}"),
    ]


def _describe_model(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the number of params, and the maximum tokens of a train step.

  Active params are the params that a token uses.
  """
  model = transformer.make_model(model_sizes.model_of(config))
  params = jax.eval_shape(model.init, jax.random.key(0))
  sampling, train = config.sampling, config.train
  completions = train.completions_per_prompt * sampling.max_completion_tokens
  num_params = sum(x.size for x in jax.tree.leaves(params))
  return {
      "params": num_params,
      "active_params": num_params - model.config.idle_params,
      "step_tokens": train.prompts_per_batch
      * (sampling.max_prompt_tokens + completions),
  }


def devices_of(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> list[tuple[str, list[jax.Device]]]:
  """Returns the trainer's and a searcher's topology, each with its devices.

  Raises:
    ValueError: a topology is unknown or too small, or its compiler is missing.
  """
  if len(operands) > 2:
    raise ValueError(
        f"operands {' '.join(operands)}: must be the trainer's topology and a"
        " searcher's"
    )
  mesh_sizes = {"mesh": config.mesh, "search.mesh": config.search.mesh}
  num_devices = {
      key: math.prod(mesh.values()) for key, mesh in mesh_sizes.items()
  }
  if accelerators.CPU in operands:
    if set(operands) != {accelerators.CPU}:
      raise ValueError(
          f"operands {' '.join(operands)}: must be 'cpu' for both roles"
      )
    jax.config.update("jax_platforms", accelerators.CPU)
    jax.config.update("jax_num_cpu_devices", max(num_devices.values()))
    return [(accelerators.CPU, jax.devices()[:n]) for n in num_devices.values()]
  out = []
  for key, mesh in mesh_sizes.items():
    name = operands[min(len(out), len(operands) - 1)] if operands else None
    name = name or f"v5e:{_slice(key, num_devices[key])}"
    devices = targets.devices(name)
    # The trainer may share a machine, but must use all chips of a larger slice.
    most = max(num_devices[key], targets.machine_size(name))
    if len(devices) < num_devices[key] or (
        key == "mesh" and len(devices) > most
    ):
      raise ValueError(
          f"config.{key}={mesh.to_dict()} needs {num_devices[key]} devices,"
          f" {name} has {len(devices)}"
      )
    out.append((name, devices[: num_devices[key]]))
  return out


def _slice(key: str, num_devices: int) -> str:
  """Returns the smallest v5e slice with at least `num_devices` chips."""
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
) -> RolePrograms:
  """Returns the trainer's programs on the devices of `config.mesh`.

  Raises:
    ValueError: a model cannot be read, or does not divide over the mesh.
  """
  mesh = sharding.make_mesh(config.mesh, devices)
  memory = memory_model.trainer(config, mesh, workdir)
  base = memory.params if memory.adapters else None
  teacher, teacher_params = memory_model.teacher(
      config, mesh, memory.model, memory.params
  )

  def lower_step() -> Any:
    step = train_step.make_train_step(
        config,
        memory.model,
        mesh,
        value_model=memory.value_model,
        adapters=memory.adapters,
        base=base,
        teacher=teacher,
        teacher_params=teacher_params,
    )
    return step.lower(memory.state, memory.batch)

  programs = {
      "train_step": Program(
          lower_step,
          memory_model.num_bytes((memory.state, base, teacher_params)),
          _REMEDIES["train_step"],
          packing.size_of(memory.batch.rows).micro_batches,
      )
  }
  if objective_table.has_reference_pass(config):
    programs["reference"] = _reference(
        config, memory, memory.batch, _TRAINER_REMEDIES
    )
  copied = memory.state.params, memory_model.published(
      config, memory.state.params
  )
  programs["publish"] = Program(
      functools.partial(_lower_publish, config, memory),
      memory_model.num_bytes(copied),
      _REMEDIES["publish"],
  )
  return RolePrograms(programs | _frozen_programs(memory), memory.resident)


def searcher(
    config: ml_collections.ConfigDict,
    devices: Sequence[jax.Device],
    workdir: str | None = None,
) -> RolePrograms:
  """Returns a searcher's programs on the devices of `config.search.mesh`.

  Raises like `trainer`.
  """
  mesh = sharding.make_mesh(memory_model.searcher_sizes(config), devices)
  memory = memory_model.searcher(config, mesh, workdir)
  settings, programs = memory.settings, memory.programs

  def lower_prefill() -> Any:
    shape = settings.prefill_size, settings.max_prompt_tokens
    return programs.prefill.lower(
        memory.decode_params,
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
    )

  def lower_chunk() -> Any:
    return programs.decode_chunk.lower(
        memory.decode_params,
        programs.abstract_state,
        np.int32(settings.chunk_steps),
        np.int32(settings.num_rows),
        programs.num_segments,
    )

  arguments = {
      "prefill": (lower_prefill, memory.decode_params),
      "decode_chunk": (
          lower_chunk,
          (memory.decode_params, programs.abstract_state),
      ),
  }
  out = {
      name: Program(lower, memory_model.num_bytes(trees), _REMEDIES[name])
      for name, (lower, trees) in arguments.items()
  }
  if objective_table.holds_reference(config, "searcher"):
    groups = config.copy_and_resolve_references()
    train, search = groups.train, config.search
    train.completions_per_prompt = search.samples_per_prompt
    num_prompts = group_reference.prompts_at_a_time(config)
    train.prompts_per_batch = train.micro_batch_prompts = num_prompts
    train.micro_batch_completions = 0
    groups.mesh.update(memory_model.searcher_sizes(config))
    size = packing.make(groups).sizes()[0]
    batch = packing.abstract_batch(groups, mesh, size)
    out["reference"] = _reference(config, memory, batch, _SEARCHER_REMEDIES)
  return RolePrograms(out | _frozen_programs(memory), memory.resident)


def _frozen_programs(
    memory: memory_model.TrainerMemory | memory_model.SearcherMemory,
) -> dict[str, Program]:
  """Returns the scoring programs of a role's frozen models.

  A victim's sampler is omitted; a model that is held twice is compiled once.
  """
  mesh, programs, compiled = memory.mesh, {}, {"task.victim"}
  for model in memory.frozen:
    source = model.source
    if source.key in compiled:
      continue
    compiled.add(source.key)
    tokens = memory_model.placed(
        jax.ShapeDtypeStruct(model.shape, jnp.int32),
        memory_model.place_of(mesh),
    )
    programs[source.name] = Program(
        functools.partial(
            jax.jit(sharding.split_rows(model.fn, mesh)).lower,
            model.params,
            tokens,
            tokens,
        ),
        memory_model.num_bytes(model.params),
        _REMEDIES[source.kind],
    )
  return programs


def _reference(
    config: ml_collections.ConfigDict,
    memory: memory_model.TrainerMemory | memory_model.SearcherMemory,
    batch: types.Batch,
    remedy: str,
) -> Program:
  """Returns the program of reference log-probs."""
  model, params = memory_model.reference(
      config, memory.mesh, memory.model, memory.params
  )
  logprobs_fn = reference_policy.make_logprobs_fn(
      model, temperature=config.sampling.temperature
  )
  lower = functools.partial(
      jax.jit(
          sequence.split_tokens(logprobs_fn, memory.mesh, *sharding.TOKEN_AXES)
      ).lower,
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
      batch.rows,
  )
  num_bytes = memory_model.num_bytes(params)
  micro_batches = packing.size_of(batch.rows).micro_batches
  return Program(lower, num_bytes, remedy, micro_batches)


def _lower_publish(
    config: ml_collections.ConfigDict, memory: memory_model.TrainerMemory
) -> Any:
  """Lowers the published copy, gathered onto each process's devices."""
  by_process = sharding.mesh_by_process(memory.mesh)
  # A program has a single order of devices: here, by process.
  mesh = jax.sharding.Mesh(
      by_process.devices.reshape(memory.mesh.devices.shape),
      memory.mesh.axis_names,
  )
  params = sharding.abstract_params(memory.adapters or memory.model, mesh)
  copy = functools.partial(
      published.snapshot,
      dtypes=published.published_dtypes(config, memory_model.platform_of(mesh)),
  )
  places = jax.tree.map(
      lambda x: jax.sharding.NamedSharding(by_process, x.sharding.spec), params
  )
  return jax.jit(copy, out_shardings=places).lower(params)


def compile_program(
    program: Program, other_bytes: int, device: jax.Device, host_size: int = 0
) -> tuple[Compiled, str]:
  """Returns the compiler's figures, and the text of the module.

  Args:
    other_bytes: resident bytes of its role other than the program's arguments.
    host_size: see `targets.host_size`.
  """
  start = time.perf_counter()
  try:
    lowered = program.lower()
    start = time.perf_counter()
    compiled = lowered.compile(targets.compiler_options(device) or None)
  except ValueError as error:
    return Compiled(fits=False, error=str(error)), ""
  except NotImplementedError as error:
    # JAX asks a local GPU whether cuDNN supports heads wider than 128.
    message = f"not compiled: {error}; try model.attention='plain'"
    return Compiled(fits=False, error=message), ""
  except jax.errors.JaxRuntimeError as error:
    if "memory" not in str(error).lower():
      raise
    took = time.perf_counter() - start
    return _does_not_fit(program, other_bytes, str(error), took), ""
  memory, text = compiled.memory_analysis(), compiled.as_text()
  costs = hlo.costs(text, host_size, program.micro_batches)
  chip = targets.CHIPS.get(device.device_kind)
  peak = memory.peak_memory_in_bytes
  if chip is None:
    # A CPU's figure excludes temporaries.
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
  peak += other_bytes
  fits = chip is None or peak <= chip.hbm_bytes
  error = f"needs {titled_rows.format_bytes(peak)}; try {program.remedy}"
  result = Compiled(
      fits=fits,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      alias_bytes=memory.alias_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes,
      peak_bytes=peak,
      collective_bytes=costs.collective_bytes,
      collectives=costs.collectives,
      network_bytes=costs.network_bytes,
      flops=costs.flops,
      memory_bytes=costs.memory_bytes,
      cache_bytes=costs.cache_bytes,
      kernels=hlo.kernels(text),
      compile_s=time.perf_counter() - start,
      arithmetic_s=chip and costs.flops / chip.flops_per_s,
      links_s=chip
      and max(
          costs.collective_bytes / chip.link_bytes_per_s,
          costs.network_bytes / chip.network_bytes_per_s,
      ),
      error="" if fits else error,
  )
  return result, text


def _does_not_fit(
    program: Program, other_bytes: int, message: str, compile_s: float
) -> Compiled:
  """Returns the result for a program that needs too much memory by itself."""
  match = re.search(r"Used ([\d.]+)([KMGT]) of ", message)
  peak, words = None, "more memory than a device has"
  if match:
    peak = int(float(match[1]) * _UNITS[match[2]]) + other_bytes
    words = titled_rows.format_bytes(peak)
  return Compiled(
      fits=False,
      peak_bytes=peak,
      compile_s=compile_s,
      error=f"needs {words}; try {program.remedy}",
  )


def _write(
    workdir: pathlib.Path, name: str, text: str, report: dict[str, Any]
) -> None:
  folder = workdir / "hlo"
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f"{name}.txt").write_text(text, "utf-8")
  (workdir / "compile.json").write_text(json.dumps(report, indent=2), "utf-8")


def _describe(result: Compiled, chip: targets.Chip | None) -> str:
  """Returns a program's figures as a line; "NO…" if it does not fit."""
  if not result.fits:
    return f"NO: {result.error}"
  size = titled_rows.format_bytes
  of = f" of {size(chip.hbm_bytes)}" if chip else ""
  kernels = ", ".join(result.kernels) or "none but XLA's"
  full = ""
  if result.cache_bytes:
    full = f" with full rows ({size(result.cache_bytes)} are their cache)"
  network = ""
  if result.network_bytes:
    network = f" ({size(result.network_bytes)} over the network)"
  return (
      f"peak {size(result.peak_bytes)}{of} (temporaries"
      f" {size(result.temporary_bytes)}), receives"
      f" {size(result.collective_bytes)}{network}, moves"
      f" {size(result.memory_bytes)} of memory{full}, {result.flops:.2e} FLOP,"
      f" kernels: {kernels}; compiled in {result.compile_s:.0f} s"
  )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `compile` program: compiles a config's programs for a TPU slice.

    python -m tba_jax.main --program=compile --config=FILE --workdir=DIR \\
        [TRAINER_TOPOLOGY [SEARCHER_TOPOLOGY]]

It needs libtpu (`pip install tba_jax[tpu]`), but neither accelerator nor
weights: arguments are shapes, and of a Hugging Face folder in `init` only
config.json is read. A topology is a generation and a shape, such as "v5e:4x4";
without one, it is the smallest slice of v5e that holds the mesh.

It prints a table, and writes WORKDIR/compile.json and the compiled modules,
WORKDIR/hlo/NAME.txt.
"""

from collections.abc import Callable, Sequence
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
import rich.box
import rich.console
import rich.table

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models import sequence
from tba_jax.models import transformer
from tba_jax.programs import plan
from tba_jax.sampling import rows
from tba_jax.system import hlo
from tba_jax.system import processes
from tba_jax.training import device_work
from tba_jax.training import lora
from tba_jax.training import policy as policy_lib
from tba_jax.training import publication
from tba_jax.training import reference
from tba_jax.training import sharding
from tba_jax.training import train_step

_PLATFORM = "tpu"
# Shapes of v5e slices, by their number of chips.
_SLICES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What to change, of a program that needs too much memory.
_TRAINER_REMEDIES = (
    "a smaller train.micro_batch_prompts, train.remat='full', a larger"
    " mesh.fsdp, mesh.sequence or mesh.tensor"
)
_REMEDIES = {
    "train_step": _TRAINER_REMEDIES + ", optimizer.state_dtype='bfloat16'",
    "reference": _TRAINER_REMEDIES,
    "prefill": "a smaller sampling.num_rows, a larger search.mesh.tensor",
    "decode_chunk": "a smaller sampling.num_rows, a larger search.mesh.tensor",
    "publish": "a larger mesh.fsdp, publish.dtype='bfloat16'",
}


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one program; bytes are of one device.

  None where the program does not fit. `peak_bytes` includes arguments and
  outputs. Of a chunk of decode steps, `flops` and `collective_bytes` are of one
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
  compile_s: float | None = None
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
  try:
    for_trainer, for_searcher = _devices(config, operands)
    lowerings = lower(config, for_trainer[1], for_searcher[1])
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  found = {
      "topology": {"trainer": for_trainer[0], "searcher": for_searcher[0]},
      "programs": {},
  }
  status = processes.EXIT_OK
  for name, lowering in lowerings.items():
    print(f"compiling {name} …", file=sys.stderr, flush=True)
    try:
      result, text = _compile(name, lowering)
    except ValueError as error:
      result, text = Compiled(fits=False, error=str(error)), ""
    found["programs"][name] = dataclasses.asdict(result)
    if not result.fits:
      status = processes.EXIT_CONFIG
    if workdir is not None:
      _write(pathlib.Path(workdir), name, text, found)
  rich.console.Console().print(_table(found["programs"]))
  for name, result in found["programs"].items():
    if not result["fits"]:
      print(f"{name}: {result['error']}", file=sys.stderr)
  return status


def _devices(
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
    if len(devices) < needed or (key == "mesh" and len(devices) != needed):
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


def lower(
    config: ml_collections.ConfigDict,
    trainer_devices: Sequence[jax.Device],
    searcher_devices: Sequence[jax.Device],
) -> dict[str, Callable[[], Any]]:
  """Returns functions that lower each program, by name; they are not called.

  Args:
    config: of the run.
    trainer_devices: of `config.mesh`.
    searcher_devices: of `config.search.mesh`.

  Raises:
    ValueError: the model cannot be read, or does not divide over a mesh.
  """
  shape = dataclasses.replace(
      plan.model_of(config),
      compute_dtype=config_lib.compute_dtype(config.model, _PLATFORM),
  )
  model = transformer.make_model(shape, remat=config.train.remat)
  mesh = sharding.make_mesh(config.mesh, trainer_devices)
  adapters = lora.make(config.lora, model)
  params = _abstract_params(model, mesh, config.sharding)
  return {
      "train_step": functools.partial(
          _lower_train_step, config, model, mesh, adapters, params
      ),
      "reference": functools.partial(
          _lower_reference, config, model, mesh, params
      ),
      **_lower_sampler(config, model, searcher_devices),
      "publish": functools.partial(
          _lower_publish, config, adapters or model, mesh
      ),
  }


def _abstract_params(
    model: Any, mesh: jax.sharding.Mesh, rules: Any, key: str = "mesh"
) -> types.PyTree:
  """Returns shapes and shardings of a model's or adapters' params."""
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  shardings = sharding.param_shardings(mesh, rules, model.logical_axes)
  sharding.check_divisible(shapes, shardings, key=key)
  return _sharded(shapes, shardings)


def _sharded(shapes: types.PyTree, shardings: types.PyTree) -> types.PyTree:
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
  )


def _abstract_batch(
    config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, B: int
) -> types.Batch:
  """Returns shapes and shardings of a batch of B prompts."""
  over_batch = sharding.batch_sharding(mesh, config.sharding)
  K = config.train.completions_per_prompt
  P = config.sampling.max_prompt_tokens
  T = config.sampling.max_completion_tokens
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(
      (B, *shape), dtype, sharding=over_batch
  )
  return types.Batch(
      prompt_tokens=array(jnp.int32, P),
      prompt_mask=array(jnp.float32, P),
      completion_tokens=array(jnp.int32, K, T),
      completion_mask=array(jnp.float32, K, T),
      behavior_logprobs=array(jnp.float32, K, T),
      ref_logprobs=array(jnp.float32, K, T),
      rewards=array(jnp.float32, K),
      staleness_steps=array(jnp.float32, K),
  )


def _lower_train_step(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    mesh: jax.sharding.Mesh,
    adapters: lora.Adapters | None,
    params: types.PyTree,
) -> Any:
  value_model = policy_lib.make_value_model(config, model)
  step = train_step.jit_train_step(
      config, model, mesh, value_model=value_model, adapters=adapters
  )
  state = train_step.abstract_state(
      config, adapters or model, mesh, value_model=value_model
  )
  batch = _abstract_batch(config, mesh, config.train.prompts_per_batch)
  return step.lower(state, batch, params if adapters else None)


def _lower_reference(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    mesh: jax.sharding.Mesh,
    params: types.PyTree,
) -> Any:
  logprobs_fn = reference.make_logprobs_fn(
      model, temperature=config.sampling.temperature
  )
  axes = sharding.token_axes(config.sharding)
  batch = _abstract_batch(config, mesh, device_work.reference_prompts(config))
  return jax.jit(sequence.split_tokens(logprobs_fn, mesh, *axes)).lower(
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
  )


@dataclasses.dataclass(frozen=True)
class _Tokenizer:
  """What a sampler asks of a tokenizer; a folder may have config.json alone."""

  pad_id: int
  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...] = ()

  def decode(self, ids: Sequence[int]) -> str:
    raise NotImplementedError("compiled, not run")


def _lower_sampler(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    devices: Sequence[jax.Device],
) -> dict[str, Callable[[], Any]]:
  """Returns functions that lower the searchers' prefill and decode chunk."""
  if len(devices) == 1:
    whole = jax.sharding.SingleDeviceSharding(devices[0])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = _sharded(shapes, jax.tree.map(lambda _: whole, shapes))
  else:
    mesh = sharding.make_mesh(
        {"sequence": 1, **config.search.mesh}, list(devices)
    )
    whole = sharding.replicated(mesh)
    params = _abstract_params(model, mesh, config.sharding, "search.mesh")
  shape = model.config
  tokenizer = _Tokenizer(
      pad_id=shape.pad_id or 0,
      stop_ids=shape.stop_ids or (shape.eos_id or 0,),
  )
  policy = policy_lib.Policy(None, tokenizer, model, None, None)
  settings = policy_lib.make_sampler(config, policy).settings
  programs = rows.Programs(model, settings, whole)

  def prefill() -> Any:
    shape = settings.prefill_size, settings.max_prompt_tokens
    return programs.prefill.lower(
        params, np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    )

  def decode_chunk() -> Any:
    # Its outputs are what later steps take, with the compiler's shardings.
    cast = programs.decode_params.lower(params)
    decode_params = _sharded(cast.out_info, cast.compile().output_shardings)
    return programs.decode_chunk.lower(
        decode_params,
        programs.abstract_state,
        np.int32(settings.chunk_steps),
        np.int32(settings.num_rows),
        programs.num_blocks,
    )

  return {"prefill": prefill, "decode_chunk": decode_chunk}


def _lower_publish(
    config: ml_collections.ConfigDict, trained: Any, mesh: jax.sharding.Mesh
) -> Any:
  """Lowers the copy that is published, gathered onto each process's devices."""
  by_process = sharding.mesh_by_process(mesh)
  # One program has one order of devices: here that of their processes.
  mesh = jax.sharding.Mesh(
      by_process.devices.reshape(mesh.devices.shape), mesh.axis_names
  )
  params = _abstract_params(trained, mesh, config.sharding)
  copy = functools.partial(publication.snapshot, dtype=config.publish.dtype)
  places = jax.tree.map(
      lambda x: jax.sharding.NamedSharding(by_process, x.sharding.spec), params
  )
  return jax.jit(copy, out_shardings=places).lower(params)


def _compile(name: str, lowering: Callable[[], Any]) -> tuple[Compiled, str]:
  """Returns what the compiler says, and the text of the module."""
  lowered = lowering()
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "memory" not in str(error).lower():
      raise
    return _does_not_fit(name, str(error), time.perf_counter() - start), ""
  memory, text = compiled.memory_analysis(), compiled.as_text()
  costs = hlo.costs(text)
  found = Compiled(
      fits=True,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      alias_bytes=memory.alias_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes,
      peak_bytes=memory.peak_memory_in_bytes,
      collective_bytes=costs.collective_bytes,
      collectives=costs.collectives,
      flops=costs.flops,
      compile_s=time.perf_counter() - start,
  )
  return found, text


def _does_not_fit(name: str, message: str, compile_s: float) -> Compiled:
  """Returns the result of a program that needs more memory than there is."""
  used = re.search(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])", message)
  size = lambda number, unit: int(float(number) * _UNITS[unit])
  peak, words = None, "more memory than a device has"
  if used:
    peak = size(used[1], used[2])
    words = f"{used[1]}{used[2]} of the {used[3]}{used[4]} that a device has"
  return Compiled(
      fits=False,
      peak_bytes=peak,
      compile_s=compile_s,
      error=f"needs {words}; try {_REMEDIES[name]}",
  )


def _write(
    workdir: pathlib.Path, name: str, text: str, found: dict[str, Any]
) -> None:
  folder = workdir / "hlo"
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f"{name}.txt").write_text(text, "utf-8")
  (workdir / "compile.json").write_text(json.dumps(found, indent=2), "utf-8")


def _table(programs: dict[str, dict[str, Any]]) -> rich.table.Table:
  """Returns the figures of each program, one a row."""
  table = rich.table.Table(
      box=rich.box.SIMPLE, collapse_padding=True, title="on one device"
  )
  table.add_column("program", no_wrap=True)
  columns = {
      "arguments": "argument_bytes",
      "temporary": "temporary_bytes",
      "peak": "peak_bytes",
      "received": "collective_bytes",
  }
  for title in ("fits", *columns, "FLOP", "took"):
    table.add_column(title, justify="right", no_wrap=True)
  show = lambda text, value: "" if value is None else text(value)
  for name, found in programs.items():
    table.add_row(
        name,
        "yes" if found["fits"] else "NO",
        *(show(_size, found[key]) for key in columns.values()),
        show("{:.2e}".format, found["flops"]),
        show("{:.0f} s".format, found["compile_s"]),
        style="" if found["fits"] else "bold red",
    )
  return table


def _size(num_bytes: float) -> str:
  for unit in ("B", "KB", "MB"):
    if num_bytes < 1000:
      return f"{num_bytes:.3g} {unit}"
    num_bytes /= 1000
  return f"{num_bytes:.3g} GB"

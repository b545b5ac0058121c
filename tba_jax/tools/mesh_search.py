# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the best meshes for given devices, from the compiler's figures.

    --program=plan --config=FILE --meshes TRAINER_TOPOLOGY [SEARCHER_TOPOLOGY]

A program takes at least as long as the longest of its arithmetic, its memory
traffic and its communication, within and between hosts, at the chip's peak
rates. Of the meshes that fit, the one with the smallest such bound is chosen.
Work that overlaps badly or runs below the peak takes longer: these times rank
meshes, but do not predict speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
import sys
import time

import jax
import ml_collections

from tba_jax.learning import group_reference
from tba_jax.programs import titled_rows
from tba_jax.run import text
from tba_jax.sampling import requests
from tba_jax.tools import compile as compiler
from tba_jax.tools import targets

# Largest tensor axis to try. It moves activations, with five sums per layer;
# more devices are better used by fsdp or data.
_MOST_TENSOR = 8

Sizes = dict[str, int]
Programs = Mapping[str, compiler.Compiled]


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A mesh, and the compiler's figures for a role's programs on it.

  seconds: lower bound on the role's time for a train step; inf if the mesh
    cannot be used.
  words: figures, or the reason why the mesh cannot be used.
  """

  sizes: Sizes
  seconds: float
  words: str


def trainer_meshes(num_devices: int) -> list[Sizes]:
  """Returns meshes to try for a trainer: fsdp or data, times tensor."""
  out = []
  for tensor in _tensor_sizes(num_devices):
    for axis in ("fsdp", "data"):
      sizes = {"data": 1, "fsdp": 1, "sequence": 1, "tensor": tensor}
      sizes[axis] = num_devices // tensor
      if sizes not in out:
        out.append(sizes)
  return out


def searcher_meshes(num_devices: int) -> list[Sizes]:
  """Returns meshes to try for a searcher: data times tensor."""
  return [
      {"data": num_devices // tensor, "fsdp": 1, "tensor": tensor}
      for tensor in _tensor_sizes(num_devices)
  ]


def _tensor_sizes(num_devices: int) -> list[int]:
  most = min(num_devices, _MOST_TENSOR)
  return [n for n in range(1, most + 1) if num_devices % n == 0]


def least_seconds(compiled: compiler.Compiled, chip: targets.Chip) -> float:
  """Returns a lower bound on a program's time from a chip's peak rates."""
  return max(
      compiled.arithmetic_s,
      compiled.links_s,
      compiled.memory_bytes / chip.memory_bytes_per_s,
  )


def training_s(programs: Programs, chip: targets.Chip) -> float:
  """Returns the minimum seconds of a train step with its reference pass."""
  seconds = least_seconds(programs["train_step"], chip)
  if "reference" in programs:
    seconds += least_seconds(programs["reference"], chip)
  return seconds


def sampling_s(
    config: ml_collections.ConfigDict, programs: Programs, chip: targets.Chip
) -> float:
  """Returns the minimum seconds that a searcher samples for a train step.

  This includes the reference pass, if there is one, and assumes that all slots
  are in use and that completions have the maximum length.
  """
  sampling, search = config.sampling, config.search
  prompts = search.prompts_per_step or config.train.prompts_per_batch
  fills = prompts * search.samples_per_prompt / sampling.num_slots
  prefills = prompts * requests.ROWS_PER_PREFILL / sampling.num_slots
  seconds = fills * sampling.max_completion_tokens * least_seconds(
      programs["decode_chunk"], chip
  ) + prefills * least_seconds(programs["prefill"], chip)
  if "reference" in programs:
    passes = prompts / group_reference.prompts_at_a_time(config)
    seconds += passes * least_seconds(programs["reference"], chip)
  return seconds


def try_trainer(
    config: ml_collections.ConfigDict,
    devices: Sequence[jax.Device],
    workdir: str | None = None,
) -> Iterator[Candidate]:
  """Compiles the train step and the reference pass on each mesh."""

  def compile_on(sizes: Sizes) -> tuple[Programs, float]:
    candidate = config.copy_and_resolve_references()
    candidate.mesh.update(sizes)
    programs = _compile(compiler.trainer(candidate, devices, workdir), devices)
    return programs, training_s(programs, chip)

  chip = targets.CHIPS[devices[0].device_kind]
  yield from _try("mesh", trainer_meshes(len(devices)), compile_on, chip)


def try_searcher(
    config: ml_collections.ConfigDict,
    devices: Sequence[jax.Device],
    workdir: str | None = None,
) -> Iterator[Candidate]:
  """Compiles prefill and decode steps on each mesh."""

  def compile_on(sizes: Sizes) -> tuple[Programs, float]:
    candidate = config.copy_and_resolve_references()
    candidate.search.mesh.update(sizes)
    programs = _compile(compiler.searcher(candidate, devices, workdir), devices)
    return programs, sampling_s(candidate, programs, chip)

  chip = targets.CHIPS[devices[0].device_kind]
  meshes = searcher_meshes(len(devices))
  yield from _try("search.mesh", meshes, compile_on, chip)


def _try(
    key: str,
    meshes: Sequence[Sizes],
    compile_on: Callable[[Sizes], tuple[Programs, float]],
    chip: targets.Chip,
) -> Iterator[Candidate]:
  """Yields each mesh's candidate, printing what is being compiled."""
  start = time.perf_counter()
  for i, sizes in enumerate(meshes):
    took = text.duration(time.perf_counter() - start)
    print(
        f"compiling config.{key}, {i + 1} of {len(meshes)}: {describe(sizes)} …"
        f" {took} so far",
        file=sys.stderr,
        flush=True,
    )
    try:
      programs, seconds = compile_on(sizes)
      yield Candidate(sizes, seconds, _figures(programs, chip))
    except ValueError as error:
      yield Candidate(sizes, math.inf, f"not usable: {error}")


def _compile(
    role: compiler.RolePrograms, devices: Sequence[jax.Device]
) -> Programs:
  """Compiles the programs of a role that determine its time.

  Raises:
    ValueError: a program does not fit, or its arrays do not divide.
  """
  out = {}
  for name in ("train_step", "reference", "prefill", "decode_chunk"):
    if program := role.programs.get(name):
      other_bytes = sum(role.resident.values()) - program.argument_bytes
      out[name], _ = compiler.compile_program(
          program, other_bytes, devices[0], targets.host_size(devices)
      )
      if not out[name].fits:
        raise ValueError(f"{name} {out[name].error}")
  return out


def _figures(programs: Programs, chip: targets.Chip) -> str:
  """Returns the main program's time bounds, and the highest memory peak."""
  main = programs.get("train_step") or programs["decode_chunk"]
  peak = max(program.peak_bytes for program in programs.values())
  memory_s = main.memory_bytes / chip.memory_bytes_per_s
  return (
      f"a step's arithmetic {main.arithmetic_s:.3g} s, memory {memory_s:.3g} s,"
      f" links {main.links_s:.3g} s; peak {titled_rows.format_bytes(peak)}"
  )


def describe(sizes: Sizes) -> str:
  """Returns the axes larger than 1, such as "fsdp 4 x tensor 2"."""
  axes = [f"{axis} {n}" for axis, n in sizes.items() if n > 1]
  return " x ".join(axes) or "one device"


def best(candidates: Sequence[Candidate]) -> Candidate | None:
  """Returns the usable mesh with the least time; ties go to the first."""
  usable = [c for c in candidates if c.seconds < math.inf]
  return min(usable, key=lambda c: c.seconds, default=None)


def rows(key: str, candidates: Sequence[Candidate]) -> titled_rows.TableRows:
  """Returns a row for each candidate, and the settings of the best."""
  out = []
  for c in candidates:
    words = c.words
    if c.seconds < math.inf:
      words = f"at least {c.seconds:.3g} s: {words}"
    out.append((describe(c.sizes), words))
  chosen = best(candidates)
  settings = "NO mesh of these devices can be used"
  if chosen:
    settings = " ".join(
        f"--config.{key}.{axis}={n}" for axis, n in chosen.sizes.items()
    )
  return [*out, ("chosen", settings)]

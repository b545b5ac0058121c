# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Audits checkpoints: the checksum of every array, the host state's counts."""

from collections.abc import Iterable, Iterator, Mapping
import json
import math
import re
from typing import Any

from etils import epath
import numpy as np
import tensorstore as ts

from tba_jax.learning import host_state
from tba_jax.models.hf import hf_files
from tba_jax.replay import ledger
from tba_jax.system import auditing
from tba_jax.system import bucket

_COMMIT = "commit_success.txt"
# Array elements read at a time.
_CHUNK = 1 << 24


def audit(run: auditing.AuditedRun) -> auditing.Findings:
  """Checks the trainer's checkpoints."""
  folder = epath.Path(bucket.place(run.folder / "checkpoints"))
  yield from _checkpoints(run, folder, "checkpoints", run.saved)
  names = {path.name for path in folder.iterdir()} if folder.exists() else ()
  history = run.saved.get(run.newest, {}).get("applied_history", [])
  for step, _ in history[-run.setting("checkpoint", "keep", 1) :]:
    if not (run.live or run.had("checkpoint_failed")) and names.isdisjoint(
        (f"{step}", f"damaged-{step}")
    ):
      what = f"deleted; a restart continues from checkpoints/{run.newest}"
      yield f"checkpoints/{step}", what
  yield _found_steps(run.saved)


def audit_model(run: auditing.AuditedRun, name: str) -> auditing.Findings:
  """Checks another model of the run: its checkpoints and its folder."""
  model = run.folder / name / "model"
  for path in sorted(model.glob("*.safetensors")):
    place = f"{name}/model/{path.name}"
    for damage in hf_files.damage(path):
      yield place, damage, auditing.COPY
  prefix, saved = f"{name}/checkpoints", {}
  folder = epath.Path(bucket.place(run.folder / prefix))
  yield from _checkpoints(run, folder, prefix, saved)
  yield _found_steps(saved) + (", a model" if model.exists() else "")


def _found_steps(saved: Iterable[int]) -> str:
  steps = ", ".join(map(str, saved))
  return f"steps {steps}" if steps else "none"


def _checkpoints(
    run: auditing.AuditedRun,
    folder: epath.Path,
    prefix: str,
    saved: dict[int, dict[str, Any]],
) -> auditing.Findings:
  """Checks all checkpoints of a folder; adds the complete ones to `saved`."""
  steps = {}
  for path in folder.iterdir() if folder.exists() else ():
    name = f"{prefix}/{path.name}"
    if path.name.isdecimal():
      steps[int(path.name)] = path
    elif "orbax-checkpoint-tmp" in path.name:
      yield name, "an interrupted save"
    elif path.name.startswith("damaged-"):
      yield name, "set aside by a restart"
  # Orbax writes commit markers in buckets, and in newer versions everywhere.
  marked = [step for step, path in steps.items() if (path / _COMMIT).exists()]
  for step in sorted(steps):
    if step not in marked and (marked or bucket.is_remote(folder)):
      yield (
          f"{prefix}/{step}/{_COMMIT}",
          "is missing: the save was not completed, or the marker was deleted",
          "a restart from a bucket uses an older checkpoint; if the rest of"
          " this one is intact, create the file again",
      )
  for step, path in sorted(steps.items()):
    host: dict[str, Any] = {}
    problems = list(_problems(run, path, f"{prefix}/{step}", step, host))
    if problems and run.live and not path.exists():
      continue  # Just removed by the run.
    saved[step] = host
    for place, what in problems:
      yield (
          f"{prefix}/{step}/{place}",
          what,
          "a restart sets this checkpoint aside and uses the previous one;"
          " export and evaluate reject it. Continue from the previous one, or"
          f" {auditing.COPY}",
      )


def _problems(
    run: auditing.AuditedRun,
    path: epath.Path,
    name: str,
    step: int,
    host: dict[str, Any],
) -> Iterator[tuple[str, str]]:
  """Yields (place, problem) pairs of a checkpoint; fills `host`."""
  file = f"host/{host_state.NAME}"
  try:
    with (path / file).open("rb") as opened:
      saved = host_state.read(opened)
    if saved["format"] != host_state.FORMAT:
      raise ValueError(f"format {saved['format']}, not {host_state.FORMAT}")
    host.update(saved["host_state"])
    yield from _array_problems(run, path, name, saved["checksums"], step)
    if "data" in host:
      for what in [*_count_problems(run, step, host)]:
        yield "host", what
  except Exception as error:  # NumPy and zipfile raise many types.
    yield file, f"cannot be read: {type(error).__name__}: {error}"


def _array_problems(
    run: auditing.AuditedRun,
    path: epath.Path,
    name: str,
    checksums: Mapping[str, int],
    step: int,
) -> Iterator[tuple[str, str]]:
  """Compares the checksums of all arrays."""
  try:
    for file in ("_CHECKPOINT_METADATA", "state/_sharding"):
      json.loads((path / file).read_bytes())
    file = "state/_METADATA"
    metadata = json.loads((path / file).read_bytes())
    arrays = {
        tuple(str(key["key"]) for key in row["key_metadata"])
        for row in metadata["tree_metadata"].values()
        if not row["value_metadata"]["skip_deserialize"]
    }
  except (OSError, ValueError, LookupError, TypeError) as error:
    yield file, f"cannot be read: {error!r}"
    return
  wanted = {_keys_of(text): checksum for text, checksum in checksums.items()}
  damaged = [
      f"array {'.'.join(keys)} has no checksum, or is missing"
      for keys in sorted(wanted.keys() ^ arrays)
  ]
  driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
  context = ts.Context()
  for count, keys in enumerate(sorted(wanted.keys() & arrays)):
    run.show(f"{name}, array {count + 1} of {len(wanted)}")
    key = ".".join(keys)
    kvstore = bucket.ocdbt(path / "state", key)
    spec = {"driver": driver, "kvstore": kvstore}
    try:
      array = ts.open(spec, open=True, read=True, context=context).result()
      if _checksum(array) != wanted[keys]:
        problem = "does not match its saved checksum"
      elif keys == ("step",) and int(array[...].read().result()) != step:
        problem = f"differs from the {step} in the directory's name"
      else:
        continue
    except Exception as error:  # TensorStore raises many types.
      problem = f"cannot be read: {str(error).splitlines()[0][:300]}"
    damaged.append(f"array {key} {problem}")
  if damaged:
    more = f"; {len(damaged) - 3} more arrays" if len(damaged) > 3 else ""
    yield "state", "; ".join(damaged[:3]) + more


def _keys_of(text: str) -> tuple[str, ...]:
  """Returns the keys of a JAX key path such as .opt_state[1].mu['w']."""
  groups = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", text)
  return tuple(next(filter(None, keys), "") for keys in groups)


def _checksum(array: ts.TensorStore) -> int:
  """Returns the checksum of an array, read in slices along its first axis.

  Σᵢ mix(bitsᵢ, i) mod 2³²,  i the index in row-major order
  """
  array = array if array.shape else array[ts.newaxis]
  num_rows = max(_CHUNK // max(math.prod(array.shape[1:]), 1), 1)
  total = offset = 0
  for first in range(0, array.shape[0], num_rows):
    last = min(first + num_rows, array.shape[0])
    data = np.ascontiguousarray(array[first:last].read().result())
    data = data.view(np.uint8) if data.dtype == bool else data
    word = f"u{min(data.dtype.itemsize, 4)}"
    bits = data.reshape(-1).view(word).astype(np.uint32)
    index = np.arange(offset, offset + bits.size, dtype=np.uint64)
    mixed = bits ^ index.astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed *= np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE35)
    total += int(np.sum(mixed, dtype=np.uint32))
    offset += bits.size
  return total % (1 << 32)


def _count_problems(
    run: auditing.AuditedRun, step: int, host: Mapping[str, Any]
) -> Iterator[str]:
  """Yields inconsistencies between the counts in a trainer's host state."""
  data, history = host["data"], host["applied_history"]
  rows = data["buffer"]["rows"]
  if history[-1] != [step, data["applied"]]:
    yield f"applied_history ends at {history[-1]}"
  for sid, (sequence, *_) in data["acknowledged"].items():
    if (applied := data["watermarks"].get(sid, 0)) > sequence:
      yield f"{sid}: applied to {applied}, acknowledged {sequence}"
  for key, limit in (("versions", step), ("epochs", run.epoch)):
    if (worst := rows[key].max(initial=0)) > limit > 0:
      yield f"{key} of the buffer go to {worst}, over {limit}"
  unused = rows["use_counts"] == 0
  # The mask has no padding.
  sampled = rows["sampled_mask"][np.repeat(unused, rows["completion_lengths"])]
  untrained = len(rows["unused_groups"]), int(unused.sum()), int(sampled.sum())
  if lacking := ledger.audit_state(data["ledger"], untrained):
    yield lacking

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Audit of checkpoints: every array, and the counts of the host state."""

from collections.abc import Iterable, Mapping
import json
import math
import re
from typing import Any

from etils import epath
import numpy as np
import tensorstore as ts

from tba_jax.learning import host_state
from tba_jax.models import hf_files
from tba_jax.replay import ledger as ledger_lib
from tba_jax.system import auditing
from tba_jax.system import bucket

_COMMIT = "commit_success.txt"
# Elements of an array that are read at a time.
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
  """Checks a model beside the run's: its checkpoints, and its folder."""
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
      yield name, "a save that was interrupted"
    elif path.name.startswith("damaged-"):
      yield name, "set aside by a restart"
  # Orbax writes commit markers in buckets, and in newer versions everywhere.
  marked = [step for step, path in steps.items() if (path / _COMMIT).exists()]
  for step in sorted(steps):
    if step not in marked and (marked or bucket.is_remote(folder)):
      yield (
          f"{prefix}/{step}/{_COMMIT}",
          "is missing: the save was not completed, or the marker deleted",
          "a restart from a bucket takes an older checkpoint; if all else of"
          " this one is sound, create the file again",
      )
  for step, path in sorted(steps.items()):
    name = f"{prefix}/{step}"
    host, problems = _read_checkpoint(run, path, name, step)
    if problems and run.live and not path.exists():
      continue  # The run has just removed it.
    for place, what in problems:
      yield (
          f"{name}/{place}",
          what,
          "a restart sets this checkpoint aside and takes the one before;"
          " export and evaluate refuse it. Go on from there, or"
          f" {auditing.COPY}",
      )
    saved[step] = host


def _read_checkpoint(
    run: auditing.AuditedRun, path: epath.Path, name: str, step: int
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
  """Returns host state and (place, what) of the problems of a checkpoint."""
  file = f"host/{host_state.NAME}"
  host: dict[str, Any] = {}
  problems: list[tuple[str, str]] = []
  try:
    with (path / file).open("rb") as opened:
      saved = host_state.read(opened)
    if saved["format"] != host_state.FORMAT:
      raise ValueError(f"format {saved['format']}, not {host_state.FORMAT}")
    host = saved["host_state"]
    problems += _check_arrays(run, path, name, saved["checksums"], step)
    if "data" in host:
      problems += _check_host(run, step, host)
  except Exception as error:  # NumPy and zipfile raise many types.
    problems.append((file, f"cannot be read: {type(error).__name__}: {error}"))
  return host, problems


def _check_arrays(
    run: auditing.AuditedRun,
    path: epath.Path,
    name: str,
    checksums: Mapping[str, int],
    step: int,
) -> list[tuple[str, str]]:
  """Compares the checksums of all arrays; returns (place, what) of problems."""
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
    return [(file, f"cannot be read: {error!r}")]
  wanted = {_keys_of(text): checksum for text, checksum in checksums.items()}
  damaged = [
      f"array {'.'.join(keys)} has no checksum, or is missing"
      for keys in sorted(wanted.keys() ^ arrays)
  ]
  driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
  context = ts.Context()
  for count, keys in enumerate(sorted(wanted.keys() & arrays)):
    run.show(f"{name}, array {count + 1} of {len(wanted)}")
    shown = f"array {'.'.join(keys)}"
    try:
      key = bucket.ocdbt(path / "state", ".".join(keys))
      spec = {"driver": driver, "kvstore": key}
      opening = ts.open(spec, open=True, read=True, context=context)
      array = opening.result()
      if _checksum(array) != wanted[keys]:
        damaged.append(f"{shown} has another checksum than when it was saved")
      elif keys == ("step",) and int(array[...].read().result()) != step:
        damaged.append(f"{shown} is not {step}, as the directory says")
    except Exception as error:  # TensorStore raises many types.
      reason = str(error).splitlines()[0][:300]
      damaged.append(f"{shown} cannot be read: {reason}")
  more = f"; {len(damaged) - 3} more arrays" if len(damaged) > 3 else ""
  return [("state", "; ".join(damaged[:3]) + more)] if damaged else []


def _keys_of(text: str) -> tuple[str, ...]:
  """Returns the keys of a path in JAX's notation, as .opt_state[1].mu['w']."""
  groups = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", text)
  return tuple(next(filter(None, keys), "") for keys in groups)


def _checksum(array: ts.TensorStore) -> int:
  """Returns the checksum of an array, read in parts along its first axis.

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


def _check_host(
    run: auditing.AuditedRun, step: int, host: Mapping[str, Any]
) -> list[tuple[str, str]]:
  """Checks that the counts of a trainer's host state agree."""
  data, problems = host["data"], []
  rows = data["buffer"]["rows"]
  if host["applied_history"][-1] != [step, data["applied"]]:
    problems.append(f"applied_history ends at {host['applied_history'][-1]}")
  for sid, (sequence, *_) in data["acknowledged"].items():
    if (applied := data["watermarks"].get(sid, 0)) > sequence:
      problems.append(f"{sid}: applied to {applied}, acknowledged {sequence}")
  for key, limit in (("versions", step), ("epochs", run.epoch)):
    if (worst := rows[key].max(initial=0)) > limit > 0:
      problems.append(f"{key} of the buffer go to {worst}, over {limit}")
  unused = rows["use_counts"] == 0
  # The mask has no padding.
  sampled = rows["sampled_mask"][np.repeat(unused, rows["completion_lengths"])]
  untrained = ledger_lib.Amount(
      len(rows["unused_groups"]), int(unused.sum()), int(sampled.sum())
  )
  if lacking := ledger_lib.audit_state(data["ledger"], untrained):
    problems.append(lacking)
  return [("host", what) for what in problems]

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of several runs: rows in a file, and tables."""

from collections.abc import Callable, Collection, Mapping, Sequence
import fcntl
import gzip
import json
import os
import pathlib
import platform
import re
import sys
from typing import Any

import numpy as np

from tba_jax.system import jsonl
from tba_jax.system import processes

_TABLE = "runs.jsonl.gz"


def parse(
    operands: Sequence[str], names: Collection[str]
) -> tuple[list[int], list[str]]:
  """Returns the seeds and names of `[SEED,… [NAME …]]`; 0 and all by default.

  `table` in place of seeds gives no seeds, to redraw tables of stored results.

  Raises:
    ValueError: an operand is invalid.
  """
  seeds, *chosen = operands or ["0"]
  if seeds == "table" and not chosen:
    return [], list(names)
  if not all(seed.isdecimal() for seed in seeds.split(",")):
    raise ValueError(f"operand {seeds!r}: must be seeds separated by commas")
  if unknown := sorted(set(chosen) - set(names)):
    raise ValueError(
        f"unknown runs {unknown}; must be one of {', '.join(names)}"
    )
  return [int(seed) for seed in seeds.split(",")], chosen or list(names)


def machine() -> dict[str, Any]:
  """Returns `cores`, the number available, and `processor`, its name."""
  path = pathlib.Path("/proc/cpuinfo")
  text = path.read_text() if path.exists() else ""
  match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
  return {
      "cores": len(processes.available_cores()),
      "processor": match[1] if match else platform.machine(),
  }


def last_items(result: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the last item of each list."""
  return {k: v[-1] for k, v in result.items() if isinstance(v, list)}


def read_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the results in a folder, in the order of their keys."""
  path = folder / _TABLE
  if not path.exists():
    return []
  lines = gzip.decompress(path.read_bytes()).splitlines()
  return [json.loads(line) for line in lines]


def keep(
    folder: pathlib.Path,
    result: Mapping[str, Any],
    key: Sequence[str] = ("name", "seed"),
) -> None:
  """Adds a result to a folder's file, replacing one with the same key.

  Safe for concurrent processes. The file's bytes depend only on its rows.

  Args:
    folder: destination, created if it is missing.
    result: row of one run; non-finite numbers become null.
    key: fields that identify a run, if a result has them.
  """
  key_of = lambda row: tuple(row.get(field, "") for field in key)
  folder.mkdir(parents=True, exist_ok=True)
  lock = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX)
    rows = {key_of(row): row for row in read_rows(folder)}
    rows[key_of(result)] = result
    lines = (jsonl.json_line(rows[k]) for k in sorted(rows))
    with jsonl.replacing(folder / _TABLE) as file:
      file.write(gzip.compress("".join(lines).encode(), mtime=0))
  finally:
    os.close(lock)


def measure(
    seeds: Sequence[int],
    names: Sequence[str],
    folder: pathlib.Path,
    run: Callable[[str, int], dict[str, Any]],
    summarize_run: Callable[[dict[str, Any]], Any] = last_items,
) -> None:
  """Executes the runs without a result in the folder.

  Args:
    seeds: numbers to run; all runs of a seed come before the next seed.
    names: names of the runs of a seed.
    folder: destination of a row for each name and seed.
    run: (name, seed) -> result, with lists that have an item per evaluation.
    summarize_run: (result) -> summary to print.
  """
  for seed in seeds:
    for name in names:
      # Another process may have finished this run.
      if is_kept(name, seed, folder):
        continue
      result = {"name": name, "seed": seed, **run(name, seed)}
      keep(folder, result)
      print(f"{name}-seed{seed}: {summarize_run(result)}", file=sys.stderr)


def is_kept(name: str, seed: int, folder: pathlib.Path) -> bool:
  """Returns whether the folder has a result with this name and seed."""
  return any((r["name"], r["seed"]) == (name, seed) for r in read_rows(folder))


def read(names: Collection[str], folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the results in the folder, in the order of the names."""
  rows = read_rows(folder)
  return [row for name in names for row in rows if row["name"] == name]


def summarize(
    runs: Sequence[dict[str, Any]], keys: Collection[str], folder: pathlib.Path
) -> dict[str, Any]:
  """Returns `folder`, and `runs`: name, seed and last value of each key."""
  ends = [
      {"name": r["name"], "seed": r["seed"]} | {k: r[k][-1] for k in keys}
      for r in runs
  ]
  return {"folder": str(folder), "runs": ends}


def make_rows(
    names: Collection[str],
    runs: Sequence[Mapping[str, Any]],
    ends: Mapping[str, tuple[str, int]],
) -> list[list[str]]:
  """Returns a row per name with results: its two parts, seeds, and last values.

  Args:
    names: "FIRST-SECOND", in order.
    runs: results; a row has the mean and range over seeds.
    ends: key to title and digits.
  """
  rows = []
  for name in names:
    if runs_of_name := of_name(runs, name):
      rows.append(
          [
              *name.rsplit("-", 1),
              str(len(runs_of_name)),
              *(
                  mean_and_range([r[key][-1] for r in runs_of_name], digits)
                  for key, (_, digits) in ends.items()
              ),
          ]
      )
  return rows


def of_name(
    runs: Sequence[Mapping[str, Any]], name: str
) -> list[Mapping[str, Any]]:
  return [run for run in runs if run["name"] == name]


def at_target(
    values: Sequence[float], curve: Sequence[float], target: float
) -> float | None:
  """Returns the value where a curve first reaches a target, interpolated.

  Returns None if it never does.
  """
  for i, height in enumerate(curve):
    if height >= target:
      if not i:
        return values[0]
      share = (target - curve[i - 1]) / (height - curve[i - 1])
      return values[i - 1] + share * (values[i] - values[i - 1])
  return None


def mean_and_range(values: Sequence[float], digits: int) -> str:
  """Returns "mean (minimum to maximum)"."""
  text = f"{np.mean(values):.{digits}f}"
  if len(values) == 1:
    return text
  return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def print_table(
    rows: Sequence[Sequence[str]], path: pathlib.Path | None = None
) -> None:
  """Prints rows as a Markdown table, header first, and writes it to a path."""
  lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
  text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
  if path is not None:
    path.write_text(text)
  print(text, file=sys.stderr)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks of several runs: a file for each, and a table."""

from collections.abc import Collection, Sequence
import json
import pathlib
import sys
from typing import Any

import numpy as np


def parse(
    operands: Sequence[str], names: Collection[str]
) -> tuple[list[int], list[str]]:
  """Returns the seeds and names of `[SEED,… [NAME …]]`; 0 and all by default.

  Raises:
    ValueError: an operand is wrong.
  """
  seeds, *chosen = operands or ["0"]
  if not all(seed.isdecimal() for seed in seeds.split(",")):
    raise ValueError(f"operand {seeds!r}: allowed seeds separated by commas")
  if unknown := sorted(set(chosen) - set(names)):
    raise ValueError(f"unknown runs {unknown}; allowed {', '.join(names)}")
  return [int(seed) for seed in seeds.split(",")], chosen or list(names)


def read(names: Collection[str], folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the results in the folder, in the order of the names."""
  return [
      json.loads(path.read_text())
      for name in names
      for path in sorted(folder.glob(f"{name}-seed*.json"))
  ]


def summarize(
    runs: Sequence[dict[str, Any]], keys: Collection[str], folder: pathlib.Path
) -> dict[str, Any]:
  """Returns `folder`, and `runs`: name, seed and last value of each key."""
  ends = [
      {"name": r["name"], "seed": r["seed"]} | {k: r[k][-1] for k in keys}
      for r in runs
  ]
  return {"folder": str(folder), "runs": ends}


def mean_and_range(values: Sequence[float], digits: int) -> str:
  """Returns "mean (least to most)"."""
  text = f"{np.mean(values):.{digits}f}"
  if len(values) == 1:
    return text
  return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def print_table(
    rows: Sequence[Sequence[str]], path: pathlib.Path | None = None
) -> None:
  """Prints rows as Markdown, the first as its head, and writes them to path."""
  lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
  text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
  if path is not None:
    path.write_text(text)
  print(text, file=sys.stderr)

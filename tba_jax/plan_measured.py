# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of `plan` that reads how fast an earlier run was. No JAX here."""

import dataclasses
import math
import pathlib

from tba_jax.report import load
from tba_jax.report import tables
from tba_jax.report import timeline


@dataclasses.dataclass(frozen=True)
class Measured:
  """Busy seconds of an earlier run.

  generate_s: of the mean searcher.
  train_s: of the trainer.
  num_searchers: of that run.
  sampled, trained: completions in those seconds.
  staleness: mean of its steps, None where not written.
  overlap: share of the ideal, None where not written.
  """

  generate_s: float
  train_s: float
  num_searchers: int
  sampled: float
  trained: float
  staleness: float | None
  overlap: float | None


def measured(workdir: str) -> Measured:
  """Returns what a run measured, from its summary, spans and metrics.

  Raises:
    ValueError: there is no such run, or nothing is measured in it yet.
  """
  run = load.read_run(workdir)
  generate_s = run.summary.get("generate_busy_s")
  train_s = run.summary.get("train_busy_s")
  if not (load.is_number(generate_s) and load.is_number(train_s)):
    spans = timeline.measured_overlap(run) or {}
    generate_s, train_s = spans.get("generate_s"), spans.get("train_s")
  settings = run.config.get("config", {})
  get = lambda section, name: settings.get(section, {}).get(name)
  count = get("search", "num_searchers")
  if not generate_s or not train_s or not load.is_number(count):
    raise ValueError(f"{workdir}: nothing is measured there yet")
  steps, completions = load.column(run.records, "total/completions")
  batch = get("train", "prompts_per_batch"), get(
      "train", "completions_per_prompt"
  )
  known = all(load.is_number(n) for n in batch)
  _, staleness = load.column(run.records, "replay/staleness_steps")
  overlap = run.summary.get("overlap_of_ideal")
  return Measured(
      generate_s=generate_s,
      train_s=train_s,
      num_searchers=int(count),
      sampled=float(completions[-1]) if len(completions) else 0.0,
      trained=float(len(steps) * math.prod(batch)) if known else 0.0,
      staleness=float(staleness.mean()) if len(staleness) else None,
      overlap=overlap if load.is_number(overlap) else None,
  )


def expected_searchers(workdir: str | None) -> str:
  """Returns how many searchers keep the trainer busy, from an earlier run."""
  if not workdir or not pathlib.Path(workdir).is_dir():
    return "unknown: no earlier run in --workdir"
  try:
    found = measured(workdir)
  except ValueError:
    return "unknown: nothing measured in --workdir yet"
  count = math.ceil(found.generate_s * found.num_searchers / found.train_s)
  return (
      f"{count}, measured there: G {tables.duration(found.generate_s)} busy"
      f" for each of {found.num_searchers}, T {tables.duration(found.train_s)}"
  )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares several run directories in one HTML file; see `page`."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from tba_jax.config import differences
from tba_jax.config import load as load_config
from tba_jax.report import curves
from tba_jax.report import diagnosis
from tba_jax.report import page
from tba_jax.report import run_reader
from tba_jax.report import tables
from tba_jax.report import timeline
from tba_jax.run import metrics
from tba_jax.run import text

SCRIPTS = ("page.js", "charts.js", "compare.js")
# The page has 8 colours; more curves in a figure are unreadable.
MAX_RUNS = 16
# A folder with any of these files is a run directory.
_SIGNS = ("config.json", "metrics.jsonl")
# Keys that differ between any two runs, and are not settings.
_NO_SETTINGS = ("run_id", "created", "format")
_MISSING = "–"


def find_runs(operands: Sequence[epath.PathLike]) -> list[epath.Path]:
  """Returns run directories: the operands, or the runs inside them.

  Raises ValueError if an operand is not a directory, or for too many runs.
  """
  runs: dict[epath.Path, None] = {}
  for operand in operands:
    folder = epath.Path(operand)
    if not folder.is_dir():
      raise ValueError(f"no run directory at {folder}")
    inside = [folder] if _is_run(folder) else sorted(
        path for path in folder.iterdir() if path.is_dir() and _is_run(path)
    )  # fmt: skip
    # An empty directory is a run that has not written anything yet.
    runs |= dict.fromkeys(inside or [folder])
  if len(runs) > MAX_RUNS:
    raise ValueError(
        f"report compares up to {MAX_RUNS} runs, found {len(runs)}"
    )
  return list(runs)


def _is_run(folder: epath.Path) -> bool:
  return any((folder / name).exists() for name in _SIGNS)


def names(paths: Sequence[epath.Path]) -> list[str]:
  """Returns a short, distinct name for each path."""
  depth = 1
  while True:
    short = ["/".join(path.parts[-depth:]) for path in paths]
    if len(set(short)) == len(paths) or depth > 20:
      return [text.printable(name, 60, one_line=True) for name in short]
    depth += 1


def settings(runs: Sequence[run_reader.RunData]) -> list[dict[str, Any]]:
  """Returns rows of name and values: settings and versions that differ."""
  # Settings lose the prefix `config.`; versions and the like have none.
  flat = [
      {
          key.removeprefix("config."): value
          for key, value in load_config.flatten(run.config).items()
      }
      for run in runs
  ]
  return [
      {
          "name": text.printable(key, 120),
          "values": [
              tables.printable(value) if side else _MISSING
              for side, value in zip(flat, values, strict=True)
          ],
      }
      # The run may be someone else's, so its code is not imported.
      for key, values in differences.between(*flat, imports=False)
      if key not in _NO_SETTINGS
  ]


def different_tasks(runs: Sequence[run_reader.RunData]) -> list[str]:
  """Returns each run's task and fields if they differ, else []."""
  tasks = [run.setting("task") for run in runs]
  shown = [
      ", ".join(f"{key} {value}" for key, value in tables.flat_config(task))
      if isinstance(task, dict)
      else _MISSING
      for task in tasks
  ]
  return shown if len(set(shown)) > 1 else []


def figures(runs: Sequence[run_reader.RunData]) -> list[dict[str, Any]]:
  """Returns rows of final figures: a name, and one value per run."""
  columns: list[dict[str, str]] = []
  for run in runs:
    column = {
        "state": tables.state(run)["words"],
        "verdict": diagnosis.verdict(run).sentence,
    }
    for row in tables.compare(*tables.evaluations(run)):
      column[f"{row['name']}, before"] = row["before"]
      column[f"{row['name']}, after"] = row["after"]
    _, rewards = run_reader.column(run.records, "train/reward_mean")
    if len(rewards):
      column["reward of the last batch"] = text.number(float(rewards[-1]))
    for fact in tables.facts(tables.outcome(run)):
      column[fact["name"]] = fact["value"]
    columns.append(column)
  keys = dict.fromkeys(key for column in columns for key in column)
  return [
      {"name": key, "values": [c.get(key, _MISSING) for c in columns]}
      for key in keys
  ]


def over_seeds(
    runs: Sequence[run_reader.RunData], labels: Sequence[str]
) -> dict[str, Any]:
  """Returns pooled held-out results of runs that differ only in their seeds.

  Returns:
    `groups`: names of the runs of each group of several seeds; `rows`: a name,
    and per group "mean (least to largest)" of the last evaluations. {} if no
    such group has finished runs.
  """
  groups: dict[str, list[int]] = {}
  for number, run in enumerate(runs):
    config = load_config.flatten(run.config.get("config") or {})
    if config and run.eval.get("after"):
      rest = {key: value for key, value in config.items() if key != "seed"}
      groups.setdefault(repr(sorted(rest.items())), []).append(number)
  chosen = [members for members in groups.values() if len(members) > 1]
  after = [tables.evaluations(run)[1] for run in runs]
  shown = tables.EVALUATIONS | {
      key: (name, "number") for key, name in metrics.more_rows(*after).items()
  }
  rows = []
  for key, (name, style) in shown.items():
    cells = []
    for members in chosen:
      values = [after[n].get(key) for n in members]
      cell = _MISSING
      if all(map(text.is_number, values)):
        mean, low, high = (
            text.number(value, style)
            for value in (sum(values) / len(values), min(values), max(values))
        )
        cell = f"{mean} ({low} to {high})"
      cells.append(cell)
    if set(cells) - {_MISSING}:
      rows.append({"name": name, "values": cells})
  group_labels = [", ".join(labels[n] for n in members) for members in chosen]
  return {"groups": group_labels, "rows": rows} if rows else {}


def charts(
    runs: Sequence[run_reader.RunData], labels: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Returns the known and the other charts, with one series per run.

  A chart of several metrics is split into one chart per metric.
  """
  standard: dict[str, dict[str, Any]] = {}
  custom: dict[str, dict[str, Any]] = {}
  for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
    records = curves.with_evaluations(run.records, run.eval)
    start = timeline.origin(run)
    for into, some in (
        (standard, curves.known_charts(records)),
        (custom, curves.other_charts(records)),
    ):
      for chart in some:
        for series in chart["series"]:
          title = chart["title"]
          if len(chart["series"]) > 1:
            title += f": {series['label']}"
          shared = {**chart, "title": title, "series": []}
          series |= {"label": label, "run": number, "origin": start}
          into.setdefault(title, shared)["series"].append(series)
  return list(standard.values()), list(custom.values())


def page_data(
    runs: Sequence[run_reader.RunData], labels: Sequence[str]
) -> dict[str, Any]:
  """Returns the data for the page's scripts."""
  standard, custom = charts(runs, labels)
  time = []
  kinds: dict[str, bool] = {}
  for run, label in zip(runs, labels, strict=True):
    for row in timeline.where_time_went(run):
      time.append({**row, "run": label})
    data = timeline.timeline(run)
    kinds |= dict(zip(data.get("kinds", ()), data.get("waits", ())))
  return {
      "origin": 0.0,
      "runs": list(labels),
      "axes": [curves.axes(run.records) for run in runs],
      "charts": standard,
      "other_charts": custom,
      "timeline": {"kinds": list(kinds), "waits": list(kinds.values())},
      "time": time,
      "events": [],
  }


def render(runs: Sequence[run_reader.RunData]) -> str:
  """Returns the page of several runs."""
  labels = names([run.workdir for run in runs])
  return page.render_template(
      "compare.html.j2",
      SCRIPTS,
      page_data(runs, labels),
      labels=labels,
      tasks=different_tasks(runs),
      figures=figures(runs),
      over_seeds=over_seeds(runs, labels),
      settings=settings(runs),
      num_settings=max(len(list(tables.flat_config(r.config))) for r in runs),
      advice=list(zip(labels, map(diagnosis.advice, runs), strict=True)),
  )


def write_comparison(paths: Sequence[epath.PathLike]) -> epath.Path:
  """Writes `compare.html` next to the first of several runs; returns it."""
  runs = [run_reader.read_run(path) for path in paths]
  path = runs[0].workdir.parent / "compare.html"
  page.write_page(path, render(runs))
  return path

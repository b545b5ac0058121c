# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `report` program: a run directory to one HTML file that needs no network.

The page holds its data as JSON and draws it itself. It asks for nothing: a
content security policy forbids requests, and text of a model is shown as text
only.
"""

from collections.abc import Sequence
import datetime
import json
import pathlib
from typing import Any

from etils import epath
import jinja2
import markupsafe

from tba_jax.report import advice
from tba_jax.report import curves
from tba_jax.report import diversity
from tba_jax.report import held_out
from tba_jax.report import load
from tba_jax.report import odd_completions
from tba_jax.report import tables
from tba_jax.report import text
from tba_jax.report import timeline
from tba_jax.report import trace

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_SCRIPTS = ("page.js", "charts.js", "timeline.js", "samples.js", "start.js")


def embedded_json(value: Any) -> markupsafe.Markup:
  """Returns JSON that cannot end the script element it stands in."""
  out = json.dumps(value, allow_nan=False, separators=(",", ":"))
  for char in "<>&":
    out = out.replace(char, f"\\u{ord(char):04x}")
  return markupsafe.Markup(out)


def _page_data(run: load.Run, start: float) -> dict[str, Any]:
  """Returns what the page's scripts draw."""
  records = curves.with_evaluations(run.records, run.eval)
  return {
      "origin": start,
      "axes": [curves.axes(run.records)],
      "charts": curves.known_charts(records),
      "other_charts": curves.other_charts(records),
      "sft_charts": curves.other_charts(run.sft_records, exclude=False),
      "staleness": curves.sum_histograms(
          run.records, "replay/staleness_histogram"
      ),
      "uses": curves.last_histogram(run.records, "replay/use_count_histogram")
      or curves.last_histogram(run.records, "replay/use_count"),
      "staleness_over_time": curves.histogram_over_time(
          run.records, "replay/staleness_histogram"
      ),
      "uses_over_time": curves.histogram_over_time(
          run.records, "replay/use_count_histogram"
      ),
      "timeline": timeline.timeline(run),
      "time": timeline.where_time_went(run),
      "events": tables.events(run, start),
      "samples": run.samples,
      "held_out": held_out.side_by_side(*tables.evaluations(run)),
      "num_samples": run.num_samples,
  }


def render_template(
    template: str, scripts: Sequence[str], data: Any, **values: Any
) -> str:
  """Returns a page: its template, the style, its scripts and its data."""
  environment = jinja2.Environment(
      loader=jinja2.FileSystemLoader(_TEMPLATES),
      autoescape=True,
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
  )
  read = lambda name: markupsafe.Markup((_TEMPLATES / name).read_text("utf-8"))
  return environment.get_template(template).render(
      style=read("report.css"),
      scripts=[read(name) for name in scripts],
      data=embedded_json(data),
      **values,
  )


def render(run: load.Run) -> str:
  """Returns the page of a run."""
  before, after = tables.evaluations(run)
  start = timeline.origin(run)
  began = datetime.datetime.fromtimestamp(start, datetime.UTC)
  settings = run.config.get("config", run.config)
  task = settings.get("task") if isinstance(settings, dict) else None
  return render_template(
      "report.html.j2",
      _SCRIPTS,
      _page_data(run, start),
      name=text.printable(run.workdir.name or str(run.workdir), 120),
      task=text.printable(str(task["name"]), 60)
      if isinstance(task, dict) and "name" in task
      else "",
      began=began.strftime("%Y-%m-%d %H:%M UTC") if start else "",
      state=tables.state(run),
      headline=tables.headline(run),
      before_after=tables.before_after(run),
      facts=[
          *tables.facts(run, timeline.measured_overlap(run)),
          *odd_completions.facts(run),
      ],
      other_facts=tables.other_facts(run),
      advice=advice.advice(run, timeline.where_time_went(run)),
      ledger=tables.ledger(run),
      diversity=diversity.diversity(before, after),
      num_events=run.num_events,
      config=list(tables.flat_config(run.config)),
      skipped=[
          (text.printable(name, 120), n)
          for name, n in sorted(run.skipped.items())
      ],
  )


def write_report(
    workdir: epath.PathLike, out: epath.PathLike | None = None
) -> epath.Path:
  """Writes the report of a run and its trace; returns the report's path.

  The trace is `trace.json` beside the report.

  Args:
    workdir: the run directory; the run may still go on, or have been killed.
    out: the file to write, default `report.html` in the run directory.

  Raises:
    ValueError: there is no such directory.
  """
  return _write(load.read_run(workdir), out)


def conclude(workdir: epath.PathLike) -> tuple[epath.Path, list[str]]:
  """Writes the report as `write_report`; also returns what it advises."""
  run = load.read_run(workdir)
  return _write(run, None), advice.advice(run, timeline.where_time_went(run))


def _write(run: load.Run, out: epath.PathLike | None) -> epath.Path:
  path = epath.Path(out) if out else run.workdir / "report.html"
  path.parent.mkdir(parents=True, exist_ok=True)
  write_page(path, render(run))
  trace.write_trace(run, path.parent / "trace.json", timeline.origin(run))
  return path


def write_page(path: epath.Path, page: str) -> None:
  """Replaces a file by a page, whole or not at all."""
  partial = path.parent / f".{path.name}.partial"
  # Bytes: a surrogate that slipped through must not stop the report.
  partial.write_bytes(page.encode("utf-8", "replace"))
  partial.replace(path)

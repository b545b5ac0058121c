# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a run directory as one HTML file that needs no network.

The page holds its data as JSON and draws it with its own scripts. A content
security policy forbids requests, and a model's text is never markup.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
import pathlib
from typing import Any

from etils import epath
import jinja2
import markupsafe

from tba_jax.report import curves
from tba_jax.report import diagnosis
from tba_jax.report import run_reader
from tba_jax.report import tables
from tba_jax.report import timeline
from tba_jax.run import text
from tba_jax.system import jsonl

# Limits on the evaluations' completions that are shown.
MAX_PROMPTS = 24
MAX_COMPLETIONS = 16
MAX_DISTINCT = 32


def _by_prompt(
    evaluation: Mapping[str, Any],
) -> dict[tuple[str, str], list[dict]]:
  """Returns (prompt's id, prompt) -> sample records of an evaluation.

  Prompts of different problems may have the same text.
  """
  out: dict[tuple[str, str], list[dict]] = {}
  records = evaluation.get("samples")
  for record in records if isinstance(records, list) else []:
    if isinstance(record, dict) and "completion" in record:
      names = "prompt_id", "prompt"
      key = tuple(str(record.get(name, "")) for name in names)
      out.setdefault(key, []).append(record)
  return out


def held_out_side_by_side(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns rows of a prompt and its samples in each of two evaluations."""
  old, new = _by_prompt(before), _by_prompt(after)
  shown = lambda records: [
      run_reader.printable_sample(record)
      for record in records[:MAX_COMPLETIONS]
  ]
  return [
      {
          "prompt": text.printable(prompt[1], run_reader.MAX_PROMPT_CHARS),
          "before": shown(old.get(prompt, [])),
          "after": shown(new.get(prompt, [])),
      }
      for prompt in list(dict.fromkeys([*old, *new]))[:MAX_PROMPTS]
  ]


def _distinct(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns distinct completions with reward and count, best first."""
  seen: dict[str, dict[str, Any]] = {}
  for record in records:
    completion, reward = str(record["completion"]), record.get("reward")
    entry = seen.setdefault(
        completion,
        {
            "text": text.printable(completion, 300, one_line=True),
            "reward": reward if text.is_number(reward) else None,
            "count": 0,
        },
    )
    entry["count"] += 1
  worst = float("-inf")  # Unjudged completions come last.
  order = lambda e: (
      -(worst if e["reward"] is None else e["reward"]),
      -e["count"],
  )
  return sorted(seen.values(), key=order)[:MAX_DISTINCT]


def diversity(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns rows of a prompt and its distinct completions in each evaluation.

  Prompts in both evaluations come first.
  """
  old, new = _by_prompt(before), _by_prompt(after)
  prompts = [p for p in old if p in new]
  prompts += [p for p in (*old, *new) if not (p in old and p in new)]
  return [
      {
          "prompt": text.printable(prompt[1], 300, one_line=True),
          "before": _distinct(old.get(prompt, [])),
          "after": _distinct(new.get(prompt, [])),
      }
      for prompt in prompts[:MAX_PROMPTS]
  ]


_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_SCRIPTS = ("page.js", "charts.js", "timeline.js", "samples.js", "start.js")


def embedded_json(value: Any) -> markupsafe.Markup:
  """Returns JSON that cannot close its script element."""
  out = json.dumps(value, allow_nan=False, separators=(",", ":"))
  for char in "<>&":
    out = out.replace(char, f"\\u{ord(char):04x}")
  return markupsafe.Markup(out)


def _page_data(run: run_reader.RunData, start: float) -> dict[str, Any]:
  """Returns the data for the page's scripts."""
  records = curves.with_evaluations(run.records, run.eval)
  charts, others = curves.known_charts(records), curves.other_charts(records)
  for some in (charts, others):
    curves.add_counterfactuals(some, run.counterfactuals, run.records)
  return {
      "origin": start,
      "axes": [curves.axes(run.records)],
      "charts": charts,
      "other_charts": others,
      "sft_charts": curves.other_charts(run.sft_records, exclude=False),
      "staleness": curves.sum_histograms(
          run.records, "replay/staleness_histogram"
      ),
      "uses": curves.last_histogram(run.records, "replay/use_count_histogram"),
      "staleness_over_time": curves.histogram_over_time(
          run.records, "replay/staleness_histogram"
      ),
      "uses_over_time": curves.histogram_over_time(
          run.records, "replay/use_count_histogram"
      ),
      "timeline": timeline.timeline(run),
      "time": timeline.where_time_went(run),
      "events": tables.events(run, start),
      "changes": tables.changes(run),
      "samples": run.samples,
      "held_out": held_out_side_by_side(*tables.evaluations(run)),
      "num_samples": run.num_samples,
  }


def render_template(
    template: str, scripts: Sequence[str], data: Any, **values: Any
) -> str:
  """Returns a page with its style, scripts and data inlined."""
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


def _render(
    run: run_reader.RunData, verdict: diagnosis.Finding, advice: Sequence[str]
) -> str:
  """Returns the page of a run."""
  before, after = tables.evaluations(run)
  start = timeline.origin(run)
  began = datetime.datetime.fromtimestamp(start, datetime.UTC)
  task = run.setting("task", "name")
  return render_template(
      "report.html.j2",
      _SCRIPTS,
      _page_data(run, start),
      name=text.printable(run.workdir.name or run.workdir, 120),
      task="" if task is None else text.printable(task, 60),
      began=began.strftime("%Y-%m-%d %H:%M UTC") if start else "",
      state=tables.state(run),
      verdict=verdict,
      before_after=tables.compare(before, after),
      facts=tables.facts(tables.outcome(run)),
      advice=advice,
      incidents=diagnosis.incidents(run),
      ledger=tables.ledger(run),
      diversity=diversity(before, after),
      num_events=run.num_events,
      changes=tables.changes(run),
      config=list(tables.flat_config(run.config)),
      damaged=[text.printable(line, 500) for line in run.damaged],
      skipped=[
          (text.printable(name, 120), n)
          for name, n in sorted(run.skipped.items())
      ],
  )


def write_report(
    workdir: epath.PathLike, out: epath.PathLike | None = None
) -> epath.Path:
  """Writes `report.html` (or `out`), and `trace.json` in the same folder.

  The run may still be in progress, or have been killed. Returns the page's
  path; raises ValueError if the directory does not exist.
  """
  return conclude(workdir, out)[0]


def conclude(
    workdir: epath.PathLike, out: epath.PathLike | None = None
) -> tuple[epath.Path, diagnosis.Finding, list[str]]:
  """Writes the report; returns its path, the verdict and the advice."""
  run = run_reader.read_run(workdir)
  verdict, advice = diagnosis.verdict(run), diagnosis.advice(run)
  path = epath.Path(out) if out else run.workdir / "report.html"
  write_page(path, _render(run, verdict, advice))
  timeline.write_trace(run, path.parent / "trace.json", timeline.origin(run))
  return path, verdict, advice


def write_page(path: epath.Path, page: str) -> None:
  """Replaces a file by a page atomically."""
  # A lone surrogate must not stop the report.
  with jsonl.replacing(path) as file:
    file.write(page.encode("utf-8", "replace"))

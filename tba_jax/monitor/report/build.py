# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `report` program: a run directory to one HTML file that needs no network.

The page holds its data as JSON and draws it itself. It asks for nothing: a
content security policy forbids requests, and text of a model is shown as text
only.
"""

from collections.abc import Iterator, Mapping, Sequence
import datetime
import json
import pathlib
from typing import Any

from etils import epath
import jinja2
import markupsafe

from tba_jax.monitor.report import advice
from tba_jax.monitor.report import curves
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables
from tba_jax.monitor.report import timeline

# Completions of held-out prompts, of the first and the last checkpoint.


MAX_PROMPTS = 24
MAX_COMPLETIONS = 16


def _by_prompt(evaluation: Mapping[str, Any]) -> dict[str, list[dict]]:
  out: dict[str, list[dict]] = {}
  records = evaluation.get("samples")
  for record in records if isinstance(records, list) else []:
    if isinstance(record, dict) and "completion" in record:
      mine = out.setdefault(str(record.get("prompt", "")), [])
      if len(mine) < MAX_COMPLETIONS:
        mine.append(load.printable_sample(record))
  return out


def held_out_side_by_side(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns rows prompt, before, after for the prompts of either evaluation.

  Args:
    before, after: evaluations with `samples`, records as `samples.jsonl` has
      them; what else stands there is left out.
  """
  old, new = _by_prompt(before), _by_prompt(after)
  return [
      {
          "prompt": load.printable(prompt, load.MAX_PROMPT_CHARS),
          "before": old.get(prompt, []),
          "after": new.get(prompt, []),
      }
      for prompt in list(dict.fromkeys([*old, *new]))[:MAX_PROMPTS]
  ]


# Held-out completions before and after, prompt by prompt.


MAX_COMPLETIONS = 32


def _completions(
    record: Mapping[str, Any],
) -> Iterator[tuple[str, float | None]]:
  """Yields (text, reward) of an evaluation's example record."""
  many = record.get("completions")
  if not isinstance(many, list):
    many = [record] if "completion" in record else []
  rewards = record.get("rewards")
  for i, one in enumerate(many):
    reward = None
    if isinstance(one, dict):
      reward = one.get("reward")
      one = one.get("completion", one.get("text", ""))
    elif isinstance(rewards, list) and i < len(rewards):
      reward = rewards[i]
    yield str(one), reward if load.is_number(reward) else None


def _counts_by_prompt(evaluation: Mapping[str, Any]) -> dict[str, list[dict]]:
  """Returns prompt -> distinct completions with reward and count."""
  out: dict[str, dict[str, dict[str, Any]]] = {}
  records = evaluation.get("samples")
  for record in records if isinstance(records, list) else []:
    if not isinstance(record, dict):
      continue
    prompt = str(record.get("prompt", ""))
    seen = out.setdefault(prompt, {})
    for completion, reward in _completions(record):
      entry = seen.setdefault(
          completion,
          {
              "text": load.printable(completion, 300, one_line=True),
              "reward": reward,
              "count": 0,
          },
      )
      entry["count"] += 1
  order = lambda e: (-(e["reward"] or 0.0), -e["count"])
  return {
      prompt: sorted(seen.values(), key=order)[:MAX_COMPLETIONS]
      for prompt, seen in out.items()
  }


def diversity(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns rows prompt, before, after for the prompts of both evaluations.

  Args:
    before, after: evaluations with `samples`: records with `prompt` and either
      `completion` and `reward`, or `completions` and `rewards`.
  """
  old, new = _counts_by_prompt(before), _counts_by_prompt(after)
  # Prompts seen on both sides first: there the two can be compared.
  prompts = [p for p in old if p in new]
  prompts += [p for p in (*old, *new) if not (p in old and p in new)]
  return [
      {
          "prompt": load.printable(prompt, 300, one_line=True),
          "before": old.get(prompt, []),
          "after": new.get(prompt, []),
      }
      for prompt in prompts[:MAX_PROMPTS]
  ]


# Figures of completions that are not as the others; none where there are none.
#
# Those that could not be judged, and those with tokens of several versions.


_FAILED = "reward/failed_"
_MIXED = "sampler/mixed_version_share"


def _last(run: load.Run) -> dict[str, Any]:
  """Returns the newest of each of the metrics that count over the run."""
  out: dict[str, Any] = {}
  for record in run.records:
    for name, value in record.items():
      if (name == _MIXED or name.startswith(_FAILED)) and load.is_number(value):
        out[name] = value
  return out


def not_judged(run: load.Run) -> dict[str, int]:
  """Returns how many completions have no reward of the task's, by cause."""
  found = run.summary.get("reward_failures")
  if not isinstance(found, Mapping):
    found = {
        name.removeprefix(_FAILED): value
        for name, value in _last(run).items()
        if name.startswith(_FAILED)
    }
  return {
      str(cause): int(n)
      for cause, n in found.items()
      if load.is_number(n) and n
  }


def odd_completion_facts(run: load.Run) -> list[dict[str, str]]:
  """Returns figures as `tables.facts` does: name, value and what it means."""
  rows = []
  failures = not_judged(run)
  if failures:
    causes = ", ".join(f"{n:,} {cause}" for cause, n in failures.items())
    note = f"by cause: {causes}; each has reward.fallback as its reward"
    rows.append(("not judged", f"{sum(failures.values()):,}", note))
  share = run.summary.get("mixed_version_share", _last(run).get(_MIXED))
  if load.is_number(share) and share:
    note = (
        "of completions have tokens of more than one version of the params"
        " (sampling.in_flight); the version shown is that of the first token"
    )
    rows.append(("several versions", f"{100 * share:.1f} %", note))
  return [
      {"name": name, "value": value, "note": load.printable(note, 400)}
      for name, value, note in rows
  ]


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
      "held_out": held_out_side_by_side(*tables.evaluations(run)),
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
      name=load.printable(run.workdir.name or str(run.workdir), 120),
      task=load.printable(str(task["name"]), 60)
      if isinstance(task, dict) and "name" in task
      else "",
      began=began.strftime("%Y-%m-%d %H:%M UTC") if start else "",
      state=tables.state(run),
      headline=tables.headline(run),
      before_after=tables.before_after(run),
      facts=[
          *tables.facts(run, timeline.measured_overlap(run)),
          *odd_completion_facts(run),
      ],
      other_facts=tables.other_facts(run),
      advice=advice.advice(run, timeline.where_time_went(run)),
      ledger=tables.ledger(run),
      diversity=diversity(before, after),
      num_events=run.num_events,
      config=list(tables.flat_config(run.config)),
      skipped=[
          (load.printable(name, 120), n)
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
  timeline.write_trace(run, path.parent / "trace.json", timeline.origin(run))
  return path


def write_page(path: epath.Path, page: str) -> None:
  """Replaces a file by a page, whole or not at all."""
  partial = path.parent / f".{path.name}.partial"
  # Bytes: a surrogate that slipped through must not stop the report.
  partial.write_bytes(page.encode("utf-8", "replace"))
  partial.replace(path)

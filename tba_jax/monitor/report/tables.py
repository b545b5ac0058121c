# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of the page: state, before and after, ledger, events, config."""

from collections.abc import Iterator, Mapping
import time
from typing import Any

from tba_jax.monitor.report import load

# A run that wrote its state longer ago than this is taken to have stopped.
ALIVE_S = 30.0
UNITS = ("prompts", "completions", "tokens")
OVERLAP_FORMULA = (
    "max(G, T) / W: busy seconds of the mean searcher (G) and of the trainer"
    " (T) in W wall-clock seconds; 1 is the ideal, the slower side never waits"
)
# Terms of the ledger's right side that have a reason or cause each.
_SPLIT_TERMS = ("rejected", "lost")

# Name of an evaluation's value -> how it is called, and how it is written.
EVALUATIONS = {
    "pass_at_1": ("pass@1", "percent"),
    "pass_at_k": ("pass@k", "percent"),
    "win_rate": ("win-rate", "percent"),
    "greedy_win_rate": ("win-rate, greedy", "percent"),
    "mean_reward": ("mean reward", "number"),
    "gold_reward": ("judge's score", "number"),
    "distinct_correct": ("distinct right solutions a prompt", "number"),
    "distinct_correct_per_solved": (
        "distinct right solutions a solved prompt",
        "number",
    ),
    "mean_length": ("mean length, tokens", "number"),
    "stop_rate": ("stopped by itself", "percent"),
    "num_prompts": ("held-out prompts", "count"),
}


def number(value: Any, style: str = "number") -> str:
  """Returns a value as a reader wants it; "–" where there is none."""
  if isinstance(value, bool):
    return "yes" if value else "no"
  if not load.is_number(value):
    return "–" if value is None else load.printable(str(value), 200)
  if style == "percent":
    return f"{100 * value:.1f} %"
  if style == "count" or isinstance(value, int):
    return f"{value:,.0f}"
  if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
    return f"{value:.3g}"
  return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def duration(seconds: Any) -> str:
  """Returns seconds as `1:02 h`, `3:20 min`, `4.2 s` or `50 ms`."""
  if not load.is_number(seconds):
    return "–"
  if 0 < abs(seconds) < 1:
    return f"{1000 * seconds:.0f} ms"
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(int(seconds), 60)
  if minutes < 60:
    return f"{minutes}:{rest:02d} min"
  return f"{minutes // 60}:{minutes % 60:02d} h"


def state(run: load.Run, now: float | None = None) -> dict[str, str]:
  """Returns whether the run is finished, running or stopped, and its words."""
  now = time.time() if now is None else now
  if run.summary:
    ended = run.summary.get("exit_reason") or run.summary.get("error")
    words = "finished" if not ended else str(ended)
    return {"name": "finished", "words": load.printable(words, 200)}
  last = (r[-1].get("time") for r in (run.records, run.sft_records) if r)
  seen = next(filter(load.is_number, (run.status.get("time"), *last)), None)
  if seen is None:
    return {"name": "stopped", "words": "nothing measured yet"}
  if now - seen < ALIVE_S:
    return {"name": "running", "words": "running"}
  return {
      "name": "stopped",
      "words": f"no summary; last sign of life {duration(now - seen)} ago",
  }


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, dict) else {}


def evaluations(run: load.Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
  """Returns the evaluations before and after, from what files there are."""
  before = {**_mapping(run.eval.get("before"))}
  before = {**_mapping(run.summary.get("before")), **before}
  after = {**_mapping(run.eval.get("after"))}
  after = {**_mapping(run.summary.get("after")), **after}
  return before, after


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, str]]:
  """Returns rows name, before, after, change; with +- 2 standard errors."""
  k = before.get("k", after.get("k"))
  rows = []
  for key, (name, style) in EVALUATIONS.items():
    if key not in before and key not in after:
      continue
    values = before.get(key), after.get(key)
    errors = before.get(f"{key}_stderr"), after.get(f"{key}_stderr")
    cells = []
    for value, error in zip(values, errors, strict=True):
      cell = number(value, style)
      if load.is_number(value) and load.is_number(error):
        cell += f" ± {number(2 * error, style)}"
      cells.append(cell)
    change = ""
    if all(map(load.is_number, values)) and style != "count":
      difference = values[1] - values[0]
      sign = "+" if difference >= 0 else "−"
      shown = number(abs(difference), style)
      change = sign + shown.replace(" %", " points")
    if load.is_number(k):
      name = name.replace("pass@k", f"pass@{k}")
    rows.append(
        {"name": name, "before": cells[0], "after": cells[1], "change": change}
    )
  return rows


def before_after(run: load.Run) -> list[dict[str, str]]:
  """Returns the rows of `compare` for a run."""
  return compare(*evaluations(run))


def headline(run: load.Run) -> list[dict[str, str]]:
  """Returns the values that the page opens with, before and after."""
  before, after = evaluations(run)
  k = before.get("k", after.get("k"))
  rows = []
  for key in ("pass_at_1", "pass_at_k", "distinct_correct"):
    if not (load.is_number(before.get(key)) or load.is_number(after.get(key))):
      continue
    name, style = EVALUATIONS[key]
    if load.is_number(k):
      name = name.replace("pass@k", f"pass@{k}")
    cells = number(before.get(key), style), number(after.get(key), style)
    rows.append(
        {"name": f"held-out {name}", "before": cells[0], "after": cells[1]}
    )
  return rows


def _restarts(run: load.Run) -> tuple[str, str]:
  """Returns how many restarts there were, and of what."""
  restarts = run.summary.get("restarts")
  if not isinstance(restarts, dict):
    roles = [
        str(e.get("role", "?"))
        for e in run.events
        if e.get("kind") == "restart"
    ]
    restarts = {role: roles.count(role) for role in roles}
  counts = {role: n for role, n in restarts.items() if load.is_number(n) and n}
  words = ", ".join(f"{n} of {role}" for role, n in counts.items())
  note = f"processes started again: {words or 'none'}"
  return number(sum(counts.values()), "count"), load.printable(note, 200)


def facts(
    run: load.Run, overlap: Mapping[str, float] | None
) -> list[dict[str, str]]:
  """Returns the run's figures as name, value and what the value means."""
  summary = run.summary
  steps, stopped_by = summary.get("steps"), summary.get("stopped_by")
  if steps is None and run.records:
    steps = run.records[-1]["step"] + 1
  share = summary.get("overlap_of_ideal")
  if share is None:
    share = overlap["overlap_of_ideal"] if overlap else None
  closed = summary.get("ledger_closed", run.ledger.get("closed"))
  ages = [
      r["replay/staleness_steps"]
      for r in run.records
      if load.is_number(r.get("replay/staleness_steps"))
  ]
  staleness = summary.get("staleness_mean")
  if staleness is None and ages:
    staleness = sum(ages) / len(ages)
  rate = summary.get("completions_per_s")
  restarts, restarts_note = _restarts(run)
  formula = summary.get("overlap_formula")
  if not isinstance(formula, str):
    formula = OVERLAP_FORMULA
  overlap_note = load.printable(formula, 400)
  if overlap:
    overlap_note += (
        f". From the spans, compiling left out: G"
        f" {duration(overlap['generate_s'])}, T"
        f" {duration(overlap['train_s'])}, W {duration(overlap['wall_s'])}"
    )
  rows = [
      (
          "steps",
          number(steps, "count"),
          f"stopped by {stopped_by}" if stopped_by else "optimizer updates",
      ),
      ("wall clock", duration(summary.get("wall_s")), ""),
      ("completions", number(summary.get("completions"), "count"), "sampled"),
      ("completions/s", number(rate), "sampled, over the wall clock"),
      ("overlap of ideal", number(share), overlap_note),
      (
          "staleness",
          number(staleness),
          "steps between the weights that sampled and that learn, mean",
      ),
      ("restarts", restarts, restarts_note),
      (
          "ledger",
          "–" if closed is None else "closed" if closed else "OPEN",
          "each completion accounted for",
      ),
  ]
  return [{"name": n, "value": v, "note": note} for n, v, note in rows]


def other_facts(run: load.Run) -> list[dict[str, str]]:
  """Returns the scalars of the summary that `facts` does not show."""
  shown = {
      *("before", "after", "steps", "completions", "wall_s", "restarts"),
      *("completions_per_s", "overlap_of_ideal", "staleness_mean"),
      *("ledger_closed", "overlap_formula", "mixed_version_share"),
  }
  return [
      {"name": load.printable(str(name), 80), "value": number(value)}
      for name, value in run.summary.items()
      if name not in shown and not isinstance(value, dict | list)
  ]


def _terms(
    values: Mapping[str, Any], unit: str
) -> Iterator[tuple[str, str, Any]]:
  """Yields (term, reason, count) of a ledger of one unit."""
  for term, value in values.items():
    if isinstance(value, dict):
      by_unit = value.get(unit)
      if by_unit is not None and not isinstance(by_unit, dict):
        yield term, "", by_unit
        continue
      if isinstance(by_unit, dict):
        value = by_unit
      elif any(u in value for u in UNITS):
        continue
      for reason, count in value.items():
        if isinstance(count, dict):
          count = count.get(unit)
        if load.is_number(count):
          yield term, str(reason), count
    elif load.is_number(value):
      yield term, "", value


def ledger(run: load.Run) -> dict[str, Any]:
  """Returns the ledger's rows with one column a unit, and both sums.

  Reads `{unit: {term: n, "rejected": {reason: n}}}` as well as
  `{term: {unit: n}, "rejected": {reason: {unit: n}}}`.

  Returns:
    `rows` of the right side as name and counts, `generated` and `accounted`
    as counts, `closed` by unit, `units`; {} where there is no ledger.
  """
  source = _mapping(run.ledger or run.status.get("ledger"))
  by_unit: dict[str, dict[tuple[str, str], float]] = {}
  for unit in UNITS:
    inner = _mapping(source.get(unit)) or source
    found = {(t, reason): n for t, reason, n in _terms(inner, unit)}
    if ("generated", "") in found:
      by_unit[unit] = found
  if not by_unit:
    return {}
  units = list(by_unit)
  names = dict.fromkeys(key for found in by_unit.values() for key in found)
  known = {"trained_first_time", "in_buffer_untrained", "evicted_untrained"}
  known |= {"queued", *_SPLIT_TERMS}
  rows, sums = [], dict.fromkeys(units, 0)
  for term, reason in names:
    if term not in known:
      continue
    counts = [by_unit[unit].get((term, reason), 0) for unit in units]
    sums = {u: sums[u] + n for u, n in zip(units, counts, strict=True)}
    name = term.replace("_", " ") + (f": {reason}" if reason else "")
    rows.append(
        {
            "name": load.printable(name, 120),
            "counts": [number(n, "count") for n in counts],
        }
    )
  generated = [by_unit[unit]["generated", ""] for unit in units]
  accounted = [sums[unit] for unit in units]
  return {
      "units": units,
      "rows": rows,
      "generated": [number(n, "count") for n in generated],
      "accounted": [number(n, "count") for n in accounted],
      "difference": [
          number(g - a, "count")
          for g, a in zip(generated, accounted, strict=True)
      ],
      "closed": [g == a for g, a in zip(generated, accounted, strict=True)],
      "final": bool(run.ledger),
  }


def events(run: load.Run, origin: float) -> list[dict[str, Any]]:
  """Returns the newest events with seconds since the origin, printable."""
  rows = []
  for event in run.events:
    when = event.get("time")
    role = str(event.get("role") or "")
    rows.append(
        {
            "t": round(when - origin, 3) if load.is_number(when) else None,
            "kind": load.printable(str(event.get("kind", "")), 60),
            "role": load.printable(
                f"{role}-{event.get('index', 0)}" if role else "", 60
            ),
            "message": load.printable(str(event.get("message", "")), 500),
        }
    )
  return rows


def flat_config(
    config: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
  """Yields (dotted key, value) of a nested config, printable."""
  for key, value in config.items():
    name = f"{prefix}{key}"
    if isinstance(value, dict) and value:
      yield from flat_config(value, f"{name}.")
    else:
      shown = value if isinstance(value, str) else repr(value)
      yield load.printable(name, 120), load.printable(shown, 300)

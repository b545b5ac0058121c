# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of the page: state, before and after, figures, ledger, config."""

import collections
from collections.abc import Iterator, Mapping
import operator
import time
from typing import Any

from tba_jax.report import run_reader
from tba_jax.run import metrics
from tba_jax.run import text

# A run without activity for longer than this counts as stopped.
ALIVE_S = 30.0
UNITS = ("prompts", "completions", "tokens")

# Key of an evaluation -> its label and number style.
EVALUATIONS = {
    "pass_at_1": ("pass@1", "percent"),
    "greedy_pass_at_1": ("pass@1, greedy", "percent"),
    "pass_at_k": ("pass@k", "percent"),
    "win_rate": ("win-rate", "percent"),
    "greedy_win_rate": ("win-rate, greedy", "percent"),
    "mean_reward": ("mean reward", "number"),
    "failure_share": ("not judged", "percent"),
    "gold_reward": ("judge's score", "number"),
    "distinct_correct": ("distinct correct solutions per prompt", "number"),
    "distinct_correct_per_solved": (
        "distinct correct solutions per solved prompt",
        "number",
    ),
    "turns": ("turns", "number"),
    "mean_length": ("mean length, tokens", "number"),
    "stop_rate": ("stop rate", "percent"),
    "certificate/tv_lower": ("distance to the target, at least", "percent"),
    "certificate/tv_upper": ("distance to the target, at most", "percent"),
    "certificate/kl_lower": ("KL to the target, at least, nats", "number"),
    "certificate/kl_upper": (
        "KL to the target, clipped at 20 nats, at most",
        "number",
    ),
    "certificate/unfound_upper": (
        "target's mass not found, at most",
        "percent",
    ),
    "certificate/modes": ("target's effective solutions", "number"),
    "num_prompts": ("held-out prompts", "count"),
}

# Cause of a loss -> words.
_CAUSES = {"journal": "journal damaged", "searcher": "searchers gone"}


def state(run: run_reader.RunData, now: float | None = None) -> dict[str, str]:
  """Returns `name`, "finished", "running" or "stopped", and `words`."""
  now = time.time() if now is None else now
  if run.summary:
    return {"name": "finished", "words": "finished"}
  last = (r[-1].get("time") for r in (run.records, run.sft_records) if r)
  seen = next(filter(text.is_number, (run.status.get("time"), *last)), None)
  if seen is None:
    return {"name": "stopped", "words": "nothing measured yet"}
  if now - seen < ALIVE_S:
    return {"name": "running", "words": "running"}
  silent = text.duration(now - seen)
  words = f"no summary; last sign of life {silent} ago"
  return {"name": "stopped", "words": words}


def mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, Mapping) else {}


def evaluations(
    run: run_reader.RunData,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
  """Returns the evaluations before and after, from `eval.json` or summary."""
  before, after = (
      {**(run.summary.get(name) or {}), **(run.eval.get(name) or {})}
      for name in ("before", "after")
  )
  return before, after


def signed(value: float, style: str) -> str:
  """Formats a change with its sign; shares change by points."""
  shown = text.number(abs(value), style).replace(" %", " points")
  return ("+" if value >= 0 else "−") + shown


def error_text(error: float, style: str) -> str:
  """Formats an error; rounding noise is 0."""
  return text.number(error if error > 1e-9 else 0.0, style)


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, str]]:
  """Returns rows of name, before, after, change, with ± 2 standard errors."""
  k = before.get("k", after.get("k"))
  rows = []
  more = metrics.more_rows(before, after)
  shown = EVALUATIONS | {key: (name, "number") for key, name in more.items()}
  for key, (name, style) in shown.items():
    if key not in before and key not in after:
      continue
    if key == "failure_share" and not (before.get(key) or after.get(key)):
      continue
    values = before.get(key), after.get(key)
    cells = []
    for side, value in zip((before, after), values, strict=True):
      error = side.get(f"{key}_stderr")
      cell = text.number(value, style)
      if text.is_number(value) and text.is_number(error):
        cell += f" ± {error_text(2 * error, style)}"
      cells.append(cell)
    change = ""
    if all(map(text.is_number, values)) and style != "count":
      change = signed(values[1] - values[0], style)
    if text.is_number(k):
      name = name.replace("pass@k", f"pass@{k}")
    row = dict(name=name, before=cells[0], after=cells[1], change=change)
    rows.append(row)
  return rows


def outcome(run: run_reader.RunData) -> dict[str, Any]:
  """Returns `summary.json`, or its known part while the run is live."""
  figures: dict[str, Any] = {}
  if run.records:
    figures["steps"] = run.records[-1]["step"] + 1
  ages = run_reader.column(run.records, "replay/staleness_steps")[1]
  mixed = run_reader.column(run.records, "sampler/mixed_version_share")[1]
  if len(ages):
    figures["staleness_mean"] = float(ages.mean())
  if len(mixed):
    figures["mixed_version_share"] = float(mixed[-1])
  figures["restarts"] = collections.Counter(
      str(e.get("role", "?")) for e in run.events if e.get("kind") == "restart"
  )
  for name in ("overlap_of_ideal", "reward_failures", "sampled_by",
               "searchers_busy_share"):  # fmt: skip
    figures[name] = run.status.get(name)
  figures["trainer_busy_share"] = mapping(run.status.get("trainer")).get(
      "busy_share"
  )
  figures["ledger_closed"] = run.ledger.get("closed")
  figures["lost"] = lost_completions(run.ledger)
  figures["environment_tokens"] = run.ledger.get("environment_tokens")
  figures["unknown"] = run.ledger.get("unknown")
  figures["damage"] = metrics.damage(run.events)
  return figures | run.summary


def sum_text(counts: Any) -> str:
  """Returns a sum and its parts by name, such as "4 (3 exit, 1 nan)"."""
  amounts = {
      name: n for name, n in mapping(counts).items() if text.is_number(n) and n
  }
  parts = ", ".join(
      f"{n:,.0f} {text.printable(name, 20, one_line=True)}"
      for name, n in amounts.items()
  )
  total = text.number(sum(amounts.values()), "count")
  return f"{total} ({parts})" if parts else total


def lost_completions(ledger: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a ledger's lost completions by cause."""
  causes = mapping(ledger.get("lost"))
  return {k: mapping(v).get("completions") for k, v in causes.items()}


def _ledger_text(summary: Mapping[str, Any]) -> str:
  """Returns whether the ledger is closed, and what is known to be lost."""
  closed = summary.get("ledger_closed")
  if closed is None:
    return "–"
  words = ["closed" if closed else "OPEN"]
  counts = mapping(summary.get("lost")).items()
  lost = {_CAUSES.get(cause, cause): n for cause, n in counts}
  if (text_ := sum_text(lost)) != "0":
    number, _, causes = text_.partition(" ")
    words.append(f"{number} lost {causes}")
  unknown = summary.get("unknown")
  if isinstance(unknown, list) and unknown:
    words.append("more may be lost")
  return ", ".join(words)


def facts(summary: Mapping[str, Any]) -> list[dict[str, str]]:
  """Returns the figures of an `outcome` as name, value and note."""
  count = lambda value: text.number(value, "count")
  steps = count(summary.get("steps"))
  if stopped_by := summary.get("stopped_by"):
    steps += f" (stopped by {stopped_by})"
  rows = [
      ("steps", steps, "optimizer updates"),
      ("wall clock", text.duration(summary.get("wall_s")), ""),
      ("completions", count(summary.get("completions")), "sampled"),
      (
          "completions/s",
          text.number(summary.get("completions_per_s")),
          "sampled during training, over its wall-clock time",
      ),
      (
          "overlap of ideal",
          text.number(summary.get("overlap_of_ideal")),
          f"{metrics.OVERLAP_FORMULA}; 1 is ideal",
      ),
      (
          "staleness",
          text.number(summary.get("staleness_mean")),
          "mean number of steps between sampling and training",
      ),
      ("restarts", sum_text(summary.get("restarts")), "of processes"),
      (
          "ledger",
          _ledger_text(summary),
          "whether every completion is accounted for",
      ),
  ]
  given = summary.get("environment_tokens")
  if text.is_number(given) and given:
    note = "from environments, in no count of the ledger"
    rows.append(("environments' tokens", count(given), note))
  rows += _by_kind(mapping(summary.get("sampled_by")))
  failures = sum_text(summary.get("reward_failures"))
  if failures != "0":
    rows.append(("not judged", failures, "training completions, by cause"))
  damage = sum_text(summary.get("damage"))
  if damage != "0":
    rows.append(("damage", damage, "found in files of the run; see its events"))
  share = summary.get("mixed_version_share")
  if text.is_number(share) and share:
    note = "completions with tokens of more than one version of the params"
    rows.append(("several versions", text.number(share, "percent"), note))
  return [
      {
          "name": name,
          "value": text.printable(value, 200, one_line=True),
          "note": note,
      }
      for name, value, note in rows
  ]


def _by_kind(sampled_by: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """Returns a row for each kind of searcher, if they differ or have a price."""
  kinds = {
      kind: amounts
      for kind, amounts in sampled_by.items()
      if all(
          text.is_number(mapping(amounts).get(unit))
          for unit in ("completions", "tokens", "wall_s", "cost")
      )
  }
  if len(kinds) < 2 and not any(a["cost"] for a in kinds.values()):
    return []
  total = sum(a["tokens"] for a in kinds.values())
  rows = []
  for kind, amounts in sorted(kinds.items()):
    tokens, cost = amounts["tokens"], amounts["cost"]
    words = [
        f"{amounts['completions']:,.0f} completions",
        f"{tokens:,.0f} tokens ({tokens / max(total, 1):.0%})",
        text.duration(amounts["wall_s"]),
    ]
    if cost:
      price = cost / max(tokens, 1) * 1e6
      words.append(f"price {cost:.2g} ({price:,.2f} for a million tokens)")
    note = "searchers' time since their first version, and its price"
    rows.append((f"sampled by {kind}", ", ".join(words), note))
  return rows


def ledger(run: run_reader.RunData) -> dict[str, Any]:
  """Returns the ledger with one column per unit, or {}.

  Returns:
    `rows` of the right-hand side as name and counts; counts of `generated`,
    `accounted` and `difference`; `units`; `final`.
  """
  source = mapping(run.ledger or run.status.get("ledger"))
  generated = mapping(source.get("generated"))
  units = [unit for unit in UNITS if text.is_number(generated.get(unit))]
  if not units:
    return {}
  terms = {
      term.replace("_", " "): source.get(term)
      for term in (
          *("trained_first_time", "in_buffer_untrained", "evicted_untrained"),
          "queued",
      )
      if term in source
  }
  for term in ("rejected", "lost"):
    for reason, counts in mapping(source.get(term)).items():
      terms[f"{term}: {reason}"] = counts
  amount = lambda counts, unit: (
      n if text.is_number(n := mapping(counts).get(unit)) else 0
  )
  shown = lambda counts: [text.number(n, "count") for n in counts]
  rows = [
      {
          "name": text.printable(name, 120),
          "counts": shown(amount(counts, unit) for unit in units),
      }
      for name, counts in terms.items()
  ]
  made = [generated[unit] for unit in units]
  accounted = [
      sum(amount(counts, unit) for counts in terms.values()) for unit in units
  ]
  return {
      "units": units,
      "rows": rows,
      "generated": shown(made),
      "accounted": shown(accounted),
      "difference": shown(map(operator.sub, made, accounted)),
      "final": bool(run.ledger),
  }


def events(run: run_reader.RunData, origin: float) -> list[dict[str, Any]]:
  """Returns the newest events, printable, in seconds since the origin."""
  rows = []
  for event in run.events:
    when, role = event.get("time"), str(event.get("role") or "")
    process = f"{role}-{event.get('index', 0)}" if role else ""
    rows.append(
        {
            "t": round(when - origin, 3) if text.is_number(when) else None,
            "kind": text.printable(event.get("kind", ""), 60),
            "role": text.printable(process, 60),
            "message": text.printable(event.get("message", ""), 500),
        }
    )
  return rows


def changes(run: run_reader.RunData) -> list[dict[str, Any]]:
  """Returns the steps at which settings changed, and the changes."""
  return [
      {
          "step": step,
          "settings": [
              f"{text.printable(key, 120)}: {printable(old)} → {printable(new)}"
              for key, (old, new) in changed.items()
          ],
      }
      for step, changed in run.changes.items()
  ]


def printable(value: Any) -> str:
  """Returns the value of a setting as the report shows it."""
  return text.printable(value if isinstance(value, str) else repr(value), 300)


def flat_config(
    config: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
  """Yields (dotted key, value) of a nested config, printable."""
  for key, value in config.items():
    name = f"{prefix}{key}"
    if isinstance(value, dict) and value:
      yield from flat_config(value, f"{name}.")
    else:
      yield text.printable(name, 120), printable(value)

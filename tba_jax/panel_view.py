# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's state as a view for the terminal, as a line, and as its last table.

Text of a run (events, errors) is shown as text only: no markup and no control
sequence of it reaches the terminal.
"""

from collections.abc import Iterable, Mapping, Sequence
import time
from typing import Any

import rich.box
import rich.console
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from tba_jax import run_state
from tba_jax.report import tables
from tba_jax.report import text

PHASES = ("setup", "sft", "reward_model", "warm-up", "train", "finish")
# Shown only while it lasts: few runs have it.
_RARE = "reward_model"
# What the roles call their phases.
_PHASE_OF = {"start": "warm-up", "compile": "warm-up", "done": "finish"}
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24  # of a sparkline

number = run_state.number


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
  """Returns values as bars, lowest to highest, at most `width` of them."""
  if not values:
    return ""
  width = min(width, len(values))
  edges = [len(values) * i // width for i in range(width + 1)]
  means = [
      sum(values[a:b]) / (b - a)
      for a, b in zip(edges[:-1], edges[1:], strict=True)
  ]
  low, high = min(means), max(means)
  if high == low:
    return _BARS[3] * width
  top = len(_BARS) - 1
  return "".join(_BARS[round(top * (m - low) / (high - low))] for m in means)


def _safe(value: Any, limit: int = 160) -> str:
  return text.printable(str(value), limit, one_line=True)


def phase_of(state: run_state.RunState) -> str:
  """Returns the phase that is shown for a state."""
  name = str(state.phase)
  return _PHASE_OF.get(name, name if name in PHASES else "setup")


def _phases(phase: str) -> rich.text.Text:
  line = rich.text.Text()
  names = [name for name in PHASES if name != _RARE or name == phase]
  at = names.index(phase)
  for i, name in enumerate(names):
    mark, style = ("●", "bold cyan") if i == at else ("○", "dim")
    if i < at:
      mark, style = "✓", "green"
    line.append(f"{mark} {name}   ", style)
  return line


def _progress(state: run_state.RunState, phase: str) -> list[Any]:
  """Returns a bar with its words, for the phase that is under way."""
  status = state.status
  evaluating = status.get("evaluate")
  unit = "step"
  done, total = number(status.get("step")), number(status.get("num_steps"))
  if phase == "sft":
    done, total = number(state.sft.get("step")), state.sft_steps
  elif isinstance(evaluating, Mapping):
    done, total = number(evaluating.get("done")), number(
        evaluating.get("total")
    )
    unit = "evaluated"
  if done is None or not total:
    return []
  words = f" {unit} {done:,.0f}/{total:,.0f}  {100 * done / total:.0f} %"
  eta = number(status.get("eta_s"))
  if eta is not None and phase == "train" and unit == "step":
    words += f"  {tables.duration(eta)} left"
  grid = rich.table.Table.grid(expand=True)
  grid.add_column(ratio=1)
  grid.add_column(justify="right")
  grid.add_row(
      rich.progress_bar.ProgressBar(
          total=total,
          completed=done,
          complete_style="cyan",
          finished_style="green",
      ),
      words,
  )
  return [grid]


def _value(value: Any, style: str = "number", unit: str = "") -> str:
  shown = tables.number(number(value), style)
  return f"{shown} {unit}".rstrip() if shown != "–" else shown


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, Mapping) else {}


def _learning(state: run_state.RunState) -> rich.table.Table:
  """Returns the figures of learning, and of the data and the time."""
  status = state.status
  buffer = _mapping(status.get("buffer"))
  trainer = _mapping(status.get("trainer"))
  store = _mapping(status.get("store"))
  size, capacity = buffer.get("size"), buffer.get("capacity")
  share = number(size) and number(capacity) and size / capacity
  fill = _value(size, "count")
  if share:
    fill += f" of {capacity:,.0f} ({100 * share:.0f} %)"
  rewards = [value for _, value in state.reward]
  accuracy = [value for _, value in state.pass_at_1]
  left = [
      ("reward", _value(status.get("reward")), sparkline(rewards)),
      (
          "held-out pass@1",
          _value(status.get("pass_at_1"), "percent"),
          sparkline(accuracy),
      ),
      ("KL to reference", _value(status.get("kl")), "nats a completion"),
      ("entropy", _value(status.get("entropy")), "nats a token"),
  ]
  right = [
      ("staleness", _value(status.get("staleness_steps"), unit="steps")),
      ("buffer", fill),
      ("overlap", _value(status.get("overlap_of_ideal"), unit="of ideal")),
      (
          "trainer busy",
          f"{_value(trainer.get('busy_share'), 'percent')}"
          f"  step {tables.duration(trainer.get('step_s'))},"
          f" waits {tables.duration(trainer.get('wait_s'))}",
      ),
  ]
  if number(store.get("generation")) is not None:
    right.append(("store", f"generation {store['generation']}"))
  grid = rich.table.Table.grid(padding=(0, 2), expand=False)
  for style in ("dim", "bold", "cyan", "dim", ""):
    grid.add_column(style=style, no_wrap=True)
  for i in range(max(len(left), len(right))):
    row = (*(left[i] if i < len(left) else ("", "", "")),
           *(right[i] if i < len(right) else ("", "")))  # fmt: skip
    cells = [rich.text.Text(cell) for cell in row]
    if row[2].startswith("nats"):
      cells[2].stylize("dim white")
    grid.add_row(*cells)
  return grid


def _searchers(searchers: Mapping[str, Any]) -> rich.table.Table:
  table = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, pad_edge=False, header_style="dim"
  )
  table.add_column("searcher")
  names = "samples/s", "tokens/s", "busy", "version", "queue", "seen"
  for name in names:
    table.add_column(name, justify="right")
  rows = [(sid, _mapping(row)) for sid, row in searchers.items()]
  for sid, row in sorted(rows, key=lambda r: (number(r[1].get("index")) or 0)):
    queue = _value(row.get("unacked"), "count")
    queue += f"/{_value(row.get('credits'), 'count')}"
    age = number(row.get("age_s"))
    cells = (
        _safe(row.get("index", sid), 24),
        _value(row.get("samples_per_s"), "count"),
        _value(row.get("tokens_per_s"), "count"),
        _value(row.get("busy_share"), "percent"),
        _value(row.get("version"), "count"),
        queue,
        "–" if age is None else f"{tables.duration(age)} ago",
    )
    table.add_row(*(rich.text.Text(cell) for cell in cells))
  return table


def _event_line(
    name: str, event: Mapping[str, Any], style: str
) -> rich.text.Text:
  when = number(event.get("time"))
  clock = time.strftime("%H:%M:%S", time.localtime(when)) if when else ""
  line = rich.text.Text().append(f"{name:<10}", "dim")
  line.append(f"{clock} {_safe(event.get('kind', ''), 40)}: ", "bold")
  line.append(_safe(event.get("message", "")), style)
  return line


def _last_lines(state: run_state.RunState) -> Iterable[rich.text.Text]:
  counts = {role: n for role, n in state.restarts.items() if number(n)}
  line = rich.text.Text().append("restarts  ", "dim")
  words = ", ".join(f"{n} of {_safe(role)}" for role, n in counts.items())
  line.append(words or "none", "yellow" if counts else "")
  yield line
  if state.event:
    yield _event_line("event", state.event, "")
  if state.error:
    yield _event_line("error", state.error, "red")
  elif state.status.get("last_error"):  # A run whose files are not here.
    line = rich.text.Text().append("error     ", "dim")
    line.append(_safe(state.status["last_error"]), "red")
    yield line
  if state.note:
    yield rich.text.Text(_safe(state.note, 300), "yellow")


def render(state: run_state.RunState) -> rich.panel.Panel:
  """Returns the view of a state."""
  phase = phase_of(state)
  parts: list[Any] = [_phases(phase), *_progress(state, phase)]
  if phase == "sft":
    fields = ((k, number(v)) for k, v in state.sft.items() if "/" in k)
    shown = [f"{_safe(k, 40)} {v:.3g}" for k, v in fields if v is not None]
    parts.append(rich.text.Text("   ".join(shown[:6])))
  elif state.status:
    parts += [rich.text.Text(), _learning(state)]
    searchers = _mapping(state.status.get("searchers"))
    if searchers:
      parts.append(_searchers(searchers))
  parts += _last_lines(state)
  return rich.panel.Panel(
      rich.console.Group(*parts),
      title=rich.text.Text(f"tba_jax · {_safe(state.name, 60)}", "bold"),
      border_style="cyan",
      padding=(0, 1),
  )


def plain_line(state: run_state.RunState) -> str:
  """Returns the state in one line, for a log."""
  phase = phase_of(state)
  status = state.status
  words = [phase]
  if phase == "sft":
    step = _value(state.sft.get("step"), "count")
    words += [f"step {step}/{state.sft_steps or '?'}"]
    words += [
        f"{_safe(name, 40)} {value:.3g}"
        for name, value in state.sft.items()
        if "/" in name and number(value) is not None
    ][:4]
  elif number(status.get("step")) is not None and phase != "setup":
    words += [
        f"step {status['step']}/{status.get('num_steps', '?')}",
        f"reward {_value(status.get('reward'))}",
        f"pass@1 {_value(status.get('pass_at_1'), 'percent')}",
        f"KL {_value(status.get('kl'))}",
        f"staleness {_value(status.get('staleness_steps'))}",
        f"{tables.duration(number(status.get('eta_s')))} left",
    ]
  restarts = sum(n for n in state.restarts.values() if number(n))
  if restarts:
    words.append(f"restarts {restarts}")
  return " · ".join(words)


def final_table(summary: Mapping[str, Any]) -> rich.table.Table:
  """Returns the table at the end of a run, from its `summary.json`."""
  table = rich.table.Table(
      title="result", box=rich.box.ROUNDED, title_style="bold"
  )
  table.add_column("")
  for name in ("before", "after", "change"):
    table.add_column(name, justify="right")
  for row in tables.compare(
      _mapping(summary.get("before")), _mapping(summary.get("after"))
  ):
    cells = row["name"], row["before"], row["after"], row["change"]
    table.add_row(*(rich.text.Text(cell) for cell in cells))
  table.add_section()
  restarts = _mapping(summary.get("restarts"))
  counts = ", ".join(f"{n} of {_safe(r)}" for r, n in restarts.items() if n)
  closed = summary.get("ledger_closed")
  steps = _value(summary.get("steps"), "count")
  if summary.get("stopped_by"):
    steps += f" (stopped by {_safe(summary['stopped_by'])})"
  rows = (
      ("steps", steps),
      ("wall clock", tables.duration(number(summary.get("wall_s")))),
      ("completions", _value(summary.get("completions"), "count")),
      ("completions/s", _value(summary.get("completions_per_s"))),
      ("overlap of ideal", _value(summary.get("overlap_of_ideal"))),
      ("staleness, steps", _value(summary.get("staleness_mean"))),
      ("restarts", counts or "none"),
      ("ledger", "–" if closed is None else "closed" if closed else "OPEN"),
  )
  failed = _mapping(summary.get("reward_failures"))
  if failed:
    text = ", ".join(f"{n} {_safe(cause)}" for cause, n in failed.items())
    rows += (("completions not judged", text),)
  for name, value in rows:
    style = "bold red" if value == "OPEN" else ""
    table.add_row(name, "", rich.text.Text(value, style), "")
  return table


def advice_list(sentences: Sequence[str]) -> rich.table.Table:
  """Returns sentences as a list, each with a dot before it."""
  grid = rich.table.Table.grid(padding=(0, 1))
  for sentence in sentences:
    grid.add_row("•", rich.text.Text(sentence))
  return grid

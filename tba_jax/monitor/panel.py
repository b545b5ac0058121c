# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The live panel of a run: in place on a terminal, else a line now and then."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import pathlib
import time
from typing import Any

import rich.box
import rich.console
import rich.live
import rich.measure
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from tba_jax.monitor import run_state
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables

# A run's state as a view for the terminal, as a line, and as its last table.
#
# Text of a run (events, errors) is shown as text only: no markup and no control
# sequence of it reaches the terminal.


PHASES = ("setup", "sft", "reward_model", "warm-up", "train", "finish")
# In these a model is made before training.
_MADE = ("sft", "reward_model")
# Shown only while it lasts: few runs have it.
_RARE = "reward_model"
# What the roles call their phases.
_PHASE_OF = {"start": "warm-up", "compile": "warm-up", "done": "finish"}
_BARS = "▁▂▃▄▅▆▇█"
# Of a sparkline, with and without much room.
_WIDTH, _NARROW = 24, 17
_ANY_WIDTH = 10_000
_COLUMNS = (
    "searcher", "samples/s", "tokens/s", "busy", "version", "queue", "seen",
)  # fmt: skip

number = run_state.number


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
  """Returns values as bars, lowest to highest, at most `width` of them."""
  if not values or not width:
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


def safe(value: Any, limit: int = 160) -> str:
  return load.printable(str(value), limit, one_line=True)


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
  if phase in _MADE:
    record, total = state.made(phase)
    done = number(record.get("step"))
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


def figure_text(value: Any, style: str = "number", unit: str = "") -> str:
  shown = tables.number(number(value), style)
  return f"{shown} {unit}".rstrip() if shown != "–" else shown


def as_mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, Mapping) else {}


class _Fitting:
  """Shows the first of some views that the terminal is wide enough for.

  So that no number is cut: what matters less is left out instead. The last one
  is taken where none fits.
  """

  def __init__(self, views: Sequence[Any]):
    self._views = views

  def __rich_console__(
      self,
      console: rich.console.Console,
      options: rich.console.ConsoleOptions,
  ) -> rich.console.RenderResult:
    any_width = options.update_width(_ANY_WIDTH)
    for view in self._views:
      wide = rich.measure.Measurement.get(console, any_width, view).maximum
      if wide <= options.max_width:
        break
    yield view


def _grid(rows: Iterable[Sequence[str]], styles: Sequence[str]) -> Any:
  grid = rich.table.Table.grid(padding=(0, 2), expand=False)
  for style in styles:
    grid.add_column(style=style, no_wrap=True)
  for row in rows:
    grid.add_row(*(rich.text.Text(cell) for cell in row))
  return grid


def _learning(state: run_state.RunState) -> _Fitting:
  """Returns the figures of learning, and of the data and the time."""
  status = state.status
  left = lambda width: [
      (
          "reward",
          figure_text(status.get("reward")),
          sparkline([value for _, value in state.reward], width),
      ),
      (
          "held-out pass@1",
          figure_text(status.get("pass_at_1"), "percent"),
          sparkline([value for _, value in state.pass_at_1], width),
      ),
      ("KL to reference", figure_text(status.get("kl")), "nats a completion"),
      ("entropy", figure_text(status.get("entropy")), "nats a token"),
  ]
  right = _data_and_time(status)
  words = [(name, f"{value} {more}".rstrip()) for name, value, more in right]

  def beside(width: int) -> Any:
    pairs = itertools.zip_longest(left(width), words)
    return _grid(
        (((*(a or ("",) * 3), *(b or ("",) * 2))) for a, b in pairs),
        ("dim", "bold", "cyan", "dim", ""),
    )

  below = rich.console.Group(
      _grid(left(_WIDTH), ("dim", "bold", "cyan")),
      _grid(
          ((f"{name:<{len('held-out pass@1')}}", more) for name, more in words),
          ("dim", ""),
      ),
  )
  short = _grid((row[:2] for row in (*left(0), *right)), ("dim", "bold"))
  return _Fitting((beside(_WIDTH), beside(_NARROW), below, short))


def _data_and_time(status: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """Returns name, value and what else there is to say of it."""
  buffer = as_mapping(status.get("buffer"))
  trainer = as_mapping(status.get("trainer"))
  store = as_mapping(status.get("store"))
  failures = as_mapping(status.get("reward_failures"))
  size, capacity = buffer.get("size"), buffer.get("capacity")
  fill = ""
  if number(size) and number(capacity):
    fill = f"of {capacity:,.0f} ({100 * size / capacity:.0f} %)"
  times = (
      f" step {tables.duration(trainer.get('step_s'))},"
      f" waits {tables.duration(trainer.get('wait_s'))}"
  )
  rows = [
      ("staleness", figure_text(status.get("staleness_steps")), "steps"),
      ("buffer", figure_text(size, "count"), fill),
      ("overlap", figure_text(status.get("overlap_of_ideal")), "of ideal"),
      (
          "trainer busy",
          figure_text(trainer.get("busy_share"), "percent"),
          times,
      ),
  ]
  rows = [(name, one, more * (one != "–")) for name, one, more in rows]
  if number(store.get("generation")) is not None:
    rows.append(("store", "generation", str(store["generation"])))
  if failures:
    rows.append(("not judged", *cause_texts(failures)))
  return rows


def cause_texts(failures: Mapping[str, Any]) -> tuple[str, str]:
  """Returns how many completions were not judged, and by which cause."""
  found = {cause: n for cause, n in failures.items() if number(n)}
  words = ", ".join(f"{n:,.0f} {safe(c, 20)}" for c, n in found.items())
  return (
      figure_text(sum(found.values()), "count"),
      f"({words})" if words else "",
  )


def _searchers(searchers: Mapping[str, Any]) -> _Fitting:
  """Returns their table, with fewer columns where there is less room."""
  rows = [(sid, as_mapping(row)) for sid, row in searchers.items()]
  rows.sort(key=lambda r: number(r[1].get("index")) or 0)
  all_cells = [_searcher_cells(sid, row) for sid, row in rows]

  def table(names: Sequence[str]) -> rich.table.Table:
    out = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, pad_edge=False, header_style="dim"
    )
    for name in names:
      justify = "left" if name == "searcher" else "right"
      out.add_column(name, justify=justify, no_wrap=True)
    for cells in all_cells:
      out.add_row(*(rich.text.Text(cells[name]) for name in names))
    return out

  left_out = ("", "tokens/s", "version", "queue", "seen", "busy")
  views = []
  for i in range(len(left_out)):
    names = [n for n in _COLUMNS if n not in left_out[: i + 1]]
    views.append(table(names))
  return _Fitting(views)


def _searcher_cells(sid: str, row: Mapping[str, Any]) -> dict[str, str]:
  queue = figure_text(row.get("unacked"), "count")
  age = number(row.get("age_s"))
  cells = (
      safe(row.get("index", sid), 24),
      figure_text(row.get("samples_per_s"), "count"),
      figure_text(row.get("tokens_per_s"), "count"),
      figure_text(row.get("busy_share"), "percent"),
      figure_text(row.get("version"), "count"),
      f"{queue}/{figure_text(row.get('credits'), 'count')}",
      "–" if age is None else f"{tables.duration(age)} ago",
  )
  return dict(zip(_COLUMNS, cells, strict=True))


def _event_line(
    name: str, event: Mapping[str, Any], style: str
) -> rich.text.Text:
  when = number(event.get("time"))
  clock = time.strftime("%H:%M:%S", time.localtime(when)) if when else ""
  line = rich.text.Text().append(f"{name:<10}", "dim")
  line.append(f"{clock} {safe(event.get('kind', ''), 40)}: ", "bold")
  line.append(safe(event.get("message", "")), style)
  return line


def _last_lines(state: run_state.RunState) -> Iterable[rich.text.Text]:
  counts = {role: n for role, n in state.restarts.items() if number(n)}
  line = rich.text.Text().append("restarts  ", "dim")
  words = ", ".join(f"{n} of {safe(role)}" for role, n in counts.items())
  line.append(words or "none", "yellow" if counts else "")
  yield line
  if state.event:
    yield _event_line("event", state.event, "")
  if state.error:
    yield _event_line("error", state.error, "red")
  elif state.status.get("last_error"):  # A run whose files are not here.
    line = rich.text.Text().append("error     ", "dim")
    line.append(safe(state.status["last_error"]), "red")
    yield line
  if state.note:
    yield rich.text.Text(safe(state.note, 600), "yellow")


def render_view(state: run_state.RunState) -> rich.panel.Panel:
  """Returns the view of a state."""
  phase = phase_of(state)
  parts: list[Any] = [_phases(phase), *_progress(state, phase)]
  if phase in _MADE:
    made, _ = state.made(phase)
    fields = ((k, number(v)) for k, v in made.items() if "/" in k)
    shown = [f"{safe(k, 40)} {v:.3g}" for k, v in fields if v is not None]
    parts.append(rich.text.Text("   ".join(shown[:6])))
  elif state.status:
    parts += [rich.text.Text(), _learning(state)]
    searchers = as_mapping(state.status.get("searchers"))
    if searchers:
      parts.append(_searchers(searchers))
  parts += _last_lines(state)
  return rich.panel.Panel(
      rich.console.Group(*parts),
      title=rich.text.Text(f"tba_jax · {safe(state.name, 60)}", "bold"),
      border_style="cyan",
      padding=(0, 1),
  )


def plain_line(state: run_state.RunState) -> str:
  """Returns the state in one line, for a log."""
  phase = phase_of(state)
  status = state.status
  words = [phase]
  if phase in _MADE:
    made, num_steps = state.made(phase)
    step = figure_text(made.get("step"), "count")
    words += [f"step {step}/{num_steps or '?'}"]
    words += [
        f"{safe(name, 40)} {value:.3g}"
        for name, value in made.items()
        if "/" in name and number(value) is not None
    ][:4]
  elif number(status.get("step")) is not None and phase != "setup":
    words += [
        f"step {status['step']}/{status.get('num_steps', '?')}",
        f"reward {figure_text(status.get('reward'))}",
        f"pass@1 {figure_text(status.get('pass_at_1'), 'percent')}",
        f"KL {figure_text(status.get('kl'))}",
        f"staleness {figure_text(status.get('staleness_steps'))}",
        f"{tables.duration(number(status.get('eta_s')))} left",
    ]
  restarts = sum(n for n in state.restarts.values() if number(n))
  if restarts:
    words.append(f"restarts {restarts}")
  return " · ".join(words)


REDRAW_EVERY_S = 0.25
LINE_EVERY_S = 10.0


class Panel:
  """Shows a run while it goes on; call `update` often, it is cheap."""

  def __init__(
      self, workdir: str | pathlib.Path, console: rich.console.Console
  ):
    self._follower = run_state.Follower(workdir)
    self._console = console
    self._live: rich.live.Live | None = None
    # Told by the caller, and valid until the trainer writes a newer state.
    self._told: tuple[str, float] = ("setup", time.time())
    self._next_draw = 0.0
    self._line_at = -LINE_EVERY_S
    self._line_phase = ""

  def __enter__(self) -> "Panel":
    if self._console.is_terminal:
      self._live = rich.live.Live(
          render_view(self._follower.state),
          console=self._console,
          auto_refresh=False,
          transient=False,
      )
      self._live.start()
    return self

  def __exit__(self, *exception: Any) -> None:
    self.update(force=True)
    if self._live is not None:
      self._live.stop()
      self._live = None

  def phase(self, name: str) -> None:
    """Says which phase begins; the trainer's own words replace it later."""
    self._told = name, time.time()
    self.update(force=True)

  def update(
      self, *, restarts: Mapping[str, int] | None = None, force: bool = False
  ) -> None:
    """Reads what is new and shows it, a few times a second at most.

    Args:
      restarts: by role, so far.
      force: now.
    """
    state = self._follower.state
    if restarts is not None:
      state.restarts = dict(restarts)
    now = time.monotonic()
    if now < self._next_draw and not force:
      return
    self._next_draw = now + REDRAW_EVERY_S
    self._follower.read()
    name, since = self._told
    written = run_state.number(state.status.get("time"))
    if written is not None and written >= since:
      name = str(state.status.get("phase", name))
    else:
      # What an earlier start of the run left is not its state now.
      state.status = {}
    state.phase = name
    if self._live is not None:
      self._live.update(render_view(state), refresh=True)
      return
    phase = phase_of(state)
    if phase != self._line_phase or now - self._line_at >= LINE_EVERY_S:
      self._line_phase, self._line_at = phase, now
      self._console.print(
          rich.text.Text(plain_line(state)),
          soft_wrap=True,
          highlight=False,
      )


# What the terminal shows at the end of a run: the result, and advice.


def final_table(summary: Mapping[str, Any]) -> rich.table.Table:
  """Returns the table at the end of a run, from its `summary.json`."""
  table = rich.table.Table(
      title="result", box=rich.box.ROUNDED, title_style="bold"
  )
  table.add_column("")
  for name in ("before", "after", "change"):
    table.add_column(name, justify="right")
  for row in tables.compare(
      as_mapping(summary.get("before")),
      as_mapping(summary.get("after")),
  ):
    cells = row["name"], row["before"], row["after"], row["change"]
    table.add_row(*(rich.text.Text(cell) for cell in cells))
  table.add_section()
  restarts = as_mapping(summary.get("restarts"))
  counts = ", ".join(f"{n} of {safe(r)}" for r, n in restarts.items() if n)
  closed = summary.get("ledger_closed")
  steps = figure_text(summary.get("steps"), "count")
  if summary.get("stopped_by"):
    steps += f" (stopped by {safe(summary['stopped_by'])})"
  rows = (
      ("steps", steps),
      ("wall clock", tables.duration(number(summary.get("wall_s")))),
      ("completions", figure_text(summary.get("completions"), "count")),
      ("completions/s", figure_text(summary.get("completions_per_s"))),
      ("overlap of ideal", figure_text(summary.get("overlap_of_ideal"))),
      ("staleness, steps", figure_text(summary.get("staleness_mean"))),
      ("restarts", counts or "none"),
      ("ledger", "–" if closed is None else "closed" if closed else "OPEN"),
  )
  failed = as_mapping(summary.get("reward_failures"))
  if failed:
    rows += (("completions not judged", " ".join(cause_texts(failed))),)
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The live panel of a run: redrawn on a terminal, else a line now and then.

Text from the run (events, errors) is sanitized: no markup or control sequence
in it reaches the terminal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import pathlib
import threading
import time
from typing import Any

import rich.box
import rich.columns
import rich.console
import rich.live
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from tba_jax.report import run_state
from tba_jax.report import tables
from tba_jax.run import files
from tba_jax.run import text

PHASES = ("setup", "sft", "reward_model", "warm-up", "train", "finish")
# Few runs have this phase: it is shown only while it lasts.
_RARE = "reward_model"
# Other names of phases -> the phases shown.
_PHASE_OF = {"start": "warm-up", "compile": "warm-up", "done": "finish"}
# Kind of the trainer's current span -> its activity during warm-up.
_WARM_UP = {
    "": "publishes the first params",
    "evaluate": "compiles and evaluates before training",
    "wait_fresh": "waits: searchers compile and sample",
    "step": "compiles the train step",
}
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE = 16
_REDRAW_EVERY_S = 0.25
_LINE_EVERY_S = 10.0
# Characters of a prompt or completion in the sample of the start model.
_SAMPLE_CHARS = 1000


def sparkline(values: Sequence[float], width: int = _SPARKLINE) -> str:
  """Returns a sparkline of at most `width` bars."""
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
  return text.printable(value, limit, one_line=True)


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, Mapping) else {}


def _number(value: Any, style: str = "number") -> str:
  return text.number(value, style) if text.is_number(value) else "–"


def _count(value: Any) -> str:
  return _number(value, "count")


def phase_of(state: run_state.RunState) -> str:
  """Returns the phase to show."""
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


def _doing(state: run_state.RunState, phase: str) -> str:
  """Returns the trainer's activity in the warm-up, "" in other phases."""
  if phase != "warm-up":
    return ""
  if not state.status:
    return "processes start and load the model"
  return _WARM_UP.get(str(state.status.get("doing") or ""), "")


def _progress(state: run_state.RunState, phase: str) -> list[Any]:
  """Returns the progress bar of the current phase, [] if unknown."""
  status = state.status
  evaluating = status.get("evaluate")
  unit, done, total = "step", status.get("step"), status.get("num_steps")
  if phase in run_state.MODEL_PHASES:
    done, total = state.made[phase].get("step"), state.made_steps.get(phase)
  elif isinstance(evaluating, Mapping):
    unit = "evaluated"
    done, total = evaluating.get("done"), evaluating.get("total")
  if not text.is_number(done) or not text.is_number(total) or not total:
    return []
  words = f" {unit} {done:,.0f}/{total:,.0f}  {100 * done / total:.0f} %"
  eta = status.get("eta_s")
  if text.is_number(eta) and phase == "train" and unit == "step":
    words += f"  {text.duration(eta)} left"
  grid = rich.table.Table.grid(expand=True)
  grid.add_column(ratio=1)
  grid.add_column(justify="right")
  bar = rich.progress_bar.ProgressBar(
      total, done, complete_style="cyan", finished_style="green"
  )
  grid.add_row(bar, words)
  return [grid]


def _held_out(status: Mapping[str, Any]) -> tuple[str, str]:
  """Returns name and value of the newest held-out evaluation."""
  newest = _mapping(status.get("held_out"))
  metric = newest.get("metric")
  name, style = tables.EVALUATIONS.get(
      metric if isinstance(metric, str) else "pass_at_1", ("pass@1", "percent")
  )
  return name, _number(newest.get("value"), style)


def _figures(state: run_state.RunState) -> rich.columns.Columns:
  """Returns the figures, in as many columns as fit."""
  status = state.status
  buffer, trainer = _mapping(status.get("buffer")), _mapping(
      status.get("trainer")
  )
  size, capacity = buffer.get("size"), buffer.get("capacity")
  fill = ""
  if text.is_number(size) and text.is_number(capacity) and capacity:
    fill = f"of {capacity:,.0f} ({100 * size / capacity:.0f} %)"
  step_s, wait_s = (text.duration(trainer.get(n)) for n in ("step_s", "wait_s"))
  curve = lambda series: sparkline([value for _, value in series])
  metric, held_out = _held_out(status)
  rows = [
      ("reward", _number(status.get("reward")), curve(state.reward)),
      (f"held-out {metric}", held_out, curve(state.held_out)),
      ("KL to reference", _number(status.get("kl")), "nats a completion"),
      ("entropy", _number(status.get("entropy")), "nats a token"),
      ("staleness", _number(status.get("staleness_steps")), "steps"),
      ("buffer", _count(size), fill),
      ("overlap", _number(status.get("overlap_of_ideal")), "of ideal"),
      (
          "trainer busy",
          _number(trainer.get("busy_share"), "percent"),
          f"step {step_s}, waits {wait_s}",
      ),
  ]
  generation = _mapping(status.get("store")).get("generation")
  # 0 without a store.
  if text.is_number(generation) and generation > 0:
    rows.append(("store", "generation", str(generation)))
  failures = tables.sum_text(status.get("reward_failures"))
  shares = _mapping(status.get("failure_share"))
  if failures != "0" or shares.get("newest"):
    more = ""
    if text.is_number(newest := shares.get("newest")):
      first = _number(shares.get("first"), "percent")
      more = f"now {_number(newest, 'percent')}, {first} at first"
    rows.append(("not judged", failures, more))
  cells = []
  for name, value, more in rows:
    cell = rich.text.Text(f"{name:<15} ", "dim")
    cell.append(value, "bold default")
    cell.append(f" {more}" if value != "–" else "", "cyan")
    cells.append(cell)
  return rich.columns.Columns(cells, padding=(0, 2), column_first=True)


def _searchers(searchers: Mapping[str, Any]) -> list[rich.columns.Columns]:
  """Returns a row for each searcher, wrapped between cells if necessary."""
  order = lambda row: i if text.is_number(i := row[1].get("index")) else 0
  rows = []
  for sid, row in sorted(
      ((sid, _mapping(row)) for sid, row in searchers.items()), key=order
  ):
    age = row.get("age_s")
    waits = row.get("environment_wait_share")
    cells = (
        f"searcher {_safe(row.get('index', sid), 24)}",
        f"{_count(row.get('samples_per_s')):>7} samples/s",
        f"{_count(row.get('tokens_per_s')):>9} tokens/s",
        f"{_number(row.get('busy_share'), 'percent'):>7} busy",
        f"version {_count(row.get('version')):>6}",
        f"queue {_count(row.get('unacked'))}/{_count(row.get('credits'))}",
        f"seen {text.duration(age)} ago" if text.is_number(age) else "",
        f"{_number(waits, 'percent')} waits for environments"
        if text.is_number(waits)
        else "",
    )
    rows.append(rich.columns.Columns(map(rich.text.Text, cells)))
  return rows


def _event_line(
    name: str, event: Mapping[str, Any], style: str
) -> rich.text.Text:
  when = event.get("time")
  clock = ""
  if text.is_number(when):
    clock = time.strftime("%H:%M:%S", time.localtime(when))
  line = rich.text.Text().append(f"{name:<10}", "dim")
  line.append(f"{clock} {_safe(event.get('kind', ''), 40)}: ", "bold")
  return line.append(_safe(event.get("message", "")), style)


def _sample_lines(sample: Mapping[str, Any]) -> Iterable[rich.text.Text]:
  """Yields a sample of the start model, as the policy wrote it."""
  reward = _number(sample.get("reward"))
  reason = _safe(sample.get("reason") or "")
  heading = f"a sample of the start model: reward {reward}"
  yield rich.text.Text(heading + (f" ({reason})" if reason else ""), "bold")
  for name in ("prompt", "completion"):
    shown = text.printable(sample.get(name, ""), _SAMPLE_CHARS)
    line = rich.text.Text().append(f"  {name}: ", "dim")
    yield line.append(shown.replace("\n", "\n    "))


def _last_lines(state: run_state.RunState) -> Iterable[rich.text.Text]:
  line = rich.text.Text().append("restarts  ", "dim")
  restarts = tables.sum_text(state.restarts)
  yield line.append(restarts, "yellow" if restarts != "0" else "")
  if state.collapse:
    line = rich.text.Text().append("collapse  ", "dim")
    yield line.append(_safe(state.collapse.line, 400), "bold red")
  if state.event:
    yield _event_line("event", state.event, "")
  if state.error:
    yield _event_line("error", state.error, "red")
  elif state.status.get("last_error"):  # The events are on another host.
    line = rich.text.Text().append("error     ", "dim")
    yield line.append(_safe(state.status["last_error"]), "red")
  if state.note:
    yield rich.text.Text(_safe(state.note, 600), "yellow")


def render_view(state: run_state.RunState) -> rich.panel.Panel:
  """Returns the view of a state, which fits a terminal of any width."""
  phase = phase_of(state)
  parts: list[Any] = [_phases(phase)]
  if doing := _doing(state, phase):
    parts.append(rich.text.Text(doing, "dim"))
  parts += _progress(state, phase)
  if phase in run_state.MODEL_PHASES:
    shown = [
        f"{_safe(name, 40)} {value:.3g}"
        for name, value in state.made[phase].items()
        if "/" in name and text.is_number(value)
    ]
    parts.append(rich.text.Text("   ".join(shown[:6])))
  elif state.status:
    parts += [rich.text.Text(), _figures(state)]
    parts += _searchers(_mapping(state.status.get("searchers")))
  parts += _last_lines(state)
  return rich.panel.Panel(
      rich.console.Group(*parts),
      title=rich.text.Text(f"tba_jax · {_safe(state.name, 60)}", "bold"),
      border_style="cyan",
      padding=(0, 1),
  )


def plain_line(state: run_state.RunState) -> str:
  """Returns the state as one line, for a log."""
  phase = phase_of(state)
  status = state.status
  words = [phase]
  if doing := _doing(state, phase):
    words.append(doing)
  evaluated = _mapping(status.get("evaluate"))
  if all(text.is_number(evaluated.get(name)) for name in ("done", "total")):
    words.append("evaluated {done:,.0f}/{total:,.0f}".format(**evaluated))
  if phase in run_state.MODEL_PHASES:
    made = state.made[phase]
    num_steps = state.made_steps.get(phase, "?")
    words.append(f"step {_count(made.get('step', 0))}/{num_steps}")
    words += [
        f"{_safe(name, 40)} {value:.3g}"
        for name, value in made.items()
        if "/" in name and text.is_number(value)
    ][:4]
  elif text.is_number(status.get("step")) and phase != "setup":
    words += [
        f"step {status['step']}/{_safe(status.get('num_steps', '?'), 20)}",
        f"reward {_number(status.get('reward'))}",
        " ".join(_held_out(status)),
        f"KL {_number(status.get('kl'))}",
        f"staleness {_number(status.get('staleness_steps'))}",
    ]
    if phase == "train" and text.is_number(status.get("eta_s")):
      words.append(f"{text.duration(status['eta_s'])} left")
  restarts = sum(n for n in state.restarts.values() if text.is_number(n))
  if restarts:
    words.append(f"restarts {restarts}")
  if state.collapse:
    since = f"since step {state.collapse.step}"
    words.append(f"collapse by {state.collapse.cause} {since}")
  return " · ".join(words)


class Panel:
  """Shows a run in progress; `update` is cheap."""

  def __init__(
      self,
      workdir: str | pathlib.Path,
      console: rich.console.Console,
      *,
      memory: files.Memory | None = None,
      line_every_s: float = _LINE_EVERY_S,
  ):
    """Makes a panel, or lines if the console is not a terminal.

    Args:
      memory: records of a run that has no files.
      line_every_s: minimum seconds between two lines of a phase.
    """
    self._line_every_s = line_every_s
    self._follower = run_state.Follower(workdir, memory)
    self._console = console
    self._live: rich.live.Live | None = None
    # The caller's phase, shown until the trainer writes a newer state.
    self._last_phase: tuple[str, float] = ("setup", time.time())
    self._next_draw = 0.0
    self._line_at = -line_every_s
    self._line = ""
    # Earlier starts of the run have shown their errors.
    self._error_at = time.time()
    self._has_sample = self._follower.first_sample() is not None

  def __enter__(self) -> "Panel":
    if self._console.is_terminal:
      self._live = rich.live.Live(
          self._view(),
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

  def _view(self) -> rich.panel.Panel:
    return render_view(self._follower.state)

  def print(self, shown: Any) -> None:
    """Prints a text or a table."""
    self._console.print(shown)

  def phase(self, name: str) -> None:
    """Shows the start of a phase, until the trainer's own state replaces it."""
    self._last_phase = name, time.time()
    self.update(force=True)

  def update(
      self, *, restarts: Mapping[str, int] | None = None, force: bool = False
  ) -> None:
    """Reads and shows the state, at most four times a second unless forced.

    `restarts` are counts by role.
    """
    state = self._follower.state
    if restarts is not None:
      state.restarts = dict(restarts)
    now = time.monotonic()
    if now < self._next_draw and not force:
      return
    self._next_draw = now + _REDRAW_EVERY_S
    self._follower.read()
    name, since = self._last_phase
    written = state.status.get("time")
    if text.is_number(written) and written >= since:
      name = str(state.status.get("phase", name))
    else:
      # Left by an earlier start of the run.
      state.status = {}
    state.phase = name
    if not self._has_sample and (sample := self._follower.first_sample()):
      self._has_sample = True
      for line in _sample_lines(sample):
        self._console.print(line, soft_wrap=True, highlight=False)
    if self._live is not None:
      self._live.update(self._view(), refresh=True)
    else:
      self._print_line(now)

  def _print_line(self, now: float) -> None:
    """Prints a changed line if one is due, or if the phase has changed.

    A new error is printed at once on a separate line.
    """
    error = self._follower.state.error
    when = error.get("time") if error else None
    if text.is_number(when) and when > self._error_at:
      self._error_at = when
      self._console.print(
          _event_line("error", error, "red"), soft_wrap=True, highlight=False
      )
    line = plain_line(self._follower.state)
    same_phase = line.split(" ")[0] == self._line.split(" ")[0]
    if line == self._line or (
        same_phase and now - self._line_at < self._line_every_s
    ):
      return
    self._line, self._line_at = line, now
    self._console.print(rich.text.Text(line), soft_wrap=True, highlight=False)


def final_table(
    summary: Mapping[str, Any], verdict: str = ""
) -> rich.console.Group:
  """Returns a run's verdict and result table, from `summary.json`."""
  table = rich.table.Table(
      title="result", box=rich.box.ROUNDED, title_style="bold"
  )
  table.add_column("")
  for name in ("before", "after", "change"):
    table.add_column(name, justify="right")
  for row in tables.compare(
      _mapping(summary.get("before")), _mapping(summary.get("after"))
  ):
    table.add_row(*map(rich.text.Text, row.values()))
  table.add_section()
  for fact in tables.facts(summary):
    style = "bold red" if fact["value"].startswith("OPEN") else ""
    value = rich.text.Text(fact["value"], style)
    table.add_row(fact["name"], "", value, "")
  parts = [rich.text.Text(verdict, "bold")] if verdict else []
  return rich.console.Group(*parts, table)


def advice_list(sentences: Sequence[str]) -> rich.table.Table:
  """Returns sentences as a bulleted list."""
  grid = rich.table.Table.grid(padding=(0, 1))
  for sentence in sentences:
    grid.add_row("•", rich.text.Text(sentence))
  return grid


@contextlib.contextmanager
def lines(
    workdir: str | pathlib.Path,
    *,
    memory: files.Memory | None = None,
    quiet: bool = False,
) -> Iterator[Panel]:
  """Prints a run's progress as plain lines, from a thread.

  Args:
    memory: records of a run that has no files.
    quiet: whether to print nothing.
  """
  console = rich.console.Console(
      force_jupyter=False, force_terminal=False, quiet=quiet
  )
  done = threading.Event()
  with Panel(workdir, console, memory=memory) as view:

    def refresh() -> None:
      while not done.wait(2 * _REDRAW_EVERY_S):
        view.update()

    thread = threading.Thread(target=refresh, daemon=True)
    thread.start()
    try:
      yield view
    finally:
      done.set()
      thread.join()

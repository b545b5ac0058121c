# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The progress of a sweep: a table in place on a terminal, else lines."""

from collections.abc import Mapping, Sequence
import time
from typing import Any

import rich.box
import rich.console
import rich.live
import rich.table

from tba_jax import sweep_table
from tba_jax import sweep_types


class View:
  """Shows which runs are done; call `update` as often as you like."""

  def __init__(
      self,
      console: rich.console.Console,
      runs: Sequence[sweep_types.Run],
  ):
    self._console = console
    self._runs = runs
    self._live: rich.live.Live | None = None
    self._started = time.monotonic()
    self._num_before: int | None = None
    self._shown: set[str] = set()

  def __enter__(self) -> "View":
    if self._console.is_terminal:
      self._live = rich.live.Live(console=self._console, auto_refresh=False)
      self._live.start()
    return self

  def __exit__(self, *exception: Any) -> None:
    if self._live is not None:
      self._live.stop()
      self._live = None

  def update(
      self, results: Mapping[str, Mapping[str, Any]], now: str = ""
  ) -> None:
    """Shows the results so far.

    Args:
      results: of the runs that are done, by name.
      now: what is being done.
    """
    if self._num_before is None:
      self._num_before = len(results)
    if self._live is not None:
      table = progress_table(self._runs, results)
      table.caption = f"{self._line(results)}  {now}"
      self._live.update(table, refresh=True)
      return
    for name in [n for n in results if n not in self._shown]:
      self._shown.add(name)
      if len(self._shown) > self._num_before:
        self._console.print(
            f"{self._line(results)}  {name}: {_summary(results[name])}",
            soft_wrap=True,
            highlight=False,
        )

  def line(self, text: str) -> None:
    """Prints `text` where there is no table in place to show it."""
    if self._live is None:
      self._console.print(text, soft_wrap=True, highlight=False)

  def _line(self, results: Mapping[str, Mapping[str, Any]]) -> str:
    done, total = len(results), len(self._runs)
    line = f"{done}/{total} runs"
    new = done - (self._num_before or 0)
    if new > 0 and done < total:
      left_s = (time.monotonic() - self._started) / new * (total - done)
      line += f", about {left_s / 60:.0f} min left"
    return line


def progress_table(
    runs: Sequence[sweep_types.Run], results: Mapping[str, Mapping[str, Any]]
) -> rich.table.Table:
  """Returns objectives by lags; in a cell the mean reward and the seeds."""
  name, title, digits = sweep_table.QUANTITIES[0]
  column = sweep_table.cells(runs, results, name)
  lags = list(dict.fromkeys(run.lag for run in runs))
  num_seeds = len({run.seed for run in runs})
  table = rich.table.Table(
      "objective",
      *(lag.label for lag in lags),
      box=rich.box.SIMPLE,
      title=f"{title} (runs done of {num_seeds} seeds)",
  )
  for objective in dict.fromkeys(run.objective for run in runs):
    mine = [column[objective, lag] for lag in lags]
    table.add_row(
        objective,
        *(
            f"{cell.text(digits)} ({cell.num_seeds + cell.num_diverged})"
            for cell in mine
        ),
    )
  return table


def _summary(result: Mapping[str, Any]) -> str:
  if result["diverged_step"] is not None:
    return f"diverged at step {result['diverged_step']}"
  last = result["curve"][-1]
  texts = [
      f"{name} {last[name]:.{digits}f}"
      for name, _, digits in sweep_table.QUANTITIES
  ]
  return f"{', '.join(texts)} ({result['wall_s']:.0f} s)"

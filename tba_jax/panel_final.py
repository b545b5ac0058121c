# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows at the end of a run: the result, and advice."""

from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.table
import rich.text

from tba_jax import panel_view
from tba_jax.report import tables


def final_table(summary: Mapping[str, Any]) -> rich.table.Table:
  """Returns the table at the end of a run, from its `summary.json`."""
  table = rich.table.Table(
      title="result", box=rich.box.ROUNDED, title_style="bold"
  )
  table.add_column("")
  for name in ("before", "after", "change"):
    table.add_column(name, justify="right")
  for row in tables.compare(
      panel_view.mapping(summary.get("before")),
      panel_view.mapping(summary.get("after")),
  ):
    cells = row["name"], row["before"], row["after"], row["change"]
    table.add_row(*(rich.text.Text(cell) for cell in cells))
  table.add_section()
  restarts = panel_view.mapping(summary.get("restarts"))
  counts = ", ".join(
      f"{n} of {panel_view.safe(r)}" for r, n in restarts.items() if n
  )
  closed = summary.get("ledger_closed")
  steps = panel_view.figure(summary.get("steps"), "count")
  if summary.get("stopped_by"):
    steps += f" (stopped by {panel_view.safe(summary['stopped_by'])})"
  rows = (
      ("steps", steps),
      ("wall clock", tables.duration(panel_view.number(summary.get("wall_s")))),
      ("completions", panel_view.figure(summary.get("completions"), "count")),
      ("completions/s", panel_view.figure(summary.get("completions_per_s"))),
      ("overlap of ideal", panel_view.figure(summary.get("overlap_of_ideal"))),
      ("staleness, steps", panel_view.figure(summary.get("staleness_mean"))),
      ("restarts", counts or "none"),
      ("ledger", "–" if closed is None else "closed" if closed else "OPEN"),
  )
  failed = panel_view.mapping(summary.get("reward_failures"))
  if failed:
    rows += (("completions not judged", " ".join(panel_view.causes(failed))),)
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a run directory, drawn with matplotlib: for notebooks and papers.

The page of `build.py` draws itself and needs none of this.
"""

from collections.abc import Mapping, Sequence
import math

from matplotlib import figure
from matplotlib import patches
from matplotlib import ticker
import numpy as np

from tba_jax.monitor import metrics
from tba_jax.monitor.report import curves as curves_lib
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline as timeline_lib

# What a first look at a run wants to see.
FIRST_LOOK = (
    "Reward",
    "Held-out pass@1",
    "KL to the reference",
    "Entropy",
    "Staleness",
    "Gradient norm",
)
_PANEL_INCHES = 3.6, 2.6
# Okabe and Ito's, which also the colour-blind tell apart.
_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7A6A00",
    "#000000",
)
_WAIT_COLOR = "#D9D9D9"
_LINES = ("-", "--", ":", "-.")


def curves(
    runs: Mapping[str, load.Run],
    titles: Sequence[str] = FIRST_LOOK,
    *,
    num_columns: int = 3,
) -> figure.Figure:
  """Returns a panel for each chart, with a colour for each run.

  Args:
    runs: label -> run; several are compared.
    titles: of charts of `curves.CHARTS`, each a panel.
    num_columns: panels beside each other.

  Raises:
    ValueError: there is no such chart, or no run.
  """
  known = {chart.title: chart for chart in curves_lib.CHARTS}
  wrong = [title for title in titles if title not in known]
  if wrong or not titles or not runs:
    raise ValueError(
        f"titles={list(titles)}, runs={list(runs)}: allowed at least one run"
        f" and any of {list(known)}"
    )
  num_columns = min(num_columns, len(titles))
  num_rows = math.ceil(len(titles) / num_columns)
  fig = figure.Figure(
      figsize=(_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows),
      layout="constrained",
  )
  axes = fig.subplots(num_rows, num_columns, squeeze=False).ravel()
  for ax in axes[len(titles) :]:
    ax.set_axis_off()
  for ax, title in zip(axes, titles):
    _draw_chart(ax, known[title], runs)
  if len(runs) > 1:
    handles = [
        patches.Patch(color=color, label=_words(label, 60))
        for label, color in zip(runs, _cycle(_COLORS, len(runs)))
    ]
    fig.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
    )
  return fig


def _draw_chart(
    ax, chart: curves_lib.Chart, runs: Mapping[str, load.Run]
) -> None:
  """Draws one chart of all runs: its series by kind of line."""
  empty = True
  for color, run in zip(_cycle(_COLORS, len(runs)), runs.values()):
    records = curves_lib.with_evaluations(run.records, run.eval)
    for line, (label, name) in zip(
        _cycle(_LINES, len(chart.series)), chart.series.items()
    ):
      band = chart.band.get(label, "")
      points = curves_lib.thin(records, name, band, chart.band_scale)
      if not points["step"]:
        continue
      empty = False
      steps, mean = points["step"], points["mean"]
      marker = "o" if len(steps) == 1 else None
      ax.plot(steps, mean, line, color=color, marker=marker, label=label)
      if band:
        ax.fill_between(
            steps, points["low"], points["high"], color=color, alpha=0.2, lw=0
        )
  ax.set_title(chart.title)
  ax.set_xlabel("optimizer step")
  ax.set_ylabel("" if chart.percent else chart.unit)
  ax.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
  if chart.percent:
    ax.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  if chart.zero and not empty:
    ax.set_ylim(bottom=min(0, ax.dataLim.ymin))
  if empty:
    ax.text(0.5, 0.5, "no data", ha="center", transform=ax.transAxes)
  elif len(chart.series) > 1:
    _, labels = ax.get_legend_handles_labels()
    once = len(labels) // len(runs) if len(labels) % len(runs) == 0 else None
    ax.legend(ax.lines[:once], labels[:once], fontsize="small")
  _plain(ax)


def timeline(
    run: load.Run, *, first_s: float = 0.0, last_s: float | None = None
) -> figure.Figure:
  """Returns who did what when: a bar for each process, grey where it waits.

  Args:
    run: its spans are drawn.
    first_s, last_s: the stretch, in seconds from the run's first sign of life;
      None: to its end.

  Raises:
    ValueError: nothing was measured in that stretch.
  """
  start = timeline_lib.origin(run)
  lanes = [run.lanes[key] for key in timeline_lib.ordered(run)]
  kept = [_stretch(lane, start, first_s, last_s) for lane in lanes]
  kept = [(lane, spans) for lane, spans in zip(lanes, kept) if len(spans[0])]
  if not kept:
    raise ValueError(
        f"first_s={first_s}, last_s={last_s}: no span of the run lies there"
    )
  fig = figure.Figure(figsize=(11, 1.2 + 0.5 * len(kept)), layout="constrained")
  ax = fig.subplots()
  waits = [metrics.is_wait(kind) for kind in run.span_kinds]
  present = sorted({int(k) for _, (kinds, *_) in kept for k in set(kinds)})
  busy = [kind for kind in present if not waits[kind]]
  color_of = dict(zip(busy, _cycle(_COLORS, len(busy))))
  for row, (_, (kinds, starts, lengths)) in enumerate(kept):
    for kind in present:
      mine = kinds == kind
      ax.broken_barh(
          list(zip(starts[mine], lengths[mine])),
          (row - 0.4, 0.8),
          color=color_of.get(kind, _WAIT_COLOR),
          linewidth=0,
      )
  ax.set_yticks(range(len(kept)), [_lane_name(lane) for lane, _ in kept])
  ax.invert_yaxis()
  ends = [(starts + lengths).max() for _, (_, starts, lengths) in kept]
  ax.set_xlim(first_s, max(ends) if last_s is None else min(last_s, max(ends)))
  ax.set_xlabel("seconds since the run began")
  handles = [
      patches.Patch(color=color_of[kind], label=_words(run.span_kinds[kind]))
      for kind in busy
  ]
  if len(busy) < len(present):
    handles.append(patches.Patch(color=_WAIT_COLOR, label="waiting"))
  fig.legend(
      handles=handles,
      loc="outside upper left",
      ncols=min(len(handles), 9),
      frameon=False,
      fontsize="small",
  )
  _plain(ax, grid=False)
  return fig


def _stretch(
    lane: load.Lane, origin: float, first_s: float, last_s: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns kinds, starts and lengths in seconds of spans in a stretch."""
  starts = np.asarray(lane.t0) - origin
  stops = np.asarray(lane.t1) - origin
  inside = stops >= first_s
  if last_s is not None:
    inside &= starts <= last_s
  kinds = np.asarray(lane.kinds)
  return kinds[inside], starts[inside], (stops - starts)[inside]


def staleness(runs: Mapping[str, load.Run]) -> figure.Figure:
  """Returns how old completions were when they were trained on, by run.

  Raises:
    ValueError: no run has counted any.
  """
  found = {
      label: curves_lib.sum_histograms(
          run.records, "replay/staleness_histogram"
      )
      for label, run in runs.items()
  }
  found = {label: np.array(rows) for label, rows in found.items() if rows}
  if not found:
    raise ValueError(f"runs={list(runs)}: none has a histogram of staleness")
  fig = figure.Figure(figsize=(5, 3), layout="constrained")
  ax = fig.subplots()
  width = 0.8 / len(found)
  colors = _cycle(_COLORS, len(found))
  for i, (color, (label, rows)) in enumerate(zip(colors, found.items())):
    ages, counts = rows.T
    ax.bar(
        ages + (i - (len(found) - 1) / 2) * width,
        counts / counts.sum(),
        width,
        color=color,
        label=_words(label, 60),
    )
  ax.set_xlabel("staleness, optimizer steps")
  ax.set_ylabel("share of completions")
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  ax.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  if len(found) > 1:
    ax.legend(frameon=False)
  _plain(ax)
  return fig


def _lane_name(lane: load.Lane) -> str:
  side = f" ({lane.lane})" if lane.lane else ""
  return _words(f"{lane.role} {lane.index}{side}")


def _words(value: str, limit: int = 40) -> str:
  """Returns text of a run as matplotlib shows it, not as a formula."""
  return load.printable(value, limit, one_line=True).replace("$", r"\$")


def _cycle(values: Sequence[str], count: int) -> list[str]:
  return [values[i % len(values)] for i in range(count)]


def _plain(ax, *, grid: bool = True) -> None:
  """Takes away the lines of the frame that say nothing."""
  ax.spines[["top", "right"]].set_visible(False)
  if grid:
    ax.grid(alpha=0.3)

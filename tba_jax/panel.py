# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The live panel of a run: in place on a terminal, else a line now and then."""

from collections.abc import Mapping
import pathlib
import time
from typing import Any

import rich.console
import rich.live
import rich.text

from tba_jax import panel_view
from tba_jax import run_state

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
          panel_view.render(self._follower.state),
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
      self._live.update(panel_view.render(state), refresh=True)
      return
    phase = panel_view.phase_of(state)
    if phase != self._line_phase or now - self._line_at >= LINE_EVERY_S:
      self._line_phase, self._line_at = phase, now
      self._console.print(
          rich.text.Text(panel_view.plain_line(state)),
          soft_wrap=True,
          highlight=False,
      )

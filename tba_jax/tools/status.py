# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `status` program: prints the live state of a run from its store."""

from collections.abc import Sequence
import pathlib
import sys
import time
from typing import Any

import ml_collections
import rich.console
import rich.text

from tba_jax.report import diagnosis
from tba_jax.report import panel
from tba_jax.report import run_reader
from tba_jax.report import run_state
from tba_jax.report import tables
from tba_jax.run import run_directory
from tba_jax.run import text
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import kv_host
from tba_jax.transport.kv import locator

# Key of the trainer's live state, an authenticated message.
STATUS_KEY = "status/run"
# The trainer's part of the state if searchers are threads of its process.
_NO_STORE = {"generation": 0}


def read_store(
    run_info: run_directory.RunInfo, deadline_s: float
) -> tuple[dict[str, Any] | None, str]:
  """Returns the live state in the run's store, and a note on its source.

  Waits up to `deadline_s` seconds for the store; returns None and the reason if
  there is no state.
  """
  try:
    if (
        not run_info.announced
        and locator.read_locator(run_info.locator) is None
    ):
      return None, "its store is not running"
    transport = kv_client.connect(run_info, deadline_s)
  except (byte_store.TransportError, OSError, ValueError) as error:
    return None, f"its store does not answer: {error}"
  try:
    data = transport.get(STATUS_KEY)
    if data is None:
      return (
          None,
          f"nothing in the store yet (generation {transport.generation})",
      )
    state = wire.decode_placed(
        data, run_info.secret, run_info.run_id, STATUS_KEY
    )
    return state, f"from the store, generation {transport.generation}"
  except (byte_store.TransportError, wire.WireError) as error:
    return None, f"its store gave no readable state: {error}"
  finally:
    transport.close()


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    operands: Sequence[str] = (),
) -> int:
  """Prints the state of the run in `workdir` once.

  Without a store, prints the trainer's last `status.json`.

  Returns:
    0; 1 if the run has no state yet; 2 if there is no run.
  """
  if operands:
    return processes.refuse(f"status takes no operand: {operands}")
  try:
    run_info = run_directory.open_run(workdir, config)
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  status, note = read_store(
      run_info, kv_host.probe_timeout_s(config.store.deadline_s)
  )
  if status is None:
    status = jsonl.read_json(pathlib.Path(workdir) / "status.json")
    # Before training, there is neither this file nor a store.
    where = "the run's files" if status is None else "status.json"
    has_no_store = isinstance(status, dict) and status.get("store") == _NO_STORE
    note = f"from {where}: {'threads have no store' if has_no_store else note}"
  state = run_state.Follower(workdir).read(with_status=False)
  last = _last_process(workdir)
  if not isinstance(status, dict):
    if not (any(state.made.values()) or state.event):
      life = _liveness(state, last)
      print(f"error: {workdir}: no state yet; {note}{life}", file=sys.stderr)
      return 1
    status = {}
  state.status = status
  state.phase = str(status.get("phase", _phase_of_files(state)))
  written_at = status.get("time")
  if text.is_number(written_at):
    note += f"; written {text.duration(max(0.0, time.time() - written_at))} ago"
  state.note = note + _liveness(state, last)
  console = rich.console.Console()
  console.print(panel.render_view(state))
  read = lambda name: jsonl.read_jsonl(pathlib.Path(workdir) / name)
  happened = diagnosis.incidents(
      run_reader.RunData(
          lines=read("metrics.jsonl"), events=read("events.jsonl")
      )
  )
  if happened:
    console.print(rich.text.Text("what happened", "bold"))
    console.print(panel.advice_list(happened))
  return processes.EXIT_OK


def _phase_of_files(state: run_state.RunState) -> str:
  """Returns the phase of a run whose trainer has written no state."""
  if state.reward:
    return "setup"
  made = [phase for phase in run_state.MODEL_PHASES if state.made[phase]]
  return made[-1] if made else "setup"


def _last_process(workdir: str) -> tuple[int, bool] | None:
  """Returns (pid, alive) of the supervisor, or of an unsupervised trainer."""
  processes = [
      run_directory.last_process(workdir, role) for role in ("", "trainer")
  ]
  return max(
      filter(None, processes), key=lambda process: process[1], default=None
  )


def _liveness(state: run_state.RunState, last: tuple[int, bool] | None) -> str:
  """Returns the end of the note about a run that is silent or has ended."""
  if state.phase == "done":
    return ""
  if last is not None and not last[1]:
    words = f"; its process {last[0]} has ended"
  elif last is not None:
    words = f"; its process {last[0]} is there"
  else:
    words = ""
  silent_s = None if state.seen is None else time.time() - state.seen
  if silent_s is not None and silent_s > tables.ALIVE_S:
    return f"; no sign of life for {text.duration(silent_s)}{words}"
  return words if last is not None and not last[1] else ""

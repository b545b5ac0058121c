# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `store` program: hosts the key-value service of a run. No JAX here."""

from collections.abc import Sequence
import logging
import sys

import ml_collections

from tba_jax import metrics
from tba_jax import processes
from tba_jax import run_directory
from tba_jax.transport import kv_host


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Serves until SIGTERM; a service that dies or hangs is replaced."""
  del operands
  processes.die_with_parent()
  stop = processes.stop_on_signals()
  run_info = run_directory.open_run(workdir, config)
  events = metrics.EventLog(run_info.workdir / "events.jsonl")
  logging.basicConfig(level=logging.INFO, stream=sys.stderr)

  def on_event(kind: str, message: str) -> None:
    logging.info("%s: %s", kind, message)
    events.write(f"store_{kind}", message, role="store")

  host = kv_host.KvHost(
      run_info.spool,
      run_info.run_id,
      address=config.store.address,
      probe_timeout_s=config.store.probe_timeout_s,
      on_event=on_event,
  )
  host.run(stop)
  events.close()
  return processes.EXIT_OK

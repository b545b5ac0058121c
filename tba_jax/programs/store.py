# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `store` program: hosts the key-value service of a run."""

from collections.abc import Sequence
import contextlib
import logging
import sys

import ml_collections

from tba_jax.config import differences
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.system import heartbeat
from tba_jax.system import processes
from tba_jax.transport.kv import kv_host


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Serves until SIGTERM; restarts a service that dies or hangs.

  Creates the run directory if needed, or resumes it; some settings may change.

  Returns:
    0; 2 if the directory, secret, address or a setting is invalid; 1 if the
    service does not start.
  """
  del operands
  stop = processes.stop_on_signals()
  try:
    run_info, saved = run_directory.create(workdir, config)
    changed = saved is not None and saved != config.to_dict()
    if changed:
      differences.check_resume(saved, config)
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  run_directory.warn_unguarded(run_info, config)
  events = metrics.EventLog(run_info.files.lines("events.jsonl"))
  # Imports have already installed a handler.
  logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)

  def on_event(kind: str, message: str) -> None:
    logging.info("%s: %s", kind, message)
    events.write(f"store_{kind}", message, role="store")

  activity = heartbeat.Activity("store-0")
  with contextlib.ExitStack() as stack:
    stack.callback(activity.close)
    stack.callback(events.close)
    try:
      host = kv_host.KvHost(
          run_info.spool,
          run_info.run_id,
          address=config.store.address,
          probe_timeout_s=kv_host.probe_timeout_s(config.store.deadline_s),
          on_event=on_event,
          root=run_info.root,
          on_tick=lambda: activity.mark("serve"),
          tls=run_info.tls,
      )
      stack.callback(host.close)
      if changed:
        # Other roles read their settings from this directory.
        run_directory.update(workdir, config)
      if config.store.locator:
        host.announce(config.store.locator, run_info.secret)
    except (ValueError, RuntimeError, OSError) as error:
      return processes.refuse(error)
    try:
      host.run(stop)
    except RuntimeError as error:
      print(f"error: {error}", file=sys.stderr)
      return 1
  return processes.EXIT_OK

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `one_process` program: trainer and searchers on a single device.

The trainer has the main thread, each searcher a thread of its own. They talk
through memory: there is no store. The run directory is that of separate
processes, which may go on where the threads were. The device executes in the
order of dispatch, so decode chunks run between train steps; host code runs
meanwhile.
"""

from collections.abc import Sequence
from concurrent import futures
import os
import sys
import threading

from absl import logging
import ml_collections

from tba_jax.monitor import run_directory
from tba_jax.programs import roles
from tba_jax.system import processes

# Seconds that searchers get to end their block after the trainer has ended.
_LEAVE_S = 10.0


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs until the last step, a signal, or an error of any thread.

  Returns the trainer's exit status. The error of a searcher interrupts the
  trainer, which saves; it is then raised here.
  """
  stop, leave = processes.start_role(), threading.Event()
  run_info = run_directory.open_run(workdir, config)
  channel = roles.MemoryChannel(config, run_info)
  count = config.search.num_searchers
  pool = futures.ThreadPoolExecutor(count, thread_name_prefix="searcher")
  searchers = [
      pool.submit(roles.search, config, workdir, index, leave.is_set, channel)
      for index in range(count)
  ]

  def errors() -> list[BaseException]:
    found = [one.exception() for one in searchers if one.done()]
    return [error for error in found if error is not None]

  status, error = processes.EXIT_OK, None
  try:
    status = roles.train(
        config,
        workdir,
        operands,
        lambda: stop.is_set() or bool(errors()),
        channel,
    )
  except Exception as raised:  # pylint: disable=broad-exception-caught
    error = raised
  leave.set()
  late = futures.wait(searchers, _LEAVE_S).not_done
  for of_searcher in errors():
    logging.error("a searcher has failed", exc_info=of_searcher)
  if errors() and status == processes.EXIT_INTERRUPTED:
    error = errors()[0]
  if late:
    # The interpreter's own exit would wait for their threads.
    logging.warning(
        "%d searchers did not end in time", len(late), exc_info=error
    )
    if error is not None:
      refused = isinstance(error, run_directory.NoRunError)
      status = processes.EXIT_CONFIG if refused else 1
    sys.stderr.flush()
    os._exit(status)  # pylint: disable=protected-access
  if error is not None:
    raise error
  return status

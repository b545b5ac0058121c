# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `one_process` program: trainer and searchers on a single device.

The trainer has the main thread, each searcher a thread of its own. They talk
through memory: there is no store. The run directory, if there is one, is that
of separate processes, which may go on where the threads were. The device
executes in the order of dispatch, so decode chunks run between train steps;
host code runs meanwhile.
"""

from collections.abc import Sequence
from concurrent import futures
import os
import sys
import threading

from absl import logging
import ml_collections

from tba_jax.learning import published
from tba_jax.programs import roles
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.transport.groups import memory

# Seconds that searchers get to end their block after the trainer has ended.
_LEAVE_S = 10.0


class LateSearchers(RuntimeError):
  """Searchers did not end in time; their threads still run.

  status: exit status of the program.
  """

  def __init__(self, status: int, count: int):
    super().__init__(f"{count} searchers did not end in time")
    self.status = status


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs until the last step, a signal, or an error of any thread.

  Returns the trainer's exit status; raises as `train`.
  """
  stop = processes.start_role("trainer")
  run_info = run_directory.open_run(workdir, config)
  try:
    return train(config, run_info, operands, stop)
  except LateSearchers as error:
    # The interpreter's own exit would wait for their threads.
    logging.warning("%s", error, exc_info=error.__cause__)
    sys.stderr.flush()
    os._exit(error.status)  # pylint: disable=protected-access


def train(
    config: ml_collections.ConfigDict,
    run_info: run_directory.RunInfo,
    operands: Sequence[str],
    stop: threading.Event,
) -> int:
  """Trains in this thread, with searchers in others; returns the exit status.

  The error of a searcher interrupts the trainer, which saves; it is then
  raised here.

  Args:
    config: config of the run.
    run_info: the run; without files, if it keeps its records in memory.
    operands: place of the process in its cluster.
    stop: interrupts the trainer; set after an error of a searcher.

  Raises:
    LateSearchers: a searcher did not end; the error that ended the run, if any,
      is its cause.
  """
  leave = threading.Event()
  channel = memory.MemoryChannel(
      config,
      None if run_info.memory else run_info,
      published.make_copy(config),
  )
  count = config.search.num_searchers
  pool = futures.ThreadPoolExecutor(count, thread_name_prefix="searcher")

  def search(index: int) -> None:
    try:
      roles.search(config, run_info, index, leave.is_set, channel)
    except BaseException:
      stop.set()
      raise

  searchers = [pool.submit(search, index) for index in range(count)]
  status, error = processes.EXIT_OK, None
  try:
    status = roles.train(config, run_info, operands, stop.is_set, channel)
  except Exception as raised:  # pylint: disable=broad-exception-caught
    error = raised
  finally:
    leave.set()
    ended, late = futures.wait(searchers, _LEAVE_S)
  errors = [e for s in searchers if s in ended and (e := s.exception())]
  for raised in errors:
    logging.error("a searcher has failed", exc_info=raised)
  if errors and status == processes.EXIT_INTERRUPTED:
    error = errors[0]
  if late:
    if error is not None:
      refused = isinstance(error, run_directory.NoRunError)
      status = processes.EXIT_CONFIG if refused else 1
    raise LateSearchers(status, len(late)) from error
  if error is not None:
    raise error
  return status

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainer and searchers as threads of one process, on a single device.

They communicate through memory, without a store. The device executes in order
of dispatch, so decode chunks run between train steps, concurrently with host
code.

`run`, the `one_process` program, has a run directory, with which separate
processes may continue. `train_in_memory`, used by `tba_jax.train(config)`,
keeps its records in memory.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import os
import sys
import tempfile
import threading
import time

from absl import logging
import ml_collections

from tba_jax.config import load
from tba_jax.config import stages
from tba_jax.learning import published
from tba_jax.policy import prompt_preview
from tba_jax.programs import model_sizes
from tba_jax.programs import reward_model
from tba_jax.programs import roles
from tba_jax.programs import sft
from tba_jax.report import page as report
from tba_jax.report import panel
from tba_jax.run import files
from tba_jax.run import run_directory
from tba_jax.system import accelerators
from tba_jax.system import processes
from tba_jax.transport.groups import memory as memory_lib

# Seconds that searchers get to finish their block after the trainer has ended.
_LEAVE_S = 10.0
_STAGES = {"sft": sft.run, "reward_model": reward_model.run}


class LateSearchers(RuntimeError):
  """Searchers did not end in time; their threads are still running."""

  def __init__(self, status: int, count: int):
    super().__init__(f"{count} searchers did not end in time")
    self.status = status


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs until the last step, a signal, or an error of any thread.

  Returns the trainer's exit status; raises like `train`.
  """
  stop = processes.start_role("trainer")
  run_info = run_directory.open_run(workdir, config)
  try:
    return train(config, run_info, operands, stop)
  except LateSearchers as error:
    # A normal exit of the interpreter would wait for their threads.
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

  An error of a searcher interrupts the trainer, which saves; the error is then
  raised here.

  Args:
    run_info: the run, which has no files if it keeps its records in memory.
    operands: place of the process in its cluster.
    stop: event that interrupts the trainer; set after an error of a searcher.

  Raises:
    LateSearchers: a searcher did not end; its cause is the error that ended the
      run, if there was one.
  """
  leave = threading.Event()
  channel = memory_lib.MemoryChannel(
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


def train_in_memory(
    config: ml_collections.ConfigDict,
    *,
    stop: threading.Event,
    on_start: Callable[[files.Memory], None],
    shows: bool,
) -> str:
  """Trains to the last step in this thread; writes no file; returns the report.

  A temporary folder holds the models that earlier stages train.

  Args:
    stop: event that ends the run at its current step.
    on_start: function called with the records, which can be read during the
      run.
    shows: whether to print progress and the result.

  Raises:
    ValueError: a file does not fit; the message names it.
    RuntimeError: the run failed.
    KeyboardInterrupt: the user interrupted the run, which leaves nothing
      behind.
  """
  if shows:
    prompt_preview.print_data(config, shows_prompt=True)
  config = config.copy_and_resolve_references()
  load.make_paths_absolute(config)
  accelerators.prepare()
  processes.prepare_compiling()
  started = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as workdir:
    config = model_sizes.with_compute_dtype(config, workdir)
    run_info = run_directory.in_memory(workdir, config)
    memory = run_info.memory
    on_start(memory)
    with panel.lines(run_info.workdir, memory=memory, quiet=not shows) as view:
      for name in stages.before_run(config):
        if not stop.is_set():
          view.phase(name)
          _STAGES[name](config, workdir, stop=stop)
      status = processes.EXIT_INTERRUPTED
      if not stop.is_set():
        status = train(config, run_info, (), stop)
    if status and status != processes.EXIT_INTERRUPTED:
      raise RuntimeError(f"the run ended with status {status}")
    summary = {
        **(memory.read("result.json") or {}),
        "wall_s": time.monotonic() - started,
        "restarts": {},
    }
    memory.write("summary.json", summary)
    memory.save(run_info.workdir)
    page, verdict, advice = report.conclude(workdir)
    if status == processes.EXIT_OK:
      view.print(panel.final_table(summary, verdict.sentence))
      view.print(panel.advice_list(advice))
    return page.read_text()

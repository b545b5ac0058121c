# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run from Python in three lines, which leaves nothing but its result."""

import collections
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
import pytest

import tba_jax
from tba_jax.learning import learner
from tba_jax.programs import roles
from tba_jax.system import accelerators

# Files of the package that a step may run, in all threads: it runs 46, of which
# the loop in one thread alone has 27.
_MAX_FILES = 48


class InMemoryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # Another directory than that of tests beside this one.
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.object(tempfile, "tempdir", self.folder))

  def files(self):
    return {*self.folder.iterdir(), *pathlib.Path.cwd().iterdir()}

  def make_config(self, *overrides):
    return tba_jax.load_config("configs/countdown.py:smoke", overrides)

  @pytest.mark.slow
  def test_trains_and_leaves_no_file_process_thread_or_handler(self):
    before, threads = self.files(), threading.active_count()
    handler = signal.getsignal(signal.SIGUSR1)
    with mock.patch.object(os, "fork", side_effect=AssertionError("a process")):
      with self.watch_training() as written:
        result = tba_jax.train(self.make_config())
    self.assertEmpty(written)
    self.assertEqual(self.files(), before)
    self.assertEqual(signal.getsignal(signal.SIGUSR1), handler)
    self.assertLessEqual(threading.active_count(), threads)
    steps = [record["step"] for record in result.steps]
    self.assertEqual(steps, [*range(result.summary["steps"])])
    self.assertTrue(result.summary["ledger_closed"])
    self.assertIn('"train/reward_mean"', result.report)
    self.assertIn("srcdoc=", result._repr_html_())
    self.assertRegex(repr(result), r"status 0, .*pass@1 0\.\d+ → 0\.\d+")

  @pytest.mark.slow
  def test_step_runs_few_files_and_none_of_store(self):
    root = f"{pathlib.Path(tba_jax.__file__).parent}{os.sep}"
    steps, step = [set()], learner.Learner.step

    def begin(self, draw):
      steps.append(set())
      return step(self, draw)

    def note(frame, event, arg):
      del arg
      if event == "call":
        name = frame.f_code.co_filename
        if name.startswith(root):
          steps[-1].add(name.removeprefix(root))

    config = self.make_config("init=scratch", "train.num_steps=16")
    try:
      threading.setprofile(note)
      sys.setprofile(note)
      with mock.patch.object(learner.Learner, "step", begin):
        tba_jax.train(config)
    finally:
      sys.setprofile(None)
      threading.setprofile(None)
    # Between the first step, which compiles, and the last. What runs once a
    # second is not part of a step.
    steady = steps[6:14]
    counts = collections.Counter(name for step in steady for name in step)
    files = sorted(n for n, count in counts.items() if 2 * count > len(steady))
    self.assertIn("transport/groups/memory.py", files)
    self.assertLessEqual(len(files), _MAX_FILES, files)
    of_the_store = (
        "transport/kv transport/params transport/wire transport/groups/intake"
        " transport/groups/journal transport/groups/leases"
        " transport/groups/memory_journal transport/groups/queue_"
        " replay/decisions"
        " learning/checkpoint learning/host_state system/jsonl"
    ).split()
    for name in files:
      self.assertFalse(name.startswith(tuple(of_the_store)), name)

  @contextlib.contextmanager
  def watch_training(self):
    """Yields the files that are written while the trainer runs."""
    written, train, is_training = [], roles.train, threading.Event()

    def watched(*args):
      is_training.set()
      try:
        return train(*args)
      finally:
        is_training.clear()

    def audit(event, args):
      if is_training.is_set() and event in ("open", "os.mkdir", "os.rename"):
        is_read = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        # Compiled programs are kept for later processes.
        if not is_read and "/.cache/" not in str(args[0]):
          written.append((event, *args))

    sys.addaudithook(audit)  # It stays, and does nothing after training.
    with mock.patch.object(roles, "train", watched):
      yield written

  def test_raises_error_of_run_and_leaves_no_file(self):
    before = self.files()
    with self.assertRaisesRegex(ValueError, "loss.beta = -1"):
      tba_jax.train(self.make_config("loss.beta=-1"))
    # Threads of one process share its devices.
    with self.assertRaisesRegex(ValueError, "mesh.fsdp = 2: must be 1"):
      tba_jax.train(self.make_config("mesh.fsdp=2"))
    with (
        mock.patch.object(roles, "train", side_effect=KeyboardInterrupt),
        mock.patch.object(accelerators, "prepare") as prepare,
        self.assertRaises(KeyboardInterrupt),
    ):
      tba_jax.train(self.make_config("init=scratch"))
    prepare.assert_called_once_with()
    self.assertEqual(self.files(), before)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How trainer and searchers end each other within one process."""

import contextlib
import threading
from unittest import mock

from absl.testing import parameterized

from tba_jax.config import settings
from tba_jax.programs import one_process
from tba_jax.programs import roles
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.transport.groups import memory

_WAIT_S = 20.0


class OneProcessTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.stop = threading.Event()
    self.config = settings.get_config()
    self.config.search.num_searchers = 2
    self.left = []  # indices of searchers that were told to leave
    self.channels = []  # channel of each role
    for module, name, made in (
        (processes, "start_role", lambda role: self.stop),
        (run_directory, "open_run", mock.Mock()),
        (roles, "train", self.train),
        (roles, "search", self.search),
    ):
      self.enter_context(mock.patch.object(module, name, made))

  def run_it(self):
    return one_process.run(self.config, "RUN", ["0"])

  def train(self, config, workdir, operands, should_stop, channel):
    """Trains until it is told to stop."""
    self.channels.append(channel)
    waited = threading.Event()
    while not should_stop():
      self.assertFalse(waited.wait(0.001))
    return processes.EXIT_INTERRUPTED

  def search(self, config, workdir, index, should_stop, channel):
    self.channels.append(channel)
    waited = threading.Event()
    while not should_stop():
      waited.wait(0.001)
    self.left.append(index)
    return False

  def test_searchers_leave_when_trainer_has_ended(self):
    with mock.patch.object(roles, "train", lambda *_: processes.EXIT_OK):
      self.assertEqual(self.run_it(), processes.EXIT_OK)
    self.assertCountEqual(self.left, [0, 1])

  def test_all_threads_share_channel_in_memory(self):
    self.stop.set()
    self.assertEqual(self.run_it(), processes.EXIT_INTERRUPTED)
    self.assertLen(self.channels, 3)
    self.assertLen(set(map(id, self.channels)), 1)
    self.assertIsInstance(self.channels[0], memory.MemoryChannel)

  def test_error_of_trainer_ends_all(self):
    def train(*args):
      raise RuntimeError("no memory")

    with mock.patch.object(roles, "train", train):
      with self.assertRaisesRegex(RuntimeError, "no memory"):
        self.run_it()
    self.assertCountEqual(self.left, [0, 1])

  def test_error_of_searcher_interrupts_trainer_and_is_raised(self):
    def search(config, workdir, index, should_stop, channel):
      if index == 1:
        raise run_directory.NoRunError("no such model")
      return self.search(config, workdir, index, should_stop, channel)

    with mock.patch.object(roles, "search", search):
      with self.assertRaisesRegex(run_directory.NoRunError, "no such model"):
        with self.assertLogs("absl", "ERROR"):
          self.run_it()
    self.assertEqual(self.left, [0])

  @parameterized.parameters(False, True)
  def test_process_exits_despite_hanging_searcher(self, refused):
    free = threading.Event()
    self.addCleanup(free.set)
    self.stop.set()

    def search(config, workdir, index, should_stop, channel):
      if refused and index == 1:
        raise run_directory.NoRunError("no such model")
      free.wait(_WAIT_S)

    with contextlib.ExitStack() as patches:
      for target, name, made in (
          (roles, "search", search),
          (one_process, "_LEAVE_S", 0.01),
      ):
        patches.enter_context(mock.patch.object(target, name, made))
      leave = patches.enter_context(
          mock.patch.object(one_process.os, "_exit", side_effect=SystemExit)
      )
      with self.assertRaises(SystemExit):
        self.run_it()
    leave.assert_called_once_with(
        processes.EXIT_CONFIG if refused else processes.EXIT_INTERRUPTED
    )

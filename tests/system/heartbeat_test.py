# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The heartbeat: what counts as progress, and its way to the supervisor."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from tba_jax.system import heartbeat
from tba_jax.system import processes

_ROOT = pathlib.Path(__file__).parents[2]
_MODULE = """
import sys, time
from tba_jax.system import heartbeat
assert sys.argv[1:] == ["a b"], sys.argv
activity = heartbeat.Activity("searcher-1")
activity.mark("decode")
activity.mark("reward")
activity.mark("decode")
waiting = heartbeat.Activity("searcher-2")
waiting.mark("wait_work", waits=True)
time.sleep(60)
"""


class ActivityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.activity = heartbeat.Activity("trainer-0")
    self.addCleanup(self.activity.close)
    self.cpu_s = 10.0

  def beat(self, count, cpu_share=0.0):
    """Returns the ages of some beats."""
    ages = []
    for _ in range(count):
      self.cpu_s += cpu_share
      ages.append(self.activity.beat(self.cpu_s))
    return ages

  def test_counts_beats_since_last_mark(self):
    self.activity.mark("step")
    self.assertEqual(self.beat(3), [1, 2, 3])
    self.activity.mark()
    self.activity.mark("record")
    self.assertEqual(self.beat(2), [1, 2])

  def test_waiting_is_not_stalling(self):
    self.activity.mark("wait_fresh", waits=True)
    self.assertEqual(self.beat(3), [0, 0, 0])
    self.activity.mark("step")
    self.assertEqual(self.beat(3), [1, 2, 3])

  # Threads beside a loop that hangs use about one percent.
  @parameterized.parameters((0.5, False), (0.05, False), (0.01, True))
  def test_first_activity_may_take_long(self, share, hangs):
    self.activity.mark("step")
    self.assertEqual(max(self.beat(300, share)) > 100, hangs)
    self.activity.mark("step")
    self.activity.mark("record")
    self.activity.mark("step")
    # The second time may not take long.
    self.assertEqual(self.beat(601, share)[-1], 601)

  def test_works_is_neither_wait_nor_hang(self):
    self.assertFalse(self.activity.works)
    self.activity.mark("decode")
    for _ in range(300):  # On a busy machine.
      self.beat(1, 0.05)
      self.assertTrue(self.activity.works)
    self.beat(100)
    self.assertFalse(self.activity.works)
    self.activity.mark("wait_work", waits=True)
    self.beat(1, 0.5)
    self.assertFalse(self.activity.works)

  def test_up_to_twice_longest_time_is_usual(self):
    self.activity.mark("step")
    self.beat(40)
    self.activity.mark("record")
    self.activity.mark("step")
    self.assertEqual(self.beat(80), [0] * 80)
    self.assertEqual(self.beat(1), [81])
    self.activity.mark("record")
    self.assertEqual(self.beat(1), [1])

  def test_span_within_another_is_counted(self):
    self.activity.mark("evaluate")
    with self.activity.span("wait_model", waits=True):
      self.assertEqual(self.beat(2), [0, 0])
    self.assertEqual(self.activity.doing, "evaluate")
    self.assertEqual(self.beat(2), [1, 2])


class RoleTest(absltest.TestCase):

  def start(self, text, **options):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "module.py").write_text(text)
    self.listener = heartbeat.Listener()
    self.addCleanup(self.listener.close)
    command = "-m tba_jax.system.role role-0 module".split()
    process = subprocess.Popen(
        [sys.executable, *command, "a b"],
        env={
            **os.environ,
            **self.listener.environment,
            "PYTHONPATH": f"{_ROOT}:{folder}",
            processes.SUPERVISED: str(os.getpid()),
        },
        pass_fds=[self.listener.pipe],
        **options,
    )
    os.close(self.listener.pipe)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return process

  def look_for(self, condition):
    deadline = time.monotonic() + 30.0
    while not condition(lines := self.listener.look()):
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.05)
    return lines

  @pytest.mark.slow
  def test_lines_of_process_until_it_is_stopped(self):
    process = self.start(_MODULE)
    self.look_for(lambda lines: any(age_s >= 2 for age_s, _, _ in lines))
    lines = self.look_for(bool)
    self.assertEqual(
        {line[1:] for line in lines},
        {("searcher-1", "decode"), ("searcher-2", "wait_work")},
    )
    self.assertEqual({age_s for age_s, name, _ in lines if "2" in name}, {0})
    process.send_signal(signal.SIGSTOP)
    self.look_for(lambda _: self.listener.silent > 40)
    process.send_signal(signal.SIGCONT)
    # The time in which it was stopped does not count.
    self.assertLess(max(self.look_for(bool))[0], 10)
    self.assertEqual(self.listener.silent, 0)

  def test_process_without_activity(self):
    self.start("import time; time.sleep(60)")
    self.assertEqual(self.look_for(bool)[0][1:], ("role-0", "start"))

  def test_descriptors_are_not_passed_on(self):
    text = "import os, subprocess; subprocess.run(['sleep', '60'])"
    process = self.start(text, start_new_session=True)
    self.look_for(bool)
    process.kill()
    process.wait()
    # Only the end of all writers reads as an empty line forever.
    self.assertEqual(os.read(self.listener.descriptor, 1 << 16)[:0], b"")
    self.assertEqual(os.read(self.listener.descriptor, 1), b"")
    os.killpg(process.pid, signal.SIGKILL)

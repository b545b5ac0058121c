# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Children: cores, logs, deaths, and an end for those that refuse it."""

import json
import os
import pathlib
import signal
import sys
import time
from unittest import mock

from absl.testing import absltest

from tba_jax.programs import train
from tba_jax.system import processes

# Stands in for the interpreter: what a role would be, it is told by its index.
_SCRIPT = """#!{python}
import os, signal, sys, time
role, index = sys.argv[3].split("=")[1], int(sys.argv[5])
print("args", *sys.argv[1:])
print("cores", *sorted(os.sched_getaffinity(0)))
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"))
print("session", os.getsid(0) == os.getpid())
if role == "deaf":
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "polite":
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
signal.signal(signal.SIGUSR1, lambda *_: print("more", flush=True))
if role == "short":
  sys.exit(index)
print("ready", flush=True)

while True:
  time.sleep(60)
"""
_WAIT_S = 20.0


class ChildrenTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    script = self.workdir / "role"
    script.write_text(_SCRIPT.format(python=sys.executable))
    script.chmod(0o700)
    patch = mock.patch.object(sys, "executable", str(script))
    patch.start()
    self.addCleanup(patch.stop)
    self.children = train.Children(self.workdir)
    self.addCleanup(self.kill_all)

  def kill_all(self):
    for child in self.children.all:
      if child.process.poll() is None:
        child.process.kill()
        child.process.wait()

  def add(self, role, index=0, cores=()):
    """Starts a child and waits until it is ready for signals."""
    child = self.children.add(role, index, cores)
    self.wait_for(lambda: "ready" in self.log(child))
    return child

  def log(self, child):
    return self.children.log_path(child).read_text()

  def wait_for(self, condition):
    deadline = time.monotonic() + _WAIT_S
    while not condition():
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.005)

  def table(self):
    rows = json.loads((self.workdir / "processes.json").read_text())
    return [(row["role"], row["index"], row["pid"]) for row in rows]

  def test_a_child_gets_its_role_cores_and_log(self):
    own = processes.available_cores()
    child = self.add("polite", 3, own[-1:])
    self.assertEqual(child.name, "polite-3")
    log = self.log(child)
    self.assertIn(
        f"args -m tba_jax.main --program=polite --workdir={self.workdir} 3\n",
        log,
    )
    self.assertIn(f"cores {own[-1]}\n", log)
    # A signal to the terminal's group does not reach it.
    self.assertIn("session True", log)
    # The supervisor itself stays where it was.
    self.assertEqual(processes.available_cores(), own)

  def test_no_cores_means_all(self):
    child = self.add("polite")
    own = " ".join(map(str, processes.available_cores()))
    self.assertIn(f"cores {own}\n", self.log(child))

  def test_a_start_that_fails_leaves_the_cores_alone(self):
    own = processes.available_cores()
    with mock.patch.object(sys, "executable", str(self.workdir / "missing")):
      with self.assertRaises(FileNotFoundError):
        self.children.add("polite", 0, own[-1:])
    self.children.all.clear()
    self.assertEqual(processes.available_cores(), own)

  def test_a_restart_goes_on_in_the_same_log(self):
    child = self.children.add("short", 4, ())
    self.assertEqual(child.process.wait(_WAIT_S), 4)
    self.children.start(child)
    child.process.wait(_WAIT_S)
    self.assertEqual(self.log(child).count("args "), 2)
    self.assertEqual(self.children.all, [child])

  def test_a_long_log_is_rotated_while_its_process_writes(self):
    child = self.add("polite")
    path = self.children.log_path(child)
    self.children.rotate_logs()
    self.assertIn("ready", self.log(child))
    with mock.patch.object(train, "_MAX_LOG_BYTES", 10):
      self.children.rotate_logs()
    self.assertIn("ready", path.with_name("polite-0.log.1").read_text())
    self.assertEqual(self.log(child), "")
    child.process.send_signal(signal.SIGUSR1)
    self.wait_for(lambda: "more" in self.log(child))
    self.assertEqual(self.log(child), "more\n")

  def test_a_group_meets_at_an_address_and_is_started_together(self):
    group = self.children.add_group("short", (), [{}, {}])
    for index, child in enumerate(group):
      self.assertEqual(child.process.wait(_WAIT_S), index)
    first = {child.operands for child in group}
    self.assertLen(first, 1)
    address = first.pop()[0]
    self.assertStartsWith(address, "127.0.0.1:")
    self.assertIn(f"1 {address}\n", self.log(group[1]))
    group[0].finished = True
    self.children.start_again(group[1])
    for child in group:
      child.process.wait(_WAIT_S)
      self.assertEqual(self.log(child).count("args "), 2)
      self.assertFalse(child.finished)
    self.assertEqual(self.children.all, group)

  def test_processes_see_their_own_devices(self):
    group = self.children.add_group(
        "short", (), [{"CUDA_VISIBLE_DEVICES": f"{i}"} for i in range(2)]
    )
    for index, child in enumerate(group):
      child.process.wait(_WAIT_S)
      self.assertIn(f"devices {index}\n", self.log(child))

  def test_a_group_of_one_is_a_child_as_any(self):
    (child,) = self.children.add_group("short", (), [{}])
    child.process.wait(_WAIT_S)
    self.assertIn(f" --workdir={self.workdir} 0\n", self.log(child))
    self.assertIs(self.children.end_group(child), child)

  def test_a_group_ends_whole_and_who_failed_tells_why(self):
    group = self.children.add_group("deaf", (), [{}] * 3)
    for child in group:
      self.wait_for(lambda child=child: "ready" in self.log(child))
    group[1].process.kill()
    with mock.patch.object(train, "_TOGETHER_S", 0.1):
      self.assertIs(self.children.end_group(group[1]), group[1])
    for child in group:
      self.assertIsNotNone(child.process.poll())

  def test_words_of_its_own_tell_more_than_an_abort(self):
    group = self.children.add_group("short", (), [{}] * 4)
    for child in group:
      child.process.wait(_WAIT_S)
    for expected, *codes in (
        (2, 1, -signal.SIGABRT, processes.EXIT_FATAL, 1),
        (3, -signal.SIGABRT, -signal.SIGABRT, -signal.SIGABRT, 1),
        # Process 0 has done what was asked.
        (0, 0, -signal.SIGABRT, 1, 1),
    ):
      for child, code in zip(group, codes, strict=True):
        child.process.returncode = code
      self.assertEqual(self.children.end_group(group[1]).index, expected)

  def test_end_is_polite_first(self):
    child = self.add("polite")
    other = self.add("other")
    self.children.end(["polite"], 10.0)
    self.assertEqual(child.process.returncode, 5)
    self.assertIsNone(other.process.poll())

  def test_end_kills_who_does_not_listen(self):
    deaf, stopped = self.add("deaf"), self.add("polite")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    polite = self.add("polite", 1)
    self.children.end(["deaf", "polite"], 0.5)
    self.assertEqual(deaf.process.returncode, -signal.SIGKILL)
    self.assertEqual(stopped.process.returncode, -signal.SIGKILL)
    # One deadline for all: who listens is not killed for the others' sake.
    self.assertEqual(polite.process.returncode, 5)

  def test_end_of_what_has_ended_does_nothing(self):
    child = self.children.add("short", 6, ())
    child.process.wait(_WAIT_S)
    self.children.end(["short", "never_started"], 0.0)
    self.assertEqual(child.process.returncode, 6)

  def test_three_deaths_within_a_minute_are_too_many(self):
    child = train.Child("trainer", 0, ())

    def died(now):
      with mock.patch.object(time, "monotonic", return_value=now):
        return self.children.died_too_often(child)

    self.assertFalse(died(100.0))
    self.assertFalse(died(130.0))
    self.assertFalse(died(161.0))  # The first is more than a minute ago.
    self.assertTrue(died(189.0))

  def test_the_table_has_what_runs(self):
    child = self.add("polite", 2)
    gone = self.children.add("short", 0, ())
    gone.process.wait(_WAIT_S)
    self.children.write_table(None)
    self.assertEqual(self.table(), [("polite", 2, child.process.pid)])
    self.children.write_table(77)
    self.assertEqual(self.table()[1:], [("kvservice", 0, 77)])

  def test_tail(self):
    child = train.Child("role", 0, ())
    self.assertIn("no log", self.children.tail(child))
    path = self.children.log_path(child)
    path.write_text("".join(f"line {i}\n" for i in range(5000)) + "\xff")
    self.assertEqual(self.children.tail(child, 3), "line 4998\nline 4999\n\xff")
    path.write_bytes(b"\xff\xfe bytes")
    self.assertIn("bytes", self.children.tail(child))


if __name__ == "__main__":
  absltest.main()

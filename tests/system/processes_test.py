# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cores, signals, and the private directory of a run's sockets."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.system import processes

_NO_SETTING = {"trainer": "", "searcher": "", "store": ""}


class CoresTest(parameterized.TestCase):

  @parameterized.parameters(
      ("0", [0]),
      ("0,2", [0, 2]),
      ("0-3", [0, 1, 2, 3]),
      ("5,0-2,1", [0, 1, 2, 5]),
  )
  def test_parse(self, text, cores):
    self.assertEqual(processes.parse_cores(text), cores)

  @parameterized.parameters("", "a", "1-", "-1", "0;1", "3-1", "0,,1", "1-2-3")
  def test_parse_refuses(self, text):
    with self.assertRaisesRegex(ValueError, "cores '"):
      processes.parse_cores(text)

  def assign(self, mine, num_searchers, per_searcher=1, **settings):
    with mock.patch.object(
        processes, "available_cores", autospec=True, return_value=mine
    ):
      return processes.assign_cores(
          {**_NO_SETTING, **settings}, num_searchers, per_searcher
      )

  def test_one_core_is_shared_without_binding(self):
    self.assertEqual(
        self.assign([3], 2), {"trainer": [], "store": [], "searchers": [[], []]}
    )

  def test_two_cores_are_split(self):
    self.assertEqual(
        self.assign([0, 1], 1),
        {"trainer": [0], "store": [1], "searchers": [[1]]},
    )

  def test_searchers_get_one_core_each_and_at_most_half(self):
    self.assertEqual(
        self.assign([0, 1, 4, 5], 1),
        {"trainer": [0, 1, 4], "store": [5], "searchers": [[5]]},
    )
    four = self.assign([0, 1, 2, 3], 3)
    self.assertEqual(four["trainer"], [0, 1])
    self.assertEqual(four["searchers"], [[2], [3], [2]])

  def test_a_searcher_of_several_virtual_devices_gets_a_core_for_each(self):
    out = self.assign([*range(8)], 1, 3)
    self.assertEqual((out["trainer"], out["searchers"]),
                     ([0, 1, 2, 3, 4], [[5, 6, 7]]))  # fmt: skip
    out = self.assign([*range(8)], 2, 4)
    self.assertEqual(out["trainer"], [0, 1, 2, 3])
    self.assertEqual(out["searchers"], [[4, 5], [6, 7]])

  def test_settings_rule(self):
    out = self.assign([0, 1], 2, trainer="all", searcher="2-5", store="7")
    self.assertEqual(
        out, {"trainer": [], "store": [7], "searchers": [[2, 3], [4, 5]]}
    )

  def test_searchers_without_binding(self):
    out = self.assign([0, 1], 2, searcher="all")
    self.assertEqual(out["searchers"], [[], []])
    self.assertEqual(out["trainer"], [0])

  def test_pin_binds_and_an_empty_list_does_not(self):
    mine = processes.available_cores()
    self.addCleanup(os.sched_setaffinity, 0, mine)
    processes.pin(mine[-1:])
    self.assertEqual(processes.available_cores(), mine[-1:])
    processes.pin([])
    self.assertEqual(processes.available_cores(), mine[-1:])


class SignalsTest(absltest.TestCase):

  def test_restart_as_role_keeps_the_command_and_what_the_caller_set(self):
    name = "GLIBC_TUNABLES"
    script = (
        "import os, sys; from tba_jax.system import processes;"
        " processes.restart_as_role();"
        f" print(os.getpid(), sys.argv[1:], os.environ[{name!r}])"
    )
    bare = {k: v for k, v in os.environ.items() if k != name}
    for own in ({}, {name: "glibc.malloc.check=0"}):
      with subprocess.Popen(
          [sys.executable, "-c", script, "a b", "c"],
          env={**bare, **own},
          stdout=subprocess.PIPE,
          text=True,
      ) as process:
        printed, _ = process.communicate(timeout=60)
      wanted = own.get(name, processes.ROLE_ENVIRONMENT[name])
      self.assertEqual(printed, f"{process.pid} ['a b', 'c'] {wanted}\n")

  def test_stop_on_signals(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
      try:
        stop = processes.stop_on_signals()
        self.assertFalse(stop.is_set())
        signal.raise_signal(number)
        self.assertTrue(stop.wait(5.0))
        # A second one does not end the process either.
        signal.raise_signal(number)
      finally:
        for n, handler in before.items():
          signal.signal(n, handler)

  def _supervised(self, supervisor):
    """Returns the exit status of a process that such a supervisor started."""
    script = (
        "from tba_jax.system import processes; processes.die_with_supervisor();"
        "print('here')"
    )
    environment = {**os.environ, processes.SUPERVISED: str(supervisor)}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        check=False,
    ).returncode

  def test_a_supervisor_that_ended_before_takes_its_process_along(self):
    self.assertEqual(self._supervised(os.getpid()), 0)
    # Of another parent than the one that started it: that one is gone.
    self.assertEqual(self._supervised(os.getppid()), -signal.SIGKILL)

  def test_die_with_parent(self):
    # The middle process starts one that binds itself to it, and is killed.
    child = (
        "from tba_jax.system import processes; processes.die_with_parent();"
        "print('ready', flush=True); import time; time.sleep(60)"
    )
    middle = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}],"
        "stdout=subprocess.PIPE, text=True);"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", middle],
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while _is_running(pid):
      self.assertLess(time.monotonic(), deadline, "it outlived its parent")
      time.sleep(0.01)


def _is_running(pid: int) -> bool:
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return text.rpartition(")")[2].split()[0] != "Z"


class SpoolDirectoryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="sp")
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    # So that no test touches the user's own.
    patch = mock.patch.object(
        tempfile, "gettempdir", autospec=True, return_value=str(self.folder)
    )
    patch.start()
    self.addCleanup(patch.stop)

  def mode(self, path):
    return path.stat().st_mode & 0o777

  def test_in_the_workdir(self):
    path = processes.spool_directory("", str(self.folder / "run"))
    self.assertEqual(path, self.folder / "run" / "spool")
    self.assertEqual(self.mode(path), 0o700)
    self.assertEqual(
        processes.spool_directory("", str(self.folder / "run")), path
    )

  def test_a_setting_rules(self):
    want = self.folder / "mine" / "here"
    self.assertEqual(processes.spool_directory(str(want), "/x"), want)
    self.assertEqual(self.mode(want), 0o700)
    self.assertFalse((self.folder / "x").exists())

  def test_a_path_too_long_for_a_socket_moves_to_a_private_place(self):
    runs = [self.folder / ("a" * 90) / name for name in ("one", "two")]
    first, second = (processes.spool_directory("", str(run)) for run in runs)
    self.assertNotEqual(first, second)
    for path in (first, second):
      self.assertEqual(path.parent, self.folder / f"tba_jax-{os.getuid()}")
      self.assertEqual(self.mode(path), 0o700)
      self.assertEqual(self.mode(path.parent), 0o700)
    # A restarted role finds the same place.
    self.assertEqual(processes.spool_directory("", str(runs[0])), first)

  def test_the_length_counts_in_bytes(self):
    # 77 letters with `/spool`, of which most take two bytes.
    length = 70 - len(os.fsencode(self.folder))
    path = processes.spool_directory("", str(self.folder / ("ä" * length)))
    self.assertEqual(path.parent.name, f"tba_jax-{os.getuid()}")

  def test_a_remote_workdir_gets_a_local_spool(self):
    one = processes.spool_directory("", "gs://bucket/run")
    self.assertEqual(one.parent.name, f"tba_jax-{os.getuid()}")
    self.assertNotEqual(one, processes.spool_directory("", "gs://bucket/b"))

  def test_a_directory_that_others_may_enter_is_refused(self):
    for mode in (0o755, 0o710, 0o701):
      path = self.folder / f"open{mode:o}"
      path.mkdir()
      path.chmod(mode)
      with self.assertRaisesRegex(ValueError, f"spool_dir.*{mode:04o}"):
        processes.spool_directory(str(path), "/x")

  def test_a_place_whose_parent_others_may_change_is_refused(self):
    parent = self.folder / f"tba_jax-{os.getuid()}"
    parent.mkdir()
    parent.chmod(0o777)
    with self.assertRaisesRegex(ValueError, f"{parent} must belong"):
      processes.spool_directory("", "gs://bucket/run")

  def test_another_users_directory_is_refused(self):
    path = self.folder / "theirs"
    path.mkdir(mode=0o700)
    with mock.patch.object(os, "getuid", return_value=os.getuid() + 1):
      with self.assertRaisesRegex(ValueError, "must belong to this user"):
        processes.spool_directory(str(path), "/x")


if __name__ == "__main__":
  absltest.main()

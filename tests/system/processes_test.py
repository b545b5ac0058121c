# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cores, signals, and the private directory of a run's sockets."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from tba_jax.system import processes
from tests.support import waiting

_ROOT = pathlib.Path(__file__).parents[2]
# Frees 150 MB below a block that stays, and compiles. Prints the share of them
# that the process has given back after a short and after a "long" compilation.
_COMPILE = """
import ctypes, jax
from tba_jax.system import processes

def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
processes.prepare_compiling()
jax.jit(lambda x: x - 1)(1.0)
blocks = [libc.malloc(3000) for _ in range(50_000)]
for block in blocks:
  libc.memset(block, 1, 3000)
for block in blocks[:-1]:
  libc.free(block)
for least, function in ((60.0, lambda x: x + 1), (0.0, lambda x: x * 2)):
  processes._LONG_COMPILATION_S = least
  before = resident()
  jax.jit(function)(1.0)
  print((before - resident()) / 150e6)
"""


# Works without running handlers of signals, before or after it has begun.
_WARM_UP = """
import hashlib, signal, sys
from tba_jax.system import processes

stop = processes.start_role("trainer")
processes.note_begun(sys.argv[1])
print("up", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
assert stop.is_set()
sys.exit(processes.EXIT_OK)
"""


class OpenFilesTest(absltest.TestCase):

  def test_raises_limit_to_hard_limit(self):
    code = (
        "import resource as r, sys\n"
        "from tba_jax.system import processes\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
        "processes.raise_open_files()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    for now, most, expected in ((256, 900, "900 900"), (900, 900, "900 900")):
      process = subprocess.run(
          [sys.executable, "-c", code, str(now), str(most)],
          cwd=_ROOT,
          capture_output=True,
          text=True,
          check=True,
      )
      self.assertEqual(process.stdout.strip(), expected)


class CoresTest(parameterized.TestCase):

  @parameterized.parameters(
      ("0", [0]),
      ("0,2", [0, 2]),
      ("0-3", [0, 1, 2, 3]),
      ("5,0-2,1", [0, 1, 2, 5]),
  )
  def test_parses_cores(self, text, cores):
    self.assertEqual(processes.parse_cores(text), cores)

  @parameterized.parameters("", "a", "1-", "-1", "0;1", "3-1", "0,,1", "1-2-3")
  def test_refuses_wrong_cores(self, text):
    with self.assertRaisesRegex(ValueError, "cores '"):
      processes.parse_cores(text)

  def assign(self, mine, num_searchers):
    with mock.patch.object(
        processes, "available_cores", autospec=True, return_value=mine
    ):
      return processes.assign_cores(num_searchers)

  def test_one_core_is_shared_without_binding(self):
    self.assertEqual(
        self.assign([3], 2), {"trainer": [], "searchers": [[], []]}
    )

  def test_two_cores_are_split(self):
    self.assertEqual(
        self.assign([0, 1], 1),
        {"trainer": [0], "searchers": [[1]]},
    )

  @parameterized.parameters(
      # cores, searchers -> cores of the trainer, and of each searcher.
      (2, 1, 1, [1]),
      (3, 1, 2, [1]),
      (4, 1, 2, [2]),
      (8, 1, 4, [4]),
      (16, 1, 8, [8]),
      (64, 1, 32, [32]),
      (8, 2, 4, [2, 2]),
      (8, 3, 5, [1, 1, 1]),
      (64, 5, 34, [6] * 5),
  )
  def test_searchers_share_half_of_cores(
      self, count, num_searchers, trainer, searchers
  ):
    mine = [*range(3, 3 + count)]
    out = self.assign(mine, num_searchers)
    self.assertLen(out["trainer"], trainer)
    self.assertEqual([len(share) for share in out["searchers"]], searchers)
    # Each core is of one process.
    self.assertEqual(sum(out["searchers"], out["trainer"]), mine)

  def test_more_searchers_than_cores_take_turns(self):
    four = self.assign([0, 1, 2, 3], 3)
    self.assertEqual(four["trainer"], [0, 1])
    self.assertEqual(four["searchers"], [[2], [3], [2]])

  def test_cores_follow_taskset(self):
    mine = processes.available_cores()
    self.addCleanup(os.sched_setaffinity, 0, mine)
    os.sched_setaffinity(0, mine[:1])
    self.assertEqual(
        processes.assign_cores(1), {"trainer": [], "searchers": [[]]}
    )
    os.sched_setaffinity(0, mine)
    out = processes.assign_cores(1)
    self.assertEqual(out["trainer"] + out["searchers"][0], mine)

  @parameterized.parameters(
      # A limit of a group, and a lower one above it.
      ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4096",
                   "a/cpu.max": "150 100", "a/b/cpu.max": "max 100"}, "a"),
      # Version 1, where a container has its own group as the top.
      ("4:memory:/x\n1:cpu,cpuacct:/x",
       {"memory/memory.limit_in_bytes": "4096", "cpu/cpu.cfs_quota_us": "150",
        "cpu/cpu.cfs_period_us": "100"}, ""),
  )  # fmt: skip
  def test_control_groups_limit_memory_and_cores(self, groups, files, folder):
    root = pathlib.Path(self.create_tempdir().full_path)
    for name, text in files.items():
      path = root / "sys/fs/cgroup" / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(f"{text}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{groups}\n")
    with mock.patch.object(processes, "available_cores", lambda: [0, 1]):
      memory, source = processes.memory(root)
      self.assertEqual(memory, 4096)
      self.assertIn(f"cgroup/{folder}", source)
      self.assertEqual(processes.num_cores(root)[0], 1.5)
      # No limits: no Linux, or limits above what is here.
      nowhere = root / "none"
      self.assertGreater(processes.memory(nowhere)[0], 2**28)
      self.assertEqual(processes.num_cores(nowhere)[0], 2)

  def test_compile_cache_folder_follows_environment(self):
    own, home = (self.create_tempdir().full_path for _ in range(2))
    bucket = {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/xla"}
    for environment, expected in (
        ({}, f"{home}/tba_jax/xla"),
        (bucket, "gs://bucket/xla"),
        ({**bucket, "TBA_JAX_CACHE_DIR": own}, own),
    ):
      environment = {"XDG_CACHE_HOME": home, **environment}
      with mock.patch.dict(os.environ, environment, clear=True):
        self.assertEqual(processes.cache_directory(), expected)

  def test_pins_process(self):
    mine = processes.available_cores()
    self.addCleanup(os.sched_setaffinity, 0, mine)
    processes.pin(mine[-1:])
    self.assertEqual(processes.available_cores(), mine[-1:])
    processes.pin([])
    self.assertEqual(processes.available_cores(), mine[-1:])


class SignalsTest(absltest.TestCase):

  def test_restart_as_role_keeps_command_and_variables(self):
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
      expected = own.get(name, processes.ROLE_ENVIRONMENT[name])
      self.assertEqual(printed, f"{process.pid} ['a b', 'c'] {expected}\n")

  def test_memory_of_long_compilation_is_given_back(self):
    ended = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        cwd=_ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    after_short, after_long = map(float, ended.stdout.split())
    self.assertLess(after_short, 0.1)
    self.assertGreater(after_long, 0.7)

  def test_leave_waits_for_threads_unless_named_otherwise(self):
    for name, expected in (("other", "3 done"), (processes.LEFT_BEHIND, "3 ")):
      script = (
          "import threading; from tba_jax.system import processes;"
          " wait = threading.Event().wait;"
          " run = lambda: (wait(1.0), print('done'));"
          f" threading.Thread(target=run, name={name!r} + '_0').start();"
          " processes.leave(3)"
      )
      ended = subprocess.run(
          [sys.executable, "-c", script],
          cwd=_ROOT,
          stdout=subprocess.PIPE,
          text=True,
          timeout=60,
          check=False,
      )
      self.assertEqual(f"{ended.returncode} {ended.stdout.strip()}", expected)

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

  def test_dies_with_supervisor(self):
    script = (
        "from tba_jax.system import processes; processes.die_with_supervisor()"
    )

    def status(supervisor):
      return subprocess.run(
          [sys.executable, "-c", script],
          cwd=_ROOT,
          env={**os.environ, processes.SUPERVISED: str(supervisor)},
          check=False,
      ).returncode

    self.assertEqual(status(os.getpid()), 0)
    # Another process is its parent: the supervisor has ended.
    self.assertEqual(status(os.getppid()), -signal.SIGKILL)

  def test_dies_with_its_parent(self):
    child = (
        "from tba_jax.system import processes; processes.die_with_parent();"
        "print('ready', flush=True); import time; time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}],"
        "stdout=subprocess.PIPE, text=True);"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    waiting.wait_until(lambda: not waiting.is_running(pid), "its end")


class FreePortTest(absltest.TestCase):

  @unittest.skipUnless(sys.platform == "linux", "kept on Linux alone")
  def test_free_port_stays_reserved(self):
    port = processes.free_port()
    with socket.socket() as other:
      with self.assertRaisesRegex(OSError, "in use"):
        other.bind(("127.0.0.1", port))
    socket.create_server(("127.0.0.1", port)).close()


class DirectoryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="sp")
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    # A temporary directory that is not the user's own.
    self.enter_context(
        mock.patch.object(tempfile, "gettempdir", lambda: str(self.folder))
    )
    self.shared = self.folder / f"tba_jax-{os.getuid()}"

  def assert_private(self, path):
    self.assertEqual(path.stat().st_mode & 0o777, 0o700)

  def test_spool_is_in_workdir_or_in_set_place(self):
    workdir = str(self.folder / "run")
    for _ in range(2):
      path = processes.spool_directory("", workdir)
      self.assertEqual(path, self.folder / "run" / "spool")
      self.assert_private(path)
    path = self.folder / "mine" / "here"
    self.assertEqual(processes.spool_directory(str(path), "/x"), path)
    self.assert_private(path)

  def test_spool_of_workdir_unusable_for_sockets(self):
    for name in ("x,y=z", "a#b", "a?b", "a%41b"):
      with self.subTest(name):
        path = processes.spool_directory("", str(self.folder / name))
        self.assertEqual(path.parent, self.shared)
        self.assert_private(path)
        with self.assertRaisesRegex(ValueError, "spool_dir: .*socket"):
          processes.spool_directory(str(self.folder / name), "/x")
        self.assertFalse((self.folder / name).exists())
    path = self.folder / "a b='c' ä%"
    self.assertEqual(processes.spool_directory("", str(path)), path / "spool")

  def test_spool_of_long_or_remote_workdir_is_in_temporary_directory(
      self,
  ):
    # The length counts in bytes: most of these letters have two.
    umlauts = "ä" * (70 - len(os.fsencode(self.folder)))
    runs = [
        *(str(self.folder / ("a" * 90) / name) for name in ("one", "two")),
        str(self.folder / umlauts),
        *("gs://bucket/a", "gs://bucket/b"),
    ]
    paths = [processes.spool_directory("", run) for run in runs]
    self.assertLen(set(paths), len(runs))
    for path in paths:
      self.assertEqual(path.parent, self.shared)
      self.assert_private(path)
    self.assert_private(self.shared)
    # A restarted role finds the same place.
    self.assertEqual(processes.spool_directory("", runs[0]), paths[0])

  def test_accessible_directory_is_refused(self):
    for mode in (0o755, 0o710, 0o701):
      path = self.folder / f"open{mode:o}"
      path.mkdir()
      path.chmod(mode)
      with self.assertRaisesRegex(ValueError, f"spool_dir.*{mode:04o}"):
        processes.spool_directory(str(path), "/x")
    self.shared.mkdir()
    self.shared.chmod(0o777)
    with self.assertRaisesRegex(ValueError, str(self.shared)):
      processes.spool_directory("", "gs://bucket/run")

  def test_link_and_directory_of_another_user_are_refused(self):
    path, link = self.folder / "real", self.folder / "link"
    path.mkdir(mode=0o700)
    link.symlink_to(path)
    processes.make_private(path, "key")
    with self.assertRaisesRegex(ValueError, "config.key: .*link"):
      processes.make_private(link, "key")
    with mock.patch.object(os, "getuid", return_value=os.getuid() + 1):
      with self.assertRaisesRegex(ValueError, "of this user"):
        processes.make_private(path, "key")


class WarmUpTest(parameterized.TestCase):

  @parameterized.parameters(
      ("searcher", 2**31 - 1, processes.EXIT_INTERRUPTED),
      ("trainer", 2 * 10**7, processes.EXIT_OK),
  )
  @pytest.mark.slow
  def test_signal_ends_starting_role(self, begun, work, status):
    process = subprocess.Popen(
        [sys.executable, "-c", _WARM_UP, begun, str(work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    self.addCleanup(process.communicate)
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline(), b"up\n")
    process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(120), status)

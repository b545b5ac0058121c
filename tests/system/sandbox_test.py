# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a confined process still reads; the pool's tests have the rest."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

from tba_jax.system import sandbox

# Confines itself, then tells what was not permitted and whether a file is seen.
_CONFINED = """
import json, os, sys
from tba_jax.system import sandbox
home, file, *readable = sys.argv[1:]
cell = sandbox.enter(
    home, network=True, readable=readable, boxed=False, uids=[60706],
    num_threads=0,
)
print(json.dumps([cell.close(), os.path.exists(file)]))
"""


class SandboxTest(absltest.TestCase):

  def test_readable_path_keeps_shared_memory(self):
    if os.geteuid() or not os.path.isdir("/dev/shm"):
      self.skipTest("only root confines disks, on Linux")
    folder = self.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
    pathlib.Path(folder).chmod(0o755)
    file = pathlib.Path(folder, "data.jsonl")
    file.touch()
    for readable in ([], [str(file)]):
      home = self.create_tempdir().full_path
      process = subprocess.run(
          [sys.executable, "-c", _CONFINED, home, str(file), *readable],
          check=True,
          capture_output=True,
          timeout=60,
      )
      missing, seen = json.loads(process.stdout)
      if "disk" in missing:
        self.skipTest("this system does not permit mount namespaces")
      self.assertEqual(seen, bool(readable))

  def test_directories_of_killed_processes_are_removed(self):
    folder = self.create_tempdir().full_path
    make = "from tba_jax.system import sandbox; import os; "
    environment = {**os.environ, "TMPDIR": folder}

    def run(then: str) -> list[str]:
      words = [
          sys.executable,
          "-c",
          f"{make} home = sandbox.TemporaryHome(); {then}",
      ]
      process = subprocess.run(
          words, env=environment, capture_output=True, text=True, timeout=60
      )
      return process.stdout.split()

    (left,) = run("print(home.path, flush=True); os.kill(os.getpid(), 9)")
    self.assertTrue(os.path.isdir(left))
    # Not those of a process that runs, nor another's folder.
    with mock.patch.object(tempfile, "tempdir", folder):
      sandbox.remove_abandoned.cache_clear()
      kept = sandbox.TemporaryHome()
    self.addCleanup(kept.close)
    self.assertFalse(os.path.exists(left))
    run("home.close()")
    self.assertEqual(os.listdir(folder), [os.path.basename(kept.path)])

  def test_packages_of_venv_below_are_seen_however_many(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    packages, other = root / "below/site-packages", root / "other"
    for folder in (packages, other):
      folder.mkdir(parents=True)
      for i in range(sandbox.MAX_ENTRIES + 1):
        (folder / f"part{i}").touch()
    paths = [str(packages), str(other)]
    self.enter_context(mock.patch.object(sys, "path", paths))
    seen = lambda hidden: set(sandbox.visible_paths((), (), hidden))
    self.assertIn(str(packages), seen(()))
    self.assertFalse(any(p.startswith(str(other)) for p in seen(())))
    # Not if something in it is hidden.
    self.assertNotIn(str(packages), seen([str(packages / "part0")]))

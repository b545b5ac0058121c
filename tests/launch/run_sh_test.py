# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""tests/run.sh ends soon, and names the test, if a test's process dies."""

import os
import pathlib
import shutil
import subprocess
import sys

from absl.testing import parameterized
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_SETUP = f"""
die() {{ echo "$@" >&2; exit 1; }}
setup_venv() {{ VENV_PYTHON={sys.executable}; }}
"""
_CONFTEST = """
from tests.support import deaths

def pytest_configure(config):
  config.pluginmanager.register(deaths)
  deaths._LATER_S = 1.0
"""
_TEST = """
import ctypes, os, pytest, signal, time

def segmentation_fault():
  ctypes.string_at(0)

def exit():
  os._exit(0)

def kill():
  os.kill(os.getpid(), signal.SIGKILL)

def hang():
  # With the lock of the interpreter: no signal handler of Python's runs.
  lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
  for _ in range(2):
    libc.pthread_mutex_lock(lock)

@pytest.mark.timeout(1)
def test_dies():
  {how}()

@pytest.mark.parametrize("i", range(500))
def test_rest(i):
  time.sleep(0.5)
"""
_WAYS = ("segmentation_fault", "exit", "kill", "hang")


class RunShTest(parameterized.TestCase):

  def run_script(self, how, *args):
    root = pathlib.Path(self.create_tempdir().full_path)
    for folder in ("tests/support", "launch"):
      (root / folder).mkdir(parents=True)
    for name in ("tests/run.sh", "tests/support/deaths.py"):
      shutil.copy(_ROOT / name, root / name)
    (root / "launch/setup_venv.sh").write_text(_SETUP)
    (root / "tests/conftest.py").write_text(_CONFTEST)
    (root / "tests/bad_test.py").write_text(_TEST.replace("{how}", how))
    (root / "tests/good_test.py").write_text(_TEST.partition("@")[0])
    # The options of an outer run may start more processes.
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    process = subprocess.run(
        ["bash", "tests/run.sh", *args],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,  # All tests take minutes.
        check=False,
    )
    self.assertEqual(process.returncode, 1, process.stdout + process.stderr)
    return process

  @parameterized.parameters(*_WAYS)
  @pytest.mark.slow
  def test_death_of_one_of_several_processes_ends_run(self, how):
    done = self.run_script(how)
    self.assertIn(
        "a test process died in tests/bad_test.py::test_dies", done.stdout
    )
    self.assertIn("failed group: fast", done.stderr)

  @parameterized.parameters(*_WAYS)
  @pytest.mark.slow
  def test_death_of_single_process_is_reported(self, how):
    done = self.run_script(how, "tests/bad_test.py")
    self.assertRegex(
        done.stderr, r"failed group: chosen \(.*, in tests/.*::test_dies\)"
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: ends the run, naming the test, if its process dies or hangs.

pytest-timeout cannot end a test stuck in native code, so half a minute later
its process exits. The death of one of several processes ends all, since xdist
might wait forever for the tests of its file. A single process writes its
current test to the file named by `AT_VARIABLE`.
"""

from collections.abc import Iterator
import faulthandler
import os
import pathlib

from _pytest import faulthandler as pytest_faulthandler
import pytest

AT_VARIABLE = "TBA_JAX_TEST_AT"
# Removed, so processes started by tests or xdist do not inherit it.
_AT = os.environ.pop(AT_VARIABLE, None)
_LATER_S = 30.0
_DIED = pytest.StashKey[bool]()


def _timeout_s(item: pytest.Item) -> float:
  mark = item.get_closest_marker("timeout")
  if mark is not None:
    return float(mark.args[0] if mark.args else mark.kwargs["timeout"])
  option = item.config.getoption("timeout", None)
  return float(option or item.config.getini("timeout") or 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
  if _AT:
    pathlib.Path(_AT).write_text(f"{item.nodeid}\n")
  timeout_s = _timeout_s(item)
  if timeout_s:
    stderr = item.config.stash[pytest_faulthandler.fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(
        timeout_s + _LATER_S, exit=True, file=stderr
    )
  try:
    return (yield)
  finally:
    faulthandler.cancel_dump_traceback_later()
    if _AT:
      pathlib.Path(_AT).unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error: object | None) -> None:
  if error is not None:
    node.config.stash[_DIED] = True


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
  pytest.exit(f"a test process died in {crashitem}", returncode=1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
  # xdist counts no failure where a process dies before its tests, or after.
  harmless = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED
  if session.config.stash.get(_DIED, False) and session.exitstatus in harmless:
    session.exitstatus = pytest.ExitCode.TESTS_FAILED

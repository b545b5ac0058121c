# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Confines processes that run code of users, and code that models write.

`environment` is for whoever starts such a process, `enter` for the process
itself. What the system does not permit is left out and named by `enter`. As

    python -m tba_jax.system.sandbox COMMAND WORD…

it becomes a command that ends with the process that started it; a parent with
threads cannot run anything between fork and exec.
"""

from collections.abc import Sequence
import ctypes
import os
import pathlib
import resource
import sys

from tba_jax.system import processes

# Variables that are passed on where they are set.
_PASSED = (
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TZ",
    "VIRTUAL_ENV",
)
_PRIVATE = "TBA_JAX_"  # prefix of variables that no such process may see

MAX_FILE_BYTES = 256 << 20
_MAX_OPEN_FILES = 256
_MAX_PROCESSES = 128  # and threads
# User ids that belong to nobody: systemd gives them to services for their time.
_FIRST_UID = 61184
_NUM_UIDS = 4336

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION = 0x20080522
_CAP_DAC_READ_SEARCH = 2  # reads any file, writes none


def environment(home: str, passed: Sequence[str] = ()) -> dict[str, str]:
  """Returns a clean environment.

  Args:
    home: the process's own directory: HOME and TMPDIR.
    passed: names of further variables to pass on.
  """
  names = [n for n in (*_PASSED, *passed) if not n.startswith(_PRIVATE)]
  found = {name: os.environ[name] for name in names if name in os.environ}
  if "PYTHONPATH" in found:  # The process may stand in another directory.
    paths = found["PYTHONPATH"].split(os.pathsep)
    found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
  return {
      # Many such processes run side by side.
      "OMP_NUM_THREADS": "1",
      "OPENBLAS_NUM_THREADS": "1",
      **found,
      "HOME": home,
      "TMPDIR": home,
      "JAX_PLATFORMS": "cpu",
  }


def without_secrets() -> dict[str, str]:
  """Returns this process's environment without the package's own variables.

  For programs of the user that need theirs, such as an API's key.
  """
  return {k: v for k, v in os.environ.items() if not k.startswith(_PRIVATE)}


def limit_memory(memory_mb: int) -> None:
  """Bounds the address space of this process and its children; 0 = not."""
  if memory_mb:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)


def enter(home: str, *, network: bool, readable: Sequence[str] = ()) -> dict:
  """Confines this process, and what it starts, for the rest of its life.

  Bounds processes, open files and the size of a file; leaves the network;
  as root takes a user id of its own, so that files and memory of others are out
  of reach; moves to `home`. To be called while there is one thread.

  Args:
    home: the process's own directory.
    network: whether it keeps the network.
    readable: paths that it has to read afterwards.

  Returns:
    `uid`: the user id taken, None for the caller's; `missing`: names of what
    the system did not permit, of "network", "user", "files" and "processes".
  """
  missing = []
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  if not network and not _leave_network():
    missing.append("network")
  uid, reads_all = None, True
  if os.geteuid() == 0:
    uid, reads_all = _take_uid(home, readable)
  if uid is None:
    missing.append("user")
  if reads_all:
    missing.append("files")
  if not _limit_processes(uid):
    missing.append("processes")
  resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES,) * 2)
  _lower_limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
  if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  processes.die_with_parent()  # Taking a user id has cleared it.
  os.chdir(home)
  return {"uid": uid, "missing": missing}


def _lower_limit(which: int, limit: int) -> None:
  hard = resource.getrlimit(which)[1]
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(which, (limit, limit))


def _leave_network() -> bool:
  """Moves to a network namespace without interfaces; False if not permitted."""
  if not sys.platform.startswith("linux"):
    return False
  uid, gid = os.getuid(), os.getgid()
  unshare = ctypes.CDLL(None, use_errno=True).unshare
  if unshare(_CLONE_NEWNET) == 0:
    return True
  if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
    return False
  for name, text in (
      ("setgroups", "deny"),
      ("uid_map", f"{uid} {uid} 1"),
      ("gid_map", f"{gid} {gid} 1"),
  ):
    pathlib.Path("/proc/self", name).write_text(text)
  return True


def _take_uid(home: str, readable: Sequence[str]) -> tuple[int | None, bool]:
  """Becomes a user that nobody else is.

  Returns:
    The user id, None where the system does not permit it; and whether files of
    others stay readable, which is so where Python itself or a path of
    `readable` is for root alone.
  """
  uid = _FIRST_UID + os.getpid() % _NUM_UIDS
  paths = [sys.prefix, sys.base_prefix, *sys.path, *readable]
  paths = [os.path.realpath(p) for p in paths if os.path.exists(p)]
  try:
    os.seteuid(uid)
    try:
      suffices = all(os.access(p, os.R_OK, effective_ids=True) for p in paths)
    finally:
      os.seteuid(0)
    for path in (home, *pathlib.Path(home).iterdir()):
      os.chown(path, uid, uid)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  except OSError:  # A container with few users.
    return None, True
  kept = 0 if suffices else 1 << _CAP_DAC_READ_SEARCH
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
  data = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
  libc.capset(header, data)
  if kept:  # Also for what it starts.
    libc.prctl(
        _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0
    )
  return uid, not suffices


def _limit_processes(uid: int | None) -> bool:
  """Bounds the processes of this user; False where root is exempt from it."""
  if uid is None and os.getuid() == 0:
    return False
  # A user of one's own starts at none; else those of the same user count.
  others = 0 if uid is not None else _num_threads(os.getuid())
  _lower_limit(resource.RLIMIT_NPROC, others + _MAX_PROCESSES)
  return True


def _num_threads(uid: int) -> int:
  """Returns how many threads a user has."""
  count = 0
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if folder.stat().st_uid == uid:
        count += len(os.listdir(folder / "task"))
    except OSError:
      continue  # It has ended.
  return count


if __name__ == "__main__":
  processes.die_with_parent()
  try:
    os.execvp(sys.argv[1], sys.argv[1:])
  except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")

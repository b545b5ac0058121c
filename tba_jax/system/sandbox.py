# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Confines processes that run user code, or code written by models.

The parent passes `environment`, the process itself calls `enter`, which returns
what the system does not permit.

    python -m tba_jax.system.sandbox COMMAND WORD…

runs a command that ends with its parent, for parents with threads, which cannot
run code between fork and exec.
"""

from collections.abc import Sequence
import ctypes
import os
import pathlib
import resource
import sys

from tba_jax.system import processes

# Variables that are passed on.
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
_PRIVATE = "TBA_JAX_"  # Prefix of variables that are never passed on.

MAX_FILE_BYTES = 256 << 20
_MAX_OPEN_FILES = 256
_MAX_PROCESSES = 128  # Threads count too.
# User ids that systemd assigns dynamically to services.
_FIRST_UID = 61184
_NUM_UIDS = 4336

# Of its directory, and of shared memory, both a tmpfs.
MAX_DISK_BYTES = 512 << 20

_SHARED = "/dev/shm"
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000
_MOUNT_SETATTR = 442  # System call of Linux 5.12.
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION = 0x20080522
_CAP_DAC_READ_SEARCH = 2  # Permission to read any file.


def environment(home: str, passed: Sequence[str] = ()) -> dict[str, str]:
  """Returns a clean environment with `home` as HOME and TMPDIR.

  `passed` names further variables to pass on.
  """
  names = [n for n in (*_PASSED, *passed) if not n.startswith(_PRIVATE)]
  found = {name: os.environ[name] for name in names if name in os.environ}
  if "PYTHONPATH" in found:  # The working directory may differ.
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
  """Returns this environment without the package's own variables.

  For user programs that need their own variables, such as an API key.
  """
  return {k: v for k, v in os.environ.items() if not k.startswith(_PRIVATE)}


def limit_memory(memory_mb: int) -> None:
  """Limits the address space of this process and its children, unless 0."""
  if memory_mb:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)


def enter(home: str, *, network: bool, readable: Sequence[str] = ()) -> dict:
  """Confines this process and its children permanently.

  Limits processes, open files and file sizes; leaves the network; as root takes
  a user id of its own, without access to files and memory of others, and makes
  all file systems read-only but an empty `home` of limited size; changes to
  `home`. Call it before starting threads.

  Args:
    home: the process's own directory.
    network: whether to keep the network.
    readable: paths that must stay readable.

  Returns:
    `uid`: the user id taken, or None; `missing`: what the system did not
    permit, of "network", "disk", "user", "files" and "processes".
  """
  missing = []
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  if not network and not _leave_network():
    missing.append("network")
  uid, reads_all, limited = None, True, False
  if os.geteuid() == 0:
    limited = _limit_disk(home, readable)
    uid, reads_all = _take_uid(home, readable)
  # Root could make disks writable again.
  if uid is None or not limited:
    missing.append("disk")
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
  processes.die_with_parent()  # Changing the user id has cleared it.
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


def _limit_disk(home: str, readable: Sequence[str]) -> bool:
  """Makes file systems read-only for this process; False if not permitted.

  `home` and shared memory become file systems of limited size, in memory.
  """
  if not sys.platform.startswith("linux"):
    return False
  libc = ctypes.CDLL(None)
  if libc.unshare(_CLONE_NEWNS) != 0:
    return False
  if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
    return False
  options = f"size={MAX_DISK_BYTES},nr_inodes=65536,mode=1777".encode()
  own = [home]
  if os.path.isdir(_SHARED) and not any(
      os.path.realpath(path).startswith(_SHARED) for path in readable
  ):
    own = [_SHARED, home]  # `home` may be in it.
  for path in map(os.fsencode, own):
    os.makedirs(path, exist_ok=True)
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(b"none", path, b"tmpfs", flags, options) != 0:
      return False

  def set_read_only(path: str, *, recursive: bool, read_only: bool) -> bool:
    flag = _MOUNT_ATTR_RDONLY  # To set, or to clear.
    attributes = (ctypes.c_uint64 * 4)(*((flag, 0) if read_only else (0, flag)))
    return libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path),
        recursive * _AT_RECURSIVE, attributes, ctypes.sizeof(attributes),
    ) == 0  # fmt: skip

  return set_read_only("/", recursive=True, read_only=True) and all(
      set_read_only(path, recursive=False, read_only=False) for path in own
  )


def _take_uid(home: str, readable: Sequence[str]) -> tuple[int | None, bool]:
  """Changes to an unused user id.

  Returns:
    The user id, None if not permitted; and whether other users' files stay
    readable, which is necessary if Python or a path of `readable` is for root
    alone.
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
  except OSError:  # Such as a container with few user ids.
    return None, True
  kept = 0 if suffices else 1 << _CAP_DAC_READ_SEARCH
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
  data = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
  libc.capset(header, data)
  if kept:  # For children too.
    libc.prctl(
        _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0
    )
  return uid, not suffices


def _limit_processes(uid: int | None) -> bool:
  """Limits the processes of this user; False if root, which is exempt."""
  if uid is None and os.getuid() == 0:
    return False
  # The limit includes the user's other processes; a new user has none.
  others = 0 if uid is not None else _num_threads(os.getuid())
  _lower_limit(resource.RLIMIT_NPROC, others + _MAX_PROCESSES)
  return True


def _num_threads(uid: int) -> int:
  """Returns the number of a user's threads."""
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

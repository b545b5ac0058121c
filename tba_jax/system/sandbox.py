# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Confines processes that run user code, or code written by models.

The parent makes a `Box`, which uses bubblewrap where that works, and passes its
`command` and `environment`. The process itself calls `enter`, and each of its
forks that runs such code calls `Confinement.close`.

    python -m tba_jax.system.sandbox COMMAND WORD…

runs a command that ends with its parent, for parents with threads, which cannot
run code between fork and exec.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import pathlib
import pwd
import resource
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from typing import Any

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
# Ranges of user ids that systemd assigns to nobody, as (first, number);
# containers may have only the second range.
_UIDS = ((1_879_048_192, 268_435_456), (60706, 478))
_HOME = "tba_jax-reward-"  # Prefix of confined processes' directories only.

# Size limit of its directory, of shared memory and of /tmp, each a tmpfs.
MAX_DISK_BYTES = 512 << 20

# Freedoms of unconfined code.
FREEDOMS = {
    "files": "read your files",
    "disk": "change files and fill disks",
    "tmpfs": "fill the memory with files",
    "user": "see and end your processes",
    "network": "use the network",
    "processes": "start processes without end",
}
# Parts of the system that programs need and that contain no secrets.
_SYSTEM = """
    /bin /lib /lib32 /lib64 /nix/store /sbin /usr /etc/alternatives
    /etc/ca-certificates /etc/group /etc/hosts /etc/ld.so.cache /etc/localtime
    /etc/nsswitch.conf /etc/passwd /etc/pki/tls/certs /etc/resolv.conf
    /etc/ssl/certs /etc/ssl/openssl.cnf
""".split()
# Most entries shown of a folder: bubblewrap's time is quadratic in them.
MAX_ENTRIES = 128
# Names of folders that contain only packages.
_PACKAGES = ("site-packages", "dist-packages")
_TRIAL_S = 60.0
_TRIAL = """
import json, sys
from tba_jax.system import sandbox
print(json.dumps(sandbox.enter(**json.loads(sys.argv[1])).close()))
"""

_SHARED = "/dev/shm"
_BOXED_HOME = "/tmp/tba_jax-home"
# Shared memory, messages and semaphores that outlive processes, one per row.
_SHARED_MEMORY = ("/proc/sysvipc/shm", "/proc/sysvipc/msg", "/proc/sysvipc/sem")
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
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
  passed_on = {name: os.environ[name] for name in names if name in os.environ}
  if "PYTHONPATH" in passed_on:  # Absolute: the working directory may differ.
    paths = passed_on["PYTHONPATH"].split(os.pathsep)
    passed_on["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
  return {
      # Many such processes run side by side.
      "OMP_NUM_THREADS": "1",
      "OPENBLAS_NUM_THREADS": "1",
      **passed_on,
      "HOME": home,
      "TMPDIR": home,
      "JAX_PLATFORMS": "cpu",
  }


def is_confined() -> bool:
  """Returns whether this process has the `environment` of a confined one."""
  return os.path.basename(os.environ.get("HOME", "")).startswith("tba_jax-")


def system_paths() -> list[str]:
  """Returns the paths of the system's programs and of Python."""
  python = os.path.realpath(sys.executable), sys.prefix, sys.base_prefix
  return _outermost([*_SYSTEM, *python])


def without_secrets() -> dict[str, str]:
  """Returns this environment without the package's own variables.

  For user programs that need their own variables, such as an API key.
  """
  return {k: v for k, v in os.environ.items() if not k.startswith(_PRIVATE)}


def limit_memory(memory_mb: int) -> None:
  """Limits the address space of this process and its children, unless 0."""
  if memory_mb:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)


@dataclasses.dataclass(frozen=True)
class Box:
  """Confinement of processes on this machine.

  bubblewrap: words of the bubblewrap command before the process's directory and
    command; [] without bubblewrap.
  tmpfs: options of a writable directory.
  network: whether processes keep the network.
  readable: paths that must stay readable.
  missing: keys of `FREEDOMS` that processes keep.
  reason: problem that keeps bubblewrap from confining them, "" if none.
  """

  bubblewrap: Sequence[str]
  tmpfs: Sequence[str]
  network: bool
  readable: Sequence[str]
  missing: Sequence[str] = ()
  reason: str = ""

  def home(self, folder: str) -> str:
    """Returns the path of a process's directory.

    In bubblewrap it is the same for all: prompts of agents often contain it.

    Args:
      folder: directory of the process, if it is not in bubblewrap.
    """
    return _BOXED_HOME if self.bubblewrap else folder

  def command(self, words: Sequence[str], home: str) -> list[str]:
    """Returns the command that runs `words`, whose directory is `home`."""
    if not self.bubblewrap:
      return list(words)
    options = [*self.tmpfs, "--tmpfs", home, "--remount-ro", "/", "--as-pid-1"]
    return [*self.bubblewrap, *options, "--chdir", os.getcwd(), "--", *words]

  def arguments(self, home: str) -> dict[str, Any]:
    """Returns the arguments of `enter`."""
    return {
        "home": home,
        "network": self.network,
        "readable": list(self.readable),
        "boxed": bool(self.bubblewrap),
        "uids": [first + secrets.randbelow(count) for first, count in _UIDS],
        "num_threads": _num_threads(os.getuid()),
    }

  def warning(self) -> str:
    """Returns what confined code can still do, "" if fully confined."""
    can = ", ".join(FREEDOMS[name] for name in self.missing)
    return f"reward code can {can}: {self.reason}" if can else ""


def make_box(
    readable: Sequence[str],
    shown: Sequence[str],
    folders: Iterable[str],
    hidden: Iterable[str],
    *,
    network: bool,
) -> Box:
  """Returns how to confine processes, after a trial.

  Under bubblewrap a process sees the system's programs, Python, the modules
  imported here, and the paths named below, all read-only.

  Args:
    readable: files and whole folders that processes read after `enter`.
    shown: files and whole folders that processes read before `enter`.
    folders: paths shown like Python's path and the working directory, without
      entries that start with a dot or contain hidden paths.
    hidden: paths not to show; the user's home is hidden too.
    network: whether processes keep the network.
  """
  bare = Box([], [], network, [*readable, os.getcwd()])
  program = shutil.which("bwrap")
  if program is None:
    reason = "bubblewrap is not installed (apt-get install bubblewrap)"
  else:
    named = [*readable, *shown]
    try:
      box = _boxed(program, bare, named, folders, hidden)
      missing, reason = _try(box)
    except (OSError, subprocess.TimeoutExpired) as error:
      missing, reason = None, repr(error)[:200]
    if missing is not None:
      return dataclasses.replace(box, missing=missing)
    reason = f"bubblewrap does not work here ({reason})"
  missing, _ = _try(bare)
  if missing is None:
    missing = [name for name in FREEDOMS if name != "tmpfs"]
  return dataclasses.replace(bare, missing=missing, reason=reason)


def _boxed(
    program: str,
    bare: Box,
    named: Sequence[str],
    folders: Iterable[str],
    hidden: Iterable[str],
) -> Box:
  """Returns `bare` with the command of bubblewrap."""
  words = [program, "--die-with-parent", "--unshare-ipc", "--unshare-pid"]
  words += ["--unshare-uts", "--unshare-cgroup-try"]
  words += [] if bare.network else ["--unshare-net"]
  usage = subprocess.run(
      [program, "--help"], capture_output=True, text=True, timeout=_TRIAL_S,
      check=False,
  )  # fmt: skip
  tmpfs, reason = ["--perms", "1777", "--size", str(MAX_DISK_BYTES)], ""
  if "--size" not in usage.stdout:
    tmpfs, reason = [], "this bubblewrap has no --size (0.7 or newer has)"
  words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
  for path in ("/tmp", _SHARED):
    words += [*tmpfs, "--tmpfs", path]
  visible = _outermost(visible_paths(named, folders, hidden))
  # Parent folders that bubblewrap makes by itself are closed to other user ids.
  parents = {
      str(parent) for path in visible for parent in pathlib.Path(path).parents
  }
  for path in sorted({*parents, os.getcwd()} - {"/"}):
    words += ["--dir", path]
  for path in visible:
    words += ["--ro-bind-try", path, path]
  return dataclasses.replace(bare, bubblewrap=words, tmpfs=tmpfs, reason=reason)


def visible_paths(
    named: Sequence[str], folders: Iterable[str], hidden: Iterable[str]
) -> Iterator[str]:
  """Yields the paths that a box shows."""
  yield from _SYSTEM
  yield os.path.realpath(sys.executable)
  homes = {os.path.expanduser("~"), _home_of(os.getuid())}
  closed = {os.path.realpath(path) for path in (*homes, *hidden) if path}
  homes = {os.path.realpath(path) for path in homes if path}

  def holds(path: str, inner: Iterable[str]) -> bool:
    return any(_is_in(other, os.path.realpath(path)) for other in inner)

  def entries(folder: str) -> list[str]:
    if holds(folder, homes) or any(
        _is_in(os.path.realpath(folder), path) for path in closed - homes
    ):
      return []
    try:
      names = [n for n in os.listdir(folder) if not n.startswith(".")]
    except OSError:  # The folder is on Python's path, but unreadable.
      return []
    paths = [os.path.join(folder, name) for name in names]
    paths = [path for path in paths if not holds(path, closed)]
    return paths if len(paths) <= MAX_ENTRIES else []

  # The Hugging Face cache, and other data, consists of links.
  links = [
      os.path.realpath(inside)
      for path in named
      for inside in pathlib.Path(path).rglob("*")
      if inside.is_symlink()
  ]
  for path in (sys.prefix, sys.base_prefix, *_imported(), *named, *links):
    if os.path.isdir(path) and holds(path, closed):
      yield from entries(path)
    else:
      yield path
  for folder in {*map(os.path.abspath, sys.path), os.getcwd(), *folders}:
    if not os.path.isdir(folder):
      yield folder  # An archive of modules.
    elif any(_is_in(folder, path) for path in (sys.prefix, *_SYSTEM)):
      continue
    elif os.path.basename(folder) in _PACKAGES and not holds(folder, closed):
      # As a whole: a nested venv, for example, may have any number of entries.
      yield folder
    else:
      yield from entries(folder)


def _home_of(uid: int) -> str:
  try:
    return pwd.getpwuid(uid).pw_dir
  except KeyError:  # The user is unknown, as in some containers.
    return ""


def _imported() -> Iterator[str]:
  """Yields the folders and files of modules, which may be anywhere."""
  for name, module in list(sys.modules.items()):
    paths = getattr(module, "__path__", None) or [
        getattr(module, "__file__", None)
    ]
    if "." not in name:
      yield from filter(None, paths)


def _is_in(path: str, folder: str) -> bool:
  return path == folder or path.startswith(folder.rstrip("/") + "/")


def _outermost(paths: Iterable[str]) -> list[str]:
  """Returns the existing paths that are not inside others, in order."""
  outermost: list[str] = []
  for path in sorted({p for p in paths if os.path.exists(p)}):
    if not any(_is_in(path, other) for other in outermost):
      outermost.append(path)
  return outermost


def _try(box: Box) -> tuple[list[str] | None, str]:
  """Tries a box; returns what is missing, or None and why it failed."""
  with contextlib.closing(TemporaryHome()) as folder:
    home = box.home(folder.path)
    arguments = json.dumps(box.arguments(home))
    words = [sys.executable, "-c", _TRIAL, arguments]
    try:
      process = subprocess.run(
          box.command(words, home),
          env=environment(home),
          stdin=subprocess.DEVNULL,
          capture_output=True,
          text=True,
          timeout=_TRIAL_S,
          check=True,
      )
      missing = json.loads(process.stdout)
    except subprocess.CalledProcessError as error:
      lines = (
          error.stderr.strip() or f"status {error.returncode}"
      ).splitlines()
      return None, lines[-1][:200]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
      return None, repr(error)[:200]
  if box.bubblewrap and not box.tmpfs:
    missing.append("tmpfs")
  return missing, ""


class TemporaryHome:
  """A temporary directory, removed by `close`.

  If this process is killed, a later process removes it.
  """

  def __init__(self):
    remove_abandoned()
    self._fd = -1
    while True:
      self.path = tempfile.mkdtemp(prefix=_HOME)
      try:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
      except FileNotFoundError:  # Another process took it for an abandoned one.
        continue
      if processes.try_lock(self._fd) and os.path.exists(self.path):
        return
      os.close(self._fd)

  def close(self) -> None:
    fd, self._fd = self._fd, -1
    if fd >= 0:
      _remove_folder(self.path)
      os.close(fd)


@functools.cache
def remove_abandoned() -> None:
  """Removes directories of ended processes, which are unlocked."""
  for path in pathlib.Path(tempfile.gettempdir()).glob(f"{_HOME}*"):
    try:
      status = path.lstat()
      ours = status.st_uid == os.getuid() or _is_ours(status.st_uid)
      if not stat.S_ISDIR(status.st_mode) or not ours:
        continue
      fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
      continue  # Another user's, or just removed.
    try:
      if processes.try_lock(fd):
        _remove_folder(str(path))
    finally:
      os.close(fd)


def _is_ours(uid: int) -> bool:
  return any(first <= uid < first + count for first, count in _UIDS)


def enter(
    home: str,
    *,
    network: bool,
    readable: Sequence[str] = (),
    boxed: bool,
    uids: Sequence[int],
    num_threads: int,
) -> "Confinement":
  """Permanently applies the confinement that all forks of this process share.

  Without a box, leaves the network and, as root, makes all file systems
  read-only except an empty `home` of limited size. Call it before starting
  threads.

  Args:
    network: whether to keep the network.
    readable: paths that must stay readable.
    boxed: whether the process runs in bubblewrap.
    uids: user ids for forks of root, which take the first permitted one.
    num_threads: threads of the user's other processes.

  Returns:
    The confinement of its forks.
  """
  missing = []
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  if not network and not boxed and not _leave_network():
    missing.append("network")
  folders = [home, "/tmp", _SHARED] if boxed else [home]
  is_limited = boxed
  if not boxed and os.geteuid() == 0:
    limited = _limit_disk(home, readable)
    is_limited, folders = bool(limited), limited or folders
  _empty(home, lambda entry: True)
  return Confinement(
      home,
      readable,
      boxed,
      uids,
      num_threads,
      folders,
      _modes(folders),
      is_limited,
      missing,
  )


@dataclasses.dataclass(frozen=True)
class Confinement:
  """Confinement of a completion's process, a fork of one that called `enter`.

  folders: paths used only by the forks, emptied by `clean`.
  modes: permissions of these folders and their initial contents, by path.
  is_limited: whether the forks can write nowhere else.
  missing: keys of `FREEDOMS` that `enter` could not take away.
  Other fields are arguments of `enter`.
  """

  home: str
  readable: Sequence[str]
  boxed: bool
  uids: Sequence[int]
  num_threads: int
  folders: Sequence[str]
  modes: Mapping[str, int]
  is_limited: bool
  missing: Sequence[str]

  def close(self) -> list[str]:
    """Confines this process and its children permanently.

    Limits processes, open files and file sizes. As root, changes to a separate
    user id, without access to others' files and memory. Changes directory to
    its home.

    Returns:
      Keys of `FREEDOMS` that the system did not let it give up.
    """
    missing = [*self.missing]
    uid, reads_all = None, False
    is_root = os.geteuid() == 0
    if is_root:
      uid, reads_all = self._take_uid()
    # Root could undo the other limits.
    is_held = uid is not None or (self.boxed and not is_root)
    if not is_held or not self.is_limited:
      missing.append("disk")
    if not is_held:
      missing.append("user")
    if not is_held or reads_all:
      missing.append("files")
    if not _limit_processes(uid, self.num_threads):
      missing.append("processes")
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES,) * 2)
    _lower_limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    if sys.platform.startswith("linux"):
      ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Set again, as changing the user id clears both.
    processes.die_with_parent()
    processes.hide_memory()
    os.chdir(self.home)
    return [name for name in FREEDOMS if name in missing]

  def _take_uid(self) -> tuple[int | None, bool]:
    for uid in self.uids:
      new_uid, reads_all = _take_uid(self.home, self.readable, uid)
      if new_uid is not None:
        return new_uid, reads_all
    return None, True

  def clean(self) -> bool:
    """Removes what ended forks left behind; False if something remains."""
    for folder in self.folders:
      _empty(folder, lambda entry: entry.path not in self.modes)
    if not self.is_limited and os.geteuid() == 0:
      for folder in ("/tmp", "/var/tmp", _SHARED):
        _empty(folder, lambda entry: _owner(entry) in self.uids)
    if self.boxed and any(map(_has_rows, _SHARED_MEMORY)):
      return False
    return _modes(self.folders) == self.modes


def _modes(folders: Sequence[str]) -> dict[str, int]:
  """Returns the modes of folders and their contents, by path.

  Mount points inside them are left out.
  """
  out, pending = {}, list(folders)
  while pending:
    path = pending.pop()
    status = os.lstat(path)
    out[path] = status.st_mode
    if stat.S_ISDIR(status.st_mode):
      with contextlib.suppress(OSError):
        inside = [os.path.join(path, name) for name in os.listdir(path)]
        pending += [child for child in inside if not os.path.ismount(child)]
  return out


def _empty(folder: str, is_left: Callable[[os.DirEntry[str]], bool]) -> None:
  """Removes leftovers from a folder, as far as possible."""
  with contextlib.suppress(OSError):
    for entry in list(os.scandir(folder)):
      is_folder = entry.is_dir(follow_symlinks=False)
      if not is_left(entry):
        if is_folder and not os.path.ismount(entry.path):
          _empty(entry.path, is_left)
      elif is_folder:
        _remove_folder(entry.path)
      else:
        os.unlink(entry.path)


def _remove_folder(path: str) -> None:
  """Removes an unused folder of any depth, if possible."""
  with contextlib.suppress(OSError):
    os.chmod(path, 0o700)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
      names = (f"{secrets.token_hex(8)}.{i}" for i in itertools.count())
      while folders := _remove_files(top):
        for name in folders:
          inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=top)
          try:
            for below in _remove_files(inner):
              new = next(names)
              os.rename(below, new, src_dir_fd=inner, dst_dir_fd=top)
          finally:
            os.close(inner)
          os.rmdir(name, dir_fd=top)
    finally:
      os.close(top)
    os.rmdir(path)


def _remove_files(folder: int) -> list[str]:
  """Removes files of an open folder; returns its folders, made accessible."""
  folders = []
  for name in os.listdir(folder):
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
      os.chmod(name, 0o700, dir_fd=folder)
      folders.append(name)
    else:
      os.unlink(name, dir_fd=folder)
  return folders


def _owner(entry: os.DirEntry[str]) -> int:
  return entry.stat(follow_symlinks=False).st_uid


def _has_rows(path: str) -> bool:
  try:
    return len(pathlib.Path(path).read_text().splitlines()) > 1
  except OSError:  # The kernel lacks System V IPC.
    return False


def _lower_limit(which: int, limit: int) -> None:
  hard = resource.getrlimit(which)[1]
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(which, (limit, limit))


def _leave_network() -> bool:
  """Moves to a network of this process alone; False if not permitted."""
  if not sys.platform.startswith("linux"):
    return False
  uid, gid = os.getuid(), os.getgid()
  unshare = ctypes.CDLL(None, use_errno=True).unshare
  if unshare(_CLONE_NEWNET) == 0:
    _raise_loopback()
    return True
  if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
    return False
  for name, text in (
      ("setgroups", "deny"),
      ("uid_map", f"{uid} {uid} 1"),
      ("gid_map", f"{gid} {gid} 1"),
  ):
    pathlib.Path("/proc/self", name).write_text(text)
  _raise_loopback()
  return True


def _raise_loopback() -> None:
  """Lets processes of a new network reach each other at 127.0.0.1."""
  up = struct.pack("16sh", b"lo", _IFF_UP)
  with contextlib.suppress(OSError):  # Not permitted.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
      fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)


def _limit_disk(home: str, readable: Sequence[str]) -> list[str]:
  """Makes file systems read-only for this process.

  `home` and shared memory become file systems of limited size, in memory.

  Returns:
    Paths of these file systems; none if this is not permitted.
  """
  if not sys.platform.startswith("linux"):
    return []
  libc = ctypes.CDLL(None)
  if libc.unshare(_CLONE_NEWNS) != 0:
    return []
  if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
    return []
  options = f"size={MAX_DISK_BYTES},nr_inodes=65536,mode=1777".encode()
  mounts = [home]
  if os.path.isdir(_SHARED) and not any(
      os.path.realpath(path).startswith(_SHARED) for path in readable
  ):
    mounts = [_SHARED, home]  # In this order: `home` may be in `_SHARED`.
  for path in map(os.fsencode, mounts):
    os.makedirs(path, exist_ok=True)
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(b"none", path, b"tmpfs", flags, options) != 0:
      return []

  def set_read_only(path: str, *, recursive: bool, read_only: bool) -> bool:
    flag = _MOUNT_ATTR_RDONLY  # Flag to set, or to clear.
    attributes = (ctypes.c_uint64 * 4)(*((flag, 0) if read_only else (0, flag)))
    return libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path),
        recursive * _AT_RECURSIVE, attributes, ctypes.sizeof(attributes),
    ) == 0  # fmt: skip

  if not set_read_only("/", recursive=True, read_only=True) or not all(
      set_read_only(path, recursive=False, read_only=False) for path in mounts
  ):
    return []
  return mounts


def _take_uid(
    home: str, readable: Sequence[str], uid: int
) -> tuple[int | None, bool]:
  """Changes to a user id.

  Returns:
    The user id, None if not permitted; and whether other users' files stay
    readable, which is necessary if Python or a path of `readable` is accessible
    only to root.
  """
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
  except OSError:  # For example, the container has few user ids.
    return None, True
  capabilities = 0 if suffices else 1 << _CAP_DAC_READ_SEARCH
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
  data = (ctypes.c_uint32 * 6)(
      capabilities, capabilities, capabilities, 0, 0, 0
  )
  libc.capset(header, data)
  if capabilities:  # Children must inherit it.
    libc.prctl(
        _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0
    )
  return uid, not suffices


def _limit_processes(uid: int | None, num_threads: int) -> bool:
  """Limits the processes of this user; False if root, which is exempt."""
  if uid is None and os.getuid() == 0:
    return False
  # The limit includes the user's other processes (before Linux 5.14, also those
  # outside a box); a new user has none.
  num_others = 0 if uid is not None else num_threads
  _lower_limit(resource.RLIMIT_NPROC, num_others + _MAX_PROCESSES)
  return True


def _num_threads(uid: int) -> int:
  """Returns the number of a user's threads."""
  count = 0
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if folder.stat().st_uid == uid:
        count += len(os.listdir(folder / "task"))
    except OSError:
      continue  # The process has ended.
  return count


if __name__ == "__main__":
  processes.die_with_parent()
  processes.adopt_orphans()
  try:
    os.execvp(sys.argv[1], sys.argv[1:])
  except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Process set-up: cores, locks, signals, environment, directories. No JAX."""

from collections.abc import Iterator, Sequence
import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import logging
import os
import pathlib
import re
import resource
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

from absl import logging as absl_logging

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Exit statuses of a role, for the supervisor.
EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_FATAL = 3  # A restart would fail again.
EXIT_INTERRUPTED = 75  # State is saved; can be resumed (EX_TEMPFAIL).

# Default environment of a role's process. Huge pages make a training step on a
# CPU, which allocates large arrays, about 10 % faster.
ROLE_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Environment variable with the supervisor's pid.
SUPERVISED = "TBA_JAX_SUPERVISED"
# Environment variable with the folder of compiled programs.
CACHE_VARIABLE = "TBA_JAX_CACHE_DIR"
_JAX_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"

# Environment variable with the user's umask, in octal digits.
_UMASK = "TBA_JAX_UMASK"

# JAX's event for a program that was compiled, or read from the cache.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LONG_COMPILATION_S = 0.5

# Prefix of the names of threads that `leave` does not wait for.
LEFT_BEHIND = "left_behind"

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
# A unix socket path has at most 108 bytes; gRPC's prefix takes some.
_MAX_SOCKET_DIR = 80
# Characters that gRPC would misread in the path of a socket.
_NOT_IN_SOCKETS = re.compile(r"[,#?]|%[0-9A-Fa-f]{2}")
_OPEN_FILES = 1 << 16


# Seconds that a role which has not begun may still run after a signal.
_WARM_UP_S = 2.0
# Role -> event, set once the role has begun in this process.
_begun: dict[str, threading.Event] = {}

# Sockets of `free_port`, which keep its ports.
_port_sockets: list[socket.socket] = []


def refuse(error: Exception | str) -> int:
  """Prints an error of a program's input; returns its exit status."""
  print(f"error: {error}", file=sys.stderr)
  return EXIT_CONFIG


def free_port() -> int:
  """Returns a free port of the loopback interface.

  Until this process exits, Linux assigns the port to no other process, but a
  process that knows the number can listen on it.
  """
  listener = socket.socket()
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  listener.bind(("127.0.0.1", 0))
  port = listener.getsockname()[1]
  if sys.platform == "linux":
    _port_sockets.append(listener)
  else:
    listener.close()
  return port


def parse_cores(text: str) -> list[int]:
  """Returns the cores in "0", "0,2" or "0-3"; raises ValueError for others."""
  cores = []
  for item in text.split(","):
    first, dash, last = item.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
      raise ValueError(f"cores {text!r}: must be such as 0  0,2  0-3")
    cores += range(int(first), int(last if dash else first) + 1)
  if not cores:
    raise ValueError(f"cores {text!r}: the range is empty")
  return sorted(set(cores))


def available_cores() -> list[int]:
  """Returns the cores that this process may run on."""
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


_ROOT = pathlib.Path("/")


def memory(root: pathlib.Path = _ROOT) -> tuple[int, str]:
  """Returns the bytes of memory that processes here may use, and their source.

  The machine's memory, or a lower limit of a control group.
  """
  most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  source = "memory of this machine"
  limits = _limits(root, "memory", "memory.max", "memory.limit_in_bytes")
  for path, limit in limits:
    if limit.isdigit() and int(limit) < most:
      most, source = int(limit), f"limit in {path}"
  return most, source


def num_cores(root: pathlib.Path = _ROOT) -> tuple[float, str]:
  """Returns the cores that processes here may use, and the count's source."""
  most, source = float(len(available_cores())), "cores of this process"
  for path, quota in _limits(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
    quota, _, period = quota.partition(" ")
    if path.name == "cpu.cfs_quota_us":
      period = (path.parent / "cpu.cfs_period_us").read_text()
    if quota.isdigit() and int(quota) / int(period) < most:
      most, source = int(quota) / int(period), f"quota in {path}"
  return most, source


def _limits(
    root: pathlib.Path, controller: str, name: str, old_name: str
) -> Iterator[tuple[pathlib.Path, str]]:
  """Yields limits of this process's control groups and their parents.

  `old_name` is the file's name in version 1, with a folder per controller.
  """
  try:
    lines = (root / "proc/self/cgroup").read_text().splitlines()
  except OSError:
    return  # Not Linux.
  mounted = root / "sys/fs/cgroup"
  for line in lines:
    _, controllers, group = line.split(":", 2)
    top, file = mounted, name
    if controllers:
      top, file = mounted / controller, old_name
      if controller not in controllers.split(","):
        continue
    # A container's own group may be mounted as the top.
    inside = top / group.lstrip("/")
    for folder in (inside, *inside.parents):
      path = folder / file
      if folder.is_relative_to(top) and path.is_file():
        yield path, path.read_text().strip()


def assign_cores(num_searchers: int) -> dict[str, Any]:
  """Returns the cores of `trainer`, and of each of `searchers`.

  Searchers share half of this process's cores evenly, and the trainer has the
  rest: a step's completions take about as long to sample as to train on.
  An empty list means no binding.

  Args:
    num_searchers: number of searchers, 1 or more.
  """
  available = available_cores()
  if len(available) < 2:
    return {"trainer": [], "searchers": [[]] * num_searchers}
  half = len(available) // 2
  per = max(1, half // num_searchers)
  split = len(available) - min(half, num_searchers * per)
  searchers = available[split:]
  return {
      "trainer": available[:split],
      "searchers": [
          searchers[i * per % len(searchers) :][:per]
          for i in range(num_searchers)
      ],
  }


def pin(cores: Sequence[int]) -> None:
  """Binds the calling thread, and its future children, to the cores."""
  if cores and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, cores)


def raise_open_files() -> None:
  """Raises this process's limit of open files, up to 65,536.

  Strangers' connections soon use up the usual 1,024, and then nobody else can
  connect.
  """
  now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  limit = _OPEN_FILES
  if most != resource.RLIM_INFINITY:
    limit = min(limit, most)
  if 0 <= now < limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def try_lock(fd: int, *, shared: bool = False) -> bool:
  """Locks an open file until it is closed; False if already locked."""
  kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
  try:
    fcntl.flock(fd, kind | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


class LockedError(ValueError):
  """Another process holds the lock; the message is its pid."""


def lock_file(path: pathlib.Path, *, wait_s: float = 0.0) -> int:
  """Locks a file and writes this process's pid to it; returns the open file.

  Raises:
    LockedError: another process still holds it after `wait_s`.
  """
  fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
  deadline = time.monotonic() + wait_s
  while not try_lock(fd):
    if time.monotonic() >= deadline:
      holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
      os.close(fd)
      raise LockedError(holder or "unknown")
    time.sleep(0.02)
  with naming(path):
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
  return fd


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds a file's name to errors of its descriptor, such as a full disk's."""
  try:
    yield
  except OSError as error:
    error.filename = error.filename or os.fspath(path)
    raise


def _set(option: int, value: int) -> None:
  """Sets an option of this process (Linux)."""
  if sys.platform.startswith("linux"):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
      raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent: int = 0) -> None:
  """Has the kernel kill this process when its parent ends (Linux).

  If the parent's pid is given and it has already ended, kills this process now.
  """
  _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if parent and os.getppid() != parent:
    os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
  """Undoes `die_with_parent`."""
  _set(_PR_SET_PDEATHSIG, 0)


def hide_memory() -> None:
  """Hides this process's memory and open files from the user's others.

  Other processes can neither trace it nor open its entries in /proc, such as
  its pipes. Forks are hidden too, until they execute a program.
  """
  _set(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
  """Makes this process the parent of descendants whose own parent has ended."""
  _set(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
  """Returns the pids of a process's running descendants (Linux)."""
  children: dict[int, list[int]] = {}
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      # The name, in parentheses, may contain any character.
      fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
    except OSError:
      continue  # The process has ended.
    state, parent = fields.split()[:2]
    if state not in "ZX":
      children.setdefault(int(parent), []).append(int(folder.name))
  out, pending = [], [pid]
  while pending:
    pids = children.get(pending.pop(), [])
    out += pids
    pending += pids
  return out


def kill_descendants(pid: int) -> None:
  """Kills a process's descendants, even while they start others."""
  stopped: set[int] = set()
  # Stop them first: a killed process makes room for another, a stopped process
  # does not.
  while running := {*descendants(pid)} - stopped:
    for child in running:
      _send(child, signal.SIGSTOP)
    stopped |= running
  for child in stopped:
    _send(child, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.kill(pid, number)


def die_with_supervisor() -> None:
  """Calls `die_with_parent` if a supervisor has started this process.

  A process started by a user or a launch script outlives its shell.
  """
  supervisor = os.environ.get(SUPERVISED)
  if supervisor:
    die_with_parent(int(supervisor))


def index_of(operands: Sequence[str]) -> int:
  """Returns the process number in the operands, or 0.

  Raises:
    ValueError: the operands are not a single number.
  """
  if len(operands) > 1 or not all(text.isdecimal() for text in operands):
    raise ValueError(
        f"operands {' '.join(operands)}: must be one whole number, the index"
        " of this process on its host"
    )
  return int(operands[0]) if operands else 0


def stop_on_signals() -> threading.Event:
  """Returns an event that SIGTERM and SIGINT set."""
  stop = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stop.set())
  return stop


@contextlib.contextmanager
def importing() -> Iterator[None]:
  """Keeps the garbage collector from scanning module objects, which stay.

  Scanning them during imports, later on and at exit takes a third of the CPU
  time of a role's start.
  """
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    gc.enable()


def start_role(role: str) -> threading.Event:
  """Sets up a role's process; returns the event of `stop_on_signals`.

  After a signal the process ends within seconds, unless `role` has called
  `note_begun`: before that there is nothing to save, and a compilation cannot
  react to signals.
  """
  absl_logging.use_absl_handler()
  absl_logging.set_verbosity(absl_logging.INFO)
  absl_logging.get_absl_handler().addFilter(_is_worth_logging)
  absl_logging.info("cores %s", available_cores())
  prepare_compiling()
  stop = stop_on_signals()
  # The interpreter writes signal numbers to the pipe at once, but runs handlers
  # only when the main thread returns to it.
  source, sink = os.pipe()
  os.set_blocking(sink, False)
  signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
  threading.Thread(
      target=_end_warm_up, args=(role, source), name="warm-up", daemon=True
  ).start()
  return stop


def note_begun(role: str) -> None:
  """Notes that a role has something to save; see `start_role`."""
  _begun.setdefault(role, threading.Event()).set()


def _end_warm_up(role: str, source: int) -> None:
  while not {signal.SIGTERM, signal.SIGINT} & {*os.read(source, 64)}:
    pass
  if not _begun.setdefault(role, threading.Event()).wait(_WARM_UP_S):
    absl_logging.warning("a signal in warm-up: nothing is to be saved")
    _leave_now(EXIT_INTERRUPTED)


def keep_private() -> None:
  """Makes new files of this process and its children private to this user."""
  users = os.umask(0o077)
  os.environ.setdefault(_UMASK, f"{users:o}")


@contextlib.contextmanager
def shared() -> Iterator[None]:
  """Makes files with the user's own umask, since others may need them."""
  users = os.environ.get(_UMASK)
  if users is None:  # The umask is unchanged.
    yield
    return
  ours = os.umask(int(users, 8))
  try:
    yield
  finally:
    os.umask(ours)


def spool_directory(setting: str, workdir: str) -> pathlib.Path:
  """Returns the local directory for socket, locator, lock and secret, 0700.

  The first of: the setting; WORKDIR/spool if it is local and can hold unix
  sockets; a directory of this user under the temporary directory.

  Raises:
    ValueError: the directory is not private, see `make_private`, or its path
      cannot hold a socket.
  """
  path = pathlib.Path(setting or f"{workdir}/spool").expanduser().absolute()
  remote = "://" in workdir
  if not setting and (remote or not _can_be_of_socket(path)):
    path = temporary_directory(workdir if remote else path.parent)
  if match := _NOT_IN_SOCKETS.search(str(path)):
    raise ValueError(
        f"config.store.spool_dir: the path of a socket cannot have {match[0]!r}"
        f" ({path}); must be another directory, or another TMPDIR"
    )
  make_private(path, "store.spool_dir")
  return path


def _can_be_of_socket(path: pathlib.Path) -> bool:
  is_short = len(os.fsencode(path)) <= _MAX_SOCKET_DIR
  return is_short and not _NOT_IN_SOCKETS.search(str(path))


def temporary_directory(name: str | os.PathLike[str]) -> pathlib.Path:
  """Returns this user's directory for `name` in the temporary one, 0700.

  Raises:
    ValueError: the directory is not private, see `make_private`.
  """
  digest = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
  path = private_directory() / digest
  # The parent's owner could replace our directory.
  make_private(path.parent, "store.spool_dir")
  make_private(path, "store.spool_dir")
  return path


def private_directory() -> pathlib.Path:
  """Returns the directory of this user's spools under the temporary one."""
  return pathlib.Path(tempfile.gettempdir(), f"tba_jax-{os.getuid()}")


def make_private(path: pathlib.Path, key: str) -> None:
  """Makes a directory with mode 0700, or checks an existing one.

  Args:
    path: directory; missing parents are made too.
    key: setting to name in the error.

  Raises:
    ValueError: the directory is a link, another user's, or accessible to
      others, or cannot be made.
  """
  try:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
        f"config.{key}: {path} cannot be made: {error.strerror}; must be a"
        " directory of this user"
    ) from error
  status = path.lstat()
  mode = stat.S_IMODE(status.st_mode)
  if (
      not stat.S_ISDIR(status.st_mode)
      or status.st_uid != os.getuid()
      or mode & 0o077
  ):
    raise ValueError(
        f"config.{key}: {path} must be a directory of this user, no link, with"
        f" mode 0700; it has {mode:04o}"
    )


def cache_directory() -> str:
  """Returns the directory of JAX's compilation cache, made if missing.

  The first of: TBA_JAX_CACHE_DIR; JAX_COMPILATION_CACHE_DIR, which may be in a
  bucket; `tba_jax/xla` in the user's cache.

  Raises:
    ValueError: the directory cannot be made.
  """
  of_jax = os.environ.get(_JAX_CACHE_VARIABLE)
  if of_jax and not os.environ.get(CACHE_VARIABLE):
    return of_jax
  root = os.environ.get(CACHE_VARIABLE) or _user_cache("xla")
  return _make_cache(root, f"{CACHE_VARIABLE}: the folder of compiled programs")


def models_directory() -> pathlib.Path:
  """Returns `tba_jax/models` in the user's cache, made if missing.

  Raises:
    ValueError: the directory cannot be made.
  """
  what = "XDG_CACHE_HOME: the cache of models"
  return pathlib.Path(_make_cache(_user_cache("models"), what))


def _user_cache(name: str) -> str:
  root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  return os.path.join(root, "tba_jax", name)


def _make_cache(root: str, what: str) -> str:
  try:
    os.makedirs(root, mode=0o700, exist_ok=True)
  except (OSError, ValueError) as error:
    why = getattr(error, "strerror", None) or error
    raise ValueError(
        f"{what}, {root!r}, cannot be made: {why}; must be a folder that this"
        " user may write"
    ) from error
  return root


def prepare_compiling() -> None:
  """Turns on JAX's compilation cache; raises as `cache_directory` does.

  After a long compilation, its memory is returned to the system, see
  `trim_memory`.
  """
  import jax  # pylint: disable=g-import-not-at-top

  jax.config.update("jax_compilation_cache_dir", cache_directory())
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  _watch_compilations()


@functools.cache
def _watch_compilations() -> None:
  import jax  # pylint: disable=g-import-not-at-top

  jax.monitoring.register_event_duration_secs_listener(_trim_after_compiling)


def _trim_after_compiling(event: str, duration_s: float, **_: Any) -> None:
  if event == _COMPILED and duration_s >= _LONG_COMPILATION_S:
    trim_memory()


def trim_memory() -> None:
  """Returns freed memory that the C library keeps to the system.

  Compilations and saves allocate in small pieces, which glibc keeps. Does
  nothing with other C libraries.
  """
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:
    trim(0)


def _is_worth_logging(record: logging.LogRecord) -> bool:
  # Libraries log a lot at INFO.
  return record.levelno >= logging.WARNING or _PACKAGE in record.pathname


def package_environment() -> dict[str, str]:
  """Returns this environment, with the package on PYTHONPATH for children."""
  paths = [os.path.dirname(_PACKAGE)]
  paths += os.environ.get("PYTHONPATH", "").split(os.pathsep)
  path = os.pathsep.join(dict.fromkeys(p for p in paths if p))
  return {**os.environ, "PYTHONPATH": path}


def leave(status: int) -> NoReturn:
  """Ends this process without waiting for threads named `LEFT_BEHIND`.

  The interpreter would wait for these threads, or abort if they are daemon
  threads inside XLA.
  """
  if any(t.name.startswith(LEFT_BEHIND) for t in threading.enumerate()):
    _leave_now(status)
  sys.exit(status)


def _leave_now(status: int) -> NoReturn:
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)  # pylint: disable=protected-access


def restart_as_role() -> None:
  """Re-executes this process in ROLE_ENVIRONMENT, unless already set.

  The C library reads some variables only at the start.
  """
  environment = {**ROLE_ENVIRONMENT, **os.environ}
  if environment != dict(os.environ):
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, environment)

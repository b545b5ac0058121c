# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Containers in which environments and verifiers run commands.

    with containers.open("podman", "python:3.12") as container:
      container.put("test.py", b"import task; print(task.mean([]))")
      status, output = container.run("python test.py", deadline_s=10)

Kinds of containers:

    bubblewrap  `image` is "", for this machine's programs and Python, or a
                folder with a root file system. Only `folder`, /tmp and /dev/shm
                are writable. All processes of a command end with it. Works in
                the confined process of an episode
    podman      `image` is in the local store. Background processes stay
    docker      the same command line as podman's
    http://…    a server, such as `examples/container_server.py`, which answers
                POST requests with JSON, where bytes are in base64:

    start   {"image", "folder", "network", "deadline_s"}: {"id"} on a line. The
            answer stays open: the container ends once the client closes the
            connection. Until then the server may write empty lines
    exec    {"id", "words", "stdin", "deadline_s", "max_bytes"}:
            {"status", "output"}, or {"error", "output"} of a command that was
            killed, or {"error"} if the container does not work

A container ends with the process that opened it, even if that is killed.
"""

import base64
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import http.client
import json
import math
import os
import pathlib
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any
import urllib.parse

from tba_jax.system import sandbox

_MAX_OUTPUT_BYTES = 2**20
_MAX_FILE_BYTES = 2**24
_POLL_S = 0.05
_END_S = 10.0  # For a container to end by itself.
_GRACE_S = 30.0  # For a server, beyond the deadline.
_RETRIES_S = (0.2, 0.5, 1.0, 2.0)
# First process of a container: ends when its stdin closes. Commands can write
# to its outputs.
_INIT = 'mkdir -p "$0" && echo ready && exec cat >/dev/null 2>&1'
# Process that ends a container whose commands keep that stdin open.
_WATCH = 'read _; exec "$0" rm --force "$1"'
# Errors of a server's answer.
_WRONG = OSError, ValueError, KeyError, TypeError, http.client.HTTPException
# Variable that marks a command's processes, and a script that kills them.
_MARK = "CONTAINER_COMMAND"
_KILL = f"""for p in /proc/[0-9]*; do
  tr '\\0' '\\n' 2>/dev/null <$p/environ | grep -qx "{_MARK}=$0" &&
  kill -9 ${{p#/proc/}}
done"""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SERVER = (
    "a server's URL works, with config.reward.network=True (see"
    " docs/guides/agents.md)"
)


class ContainerError(RuntimeError):
  """A container cannot start, or has died."""


class CommandError(ContainerError):
  """A command was killed, or cannot start; `output` is what it wrote."""

  def __init__(self, message: str, output: bytes = b""):
    super().__init__(message)
    self.output = output.decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of a container.

  words: program and arguments.
  stdin: input.
  deadline_s: seconds until it is killed.
  max_bytes: size of output at which it is killed.
  """

  words: Sequence[str]
  stdin: bytes
  deadline_s: float
  max_bytes: int

  def __post_init__(self) -> None:
    if isinstance(self.words, str) or not (
        self.words and all(isinstance(word, str) for word in self.words)
    ):
      raise ValueError(f"words = {self.words!r}: must be a list of str")
    _check_deadline(self.deadline_s)
    if len(self.stdin) > _MAX_FILE_BYTES:
      raise CommandError(
          f"{_named(self)}: stdin has {len(self.stdin)} bytes, must have at"
          f" most {_MAX_FILE_BYTES}"
      )


@dataclasses.dataclass
class Container:
  """A running container; fields are the arguments of `open`."""

  kind: str
  image: str
  folder: str
  network: bool
  options: Sequence[str]
  deadline_s: float

  def __post_init__(self) -> None:
    # To return as info["metrics"].
    self.metrics = {"commands": 0, "command_s": 0.0, "failed_commands": 0}
    self._is_closed = False

  def run(
      self,
      command: str | Sequence[str],
      stdin: str | bytes = b"",
      *,
      deadline_s: float | None = None,
  ) -> tuple[int, str]:
    """Returns exit status and output of a command.

    Args:
      command: words, or a line for `sh`.
      stdin: input.
      deadline_s: seconds until it is killed; the default is of `open`.

    Returns:
      Status, and stdout with stderr as UTF-8, wrong bytes replaced. With
      podman and docker, the two may be interleaved differently.

    Raises:
      CommandError: the deadline has passed, or the command wrote over 1 MiB.
      ContainerError: the container has died.
    """
    words = ["sh", "-c", command] if isinstance(command, str) else [*command]
    data = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
    limit_s = self.deadline_s if deadline_s is None else deadline_s
    status, output = self._count(
        Command(words, data, limit_s, _MAX_OUTPUT_BYTES)
    )
    return status, output.decode(errors="replace")

  def put(self, path: str, data: bytes) -> None:
    """Writes a file of up to 16 MiB, and its folder; raises as `run`."""
    target = os.path.join(".", path)  # Names may start with a dash.
    script = 'mkdir -p "$1" && cat >"$0"'
    words = ["sh", "-c", script, target, os.path.dirname(target)]
    self._transfer(words, data, f"put({path!r})")

  def get(self, path: str) -> bytes:
    """Returns a file of up to 16 MiB; raises as `run`."""
    words = ["cat", os.path.join(".", path)]
    return self._transfer(words, b"", f"get({path!r})")

  def _transfer(self, words: Sequence[str], data: bytes, name: str) -> bytes:
    status, output = self._count(
        Command(words, data, self.deadline_s, _MAX_FILE_BYTES)
    )
    if status:
      reason = f"status {status}, {_last_line(output)}"
      raise CommandError(f"{name}: {reason}", output)
    return output

  def _count(self, command: Command) -> tuple[int, bytes]:
    if self._is_closed:
      raise ContainerError(f"{_named(command)}: the container is closed")
    start = time.monotonic()
    self.metrics["commands"] += 1
    try:
      return self.execute(command)
    except CommandError:
      self.metrics["failed_commands"] += 1
      raise
    finally:
      self.metrics["command_s"] += time.monotonic() - start

  def execute(self, command: Command) -> tuple[int, bytes]:
    """Returns status and output of a command; raises as `run`."""
    raise NotImplementedError

  def close(self) -> None:
    """Ends the container and its processes."""
    self._is_closed = True

  def __enter__(self) -> "Container":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _run(
      self,
      before: Sequence[str],
      command: Command,
      variables: dict[str, str],
      kill: Callable[[], Any] = lambda: None,
      files: Sequence[int] = (),
  ) -> tuple[int, bytes]:
    """Returns status and output of a program, run in its own process group.

    Args:
      before: program and arguments before the command's words.
      command: words and limits.
      variables: environment.
      kill: function that kills what is not in the process group.
      files: descriptors to inherit.
    """
    deadline = time.monotonic() + command.deadline_s
    with tempfile.TemporaryFile() as stdin:
      stdin.write(command.stdin)
      stdin.seek(0)
      try:
        process = subprocess.Popen(
            [*before, *command.words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
            pass_fds=files,
        )
      except (OSError, ValueError) as error:  # For example, words are too long.
        message = f"{_named(command)}: cannot start ({error})"
        raise CommandError(message) from error
    try:
      output, failure, is_open = bytearray(), "", True
      poll = select.poll()
      poll.register(process.stdout, select.POLLIN)
      while not failure:
        has_ended = process.poll() is not None
        if is_open and poll.poll(_POLL_S * 1000):
          data = os.read(process.stdout.fileno(), 2**16)
          output += data
          is_open = bool(data)
        elif has_ended:  # A background process may keep the pipe open.
          return process.returncode, bytes(output)
        elif not is_open:
          with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        if len(output) > command.max_bytes:
          failure = f"wrote over {command.max_bytes} bytes"
        elif time.monotonic() > deadline:
          failure = f"did not end in {command.deadline_s:g} s"
        elif self._is_closed:
          failure = "ended with its container"
      raise CommandError(
          f"{_named(command)}: {failure}", bytes(output[: command.max_bytes])
      )
    finally:
      if process.poll() is None:
        kill()
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()
      process.stdout.close()


def open(  # pylint: disable=redefined-builtin
    kind: str = "bubblewrap",
    image: str = "",
    *,
    folder: str = "/work",
    network: bool = False,
    options: Sequence[str] = (),
    deadline_s: float = 60.0,
) -> Container:
  """Starts a container.

  Args:
    kind: see the module.
    image: see the module.
    folder: working directory, made if missing.
    network: whether commands have a network.
    options: further options of `bwrap` or `podman run`, such as --memory=2g.
    deadline_s: longest time of the start and, by default, of a command.

  Raises:
    ValueError: an argument is wrong.
    ContainerError: the container cannot start.
  """
  if not os.path.isabs(folder) or not os.path.normpath(folder).strip("/"):
    raise ValueError(f"folder = {folder!r}: must be absolute, and not /")
  _check_deadline(deadline_s)
  for prefix, make in _KINDS.items():
    if kind == prefix or (":" in prefix and kind.startswith(prefix)):
      return make(kind, image, folder, network, options, deadline_s)
  raise ValueError(f"kind = {kind!r}: must be {', '.join(_KINDS)}…")


class _Bubblewrap(Container):
  """Commands with namespaces of their own, and shared writable folders."""

  def __post_init__(self) -> None:
    super().__post_init__()
    words = [_find("bwrap", "bubblewrap"), "--die-with-parent", "--new-session"]
    words += ["--unshare-all", *["--share-net"] * self.network]
    words += ["--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
    if self.image and not os.path.isdir(self.image):
      raise ContainerError(
          f"image = {self.image!r}: must be a folder with a root file system,"
          " or '' for this machine's programs"
      )
    names = os.listdir(self.image) if self.image else []
    for name in {*names} - {"dev", "proc", "sys", "tmp"}:
      source = os.path.join(self.image, name)
      if os.path.islink(source):
        words += ["--symlink", os.readlink(source), f"/{name}"]
      else:
        words += ["--ro-bind", source, f"/{name}"]
    for path in [] if self.image else sandbox.system_paths():
      words += ["--ro-bind-try", path, path]
    words += ["--dev", "/dev", "--remount-ro", "/dev"]
    self._variables = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": _PATH}
    if not self.image:
      self._variables["PATH"] = f"{sys.prefix}/bin:{_PATH}"
    self._home = sandbox.TemporaryHome()
    with contextlib.ExitStack() as stack:
      stack.callback(self.close)
      self._start(words)
      stack.pop_all()

  def _start(self, words: list[str]) -> None:
    """Makes the writable folders, and tries the container."""
    for i, target in enumerate(("/tmp", "/dev/shm", self.folder)):
      source = os.path.join(self._home.path, str(i))
      if i == 2 and self.image and os.path.isdir(self.image + target):
        shutil.copytree(self.image + target, source, symlinks=True)
      else:
        os.mkdir(source)
      words += ["--bind", source, target]
    words += [*self.options, "--chdir", self.folder]
    # In an episode's sandbox the kernel forbids a new /proc. Processes in the
    # old one are visible, but cannot be traced or killed.
    for proc in ("--proc", "/proc"), ("--ro-bind", "/proc", "/proc"):
      self._words = [*words, *proc, "--remount-ro", "/"]
      trial = Command(["true"], b"", self.deadline_s, _MAX_OUTPUT_BYTES)
      try:
        status, output = self.execute(trial)
        if not status:
          return
        reason = _last_line(output)
      except ContainerError as error:
        reason = str(error)
    if "mkdir" in reason:
      raise ContainerError(
          f"folder = {self.folder!r}: must not be in a file or a read-only part"
          f" of the image ({reason})"
      )
    hint = "image must have programs"
    if "namespace" in reason or "ermi" in reason:
      hint = f"must have permission for user namespaces; {_SERVER}"
    raise ContainerError(f"bubblewrap does not work here ({reason}): {hint}")

  def execute(self, command: Command) -> tuple[int, bytes]:
    # The report has the exit code of a command that was started.
    with os.fdopen(os.memfd_create("report"), "rb") as report:
      fd = report.fileno()
      words = [*self._words, "--json-status-fd", str(fd), "--"]
      status, output = self._run(words, command, self._variables, files=[fd])
      report.seek(0)
      if b"exit-code" in report.read():
        return status, output
    reason = f"{_named(command)}: {_last_line(output)}"
    if output.startswith(b"bwrap: execvp "):
      raise CommandError(reason, output)
    raise ContainerError(reason)

  def close(self) -> None:
    super().close()
    self._home.close()


class _Cli(Container):
  """A container of podman or docker."""

  def __post_init__(self) -> None:
    super().__post_init__()
    self._program = _find(self.kind, self.kind)
    self._remove_abandoned()
    self._name = f"{names_of(os.getpid())}-{secrets.token_hex(8)}"
    words = [self._program, "run", "--interactive", "--rm", "--pull=never"]
    words += [f"--name={self._name}", "--entrypoint=sh"]
    words += ["--log-driver=none", "--stop-timeout=0"]
    words += [] if self.network else ["--network=none"]
    self._watch = subprocess.Popen(
        ["sh", "-c", _WATCH, self._program, self._name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=sandbox.without_secrets(),
    )
    self._errors = tempfile.TemporaryFile()
    self._process = subprocess.Popen(
        [*words, *self.options, "--", self.image, "-c", _INIT, self.folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._errors,
        start_new_session=True,
        env=sandbox.without_secrets(),
    )
    poll = select.poll()
    poll.register(self._process.stdout, select.POLLIN)
    is_late = not poll.poll(self.deadline_s * 1000)
    if is_late or self._process.stdout.readline() != b"ready\n":
      self._errors.seek(0)
      reason = _last_line(self._errors.read())
      self.close()
      reason = f"no answer in {self.deadline_s:g} s" if is_late else reason
      hint = f"; in an episode's sandbox {_SERVER}" * sandbox.is_confined()
      raise ContainerError(
          f"{self.kind} cannot start image {self.image!r} ({reason}): images"
          f" must have `sh` and be pulled, built or imported before{hint}"
      )

  def _remove_abandoned(self) -> None:
    """Removes what remains of a container if podman's monitor was killed."""
    for name in self._ask("ps", "--all", "--format={{.Names}}").split():
      pid = name.partition(names_of(""))[2].partition("-")[0]
      if pid.isdecimal():
        try:
          os.kill(int(pid), 0)
        except ProcessLookupError:
          self._ask("rm", "--force", name)
        except PermissionError:  # Another user's process.
          pass

  def _ask(self, *words: str) -> str:
    command = Command(words, b"", _END_S, _MAX_OUTPUT_BYTES)
    with contextlib.suppress(ContainerError):
      output = self._run([self._program], command, sandbox.without_secrets())[1]
      return output.decode(errors="replace")
    return ""

  def execute(self, command: Command) -> tuple[int, bytes]:
    mark = secrets.token_hex(8)
    status, output = self._run(
        [self._program, "exec", "--interactive", f"--workdir={self.folder}"]
        + [f"--env={_MARK}={mark}", self._name],
        command,
        sandbox.without_secrets(),
        lambda: self._ask("exec", self._name, "sh", "-c", _KILL, mark),
    )
    # Errors of the program look like the command's.
    if status == 137 or (status and output.startswith(b"Error")):
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(1.0)
        raise ContainerError(
            f"{_named(command)}: the container has died ({_last_line(output)})"
        )
    return status, output

  def close(self) -> None:
    super().close()
    for process in self._process, self._watch:
      process.stdin.close()  # The end of `_INIT` and `_WATCH`.
    for process in self._process, self._watch:
      try:
        process.wait(_END_S)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    self._process.stdout.close()
    self._errors.close()


class _Remote(Container):
  """A container of a server, whose open answer is its lease."""

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.options:
      raise ValueError(f"options = {self.options!r}: must be the server's")
    body = {"image": self.image, "folder": self.folder}
    body |= {"network": self.network, "deadline_s": self.deadline_s}
    self._lease, self._id = self._post("start", body, lambda out: out["id"])

  def execute(self, command: Command) -> tuple[int, bytes]:
    stdin = base64.b64encode(command.stdin).decode()
    body = {"id": self._id, **vars(command), "stdin": stdin}
    lease, output = self._post(
        "exec", body, lambda out: (int(out["status"]), _decode(out))
    )
    lease.close()
    return output

  def close(self) -> None:
    super().close()
    self._lease.close()

  def _post(
      self, name: str, body: dict[str, Any], read: Callable[[Any], Any]
  ) -> tuple[contextlib.ExitStack, Any]:
    """Sends a request, only once.

    Args:
      name: end of the path.
      body: content.
      read: function that returns what is needed of the answer.

    Returns:
      The open connection, and the result of `read`.
    """
    url = urllib.parse.urlsplit(self.kind.rstrip("/"))
    make = http.client.HTTPConnection
    if url.scheme == "https":
      make = http.client.HTTPSConnection
    connection = make(url.netloc, timeout=body["deadline_s"] + _GRACE_S)
    with contextlib.ExitStack() as stack:
      stack.callback(connection.close)
      try:
        for wait_s in _RETRIES_S:
          with contextlib.suppress(ConnectionError):
            connection.connect()
            break
          time.sleep(wait_s)
        connection.request("POST", f"{url.path}/{name}", json.dumps(body))
        response = stack.enter_context(connection.getresponse())
        if response.status != 200:
          raise ValueError(f"status {response.status}")
        answer = json.loads(response.readline())
        if "error" not in answer:
          result = read(answer)
          return stack.pop_all(), result
        if "output" in answer:
          raise CommandError(answer["error"], _decode(answer))
        raise ContainerError(answer["error"])
      except _WRONG as error:
        hint = f"; in an episode {_SERVER}" * sandbox.is_confined()
        raise ContainerError(f"POST …/{name}: {error!r}{hint}") from error


_KINDS = {
    "bubblewrap": _Bubblewrap,
    "podman": _Cli,
    "docker": _Cli,
    "http://": _Remote,
    "https://": _Remote,
}


def _find(program: str, package: str) -> str:
  path = shutil.which(program)
  if path is None:
    raise ContainerError(
        f"{program}: must be installed (apt-get install {package}), or"
        f" {_SERVER}"
    )
  return path


def names_of(pid: int | str) -> str:
  """Returns the start of names of a process's containers."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
  return f"tba_jax-{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


def _decode(answer: dict[str, Any]) -> bytes:
  return base64.b64decode(answer["output"], validate=True)


def _check_deadline(deadline_s: float) -> None:
  is_number = isinstance(deadline_s, (int, float))
  if not is_number or not math.isfinite(deadline_s):
    raise ValueError(f"deadline_s = {deadline_s!r}: must be a finite number")


def _named(command: Command) -> str:
  return shlex.join(command.words)[:80]


def _last_line(output: bytes) -> str:
  lines = output.decode(errors="replace").strip().splitlines()
  return lines[-1][:300] if lines else "no message"

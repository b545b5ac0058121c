# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `train` program: starts and supervises the processes of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import ml_collections
import rich.console

from tba_jax.config import differences
from tba_jax.config import stages
from tba_jax.programs import model_sizes
from tba_jax.report import page as report
from tba_jax.report import panel
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.run import run_files
from tba_jax.system import accelerators
from tba_jax.system import bucket
from tba_jax.system import heartbeat
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport.params import shared_files

_DEATHS = 3
_ERRORS = 3
_END_TICK_S = 0.02
# Minimum seconds without progress before a process is killed, and seconds of
# silence after which others may be waiting for a process.
_LEAST_STALL_S = 10
_SILENT_S = 5
_SEARCHER_END_S = 3.0
_STORE_END_S = 2.0
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COUNT_DEVICES = (
    "import jax; print(jax.local_device_count(), jax.default_backend())"
)
_STATUS = {"phase?": str, "step?": int}
_LOCATOR = {"generation": int, "pid": int}


@dataclasses.dataclass(frozen=True)
class Limits:
  """Periods and limits of supervision.

  tick_s: seconds between checks of the processes.
  check_every_s: seconds between checks of progress, logs and totals.
  together_s: seconds for a group to notice that one of its processes died.
  deaths_within_s: period in seconds in which three deaths of a process end the
    run.
  max_log_bytes: size at which a log is rotated.
  """

  tick_s: float = 0.1
  check_every_s: float = 1.0
  together_s: float = 3.0
  deaths_within_s: float = 60.0
  max_log_bytes: int = 8_000_000


@dataclasses.dataclass
class Child:
  """A process of a role, across its restarts.

  role, index: role and index of the process.
  cores: CPU cores to pin the process to; empty = all cores of its parent.
  process: current process; None before the first start.
  deaths: times of recent unplanned exits, monotonic seconds.
  finished: whether it exited as planned, so that it is not restarted.
  listener: signs of progress of the current process.
  errors: number of consecutive exits with an error without progress of the run.
  furthest: step of the run at the last of these exits.
  group: processes restarted together, including this one; may be empty.
  operands: additional arguments of its program, after the index.
  program: name of its program; "" = the role's.
  environment: additional variables, such as those that name its accelerators.
  """

  role: str
  index: int
  cores: Sequence[int]
  process: subprocess.Popen | None = None
  deaths: list[float] = dataclasses.field(default_factory=list)
  restarts: int = 0
  finished: bool = False
  listener: heartbeat.Listener | None = None
  errors: int = 0
  furthest: int = -1
  group: Sequence["Child"] = dataclasses.field(default=(), repr=False)
  operands: Sequence[str] = ()
  program: str = ""
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return f"{self.role}-{self.index}"


class Children:
  """Starts and stops the processes of a run, and keeps their logs."""

  def __init__(self, workdir: pathlib.Path, limits: Limits = Limits()):
    self._workdir = workdir
    self._limits = limits
    self._logs = workdir / "logs"
    self._logs.mkdir(exist_ok=True)
    self._all: list[Child] = []

  @property
  def all(self) -> list[Child]:
    return self._all

  def log_path(self, child: Child) -> pathlib.Path:
    return self._logs / f"{child.name}.log"

  def add(
      self,
      role: str,
      index: int,
      cores: Sequence[int] = (),
      environment: Mapping[str, str] | None = None,
      program: str = "",
  ) -> Child:
    """Starts a process of a role."""
    child = Child(
        role, index, cores, program=program, environment=environment or {}
    )
    self._all.append(child)
    self.start_again(child)
    return child

  def add_group(
      self,
      role: str,
      cores: Sequence[int],
      environments: Sequence[Mapping[str, str]],
  ) -> list[Child]:
    """Starts one process per environment, which are restarted together."""
    group = [
        Child(role, index, cores, environment=environment)
        for index, environment in enumerate(environments)
    ]
    for child in group:
      child.group = group if len(group) > 1 else ()
    self._all += group
    self.start_again(group[0])
    return group

  def start_again(self, child: Child) -> None:
    """Starts a child and its whole group, with a new rendezvous address."""
    if child.role == "trainer":
      # The status of an earlier trainer does not describe this one.
      with contextlib.suppress(OSError):
        (self._workdir / "status.json").unlink()
    address = f"127.0.0.1:{processes.free_port()}" if child.group else ""
    for member in child.group or (child,):
      member.operands = (address,) if address else ()
      member.finished = False
      self.start(member)

  def end_group(self, child: Child) -> Child:
    """Stops the group of a child that has exited; returns the cause.

    The other processes get some seconds to exit by themselves. The cause is the
    child with the most informative exit status, or process 0 if it exited as
    planned.
    """
    killed = []
    deadline = time.monotonic() + self._limits.together_s
    for member in child.group:
      try:
        member.process.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        member.process.kill()
        member.process.wait()
        killed.append(member.index)

    def uninformative(member: Child) -> tuple[bool, ...]:
      code = member.process.returncode
      return (
          member.index in killed,
          member.index > 0 or code != processes.EXIT_OK,
          code not in (processes.EXIT_CONFIG, processes.EXIT_FATAL),
          code in (-signal.SIGABRT, processes.EXIT_OK),
      )

    return min(child.group or (child,), key=uninformative)

  def start(self, child: Child) -> None:
    """Starts a child's process, pinned to its cores before it runs."""
    path = self.log_path(child)
    command = [
        *(sys.executable, "-m", "tba_jax.system.role", child.name),
        "tba_jax.main",
        f"--program={child.program or child.role}",
        f"--workdir={self._workdir}",
        str(child.index),
        *child.operands,
    ]
    # A child inherits the affinity of the thread that starts it.
    cores = processes.available_cores()
    if child.listener is not None:
      child.listener.close()
    child.listener = heartbeat.Listener()
    processes.pin(child.cores)
    try:
      with path.open("ab") as log:
        child.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal should only reach the supervisor.
            start_new_session=True,
            pass_fds=[child.listener.pipe],
            env={
                **processes.ROLE_ENVIRONMENT,
                **os.environ,
                **child.environment,
                **child.listener.environment,
                processes.SUPERVISED: str(os.getpid()),
            },
        )
    finally:
      os.close(child.listener.pipe)
      processes.pin(cores)

  def rotate_logs(self) -> None:
    """Moves the contents of long logs to `<role>.log.1`.

    A log is truncated, not renamed, because its process has the file open.
    """
    for path in map(self.log_path, self._all):
      if path.exists() and path.stat().st_size > self._limits.max_log_bytes:
        shutil.copyfile(path, path.with_suffix(".log.1"))
        os.truncate(path, 0)

  def died_too_often(self, child: Child) -> bool:
    """Counts a death; returns whether it is the third within a minute."""
    now = time.monotonic()
    since = now - self._limits.deaths_within_s
    child.deaths = [t for t in child.deaths if t > since] + [now]
    return len(child.deaths) >= _DEATHS

  def gets_no_further(self, child: Child, step: int) -> bool:
    """Counts an error; returns whether it is the third at the same step."""
    child.errors = child.errors + 1 if step <= child.furthest else 1
    child.furthest = max(child.furthest, step)
    return child.errors >= _ERRORS

  def write_table(self, service_pid: int | None) -> None:
    """Writes `processes.json`: role, index and pid of running processes."""
    rows = [
        {"role": c.role, "index": c.index, "pid": c.process.pid}
        for c in self._all
        if c.process is not None and c.process.poll() is None
    ]
    if service_pid is not None:
      rows.append({"role": "kvservice", "index": 0, "pid": service_pid})
    jsonl.atomic_write_json(self._workdir / "processes.json", rows)

  def tail(self, child: Child, num_lines: int = 20) -> str:
    """Returns the last lines of a child's log."""
    try:
      with self.log_path(child).open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 16384))
        text = log.read().decode(errors="replace")
    except OSError as error:
      return f"(no log: {error})"
    return "\n".join(text.splitlines()[-num_lines:])

  def end(
      self,
      roles: Sequence[str],
      deadline_s: float,
      is_urgent: Callable[[], bool] = lambda: False,
  ) -> None:
    """Stops processes of some roles: SIGTERM, then SIGKILL.

    Args:
      roles: processes to stop, by role.
      deadline_s: seconds until SIGKILL.
      is_urgent: function that returns whether to send SIGKILL immediately.
    """
    chosen = [
        c
        for c in self._all
        if c.role in roles
        and c.process is not None
        and c.process.poll() is None
    ]
    for child in chosen:
      child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + deadline_s
    for child in chosen:
      while True:
        try:
          child.process.wait(_END_TICK_S)
          break
        except subprocess.TimeoutExpired:
          if is_urgent() or time.monotonic() >= deadline:
            # A stopped process (SIGSTOP) does not see SIGTERM.
            child.process.kill()

  def close(self) -> None:
    """Stops listening to processes that have ended."""
    for child in self._all:
      if child.listener is not None:
        child.listener.close()
        child.listener = None


class RunFailed(RuntimeError):
  """The run cannot continue; `status` is the program's exit status."""

  def __init__(self, message: str, status: int = 1):
    super().__init__(message)
    self.status = status


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs or resumes a whole training run on this machine.

  Returns:
    0: the run succeeded; 1: it failed; 2: the config or directory is invalid;
    128 + number: a signal ended it.
  """
  if operands:
    return processes.refuse(f"--program=train takes no operand {operands}")
  try:
    return supervise(config, workdir)[0]
  except run_directory.NoRunError as error:
    return processes.refuse(error)


def supervise(
    config: ml_collections.ConfigDict,
    workdir: str,
    stop: threading.Event | None = None,
) -> tuple[int, str]:
  """Runs or resumes a whole training run, like `run`.

  Args:
    workdir: local folder of the run.
    stop: event that saves and ends the run like a signal; such a run prints no
      progress and handles no signals. None handles signals in the main thread.

  Returns:
    The exit status as in `run`, and why the run failed, else "".

  Raises:
    NoRunError: the run cannot begin.
  """
  console = rich.console.Console(quiet=stop is not None)
  if console.is_jupyter:
    # Print plain lines, since a notebook would keep every frame of the panel.
    console = rich.console.Console(
        force_jupyter=False, force_terminal=False, quiet=console.quiet
    )
  changed = (*END_SIGNALS, signal.SIGUSR1) if stop is None else ()
  handlers = {number: signal.getsignal(number) for number in changed}
  with contextlib.ExitStack() as closing:
    try:
      check_devices(config)
      closing.enter_context(bucket.hold(run_directory.lock(workdir), workdir))
      config = model_sizes.with_compute_dtype(config, workdir)
      changes = {}
      if run_directory.run_id(workdir):
        saved = run_directory.load_config(workdir)
        changes = differences.check_resume(saved, config)
      _check_stages(config, pathlib.Path(workdir))
      run_info, _ = run_directory.create(workdir, config)
      run_directory.warn_unguarded(run_info, config)
      supervisor = Supervisor(
          config, run_info, console, changes=changes, stop=stop
      )
    except (ValueError, OSError) as error:
      raise run_directory.NoRunError(str(error)) from error
    closing.callback(supervisor.close)
    try:
      return supervisor.run(), supervisor.failure
    finally:
      # Restore the handlers of a Python caller, such as a notebook.
      for number, handler in handlers.items():
        signal.signal(number, handler)


def check_devices(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if this machine has fewer devices than a mesh needs."""
  one_process, _ = accelerators.one_process(config)
  accelerators.of_run(config, alone=one_process)
  if accelerators.find().kind != accelerators.CPU:
    return
  platforms = os.environ.get("JAX_PLATFORMS", "")
  requests = []  # section of cpu_devices, key of the mesh, devices of a process
  for section, key, mesh, num_processes in (
      ("trainer", "mesh", config.mesh, config.trainer.num_processes),
      ("search", "search.mesh", config.search.mesh, 1),
  ):
    count = math.prod(mesh.values()) // num_processes
    if count > 1 and not config[section].cpu_devices:
      requests.append((section, f"config.{key} = {mesh.to_dict()}", count))
  if not requests and platforms in ("", accelerators.CPU):
    return
  # A separate process counts devices, since the supervisor does not load JAX.
  process = subprocess.run(
      [sys.executable, "-c", _COUNT_DEVICES],
      env=processes.package_environment(),
      capture_output=True,
      text=True,
  )
  if process.returncode:
    last = process.stderr.strip().splitlines()[-1:] or ["JAX does not start"]
    raise ValueError(f"JAX_PLATFORMS={platforms!r}: {last[0]}")
  num_devices, platform = process.stdout.split()[-2:]
  for section, setting, count in requests:
    if count > int(num_devices):
      remedy = f"; config.{section}.cpu_devices={count} makes virtual ones"
      raise ValueError(
          f"{setting}: needs {count} devices, this machine has {num_devices}"
          f" ({platform}){remedy * (platform == 'cpu')}"
      )


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the object in a file, or None; raises ValueError if damaged."""
  return jsonl.read_object(path, run_files.SCHEMAS[path.name])


def _read_live(path: pathlib.Path, schema: Any) -> dict[str, Any]:
  """Returns the object in a file that a role keeps rewriting, or {}."""
  value = jsonl.read_json(path)
  return {} if jsonl.schema_error(value, schema) else value


def _check_stages(
    config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> None:
  """Raises ValueError for settings that a later stage would reject."""
  for role in stages.before_run(config):
    folder = workdir / role
    if (folder / "settings.json").exists():
      stages.check(config, folder, section=role)
    if (folder / "model" / "config.json").exists():
      stages.check_model(folder)
    elif role == "reward_model":
      stages.check_pairs(config)


class Supervisor:
  """The `train` program for one run.

  failure: cause of the run's failure; "" if it did not fail.
  """

  failure = ""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run_info: run_directory.RunInfo,
      console: rich.console.Console,
      *,
      changes: Mapping[str, tuple[Any, Any]] = types.MappingProxyType({}),
      limits: Limits = Limits(),
      children: Children | None = None,
      stop: threading.Event | None = None,
  ):
    """Takes over the signal handlers of the process, unless `stop` is given.

    Args:
      changes: settings that changed since the run's last start, (old, new) by
        key.
      children: starter of the processes; None starts them on this machine.
      stop: event that ends the run like SIGINT.
    """
    self._config = config
    self._run = run_info
    self._workdir = run_info.workdir
    self._console = console
    self._changes = changes
    # Totals from earlier supervisors of the run.
    self._totals_path = self._workdir / "totals.json"
    self._earlier = _read(self._totals_path) or {
        "wall_s": 0.0,
        "restarts": {},
    }
    self._summary = _read(self._workdir / "summary.json")
    self._events = metrics.EventLog(
        jsonl.LineWriter(self._workdir / "events.jsonl")
    )
    self._limits = limits
    self._children = children or Children(self._workdir, limits)
    self._panel = panel.Panel(self._workdir, console)
    self._stop = stop
    self._received: int | None = None
    self._num_signals = 0
    self._capture_asked = False
    # First and latest generation of the store that this supervisor has seen.
    self._generations: tuple[int, int] | None = None
    self._started = time.monotonic()
    self._next_check = 0.0
    # The furthest step that this supervisor knows of.
    self._step = self._status().get("step") or 0
    self._disk_is_full = False

    if stop is None:
      for number in END_SIGNALS:
        signal.signal(number, self._on_signal)
      signal.signal(signal.SIGUSR1, self._on_capture)

  @property
  def _signal(self) -> int | None:
    """Signal that ends the run; None if there was none."""
    if self._received is None and self._stop and self._stop.is_set():
      self._received = signal.SIGINT
    return self._received

  def run(self) -> int:
    changes = "\n".join(differences.lines(self._changes))
    if self._is_finished():
      finished = self._summary
      self._console.print(
          f"This run is finished ({finished['steps']} steps); its report is"
          f" {self._workdir / 'report.html'}"
      )
      if changes:
        self._console.print(
            f"not applied, since no step is left (config.train.num_steps):\n"
            f"{changes}",
            soft_wrap=True,
        )
      self._console.print(panel.final_table(finished))
      return processes.EXIT_OK
    # Training continues, so the earlier result is no longer valid.
    for name in ("result.json", "summary.json"):
      (self._workdir / name).unlink(missing_ok=True)
    # All roles read their settings from `config.json`, which is replaced
    # atomically: a kill leaves either the old or the new settings.
    run_directory.update(str(self._workdir), self._config)
    if changes:
      self._console.print(f"changed settings:\n{changes}", soft_wrap=True)
    status = processes.EXIT_OK
    error = None
    try:
      with self._panel:
        self._make_models()
        if self._signal is None:
          self._train()
    except OSError:
      if not self._is_deleted():
        raise
      error, status = self._deleted(), 1
    except RunFailed as failure:
      error, status = failure, failure.status
      if not self._is_deleted() and any(
          child.role == "trainer" and child.process.returncode is None
          for child in self._children.all
      ):
        self._console.print(
            "The run has failed: saving. A signal ends it without saving."
        )
    finally:
      self._end_all()
    return self._conclude(status, error)

  def _is_finished(self) -> bool:
    """Returns whether no steps are left.

    A run ended by a guard or a limit continues with changed settings.
    """
    if not self._summary:
      return False
    name = "num_steps" if not self._changes else "steps"
    return self._summary[name] >= self._config.train.num_steps

  def close(self) -> None:
    """Closes the event log."""
    self._events.close()

  def _on_signal(self, number: int, frame: Any) -> None:
    del frame
    self._received = self._received or number
    self._num_signals += 1

  def _on_capture(self, number: int, frame: Any) -> None:
    del number, frame
    self._capture_asked = True

  def _make_models(self) -> None:
    """Trains the missing models that the config needs."""
    for role in stages.before_run(self._config):
      if self._signal is None:
        self._make_model(role)

  def _make_model(self, role: str) -> None:
    """Runs the program that trains a model, unless the model exists."""
    folder = self._workdir / role
    try:
      stages.check(self._config, folder, section=role)
    except ValueError as error:
      raise RunFailed(str(error), processes.EXIT_CONFIG) from error
    if (folder / "model" / "config.json").exists():
      return
    self._panel.phase(role)
    environment = accelerators.of_run(self._config, alone=True)["trainer"][0]
    child = self._children.add(role, 0, (), environment)
    with self._leave_out_unwritable():
      self._children.write_table(None)
    while not child.finished and self._signal is None:
      self._check_directory()
      if self._check(child):
        with self._leave_out_unwritable():
          self._children.write_table(None)
      self._look_if_due()
      self._panel.update()
      time.sleep(self._limits.tick_s)
    self._end_savers([role])
    child.finished = True

  def _train(self) -> None:
    self._panel.phase("warm-up")
    search = self._config.search
    cores = processes.assign_cores(search.num_searchers)
    one_process, why = accelerators.one_process(self._config)
    devices = accelerators.of_run(self._config, alone=one_process)
    if one_process:
      self._events.write("one_process", why)
      shares = cores["trainer"], *cores["searchers"]
      trainer = self._children.add(
          "trainer",
          0,
          sorted(set().union(*shares)) if all(shares) else (),
          devices["trainer"][0],
          program="one_process",
      )
    else:
      self._children.add("store", 0)
      trainer = self._children.add_group(
          "trainer", cores["trainer"], devices["trainer"]
      )[0]
      for i in range(search.num_searchers):
        self._children.add(
            "searcher", i, cores["searchers"][i], devices["searcher"][i]
        )
    service_pid = None
    with self._leave_out_unwritable():
      self._children.write_table(None)
    while not trainer.finished and self._signal is None:
      self._check_directory()
      changed = [c for c in self._children.all if self._check(c)]
      # Without a store, the file of an earlier one may still exist.
      locator = {}
      if not one_process:
        locator = _read_live(self._run.locator, _LOCATOR)
      self._note_generation(locator)
      if changed or locator.get("pid") != service_pid:
        service_pid = locator.get("pid")
        with self._leave_out_unwritable():
          self._children.write_table(service_pid)
      self._pass_capture_on(trainer)
      self._look_if_due()
      self._panel.update(restarts=self._totals()["restarts"])
      time.sleep(self._limits.tick_s)

  def _is_deleted(self) -> bool:
    return not (self._workdir / "config.json").exists()

  def _deleted(self) -> RunFailed:
    return RunFailed(
        f"--workdir={self._workdir}: the directory was deleted while the run"
        " was there; nothing of it can be saved"
    )

  def _check_directory(self) -> None:
    if self._is_deleted():
      raise self._deleted()

  def _look_if_due(self) -> None:
    """Checks progress, rotates logs and writes totals, once a second."""
    now = time.monotonic()
    if now < self._next_check:
      return
    self._next_check = now + self._limits.check_every_s
    for child in self._children.all:
      if not child.finished:
        self._kill_if_stalled(child)
    with self._leave_out_unwritable():
      self._children.rotate_logs()
      jsonl.atomic_write_json(self._totals_path, self._totals())

  @contextlib.contextmanager
  def _leave_out_unwritable(self) -> Iterator[None]:
    """Reports the first failure to write; the run continues regardless."""
    try:
      yield
      self._disk_is_full = False
    except OSError as error:
      if not self._disk_is_full:
        self._events.write(
            "not_written", f"logs, totals and processes.json: {error}"
        )
      self._disk_is_full = True

  def _kill_if_stalled(self, child: Child) -> None:
    """Kills a child without progress; `_check` restarts it."""
    reports = child.listener.look()
    if child.listener.silent > self._stall_s(child.role):
      self._kill(child, f"no sign of life for {child.listener.silent} s")
    if any(other.listener.silent > _SILENT_S for other in child.group):
      return  # This child is waiting for the other one.
    for age_s, name, doing in reports:
      if age_s > self._stall_s(name.rpartition("-")[0]):
        thread = f"{name}: " * (name != child.name)
        self._kill(child, f"{thread}no progress for {age_s} s ({doing})")
        break

  def _stall_s(self, role: str) -> float:
    """Returns how long a role may go without progress, in seconds.

    If other roles wait for it with a deadline, the limit is half of that.
    """
    if role == "store":
      limit_s = self._config.store.deadline_s / 2
    elif role == "searcher":
      limit_s = self._config.search.starvation_s / 2
    else:
      limit_s = 2 * self._config.search.starvation_s
    return max(limit_s, _LEAST_STALL_S)

  def _kill(self, child: Child, why: str) -> None:
    if child.process.poll() is not None:
      return
    self._events.write(
        "stalled", f"{child.name}: {why}", role=child.role, index=child.index
    )
    child.process.kill()

  def _pass_capture_on(self, trainer: Child) -> None:
    """Requests a profile once the trainer can handle the signal."""
    if self._capture_asked and self._status().get("phase") == "train":
      self._capture_asked = False
      trainer.process.send_signal(signal.SIGUSR1)

  def _status(self) -> dict[str, Any]:
    """Returns the current trainer's `status.json`; {} without one."""
    return _read_live(self._workdir / "status.json", _STATUS)

  def _check(self, child: Child) -> bool:
    """Restarts a child if it has exited; returns whether it was restarted."""
    if child.finished or child.process.poll() is None:
      return False
    if child.process.returncode != processes.EXIT_OK:
      child = self._children.end_group(child)
    code = child.process.returncode
    is_dismissed = (
        child.role == "searcher" and code == processes.EXIT_INTERRUPTED
    )
    if is_dismissed or (child.role != "store" and code == processes.EXIT_OK):
      child.finished = child.role != "searcher" or self._is_finishing()
      if not child.finished:
        # An interrupted trainer dismissed it.
        self._children.start(child)
      return not child.finished
    if code in (processes.EXIT_CONFIG, processes.EXIT_FATAL):
      wrong = code == processes.EXIT_CONFIG
      raise RunFailed(
          self._last_words(child), processes.EXIT_CONFIG if wrong else 1
      )
    cause = signal.Signals(-code).name if code < 0 else f"status {code}"
    too_often = self._children.died_too_often(child)
    # The last line that a role prints if it ends by itself.
    last = self._children.tail(child, 1) if code == 1 else ""
    why = last.removeprefix("error: ")
    self._events.write(
        "died",
        f"{child.name}: {cause}" + (f", {why}" if why != last else ""),
        role=child.role,
        index=child.index,
    )
    if too_often:
      raise RunFailed(
          f"{child.name} died three times within a minute.\n"
          + self._last_words(child)
      )
    self._step = max(self._step, self._status().get("step") or 0)
    if code == 1 and self._children.gets_no_further(child, self._step):
      raise RunFailed(
          f"{child.name} failed three times and came no further than step"
          f" {self._step}.\n{self._last_words(child)}"
      )
    child.restarts += 1
    self._children.start_again(child)
    self._events.write(
        "restart",
        f"{child.name} (after {cause})",
        role=child.role,
        index=child.index,
    )
    return True

  def _is_finishing(self) -> bool:
    """Returns whether the trainer has finished training."""
    trainer = next(c for c in self._children.all if c.role == "trainer")
    phase = self._status().get("phase")
    return trainer.finished or phase in ("finish", "done")

  def _note_generation(self, locator: dict[str, Any]) -> None:
    generation = locator.get("generation")
    if generation is not None:
      first = self._generations[0] if self._generations else generation
      self._generations = first, generation

  def _totals(self) -> dict[str, Any]:
    """Returns wall time and restarts by role over all supervisors of the run.

    Each new generation of the store counts as a restart.
    """
    restarts = {"trainer": 0, "searcher": 0, "store": 0}
    restarts |= self._earlier["restarts"]
    for child in self._children.all:
      if child.role != "store":
        restarts[child.role] = restarts.get(child.role, 0) + child.restarts
    if self._generations:
      restarts["store"] += self._generations[1] - self._generations[0]
    wall_s = self._earlier["wall_s"] + time.monotonic() - self._started
    return {"wall_s": wall_s, "restarts": restarts}

  def _end_all(self) -> None:
    """Stops all processes: the trainer saves first, the store stops last."""
    if self._signal is not None:
      name = signal.Signals(self._signal).name
      self._events.write("signal", f"{name}: saving and ending")
      self._console.print(
          f"{name}: saving; the same command continues. A second signal ends"
          " the run without saving."
      )
    self._end_savers(["trainer", "sft", "reward_model"])
    self._children.end(["searcher"], _SEARCHER_END_S)
    self._children.end(["store"], _STORE_END_S)
    # Files in tmpfs would outlive the run; the next trainer republishes them.
    shared_files.remove_directory(
        shared_files.files_directory(
            self._config.publish.directory, self._workdir, self._run.run_id
        )
    )
    with contextlib.suppress(OSError):
      (self._workdir / "processes.json").unlink()
    self._children.close()

  def _end_savers(self, roles: Sequence[str]) -> None:
    """Stops roles that save first, which may take as long as their steps."""
    before = self._num_signals
    self._children.end(
        roles,
        2 * self._config.search.starvation_s,
        lambda: self._num_signals > before or self._is_deleted(),
    )

  def _fail(self, why: RunFailed | str, status: int) -> int:
    self.failure = str(why)
    print(f"error: {why}", file=sys.stderr)
    return status

  def _conclude(self, status: int, error: RunFailed | None) -> int:
    if error is not None and self._is_deleted():
      return self._fail(error, status)
    totals = self._totals()
    result = None
    try:
      result = _read(self._workdir / "result.json")
    except ValueError as damaged:
      error, status = error or RunFailed(str(damaged)), status or 1
    with contextlib.suppress(OSError):
      jsonl.atomic_write_json(self._totals_path, totals)
    if error is None and result is not None:
      summary = {**result, **totals}
      try:
        jsonl.atomic_write_json(self._workdir / "summary.json", summary)
      except OSError as cause:
        print(f"warning: summary.json is not written: {cause}", file=sys.stderr)
    path, verdict, advice = None, "", ()
    try:
      path, conclusion, advice = report.conclude(self._workdir)
      verdict = conclusion.sentence
    except Exception as cause:  # A run must not fail because of its report.
      print(f"warning: no report could be written: {cause!r}", file=sys.stderr)
    if error is not None:
      return self._fail(error, status)
    if self._signal is not None:
      return 128 + self._signal
    if result is None:
      return self._fail(
          "the trainer ended without a result; see logs/trainer-0.log", 1
      )
    self._console.print(panel.final_table(summary, verdict))
    self._console.print(panel.advice_list(advice))
    self._console.print(f"report: {path}", soft_wrap=True)
    if not result["ledger_closed"]:
      return self._fail(
          f"the ledger does not close; see {self._workdir}/ledger.json", 1
      )
    return processes.EXIT_OK

  def _last_words(self, child: Child) -> str:
    return (
        f"{child.name} ended with status {child.process.returncode}. The end"
        f" of {self._children.log_path(child)}:\n{self._children.tail(child)}"
    )

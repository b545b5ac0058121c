# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `train` program: starts a run's processes, watches them, ends them.

No JAX here: the supervisor must outlive whatever happens to the others.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import ml_collections
import rich.console

from tba_jax.config import stages
from tba_jax.config import validate
from tba_jax.monitor import metrics
from tba_jax.monitor import panel
from tba_jax.monitor import run_directory
from tba_jax.monitor.report import build as report
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import carrier_files

# Child processes of a run: started on their cores, watched, ended. No JAX.


_MAX_LOG_BYTES = 8_000_000
# In which the processes of a group notice that one of them is gone.
_TOGETHER_S = 3.0
_DEATHS = 3
_WITHIN_S = 60.0
_ERRORS = 3


@dataclasses.dataclass
class Child:
  """One place for a process of a role; a restart fills it again.

  role, index: of the process.
  cores: that it runs on; empty = all of its parent's.
  process: the present one, None before the first start.
  deaths: times of unplanned ends, seconds of the monotonic clock.
  restarts: how often it was started again.
  finished: it ended as planned and is not started again.
  started: time of the last start, seconds of the epoch.
  errors: how often in a row it ended by an error and got no further.
  furthest: the run's step at the latest of them.
  group: those that live and die together, with itself; empty = it is alone.
  operands: of its program, after the index.
  """

  role: str
  index: int
  cores: Sequence[int]
  process: subprocess.Popen | None = None
  deaths: list[float] = dataclasses.field(default_factory=list)
  restarts: int = 0
  finished: bool = False
  started: float = 0.0
  errors: int = 0
  furthest: int = -1
  group: Sequence["Child"] = dataclasses.field(default=(), repr=False)
  operands: Sequence[str] = ()

  @property
  def name(self) -> str:
    return f"{self.role}-{self.index}"


class Children:
  """Starts, watches and ends the processes of one run."""

  def __init__(self, workdir: pathlib.Path):
    """Makes the log directory.

    Args:
      workdir: of the run.
    """
    self._workdir = workdir
    self._logs = workdir / "logs"
    self._logs.mkdir(exist_ok=True)
    self._all: list[Child] = []

  @property
  def all(self) -> list[Child]:
    return self._all

  def log_path(self, child: Child) -> pathlib.Path:
    return self._logs / f"{child.name}.log"

  def add(self, role: str, index: int, cores: Sequence[int]) -> Child:
    """Starts a process of a role and watches it from now on."""
    child = Child(role, index, cores)
    self._all.append(child)
    self.start(child)
    return child

  def add_group(
      self, role: str, size: int, cores: Sequence[int]
  ) -> list[Child]:
    """Starts processes that live and die together; watches them from now on."""
    group = [Child(role, index, cores) for index in range(size)]
    for child in group:
      child.group = group if size > 1 else ()
    self._all += group
    self.start_again(group[0])
    return group

  def start_again(self, child: Child) -> None:
    """Starts a child, and with it all of its group, at a new address."""
    address = f"127.0.0.1:{processes.free_port()}" if child.group else ""
    for one in child.group or (child,):
      one.operands = (address,) if address else ()
      one.finished = False
      self.start(one)

  def end_group(self, child: Child) -> Child:
    """Ends the group of a child that has ended; returns who tells why.

    The others notice by themselves, and end by an error of their own, or by
    SIGABRT of the library; they have some seconds for it. Without a group, and
    where its first process has ended as planned, that is it.
    """
    killed = []
    deadline = time.monotonic() + _TOGETHER_S
    for one in child.group:
      try:
        one.process.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        one.process.kill()
        one.process.wait()
        killed.append(one.index)

    def tells_least(one: Child) -> tuple[bool, ...]:
      code = one.process.returncode
      return (
          one.index in killed,
          one.index > 0 or code != processes.EXIT_OK,
          code not in (processes.EXIT_CONFIG, processes.EXIT_FATAL),
          code in (-signal.SIGABRT, processes.EXIT_OK),
      )

    return min(child.group or (child,), key=tells_least)

  def start(self, child: Child) -> None:
    """Starts the process of a child, bound to its cores before it runs."""
    path = self.log_path(child)
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
      path.replace(path.with_suffix(".log.1"))
    command = [
        sys.executable,
        "-m",
        "tba_jax.main",
        f"--program={child.role}",
        f"--workdir={self._workdir}",
        str(child.index),
        *child.operands,
    ]
    # A child inherits the affinity of the thread that starts it.
    own = processes.available_cores()
    child.started = time.time()
    processes.pin(child.cores)
    try:
      with path.open("ab") as log:
        child.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for the supervisor alone.
            start_new_session=True,
            env={
                **processes.ROLE_ENVIRONMENT,
                **os.environ,
                processes.SUPERVISED: str(os.getpid()),
            },
        )
    finally:
      processes.pin(own)

  def died_too_often(self, child: Child) -> bool:
    """Notes a death; True where it is the third within a minute."""
    now = time.monotonic()
    child.deaths = [t for t in child.deaths if now - t < _WITHIN_S] + [now]
    return len(child.deaths) >= _DEATHS

  def gets_no_further(self, child: Child, step: int) -> bool:
    """Notes an end by an error; True for the third without a further step."""
    child.errors = child.errors + 1 if step <= child.furthest else 1
    child.furthest = max(child.furthest, step)
    return child.errors >= _ERRORS

  def write_table(self, service_pid: int | None) -> None:
    """Writes `processes.json`: role, index and pid of what runs now."""
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

  def end(self, roles: Sequence[str], deadline_s: float) -> None:
    """Sends SIGTERM to the processes of some roles, SIGKILL at the deadline.

    Blocks until they have ended.
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
      try:
        child.process.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        # A stopped process (SIGSTOP) does not see SIGTERM.
        child.process.kill()
        child.process.wait()


_TICK_S = 0.1
# Together under the 20 s that a user waits for after Ctrl-C.
_TRAINER_END_S = 13.0
_SEARCHER_END_S = 3.0
_STORE_END_S = 2.0
# They end a run, saved.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunFailed(RuntimeError):
  """The run cannot go on; the message has the cause and a log's last lines.

  status: that the program ends with.
  """

  def __init__(self, message: str, status: int = 1):
    super().__init__(message)
    self.status = status


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs a whole training run on this machine; see the module.

  The same command again continues an interrupted run, and says so of a
  finished one.

  Returns:
    0 where the run did what was asked; 2 for a wrong config or directory; 1
    where the run failed; 128 + the signal's number where one ended it.
  """
  console = rich.console.Console()
  if console.is_jupyter:
    # Plain lines, not a block of HTML for each; its stdout calls itself a
    # terminal, and would keep every picture of the panel.
    console = rich.console.Console(force_jupyter=False, force_terminal=False)
  if operands:
    print(f"error: --program=train takes no operand {operands}",
          file=sys.stderr)  # fmt: skip
    return processes.EXIT_CONFIG
  try:
    held = bucket.hold(run_directory.lock(workdir), workdir)
    run_info, saved = run_directory.create(workdir, config)
    if saved is not None:
      validate.check_resume(saved, config)
      run_directory.update(workdir, config)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  changed = (*_SIGNALS, signal.SIGUSR1)
  handlers = {number: signal.getsignal(number) for number in changed}
  try:
    return _Supervisor(config, run_info, console).run()
  finally:
    # Who called this from Python, in a notebook say, has its Ctrl-C again.
    for number, handler in handlers.items():
      signal.signal(number, handler)
    held.close()


class _Supervisor:
  """One run of the `train` program."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run_info: run_directory.Run,
      console: rich.console.Console,
  ):
    self._config = config
    self._run = run_info
    self._workdir = run_info.workdir
    self._console = console
    self._events = metrics.EventLog(self._workdir / "events.jsonl")
    self._children = Children(self._workdir)
    self._panel = panel.Panel(self._workdir, console)
    self._signal: int | None = None
    self._capture_asked = False
    # First and newest generation of the store that this supervisor saw.
    self._generations: tuple[int, int] | None = None
    self._started = time.time()
    for number in _SIGNALS:
      signal.signal(number, self._on_signal)
    signal.signal(signal.SIGUSR1, self._on_capture)

  def run(self) -> int:
    finished = jsonl.read_json(self._workdir / "summary.json")
    if finished and finished["num_steps"] >= self._config.train.num_steps:
      self._console.print(
          f"This run is finished ({finished['steps']} steps); its report is"
          f" {self._workdir / 'report.html'}"
      )
      self._console.print(panel.final_table(finished))
      return processes.EXIT_OK
    # What an earlier end of the run said no longer holds.
    (self._workdir / "result.json").unlink(missing_ok=True)
    status = processes.EXIT_OK
    error = None
    try:
      with self._panel:
        self._make_models()
        if self._signal is None:
          self._train()
    except RunFailed as failure:
      error, status = failure, failure.status
    finally:
      self._end_all()
    return self._conclude(status, error)

  def _on_signal(self, number: int, frame: Any) -> None:
    del frame
    self._signal = self._signal or number

  def _on_capture(self, number: int, frame: Any) -> None:
    del number, frame
    self._capture_asked = True

  def _make_models(self) -> None:
    """Makes the models that the config wants made and that are not there."""
    reward = self._config.reward
    made_here = reward.where == "model" and reward.model == "reward_model"
    for role, wanted in (
        ("sft", self._config.init == "sft"),
        ("reward_model", made_here),
    ):
      if wanted and self._signal is None:
        self._make_model(role)

  def _make_model(self, role: str) -> None:
    """Runs the program of a model; done at once where its model is there."""
    folder = self._workdir / role
    try:
      stages.check(self._config, folder, section=role)
    except ValueError as error:
      raise RunFailed(str(error), processes.EXIT_CONFIG) from error
    if (folder / "model" / "config.json").exists():
      return
    self._panel.phase(role)
    child = self._children.add(role, 0, ())
    self._children.write_table(None)
    while not child.finished and self._signal is None:
      if self._check(child):
        self._children.write_table(None)
      self._panel.update()
      time.sleep(_TICK_S)
    self._children.end([role], _TRAINER_END_S)
    child.finished = True

  def _train(self) -> None:
    self._panel.phase("warm-up")
    search = self._config.search
    cores = processes.assign_cores(
        self._config.cores, search.num_searchers, max(1, search.cpu_devices)
    )
    self._children.add("store", 0, cores["store"])
    trainer = self._children.add_group(
        "trainer", self._config.trainer.num_processes, cores["trainer"]
    )[0]
    for i in range(search.num_searchers):
      self._children.add("searcher", i, cores["searchers"][i])
    service_pid = None
    self._children.write_table(None)
    while not trainer.finished and self._signal is None:
      changed = [c for c in self._children.all if self._check(c)]
      locator = jsonl.read_json(self._run.locator) or {}
      self._note_generation(locator)
      if changed or locator.get("pid") != service_pid:
        service_pid = locator.get("pid")
        self._children.write_table(service_pid)
      self._pass_capture_on(trainer)
      self._panel.update(restarts=self._restarts())
      time.sleep(_TICK_S)

  def _pass_capture_on(self, trainer: Child) -> None:
    """Has the trainer capture its next steps, once it makes some.

    Before that it may not listen yet, and the signal would end it.
    """
    if self._capture_asked and self._phase_of(trainer) == "train":
      self._capture_asked = False
      trainer.process.send_signal(signal.SIGUSR1)

  def _phase_of(self, trainer: Child) -> str:
    """Returns the phase that the present trainer told, "" where none yet."""
    seen = jsonl.read_json(self._workdir / "status.json") or {}
    present = (seen.get("started") or 0.0) >= trainer.started
    return str(seen.get("phase", "")) if present else ""

  def _check(self, child: Child) -> bool:
    """Looks after one child; True where it was started again."""
    if child.finished or child.process.poll() is None:
      return False
    if child.process.returncode != processes.EXIT_OK:
      child = self._children.end_group(child)
    code = child.process.returncode
    gone = child.role == "searcher" and code == processes.EXIT_INTERRUPTED
    if gone or (child.role != "store" and code == processes.EXIT_OK):
      child.finished = child.role != "searcher" or self._is_finishing()
      if not child.finished:
        # A trainer that was ended before its time had sent it away.
        self._children.start(child)
      return not child.finished
    if code in (processes.EXIT_CONFIG, processes.EXIT_FATAL):
      wrong = code == processes.EXIT_CONFIG
      raise RunFailed(
          self._last_words(child), processes.EXIT_CONFIG if wrong else 1
      )
    cause = signal.Signals(-code).name if code < 0 else f"status {code}"
    too_often = self._children.died_too_often(child)
    self._events.write(
        "died", f"{child.name}: {cause}", role=child.role, index=child.index
    )
    if too_often:
      raise RunFailed(
          f"{child.name} died three times within a minute.\n"
          + self._last_words(child)
      )
    seen = jsonl.read_json(self._workdir / "status.json") or {}
    step = seen.get("step") or 0
    if code == 1 and self._children.gets_no_further(child, step):
      raise RunFailed(
          f"{child.name} failed three times and came no further than step"
          f" {step}.\n{self._last_words(child)}"
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
    """True where the present trainer has all steps and lets searchers go."""
    trainer = next(c for c in self._children.all if c.role == "trainer")
    return trainer.finished or self._phase_of(trainer) in ("finish", "done")

  def _note_generation(self, locator: dict[str, Any]) -> None:
    generation = locator.get("generation")
    if generation is not None:
      first = self._generations[0] if self._generations else generation
      self._generations = first, generation

  def _restarts(self) -> dict[str, int]:
    """Restarts by role; each further generation of the store counts as one."""
    out = {"trainer": 0, "searcher": 0, "store": 0}
    for child in self._children.all:
      if child.role != "store":
        out[child.role] = out.get(child.role, 0) + child.restarts
    if self._generations:
      out["store"] = self._generations[1] - self._generations[0]
    return out

  def _end_all(self) -> None:
    """Ends what still runs: the trainer saves first, the store goes last."""
    if self._signal is not None:
      name = signal.Signals(self._signal).name
      self._events.write("signal", f"{name}: saving and ending")
      self._console.print(f"{name}: saving; the same command continues.")
    self._children.end(["trainer", "sft", "reward_model"], _TRAINER_END_S)
    self._children.end(["searcher"], _SEARCHER_END_S)
    self._children.end(["store"], _STORE_END_S)
    # In memory they would outlast the run; the next trainer publishes again.
    carrier_files.remove_directory(
        carrier_files.files_directory(
            self._config.publish.directory, self._workdir, self._run.run_id
        )
    )
    (self._workdir / "processes.json").unlink(missing_ok=True)

  def _conclude(self, status: int, error: RunFailed | None) -> int:
    result = jsonl.read_json(self._workdir / "result.json")
    if error is None and result is not None:
      earlier = jsonl.read_json(self._workdir / "summary.json") or {}
      wall_s = time.time() - self._started + earlier.get("wall_s", 0.0)
      summary = {**result, "wall_s": wall_s, "restarts": self._restarts()}
      jsonl.atomic_write_json(self._workdir / "summary.json", summary)
    path, advice = self._try(lambda: report.conclude(self._workdir)) or (
        None,
        (),
    )
    if error is not None:
      print(f"error: {error}", file=sys.stderr)
      return status
    if self._signal is not None:
      return 128 + self._signal
    if result is None:
      print("error: the trainer ended without a result; see logs/trainer-0.log",
            file=sys.stderr)  # fmt: skip
      return 1
    self._console.print(panel.final_table(summary))
    self._console.print(panel.advice_list(advice))
    self._console.print(f"report: {path}", soft_wrap=True)
    if not result["ledger_closed"]:
      print(
          f"error: the ledger does not close; see {self._workdir}/ledger.json",
          file=sys.stderr,
      )
      return 1
    return processes.EXIT_OK

  def _try(self, write: Callable[[], Any]) -> Any:
    # A run that learned for an hour must not fail for its report.
    try:
      return write()
    except Exception as error:
      print(f"warning: no report could be written: {error!r}", file=sys.stderr)
      return None

  def _last_words(self, child: Child) -> str:
    return (
        f"{child.name} ended with status {child.process.returncode}. The end"
        f" of {self._children.log_path(child)}:\n{self._children.tail(child)}"
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs under a seeded schedule of faults, and their audit.

    python -m tests.chaos --config=configs/arithmetic.py chaos \\
        SEED KILLS [LAYOUT …]

KILLS processes die by SIGKILL, alone and in pairs, the supervisor included,
which is then started again by the same command. Between the kills, processes
are stopped for some seconds and for ever, slowed down, and left without disk,
links are cut, the wall clock jumps, and files are torn while nothing runs. A
fault comes when its step is reached; the last third of the steps has none.
Fast machines make many steps while a fault lasts: a run in which not all faults
came says so, and a higher `train.num_steps` makes it longer.
Layouts:

  many        a store, a trainer, four searchers
  trainers    a store, a trainer of two processes, two searchers
  one         one process, whose threads talk through memory

share the kills 6 : 2 : 2. After each run `auditor`, which shares no code with
the package, proves its accounts. Runs without faults of three seeds give the
band of the results; with fewer than 20 kills one run gives the order of prompts
alone. A sound run of 20 kills and more leaves a row in `runs.jsonl.gz`, of
which `faults` makes a table.

Needs Linux, and no privileges: a full disk is a limit on the size of files, cut
links are sockets shut down through `pidfd_getfd`, and the clock is Python's
(`clock/sitecustomize.py`).
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import ctypes
import errno
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

import ml_collections

from benchmarks import results
from tba_jax.config import load
from tba_jax.programs import train
from tba_jax.system import jsonl
from tba_jax.system import processes
from tests.chaos import auditor

# Folder of the results that are kept, and what tells them apart.
FOLDER = pathlib.Path(__file__).parent
KEY = ("format", "layout", "seed")
_CLOCK = pathlib.Path(__file__).parent / "clock"
_LAYOUTS = {
    "many": {"run.processes": "many", "search.num_searchers": 4},
    "trainers": {
        "run.processes": "many",
        "search.num_searchers": 2,
        "mesh.fsdp": 2,
        "trainer.num_processes": 2,
        "trainer.cpu_devices": 1,
        "trainer.heartbeat_s": 20.0,
    },
    "one": {"run.processes": "one"},
}
_SHARES = {"many": 6, "trainers": 2, "one": 2}
_SETTINGS = {
    "checkpoint.keep_journal": True,
    "replay.capacity": 1_000_000,
    "replay.capacity_per_prompt": 1_000_000,
    "search.lease_s": 4.0,
    "search.starvation_s": 90.0,
    "store.deadline_s": 30.0,
    "replay.dedupe": False,
    "evaluate.every_steps": 0,
    "checkpoint.every_steps": 5,
    "guards.action": "off",
}
_BAND_SEEDS, _BAND_KILLS = 3, 20
_STEPS_PER_KILL, _MORE_STEPS = 5, 60
# New steps in which a fault shows: the first have data already.
_AFTER_STEPS = 3
_QUIET_SHARE = 0.3
# Shares of the roles in kills, and of kills that hit a pair of roles.
_WEIGHTS = {"searcher": 4, "kvservice": 2, "trainer": 2, "store": 1,
            "supervisor": 1}  # fmt: skip
_PAIR_SHARE = 0.2
# A role that dies three times within a minute ends the run, so another one is
# hit instead.
_DEATHS, _DEATHS_S = 2, 62.0
# Kills for each fault of another kind.
_KILLS_PER_FAULT = 2
FAULTS = ("stop", "full disk", "cut links", "slow", "clock jump",
           "torn files", "stop for ever")  # fmt: skip
# Those that a run of one process does not have.
_OF_MANY = ("cut links", "stop for ever")
# The trainer, which is given minutes before it counts as hanging, is left out.
_STOPPED_FOR_EVER = ("searcher", "store", "kvservice")
_JUMPS_S = (-86400.0, -3600.0, -10.0, 10.0, 3600.0, 86400.0)
_STOP_S, _SLOW_S, _FULL_S, _CUT_S = (1.0, 4.0), 4.0, 3.0, 4.0
# Size past which no file can be written while the disk is full.
_FULL_BYTES = 1 << 14
_POLL_S, _CUT_POLL_S = 0.05, 0.001
_UP_S, _STALL_S = 90.0, 240.0
# Longest time that a process outlives its supervisor.
_END_S = 5.0
_PIDFD_GETFD = 438


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns what was done to each run, and what its audit found.

  Args:
    config: config of the runs, which all start from one fine-tuned model if it
      asks for one.
    operands: seed of the schedule, number of kills, names of layouts.

  Raises:
    RuntimeError: a run failed, or its audit found a fault; its directory is
      kept.
    ValueError: an operand is wrong.
  """
  seed, kills, *names = (*operands, *("0", "100")[len(operands) :])
  names = names or list(_LAYOUTS)
  if unknown := sorted(set(names) - set(_LAYOUTS)):
    raise ValueError(f"layouts {unknown}: must be one of {', '.join(_LAYOUTS)}")
  rng = random.Random(int(seed))
  shares = sum(_SHARES[name] for name in names)
  counts = {n: max(1, int(kills) * _SHARES[n] // shares) for n in names}
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(_SETTINGS)
  config.train.num_steps = max(
      config.train.num_steps,
      max(counts.values()) * _STEPS_PER_KILL + _MORE_STEPS,
  )
  folder = pathlib.Path(tempfile.mkdtemp(prefix="tba_jax_chaos_"))
  _tell(f"runs are in {folder}")
  runs = {}
  with _clock(folder / "clock") as clock:
    plain = _undisturbed(
        config, folder, _BAND_SEEDS if int(kills) >= _BAND_KILLS else 1
    )
    if config.init == "sft":
      config.init = str(plain[0] / "sft" / "model")
    band = [_result(path)["pass_at_1"] for path in plain]
    for name, count in counts.items():
      began, outcomes = time.monotonic(), _Outcomes()
      disturbed = _Run(folder / name, _with(config, _LAYOUTS[name]))
      try:
        schedule = _schedule(config, name, count, rng)
        done = _disturb(disturbed, schedule, rng, clock, outcomes)
        figures, faults = auditor.audit(folder / name, plain[0])
      finally:
        disturbed.close()
      if len(plain) > 1:
        faults += _outside(folder / name, plain)
      if faults:
        raise RuntimeError(
            f"{folder / name} is kept; its audit found:\n" + "\n".join(faults)
        )
      runs[name] = {
          "done": done,
          "seconds": round(time.monotonic() - began, 1),
          "restarts": jsonl.read_json(folder / name / "summary.json")[
              "restarts"
          ],
          "pass_at_1": _result(folder / name)["pass_at_1"],
          "audit": figures,
          "outcomes": outcomes.rows(),
      }
      _tell(f"{name}: {json.dumps(runs[name])}")
      if done["kill"] >= _BAND_KILLS:
        kept = {"layout": name, "seed": int(seed), **runs[name]}
        kept["pass_at_1_undisturbed"] = band
        results.keep(FOLDER, kept, KEY)
  shutil.rmtree(folder)
  return {
      "seed": int(seed),
      "steps": config.train.num_steps,
      "pass_at_1_undisturbed": band,
      "runs": runs,
  }


def _tell(text: str) -> None:
  # Standard output is for the one line of results.
  print(text, file=sys.stderr, flush=True)


def _with(
    config: ml_collections.ConfigDict, settings: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(settings)
  return config


@contextlib.contextmanager
def _clock(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Has the processes started from here on read their clock's jump there."""
  path.write_bytes(struct.pack("<d", 0.0))
  before = dict(os.environ)
  paths = [str(_CLOCK), os.environ.get("PYTHONPATH", "")]
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  os.environ["TBA_JAX_CLOCK_FILE"] = str(path)
  try:
    yield path
  finally:
    os.environ.clear()
    os.environ.update(before)


def _undisturbed(
    config: ml_collections.ConfigDict, folder: pathlib.Path, count: int
) -> list[pathlib.Path]:
  """Makes runs without faults, with the config's seed and those after it."""
  made = []
  for i in range(count):
    path = folder / f"undisturbed-{i}"
    config = _with(config, {"seed": config.seed + bool(i), **_LAYOUTS["one"]})
    if made and config.init == "sft":
      config.init = str(made[0] / "sft" / "model")
    plain = _Run(path, config)
    try:
      plain.wait()
    finally:
      plain.close()
    made.append(path)
  return made


def _result(workdir: pathlib.Path) -> dict[str, float]:
  return jsonl.read_json(workdir / "summary.json")["after"]


def _outside(workdir: pathlib.Path, plain: Sequence[pathlib.Path]) -> list[str]:
  """Tells of a result beyond those of other seeds by two standard errors."""
  results = [_result(path)["pass_at_1"] for path in plain]
  result = _result(workdir)
  room = 2 * result["pass_at_1_stderr"]
  if min(results) - room <= result["pass_at_1"] <= max(results) + room:
    return []
  return [f"pass@1 is {result['pass_at_1']}, without faults {results}"]


class _Run:
  """A run and its processes."""

  def __init__(self, workdir: pathlib.Path, config: ml_collections.ConfigDict):
    self.workdir = workdir
    self.num_steps = config.train.num_steps
    jsonl.atomic_write_json(f"{workdir}.json", config.to_dict())
    # Times at which a process of a role died, by role and index, of the deaths
    # that its supervisor counts.
    self._deaths: dict[tuple[str, int], list[float]] = {}
    self.start()

  def start(self) -> None:
    """Starts the supervisor: the same command, first and later."""
    self._deaths.clear()
    self._num_events = len(self.events())
    with open(f"{self.workdir}.txt", "ab") as log:
      self._process = subprocess.Popen(
          [
              *(sys.executable, "-m", "tests.chaos.chaos"),
              *(f"{self.workdir}.json", str(self.workdir)),
          ],
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
      )

  def wait(self) -> None:
    """Waits until the run has ended by itself; raises RuntimeError."""
    self.wait_for_step(self.num_steps - 1)
    try:
      status = self._process.wait(_STALL_S)
    except subprocess.TimeoutExpired:
      status = "none yet"
    if status:
      raise RuntimeError(self._words(f"status {status}"))

  def wait_for_step(self, step: int) -> int:
    """Returns the run's step once it is at least `step`, or its last one."""
    step = min(step, self.num_steps - 1)
    deadline, furthest = time.monotonic() + _STALL_S, -1
    while (now := self.step()) < step:
      self._note_deaths()
      if now > furthest:
        furthest, deadline = now, time.monotonic() + _STALL_S
      status = self._process.poll()
      if status is not None and self.step() < step:
        raise RuntimeError(self._words(f"status {status}"))
      if time.monotonic() > deadline:
        raise RuntimeError(self._words(f"no step after {now}"))
      time.sleep(_POLL_S)
    return now

  def has_ended(self) -> bool:
    """Returns whether the run has made its last step."""
    return self.step() >= self.num_steps - 1

  def step(self) -> int:
    """Returns the step in the last whole line of the metrics, -1 for none."""
    try:
      with (self.workdir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
        lines = file.read().split(b"\n")
    except FileNotFoundError:
      return -1
    for line in reversed(lines):
      with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(line)["step"]
    return -1

  def pids(self) -> dict[tuple[str, int], int]:
    """Returns the pids of the processes that live."""
    rows = []
    with contextlib.suppress(ValueError):
      rows = jsonl.read_json(self.workdir / "processes.json") or []
    result = {(row["role"], row["index"]): row["pid"] for row in rows}
    result["supervisor", 0] = self._process.pid
    return {name: pid for name, pid in result.items() if _lives(pid)}

  def may_die(self, name: tuple[str, int]) -> bool:
    """Returns whether another death is not the one that ends the run."""
    self._note_deaths()
    role, _ = name
    if role in ("supervisor", "kvservice"):
      return True
    since = time.monotonic() - _DEATHS_S
    return (
        sum(
            at > since
            for other, times in self._deaths.items()
            for at in times
            # The processes of a trainer die together.
            if other == name or role == other[0] == "trainer"
        )
        < _DEATHS
    )

  def _note_deaths(self) -> None:
    """Notes the deaths that the supervisor has told since the last look."""
    events = self.events()
    for event in events[self._num_events :]:
      if event["kind"] == "died":
        name = event["role"], event["index"]
        self._deaths.setdefault(name, []).append(time.monotonic())
    self._num_events = len(events)

  def events(self) -> list[dict[str, Any]]:
    return list(jsonl.read_jsonl(self.workdir / "events.jsonl"))

  def end_by_kill(self) -> list[str]:
    """Kills the supervisor; returns the processes that outlive it."""
    self._process.kill()
    self._process.wait()
    run_id = (jsonl.read_json(self.workdir / "config.json") or {}).get("run_id")
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
      left = auditor.leftovers(self.workdir, run_id)
      left = [name for name in left if name.startswith("process")]
      if not left:
        break
      time.sleep(_POLL_S)
    return left

  def close(self) -> None:
    """Ends the run, if it has not ended."""
    if self._process.poll() is None:
      self._process.kill()
      self._process.wait()

  def _words(self, why: str) -> str:
    text = pathlib.Path(f"{self.workdir}.txt").read_text(errors="replace")
    return f"{self.workdir} (kept): {why}\n{text[-3000:]}"


def _lives(pid: int) -> bool:
  try:
    status = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return status.rpartition(")")[2].split()[0] != "Z"


def _roles(layout: str) -> list[str]:
  if layout == "one":
    return ["trainer", "supervisor"]
  return list(_WEIGHTS)


def _schedule(
    config: ml_collections.ConfigDict,
    layout: str,
    kills: int,
    rng: random.Random,
) -> list[tuple[int, str, tuple[str, ...]]]:
  """Returns (step, fault, roles), with so many kills."""
  roles = _roles(layout)
  pairs = list(itertools.combinations(roles, 2))
  rng.shuffle(pairs)
  pairs, faults = itertools.cycle(pairs), []
  others = [f for f in FAULTS if layout != "one" or f not in _OF_MANY]
  kinds = itertools.cycle(others)
  num, until_other = 0, _KILLS_PER_FAULT
  while num < kills:
    if until_other <= 0:
      until_other += _KILLS_PER_FAULT
      kind = next(kinds)
      if kind == "torn files":
        victims = ("supervisor",)
      elif kind == "clock jump":
        victims = ()
      elif kind == "slow":
        victims = ("trainer",) if layout == "one" else ("searcher",)
      elif kind == "stop for ever":
        victims = (rng.choice(_STOPPED_FOR_EVER),)
      elif kind == "cut links":
        victims = (rng.choice(["trainer", "searcher"]),)
      elif kind == "full disk":
        victims = (rng.choice([r for r in roles if r != "kvservice"]),)
      else:
        victims = (rng.choice(roles),)
      faults.append((kind, victims))
      num += kind == "torn files"
      continue
    if kills - num >= 2 and rng.random() < _PAIR_SHARE:
      victims = next(pairs)
    else:
      weights = [_WEIGHTS[role] for role in roles]
      victims = tuple(rng.choices(roles, weights))
    faults.append(("kill", victims))
    num += len(victims)
    until_other -= len(victims)
  last = int(config.train.num_steps * (1 - _QUIET_SHARE))
  return [
      (max(1, i * last // len(faults)), kind, victims)
      for i, (kind, victims) in enumerate(faults)
  ]


def _disturb(
    run_: _Run,
    schedule: Sequence[tuple[int, str, tuple[str, ...]]],
    rng: random.Random,
    clock: pathlib.Path,
    outcomes: "_Outcomes",
) -> dict[str, int]:
  """Brings faults to a run while it lasts; returns how often each."""
  done, furthest = collections.Counter(), 0
  for number, (step, kind, roles) in enumerate(schedule):
    outcomes.end(run_, furthest)
    furthest = run_.wait_for_step(step)
    if run_.has_ended():
      _tell(
          f"{len(schedule) - number} of {len(schedule)} faults did not come"
          f" within {run_.num_steps} steps: set train.num_steps"
      )
      break
    names = [_choose(run_, role, kind, rng) for role in roles]
    outcomes.begin(run_, kind, names)
    _tell(
        f"{number + 1} of {len(schedule)}, step {furthest}: {kind}"
        f" {' '.join(f'{role}-{index}' for role, index in names)}"
    )
    if kind == "kill":
      # The supervisor last, since all end with it.
      for name in sorted(names, key=lambda n: n[0] == "supervisor"):
        done["kill"] += 1
        if name[0] == "supervisor":
          _end(run_)
          run_.start()
        else:
          _signal(run_, name, signal.SIGKILL)
    elif kind == "torn files":
      done["kill"] += 1
      _end(run_)
      _tear(run_.workdir, rng)
      run_.start()
    elif kind == "stop":
      _signal(run_, names[0], signal.SIGSTOP)
      time.sleep(rng.uniform(*_STOP_S))
      _signal(run_, names[0], signal.SIGCONT)
    elif kind == "stop for ever":
      _signal(run_, names[0], signal.SIGSTOP)
    elif kind == "slow":
      _slow(run_, names[0])
    elif kind == "full disk":
      _fill(run_, names[0])
    elif kind == "cut links":
      _cut(run_, names[0])
    else:
      # In place: processes have it mapped.
      with clock.open("r+b") as file:
        file.write(struct.pack("<d", rng.choice(_JUMPS_S)))
    done[kind] += kind != "kill"
  outcomes.end(run_, furthest)
  run_.wait()
  return dict(done)


def _choose(
    run_: _Run, role: str, kind: str, rng: random.Random
) -> tuple[str, int]:
  """Returns a process of a role that lives, or of one that may die."""
  # A link that is cut just as a client of JAX connects aborts its process.
  deadly = kind in ("kill", "stop for ever", "cut links")
  deadline = time.monotonic() + _UP_S
  while time.monotonic() < deadline:
    names = [n for n in sorted(run_.pids()) if n[0] == role]
    if names:
      names = [n for n in names if not deadly or run_.may_die(n)]
      if names:
        return rng.choice(names)
      if kind == "kill":
        return "supervisor", 0
    time.sleep(_POLL_S)
  raise RuntimeError(f"{run_.workdir}: no process of {role} for {_UP_S} s")


def _signal(run_: _Run, name: tuple[str, int], number: int) -> None:
  pid = run_.pids().get(name)
  if pid is not None:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)


def _end(run_: _Run) -> None:
  if left := run_.end_by_kill():
    raise RuntimeError(
        f"{run_.workdir}: {_END_S} s after its supervisor there are {left}"
    )


def _slow(run_: _Run, name: tuple[str, int]) -> None:
  """Leaves a process a fifth of its time."""
  deadline = time.monotonic() + _SLOW_S
  while time.monotonic() < deadline:
    _signal(run_, name, signal.SIGSTOP)
    time.sleep(0.2)
    _signal(run_, name, signal.SIGCONT)
    time.sleep(0.05)


def _fill(run_: _Run, name: tuple[str, int]) -> None:
  """Lets a process's files grow no further, for some seconds."""
  pid = run_.pids().get(name)
  if pid is None:
    return
  with contextlib.suppress(ProcessLookupError):
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, most[1]))
    time.sleep(_FULL_S)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, most)


def _cut(run_: _Run, name: tuple[str, int]) -> None:
  """Breaks a process's links to the key-value service as they are made."""
  deadline = time.monotonic() + _CUT_S
  while time.monotonic() < deadline:
    pids = run_.pids()
    pid, service = pids.get(name), pids.get(("kvservice", 0))
    if pid is not None and service is not None:
      with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        _shut_links(pid, service)
    time.sleep(_CUT_POLL_S)


def _shut_links(pid: int, service: int) -> None:
  """Shuts the unix sockets of one process that lead to another one."""
  libc = ctypes.CDLL(None, use_errno=True)
  handle = os.pidfd_open(pid)
  try:
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
      number = libc.syscall(_PIDFD_GETFD, handle, int(path.name), 0)
      if number < 0:
        if ctypes.get_errno() == errno.EBADF:
          continue  # It has just been closed.
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
      if not stat.S_ISSOCK(os.fstat(number).st_mode):
        os.close(number)
        continue
      with socket.socket(fileno=number) as link:
        if link.family != socket.AF_UNIX:
          continue
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("iii", peer)[0] == service:
          with contextlib.suppress(OSError):  # It is broken already.
            link.shutdown(socket.SHUT_RDWR)
  finally:
    os.close(handle)


def _tear(workdir: pathlib.Path, rng: random.Random) -> None:
  """Does what a crash of the machine does to files that were being written."""
  segments = sorted((workdir / "replay").glob("segment-*.journal"))
  if segments:
    size = segments[-1].stat().st_size
    os.truncate(segments[-1], max(0, size - rng.randrange(1, 4000)))
  for name in ("metrics.jsonl", "events.jsonl", "replay/acknowledged.jsonl",
               "replay/decisions.jsonl"):  # fmt: skip
    if (workdir / name).exists():
      with (workdir / name).open("ab") as file:
        file.write(b'{"step": 1' if "ack" not in name else b'\n["s0')
  steps = [p for p in (workdir / "checkpoints").glob("*") if p.name.isdecimal()]
  # The last but one must stay: a machine does not lose what was synced.
  if len(steps) > 1:
    newest = max(steps, key=lambda p: int(p.name))
    files = [p for p in (newest / "state").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


class _Outcomes:
  """What became of each fault."""

  def __init__(self):
    self._open: tuple[Any, ...] | None = None
    self._rows: dict[tuple[str, str], dict[str, Any]] = {}

  def begin(
      self, run_: _Run, kind: str, names: Sequence[tuple[str, int]]
  ) -> None:
    roles = " + ".join(sorted(role for role, _ in names)) or "all"
    self._open = kind, roles, time.monotonic(), len(run_.events())

  def end(self, run_: _Run, furthest: int) -> None:
    """Waits for some new steps, and notes the longest pause before them."""
    if self._open is None:
      return
    kind, roles, began, count = self._open
    pause = 0.0
    for i in range(1, _AFTER_STEPS + 1):
      run_.wait_for_step(furthest + i)
      now = time.monotonic()
      pause, began = max(pause, now - began), now
    row = self._rows.setdefault((kind, roles), {"seconds": [], "told": {}})
    row["seconds"].append(round(pause, 2))
    # The first event of each kind, in the order in which they came.
    first: dict[str, str] = {}
    for event in run_.events()[count:]:
      first.setdefault(event["kind"], str(event.get("message") or ""))
    for name, message in first.items():
      told = row["told"].setdefault(name, {"times": 0, "message": message})
      told["times"] += 1
    self._open = None

  def rows(self) -> list[dict[str, Any]]:
    """Returns by fault the pauses of training, and the events.

    A pause is the longest from the fault or a new step to the next one, in
    seconds, the fault's own included, such as those of a stop. Of each kind of
    event there is the number of faults after which it came, and the message of
    the first.
    """
    return [
        {"fault": kind, "process": roles, **row}
        for (kind, roles), row in sorted(self._rows.items())
    ]


def main() -> int:
  """Is the `train` program, of a config in a JSON file."""
  path, workdir = sys.argv[1:]
  processes.die_with_parent()
  config = ml_collections.ConfigDict(jsonl.read_json(path))
  return train.run(load.complete(config), workdir, [])


if __name__ == "__main__":
  sys.exit(main())

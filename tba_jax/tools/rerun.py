# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `rerun` program: trains recorded steps again, without searchers.

    python -m tba_jax.main --program=rerun --workdir=runs/countdown
    python -m tba_jax.main --program=rerun --workdir=runs/countdown 40 57

Operands are the step of a checkpoint to begin with (default: the oldest whose
journal is there; 0 is the start) and the step to end before (default: the last
recorded). Data comes from the journal, and the decisions that asynchrony made
about it from `replay/decisions.jsonl`. Where the run was resumed with changed
settings, the following steps use these. On the same machine each step has the
same bits; the first step that does not is reported, with the fields of the
draw, the metrics or the params that differ. `--export_step=N` writes that step
to a file (`step_file`); `--program=rerun FILE` computes it again, on any host.

A counterfactual changes settings of the loss, the optimizer or the draw, or
leaves out groups, and goes on with the recorded data:

    --set=loss.beta=0.1 --without=group=7,12 --without=searcher=s001

prints the first step that differs and a table of the main metrics, and writes
`counterfactuals/*.json` for the run's report. `--bisect=METRIC` finds what a
jump of a metric at the last step goes back to (`bisection`); `--bisect=any`
takes metric and steps from the record. See docs/reference/replay.md.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax import loop
from tba_jax import types
from tba_jax.config import load
from tba_jax.learning import buffers
from tba_jax.learning import checkpoint
from tba_jax.learning import device_work
from tba_jax.learning import host_state
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import work_parts
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.replay import curriculum
from tba_jax.replay import decisions
from tba_jax.replay import prompt_order
from tba_jax.report import run_reader
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.tools import bisection
from tba_jax.tools import counterfactual
from tba_jax.tools import jump
from tba_jax.tools import step_file
from tba_jax.transport import wire
from tba_jax.transport.groups import inbox as inbox_lib
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import service as service_lib

_FLAGS = ("export_step", "set", "without", "bisect", "by")
_SHOW_EVERY_S = 2.0
# Settings that may change on a resume, but need a new process to rerun.
_DEVICES = ("mesh.", "trainer.num_processes", "trainer.cpu_devices")


# Policy and work by config.
_Works = dict[str, tuple[policy_lib.Policy, device_work.DeviceWork]]


class Different(Exception):
  """A step differs from the recorded one; the message names the difference."""


@dataclasses.dataclass(frozen=True)
class _Request:
  """Operands of the program.

  first: step to begin with, None for the oldest.
  last: step to end before, None for the last recorded one.
  export: step to export, or None.
  settings, without: values of `--set` and `--without`.
  metric: value of `--bisect`, or "".
  unit: value of `--by`.
  """

  first: int | None
  last: int | None
  export: int | None
  settings: Sequence[str]
  without: Sequence[str]
  metric: str
  unit: str


def run(
    config: ml_collections.ConfigDict | None,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Trains recorded steps again, or computes the step of a file.

  Returns:
    0: the bits are the same, a file's step is equal up to rounding, the
    counterfactual is done, or the cause of the jump is found; 1: there is a
    difference, which is printed, or no cause is found; 2: wrong usage.
  """
  try:
    if config is not None:
      raise ValueError("--config: rerun takes the settings of the record")
    if workdir is None:
      return step_file.run(operands)
    return _replay(workdir, _parse(operands))
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  except Different as difference:
    print(difference)
    return 1


def _parse(operands: Sequence[str]) -> _Request:
  values: dict[str, list[str]] = {name: [] for name in _FLAGS}
  steps = []
  for operand in operands:
    name, has_value, value = operand.removeprefix("--").partition("=")
    if operand.startswith("--") and has_value and name in _FLAGS:
      values[name].append(value)
    else:
      steps.append(operand)
  exported = values["export_step"][-1:]
  if len(steps) > 2 or not all(t.isdecimal() for t in (*steps, *exported)):
    raise ValueError(
        f"operands {' '.join(operands)}: must be the step to begin with, the"
        f" step to end before, and flags: --{'=, --'.join(_FLAGS)}="
    )
  given = [name for name in _FLAGS if values[name] and name != "by"]
  if len(given) > 1 and given != ["set", "without"]:
    raise ValueError(
        f"--{given[0]} and --{given[1]}: must not be combined; only --set and"
        " --without may"
    )
  if values["by"] and not values["bisect"]:
    raise ValueError("--by: must come with --bisect")
  metric = "".join(values["bisect"][-1:]).removeprefix("train/")
  if values["bisect"] and not metric:
    raise ValueError("--bisect=: must be a metric")
  default = bisection.ALL if metric in bisection.SOURCES else "group"
  unit = (values["by"] or [default])[-1]
  if unit not in bisection.UNITS:
    raise ValueError(f"--by={unit}: must be {' or '.join(bisection.UNITS)}")
  if metric in bisection.SOURCES and steps:
    raise ValueError(
        f"--bisect={metric}: must come without steps, which it takes from the"
        " run"
    )
  first, last, *_ = *map(int, steps), None, None
  return _Request(
      first,
      last,
      int(exported[0]) if exported else None,
      values["set"],
      values["without"],
      metric,
      unit,
  )


def _replay(workdir: str, request: _Request) -> int:
  """Trains recorded steps again; see `run`."""
  folder = pathlib.Path(workdir).absolute()
  run_directory.load_config(workdir)
  recording = decisions.read(folder)
  # Opening checkpoints removes those that a live run is still writing.
  with contextlib.ExitStack() as closing:
    for role in ("", "trainer"):
      closing.callback(os.close, run_directory.lock(workdir, role))
    jumped = None
    if request.metric in bisection.SOURCES:
      jumped = bisection.find(
          run_reader.read_run(folder),
          recording,
          _starts(folder),
          request.metric,
      )
      if jumped is None:
        print(f"{workdir}: no metric jumps in the steps that can be rerun")
        return 1
      request = dataclasses.replace(
          request, first=jumped.first, last=jumped.last
      )
    first, last = _range(folder, recording, request.first, request.last)
    export = request.export
    if export is not None and not first <= export < last:
      raise ValueError(
          f"--export_step={export}: must be a replayed step, {first} to"
          f" {last - 1}"
      )
    start = recording.steps[first].start
    _check_settings(recording, first, last)
    config = _config_of(recording, first)
    is_exact = not (request.settings or request.without or request.metric)
    if not is_exact:
      # Refuse wrong operands before a device is used.
      index, left_out = None, frozenset()
      if request.without or request.metric:
        index = counterfactual.GroupIndex(_records(folder, 0))
        left_out = index.select(request.without)
      for begin, *_ in _parts(recording, first, last):
        _config_of(recording, begin, request.settings)
      if request.metric and jumped is None:
        jumped = _jump(recording, request.metric, first, last)
    cores = processes.available_cores()[: start.machine.get("cores")]
    processes.pin(cores)
    processes.prepare_compiling()
    info = run_directory.open_run(workdir, config)
    cluster = cluster_lib.join(config.trainer, (), info.secret)
    for name, value in device_work.machine().items():
      if value != start.machine.get(name):
        print(
            f"note: {name} {value!r}, the run's was"
            f" {start.machine.get(name)!r}: bits may differ"
        )
    if (count := start.config.get("trainer", {}).get("num_processes", 1)) > 1:
      print(
          f"note: one process has the devices of {count}: sums over more than"
          " two devices may have other last bits"
      )
    train = functools.partial(_train, info, recording, cluster, first, last)
    if is_exact:
      path = folder / f"step-{export}.npz"
      outcome = train(export=export, path=path, is_exact=True)
      names = ", ".join(f"checkpoints/{step}" for step in outcome.checkpoints)
      print(
          f"{workdir}: steps {first} to {last - 1} have the same bits: draws,"
          f" metrics{' and ' * bool(names)}{names}"
      )
      if export is not None:
        print(path)
      return processes.EXIT_OK
    if request.metric:
      works: _Works = {}
      closing.callback(lambda: [work.close() for _, work in works.values()])
      train = functools.partial(train, index=index, works=works)
      return bisection.run(train, index, recording, jumped, request.unit)
    outcome = train(settings=request.settings, index=index, left_out=left_out)
    counterfactual.report(
        folder, recording, outcome, index, request.settings, request.without
    )
    return processes.EXIT_OK


def _train(
    info: run_directory.RunInfo,
    recording: decisions.Recording,
    cluster: cluster_lib.Cluster,
    first: int,
    last: int,
    *,
    export: int | None = None,
    path: pathlib.Path | None = None,
    is_exact: bool = False,
    settings: Sequence[str] = (),
    undone: Collection[tuple[int, str]] = (),
    index: counterfactual.GroupIndex | None = None,
    left_out: Collection[int] = (),
    works: _Works | None = None,
) -> counterfactual.Outcome:
  """Trains steps `first` to `last` (exclusive) again.

  Args:
    export: step to write to `path`, or None.
    is_exact: whether a difference from the record ends the rerun.
    settings: changed settings, see `counterfactual.apply_settings`.
    undone: (step, key) of recorded changes of settings to undo.
    index: groups of the journal; None without a need for their ids.
    left_out: ids of groups that no step draws.
    works: compiled work that reruns share; None shares none.

  Raises:
    Different: a step differs, with `is_exact`.
  """
  outcome = counterfactual.Outcome()
  shown_at = time.monotonic()

  def on_step(
      replayed: _Replay, step: int, draw: types.Draw, metrics: dict[str, Any]
  ) -> None:
    nonlocal shown_at
    outcome.metrics[step] = {k: float(v) for k, v in metrics.items()}
    if not outcome.difference:
      outcome.difference = replayed.difference(step, draw, metrics)
      if outcome.difference:
        outcome.first_different = step
        if is_exact:
          raise Different(outcome.difference)
    if time.monotonic() - shown_at > _SHOW_EVERY_S:
      shown_at = time.monotonic()
      state = "the same" if not outcome.difference else "trained"
      print(f"step {step}: {state}", file=sys.stderr, flush=True)

  checkpoints = info.workdir / "checkpoints"
  with contextlib.ExitStack() as closing:
    for begin, end, config in _parts(recording, first, last, settings, undone):
      with contextlib.ExitStack() as of_part:
        replayed = _Replay(
            config,
            info,
            recording,
            cluster,
            begin,
            checkpoints,
            of_part,
            outcome,
            index,
            left_out,
            works,
        )
        replayed.run(end, export, path, on_step)
        if end < last:
          checkpoints = pathlib.Path(
              closing.enter_context(tempfile.TemporaryDirectory())
          )
          replayed.save(checkpoints, end)
  return outcome


def _jump(
    recording: decisions.Recording, metric: str, first: int, last: int
) -> bisection.Jump:
  """Returns the jump of a metric at the last step.

  Raises:
    ValueError: there is none.
  """
  recorded = recording.steps[last - 1].metrics
  if metric not in recorded:
    raise ValueError(
        f"--bisect={metric}: must be {', '.join(bisection.SOURCES)} or a metric"
        f" of step {last - 1}: {', '.join(sorted(recorded))}"
    )
  try:
    low, high = jump.band(
        [v for n, v in recording.metric(metric).items() if n < first]
    )
  except ValueError as error:
    raise ValueError(f"step {first}: {error}") from error
  value = recorded[metric]
  if low <= value <= high:
    raise ValueError(
        f"--bisect={metric}: must jump at step {last - 1}, where it is"
        f" {value:.6g}; {low:.6g} to {high:.6g} is normal before step {first}"
    )
  return bisection.Jump(metric, first, last, first, (low, high))


def _range(
    folder: pathlib.Path,
    recording: decisions.Recording,
    first: int | None,
    last: int | None,
) -> tuple[int, int]:
  """Returns the first step and the end (exclusive).

  Raises:
    ValueError: the steps cannot be rerun; the message lists those that can.
  """
  starts = _starts(folder)
  if first is None:
    first = min((s for s in starts if s in recording.steps), default=None)
  if first not in starts or first not in recording.steps:
    allowed = [s for s in sorted(starts) if s in recording.steps]
    raise ValueError(
        f"step {first}: must be a checkpoint whose journal is there and that"
        f" steps follow: {', '.join(map(str, allowed)) or 'none'};"
        " config.checkpoint.keep_journal=True keeps the journal of all"
    )
  end = max(recording.steps) + 1 if last is None else last
  missing = [s for s in range(first, end) if s not in recording.steps]
  if end <= first or missing:
    to = missing[0] if missing else max(recording.steps) + 1
    raise ValueError(
        f"steps {first} to {end}: must be an end of {first + 1} to {to}, since"
        " no later one is recorded"
    )
  return first, end


def _starts(folder: pathlib.Path) -> dict[int, int]:
  """Returns the journal's offset at each step that a rerun may begin with."""
  segments = journal.find_segments(folder / "replay")
  begin = min(segments, default=0)
  applied = {0: 0}
  for path in (folder / "checkpoints").glob("*/host/" + host_state.NAME):
    if path.parent.parent.name.isdecimal():
      with contextlib.suppress(ValueError, OSError):
        data = _read_host(path)["host_state"]["data"]
        applied[int(path.parent.parent.name)] = data["applied"]
  return {step: at for step, at in applied.items() if at >= begin}


def _read_host(path: pathlib.Path) -> dict[str, Any]:
  with path.open("rb") as file:
    return host_state.read(file)


def _config_of(
    recording: decisions.Recording,
    step: int,
    settings: Sequence[str] = (),
    old: Mapping[str, Any] | None = None,
) -> ml_collections.ConfigDict:
  """Returns the config that a step was trained with, with changed settings."""
  config = ml_collections.ConfigDict(recording.steps[step].start.config)
  config = counterfactual.undo(load.complete(config), old or {})
  config = counterfactual.apply_settings(config, settings)
  trainer = config.trainer
  if trainer.num_processes > 1:
    # This process has the devices of all processes of the record.
    with config.unlocked():
      trainer.cpu_devices *= trainer.num_processes
      trainer.num_processes = 1
  return config


def _parts(
    recording: decisions.Recording,
    first: int,
    last: int,
    settings: Sequence[str] = (),
    undone: Collection[tuple[int, str]] = (),
) -> Iterator[tuple[int, int, ml_collections.ConfigDict]]:
  """Yields (first, end, config) of ranges of steps with the same config."""
  old: dict[str, Any] = {}
  changes = bisection.changes(recording, first, last)
  begin, config = first, None
  for step in range(first, last):
    for (at, key), (before, _) in changes.items():
      if at == step:
        # The first of several undone changes has the oldest value.
        if (at, key) in undone:
          old.setdefault(key, before)
        else:
          old.pop(key, None)
    if step > first and all(at != step for at, _ in changes):
      continue
    new = _config_of(recording, step, settings, old)
    if config is not None and new.to_dict() != config.to_dict():
      yield begin, step, config
      begin = step
    if config is None or begin == step:
      config = new
  yield begin, last, config


def _check_settings(
    recording: decisions.Recording, first: int, last: int
) -> None:
  """Raises ValueError if the trainer's devices changed between the steps."""
  for step, key in bisection.changes(recording, first + 1, last):
    if key.startswith(_DEVICES):
      raise ValueError(
          f"steps {first} to {last}: config.{key} changed at step {step};"
          f" must be an end of at most {step}, or steps from there on"
      )


class _Receiver:
  """Source of the journal's records, up to a recorded offset."""

  generation = 0

  def __init__(
      self, folder: pathlib.Path, order: prompt_order.PromptOrder, applied: int
  ):
    """Starts reading at the journal offset `applied`."""
    self.inbox = inbox_lib.Inbox()
    self.order = order
    self.journal_start = applied
    self._records = _records(folder, applied)
    self._next = next(self._records, None)

  def acknowledged(self) -> dict[str, int]:
    return {}

  def feed(self, offset: int) -> None:
    """Puts the records up to a journal offset into the inbox."""
    while self._next is not None and self._next.offset <= offset:
      self.inbox.put(self._next)
      self._next = next(self._records, None)


def _records(
    folder: pathlib.Path, from_offset: int
) -> Iterator[inbox_lib.Record]:
  """Yields the journal's records as the run's receiver delivered them."""
  for end, payload in journal.read_records(folder / "replay", from_offset):
    try:
      header, arrays = wire.decode_unverified(payload)
    except wire.WireError:
      continue
    groups = None
    if "sequence" in header:
      with contextlib.suppress(ValueError):
        groups = messages.unpack_groups(header, arrays)
    yield inbox_lib.Record(end, header, groups)


class _Replay:
  """Source and learner of recorded steps with one config."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.RunInfo,
      recording: decisions.Recording,
      cluster: cluster_lib.Cluster,
      first: int,
      checkpoints: pathlib.Path,
      closing: contextlib.ExitStack,
      outcome: counterfactual.Outcome,
      index: counterfactual.GroupIndex | None = None,
      left_out: Collection[int] = (),
      works: _Works | None = None,
  ):
    """Restores the state before step `first` from the folder of checkpoints."""
    self._outcome = outcome
    self._left_out = np.array([*left_out], np.int64)
    self._config = config
    self._recording = recording
    self._folder = run.workdir / "checkpoints"
    self._step = first
    checkpointer = checkpoint.Checkpointer(
        str(checkpoints), keep=config.checkpoint.keep
    )
    closing.callback(checkpointer.close)
    key = config.to_json_best_effort()
    if works and first and key in works:
      self._policy, self._work = works[key]
      saved = work_parts.restore(
          config, self._policy, self._work, checkpointer, first
      )
    else:
      self._policy = policy_lib.make_policy(config, run.workdir)
      self._work, saved = work_parts.make_work(
          config, run, self._policy, cluster, checkpointer, first
      )
    if works is None:
      closing.callback(self._work.close)
    else:
      if key in works and works[key][1] is not self._work:
        works[key][1].close()
      works[key] = self._policy, self._work
      # Only one part of the steps holds a state.
      closing.callback(self._work.set_state, None)
    data = saved.get("data")
    applied = data["applied"] if data else 0
    policy = self._policy
    order = curriculum.make_order(
        config, policy.task, policy.tokenizer, run.workdir / "replay"
    )
    self._receiver = _Receiver(run.workdir, order, applied)
    self._service = service_lib.ReplayService(
        config,
        receiver=self._receiver,
        buffer=buffers.make_buffer(config, policy),
        vocab_size=self._policy.model.config.vocab_size,
        num_experts=self._policy.model.config.num_experts,
        on_event=lambda kind, message: None,
        saved=data,
    )
    self._learner = learner_lib.make_learner(
        config, policy, self._service.buffer, self._work
    )
    # Function from rows of the buffer to ids of their groups.
    self._find = index and index.finder(
        self._service.buffer.table, lambda: self._service.applied
    )

  def run(
      self,
      last: int,
      export: int | None,
      path: pathlib.Path | None,
      on_step: "Callable[[_Replay, int, types.Draw, dict[str, Any]], None]",
  ) -> None:
    """Trains up to `last`.

    Args:
      last: step to end before.
      export: step to write to a file, or None.
      on_step: function called after each step with its draw and metrics.
    """
    recorded = self._recording.steps
    running: list[tuple[int, types.Draw, Mapping[str, Any]]] = []

    def read(step: int, draw: types.Draw, metrics: Mapping[str, Any]) -> None:
      # Read as many steps behind as the trainer did.
      running.append((step, draw, metrics))
      ahead = step + 1 < last and recorded[step + 1].decision.ahead
      for done, *of_step in running[: len(running) - ahead]:
        draw, metrics = of_step
        metrics = jax.device_get(metrics)
        self._learner.finish()
        on_step(self, done, draw, metrics)
      del running[: len(running) - ahead]

    self._export, self._path = export, path
    loop.run(self._draws(last), self, [read])

  def save(self, folder: pathlib.Path, step: int) -> None:
    """Saves a checkpoint of the state before `step`, as the run had it."""
    start = self._recording.steps[step].start
    self._apply(start.step, start.applied)
    host = {
        "data": self._service.get_state(),
        "base": self._work.base,
        "reference": self._work.reference.name,
    }
    checkpointer = checkpoint.Checkpointer(str(folder), keep=1)
    with contextlib.closing(checkpointer):
      checkpointer.save(step, self._work.state, host, wait=True)

  def step(self, draw: types.Draw) -> dict[str, jax.Array]:
    """Dispatches a recorded step, after exporting it if requested."""
    batch = self._learner.make(draw)
    if draw.step == self._export:
      step_file.write(
          self._path,
          self._config,
          self._policy,
          self._work,
          draw,
          batch,
          self._recording.steps[draw.step].metrics,
      )
    return self._work.train(batch)

  def _draws(self, last: int) -> Iterator[tuple[int, types.Draw]]:
    """Applies each step's data and draws from it, as the trainer did."""
    for step in range(self._step, last):
      yield step, self._draw(step)

  def _draw(self, step: int) -> types.Draw:
    recorded, service = self._recording.steps[step], self._service
    start, train = recorded.start, self._config.train
    if service.buffer.epoch != start.epoch:
      # Data that was applied at the end of the previous start of the run.
      self._apply(start.step, start.applied)
      service.buffer.begin_epoch(start.epoch, start.step)
    self._apply(step, recorded.decision.applied)
    draw = service.draw(
        train.prompts_per_batch, train.completions_per_prompt, step
    )
    if self._find is not None:
      draw = self._without(draw)
    service.mark_drawn(draw)
    scale = recorded.decision.scale / self._work.learning_rate_scale
    if scale != 1:
      self._work.scale_learning_rate(scale)
    return draw

  def _apply(self, step: int, position: int) -> None:
    self._receiver.feed(position)
    self._service.apply(step, all_records=True)

  def _without(self, draw: types.Draw) -> types.Draw:
    """Returns a draw without completions of left-out groups."""
    buffer, outcome = self._service.buffer, self._outcome
    groups = lambda d: self._find(buffer.table.find(d.ids)[0].ravel()).reshape(
        d.ids.shape
    )
    outcome.drawn[draw.step] = recorded = groups(draw)
    if not np.isin(recorded, self._left_out).any():
      return draw
    draw = buffer.redraw(
        draw,
        lambda rows: np.isin(self._find(rows), self._left_out),
        np.random.default_rng([self._config.seed, draw.step]),
    )
    outcome.redrawn[draw.step] = groups(draw)
    return draw

  def difference(
      self, step: int, draw: types.Draw, metrics: dict[str, Any]
  ) -> str:
    """Returns how a step's bits differ from the record, or ""."""
    recorded = self._recording.steps[step]
    sums = decisions.sums_of(draw)
    fields = [
        name
        for name in sums | recorded.draw
        if sums.get(name) != recorded.draw.get(name)
    ]
    if fields:
      return (
          f"step {step}: the draw differs in {', '.join(fields)}: other data"
          " came, or it was drawn otherwise"
      )
    for name, before in recorded.metrics.items():
      now = np.float32(metrics.get(name, np.nan))
      if now.tobytes() != before.tobytes():
        return (
            f"step {step}: train/{name} is {now}, was {before}; the draw is the"
            " same"
        )
    return self._params_difference(step + 1)

  def _params_difference(self, step: int) -> str:
    """Compares the state before a step with its checkpoint, if there is one."""
    path = self._folder / str(step) / "host" / host_state.NAME
    if not path.exists():
      return ""
    saved = _read_host(path)["checksums"]
    checksums = checkpoint.leaf_checksums(self._work.state)
    leaves = [name for name in checksums if checksums[name] != saved.get(name)]
    if leaves:
      return (
          f"step {step - 1}: {len(leaves)} of {len(checksums)} leaves differ"
          f" from checkpoints/{step}: {', '.join(leaves[:3])}; its draw and"
          " metrics are the same"
      )
    self._outcome.checkpoints.append(step)
    return ""

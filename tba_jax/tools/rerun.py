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
draw, the metrics or the params that differ. Only `--export_step=N` writes a
file, with that step (`step_file`); `--program=rerun FILE` computes it again, on
any host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
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
from tba_jax.config import differences
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
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.tools import step_file
from tba_jax.transport import wire
from tba_jax.transport.groups import inbox as inbox_lib
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import service as service_lib

_EXPORT = "--export_step="
_SHOW_EVERY_S = 2.0
# Settings that may change on a resume, but need a new process to rerun.
_DEVICES = ("mesh.", "trainer.")


class Different(Exception):
  """A step differs from the recorded one; the message names the difference."""


def run(
    config: ml_collections.ConfigDict | None,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Trains recorded steps again, or computes the step of a file.

  Returns:
    0: the bits are the same, or a file's step is equal up to rounding; 1: there
    is a difference, which is printed; 2: wrong usage.
  """
  try:
    if config is not None:
      raise ValueError("--config: rerun takes the settings of the record")
    if workdir is None:
      return step_file.run(operands)
    return _replay(workdir, *_parse(operands))
  except (ValueError, OSError) as error:
    return processes.refuse(error)
  except Different as difference:
    print(difference)
    return 1


def _parse(
    operands: Sequence[str],
) -> tuple[int | None, int | None, int | None]:
  """Returns the first step, the end (exclusive), and the step to export."""
  exported = [o for o in operands if o.startswith(_EXPORT)]
  steps = [o for o in operands if not o.startswith(_EXPORT)]
  texts = [*steps, *(o.removeprefix(_EXPORT) for o in exported)]
  if len(steps) > 2 or not all(text.isdecimal() for text in texts):
    raise ValueError(
        f"operands {' '.join(operands)}: must be the step to begin with, the"
        " step to end before, and --export_step=N"
    )
  first, last, *_ = *map(int, steps), None, None
  return first, last, int(texts[-1]) if exported else None


def _replay(
    workdir: str, first: int | None, last: int | None, export: int | None
) -> int:
  """Trains steps `first` to `last` (exclusive) again; see `run`."""
  folder = pathlib.Path(workdir).absolute()
  run_directory.load_config(workdir)
  recording = decisions.read(folder)
  # Opening checkpoints removes those that a live run is still writing.
  with contextlib.ExitStack() as closing:
    for role in ("", "trainer"):
      closing.callback(os.close, run_directory.lock(workdir, role))
    first, last = _range(folder, recording, first, last)
    if export is not None and not first <= export < last:
      raise ValueError(
          f"--export_step={export}: must be a replayed step, {first} to"
          f" {last - 1}"
      )
    start = recording.steps[first].start
    _check_settings(recording, first, last)
    config = _config_of(recording, first)
    if config.trainer.num_processes > 1:
      raise ValueError(
          f"config.trainer.num_processes = {config.trainer.num_processes}:"
          " must be 1; the steps of several processes are not replayed"
      )
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
    path = folder / f"step-{export}.npz"
    shown_at, compared = time.monotonic(), []
    checkpoints = folder / "checkpoints"

    def show(step: int) -> None:
      nonlocal shown_at
      if time.monotonic() - shown_at > _SHOW_EVERY_S:
        shown_at = time.monotonic()
        print(f"step {step}: the same", file=sys.stderr, flush=True)

    for begin, end in _parts(recording, first, last):
      with contextlib.ExitStack() as of_part:
        replayed = _Replay(
            _config_of(recording, begin),
            info,
            recording,
            cluster,
            begin,
            checkpoints,
            of_part,
        )
        replayed.run(end, export, path, show)
        compared += replayed.compared
        if end < last:
          checkpoints = pathlib.Path(
              closing.enter_context(tempfile.TemporaryDirectory())
          )
          replayed.save(checkpoints, end)
  names = ", ".join(f"checkpoints/{step}" for step in compared)
  print(
      f"{workdir}: steps {first} to {last - 1} have the same bits: draws,"
      f" metrics{' and ' * bool(names)}{names}"
  )
  if export is not None:
    print(path)
  return processes.EXIT_OK


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
    recording: decisions.Recording, step: int
) -> ml_collections.ConfigDict:
  """Returns the config that a step was trained with."""
  config = ml_collections.ConfigDict(recording.steps[step].start.config)
  return load.complete(config)


def _parts(
    recording: decisions.Recording, first: int, last: int
) -> Iterator[tuple[int, int]]:
  """Yields (first, end) of ranges of steps trained with the same config."""
  begin = first
  for step in range(first + 1, last):
    sides = [recording.steps[s].start.config for s in (begin, step)]
    if sides[0] != sides[1]:
      yield begin, step
      begin = step
  yield begin, last


def _check_settings(
    recording: decisions.Recording, first: int, last: int
) -> None:
  """Raises ValueError if the trainer's devices changed between the steps."""
  configs = [
      recording.steps[begin].start.config
      for begin, _ in _parts(recording, first, last)
  ]
  for (step, _), *sides in zip(
      [*_parts(recording, first, last)][1:], configs, configs[1:]
  ):
    for key in differences.changed(*sides):
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
    """Starts reading at the position `applied`."""
    self.inbox = inbox_lib.Inbox()
    self.order = order
    self.journal_start = applied
    self._records = journal.read_records(folder / "replay", applied)
    self._next: tuple[int, bytes] | None = next(self._records, None)

  def acknowledged(self) -> dict[str, int]:
    return {}

  def feed(self, position: int) -> None:
    """Puts the records up to a position into the inbox."""
    while self._next is not None and self._next[0] <= position:
      end, payload = self._next
      with contextlib.suppress(wire.WireError):
        self.inbox.put(_record(end, payload))
      self._next = next(self._records, None)


def _record(position: int, payload: bytes) -> inbox_lib.Record:
  """Returns a record as the run's receiver would put it into the inbox."""
  header, arrays = wire.decode_unverified(payload)
  groups = None
  if "sequence" in header:
    with contextlib.suppress(ValueError):
      groups = messages.unpack_groups(header, arrays)
  return inbox_lib.Record(position, header, groups)


class _Replay:
  """Source and learner of recorded steps with one config.

  compared: steps of checkpoints that the params were compared with.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.RunInfo,
      recording: decisions.Recording,
      cluster: cluster_lib.Cluster,
      first: int,
      checkpoints: pathlib.Path,
      closing: contextlib.ExitStack,
  ):
    """Restores the state before step `first` from the folder of checkpoints."""
    self.compared: list[int] = []
    self._config = config
    self._recording = recording
    self._folder = run.workdir / "checkpoints"
    self._step = first
    self._policy = policy_lib.make_policy(config, run.workdir)
    checkpointer = checkpoint.Checkpointer(
        str(checkpoints), keep=config.checkpoint.keep
    )
    closing.callback(checkpointer.close)
    self._work, saved = work_parts.make_work(
        config, run, self._policy, cluster, checkpointer, first
    )
    closing.callback(self._work.close)
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

  def run(
      self,
      last: int,
      export: int | None,
      path: pathlib.Path,
      on_step: Callable[[int], None],
  ) -> None:
    """Trains up to `last`.

    Args:
      last: step to end before.
      export: step to write to a file, or None.
      path: step file.
      on_step: function called after each step that has the same bits.

    Raises:
      Different: a step differs.
    """
    recorded = self._recording.steps
    running: list[tuple[int, types.Draw, Mapping[str, Any]]] = []

    def compare(
        step: int, draw: types.Draw, metrics: Mapping[str, Any]
    ) -> None:
      # Compare as many steps behind as the trainer was.
      running.append((step, draw, metrics))
      ahead = step + 1 < last and recorded[step + 1].decision.ahead
      for done, *of_step in running[: len(running) - ahead]:
        draw, metrics = of_step
        metrics = jax.device_get(metrics)
        self._learner.finish()
        self._compare(done, draw, metrics)
        self._compare_params(done + 1)
        on_step(done)
      del running[: len(running) - ahead]

    self._export, self._path = export, path
    loop.run(self._draws(last), self, [compare])

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
    service.mark_trained(draw)
    scale = recorded.decision.scale / self._work.learning_rate_scale
    if scale != 1:
      self._work.scale_learning_rate(scale)
    return draw

  def _apply(self, step: int, position: int) -> None:
    self._receiver.feed(position)
    self._service.apply(step, all_records=True)

  def _compare(
      self, step: int, draw: types.Draw, metrics: dict[str, Any]
  ) -> None:
    """Raises Different if the draw or the metrics have different bits."""
    recorded = self._recording.steps[step]
    sums = decisions.sums_of(draw)
    fields = [
        name
        for name in sums | recorded.draw
        if sums.get(name) != recorded.draw.get(name)
    ]
    if fields:
      raise Different(
          f"step {step}: the draw differs in {', '.join(fields)}: other data"
          " came, or it was drawn otherwise"
      )
    for name, before in recorded.metrics.items():
      now = np.float32(metrics.get(name, np.nan))
      if now.tobytes() != before.tobytes():
        raise Different(
            f"step {step}: train/{name} is {now}, was {before}; the draw is the"
            " same"
        )

  def _compare_params(self, step: int) -> None:
    """Compares the state before a step with its checkpoint, if there is one."""
    path = self._folder / str(step) / "host" / host_state.NAME
    if not path.exists():
      return
    saved = _read_host(path)["checksums"]
    checksums = checkpoint.leaf_checksums(self._work.state)
    leaves = [name for name in checksums if checksums[name] != saved.get(name)]
    if leaves:
      raise Different(
          f"step {step - 1}: {len(leaves)} of {len(checksums)} leaves differ"
          f" from checkpoints/{step}: {', '.join(leaves[:3])}; its draw and"
          " metrics are the same"
      )
    self.compared.append(step)

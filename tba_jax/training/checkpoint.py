# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a role: its device state and its host state, in one step.

A checkpoint is complete or absent: Orbax writes into a temporary directory and
renames it. The device state is any pytree of arrays and may be restored onto
another mesh or number of processes. The host state (replay buffer, cursors,
counts) is process 0's: it writes it bit for bit, in one checked file.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import json
import logging
from typing import Any, BinaryIO
import zipfile

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from tba_jax import types
from tba_jax.system import bucket
from tba_jax.training import cluster

# Host state to one file and back, bit for bit, without pickle.
#
# The file is an uncompressed `.npz`: the arrays, and one more member with the
# structure as JSON. Its members carry checksums, so damage is seen when read.


# JSON objects with one of these keys stand for what JSON cannot say.
_ARRAY = "__array__"
_SCALAR = "__scalar__"
_PAIRS = "__pairs__"
_STRUCTURE = "structure"


@dataclasses.dataclass(frozen=True)
class Packed:
  """A host state whose arrays are copies.

  structure: the state with each array replaced by its name, as JSON.
  arrays: name to array.
  """

  structure: str
  arrays: dict[str, np.ndarray]


def pack_host_state(host_state: Any) -> Packed:
  """Returns a copy of the state that later changes do not reach.

  Args:
    host_state: nested dicts (keys str or int) and lists of NumPy arrays and
      scalars, bool, int of any size, float, str and None.

  Raises:
    TypeError: something else is in it; names the place.
  """
  arrays = {}

  def encode(value: Any, place: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
      return value
    if isinstance(value, (np.ndarray, np.generic)):
      if value.dtype.kind not in "biufcSU":
        raise TypeError(f"{place}: cannot store an array of {value.dtype}")
      name = f"a{len(arrays)}"
      arrays[name] = np.array(value, copy=True)
      kind = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
      return {kind: name}
    if type(value) is list:
      return [encode(v, f"{place}[{i}]") for i, v in enumerate(value)]
    if type(value) is dict:
      return _encode_dict(value, place)
    raise TypeError(f"{place}: cannot store a {type(value).__name__}")

  def _encode_dict(value: dict[Any, Any], place: str) -> dict[str, Any]:
    if not all(type(k) in (str, int) for k in value):
      raise TypeError(f"{place}: a key that is neither str nor int")
    pairs = [[k, encode(v, f"{place}[{k!r}]")] for k, v in value.items()]
    plain = all(type(k) is str and not k.startswith("__") for k in value)
    return dict(pairs) if plain else {_PAIRS: pairs}

  structure = json.dumps(encode(host_state, "host_state"))
  return Packed(structure=structure, arrays=arrays)


def write_host_state(file: BinaryIO, packed: Packed) -> None:
  """Writes one `.npz`; raises OSError as the file does."""
  structure = np.frombuffer(packed.structure.encode(), np.uint8)
  np.savez(file, **{_STRUCTURE: structure}, **packed.arrays)


def read_host_state(file: BinaryIO) -> Any:
  """Returns the state that was packed.

  Raises:
    ValueError: the file is cut short or changed.
  """
  try:
    with np.load(file, allow_pickle=False) as members:
      arrays = {name: members[name] for name in members.files}
    structure = json.loads(arrays.pop(_STRUCTURE).tobytes().decode())
  except (zipfile.BadZipFile, EOFError, KeyError, UnicodeDecodeError) as error:
    raise ValueError(f"host state is damaged: {error}") from error

  def decode(value: Any) -> Any:
    if isinstance(value, list):
      return [decode(v) for v in value]
    if not isinstance(value, dict):
      return value
    if _ARRAY in value:
      return arrays[value[_ARRAY]]
    if _SCALAR in value:
      return arrays[value[_SCALAR]][()]
    if _PAIRS in value:
      return {k: decode(v) for k, v in value[_PAIRS]}
    return {k: decode(v) for k, v in value.items()}

  return decode(structure)


# The host state as an item of an Orbax checkpoint: one file of process 0.


class HostStateHandler(ocp.AsyncCheckpointHandler):
  """Writes the host state of process 0, and reads it in all of them."""

  async def async_save(
      self, directory: epath.Path, args: "HostStateSave"
  ) -> list[ocp.future.Future]:
    if jax.process_index() != 0:
      return []
    return [
        ocp.future.CommitFutureAwaitingContractedSignals(
            self._write(directory, args.packed), name="host_state_save"
        )
    ]

  def save(self, directory: epath.Path, args: "HostStateSave") -> None:
    with _path(directory).open("wb") as file:
      write_host_state(file, args.packed)

  def restore(self, directory: epath.Path, args: "HostStateRestore") -> Any:
    # Also where it is not needed: then all processes see the same damage, and
    # pass over the same checkpoint.
    del args  # There is nothing to choose.
    with _path(directory).open("rb") as file:
      return read_host_state(file)

  async def _write(self, directory: epath.Path, packed: Packed) -> None:
    self.save(directory, HostStateSave(packed))


@ocp.args.register_with_handler(HostStateHandler, for_save=True)
@dataclasses.dataclass
class HostStateSave(ocp.args.CheckpointArgs):
  """What to save: a packed host state."""

  packed: Packed


@ocp.args.register_with_handler(HostStateHandler, for_restore=True)
@dataclasses.dataclass
class HostStateRestore(ocp.args.CheckpointArgs):
  """Restores the whole host state."""


def _path(directory: epath.Path) -> epath.Path:
  return directory / "process-00000.npz"


# Fields of a train state that an earlier program's checkpoint lacks.


class LackingError(ValueError):
  """The checkpoint has no place for arrays that this run's state has."""


def lacking_fields(folder: epath.Path, state: types.PyTree) -> set[str]:
  """Returns the fields, all without arrays, that a checkpoint lacks.

  Args:
    folder: of one checkpoint.
    state: that is wanted: arrays or shapes.

  Raises:
    LackingError: it lacks fields that have arrays; the message names them.
  """
  saved = ocp.StandardCheckpointHandler().metadata(folder / "state")
  fields = _by_name(state)
  absent = fields.keys() - saved.tree.keys()
  if absent == fields.keys():
    return set()  # No earlier layout: the reader tells what differs.
  needed = sorted(n for n in absent if jax.tree.leaves(fields[n]))
  if needed:
    raise LackingError(
        f"checkpoint {folder.name} in {folder.parent} has no"
        f" {', '.join(needed)}: an earlier program, or one with other"
        " settings, wrote it; go on with the settings it was written with, or"
        " with those write its model (--program=export) and start a new run"
        " with that folder as config.init"
    )
  return absent


def without_fields(
    state: types.PyTree, names: set[str]
) -> dict[str, types.PyTree]:
  """Returns the fields of a state but those named."""
  return {n: field for n, field in _by_name(state).items() if n not in names}


def with_defaults(
    state: types.PyTree, fields: dict[str, types.PyTree]
) -> types.PyTree:
  """Returns a state with some of its fields replaced."""
  if dataclasses.is_dataclass(state):
    return dataclasses.replace(state, **fields)
  return {**state, **fields}


def _by_name(state: types.PyTree) -> dict[str, Any]:
  """Returns the fields of a state; {} where they have no names."""
  if dataclasses.is_dataclass(state):
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  return dict(state) if isinstance(state, dict) else {}


# Of the whole checkpoint. Raise it when an older program could not read it.
FORMAT = 1


class NewerFormatError(ValueError):
  """The checkpoint was written by a newer program than this one."""


class Checkpointer:
  """Saves to and restores from `directory/<step>/`.

  The newest few stay, to go on from, and of the older ones those that are asked
  for, to evaluate or export. Steps only grow. One thread uses it. All processes
  of a mesh call each method together; they share the directory.
  """

  def __init__(
      self,
      directory: str,
      *,
      keep: int,
      keep_every_steps: int = 0,
      keep_every_s: int = 0,
      barrier: cluster.SaveBarrier | None = None,
      on_event: Callable[[str, str], None] | None = None,
  ):
    """Opens the directory, makes it if needed, removes torn saves.

    Args:
      directory: local or `gs://` path.
      keep: how many of the newest checkpoints stay, at least 1.
      keep_every_steps: those whose step divides by it stay for good; 0 = none.
      keep_every_s: of those that were saved within so many seconds, the first
        stays for good; 0 = none.
      barrier: where the processes of a mesh meet; None for one alone.
      on_event: called with (kind, message) when a damaged checkpoint is passed
        over; kind is "checkpoint_damaged".

    Raises:
      ValueError: `keep` is below 1.
      OSError: the directory cannot be made or written, with its path.
    """
    if keep < 1:
      raise ValueError(f"checkpoint.keep={keep}: at least 1")
    self._directory = bucket.absolute(directory)
    self._on_event = on_event or (lambda kind, message: None)
    self._keep = keep
    self._kept_for_good = keep_every_steps, keep_every_s
    self._barrier = barrier
    self._pending_step = None
    try:
      self._check_room()
      self._manager = self._open()
    except OSError as error:
      raise OSError(
          f"checkpoint directory {self._directory} cannot be used: {error}"
      ) from error

  def save(
      self,
      step: int,
      state: types.PyTree,
      host_state: dict[str, Any],
      *,
      wait: bool = False,
  ) -> None:
    """Takes a copy of both states and writes them in the background.

    Returns once the copies are in host memory, so the caller may donate `state`
    and change `host_state`; before that it waits for the previous save, if that
    is still being written. With `wait`, returns once it is complete.

    Args:
      step: number of the checkpoint, above `latest_step()`.
      state: pytree of `jax.Array`.
      host_state: nested dicts (keys str or int) and lists of NumPy arrays and
        scalars, int, float, bool, str and None; of process 0, not read in the
        others.

    Raises:
      OSError: this save, or the one before it, could not be written (disk full,
        read-only); the message has the directory, the step and the cause.
      TypeError: `host_state` holds something else.
      ValueError: `step` is not above the latest one.
    """
    self.wait()
    if (latest := self.latest_step()) is not None and step <= latest:
      raise ValueError(
          f"checkpoint step {step} is not above {latest}, the latest in"
          f" {self._directory}"
      )
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        host=HostStateSave(pack_host_state(host_state)),
    )
    self._pending_step = step
    metadata = {"format": FORMAT}
    self._raise_if_failed(self._check_room)
    self._raise_if_failed(
        lambda: self._manager.save(step, args=args, custom_metadata=metadata)
    )
    if wait:
      self.wait()

  def latest_step(self) -> int | None:
    """Returns the newest complete step, or None; one being written counts."""
    return self._manager.latest_step()

  def complete_steps(self) -> list[int]:
    """Returns the steps on disk that are complete, oldest first."""
    pending = (
        self._pending_step if self._manager.is_saving_in_progress() else None
    )
    return sorted(s for s in self._manager.all_steps() if s != pending)

  def newest_steps(self) -> list[int]:
    """Returns those of `complete_steps` that a run may go on from.

    What is kept for good besides is for evaluation and export: the data behind
    it does not stay.
    """
    return self.complete_steps()[-self._keep :]

  def restore(
      self, example_state: types.PyTree, step: int | None = None
  ) -> tuple[types.PyTree, dict[str, Any]]:
    """Returns (state, host_state) of the newest checkpoint that can be read.

    A damaged one is passed over for the one before it, with an event, and moved
    aside (`damaged-<step>`), so that its step can be saved again. That happens
    only after an older one could be read: where none can, nothing is moved.

    Args:
      example_state: pytree of arrays or `jax.ShapeDtypeStruct` with shardings:
        the structure, shapes, dtypes and shardings of the result.
      step: only this one; damage is then an error.

    Raises:
      FileNotFoundError: there is no checkpoint, or not that step.
      NewerFormatError: the newest one has a newer format.
      LackingError: the newest one lacks whole fields of the state. Fields
        without any array, which an earlier program did not know, may lack.
      ValueError: none can be read with this structure; names the reasons.
    """
    self.wait()
    steps = sorted(self._manager.all_steps(), reverse=True)
    if step is not None:
      steps = [s for s in steps if s == step]
    if not steps:
      which = "no checkpoint" if step is None else f"no checkpoint {step}"
      raise FileNotFoundError(f"{which} in {self._directory}")
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        example_state,
    )
    failures = {}
    for candidate in steps:
      try:
        out = self._restore_step(candidate, abstract)
      except (NewerFormatError, LackingError):
        raise
      # Damage shows as whatever the reader of the damaged part raises.
      except Exception as error:
        failures[candidate] = error
        continue
      self._set_aside(failures, candidate)
      return out
    reasons = "; ".join(
        f"step {s}: {type(e).__name__}: {e}" for s, e in failures.items()
    )
    raise ValueError(
        f"no checkpoint in {self._directory} can be read: {reasons}"
    ) from next(iter(failures.values()))

  def wait(self) -> None:
    """Waits until the running save is complete; raises as `save` does."""
    self._raise_if_failed(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits for the running save, then lets go of threads; raises as `save`."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def check(self) -> None:
    """Raises as `save` where one of several processes could not save."""
    if self._barrier is not None and self._barrier.failure is not None:
      self.wait()

  def _open(self) -> ocp.CheckpointManager:
    together = {}
    if self._barrier is not None:
      together["barrier_sync_fn"] = self._barrier
      together["timeout_secs"] = int(self._barrier.deadline_s)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=self._preservation(),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
        # Else what other threads write by Orbax waits for these directories.
        async_options=ocp.AsyncOptions(
            create_directories_asynchronously=False, **together
        ),
    )
    return ocp.CheckpointManager(self._directory, options=options)

  def _preservation(self) -> managers.PreservationPolicy:
    steps, seconds = self._kept_for_good
    policies = [managers.LatestN(self._keep)]
    if steps:
      policies.append(managers.EveryNSteps(steps))
    if seconds:
      policies.append(managers.EveryNSeconds(seconds))
    return managers.AnyPreservationPolicy(policies)

  def _check_room(self) -> None:
    """Makes the directory; of several processes, all learn if that fails.

    In a save process 0 alone makes folders, between collectives that the others
    wait in. So it tries that before, where all can be told.

    Raises:
      OSError: it cannot be made, or no folder in it.
    """
    if self._barrier is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      return
    try:
      if jax.process_index() == 0:
        probe = self._directory / ".probe"
        probe.mkdir(parents=True, exist_ok=True)
        # A bucket has no folders to be made.
        (probe / "file").write_bytes(b".")
        probe.rmtree()
    finally:
      # It tells an error that is on its way up.
      timeout_ms = int(self._barrier.deadline_s * 1000)
      self._barrier(key="making folders", timeout_ms=timeout_ms)

  def _restore_step(
      self, step: int, abstract: types.PyTree
  ) -> tuple[types.PyTree, dict[str, Any]]:
    with _without_hint():
      metadata = self._manager.metadata(step).custom_metadata or {}
    if "format" not in metadata:
      raise ValueError("its metadata holds no format")
    if metadata["format"] > FORMAT:
      raise NewerFormatError(
          f"checkpoint {step} in {self._directory} has format"
          f" {metadata['format']}; this program reads up to {FORMAT}"
      )
    lacking = lacking_fields(self._directory / str(step), abstract)
    wanted = without_fields(abstract, lacking) if lacking else abstract
    args = ocp.args.Composite(
        host=HostStateRestore(), state=ocp.args.StandardRestore(wanted)
    )
    out = self._manager.restore(step, args=args)
    state = out["state"]
    if lacking:
      state = with_defaults(abstract, state)
    return state, out["host"]

  def _set_aside(self, failures: dict[int, Exception], used: int) -> None:
    for step, error in failures.items():
      aside = self._directory / f"damaged-{step}"
      if jax.process_index() == 0:
        if aside.exists():
          aside.rmtree()
        (self._directory / str(step)).rename(aside)
      self._on_event(
          "checkpoint_damaged",
          f"checkpoint {step} in {self._directory} is damaged"
          f" ({type(error).__name__}: {error}); moved to {aside.name}, step"
          f" {used} restored instead",
      )
    if failures:
      self._manager.reload()

  def _raise_if_failed(self, call: Callable[[], Any]) -> None:
    try:
      call()
    # Orbax and TensorStore report a full disk as ValueError, RuntimeError, …
    except Exception as error:
      raise OSError(
          f"checkpoint {self._pending_step} could not be written to"
          f" {self._directory}: {error}"
      ) from error


@contextlib.contextmanager
def _without_hint() -> Iterator[None]:
  """Keeps back that the items need handlers, where metadata alone is read."""
  logger = logging.getLogger("absl")
  is_other = lambda record: "could not be restored" not in record.getMessage()
  logger.addFilter(is_other)
  try:
    yield
  finally:
    logger.removeFilter(is_other)

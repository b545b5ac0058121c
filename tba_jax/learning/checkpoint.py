# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of device and host state, written by Orbax.

A checkpoint is complete or absent: Orbax writes into a temporary directory and
renames it. The device state is any pytree of arrays and may be restored onto
another mesh or number of processes. Process 0 writes the host state (replay
buffer, counts and so on) to an `.npz` with a CRC per member. It includes a
checksum for each leaf of the device state, which Orbax does not verify.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any

from absl import logging
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from tba_jax import types
from tba_jax.learning import host_state as host_state_lib
from tba_jax.mesh import cluster
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes

# Items of a checkpoint; each is a folder.
_STATE, _HOST = "state", "host"
# Smaller leaves are summed on the host, to avoid compiling for each shape.
HOST_SUM_SIZE = 1 << 20


class FormatError(ValueError):
  """The checkpoint was written in another format."""


class Checkpointer:
  """Saves to and restores from `directory/<step>/`; not thread-safe.

  All processes of a mesh share the directory and call each method together.

  Args:
    directory: local or `gs://` path, created if missing. Partial saves are
      removed.
    keep: number of newest checkpoints to keep, at least 1.
    keep_every_steps: period in steps of permanent checkpoints; 0 for none.
    keep_every_s: period in seconds of permanent checkpoints; 0 for none.
    barrier: synchronization point of the mesh's processes; None for a single
      process.
    read_only: whether to remove and rename nothing, because another process may
      be saving.
    on_event: function called with ("checkpoint_damaged", message) when a
      damaged checkpoint is skipped; logs it by default.

  Raises:
    OSError: the directory cannot be created or written.
  """

  def __init__(
      self,
      directory: str,
      *,
      keep: int,
      keep_every_steps: int = 0,
      keep_every_s: int = 0,
      barrier: cluster.SaveBarrier | None = None,
      read_only: bool = False,
      on_event: Callable[[str, str], None] | None = None,
  ):
    self._directory = bucket.absolute(directory)
    self._on_event = on_event or (lambda _, message: logging.warning(message))
    self._keep = keep
    self._kept_for_good = keep_every_steps, keep_every_s
    self._barrier = barrier
    self._pending_step = None
    self._read_only = read_only
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
    """Copies `state` to host memory and writes both in the background.

    First waits for the previous save. On return the caller may donate `state`
    but must not modify the arrays in `host_state`, which are not copied.

    Args:
      step: number of completed steps, above `latest_step()`.
      state: pytree of `jax.Array`.
      host_state: host values, see `host_state.pack`; only process 0 writes its
        own.
      wait: whether to wait until the checkpoint is complete.

    Raises:
      OSError: the checkpoint, or the previous one, could not be written.
      TypeError: `host_state` has an unsupported type.
      ValueError: `step` is not above the latest one.
    """
    self.wait()
    if (latest := self.latest_step()) is not None and step <= latest:
      raise ValueError(
          f"checkpoint step {step} is not above {latest}, the latest in"
          f" {self._directory}"
      )
    packed = host_state_lib.pack(
        {
            "format": host_state_lib.FORMAT,
            "checksums": leaf_checksums(state),
            "host_state": host_state,
        }
    )
    args = ocp.args.Composite(
        **{_STATE: ocp.args.StandardSave(state), _HOST: HostStateSave(packed)}
    )
    self._pending_step = step
    self._raise_if_failed(self._check_room)
    self._raise_if_failed(lambda: self._manager.save(step, args=args))
    if wait:
      self.wait()

  def latest_step(self) -> int | None:
    """Returns the newest step, even if still being written, or None."""
    return self._manager.latest_step()

  def complete_steps(self) -> list[int]:
    """Returns the steps of complete checkpoints, oldest first."""
    pending = (
        self._pending_step if self._manager.is_saving_in_progress() else None
    )
    return sorted(s for s in self._manager.all_steps() if s != pending)

  def newest_steps(self) -> list[int]:
    """Returns the complete steps that a run can be resumed from.

    Older checkpoints, kept for evaluation and export, have lost their journal.
    """
    return self.complete_steps()[-self._keep :]

  def restore(
      self, example_state: types.PyTree, step: int | None = None
  ) -> tuple[types.PyTree, dict[str, Any]]:
    """Returns (state, host_state) of the newest undamaged checkpoint.

    Only process 0 gets a host state; the others get {}. If a newer checkpoint
    is damaged and an older one can be read, the damaged one is reported and
    renamed to `damaged-<step>`.

    Args:
      example_state: pytree of arrays or `jax.ShapeDtypeStruct`s with the
        structure and shardings of the result.
      step: checkpoint to read, which must be undamaged; None for the newest.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of that step.
      FormatError: the newest checkpoint has another format.
      SaveError: a process missed the deadline.
      ValueError: no checkpoint can be read with this structure; lists reasons.
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
        restored = self._restore_step(candidate, abstract)
      except (FormatError, cluster.SaveError):
        raise
      # Orbax and TensorStore raise many types of errors for a damaged file.
      except Exception as error:
        # Frees the damaged state, which the error's frames refer to.
        failures[candidate] = error.with_traceback(None)
        continue
      self._set_aside(failures, candidate)
      return restored
    reasons = "; ".join(
        f"step {s}: {type(e).__name__}: {e}" for s, e in failures.items()
    )
    raise ValueError(
        f"no checkpoint in {self._directory} can be read: {reasons}"
    ) from next(iter(failures.values()))

  def wait(self) -> None:
    """Waits for the running save; raises as `save`."""
    self._raise_if_failed(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits for the running save and closes; raises as `save`."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def check(self) -> None:
    """Raises as `save` if any process of the mesh failed to save."""
    if self._barrier is not None and self._barrier.failure is not None:
      self.wait()

  def _open(self) -> ocp.CheckpointManager:
    together = {}
    if self._barrier is not None:
      together["barrier_sync_fn"] = self._barrier
      together["timeout_secs"] = int(self._barrier.deadline_s)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=self._preservation(),
        cleanup_tmp_directories=not self._read_only,
        enable_async_checkpointing=True,
        # Otherwise Orbax waits for these directories in other threads.
        async_options=ocp.AsyncOptions(
            create_directories_asynchronously=False,
            post_finalization_callback=processes.trim_memory,
            **together,
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
    """Creates the directory; raises OSError in all processes on failure.

    During a save, process 0 creates folders while the others already wait in a
    collective. Here an error can still reach them.
    """
    if self._barrier is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      return
    try:
      if jax.process_index() == 0:
        probe = self._directory / ".probe"
        probe.mkdir(parents=True, exist_ok=True)
        # A bucket has no folders, but may reject a file.
        (probe / "file").write_bytes(b".")
        probe.rmtree()
    finally:
      # Shares an error that is propagating.
      timeout_ms = int(self._barrier.deadline_s * 1000)
      self._barrier(key="making folders", timeout_ms=timeout_ms)

  def _restore_step(
      self, step: int, abstract: types.PyTree
  ) -> tuple[types.PyTree, dict[str, Any]]:
    """Returns (state, host state) of a checkpoint, or raises in all processes.

    The restore of Orbax's manager would wait in a barrier for a failed process.
    """
    folder = self._directory / str(step)
    with self._agreeing(step):
      host = self._read_host(folder)
      state = ocp.StandardCheckpointHandler().restore(
          folder / _STATE, args=ocp.args.StandardRestore(abstract)
      )
    checksums = leaf_checksums(state)
    with self._agreeing(step):
      saved = host.get("checksums", checksums)
      damaged = sorted(k for k in checksums if checksums[k] != saved.get(k))
      if damaged:
        raise ValueError(
            f"{len(damaged)} of {len(checksums)} leaves fail their checksum:"
            f" {', '.join(damaged[:3])}"
        )
    return state, host.get("host_state", {})

  def _read_host(self, folder: epath.Path) -> dict[str, Any]:
    """Returns the content of the host file; {} except in process 0."""
    if self._barrier is not None and jax.process_index() != 0:
      return {}
    host = HostStateHandler().restore(folder / _HOST)
    if host.get("format") != host_state_lib.FORMAT:
      raise FormatError(
          f"checkpoint {folder.name} in {self._directory} has format"
          f" {host.get('format')}; this program reads {host_state_lib.FORMAT}"
      )
    return host

  @contextlib.contextmanager
  def _agreeing(self, step: int) -> Iterator[None]:
    """Raises on exit if the body raised in any process."""
    error = None
    try:
      yield
    # Orbax and TensorStore raise many types of errors for a damaged file.
    except Exception as raised:
      error = raised
    text = "" if error is None else f"{type(error).__name__}: {error}"
    texts = [text]
    if self._barrier is not None:
      texts = self._barrier.share(text, f"reading checkpoint {step}")
    if error is not None:
      raise error
    for process, other in enumerate(texts):
      if other:
        is_format = other.startswith(FormatError.__name__)
        raise (FormatError if is_format else ValueError)(
            f"process {process} of the trainer: {other}"
        )

  def _set_aside(self, failures: dict[int, Exception], used: int) -> None:
    for step, error in failures.items():
      if self._read_only:
        logging.warning(
            "checkpoint %d is damaged, step %d is read: %s", step, used, error
        )
        continue
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
      if self._barrier is not None:
        # The other processes list the folder after this change.
        timeout_ms = int(self._barrier.deadline_s * 1000)
        self._barrier(key="setting checkpoints aside", timeout_ms=timeout_ms)
      self._manager.reload()

  def _raise_if_failed(self, call: Callable[[], Any]) -> None:
    try:
      call()
    # Orbax and TensorStore raise many types of errors when a disk is full.
    except Exception as error:
      raise OSError(
          f"checkpoint {self._pending_step} could not be written to"
          f" {self._directory}: {error}"
      ) from error


def leaf_checksums(tree: types.PyTree) -> dict[str, int]:
  """Returns a 32-bit checksum of each leaf, by its path.

      checksum = Σᵢ mix(bitsᵢ, i) mod 2³²,  i the index in row-major order

  `mix` is a bijection of the bits, so a single changed element is always
  detected. The sum does not depend on the sharding, so no leaf is gathered. All
  processes of a mesh must call it together.
  """
  sums = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if leaf.is_fully_replicated and leaf.size < HOST_SUM_SIZE:
      # A copy, because the leaf may be donated next.
      checksum = _checksum(np.array(leaf.addressable_data(0)), np)
    else:
      # One at a time: if all-reduces of several programs are in flight, their
      # order may differ between processes, which then hang.
      checksum = _device_checksum(leaf)
    sums[jax.tree_util.keystr(path)] = int(checksum)
  return sums


def _checksum(array: Any, xp: Any) -> Any:
  """Returns the uint32 checksum of an array; `xp` is NumPy or `jax.numpy`."""
  if array.dtype == bool:
    array = array.astype(np.uint8)
  unsigned = xp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}")
  if xp is np:
    bits = np.ascontiguousarray(array).reshape(-1).view(unsigned)
  else:
    bits = jax.lax.bitcast_convert_type(array, unsigned)
  bits = bits.astype(np.uint32)
  index = xp.zeros(bits.shape, np.uint32)
  for axis, size in enumerate(bits.shape):
    # Per axis, which keeps a sharded array sharded.
    shape = [size if i == axis else 1 for i in range(bits.ndim)]
    counts = xp.arange(size, dtype=np.uint32).reshape(shape)
    index = index * np.uint32(size % (1 << 32)) + counts
  mixed = (bits ^ index * np.uint32(0x9E3779B1)) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE35)
  return xp.sum(mixed, dtype=np.uint32)


_device_checksum = jax.jit(lambda array: _checksum(array, jnp))


class HostStateHandler(ocp.AsyncCheckpointHandler):
  """Writes the host state (in process 0) and reads it."""

  async def async_save(
      self, directory: epath.Path, args: "HostStateSave"
  ) -> list[ocp.future.Future]:
    if jax.process_index() != 0:
      return []
    return [
        ocp.future.CommitFutureAwaitingContractedSignals(
            self._write(directory, args), name="host_state_save"
        )
    ]

  def save(self, directory: epath.Path, args: "HostStateSave") -> None:
    with _path(directory).open("wb") as file:
      host_state_lib.write(file, args.packed)
      jsonl.sync_file(file)
    jsonl.sync_directory(directory)

  def restore(self, directory: epath.Path) -> Any:
    with _path(directory).open("rb") as file:
      return host_state_lib.read(file)

  async def _write(self, directory: epath.Path, args: "HostStateSave") -> None:
    self.save(directory, args)


@ocp.args.register_with_handler(
    HostStateHandler, for_save=True, for_restore=True
)
@dataclasses.dataclass
class HostStateSave(ocp.args.CheckpointArgs):
  """Orbax arguments to save a packed host state, and to restore one."""

  packed: host_state_lib.PackedHostState


def _path(directory: epath.Path) -> epath.Path:
  return directory / host_state_lib.NAME

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The host state as an item of an Orbax checkpoint: one file of process 0."""

import dataclasses
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from tba_jax import host_state as host_state_lib


class Handler(ocp.AsyncCheckpointHandler):
  """Writes the host state of process 0, and reads it in all of them."""

  async def async_save(
      self, directory: epath.Path, args: "Save"
  ) -> list[ocp.future.Future]:
    if jax.process_index() != 0:
      return []
    return [
        ocp.future.CommitFutureAwaitingContractedSignals(
            self._write(directory, args.packed), name="host_state_save"
        )
    ]

  def save(self, directory: epath.Path, args: "Save") -> None:
    with _path(directory).open("wb") as file:
      host_state_lib.write(file, args.packed)

  def restore(self, directory: epath.Path, args: "Restore") -> Any:
    # Also where it is not needed: then all processes see the same damage, and
    # pass over the same checkpoint.
    del args  # There is nothing to choose.
    with _path(directory).open("rb") as file:
      return host_state_lib.read(file)

  async def _write(
      self, directory: epath.Path, packed: host_state_lib.Packed
  ) -> None:
    self.save(directory, Save(packed))


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
  """What to save: a packed host state."""

  packed: host_state_lib.Packed


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
  """Restores the whole host state."""


def _path(directory: epath.Path) -> epath.Path:
  return directory / "process-00000.npz"

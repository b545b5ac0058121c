# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fields of a train state that an earlier program's checkpoint lacks."""

import dataclasses
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from tba_jax import types


class LackingError(ValueError):
  """The checkpoint has no place for arrays that this run's state has."""


def lacking(folder: epath.Path, state: types.PyTree) -> set[str]:
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


def without(state: types.PyTree, names: set[str]) -> dict[str, types.PyTree]:
  """Returns the fields of a state but those named."""
  return {n: field for n, field in _by_name(state).items() if n not in names}


def replaced(
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

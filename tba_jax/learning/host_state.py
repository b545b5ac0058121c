# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The host state of a checkpoint: JSON, and arrays as members of an `.npz`."""

import dataclasses
import json
from typing import Any, BinaryIO

import numpy as np

# Format of the whole checkpoint; an incompatible change increases it.
FORMAT = 6
# File name, in the folder `host` of a checkpoint.
NAME = "process-00000.npz"

# A JSON object with this key stands for an array of the file.
_ARRAY = "__array__"
_STRUCTURE = "structure"


@dataclasses.dataclass(frozen=True)
class PackedHostState:
  """A host state: JSON that names arrays, and the arrays by name."""

  structure: str
  arrays: dict[str, np.ndarray]


def pack(host_state: Any) -> PackedHostState:
  """Returns a host state as it is written, with the arrays themselves.

  Args:
    host_state: JSON values (ints of any size, keys str), and NumPy arrays and
      scalars.

  Raises:
    TypeError: a value has another type.
  """
  arrays = {}

  def encode(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic) or (
        array.dtype.kind not in "biufcSU"
    ):
      raise TypeError(f"host state: cannot store {type(value)} {value!r:.80}")
    name = f"a{len(arrays)}"
    arrays[name] = array
    return {_ARRAY: name, "scalar": isinstance(value, np.generic)}

  return PackedHostState(json.dumps(host_state, default=encode), arrays)


def write(file: BinaryIO, packed: PackedHostState) -> None:
  """Writes a host state as `.npz`."""
  structure = np.frombuffer(packed.structure.encode(), np.uint8)
  np.savez(file, **{_STRUCTURE: structure}, **packed.arrays)


def read(file: BinaryIO) -> Any:
  """Returns a host state; raises ValueError if the file is damaged."""

  def decode(value: dict[str, Any]) -> Any:
    if _ARRAY not in value:
      return value
    array = arrays[value[_ARRAY]]
    return array[()] if value["scalar"] else array

  try:
    with np.load(file, allow_pickle=False) as members:
      arrays = {name: members[name] for name in members.files}
    structure = arrays.pop(_STRUCTURE).tobytes().decode()
    return json.loads(structure, object_hook=decode)
  # NumPy, zipfile and tokenize raise many types of errors for damaged bytes.
  except Exception as error:
    raise ValueError(f"host state is damaged: {error!r}") from error

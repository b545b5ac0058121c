# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Host state of a checkpoint: an `.npz` of arrays and the JSON around them."""

import dataclasses
import json
from typing import Any, BinaryIO

import numpy as np

# Version of the checkpoint format; incremented by incompatible changes.
FORMAT = 6
# File name in the `host` folder of a checkpoint.
NAME = "process-00000.npz"

# A JSON object with this key stands for an array in the file.
_ARRAY = "__array__"
_STRUCTURE = "structure"


@dataclasses.dataclass(frozen=True)
class PackedHostState:
  """A host state: JSON that refers to arrays, and the arrays by name."""

  structure: str
  arrays: dict[str, np.ndarray]


def pack(host_state: Any) -> PackedHostState:
  """Packs a host state for writing; arrays are not copied.

  Args:
    host_state: JSON values (ints of any size, str keys), NumPy arrays and NumPy
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
  """Reads a host state; raises ValueError if the file is damaged."""

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

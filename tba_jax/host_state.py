# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Host state to one file and back, bit for bit, without pickle.

The file is an uncompressed `.npz`: the arrays, and one more member with the
structure as JSON. Its members carry checksums, so damage is seen when read.
"""

import dataclasses
import json
from typing import Any, BinaryIO
import zipfile

import numpy as np

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


def pack(host_state: Any) -> Packed:
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


def write(file: BinaryIO, packed: Packed) -> None:
  """Writes one `.npz`; raises OSError as the file does."""
  structure = np.frombuffer(packed.structure.encode(), np.uint8)
  np.savez(file, **{_STRUCTURE: structure}, **packed.arrays)


def read(file: BinaryIO) -> Any:
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GGUF file under Hugging Face's names, in slices.

The package `gguf` dequantizes blocks as they are read. Does not import JAX.
"""

import json
import pathlib

import numpy as np

# Files of a folder made by `gguf_folder.py`.
WEIGHTS = "model.gguf"
INDEX = "model.gguf.index.json"


class GgufFiles:
  """The tensors of a folder with a GGUF file; see `hf_files.WeightFiles`.

  For each tensor, the index has its offset in bytes, the bytes of a row, ggml's
  name of the quantization, the shape, the number of heads whose rows are
  interleaved, 0 for none, and a number to add to the values.

  shapes: Hugging Face's tensor name -> dimensions.
  dtypes: "F32" of each.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder / WEIGHTS
    self._index = json.loads((folder / INDEX).read_text("utf-8"))
    self.shapes = {
        name: tuple(row["shape"]) for name, row in self._index.items()
    }
    self.dtypes = dict.fromkeys(self._index, "F32")

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor, dequantized to float32."""
    # Takes a moment to import.
    import gguf  # pylint: disable=g-import-not-at-top

    row = self._index[name]
    # A vector is a matrix of one row.
    *outer, last = index
    count = row["shape"][0] if outer else 1
    rows = np.arange(count)[outer[0] if outer else slice(None)]
    rows = _source_rows(rows, count, row["heads"])
    if not rows.size:
      return np.empty((0, *row["shape"][1:]), np.float32)[:, last]
    first, stop = int(rows.min()), int(rows.max()) + 1
    size = row["row_bytes"]
    data = np.fromfile(
        self._path,
        np.uint8,
        count=(stop - first) * size,
        offset=row["offset"] + first * size,
    )
    data = data.reshape(stop - first, size)[rows - first]
    kind = gguf.GGMLQuantizationType[row["type"]]
    values = gguf.dequantize(data, kind)[:, last]
    if row["shift"]:
      values = values + np.float32(row["shift"])
    return values if outer else values[0]

  def damaged(self, part: int = 0, num_parts: int = 1) -> list[str]:
    """Returns nothing: a GGUF file has no digests of its tensors."""
    del part, num_parts
    return []


def _source_rows(rows: np.ndarray, count: int, heads: int) -> np.ndarray:
  """Returns the file's row index of each row of a tensor.

  llama.cpp rotates adjacent entries, Hugging Face entries half a head apart:
  Llama files store the rows of query and key heads in the order 0, half, 1,
  half + 1, …
  """
  if not heads:
    return rows
  size = count // heads
  head, entry = np.divmod(rows, size)
  part, place = np.divmod(entry, size // 2)
  return head * size + 2 * place + part

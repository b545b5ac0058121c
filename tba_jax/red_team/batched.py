# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of any number and length through a function of one shape."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def run(
    fn: Callable[[np.ndarray, np.ndarray], Any],
    ids: Sequence[Sequence[int]],
    *,
    num_rows: int,
    num_tokens: int,
    pad_id: int,
    left: bool,
) -> np.ndarray:
  """Returns `fn` of all texts, called on batches of one shape.

  Args:
    fn: (tokens [B, L] int32, mask [B, L] int32) -> [B, ...].
    ids: of each text, at most L.
    num_rows: B; the last batch is filled up.
    num_tokens: L.
    pad_id: fills a row.
    left: whether the padding stands before the text.

  Returns:
    [n, ...]; of no text [0].
  """
  out = []
  for start in range(0, len(ids), num_rows):
    some = ids[start : start + num_rows]
    tokens = np.full((num_rows, num_tokens), pad_id, np.int32)
    mask = np.zeros((num_rows, num_tokens), np.int32)
    for row, text in enumerate(some):
      where = slice(num_tokens - len(text), None) if left else slice(len(text))
      tokens[row, where], mask[row, where] = text, 1
    out.append(np.asarray(fn(tokens, mask))[: len(some)])
  return np.concatenate(out) if out else np.zeros(0, np.float32)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fewer rows where few completions are left, so that steps cost less.

Axes: R rows.
"""

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
  from tba_jax.sampling import rows as rows_lib

# Rows come in multiples of this: the CPU backend's products work on so many at
# once, so a row has the same bits in a program of fewer rows.
_MULTIPLE = 16
# Each count is some programs more, so they are few.
_MOST_COUNTS = 3


def row_counts(place: jax.sharding.Sharding, num_rows: int) -> tuple[int, ...]:
  """Returns R and what rows in flight may be cut down to: R / 2, R / 4.

  R alone on other than one CPU: there a step reads the weights for as long as
  it works on a row, and products of fewer rows may have other bits.
  """
  counts = [num_rows]
  *others, device = place.device_set
  if device.platform == "cpu" and not others:
    while len(counts) < _MOST_COUNTS and counts[-1] % (2 * _MULTIPLE) == 0:
      counts.append(counts[-1] // 2)
  return tuple(counts)


def take(
    state: "rows_lib.DecodeState", rows: jax.Array
) -> "rows_lib.DecodeState":
  """Returns a state of the rows at `rows`, [fewer than R] int32."""
  return jax.tree.map(lambda leaf: leaf[rows], state)

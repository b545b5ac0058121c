# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lengths of completions with a long tail.

They are lognormal, cut off at the longest: a few are ten times as long as most.
"""

import numpy as np

# (mean, longest) in tokens: chat, mathematics, and two of models that reason.
LENGTHS = ((300, 1024), (500, 2048), (2500, 16384), (8000, 32768))
# Standard deviation of the logarithm of a length.
_SPREAD = 1.0


def lognormal_lengths(
    mean: int, longest: int, shape: tuple[int, ...], seed: int
) -> np.ndarray:
  """Returns lengths of completions in tokens, int64 of a shape.

  They are exp(m + s z) with s = 1, rounded, and at most `longest`, as
  completions that are cut off. m is such that the mean of many is `mean`.

  Args:
    mean: mean length, below `longest`.
    longest: most tokens of a completion.
    shape: shape of the result.
    seed: seed of the draw.
  """

  def lengths(m: float, z: np.ndarray) -> np.ndarray:
    return np.clip(np.exp(m + _SPREAD * z), 1, longest)

  # The mean after the cut has no closed form; it grows with m.
  many = np.random.default_rng(0).standard_normal(2**16)
  low, high = 0.0, np.log(longest) + 3 * _SPREAD
  for _ in range(40):
    middle = (low + high) / 2
    is_low = lengths(middle, many).mean() < mean
    low, high = (middle, high) if is_low else (low, middle)
  z = np.random.default_rng(seed).standard_normal(shape)
  return np.rint(lengths(low, z)).astype(np.int64)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of means over prompts, by resampling the prompts."""

import numpy as np

# Resamples are drawn in parts of so many values, to bound the memory.
_PART = 4_000_000


def mean_interval(
    values_B: np.ndarray,
    *,
    num_resamples: int,
    confidence: float,
    seed: int = 0,
) -> tuple[float, float]:
  """Returns the percentile bootstrap interval of a mean.

      [q_{(1-c)/2}, q_{(1+c)/2}] of the means of resamples with replacement

  Source: Efron 1979 (Annals of Statistics 7:1), percentile method. Prompts are
  resampled, not completions: those of a prompt are not independent.

  Args:
    values_B: [B] one value a prompt, B at least 1.
    num_resamples: at least 1.
    confidence: c, above 0 and below 1.
    seed: of the resamples; the same values give the same interval.

  Raises:
    ValueError: there is no value, or a number is out of range.
  """
  values_B = np.asarray(values_B, np.float64)
  if values_B.ndim != 1 or not len(values_B):
    raise ValueError("a bootstrap interval: allowed one value or more")
  if num_resamples < 1 or not 0 < confidence < 1:
    raise ValueError(
        f"a bootstrap interval of {num_resamples} resamples and confidence"
        f" {confidence}: allowed 1 or more, and between 0 and 1"
    )
  rng = np.random.default_rng(seed)
  size = len(values_B)
  means = []
  left = num_resamples
  while left:
    some = min(left, max(_PART // size, 1))
    means.append(values_B[rng.integers(size, size=(some, size))].mean(axis=1))
    left -= some
  tail = (1 - confidence) / 2
  low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
  return float(low), float(high)

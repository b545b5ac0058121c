# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How good a reward model is on pairs whose better completion is known."""

from typing import Any

import numpy as np

from tba_jax import bootstrap


def summarize(
    margins_N: np.ndarray,
    *,
    num_bins: int,
    resamples: int,
    confidence: float,
) -> dict[str, Any]:
  """Returns accuracy, log-loss and calibration of Bradley-Terry margins.

  The model says that the completion of the higher reward is the better one,
  with probability p = sigmoid(|margin|), from .5 to 1. Bins of equal width hold
  the pairs by p; with n_b pairs of which a share a_b was right,

      calibration_error = Σ_b n_b/N |a_b - mean p_b|

  Source: Guo et al. 2017 (arXiv:1706.04599), expected calibration error.

  Args:
    margins_N: [N] float, reward of the better minus that of the other one, N at
      least 1. A margin of 0 is half right.
    num_bins: at least 1.
    resamples, confidence: of the bootstrap interval of the accuracy.

  Returns:
    accuracy, accuracy_interval, loss (nats a pair), margin (mean),
    calibration_error, num_pairs, and `bins`: a record with `num_pairs`,
    `predicted` and `right` for each bin that is not empty.

  Raises:
    ValueError: there is no pair, or a margin is not finite.
  """
  margins_N = np.asarray(margins_N, np.float64)
  if not len(margins_N) or not np.isfinite(margins_N).all():
    raise ValueError(
        "margins of pairs: allowed one or more, all of them finite"
    )
  right_N = (np.sign(margins_N) + 1) / 2
  predicted_N = 1 / (1 + np.exp(-np.abs(margins_N)))
  bin_N = np.minimum(((predicted_N - 0.5) * 2 * num_bins).astype(int),
                     num_bins - 1)  # fmt: skip
  bins = []
  for b in np.unique(bin_N):
    own = bin_N == b
    bins.append(
        {
            "num_pairs": int(own.sum()),
            "predicted": float(predicted_N[own].mean()),
            "right": float(right_N[own].mean()),
        }
    )
  gaps = [b["num_pairs"] * abs(b["right"] - b["predicted"]) for b in bins]
  return {
      "accuracy": float(right_N.mean()),
      "accuracy_interval": bootstrap.mean_interval(
          right_N, num_resamples=resamples, confidence=confidence
      ),
      "loss": float(np.logaddexp(0, -margins_N).mean()),
      "margin": float(margins_N.mean()),
      "calibration_error": float(sum(gaps) / len(margins_N)),
      "num_pairs": len(margins_N),
      "bins": bins,
  }

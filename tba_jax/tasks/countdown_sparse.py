# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown with few solutions: reward is rare, so search must find it.

As `countdown`, but only pairs of numbers and target with at most
`max_solutions` distinct solutions are kept. Steps drawn at random are right
once in 200 completions (in 24 with three numbers and one solution), so most
groups have no reward at all, and what is found once must be drawn from replay
again.
"""

from typing import ClassVar

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import countdown


class CountdownSparse(countdown.Countdown):
  """Reach a target that has few solutions.

  numbers, max_number, max_target, held_out_fraction, split_seed: as of
    `Countdown`.
  max_solutions: distinct solutions that a pair may have to be kept.
  """

  name: ClassVar[str] = "countdown_sparse"
  FIELDS: ClassVar = {
      "numbers": 4,
      "max_number": 12,
      "max_target": 99,
      "max_solutions": 2,
      "held_out_fraction": 0.15,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      numbers: int,
      max_number: int,
      max_target: int,
      max_solutions: int,
      held_out_fraction: float,
      split_seed: int,
  ):
    """Enumerates the pairs.

    Raises:
      ValueError: a field is out of range, or leaves a split without prompts.
    """
    base.check_integer("max_solutions", max_solutions, 1, 10_000)
    super().__init__(
        numbers=numbers,
        max_number=max_number,
        max_target=max_target,
        min_solutions=max_solutions,
        held_out_fraction=held_out_fraction,
        split_seed=split_seed,
    )

  def _is_kept(self, num_solutions: np.ndarray, limit: int) -> np.ndarray:
    return num_solutions <= limit

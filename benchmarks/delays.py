# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task and a loss with delays, for `cost_ratios.py`.

Configs name them like custom ones:
`task.name="benchmarks.delays:SlowCountdown"` and
`loss.name="benchmarks/delays.py:slow_tb"`.
"""

import time
from typing import Any, ClassVar

import jax
import ml_collections
import numpy as np

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import tb
from tba_jax.tasks import base
from tba_jax.tasks import countdown

TRAIN_S = 0.35


class SlowCountdown(countdown.Countdown):
  """Countdown with slow rewards, except in evaluations.

  reward_s: seconds per reward.
  """

  name: ClassVar[str] = "slow_countdown"
  FIELDS: ClassVar = {**countdown.Countdown.FIELDS, "reward_s": 0.0}

  def __init__(self, *, reward_s: float, **fields: Any):
    super().__init__(**fields)
    self._reward_s = reward_s

  def reward(self, split: str, index: int, completion: str) -> float:
    if split == base.TRAIN:
      time.sleep(self._reward_s)
    return super().reward(split, index, completion)


def slow_tb(
    groups: groups_lib.Groups, c: ml_collections.ConfigDict, beta: jax.Array
) -> groups_lib.Loss:
  """Returns the TB loss after `TRAIN_S` seconds."""
  loss, aux = tb.tb_loss(groups, c, beta)
  return loss + jax.pure_callback(_wait, np.float32(0)), aux


def _wait() -> np.float32:
  time.sleep(TRAIN_S)
  return np.float32(0)

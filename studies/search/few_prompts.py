# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sparse countdown on few prompts, for `search.py` and `free_search.py`.

Loaded like a custom task. All splits have the same prompts, since the goal is
to solve these, as red-teaming attacks one victim.
"""

import time
from typing import Any, ClassVar

from tba_jax.tasks import base
from tba_jax.tasks import countdown


class FewPrompts(countdown.CountdownSparse):
  """Sparse countdown with the first training prompts in all splits.

  num_prompts: number of training prompts; 0 = all prompts and disjoint splits.
  reward_s: seconds per reward, except in evaluations.
  """

  name: ClassVar[str] = "few_prompts"
  FIELDS: ClassVar = {
      **countdown.CountdownSparse.FIELDS,
      "num_prompts": 0,
      "reward_s": 0.0,
  }

  def __init__(self, *, num_prompts: int, reward_s: float, **fields: Any):
    super().__init__(**fields)
    self._reward_s = reward_s
    if num_prompts:
      for of_split in (self._pairs, self._numbers):
        first = of_split[base.TRAIN][:num_prompts]
        of_split.update(dict.fromkeys(base.SPLITS, first))

  def reward(self, split: str, index: int, completion: str) -> float:
    if split == base.TRAIN and self._reward_s:
      time.sleep(self._reward_s)
    return super().reward(split, index, completion)

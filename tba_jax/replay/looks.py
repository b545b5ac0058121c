# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long the drain's looks at the queue take, and what they find."""

import dataclasses


@dataclasses.dataclass
class Looks:
  """Sums since the drain began.

  empty: looks that found no block.
  empty_s: seconds that they took.
  served: looks that found blocks.
  served_s: seconds that they took, answers to the searchers included.
  blocks: that were found.
  """

  empty: int = 0
  empty_s: float = 0.0
  served: int = 0
  served_s: float = 0.0
  blocks: int = 0

  def add(self, seconds: float, blocks: int) -> None:
    """Counts one look."""
    if blocks:
      self.served += 1
      self.served_s += seconds
      self.blocks += blocks
    else:
      self.empty += 1
      self.empty_s += seconds

  @property
  def busy_s(self) -> float:
    return self.empty_s + self.served_s

  def since(self, before: "Looks") -> "Looks":
    """Returns what came after an earlier copy of these sums."""
    mine, its = dataclasses.astuple(self), dataclasses.astuple(before)
    return Looks(*(a - b for a, b in zip(mine, its, strict=True)))

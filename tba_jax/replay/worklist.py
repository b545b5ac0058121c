# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a searcher has been granted and has not begun."""

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Block:
  """Positions of the prompt order to sample in one round.

  epoch: of the trainer that granted it.
  block: number of the grant.
  require_version: the version to sample with; -1 = the newest.
  prompts: (position, prompt_id, visit) of each prompt.
  """

  epoch: int
  block: int
  require_version: int
  prompts: tuple[tuple[int, int, int], ...]


class WorkList:
  """Blocks in the order of their grants. Not thread-safe: its owner locks.

  blocks: granted and not begun.
  epoch: of the newest trainer that was heard of, -1 before the first.
  """

  def __init__(self):
    self.blocks: list[Block] = []
    self._tag = (-1, -1)
    # The last block that was taken from the present trainer.
    self._last_block = -1

  @property
  def epoch(self) -> int:
    return self._tag[0]

  def hear(self, message: Mapping[str, Any]) -> bool:
    """Takes the trainer's list of what this searcher holds.

    Returns:
      False where it is no news: it was heard before, or is a replaced
      trainer's, whose epoch is older.
    """
    epoch, tag = message["epoch"], (message["epoch"], message["count"])
    if tag <= self._tag:
      return False
    if epoch > self.epoch:
      self._last_block = -1
    self._tag = tag
    # What is not listed any more was taken back, or granted by a trainer that
    # is gone.
    listed = {(epoch, block) for block, _, _ in message["blocks"]}
    self.blocks = [b for b in self.blocks if (b.epoch, b.block) in listed]
    for block, version, prompts in message["blocks"]:
      if block > self._last_block:
        self._last_block = block
        prompts = tuple(tuple(p) for p in prompts)
        self.blocks.append(Block(epoch, block, version, prompts))
    return True

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which searcher samples which prompts: blocks granted up to an admission."""

from collections.abc import Callable, Collection
import heapq
from typing import Any

from tba_jax.replay import prompt_order

# Blocks that a searcher may hold without having delivered them.
BLOCKS_AHEAD = 2


class Grants:
  """Cuts the prompt order into blocks. Not thread-safe: its owner locks."""

  def __init__(
      self,
      order: prompt_order.PromptOrder,
      *,
      prompts_per_round: int,
      version_of: Callable[[int], int],
  ):
    """Grants nothing before the first `admit`.

    Args:
      order: of prompts.
      prompts_per_round: prompts of a full block.
      version_of: position -> version that must sample it, -1 = the newest.
    """
    self._order = order
    self._prompts_per_round = prompts_per_round
    self._version_of = version_of
    self._limit = 0
    self._blocks: dict[str, list[tuple[int, int, list[int]]]] = {}
    self._num_blocks = 0
    self._changed: set[str] = set()

  def admit(self, limit: int) -> bool:
    """Lets positions below `limit` be granted; False where they could be."""
    if limit <= self._limit:
      return False
    self._limit = limit
    return True

  def deliver(self, sid: str, positions: Collection[int]) -> None:
    """Takes delivered positions out of what a searcher holds."""
    self._order.deliver(sid, positions)
    held = self._blocks.get(sid)
    if held:
      delivered = set(positions)
      self._blocks[sid] = [b for b in held if not delivered & set(b[2])]

  def forget(self, sid: str) -> None:
    """Takes back all that a searcher holds; it will be granted again."""
    self._blocks.pop(sid, None)
    self._changed.discard(sid)
    self._order.release(sid)

  def announce_again(self) -> None:
    """Makes the next `assign` return the blocks of every searcher."""
    self._changed.update(self._blocks)

  def assign(
      self, alive: Collection[str], asked: Collection[str] = ()
  ) -> dict[str, list[Any]]:
    """Grants what is admitted, each block to who holds least.

    Args:
      alive: the searchers that may be granted something.
      asked: those whose blocks are returned in any case.

    Returns:
      sid -> all blocks that it holds, of those whose blocks changed. A block is
      [number, version, [(position, prompt_id, visit), …]].
    """
    # By blocks held, then by name. There may be thousands, and mostly nothing
    # to grant.
    held = []
    if self._order.available(self._limit):
      held = [(len(self._blocks.get(sid, ())), sid) for sid in alive]
      heapq.heapify(held)
    while held and held[0][0] < BLOCKS_AHEAD:
      count, sid = held[0]
      block = self._next_block(sid)
      if block is None:
        break
      self._blocks.setdefault(sid, []).append(block)
      self._changed.add(sid)
      heapq.heapreplace(held, (count + 1, sid))
    changed = {sid for sid in self._changed if sid in alive} | set(asked)
    self._changed -= changed
    return {
        sid: [
            [number, version, [(p, *self._order.prompt(p)) for p in positions]]
            for number, version, positions in self._blocks.get(sid, ())
        ]
        for sid in changed
    }

  def _next_block(self, sid: str) -> tuple[int, int, list[int]] | None:
    available = self._order.available(self._limit)
    size = self._prompts_per_round
    # A part of a block is granted only when nothing else is under way.
    if not available or (available < size and any(self._blocks.values())):
      return None
    positions = self._order.grant(sid, size, self._limit)
    self._num_blocks += 1
    return self._num_blocks, self._version_of(positions[0]), positions

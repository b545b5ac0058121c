# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which searcher samples which prompts: blocks granted up to an admission."""

from collections.abc import Callable, Collection, Sequence
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

  def admit(self, limit: int) -> None:
    """Lets positions below `limit` be granted."""
    self._limit = max(self._limit, limit)

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
    self._order.release(sid)

  def announce_again(self) -> None:
    """Makes the next `assign` return the blocks of every searcher."""
    self._changed.update(self._blocks)

  def assign(self, alive: Sequence[str]) -> dict[str, list[Any]]:
    """Grants what is admitted, each block to who holds least.

    Args:
      alive: the searchers that may be granted something.

    Returns:
      sid -> all blocks that it holds, of those whose blocks changed. A block is
      [number, version, [(position, prompt_id, visit), …]].
    """
    held = {sid: self._blocks.setdefault(sid, []) for sid in sorted(alive)}
    while held:
      sid = min(held, key=lambda s: len(held[s]))
      if len(held[sid]) >= BLOCKS_AHEAD:
        break
      block = self._next_block(sid)
      if block is None:
        break
      held[sid].append(block)
      self._changed.add(sid)
    changed = self._changed & set(alive)
    self._changed.clear()
    return {
        sid: [
            [number, version, [(p, *self._order.prompt(p)) for p in positions]]
            for number, version, positions in self._blocks[sid]
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

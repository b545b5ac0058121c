# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scheduling of searchers: admission of prompts, and grants of blocks."""

from collections.abc import Callable, Collection
import dataclasses
import heapq
import math
import sys
from typing import Any

import ml_collections

from tba_jax.replay import prompt_order

# Undelivered blocks that a searcher may hold.
BLOCKS_AHEAD = 2


class Grants:
  """Grants blocks of the prompt order to searchers. Not thread-safe."""

  def __init__(
      self,
      order: prompt_order.PromptOrder,
      *,
      prompts_per_round: int,
      version_of: Callable[[int], int],
  ):
    """Makes a scheduler that has admitted nothing.

    Args:
      order: order of prompts.
      prompts_per_round: prompts of a full block.
      version_of: position -> version that must sample it, -1 for the newest.
    """
    self._order = order
    self._prompts_per_round = prompts_per_round
    self._version_of = version_of
    self._limit = 0
    self._blocks: dict[str, list[tuple[int, int, list[int]]]] = {}
    self._num_blocks = 0
    self._changed: set[str] = set()

  def admit(self, limit: int) -> bool:
    """Admits positions below `limit`; returns False if they already were."""
    if limit <= self._limit:
      return False
    self._limit = limit
    return True

  def deliver(self, sid: str, positions: Collection[int]) -> None:
    """Removes a searcher's blocks with these positions."""
    self._order.deliver(positions)
    for block in list(self._blocks.get(sid, ())):
      if not set(block[2]).isdisjoint(positions):
        self._take_back(sid, block)

  def forget(self, sid: str) -> None:
    """Takes back all blocks of a searcher, to be granted again."""
    for block in list(self._blocks.get(sid, ())):
      self._take_back(sid, block)
    self._blocks.pop(sid, None)
    self._changed.discard(sid)

  def holds(self, sid: str) -> bool:
    """Returns whether a searcher has blocks that it has not delivered."""
    return bool(self._blocks.get(sid))

  def _take_back(self, sid: str, block: tuple[int, int, list[int]]) -> None:
    """Removes a block; its undelivered positions will be granted again."""
    self._blocks[sid].remove(block)
    self._order.release(p for p in block[2] if not self._order.is_taken(p))

  def announce_again(self) -> None:
    """Makes the next `assign` return the blocks of every searcher."""
    self._changed.update(self._blocks)

  def assign(
      self, alive: Collection[str], asked: Collection[str] = ()
  ) -> dict[str, list[Any]]:
    """Grants admitted positions, each block to the searcher with the fewest.

    Args:
      alive: searchers that may be granted blocks.
      asked: searchers whose blocks are returned even if unchanged.

    Returns:
      sid -> all its blocks, for searchers whose blocks changed, as in the
      message "work".
    """
    # Searchers by blocks held, then by name. The list is not built when nothing
    # is available: there may be thousands of them.
    held = []
    if self._order.available(self._limit):
      held = [(len(self._blocks.get(sid, ())), sid) for sid in alive]
      heapq.heapify(held)
    while held and held[0][0] < BLOCKS_AHEAD:
      count, sid = held[0]
      block = self._next_block()
      if block is None:
        break
      self._blocks.setdefault(sid, []).append(block)
      self._changed.add(sid)
      heapq.heapreplace(held, (count + 1, sid))
    changed = {sid for sid in self._changed if sid in alive} | set(asked)
    self._changed -= changed
    return {
        sid: [
            {
                "number": number,
                "version": version,
                "prompts": [(p, *self._order.prompt(p)) for p in positions],
            }
            for number, version, positions in self._blocks.get(sid, ())
        ]
        for sid in changed
    }

  def _next_block(self) -> tuple[int, int, list[int]] | None:
    available = self._order.available(self._limit)
    size = self._prompts_per_round
    # A partial block is granted only when no other block is outstanding.
    if not available or (available < size and any(self._blocks.values())):
      return None
    positions = self._order.grant(size, self._limit)
    self._num_blocks += 1
    return self._num_blocks, self._version_of(positions[0]), positions


@dataclasses.dataclass(frozen=True)
class Flow:
  """Flow control: prompts admitted ahead of training, and their version.

  Admission bounds staleness. With F fresh prompts a step, a warm start of W
  prompts and a lead of n steps, searchers may have sampled at most

      W + F (step + 1 + n)

  prompts when `step` begins; with `wait_for_fresh` it begins once
  W + F (step + 1) of them have arrived. No data is dropped for its age. With
  F = 0 searchers run free: nothing bounds what they sample, and a step takes
  what has arrived.

  In rounds of P prompts and R steps, round q (from 0) has the positions q P to
  (q + 1) P - 1. All are sampled with the params at the start of round q - lag,
  and have arrived before round q begins.

  prompts_per_step: F.
  warm_prompts: W, prompts sampled before the first step.
  lead_steps: n.
  num_steps: steps of the run; no prompt beyond them is granted.
  lockstep: a step's data is sampled with the version of that step.
  wait_for_fresh: a step waits for its own fresh prompts.
  starvation_s: longest wait without a delivery.
  round_prompts: P; 0 for no rounds, else F, W and n are not used.
  round_steps: R.
  lag_rounds: 0 or 1.
  """

  prompts_per_step: int
  warm_prompts: int
  lead_steps: int
  num_steps: int
  lockstep: bool
  wait_for_fresh: bool
  starvation_s: float
  round_prompts: int = 0
  round_steps: int = 1
  lag_rounds: int = 0

  @property
  def is_pinned(self) -> bool:
    """Whether each position must be sampled with one certain version."""
    return self.lockstep or self.round_prompts > 0

  def needed(self, step: int) -> int:
    """Returns the number of prompts that must arrive before `step` begins."""
    if self.round_prompts:
      return self.round_prompts * (step // self.round_steps + 1)
    if not self.wait_for_fresh:
      return max(1, self.warm_prompts)
    return self.warm_prompts + self.prompts_per_step * (step + 1)

  def admitted(self, step: int) -> int:
    """Returns the number of prompts admitted before `step` begins."""
    if self.round_prompts:
      return self.needed(step)
    if not self.prompts_per_step:
      return sys.maxsize
    lead = 0 if self.lockstep else self.lead_steps
    last = min(step + 1 + lead, self.num_steps)
    return self.warm_prompts + self.prompts_per_step * last

  def admitted_next(self, step: int) -> int:
    """Returns the number of prompts admitted once `step` of a round began."""
    rounds = self.num_steps // self.round_steps
    last = min(step // self.round_steps + 1 + self.lag_rounds, rounds)
    return self.round_prompts * last

  def version_of(self, position: int) -> int:
    """Returns the version that must sample a position, -1 for the newest."""
    if self.round_prompts:
      begun = max(0, position // self.round_prompts - self.lag_rounds)
      return begun * self.round_steps
    if not self.lockstep:
      return -1
    return max(0, position - self.warm_prompts) // self.prompts_per_step


def make_flow(config: ml_collections.ConfigDict) -> Flow:
  """Returns the flow control that a config describes."""
  search, rounds = config.search, config.rounds
  return Flow(
      prompts_per_step=search.prompts_per_step,
      warm_prompts=math.ceil(
          config.replay.warm_start_completions / search.samples_per_prompt
      ),
      lead_steps=search.lead_steps,
      num_steps=config.train.num_steps,
      lockstep=search.lockstep,
      wait_for_fresh=search.wait_for_fresh,
      starvation_s=search.starvation_s,
      round_prompts=rounds.mini_batches * config.train.prompts_per_batch,
      round_steps=max(rounds.mini_batches, 1) * rounds.passes,
      lag_rounds=rounds.lag_rounds,
  )

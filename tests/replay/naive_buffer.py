# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The replay buffer's rules as plain lists: slow, and simple to believe."""

from collections.abc import Iterable
import dataclasses

from tba_jax import types
from tba_jax.replay import ledger


@dataclasses.dataclass
class Item:
  """One completion."""

  prompt_id: int
  tokens: tuple[int, ...]
  sampled: tuple[bool, ...]
  reward: float
  version: int
  arrival: int
  group: int
  item_id: int
  uses: int = 0


class NaiveBuffer:
  """All items in one list, oldest first."""

  def __init__(self, capacity_per_prompt: int, capacity: int, dedupe: bool):
    self._capacity_per_prompt = capacity_per_prompt
    self._capacity = capacity
    self._dedupe = dedupe
    self.items: list[Item] = []
    self._trained_groups: set[int] = set()
    self._num_groups = 0
    self._num_ids = 0

  def insert(self, group: types.Group, step: int) -> ledger.Amount:
    """Returns what left without ever having been trained on."""
    before = self.untrained()
    new = []
    lengths = group.completion_lengths.tolist()
    for j, length in enumerate(lengths):
      tokens = tuple(group.completion_tokens[j, :length].tolist())
      item = Item(
          prompt_id=group.prompt_id,
          tokens=tokens,
          sampled=tuple(group.sampled_mask[j, :length].tolist()),
          reward=float(group.rewards[j]),
          version=int(group.versions[j]),
          arrival=step,
          group=self._num_groups,
          item_id=0,
      )
      if self._dedupe:
        new = [i for i in new if i.tokens != tokens]
        self.items = [
            i
            for i in self.items
            if (i.prompt_id, i.tokens) != (group.prompt_id, tokens)
        ]
      new.append(item)
    self._num_groups += 1
    new = new[-min(self._capacity_per_prompt, self._capacity) :]
    for item in new:
      item.item_id = self._num_ids
      self._num_ids += 1
    own = [i for i in self.items if i.prompt_id == group.prompt_id]
    excess = max(0, len(own) + len(new) - self._capacity_per_prompt)
    drop = {id(i) for i in own[:excess]}
    self.items = [i for i in self.items if id(i) not in drop]
    excess = max(0, len(self.items) + len(new) - self._capacity)
    self.items = self.items[excess:] + new
    came = ledger.Amount(1, len(lengths), int(group.sampled_mask.sum()))
    return before + came - self.untrained()

  def mark_drawn(self, ids: Iterable[int]) -> ledger.Amount:
    """Returns what is trained on for the first time."""
    before = self.untrained()
    for item_id in ids:
      for item in self.items:
        if item.item_id == item_id:
          item.uses += 1
          self._trained_groups.add(item.group)
    return before - self.untrained()

  def untrained(self) -> ledger.Amount:
    """Returns what was never trained on."""
    items = [i for i in self.items if not i.uses]
    groups = {i.group for i in self.items} - self._trained_groups
    return ledger.Amount(
        len(groups), len(items), sum(sum(i.sampled) for i in items)
    )

  def of_prompt(self, prompt_id: int) -> list[Item]:
    """Returns a prompt's items."""
    return [i for i in self.items if i.prompt_id == prompt_id]

  def recent(self, prompt_id: int, after: int, count: int) -> list[Item]:
    """Returns a prompt's items that arrived above a step.

    The newest others make them `count`, as far as there are others.
    """
    items = self.of_prompt(prompt_id)
    recent = [i for i in items if i.arrival > after]
    others = [i for i in items if i.arrival <= after]
    while others and len(recent) < count:
      recent.append(others.pop())
    return recent

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the store of completions gives up where a capacity is reached.

A rule is (store, group, prompt, kept) -> (stored, evicted, emptied): of `kept`,
places in the new group, those that are to be stored; untrained and trained of
the old completions that went; other prompts of which nothing is left.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tba_jax import types
  from tba_jax.replay import amount
  from tba_jax.replay import completions
  from tba_jax.replay import prompt_rows
  from tba_jax.replay import rows as rows_lib

Room = tuple[list[int], "tuple[amount.Amount, amount.Amount]", list[int]]


def oldest(
    store: "completions.CompletionStore",
    group: "types.Group",
    prompt: "prompt_rows.PromptRows",
    kept: list[int],
) -> Room:
  """Evicts what arrived first: of the prompt, then of all."""
  stored = kept[-min(store.capacity_per_prompt, store.capacity) :]
  excess = len(prompt) + len(stored) - store.capacity_per_prompt
  own = store.release(prompt.view()[: max(excess, 0)].copy())
  prompt.drop_oldest(max(excess, 0))
  excess = len(store.table) + len(stored) - store.capacity
  if excess <= 0:
    return stored, own, []
  rows = store.table.oldest(excess)
  emptied = []
  for owner_id in store.table.prompt_ids[rows].tolist():
    owner = store.prompts[owner_id]
    # Rows come in order of arrival here and there, so it is its first.
    owner.drop_oldest(1)
    # The prompt itself is about to have rows and never counts as emptied.
    if not len(owner) and owner_id != group.prompt_id:
      del store.prompts[owner_id]
      emptied.append(owner_id)
  others = store.release(rows)
  return stored, (own[0] + others[0], own[1] + others[1]), emptied


def lowest_reward(
    store: "completions.CompletionStore",
    group: "types.Group",
    prompt: "prompt_rows.PromptRows",
    kept: list[int],
) -> Room:
  """Evicts the lowest rewards, new ones too: of the prompt, then of all."""
  evicted, emptied = store.release(np.zeros(0, np.int64)), []
  for capacity, of_all in (
      (store.capacity_per_prompt, False),
      (store.capacity, True),
  ):
    rows = store.table.live_rows() if of_all else prompt.view()
    excess = len(rows) + len(kept) - capacity
    if excess <= 0:
      continue
    rows, goes = _lowest(store.table, rows, group.rewards[kept], excess)
    kept = [j for j, gone in zip(kept, goes.tolist(), strict=True) if not gone]
    for row in rows.tolist():
      owner_id = int(store.table.prompt_ids[row])
      owner = store.prompts[owner_id]
      owner.remove(row, store.table.ids)
      if not len(owner) and owner_id != group.prompt_id:
        del store.prompts[owner_id]
        emptied.append(owner_id)
    freed = store.release(rows)
    evicted = evicted[0] + freed[0], evicted[1] + freed[1]
  return kept, evicted, emptied


def _lowest(
    table: "rows_lib.RowTable",
    rows: np.ndarray,
    rewards: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns which of old rows and new rewards go; of equal ones the oldest.

  Args:
    table: of the rows.
    rows: [n] int64, stored.
    rewards: [m] float32, of completions that are newer than all of them.
    count: how many go, at most n + m.

  Returns:
    Rows that go, and [m] bool, True for a new one that does.
  """
  newer = table.next_id + np.arange(len(rewards))
  order = np.lexsort(
      (
          np.concatenate([table.ids[rows], newer]),
          np.concatenate([table.rewards[rows], rewards]),
      )
  )[:count]
  goes = np.zeros(len(rewards), np.bool_)
  goes[order[order >= len(rows)] - len(rows)] = True
  return rows[order[order < len(rows)]], goes


RULES: Mapping[str, Callable[..., Room]] = {
    "oldest": oldest,
    "lowest_reward": lowest_reward,
}

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Selects prompts and completions for a batch (NumPy).

Source: Bartoldson et al. 2025 (arXiv:2503.18929) §4.2, with two differences.
In the recent window, new data makes a prompt undrawn again. If a pool is
refilled in the middle of a batch, prompts already in the batch are drawn again
only if no others are left.
"""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np


def choose_uniform(
    rng: np.random.Generator, num_items: int, count: int
) -> np.ndarray:
  """Returns indices drawn uniformly without replacement, [count] int64.

  If `num_items` is below `count`, each item is taken equally often and the rest
  is drawn, so that numbers of copies differ by at most one.
  """
  if num_items == count:
    return np.arange(count)
  if num_items > count:
    return rng.choice(num_items, count, replace=False, shuffle=False)
  times, rest = divmod(count, num_items)
  whole = np.tile(np.arange(num_items), times)
  return np.append(whole, rng.choice(num_items, rest, replace=False))


def choose_by_reward(
    rng: np.random.Generator,
    rewards: np.ndarray,
    count: int,
    *,
    temperature: float,
    ages: np.ndarray | None = None,
    age_decay: float = 0.0,
) -> np.ndarray:
  """Returns indices drawn by reward and age, [count] int64.

      weight = exp(reward/temperature) exp(-age/age_decay)

  Draws without replacement (Gumbel top-k trick, with which no weight
  underflows) from at least `count` items, else with replacement. Source of the
  decay: Ma et al. 2026 (FreshPER, arXiv:2604.16918), which multiplies any
  priority by it; its own is |reward|.

  Args:
    rewards: [n] float, finite.
    temperature: reward per unit of log-weight, above 0.
    ages: [n], staleness in steps; read with an age_decay.
    age_decay: steps per unit of log-weight; 0 = no decay.
  """
  log_weights = (rewards.astype(np.float64) - rewards.max()) / temperature
  if age_decay:
    log_weights -= ages / age_decay
    log_weights -= log_weights.max()
  if len(rewards) == count:
    return np.arange(count)
  if len(rewards) > count:
    keys = log_weights + rng.gumbel(size=len(rewards))
    return np.argpartition(keys, -count)[-count:]
  cumulative = np.cumsum(np.exp(log_weights))
  points = rng.random(count) * cumulative[-1]
  # A point may round up to the total itself.
  indices = np.searchsorted(cumulative, points, side="right")
  return np.minimum(indices, len(rewards) - 1)


class PromptPool:
  """Keys drawn uniformly without replacement; refilled when exhausted.

  Adding, removing and drawing a key take constant time: undrawn keys come first
  in a list, and each change swaps two items.
  """

  def __init__(self):
    self.items: list[int] = []
    self.position: dict[int, int] = {}
    self._num_undrawn = 0

  def __len__(self) -> int:
    return len(self.items)

  def __contains__(self, key: int) -> bool:
    return key in self.position

  @property
  def num_undrawn(self) -> int:
    return self._num_undrawn

  def add(self, key: int) -> None:
    """Adds a key, or makes a drawn one undrawn again."""
    position = self.position.get(key)
    if position is None:
      position = len(self.items)
      self.items.append(key)
      self.position[key] = position
    if position >= self._num_undrawn:
      self._swap(position, self._num_undrawn)
      self._num_undrawn += 1

  def remove(self, key: int) -> None:
    """Removes a key; raises KeyError if it is not in the pool."""
    position = self.position[key]
    if position < self._num_undrawn:
      self._num_undrawn -= 1
      self._swap(position, self._num_undrawn)
      position = self._num_undrawn
    self._swap(position, len(self.items) - 1)
    self.items.pop()
    del self.position[key]

  def draw(self, rng: np.random.Generator, count: int) -> list[int]:
    """Returns `count` keys, distinct unless `count` exceeds the pool.

    Raises:
      ValueError: the pool is empty.
    """
    if count and not self.items:
      raise ValueError(f"cannot draw {count} keys from an empty pool")
    out: list[int] = []
    # Number of keys drawn in this call, which a refill should keep drawn.
    num_held = 0
    while len(out) < count:
      if not self._num_undrawn:
        num_held = self._refill(num_held)
      num_taken = min(count - len(out), self._num_undrawn)
      bounds = self._num_undrawn - np.arange(num_taken)
      for index in rng.integers(bounds).tolist():
        self._num_undrawn -= 1
        self._swap(index, self._num_undrawn)
        out.append(self.items[self._num_undrawn])
      num_held += num_taken
    return out

  def get_state(self) -> dict[str, Any]:
    """Returns the keys in order, and the number of undrawn ones."""
    return {
        "items": np.array(self.items, np.int64),
        "num_undrawn": self._num_undrawn,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; later draws are the same as in the saved pool."""
    self.items = state["items"].tolist()
    self.position = {key: i for i, key in enumerate(self.items)}
    self._num_undrawn = int(state["num_undrawn"])

  def _swap(self, i: int, j: int) -> None:
    items = self.items
    items[i], items[j] = items[j], items[i]
    self.position[items[i]] = i
    self.position[items[j]] = j

  def _refill(self, num_held: int) -> int:
    """Marks all keys undrawn, except the `num_held` drawn last, if possible.

    Returns:
      The number of keys that stay drawn.
    """
    num_items = len(self.items)
    if num_held >= num_items:
      self._num_undrawn = num_items
      return 0
    # With nothing undrawn, the last drawn keys come first.
    for i in range(min(num_held, num_items - num_held)):
      self._swap(i, num_items - 1 - i)
    self._num_undrawn = num_items - num_held
    return num_held


class RecentPool:
  """Pool of prompts with recent data.

  Data is recent at step t if it arrived after step t - window_steps. New data
  makes a prompt undrawn again.
  """

  def __init__(self, window_steps: int):
    self._window_steps = window_steps
    self.pool = PromptPool()
    # (step, key) of arrivals, oldest first, and each key's last arrival.
    self.arrivals: collections.deque[tuple[int, int]] = collections.deque()
    self.last: dict[int, int] = {}

  def __len__(self) -> int:
    return len(self.pool)

  def __contains__(self, key: int) -> bool:
    return key in self.pool

  def add(self, key: int, step: int) -> None:
    """Records data that arrived at a step, which must not decrease."""
    if self.last.get(key) != step:
      self.last[key] = step
      self.arrivals.append((step, key))
    self.pool.add(key)

  def remove(self, key: int) -> None:
    """Removes a key if it is in the pool."""
    if self.last.pop(key, None) is not None:
      self.pool.remove(key)

  def expire(self, step: int) -> None:
    """Drops prompts without data in the window of `step`."""
    oldest = step - self._window_steps
    while self.arrivals and self.arrivals[0][0] <= oldest:
      arrived, key = self.arrivals.popleft()
      # Ignore the entry if later data arrived, or the key was removed.
      if self.last.get(key) == arrived:
        self.remove(key)

  def draw(self, rng: np.random.Generator, count: int) -> list[int]:
    """Returns `count` keys; see `PromptPool.draw`."""
    return self.pool.draw(rng, count)

  def get_state(self) -> dict[str, Any]:
    """Returns the pool and the arrivals as arrays."""
    return {
        "pool": self.pool.get_state(),
        "arrivals": _pairs(self.arrivals),
        "last": _pairs([(step, key) for key, step in self.last.items()]),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; later draws are the same as in the saved pool."""
    self.pool.set_state(state["pool"])
    self.arrivals = collections.deque(map(tuple, state["arrivals"].tolist()))
    self.last = {key: step for step, key in state["last"].tolist()}


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
  return np.array(list(pairs), np.int64).reshape(-1, 2)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments for tests, with the interfaces that users may implement."""

import os
import time


class TwoTurns:
  """Sends a letter, then echoes; a turn's reward is its length."""

  words = ("a", "b", "c", "d", ":")

  def reset(self, seed):
    self._num_turns = 0
    return "abcd"[seed % 4] + ":"

  def step(self, text):
    self._num_turns += 1
    success = self._num_turns == 2
    info = {"success": success, "metrics": {"letters": len(text)}}
    return f"{text[-1:]}:", len(text) / 4, success, info

  def demonstrate(self):
    return "ab" if self._num_turns else "c"


class Gymnasium:
  """Gymnasium's interface: `reset` returns info, `step` a 5-tuple."""

  def reset(self, *, seed=None, options=None):
    del options
    return f"seed {seed}", {}

  def step(self, action):
    said = [] if action == "end" else "ok"  # SkyRL's last observation.
    return said, 1, action == "end", action == "late", {}


class Tools:
  """A class with a method as tool."""

  def reset(self, seed):
    return f"{seed}?"

  def add(self, left: int, right: int) -> int:
    """Adds two numbers."""
    return left + right

  def get_reward(self, text):
    return float(text == "5")

  def demonstrate(self):
    return 'add: {"left": 2, "right": 3}'


REWARDS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "none": None,
    "text": "1",
}


class Trouble:
  """Misbehaves as its first turn requests; cannot be closed."""

  made = 0

  def reset(self, seed):
    Trouble.made += 1
    if seed == 2:
      raise ValueError("no seed 2")
    if seed == 4:
      return f"made {Trouble.made} in {os.getpid()} {time.monotonic_ns()}"
    return [1] if seed == 6 else "say"

  def step(self, text):
    what, _, value = text.partition(" ")
    if what == "hang":
      time.sleep(1000)
    elif what == "die":
      os._exit(3)
    elif what == "print":
      print("x" * 2**20)
    elif what == "raise":
      raise RuntimeError(value)
    elif what == "tuple":
      return "a", 1.0
    observation = "x" * int(value) if what == "say" else "ok"
    reward = REWARDS[value] if what == "reward" else 0.5
    done = "no" if what == "text" else what == "done"
    info = {"success": "False"} if what == "flag" else {}
    return observation, reward, done, info

  def close(self):
    raise OSError("closed before")


class FailsToBegin(TwoTurns):
  """Fails to reset with every other seed of a split."""

  def reset(self, seed):
    if seed % 4 > 1:
      raise ValueError(f"no seed {seed}")
    return super().reset(seed)


class Fails(TwoTurns):
  """Fails in its first step."""

  def step(self, text):
    if len(text) % 2:
      os._exit(3)
    raise ValueError("no turn")


class Slow(TwoTurns):
  """Resets in a second."""

  def reset(self, seed):
    time.sleep(1)
    return super().reset(seed)


class TakesLong(TwoTurns):
  """Answers in .05 s."""

  def step(self, text):
    time.sleep(0.05)
    return super().step(text)

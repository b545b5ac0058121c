# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A text environment as Gymnasium registers and wraps it."""

import string

import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env):
  """Draws a digit, which a turn has to repeat."""

  observation_space = action_space = spaces.Text(100, charset=string.printable)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self._digit = str(self.np_random.integers(10))
    return f"Say {self._digit}", {}

  def step(self, action):
    is_right = action == self._digit
    return "No", 1.0 if is_right else -0.5, is_right, False, {}


if "Echo-v0" not in gymnasium.registry:
  gymnasium.register("Echo-v0", Echo, max_episode_steps=3)


def make() -> gymnasium.Env:
  return gymnasium.make("Echo-v0")

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixed opponents in TextArena's games for two."""

import re

import textarena


def first_free(observation: str) -> str:
  """Plays the first of the moves that the last board offers."""
  moves = observation.rpartition("Available Moves:")[2]
  return re.search(r"\[\d\]", moves)[0]


class FirstFree(textarena.Agent):
  """The same, as TextArena's own agents are written."""

  def __call__(self, observation: str) -> str:
    return first_free(observation)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""In-process environments for tests of the sampler."""

import numpy as np

MAX_TURNS = 3


class Scripted:
  """Environments whose answers are functions of a completion's tokens.

  An answer has several tokens, possibly a stop token. Completions end after
  three turns.

  longest: maximum tokens of an answer.
  most_live: maximum number of completions between first turn and last answer.
  """

  def __init__(self, delay: int = 0, longest: int = 2):
    self._delay = delay
    self.longest = longest
    self._ended = []
    self._calls = 0
    self._num_turns = {}
    self._live = set()
    self.most_live = 0
    self.cuts = set()

  def end(self, owner, tokens):
    self._num_turns[owner] = turn = self._num_turns.get(owner, 0) + 1
    self._live.add(owner)
    self.most_live = max(self.most_live, len(self._live))
    self._ended.append(
        (owner, None if turn == MAX_TURNS else self.answer(tokens))
    )

  def cut(self, owner, tokens):
    self.cuts.add(owner)
    self._live.discard(owner)

  def answers(self, wait_s):
    wait = wait_s > 0
    self._calls += 1
    if not wait and self._calls % (self._delay + 1):
      return []
    # Answer the newest first, and delay others.
    count = 1 if self._delay else len(self._ended)
    out = [self._ended.pop() for _ in self._ended[:count]]
    if wait and not out:
      raise AssertionError("nothing to wait for")
    self._live -= {owner for owner, ids in out if ids is None}
    return out

  def answer(self, tokens):
    total = int(np.sum(tokens))
    most = self.longest
    ids = [1 + total % 5, *(2 + i % 4 for i in range(most - 1))]
    return np.array(ids[: total % (most + 1)], np.int32)

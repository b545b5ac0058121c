# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of groups where the trainer gives them, as they leave the queue.

With `reward.role="trainer"` searchers send completions unscored, and the
journal holds them so: what is read from it after a restart is scored again, by
the same frozen judge.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.rewards import judges
from tba_jax.tasks import base


class GroupScorer:
  """Puts a judge's rewards into groups."""

  def __init__(
      self,
      judge: judges.Judge | None,
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      missing_stop_reward: float | None,
  ):
    """Takes the parts.

    Args:
      judge: of completions; None where they come with their rewards.
      tokenizer: of the policy.
      missing_stop_reward: takes the place of the reward of completions without
        stop token; None where the config does not replace it.
    """
    self._judge = judge
    self._tokenizer = tokenizer
    self._missing_stop_reward = missing_stop_reward

  def score(self, groups: Sequence[types.Group]) -> list[types.Group]:
    """Returns the groups with rewards, judged together."""
    if self._judge is None:
      return list(groups)
    judged = iter(
        self._judge.judge([r for group in groups for r in self._ask(group)])
    )
    return [
        dataclasses.replace(group, rewards=self._rewards(group, judged))
        for group in groups
    ]

  def close(self) -> None:
    """Ends what the judge has started."""
    if self._judge is not None:
      self._judge.close()

  def _ask(self, group: types.Group) -> list[judges.Request]:
    most = group.completion_tokens.shape[-1]
    return [
        judges.Request(
            base.TRAIN,
            group.prompt_id,
            self._tokenizer.decode_completion(
                tokens, int(length), bool(stopped)
            ),
            # A stop string ends a completion too.
            bool(stopped) or int(length) < most,
        )
        for tokens, length, stopped in zip(
            group.completion_tokens, group.completion_lengths, group.stopped
        )
    ]

  def _rewards(
      self, group: types.Group, judged: Iterator[base.Judgement]
  ) -> np.ndarray:
    rewards_S = np.array(
        [next(judged).reward for _ in range(group.num_completions)], np.float32
    )
    if self._missing_stop_reward is None:
      return rewards_S
    instead = np.float32(self._missing_stop_reward)
    return np.where(group.stopped, rewards_S, instead)


class Unscored(judges.Judge):
  """Gives every completion a reward of 0: another process judges."""

  def __init__(self):
    """Takes nothing."""
    super().__init__(fallback=0.0)

  def _judge(self, requests: Sequence[judges.Request]) -> list[base.Judgement]:
    return [base.Judgement(0.0, None)] * len(requests)

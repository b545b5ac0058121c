# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Episodes of environments in processes, without a model."""

from collections.abc import Generator, Iterable, Sequence
import json
import math

import numpy as np

from tba_jax.environments import build
from tba_jax.environments import turns as turns_lib
from tba_jax.rewards import judges
from tba_jax.tasks import base
from tba_jax.tasks import task_table
from tests.support import base_config

EOS = 256

# Generator of the policy's turns; receives the environment's answers.
Player = Generator[str, str, None]


class Bytes:
  """Byte tokenizer; 256 is the stop token."""

  eos_id = EOS

  def encode(self, text, after=()):
    is_text = isinstance(text, str)
    return list((text if is_text else json.dumps(text)).encode())

  def encode_answer(self, said, turn, chat=(), tools=()):
    return self.encode(said)

  def messages(self, prompt):
    return None if isinstance(prompt, str) else prompt

  def encode_prompt(self, prompt, tools=()):
    self.tools = tools
    return self.encode(prompt)

  def stop_id(self, prompt):
    return EOS

  def decode_completion(self, ids, length, stopped):
    return bytes(int(i) for i in ids[: length - stopped]).decode()


def make(
    case,
    source,
    *,
    num_workers=2,
    max_prompt_tokens=20,
    deadline_s=3.0,
    readable="",
    env_vars="",
    network=False,
    **task,
) -> turns_lib.Environments:
  """Returns the environments of `task.source`, closed with the test case."""
  config = base_config.make(
      task={"name": "environment", "source": source, "max_turns": 3, **task},
      sampling__max_prompt_tokens=max_prompt_tokens,
      reward__backend="pool",
      reward__num_workers=num_workers,
      reward__deadline_s=deadline_s,
      reward__readable=readable,
      reward__env_vars=env_vars,
      reward__network=network,
  )
  made = build.make(
      config, "", task_table.make_task(config.task), Bytes(), None
  )
  case.addCleanup(made.close)
  return made


def _saying(turns: Iterable[str]) -> Player:
  left = iter(turns)
  while (turn := next(left, None)) is not None:
    yield turn


def play(
    made: turns_lib.Environments,
    *players: Player | Sequence[str],
    indices: Sequence[int] = (),
) -> tuple[list[list[str]], list[judges.EpisodeOutcome]]:
  """Plays concurrent episodes; returns answers and outcome of each.

  Args:
    made: environments.
    players: policy turns of each completion.
    indices: training prompt of each completion (default: the first).
  """
  indices = indices or [0] * len(players)
  run = made.episodes(made.prompts(base.TRAIN, indices), 1)
  owners = [(i, 0) for i in range(len(players))]
  tokens = {owner: [] for owner in owners}
  answers = {owner: [] for owner in owners}
  left = {
      owner: player if isinstance(player, Generator) else _saying(player)
      for owner, player in zip(owners, players)
  }

  def end(owner, turn):
    tokens[owner] += [*turn.encode(), EOS]
    run.end(owner, np.array(tokens[owner]))

  for owner in owners:
    end(owner, next(left[owner]))
  waiting = set(owners)
  while waiting:
    for owner, ids in run.answers(math.inf):
      if ids is None:
        waiting.discard(owner)
        continue
      tokens[owner] += ids.tolist()
      answers[owner].append(bytes(ids.tolist()).decode())
      try:
        end(owner, left[owner].send(answers[owner][-1]))
      except StopIteration:
        run.cut(owner, None)
        waiting.discard(owner)
  run.close()
  return [*answers.values()], [
      run.outcomes(i)()[0] for i in range(len(players))
  ]

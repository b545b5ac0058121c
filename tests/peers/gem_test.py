# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Games and tools of GEM: the package's own texts and rewards."""

import os
import pathlib
import random
import sys
from unittest import mock

from absl.testing import parameterized
import gem
from gem.wrappers import observation_wrapper

from tba_jax.tasks import base
from tests.support import episodes

# Other games need a list of words that a run, without a network, cannot load.
_GAMES = {
    "GuessTheNumber-v0-easy": None,
    "Mastermind-v0-hard": None,
    "Minesweeper-v0-random": None,
    "FifteenPuzzle-v0-easy": r"\boxed{up}",
    "Sudoku-v0-easy": r"\boxed{1 1 1}",
    "TowerofHanoi-v0-easy": r"\boxed{A C}",
    "Game2048-v0-easy": None,
    "Sokoban-v0-easy": None,
    "Crosswords-v0-easy": r"\boxed{0 0 A}",
}


def alone(name, seed, num_turns, turn):
  """Returns turns, and what the package says and pays for them without us."""
  env = observation_wrapper.ObservationWrapper(
      gem.make(name), include_action=False, include_chat_template=False
  )
  texts, rewards, done = [env.reset(seed=seed)[0]], [], False
  turns = []
  while not done and len(turns) < num_turns:
    # Drawing a turn must not change what the game draws.
    state = random.getstate()
    turns.append(turn or env.unwrapped.sample_random_action())
    random.setstate(state)
    text, reward, *ends, _ = env.step(turns[-1])
    texts.append(text)
    rewards.append(float(reward))
    done = any(ends)
  return turns, texts[: len(texts) - done], sum(rewards)


class GemTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # The tool runs `python`, as of an activated environment.
    folder = pathlib.Path(sys.executable).parent
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    self.enter_context(mock.patch.dict(os.environ, PATH=path))

  def make(self, name, **task):
    return episodes.make(
        self,
        f"gem:{name}",
        max_prompt_tokens=6000,
        deadline_s=30.0,
        **{"max_turns": 4, **task},
    )

  @parameterized.parameters(*_GAMES.items())
  def test_texts_and_rewards_match_package(self, game, turn):
    made = self.make(f"game:{game}")
    (prompt,) = made.prompts(base.TRAIN, [3])
    turns, texts, reward = alone(f"game:{game}", 6, 4, turn)
    ((*answers,),), (outcome,) = episodes.play(made, turns, indices=[3])
    self.assertEqual(outcome.failure, "")
    self.assertAlmostEqual(outcome.reward, reward, places=6)
    # The package's wrapper repeats the observations before the last one.
    said = [prompt.observation, *answers]
    # The last of four turns is not answered.
    self.assertLen(said, min(len(texts), 4))
    for text, answer in zip(texts, said):
      self.assertTrue(text.endswith(answer), (text, answer))
      self.assertNotEmpty(answer)

  def test_python_calculates_before_answer(self):
    made = self.make("rg:chain_sum,python_tool")
    (prompt,) = made.prompts(base.TRAIN, [0])
    self.assertIn("wrapped within <python>", prompt.observation)
    problem = prompt.observation.partition(": ")[2].partition("=")[0].strip()
    code = f"<python>print({problem})</python>"
    value = eval(problem)  # A sum of the package's own.
    ((answer,),), (outcome,) = episodes.play(
        made, [f"Let me see. {code}", rf"\boxed{{{value}}}"]
    )
    self.assertEqual(answer, f"Code execution result: {value}\n\n")
    # The wrapper pays .05 for a call, .25 for one that succeeds.
    self.assertAlmostEqual(outcome.reward, 1.3)
    self.assertTrue(outcome.is_right)

  @parameterized.parameters(
      ("game:GuessTheNumber-v1", "must be one of game:GuessTheNumber-v0-"),
      ("game:GuessTheNumber-v0-easy,python", "must be one of python_tool"),
  )
  def test_unknown_names_are_reported(self, name, message):
    (prompt,) = self.make(name).prompts(base.TRAIN, [0])
    self.assertIn(message, prompt.failure[1])

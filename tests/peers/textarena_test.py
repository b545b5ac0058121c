# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena: the package's own texts and rewards, and a run."""

import pathlib

from absl.testing import parameterized
import textarena

import tba_jax
from tba_jax.tasks import base
from tests.peers import opponents
from tests.programs import environments_test
from tests.support import episodes

_OPPONENTS = pathlib.Path(opponents.__file__)
_HANOI = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")


def binary_search() -> episodes.Player:
  low, high = 1, 20
  while True:
    guess = (low + high) // 2
    said = yield f"My guess is [{guess}]"
    if "higher" in said:
      low = guess + 1
    else:
      high = guess - 1


def alone(name: str, seed: int, turns) -> tuple[str, float]:
  """Returns what the package says without us, and the reward."""
  game = textarena.make(name)
  game.reset(num_players=1, seed=seed)
  _, said = game.get_observation()
  done = False
  for turn in turns:
    done, _ = game.step(action=turn)
    if done:
      break
    # The default wrappers tell the whole game each time.
    _, said = game.get_observation()
  for turn in turns:
    turn = turn if "[" in turn else f"[{turn}]"
    said = said.replace(f"\n[Player] {turn}", "", 1)
    said = said.replace(f"\n[Player 0] {turn}", "", 1)
  return said.lstrip("\n") + "\n", game.close()[0][0] if done else 0.0


class TextArenaTest(parameterized.TestCase):

  def make(self, name, **task):
    return episodes.make(
        self,
        f"textarena:{name}",
        max_prompt_tokens=4000,
        deadline_s=30.0,
        **{"max_turns": 20, **task},
    )

  @parameterized.parameters(
      ("GuessTheNumber-v0", ["[10]", "[11]", "a number", "none"]),
      ("FrozenLake-v0", ["[right]", "down", "[down]", "[right]", "[right]"]),
      ("TowerOfHanoi-v0", [f"[{move}]" for move in _HANOI]),
      ("Blackjack-v0", ["[Hit]", "[Stand]", "[Stand]"] + ["[Hit]"] * 20),
  )
  def test_texts_and_rewards_match_package(self, name, turns):
    made = self.make(name)
    indices = [0, 1, 2, 1]
    prompts = made.prompts(base.TRAIN, indices)
    # Two games at a time, and a process serves several.
    answers, outcomes = episodes.play(made, *[turns] * 4, indices=indices)
    for index, prompt, said, outcome in zip(
        indices, prompts, answers, outcomes
    ):
      # The last answer is not said where it ends the game.
      heard = turns[: outcome.num_turns]
      text, reward = alone(name, 2 * index, heard)
      self.assertEqual(prompt.observation + "".join(said), text)
      self.assertEqual((outcome.failure, outcome.reward), ("", reward))
      self.assertEqual(outcome.is_right, reward >= 1)

  def test_number_is_found(self):
    answers, outcomes = episodes.play(
        self.make("GuessTheNumber-v0"),
        *(binary_search() for _ in range(4)),
        indices=[0, 1, 2, 3],
    )
    self.assertEqual([o.reward for o in outcomes], [1.0] * 4)
    for said in answers:
      for answer in said:
        self.assertRegex(answer, r"^\[GAME\] The target number is \w+\.\n$")

  @parameterized.parameters("first_free", "FirstFree")
  def test_game_for_two_against_fixed_opponent(self, name):
    made = self.make("TicTacToe-v0", opponent=f"{_OPPONENTS}:{name}")
    answers, (won, lost) = episodes.play(
        made, ["[4]", "[2]", "[6]"], ["[8]", "[7]", "[5]", "[3]"]
    )
    self.assertEqual((won.reward, won.is_right), (1.0, True))
    self.assertEqual((lost.reward, lost.is_right), (-1.0, False))
    self.assertEqual((won.num_turns, lost.num_turns), (3, 3))
    self.assertIn("[Player 1] [0]\n", answers[0][0])
    self.assertNotIn("[Player 0]", "".join(answers[0]))

  def test_reports_unplayable_games(self):
    (prompt,) = self.make("TicTacToe-v0").prompts(base.TRAIN, [0])
    self.assertRegex(prompt.failure[1], "to be 2.*task.opponent for two")
    (prompt,) = self.make("GuessTheNumbers-v0").prompts(base.TRAIN, [0])
    self.assertRegex(prompt.failure[1], "must be .*GuessTheNumber-v0,")

  def test_run_trains_on_game(self):
    config = environments_test.make_config(
        init="scratch", train__num_steps=2, evaluate__final_prompts=4
    )
    config.task.source = "textarena:GuessTheNumber-v0"
    config.sampling.max_prompt_tokens = 800
    config.sampling.max_completion_tokens = 128
    config.model.max_positions = 1024
    config.reward.deadline_s = 30.0
    result = tba_jax.train(config)
    self.assertTrue(result.summary["ledger_closed"])
    self.assertEqual(result.summary["reward_failures"], {})
    for record in result.steps:
      self.assertLess(record["train/logprob_gap"], 1e-5)

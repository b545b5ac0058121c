# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in processes: turns, failures by cause, and what goes on."""

import dataclasses
import math
import pathlib
import time
from unittest import mock

from absl.testing import parameterized
import numpy as np
import pytest

from tba_jax.environments import turns as turns_lib
from tba_jax.rewards import judges
from tba_jax.tasks import base
from tests.support import episodes
from tests.support import sentencepiece_case
from tests.support import two_turns

_FILE = pathlib.Path(two_turns.__file__)
_EOS = episodes.EOS


class EnvironmentsTest(parameterized.TestCase):

  def make(self, name, num_workers=2, **task):
    source = f"{_FILE}:{name}"
    return episodes.make(self, source, num_workers=num_workers, **task)

  def test_turns_are_answered_and_their_rewards_summed(self):
    found = self.make("TwoTurns")
    prompts = found.prompts(base.TRAIN, [0, 1, 2, 0])
    said = [bytes(p.tokens.tolist()).decode() for p in prompts]
    self.assertEqual(said, ["a:", "c:", "a:", "a:"])
    answers, outcomes = episodes.play(found, ["ab", "abc"], ["d"])
    self.assertEqual(answers, [["b:"], ["d:"]])
    whole, cut = (dataclasses.replace(o, seconds=0.0) for o in outcomes)
    # Turns of two and three letters, with an answer of two in between.
    expected = judges.EpisodeOutcome(
        1.25, True, 0.0, (0.5, 0.75), (3, 9), {"letters": 3.0}
    )
    self.assertEqual(whole, expected)
    self.assertEqual(whole.num_turns, 2)
    self.assertEqual(
        cut,
        judges.EpisodeOutcome(
            0.25, False, 0.0, (0.25,), (2,), {"letters": 1.0}
        ),
    )
    self.assertGreater(outcomes[0].seconds, 0.0)

  def test_held_out_seeds_are_others(self):
    found = self.make("TwoTurns")
    (prompt,) = found.prompts(base.HELD_OUT, [0])
    self.assertEqual(prompt.observation, "b:")

  @parameterized.parameters(("end", 1), ("late", 1), ("on", 3))
  @pytest.mark.slow
  def test_the_shape_of_gymnasium_and_the_limit_of_turns(self, turn, count):
    found = self.make("Gymnasium", correct_threshold=2.0)
    self.assertEqual(found.prompts(base.TRAIN, [3])[0].observation, "seed 6")
    answers, (outcome,) = episodes.play(found, [turn] * 3)
    self.assertEqual(answers, [["ok"] * (count - 1)])
    self.assertEqual(outcome.num_turns, count)
    self.assertEqual(outcome.reward, count)
    self.assertEqual(outcome.is_right, count == 3)

  def test_tools_are_called_until_a_turn_without_a_call(self):
    found = self.make("Tools")
    self.assertEqual(found.prompts(base.TRAIN, [1])[0].observation, "2?")
    turns = ['add: {"left": 2, "right": 3}', 'add: {"left": 2}', "5"]
    answers, (outcome,) = episodes.play(found, turns)
    missing = "error: missing a required argument: 'right'\n"
    self.assertEqual(answers, [["5\n", missing]])
    self.assertEqual((outcome.reward, outcome.num_turns), (1.0, 3))
    (schema,) = found._tokenizer.tools
    self.assertEqual(schema["function"]["name"], "add")
    _, ids, mask = found.demonstration(base.TRAIN, 1, 60)
    text = bytes(i for i, m in zip(ids, mask) if not m).decode()
    self.assertEqual(text, "5\n")

  @pytest.mark.slow
  def test_a_failure_costs_its_completion_and_is_counted_by_its_cause(self):
    found = self.make("Trouble", num_workers=6)
    said = {
        "hang": "deadline",
        "die": "crash",
        "raise it": "error",
        "tuple": "error",
        "say 1000000": "size",
        **{f"reward {name}": "nan" for name in two_turns.REWARDS},
        "text": "error",
        "flag": "error",
        "print": "",
        "done": "",
    }
    _, outcomes = episodes.play(found, *([what, "done"] for what in said))
    self.assertEqual([o.failure for o in outcomes], [*said.values()])
    self.assertIn("RuntimeError: it", outcomes[2].message)
    events = []
    judge = judges.OfOutcomes(on_event=lambda kind, text: events.append(text))
    judged = judge.judge(
        [judges.JudgeRequest("train", 0, "", outcome=o) for o in outcomes]
    )
    rewards = [j.reward for j in judged]
    np.testing.assert_array_equal(rewards, [np.nan] * 11 + [1.0, 0.5])
    self.assertEqual(judged[11].parts["turns"], 2.0)
    self.assertEqual(
        judge.totals()["failures"],
        {"deadline": 1, "crash": 1, "error": 4, "size": 1, "nan": 4},
    )
    # Their processes are replaced.
    _, outcomes = episodes.play(found, *[["done"]] * 8)
    self.assertEqual([o.failure for o in outcomes], [""] * 8)

  def test_failing_close_is_ignored(self):
    found = self.make("Trouble", num_workers=1)
    for _ in range(2):
      _, outcomes = episodes.play(found, ["done"], ["done"])
      self.assertEqual([o.failure for o in outcomes], ["", ""])

  def test_failing_reset_fails_prompt(self):
    found = self.make("Trouble")
    prompts = found.prompts(base.TRAIN, [1, 3, 2, 0])
    self.assertEqual([len(p.tokens) for p in prompts], [0, 0, 0, 3])
    causes = [p.failure and p.outcome.failure for p in prompts]
    self.assertEqual(causes, ["error", "error", "size", None])

  def test_changed_prompt_is_failure(self):
    found = self.make("Trouble")
    found._max_prompt_tokens = 200
    _, outcomes = episodes.play(found, ["done"], indices=[2])
    self.assertEqual(outcomes[0].failure, "reset")

  def test_missing_turn_releases_process(self):
    found = self.make("TwoTurns", num_workers=1)
    with mock.patch.object(turns_lib, "_TURN_DEADLINE_S", 0.1):
      run = found.episodes(found.prompts(base.TRAIN, [0, 0]), 1)
      for owner in ((0, 0), (1, 0)):
        run.end(owner, np.array([*b"ab", _EOS]))
      answered = [run.answers(math.inf)[0] for _ in range(2)]
      self.assertEqual([ids.tolist() for _, ids in answered], [[*b"b:"]] * 2)
    run.end((0, 0), np.array([*b"abb:ab", _EOS]))
    self.assertEqual(run.answers(math.inf), [((0, 0), None)])
    self.assertEqual(run.outcomes(0)()[0].failure, "turn")

  def test_unresponsive_environments_raise(self):
    found = self.make("TwoTurns")
    run = found.episodes(found.prompts(base.TRAIN, [0]), 1)
    found._workers.longest_s = 0.05
    with self.assertRaisesRegex(TimeoutError, "source answered in 0.1 s"):
      run.answers(math.inf)
    self.assertBetween(found.waited_s, 0.1, 1.0)
    # Processes may have been in use for the prompts of the next block.
    found._answered_s = math.inf
    self.assertEmpty(run.answers(math.inf))

  def test_newly_freed_process_has_time_to_answer(self):
    environments = self.make("TwoTurns", num_workers=1)
    prompts = environments.prompts(base.TRAIN, [0, 0])
    episodes_run = environments.episodes(prompts, 1)
    turn = np.array([*b"ab", _EOS])
    episodes_run.end((0, 0), turn)
    episodes_run.answers(math.inf)
    environments._workers.longest_s = 0.1
    episodes_run.end((1, 0), turn)  # Waits for the process.
    time.sleep(0.4)  # A long turn is decoded.
    episodes_run.cut((0, 0), None)
    while not (answers := episodes_run.answers(0.01)):
      pass
    self.assertEqual(answers[0][0], (1, 0))

  def test_more_completions_than_processes_wait(self):
    found = self.make("TwoTurns", num_workers=1)
    _, outcomes = episodes.play(found, *[["ab", "abc"]] * 5)
    self.assertEqual([o.reward for o in outcomes], [1.25] * 5)

  def test_close_releases_unfinished_completions(self):
    found = self.make("TwoTurns")
    run = found.episodes(found.prompts(base.TRAIN, [0]), 1)
    run.end((0, 0), np.array([*b"ab", _EOS]))
    ((_, ids),) = run.answers(math.inf)
    self.assertEqual(ids.tolist(), [*b"b:"])
    found.close()
    found._workers.threads.shutdown(wait=True)  # None waits for a turn.

  def test_answer_is_tokenized_after_its_turn(self):
    found = self.make("TwoTurns")
    found._tokenizer = words = sentencepiece_case.make()
    turn = words.encode("ab", words.encode("a:"))
    for end, expected in (([], "b:"), ([words.eos_id], "\u2581b:")):
      run = found.episodes(found.prompts(base.TRAIN, [0]), 1)
      run.end((0, 0), np.array([*turn, *end]))
      ((_, ids),) = run.answers(math.inf)
      self.assertEqual("".join(words.tokens(ids)), expected)
      run.close()
    _, ids, _ = found.demonstration(base.TRAIN, 1, 20)
    self.assertEqual("".join(words.tokens(ids)), "c</s>\u2581c:ab</s>")

  def test_demonstrations_have_masks(self):
    found = self.make("TwoTurns")
    prompt, ids, mask = found.demonstration(base.TRAIN, 1, 20)
    self.assertEqual(bytes(prompt), b"c:")
    self.assertEqual(ids, [*b"c", _EOS, *b"c:ab", _EOS])
    self.assertEqual(mask, [1, 1, 0, 0, 1, 1, 1])
    _, ids, mask = found.demonstration(base.TRAIN, 1, 6)
    self.assertEqual((ids, mask), ([*b"c", _EOS], [1, 1]))
    with self.assertRaisesRegex(ValueError, "max_completion_tokens = 1: .* 2"):
      found.demonstration(base.TRAIN, 1, 1)

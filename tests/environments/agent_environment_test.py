# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents whose calls of a model are the turns of an episode."""

import json
import pathlib

from absl.testing import parameterized
import numpy as np
import pytest

from tba_jax.tasks import base
from tests.support import agents
from tests.support import episodes
from tests.support import silent_agent

_FILE = pathlib.Path(agents.__file__)
_CALL = '<tool_call>{"name": "add", "arguments": {"left": 0}}</tool_call>'


class AgentEnvironmentTest(parameterized.TestCase):

  def make(self, name, **task):
    return episodes.make(
        self,
        f"{_FILE}:{name}",
        max_prompt_tokens=1000,
        deadline_s=20.0,
        **task,
    )

  @parameterized.parameters("OpenAi", "Anthropic", "Responses")
  @pytest.mark.slow
  def test_clients_call_tools_and_get_their_results(self, name):
    found = self.make(name)
    (prompt,) = found.prompts(base.TRAIN, [0])
    system, user = prompt.observation
    self.assertEqual(system, {"role": "system", "content": "Add."})
    self.assertEqual(user, {"role": "user", "content": "0 + 1?"})
    (tool,) = prompt.tools
    self.assertEqual(tool["function"]["name"], "add")
    answers, (right, wrong) = episodes.play(
        found, [f"One moment. {_CALL}", "1"], ["2"]
    )
    (result,), none = answers
    expected = [{"role": "tool", "name": "add", "content": "1"}]
    self.assertEqual(json.loads(result), expected)
    self.assertEmpty(none)
    self.assertEqual((right.reward, right.num_turns), (1.0, 2), right.message)
    self.assertEqual((wrong.reward, wrong.num_turns), (0.0, 1))
    self.assertTrue(right.is_right)
    self.assertFalse(wrong.is_right)

  @pytest.mark.slow
  def test_a_process_imports_its_agents_dialect(self):
    file = pathlib.Path(silent_agent.__file__)
    found = episodes.make(self, f"{file}:Silent", max_prompt_tokens=1000)
    _, (outcome,) = episodes.play(found, ["1"])
    self.assertEqual((outcome.reward, outcome.failure), (1.0, ""))
    self.assertEqual(outcome.metrics, {"imported": 1})

  @pytest.mark.slow
  def test_agents_know_the_number_of_tokens(self):
    found = self.make("OpenAi")
    _, (outcome,) = episodes.play(found, [_CALL, "1"])
    # With the stop token of both turns.
    expected = {"tokens": len(_CALL) + 1 + 2, "models": 1.0}
    self.assertEqual(outcome.metrics, expected)

  @parameterized.parameters(
      ("raise", "error", "RuntimeError: it"),
      ("hang", "deadline", "no answer in"),
      ("rewrite", "history", "ends with 'Sayrewrite'"),
      ("shorten", "history", "ends with 'sa'"),
      ("n", "error", "n = 2: must be 1"),
      ("logprobs", "error", "logprobs: must be left out"),
      ("unknown", "error", "x: not supported"),
  )
  @pytest.mark.slow
  def test_failures_end_the_episode_and_name_their_cause(
      self, what, cause, text
  ):
    found = episodes.make(self, f"{_FILE}:Trouble", deadline_s=4.0)
    _, (outcome,) = episodes.play(found, [what, "x"])
    self.assertEqual(outcome.failure, cause, outcome.message)
    self.assertIn(text, outcome.message)

  @parameterized.parameters(("go!", "stop_strings"), ("go", ""))
  @pytest.mark.slow
  def test_stop_of_a_call_must_end_turns(self, turn, text):
    found = episodes.make(self, f"{_FILE}:Trouble")
    answers, (outcome,) = episodes.play(found, ["stop", turn])
    self.assertEqual(answers, [[";"]])
    self.assertEqual(outcome.failure, "error" if text else "")
    self.assertIn(text, outcome.message)

  @pytest.mark.slow
  def test_repeated_calls_get_the_same_answer(self):
    found = episodes.make(self, f"{_FILE}:Trouble")
    _, (outcome,) = episodes.play(found, ["repeat"])
    self.assertEqual((outcome.reward, outcome.num_turns), (1.0, 1))

  @parameterized.parameters(
      (("long", "a", "b", "c"), 3, "saylong;a;b;"),  # task.max_turns is 3.
      (("long", "a"), 2, "saylong;a;"),
  )
  @pytest.mark.slow
  def test_agents_reward_episodes_beyond_a_limit(self, turns, count, text):
    found = episodes.make(self, f"{_FILE}:Trouble")
    _, (outcome,) = episodes.play(found, turns)
    self.assertEqual(outcome.reward, 0.25, outcome.message)
    self.assertEqual(outcome.num_turns, count)
    self.assertEqual(outcome.metrics, {"letters": len(text)})

  @pytest.mark.slow
  def test_agents_reward_episodes_without_a_finished_turn(self):
    found = episodes.make(self, f"{_FILE}:Early")
    (prompt,) = found.prompts(base.TRAIN, [0])
    run = found.episodes([prompt], 1)
    run.cut((0, 0), np.array([*b"on and on"]))
    run.close()
    (outcome,) = run.outcomes(0)()
    self.assertEqual(outcome.failure, "", outcome.message)
    self.assertEqual((outcome.reward, outcome.num_turns), (9.0, 0))

  @pytest.mark.slow
  def test_answers_other_conversations_by_the_method(self):
    found = episodes.make(self, f"{_FILE}:Aside")
    answers, (outcome,) = episodes.play(found, ["it", "ok"])
    self.assertEqual(answers, [["[title?]"]])
    self.assertEqual((outcome.reward, outcome.num_turns), (1.0, 2))

  @pytest.mark.slow
  def test_agents_must_call_the_model(self):
    found = episodes.make(self, f"{_FILE}:Trouble")
    (prompt,) = found.prompts(base.TRAIN, [1])
    self.assertIn("before its agent called the model", prompt.failure[1])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of reward functions, in our form and in TRL's."""

import asyncio

from absl.testing import parameterized
import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import reward_calls

_CHAT = [{"role": "user", "content": "Sky?"}]
_ROW = {"prompt": "Sky?", "answer": "blue", "level": 2}


def ours(prompt, completion, row):
  return len(prompt) + len(completion) + row["level"]


async def ours_async(prompt, completion, row):
  await asyncio.sleep(0)
  return ours(prompt, completion, row)


def trl(prompts, completions, level, **kwargs):
  assert kwargs["answer"] == ["blue"] * len(level), kwargs
  return [len(p) + len(c) + n for p, c, n in zip(prompts, completions, level)]


async def trl_async(completions, level):
  await asyncio.sleep(0)
  return np.asarray([4 + len(c) + n for c, n in zip(completions, level)])


class Ranks:
  """Judges completions by one another."""

  def __call__(self, completions, **kwargs):
    order = sorted(completions, key=len)
    return [order.index(c) for c in completions]


def _call(function, *completions, prompt="Sky?"):
  return reward_calls.call(function, prompt, completions, _ROW, _ROW)


class RewardCallsTest(parameterized.TestCase):

  @parameterized.parameters(
      (ours, False), (ours_async, True), (trl, True), (trl_async, True)
  )
  def test_forms_give_same_numbers(self, function, takes_group):
    self.assertEqual(_call(function, "ab", "abc"), [8, 9])
    self.assertEqual(reward_calls.takes_group(function), takes_group)

  def test_completions_of_prompt_are_judged_together(self):
    self.assertTrue(reward_calls.takes_group(Ranks()))
    self.assertEqual(_call(Ranks(), "ccc", "a", "bb"), [2, 0, 1])

  def test_trl_gets_messages_of_chat_prompts_and_ours_gets_text(self):
    seen = []
    see = lambda completions, prompts: seen.extend([prompts, completions]) or [
        1
    ]
    _call(see, "blue", prompt=_CHAT)
    message = {"role": "assistant", "content": "blue"}
    self.assertEqual(seen, [[_CHAT], [[message]]])
    plain = lambda prompt, completion, row: (prompt, completion)
    self.assertEqual(_call(plain, "blue", prompt=_CHAT), [(_CHAT, "blue")])

  @parameterized.parameters(
      (lambda completions: [1], "list of 1, \\[1\\]: must be a list of 2"),
      (lambda completions: "ab", "returned str, 'ab': must be a list of 2"),
      (lambda completions: None, "returned NoneType, None: must be a list"),
      (lambda completions, gold: [1, 2], "argument 'gold' is no column of the"
       " data, which has prompt, answer, level"),
      (lambda completions: [1 / 0], "reward_calls_test.py:.*ZeroDivision"),
  )  # fmt: skip
  def test_wrong_group_names_function_and_rule(self, function, why):
    errors = _call(function, "a", "b")
    self.assertLen(errors, 2)
    for error in errors:
      self.assertIsInstance(error, base.RewardError)
      self.assertRegex(str(error), why)

  def test_arguments_of_trl_are_passed_by_name(self):
    def trl(completions, completion_ids, log_metric, trainer_state=None):
      assert trainer_state is None
      log_metric("longest", max(map(len, completion_ids)))
      return [len(completion_ids[0]), None]

    given = reward_calls.call(
        trl, "Sky?", ["blue", "red"], _ROW, _ROW, [(4, 2), (5, 6, 2)]
    )
    expected = [{"reward": 2, "longest": 3}, {"reward": None, "longest": 3}]
    self.assertEqual(given, expected)
    # As in TRL's own example, with the other arguments left in kwargs.
    lengths = lambda completion_ids, **kwargs: [len(i) for i in completion_ids]
    self.assertTrue(reward_calls.takes_group(lengths))
    given = reward_calls.call(lengths, "Sky?", ["a"], _ROW, _ROW, [(4, 2)])
    self.assertEqual(given, [2])
    everything = lambda **kwargs: [len(kwargs["completions"])]
    self.assertEqual(_call(everything, "a"), [1])

  @parameterized.parameters(
      (lambda completions, trainer_state: [1], "'trainer_state' is not passed"
       " here: .*START:END:STEPS"),
      (lambda completions, log_extra: [1], "'log_extra' is not passed here:"
       " samples.jsonl has"),
      (lambda completions, environments: [1], "'environments' is not passed"
       " here: environment=…"),
      (lambda completion: 1, r"takes \(completion\): must take \(prompt,"
       r" completion, row\), or as in TRL \(completions, \*\*kwargs\)"),
  )  # fmt: skip
  def test_unpassed_argument_is_answered(self, function, why):
    (error,) = _call(function, "a")
    self.assertRegex(str(error), why)

  def test_failure_of_one_completion_leaves_others(self):
    async def fails(prompt, completion, row):
      return 1 / len(completion)

    for function in (fails, lambda p, c, r: 1 / len(c)):
      error, value = _call(function, "", "ab")
      self.assertIn("ZeroDivisionError", str(error))
      self.assertEqual(value, 0.5)

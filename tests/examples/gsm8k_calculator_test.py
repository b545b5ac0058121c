# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K with a calculator: its sums, and that its solutions are right.

The test of the published problems skips where TBA_JAX_DATA has no `gsm8k`.
"""

import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.environments import tool_environment
from tba_jax.system import user_code

_FILE = pathlib.Path(__file__).parents[2] / "examples" / "gsm8k_calculator.py"
_REAL = pathlib.Path(os.environ.get("TBA_JAX_DATA", "")) / "gsm8k"


def load(name):
  return user_code.load_function("config.task.source", f"{_FILE}:{name}")


def demonstrate(make, seed):
  """Returns who said what in a demonstration, and its reward."""
  environment = tool_environment.wrap(make())
  said, reward, done = [environment.reset(seed=seed)], 0.0, False
  while not done:
    turn = environment.demonstrate()
    answer, added, done, _ = environment.step(turn)
    said += [turn, answer]
    reward += added
  return said, reward


class Gsm8kCalculatorTest(parameterized.TestCase):

  @parameterized.parameters(
      ("48/2", "24"),
      ("12/60*50", "10"),
      (" -3+.5", "-2.5"),
      ("1/3", "0.333333"),
      ("(3+4)*2", "14"),
      ("1/0", "error"),
      ("9**9", "error"),
      ("3 apples", "error"),
      ("(" * 10_000, "error"),
  )
  def test_sums(self, expression, value):
    self.assertEqual(load("value_of")(expression), value)

  def test_synthetic_solutions_are_right(self):
    make, counts = load("MadeUp"), []
    for seed in range(200):
      said, reward = demonstrate(make, seed)
      self.assertEqual(reward, 1.0)
      self.assertNotIn("error\n", said)
      counts.append(len(said[1::2]))
    # Half of them calculate two sums.
    self.assertBetween(counts.count(3), 70, 130)
    self.assertEqual({*counts}, {1, 3})
    known = make.words
    for text in said:
      for word in filter(str.isalpha, text.split()):
        self.assertTrue(any(word in other for other in known), word)

  def test_wrong_number_is_not_rewarded(self):
    environment = load("MadeUp")()
    environment.reset(seed=0)
    self.assertEqual(environment.get_reward("#### 100"), 0.0)
    self.assertEqual(environment.get_reward("calculate: 1+1"), 0.0)

  def test_published_problems_without_folder_are_error(self):
    with mock.patch.dict(os.environ):
      os.environ.pop("GSM8K", None)
      with self.assertRaisesRegex(ValueError, "set GSM8K to the folder"):
        load("Gsm8k")().reset(seed=0)

  @absltest.skipUnless(_REAL.is_dir(), "TBA_JAX_DATA has no gsm8k")
  def test_published_solutions_are_right(self):
    with mock.patch.dict(os.environ, GSM8K=str(_REAL)):
      make = load("Gsm8k")
      sums = errors = 0
      for seed in range(2000):
        said, reward = demonstrate(make, seed)
        self.assertEqual(reward, 1.0, said)
        sums += len(said[2:-2:2])
        errors += said.count("error\n")
    self.assertGreater(sums, 5000)
    self.assertLess(errors, 10)

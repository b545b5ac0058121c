# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Only pairs with few solutions, and random valid chains seldom solve them."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import countdown


def _task(**fields) -> countdown.CountdownSparse:
  cls = countdown.CountdownSparse
  return cls(**{**cls.FIELDS, **fields})


def _random_chain(prompt: str, rng: np.random.Generator) -> str:
  """Steps with operands and operations drawn evenly, as far as they go."""
  left = [int(n) for n in prompt.partition(">")[0].split(",")]
  steps = []
  while len(left) > 1:
    i, j = rng.choice(len(left), size=2, replace=False)
    a, b = max(left[i], left[j]), min(left[i], left[j])
    operation = str(rng.choice(list(answers.OPERATIONS)))
    result = answers.apply_operation(operation, a, b)
    left = [n for k, n in enumerate(left) if k not in (i, j)] + [result]
    steps.append(f"{a}{operation}{b}={result}")
  return ",".join(steps)


class CountdownSparseTest(parameterized.TestCase):

  @parameterized.parameters(1, 2)
  def test_no_pair_has_more_solutions(self, limit):
    task = _task(max_solutions=limit)
    found = {
        task.num_solutions(split, i)
        for split in base.SPLITS
        for i in range(0, task.num_prompts(split), 101)
    }
    self.assertEqual(found, set(range(1, limit + 1)))

  def test_references_are_right(self):
    task = _task()
    rng = np.random.default_rng(0)
    for i in range(0, task.num_prompts("train"), 997):
      solution = task.reference_completion("train", i, rng)
      self.assertEqual(task.reward("train", i, solution), 1.0)

  def test_reward_is_rare(self):
    task = _task()
    rng = np.random.default_rng(1)
    size = task.num_prompts("train")
    rewards = [
        task.reward("train", i, _random_chain(task.prompt("train", i), rng))
        for i in rng.integers(size, size=3000).tolist()
    ]
    self.assertBetween(np.mean(rewards), 0.001, 0.02)

  def test_a_wrong_field(self):
    with self.assertRaisesRegex(ValueError, "config.task.max_solutions=0"):
      _task(max_solutions=0)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Why a completion of countdown is wrong: words by hand, and no reason else."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import countdown


def _explain(text):
  return countdown.explain(
      [3, 4, 7, 2],
      17,
      text,
      read_step=answers.read_step,
      max_value=99,
      max_length=27,
  )


class CountdownReasonTest(parameterized.TestCase):

  @parameterized.parameters(
      ("4*3=12,12+7=19,19-2=17", ""),
      ("", "is empty"),
      ("4*3=12," * 9, "has 63 characters, a solution up to 27"),
      ("17", 'step 1: "17" is not of the form 4*3=12'),
      ("4*3=12,12+7=17", "step 2: 12+7 is 19, not 17"),
      ("4*3=12,12+7=19,19+2=21", "gives 21, not 17"),
      ("4*3=12,12+3=15,15+2=17", "step 2: uses 3 once too often"),
      (
          "4*3=12,12-5=7,7+7=14",
          "step 2: uses 5, which is not among 7, 2",
      ),
      ("7*2=14,14+3=17", "ends with 4, 17 left over"),
      (
          "4*3=12,12+7=19,19-2=17,1+1=2",
          "has 28 characters, a solution up to 27",
      ),
      ("4-3=1,7+2=9,9+1=10,10-7=3", "has more than 3 steps"),
      (
          "3*4=12,12+7=19,19-2=17",
          "step 1: the larger of 3 and 4 has to stand first",
      ),
      ("7-7=0,4*3=12,12+2=14", "step 1: 0 is not from 1 to 99"),
      ("4*3=12, 12+7=19", 'step 2: " 12+7=19" is not of the form 4*3=12'),
  )
  def test_words(self, text, reason):
    self.assertEqual(_explain(text), reason)

  @parameterized.parameters("train", "held_out")
  def test_there_is_a_reason_exactly_where_there_is_no_reward(self, split):
    task = countdown.Countdown(**countdown.Countdown.FIELDS)
    rng = np.random.default_rng(0)
    words = task.tokenizer_words()
    counts = [0, 0]
    for i in range(300):
      text = task.reference_completion(split, i, rng)
      place = rng.integers(len(text) + 1)
      for one in (text, text[:place], text[:place] + rng.choice(words)):
        right = task.solution_key(split, i, one) is not None
        self.assertEqual(task.explain(split, i, one) == "", right, one)
        counts[right] += 1
    self.assertGreater(min(counts), 100)


if __name__ == "__main__":
  absltest.main()

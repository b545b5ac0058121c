# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Final numbers of texts, and of texts that were written to cheat or break."""

import time

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.tasks import answers


class NumbersTest(parameterized.TestCase):

  @parameterized.parameters(
      ("#### 72", 72.0),
      ("She has 5 and he has 7.", 7.0),
      ("It costs $1,080.", 1080.0),
      ("109,200,000 people", 109_200_000.0),
      ("1,2,3", 3.0),
      ("12,34", 34.0),
      ("1,0800", 800.0),
      ("the loss is -10", -10.0),
      ("= -3", -3.0),
      ("10-3", 3.0),
      ("(5)-2", 2.0),
      ("x-5", 5.0),
      ("+4", 4.0),
      ("half is .5", 0.5),
      ("3.25 hours", 3.25),
      ("72.0", 72.0),
      ("5.", 5.0),
      ("1e3", 1000.0),
      ("2.5E-1", 0.25),
      ("5e", 5.0),
      ("72nd", 72.0),
      ("50%", 50.0),
      ("007", 7.0),
      ("<eos> 3 <pad>", 3.0),
  )
  def test_last_number(self, text, value):
    self.assertEqual(answers.last_number(text), value)

  @parameterized.parameters(
      "", "no number", "٧", "７", "½", "Ⅳ", "nan", "inf", "-", ".", "1" * 41,
      "7e999", "-7e999", None, 7, b"7",
  )  # fmt: skip
  def test_no_number(self, text):
    self.assertIsNone(answers.last_number(text))

  @parameterized.parameters(
      ("So.\n#### 72", 72.0),
      ("#### 1,080", 1080.0),
      ("#### $5.50", 5.5),
      ("#### 20%", 20.0),
      ("#### -3.", -3.0),
      ("#### 1\nno, #### 2", 2.0),
      ("####72", 72.0),
      ("#### 72\nand 9 more", 72.0),
  )
  def test_final_number(self, text, value):
    self.assertEqual(answers.final_number(text), value)

  @parameterized.parameters(
      "72", "### 72", "####\n72", "#### 7 or 8", "#### seven", "#### 7 ####",
      "", None, "#### 7=7", "#### 1 2",
  )  # fmt: skip
  def test_no_final_number(self, text):
    self.assertIsNone(answers.final_number(text))

  def test_calculator_marks_go(self):
    text = "48/2 = <<48/2=24>>24 and <<24+48=72>>72\n#### 72"
    self.assertEqual(
        answers.without_calculator(text), "48/2 = 24 and 72\n#### 72"
    )
    self.assertEqual(answers.without_calculator("a << b"), "a << b")

  @parameterized.parameters("1", "1,", "-", ".", "1.", "1e", "#", "#### ", "1 ")
  def test_time_is_linear_in_the_length(self, piece):
    # A quadratic reader would take minutes.
    started = time.monotonic()
    answers.last_number(piece * 200_000)
    answers.final_number(piece * 200_000)
    self.assertLess(time.monotonic() - started, 30.0)


if __name__ == "__main__":
  absltest.main()

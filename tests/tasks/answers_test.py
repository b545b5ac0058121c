# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of numbers and boxes in texts, adversarial texts among them."""

import time

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.tasks import answers


class ParseIntegerTest(parameterized.TestCase):

  @parameterized.parameters("0", "7", "10", "123456789")
  def test_reads_a_canonical_number(self, text):
    self.assertEqual(answers.parse_integer(text), int(text))

  @parameterized.parameters(
      "", "00", "07", "+7", "-7", " 7", "7\n", "7.0", "1e3", "1_0", "0x1",
      "٧", "７", "²", "7\u200b", "\u00a07", "1" * 10, "1" * 1_000_000,
      None, 7, b"7",
  )  # fmt: skip
  def test_refuses_another_spelling(self, text):
    self.assertIsNone(answers.parse_integer(text))


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
      ("10-3", 3.0),
      ("(5)-2", 2.0),
      ("x-5", 5.0),
      ("+4", 4.0),
      ("half is .5", 0.5),
      ("3.25 hours", 3.25),
      ("5.", 5.0),
      ("1e3", 1000.0),
      ("2.5E-1", 0.25),
      ("5e", 5.0),
      ("72nd", 72.0),
      ("007", 7.0),
      ("<eos> 3 <pad>", 3.0),
  )
  def test_last_number(self, text, value):
    self.assertEqual(answers.last_number(text), value)

  @parameterized.parameters(
      "", "no number", "٧", "７", "½", "nan", "inf", "-", ".", "1" * 41,
      "7e999", "-7e999", None, 7, b"7",
  )  # fmt: skip
  def test_no_number(self, text):
    self.assertIsNone(answers.last_number(text))
    self.assertIsNone(answers.final_answer(text))

  @parameterized.parameters(
      ("So.\n#### 72", 72.0),
      ("#### 1,080", 1080.0),
      ("#### $5.50", 5.5),
      ("#### 20%", 20.0),
      ("#### -3.", -3.0),
      ("#### 1\nno, #### 2", 2.0),
      ("####72", 72.0),
      ("#### 72\nand 9 more", 72.0),
      ("72", None),
      ("### 72", None),
      ("####\n72", None),
      ("#### 7 or 8", None),
      ("#### seven", None),
      ("#### 7 ####", None),
      ("#### 7=7", None),
      ("#### 1 2", None),
      ("", None),
      (None, None),
  )
  def test_number_after_hashes(self, text, value):
    self.assertEqual(answers.number_after_hashes(text), value)

  def test_calculator_marks_go(self):
    text = "48/2 = <<48/2=24>>24 and <<24+48=72>>72\n#### 72"
    self.assertEqual(
        answers.without_calculator(text), "48/2 = 24 and 72\n#### 72"
    )
    self.assertEqual(answers.without_calculator("a << b"), "a << b")


class FinalAnswerTest(parameterized.TestCase):

  @parameterized.parameters(
      # The first `####`.
      ("2+2=4\n#### 4", 4.0),
      ("#### 18 dollars", 18.0),
      ("#### **18**", 18.0),
      (r"#### \boxed{18}", 18.0),
      ("####\u00a018", 18.0),
      ("####\n72", 72.0),
      ("#### 5 + 3 = 8", 8.0),
      ("#### 1\n#### 2", 1.0),
      ("#### seven\n5", None),
      # Else the box, else the number after "answer is", else the last number.
      (r"7, so \boxed{5}. I used 2 steps.", 5.0),
      (r"The answer is 4, no: \boxed{5}", 5.0),
      ("The answer is 18. I used 2 steps.", 18.0),
      ("The answer is: $1,080.50.", 1080.5),
      ("The answer is 5? No, the answer is 6.", 6.0),
      ("Final answer: **72** apples for 3", 72.0),
      ("The answer is not known, but 5.", 5.0),
      ("She has 5 and he has 7.", 7.0),
      # What follows the answer.
      ("#### 18\n\nQuestion: Ann takes 2", 18.0),
      ("It is 18.\n\nQuestion: Ann takes 2", 18.0),
      ("It is 18\nQ: Ann takes 2", 18.0),
      ("18</s>2 3", 18.0),
      ("It is 18<|im_end|>\n5", 18.0),
      # Signs.
      ("it is −5", -5.0),
      ("#### -$5", -5.0),
      ("#### $-5", -5.0),
      ("($5)", -5.0),
      ("#### ($5)", -5.0),
      ("The answer is ($5).", -5.0),
      ("Ann spent all of it ($5)", 5.0),
      ("10 - 3", 3.0),
      ("10-3", 3.0),
      # Fractions.
      ("3/4", 0.75),
      (r"\frac{6}{2}", 3.0),
      (r"\boxed{-\dfrac{1}{2}}", -0.5),
      ("2 1/2 cups", 2.5),
      (r"2\frac{1}{2}", 2.5),
      ("12/4 = 3", 3.0),
      ("3/4/2020", 2020.0),
      ("1/0", None),
      # Separators and units.
      ("11{,}050", 11050.0),
      ("1 234", 1234.0),
      ("1\u00a0234 km", 1234.0),
      ("12 345 678", 12345678.0),
      ("2 34", 34.0),
      (r"\$18 a day", 18.0),
      (r"50\%", 50.0),
      ("1e3", 1000.0),
      ("9" * 50, None),
  )
  def test_what_a_person_reads(self, text, value):
    self.assertEqual(answers.final_answer(text), value)


class LastBoxedTest(parameterized.TestCase):

  @parameterized.parameters(
      (r"so \boxed{5}.", "5"),
      (r"\boxed{1} or \boxed{ 2 }", "2"),
      (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
      (r"\boxed{\boxed{3}}", "3"),
      (r"\fbox{7}", "7"),
      (r"$\boxed 8$, as told", "8"),
      (r"\boxed 9." + "\nmore", "9"),
      (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
      (r"\boxed{a}} {", "a"),
      ("5", None),
      ("", None),
      (r"\boxed{", None),
      (r"\boxed{}", None),
      (r"\boxed", None),
      (r"\boxed{1} and \boxed{2", None),
      (r"\boxedx{1}", None),
      (r"\boxed}1{", "}1{"),
  )
  def test_which_counts(self, text, found):
    self.assertEqual(answers.last_boxed(text), found)


class LinearTimeTest(parameterized.TestCase):

  @parameterized.parameters(
      "1", "1,", "-", ".", "1.", "1e", "#", "#### ", "1 ", "1 111 ", "\n",
      "Question:", "\n ", "answer is ", "1/", r"\frac{", r"\boxed{", r"\boxed",
      "$", "( $", "1 1/", "{,}",
  )  # fmt: skip
  def test_time_is_linear_in_the_length(self, piece):
    # A quadratic reader would take minutes.
    started = time.monotonic()
    for read in (
        answers.last_number,
        answers.number_after_hashes,
        answers.final_answer,
        answers.last_boxed,
    ):
      read(piece * 100_000)
    self.assertLess(time.monotonic() - started, 20.0)


if __name__ == "__main__":
  absltest.main()

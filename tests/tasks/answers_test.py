# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of numbers and boxes in texts, adversarial texts among them."""

import json
import pathlib
import time

from absl.testing import parameterized
import pytest

from tba_jax.tasks import answers

# Written by hand for these tests.
_DATA = pathlib.Path(__file__).parent / "answers_read.jsonl"


class ParseIntegerTest(parameterized.TestCase):

  @parameterized.parameters("0", "7", "10", "123456789")
  def test_reads_canonical_number(self, text):
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
  def test_reads_last_number(self, text, value):
    self.assertEqual(answers.last_number(text), value)

  @parameterized.parameters(
      "", "no number", "٧", "７", "½", "nan", "inf", "-", ".", "1" * 41,
      "7e999", "-7e999", None, 7, b"7",
  )  # fmt: skip
  def test_returns_none_without_number(self, text):
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


# Number that a person reads as the answer of a completion, None if there is
# none.
_READ = (
    # Marked answers: the last mark counts.
    ("2+2=4\n#### 4", 4.0),
    ("#### 18 dollars", 18.0),
    ("#### **18**", 18.0),
    (r"#### \boxed{18}", 18.0),
    ("####\u00a018", 18.0),
    ("####\n72", 72.0),
    ("#### 5 + 3 = 8", 8.0),
    ("#### 1\nNo, wait.\n#### 2", 2.0),
    ("#### 1 #### 2", 2.0),
    (r"\boxed{5}, no: \boxed{6}", 6.0),
    ("#### 5\nSo \\boxed{6}.", 6.0),
    (r"\boxed{5}" + "\n#### 6", 6.0),
    ("#### 18\nNo, the answer is 20.", 20.0),
    ("#### 18\nThe answer is in dollars for 2 days.", 18.0),
    ("#### 18\nAnn was 9.", 18.0),
    (r"7, so \boxed{5}. I used 2 steps.", 5.0),
    (r"The answer is 4, no: \boxed{5}", 5.0),
    ("#### unknown\n5", None),
    (r"The 5 of us: \boxed{x}", None),
    # Answers that are said.
    ("The answer is 18. I used 2 steps.", 18.0),
    ("The answer is: $1,080.50.", 1080.5),
    ("The answer is 5? No, the answer is 6.", 6.0),
    ("Final answer: **72** apples for 3", 72.0),
    ("The answer is not known, but 5.", 5.0),
    ("The answer is that Ann has 18 eggs.", 18.0),
    # The last number.
    ("She has 5 and he has 7.", 7.0),
    ("9 x 2 = 18", 18.0),
    ("18 = 6 x 3", 18.0),
    ("", None),
    ("I do not know.", None),
    # Text that follows the answer.
    ("#### 18\n\nQuestion: Ann takes 2", 18.0),
    ("It is 18.\n\nQuestion: Ann takes 2", 18.0),
    ("It is 18\nQ: Ann takes 2", 18.0),
    ("18</s>2 3", 18.0),
    ("It is 18<|im_end|>\n5", 18.0),
    ("18 (9 eggs x $2)", 18.0),
    ("She earns $18 (9 eggs at $2).", 18.0),
    ("She earns it all (9 x 2 = 18)", 18.0),
    ("Ann bought 3 books ($18)", 18.0),
    # Signs.
    ("it is −5", -5.0),
    ("#### -$5", -5.0),
    ("#### $-5", -5.0),
    ("($5)", -5.0),
    ("#### ($5)", -5.0),
    ("The answer is ($5).", -5.0),
    ("Ann spent all of it ($5)", 5.0),
    ("Eggs:\n3\n- 18", 18.0),
    ("####\n- 18", 18.0),
    ("Answer:\n - 18 eggs", 18.0),
    ("#### - 5", -5.0),
    (r"\boxed{- 5}", -5.0),
    (r"\boxed{- \frac{1}{2}}", -0.5),
    ("The answer is x = - 5.", -5.0),
    ("The answer is negative 5.", -5.0),
    ("It is Minus $5", -5.0),
    ("10 minus 3", None),
    ("10 minus 3 is 7", 7.0),
    # Fractions.
    ("3/4", 0.75),
    (r"\frac{6}{2}", 3.0),
    (r"\boxed{\frac34}", 0.75),
    (r"1\dfrac1{2}", 1.5),
    (r"\boxed{\frac{1}2}", 0.5),
    (r"\boxed{\frac123}", None),
    ("The answer is 3 / 4.", 0.75),
    (r"\boxed{-\dfrac{1}{2}}", -0.5),
    ("2 1/2 cups", 2.5),
    (r"2\frac{1}{2}", 2.5),
    ("12/4 = 3", 3.0),
    ("3/4/2020", 2020.0),
    ("1/0", None),
    # Separators, units, scales and digits.
    ("11{,}050", 11050.0),
    ("1 234", 1234.0),
    ("1\u00a0234 km", 1234.0),
    ("12 345 678", 12345678.0),
    ("2 34", 34.0),
    (r"\$18 a day", 18.0),
    (r"50\%", 50.0),
    ("18eggs", 18.0),
    ("USD18", 18.0),
    ("US$ 18", 18.0),
    ("1e3", 1000.0),
    ("9" * 50, None),
    ("1 million", 1e6),
    ("#### $2.5 million", 2.5e6),
    ("3 Thousand people", 3000.0),
    ("5 million-dollar houses", 5.0),
    ("１８", 18.0),
    ("＃＃＃＃ １，０８０", 1080.0),
    # Words, where they are the whole statement.
    ("eighteen", 18.0),
    ("#### Eighteen", 18.0),
    ("The answer is twenty-five dollars.", 25.0),
    ("#### one hundred and five", 105.0),
    ("#### two thousand three hundred", 2300.0),
    ("#### three million", 3e6),
    ("The answer is one of them.", None),
    ("#### two three", None),
    ("#### twenty twelve", None),
    ("#### hundred", None),
    ("#### and two", None),
    ("#### two two", None),
    # No quantities.
    ("15:03", None),
    ("#### 15:03", None),
    ("Ann has 5 eggs at 15:03", 5.0),
    ("x3", None),
    ("GPT4", None),
    ("Ann has 5 eggs in box_3", 5.0),
    ("18th", None),
    ("Ann has 5 eggs on the 18th", 5.0),
    # Formulas left to compute, and what is left open.
    ("2^10", None),
    ("#### 9*2", None),
    ("#### 9 x $2", None),
    (r"#### 9 \times 2", None),
    (r"\boxed{2^{10}}", None),
    (r"\boxed{\sqrt{16}}", None),
    (r"so \boxed{2\pi}", None),
    ("10 - 3", None),
    ("10-3", None),
    ("It takes 5-7 days", None),
    ("10 - 3 = 7", 7.0),
    ("The answer is 20% of $50, which is $10.", 10.0),
    ("The answer is 20% of 50, or 10.", 10.0),
    ("The answer is 10, which is 20% of 50.", 10.0),
    ("The answer is 5 + 3 - 2, that is 6.", 6.0),
    ("The answer is 3 x 5, which is odd.", None),
    ("#### 18, 19", None),
    (r"\boxed{(3, -5)}", None),
    (r"so \boxed{\{1080, 2\}}", None),
    ("The answer is 18, 2 of them red.", 18.0),
    ("#### 18 or 19", None),
    ("The answer is 18 eggs or 19 eggs.", None),
    ("#### 18 or so", 18.0),
)


class FinalAnswerTest(parameterized.TestCase):

  @parameterized.parameters(*_READ)
  def test_final_answer_matches_human_reading(self, text, value):
    self.assertEqual(answers.final_answer(text), value)

  def test_final_answers_in_file_match_human_reading(self):
    cases = [json.loads(line) for line in _DATA.read_text("utf-8").splitlines()]
    cases = [case for case in cases if "completion" in case]
    self.assertGreater(len(cases), 100)
    for case in cases:
      with self.subTest(**case):
        read = answers.final_answer(case["completion"])
        self.assertEqual(read, case["number"])


class ThinkingTest(parameterized.TestCase):

  @parameterized.parameters(
      ("18", "18"),
      ("<think>20</think>18", "18"),
      ("20</think>18", "18"),
      ("<think>a</think>b<think>20</think>18", "18"),
      ("<thinking>20</thinking>18", "18"),
      ("18 <think>20</think>", "18 "),
      ("<think>20", ""),
      ("18 <think>20", ""),
      ("<think>a</think>18<think>20", ""),
      ("", ""),
  )
  def test_answer_follows_thoughts(self, completion, answer):
    self.assertEqual(answers.after_thinking(completion), answer)

  @parameterized.parameters(
      ("<think>\n", "20", "<think>20"),
      ("2+2?<think>", "20</think>18", "20</think>18"),
      ("<think>\n\n</think>\n\n", "18", "18"),
      ("What is <think>?", "18", "18"),
      ("2+2?", "18", "18"),
  )
  def test_prompt_may_open_thoughts(self, prompt, completion, judged):
    self.assertEqual(answers.with_opening(prompt, completion), judged)


class TbaNumberTest(parameterized.TestCase):

  @parameterized.parameters(
      ("#### 1,080", 1080.0),
      ("10-3", -3.0),
      ("1,2", 12.0),
      ("1, 2", 2.0),
      ("(5)+2", 2.0),
      ("5.", 5.0),
      ("-.5", -0.5),
      ("2e3", 2000.0),
      ("2E3", 3.0),
      ("none", None),
      (None, None),
  )
  def test_tba_reads_all_signs_and_no_comma(self, text, value):
    self.assertEqual(answers.tba_last_number(text), value)


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
  def test_last_box_counts(self, text, found):
    self.assertEqual(answers.last_boxed(text), found)


class LinearTimeTest(parameterized.TestCase):

  @parameterized.parameters(
      "1", "1,", "-", ".", "1.", "1e", "#", "#### ", "1 ", "1 111 ", "\n",
      "Question:", "\n ", "answer is ", "1/", r"\frac{", r"\boxed{", r"\boxed",
      "$", "( $", "1 1/", "{,}", "1:", "1^", "1 x ", "1 million ", "a1",
      "1 or ", "(1 2)", "(", "two ", "１", "1t", r"\boxed{1}", "1 = ", "1,1",
      "<answer>", "<think>", "1. ", "\n1. ", "not 1 ",
      "1 a (1 a) ", r"\text{", "½",
  )  # fmt: skip
  @pytest.mark.slow
  def test_time_is_linear_in_length(self, piece):
    # A quadratic reader would take minutes.
    started = time.monotonic()
    for read in (
        answers.last_number,
        answers.tba_last_number,
        answers.number_after_hashes,
        answers.after_thinking,
        answers.final_answer,
        answers.last_boxed,
    ):
      read(piece * 100_000)
    self.assertLess(time.monotonic() - started, 20.0)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict reading of numbers and steps."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.tasks import answers


class ParseIntegerTest(parameterized.TestCase):

  @parameterized.parameters("0", "7", "10", "99", "123456789")
  def test_reads_a_canonical_number(self, text):
    self.assertEqual(answers.parse_integer(text), int(text))

  @parameterized.parameters(
      "", "00", "07", "+7", "-7", " 7", "7 ", "7\n", "7.0", "1e3", "1_0", "0x1"
  )
  def test_refuses_another_spelling(self, text):
    self.assertIsNone(answers.parse_integer(text))

  @parameterized.parameters("٧", "７", "²", "Ⅷ", "7\u200b", "\u00a07")
  def test_refuses_digits_outside_ascii(self, text):
    self.assertIsNone(answers.parse_integer(text))

  def test_refuses_long_text_without_converting_it(self):
    self.assertIsNone(answers.parse_integer("1" * 10))
    # int() itself would raise ValueError past its digit limit.
    self.assertIsNone(answers.parse_integer("1" * 1_000_000))

  def test_refuses_what_is_not_text(self):
    for value in (None, 7, b"7", ["7"]):
      self.assertIsNone(answers.parse_integer(value))
      self.assertIsNone(answers.parse_step(value))


class ApplyOperationTest(parameterized.TestCase):

  @parameterized.parameters(("+", 10), ("-", 4), ("*", 21))
  def test_applies(self, operation, expected):
    self.assertEqual(answers.apply_operation(operation, 7, 3), expected)

  @parameterized.parameters("/", "", "**", "+-")
  def test_refuses_an_unknown_operation(self, operation):
    with self.assertRaisesRegex(ValueError, "allowed"):
      answers.apply_operation(operation, 7, 3)


class ReadStepTest(absltest.TestCase):

  def test_reads_a_step_whether_it_is_true_or_not(self):
    self.assertEqual(answers.read_step("3*4=13"), (3, "*", 4, 13, 12))
    self.assertEqual(answers.read_step("3*4=12"), (3, "*", 4, 12, 12))
    for text in ("3*4", "03*4=12", "3*4=12,", "", None, "1" * 100):
      self.assertIsNone(answers.read_step(text))


class ParseStepTest(parameterized.TestCase):

  @parameterized.parameters(
      ("3*4=12", (3, "*", 4, 12)),
      ("7-7=0", (7, "-", 7, 0)),
      ("12+0=12", (12, "+", 0, 12)),
  )
  def test_reads_a_true_step(self, text, expected):
    self.assertEqual(answers.parse_step(text), expected)

  @parameterized.parameters("3*4=13", "3+4=12", "4-3=2", "0=0", "12=12")
  def test_refuses_a_false_step(self, text):
    self.assertIsNone(answers.parse_step(text))

  @parameterized.parameters(
      "",
      "3*4",
      "3*4=",
      "*4=12",
      "3*4=12=12",
      "3*4*1=12",
      "03*4=12",
      "3*4=012",
      "3 * 4=12",
      "3*4=12\n",
      "3*-4=-12",
      "+3*4=12",
      "12/4=3",
      "３*4=12",
      "3×4=12",
      "3*4=12;",
      "<pad>3*4=12",
  )
  def test_refuses_another_form(self, text):
    self.assertIsNone(answers.parse_step(text))

  def test_refuses_long_numbers(self):
    ones = "1" * 5000
    self.assertIsNone(answers.parse_step(f"{ones}-{ones}=0"))


if __name__ == "__main__":
  absltest.main()

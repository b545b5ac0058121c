# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of equal answers of mathematics; `answers_read.jsonl` has more."""

import json
import os
import pathlib
import tempfile

from absl.testing import parameterized

from tba_jax.tasks import math_answers

_READ = pathlib.Path(__file__).parent / "answers_read.jsonl"


class EqualTest(parameterized.TestCase):

  @parameterized.parameters(
      ("5", "5"),
      ("5", "$5$"),
      ("5", "5."),
      ("5", "5.0"),
      ("05", "+5"),
      (".5", "0.5"),
      (r"\text{Evelyn}", "Evelyn"),
      (r"\text{ even}", "even"),
      (r"11,\! 111", "11111"),
      ("1,080", "1080"),
      (r"\$18.90", "18.90"),
      (r"30^\circ", "30"),
      (r"30^{\circ}", "30"),
      (r"50\%", "50"),
      (r"\left( 1, 2 \right)", "(1,2)"),
      (r"\dfrac{1}{2}", r"\frac{1}{2}"),
      # Answers that only math-verify knows.
      (r"\frac{1}{2}", "0.5"),
      (r"\frac{3}{4}", r"\frac{6}{8}"),
      ("x+1", "1+x"),
      (r"\sqrt{12}", r"2\sqrt{3}"),
      ("1,2", "2,1"),
      ("100, 200", "200, 100"),
      ("100, 200", "100,200"),
      ("1,080", r"1,\!080."),
      ("2^{10}", "1024"),
  )
  def test_accepts_same_answer(self, reference, answer):
    self.assertTrue(math_answers.equal(reference, answer))

  @parameterized.parameters(
      ("5", "6"),
      ("5", "-5"),
      ("12", "1 2"),
      ("1080", "1, 080"),
      ("100, 200", "100200"),
      ("5", ""),
      ("5", "$"),
      ("", ""),
      (r"\text{}", ""),
      ("(1,2)", "(2,1)"),
      ("[1,2)", "[1,2]"),
      ("x+1", "x-1"),
      ("x^2", "x**2"),
      ("Evelyn", "Angela"),
      ("5", "}{"),
      ("5", r"\frac{"),
      ("5", "\0"),
      (r"\frac{1}{2}", r"\frac{1}{0}"),
  )
  def test_refuses_another_answer(self, reference, answer):
    self.assertFalse(math_answers.equal(reference, answer))

  def test_reads_answers_like_human(self):
    cases = [json.loads(line) for line in _READ.read_text("utf-8").splitlines()]
    cases = [case for case in cases if "reference" in case]
    self.assertGreater(len(cases), 150)
    for case in cases:
      for pair in ("reference", "answer"), ("answer", "reference"):
        with self.subTest(**case):
          texts = [case[name] for name in pair]
          self.assertEqual(math_answers.equal(*texts), case["equal"])

  @parameterized.parameters(
      ("5 cm", "5 m", False),
      ("1,2", "1,2,3", False),
      ("3", "3, 3", False),
      (r"\text{odd}", r"\text{even}", False),
      (r"\frac12", "½", True),
      ("(3,\\infty)", "x>3", True),
      ("x+1", "1+x", None),
  )
  def test_decides_most_answers_without_sympy(self, reference, answer, said):
    self.assertEqual(math_answers.equal_as_texts(reference, answer), said)

  def test_no_text_is_run_as_python(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "made"
      code = f"__import__('os').mkdir('{path}')"
      for text in (code, rf"\text{{{code}}}", f"${code}$", f"\\{code}"):
        self.assertFalse(math_answers.equal("5", text))
      self.assertEqual(os.listdir(folder), [])

  def test_long_answers_are_compared_as_texts(self):
    long = "1+" * math_answers.MAX_CHARS + "1"
    self.assertTrue(math_answers.equal(long, f" {long} "))
    self.assertFalse(math_answers.equal(str(math_answers.MAX_CHARS + 1), long))

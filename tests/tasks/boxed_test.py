# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Boxed answers: which one counts, and what is the same answer."""

import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.tasks import math


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
      # Nothing is boxed, or nothing in the last box.
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
    self.assertEqual(math.last_boxed(text), found)

  def test_long_texts(self):
    # A quadratic reader would run into the deadline of the tests.
    for text in (
        r"\boxed" * 100_000,
        r"\boxed{" * 100_000,
        r"\boxed{" + "{" * 400_000,
        r"\boxed{" + "1 " * 300_000 + "}",
        r"\boxed" + " " * 500_000,
    ):
      self.assertIsInstance(math.last_boxed(text), str | None)
      self.assertIsInstance(math.normalized(text), str)


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
      # What only math-verify knows.
      (r"\frac{1}{2}", "0.5"),
      (r"\frac{3}{4}", r"\frac{6}{8}"),
      ("x+1", "1+x"),
      (r"\sqrt{12}", r"2\sqrt{3}"),
      ("1,2", "2,1"),
      ("2^{10}", "1024"),
  )
  def test_the_same(self, reference, answer):
    self.assertTrue(math.equal(reference, answer))

  @parameterized.parameters(
      ("5", "6"),
      ("5", "-5"),
      ("12", "1 2"),
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
  def test_another(self, reference, answer):
    self.assertFalse(math.equal(reference, answer))

  def test_no_text_is_run_as_python(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "made"
      code = f"__import__('os').mkdir('{path}')"
      for text in (code, rf"\text{{{code}}}", f"${code}$", f"\\{code}"):
        self.assertFalse(math.equal("5", text))
      self.assertEqual(os.listdir(folder), [])

  def test_long_answers_are_compared_as_texts(self):
    long = "1+" * math.MAX_CHARS + "1"
    self.assertTrue(math.equal(long, f" {long} "))
    self.assertFalse(math.equal(str(math.MAX_CHARS + 1), long))


if __name__ == "__main__":
  absltest.main()

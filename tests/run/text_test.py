# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Printable text and formatted numbers."""

from absl.testing import parameterized

from tba_jax.run import text


class PrintableTest(parameterized.TestCase):

  @parameterized.parameters(
      ("plain ünï 日本", "plain ünï 日本"),
      ("a\x1b[31mred", "a␛[31mred"),
      ("a\x00\x7f", "a␀␡"),
      ("a\u202eb", "a⟦U+202E⟧b"),
      ("a\u200bb", "a⟦U+200B⟧b"),
      ("\ud800", "⟦U+D800⟧"),
      ("\u2028", "⟦U+2028⟧"),
      ("\x85", "⟦U+0085⟧"),
      ("\r\n", "␍\n"),
      ("<script>", "<script>"),
  )
  def test_prints_control_characters_visibly(self, given, shown):
    self.assertEqual(text.printable(given), shown)

  def test_puts_text_on_one_line(self):
    self.assertEqual(text.printable("a\nb\tc", one_line=True), "a␊b␉c")

  def test_cuts_at_limit(self):
    self.assertEqual(
        text.printable("x" * 100_000, 3), "xxx … (99,997 more characters)"
    )
    self.assertEqual(text.printable("xxx", 3), "xxx")


class FormatTest(parameterized.TestCase):

  @parameterized.parameters(
      (None, "number", "–"),
      (0.294, "percent", "29.4 %"),
      (164576, "count", "164,576"),
      (2.2, "number", "2.20"),
      (627.2, "number", "627"),
      (3e-5, "number", "3e-05"),
      (0.0042, "number", "0.0042"),
      (0.045, "number", "0.045"),
      (True, "number", "yes"),
      ("\x1b[1m", "number", "␛[1m"),
  )
  def test_formats_number(self, value, style, shown):
    self.assertEqual(text.number(value, style), shown)

  @parameterized.parameters(
      (0.05, "50 ms"), (4.2, "4.2 s"), (200, "3:20 min"), (3720, "1:02 h"),
      (None, "–"),
  )  # fmt: skip
  def test_formats_duration(self, value, shown):
    self.assertEqual(text.duration(value), shown)

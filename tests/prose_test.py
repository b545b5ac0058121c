# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits on the counts of `python -m benchmarks prose`.

They may only fall: rewrite a sentence that exceeds one.
"""

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import prose

_LIMITS = {
    # Task data, a setting's old name, and a message quoted in docs.
    "stilted_in_code": 6,
    "stilted_in_docs": 1,
    "fields_that_repeat_their_name": 0,
    "tests_with_relative_clauses": 0,
    "errors_with_allowed": 0,
    "words_of_readme": 900,
    "words_of_docs": 25_400,
}


class ProseTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.figures = prose.figures()

  @parameterized.parameters(*_LIMITS)
  def test_stays_below_limit(self, name):
    figure = self.figures[name]
    total = sum(figure.values()) if isinstance(figure, dict) else figure
    self.assertLessEqual(total, _LIMITS[name], figure)

  def test_finds_repeated_fields(self):
    source = """
    state: state before the next step.
    max_tokens: the max tokens of a row.
    tokens_BxT: tokens of the batch.
    mask: 1 on real tokens.
    mesh: mesh.Mesh
    """
    self.assertLen(prose.repeated_fields(source), 3)


if __name__ == "__main__":
  absltest.main()

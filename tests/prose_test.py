# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Language of code, tests and docs: what `python -m benchmarks prose` counts.

Limits may only fall. A sentence over a limit is written anew.
"""

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import prose

_LIMITS = {
    # Data of tasks, the old name of a setting, and a message that docs quote.
    "stilted_in_code": 6,
    "stilted_in_docs": 1,
    "fields_that_repeat_their_name": 0,
    "tests_with_relative_clauses": 0,
    "errors_with_allowed": 0,
    "words_of_readme": 900,
    "words_of_docs": 38_800,
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

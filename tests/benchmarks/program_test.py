# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark program: names, operands, one JSON line."""

import contextlib
import io
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections

from tba_jax import processes
from tba_jax.benchmarks import program
from tba_jax.benchmarks import replay

CONFIG = ml_collections.ConfigDict()


class ProgramTest(parameterized.TestCase):

  @parameterized.parameters(([],), (["no_such"],), (["program"],))
  def test_a_wrong_name_is_refused_with_the_right_ones(self, operands):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
      self.assertEqual(program.run(CONFIG, None, operands), 2)
    for name in program.BENCHMARKS:
      self.assertIn(name, stderr.getvalue())

  def test_a_benchmark_prints_one_json_line(self):
    stdout = io.StringIO()
    with (
        mock.patch.object(
            replay, "run", autospec=True, return_value={"draws_per_s": 2.5}
        ) as run,
        contextlib.redirect_stdout(stdout),
    ):
      self.assertEqual(program.run(CONFIG, None, ["replay", "a", "b"]), 0)
    run.assert_called_once_with(CONFIG, ["a", "b"])
    self.assertEqual(stdout.getvalue().count("\n"), 1)
    self.assertEqual(
        json.loads(stdout.getvalue()),
        {
            "benchmark": "replay",
            "draws_per_s": 2.5,
            "machine": {"cores": len(processes.available_cores())},
        },
    )

  def test_every_benchmark_has_a_file(self):
    folder = pathlib.Path(program.__file__).parent
    have = {path.stem for path in folder.glob("*.py")}
    self.assertContainsSubset(program.BENCHMARKS, have)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The file that keeps results, and what they say of their machine."""

import concurrent.futures
import gzip
import math
import os
import pathlib
import platform
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import results


def _keep(folder, name):
  for seed in range(5):
    results.keep(folder, {"name": name, "seed": seed, "values": [seed / 7]})


class KeepTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "study"

  def test_bytes_depend_only_on_rows(self):
    files = []
    for i, names in enumerate(("ab", "ba")):
      for name in names:
        _keep(self.folder / str(i), name)
      (path,) = (self.folder / str(i)).iterdir()
      files.append(path.read_bytes())
    self.assertEqual(*files)
    first = gzip.decompress(files[0]).splitlines()[0]
    self.assertEqual(first, b'{"name": "a", "seed": 0, "values": [0.0]}')

  def test_row_replaces_only_row_with_same_key(self):
    _keep(self.folder, "a")
    before = results.read_rows(self.folder)
    row = {"name": "a", "seed": 2, "values": [math.inf]}
    results.keep(self.folder, row)
    before[2] = row | {"values": [None], "non_finite": ["values[0]"]}
    self.assertEqual(results.read_rows(self.folder), before)

  def test_writers_lose_no_row_of_each_other(self):
    names = "abcd"
    # Each call opens the lock anew, as a process of its own would.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      list(pool.map(_keep, [self.folder] * 4, names))
    result = [(r["name"], r["seed"]) for r in results.read_rows(self.folder)]
    self.assertEqual(result, [(n, s) for n in names for s in range(5)])

  def test_run_with_result_is_not_made_again(self):
    made = []

    def train(name, seed):
      made.append((name, seed))
      return {"pass_at_1": [0.1, 0.2]}

    results.measure([3], ["b-1"], self.folder, train)
    results.measure([3, 4], ["a-1", "b-1"], self.folder, train)
    self.assertEqual(made, [("b-1", 3), ("a-1", 3), ("a-1", 4), ("b-1", 4)])
    result = results.read(["b-1", "a-1"], self.folder)
    self.assertEqual(
        [(r["name"], r["seed"]) for r in result],
        [("b-1", 3), ("b-1", 4), ("a-1", 3), ("a-1", 4)],
    )

  @parameterized.parameters("x", "0,y", "0 verl", "table verl")
  def test_names_wrong_operand(self, operands):
    with self.assertRaisesRegex(ValueError, "must be"):
      results.parse(operands.split(), ["ours"])


class MachineTest(absltest.TestCase):

  def told(self, text: str | None) -> dict:
    path = pathlib.Path(self.create_tempdir().full_path) / "cpuinfo"
    if text is not None:
      path.write_text(text)
    with mock.patch.object(results.pathlib, "Path", return_value=path):
      return results.machine()

  def test_has_cores_of_this_process_and_processor_s_name(self):
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: fpu\n" * 2
    self.assertEqual(
        self.told(text),
        {
            "cores": len(os.sched_getaffinity(0)),
            "processor": "Some CPU @ 2 GHz",
        },
    )

  def test_processor_without_name_has_its_family(self):
    for text in (None, "", "Features\t: asimd\n"):
      self.assertEqual(self.told(text)["processor"], platform.machine())

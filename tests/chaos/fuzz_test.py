# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutated inputs of each format, in short form."""

import pathlib
import tempfile
from unittest import mock

from absl.testing import parameterized
import pytest

from tests.chaos import fuzz

_COUNTS = {"wire": 1500, "journal": 300, "checkpoint": 200, "config": 80,
           "jsonl": 300, "hf": 80, "params": 600}  # fmt: skip


class FuzzTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # Inputs of readers that fail are kept there.
    folder = self.create_tempdir().full_path
    self.enter_context(mock.patch.object(tempfile, "tempdir", folder))

  @parameterized.parameters(*_COUNTS)
  @pytest.mark.slow
  def test_counts_accepted_and_refused_inputs(self, name):
    out = fuzz.run(None, [name, str(_COUNTS[name]), "1"])
    outcomes = out["formats"][name]
    counted = [
        n for k, n in outcomes.items() if k.startswith(("accepted", "refused"))
    ]
    self.assertEqual(sum(counted), _COUNTS[name])

  def test_reports_input_of_failing_reader(self):
    formats = {
        "accepts": lambda folder: self.make_format(folder, fuzz.Accepted("x")),
        "fails": lambda folder: self.make_format(folder, TypeError("x")),
    }
    with mock.patch.object(fuzz, "FORMATS", formats):
      for name in formats:
        with self.assertRaisesRegex(RuntimeError, f"{name}, input 0 .*: x"):
          fuzz.run(None, [name, "1", "1"])

  def test_reports_excessive_allocation(self):
    kept = []

    def make(folder):
      del folder
      return fuzz.Format(
          lambda rng: b"1234", lambda data: kept.append(bytearray(1 << 24))
      )

    with mock.patch.object(fuzz, "FORMATS", {"large": make}):
      with self.assertRaisesRegex(RuntimeError, "bytes were allocated for 4"):
        fuzz.run(None, ["large", "2", "1"])

  def make_format(self, folder: pathlib.Path, error: Exception) -> fuzz.Format:
    del folder

    def read(data: bytes) -> None:
      del data
      raise error

    return fuzz.Format(lambda rng: b"1234", read)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of the studies are those of the runs that are kept."""

import contextlib
import importlib
import pathlib
import shutil
from unittest import mock

from absl.testing import parameterized

from benchmarks import results
from studies import __main__ as studies
from tba_jax.config import load

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIGS = {"real": "configs/instructions.py"}
# They print a table of what they have just measured.
_WITHOUT_RUNS = ("certificate", "enumerable", "free_search")


class TablesTest(parameterized.TestCase):

  @parameterized.parameters(*sorted({*studies.STUDIES} - {*_WITHOUT_RUNS}))
  def test_study_reproduces_committed_tables(self, name):
    module = importlib.import_module(studies.MODULES[name])
    own = _ROOT / "studies" / name
    folder = pathlib.Path(self.create_tempdir().full_path)
    if results.read_rows(own):
      shutil.copy(own / "runs.jsonl.gz", folder)
    config = load.load_config(_CONFIGS.get(name, "configs/countdown.py"), [])
    with contextlib.chdir(folder):
      with mock.patch.object(module, "RESULTS", folder):
        module.run(config, ["table"])
    self.assertFalse((folder / "runs").exists())
    expected = {path.name: path.read_text() for path in own.glob("*.md")}
    expected.pop("README.md", None)
    if expected:
      actual = {path.name: path.read_text() for path in folder.glob("*.md")}
      self.assertEqual(actual, expected, f"run: python -m studies {name} table")
      pictures = {path.name for path in own.glob("*.png")}
      self.assertEqual({p.name for p in folder.glob("*.png")}, pictures)

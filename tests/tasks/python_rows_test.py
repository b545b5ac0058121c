# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a Python program as files."""

import datetime
import json
import pathlib

from absl.testing import parameterized
import datasets
import pandas as pd

from tba_jax.tasks import python_rows

_ROWS = [{"prompt": "1+2", "answer": 3}, {"prompt": "2+2", "answer": 4}]
_CHAT = [{"role": "user", "content": "1+2"}]


class PythonRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path, "data")

  def write(self, data, template=""):
    sources, template = python_rows.sources(data, self.folder, template)
    read = lambda path: [
        json.loads(line) for line in pathlib.Path(path).read_text().splitlines()
    ]
    return {split: read(path) for split, path in sources.items()}, template

  @parameterized.named_parameters(
      ("list", _ROWS),
      ("DataFrame", pd.DataFrame(_ROWS)),
      ("Dataset", datasets.Dataset.from_list(_ROWS)),
  )
  def test_rows_are_same_of_all_kinds(self, data):
    self.assertEqual(self.write(data), ({"train": _ROWS}, "{prompt}"))

  def test_prompts_and_messages_are_rows(self):
    rows, template = self.write(["1+2", _CHAT])
    self.assertEqual(rows["train"], [{"prompt": "1+2"}, {"prompt": _CHAT}])
    self.assertEqual(template, "{prompt}")
    rows, template = python_rows.sources(
        [{"messages": _CHAT}], self.folder / "other"
    )
    self.assertEqual(template, "{messages}")

  def test_splits_are_mapping_and_paths_are_kept(self):
    data = datasets.DatasetDict(train=datasets.Dataset.from_list(_ROWS))
    self.assertEqual(self.write(data)[0], {"train": _ROWS})
    sources, _ = python_rows.sources(
        {"train": _ROWS, "test": "openai/gsm8k/main[test]"}, self.folder
    )
    self.assertEqual(sources["test"], "openai/gsm8k/main[test]")
    sources = python_rows.sources(pathlib.Path("a.jsonl"), self.folder)
    self.assertEqual(sources, ({"train": "a.jsonl"}, ""))

  @parameterized.parameters(
      (3, "data=3: must be a path, a list of rows"),
      ([], "data: has no rows"),
      ([3], r"data\[0\]=3: must be an object"),
      ({"prompt": ["a"]}, "must have the splits 'train'"),
      ([*_ROWS, {"prompt": " "}], r"data\[2\]: has no prompt"),
      ({"train": _ROWS, "test": [{"answer": 3}]},
       r"data\['test'\]\[0\]: has no prompt: \{prompt\} needs"),
      ([{"prompt": ["a"]}], r"data\[0\]: field 'prompt' is a list"),
      ([{"question": "a"}], "fields question and none of .*'{question}'"),
      ([{"prompt": "a", "when": datetime.tzinfo()}],
       r"data\[0\]: field 'when' cannot be written as JSON"),
      ([{"prompt": "a", "x": "\ud800"}], r"data\[0\]: field 'x' cannot"),
  )  # fmt: skip
  def test_wrong_data_names_argument_and_row(self, data, why):
    with self.assertRaisesRegex(ValueError, why):
      self.write(data)

  def test_template_takes_its_fields(self):
    rows = [{"question": "1+2"}]
    self.assertEqual(self.write(rows, "Q: {question}")[1], "Q: {question}")

  def test_other_rows_than_run_began_with_are_refused(self):
    self.write(_ROWS[:1])
    # The call that gave them failed before there was a run.
    self.assertEqual(self.write(_ROWS)[0], {"train": _ROWS})
    (self.folder.parent / "config.json").write_text("{}")
    self.write(_ROWS)
    with self.assertRaisesRegex(
        ValueError, "data: differs from the rows that the run began with"
    ):
      self.write(_ROWS[:1])

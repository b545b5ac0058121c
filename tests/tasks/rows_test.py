# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of every kind of source, each with the place that it came from."""

import json
import pathlib

from absl.testing import absltest
import pyarrow
from pyarrow import parquet

from tba_jax.tasks import rows


def _table(*prompts: str) -> pyarrow.Table:
  return pyarrow.table({"prompt": list(prompts), "n": range(len(prompts))})


class RowsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def read(self, source: str):
    found = rows.read_rows("config.task.train", str(self.folder / source))
    return [(row.place, row.fields) for row in found]

  def save(self, folder: pathlib.Path, *shards: pyarrow.Table) -> None:
    """Writes what `save_to_disk` of `datasets` writes, as far as it is read."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}.arrow" for i in range(len(shards))]
    for name, shard in zip(names, shards):
      with pyarrow.ipc.new_stream(str(folder / name), shard.schema) as writer:
        writer.write_table(shard)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))

  def test_jsonl_with_lines_that_are_none(self):
    (self.folder / "a.jsonl").write_bytes(
        b'{"prompt": "x"}\n\nnot json\n[1]\n\xff\n{"prompt": "y"}'
    )
    self.assertEqual(
        self.read("a.jsonl"),
        [
            ("a.jsonl:1", {"prompt": "x"}),
            ("a.jsonl:3", None),
            ("a.jsonl:4", None),
            ("a.jsonl:5", None),
            ("a.jsonl:6", {"prompt": "y"}),
        ],
    )

  def test_half_a_character_is_no_text(self):
    (self.folder / "a.jsonl").write_bytes(
        b'{"prompt": "\\ud83d"}\n{"prompt": "\\ud83d\\ude00"}\n'
    )
    self.assertEqual(
        self.read("a.jsonl"),
        [("a.jsonl:1", None), ("a.jsonl:2", {"prompt": "\U0001f600"})],
    )

  def test_a_damaged_data_set_is_named(self):
    folder = self.folder / "one"
    self.save(folder, _table("a"))
    (folder / "data-00000.arrow").write_bytes(b"")
    with self.assertRaisesRegex(ValueError, "train=.*data-00000.arrow cannot"):
      self.read("one")
    (folder / "state.json").write_text("{}")
    with self.assertRaisesRegex(ValueError, "one cannot.*_data_files"):
      self.read("one")

  def test_a_saved_data_set(self):
    self.save(self.folder / "one", _table("a", "b"), _table("c"))
    self.assertEqual(
        self.read("one"),
        [
            ("data-00000.arrow:1", {"prompt": "a", "n": 0}),
            ("data-00000.arrow:2", {"prompt": "b", "n": 1}),
            ("data-00001.arrow:1", {"prompt": "c", "n": 0}),
        ],
    )
    with self.assertRaisesRegex(ValueError, "has no splits"):
      self.read("one[train]")

  def test_a_saved_data_set_with_splits(self):
    self.save(self.folder / "d" / "train", _table("a"))
    self.save(self.folder / "d" / "test", _table("b"))
    (self.folder / "d" / "dataset_dict.json").write_text(
        '{"splits": ["train", "test"]}'
    )
    self.assertEqual(
        self.read("d[test]"),
        [("test/data-00000.arrow:1", {"prompt": "b", "n": 0})],
    )
    with self.assertRaisesRegex(ValueError, r"one of \['train', 'test'\]"):
      self.read("d")

  def test_parquet_as_the_hub_names_it(self):
    data = self.folder / "hub" / "data"
    data.mkdir(parents=True)
    parquet.write_table(_table("a"), data / "train-00000-of-00001.parquet")
    parquet.write_table(_table("b"), data / "test-00000-of-00001.parquet")
    place = "data/train-00000-of-00001.parquet:1"
    self.assertEqual(
        self.read("hub[train]"), [(place, {"prompt": "a", "n": 0})]
    )
    with self.assertRaisesRegex(ValueError, "with this split"):
      self.read("hub[dev]")

  def test_nothing_there(self):
    (self.folder / "empty").mkdir()
    (self.folder / "a.jsonl").write_text("{}")
    for source, message in (
        ("nope.jsonl", "no such file or folder"),
        ("empty", "allowed a folder that TFDS prepared"),
        ("a.jsonl[train]", "a file has no splits"),
    ):
      with self.assertRaisesRegex(ValueError, f"config.task.train=.*{message}"):
        self.read(source)


if __name__ == "__main__":
  absltest.main()

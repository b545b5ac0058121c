# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's records are the same in files and in memory."""

import pathlib

from absl.testing import parameterized

from tba_jax.run import files


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.memory = files.Memory()

  def make(self, kind):
    return files.Directory(self.folder) if kind == "files" else self.memory

  def write(self, records):
    tail = records.tail("metrics.jsonl")
    self.assertEmpty(tail())
    lines = records.lines("metrics.jsonl")
    lines.write({"step": 0, "loss": float("nan")})
    self.assertEqual(
        tail(), [{"step": 0, "loss": None, "non_finite": ["loss"]}]
    )
    other = records.lines("metrics.jsonl")
    other.write({"step": 1})
    self.assertEqual(tail(), [{"step": 1}])
    for opened in (lines, other):
      opened.close()
    with records.text("spans/a.jsonl") as file:
      file.write('{"kind": "a"}\n')
    records.write("eval.json", {"step": 1, "value": float("inf")})
    records.write("eval.json", {"step": 2, "value": float("inf")})

  @parameterized.parameters("files", "memory")
  def test_records_are_read_as_they_were_written(self, kind):
    records = self.make(kind)
    self.assertEmpty(records.records("metrics.jsonl"))
    self.assertIsNone(records.read("eval.json"))
    self.write(records)
    steps = [r["step"] for r in records.records("metrics.jsonl")]
    self.assertEqual(steps, [0, 1])
    self.assertEqual(records.records("metrics.jsonl").skipped, 0)
    self.assertEqual(records.read("eval.json")["step"], 2)

  def test_memory_saves_files_of_directory(self):
    self.write(self.make("memory"))
    self.assertEmpty(list(self.folder.iterdir()))
    saved = self.folder / "saved"
    self.memory.save(saved)
    self.write(files.Directory(self.folder / "written"))
    for name in ("metrics.jsonl", "spans/a.jsonl", "eval.json"):
      self.assertEqual(
          (saved / name).read_text(),
          (self.folder / "written" / name).read_text(),
      )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON files: atomic writes, and reads with a schema."""

import json
import os
import pathlib
from unittest import mock

from absl.testing import parameterized

from tba_jax.system import jsonl

_SCHEMA = {"step": int, "share?": float, "rows": [{"name": str}], "*": float}
_RIGHT = {"step": 3, "share": 1, "rows": [{"name": "a"}], "other": 0.5}


class JsonlTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "a.json"

  def test_file_and_directory_are_synced(self):
    done = []
    fsync, replace = os.fsync, os.replace

    def note(name, call):
      return lambda *args: (done.append(name), call(*args))[1]

    with (
        mock.patch.object(os, "fsync", note("fsync", fsync)),
        mock.patch.object(os, "replace", note("replace", replace)),
    ):
      jsonl.atomic_write_json(self.path, {"a": float("nan")})
    self.assertEqual(done, ["fsync", "replace", "fsync"])
    self.assertEqual(jsonl.read_json(self.path), {"a": None})
    self.assertEqual(os.listdir(self.path.parent), ["a.json"])

  def test_failed_write_keeps_old_file(self):
    jsonl.atomic_write_json(self.path, 1)
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "full")):
      with self.assertRaises(OSError):
        jsonl.atomic_write_json(self.path, 2)
    self.assertEqual(jsonl.read_json(self.path), 1)
    self.assertEqual(os.listdir(self.path.parent), ["a.json"])

  def test_no_bit_changes_in_silence(self):
    writer = jsonl.LineWriter(self.path.with_suffix(".jsonl"))
    writer.write({"step": 3, "loss": 0.5})
    writer.close()
    jsonl.atomic_write_json(self.path, {"step": 3, "section": {"rate": 1e-4}})
    for path in (self.path, self.path.with_suffix(".jsonl")):
      data = path.read_bytes()
      self.assertTrue(jsonl.is_sound(data))
      for i in range(8 * len(data)):
        changed = bytearray(data)
        changed[i // 8] ^= 1 << i % 8
        if jsonl.is_sound(bytes(changed)) is not False:
          with self.assertRaises(ValueError, msg=bytes(changed)):
            json.loads(changed)

  def test_checksum_is_not_read(self):
    jsonl.atomic_write_json(self.path, _RIGHT)
    self.assertEqual(jsonl.read_object(self.path, _SCHEMA), _RIGHT)
    self.assertEqual(jsonl.read_json(self.path), _RIGHT)
    line = jsonl.sealed(jsonl.json_line(_RIGHT))
    self.assertEqual(jsonl.parse_line(line), _RIGHT)

  @parameterized.parameters("{}", '{"a": 1}', '{"a": 1, "checksum": "0000', "")
  def test_object_without_checksum_is_not_judged(self, text):
    self.assertIsNone(jsonl.is_sound(text.encode()))

  def test_reads_valid_object(self):
    self.assertIsNone(jsonl.read_object(self.path, _SCHEMA))
    for value in (_RIGHT, {"step": 0, "rows": []}, {**_RIGHT, "share": None}):
      self.path.write_text(json.dumps(value))
      self.assertEqual(jsonl.read_object(self.path, _SCHEMA), value)

  @parameterized.parameters(
      ("", "JSON"),
      ("[" * 100_000, "JSON"),
      ("[]", "not an object"),
      ({"rows": []}, "'step'"),
      ({"step": True, "rows": []}, "'step'"),
      ({"step": None, "rows": []}, "'step'"),
      ({"step": 1, "rows": {}}, "'rows'"),
      ({"step": 1, "rows": [{"name": 1}]}, r"'rows\[0\].name'"),
      ({**_RIGHT, "share": "x"}, "'share'"),
      ({**_RIGHT, "other": "x"}, "'other'"),
  )
  def test_invalid_object_names_file(self, value, words):
    text = value if isinstance(value, str) else json.dumps(value)
    self.path.write_text(text)
    with self.assertRaisesRegex(ValueError, f"^{self.path}: .*{words}"):
      jsonl.read_object(self.path, _SCHEMA)

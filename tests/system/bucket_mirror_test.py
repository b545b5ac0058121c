# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What of a folder goes to a bucket, and when; a disk stands for the bucket."""

import pathlib
import time
from unittest import mock

from absl.testing import absltest
import fsspec

from tba_jax.system import bucket


class BucketMirrorTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # A bucket has no folders to be made.
    disk = mock.patch.dict(fsspec.config.conf, file={"auto_mkdir": True})
    self.enter_context(disk)
    self.enter_context(mock.patch.object(bucket, "_TICK_S", 0.02))
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.copy = pathlib.Path(self.create_tempdir().full_path)
    self.url = f"file://{self.copy}"

  def write(self, *names, folder=None, text="{}\n"):
    for name in names:
      path = (folder or self.folder) / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)

  def names(self, folder):
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix() for p in files}

  def wait_for(self, condition):
    until = time.monotonic() + 20
    while not condition():
      self.assertLess(time.monotonic(), until)
      time.sleep(0.02)

  def test_files_are_copied_but_those_of_this_host(self):
    ours = {"config.json", "sft/model/config.json", "logs/trainer-0.log"}
    self.write(*ours)
    self.write(
        ".lock", "spool/secret", "secret", "params/1/leaf", ".config.json.12.3",
        "checkpoints/3/state", "sft/checkpoints/1/x", "model.partial",
    )  # fmt: skip
    bucket.Mirror(self.folder, self.url).close()
    self.assertEqual(self.names(self.copy), ours)

  def test_what_changes_is_copied_again_and_what_goes_goes(self):
    self.write("a.jsonl", "b.json")
    mirror = bucket.Mirror(self.folder, self.url, every_s=0.01)
    self.wait_for(lambda: self.names(self.copy) == {"a.jsonl", "b.json"})
    self.write("a.jsonl", text="{}\n{}\n")
    (self.folder / "b.json").unlink()
    self.wait_for(lambda: self.names(self.copy) == {"a.jsonl"})
    self.wait_for(lambda: (self.copy / "a.jsonl").read_text() == "{}\n{}\n")
    self.write("late.json")
    mirror.close()
    self.assertEqual(self.names(self.copy), {"a.jsonl", "late.json"})

  def test_the_open_segment_is_copied_at_the_end(self):
    first, last = "replay/segment-0.journal", "replay/segment-7.journal"
    self.write(first, last)
    mirror = bucket.Mirror(self.folder, self.url)
    self.wait_for(lambda: first in self.names(self.copy))
    self.assertNotIn(last, self.names(self.copy))
    mirror.close()
    self.assertIn(last, self.names(self.copy))

  def test_a_failure_is_told_at_the_end_and_tried_again_before(self):
    self.write("a/b.json")
    (self.copy / "a").write_text("no folder")
    mirror = bucket.Mirror(self.folder, self.url, every_s=0.01)
    self.wait_for(lambda: mirror._failure is not None)
    with self.assertRaisesRegex(OSError, "a/b.json could not be copied to"):
      mirror.close()
    mirror = bucket.Mirror(self.folder, self.url, every_s=0.01)
    (self.copy / "a").unlink()
    mirror.close()
    self.assertEqual(self.names(self.copy), {"a/b.json"})

  def test_a_folder_becomes_what_the_bucket_has(self):
    self.write("a.json", "replay/segment-1.journal", folder=self.copy)
    self.write("sft/model/model.safetensors", folder=self.copy)
    self.write("replay/segment-0.journal", "spool/secret", ".lock")
    self.write("a.json", text="old")
    bucket.fetch(self.url, self.folder)
    self.assertEqual(
        self.names(self.folder),
        self.names(self.copy) | {"spool/secret", ".lock"},
    )
    self.assertEqual((self.folder / "a.json").read_text(), "{}\n")

  def test_a_look_leaves_models_where_they_are(self):
    self.write("metrics.jsonl", "m/model.safetensors", folder=self.copy)
    bucket.fetch(self.url, self.folder, logs_only=True)
    self.assertEqual(self.names(self.folder), {"metrics.jsonl"})

  def test_single_files_are_sent(self):
    self.write("report.html", "other.html")
    bucket.copy_file(self.folder, self.url, ["report.html", "none"])
    self.assertEqual(self.names(self.copy), {"report.html"})


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which folder stands for a run in a bucket; a disk stands for the bucket."""

import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import fsspec

from tba_jax.system import bucket
from tba_jax.system import jsonl


class BucketTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # A bucket has no folders to be made.
    disk = mock.patch.dict(fsspec.config.conf, file={"auto_mkdir": True})
    self.enter_context(disk)
    self.copy = pathlib.Path(self.create_tempdir().full_path)
    self.url = f"file://{self.copy}"
    self.hosts = self.create_tempdir().full_path
    self.lock = self.create_tempfile().full_path

  def on(self, host, program="train"):
    """Returns the folder that a program has on a host."""
    place = os.path.join(self.hosts, host)
    os.makedirs(place, exist_ok=True)
    with mock.patch.object(tempfile, "gettempdir", lambda: place):
      return bucket.prepare(self.url, program)

  def hold(self, folder):
    return bucket.hold(os.open(self.lock, os.O_RDONLY), folder)

  def work(self, folder, **files):
    """Works in a folder, to the end of which all is in the bucket."""
    held = self.hold(folder)
    for name, value in files.items():
      jsonl.atomic_write_json(folder / f"{name}.json", value)
    held.close()

  def test_a_path_is_itself(self):
    path = self.create_tempdir().full_path
    self.assertEqual(bucket.stage(path, "train"), path)
    self.assertEqual(bucket.stage_model(path, key="k"), path)
    self.assertEqual(
        bucket.place(pathlib.Path(path, "checkpoints")), f"{path}/checkpoints"
    )
    held = self.hold(path)
    held.close()
    self.assertEmpty(os.listdir(path))

  @parameterized.parameters(
      ("s3://bucket/run", "train", "gs://BUCKET/PATH"),
      ("gs://bucket", "train", "gs://BUCKET/PATH"),
      ("gs://bucket/", "train", "gs://BUCKET/PATH"),
      ("gs://bucket//run", "train", "gs://BUCKET/PATH"),
      ("gs://bucket/run", "sweep", "a path of this machine"),
      ("gs://bucket/run", "benchmark", "a path of this machine"),
  )
  def test_a_wrong_url_is_refused(self, url, program, words):
    with self.assertRaisesRegex(ValueError, f"^--workdir={url}: .*{words}"):
      bucket.stage(url, program)

  def test_without_gcsfs_it_is_named(self):
    with mock.patch("importlib.util.find_spec", lambda name: None):
      with self.assertRaisesRegex(ValueError, r"tba_jax\[gcs\]"):
        bucket.stage("gs://bucket/run", "train")

  def test_checkpoints_are_in_the_bucket(self):
    folder = self.on("a")
    for name in ("checkpoints", "sft/checkpoints"):
      self.assertEqual(bucket.place(folder / name), f"{self.url}/{name}")

  def test_a_host_goes_on_with_its_own_and_another_with_the_buckets(self):
    folder = self.on("a")
    self.work(folder, config=1, epoch={"epoch": 3, "owner": "o"})
    # As one that was killed leaves it: not all of it is in the bucket.
    (folder / "late.json").write_text("4")
    self.assertEqual(self.on("a"), folder)
    self.assertTrue((folder / "late.json").exists())
    other = self.on("b")
    self.assertFalse((other / "late.json").exists())
    self.assertEqual(jsonl.read_json(other / "config.json"), 1)
    # The first may have begun an epoch that the bucket does not know.
    self.assertEqual(
        jsonl.read_json(other / "epoch.json"), {"epoch": 4, "owner": "o"}
    )
    self.work(other, config=2)
    self.on("a")
    self.assertFalse((folder / "late.json").exists())
    self.assertEqual(jsonl.read_json(folder / "config.json"), 2)

  def test_what_was_only_looked_at_is_fetched_whole_for_work(self):
    self.work(self.on("a"), config=1)
    (self.copy / "model.safetensors").write_text("weights")
    self.assertFalse((self.on("b", "status") / "model.safetensors").exists())
    self.assertTrue((self.on("b", "evaluate") / "model.safetensors").exists())

  def test_a_killed_one_is_waited_for_on_other_hosts_alone(self):
    folder = self.on("a")
    lease = bucket.Lease(self.url)
    with mock.patch.object(bucket, "Lease", lambda url: lease):
      with mock.patch.object(lease, "release"):
        self.work(folder, config=1)
    self.assertNotEqual(bucket.Lease(self.url).look().holder, "")
    self.work(self.on("a"), config=2)  # At once.
    self.assertEqual(bucket.Lease(self.url).look().holder, "")

  def test_where_another_worked_meanwhile_it_is_told(self):
    folder = self.on("a")
    self.work(self.on("b"), config=1)
    with self.assertRaisesRegex(ValueError, "start again"):
      self.hold(folder)

  def test_a_child_of_a_supervisor_takes_nothing(self):
    folder = self.on("a")
    with mock.patch.dict(os.environ, TBA_JAX_SUPERVISED="1"):
      self.work(folder, config=1)
    self.assertEmpty(list(self.copy.iterdir()))

  def test_files_are_sent_of_a_run_in_a_bucket_alone(self):
    folder = self.on("a", "report")
    (folder / "report.html").write_text("page")
    bucket.send(folder, "report.html", "none*")
    self.assertEqual((self.copy / "report.html").read_text(), "page")
    bucket.send(self.copy, "report.html")


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Run directories in a bucket; a `file://` URL takes its place.

`tests/multi_process/bucket_run_test.py` uses a bucket's protocol.
"""

import os
import pathlib
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import fsspec

from tba_jax.system import bucket
from tba_jax.system import jsonl
from tests.support import waiting


class RunDirectoryTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # Buckets need no mkdir.
    disk = mock.patch.dict(fsspec.config.conf, file={"auto_mkdir": True})
    self.enter_context(disk)
    self.copy = pathlib.Path(self.create_tempdir().full_path)
    self.url = f"file://{self.copy}"
    self.hosts = self.create_tempdir().full_path
    self.lock = self.create_tempfile().full_path

  def on(self, host, program="train"):
    """Returns the folder of a program on a host."""
    place = os.path.join(self.hosts, host)
    os.makedirs(place, exist_ok=True)
    with mock.patch.object(tempfile, "gettempdir", lambda: place):
      return bucket.prepare(self.url, program)

  def hold(self, folder):
    return bucket.hold(os.open(self.lock, os.O_RDONLY), folder)

  def work(self, folder, **files):
    """Writes JSON files as a run does, and uploads them."""
    held = self.hold(folder)
    for name, value in files.items():
      jsonl.atomic_write_json(folder / f"{name}.json", value)
    held.close()

  def test_path_is_unchanged(self):
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
  def test_wrong_url_is_refused(self, url, program, words):
    with self.assertRaisesRegex(ValueError, f"^--workdir={url}: .*{words}"):
      bucket.stage(url, program)

  def test_missing_gcsfs_is_named(self):
    with mock.patch("importlib.util.find_spec", lambda name: None):
      with self.assertRaisesRegex(ValueError, r"tba_jax\[gcs\]"):
        bucket.stage("gs://bucket/run", "train")

  def test_checkpoints_are_in_bucket(self):
    folder = self.on("a")
    for name in ("checkpoints", "sft/checkpoints"):
      self.assertEqual(bucket.place(folder / name), f"{self.url}/{name}")

  def test_host_keeps_its_files_and_another_downloads(self):
    folder = self.on("a")
    self.work(folder, config=1, epoch={"epoch": 3, "owner": "o"})
    # A killed run has files that are not in the bucket.
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

  def test_only_programs_with_models_download_them(self):
    self.work(self.on("a"), config=1)
    (self.copy / "model.safetensors").write_text("weights")
    self.assertFalse((self.on("b", "status") / "model.safetensors").exists())
    self.assertTrue((self.on("b", "evaluate") / "model.safetensors").exists())

  def test_own_lock_of_killed_run_is_taken_at_once(self):
    folder = self.on("a")
    lock = bucket.Lock(self.url)
    with mock.patch.object(bucket, "Lock", lambda url: lock):
      with mock.patch.object(lock, "release"):
        self.work(folder, config=1)
    self.assertNotEqual(bucket.Lock(self.url).read().holder, "")
    self.work(self.on("a"), config=2)  # The lock is taken at once.
    self.assertEqual(bucket.Lock(self.url).read().holder, "")

  def test_work_of_another_host_in_between_is_error(self):
    folder = self.on("a")
    self.work(self.on("b"), config=1)
    with self.assertRaisesRegex(ValueError, "start again"):
      self.hold(folder)

  def test_child_of_supervisor_takes_no_lock(self):
    folder = self.on("a")
    with mock.patch.dict(os.environ, TBA_JAX_SUPERVISED="1"):
      self.work(folder, config=1)
    self.assertEmpty(list(self.copy.iterdir()))

  def test_sends_files_to_bucket(self):
    folder = self.on("a", "report")
    (folder / "report.html").write_text("page")
    bucket.send(folder, "report.html", "none*")
    self.assertEqual((self.copy / "report.html").read_text(), "page")
    bucket.send(self.copy, "report.html")


class LockTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(bucket, "POLL_S", 0.02))
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.url = f"file://{self.folder}"

  def make(self):
    return bucket.Lock(self.url)

  def test_each_holder_has_token(self):
    first = self.make()
    self.assertEqual(first.read().token, "")
    one = first.take("")
    first.release()
    self.assertEqual(self.make().read().holder, "")
    two = self.make().take("")
    self.assertNotEqual(one.token, two.token)
    self.assertStartsWith(two.holder, "process ")

  def test_silent_holder_loses_lock(self):
    first, second = self.make(), self.make()
    first.take("")
    begun = time.monotonic()
    second.take("", gone_s=0.1)
    self.assertGreaterEqual(time.monotonic() - begun, 0.1)
    with self.assertRaisesRegex(RuntimeError, "taken it over"):
      first.renew()
    with self.assertRaises(RuntimeError):
      first.release()
    second.renew()

  def test_living_holder_keeps_lock(self):
    first, second = self.make(), self.make()
    first.take("")
    timer = threading.Timer(0.1, first.renew)
    timer.start()
    self.addCleanup(timer.join)
    with self.assertRaisesRegex(
        ValueError, f"{self.url}: process .* already runs there"
    ):
      second.take("", gone_s=0.5)

  def test_released_lock_is_taken_at_once(self):
    first, second = self.make(), self.make()
    first.take("")
    timer = threading.Timer(0.1, first.release)
    timer.start()
    self.addCleanup(timer.join)
    self.assertNotEqual(second.take("", gone_s=0.5).holder, "")

  def test_lock_of_dead_holder_is_taken_at_once(self):
    token = self.make().take("").token
    begun = time.monotonic()
    self.make().take(token, gone_s=60)
    self.assertLess(time.monotonic() - begun, 30)

  def test_slower_of_two_is_refused(self):
    slow, fast = self.make(), self.make()
    seen = slow.read()
    slow.read = lambda: seen  # State from before the other wrote.
    fast.take("")
    with self.assertRaisesRegex(ValueError, "was faster"):
      slow.take("")

  def test_tolerates_lost_response_to_write(self):
    lock = self.make()
    lock.take("")
    write = lock.store.write

    class Lost:
      """Writes twice: the second answer is a failure."""

      def __init__(self, store):
        self.read = store.read

      def write(self, *args, **kwargs):
        write(*args, **kwargs).result()
        return write(*args, **kwargs)

    lock.store = Lost(lock.store)
    lock.renew()

  def test_damaged_lock_is_error(self):
    (self.folder / bucket.NAME).write_text("{")
    with self.assertRaisesRegex(OSError, "is damaged"):
      self.make().read()


class UploaderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # Buckets need no mkdir.
    disk = mock.patch.dict(fsspec.config.conf, file={"auto_mkdir": True})
    self.enter_context(disk)
    self.enter_context(mock.patch.object(bucket, "TICK_S", 0.02))
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

  def test_files_of_host_are_not_uploaded(self):
    ours = {"config.json", "sft/model/config.json", "logs/trainer-0.log"}
    self.write(*ours)
    self.write(
        ".lock", "spool/secret", "secret", "params/1/leaf", ".config.json.12.3",
        "checkpoints/3/state", "sft/checkpoints/1/x", "model.partial",
    )  # fmt: skip
    bucket.Uploader(self.folder, self.url).close()
    self.assertEqual(self.names(self.copy), ours)

  def test_changes_and_removals_are_uploaded(self):
    self.write("a.jsonl", "b.json")
    uploader = bucket.Uploader(self.folder, self.url, every_s=0.01)
    waiting.wait_until(lambda: self.names(self.copy) == {"a.jsonl", "b.json"})
    self.write("a.jsonl", text="{}\n{}\n")
    (self.folder / "b.json").unlink()
    waiting.wait_until(lambda: self.names(self.copy) == {"a.jsonl"})
    waiting.wait_until(
        lambda: (self.copy / "a.jsonl").read_text() == "{}\n{}\n"
    )
    self.write("late.json")
    uploader.close()
    self.assertEqual(self.names(self.copy), {"a.jsonl", "late.json"})

  def test_open_segment_is_uploaded_at_end(self):
    first, last = "replay/segment-0.journal", "replay/segment-7.journal"
    self.write(first, last)
    uploader = bucket.Uploader(self.folder, self.url)
    waiting.wait_until(lambda: first in self.names(self.copy))
    self.assertNotIn(last, self.names(self.copy))
    uploader.close()
    self.assertIn(last, self.names(self.copy))

  def test_failed_upload_is_retried_and_raised_at_end(self):
    self.write("a/b.json")
    (self.copy / "a").write_text("not a folder")
    uploader = bucket.Uploader(self.folder, self.url, every_s=0.01)
    waiting.wait_until(lambda: uploader.failure is not None)
    with self.assertRaisesRegex(OSError, "a/b.json could not be copied to"):
      uploader.close()
    uploader = bucket.Uploader(self.folder, self.url, every_s=0.01)
    (self.copy / "a").unlink()
    uploader.close()
    self.assertEqual(self.names(self.copy), {"a/b.json"})

  def test_fetch_makes_folder_equal(self):
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

  def test_fetch_of_logs_leaves_out_models(self):
    self.write("metrics.jsonl", "m/model.safetensors", folder=self.copy)
    bucket.fetch(self.url, self.folder, logs_only=True)
    self.assertEqual(self.names(self.folder), {"metrics.jsonl"})

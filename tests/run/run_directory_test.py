# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Identity, config, lock and epochs of a run directory."""

import fcntl
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.run import run_directory
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import locator
from tests.support import tiny_model

_ROOT = pathlib.Path(__file__).parents[2]


class RunDirectoryTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / "run"
    self.config = tiny_model.make_config()
    self.config.store.spool_dir = self.create_tempdir().full_path + "/spool"

  def create(self):
    return run_directory.create(str(self.workdir), self.config)

  def saved(self):
    return json.loads((self.workdir / "config.json").read_text())

  def damage(self, text):
    self.workdir.mkdir(exist_ok=True)
    (self.workdir / "config.json").write_text(text)

  def test_refused_run_leaves_no_config(self):
    self.config.store.secret_file = "/no/such/secret"
    with self.assertRaisesRegex(ValueError, "secret_file=/no/such/secret"):
      self.create()
    self.assertFalse((self.workdir / "config.json").exists())

  def test_creates_new_run(self):
    run, before = self.create()
    self.assertIsNone(before)
    self.assertEqual(run.workdir, self.workdir)
    self.assertEqual(str(run.spool), self.config.store.spool_dir)
    self.assertEqual(run.locator, run.spool / "locator.json")
    self.assertLen(run.secret, 32)
    saved = self.saved()
    self.assertEqual(saved["run_id"], run.run_id)
    self.assertEqual(saved["format"], run_directory.FORMAT)
    self.assertEqual(saved["config"], self.config.to_dict())
    self.assertEqual(set(saved["versions"]) & {"python", "jax", "flax"},
                     {"python", "jax", "flax"})  # fmt: skip
    self.assertIn("git_revision", saved)

  def test_existing_run_keeps_its_identity(self):
    first, _ = self.create()
    self.config.train.num_steps = 7
    second, before = self.create()
    self.assertEqual(second, first)
    # Nothing is written: the caller decides whether the change is allowed.
    self.assertEqual(before["train"]["num_steps"], 100)
    self.assertEqual(self.saved()["config"]["train"]["num_steps"], 100)

  def test_roles_share_run(self):
    run, _ = self.create()
    self.assertEqual(
        run_directory.open_run(str(self.workdir), self.config), run
    )

  def test_two_runs_differ(self):
    first, _ = self.create()
    self.workdir = self.workdir.with_name("other")
    self.config.store.spool_dir += "2"
    second, _ = self.create()
    self.assertNotEqual(first.run_id, second.run_id)
    self.assertNotEqual(first.secret, second.secret)

  def test_update_changes_only_config(self):
    self.create()
    before = self.saved()
    self.config.train.num_steps = 7
    run_directory.update(str(self.workdir), self.config)
    after = self.saved()
    self.assertEqual(after["config"]["train"]["num_steps"], 7)
    self.assertEqual(after["run_id"], before["run_id"])
    self.assertEqual(after["created"], before["created"])

  def test_loads_saved_config(self):
    self.create()
    loaded = run_directory.load_config(str(self.workdir))
    self.assertEqual(loaded.to_dict(), self.config.to_dict())
    self.assertEqual(
        run_directory.run_id(str(self.workdir)), self.saved()["run_id"]
    )

  def test_no_run_has_no_id(self):
    self.assertEqual(run_directory.run_id(str(self.workdir)), "")

  def test_names_missing_run(self):
    for read in (
        lambda: run_directory.load_config(str(self.workdir)),
        lambda: run_directory.open_run(str(self.workdir), self.config),
    ):
      with self.assertRaisesRegex(ValueError, "--workdir=.*no run is there"):
        read()

  @parameterized.parameters(
      "",
      "{",
      "[]",
      "3",
      '{"format": 1}',
      '{"format": "x", "run_id": "r", "config": {}, "created": 0}',
  )
  def test_damaged_config_is_named(self, text):
    self.damage(text)
    for read in (
        self.create,
        lambda: run_directory.load_config(str(self.workdir)),
    ):
      with self.assertRaisesRegex(ValueError, "config.json: damaged"):
        read()
    self.assertEqual((self.workdir / "config.json").read_text(), text)

  def test_another_format_is_refused(self):
    self.create()
    for change in (-1, 1):
      other = run_directory.FORMAT + change
      saved = {
          **self.saved(),
          "format": other,
          "versions": {"tba_jax": "0.0.7"},
          "git_revision": "abc1234",
      }
      self.damage(json.dumps(saved))
      for read in (
          self.create,
          lambda: run_directory.load_config(str(self.workdir)),
      ):
        with self.assertRaisesRegex(
            ValueError,
            rf"format {other}, .* reads {run_directory.FORMAT}: use the version"
            r".*\(0\.0\.7, git revision abc1234\), or another --workdir",
        ):
          read()

  def test_reports_uncreatable_directory(self):
    self.workdir.parent.joinpath("file").write_text("")
    self.workdir = self.workdir.parent / "file" / "run"
    with self.assertRaisesRegex(OSError, "file"):
      self.create()

  def test_unsafe_spool_is_refused(self):
    spool = pathlib.Path(self.config.store.spool_dir)
    spool.mkdir()
    spool.chmod(0o755)
    with self.assertRaisesRegex(ValueError, "spool_dir"):
      self.create()

  def test_takes_given_secret(self):
    file = self.workdir.parent / "secret"
    self.config.store.secret_file = str(file)
    with self.assertRaisesRegex(ValueError, "secret_file=.*no such file"):
      self.create()
    file.write_bytes(b"f" * 32)
    file.chmod(0o644)
    with self.assertRaisesRegex(ValueError, "secret.*0644"):
      self.create()
    file.chmod(0o600)
    run, _ = self.create()
    self.assertEqual(run.secret, b"f" * 32)
    with mock.patch.dict(os.environ, {"TBA_JAX_SECRET": "65" * 32}):
      self.assertEqual(self.create()[0].secret, b"e" * 32)
    with mock.patch.dict(os.environ, {"TBA_JAX_SECRET": "65"}):
      with self.assertRaisesRegex(ValueError, "TBA_JAX_SECRET: must be 64"):
        self.create()

  def test_hosts_share_no_secret_only_if_insecure(self):
    secret = lambda folder: run_directory.create(
        str(self.workdir.parent / folder), self.config
    )[0].secret
    self.config.store.address = "127.0.0.1:0"
    self.config.store.spool_dir = ""
    self.assertNotEqual(secret("a"), secret("b"))
    self.config.store.insecure = True
    self.assertEqual(secret("a"), secret("b"))

  @parameterized.parameters(
      ({}, False),
      ({"store.address": "127.0.0.1:0"}, True),
      ({"store.locator": "127.0.0.1:7"}, True),
      ({"trainer.num_processes": 2}, True),
      ({"trainer.num_processes": 2, "store.insecure": True}, False),
  )
  def test_run_with_port_makes_its_own_tls(self, changes, made):
    for key, value in changes.items():
      section, name = key.split(".")
      self.config[section][name] = value
    with mock.patch.object(certificates, "is_supported", return_value=True):
      run, _ = self.create()
      again = run_directory.open_run(str(self.workdir), self.config)
    self.assertEqual(run.tls is not None, made)
    self.assertEqual(again.tls, run.tls)
    names = ["ca.pem", "cert.pem", "key.pem"] if made else []
    self.assertCountEqual(os.listdir(run.spool), names + ["secret"])
    with mock.patch.object(certificates, "is_supported", return_value=False):
      self.assertIsNone(self.create()[0].tls)

  def test_tls_of_given_secret_is_not_in_workdir(self):
    # The workdir is on a share, as the spool in it.
    self.config.store.update(spool_dir="", address="127.0.0.1:0")
    temporary = self.create_tempdir().full_path
    with (
        mock.patch.object(certificates, "is_supported", return_value=True),
        mock.patch.object(tempfile, "tempdir", temporary),
        mock.patch.dict(os.environ, {"TBA_JAX_SECRET": "65" * 32}),
    ):
      run, _ = self.create()
    self.assertStartsWith(run.tls.key_file, temporary)
    folder = pathlib.Path(run.tls.key_file).parent
    self.assertEqual(folder.stat().st_mode & 0o777, 0o700)
    self.assertEmpty(list(self.workdir.rglob("*.pem")))

  def test_named_files_of_tls_win(self):
    self.config.store.update(
        address="127.0.0.1:0", tls_cert_file="~/c", tls_key_file="k",
        tls_ca_file="a",
    )  # fmt: skip
    with mock.patch.object(certificates, "is_supported", return_value=True):
      run, _ = self.create()
    cert = os.path.expanduser("~/c")
    self.assertEqual(run.tls, certificates.Tls(cert, "k", "a"))
    self.assertEmpty(list(run.spool.glob("*.pem")))

  def test_other_hosts_without_tls_are_warned_of(self):
    for address, version, insecure, words in (
        ("", "0.10.2", False, "^$"),
        ("127.0.0.1:0", "0.10.2", False, "^$"),
        ("10.0.0.1:7-9", "0.10.2", False, "reaches 10.0.0.1:7-9 can.* 0.11.2"),
        ("10.0.0.1:7-9", "0.11.2", False, "^$"),
        ("10.0.0.1:7-9", "0.11.2", True, "reaches 10.0.0.1:7-9 can.*insecure"),
    ):
      self.config.store.update(address=address, insecure=insecure)
      with (
          mock.patch.object(
              certificates, "jaxlib_version", return_value=version
          ),
          mock.patch("sys.stderr", io.StringIO()) as told,
      ):
        run_directory.warn_unguarded(self.create()[0], self.config)
      self.assertRegex(told.getvalue(), words)
      self.assertLessEqual(told.getvalue().count("\n"), 1)

  def test_another_host_joins_run(self):
    run, _ = self.create()
    result = locator.Locator(run.run_id, 1, "127.0.0.1:1", 7)
    locator.write_locator(run.locator, result)
    announcer = locator.Announcer("127.0.0.1:0", run.secret, run.locator)
    self.addCleanup(announcer.close)
    secret = self.workdir.parent / "secret"
    secret.write_bytes(run.secret)
    secret.chmod(0o600)
    config = self.config.copy_and_resolve_references()
    config.store.update(
        spool_dir="",
        locator=f"127.0.0.1:{announcer.port}",
        secret_file=str(secret),
        deadline_s=1.0,
    )
    away = self.workdir.parent / "away"
    joined = run_directory.open_run(str(away), config)
    self.assertEqual(joined.run_id, run.run_id)
    self.assertEqual(joined.finder(), result)
    saved = json.loads((away / "config.json").read_text())
    self.assertEqual(saved["run_id"], run.run_id)
    # A host with another secret does not join.
    secret.write_bytes(b"x" * 32)
    other = str(self.workdir.parent / "other")
    with self.assertRaisesRegex(run_directory.NoRunError, "hash"):
      run_directory.open_run(other, config)
    announcer.close()
    with self.assertRaisesRegex(run_directory.NoRunError, "no store answered"):
      run_directory.open_run(other, config)
    self.assertFalse(pathlib.Path(other, "config.json").exists())

  def test_epochs_grow_from_one(self):
    run, _ = self.create()
    self.assertEqual([run_directory.next_epoch(run) for _ in range(3)],
                     [1, 2, 3])  # fmt: skip
    again = run_directory.open_run(str(self.workdir), self.config)
    self.assertEqual(run_directory.next_epoch(again), 4)

  def test_owner_changes_with_new_run(self):
    run, _ = self.create()
    name = run_directory.owner(run)
    self.assertEqual(run_directory.next_epoch(run), 1)
    self.assertEqual(run_directory.owner(run), name)
    self.assertEqual(run_directory.next_epoch(run), 2)
    (self.workdir / "epoch.json").unlink()
    self.assertNotEqual(run_directory.owner(run), name)


class LockTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path + "/run"

  def hold(self):
    """Starts another process that holds the lock."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from tba_jax.run import run_directory as r;"
            "fd = r.lock(sys.argv[1]); print('held', flush=True);"
            "sys.stdin.read()",
            self.workdir,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.stdin.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline(), b"held\n")
    return process

  def test_holder_is_named(self):
    other = self.hold()
    with self.assertRaisesRegex(ValueError, f"process {other.pid} already"):
      run_directory.lock(self.workdir)

  def test_reports_last_process(self):
    self.assertIsNone(run_directory.last_process(self.workdir))
    other = self.hold()
    result = run_directory.last_process(self.workdir)
    self.assertEqual(result, (other.pid, True))
    self.assertIsNone(run_directory.last_process(self.workdir, "trainer"))
    other.kill()
    other.wait()
    result = run_directory.last_process(self.workdir)
    self.assertEqual(result, (other.pid, False))

  def test_lock_check_refuses_nobody(self):
    os.close(run_directory.lock(self.workdir))
    fd = os.open(os.path.join(self.workdir, ".lock"), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, os.close, (fd,))
    timer.start()
    self.addCleanup(timer.join)
    os.close(run_directory.lock(self.workdir))

  def test_lock_of_dead_holder_is_free(self):
    other = self.hold()
    other.kill()
    other.wait()
    run_directory.lock(self.workdir)
    with self.assertRaisesRegex(ValueError, "already runs there"):
      run_directory.lock(self.workdir)

  def test_lock_reports_uncreatable_directory(self):
    file = self.create_tempfile("file").full_path
    for workdir in (file, f"{file}/run", "/proc/none/run"):
      with self.assertRaisesRegex(
          ValueError, f"--workdir={workdir}: .*; must be a folder"
      ):
        run_directory.lock(workdir)

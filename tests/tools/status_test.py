# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for status, with a real store where one is asked."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time

from absl.testing import parameterized

from tba_jax.config import settings
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.tools import status
from tba_jax.transport import wire
from tba_jax.transport.kv import locator
from tests.report import fake_run
from tests.transport import running_host


class StatusTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba-")
    self.addCleanup(folder.cleanup)
    self.workdir = os.path.join(folder.name, "run")
    self.config = settings.get_config()
    self.run_info, _ = run_directory.create(self.workdir, self.config)

  def _status(self, operands=()):
    """Returns exit status, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = status.run(self.config, self.workdir, operands)
    shown = " ".join(out.getvalue().replace("│", " ").split())
    return code, shown, err.getvalue()

  def _write_file(self, **values):
    path = os.path.join(self.workdir, "status.json")
    jsonl.atomic_write_json(path, {**fake_run.status(), **values})

  def _message(self, **changes):
    """Returns a state as the trainer writes it, but for `changes`."""
    place = {"run": self.run_info.run_id, "key": status.STATUS_KEY}
    state = {**place, **fake_run.status(step=77), **changes}
    return wire.encode_message(state, self.run_info.secret)

  def _host(self):
    host = running_host.RunningHost(
        self.run_info.spool,
        run_id=self.run_info.run_id,
        root=self.run_info.root,
    )
    self.enterContext(host)
    return host

  def test_live_state_comes_from_store(self):
    self._write_file(step=1)
    client = self._host().client(root=self.run_info.root)
    client.put(status.STATUS_KEY, self._message(time=time.time()))
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("step 77/320", out)
    self.assertIn("from the store, generation", out)

  def test_foreign_state_is_not_shown(self):
    self._write_file(step=33)
    client = self._host().client(root=self.run_info.root)
    forged = wire.encode_message(fake_run.status(step=77), b"x" * 32)
    copied = self._message(key="live/a")
    for message in (forged, copied, self._message(run="another")):
      client.put(status.STATUS_KEY, message)
      code, out, _ = self._status()
      self.assertEqual(code, 0)
      self.assertIn("step 33/320", out)
      self.assertIn("no readable state", out)

  def test_reports_store_without_state(self):
    self._write_file(step=33)
    self._host()
    _, out, _ = self._status()
    self.assertIn("step 33/320", out)
    self.assertIn("nothing in the store yet", out)

  def test_file_is_shown_and_named_without_store(self):
    self._write_file(time=time.time() - 200)
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("step 120/320", out)
    self.assertIn("from status.json: its store is not running", out)
    self.assertRegex(out, r"written 3:2\d min ago; no sign of life for 3:2")

  def test_reports_events(self):
    self._write_file()
    self.assertNotIn("what happened", self._status()[1])
    with open(os.path.join(self.workdir, "events.jsonl"), "w") as f:
      event = {"kind": "died", "role": "searcher", "index": 1}
      f.write(json.dumps({**event, "message": "searcher-1: SIGKILL"}) + "\n")
    _, out, _ = self._status()
    self.assertIn("what happened • searcher-1 died once (SIGKILL)", out)

  def test_threads_of_one_process_have_no_store(self):
    self._write_file(store={"generation": 0}, time=time.time())
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("from status.json: threads have no store; written", out)
    self.assertNotIn("generation", out)

  def test_fine_tuning_has_no_store_state(self):
    os.makedirs(os.path.join(self.workdir, "sft"))
    with open(os.path.join(self.workdir, "sft", "metrics.jsonl"), "w") as f:
      f.write('{"step": 10, "train/loss": 2.5}\n')
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("from the run's files: its store is not running", out)

  def _fine_tunes(self, role, silent_s):
    """Leaves what fine-tuning wrote last, so many seconds ago."""
    folder = os.path.join(self.workdir, role)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
      record = {"step": 10, "time": time.time() - silent_s, "train/loss": 2.5}
      f.write(json.dumps(record) + "\n")

  def _ended(self):
    """Leaves the lock of a process that has ended; returns its pid."""
    script = "import os; print(os.getpid())"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True
    )
    with open(os.path.join(self.workdir, ".lock"), "wb") as f:
      f.write(process.stdout)
    return int(process.stdout)

  @parameterized.parameters("sft", "reward_model")
  def test_dead_fine_tuning_is_shown_as_ended(self, role):
    self._fine_tunes(role, 200)
    pid = self._ended()
    _, out, _ = self._status()
    self.assertIn(f"● {role}", out)
    self.assertRegex(
        out, rf"no sign of life for 3:2\d min; its process {pid} has ended"
    )
    self._fine_tunes(role, 2)
    _, out, _ = self._status()
    self.assertNotIn("no sign of life", out)
    self.assertIn(f"its process {pid} has ended", out)

  def test_distinguishes_live_from_hanging_fine_tuning(self):
    lock = run_directory.lock(self.workdir)
    self.addCleanup(os.close, lock)
    self._fine_tunes("sft", 2)
    _, out, _ = self._status()
    self.assertNotIn("process", out)
    self._fine_tunes("sft", 200)
    _, out, _ = self._status()
    self.assertRegex(
        out, rf"no sign of life for 3:2\d min; its process {os.getpid()} is"
    )

  def test_remote_host_shows_only_silence(self):
    self._fine_tunes("sft", 200)
    _, out, _ = self._status()
    self.assertRegex(out, r"no sign of life for 3:2\d min")
    self.assertNotIn("process", out)

  def test_finds_manually_started_trainer(self):
    self._ended()
    lock = run_directory.lock(self.workdir, "trainer")
    self.addCleanup(os.close, lock)
    self._write_file(time=time.time() - 200)
    _, out, _ = self._status()
    self.assertIn(f"its process {os.getpid()} is there", out)

  def test_finished_run_shows_no_liveness(self):
    self._ended()
    self._write_file(time=time.time() - 200, phase="done")
    _, out, _ = self._status()
    self.assertNotIn("no sign of life", out)
    self.assertNotIn("has ended", out)

  def test_dead_store_is_given_up_in_time(self):
    self.config.store.deadline_s = 0.9
    self._write_file()
    locator.write_locator(
        self.run_info.locator,
        locator.Locator(self.run_info.run_id, 3, "unix:/nowhere/kv.sock", 1),
    )
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("its store does not answer", out)

  def test_run_without_any_state_is_error(self):
    code, _, err = self._status()
    self.assertEqual(code, 1)
    self.assertIn("no state yet", err)

  def test_no_run_and_operands_are_refused(self):
    self.assertEqual(self._status(["x"])[0], 2)
    self.workdir += "-other"
    code, _, err = self._status()
    self.assertEqual(code, 2)
    self.assertIn("no run is there", err)

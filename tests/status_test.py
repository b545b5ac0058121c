# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for status, with a real store where one is asked."""

import contextlib
import io
import os
import tempfile
import time

from absl.testing import absltest

from configs import common
from tba_jax import metrics
from tba_jax import run_directory
from tba_jax import status
from tba_jax.transport import locator
from tba_jax.transport import wire
from tests.report import fake_run
from tests.transport import running_host


class StatusTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba-")
    self.addCleanup(folder.cleanup)
    self.workdir = os.path.join(folder.name, "run")
    self.config = common.get_config()
    self.run_info, _ = run_directory.create(self.workdir, self.config)

  def _status(self, operands=()):
    """Returns exit status, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = status.run(self.config, self.workdir, operands)
    return code, " ".join(out.getvalue().split()), err.getvalue()

  def _write_file(self, **values):
    path = os.path.join(self.workdir, "status.json")
    metrics.write_status(path, fake_run.status() | values)

  def _host(self):
    host = running_host.RunningHost(
        self.run_info.spool, run_id=self.run_info.run_id
    )
    self.enterContext(host)
    return host

  def test_the_live_state_comes_from_the_store(self):
    self._write_file(step=1)
    message = fake_run.status(step=77) | {"time": time.time()}
    client = self._host().client()
    client.put(
        status.STATUS_KEY,
        wire.encode_message(message, self.run_info.secret),
    )
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("step 77/320", out)
    self.assertIn("from the store, generation", out)

  def test_a_state_that_the_run_did_not_write_is_not_shown(self):
    self._write_file(step=33)
    client = self._host().client()
    forged = wire.encode_message(fake_run.status(step=77), b"x" * 32)
    client.put(status.STATUS_KEY, forged)
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("step 33/320", out)
    self.assertIn("no readable state", out)

  def test_a_store_without_a_state_says_so(self):
    self._write_file(step=33)
    self._host()
    _, out, _ = self._status()
    self.assertIn("step 33/320", out)
    self.assertIn("nothing in the store yet", out)

  def test_without_a_store_the_file_is_shown_and_named(self):
    self._write_file(time=time.time() - 200)
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("step 120/320", out)
    self.assertIn("from status.json: its store is not running", out)
    self.assertRegex(out, r"written 3:2\d min ago")

  def test_while_it_fine_tunes_there_is_no_state_to_name(self):
    os.makedirs(os.path.join(self.workdir, "sft"))
    with open(os.path.join(self.workdir, "sft", "metrics.jsonl"), "w") as f:
      f.write('{"step": 10, "train/loss": 2.5}\n')
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("from the run's files: its store is not running", out)

  def test_a_dead_store_is_given_up_in_time(self):
    self.config.store.probe_timeout_s = 0.3
    self._write_file()
    locator.write(
        self.run_info.locator,
        locator.Locator(self.run_info.run_id, 3, "unix:/nowhere/kv.sock", 1),
    )
    code, out, _ = self._status()
    self.assertEqual(code, 0)
    self.assertIn("its store does not answer", out)

  def test_a_run_without_any_state_is_an_error(self):
    code, _, err = self._status()
    self.assertEqual(code, 1)
    self.assertIn("no state yet", err)

  def test_no_run_and_operands_are_refused(self):
    self.assertEqual(self._status(["x"])[0], 2)
    self.workdir += "-other"
    code, _, err = self._status()
    self.assertEqual(code, 2)
    self.assertIn("no run is there", err)


if __name__ == "__main__":
  absltest.main()

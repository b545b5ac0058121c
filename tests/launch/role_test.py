# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""launch/role.sh keeps a role going, with a stand-in for Python."""

import os
import pathlib
import signal
import subprocess
import time

from absl.testing import parameterized

from tests.support import waiting

_ROLE = pathlib.Path(__file__).parents[2] / "launch" / "role.sh"
_WAIT_S = 20.0


class RoleTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.python = self.folder / "python"
    self.calls = self.folder / "calls"

  def start(self, body, *arguments, **variables):
    """Starts role.sh; `body` is what the stand-in does with its arguments."""
    self.python.write_text(
        f'#!/usr/bin/env bash\necho "$*" >>{self.calls}\n{body}\n'
    )
    self.python.chmod(0o755)
    process = subprocess.Popen(
        ["bash", str(_ROLE), *arguments],
        env={
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.folder),
            "PYTHON": str(self.python),
            "PAUSE_S": "0",
            **variables,
        },
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.stderr.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return process

  def count(self):
    return (
        len(self.calls.read_text().splitlines()) if self.calls.exists() else 0
    )

  @parameterized.parameters(0, 2, 3)
  def test_does_not_retry_permanent_failure(self, status):
    process = self.start(f"exit {status}", "--program=store")
    self.assertEqual(process.wait(_WAIT_S), status)
    self.assertEqual(
        self.calls.read_text(), "-m tba_jax.main --program=store\n"
    )

  def test_restarts_after_error(self):
    process = self.start(
        f"[ $(wc -l <{self.calls}) -ge 3 ] && exit 0; exit 1", "--program=store"
    )
    self.assertEqual(process.wait(_WAIT_S), 0)
    self.assertEqual(self.count(), 3)
    self.assertIn("ended with status 1; restarting", process.stderr.read())

  def test_runs_once_if_requested(self):
    process = self.start("exit 1", "--once", "--program=store")
    self.assertEqual(process.wait(_WAIT_S), 1)
    self.assertEqual(self.count(), 1)

  def test_passes_signal_on_and_waits(self):
    ended = self.folder / "ended"
    body = (
        f"trap 'sleep .3; touch {ended}; exit 75' TERM\n"
        "for i in $(seq 400); do sleep .05; done"
    )
    process = self.start(body, "--program=trainer")
    waiting.wait_until(self.count)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(_WAIT_S), 75)
    self.assertTrue(ended.exists())
    self.assertEqual(self.count(), 1)

  def test_takes_index_of_environment(self):
    process = self.start(
        "exit 0", "--program=trainer", "--index_from=RANK", "h:1", RANK="3"
    )
    self.assertEqual(process.wait(_WAIT_S), 0)
    self.assertEndsWith(self.calls.read_text(), "--program=trainer 3 h:1\n")
    process = self.start("exit 0", "--index_from=NONE")
    self.assertEqual(process.wait(_WAIT_S), 2)
    self.assertIn("the environment variable is not set", process.stderr.read())

  def test_makes_secret_once(self):
    secret = self.folder / "run" / "secret"
    result = set()
    for _ in range(2):
      process = self.start("exit 0", f"--make_secret={secret}")
      self.assertEqual(process.wait(_WAIT_S), 0)
      self.assertEqual(secret.stat().st_mode & 0o777, 0o600)
      self.assertEqual(os.listdir(secret.parent), ["secret"])
      result.add(secret.read_bytes())
    self.assertLen(result, 1)
    self.assertLen(result.pop(), 32)
    self.assertEqual(self.calls.read_text(), "-m tba_jax.main\n" * 2)

  def test_waits_for_file(self):
    file = self.folder / "config.json"
    process = self.start("exit 0", f"--wait_for={file}", "--program=trainer")
    time.sleep(0.5)
    self.assertIsNone(process.poll())
    self.assertEqual(self.count(), 0)
    file.touch()
    self.assertEqual(process.wait(_WAIT_S), 0)
    process = self.start("exit 0", f"--wait_for={file}2", WAIT_S="1")
    self.assertEqual(process.wait(_WAIT_S), 1)
    self.assertIn("after 1 s; is the store running?", process.stderr.read())

  def test_appends_to_log(self):
    log = self.folder / "searcher-0.log"
    log.write_text("earlier\n")
    process = self.start(
        "echo out; echo err >&2; exit 3", f"--log={log}", "--program=searcher"
    )
    self.assertEqual(process.wait(_WAIT_S), 3)
    self.assertEqual(log.read_text(), "earlier\nout\nerr\n")
    self.assertEqual(process.stdout.read() + process.stderr.read(), "")

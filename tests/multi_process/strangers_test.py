# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who has not the run's secret does not reach its store; the run goes on."""

import pathlib
import tempfile

from absl.testing import absltest
import psutil

from tba_jax.transport.kv import locator
from tests.support import harness
from tests.transport import strangers
from tests.transport import tls_test

_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 100_000,
    "evaluate.every_steps": 0,
    "replay.recent_fraction": 0.75,
}


class StrangersTest(absltest.TestCase):

  def start(self, **changes):
    folder = tempfile.TemporaryDirectory(prefix="tba_strangers_")
    self.addCleanup(folder.cleanup)
    self.workdir = pathlib.Path(folder.name) / "run"
    run = harness.Run(self.workdir, {**_OVERRIDES, **changes})
    self.addCleanup(run.close)
    run.wait_for_step(3)
    return run

  def test_local_run_opens_only_loopback_ports(self):
    for changes, ports in (({}, 0), ({"store.address": "127.0.0.1:0"}, 1)):
      run = self.start(**changes)
      hosts = [
          # A socket that would also take IPv6 has this prefix.
          one.laddr.ip.removeprefix("::ffff:")
          for process in psutil.Process(run.process.pid).children(True)
          for one in process.net_connections("inet")
          if one.status == psutil.CONN_LISTEN
      ]
      self.assertEqual(hosts, ["127.0.0.1"] * ports)
      run.close()

  def test_continues_among_strangers(self):
    tls_test.setUpModule()
    run = self.start(**{"store.address": "127.0.0.1:0"})
    spool = self.workdir / "spool"
    keys = [spool / name for name in ("cert.pem", "key.pem", "ca.pem")]
    self.assertEqual([key.stat().st_mode & 0o777 for key in keys], [0o600] * 3)
    result = locator.read_locator(spool / "locator.json")
    other = strangers.of_another_run(self.workdir.parent / "other")
    first = run.steps()[-1]["step"]
    for _ in range(3):
      strangers.send_garbage(result.address)
      self.assertEmpty(strangers.speak_tls(result.address))
      self.assertIsNone(strangers.attach(result, None))
      self.assertIsNone(strangers.attach(result, other))
    run.wait_for_step(first + 10)
    self.assertEqual(run.events("store_lost"), [])
    self.assertEqual(run.events("restart"), [])
    # No log or file of the run, but those of the spool, tells a key.
    key = keys[1].read_text().splitlines()[1]
    for path in self.workdir.rglob("*"):
      if path.is_file() and spool not in path.parents:
        self.assertNotIn(key, path.read_text(errors="replace"), path)

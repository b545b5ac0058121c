# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The store program serves a run and ends cleanly at SIGTERM."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import parameterized

from tba_jax.programs import store
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.transport.kv import kv_client
from tests.support import tiny_model
from tests.support import waiting

_ROOT = pathlib.Path(__file__).parents[2]
_WAIT_S = 60.0


class StoreTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="st")
    self.addCleanup(folder.cleanup)
    config = tiny_model.make_config()
    config.store.spool_dir = f"{folder.name}/s"
    self.run_info, _ = run_directory.create(f"{folder.name}/run", config)
    self.process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from tba_jax.run import run_directory;"
            "from tba_jax.programs import store;"
            "config = run_directory.load_config(sys.argv[1]);"
            "status = store.run(config, sys.argv[1], []);"
            "sys.exit(9 if 'jax' in sys.modules else status)",
            str(self.run_info.workdir),
        ],
        cwd=_ROOT,
        stderr=subprocess.DEVNULL,
    )
    self.addCleanup(self.process.wait)
    self.addCleanup(self.process.kill)

  def events(self):
    try:
      text = (self.run_info.workdir / "events.jsonl").read_text()
    except FileNotFoundError:
      return []
    return [json.loads(line) for line in text.splitlines()]

  def test_serves_until_sigterm(self):
    waiting.wait_until(
        lambda: any(e["kind"] == "store_started" for e in self.events()),
        "its start",
        _WAIT_S,
        is_lost=lambda: self.process.poll() is not None,
    )
    service = json.loads(self.run_info.locator.read_text())["pid"]
    client = kv_client.KvTransport(
        self.run_info.locator,
        deadline_s=_WAIT_S,
        run_id=self.run_info.run_id,
        root=self.run_info.root,
    )
    client.put("a/b", b"value")
    self.assertEqual(client.get("a/b"), b"value")
    client.close()
    self.process.send_signal(signal.SIGTERM)
    self.assertEqual(self.process.wait(_WAIT_S), 0)
    # Its service is gone with it, and so is the socket.
    with self.assertRaises(ProcessLookupError):
      os.kill(service, 0)
    self.assertEmpty(list(self.run_info.spool.glob("*.sock")))
    self.assertEqual({e["role"] for e in self.events()}, {"store"})

  @parameterized.parameters(
      (
          {"address": "192.0.2.1:7001-7009", "insecure": True},
          "no free port of 192.0.2.1",
          1,
      ),
      ({"locator": "192.0.2.1:7000", "insecure": True}, "cannot be bound", 2),
  )
  def test_address_of_another_host_is_error(self, changes, words, status):
    # 192.0.2.1 is an address of documentation: no host has it.
    folder = self.create_tempdir().full_path
    config = tiny_model.make_config()
    config.store.update(spool_dir=f"{folder}/s", **changes)
    stop = mock.patch.object(
        processes, "stop_on_signals", return_value=threading.Event()
    )
    with stop, mock.patch("sys.stderr", io.StringIO()) as told:
      self.assertEqual(store.run(config, f"{folder}/run", []), status)
    self.assertRegex(told.getvalue().replace("\n", " "), words)

  def test_run_continues_with_changed_free_settings(self):
    workdir = f"{self.create_tempdir().full_path}/run"
    config = tiny_model.make_config()
    run_id = run_directory.create(workdir, config)[0].run_id
    ended = threading.Event()
    ended.set()
    stop = mock.patch.object(processes, "stop_on_signals", return_value=ended)
    config.train.num_steps += 5
    with stop:
      self.assertEqual(store.run(config, workdir, []), 0)
    saved = run_directory.load_config(workdir)
    self.assertEqual(saved.train.num_steps, config.train.num_steps)
    self.assertEqual(run_directory.open_run(workdir, config).run_id, run_id)
    config.seed += 1
    with stop, mock.patch("sys.stderr", io.StringIO()) as told:
      self.assertEqual(store.run(config, workdir, []), 2)
    self.assertRegex(
        told.getvalue(), "^error: config.seed = .*: the run was st"
    )
    self.assertEqual(run_directory.load_config(workdir), saved)

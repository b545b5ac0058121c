# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A store host on a thread, and its clients."""

import pathlib
import tempfile
import threading
from typing import Any

from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import kv_host
from tests.support import waiting


class RunningHost:
  """Runs a `KvHost` in a context; stops it and its clients at the end.

  Enters when the first generation answers, or `run` has raised `error`.
  """

  def __init__(self, spool: pathlib.Path | None = None, **host_args: Any):
    self._folder = tempfile.TemporaryDirectory(prefix="tba-")
    self.spool = spool or pathlib.Path(self._folder.name) / "spool"
    self.events: list[tuple[str, str]] = []
    self._host_args = {
        "run_id": "run",
        "probe_timeout_s": 30.0,
        "on_event": lambda *event: self.events.append(event),
        **host_args,
    }
    self._stop = threading.Event()
    # What clients do; a test may replace one.
    self.operations = dict(kv_client.OPERATIONS)
    self._clients: list[kv_client.KvTransport] = []
    self.error: BaseException | None = None

  def __enter__(self) -> "RunningHost":
    self.host = kv_host.KvHost(self.spool, **self._host_args)
    self._thread = threading.Thread(target=self._run)
    self._thread.start()
    waiting.wait_until(
        lambda: self.error or "started" in self.kinds(), "a start", 60.0
    )
    return self

  def __exit__(self, *unused: Any) -> None:
    self.stop()
    for client in self._clients:
      client.close()
    self._folder.cleanup()

  def stop(self) -> None:
    self._stop.set()
    self._thread.join(60)

  def client(self, **client_args: Any) -> kv_client.KvTransport:
    """Returns a new client; the context closes it."""
    args = {
        "locator_path": self.host.locator_path,
        "deadline_s": 60.0,
        "poll_s": 0.01,
        "operations": self.operations,
        **client_args,
    }
    client = kv_client.KvTransport(**args)
    self._clients.append(client)
    return client

  def kinds(self) -> list[str]:
    """Returns the kinds of the events so far."""
    return [kind for kind, _ in self.events]

  def _run(self) -> None:
    try:
      self.host.run(self._stop)
    except Exception as error:
      self.error = error

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API over a model in memory, for child processes of this one."""

from collections.abc import Iterator
import contextlib
import secrets
import socket
import tempfile
import threading
import time
from typing import Any

import ml_collections
import uvicorn

from tba_jax import types
from tba_jax.policy import policy as policy_lib
from tba_jax.serving import app as app_lib
from tba_jax.serving import connections
from tba_jax.serving import engine as engine_lib
from tba_jax.serving import handlers

# Seconds for the server to start, and for its current request to finish.
_START_S, _END_S = 30.0, 60.0


class Endpoint:
  """Address of a served model, and the activity of its clients.

  url, key: base URL of OpenAI's API on the loopback address, and its key.
  answered: number of answered HTTP requests.
  """

  def __init__(self, app: Any, port: int, key: str):
    self.url, self.key = f"http://127.0.0.1:{port}/v1", key
    self.answered = self._under_way = 0
    self._idle_since = time.monotonic()
    self._app = app

  @property
  def idle_s(self) -> float:
    """Seconds since the last request was answered; 0 while one is under way."""
    return 0.0 if self._under_way else time.monotonic() - self._idle_since

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Passes an ASGI request on to the application, and counts it."""
    is_request = scope["type"] == "http"  # Not the lifespan of the application.
    self._under_way += is_request
    try:
      await self._app(scope, receive, send)
    finally:
      self._under_way -= is_request
      self.answered += is_request
      self._idle_since = time.monotonic()


@contextlib.contextmanager
def serve(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    name: str,
) -> Iterator[Endpoint]:
  """Serves a model from threads of this process; its requests leave no files.

  Args:
    config: reads `sampling`, `mesh` and `seed`.
    params: model params on the devices.
    name: id of the model for clients.

  Raises:
    OSError: the server does not start.
  """
  config = config.copy_and_resolve_references()
  config.serve.model_name = name
  key, waiters = secrets.token_urlsafe(32), handlers.Waiters()
  with (
      tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
      socket.create_server(("127.0.0.1", 0)) as listener,
  ):
    engine = engine_lib.Engine(
        config, folder, waiters.notify, source=(policy, params)
    )
    decoding = threading.Thread(target=engine.run, name="engine", daemon=True)
    app = app_lib.make(engine, waiters, decoding, key)
    endpoint = Endpoint(app, listener.getsockname()[1], key)
    server = uvicorn.Server(
        uvicorn.Config(
            endpoint,
            http=connections.Protocol,
            # The program's logging stays as it is.
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    serving = threading.Thread(
        target=server.run, args=([listener],), name="http", daemon=True
    )
    decoding.start()
    serving.start()
    try:
      end = time.monotonic() + _START_S
      while not server.started:
        if time.monotonic() > end or not serving.is_alive():
          raise OSError(f"{endpoint.url}: the server does not start")
        time.sleep(0.01)
      yield endpoint
    finally:
      engine.stop()
      waiters.close()
      server.should_exit = True
      serving.join(_END_S)
      decoding.join(_END_S)

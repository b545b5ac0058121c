# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Connections that send no request are closed, and keep nobody out."""

import contextlib
import socket
import threading
import time
from unittest import mock

from absl.testing import absltest
import uvicorn

from tba_jax.serving import connections
from tests.support import waiting

_REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope, receive, send):
  del receive
  assert scope["type"] == "http"
  head = {"type": "http.response.start", "status": 200,
          "headers": [(b"content-length", b"2")]}  # fmt: skip
  await send(head)
  await send({"type": "http.response.body", "body": b"ok"})


class ConnectionsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(mock.patch.object(connections, "REQUEST_S", 0.5))
    self.enterContext(mock.patch.object(connections, "_MAX_WAITING", 8))
    listener = socket.create_server(("127.0.0.1", 0))
    self.address = listener.getsockname()
    self.server = uvicorn.Server(
        uvicorn.Config(
            answer,
            http=connections.Protocol,
            log_level="error",
            lifespan="off",
            limit_concurrency=16,
        )
    )
    thread = threading.Thread(
        target=self.server.run, kwargs={"sockets": [listener]}
    )
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(setattr, self.server, "should_exit", True)
    waiting.wait_until(lambda: self.server.started, lambda: "no start", 20.0)

  def connect(self):
    near = socket.create_connection(self.address, 5.0)
    self.addCleanup(near.close)
    return near

  def ask(self, near):
    near.sendall(_REQUEST)
    data = b""
    while not data.endswith(b"ok"):
      part = near.recv(4096)
      if not part:
        raise EOFError(data)
      data += part
    return data.split(b" ")[1]

  def seconds_open(self, near, every=b""):
    """Returns how long a connection lives to which bytes are sent."""
    began = time.monotonic()
    near.settimeout(0.1)
    while time.monotonic() < began + 5:
      with contextlib.suppress(TimeoutError):
        try:
          if every:
            near.sendall(every)
          if not near.recv(4096):
            break
        except ConnectionError:
          break
    return time.monotonic() - began

  def test_closes_connection_without_request(self):
    self.assertBetween(self.seconds_open(self.connect()), 0.3, 3.0)

  def test_closes_connection_of_slow_bytes(self):
    near = self.connect()
    near.sendall(b"GET / HTTP/1.1\r\nX: ")
    self.assertBetween(self.seconds_open(near, b"a"), 0.3, 3.0)
    near = self.connect()
    self.assertEqual(self.ask(near), b"200")
    near.sendall(b"GET / HTTP/1.1\r\nX: ")
    self.assertBetween(self.seconds_open(near, b"a"), 0.3, 3.0)

  def test_idle_connections_do_not_block_clients(self):
    idle = [self.connect() for _ in range(60)]
    for _ in range(3):
      self.assertEqual(self.ask(self.connect()), b"200")
    self.assertLessEqual(len(connections.Protocol.waiting), 8)
    del idle

  def test_answers_several_requests_of_connection(self):
    near = self.connect()
    for _ in range(3):
      self.assertEqual(self.ask(near), b"200")
      time.sleep(0.2)

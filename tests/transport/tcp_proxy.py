# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on the loopback interface, whose link a test cuts and mends."""

import socket
import threading
from typing import Any


class TcpProxy:
  """Forwards connections to one address, until the end of the context.

  forwarded: the bytes in both directions.
  """

  def __init__(self, target: tuple[str, int]):
    self.forwarded = bytearray()
    self._target = target
    self._server = socket.create_server(("127.0.0.1", 0))
    self._open = threading.Event()
    self._open.set()
    self._closed = False
    self._lock = threading.Lock()
    self._sockets: list[socket.socket] = []
    threading.Thread(target=self._accept, daemon=True).start()

  @property
  def address(self) -> str:
    return f"127.0.0.1:{self._server.getsockname()[1]}"

  def __enter__(self) -> "TcpProxy":
    return self

  def __exit__(self, *unused: Any) -> None:
    self._closed = True
    self._server.close()
    self.cut(reset=True)
    self._open.set()

  def cut(self, *, reset: bool) -> None:
    """Cuts the link.

    Args:
      reset: whether connections break, and new ones at once; else they stay and
        are silent, like a pulled cable.
    """
    self._open.clear()
    self._reset = reset
    if reset:
      with self._lock:
        for one in self._sockets:
          _close(one)
        self._sockets.clear()

  def mend(self) -> None:
    """Lets bytes and connections pass again."""
    self._open.set()

  def _accept(self) -> None:
    while True:
      try:
        near, _ = self._server.accept()
      except OSError:
        return
      if self._closed or (not self._open.is_set() and self._reset):
        _close(near)
        continue
      threading.Thread(target=self._join, args=(near,), daemon=True).start()

  def _join(self, near: socket.socket) -> None:
    self._open.wait()
    try:
      far = socket.create_connection(self._target, 5.0)
    except OSError:
      _close(near)
      return
    far.settimeout(None)
    with self._lock:
      self._sockets += [near, far]
    for source, sink in ((near, far), (far, near)):
      threading.Thread(
          target=self._pump, args=(source, sink), daemon=True
      ).start()

  def _pump(self, source: socket.socket, sink: socket.socket) -> None:
    try:
      while data := source.recv(1 << 16):
        self._open.wait()
        self.forwarded += data
        sink.sendall(data)
    except OSError:
      pass
    _close(source)
    _close(sink)


def _close(one: socket.socket) -> None:
  try:
    one.shutdown(socket.SHUT_RDWR)
  except OSError:
    pass
  one.close()

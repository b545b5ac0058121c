# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of a store that have not the run's secret."""

import dataclasses
import os
import pathlib
import socket
import ssl

from tba_jax.transport import byte_store
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import locator

_WAIT_S = 5.0
# The beginning of HTTP/2, with empty settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)


def send_garbage(address: str) -> None:
  """Sends random bytes; returns when the store has closed the connection."""
  with socket.create_connection(
      locator.split_address(address), _WAIT_S
  ) as near:
    try:
      near.sendall(os.urandom(1 << 16))
      while near.recv(1 << 16):
        pass
    except ConnectionError:
      pass


def speak_tls(address: str) -> bytes:
  """Returns what a client without certificate is told over TLS."""
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.check_hostname = False
  context.verify_mode = ssl.CERT_NONE
  context.set_alpn_protocols(["h2"])
  told = b""
  with socket.create_connection(
      locator.split_address(address), _WAIT_S
  ) as near:
    try:
      # The client is done with TLS 1.3 before the store has looked at it.
      with context.wrap_socket(near) as secured:
        secured.sendall(_PREFACE)
        while part := secured.recv(1 << 16):
          told += part
    except (ssl.SSLError, ConnectionError):
      pass
  return told


def attach(
    found: locator.Locator,
    tls: certificates.Tls | None,
    deadline_s: float = 1.5,
) -> kv_client.KvTransport | None:
  """Returns a client of the store; None if it was not let in."""
  near = dataclasses.replace(found, tls=tls is not None)
  try:
    return kv_client.KvTransport(
        lambda: near, deadline_s=deadline_s, poll_s=0.01, tls=tls
    )
  except byte_store.DeadlineExceededError:
    return None


def of_another_run(folder: str | os.PathLike[str]) -> certificates.Tls:
  """Returns the files of a run with another secret."""
  pathlib.Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
  return certificates.make(folder, os.urandom(32))

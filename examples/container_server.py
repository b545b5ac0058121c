# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves containers to environments, whose sandbox has no podman or docker.

    python examples/container_server.py podman --memory=2g

prints a URL, the `kind` of `containers.open`; GET returns the number of
containers. Arguments: kind of the containers, and their options. Whoever knows
the URL can run commands. `tba_jax/environments/containers.py` has the protocol.
"""

import base64
import contextlib
from http import server
import json
import os
import secrets
import sys

from tba_jax.environments import containers

_KEY = os.environ.get("CONTAINERS_KEY") or secrets.token_hex(16)
_PORT = int(os.environ.get("CONTAINERS_PORT", "0"))
_MAX_BYTES = 2**25
_running = {}


class Handler(server.BaseHTTPRequestHandler):
  """Calls `start` and `execute` by the path of a request."""

  timeout = 60  # Seconds to wait for a client.

  def do_GET(self):  # pylint: disable=invalid-name
    if self.path == f"/{_KEY}":
      self.answer(containers=len(_running))

  def do_POST(self):  # pylint: disable=invalid-name
    methods = {f"/{_KEY}/start": self.start, f"/{_KEY}/exec": self.execute}
    try:
      method = methods[self.path]
      size = int(self.headers["Content-Length"])
      if not 0 <= size <= _MAX_BYTES:
        raise ValueError(f"{size} bytes: must be at most {_MAX_BYTES}")
      method(**json.loads(self.rfile.read(size)))
    except containers.CommandError as error:
      output = base64.b64encode(error.output.encode()).decode()
      self.answer(error=str(error), output=output)
    except Exception as error:  # pylint: disable=broad-exception-caught
      self.answer(error=f"{type(error).__name__}: {error}")

  def start(self, **arguments):
    id = secrets.token_hex(8)
    with containers.open(sys.argv[1], options=sys.argv[2:], **arguments) as new:
      _running[id] = new
      try:
        self.answer(id=id)
        self.connection.settimeout(10)
        while True:
          try:
            if not self.connection.recv(1):
              return
          except TimeoutError:
            self.wfile.write(b"\n")  # An error if the client's host is gone.
      except OSError:
        pass
      finally:
        del _running[id]

  def execute(self, id, words, stdin, deadline_s, max_bytes):
    if id not in _running:
      raise containers.ContainerError("the container has ended")
    status, output = _running[id].execute(
        containers.Command(
            words, base64.b64decode(stdin), deadline_s, max_bytes
        )
    )
    self.answer(status=status, output=base64.b64encode(output).decode())

  def answer(self, **fields):
    with contextlib.suppress(OSError):  # The client may be gone.
      self.send_response(200)
      self.end_headers()
      self.wfile.write(json.dumps(fields).encode() + b"\n")

  def log_message(self, *arguments):
    """Prints nothing."""


if __name__ == "__main__":
  http = server.ThreadingHTTPServer(("127.0.0.1", _PORT), Handler)
  http.daemon_threads = True
  print(f"http://127.0.0.1:{http.server_address[1]}/{_KEY}", flush=True)
  http.serve_forever()

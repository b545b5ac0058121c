# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint whose answers a test gives."""

from collections.abc import Callable
import http.server
import json
import threading
import time
from typing import Any

KEY = "sk-secret-of-the-judge"
USAGE = {"prompt_tokens": 30, "completion_tokens": 2}

# Status, headers and body of a response; None drops the connection.
Response = tuple[int, dict[str, str], bytes] | None


def chat(content: Any, usage: Any = None) -> Response:
  """Returns a chat completion."""
  message = {"role": "assistant", "content": content}
  body = {"choices": [{"message": message}], "usage": usage or USAGE}
  return 200, {}, json.dumps(body).encode()


def failure(status: int, text: str = "", **headers: str) -> Response:
  named = {name.replace("_", "-"): value for name, value in headers.items()}
  return status, named, text.encode()


class Server:
  """Answers on a free port.

  url: base URL.
  bodies: requests so far.
  answer: function from the text of a request to the response.
  most: largest number of requests under way together.
  key: required API key; "" for none.
  """

  def __init__(self, answer: Callable[[str], Response], port: int = 0):
    self.answer, self.key, self.most = answer, "", 0
    self.bodies: list[dict[str, Any]] = []
    self.times: list[float] = []
    self._active, self._lock = 0, threading.Lock()
    handler = type("Handler", (_Handler,), {"fake": self})
    self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    self._http.daemon_threads = True
    self.port = self._http.server_address[1]
    self.url = f"http://127.0.0.1:{self.port}/v1"
    self._thread = threading.Thread(target=self._http.serve_forever)
    self._thread.start()

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()
    self._thread.join()

  def respond(self, path: str, key: str, body: dict[str, Any]) -> Response:
    if path != "/v1/chat/completions":
      return failure(404, f"no path {path}")
    if key != (f"Bearer {self.key}" if self.key else ""):
      return failure(401, f"wrong key {key}")
    with self._lock:
      self.bodies.append(body)
      self.times.append(time.monotonic())
      self._active += 1
      self.most = max(self.most, self._active)
    try:
      return self.answer(body["messages"][0]["content"])
    finally:
      with self._lock:
        self._active -= 1


class _Handler(http.server.BaseHTTPRequestHandler):
  fake: Server

  def do_POST(self) -> None:  # pylint: disable=invalid-name
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    key = self.headers.get("Authorization", "")
    response = self.fake.respond(self.path, key, body)
    if response is None:
      self.close_connection = True
      return
    status, headers, data = response
    try:
      self.send_response(status)
      for name, value in {**headers, "Content-Length": len(data)}.items():
        self.send_header(name, str(value))
      self.end_headers()
      self.wfile.write(data)
    except OSError:  # The client has given up.
      self.close_connection = True

  def log_message(self, format, *args):  # pylint: disable=redefined-builtin
    """Prints nothing."""

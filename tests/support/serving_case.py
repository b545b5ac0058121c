# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine, for tests of the server."""

import json
import socket
import threading
import urllib.error
import urllib.request

import numpy as np
import uvicorn

from configs import serve as serve_config
from tba_jax.chat_api import strict_json
from tba_jax.serving import app as app_lib
from tba_jax.serving import engine as engine_lib
from tba_jax.serving import handlers
from tba_jax.serving import protobufs
from tba_jax.serving import schemas
from tests.support import waiting

SESSION = "session"
MODEL = f"{SESSION}:train:0"
KEY = "tml-key"
# Chat template in the vocabulary of the smallest server's task.
TEMPLATE = (
    "{% for m in messages %}{{ '=' if m.role == 'assistant' else '' }}"
    "{{ m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def make_config(init="scratch", **changes):
  """Returns the smallest server's config, with changes of `serve`."""
  config = serve_config.get_config("smoke")
  config.init = init
  for name, value in changes.items():
    config.serve[name] = value
  return config


def datum(ids, **inputs):
  """Returns a sequence that predicts its next tokens, as JSON."""
  tensors = {"target_tokens": np.asarray(ids[1:], np.int64)}
  for name, values in inputs.items():
    dtype = np.int64 if name == "group" else np.float32
    tensors[name] = np.asarray(values, dtype)
  return {
      "model_input": {
          "chunks": [{"type": "encoded_text", "tokens": list(ids[:-1])}]
      },
      "loss_fn_inputs": {
          name: {
              "data": array.tolist(),
              "dtype": array.dtype.name,
              "shape": list(array.shape),
          }
          for name, array in tensors.items()
      },
  }


def pass_body(data, loss="cross_entropy", config=None, *, forward=False):
  """Returns the body of a pass, in the engine's format."""
  name = "forward_input" if forward else "forward_backward_input"
  asked = {"data": data, "loss_fn": loss, "loss_fn_config": config or {}}
  kind = schemas.Forward if forward else schemas.ForwardBackward
  body = {"model_id": MODEL, name: asked}
  return protobufs.pack_pass(strict_json.read(kind, body))


def adam_body(learning_rate=0.01, **more):
  """Returns the body of an optim_step."""
  adam = {"learning_rate": learning_rate, **more}
  return json.dumps({"model_id": MODEL, "adam_params": adam}).encode()


class HttpServer:
  """HTTP server with an engine and a chat template, in this process.

  url: address.
  engine: engine behind the server.
  """

  def __init__(self, workdir, **changes):
    waiters = handlers.Waiters()
    self.engine = engine_lib.Engine(
        make_config(**changes), workdir, waiters.notify
    )
    self.engine.base.policy.tokenizer.chat_template = TEMPLATE
    self._thread = threading.Thread(target=self.engine.run, daemon=True)
    app = app_lib.make(self.engine, waiters, self._thread, KEY)
    self._server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    self._serving = threading.Thread(
        target=self._server.run, args=([listener],), daemon=True
    )
    self._thread.start()
    self._serving.start()
    waiting.wait_until(
        lambda: self._server.started, "the server does not start", 60.0
    )

  def ask(self, path, body=None, method="", **headers):
    """Returns status and JSON of a request, a GET if `body` is None."""
    request = urllib.request.Request(
        f"{self.url}/{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", **headers},
        method=method or None,
    )
    try:
      with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
      with error:
        return error.code, json.load(error)

  def result(self, answer):
    """Returns the result of an accepted request."""
    status, response = answer
    assert status == 200, response
    id = {"request_id": response["request_id"]}
    while True:
      status, response = self.ask("api/v1/retrieve_future", id)
      if status != 408:
        return response

  def close(self):
    self._server.should_exit = True
    self._serving.join(30)
    self.engine.stop()
    self._thread.join(60)

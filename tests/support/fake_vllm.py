# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of vLLM's server that a sampler uses, with `tiny_model`.

Requests and responses follow vLLM 0.32 (`rl/online/api_router.py`,
`scale_out/token_in_token_out/protocol.py`); `peers/vllm_test.py` sends the same
requests to a real server.
"""

import functools
import http.server
import json
import threading
from typing import Any
from urllib import parse

import numpy as np

from tba_jax.models.hf import hf
from tba_jax.sampling import requests
from tests.support import sampler_case
from tests.support import tiny_model

STOP, MODEL_LEN = 1, 7


@functools.cache
def _sampler(temperature: float, stop_ids: tuple[int, ...]):
  return sampler_case.make(
      tiny_model.make_model(), temperature=temperature, stop_ids=stop_ids
  )


class Server:
  """A server on a free port.

  url: address.
  calls: paths of all modifying requests, and parameters of pauses.
  weights: name of the weights.
  logprobs_mode, max_model_len: options of vLLM.
  on_generate: function of the number of completion requests so far, called
    before each response.
  key: required API key; "" for none.
  """

  def __init__(self, folder: str, port: int = 0):
    self.calls: list[str] = []
    self.weights = "default"
    self.logprobs_mode, self.max_model_len = "raw_logprobs", MODEL_LEN
    self.on_generate = lambda count: None
    self.key = ""
    self.drops_versions = False
    self._count = self._seed = 0
    self._lock = threading.Lock()
    self.folder = folder
    self.read_weights(folder)
    handler = type("Handler", (_Handler,), {"fake": self})
    self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    self.port = self._http.server_address[1]
    self.url = f"http://127.0.0.1:{self.port}"
    self._thread = threading.Thread(target=self._http.serve_forever)
    self._thread.start()

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()
    self._thread.join()

  def read_weights(self, folder: str) -> None:
    _, self._params = hf.load(folder, dtype="float32", compute_dtype="float32")

  def get(self, path: str) -> Any:
    if path == "/health":
      return {}
    if path == "/weight_info":
      return {"weight_version": self.weights}
    assert path == "/server_info?config_format=json", path
    config = {
        "logprobs_mode": self.logprobs_mode,
        "max_model_len": self.max_model_len,
        "model": self.folder,
    }
    return {"vllm_config": {"model_config": config}}

  def post(self, path: str, body: dict[str, Any]) -> Any:
    if path == "/inference/v1/generate":
      with self._lock:
        self._count += 1
        count = self._count
      self.on_generate(count)
      return self._generate(body)
    self.calls.append(path)
    if path == "/collective_rpc":
      assert body["method"] == "reload_weights", body
      self.read_weights(body["kwargs"]["weights_path"])
    elif path == "/update_weight_version":
      self.weights = body["new_version"]
    else:
      result = parse.urlsplit(path).path
      assert result in ("/pause", "/resume", "/reset_prefix_cache"), path
    return {}

  def _generate(self, body: dict[str, Any]) -> Any:
    asked = body["sampling_params"]
    assert asked.pop("detokenize") is False
    prompt = np.array(body["token_ids"], np.int32)
    weights, params = self.weights, self._params
    if "prompt_logprobs" in asked:
      answer = _sampler(1.0, (STOP,)).token_logprobs(params, prompt[None])
      (row,) = np.asarray(answer)
      told = [{str(t): {"logprob": float(p)}} for t, p in zip(prompt[1:], row)]
      return {"prompt_logprobs": [None, *told], "choices": []}
    assert asked["ignore_eos"] and asked["logprobs"] == 0, asked
    sampler = _sampler(asked["temperature"], tuple(asked["stop_token_ids"]))
    with self._lock:
      self._seed += 1
      (result,) = sampler.sample(
          params,
          [
              requests.Request(
                  prompt, 0, 0, asked["n"], seed=self._seed,
                  max_tokens=asked["max_tokens"],
              )
          ],
          version=0,
      )  # fmt: skip
    choices = []
    for i, length in enumerate(result.lengths.tolist()):
      ids = result.tokens[i, :length].tolist()
      logprobs = result.logprobs[i, :length].tolist()
      spans = [{"version": weights, "start": 0, "end": length}]
      choices.append(
          {
              "index": i,
              "finish_reason": "stop" if result.stopped[i] else "length",
              "token_ids": ids,
              "logprobs": {
                  "content": [
                      {"token_id": t, "logprob": p}
                      for t, p in zip(ids, logprobs)
                  ]
              },
              "weight_versions": None if self.drops_versions else spans,
          }
      )
    return {"choices": choices[::-1]}


class _Handler(http.server.BaseHTTPRequestHandler):
  fake: Server

  def do_GET(self) -> None:
    self._answer(lambda: self.fake.get(self.path))

  def do_POST(self) -> None:
    length = int(self.headers["Content-Length"])
    body = json.loads(self.rfile.read(length) or b"{}")
    self._answer(lambda: self.fake.post(self.path, body))

  def _answer(self, make) -> None:
    expected = f"Bearer {self.fake.key}" if self.fake.key else None
    code, text = 200, b"{}"
    if self.headers["Authorization"] != expected:
      code, text = 401, b'{"error": "Unauthorized"}'
    else:
      try:
        text = json.dumps(make()).encode()
      except ConnectionError:
        self.close_connection = True
        return
      except Exception as error:
        code, text = 500, repr(error).encode()
    self.send_response(code)
    self.send_header("Content-Length", str(len(text)))
    self.end_headers()
    self.wfile.write(text)

  def log_message(self, *args) -> None:
    pass

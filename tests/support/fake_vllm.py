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
import pathlib
import tempfile
import threading
from typing import Any
from urllib import parse

import jax
import numpy as np

from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf
from tba_jax.sampling import requests
from tests.support import sampler_case
from tests.support import tiny_model

STOP, MODEL_LEN = 1, 7


_MODEL = tiny_model.make_model(max_positions=48)


@functools.cache
def _sampler(temperature: float, stop_ids: tuple[int, ...], **truncation):
  return sampler_case.make(
      _MODEL,
      temperature=temperature,
      stop_ids=stop_ids,
      **truncation,
      max_prompt_tokens=32,
      max_completion_tokens=16,
  )


@functools.cache
def _logits_fn():
  return jax.jit(lambda *args: _MODEL.logits(*args)[0])


def _tops(params, prompt, ids, kept_TxC, temperature):
  """Returns vLLM's `top_logprobs` of each id, one more than are kept."""
  whole = np.zeros((1, 48), np.int32)
  whole[0, : len(prompt) + len(ids)] = [*prompt, *ids]
  logits_LxV = np.asarray(_logits_fn()(params, whole, np.ones_like(whole)))
  tops = []
  for t, kept in enumerate(kept_TxC[: len(ids)]):
    kept = kept[kept >= 0]
    logits = logits_LxV[len(prompt) - 1 + t] / temperature
    logprobs = logits[kept] - np.logaddexp.reduce(logits[kept])
    others = np.setdiff1d(np.arange(len(logits)), kept)
    pairs = [*zip(kept, logprobs), *((token, -9999.0) for token in others)]
    tops.append(
        [
            {"token_id": int(token), "logprob": float(logprob)}
            for token, logprob in pairs[: kept_TxC.shape[1] + 1]
        ]
    )
  return tops


class Server:
  """A server on a free port.

  url: address.
  calls: paths of all modifying requests, and parameters of pauses.
  weights: name of the weights.
  logprobs_mode, max_model_len: options of vLLM.
  on_generate: function of the number of completion requests so far, called
    before each response.
  key: required API key; "" for none.
  salts: names of the weights and of the prefix cache of all requests.
  adapters: params by the name of their adapter.
  max_lora_rank, max_loras, max_logprobs: options of vLLM.
  on_post: function of the path of each other modifying request, called first.
  change: function called with each choice, which may change it.
  stop_at: (ids of a turn) -> number of ids up to a stop string, or None.
  asked: sampling parameters of completion requests.
  tie: place of a choice at which as many tokens and one more are kept, the last
    two equally likely; None for no ties.
  """

  def __init__(
      self, folder: str, port: int = 0, max_model_len: int = MODEL_LEN
  ):
    self.calls: list[str] = []
    self.weights = "default"
    self.logprobs_mode, self.max_model_len = "raw_logprobs", max_model_len
    self.on_generate = lambda count: None
    self.key = ""
    self.drops_versions = False
    self.salts: set[tuple[str, str]] = set()
    self.adapters: dict[str, Any] = {}
    self.max_lora_rank, self.max_loras, self.max_logprobs = 0, 2, 20
    self.on_post = lambda path: None
    self.change = lambda choice: None
    self.stop_at = lambda ids: None
    self.asked: list[dict[str, Any]] = []
    self.tie: int | None = None
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
    if path == "/v1/models":
      return {"data": [{"id": name} for name in self.adapters]}
    config = {
        "max_logprobs": self.max_logprobs,
        "logprobs_mode": self.logprobs_mode,
        "max_model_len": self.max_model_len,
        "model": self.folder,
    }
    assert path == "/server_info?config_format=json", path
    adapters = {
        "max_lora_rank": self.max_lora_rank,
        "max_loras": self.max_loras,
    }
    return {"vllm_config": {"model_config": config, "lora_config": adapters}}

  def post(self, path: str, body: dict[str, Any]) -> Any:
    if path == "/inference/v1/generate":
      with self._lock:
        self._count += 1
        count = self._count
      self.on_generate(count)
      return self._generate(body)
    self.calls.append(path)
    self.on_post(path)
    if path == "/collective_rpc":
      assert body["method"] == "reload_weights", body
      self.read_weights(body["kwargs"]["weights_path"])
    elif path == "/v1/load_lora_adapter":
      self.adapters[body["lora_name"]] = self._read_adapter(body["lora_path"])
      return f"Success: {body['lora_name']}"
    elif path == "/update_weight_version":
      self.weights = body["new_version"]
    else:
      result = parse.urlsplit(path).path
      assert result in ("/pause", "/resume", "/abort_requests"), path
    return {}

  def _read_adapter(self, folder: str) -> Any:
    with tempfile.TemporaryDirectory() as cache:
      merged = adapter_folder.find(
          pathlib.Path(folder), pathlib.Path, pathlib.Path(cache), weights=True
      )
      _, params = hf.load(str(merged), dtype="float32", compute_dtype="float32")
      return jax.tree.map(np.array, params)

  def _generate(self, body: dict[str, Any]) -> Any:
    asked = body["sampling_params"]
    prompt = np.array(body["token_ids"], np.int32)
    weights, params = self.weights, self._params
    assert len(prompt) + asked["max_tokens"] <= self.max_model_len, asked
    if name := body.get("model"):
      if name not in self.adapters:
        raise FileNotFoundError(name)
      weights, params = self.weights, self.adapters[name]
    self.salts.add((name or weights, body["cache_salt"]))
    if "prompt_logprobs" in asked:
      assert asked["detokenize"] is False
      answer = _sampler(1.0, (STOP,)).token_logprobs(params, prompt[None])
      (row,) = np.asarray(answer)
      told = [{str(t): {"logprob": float(p)}} for t, p in zip(prompt[1:], row)]
      return {"prompt_logprobs": [None, *told], "choices": []}
    assert asked["ignore_eos"], asked
    assert asked["detokenize"] == bool(asked["stop"]), asked
    names = {"top_k", "top_p", "min_p"} & {*asked}
    truncation = {name: asked[name] for name in names}
    if truncation:
      truncation["num_kept"] = asked["logprobs"] - 1
    else:
      assert asked["logprobs"] == 0
    sampler = _sampler(
        asked["temperature"], tuple(asked["stop_token_ids"]), **truncation
    )
    with self._lock:
      self.asked.append(asked)
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
      stop = self.stop_at(ids) if asked["stop"] else None
      ids = ids[:stop]
      length = len(ids)
      logprobs = result.logprobs[i, :length].tolist()
      tops = [[]] * length
      if truncation:
        kept = result.kept_ids[i]
        temperature = asked["temperature"]
        tops = _tops(params, prompt, ids, kept, temperature)
        tie = self.tie
        if tie is not None and tie < length and asked["max_tokens"] > 1:
          logprobs_of = {e["token_id"]: e["logprob"] for e in tops[tie]}
          least = sorted(logprobs_of.values())
          for entry in tops[tie][-2:]:
            entry["logprob"] = least[1]
      spans = [{"version": weights, "start": 0, "end": length}]
      choices.append(
          choice := {
              "index": i,
              "finish_reason": (
                  "stop" if result.stopped[i] or stop else "length"
              ),
              "token_ids": ids,
              "logprobs": {
                  "content": [
                      {"token_id": t, "logprob": p, "top_logprobs": top}
                      for t, p, top in zip(ids, logprobs, tops)
                  ]
              },
              "weight_versions": None if self.drops_versions else spans,
          }
      )
      self.change(choice)
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
        answer = make()
        text = (
            answer if isinstance(answer, str) else json.dumps(answer)
        ).encode()
      except ConnectionError:
        self.close_connection = True
        return
      except FileNotFoundError as error:
        error = {"type": "NotFoundError", "message": str(error)}
        code, text = 404, json.dumps({"error": error}).encode()
      except Exception as error:
        code, text = 500, repr(error).encode()
    self.send_response(code)
    self.send_header("Content-Length", str(len(text)))
    self.end_headers()
    self.wfile.write(text)

  def log_message(self, *args) -> None:
    pass

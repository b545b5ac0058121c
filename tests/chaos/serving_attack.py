# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of requests, valid and not, to a server that is killed meanwhile.

    python -m tests.chaos.serving_attack REQUESTS SEED FOLDER

Clients train, save, load, sample, play episodes and replays by a grammar that a
seed draws from; wrong requests of all kinds come between, requests come twice,
and the server is killed at moments that the seed draws. Each client notes the
results of its valid requests. The same valid requests to another server, by one
client after the other and without kills, must have the same results: whatever
is lost, done twice or changed by another client shows in their bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import http.client
import json
import pathlib
import random
import socket
import sqlite3
import sys
import threading
import time
from typing import Any
import urllib.error
import urllib.request

from tests.support import harness
from tests.support import serving_case

OVERRIDES = {
    "serve.max_models": 8,
    "serve.checkpoint_every_steps": 4,
    "serve.gap_deadline_s": 600,
    "loss.beta": 0.1,
}
_LOST = (ConnectionError, TimeoutError, http.client.HTTPException)
_RETRY = (408, 503)
_DEADLINE_S = 1800.0
# Probability of one more wrong request after a valid operation.
_WRONG = 0.9
_DEEP = b'{"prompt":' + b"[" * 100_000
_HUGE = 64 * 2**20


class Count:
  """Requests that were sent, of all clients."""

  def __init__(self, most: int):
    self._lock = threading.Lock()
    self.most, self.sent, self.wrong, self.again = most, 0, 0, 0
    self.has_failed = False

  def add(self, *, wrong: bool = False, again: bool = False) -> None:
    with self._lock:
      self.sent += 1
      self.wrong += wrong
      self.again += again


class Client:
  """One client: `play` does valid operations, and wrong ones between them.

  results: name and result of each valid operation.
  """

  def __init__(
      self,
      server: harness.Served,
      name: str,
      seed: int,
      count: Count | None = None,
  ):
    self._server, self._count = server, count
    self._valid = random.Random(f"{name}-{seed}")
    # Apart, so that the valid ones are the same without the wrong ones.
    self._other = random.Random(f"{name}-{seed}-wrong")
    self.results: list[tuple[str, Any]] = []
    self._models: list[dict[str, Any]] = []
    self._numbers = {"model": 0, "sample": 0, "episode": 0, "group": 0}
    self._replay: dict[str, Any] | None = None

  # Requests.

  def _open(
      self, path: str, body: Any, headers: Mapping[str, str], method: str
  ) -> tuple[int, Any]:
    """Returns status and answer; raises _LOST if there is none."""
    data = body
    if body is not None and not isinstance(body, bytes):
      data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{self._server.url}/{path}",
        data,
        {"X-API-Key": self._server.key, **headers},
        method=method or None,
    )
    try:
      with urllib.request.urlopen(request, timeout=120) as answer:
        raw = answer.read()
        return answer.status, json.loads(raw) if raw else None
    except urllib.error.HTTPError as error:
      with error:
        return error.code, json.loads(error.read() or b"null")
    except urllib.error.URLError as error:
      if isinstance(error.reason, OSError):
        raise ConnectionError(str(error)) from error
      raise

  def _ask(
      self, path: str, body: Any = None, method: str = "", **headers: str
  ) -> tuple[int, Any]:
    """Returns status and answer, however often the server is killed."""
    end = time.monotonic() + _DEADLINE_S
    while True:
      try:
        result = self._open(path, body, headers, method)
        if result[0] not in _RETRY:
          return result
      except _LOST:
        time.sleep(0.2)
      if time.monotonic() > end or (self._count and self._count.has_failed):
        raise TimeoutError(path)

  def _do(self, path: str, body: Any = None, **headers: str) -> Any:
    """Returns the answer of a valid request, which may come twice."""
    status, response = self._ask(path, body, **headers)
    assert status < 300, (path, body, status, response)
    if self._count is not None and body is not None:
      self._count.add()
      if self._other.random() < 0.1 and "create_session" not in path:
        self._count.add(again=True)
        again = self._ask(path, body, **headers)
        assert again == (status, response), (path, response, again)
    return response

  def _result(self, asked: Mapping[str, Any]) -> Any:
    id = {"request_id": asked["request_id"]}
    status, response = self._ask("api/v1/retrieve_future", id)
    assert status == 200, (asked, response)
    return response

  def _note(self, name: str, result: Any) -> None:
    text = json.dumps(result).replace(self.session, "SESSION")
    self.results.append((name, json.loads(text)))

  def _number(self, name: str) -> int:
    self._numbers[name] += 1
    return self._numbers[name]

  # The grammar.

  def play(self, operations: int | None = None) -> int:
    """Does so many operations, or until all requests are sent; returns both."""
    response = self._do("api/v1/create_session", {})
    self.session = response["session_id"]
    self._new_model()
    kinds: Sequence[tuple[int, Callable[[], None]]] = (
        (5, self._train), (3, self._forward), (1, self._save), (1, self._load),
        (1, self._publish), (8, self._sample), (4, self._answer),
        (4, self._episode), (2, self._burst), (1, self._replay_step),
        (1, self._replay_group), (1, self._new_model), (1, self._list),
    )  # fmt: skip
    done = 0
    while operations is None or done < operations:
      if operations is None and self._count.sent >= self._count.most:
        break
      weights, functions = zip(*kinds)
      (operation,) = self._valid.choices(functions, weights)
      operation()
      done += 1
      while self._count is not None and self._other.random() < _WRONG:
        self._wrong_request()
    return done

  def _new_model(self) -> None:
    model = {
        "session_id": self.session,
        "model_seq_id": self._number("model"),
        "base_model": "scratch",
        "lora_config": {"rank": 2, "seed": self._valid.randrange(99)},
    }
    asked = self._do("api/v1/create_model", model)
    self._note("create_model", self._result(asked))
    model = {"id": asked["model_id"], "seq": 0, "path": "", "sampler": ""}
    self._models = [*self._models[-1:], model]

  def _of_model(self, path: str, body: Mapping[str, Any]) -> Any:
    """Sends a request to the drawn model; returns what it is asked for by."""
    self.model["seq"] += 1
    return self._do(
        f"api/v1/{path}",
        {"model_id": self.model["id"], "seq_id": self.model["seq"], **body},
    )

  def _draw_model(self) -> None:
    self.model = self._valid.choice(self._models)

  def _data(self, loss: str) -> list[dict[str, Any]]:
    draw, out = self._valid, []
    if loss == "tb":
      for group in range(draw.randint(1, 2)):
        prompt = [draw.randrange(1, 9) for _ in range(2)]
        for _ in range(2):
          ids = [*prompt, *(draw.randrange(1, 9) for _ in range(3))]
          out.append(
              serving_case.datum(
                  ids,
                  weights=[0.0, 1.0, 1.0, 1.0],
                  logprobs=[0.0, -1.0, -2.0, -1.5],
                  reward=[draw.random()],
                  group=[group],
              )
          )
      return out
    for _ in range(draw.randint(1, 3)):
      ids = [draw.randrange(1, 9) for _ in range(draw.randint(3, 8))]
      inputs = {"weights": [1.0] * (len(ids) - 1)}
      if loss != "cross_entropy":
        inputs = {
            "logprobs": [-1.0] * (len(ids) - 1),
            "advantages": [draw.uniform(-1, 1) for _ in ids[1:]],
        }
      out.append(serving_case.datum(ids, **inputs))
    return out

  def _pass(self, kind: str) -> Any:
    loss = self._valid.choice(
        ("cross_entropy", "importance_sampling", "ppo", "cispo", "tb")
    )
    name = "forward_input" if kind == "forward" else "forward_backward_input"
    return self._of_model(
        kind, {name: {"data": self._data(loss), "loss_fn": loss}}
    )

  def _train(self) -> None:
    self._draw_model()
    passes = [
        self._pass("forward_backward") for _ in range(self._valid.randint(1, 2))
    ]
    step = self._of_model(
        "optim_step", {"adam_params": {"learning_rate": 0.01}}
    )
    for asked in (*passes, step):
      self._note("train", self._result(asked))

  def _forward(self) -> None:
    self._draw_model()
    self._note("forward", self._result(self._pass("forward")))

  def _save(self) -> None:
    self._draw_model()
    name = self._valid.choice("ab")
    asked = self._of_model("save_weights", {"path": name, "overwrite": True})
    result = self._result(asked)
    self.model["path"] = result["path"]
    self._note("save", result)

  def _load(self) -> None:
    self._draw_model()
    if not self.model["path"]:
      return self._save()
    optimizer = self._valid.random() < 0.5
    body = {"path": self.model["path"], "optimizer": optimizer}
    self._note("load", self._result(self._of_model("load_weights", body)))

  def _publish(self) -> None:
    self._draw_model()
    result = self._result(self._of_model("save_weights_for_sampler", {}))
    self.model["sampler"] = result["sampling_session_id"]
    self._note("publish", sorted(result))

  def _sampling_session(self) -> str:
    """Returns that of a model's version, or a new one of the base model."""
    self._draw_model()
    if self.model["sampler"]:
      return self.model["sampler"]
    body = {
        "session_id": self.session,
        "sampling_session_seq_id": 0,
        "base_model": "scratch",
    }
    response = self._do("api/v1/create_sampling_session", body)
    return response["sampling_session_id"]

  def _sample_body(self, **fields: Any) -> dict[str, Any]:
    draw = self._valid
    tokens = [draw.randrange(1, 9) for _ in range(draw.randint(1, 5))]
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "num_samples": draw.randint(1, 3),
        "sampling_params": {
            "max_tokens": draw.randint(1, 4),
            "seed": draw.randrange(10**6),
            "temperature": draw.choice((0.0, 0.7, 1.0)),
        },
        **fields,
    }

  def _sample(self) -> None:
    body = self._sample_body(
        sampling_session_id=self._sampling_session(),
        prompt_logprobs=self._valid.random() < 0.3,
        seq_id=self._number("sample"),
    )
    self._note("sample", self._result(self._do("api/v1/asample", body)))

  def _text_body(self, prompt: str) -> dict[str, Any]:
    return {
        "model": "scratch",
        "prompt": prompt,
        "max_tokens": 2,
        "seed": self._valid.randrange(10**6),
        "temperature": self._valid.choice((0.7, 1.0)),
    }

  def _key(self) -> dict[str, str]:
    number = self._number("episode")
    return {"Idempotency-Key": f"{self.session}-{number}"}

  def _answer(self) -> None:
    body = {**self._text_body("1+2"), "n": self._valid.randint(1, 3)}
    response = self._do("v1/completions", body, **self._key())
    self._note("answer", [response["choices"], response["usage"]])

  def _new_episode(self, **fields: Any) -> Any:
    fields = fields or {"base_model": "scratch"}
    return self._do("api/v1/create_episode", fields, **self._key())

  def _play(self, episode: Mapping[str, Any], prompt: str) -> Any:
    path = f"{episode['path'].strip('/')}/completions"
    return self._do(path, self._text_body(prompt), **self._key())

  def _finish(self, episode: Mapping[str, Any], reward: float | None) -> Any:
    id = episode["episode_id"]
    response = self._do(f"api/v1/episodes/{id}/finish", {"reward": reward})
    return {k: v for k, v in response.items() if k != "episode_id"}

  def _episode(self) -> None:
    episode, prompt = self._new_episode(), "1+2"
    for _ in range(self._valid.randint(1, 2)):
      response = self._play(episode, prompt)["choices"][0]
      prompt += response["text"] + "+3"
    self._note("finish", self._finish(episode, self._valid.random()))
    self._note("episode", self._do(f"api/v1/episodes/{episode['episode_id']}"))

  def _burst(self) -> None:
    """Calls at once, of several temperatures, each of which begins a row."""
    episode = self._new_episode()
    path = f"{episode['path'].strip('/')}/completions"
    texts = ("1+2", "3*4", "5-6")
    calls = [(self._text_body(text), self._key()) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      list(pool.map(lambda call: self._do(path, call[0], **call[1]), calls))
    self._finish(episode, None)
    response = self._do(f"api/v1/episodes/{episode['episode_id']}")
    response["rows"].sort(key=json.dumps)
    self._note("burst", response)

  def _open_replay(self) -> dict[str, Any]:
    if self._replay is None:
      body = {
          "session_id": self.session,
          "replay_seq_id": 0,
          "base_model": "scratch",
          "lora_config": {"rank": 2, "seed": 1},
          "adam_params": {"learning_rate": 0.01},
          "prompts_per_batch": 1,
          "completions_per_prompt": 2,
          "num_steps": 10**6,
          "loss_fn_config": {"beta": 0.1, "anchor": "ema"},
      }
      self._replay = {**self._do("api/v1/create_replay", body), "step": 0}
      self._do(f"api/v1/replays/{self._replay['replay_id']}/start", {})
    return self._replay

  def _wait_for_step(self, replay: dict[str, Any]) -> None:
    """Waits until the group that entered was trained and its version is out."""
    replay["step"] += 1
    id, end = replay["replay_id"], time.monotonic() + _DEADLINE_S
    after = replay["step"] - 1
    while True:
      _, state = self._ask(f"api/v1/replays/{id}?after={after}")
      if state["version"] >= replay["step"]:
        break
      assert state["running"] and time.monotonic() < end, state
      time.sleep(0.05)
    self._note("replay", [state["steps"], state["counts"], state["step"]])

  def _replay_step(self) -> None:
    replay = self._open_replay()
    body = self._sample_body(
        sampling_session_id=replay["sampling_session_id"],
        num_samples=2,
        into="replay",
        seq_id=self._number("sample"),
    )
    asked = self._do("api/v1/asample", body)
    result = self._result(asked)
    self._note("sample_into", result)
    rewards = [float(sum(s["tokens"]) % 5) for s in result["sequences"]]
    body = {"request_id": asked["request_id"], "rewards": rewards}
    self._do(f"api/v1/replays/{replay['replay_id']}/reward", body)
    self._wait_for_step(replay)

  def _replay_group(self) -> None:
    replay = self._open_replay()
    fields = {
        "sampling_session_id": replay["sampling_session_id"],
        "into": "replay",
        "group": f"g{self._number('group')}",
        "num_episodes": 2,
    }
    episodes = [self._new_episode(**fields) for _ in range(2)]
    if self._count is not None:
      for changes in ({}, {"num_episodes": 3}):
        self._refused("api/v1/create_episode", {**fields, **changes})
    for episode in episodes:
      self._play(episode, "1+2")
    for n, episode in enumerate(episodes):
      self._note("finish", self._finish(episode, float(n)))
    self._wait_for_step(replay)

  def _list(self) -> None:
    id = self._models[-1]["id"]
    response = self._do(f"api/v1/training_runs/{id}/checkpoints")
    paths = [c["tinker_path"] for c in response["checkpoints"]]
    # Those without a name have the number of their request.
    self._note("list", sorted(p for p in paths if "unnamed" not in p))

  # Wrong requests.

  def _refused(self, path: str, body: Any, method: str = "") -> None:
    """Sends a wrong request; it must be refused, or fail as the client's."""
    self._count.add(wrong=True)
    try:
      status, response = self._ask(path, body, method)
    except UnicodeEncodeError:
      return
    if (
        status == 200
        and isinstance(response, dict)
        and "request_id" in response
    ):
      for model in self._models:
        if isinstance(body, dict) and body.get("model_id") == model["id"]:
          model["seq"] += 1  # It has used up the number.
      response = self._result(response)
      assert response.get("category") == "user", (path, body, response)
    else:
      assert 400 <= status < 500, (path, str(body)[:500], status, response)

  def _wrong_request(self) -> None:
    draw = self._other
    kind = draw.randrange(10)
    if kind < 4:
      return self._refused(*draw.choice(list(self._wrong_bodies())))
    if kind == 4:
      return self._raw_request()
    path = draw.choice(
        ("create_model", "forward_backward", "optim_step",
         "asample", "create_episode", "create_replay", "retrieve_future",
         "retrieve_futures", "load_weights", "weights_info", "get_info")
    )  # fmt: skip
    bodies = (
        b"", b"[", b"null", b"[1]", b"\xff\xfe", b'{"a": NaN}',
        b'{"a": 1e999}', _DEEP, b'{"session_id": "\\ud800"}',
        b'{"a": ' + b"9" * 5000 + b"}", b'{"session_id": 3}',
    )  # fmt: skip
    self._refused(f"api/v1/{path}", draw.choice(bodies))

  def _wrong_bodies(self) -> Iterator[tuple[str, Any]]:
    """Yields well-formed requests that are wrong."""
    draw, model = self._other, self._other.choice(self._models)
    odd = draw.choice(
        (None, True, -1, 2**31, 2**70, 1e300, "x", "\0", "../..", [], {}, [[]])
    )
    sample = {
        "sampling_session_id": model["sampler"] or "x",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {},
    }
    tokens = lambda ids: {"chunks": [{"type": "encoded_text", "tokens": ids}]}
    for changes in (
        {"num_samples": 10**9}, {"num_samples": 0}, {"x": 1},
        {"prompt": odd or "x"}, {"prompt": tokens([])},
        {"prompt": tokens([2**31 - 1])}, {"prompt": tokens([1] * 50_000)},
        {"prompt": tokens([-1])}, {"prompt": tokens(["1"])},
        *({"sampling_params": p} for p in (
            {"max_tokens": 10**9}, {"max_tokens": -1}, {"temperature": -1},
            {"temperature": 1e30}, {"top_p": 0}, {"top_k": -5},
            {"top_k": 10**30}, {"stop": [""]}, {"stop": [2**40]},
            {"stop": ["x"] * 1000}, {"y": 2}, {"seed": "a"},
        )),
        {"prompt_logprobs": True, "prompt_logprobs_last_n": -1},
        {"into": "replay"}, {"record_stability_info": True},
    ):  # fmt: skip
      yield "api/v1/asample", {**sample, **changes}
    episode = {"base_model": "scratch"}
    for changes in (
        {"base_model": "y"}, {"group": "g"}, {"into": "replay"}, {"x": 1},
        {"model_path": "tinker://a/weights/../b"},
    ):  # fmt: skip
      yield "api/v1/create_episode", {**episode, **changes}
    text = {"model": "scratch", "prompt": "1", "max_tokens": 1}
    for changes in (
        {"n": 129}, {"n": -1}, {"prompt": "1" * 500_000}, {"prompt": ""},
        {"prompt": [1] * 100_000}, {"prompt": "\U0001f600" * 99},
        {"x": odd or 1},
        {"model": "y"}, {"stop": [3]}, {"stop": ["x"] * 100},
        {"temperature": "hot"}, {"max_tokens": 0}, {"seed": 1.5},
        {"logit_bias": {"1": 2}},
    ):  # fmt: skip
      yield "v1/completions", {**text, **changes}
    yield "v1/chat/completions", {"model": "scratch", "messages": [odd]}
    replay = {
        "session_id": self.session, "replay_seq_id": 9, "base_model": "scratch",
        "adam_params": {}, "prompts_per_batch": 1, "num_steps": 1,
        "completions_per_prompt": 2,
    }  # fmt: skip
    for changes in (
        {"num_steps": -1}, {"prompts_per_batch": 2**30}, {"loss_fn": "ppo2"},
        {"completions_per_prompt": 1}, {"adam_params": {"beta1": 2}},
        {"replay": {"capacity": -1}}, {"lora_config": {"rank": 10**9}},
        {"loss_fn_config": {"name": "/etc/passwd:x"}}, {"model_path": "x"},
    ):  # fmt: skip
      yield "api/v1/create_replay", {**replay, **changes}
    # What a model's number is used up by: it fails, and changes nothing.
    numbered = lambda body: {
        "model_id": model["id"], "seq_id": model["seq"] + 1, **body
    }  # fmt: skip
    passed = lambda data, loss="cross_entropy", **config: numbered(
        {"forward_backward_input": {
            "data": data, "loss_fn": loss, "loss_fn_config": config}}
    )  # fmt: skip
    kind = draw.randrange(12)
    one = serving_case.datum([1, 2, 3], weights=[1.0, 1.0])
    if kind == 0:
      yield "api/v1/forward_backward", passed([one], "no_loss")
    elif kind == 1:
      yield "api/v1/forward_backward", passed([one], "ppo")
    elif kind == 2:
      yield "api/v1/forward_backward", passed([one], "cross_entropy", beta=1.0)
    elif kind == 3:
      long = serving_case.datum([1] * 100, weights=[1.0] * 99)
      yield "api/v1/forward_backward", passed([one, long])
    elif kind == 4:
      large = serving_case.datum([1, 2**30], weights=[1.0])
      yield "api/v1/forward_backward", passed([large])
    elif kind == 5:
      group = serving_case.datum(
          [1, 2], weights=[1.0], logprobs=[0.0], reward=[0], group=[0]
      )
      yield "api/v1/forward_backward", passed([group], "tb", beta=0.1)
    elif kind == 6:
      yield "api/v1/optim_step", numbered({"adam_params": {"beta1": 3}})
    elif kind == 7:
      yield "api/v1/optim_step", numbered({"adam_params": {"rate": 3}})
    elif kind == 8:
      yield "api/v1/save_weights", numbered({"path": "../x"})
    elif kind == 9:
      path = {"path": "tinker://x/weights/a", "optimizer": True}
      yield "api/v1/load_weights", numbered(path)
    elif kind == 10:
      yield "api/v1/save_weights_for_sampler", numbered({"path": "unnamed-1"})
    else:
      path = {"path": model["path"] or "x", "optimizer": "yes"}
      yield "api/v1/load_weights", numbered(path)

  def _raw_request(self) -> None:
    """Opens a connection that sends no request, or one that is too large."""
    self._count.add(wrong=True)
    head = (
        f"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-API-Key:"
        f" {self._server.key}\r\n"
    ).encode()
    kind = self._other.randrange(4)
    port = int(self._server.url.rpartition(":")[2])
    try:
      with socket.create_connection(("127.0.0.1", port), 5) as near:
        near.settimeout(30)
        if kind == 0:
          near.sendall(head)  # And no more.
        elif kind == 1:
          for _ in range(40):
            near.sendall(b"X-Flood: " + b"a" * 2**13 + b"\r\n")
        elif kind == 2:
          near.sendall(head + f"Content-Length: {_HUGE}\r\n\r\n".encode())
          assert b" 413 " in near.recv(200)
        else:
          near.sendall(head + b"Content-Length: 90\r\n\r\n{")
    except (OSError, *_LOST):
      pass  # The server was killed, or has closed it.


def attack(
    workdir: pathlib.Path,
    requests: int,
    seed: int,
    *,
    num_clients: int,
    pause: tuple[int, int],
) -> str:
  """Attacks a server, and compares it with one that is left in peace.

  Args:
    workdir: folder of both servers.
    requests: requests to send, more or less.
    seed: seed of all that is drawn.
    num_clients: clients at the same time.
    pause: least and most requests between two kills.

  Returns:
    A summary.

  Raises:
    AssertionError: something was lost, done twice, changed, or not answered.
  """
  begin = time.monotonic()
  count, draw = Count(requests), random.Random(seed)
  server = harness.Served(workdir / "attacked", **OVERRIDES)
  names = [f"client-{n}" for n in range(num_clients)]
  clients = [Client(server, name, seed, count) for name in names]
  kills = 0
  try:
    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
      plays = [pool.submit(client.play) for client in clients]
      while not all(play.done() for play in plays):
        goal = count.sent + draw.randint(*pause)
        while count.sent < goal and not all(play.done() for play in plays):
          time.sleep(0.05)
        if any(play.done() and play.exception() for play in plays):
          count.has_failed = True
          break
        time.sleep(draw.uniform(0, 0.5))
        if draw.random() < 0.2:
          server.stop()
          server.start()
        else:
          server.kill(again_s=draw.choice((None, None, 0.5, 2.0, 6.0)))
        kills += 1
    errors = [play.exception() for play in plays if play.exception()]
    if errors:
      raise next(
          (e for e in errors if not isinstance(e, TimeoutError)), errors[0]
      )
    operations = [play.result() for play in plays]
    server.stop()
    _check_journal(workdir / "attacked" / "serve" / "journal.sqlite")
    attacked_s = time.monotonic() - begin
    server = harness.Served(workdir / "in_peace", **OVERRIDES)
    for client, name, number in zip(clients, names, operations, strict=True):
      alone = Client(server, name, seed)
      alone.play(number)
      for n, (result, expected) in enumerate(
          zip(client.results, alone.results, strict=True)
      ):
        assert result == expected, (name, n, result, expected)
  finally:
    server.end()
  return (
      f"{count.sent} requests ({count.wrong} wrong, {count.again} sent twice)"
      f" of {num_clients} clients in {attacked_s:.0f} s, {kills} kills and"
      f" stops: {sum(len(c.results) for c in clients)} results as in peace"
  )


def _check_journal(path: pathlib.Path) -> None:
  """Raises unless each request has one outcome that is not the server's."""
  with sqlite3.connect(path) as db:
    rows = db.execute(
        "SELECT id, kind, failure FROM requests WHERE done IS NULL OR failure"
        ' LIKE \'%"category": "server"%\''
    ).fetchall()
  assert not rows, rows


def main(argv: Sequence[str]) -> None:
  requests, seed, folder = argv
  print(
      attack(
          pathlib.Path(folder),
          int(requests),
          int(seed),
          num_clients=4,
          pause=(30, max(60, int(requests) // 12)),
      )
  )


if __name__ == "__main__":
  main(sys.argv[1:])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP application of a server: the paths of the Tinker API, and of episodes.

Handlers check a request, have it journaled and answer at once; its result is
asked for by `retrieve_future`, which waits. Errors are JSON, {"error": text}:
401 for a wrong key, 404 for what is not there, 408 for a result that is not
there yet or a body that is too slow, 410 for a result that is forgotten or a
session that has finished, 413 for a body that is too large, 415 for one that is
compressed, 422 for a request that is wrong, 503 once the engine has ended.
Below `/episodes/ID/v1/` and `/v1/` they are {"error": {"message": text, …}}, as
OpenAI's, and 400 stands for 422.

Source: package `tinker` 0.38, whose client is served unchanged.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import contextlib
import datetime
import functools
import hashlib
import hmac
import json
import re
import threading
from typing import Any
import uuid

from starlette import applications
from starlette import concurrency
from starlette import exceptions
from starlette import requests
from starlette import responses
from starlette import routing

from tba_jax.serving import chat
from tba_jax.serving import engine as engine_lib
from tba_jax.serving import journal as journal_lib
from tba_jax.serving import messages

# Seconds that `retrieve_future` waits; the official client allows 45.
_POLL_S = 20.0
# Seconds that a call of an agent, and what needs no future, waits: as long as
# the official client does.
_ANSWER_S = 600.0
# Most bytes of a body from who has the key. A pass of protocol buffers, which
# are read in no time, may have ten million tokens. JSON holds the interpreter
# while it is parsed: a pass in JSON takes .2 s. Other JSON may have what the
# model can read, of tokens and of what is written around them, and 1 MiB.
_MOST_BYTES, _MOST_OF_JSON_PASS = 256 * 2**20, 8 * 2**20
_MOST_OF_JSON, _BYTES_OF_TOKEN = 2**20, 64
# Seconds for a body to come, 256 MiB over a line of 4 Mbit a second.
_BODY_S = 600.0
_NOT_FOUND, _NOT_YET, _GONE, _TOO_LARGE, _WRONG = 404, 408, 410, 413, 422
_NO_KEY, _NOT_NOW = 401, 503
# Numbers of the requests of each clone of a sampling client.
_NUMBERS_OF_CLONE = 10**9

_CHECKPOINT_TYPES = {
    engine_lib.WEIGHTS: "training",
    engine_lib.SAMPLER_WEIGHTS: "sampler",
    engine_lib.EXTERNAL_WEIGHTS: "external",
}
_OF_EPISODE = (
    "sampling_session_id", "model_path", "base_model", "into", "group",
    "num_episodes",
)  # fmt: skip
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# What clients may ask of the model of a replay.
_OF_CLIENTS = (
    engine_lib.FORWARD, engine_lib.SAVE, engine_lib.SAVE_SAMPLER,
    engine_lib.EXPORT,
)  # fmt: skip

Handler = Callable[[requests.Request], Awaitable[responses.Response]]


class Waiters:
  """Handlers that wait for requests to be done; `notify` is for any thread."""

  def __init__(self) -> None:
    self._loop: asyncio.AbstractEventLoop | None = None
    self._events: dict[str, set[asyncio.Event]] = {}
    self._is_closed = False

  def open(self) -> None:
    """Takes the running event loop."""
    self._loop = asyncio.get_running_loop()

  def notify(self, ids: list[str]) -> None:
    """Wakes whoever waits for one of these requests or their owners."""
    if self._loop is not None:
      with contextlib.suppress(RuntimeError):  # The loop has ended.
        self._loop.call_soon_threadsafe(self._wake, ids)

  def close(self) -> None:
    """Ends all waits, for the server is to stop."""
    self._is_closed = True
    for events in self._events.values():
      for event in events:
        event.set()

  def _wake(self, ids: list[str]) -> None:
    for name in {*ids, *(id.rpartition(":")[0] for id in ids)}:
      for event in self._events.get(name, ()):
        event.set()

  async def wait_for(
      self, name: str, read: Callable[[], Any], timeout_s: float
  ) -> Any:
    """Returns `read()` once it is not None, or None after a timeout or end."""
    event = asyncio.Event()
    self._events.setdefault(name, set()).add(event)
    end = asyncio.get_running_loop().time() + timeout_s
    try:
      while True:
        event.clear()
        value = await concurrency.run_in_threadpool(read)
        left_s = end - asyncio.get_running_loop().time()
        is_over = self._is_closed or not left_s > 0  # Also if it is nan.
        if value is not None or is_over:
          return value
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(event.wait(), left_s)
    finally:
      self._events[name].discard(event)
      if not self._events[name]:
        del self._events[name]


class App:
  """The application; `asgi` is what a server runs.

  Args:
    engine: engine, whose thread `thread` is.
    waiters: told of requests that are done.
    thread: the engine's thread; the server is healthy while it lives.
    key: key that every request must have.
  """

  def __init__(
      self,
      engine: engine_lib.Engine,
      waiters: Waiters,
      thread: threading.Thread,
      key: str,
  ):
    self._engine = engine
    self._journal = engine.journal
    self._waiters = waiters
    self._thread = thread
    self._key = key
    self._most_of_json = _MOST_OF_JSON + _BYTES_OF_TOKEN * engine.max_tokens
    post, get, delete = ["POST"], ["GET"], ["DELETE"]
    rows = [
        ("healthz", get, self._healthz),
        ("get_server_capabilities", get, self._capabilities),
        ("client/config", post, self._client_config),
        ("client/dynamic_config", post, self._dynamic_config),
        ("telemetry", post, self._telemetry),
        ("create_session", post, self._create_session),
        ("session_heartbeat", post, self._heartbeat),
        ("sessions/{session}", get, self._session),
        ("sessions/{session}/finish", post, self._finish_session),
        ("create_model", post, self._create_model),
        ("get_info", post, self._get_info),
        ("forward", post, functools.partial(self._pass, True)),
        ("forward_backward", post, functools.partial(self._pass, False)),
        *(
            (kind, post, functools.partial(self._of_model, kind))
            for kind in (engine_lib.OPTIM_STEP, engine_lib.SAVE,
                         engine_lib.SAVE_SAMPLER, engine_lib.EXPORT)
        ),
        ("load_weights", post, self._load_weights),
        ("weights_info", post, self._weights_info),
        ("create_sampling_session", post, self._create_sampling_session),
        ("samplers/{sampler}", get, self._sampler),
        ("asample", post, self._asample),
        ("retrieve_future", post, self._retrieve_future),
        ("retrieve_futures", post, self._retrieve_futures),
        ("create_replay", post, self._create_replay),
        ("replays/{replay}", get, self._replay),
        ("replays/{replay}/reward", post, self._reward),
        ("replays/{replay}/start", post,
         functools.partial(self._of_replay, engine_lib.START)),
        ("replays/{replay}/stop", post,
         functools.partial(self._of_replay, engine_lib.STOP)),
        ("create_episode", post, self._create_episode),
        ("episodes/{episode}", get, self._get_episode),
        ("episodes/{episode}/finish", post, self._finish_episode),
        ("sessions", get, self._sessions),
        ("checkpoints", get, self._all_checkpoints),
        ("training_runs", get, self._training_runs),
        ("training_runs/{model}", get, self._training_run),
        ("training_runs/{model}/checkpoints", get, self._checkpoints),
        ("training_runs/{model}/checkpoints/{kind}/{name}", delete,
         self._delete_checkpoint),
    ]  # fmt: skip
    of_agents = [
        ("models", get, self._models),
        ("chat/completions", post, functools.partial(self._call, True)),
        ("completions", post, functools.partial(self._call, False)),
    ]
    alone = [
        ("models", get, self._model_alone),
        ("chat/completions", post, functools.partial(self._answer, True)),
        ("completions", post, functools.partial(self._answer, False)),
    ]
    self.asgi = applications.Starlette(
        routes=[
            *(
                routing.Route(
                    f"/api/v1/{path}", self._guarded(handler), methods=how
                )
                for path, how, handler in rows
            ),
            *(
                routing.Route(
                    f"/episodes/{{episode}}/v1/{path}",
                    _as_openai(self._guarded(handler)),
                    methods=how,
                )
                for path, how, handler in of_agents
            ),
            *(
                routing.Route(
                    f"{prefix}/v1/{path}",
                    _as_openai(self._guarded(handler)),
                    methods=how,
                )
                for prefix in ("", "/oai/api")  # The second is Tinker's.
                for path, how, handler in alone
            ),
        ],
        exception_handlers={
            exceptions.HTTPException: _http_error,
            Exception: _server_error,
        },
        lifespan=self._lifespan,
    )

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: applications.Starlette) -> Any:
    del app
    self._waiters.open()
    yield

  def _guarded(self, handler: Callable[..., Awaitable[Any]]) -> Handler:
    """Returns a handler behind the key, with its errors as responses."""

    async def guarded(request: requests.Request) -> responses.Response:
      given = request.headers.get("x-api-key", "")
      if not given:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
      if not hmac.compare_digest(given.encode(), self._key.encode()):
        return _error(
            _NO_KEY, "the header X-API-Key is not the key of this server"
        )
      try:
        answer = await handler(request)
      except LookupError as error:
        return _error(_NOT_FOUND, error.args[0])
      except _BodyError as error:
        return _error(error.status, str(error))
      except ValueError as error:
        return _error(_WRONG, str(error))
      except RecursionError:
        return _error(_WRONG, "the body is nested too deeply")
      except OSError as error:
        return _error(_NOT_NOW, f"{error}: ask again later")
      except requests.ClientDisconnect:
        return _error(400, "the body ended early")  # To nobody.
      except asyncio.CancelledError:
        return _error(_NOT_NOW, "the server stops: ask again later")
      if isinstance(answer, responses.Response):
        return answer
      return responses.JSONResponse(answer)

    return guarded

  # Bodies.

  async def _body(
      self, request: requests.Request, most: int | None = None
  ) -> bytes:
    """Returns a body; raises _BodyError if it is too large or too slow.

    Args:
      request: request.
      most: most bytes; None is what JSON other than a pass may have.
    """
    most = most or self._most_of_json
    text = f"the body has more than {most} bytes"
    if most == _MOST_OF_JSON_PASS:
      text += ": allowed as application/x-protobuf"
    if "content-encoding" in request.headers:
      raise _BodyError(415, "Content-Encoding: allowed none")
    parts, size = [], 0
    try:
      size = int(request.headers.get("content-length", 0))
    except ValueError as error:
      raise _BodyError(400, "Content-Length: allowed a number") from error
    if size > most:
      raise _BodyError(_TOO_LARGE, text)
    size = 0
    try:
      async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
          size += len(part)
          if size > most:
            raise _BodyError(_TOO_LARGE, text)
          parts.append(part)
    except TimeoutError as error:
      raise _BodyError(
          _NOT_YET, f"the body took more than {_BODY_S:g} s"
      ) from error
    return b"".join(parts)

  async def _json(self, request: requests.Request) -> dict[str, Any]:
    return (await self._raw_json(request))[1]

  async def _raw_json(
      self, request: requests.Request
  ) -> tuple[bytes, dict[str, Any]]:
    """Returns a body as it came, and its JSON object."""
    raw = await self._body(request)
    parse = messages.parse_json
    return raw, await concurrency.run_in_threadpool(parse, raw)

  async def _submit(
      self, kind: str, owner: str, seq: int | None, body: bytes, name: str = ""
  ) -> journal_lib.Request:
    submit = functools.partial(self._engine.submit, name=name)
    return await concurrency.run_in_threadpool(submit, kind, owner, seq, body)

  # The server and its sessions.

  async def _healthz(self, request: requests.Request) -> Any:
    del request
    if not self._thread.is_alive():
      return _error(_NOT_NOW, "the engine has ended; see the server's log")
    return {"status": "ok"}

  async def _capabilities(self, request: requests.Request) -> Any:
    del request
    model = {
        "model_name": self._engine.model_name,
        "max_context_length": self._engine.max_tokens,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}

  async def _client_config(self, request: requests.Request) -> Any:
    await self._json(request)
    return {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        # A pass comes whole if it can, since groups must not be cut.
        "fwdbwd_max_chunk_len": 2**20,
        "fwdbwd_max_chunk_bytes_count": _MOST_BYTES // 2,
        "proto_compress_fwdbwd": False,
        "custom_loss_server_side": False,
    }

  async def _dynamic_config(self, request: requests.Request) -> Any:
    await self._json(request)
    return {"refresh_interval_sec": 3600, "sample_cancel_enabled": False}

  async def _telemetry(self, request: requests.Request) -> Any:
    await self._body(request, _MOST_OF_JSON_PASS)  # Kept nowhere.
    return {"status": "accepted"}

  async def _create_session(self, request: requests.Request) -> Any:
    await self._json(request)
    session = str(uuid.uuid4())
    await concurrency.run_in_threadpool(self._journal.add_session, session)
    return {"type": "create_session", "session_id": session}

  def _check_session(self, session: str) -> str:
    session_state = self._journal.session(session)
    if session_state is None:
      raise LookupError(f"session {session}: there is none")
    if session_state[0]:
      raise _BodyError(_GONE, f"session {session} has finished")
    return session

  async def _heartbeat(self, request: requests.Request) -> Any:
    body = await self._json(request)
    self._check_session(messages.field(body, "session_id", str))
    return {"type": "session_heartbeat"}

  async def _session(self, request: requests.Request) -> Any:
    session = request.path_params["session"]
    if self._journal.session(session) is None:
      raise LookupError(f"session {session}: there is none")
    return {
        "training_run_ids": self._journal.models_of(session),
        "sampler_ids": self._journal.samplers_of(session),
    }

  async def _finish_session(self, request: requests.Request) -> Any:
    body = await self._json(request)
    session = self._check_session(request.path_params["session"])
    reason = json.dumps(body.get("reason"))
    self._journal.finish_session(session, reason)
    return responses.Response(status_code=204)

  # Models.

  def _check_base(self, name: str) -> None:
    if name != self._engine.model_name:
      raise ValueError(
          f"base_model={name!r}: allowed {self._engine.model_name!r}"
      )

  def _check_model(self, model: str) -> str:
    if self._journal.model(model) is None:
      raise LookupError(f"model {model}: there is none; create_model makes one")
    return model

  async def _create_model(self, request: requests.Request) -> Any:
    body = await self._json(request)
    session = self._check_session(messages.field(body, "session_id", str))
    model = f"{session}:train:{messages.field(body, 'model_seq_id', int)}"
    self._check_base(messages.field(body, "base_model", str))
    optimizer = messages.field(body, "optimizer_config", dict, {})
    if optimizer.get("type", "adamw") != "adamw":
      raise ValueError(
          f"optimizer_config.type={optimizer['type']!r}: allowed 'adamw'"
      )
    lora_config = messages.field(body, "lora_config", dict, None)
    spec = self._engine.spec_of(model, lora_config)
    spec["user_metadata"] = messages.field(body, "user_metadata", dict, {})
    self._journal.add_model(model, session, spec)
    raw = json.dumps(body, sort_keys=True).encode()
    asked = await self._submit(engine_lib.CREATE, model, 0, raw)
    return {"request_id": asked.id, "model_id": model}

  async def _get_info(self, request: requests.Request) -> Any:
    body = await self._json(request)
    model = self._check_model(messages.field(body, "model_id", str))
    spec = self._journal.model(model)
    name = self._engine.model_name
    return {
        "type": "get_info",
        "model_data": {
            "arch": self._engine.family,
            "model_name": name,
            "tokenizer_id": self._engine.tokenizer_id,
        },
        "model_id": model,
        "is_lora": spec["rank"] > 0,
        "lora_rank": spec["rank"],
        "model_name": name,
    }

  async def _pass(self, forward_only: bool, request: requests.Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0]
    is_proto = kind == messages.PROTO
    body = await self._body(
        request, _MOST_BYTES if is_proto else _MOST_OF_JSON_PASS
    )

    def read() -> tuple[bytes, tuple[str, int, bool]]:
      packed = body
      if not is_proto:
        packed = messages.pack_pass(
            messages.parse_json(body), forward_only=forward_only
        )
      return packed, messages.address_of_pass(packed)

    body, address = await concurrency.run_in_threadpool(read)
    model, seq, has_no_backward = address
    kind = (
        engine_lib.FORWARD if has_no_backward else engine_lib.FORWARD_BACKWARD
    )
    return await self._accept(kind, model, seq, body)

  async def _of_model(self, kind: str, request: requests.Request) -> Any:
    body = await self._json(request)
    model = messages.field(body, "model_id", str)
    seq = messages.field(body, "seq_id", int, 0)
    raw = json.dumps(body, sort_keys=True).encode()
    return await self._accept(kind, model, seq, raw)

  async def _accept(self, kind: str, model: str, seq: int, body: bytes) -> Any:
    """Journals a model's request; 0 stands for a number that is not given."""
    spec = self._journal.model(self._check_model(model))
    if seq < 0:
      raise ValueError(f"seq_id={seq}: allowed numbers from 1")
    if "replay" in spec and (seq or kind not in _OF_CLIENTS):
      raise ValueError(
          f"{kind} with seq_id={seq}: the server numbers the requests of a"
          f" replay; allowed {', '.join(_OF_CLIENTS)}, without seq_id"
      )
    asked = await self._submit(kind, model, seq or None, body)
    return {"request_id": asked.id, "model_id": model}

  async def _load_weights(self, request: requests.Request) -> Any:
    body = await self._json(request)
    path = messages.field(body, "path", str)
    messages.field(body, "optimizer", bool)
    raw = json.dumps(body, sort_keys=True).encode()
    if body.get("session_id") is None:
      model = messages.field(body, "model_id", str)
      seq = messages.field(body, "seq_id", int, 0)
      return await self._accept(engine_lib.LOAD, model, seq, raw)
    # The load makes the model, of the checkpoint's spec.
    session = self._check_session(messages.field(body, "session_id", str))
    model = f"{session}:train:{messages.field(body, 'model_seq_id', int)}"
    if body.get("base_model") is not None:
      self._check_base(messages.field(body, "base_model", str))
    said = messages.field(body, "user_metadata", dict, {})
    spec = {**self._spec_of_checkpoint(path), "user_metadata": said}
    self._journal.add_model(model, session, spec)
    asked = await self._submit(engine_lib.LOAD, model, 0, raw)
    return {"request_id": asked.id, "model_id": model}

  def _spec_of_checkpoint(self, path: str) -> Mapping[str, Any]:
    spec = self._journal.checkpoint(path)
    if spec is None:
      raise LookupError(f"{path}: there is no such checkpoint")
    return spec

  async def _weights_info(self, request: requests.Request) -> Any:
    body = await self._json(request)
    spec = self._spec_of_checkpoint(messages.field(body, "tinker_path", str))
    return {
        "base_model": spec["base_model"],
        "is_lora": spec["rank"] > 0,
        "lora_rank": spec["rank"] or None,
        "train_unembed": not spec["rank"],
        "train_mlp": spec["train_mlp"],
        "train_attn": spec["train_attn"],
    }

  async def _training_run(self, request: requests.Request) -> Any:
    return self._run_as_json(self._check_model(request.path_params["model"]))

  def _run_as_json(self, model: str) -> dict[str, Any]:
    spec = self._journal.model(model)
    newest = {c["checkpoint_type"]: c for c in self._listed(model)}
    return {
        "training_run_id": model,
        "base_model": spec["base_model"],
        "model_owner": "",
        "is_lora": spec["rank"] > 0,
        "lora_rank": spec["rank"] or None,
        "last_request_time": _iso(self._journal.last_asked_s(model)),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": spec.get("user_metadata"),
    }

  async def _checkpoints(self, request: requests.Request) -> Any:
    model = self._check_model(request.path_params["model"])
    return {"checkpoints": self._listed(model)}

  def _listed(self, model: str) -> list[dict[str, Any]]:
    """Returns the checkpoints of a model as clients see them, oldest first."""
    rows = self._journal.checkpoints_of(model)
    return [_checkpoint_as_json(*row) for row in rows]

  # Lists of all there is, the newest first.

  def _newest(
      self, request: requests.Request, table: str, limit: int
  ) -> tuple[Sequence[tuple[Any, ...]], dict[str, int]]:
    """Returns a page of a table and its cursor; `limit` is the usual one."""
    cursor = {"limit": limit, "offset": 0}
    for name, least in (("limit", 1), ("offset", 0)):
      text = request.query_params.get(name, str(cursor[name]))
      if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ValueError(f"{name}={text!r}: allowed whole numbers from {least}")
      cursor[name] = int(text)
    rows, count = self._journal.newest(table, **cursor)
    return rows, {**cursor, "total_count": count}

  async def _sessions(self, request: requests.Request) -> Any:
    rows, _ = self._newest(request, "sessions", 20)
    return {"sessions": [session for (session,) in rows]}

  async def _training_runs(self, request: requests.Request) -> Any:
    rows, cursor = self._newest(request, "models", 20)
    runs = [self._run_as_json(model) for (model,) in rows]
    return {"training_runs": runs, "cursor": cursor}

  async def _all_checkpoints(self, request: requests.Request) -> Any:
    rows, cursor = self._newest(request, "checkpoints", 100)
    shown = [_checkpoint_as_json(*row) for row in rows]
    return {"checkpoints": shown, "cursor": cursor}

  async def _delete_checkpoint(self, request: requests.Request) -> Any:
    p = request.path_params
    path = f"tinker://{p['model']}/{p['kind']}/{p['name']}"
    self._spec_of_checkpoint(path)
    await concurrency.run_in_threadpool(self._engine.delete, path)
    return responses.Response(status_code=204)

  # Sampling.

  async def _create_sampling_session(self, request: requests.Request) -> Any:
    body = await self._json(request)
    session = self._check_session(messages.field(body, "session_id", str))
    number = messages.field(body, "sampling_session_seq_id", int)
    path = messages.field(body, "model_path", str, "")
    if path:
      self._spec_of_checkpoint(path)
    else:
      self._check_base(messages.field(body, "base_model", str))
    sampler = f"{session}:sample:{number}"
    if self._journal.sampler(sampler) not in (None, path):
      raise ValueError(f"{sampler} is of another model: take another number")
    self._journal.add_sampler(sampler, session, path)
    return {
        "type": "create_sampling_session",
        "sampling_session_id": sampler,
    }

  def _check_sampler(self, sampler: str) -> str:
    """Returns the path of a sampling session."""
    path = self._journal.sampler(sampler)
    if path is None:
      raise LookupError(f"sampling session {sampler}: there is none")
    return path

  async def _sampler(self, request: requests.Request) -> Any:
    sampler = request.path_params["sampler"]
    path = self._check_sampler(sampler)
    return {
        "sampler_id": sampler,
        "base_model": self._engine.model_name,
        "model_path": path or None,
    }

  async def _asample(self, request: requests.Request) -> Any:
    raw, body = await self._raw_json(request)
    sampler = messages.field(body, "sampling_session_id", str)
    self._check_sampler(sampler)
    count = engine_lib.num_samples(body)
    seq = messages.field(body, "seq_id", int, None)
    kind, replay = engine_lib.SAMPLE, self._into(body, sampler)
    if replay:
      kind, least = engine_lib.SAMPLE_INTO, self._engine.least_completions(
          replay
      )
      if count < least:
        raise ValueError(f"num_samples={count}: allowed {least} or more")
    # Without a number of its client's it takes none that one may give.
    name = "" if seq is not None else str(uuid.uuid4())
    asked = await self._submit(kind, sampler, seq, raw, name)
    return {
        "request_id": asked.id,
        "sample_sequence_ids": [f"{asked.id}:{i}" for i in range(count)],
    }

  # Episodes.

  async def _create_episode(self, request: requests.Request) -> Any:
    body = await self._json(request)
    messages.check_fields(body, _OF_EPISODE)
    sampler = messages.field(body, "sampling_session_id", str, "")
    path = messages.field(body, "model_path", str, "")
    if sampler:
      self._check_sampler(sampler)
    elif path:
      self._spec_of_checkpoint(path)
    else:
      self._check_base(messages.field(body, "base_model", str))
    episode = _idempotency_key(request) or str(uuid.uuid4())
    spec = {"sampler": sampler, "path": path, **self._group_of(body, sampler)}
    await concurrency.run_in_threadpool(
        functools.partial(
            self._journal.add_episode,
            *(episode, sampler.partition(":")[0], spec),
            together=spec["together"],
            size=spec["num_episodes"],
        )
    )
    return {
        "type": "create_episode",
        "episode_id": episode,
        "path": f"/episodes/{episode}/v1",
    }

  def _group_of(self, body: Mapping[str, Any], sampler: str) -> dict[str, Any]:
    """Returns replay, group and its size of an episode, "" without one."""
    replay = self._into(body, sampler)
    group = messages.field(body, "group", str, "")
    count = messages.field(body, "num_episodes", int, 0)
    if not replay:
      if group or count:
        raise ValueError('group, num_episodes: allowed with "into": "replay"')
      return {"replay": "", "together": "", "num_episodes": 0}
    least = self._engine.least_completions(replay)
    if not _GROUP.fullmatch(group) or count < least:
      raise ValueError(
          f"group={group!r}, num_episodes={count}: allowed a name of letters,"
          f" digits, '.', '_' and '-', and {least} episodes or more"
      )
    together = f"{replay}/{group}"
    return {"replay": replay, "together": together, "num_episodes": count}

  def _into(self, body: Mapping[str, Any], sampler: str) -> str:
    """Returns the replay that is sampled for, "" if none is."""
    into = messages.field(body, "into", str, "")
    if not into:
      return ""
    replay = sampler.rpartition(":")[0]
    spec = self._journal.model(replay) or {}
    is_newest = sampler == engine_lib.newest_sampler(replay)
    if into != "replay" or not is_newest or "replay" not in spec:
      raise ValueError(
          f"into={into!r}: allowed 'replay', with the sampling_session_id of a"
          " replay"
      )
    return replay

  def _check_episode(self, request: requests.Request) -> str:
    """Returns the episode of a URL, which has not finished."""
    episode = request.path_params["episode"]
    state = self._journal.episode(episode)
    if state is None:
      raise LookupError(f"episode {episode}: there is none")
    if state[1] is not None:
      raise _BodyError(_GONE, f"episode {episode} has finished")
    return episode

  async def _get_episode(self, request: requests.Request) -> Any:
    return await concurrency.run_in_threadpool(
        self._engine.read_episode, request.path_params["episode"]
    )

  async def _finish_episode(self, request: requests.Request) -> Any:
    body = await self._json(request)
    messages.check_fields(body, ("reward",))
    if "reward" not in body:
      raise ValueError("reward is missing: allowed float, or null")
    reward = messages.field(body, "reward", float, None)
    if reward is not None and not messages.is_reward(reward):
      raise ValueError(f"reward={reward}: allowed finite numbers, or null")
    episode = request.path_params["episode"]
    if self._journal.episode(episode) is None:
      raise LookupError(f"episode {episode}: there is none")
    raw = json.dumps({"reward": reward}).encode()
    asked = await self._submit(
        engine_lib.FINISH, episode, None, raw, name="finish"
    )
    return await self._result_of(asked.id)

  async def _models(self, request: requests.Request) -> Any:
    self._check_episode(request)
    return await self._model_alone(request)

  async def _model_alone(self, request: requests.Request) -> Any:
    del request
    model = {
        "id": self._engine.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "tba_jax",
    }
    return {"object": "list", "data": [model]}

  async def _call(self, is_chat: bool, request: requests.Request) -> Any:
    """Answers a call of an agent, once it is done."""
    raw, body = await self._raw_json(request)
    episode = self._check_episode(request)
    _check_call(body, is_chat)
    call = chat.parse(body, self._engine.model_name)
    id = await self._repeated(request, episode, raw)
    if id is None:
      key = _idempotency_key(request)
      id = (await self._submit(engine_lib.CALL, episode, None, raw, key)).id
    return await self._answered(call, id)

  async def _answer(self, is_chat: bool, request: requests.Request) -> Any:
    """Answers a call without an episode, of which nothing is kept."""
    raw, body = await self._raw_json(request)
    _check_call(body, is_chat)
    model = messages.field(body, "model", str)
    is_base = model == self._engine.model_name
    if not is_base and self._journal.checkpoint(model) is None:
      raise LookupError(
          f"model={model!r}: allowed {self._engine.model_name!r}, or a path"
          " that save_weights_for_sampler has returned"
      )
    most = engine_lib.MOST_CHOICES
    call = chat.parse(body, model, most_choices=most)
    key = _idempotency_key(request)
    asked = await self._submit(
        engine_lib.ANSWER, engine_lib.ANSWERS, None, raw, key
    )
    return await self._answered(call, asked.id)

  async def _answered(self, call: chat.Call, id: str) -> Any:
    """Returns the answer of a call once it is done."""
    result = await self._result_of(id)
    if isinstance(result, responses.Response):
      return result
    answer = result["answer"]
    if not call.stream:
      return answer
    return responses.StreamingResponse(
        chat.events(answer, has_usage=call.has_usage),
        media_type="text/event-stream",
    )

  async def _outcome(
      self, id: str, timeout_s: float
  ) -> journal_lib.Outcome | None:
    """Waits until a request is done; returns None after a timeout."""

    def read() -> journal_lib.Outcome | None:
      outcome = self._journal.outcome(id)
      return outcome if outcome is None or outcome.is_done else None

    return await self._waiters.wait_for(id, read, timeout_s)

  async def _result_of(self, id: str) -> Any:
    """Returns the result of a request, JSON, once it is done, or an error."""
    outcome = await self._outcome(id, _ANSWER_S)
    if outcome is None:
      return _error(_NOT_YET, "no answer yet: ask again")
    if outcome.failure is not None:
      of_user = outcome.failure["category"] == "user"
      return _error(_WRONG if of_user else 500, outcome.failure["error"])
    return json.loads(outcome.result)

  async def _repeated(
      self, request: requests.Request, episode: str, body: bytes
  ) -> str | None:
    """Returns the call that the official client sends again; None if none."""
    if request.headers.get("x-stainless-retry-count", "0") == "0":
      return None
    return await concurrency.run_in_threadpool(
        self._journal.same_body, episode, body
    )

  # Replays.

  async def _create_replay(self, request: requests.Request) -> Any:
    raw, body = await self._raw_json(request)
    session = self._check_session(messages.field(body, "session_id", str))
    number = messages.field(body, "replay_seq_id", int)
    self._check_base(messages.field(body, "base_model", str))
    model = await concurrency.run_in_threadpool(
        self._engine.add_replay, session, number, body
    )
    path = messages.field(body, "model_path", str, "")
    if path:
      load = json.dumps({"path": path, "optimizer": False}).encode()
      asked = await self._submit(engine_lib.LOAD, model, 0, load)
      loaded = await self._result_of(asked.id)
      if isinstance(loaded, responses.Response):
        return loaded
      # Its session is of this version before anybody samples from it.
      asked = await self._submit(engine_lib.SAVE_SAMPLER, model, 1, b"{}")
      await self._result_of(asked.id)
    else:
      asked = await self._submit(engine_lib.CREATE, model, 0, raw)
    return {
        "request_id": asked.id,
        "replay_id": model,
        "sampling_session_id": engine_lib.newest_sampler(model),
    }

  def _check_replay(self, request: requests.Request) -> str:
    """Returns the replay of a URL."""
    replay = request.path_params["replay"]
    if "replay" not in (self._journal.model(replay) or {}):
      raise LookupError(f"replay {replay}: there is none")
    return replay

  async def _replay(self, request: requests.Request) -> Any:
    replay = self._check_replay(request)
    after = request.query_params.get("after", "0")
    if not after.isdecimal():
      raise ValueError(f"after={after!r}: allowed whole numbers from 0")
    return await concurrency.run_in_threadpool(
        self._engine.replay_state, replay, int(after)
    )

  async def _of_replay(self, kind: str, request: requests.Request) -> Any:
    await self._body(request)
    replay = self._check_replay(request)
    asked = await self._submit(kind, replay, None, b"{}")
    return await self._result_of(asked.id)

  async def _reward(self, request: requests.Request) -> Any:
    body = await self._json(request)
    messages.check_fields(body, ("request_id", "rewards"))
    asked = await concurrency.run_in_threadpool(
        self._engine.reward,
        self._check_replay(request),
        messages.field(body, "request_id", str),
        messages.field(body, "rewards", list),
    )
    return {"request_id": asked.id}

  # Results.

  async def _retrieve_future(self, request: requests.Request) -> Any:
    body = await self._json(request)
    id = messages.field(body, "request_id", str)
    if self._journal.outcome(id) is None:
      return _error(_GONE, f"request {id} is not known, or forgotten")
    outcome = await self._outcome(id, _POLL_S)
    if outcome is None:
      return responses.JSONResponse(
          {"type": "try_again", "request_id": id, "queue_state": "active"},
          status_code=_NOT_YET,
      )
    if outcome.failure is not None:
      return outcome.failure
    # Large results take a while.
    return await concurrency.run_in_threadpool(self._result, request, outcome)

  def _result(
      self, request: requests.Request, outcome: journal_lib.Outcome
  ) -> responses.Response:
    """Returns a result in the form that the client accepts."""
    to_json = {
        engine_lib.FORWARD: messages.pass_result_to_json,
        engine_lib.FORWARD_BACKWARD: messages.pass_result_to_json,
        engine_lib.SAMPLE: messages.sample_result_to_json,
    }.get(outcome.kind)
    if to_json is None:
      return responses.Response(outcome.result, media_type="application/json")
    if messages.PROTO in request.headers.get("accept", ""):
      return responses.Response(outcome.result, media_type=messages.PROTO)
    return responses.JSONResponse(to_json(outcome.result))

  async def _retrieve_futures(self, request: requests.Request) -> Any:
    body = await self._json(request)
    target = messages.field(body, "target", dict)
    sampler = messages.field(target, "sampling_session_id", str)
    clone = messages.field(target, "cloned_sampler_id", int, 0)
    after = messages.field(body, "prev_cursor", int, 0)
    for name, value in (("cloned_sampler_id", clone), ("prev_cursor", after)):
      if not 0 <= value < 2**32:
        raise ValueError(f"{name}={value}: allowed 0 to 2**32 - 1")
    self._check_sampler(sampler)
    timeout_s = messages.field(body, "timeout", float, _POLL_S)

    first = clone * _NUMBERS_OF_CLONE

    def read() -> list[tuple[int, str, bool]] | None:
      return (
          self._journal.completions(
              sampler, after, first=first, last=first + _NUMBERS_OF_CLONE - 1
          )
          or None
      )

    rows = await self._waiters.wait_for(sampler, read, min(timeout_s, _POLL_S))
    return {
        "completions": [
            {"state": "failed" if failed else "finished", "request_id": id}
            for _, id, failed in rows or ()
        ],
        "cursor": rows[-1][0] if rows else after,
    }


def _check_call(body: Mapping[str, Any], is_chat: bool) -> None:
  """Raises ValueError for a chat without messages, a text without prompt."""
  wanted, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
  if body.get(wanted) is None or other in body:
    raise ValueError(f"allowed {wanted}, and not {other}")


def _idempotency_key(request: requests.Request) -> str:
  """Returns a name of the call, the same if it comes again; "" = none."""
  key = request.headers.get("idempotency-key", "")
  if key:
    key = f"key-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
  return key


class _BodyError(ValueError):
  """A request that cannot be taken, with its HTTP status."""

  def __init__(self, status: int, text: str):
    super().__init__(text)
    self.status = status


def _as_openai(handler: Handler) -> Handler:
  """Returns a handler whose errors have OpenAI's form and status."""

  async def as_openai(request: requests.Request) -> responses.Response:
    answer = await handler(request)
    if answer.status_code < 400:
      return answer
    status = 400 if answer.status_code == _WRONG else answer.status_code
    text = json.loads(answer.body)["error"]
    code = text.partition(":")[0] if text.startswith("context_length") else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": kind, "param": None, "code": code}
    return responses.JSONResponse({"error": error}, status_code=status)

  return as_openai


def _checkpoint_as_json(path: str, created_s: float) -> dict[str, Any]:
  _, kind, name = path.removeprefix("tinker://").split("/")
  return {
      "checkpoint_id": f"{kind}/{name}",
      "checkpoint_type": _CHECKPOINT_TYPES[kind],
      "time": _iso(created_s),
      "tinker_path": path,
  }


def _iso(time_s: float) -> str:
  return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat()


def _error(status: int, text: str) -> responses.JSONResponse:
  return responses.JSONResponse({"error": text}, status_code=status)


async def _http_error(
    request: requests.Request, error: exceptions.HTTPException
) -> responses.Response:
  if error.status_code == _NOT_FOUND:
    return _error(
        _NOT_FOUND,
        f"{request.method} {request.url.path}: not served; docs/serve.md lists"
        " the paths",
    )
  return _error(error.status_code, error.detail)


async def _server_error(
    request: requests.Request, error: Exception
) -> responses.Response:
  return _error(500, f"{request.url.path}: {type(error).__name__}: {error}")

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of HTTP handlers: bodies, the key, errors, waits for results.

An error is JSON, {"error": text}, with status 401 for a wrong key, 404 for
something that does not exist, 408 for an unfinished result or a slow body, 410
for a forgotten result or a finished session or episode, 413 for a body that is
too large, 415 for a compressed body, 422 for an invalid request, and 503 while
the server cannot take requests or once the engine has ended. OpenAI's API uses
{"error": {"message": text, …}} and Anthropic's {"type": "error", "error":
{"type", "message"}}, with 400 in place of 422.
"""

import asyncio
from collections.abc import Awaitable, Callable
import contextlib
import functools
import hashlib
import hmac
import json
from typing import Any, TypeVar

from starlette import concurrency
from starlette import exceptions
from starlette import requests
from starlette import responses

from tba_jax.chat_api import strict_json
from tba_jax.serving import engine_ports
from tba_jax.serving import kinds
from tba_jax.serving import request_journal

NO_KEY, NOT_FOUND, NOT_YET, GONE = 401, 404, 408, 410
TOO_LARGE, WRONG, NOT_NOW = 413, 422, 503
# Seconds to wait for an agent's call, or for another request that is answered
# without a future: the official client waits as long.
_ANSWER_S = 600.0
# Types of errors in Anthropic's API, by status.
_ANTHROPIC_ERRORS = {
    NO_KEY: "authentication_error",
    NOT_FOUND: "not_found_error",
    NOT_YET: "timeout_error",
    TOO_LARGE: "request_too_large",
    NOT_NOW: "overloaded_error",
}
# Largest bodies, in bytes, from clients with the key. A pass as a protocol
# buffer, which is parsed in no time, may have ten million tokens. Parsing JSON
# blocks the interpreter, .2 s for the largest JSON pass. Other JSON may have
# 1 MiB, and 64 bytes for each token of the longest sequence.
MOST_BYTES, MOST_OF_JSON_PASS = 256 * 2**20, 8 * 2**20
MOST_OF_JSON, BYTES_OF_TOKEN = 2**20, 64
# Seconds for a body to arrive: 256 MiB at 4 Mbit/s.
_BODY_S = 600.0

_M = TypeVar("_M", bound=strict_json.Message)
Handler = Callable[[requests.Request], Awaitable[responses.Response]]


class StatusError(ValueError):
  """Rejection of a request, with its HTTP status."""

  def __init__(self, status: int, text: str):
    super().__init__(text)
    self.status = status


class Waiters:
  """Wakes handlers that wait for requests; `notify` is for any thread."""

  def __init__(self) -> None:
    self._loop: asyncio.AbstractEventLoop | None = None
    self._events: dict[str, set[asyncio.Event]] = {}
    self._is_closed = False

  def open(self) -> None:
    """Stores the running event loop, for `notify`."""
    self._loop = asyncio.get_running_loop()

  def notify(self, ids: list[str]) -> None:
    """Wakes the handlers that wait for these requests or their owners."""
    if self._loop is not None:
      with contextlib.suppress(RuntimeError):  # The loop has ended.
        self._loop.call_soon_threadsafe(self._wake, ids)

  def close(self) -> None:
    """Ends all waits, since the server is stopping."""
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
    """Returns `read()` once it is not None; None after a timeout or `close`."""
    event = asyncio.Event()
    self._events.setdefault(name, set()).add(event)
    end = asyncio.get_running_loop().time() + timeout_s
    try:
      while True:
        event.clear()
        value = await concurrency.run_in_threadpool(read)
        left_s = end - asyncio.get_running_loop().time()
        if value is not None or self._is_closed or left_s <= 0:
          return value
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(event.wait(), left_s)
    finally:
      self._events[name].discard(event)
      if not self._events[name]:
        del self._events[name]


class Handlers:
  """Base of the HTTP handlers; each subclass has its own `routes`.

  Args:
    waiters: list of the handlers that wait for requests.
  """

  def __init__(self, engine: engine_ports.EnginePort, waiters: Waiters):
    self.engine = engine
    self.registry = engine.registry
    self.journal = engine.journal
    self.waiters = waiters

  # Bodies.

  async def body(
      self, request: requests.Request, most: int | None = None
  ) -> bytes:
    """Returns a body; raises StatusError for one too large or too slow.

    Args:
      most: limit in bytes; None = the limit of JSON requests other than a pass.
    """
    if most is None:
      most = MOST_OF_JSON + BYTES_OF_TOKEN * self.engine.base.max_tokens
    text = f"the body has more than {most} bytes"
    if most == MOST_OF_JSON_PASS:
      text += ": must come as application/x-protobuf"
    if "content-encoding" in request.headers:
      raise StatusError(415, "Content-Encoding: must be left out")
    try:
      size = int(request.headers.get("content-length", 0))
    except ValueError as error:
      raise StatusError(400, "Content-Length: must be a number") from error
    if size > most:
      raise StatusError(TOO_LARGE, text)
    parts, size = [], 0
    try:
      async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
          size += len(part)
          if size > most:
            raise StatusError(TOO_LARGE, text)
          parts.append(part)
    except TimeoutError as error:
      raise StatusError(
          NOT_YET, f"the body took more than {_BODY_S:g} s"
      ) from error
    return b"".join(parts)

  async def read(
      self, kind: type[_M], request: requests.Request
  ) -> tuple[_M, bytes]:
    """Returns the parsed message of a JSON body, and the body."""
    raw = await self.body(request)
    return await concurrency.run_in_threadpool(strict_json.read, kind, raw), raw

  # Requests to the engine.

  async def submit(
      self, kind: str, owner: str, seq: int | None, body: bytes, name: str = ""
  ) -> request_journal.ServerRequest:
    submit = functools.partial(self.engine.queue.submit, name=name)
    return await concurrency.run_in_threadpool(submit, kind, owner, seq, body)

  async def outcome(
      self, id: str, timeout_s: float
  ) -> request_journal.RequestOutcome | None:
    """Waits until a request is done; returns None after a timeout."""

    def read() -> request_journal.RequestOutcome | None:
      outcome = self.journal.outcome(id)
      return outcome if outcome is None or outcome.is_done else None

    return await self.waiters.wait_for(id, read, timeout_s)

  async def result_of(self, id: str) -> dict[str, Any]:
    """Returns the result of a request once it is done.

    Raises:
      StatusError: the request has failed, or is not done in time.
    """
    outcome = await self.outcome(id, _ANSWER_S)
    if outcome is None:
      raise StatusError(NOT_YET, "no answer yet: ask again")
    if outcome.failure is not None:
      of_user = outcome.failure["category"] == "user"
      raise StatusError(WRONG if of_user else 500, outcome.failure["error"])
    return json.loads(outcome.result)

  # Objects that requests refer to.

  def check_base(self, name: str | None) -> None:
    if name != self.engine.base.name:
      raise ValueError(
          f"base_model = {name!r}: must be {self.engine.base.name!r}"
      )

  def check_session(self, session: str) -> str:
    state = self.registry.session(session)
    if state is None:
      raise LookupError(f"session {session}: there is none")
    if state[0]:
      raise StatusError(GONE, f"session {session} has finished")
    return session

  def spec_of_model(self, model: str) -> dict[str, Any]:
    spec = self.registry.model(model)
    if spec is None:
      raise LookupError(f"model {model}: there is none; create_model makes one")
    return spec

  def spec_of_checkpoint(self, path: str) -> dict[str, Any]:
    spec = self.registry.checkpoint(path)
    if spec is None:
      raise LookupError(f"{path}: there is no such checkpoint")
    return spec

  def path_of_sampler(self, sampler: str) -> str:
    path = self.registry.sampler(sampler)
    if path is None:
      raise LookupError(f"sampling session {sampler}: there is none")
    return path

  def replay_into(self, into: str, sampler: str) -> str:
    """Returns the replay to sample into; "" = none."""
    if not into:
      return ""
    replay = sampler.rpartition(":")[0]
    is_newest = sampler == kinds.newest_sampler(replay)
    if not is_newest or "replay" not in (self.registry.model(replay) or {}):
      raise ValueError(
          f"into = {into!r}: must come with the sampling_session_id of a replay"
      )
    return replay


def guarded(handler: Callable[..., Awaitable[Any]], key: str) -> Handler:
  """Returns a handler that checks the key and turns errors into responses."""

  async def guarded_handler(request: requests.Request) -> responses.Response:
    token = request.headers.get("x-api-key", "")
    if not token:
      token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(token.encode(), key.encode()):
      return error(NO_KEY, "the header X-API-Key is not the key of this server")
    try:
      answer = await handler(request)
    except LookupError as problem:
      return error(NOT_FOUND, problem.args[0])
    except StatusError as problem:
      return error(problem.status, str(problem))
    except ValueError as problem:
      return error(WRONG, str(problem))
    except OSError as problem:
      return error(NOT_NOW, f"{problem}: ask again later")
    except requests.ClientDisconnect:
      return error(400, "the body ended early")  # The client is gone.
    except asyncio.CancelledError:
      return error(NOT_NOW, "the server stops: ask again later")
    if isinstance(answer, responses.Response):
      return answer
    return responses.Response(
        strict_json.to_json(answer), media_type="application/json"
    )

  return guarded_handler


def as_openai(handler: Handler) -> Handler:
  """Returns a handler whose errors have OpenAI's format and status."""

  def shown(status: int, text: str) -> dict[str, Any]:
    code = text.partition(":")[0] if text.startswith("context_length") else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": kind, "param": None, "code": code}
    return {"error": error}

  return _with_errors(handler, shown)


def as_anthropic(handler: Handler) -> Handler:
  """Returns a handler whose errors have Anthropic's format and status."""

  def shown(status: int, text: str) -> dict[str, Any]:
    other = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_ERRORS.get(status, other)
    return {"type": "error", "error": {"type": kind, "message": text}}

  return _with_errors(handler, shown)


def _with_errors(
    handler: Handler, shown: Callable[[int, str], dict[str, Any]]
) -> Handler:
  """Returns a handler with the error bodies (status, text) -> JSON."""

  async def with_errors(request: requests.Request) -> responses.Response:
    answer = await handler(request)
    if answer.status_code < 400:
      return answer
    status = 400 if answer.status_code == WRONG else answer.status_code
    body = shown(status, json.loads(answer.body)["error"])
    return responses.JSONResponse(body, status_code=status)

  return with_errors


def idempotency_key(request: requests.Request) -> str:
  """Returns a name for the call, which its retries share; "" = none."""
  key = request.headers.get("idempotency-key", "")
  if key:
    key = f"key-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
  return key


def error(status: int, text: str) -> responses.JSONResponse:
  return responses.JSONResponse({"error": text}, status_code=status)


async def http_error(
    request: requests.Request, problem: exceptions.HTTPException
) -> responses.Response:
  if problem.status_code == NOT_FOUND:
    return error(
        NOT_FOUND,
        f"{request.method} {request.url.path}: not served;"
        " docs/reference/server.md lists the paths",
    )
  return error(problem.status_code, problem.detail)


async def server_error(
    request: requests.Request, problem: Exception
) -> responses.Response:
  return error(500, f"{request.url.path}: {type(problem).__name__}: {problem}")

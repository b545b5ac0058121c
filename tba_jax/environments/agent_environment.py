# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments whose turns are an agent's calls of a model over HTTP.

    play(seed, url) -> reward, or (reward, info)

runs an agent to its end. `url` is a server in the process of the episode, which
speaks OpenAI's and Anthropic's APIs (`chat_api`). The first call is the prompt,
and what a call adds to the one before is an observation. All calls must go on
the same conversation, one after the other; an equal call gets the same answer.
Calls with another history are answered by the optional method

    answer(messages) -> text

in other threads (`messages` is a text for text completions); without the method
they fail the episode. At the token limit of a completion the answer is cut off.
Calls beyond the limit of tokens or turns fail with status 400, and the episode
counts if `play` returns a reward.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
from http import server
import importlib
import inspect
import json
import queue
import secrets
import threading
import time
from typing import Any

from tba_jax.system import keeper
from tba_jax.tasks import base

# Path below /v1/ -> dialect, see `chat_api/dialects.py`; "" is OpenAI's own.
_DIALECTS = {
    "chat/completions": "",
    "completions": "",
    "responses": "openai_responses",
    "messages": "anthropic_messages",
}
# Dialect that takes seconds to import -> word in the code of its agents.
_MENTIONS = {"openai_responses": "responses", "anthropic_messages": "anthropic"}
# Dialects that this process has, or imports when they are called.
_preloaded = {""}
# Most bytes of a call.
_MAX_BYTES = 2**24


class CallError(Exception):
  """A call that is answered with an HTTP error.

  status: HTTP status.
  """

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


@dataclasses.dataclass
class _Call:
  """A call that waits for its answer.

  request: the completion that it equals.
  history: the prompt's text, or messages in a form that can be compared.
  answer: the completion, for all tries of the call.
  """

  request: Any
  history: str | list[dict[str, Any]]
  answer: futures.Future[dict[str, Any]] = dataclasses.field(
      default_factory=futures.Future
  )


@dataclasses.dataclass(frozen=True)
class _Ended:
  """The result of `play`, or why the episode has failed."""

  result: Any = None
  error: BaseException | None = None


class AgentEnvironment:
  """Makes an environment of an object that plays an agent.

  schemas: JSON schemas of the tools of the agent's first call.
  """

  def __init__(self, inner: Any):
    self._inner = inner
    self.schemas: Sequence[Mapping[str, Any]] = ()
    self._lock = threading.Lock()
    # What the agent's calls add, and the end.
    self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._pending: _Call | None = None
    self._answered: _Call | None = None
    self._is_over = False
    # Conversation up to the policy's last turn.
    self._history: str | list[dict[str, Any]] | None = None

  def reset(self, seed: int) -> Any:
    """Starts the agent; returns the prompt of its first call."""
    key = secrets.token_hex(16)  # Other processes may share the network.
    http = server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Handler, self, f"/{key}/v1/")
    )
    http.daemon_threads = True
    url = f"http://127.0.0.1:{http.server_address[1]}/{key}"
    for target in (http.serve_forever, lambda: self._play(seed, url)):
      threading.Thread(target=target, daemon=True).start()
    observation, _, done, _ = self._next()
    if done:
      raise base.RewardError(
          "error", f"play({seed}) ended before its agent called the model"
      )
    return observation

  def step(
      self, text: str, usage: tuple[int, int]
  ) -> tuple[Any, float, bool, dict[str, Any]]:
    """Answers the agent's call; returns what the next call adds.

    Args:
      text: turn of the policy.
      usage: number of tokens before the turn, and of the turn.
    """
    with self._lock:
      self._answer_pending(text, usage)
    return self._next()

  def end(
      self, text: str | None, usage: tuple[int, int]
  ) -> tuple[Any, float, bool, dict[str, Any]]:
    """Refuses further calls; returns the agent's reward.

    Args:
      text: unfinished turn; None refuses the pending call too.
      usage: see `step`.
    """
    with self._lock:
      self._is_over = True
      if text is None:
        self._pending.answer.set_exception(_over())
      else:
        self._answer_pending(text, usage)
    return self._next()

  def close(self) -> None:
    if hasattr(self._inner, "close"):
      self._inner.close()

  def _play(self, seed: int, url: str) -> None:
    try:
      self._events.put(_Ended(self._inner.play(seed, url)))
    except BaseException as error:  # pylint: disable=broad-exception-caught
      self._events.put(_Ended(error=error))

  def _next(self) -> tuple[Any, float, bool, dict[str, Any]]:
    """Waits for a call or the end; the caller has a deadline."""
    event = self._events.get()
    if not isinstance(event, _Ended):
      return event, 0.0, False, {}
    if event.error is not None:
      raise event.error
    result = event.result
    reward, info = result if isinstance(result, tuple) else (result, {})
    return "", reward, True, info

  def _answer_pending(self, text: str, usage: tuple[int, int]) -> None:
    call = self._pending
    for stop in call.request.stop:
      if stop in text:
        raise base.RewardError(
            "error",
            f"the agent's call asks to stop at {stop!r}, which the turn"
            " contains: must be in config.sampling.stop_strings",
        )
    message, answer = _completion(
        call.request, text, usage, stopped=not self._is_over
    )
    if isinstance(call.history, str):
      self._history = call.history + text
    else:
      self._history = [*call.history, _observed(message)]
    self._pending, self._answered = None, call
    call.answer.set_result(answer)

  # Threads of the server.

  def lacks(self, dialect: str) -> bool:
    """Ends the episode if its first call needs seconds for an import.

    A process that imports the dialect first then takes the episode again.
    """
    is_first = self._pending is None and self._answered is None
    if dialect in _preloaded or not is_first:
      return False
    error = base.RewardError(keeper.PRELOAD, dialect)
    self._events.put(_Ended(error=error))
    return True

  def answer(self, request: Any) -> dict[str, Any]:
    """Returns the completion of a call, once the policy has sampled it.

    Raises:
      CallError: the call is not supported, or does not go on the conversation.
    """
    call = _Call(request, _history(request))
    try:
      with self._lock:
        call = self._take(call)
      if call is None:
        return self._answer_aside(request)
    except CallError:
      raise
    except Exception as error:  # pylint: disable=broad-exception-caught
      self._events.put(_Ended(error=error))
      raise CallError(500, f"the episode has failed: {error}") from error
    return call.answer.result()

  def _take(self, call: _Call) -> _Call | None:
    """Returns the call whose answer counts; None without one.

    It is an earlier one if the client tries again.
    """
    if self._is_over:
      raise _over()
    for earlier in (self._pending, self._answered):
      if earlier is not None and earlier.history == call.history:
        return earlier
    new, known = call.history, self._history
    if known is None and self._pending is None:
      known = "" if isinstance(new, str) else []
      self.schemas = call.request.offered_tools
    if self._pending is not None or type(new) is not type(known):
      return None
    added = new[len(known) :]
    if new[: len(known)] != known or not added:
      return None
    self._pending = call
    self._events.put(added)
    return call

  def _answer_aside(self, request: Any) -> dict[str, Any]:
    """Returns the user's answer to a call of another conversation."""
    asked = request.chat or request.prompt
    if not hasattr(self._inner, "answer"):
      raise base.RewardError(
          "history",
          "the agent's call does not go on its conversation: must append to"
          " it, one call after the other, or be answered by answer(messages);"
          f" it ends with {str(asked)[-200:]!r}",
      )
    text = self._inner.answer(asked)
    if not isinstance(text, str):
      raise base.RewardError(
          "error", f"answer returned {repr(text)[:80]}: must be a text"
      )
    return _completion(request, text)[1]


def _over() -> CallError:
  return CallError(
      400,
      f"{_api('strict_json').TOO_LONG}: the completion has"
      " config.task.max_turns turns or"
      " config.sampling.max_completion_tokens tokens",
  )


def _history(request: Any) -> str | list[dict[str, Any]]:
  """Returns a call's prompt, or its messages in a form that can be compared."""
  if request.n != 1:
    raise CallError(400, f"n = {request.n}: must be 1")
  if request.has_logprobs:
    raise CallError(400, "logprobs: must be left out; the run records them")
  if request.chat is not None:
    names = {
        call["id"]: call["function"]["name"]
        for message in request.chat
        for call in message.get("tool_calls", ())
    }
    return [_observed(message, names) for message in request.chat]
  if not isinstance(request.prompt, str):
    raise CallError(400, "prompt: must be a text")
  return request.prompt


def _observed(
    message: Mapping[str, Any], names: Mapping[str, str] = {}
) -> dict[str, Any]:
  """Returns a message without the parts that clients drop or change.

  Args:
    message: `role`, `content`, and optionally `tool_calls`.
    names: called tool, by the call's id.
  """
  out = {"role": message["role"], "content": message["content"] or ""}
  name = message.get("name")
  if message["role"] == "tool":
    name = names.get(message.get("tool_call_id")) or name
  if name is not None:
    out["name"] = name
  if message["role"] == "assistant":
    # LiteLLM moves the thinking part out of the text.
    out["content"] = out["content"].rpartition("</think>")[2].strip()
  if message.get("tool_calls"):
    out["tool_calls"] = []
    for call in message["tool_calls"]:
      name, given = call["function"]["name"], call["function"]["arguments"]
      try:
        given = json.loads(given) if isinstance(given, str) else given
      except ValueError:  # As the agent wrote it.
        pass
      function = {"name": name, "arguments": given}
      out["tool_calls"].append({"type": "function", "function": function})
  return out


def _completion(
    request: Any,
    text: str,
    usage: tuple[int, int] = (0, 0),
    *,
    stopped: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the assistant's message for a text, and the completion with it."""
  id = f"{time.monotonic_ns():x}"
  message = _api("completions").answer(request, text, id)
  answer = _api("completions").completion(
      request,
      id=id,
      created_s=time.time(),
      model=request.model,
      message=message,
      usage=usage,
      stopped=stopped,
  )
  return message, answer


def _api(name: str) -> Any:
  """Returns a module of `chat_api`, whose packages take seconds to import."""
  return importlib.import_module(f"tba_jax.chat_api.{name}")


def preload(make: Any, asked: str) -> None:
  """Imports dialects for all later episodes.

  Args:
    make: the agent's class; dialects that its module mentions are imported.
    asked: dialect of an episode that another process could not serve, or "".

  Raises:
    ImportError: the extra `serve` is not installed.
  """
  try:
    _api("completions")
  except ImportError as error:
    raise ImportError(f"{error}: pip install 'tba_jax[serve]'") from error
  try:
    text = inspect.getsource(inspect.getmodule(make))
  except (OSError, TypeError):
    text = ""
  for dialect, word in _MENTIONS.items():
    if dialect == asked or word in text.lower():
      _preloaded.add(dialect)
      with contextlib.suppress(ImportError):  # Answered to the agent's call.
        _api(dialect)
  if asked:  # An agent of several dialects waits for further ones.
    _preloaded.update(_MENTIONS)


class _Handler(server.BaseHTTPRequestHandler):
  """Translates a call between its dialect and chat completions."""

  protocol_version = "HTTP/1.1"
  timeout = 60.0  # Seconds, for each read.

  def __init__(
      self, environment: AgentEnvironment, prefix: str, *arguments: Any
  ):
    self._environment, self._prefix = environment, prefix
    super().__init__(*arguments)

  def log_message(self, *arguments: Any) -> None:
    """Prints nothing."""

  def do_GET(self) -> None:  # pylint: disable=invalid-name
    if self._path() != "models":
      self._send_error(404, f"{self.path}: there is no such path")
      return
    model = {"id": "policy", "object": "model", "owned_by": "tba_jax"}
    self._send({"object": "list", "data": [{**model, "created": 0}]})

  def do_POST(self) -> None:  # pylint: disable=invalid-name
    try:
      size = int(self.headers.get("Content-Length", "-1"))
      if not 0 <= size <= _MAX_BYTES:
        self.close_connection = True  # The body is not read.
        raise CallError(413, f"Content-Length: must be 0 to {_MAX_BYTES}")
      body = _api("strict_json").parse_json(self.rfile.read(size))
      self._answer(body)
    except CallError as error:
      self._send_error(error.status, str(error))
    except ValueError as error:
      self._send_error(400, str(error))
    except ImportError as error:
      self._send_error(501, f"{error}: pip install 'tba_jax[serve]'")
    except OSError:  # The client is gone.
      self.close_connection = True

  def _path(self) -> str:
    """Returns the path below the prefix; "" elsewhere."""
    path = self.path.partition("?")[0]
    is_here = path.startswith(self._prefix)
    return path.removeprefix(self._prefix) if is_here else ""

  def _answer(self, body: dict[str, Any]) -> None:
    if self._path() not in _DIALECTS:
      raise CallError(404, f"{self.path}: must be {', '.join(_DIALECTS)}")
    name = _DIALECTS[self._path()]
    if self._environment.lacks(name):
      raise CallError(503, f"{name} is not loaded")
    dialect = _api(name) if name else None
    request = _api("chat_requests").read_completions(
        dialect.to_chat(body) if dialect else body
    )
    answer = self._environment.answer(request)
    if dialect:
      answer = dialect.reply(body, answer)
    if not request.stream:
      self._send(answer)
      return
    if dialect:
      events = dialect.events(answer)
    else:
      has_usage = request.stream_options.include_usage
      events = _api("completions").events(answer, has_usage=has_usage)
    self._write(200, "text/event-stream", "".join(events).encode())

  def _send(self, value: Any) -> None:
    self._write(200, "application/json", json.dumps(value).encode())

  def _send_error(self, status: int, text: str) -> None:
    error = {"type": "invalid_request_error", "message": text}
    data = json.dumps({"type": "error", "error": error}).encode()
    self._write(status, "application/json", data)

  def _write(self, status: int, kind: str, data: bytes) -> None:
    self.send_response(status)
    self.send_header("Content-Type", kind)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

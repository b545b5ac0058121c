# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Handlers of episodes, and of the APIs that their agents use."""

from collections.abc import Callable
import dataclasses
import functools
import importlib
from typing import Any
import uuid

from starlette import concurrency
from starlette import requests
from starlette import responses

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import completions
from tba_jax.chat_api import strict_json
from tba_jax.serving import handlers
from tba_jax.serving import kinds
from tba_jax.serving import schemas

# A schema, or a function that returns the module of a dialect.
_Kind = type[chat_requests.CompletionRequest] | Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class _Call:
  """An agent's call.

  raw: JSON of the completion's request.
  body: request as sent; None if it was sent as a completion.
  dialect: module that translated it, see `dialects.py`; None likewise.
  """

  call: chat_requests.CompletionRequest
  raw: bytes
  body: dict[str, Any] | None = None
  dialect: Any = None


class AgentHandlers(handlers.Handlers):
  """Episodes below /api/v1/, calls below /episodes/ID/v1/ and /v1/."""

  def routes(self) -> list[tuple[str, str, Any]]:
    """Returns path (below /api/v1/), method and handler of each route."""
    return [
        ("create_episode", "POST", self._create),
        ("episodes/{episode}", "GET", self._get),
        ("episodes/{episode}/finish", "POST", self._finish),
    ]

  def openai_routes(self, *, in_episode: bool) -> list[tuple[str, str, Any]]:
    """Returns the routes of OpenAI's API, inside an episode or outside any."""
    models, call = self._models, self._call
    if in_episode:
      models, call = self._models_in_episode, self._call_in_episode
    partial = functools.partial
    return [
        ("models", "GET", models),
        ("chat/completions", "POST", partial(call, chat_requests.ChatRequest)),
        ("completions", "POST", partial(call, chat_requests.TextRequest)),
        ("responses", "POST", partial(call, _responses)),
    ]

  def anthropic_routes(self, *, in_episode: bool) -> list[tuple[str, str, Any]]:
    """Returns the routes of Anthropic's API."""
    call = self._call_in_episode if in_episode else self._call
    return [
        ("messages", "POST", functools.partial(call, _messages)),
        ("messages/count_tokens", "POST", self._count_tokens),
    ]

  async def _create(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.CreateEpisode, request)
    sampler, path = body.sampling_session_id, body.model_path
    if sampler:
      self.path_of_sampler(sampler)
    elif path:
      self.spec_of_checkpoint(path)
    else:
      self.check_base(body.base_model)
    episode = handlers.idempotency_key(request) or str(uuid.uuid4())
    spec = {"sampler": sampler, "path": path, **self._group_of(body)}
    await concurrency.run_in_threadpool(
        functools.partial(
            self.registry.add_episode,
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

  def _group_of(self, body: schemas.CreateEpisode) -> dict[str, Any]:
    """Returns an episode's replay, group and group size; "" and 0 = none."""
    replay = self.replay_into(body.into, body.sampling_session_id)
    count = body.num_episodes
    if not replay:
      if body.group or count:
        raise ValueError(
            'group, num_episodes: must come with "into": "replay", or be left'
            " out"
        )
      return {"replay": "", "together": "", "num_episodes": 0}
    least = self.engine.replays.least_completions(replay)
    if not body.group or count < least:
      raise ValueError(
          f"group = {body.group!r}, num_episodes = {count}: must be a name, and"
          f" {least} episodes or more"
      )
    together = f"{replay}/{body.group}"
    return {"replay": replay, "together": together, "num_episodes": count}

  async def _get(self, request: requests.Request) -> Any:
    return await concurrency.run_in_threadpool(
        self.engine.episodes.read, request.path_params["episode"]
    )

  async def _finish(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.FinishEpisode, request)
    episode = request.path_params["episode"]
    self._state(episode)
    raw = body.model_dump_json().encode()
    submitted = await self.submit(
        kinds.FINISH, episode, None, raw, name="finish"
    )
    return await self.result_of(submitted.id)

  def _state(self, episode: str) -> tuple[dict[str, Any], Any]:
    state = self.registry.episode(episode)
    if state is None:
      raise LookupError(f"episode {episode}: there is none")
    return state

  def _open_episode(self, request: requests.Request) -> str:
    """Returns the unfinished episode of a URL."""
    episode = request.path_params["episode"]
    if self._state(episode)[1] is not None:
      raise handlers.StatusError(
          handlers.GONE, f"episode {episode} has finished"
      )
    return episode

  async def _models_in_episode(self, request: requests.Request) -> Any:
    self._open_episode(request)
    return await self._models(request)

  async def _models(self, request: requests.Request) -> Any:
    del request
    model = {
        "id": self.engine.base.name,
        "object": "model",
        "created": 0,
        "owned_by": "tba_jax",
    }
    return {"object": "list", "data": [model]}

  async def _count_tokens(self, request: requests.Request) -> Any:
    """Returns the tokens of a call in Anthropic's form, which is not made."""
    body = strict_json.parse_json(await self.body(request))
    episode = None
    if "episode" in request.path_params:
      episode = self._open_episode(request)

    def count() -> Any:
      dialect = _messages()
      chat = dialect.to_chat(body, counts=True)
      call = strict_json.read(chat_requests.ChatRequest, chat)
      self._check_model(call, in_episode=episode is not None)
      return dialect.count(self.engine.episodes.count_tokens(call, episode))

    return await concurrency.run_in_threadpool(count)

  async def _read_call(self, kind: _Kind, request: requests.Request) -> _Call:
    """Returns a call in any of the forms that agents speak."""
    if isinstance(kind, type):
      return _Call(*await self.read(kind, request))
    body = await self.body(request)

    def translate() -> _Call:
      sent, dialect = strict_json.parse_json(body), kind()
      raw = strict_json.to_json(dialect.to_chat(sent))
      return _Call(
          strict_json.read(chat_requests.ChatRequest, raw), raw, sent, dialect
      )

    return await concurrency.run_in_threadpool(translate)

  def _check_model(
      self, call: chat_requests.CompletionRequest, *, in_episode: bool
  ) -> None:
    name = self.engine.base.name
    if call.model == name:
      return
    if in_episode:
      raise ValueError(f"model = {call.model!r}: must be {name!r}")
    if self.registry.checkpoint(call.model) is None:
      raise LookupError(
          f"model = {call.model!r}: must be {name!r}, or a path that"
          " save_weights_for_sampler has returned"
      )

  async def _call_in_episode(
      self, kind: _Kind, request: requests.Request
  ) -> Any:
    """Answers an agent's call, once it is done."""
    sent = await self._read_call(kind, request)
    call, raw = sent.call, sent.raw
    episode = self._open_episode(request)
    self._check_model(call, in_episode=True)
    if call.n != 1:
      raise ValueError(f"n = {call.n}: must be 1; play another episode")
    id = None
    # The official client counts the retries of a call in this header.
    if request.headers.get("x-stainless-retry-count", "0") != "0":
      id = await concurrency.run_in_threadpool(
          self.journal.same_body, episode, raw
      )
    if id is None:
      key = handlers.idempotency_key(request)
      id = (await self.submit(kinds.CALL, episode, None, raw, key)).id
    return await self._answered(sent, id)

  async def _call(self, kind: _Kind, request: requests.Request) -> Any:
    """Answers a call outside any episode."""
    sent = await self._read_call(kind, request)
    self._check_model(sent.call, in_episode=False)
    key = handlers.idempotency_key(request)
    submitted = await self.submit(
        kinds.ANSWER, kinds.ANSWERS, None, sent.raw, key
    )
    return await self._answered(sent, submitted.id)

  async def _answered(self, sent: _Call, id: str) -> Any:
    """Returns the answer to a submitted call, once it is done."""
    answer = (await self.result_of(id))["answer"]
    if sent.dialect is not None:
      answer = sent.dialect.reply(sent.body, answer)
    if not sent.call.stream:
      return answer
    if sent.dialect is not None:
      events = sent.dialect.events(answer)
    else:
      has_usage = sent.call.stream_options.include_usage
      events = completions.events(answer, has_usage=has_usage)
    return responses.StreamingResponse(events, media_type="text/event-stream")


# The official clients, with the types of the dialects, take seconds to import.


def _messages() -> Any:
  return _dialect("anthropic_messages")


def _responses() -> Any:
  return _dialect("openai_responses")


def _dialect(name: str) -> Any:
  """Returns a dialect's module; its client's package loads at first use.

  Raises StatusError if the package is missing.
  """
  try:
    return importlib.import_module(f"tba_jax.chat_api.{name}")
  except ImportError as error:
    raise handlers.StatusError(
        501, f"{error}: pip install 'tba_jax[serve]' on the server"
    ) from error

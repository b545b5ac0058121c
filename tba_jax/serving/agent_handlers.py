# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Handlers of episodes, and of the OpenAI API that their agents use."""

import functools
from typing import Any
import uuid

from starlette import concurrency
from starlette import requests
from starlette import responses

from tba_jax.serving import completions
from tba_jax.serving import handlers
from tba_jax.serving import kinds
from tba_jax.serving import schemas


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
    return [
        ("models", "GET", models),
        (
            "chat/completions",
            "POST",
            functools.partial(call, schemas.ChatRequest),
        ),
        ("completions", "POST", functools.partial(call, schemas.TextRequest)),
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

  async def _call_in_episode(
      self, kind: type[schemas.CompletionRequest], request: requests.Request
  ) -> Any:
    """Answers an agent's call, once it is done."""
    call, raw = await self.read(kind, request)
    episode, name = self._open_episode(request), self.engine.base.name
    if call.model != name:
      raise ValueError(f"model = {call.model!r}: must be {name!r}")
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
    return await self._answered(call, id)

  async def _call(
      self, kind: type[schemas.CompletionRequest], request: requests.Request
  ) -> Any:
    """Answers a call outside any episode."""
    call, raw = await self.read(kind, request)
    name = self.engine.base.name
    if call.model != name and self.registry.checkpoint(call.model) is None:
      raise LookupError(
          f"model = {call.model!r}: must be {name!r}, or a path that"
          " save_weights_for_sampler has returned"
      )
    key = handlers.idempotency_key(request)
    submitted = await self.submit(kinds.ANSWER, kinds.ANSWERS, None, raw, key)
    return await self._answered(call, submitted.id)

  async def _answered(self, call: schemas.CompletionRequest, id: str) -> Any:
    """Returns the answer to a submitted call, once it is done."""
    answer = (await self.result_of(id))["answer"]
    if not call.stream:
      return answer
    has_usage = call.stream_options.include_usage
    return responses.StreamingResponse(
        completions.events(answer, has_usage=has_usage),
        media_type="text/event-stream",
    )

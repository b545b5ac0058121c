# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Handlers of replays."""

import functools
from typing import Any

from starlette import concurrency
from starlette import requests

from tba_jax.serving import handlers
from tba_jax.serving import kinds
from tba_jax.serving import schemas


class ReplayHandlers(handlers.Handlers):
  """Creation, state, rewards, start and stop of replays."""

  def routes(self) -> list[tuple[str, str, Any]]:
    """Returns path (below /api/v1/), method and handler of each route."""
    run = functools.partial
    return [
        ("create_replay", "POST", self._create),
        ("replays/{replay}", "GET", self._state),
        ("replays/{replay}/reward", "POST", self._reward),
        ("replays/{replay}/start", "POST", run(self._run, kinds.START)),
        ("replays/{replay}/stop", "POST", run(self._run, kinds.STOP)),
    ]

  async def _create(self, request: requests.Request) -> Any:
    body, raw = await self.read(schemas.CreateReplay, request)
    self.check_session(body.session_id)
    self.check_base(body.base_model)
    model = await concurrency.run_in_threadpool(self.engine.replays.add, body)
    if body.model_path:
      load = schemas.LoadWeights(path=body.model_path, optimizer=False)
      raw = load.model_dump_json().encode()
      submitted = await self.submit(kinds.LOAD, model, 0, raw)
      await self.result_of(submitted.id)
      # The sampling session points at this version before its first use.
      submitted = await self.submit(kinds.SAVE_SAMPLER, model, 1, kinds.PUBLISH)
      await self.result_of(submitted.id)
    else:
      submitted = await self.submit(kinds.CREATE, model, 0, raw)
    return {
        "request_id": submitted.id,
        "replay_id": model,
        "sampling_session_id": kinds.newest_sampler(model),
    }

  def _replay(self, request: requests.Request) -> str:
    """Returns the replay of a URL."""
    replay = request.path_params["replay"]
    if "replay" not in (self.registry.model(replay) or {}):
      raise LookupError(f"replay {replay}: there is none")
    return replay

  async def _state(self, request: requests.Request) -> Any:
    replay = self._replay(request)
    after = request.query_params.get("after", "0")
    if not after.isdecimal():
      raise ValueError(f"after = {after!r}: must be a whole number from 0")
    return await concurrency.run_in_threadpool(
        self.engine.replays.state, replay, int(after)
    )

  async def _run(self, kind: str, request: requests.Request) -> Any:
    await self.body(request)
    submitted = await self.submit(kind, self._replay(request), None, b"{}")
    return await self.result_of(submitted.id)

  async def _reward(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.RewardSample, request)
    submitted = await concurrency.run_in_threadpool(
        self.engine.replays.reward,
        self._replay(request),
        body.request_id,
        body.rewards,
    )
    return {"request_id": submitted.id}

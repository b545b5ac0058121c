# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP application of a server: routes, key check and error handlers."""

from collections.abc import AsyncIterator
import contextlib
import threading
from typing import Any

from starlette import applications
from starlette import exceptions
from starlette import requests
from starlette import routing

from tba_jax.serving import agent_handlers
from tba_jax.serving import engine_ports
from tba_jax.serving import handlers
from tba_jax.serving import replay_handlers
from tba_jax.serving import tinker_handlers


def make(
    engine: engine_ports.EnginePort,
    waiters: handlers.Waiters,
    thread: threading.Thread,
    key: str,
) -> applications.Starlette:
  """Returns the application that a server runs.

  Args:
    engine: parts of the server, run by `thread`.
    waiters: list of waiting handlers, opened when the application starts.
    thread: the engine's thread; the server is healthy while it lives.
    key: API key, required in every request.
  """

  async def healthz(request: requests.Request) -> Any:
    del request
    if not thread.is_alive():
      raise handlers.StatusError(
          handlers.NOT_NOW, "the engine has ended; see the server's log"
      )
    return {"status": "ok"}

  @contextlib.asynccontextmanager
  async def lifespan(app: applications.Starlette) -> AsyncIterator[None]:
    del app
    waiters.open()
    yield

  agents = agent_handlers.AgentHandlers(engine, waiters)
  rows = [
      ("healthz", "GET", healthz),
      *tinker_handlers.TinkerHandlers(engine, waiters).routes(),
      *replay_handlers.ReplayHandlers(engine, waiters).routes(),
      *agents.routes(),
  ]
  routes = [
      routing.Route(
          f"/api/v1/{path}", handlers.guarded(handler, key), methods=[method]
      )
      for path, method, handler in rows
  ]
  # /oai/api is Tinker's prefix.
  for prefix in ("/episodes/{episode}", "", "/oai/api"):
    in_episode = prefix.startswith("/episodes")
    for dialect, with_errors in (
        (agents.openai_routes, handlers.as_openai),
        (agents.anthropic_routes, handlers.as_anthropic),
    ):
      for path, method, handler in dialect(in_episode=in_episode):
        handler = with_errors(handlers.guarded(handler, key))
        routes.append(
            routing.Route(f"{prefix}/v1/{path}", handler, methods=[method])
        )
  return applications.Starlette(
      routes=routes,
      exception_handlers={
          exceptions.HTTPException: handlers.http_error,
          Exception: handlers.server_error,
      },
      lifespan=lifespan,
  )

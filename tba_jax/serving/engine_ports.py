# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Interfaces of the engine that HTTP handlers use; `Engine` provides them."""

from collections.abc import Sequence
from typing import Any, Protocol

from tba_jax.chat_api import chat_requests
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import request_queue
from tba_jax.serving import saved_weights
from tba_jax.serving import schemas


class BasePort(Protocol):
  """See `ServedBase`."""

  name: str
  tokenizer_id: str

  @property
  def family(self) -> str:
    ...

  @property
  def max_tokens(self) -> int:
    ...

  def spec_of(
      self, model: str, adapters: schemas.LoraConfig | None
  ) -> dict[str, Any]:
    ...


class EpisodePort(Protocol):
  """See `AgentEpisodes`."""

  def read(self, id: str) -> dict[str, Any]:
    ...

  def count_tokens(
      self, call: chat_requests.CompletionRequest, id: str | None
  ) -> int:
    ...


class ReplayPort(Protocol):
  """See `Replays`."""

  def add(self, body: schemas.CreateReplay) -> str:
    ...

  def least_completions(self, model: str) -> int:
    ...

  def reward(
      self, model: str, id: str, rewards: Sequence[float]
  ) -> request_journal.ServerRequest:
    ...

  def state(self, model: str, after: int) -> dict[str, Any]:
    ...


class EnginePort(Protocol):
  """See `Engine`."""

  registry: registry_lib.Registry
  journal: request_journal.RequestJournal
  queue: request_queue.RequestQueue
  base: BasePort
  weights: saved_weights.SavedWeights
  episodes: EpisodePort
  replays: ReplayPort

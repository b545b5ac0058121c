# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents' calls: sampling for them, and the episodes that they continue."""

import collections
from collections.abc import Mapping
import dataclasses
import functools
import json
from typing import Any

import numpy as np

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import completions
from tba_jax.chat_api import strict_json
from tba_jax.serving import episodes
from tba_jax.serving import kinds
from tba_jax.serving import protobufs
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import sample_batches
from tba_jax.serving import schemas
from tba_jax.serving import served_base

# Most episodes in memory; others are rebuilt from the journal.
_EPISODES = 256


@dataclasses.dataclass
class AgentEpisodes:
  """Episodes of a server; `read` and `count_tokens` are for any thread."""

  base: served_base.ServedBase
  registry: registry_lib.Registry
  journal: request_journal.RequestJournal
  samples: sample_batches.SampleBatches
  _episodes: collections.OrderedDict[str, episodes.Episode] = dataclasses.field(
      default_factory=collections.OrderedDict, init=False
  )

  def read(self, id: str) -> dict[str, Any]:
    """Returns rows, counts and outcome of an episode as JSON; for any thread.

    Raises:
      LookupError: the episode does not exist.
    """
    state = self.registry.episode(id)
    if state is None:
      raise LookupError(
          f"episode {id}: there is none; create_episode makes one"
      )
    if state[1] is not None:
      return state[1]
    rows = self._restore(id).to_json()
    return {"reward": None, "finished": False, **rows}

  def count_tokens(
      self, call: chat_requests.CompletionRequest, id: str | None
  ) -> int:
    """Returns the tokens that the model would see in a call; for any thread.

    Args:
      id: its episode; None = outside any.

    Raises:
      ValueError: the call is invalid or too long.
    """
    episode = self._new() if id is None else self._restore(id)
    return len(episode.begin(call).tokens)

  def job(
      self, request: request_journal.ServerRequest
  ) -> sample_batches.SampleJob:
    """Returns the sampling job of an agent's call.

    Raises:
      ValueError: the call is invalid or too long, or its episode has finished.
    """
    call = chat_requests.read_completions(strict_json.parse_json(request.body))
    if request.kind == kinds.CALL:
      spec, outcome = self.registry.episode(request.owner)
      if outcome is not None:
        raise ValueError(f"episode {request.owner} has finished")
      path = spec["path"]
      if spec["sampler"]:
        path = sample_batches.path_of(self.registry, spec["sampler"])
      turn = self._episode(request.owner).begin(call)
    else:
      path = "" if call.model == self.base.name else call.model
      turn = self._new().begin(call)
    sampling = self.base.config.sampling
    P, T = sampling.max_prompt_tokens, sampling.max_completion_tokens
    room = T - (len(turn.tokens) - turn.start)
    if len(turn.tokens) > P or room < 1:
      raise ValueError(
          f"{strict_json.TOO_LONG}: the call has {len(turn.tokens)} tokens,"
          f" {len(turn.tokens) - turn.start} of them after the episode's first"
          f" prompt; must be up to config.sampling.max_prompt_tokens = {P}, and"
          f" fewer than config.sampling.max_completion_tokens = {T}"
      )
    return sample_batches.SampleJob(
        request.id,
        request.owner,
        path,
        self.samples.settings(call, None, call.stop),
        sample_batches.decode_request(
            request.id,
            np.asarray(turn.tokens, np.int32),
            call.n,
            call.seed,
            min(call.most_tokens or T, room),
        ),
        pack=functools.partial(self._answer, request, call, turn, path),
    )

  def end(self, request: request_journal.ServerRequest) -> Mapping[str, Any]:
    """Stores an episode's outcome and drops its calls; returns its spec."""
    id = request.owner
    reward = strict_json.read(schemas.FinishEpisode, request.body).reward
    if self.registry.episode(id)[1] is None:
      rows = self._episode(id).to_json()
      outcome = {"reward": reward, "finished": True, **rows}
      self.registry.finish_episode(id, outcome)
    self.journal.drop_bodies(id, request.seq)
    self.forget(id)
    return self.registry.episode(id)[0]

  def forget(self, id: str) -> None:
    """Drops an episode from memory; it is rebuilt when next needed."""
    self._episodes.pop(id, None)

  def _episode(self, id: str) -> episodes.Episode:
    if id not in self._episodes:
      while len(self._episodes) >= _EPISODES:
        self._episodes.popitem(last=False)
      self._episodes[id] = self._restore(id)
    self._episodes.move_to_end(id)
    return self._episodes[id]

  def _restore(self, id: str) -> episodes.Episode:
    """Returns an episode, rebuilt from the calls in the journal.

    Calls are added in the order of their answers: concurrent calls are batched
    by their settings, not by their numbers.
    """
    episode = self._new()
    for request, result in self.journal.answered(id, kinds.CALL):
      call = chat_requests.read_completions(
          strict_json.parse_json(request.body)
      )
      saved = json.loads(result)
      episode.add(saved["record"], call.chat, saved["message"])
    return episode

  def _new(self) -> episodes.Episode:
    most = self.base.config.sampling.max_prompt_tokens
    return episodes.Episode(self.base.policy.tokenizer, most)

  def _answer(
      self,
      request: request_journal.ServerRequest,
      call: chat_requests.CompletionRequest,
      turn: episodes.Turn,
      path: str,
      result: protobufs.SampleResult,
      step: int,
  ) -> bytes:
    """Adds an answered call to its episode; returns the bytes to journal."""
    tokenizer, is_kept = self.base.policy.tokenizer, request.kind == kinds.CALL
    answers = []
    for n, tokens in enumerate(result.tokens):
      ids = tokens.tolist()
      episode = self._episode(request.owner) if is_kept else self._new()
      record = episode.end(
          turn,
          ids,
          result.logprobs[n].tolist(),
          stopped=result.stopped[n],
          version=step,
      )
      text = tokenizer.decode(tokenizer.split_stop(ids)[0], within=True)
      stopped_by = None
      for stop in call.stop:
        text, cut, _ = text.partition(stop)
        stopped_by = stop if cut else stopped_by
      id = f"{request.id}-{n}" if n else request.id
      message = completions.answer(call, text, id)
      answer = completions.completion(
          call,
          id=request.id,
          created_s=request.accepted_s,
          model=self.base.name if is_kept else path or self.base.name,
          message=message,
          usage=(len(turn.tokens), len(ids)),
          stopped=record["stopped"],
          tokens=[tokenizer.decode([i]) for i in ids],
          record=record,
          prompt_ids=[int(i) for i in turn.tokens],
          stop=stopped_by,
      )
      answers.append(answer)
    if not is_kept:
      saved = {"answer": completions.join(answers)}
    else:
      episode.add(record, call.chat, message)
      saved = {"record": record, "message": message, "answer": answer}
    return json.dumps(saved).encode()

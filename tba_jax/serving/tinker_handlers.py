# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Handlers of the Tinker API.

A handler checks a request, journals it and answers at once; `retrieve_future`
waits for its result. Of a model's numbered request, only the address is checked
on arrival (a JSON pass is parsed whole). The rest is read in its turn, where an
invalid request fails and uses up its number.

Source: package `tinker` 0.38, whose client works unchanged.
"""

from collections.abc import Sequence
import datetime
import functools
import json
import re
from typing import Any
import uuid

from starlette import concurrency
from starlette import requests
from starlette import responses

from tba_jax.chat_api import strict_json
from tba_jax.serving import handlers
from tba_jax.serving import kinds
from tba_jax.serving import protobufs
from tba_jax.serving import request_journal
from tba_jax.serving import saved_weights
from tba_jax.serving import schemas

# Seconds that `retrieve_future` waits; the official client allows 45.
_POLL_S = 20.0
# Request numbers reserved for each clone of a sampling client.
_NUMBERS_OF_CLONE = 10**9
_CHECKPOINT_TYPES = {
    saved_weights.WEIGHTS: "training",
    saved_weights.SAMPLER_WEIGHTS: "sampler",
    saved_weights.EXTERNAL_WEIGHTS: "external",
}
# Kinds of requests that clients may send to the model of a replay.
_OF_REPLAYS = (
    kinds.FORWARD, kinds.SAVE, kinds.SAVE_SAMPLER, kinds.EXPORT,
)  # fmt: skip


class TinkerHandlers(handlers.Handlers):
  """Sessions, models, checkpoints, sampling and results."""

  def routes(self) -> list[tuple[str, str, Any]]:
    """Returns path (below /api/v1/), method and handler of each route."""
    of_model = [kinds.OPTIM_STEP, kinds.SAVE, kinds.SAVE_SAMPLER, kinds.EXPORT]
    run = "training_runs/{model}"
    return [
        ("get_server_capabilities", "GET", self._capabilities),
        ("client/config", "POST", self._client_config),
        ("client/dynamic_config", "POST", self._dynamic_config),
        ("telemetry", "POST", self._telemetry),
        ("create_session", "POST", self._create_session),
        ("session_heartbeat", "POST", self._heartbeat),
        ("sessions/{session}", "GET", self._session),
        ("sessions/{session}/finish", "POST", self._finish_session),
        ("create_model", "POST", self._create_model),
        ("get_info", "POST", self._get_info),
        ("forward", "POST", functools.partial(self._pass, schemas.Forward)),
        (
            "forward_backward",
            "POST",
            functools.partial(self._pass, schemas.ForwardBackward),
        ),
        *(
            (kind, "POST", functools.partial(self._of_model, kind))
            for kind in of_model
        ),
        ("load_weights", "POST", self._load_weights),
        ("weights_info", "POST", self._weights_info),
        ("create_sampling_session", "POST", self._create_sampling_session),
        ("samplers/{sampler}", "GET", self._sampler),
        ("asample", "POST", self._asample),
        ("retrieve_future", "POST", self._retrieve_future),
        ("retrieve_futures", "POST", self._retrieve_futures),
        ("sessions", "GET", self._sessions),
        ("checkpoints", "GET", self._all_checkpoints),
        ("training_runs", "GET", self._training_runs),
        (run, "GET", self._training_run),
        (f"{run}/checkpoints", "GET", self._checkpoints),
        (f"{run}/checkpoints/{{kind}}/{{name}}", "DELETE", self._delete),
    ]

  # The server and its sessions.

  async def _capabilities(self, request: requests.Request) -> Any:
    del request
    model = {
        "model_name": self.engine.base.name,
        "max_context_length": self.engine.base.max_tokens,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}

  async def _client_config(self, request: requests.Request) -> Any:
    await self.body(request)
    most = handlers.MOST_BYTES // 2
    return {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        # A pass should arrive whole if it can, since groups must not be split.
        "fwdbwd_max_chunk_len": 2**20,
        "fwdbwd_max_chunk_bytes_count": most,
        "proto_compress_fwdbwd": False,
        "custom_loss_server_side": False,
    }

  async def _dynamic_config(self, request: requests.Request) -> Any:
    await self.body(request)
    return {
        "refresh_interval_sec": 3600,
        "sample_cancel_enabled": False,
    }

  async def _telemetry(self, request: requests.Request) -> Any:
    # Read and discarded.
    await self.body(request, handlers.MOST_OF_JSON_PASS)
    return {"status": "accepted"}

  async def _create_session(self, request: requests.Request) -> Any:
    await self.read(strict_json.OpenMessage, request)
    session = str(uuid.uuid4())
    await concurrency.run_in_threadpool(self.registry.add_session, session)
    return {"type": "create_session", "session_id": session}

  async def _heartbeat(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.OfSession, request)
    self.check_session(body.session_id)
    return {"type": "session_heartbeat"}

  async def _session(self, request: requests.Request) -> Any:
    session = request.path_params["session"]
    if self.registry.session(session) is None:
      raise LookupError(f"session {session}: there is none")
    return {
        "training_run_ids": self.registry.models_of(session),
        "sampler_ids": self.registry.samplers_of(session),
    }

  async def _finish_session(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.FinishSession, request)
    session = self.check_session(request.path_params["session"])
    self.registry.finish_session(session, json.dumps(body.reason))
    return responses.Response(status_code=204)

  # Models.

  async def _create_model(self, request: requests.Request) -> Any:
    body, raw = await self.read(schemas.CreateModel, request)
    session = self.check_session(body.session_id)
    model = f"{session}:train:{body.model_seq_id}"
    self.check_base(body.base_model)
    spec = self.engine.base.spec_of(model, body.lora_config)
    return await self._make(model, session, spec, body, kinds.CREATE, raw)

  async def _make(
      self,
      model: str,
      session: str,
      spec: dict[str, Any],
      body: schemas.CreateModel | schemas.CreateByLoad,
      kind: str,
      raw: bytes,
  ) -> dict[str, Any]:
    """Registers a model, and submits the request that creates it."""
    spec = {**spec, "user_metadata": body.user_metadata}
    self.registry.add_model(model, session, spec)
    submitted = await self.submit(kind, model, 0, strict_json.in_one_form(raw))
    return {"request_id": submitted.id, "model_id": model}

  async def _get_info(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.OfModel, request)
    spec, base = self.spec_of_model(body.model_id), self.engine.base
    return {
        "type": "get_info",
        "model_data": {
            "arch": base.family,
            "model_name": base.name,
            "tokenizer_id": base.tokenizer_id,
        },
        "model_id": body.model_id,
        "is_lora": spec["rank"] > 0,
        "lora_rank": spec["rank"],
        "model_name": base.name,
    }

  async def _pass(
      self,
      form: type[schemas.Forward | schemas.ForwardBackward],
      request: requests.Request,
  ) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0]
    is_proto = kind == protobufs.PROTO
    body = await self.body(
        request,
        handlers.MOST_BYTES if is_proto else handlers.MOST_OF_JSON_PASS,
    )

    def read() -> tuple[bytes, tuple[str, int, bool]]:
      packed = (
          body
          if is_proto
          else protobufs.pack_pass(strict_json.read(form, body))
      )
      return packed, protobufs.address_of_pass(packed)

    packed, address = await concurrency.run_in_threadpool(read)
    model, seq, is_forward = address
    kind = kinds.FORWARD if is_forward else kinds.FORWARD_BACKWARD
    return await self._accept(kind, model, seq, packed)

  async def _of_model(self, kind: str, request: requests.Request) -> Any:
    body, raw = await self.read(schemas.OfModel, request)
    raw = strict_json.in_one_form(raw)
    return await self._accept(kind, body.model_id, body.seq_id, raw)

  async def _accept(
      self, kind: str, model: str, seq: int, body: bytes
  ) -> dict[str, Any]:
    """Journals a model's request; `seq` 0 = the client gave no number."""
    spec = self.spec_of_model(model)
    if seq < 0:
      raise ValueError(f"seq_id = {seq}: must be 1 or more")
    if "replay" in spec and (seq or kind not in _OF_REPLAYS):
      raise ValueError(
          f"{kind} with seq_id = {seq}: the server numbers the requests of a"
          f" replay; must be {', '.join(_OF_REPLAYS)}, without seq_id"
      )
    submitted = await self.submit(kind, model, seq or None, body)
    return {"request_id": submitted.id, "model_id": model}

  async def _load_weights(self, request: requests.Request) -> Any:
    raw = await self.body(request)
    if strict_json.parse_json(raw).get("session_id") is None:
      body = strict_json.read(schemas.OfModel, raw)
      raw = strict_json.in_one_form(raw)
      return await self._accept(kinds.LOAD, body.model_id, body.seq_id, raw)
    # The load creates the model, with the checkpoint's spec.
    body = strict_json.read(schemas.CreateByLoad, raw)
    session = self.check_session(body.session_id)
    model = f"{session}:train:{body.model_seq_id}"
    if body.base_model is not None:
      self.check_base(body.base_model)
    spec = self.spec_of_checkpoint(body.path)
    return await self._make(model, session, spec, body, kinds.LOAD, raw)

  # Checkpoints.

  async def _weights_info(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.OfCheckpoint, request)
    spec = self.spec_of_checkpoint(body.tinker_path)
    return {
        "base_model": spec["base_model"],
        "is_lora": spec["rank"] > 0,
        "lora_rank": spec["rank"] or None,
        "train_unembed": not spec["rank"],
        "train_mlp": spec["train_mlp"],
        "train_attn": spec["train_attn"],
    }

  async def _training_run(self, request: requests.Request) -> Any:
    return self._run_info(request.path_params["model"])

  def _run_info(self, model: str) -> dict[str, Any]:
    spec = self.spec_of_model(model)
    newest = {c["checkpoint_type"]: c for c in self._listed(model)}
    return {
        "training_run_id": model,
        "base_model": spec["base_model"],
        "is_lora": spec["rank"] > 0,
        "lora_rank": spec["rank"] or None,
        "last_request_time": _iso(self.journal.last_request_s(model)),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": spec.get("user_metadata"),
        "model_owner": "",
    }

  async def _checkpoints(self, request: requests.Request) -> Any:
    model = request.path_params["model"]
    self.spec_of_model(model)
    return {"checkpoints": self._listed(model)}

  def _listed(self, model: str) -> list[dict[str, Any]]:
    """Returns the checkpoints of a model, oldest first."""
    rows = self.registry.checkpoints_of(model)
    return [_checkpoint_info(*row) for row in rows]

  async def _delete(self, request: requests.Request) -> Any:
    p = request.path_params
    path = f"{saved_weights.SCHEME}{p['model']}/{p['kind']}/{p['name']}"
    self.spec_of_checkpoint(path)
    await concurrency.run_in_threadpool(self.engine.weights.delete, path)
    return responses.Response(status_code=204)

  # Lists of all sessions, models and checkpoints, newest first.

  def _newest(
      self, request: requests.Request, table: str, limit: int
  ) -> tuple[Sequence[tuple[Any, ...]], dict[str, Any]]:
    """Returns a page of a table, and its cursor; `limit` is the default."""
    page = {"limit": limit, "offset": 0}
    for name, least in (("limit", 1), ("offset", 0)):
      text = request.query_params.get(name, str(page[name]))
      if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ValueError(
            f"{name} = {text!r}: must be a whole number from {least}"
        )
      page[name] = int(text)
    rows, count = self.registry.newest(table, **page)
    return rows, {**page, "total_count": count}

  async def _sessions(self, request: requests.Request) -> Any:
    rows, _ = self._newest(request, "sessions", 20)
    return {"sessions": [session for (session,) in rows]}

  async def _training_runs(self, request: requests.Request) -> Any:
    rows, cursor = self._newest(request, "models", 20)
    runs = [self._run_info(model) for (model,) in rows]
    return {"training_runs": runs, "cursor": cursor}

  async def _all_checkpoints(self, request: requests.Request) -> Any:
    rows, cursor = self._newest(request, "checkpoints", 100)
    shown = [_checkpoint_info(*row) for row in rows]
    return {"checkpoints": shown, "cursor": cursor}

  # Sampling.

  async def _create_sampling_session(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.CreateSamplingSession, request)
    session, path = self.check_session(body.session_id), body.model_path
    if path:
      self.spec_of_checkpoint(path)
    else:
      self.check_base(body.base_model)
    sampler = f"{session}:sample:{body.sampling_session_seq_id}"
    if self.registry.sampler(sampler) not in (None, path):
      raise ValueError(f"{sampler} is of another model: take another number")
    self.registry.add_sampler(sampler, session, path)
    return {
        "type": "create_sampling_session",
        "sampling_session_id": sampler,
    }

  async def _sampler(self, request: requests.Request) -> Any:
    sampler = request.path_params["sampler"]
    path = self.path_of_sampler(sampler)
    return {
        "sampler_id": sampler,
        "base_model": self.engine.base.name,
        "model_path": path or None,
    }

  async def _asample(self, request: requests.Request) -> Any:
    body, raw = await self.read(schemas.Sample, request)
    sampler, count = body.sampling_session_id, body.num_samples
    self.path_of_sampler(sampler)
    kind, replay = kinds.SAMPLE, self.replay_into(body.into, sampler)
    if replay:
      kind = kinds.SAMPLE_INTO
      least = self.engine.replays.least_completions(replay)
      if count < least:
        raise ValueError(f"num_samples = {count}: must be {least} or more")
    # A request without a number is named by a UUID: no numbered one has its id.
    name = "" if body.seq_id is not None else str(uuid.uuid4())
    submitted = await self.submit(kind, sampler, body.seq_id, raw, name)
    return {
        "request_id": submitted.id,
        "sample_sequence_ids": [f"{submitted.id}:{i}" for i in range(count)],
    }

  # Results.

  async def _retrieve_future(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.OfRequest, request)
    id = body.request_id
    if self.journal.outcome(id) is None:
      raise handlers.StatusError(
          handlers.GONE, f"request {id} is not known, or forgotten"
      )
    outcome = await self.outcome(id, _POLL_S)
    if outcome is None:
      return responses.Response(
          strict_json.to_json(
              {
                  "type": "try_again",
                  "request_id": id,
                  "queue_state": "active",
              }
          ),
          handlers.NOT_YET,
          media_type="application/json",
      )
    if outcome.failure is not None:
      return outcome.failure
    # Large results take a while.
    return await concurrency.run_in_threadpool(_result, request, outcome)

  async def _retrieve_futures(self, request: requests.Request) -> Any:
    body, _ = await self.read(schemas.RetrieveFutures, request)
    sampler, after = body.target.sampling_session_id, body.prev_cursor
    self.path_of_sampler(sampler)
    first = body.target.cloned_sampler_id * _NUMBERS_OF_CLONE

    def read() -> list[tuple[int, str, bool]] | None:
      last = first + _NUMBERS_OF_CLONE - 1
      rows = self.journal.completions(sampler, after, first=first, last=last)
      return rows or None

    rows = await self.waiters.wait_for(
        sampler, read, min(body.timeout, _POLL_S)
    )
    states = [
        {
            "state": "failed" if failed else "finished",
            "request_id": id,
        }
        for _, id, failed in rows or ()
    ]
    cursor = rows[-1][0] if rows else after
    return {"completions": states, "cursor": cursor}


def _result(
    request: requests.Request, outcome: request_journal.RequestOutcome
) -> responses.Response:
  """Returns a result in the form that the client accepts."""
  to_json = {
      kinds.FORWARD: protobufs.pass_result_to_json,
      kinds.FORWARD_BACKWARD: protobufs.pass_result_to_json,
      kinds.SAMPLE: protobufs.sample_result_to_json,
  }.get(outcome.kind)
  if to_json is None:
    return responses.Response(outcome.result, media_type="application/json")
  if protobufs.PROTO in request.headers.get("accept", ""):
    return responses.Response(outcome.result, media_type=protobufs.PROTO)
  return responses.JSONResponse(to_json(outcome.result))


def _checkpoint_info(path: str, created_s: float) -> dict[str, Any]:
  _, kind, name = path.removeprefix(saved_weights.SCHEME).split("/")
  return {
      "checkpoint_id": f"{kind}/{name}",
      "checkpoint_type": _CHECKPOINT_TYPES[kind],
      "time": _iso(created_s),
      "tinker_path": path,
  }


def _iso(time_s: float) -> str:
  return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns sample requests into jobs, and decodes jobs of a version together."""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
from typing import Any
import zlib

import numpy as np

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import strict_json
from tba_jax.sampling import decode
from tba_jax.serving import kinds
from tba_jax.serving import protobufs
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import request_journal
from tba_jax.serving import saved_weights
from tba_jax.serving import schemas
from tba_jax.serving import served_base

# Most compiled samplers kept, keyed by settings, and most versions whose params
# stay on the devices.
_SAMPLERS, _VERSIONS = 8, 2


@dataclasses.dataclass(frozen=True)
class SampleSettings:
  """Sampling settings that a sampler is compiled for.

  top_k: number of most likely tokens to draw from; 0 = all.
  is_long: whether prompts may exceed the usual length, followed by one token.
  """

  temperature: float
  top_k: int
  top_p: float
  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...]
  is_long: bool = False


@dataclasses.dataclass(frozen=True)
class SampleJob:
  """Requested completions.

  owner: sampling session or episode.
  path: `tinker://` path of the version; "" for the base model.
  pack: function (result, optimizer steps of the version) -> journaled result.
  last_n: prompt tokens, from the end, that get log-probs; 0 = none.
  """

  id: str
  owner: str
  path: str
  settings: SampleSettings
  request: decode.Request
  pack: Callable[[protobufs.SampleResult, int], bytes]
  last_n: int = 0


@dataclasses.dataclass
class _OnDevice:
  """Params of a version on the devices: as trained, and as decoded."""

  params: Any
  step: int
  decoded: Any = None


@dataclasses.dataclass
class SampleBatches:
  """Decodes samples in batches; for the engine's thread."""

  base: served_base.ServedBase
  registry: registry_lib.Registry
  weights: saved_weights.SavedWeights
  _samplers: collections.OrderedDict[SampleSettings, decode.JaxSampler] = (
      dataclasses.field(default_factory=collections.OrderedDict, init=False)
  )
  # Keyed by path and the request that wrote it: a path may be overwritten.
  _versions: collections.OrderedDict[tuple[str, str], _OnDevice] = (
      dataclasses.field(default_factory=collections.OrderedDict, init=False)
  )

  def job(self, request: request_journal.ServerRequest) -> SampleJob:
    """Returns the job of a sample request; ValueError if it is invalid."""
    body = strict_json.read(schemas.Sample, request.body)
    tokens, params = body.prompt.ids, body.sampling_params
    last_n = body.prompt_logprobs_last_n
    job = SampleJob(
        request.id,
        request.owner,
        path_of(self.registry, request.owner),
        self.settings(params, *params.stops),
        decode_request(
            request.id,
            tokens,
            body.num_samples,
            params.seed,
            params.max_tokens,
        ),
        pack=functools.partial(_pack, request.kind, tokens.tolist()),
        last_n=(len(tokens) if last_n is None else last_n)
        * body.prompt_logprobs,
    )
    c = self.base.config.sampling
    P, T = c.max_prompt_tokens, c.max_completion_tokens
    most = params.max_tokens or T
    if len(tokens) > P and most == 1 and request.kind == kinds.SAMPLE:
      # Clients get the log-probs of a longer text by sampling one token.
      settings = dataclasses.replace(job.settings, is_long=True)
      job = dataclasses.replace(job, settings=settings)
      if len(tokens) >= P + T:
        raise ValueError(
            f"prompt: has {len(tokens)} tokens, and one after it: must be up to"
            f" config.sampling.max_prompt_tokens = {P} and"
            f" config.sampling.max_completion_tokens = {T} together"
        )
    elif params.max_tokens is None:
      request = dataclasses.replace(job.request, max_tokens=T)
      job = dataclasses.replace(job, request=request)
    return job

  def settings(
      self,
      params: schemas.SamplingParams | chat_requests.CompletionRequest,
      stop_ids: Sequence[int] | None,
      stop_strings: Sequence[str],
  ) -> SampleSettings:
    """Returns settings; `stop_ids` None = the tokenizer's stop tokens."""
    if stop_ids is None:
      stop_ids = self.base.policy.tokenizer.stop_ids
    return SampleSettings(
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        tuple(sorted(stop_ids)),
        tuple(stop_strings),
    )

  def check(self, job: SampleJob) -> None:
    """Raises ValueError for a job that cannot be decoded."""
    if job.path:
      self.weights.place(job.path)
    settings = self._decode_settings(job.settings)
    try:
      job.request.check(settings, self.base.policy.model.config.vocab_size)
    except ValueError as error:
      # Clients do not know the server's number of the prompt.
      number = f"prompt {job.request.prompt_id}: "
      raise ValueError(str(error).removeprefix(number)) from error

  def complete(self, jobs: Sequence[SampleJob]) -> list[bytes]:
    """Returns the results of jobs of one version with the same settings."""
    sampler = self._sampler(jobs[0].settings)
    version = self._version(jobs[0].path)
    if version.decoded is None:
      version.decoded = sampler.put(version.params)
    completions = sampler.sample(
        version.decoded, [job.request for job in jobs], version=0
    )
    scored = [job for job in jobs if job.last_n]
    values = self.base.scorer().logprobs(
        version.params, [job.request.prompt_tokens for job in scored]
    )
    prompts = {job.id: v for job, v in zip(scored, values, strict=True)}
    out = []
    for job, c in zip(jobs, completions, strict=True):
      prompt_logprobs = prompts.get(job.id)
      if prompt_logprobs is not None:
        prompt_logprobs[: max(0, len(prompt_logprobs) - job.last_n)] = np.nan
      result = protobufs.SampleResult(
          [t[:n] for t, n in zip(c.tokens, c.lengths)],
          [p[:n] for p, n in zip(c.plain_logprobs, c.lengths)],
          c.stopped.tolist(),
          prompt_logprobs,
      )
      out.append(job.pack(result, version.step))
    return out

  def _version(self, path: str) -> _OnDevice:
    spec = (self.registry.checkpoint(path) if path else None) or {}
    key = (path, spec.get("request", ""))
    if key not in self._versions:
      while len(self._versions) >= _VERSIONS:
        self._versions.popitem(last=False)
      params, step = self.base.params, 0
      if path:
        spec, state = self.weights.read(path)
        params = self.base.programs(spec).trainable.merged(state["params"])
        step = spec.get("step", 0)
      self._versions[key] = _OnDevice(params, step)
    self._versions.move_to_end(key)
    return self._versions[key]

  def _sampler(self, settings: SampleSettings) -> decode.JaxSampler:
    """Returns the sampler of these settings, compiled on first use."""
    if settings not in self._samplers:
      while len(self._samplers) >= _SAMPLERS:
        self._samplers.popitem(last=False)
      self._samplers[settings] = decode.JaxSampler(
          self.base.policy.model, self._decode_settings(settings)
      )
    self._samplers.move_to_end(settings)
    return self._samplers[settings]

  def _decode_settings(self, settings: SampleSettings) -> decode.Settings:
    c, tokenizer = self.base.config.sampling, self.base.policy.tokenizer
    P, T = c.max_prompt_tokens, c.max_completion_tokens
    if settings.is_long:
      P, T = P + T - 1, 1
    return decode.Settings(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_prompt_tokens=P,
        max_completion_tokens=T,
        num_rows=c.num_slots,
        chunk_steps=c.chunk_steps,
        prompt_buckets=c.prompt_buckets,
        stop_ids=settings.stop_ids,
        stop_strings=settings.stop_strings,
        text_fn=functools.partial(tokenizer.decode, within=True),
        pad_id=tokenizer.pad_id,
        seed=self.base.config.seed,
        # The temperature of passes, so that on-policy ratios are 1.
        plain_temperature=c.temperature,
    )


def decode_request(
    id: str,
    tokens: np.ndarray,
    count: int,
    seed: int | None,
    max_tokens: int | None,
) -> decode.Request:
  """Returns a prompt's decode request; the seed defaults to a hash of `id`."""
  return decode.Request(
      prompt_tokens=tokens,
      # The same seed and prompt give the same completions.
      prompt_id=zlib.crc32(tokens.tobytes()),
      visit=0,
      num_completions=count,
      seed=served_base.seed_of(id) if seed is None else seed % 2**32,
      max_tokens=max_tokens,
  )


def path_of(registry: registry_lib.Registry, sampler: str) -> str:
  """Returns the path of a sampling session; raises ValueError if unknown."""
  path = registry.sampler(sampler)
  if path is None:
    raise ValueError(f"sampling session {sampler}: there is none")
  return path


def _pack(
    kind: str, prompt_ids: list[int], result: protobufs.SampleResult, step: int
) -> bytes:
  """Returns the result of a sample; for a replay, as JSON with the prompt."""
  packed = protobufs.pack_sample_result(result)
  if kind == kinds.SAMPLE:
    return packed
  fields = {"prompt_ids": prompt_ids, "version": step}
  return json.dumps(
      {**protobufs.sample_result_to_json(packed), **fields}
  ).encode()

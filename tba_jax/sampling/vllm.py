# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampler that leaves decoding to a vLLM server.

    put(params) → folder of safetensors → pause, reload_weights, resume
    sample(…)   → POST /inference/v1/generate, one request a prompt, all at once

Implements `requests.Sampler`. Ids and log-probs are the server's, so importance
weights use the log-probs of the distribution that sampled. The server reports
which weights sampled each token. Completions by any other weights, for example
after a restart, are sampled again.

vLLM's own weight transfer needs PyTorch tensors on GPUs; every vLLM backend can
read a folder, also across machines that share a file system.

Random numbers are the server's. (Seeds of requests would not make completions
independent of their batch mates, slow vLLM's sampler down, and crash it on CPUs
if a prompt is prefilled in two chunks.)
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import http.client
import itertools
import json
import os
import pathlib
import queue
import shutil
import threading
import time
from typing import Any
from urllib import error as urllib_error
from urllib import request as urllib_request
import uuid
import weakref

from absl import logging
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tba_jax.sampling import requests
from tba_jax.sampling import samplers
from tba_jax.system import jsonl
from tba_jax.system import processes

# Environment variable with the server's API key; the name is vLLM's.
KEY_VARIABLE = "VLLM_API_KEY"
# Command that starts a suitable server.
HOW = "VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --enable-scale-out"
# Seconds between polls for newer params, seconds between health checks, and
# their timeout.
_POLL_S, HEALTH_S, _ANSWER_S = 0.2, 5.0, 20.0
# Sampling fails after this many consecutive attempts without a completion.
_MOST_ATTEMPTS = 5


def write_model(source: str, folder: str) -> None:
  """Writes a folder for `vllm serve`.

  A tied head is untied, with the same values: on reload vLLM would keep its old
  head.

  Args:
    source: folder or name of a model, as in `config.init`.
    folder: destination, made or replaced.

  Raises:
    ValueError: the source cannot be read.
  """
  config, params = hf.load(source)
  hf.save(folder, *_untied(config, params), tokenizer_lib.load(source))


def _untied(
    config: config_lib.ModelConfig, params: types.PyTree
) -> tuple[config_lib.ModelConfig, types.PyTree]:
  if not config.tie_embeddings:
    return config, params
  head = {"kernel": params["embed"]["embedding"]}
  untied = dataclasses.replace(config, tie_embeddings=False)
  return untied, {**params, "head": head}


class UnreachableError(RuntimeError):
  """The server cannot be reached."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParamsFolder:
  """Params that the server can load; the files are deleted with the object.

  name: unique identifier of these params on the server.
  folder: directory of the files.
  """

  name: str
  folder: pathlib.Path

  def __post_init__(self) -> None:
    weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


class VllmSampler:
  """Samples completions with a vLLM server of its own.

  No other client may change the server's weights.

  platform: field of `requests.Sampler`.
  """

  platform = "vllm"

  def __init__(
      self,
      settings: requests.SamplingSettings,
      model_config: config_lib.ModelConfig,
      *,
      url: str,
      folder: pathlib.Path,
      is_shared: bool = False,
      deadline_s: float,
      on_event: Callable[[str, str], None],
      on_progress: Callable[[], None] = lambda: None,
  ):
    """Initializes the sampler without reaching the server.

    Args:
      settings: sampling without truncation, stop strings or several turns.
      model_config: shape of the params.
      url: "http://HOST:PORT".
      folder: parent of the params' folders, at the same path on the server.
      is_shared: whether the server may run as another user.
      deadline_s: longest wait for an unresponsive server.
      on_event: function called with (kind, message).
      on_progress: function called while the server works.
    """
    self._settings = settings
    self._model_config = model_config
    self.server = VllmServer(url)
    self._folder = folder
    self._written = processes.shared if is_shared else contextlib.nullcontext
    self.deadline_s = deadline_s
    self.on_event, self._on_progress = on_event, on_progress
    self._numbers = itertools.count()
    # Names are unique to this object: another may have used the server.
    self._prefix = uuid.uuid4().hex[:8]
    # Params on the server, None if unknown.
    self._loaded: ParamsFolder | None = None
    self._is_checked = False
    # Whether completions are in flight, which continue with newer params.
    self._is_sampling = False

    self.stream = functools.partial(requests.in_one_batch, self.sample)

  @property
  def settings(self) -> requests.SamplingSettings:
    return self._settings

  def put(self, params: types.PyTree, shardings: Any = None) -> ParamsFolder:
    """Writes params to a folder and has the server load them.

    Args:
      params: model params, or the result of an earlier `put`.
      shardings: unused.

    Raises:
      UnreachableError: the server did not answer in time.
      ValueError: the server rejects the params, or has wrong options.
    """
    del shardings
    if isinstance(params, ParamsFolder):
      return params
    name = f"{self._prefix}-{next(self._numbers)}"
    version = ParamsFolder(name, (self._folder / name).absolute())
    with self._written():
      hf.save(version.folder, *_untied(self._model_config, params))
    self._load(version)
    return version

  def warm_up(self, params: types.PyTree) -> None:
    """Samples one token to detect an unsuitable server early."""
    prompt = np.zeros(1, np.int32)
    self.sample(
        params, [requests.Request(prompt, 0, 0, 1, max_tokens=1)], version=0
    )

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[requests.Request],
      *,
      version: int,
      newer: requests.NewerFn | None = None,
      turns: requests.Turns | None = None,
  ) -> list[types.Completions]:
    """Returns the completions of each prompt; see `requests.Sampler`.

    With newer params the server keeps its KV cache.

    Raises:
      UnreachableError: the server did not answer in time.
      ValueError: a request is wrong, or the server rejects it.
      RuntimeError: another client changes the server's weights.
    """
    assert turns is None
    for request in prompts:
      request.check(self._settings, self._model_config.vocab_size)
    attempt = _Attempt(self, prompts, self.put(params), version)
    del params
    failures, why = 0, ""
    while attempt.missing:
      before = len(attempt.missing)
      self._load(attempt.current)
      self._is_sampling = True
      try:
        attempt.run(newer)
        why = "does another client change its weights?"
      except UnreachableError as error:
        why = str(error)
        self._loaded = None
        self.on_event("sampler_lost", why)
      finally:
        self._is_sampling = False
      failures = failures + 1 if len(attempt.missing) == before else 0
      if failures == _MOST_ATTEMPTS:
        raise RuntimeError(
            f"{self.server.url}: {failures} attempts gave no completion by the"
            f" given params: {why}"
        )
    if attempt.has_swapped:
      # Repeated prompts would reuse keys and values of older params.
      try:
        self.server.post("/reset_prefix_cache")
      except UnreachableError:
        self._loaded = None  # Loading also clears the cache.
    return [attempt.results[i] for i in range(len(prompts))]

  def token_logprobs(
      self, params: types.PyTree, tokens_BxL: np.ndarray
  ) -> np.ndarray:
    """Returns [B, L - 1] float32, log π of each token after the first, nats.

    See `requests.Sampler` for the arguments and `put` for errors.
    """
    self._load(self.put(params))
    rows = []
    for tokens_L in np.asarray(tokens_BxL).tolist():
      answer = self._generate(
          tokens_L,
          {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
      )
      places = answer.get("prompt_logprobs") or []
      try:
        rows.append(
            [
                at[str(token)]["logprob"]
                for token, at in zip(tokens_L[1:], places[1:], strict=True)
            ]
        )
      except (KeyError, TypeError, ValueError) as error:
        raise self.server.wrong(
            "/inference/v1/generate", f"no log-probs of a prompt: {error!r}"
        ) from error
    return np.asarray(rows, np.float32)

  def generate(self, request: requests.Request) -> list[dict[str, Any]]:
    """Returns the server's choices for one request, as parsed JSON."""
    settings = self._settings
    limit = request.max_tokens or settings.max_completion_tokens
    answer = self._generate(
        np.asarray(request.prompt_tokens).tolist(),
        {
            "n": request.num_completions,
            "max_tokens": limit,
            "temperature": settings.temperature,
            "stop_token_ids": sorted(settings.stop_ids),
            # The model's files may name other stop tokens.
            "ignore_eos": True,
            "logprobs": 0,
        },
    )
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != request.num_completions:
      raise self.server.wrong(
          "/inference/v1/generate",
          f"not {request.num_completions} choices, but {choices!r:.80}",
      )
    return sorted(choices, key=lambda choice: choice["index"])

  def completions(
      self, choices: Sequence[Mapping[str, Any]], versions: Mapping[str, int]
  ) -> types.Completions | None:
    """Converts choices; returns None if other params sampled a token.

    Args:
      choices: server's answer to a request.
      versions: name of params -> version.

    Raises:
      ValueError: the choices do not match the request.
    """
    S, T = len(choices), self._settings.max_completion_tokens
    tokens_SxT = np.full((S, T), self._settings.pad_id, np.int32)
    logprobs_SxT = np.zeros((S, T), np.float32)
    versions_SxT = np.full((S, T), -1, np.int32)
    lengths_S, stopped_S = np.zeros(S, np.int32), np.zeros(S, bool)
    for i, choice in enumerate(choices):
      ids, spans = choice.get("token_ids"), choice.get("weight_versions")
      if choice.get("finish_reason") == "abort":
        return None
      try:
        content = choice["logprobs"]["content"]
        sampled_ids = [at["token_id"] for at in content]
        logprobs = np.asarray([at["logprob"] for at in content], np.float32)
        names = [span["version"] for span in spans]
        ends = [(span["start"], span["end"]) for span in spans]
      except (KeyError, TypeError) as error:
        raise self.server.wrong(
            "/inference/v1/generate",
            f"a choice without log-probs or versions: {error!r}; the server"
            f" must be vLLM 0.32 or newer, started with {HOW}",
        ) from error
      n = len(ids)
      if (
          sampled_ids != ids
          or not 1 <= n <= T
          or not np.isfinite(logprobs).all()
      ):
        raise self.server.wrong(
            "/inference/v1/generate", f"log-probs of other tokens: {ids!r:.80}"
        )
      if set(names) - set(versions) or sum(b - a for a, b in ends) != n:
        return None
      tokens_SxT[i, :n], logprobs_SxT[i, :n] = ids, logprobs
      for name, (start, end) in zip(names, ends, strict=True):
        versions_SxT[i, start:end] = versions[name]
      lengths_S[i] = n
      stopped_S[i] = ids[-1] in self._settings.stop_ids
    return types.Completions(
        tokens=tokens_SxT,
        lengths=lengths_S,
        sampled_mask=np.arange(T) < lengths_S[:, None],
        logprobs=logprobs_SxT,
        plain_logprobs=logprobs_SxT,
        stopped=stopped_S,
        # Versions never decrease, so the first token has the oldest.
        versions=versions_SxT[:, 0].copy(),
        token_versions=versions_SxT,
    )

  def swap(self, version: ParamsFolder) -> None:
    """Switches the server's completions in flight to other params."""
    if version is not self._loaded:
      self._load(version)

  def check_is_alive(self) -> None:
    """Checks the server's health.

    Raises:
      UnreachableError: no answer came in time.
    """
    self.server.get("/health", timeout_s=_ANSWER_S)

  def progress(self) -> None:
    self._on_progress()

  def _generate(
      self, ids: Sequence[int], sampling: Mapping[str, Any]
  ) -> dict[str, Any]:
    return self.server.post(
        "/inference/v1/generate",
        {
            "token_ids": ids,
            "sampling_params": {"detokenize": False, **sampling},
        },
        timeout_s=None,
    )

  def _load(self, version: ParamsFolder) -> None:
    """Has the server load a version unless it is loaded; waits until then."""
    if version is self._loaded and self._is_named(version):
      return
    deadline = time.monotonic() + self.deadline_s
    self._loaded = None
    while True:
      try:
        self._check_server()
        mode = "keep" if self._is_sampling else "wait"
        self.server.post(f"/pause?mode={mode}")
        try:
          self._reload(version.folder)
          self.server.post(
              "/update_weight_version", {"new_version": version.name}
          )
        finally:
          self.server.post("/resume")
        self._loaded = version
        return
      except UnreachableError as error:
        # The server may have restarted.
        self._is_checked = False
        left_s = deadline - time.monotonic()
        if left_s <= 0:
          raise UnreachableError(
              f"{error}, for {self.deadline_s:g} s (config.search"
              f".starvation_s); start it with {HOW}"
          ) from error
        logging.log_every_n_seconds(
            logging.WARNING, "%s; waiting up to %.0f s", 10, error, left_s
        )
        self._on_progress()
        time.sleep(min(1.0, left_s))

  def _reload(self, folder: pathlib.Path) -> None:
    """Waits until the server has read a folder; large ones take a while."""
    call = {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(folder)},
    }
    with futures.ThreadPoolExecutor(1, thread_name_prefix="vllm") as thread:
      reload = thread.submit(
          self.server.post, "/collective_rpc", call, timeout_s=self.deadline_s
      )
      while not futures.wait([reload], timeout=1.0).done:
        self._on_progress()
    reload.result()

  def _is_named(self, version: ParamsFolder) -> bool:
    """Returns whether the server reports this version."""
    try:
      weights = self.server.get("/weight_info", timeout_s=_ANSWER_S)
    except UnreachableError:
      return False
    return weights.get("weight_version") == version.name

  def _check_server(self) -> None:
    """Raises ValueError if the server's options change what is sampled."""
    if self._is_checked:
      return
    info = self.server.get(
        "/server_info?config_format=json", timeout_s=self.deadline_s
    )
    model_config = info.get("vllm_config", {}).get("model_config", {})
    wrong = []
    mode = model_config.get("logprobs_mode")
    allowed = ["processed_logprobs"]
    if self._settings.temperature in (0, 1):
      allowed.append("raw_logprobs")
    if mode not in allowed:
      wrong.append(f"--logprobs-mode={mode}: must be {' or '.join(allowed)}")
    P = self._settings.max_prompt_tokens
    most = P + self._settings.max_completion_tokens
    if (model_config.get("max_model_len") or 0) < most:
      wrong.append(
          f"--max-model-len={model_config.get('max_model_len')}: must be {most}"
          " or more, because sampling.max_prompt_tokens and"
          " sampling.max_completion_tokens add up to it"
      )
    served = pathlib.Path(str(model_config.get("model"))) / "config.json"
    if self._model_config.tie_embeddings and served.is_file():
      if jsonl.read_json(served).get("tie_word_embeddings"):
        wrong.append(
            f"{served.parent}: must be a model with an untied head, because"
            " vLLM keeps a tied one when it reloads weights; serve a folder"
            " written by tba_jax.sampling.vllm.write_model"
            " (docs/guides/serving.md)"
        )
    if wrong:
      raise ValueError(f"{self.server.url}: {'; '.join(wrong)}")
    self._is_checked = True


def make(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    settings: requests.SamplingSettings,
    home: samplers.SamplerHome,
) -> VllmSampler:
  """Returns a searcher's sampler; see `samplers.make`.

  Raises:
    ValueError: `search.vllm_folder` is not a local folder.
  """
  search = config.search
  folder = search.vllm_folder or str(home.workdir / "vllm")
  if "://" in folder:
    raise ValueError(
        f"config.search.vllm_folder = {folder!r}: must be a local folder,"
        " because the vLLM server reads params from it"
    )
  searcher_folder = pathlib.Path(folder) / f"searcher-{home.index}"
  # Removes the params of a killed searcher.
  shutil.rmtree(searcher_folder, ignore_errors=True)
  urls = search.vllm_urls.split(",")
  return VllmSampler(
      settings,
      model.config,
      url=urls[home.index % len(urls)],
      folder=searcher_folder,
      is_shared=bool(search.vllm_folder),
      deadline_s=search.starvation_s,
      on_event=home.on_event,
      on_progress=home.on_progress,
  )


class _Attempt:
  """Completions of several prompts, requested until complete.

  current: params to sample with.
  missing: indices of prompts without completions.
  results: index -> completions.
  has_swapped: whether newer params continued completions.
  """

  def __init__(
      self,
      sampler: VllmSampler,
      prompts: Sequence[requests.Request],
      params: ParamsFolder,
      version: int,
  ):
    self.current = params
    self.missing = set(range(len(prompts)))
    self.results: dict[int, types.Completions] = {}
    self.has_swapped = False
    self._sampler = sampler
    self._prompts = prompts
    self._versions = {params.name: version}

  def run(self, newer: requests.NewerFn | None) -> None:
    """Requests everything missing once.

    Raises:
      UnreachableError: the server does not answer.
      ValueError: the server rejects a request.
    """
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def ask(index: int) -> None:
      try:
        answers.put((index, self._sampler.generate(self._prompts[index])))
      except Exception as error:  # Raised again below.
        answers.put((index, error))

    for index in self.missing:
      # Daemons, since a hanging server would block a join.
      threading.Thread(target=ask, args=(index,), daemon=True).start()
    checked_s = time.monotonic()
    for _ in range(len(self.missing)):
      while True:
        try:
          index, answer = answers.get(timeout=_POLL_S)
          break
        except queue.Empty:
          if newer is not None:
            self._take(newer())
          if time.monotonic() - checked_s > HEALTH_S:
            self._sampler.check_is_alive()
            self._sampler.progress()
            checked_s = time.monotonic()
      self._sampler.progress()
      if isinstance(answer, Exception):
        raise answer
      completions = self._sampler.completions(answer, self._versions)
      if completions is not None:
        self.results[index] = completions
        self.missing.remove(index)

  def _take(self, version_and_params: tuple[int, types.PyTree] | None) -> None:
    """Switches to newer params; None retries the current ones."""
    if version_and_params is not None:
      version, params = version_and_params
      self._versions[params.name] = version
      self.has_swapped |= params is not self.current
      self.current = params
    self._sampler.swap(self.current)


class VllmServer:
  """JSON requests to one server.

  url: base URL without a trailing slash.
  """

  def __init__(self, url: str):
    self.url = url.rstrip("/")
    self._headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
      self._headers["Authorization"] = f"Bearer {key}"

  def get(self, path: str, *, timeout_s: float | None) -> dict[str, Any]:
    """Returns the answer; see `post` for errors."""
    return self._ask(path, None, timeout_s)

  def post(
      self,
      path: str,
      body: Mapping[str, Any] | None = None,
      *,
      timeout_s: float | None = 60.0,
  ) -> dict[str, Any]:
    """Returns the answer.

    Raises:
      UnreachableError: no server answers, or it fails internally.
      ValueError: the server rejects the request.
    """
    return self._ask(path, json.dumps(body or {}).encode(), timeout_s)

  def wrong(self, path: str, why: str) -> ValueError:
    return ValueError(f"{self.url}{path}: {why}")

  def _ask(
      self, path: str, body: bytes | None, timeout_s: float | None
  ) -> dict[str, Any]:
    request = urllib_request.Request(self.url + path, body, self._headers)
    try:
      with urllib_request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read()
    except urllib_error.HTTPError as error:
      detail = error.read(2000).decode(errors="replace")
      if error.code >= 500:
        raise UnreachableError(
            f"{self.url}{path} failed ({error.code}): {detail:.300}"
        ) from error
      raise self.wrong(
          path,
          f"refused ({error.code}): {detail:.300}; the server must be vLLM 0.32"
          f" or newer, started with {HOW}",
      ) from error
    except (OSError, http.client.HTTPException) as error:
      raise UnreachableError(
          f"no vLLM server answers at {self.url} ({error})"
      ) from error
    try:
      return json.loads(text) if text.strip() else {}
    except ValueError as error:
      raise self.wrong(path, f"not JSON: {text[:80]!r}") from error

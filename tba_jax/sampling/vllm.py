# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampler that leaves decoding to a vLLM server.

    put(params) → folder of safetensors → pause, reload_weights, resume
    put(adapter) → folder of an adapter → load_lora_adapter
    stream(…)   → POST /inference/v1/generate, ids → ids, turn by turn

Implements `requests.Sampler`. Ids and log-probs are the server's, so importance
weights use the log-probs of the distribution that sampled. The server reports
which weights sampled each token. Turns by any other weights, for example after
a restart, are sampled again. A request names its adapter, which samples it to
the end; the weights are then the base's.

vLLM's own weight transfer needs PyTorch tensors on GPUs; every vLLM backend can
read a folder, also across machines that share a file system.

With top-k, top-p or min-p the server returns the likeliest tokens with each; it
masks those that it dropped. It applies min-p before top-k and top-p, and never
keeps more than C tokens; of equally likely ones at that limit it keeps none.
Plain log-probs are then the sampling log-probs.

Random numbers are the server's. (Seeds of requests would not make completions
independent of their batch mates, slow vLLM's sampler down, and crash it on CPUs
if a prompt is prefilled in two chunks.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
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
from tba_jax.models.hf import adapter_folder
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
_PATH = "/inference/v1/generate"
_ADAPTER_PATH = "/v1/load_lora_adapter"
_ADAPTER_HOW = (
    "the server must be started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and"
    " --enable-lora, find config.search.vllm_folder at the same path and"
    " support config.lora.targets"
)
# Log-prob of tokens that truncated sampling drops, and instead of NaN.
_MASKED = -9999.0
# Seconds between polls for newer params, and for environments' answers; seconds
# between health checks, and their timeout.
_POLL_S, _LOOK_EVERY_S, HEALTH_S, _ANSWER_S = 0.2, 0.02, 5.0, 20.0
# Longest wait for a turn, the environments' as well.
TURN_S = 3600.0
# Sampling fails after this many attempts at a turn; seconds before the second,
# and more each time.
_MOST_ATTEMPTS, AGAIN_S = 5, 1.0


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
  rank: inner dimension of an adapter; 0 for whole params.
  """

  name: str
  folder: pathlib.Path
  rank: int = 0

  def __post_init__(self) -> None:
    weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Turn:
  """Tokens that the server sampled.

  ids: n token ids.
  logprobs: [n] float32, nats.
  names: name of the params that sampled each token; None if the server aborted
    the turn.
  kept: [n, C] int32, tokens that truncated sampling kept, -1 after the last.
  top_k: most tokens to keep at the next place, where the server kept more than
    C because several are as likely as the last; else 0.
  """

  ids: Sequence[int]
  logprobs: np.ndarray
  names: Sequence[str] | None
  kept: np.ndarray
  top_k: int

  def versions(self, known: Mapping[str, int]) -> list[int] | None:
    """Returns the version of each token; None if other params sampled one.

    Args:
      known: name of params -> version.
    """
    names = self.names
    if names is None or len(names) != len(self.ids):
      return None
    return [known[name] for name in names] if {*names} <= {*known} else None


class VllmSampler:
  """Samples completions with a vLLM server of its own.

  No other client may change the server's weights.

  platform: field of `requests.Sampler`.
  base: name of the weights under adapters, None until one is loaded.
  is_sampling: whether turns are in flight, which continue with newer params.
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
      settings: sampling without exploration.
      url: "http://HOST:PORT".
      folder: parent of the params' folders, at the same path on the server.
      is_shared: whether the server may run as another user.
      deadline_s: longest wait for an unresponsive server.
      on_event: function called with (kind, message).
      on_progress: function called while the server works.
    """
    self._settings = settings
    self.model_config = model_config
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
    self.base: str | None = None
    self._is_checked = False
    self.is_sampling = False

  @property
  def settings(self) -> requests.SamplingSettings:
    return self._settings

  def put(self, params: types.PyTree, shardings: Any = None) -> ParamsFolder:
    """Writes params to a folder and has the server load them.

    Args:
      params: model params, an `adapter_folder.Adapter`, or the result of an
        earlier `put`.
      shardings: unused.

    Raises:
      UnreachableError: the server did not answer in time.
      ValueError: the server rejects the params, or has wrong options.
    """
    del shardings
    if isinstance(params, ParamsFolder):
      return params
    name = f"{self._prefix}-{next(self._numbers)}"
    is_adapter = isinstance(params, adapter_folder.Adapter)
    version = ParamsFolder(
        name,
        (self._folder / name).absolute(),
        params.rank if is_adapter else 0,
    )
    with self._written():
      if is_adapter:
        version.folder.mkdir(parents=True)
        params.write(version.folder)
      else:
        hf.save(version.folder, *_untied(self.model_config, params))
    self.load(version)
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
    """Returns the completions of each prompt; see `stream`."""
    batches = iter([prompts])
    stream = self.stream(
        params,
        lambda: next(batches, None),
        version=version,
        newer=newer,
        turns=turns,
    )
    del params
    completions = dict(itertools.chain.from_iterable(stream))
    return [completions[i] for i in range(len(prompts))]

  def stream(
      self,
      params: types.PyTree,
      more: requests.MoreFn,
      *,
      version: int,
      newer: requests.NewerFn | None = None,
      turns: requests.Turns | None = None,
  ) -> Iterator[list[tuple[int, types.Completions]]]:
    """Samples requests while the server answers; see `requests.Sampler`.

    Turns in flight continue with newer params and the old KV cache; later turns
    are prefilled with the newer params.

    Raises:
      UnreachableError: the server did not answer in time.
      ValueError: a request is wrong, or the server rejects it.
      RuntimeError: another client changes the server's weights.
    """
    return _Loop(self, self.put(params), version, more, newer, turns).run()

  def token_logprobs(
      self, params: types.PyTree, tokens_BxL: np.ndarray
  ) -> np.ndarray:
    """Returns [B, L - 1] float32, log π of each token after the first, nats.

    See `requests.Sampler` for the arguments and `put` for errors.
    """
    params = self.put(params)
    rows = [
        self._wait_for_server(self._prompt_logprobs, params, tokens_L)
        for tokens_L in np.asarray(tokens_BxL).tolist()
    ]
    return np.asarray(rows, np.float32)

  def _prompt_logprobs(
      self, params: ParamsFolder, tokens_L: Sequence[int]
  ) -> list[float]:
    """Returns `token_logprobs` of one sequence."""
    self._load_once(params)
    answer = self._slowly(
        self._generate,
        params,
        tokens_L,
        {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "detokenize": False,
        },
    )
    places = answer.get("prompt_logprobs") or []
    try:
      return [
          float(at[str(token)]["logprob"])
          for token, at in zip(tokens_L[1:], places[1:], strict=True)
      ]
    except (KeyError, TypeError, ValueError) as error:
      raise self.server.wrong(
          _PATH, f"no log-probs of a prompt: {error!r}"
      ) from error

  def generate(
      self,
      params: ParamsFolder,
      ids: Sequence[int],
      num: int,
      max_tokens: int,
      top_k: int,
  ) -> list[_Turn]:
    """Returns turns after a prompt.

    Args:
      max_tokens: most tokens of each.
      top_k: number of tokens to sample the first from; 0 for C.

    Raises:
      UnreachableError: the server does not answer.
      ValueError: the server rejects the request, or its answer is wrong.
    """
    settings = self._settings
    truncation = {"logprobs": 0}
    if C := settings.num_kept:
      # One more shows whether C were all.
      truncation = {
          "logprobs": C + 1,
          "top_k": top_k or C,
          "top_p": settings.top_p,
          "min_p": settings.min_p,
      }
    if top_k:
      max_tokens = 1
    answer = self._generate(
        params,
        ids,
        {
            "n": num,
            "max_tokens": max_tokens,
            "temperature": settings.temperature,
            "stop_token_ids": sorted(settings.stop_ids),
            # Only saves tokens: `_Loop` decides where a turn ends.
            "stop": [*settings.stop_strings],
            "detokenize": bool(settings.stop_strings),
            "skip_special_tokens": False,
            # The model's files may name other stop tokens.
            "ignore_eos": True,
            **truncation,
        },
        timeout_s=TURN_S,
    )
    choices = answer.get("choices")
    try:
      choices = sorted(choices, key=lambda choice: choice["index"])
      indices = [choice["index"] for choice in choices]
    except (KeyError, TypeError):
      indices = None
    if indices != [*range(num)]:
      raise self.server.wrong(_PATH, f"not {num} choices, but {choices!r:.80}")
    return [self._turn(choice, max_tokens) for choice in choices]

  def _turn(self, choice: Mapping[str, Any], max_tokens: int) -> _Turn:
    """Converts a choice of the server.

    Raises:
      ValueError: the choice does not match the request.
    """
    if choice.get("finish_reason") == "abort":
      return _Turn([], np.zeros(0), None, np.zeros((0, 0)), 0)
    try:
      ids, content = choice["token_ids"], choice["logprobs"]["content"]
      sampled_ids = [at["token_id"] for at in content]
      logprobs = np.array([float(at["logprob"]) for at in content], np.float32)
      names, n = [], len(content)
      for span in choice["weight_versions"]:
        start, end = span["start"], span["end"]
        if not 0 <= start <= end <= n:
          raise ValueError(f"tokens {start} to {end} of {n}")
        names += [str(span["version"])] * (end - start)
      tops = []
      if self._settings.num_kept:
        tops = [
            [(top["token_id"], float(top["logprob"])) for top in tops]
            for tops in (at["top_logprobs"] for at in content)
        ]
    except (KeyError, TypeError, ValueError) as error:
      raise self.server.wrong(
          _PATH,
          f"a choice without log-probs or versions: {error!r}; the server"
          f" must be vLLM 0.32 or newer, started with {HOW}",
      ) from error
    if (
        sampled_ids != ids
        or not 1 <= n <= max_tokens
        or not self._are_tokens(ids)
        or not (np.isfinite(logprobs) & (logprobs > _MASKED)).all()
    ):
      raise self.server.wrong(_PATH, f"log-probs of other tokens: {ids!r:.80}")
    kept_nxC, top_k = np.zeros((n, 0), np.int32), 0
    if self._settings.num_kept:
      kept_nxC, top_k = self._kept(ids, tops)
    n = len(kept_nxC)
    return _Turn(ids[:n], logprobs[:n], names[:n], kept_nxC, top_k)

  def _are_tokens(self, ids: Sequence[Any]) -> bool:
    V = self.model_config.vocab_size
    return all(type(i) is int and 0 <= i < V for i in ids)

  def _kept(
      self,
      ids: Sequence[int],
      tops: Sequence[Sequence[tuple[int, float]]],
  ) -> tuple[np.ndarray, int]:
    """Returns `kept` and `top_k` of a turn, up to the place that needs it.

    Args:
      tops: C + 1 likeliest tokens of each place, with their log-probs.
    """
    C = self._settings.num_kept
    kept_TxC = np.full((len(tops), C), -1, np.int32)
    for place, top in enumerate(tops):
      top = sorted(top, key=lambda token: -token[1])
      kept = [token for token in top if token[1] > _MASKED]
      if len(kept) > C:
        last = kept[C][1]
        if top_k := sum(logprob > last for _, logprob in kept):
          return kept_TxC[:place], top_k
        raise self.server.wrong(
            _PATH,
            f"more than {C} tokens are the likeliest; raise"
            " config.sampling.top_k and max_kept_tokens",
        )
      kept_ids = [token for token, _ in kept]
      if ids[place] not in kept_ids or not self._are_tokens(kept_ids):
        raise self.server.wrong(
            _PATH, f"token {ids[place]} is not among the kept ones: {kept_ids}"
        )
      kept_TxC[place, : len(kept)] = kept_ids
    return kept_TxC, 0

  def swap(self, version: ParamsFolder) -> None:
    """Switches to other params, also turns in flight unless by an adapter."""
    if version is not self._loaded:
      self.load(version)

  def check_is_alive(self) -> None:
    """Checks the server's health.

    Raises:
      UnreachableError: no answer came in time.
    """
    self.server.get("/health", timeout_s=_ANSWER_S)

  def progress(self) -> None:
    self._on_progress()

  def _generate(
      self,
      params: ParamsFolder,
      ids: Sequence[int],
      sampling: dict[str, Any],
      *,
      timeout_s: float,
  ) -> dict[str, Any]:
    return self.server.post(
        _PATH,
        {
            "token_ids": ids,
            # No prefix that other params computed is reused.
            "cache_salt": params.name,
            "sampling_params": sampling,
            **({"model": params.name} if params.rank else {}),
        },
        timeout_s=timeout_s,
    )

  def load(self, version: ParamsFolder, *, is_lost: bool = False) -> None:
    """Has the server load a version; waits until then.

    Args:
      version: params to load unless they are loaded.
      is_lost: whether to load them in any case.

    Raises:
      UnreachableError: the server did not answer in time.
      ValueError: the server rejects the params, or has wrong options.
    """
    self._wait_for_server(lambda: self._load_once(version, is_lost=is_lost))

  def _wait_for_server(self, ask: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `ask`, repeated while the server is lost."""
    deadline = time.monotonic() + self.deadline_s
    while True:
      try:
        return ask(*args)
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

  def _load_once(self, version: ParamsFolder, *, is_lost: bool = False) -> None:
    """Does what `load` does, but does not wait for a lost server."""
    if not is_lost and version is self._loaded and self.has(version):
      return
    self._loaded = None
    self._check_server(version.rank)
    if version.rank:
      if is_lost:
        self.server.post("/abort_requests")
      self._load_adapter(version)
    else:
      mode = "abort" if is_lost else "wait"
      if self.is_sampling:
        mode = "keep"
      try:
        self._slowly(self.server.post, f"/pause?mode={mode}")
        self._slowly(
            self.server.post,
            "/collective_rpc",
            {
                "method": "reload_weights",
                "kwargs": {"weights_path": str(version.folder)},
            },
        )
        self.server.post(
            "/update_weight_version", {"new_version": version.name}
        )
      finally:
        self.server.post("/resume")
    self._loaded = version

  def _load_adapter(self, version: ParamsFolder) -> None:
    """Has the server load an adapter unless it has it.

    Earlier adapters stay: turns in flight may use them, and the server drops
    those that it has no room for.
    """
    if self.base is None:
      # A killed searcher may have left the server paused.
      self.server.post("/resume")
      self.base = self._weight_version()
    if self.has(version):
      return
    try:
      self._slowly(
          self.server.post,
          _ADAPTER_PATH,
          {"lora_name": version.name, "lora_path": str(version.folder)},
      )
    except ValueError:
      self.check_is_alive()  # A crash is no refusal.
      raise

  def _slowly(self, ask: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Returns an answer that may take as long as the deadline."""
    with futures.ThreadPoolExecutor(1, thread_name_prefix="vllm") as thread:
      answer = thread.submit(ask, *args, timeout_s=self.deadline_s)
      while not futures.wait([answer], timeout=1.0).done:
        self._on_progress()
    return answer.result()

  def _weight_version(self) -> str | None:
    weights = self.server.get("/weight_info", timeout_s=_ANSWER_S)
    return weights.get("weight_version")

  def has(self, version: ParamsFolder) -> bool:
    """Returns whether the server reports this version."""
    try:
      if not version.rank:
        return self._weight_version() == version.name
      models = self.server.get("/v1/models", timeout_s=_ANSWER_S)
    except UnreachableError:
      return False
    return version.name in [model["id"] for model in models.get("data", ())]

  def _check_server(self, rank: int) -> None:
    """Raises ValueError if the server's options change what is sampled.

    Args:
      rank: inner dimension of adapters, 0 without any.
    """
    if self._is_checked:
      return
    info = self._slowly(self.server.get, "/server_info?config_format=json")
    model_config = info.get("vllm_config", {}).get("model_config", {})
    wrong = []
    lora_config = info.get("vllm_config", {}).get("lora_config") or {}
    if (lora_config.get("max_lora_rank") or 0) < rank:
      wrong.append(
          f"--max-lora-rank={lora_config.get('max_lora_rank')}: must be {rank}"
          " or more (config.lora.rank), with --enable-lora --max-loras=2 and"
          " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
      )
    elif rank and (lora_config.get("max_loras") or 0) < 2:
      wrong.append(
          f"--max-loras={lora_config.get('max_loras')}: must be 2 or more,"
          " because turns in flight keep their adapter"
      )
    mode = model_config.get("logprobs_mode")
    allowed = ["processed_logprobs"]
    C = self._settings.num_kept
    if self._settings.temperature in (0, 1) and not C:
      allowed.append("raw_logprobs")
    if mode not in allowed:
      wrong.append(f"--logprobs-mode={mode}: must be {' or '.join(allowed)}")
    most = model_config.get("max_logprobs", 0)
    if C and -1 != most <= C:
      wrong.append(
          f"--max-logprobs={most}: must be {C + 1} or more, because"
          " config.sampling.top_k, top_p or min_p keep up to"
          f" {C} tokens (config.sampling.max_kept_tokens)"
      )
    P = self._settings.max_prompt_tokens
    most = P + self._settings.max_completion_tokens
    if (model_config.get("max_model_len") or 0) < most:
      wrong.append(
          f"--max-model-len={model_config.get('max_model_len')}: must be {most}"
          " or more, because sampling.max_prompt_tokens and"
          " sampling.max_completion_tokens add up to it"
      )
    served = pathlib.Path(str(model_config.get("model"))) / "config.json"
    # Adapters leave the head as it is.
    if self.model_config.tie_embeddings and served.is_file() and not rank:
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


class _Growing:
  """Completions of a request, as their turns arrive.

  num_left: number of unfinished completions.
  starts_S: [S] int32, start of the current turn.
  """

  def __init__(
      self, request: requests.Request, settings: requests.SamplingSettings
  ):
    S, T = request.num_completions, settings.max_completion_tokens
    self.request, self.num_left = request, S
    self.limit = request.max_tokens or T
    self.tokens_SxT = np.full((S, T), settings.pad_id, np.int32)
    self.lengths_S, self.starts_S = np.zeros((2, S), np.int32)
    self.stopped_S = np.zeros(S, bool)
    self._logprobs_SxT = np.zeros((S, T), np.float32)
    self._versions_SxT = np.full((S, T), -1, np.int32)
    self._kept_SxTxC = np.full((S, T, settings.num_kept), -1, np.int32)

  def tokens(self, sample: int) -> np.ndarray:
    """Returns a completion's tokens so far."""
    return self.tokens_SxT[sample, : self.lengths_S[sample]].copy()

  def add(
      self,
      sample: int,
      ids: Sequence[int],
      logprobs: Any = 0.0,
      versions: Any = -1,
      kept: Any = -1,
  ) -> None:
    """Appends tokens, by default an environment's."""
    start = self.lengths_S[sample]
    self.lengths_S[sample] += len(ids)
    place = sample, slice(start, self.lengths_S[sample])
    self.tokens_SxT[place] = ids
    self._logprobs_SxT[place] = logprobs
    self._versions_SxT[place] = versions
    self._kept_SxTxC[place] = kept

  def completions(self) -> types.Completions:
    return types.Completions(
        tokens=self.tokens_SxT,
        lengths=self.lengths_S,
        sampled_mask=self._versions_SxT >= 0,
        logprobs=self._logprobs_SxT,
        plain_logprobs=self._logprobs_SxT,
        stopped=self.stopped_S,
        # Versions never decrease, so the first token has the oldest.
        versions=self._versions_SxT[:, 0].copy(),
        token_versions=self._versions_SxT,
        kept_ids=self._kept_SxTxC if self._kept_SxTxC.size else None,
    )


@dataclasses.dataclass(frozen=True)
class _Call:
  """Turns of one request that the server samples in one call.

  top_k: argument of `VllmSampler.generate`.
  attempts: number of calls that gave no turns.
  params: folder kept until the answer.
  """

  index: int
  samples: Sequence[int]
  top_k: int
  attempts: int
  params: ParamsFolder


class _Loop:
  """One call of the sampler.

  The server samples turn after turn, each after the ids of everything before
  it. Turns that it loses are requested again.
  """

  def __init__(
      self,
      sampler: VllmSampler,
      params: ParamsFolder,
      version: int,
      more: requests.MoreFn,
      newer: requests.NewerFn | None,
      turns: requests.Turns | None,
  ):
    self._sampler, self._settings = sampler, sampler.settings
    self._params = params
    self._versions = {params.name: version}
    self._more, self._newer, self._turns = more, newer, turns
    self._num_requests = 0
    self._growing: dict[int, _Growing] = {}
    # By number, calls without an answer.
    self._calls: dict[int, _Call] = {}
    self._num_calls = 0
    self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    # Completions whose environment answers next.
    self._waiting: set[requests.Owner] = set()
    self._over: list[int] = []
    self._watch = None
    if self._settings.stop_strings:
      self._watch = requests.StopStringWatch(
          self._settings.stop_strings, self._settings.text_fn
      )
    self._checked_s = time.monotonic()

  def run(self) -> Iterator[list[tuple[int, types.Completions]]]:
    """Samples until nothing is left; yields requests as they finish."""
    self._sampler.load(self._params)
    try:
      while True:
        self._take_more()
        if not self._growing:
          return
        self._take_answers()
        self._read()
        if self._newer is not None:
          self._take_newer(self._newer())
        if self._over:
          over, self._over = self._over, []
          yield [(i, self._growing.pop(i).completions()) for i in over]
    finally:
      self._sampler.is_sampling = False

  def _take_more(self) -> None:
    """Starts further requests while the server has room for them."""
    num_left = sum(grown.num_left for grown in self._growing.values())
    if num_left >= self._settings.num_rows:
      return
    batch = self._more() or ()
    for request in batch:
      request.check(self._settings, self._sampler.model_config.vocab_size)
    for request in batch:
      self._growing[self._num_requests] = _Growing(request, self._settings)
      self._ask(self._num_requests, range(request.num_completions))
      self._num_requests += 1

  def _ask(
      self,
      index: int,
      samples: Sequence[int],
      top_k: int = 0,
      attempts: int = 0,
  ) -> None:
    """Requests turns in a thread, which a hanging server may block.

    Args:
      index, samples, top_k, attempts: fields of `_Call`.
    """
    self._sampler.is_sampling = True
    number, self._num_calls = self._num_calls, self._num_calls + 1
    self._calls[number] = _Call(index, samples, top_k, attempts, self._params)
    grown, (first, *_) = self._growing[index], samples
    tokens = grown.tokens(first)
    ids = [*grown.request.prompt_tokens.tolist(), *tokens.tolist()]
    num_left = grown.limit - len(tokens)
    arguments = self._params, ids, len(samples), num_left, top_k

    def ask(answers: queue.SimpleQueue[tuple[int, Any]]) -> None:
      time.sleep(attempts * AGAIN_S)
      try:
        answers.put((number, self._sampler.generate(*arguments)))
      except Exception as error:  # Raised again by `_read`.
        answers.put((number, error))

    thread = threading.Thread(target=ask, args=(self._answers,), daemon=True)
    thread.start()

  def _ask_again(self, why: str, number: int | None = None) -> None:
    """Requests turns once more: of one call, or all if the params are lost.

    Args:
      number: the call that failed; None if the server does not answer.
    """
    self._sampler.on_event("sampler_lost", why)
    if number is None or not self._sampler.has(self._params):
      self._sampler.is_sampling = False
      self._sampler.load(self._params, is_lost=True)
      # Late answers of the calls before are left in the old queue.
      self._answers = queue.SimpleQueue()
      again, self._calls = [*self._calls.values()], {}
    else:
      again = [self._calls.pop(number)]
    for call in again:
      attempts = call.attempts + 1
      if attempts == _MOST_ATTEMPTS:
        raise RuntimeError(
            f"{self._sampler.server.url}: {attempts} attempts gave no"
            f" completion by the given params: {why}"
        )
      self._ask(call.index, call.samples, call.top_k, attempts)
    self._checked_s = time.monotonic()

  def _read(self) -> None:
    """Takes a turn from the server; waits a moment for one."""
    if not self._calls:
      return
    try:
      number, answer = self._answers.get(
          timeout=_LOOK_EVERY_S if self._waiting else _POLL_S
      )
    except queue.Empty:
      if time.monotonic() - self._checked_s > HEALTH_S:
        try:
          self._sampler.check_is_alive()
        except UnreachableError as error:
          self._ask_again(str(error))
        self._sampler.progress()
        self._checked_s = time.monotonic()
      return
    self._sampler.progress()
    if isinstance(answer, UnreachableError):
      self._ask_again(str(answer), number)
      return
    if isinstance(answer, Exception):
      raise answer
    call = self._calls[number]
    known = self._versions
    if call.params.rank:
      known = {self._sampler.base: self._versions[call.params.name]}
    versions = [turn.versions(known) for turn in answer]
    if None in versions:
      self._ask_again(
          f"{self._sampler.server.url}: other weights sampled a turn; does"
          " another client change its weights?",
          number,
      )
      return
    del self._calls[number]
    for sample, *turn in zip(call.samples, answer, versions, strict=True):
      self._add((call.index, sample), *turn)
    self._sampler.is_sampling = bool(self._calls)

  def _add(
      self, owner: requests.Owner, turn: _Turn, versions: Sequence[int]
  ) -> None:
    """Appends a turn to its completion."""
    index, sample = owner
    grown = self._growing[index]
    n, start = len(turn.ids), grown.starts_S[sample]
    stopped = n > 0 and turn.ids[-1] in self._settings.stop_ids
    before = grown.tokens(sample)
    if self._watch is not None:
      text_ids = [*before[start:], *turn.ids[: n - stopped]]
      cut = self._watch.cut(owner, np.array(text_ids, np.int32))
      if cut is not None:
        n, stopped = start + cut - len(before), True
    grown.add(
        sample, turn.ids[:n], turn.logprobs[:n], versions[:n], turn.kept[:n]
    )
    tokens = grown.tokens(sample)
    if not stopped and len(tokens) < grown.limit:
      # The server stopped at a text that is no stop string here, or kept too
      # many tokens.
      self._ask(index, [sample], turn.top_k)
      return
    grown.stopped_S[sample] = stopped
    if stopped and self._turns is not None:
      self._waiting.add(owner)
      self._turns.end(owner, tokens)
      return
    if self._turns is not None:
      self._turns.cut(owner, tokens)
    self._finish(owner)

  def _take_answers(self) -> None:
    """Continues completions that their environment answered, or ends them."""
    if not self._waiting:
      return
    wait_s = 0.0 if self._calls else _LOOK_EVERY_S
    for owner, ids in self._turns.answers(wait_s):
      self._waiting.remove(owner)
      index, sample = owner
      grown = self._growing[index]
      # An answer without room for a further token is dropped.
      if ids is not None and len(ids) >= (
          grown.limit - grown.lengths_S[sample]
      ):
        self._turns.cut(owner, None)
        grown.stopped_S[sample], ids = False, None
      if ids is None:
        self._finish(owner)
        continue
      grown.add(sample, ids)
      grown.starts_S[sample] = end = int(grown.lengths_S[sample])
      if self._watch is not None:
        self._watch.begin_turn(owner, end)
      self._ask(index, [sample])

  def _finish(self, owner: requests.Owner) -> None:
    index, _ = owner
    if self._watch is not None:
      self._watch.forget(owner)
    self._growing[index].num_left -= 1
    if not self._growing[index].num_left:
      self._over.append(index)

  def _take_newer(
      self, version_and_params: tuple[int, types.PyTree] | None
  ) -> None:
    """Switches to newer params; None keeps the current ones."""
    if version_and_params is not None:
      version, self._params = version_and_params
      self._versions[self._params.name] = version
    self._sampler.swap(self._params)


class VllmServer:
  """JSON requests to one server.

  url: base URL without a trailing slash.
  """

  def __init__(self, url: str):
    self.url = url.rstrip("/")
    self._headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
      self._headers["Authorization"] = f"Bearer {key}"

  def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
    """Returns the answer; see `post` for errors."""
    return self._ask(path, None, timeout_s)

  def post(
      self,
      path: str,
      body: Mapping[str, Any] | None = None,
      *,
      timeout_s: float = 60.0,
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
      self, path: str, body: bytes | None, timeout_s: float
  ) -> dict[str, Any]:
    request = urllib_request.Request(self.url + path, body, self._headers)
    try:
      with urllib_request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read()
    except urllib_error.HTTPError as error:
      detail = error.read(2000).decode(errors="replace")
      how = f"the server must be vLLM 0.32 or newer, started with {HOW}"
      # A server that has restarted lacks the adapters.
      is_lost = error.code >= 500 or (
          error.code == 404 and "NotFoundError" in detail
      )
      if path == _ADAPTER_PATH:  # A refusal may have any code.
        how, is_lost = _ADAPTER_HOW, error.code == 503
      if is_lost:
        raise UnreachableError(
            f"{self.url}{path} failed ({error.code}): {detail:.300}"
        ) from error
      raise self.wrong(
          path, f"refused ({error.code}): {detail:.300}; {how}"
      ) from error
    except (OSError, http.client.HTTPException) as error:
      raise UnreachableError(
          f"no vLLM server answers at {self.url} ({error})"
      ) from error
    try:
      if path == _ADAPTER_PATH:  # A sentence.
        return {}
      result = json.loads(text) if text.strip() else {}
    except ValueError:
      result = None
    if not isinstance(result, dict):
      raise self.wrong(path, f"no JSON object: {text[:80]!r}")
    return result

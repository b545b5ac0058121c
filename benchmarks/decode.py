# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens per second, versus PyTorch and the machine's limit.

Samples 2 prompts x 16 completions of 64 + 64 tokens, without a stop token, from
a Llama of 25.7 M params in float32, or in
`--config.model.compute_dtype=bfloat16`.

TBA_JAX_PEERS names a folder with `make_checkpoint.py` (DIR llama 30m) and
`decode_hf.py` (DIR rows P T K, prints JSON with `tokens_per_s`). Both programs
then sample the same checkpoint in turn, each alone on the machine; `ratio`
compares the best runs, `ratios` each pair. Without the folder or PyTorch, only
ours is measured, on random params. If TBA_JAX_TUNIX names a Python with tunix,
its sampler is timed as well (`decode_tunix.py`, DIR rows P T; it prefills each
row).

`steps_tokens_per_s` excludes prefill and first tokens, which are timed
separately.

The limit is the time of a decode step's matrix products: 2 flops per parameter
and token at the speed of a [32, 512] x [512, 1536] product whose weights do not
fit the cache, measured in the same run.
"""

from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import peer_model
from tba_jax import types
from tba_jax.learning import published
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tba_jax.sampling import decode

_PEERS = "TBA_JAX_PEERS"
_TUNIX = "TBA_JAX_TUNIX"
_PEER_TIMEOUT_S = 600
_REPEATS = 3
_PROMPT_IDS = 3, 250


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  prompts: number of prompts.
  completions: completions of each prompt.
  prompt_tokens: tokens of each prompt.
  completion_tokens: tokens of each completion.
  runs: samplings per repeat, the fastest of which counts, since ours is short
    relative to the start of the peer's process.
  model: shape of the model if no peer makes it.
  """

  prompts: int = 2
  completions: int = 16
  prompt_tokens: int = 64
  completion_tokens: int = 64
  runs: int = 4
  model: config_lib.ModelConfig = peer_model.SHAPE

  @property
  def rows(self) -> int:
    return self.prompts * self.completions


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Returns tokens/s of ours and the peer, their ratio, and the limit.

  Args:
    config: only `model.compute_dtype` and `publish.dtype` are read.
    operands: repeats (default 3).
    work: sizes of what is timed.

  Raises:
    RuntimeError: a peer's script failed.
    ValueError: the folder of peers is invalid.
  """
  repeats = int(operands[0]) if operands else _REPEATS
  peers = find_peers()
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as folder:
    shape, params = load_model(peers, folder, work.model)
    dtype = config_lib.compute_dtype(config.model, jax.default_backend())
    shape = dataclasses.replace(shape, compute_dtype=dtype)
    dtypes = published.published_dtypes(config)
    params = published.snapshot(params, dtypes=dtypes)
    ours = make_ours(transformer.make_model(shape), params, work)
    pairs = []
    for _ in range(repeats):
      pair = _best_of_ours(ours, work)
      if peers is not None:
        shapes = (
            work.rows,
            work.prompt_tokens,
            work.completion_tokens,
            work.completions,
        )
        printed = run_script(peers, "decode_hf.py", folder, *map(str, shapes))
        pair["hf_tokens_per_s"] = json.loads(printed)["tokens_per_s"]
        if tunix := os.environ.get(_TUNIX):
          printed = run_script(
              peers,
              "decode_tunix.py",
              folder,
              *map(str, shapes[:3]),
              python=tunix,
          )
          pair["tunix_tokens_per_s"] = json.loads(printed)["tokens_per_s"]
      pairs.append(pair)
  num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
  result = {
      "rows": work.rows,
      "prompt_tokens": work.prompt_tokens,
      "completion_tokens": work.completion_tokens,
      "completions_per_prompt": work.completions,
      "num_params": num_params,
      "limit_tokens_per_s": _limit_flops(work) / (2 * num_params),
      **{name: max(pair[name] for pair in pairs) for name in pairs[0]},
  }
  result["share_of_limit"] = (
      result["tokens_per_s"] / result["limit_tokens_per_s"]
  )
  result["steps_share_of_limit"] = (
      result["steps_tokens_per_s"] / result["limit_tokens_per_s"]
  )
  if "tunix_tokens_per_s" in result:
    result["tunix_ratio"] = (
        result["tokens_per_s"] / result["tunix_tokens_per_s"]
    )
  if peers is not None:
    ratio = lambda pair: pair["tokens_per_s"] / pair["hf_tokens_per_s"]
    result["ratio"] = ratio(result)
    result["ratios"] = [ratio(pair) for pair in pairs]
  return result


def find_peers() -> pathlib.Path | None:
  """Returns the folder of peers; None if it is unset or PyTorch is missing."""
  folder = os.environ.get(_PEERS)
  if not folder or importlib.util.find_spec("torch") is None:
    return None
  path = pathlib.Path(folder)
  for name in ("make_checkpoint.py", "decode_hf.py"):
    if not (path / name).is_file():
      raise ValueError(f"{_PEERS}={folder}: it has no {name}")
  return path


def load_model(
    peers: pathlib.Path | None, folder: str, shape: config_lib.ModelConfig
) -> tuple[config_lib.ModelConfig, types.PyTree]:
  """Returns the peers' model, saved in `folder`, or else a random one."""
  if peers is None:
    init = jax.jit(transformer.make_model(shape).init)
    return shape, init(jax.random.key(0))
  run_script(peers, "make_checkpoint.py", folder, "llama", "30m")
  return hf.load(folder)


def run_script(
    folder: pathlib.Path,
    name: str,
    *arguments: str,
    python: str = sys.executable,
) -> str:
  """Runs a peer's script to its end; returns its last line of output."""
  process = subprocess.run(
      [python, str(folder / name), *arguments],
      capture_output=True,
      text=True,
      timeout=_PEER_TIMEOUT_S,
  )
  if process.returncode:
    raise RuntimeError(
        f"{name} ended with status {process.returncode}:"
        f" {process.stderr[-2000:]}"
    )
  return process.stdout.strip().rpartition("\n")[2]


def _best_of_ours(ours: Callable[[int], float], work: Work) -> dict[str, float]:
  """Returns tokens/s in total and of decode steps alone."""
  least = lambda tokens: min(ours(tokens) for _ in range(work.runs))
  whole_s, first_s = least(work.completion_tokens), least(1)
  num_steps = work.completion_tokens - 1
  return {
      "tokens_per_s": work.rows * work.completion_tokens / whole_s,
      "steps_tokens_per_s": work.rows * num_steps / (whole_s - first_s),
      "prefill_tokens_per_s": work.prompts * work.prompt_tokens / first_s,
  }


def make_ours(
    model: transformer.Model, params: types.PyTree, work: Work
) -> Callable[[int], float]:
  """Returns (tokens per completion) -> seconds to sample all completions."""
  sampler = decode.JaxSampler(
      model,
      decode.Settings(
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          max_prompt_tokens=work.prompt_tokens,
          max_completion_tokens=work.completion_tokens,
          num_rows=work.rows,
          chunk_steps=work.completion_tokens,
          stop_ids=(),
          pad_id=0,
          seed=0,
      ),
  )
  rng = np.random.default_rng(0)
  first, end = _PROMPT_IDS
  prompts = rng.integers(
      first,
      min(end, model.config.vocab_size),
      (work.prompts, work.prompt_tokens),
  )
  sampler.warm_up(params)

  def once(max_tokens: int) -> float:
    requests = [
        decode.Request(
            prompt_tokens=prompt,
            prompt_id=index,
            visit=0,
            num_completions=work.completions,
            max_tokens=max_tokens,
        )
        for index, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    sampler.sample(params, requests, version=0)
    return time.perf_counter() - start

  return once


def _limit_flops(work: Work) -> float:
  """Returns flop/s of products with few rows and 48 MB of weights."""
  shape = work.model.width, work.model.mlp_width
  rows_RxD = jnp.ones((work.rows, shape[0]))
  weights = [jnp.full(shape, float(i)) for i in range(16)]
  products = jax.jit(lambda x, ws: sum((x @ w).sum() for w in ws))
  products(rows_RxD, weights).block_until_ready()
  seconds = []
  for _ in range(10):
    start = time.perf_counter()
    products(rows_RxD, weights).block_until_ready()
    seconds.append(time.perf_counter() - start)
  flops = 2 * rows_RxD.size * shape[1] * len(weights)
  return flops / min(seconds)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens per second if most completions are short.

The model assigns all 512 tokens about the same probability, and 16 of them stop
a completion, so lengths are geometric with a mean of about a quarter of the
limit, 128. 8 prompts of 64 tokens x 16 completions pass through 32 rows. Only
tokens up to the stop count.

With TBA_JAX_PEERS (see `decode.py`), Hugging Face `generate` samples the same
checkpoint in batches of 32 rows, each as long as its longest row. It is timed
on rows as long as the longest of 32 consecutive completions of ours is on
average, and credited with the same tokens.
"""

from collections.abc import Sequence
import dataclasses
import json
import tempfile
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import decode as benchmarks_decode
from benchmarks import peer_model
from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.net import transformer
from tba_jax.sampling import decode as sampling_decode

_CHUNK_STEPS = 8
_LAST_PROMPT_ID = 250


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  prompts: number of prompts.
  completions: completions of each prompt.
  rows: rows that are decoded at a time.
  prompt_tokens: tokens of each prompt.
  completion_tokens: maximum tokens of a completion.
  stop_ids: number of tokens that stop a completion.
  model: shape of the model if no peer makes it.
  """

  prompts: int = 8
  completions: int = 16
  rows: int = 32
  prompt_tokens: int = 64
  completion_tokens: int = 128
  stop_ids: int = 16
  model: config_lib.ModelConfig = peer_model.SHAPE


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Returns tokens/s of ours and of the peer, their ratio, and the lengths.

  Args:
    config: not read.
    operands: repeats (default 3).
    work: sizes of what is timed.

  Raises:
    RuntimeError: a peer's script failed.
    ValueError: the folder of peers is invalid.
  """
  del config
  repeats = int(operands[0]) if operands else 3
  peers = benchmarks_decode.find_peers()
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as folder:
    shape, params = benchmarks_decode.load_model(peers, folder, work.model)
    sampler = _make_sampler(transformer.make_model(shape), work)
    requests = _requests(work, shape.vocab_size)
    sampler.warm_up(params)
    pairs = []
    for _ in range(repeats):
      seconds, lengths = _measure(sampler, params, requests)
      pair = {"tokens_per_s": lengths.sum() / seconds}
      if peers is not None:
        batches = lengths.reshape(-1, work.rows)
        longest = round(float(batches.max(axis=1).mean()))
        shapes = work.rows, work.prompt_tokens, longest, work.completions
        printed = benchmarks_decode.run_script(
            peers, "decode_hf.py", folder, *map(str, shapes)
        )
        rows_per_s = json.loads(printed)["tokens_per_s"] / longest
        pair["hf_tokens_per_s"] = rows_per_s * lengths.mean()
      pairs.append(pair)
  result = {
      "rows": work.rows,
      "completions": lengths.size,
      "completion_tokens": work.completion_tokens,
      "mean_length": float(lengths.mean()),
      **{name: float(max(p[name] for p in pairs)) for name in pairs[0]},
  }
  if peers is not None:
    result["ratio"] = result["tokens_per_s"] / result["hf_tokens_per_s"]
  return result


def _make_sampler(
    model: transformer.Model, work: Work
) -> sampling_decode.JaxSampler:
  return sampling_decode.JaxSampler(
      model,
      sampling_decode.Settings(
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          max_prompt_tokens=work.prompt_tokens,
          max_completion_tokens=work.completion_tokens,
          num_rows=work.rows,
          chunk_steps=_CHUNK_STEPS,
          stop_ids=range(work.stop_ids),
          pad_id=0,
          seed=0,
      ),
  )


def _requests(work: Work, vocab_size: int) -> list[sampling_decode.Request]:
  rng = np.random.default_rng(0)
  ids = work.stop_ids, min(_LAST_PROMPT_ID, vocab_size)
  return [
      sampling_decode.Request(
          prompt_tokens=rng.integers(*ids, work.prompt_tokens),
          prompt_id=index,
          visit=0,
          num_completions=work.completions,
      )
      for index in range(work.prompts)
  ]


def _measure(
    sampler: sampling_decode.JaxSampler,
    params: types.PyTree,
    requests: Sequence[sampling_decode.Request],
) -> tuple[float, np.ndarray]:
  """Returns the seconds of the faster of two runs, and the lengths."""
  seconds = []
  for _ in range(2):
    start = time.perf_counter()
    completions = sampler.sample(params, requests, version=0)
    jax.block_until_ready(params)
    seconds.append(time.perf_counter() - start)
  return min(seconds), np.concatenate([f.lengths for f in completions])

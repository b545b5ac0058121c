# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens per second as a cache of 1,024 tokens fills up.

32 rows of the model of `decode.py` sample 960 tokens after prompts of 64, in
chunks of 64 decode steps. Timed are the chunks that end with a quarter, half
and all of the cache in use: a step should cost what is live, not what there is
room for.
"""

from collections.abc import Sequence
import tempfile
import time
from typing import Any

import ml_collections
import numpy as np

from benchmarks import decode as benchmarks_decode
from tba_jax.models import transformer
from tba_jax.sampling import decode as sampling_decode

_NUM_PROMPTS = 2
_NUM_ROWS = 32
_PROMPT_TOKENS = 64
_CACHE_TOKENS = 1024
_CHUNK_STEPS = 64
_PROMPT_IDS = 3, 250
_SHARES = (0.25, 0.5, 1.0)


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns tokens/s of decode steps, by the share of the cache in use.

  Args:
    config: not read.
    operands: repeats (default 2), of which the fastest chunks count.
  """
  del config
  repeats = int(operands[0]) if operands else 2
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as folder:
    shape, params = benchmarks_decode.load_model(None, folder)
  sampler = sampling_decode.Sampler(
      transformer.make_model(shape),
      sampling_decode.Settings(
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          max_prompt_tokens=_PROMPT_TOKENS,
          max_completion_tokens=_CACHE_TOKENS - _PROMPT_TOKENS,
          num_rows=_NUM_ROWS,
          chunk_steps=_CHUNK_STEPS,
          stop_ids=(),
          pad_id=0,
          seed=0,
      ),
  )
  rng = np.random.default_rng(0)
  requests = [
      sampling_decode.Request(
          prompt_tokens=rng.integers(*_PROMPT_IDS, _PROMPT_TOKENS),
          prompt_id=index,
          visit=0,
          num_completions=_NUM_ROWS // _NUM_PROMPTS,
      )
      for index in range(_NUM_PROMPTS)
  ]
  sampler.warm_up(params)
  chunks = []
  for _ in range(repeats):
    times: list[float] = []
    # Asked between chunks, when the last one has ended.
    sampler.sample(
        params,
        requests,
        version=0,
        newer=lambda times=times: times.append(time.perf_counter()),
    )
    chunks.append(np.diff([*times, time.perf_counter()]))
  seconds = np.min(chunks, axis=0)
  tokens_per_s = {}
  for share in _SHARES:
    # The first chunk holds the prefill too.
    last = int(share * _CACHE_TOKENS - _PROMPT_TOKENS) // _CHUNK_STEPS - 1
    # Each row's first token came before the first chunk.
    steps = _CHUNK_STEPS - (share == 1)
    tokens_per_s[f"{share:.0%}"] = _NUM_ROWS * steps / float(seconds[last])
  return {
      "rows": _NUM_ROWS,
      "cache_tokens": _CACHE_TOKENS,
      "tokens_per_s_by_share_in_use": tokens_per_s,
  }

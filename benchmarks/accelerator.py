# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decode and train speed of a 1.5 B Llama on one accelerator, and its memory.

    python -m benchmarks accelerator [ROWS [COMPLETION_TOKENS]]

Random params, bfloat16 compute. Decode: ROWS completions (64), 8 of each prompt
of 512 tokens, COMPLETION_TOKENS long (512). The bound is the time to read the
weights and, on average, the KV cache once a step at the bandwidth measured in
the same run. Training: one trajectory balance update of 4 prompts x 8
completions of 512 + 512 tokens with float32 params and moments, one prompt a
micro-batch. A token is one of B·K·(P+T); `share_of_product` holds 6 flops a
param and token against a bfloat16 matrix product measured in the same run.
"""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models import transformer
from tba_jax.sampling import decode
from tba_jax.training import sharding
from tba_jax.training import train_step

_K = 8
_PROMPT_TOKENS = 512
_TRAIN_PROMPTS = 4
_TRAIN_TOKENS = 512
SHAPE = config_lib.ModelConfig(
    family="llama",
    vocab_size=128256,
    num_layers=16,
    width=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    mlp_width=8192,
    rope_theta=500000.0,
    norm_epsilon=1e-5,
    tie_embeddings=False,
    max_positions=16384,
    param_dtype="float32",
    compute_dtype="bfloat16",
    **config_lib.PLAIN,
    pad_id=0,
    bos_id=1,
    eos_id=2,
)


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns speeds, bounds and memory; `config` gives optimizer and loss."""
  rows, tokens = [*map(int, operands), 64, 512][:2] if operands else (64, 512)
  device = jax.devices()[0]
  result = {"device": device.device_kind, "rows": rows, "tokens": tokens}
  result |= _decode(rows, tokens)
  result |= _train(config)
  stats = device.memory_stats() or {}
  result["peak_gb"] = stats.get("peak_bytes_in_use", 0) / 1e9
  return result


def _best_s(fn: Callable[[], Any], repeats: int) -> float:
  """Returns the seconds of the fastest call, the first one left out."""
  jax.block_until_ready(fn())
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(fn())
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def _decode(rows: int, tokens: int) -> dict[str, float]:
  shape = dataclasses.replace(SHAPE, param_dtype="bfloat16")
  model = transformer.make_model(shape)
  params = jax.jit(model.init)(jax.random.PRNGKey(0))
  sampler = decode.Sampler(
      model,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      max_prompt_tokens=_PROMPT_TOKENS,
      max_completion_tokens=tokens,
      num_rows=rows,
      chunk_steps=64,
      eos_id=None,
      pad_id=0,
      seed=0,
  )
  rng = np.random.default_rng(0)
  prompts = rng.integers(3, shape.vocab_size, (rows // _K, _PROMPT_TOKENS))

  def sample(max_tokens: int) -> Any:
    requests = [
        decode.Request(
            prompt_tokens=prompt,
            prompt_id=i,
            visit=0,
            num_completions=_K,
            max_tokens=max_tokens,
        )
        for i, prompt in enumerate(prompts)
    ]
    return [c.tokens for c in sampler.sample(params, requests, version=0)]

  whole_s = _best_s(lambda: sample(tokens), 3)
  first_s = _best_s(lambda: sample(1), 3)
  step_s = (whole_s - first_s) / (tokens - 1)
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  columns = _PROMPT_TOKENS + tokens / 2
  cache = 2 * 2 * SHAPE.num_layers * rows * columns * 8 * SHAPE.head_dim
  bandwidth = _bandwidth()
  return {
      "decode_tokens_per_s": rows * tokens / whole_s,
      "decode_step_ms": step_s * 1e3,
      "decode_bound_ms": (weights + cache) / bandwidth * 1e3,
      "prefill_and_first_token_ms": first_s * 1e3,
      "bandwidth_gb_per_s": bandwidth / 1e9,
  }


def _bandwidth() -> float:
  """Returns bytes/s, read and written, of adding 1 to a gigabyte."""
  x = jnp.zeros(1 << 29, jnp.bfloat16)
  add = jax.jit(lambda x: x + 1)
  return 2 * x.nbytes / _best_s(lambda: add(x), 10)


def _train(config: ml_collections.ConfigDict) -> dict[str, float]:
  config = config.copy_and_resolve_references()
  config.train.num_steps = 1000
  config.train.micro_batch_prompts = 1
  config.train.remat = "full"
  config.optimizer.warmup_steps = 0
  config.mesh.update(data=1, fsdp=1, sequence=1, tensor=1)
  model = transformer.make_model(SHAPE, remat="full")
  mesh = sharding.make_mesh(config.mesh)
  params = jax.jit(model.init)(jax.random.PRNGKey(0))
  num_params = sum(x.size for x in jax.tree.leaves(params))
  state = train_step.init_state(config, model, params, mesh)
  del params
  step = train_step.make_train_step(config, model, mesh)
  batch = sharding.shard_batch(_batch(), mesh, config.sharding)
  state, _ = step(state, batch)
  seconds = []
  for _ in range(4):
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - start)
  num_tokens = _TRAIN_PROMPTS * _K * (_PROMPT_TOKENS + _TRAIN_TOKENS)
  tokens_per_s = num_tokens / min(seconds)
  x_NxN = jnp.ones((8192, 8192), jnp.bfloat16)
  product = jax.jit(lambda x: x @ x)
  flops = 2 * 8192**3 / _best_s(lambda: product(x_NxN), 10)
  return {
      "num_params": num_params,
      "train_tokens_per_s": tokens_per_s,
      "train_step_s": min(seconds),
      "product_tflops": flops / 1e12,
      "share_of_product": 6 * num_params * tokens_per_s / flops,
  }


def _batch() -> types.Batch:
  """Returns full-length random completions."""
  B, K, P, T = _TRAIN_PROMPTS, _K, _PROMPT_TOKENS, _TRAIN_TOKENS
  rng = np.random.default_rng(0)
  tokens = lambda *shape: rng.integers(3, SHAPE.vocab_size, shape, np.int32)
  logprobs = lambda: rng.uniform(-7, -5, (B, K, T)).astype(np.float32)
  return types.Batch(
      prompt_tokens=tokens(B, P),
      prompt_mask=np.ones((B, P), np.float32),
      completion_tokens=tokens(B, K, T),
      completion_mask=np.ones((B, K, T), np.float32),
      behavior_logprobs=logprobs(),
      ref_logprobs=logprobs(),
      rewards=rng.uniform(size=(B, K)).astype(np.float32),
      staleness_steps=np.ones((B, K), np.float32),
  )

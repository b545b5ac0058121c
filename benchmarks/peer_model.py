# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The model that benchmarks time (25.7 M params, float32), and batches."""

from collections.abc import Sequence

import numpy as np

from tba_jax import types
from tba_jax.models import config

# Shape that the peers' `make_checkpoint.py DIR llama 30m` writes.
SHAPE = config.ModelConfig(
    family="llama",
    vocab_size=512,
    num_layers=8,
    width=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_width=1536,
    rope_theta=10000.0,
    norm_epsilon=1e-6,
    tie_embeddings=False,
    max_positions=1024,
    param_dtype="float32",
    compute_dtype="float32",
    pad_id=0,
    bos_id=1,
    eos_id=2,
)


def make_batch(shape: Sequence[int], vocab_size: int) -> types.Batch:
  """Returns full-length random completions; content does not affect times."""
  B, K, P, T = shape
  rng = np.random.default_rng(0)
  tokens = lambda *shape: rng.integers(3, vocab_size, shape).astype(np.int32)
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

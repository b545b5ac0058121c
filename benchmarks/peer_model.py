# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The model that benchmarks time: 25.7 M params in float32."""

from tba_jax.models import config

# What the peers' `make_checkpoint.py DIR llama 30m` writes.
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
    **config.PLAIN,
    pad_id=0,
    bos_id=1,
    eos_id=2,
)

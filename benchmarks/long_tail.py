# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of completions with very different lengths.

    python -m benchmarks long_tail trainer

Completion lengths are lognormal with a cutoff: a few are ten times as long as
most.

`trainer` counts the FLOP of a train step of Qwen2.5-0.5B's shape on 32 prompts
x 8 completions, relative to ideal variable-length attention that computes each
prompt once per group. From the choices of packing and kernels it counts matrix
products at all positions of the micro-batches, computed chunks of logits, and
tiles visited by attention; nothing is compiled. Neither figure includes
recomputation by `train.remat`.
"""

from collections.abc import Sequence
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import slices
from tba_jax import types
from tba_jax.learning import packing
from tba_jax.losses import logprobs
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.kernels import gpu_rows
from tba_jax.models.kernels import kernels
from tba_jax.models.kernels import splash_rows
from tba_jax.models.net import packed
from tba_jax.models.net import row_attention

# (mean, longest) in tokens: chat, mathematics, and two for reasoning models.
LENGTHS = ((300, 1024), (500, 2048), (2500, 16384), (8000, 32768))
# Standard deviation of the logarithm of a length.
_SPREAD = 1.0
# Prompts, completions per prompt, and tokens of a prompt: mean and maximum.
_B, _K, _PROMPTS = 32, 8, (200, 512)
# Full-length prompts that fit into a micro-batch per shard.
_MICRO = 4
_MODEL = "Qwen/Qwen2.5-0.5B"
_BACKENDS = ("cpu", "gpu", "tpu")


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of the part in the first operand.

  Returns:
    For `trainer`: for each (mean, longest, backend, devices of `mesh.sequence`)
    the ratio of FLOP to the minimum, and of row positions to tokens.
  """
  del config
  if list(operands) != ["trainer"]:
    raise ValueError(f"operands {list(operands)}: must be 'trainer'")
  shapes = json.loads(slices.SHAPES.read_text())
  shape = hf_config.from_hf(shapes[_MODEL])
  out = []
  for mean, longest in LENGTHS:
    for sequence in (1, 4):
      batch = make_batch(mean, longest, sequence)
      for backend in _BACKENDS:
        found = count(shape, batch, backend, sequence)
        row = dict(mean=mean, longest=longest, backend=backend)
        out.append({**row, "sequence": sequence, **found})
        print(out[-1], file=sys.stderr)
  return {"rows": out}


def make_batch(
    mean: int, longest: int, sequence: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, types.Rows]:
  """Returns a prompt mask [B, P], lengths [B, K] and the batch's rows."""
  mean_prompt, P = _PROMPTS
  lengths_BxK = lognormal_lengths(mean, longest, (_B, _K), seed)
  prompts_B = lognormal_lengths(mean_prompt, P, (_B,), seed + 1)
  prompt_mask = np.arange(P) >= P - prompts_B[:, None]
  mask = np.arange(longest) < lengths_BxK[..., None]
  # No two completions are equal.
  tokens = np.arange(_B * _K, dtype=np.int32).reshape(_B, _K, 1)
  tokens = np.broadcast_to(tokens, mask.shape)
  shapes = packing.Packing((_B, _K, P, longest), _MICRO, sequence=sequence)
  return (
      prompt_mask,
      lengths_BxK,
      packing.pack(shapes, prompt_mask, tokens, mask),
  )


def count(
    shape: config_lib.ModelConfig,
    batch: tuple[np.ndarray, np.ndarray, types.Rows],
    backend: str,
    sequence: int,
) -> dict[str, float]:
  """Returns the ratios of FLOP to the minimum, and of row positions to tokens.

  A weight of a layer or the head takes 6 FLOP per token, and a visible key 12
  per query and head entry: a third of these forward, two thirds backward.
  Recomputed logits, and scores in attention's backward pass, are excluded on
  both sides.
  """
  prompt_mask, lengths_BxK, rows = batch
  prompts_B = prompt_mask.sum(axis=1)
  (R, N, L), T = rows.token_indices.shape, rows.place_indices.shape[2]
  D, Dh = shape.width, shape.head_dim
  H, G = shape.num_heads, shape.num_kv_heads
  layer = 2 * (H + G) * Dh * D + 3 * D * shape.mlp_width
  head = shape.vocab_size * D

  def flops(num_tokens: float, num_logits: float, num_pairs: float) -> float:
    layers = 6 * layer * num_tokens + 12 * H * Dh * num_pairs
    return shape.num_layers * layers + 6 * head * num_logits

  prompt_pairs = (prompts_B * (prompts_B + 1) / 2).sum()
  own_pairs = lengths_BxK * (lengths_BxK + 1) / 2
  own_pairs = (own_pairs + prompts_B[:, None] * lengths_BxK).sum()
  num_needed = prompts_B.sum() + lengths_BxK.sum()
  needed = flops(num_needed, lengths_BxK.sum(), prompt_pairs + own_pairs)

  filled = [n for n in range(N) if (rows.token_indices[:, n] >= 0).any()]
  num_logits, num_pairs = 0, 0
  visited = jax.jit(_visited, static_argnums=(2, 3))
  for n in filled:
    token_indices_RxL = rows.token_indices[:, n]
    counts = token_indices_RxL >= prompt_mask.size
    num_logits += _num_logits(counts, shape.vocab_size, backend, sequence)
    shapes = (_B, _K, T)
    num_pairs += float(visited(token_indices_RxL, prompt_mask, shapes, backend))
  num_places = len(filled) * R * L
  return {
      "flops": flops(num_places, num_logits, num_pairs) / needed,
      "places": num_places / num_needed,
      "pairs": num_pairs / (prompt_pairs + own_pairs),
  }


def _num_logits(
    counts_RxL: np.ndarray, vocab_size: int, backend: str, sequence: int
) -> int:
  """Returns how many tokens' logits `logprobs.map_logits` computes."""
  most = logprobs.MAX_LOGITS["cpu" if backend == "cpu" else "other"]
  own = counts_RxL.size // sequence
  if own * vocab_size <= most:
    return counts_RxL.size
  length = logprobs.chunk_length(own, most // vocab_size)
  per_shard = counts_RxL.reshape(len(counts_RxL), sequence, -1).sum(axis=(0, 2))
  num_chunks = -(-per_shard.max() // length)
  return int(num_chunks * length * sequence)


def _visited(
    token_indices_RxL: jax.Array,
    prompt_mask: jax.Array,
    shape: tuple[int, int, int],
    backend: str,
) -> jax.Array:
  """Returns the number of query-key pairs in the blocks attention computes."""
  places = packed.places_of(jnp.asarray(token_indices_RxL), prompt_mask, shape)
  L = token_indices_RxL.shape[1]
  block = gpu_rows.BLOCK
  if backend != "gpu":
    block = row_attention.block_size(places, backend)
  length = packing.round_up(L, block)
  if backend == "tpu":
    block, length = kernels.block_sizes(L, block)
  elif backend == "cpu" and L <= row_attention.WHOLE:
    return jnp.float32(L * token_indices_RxL.size)
  pad = lambda x: jnp.pad(x, ((0, 0), (0, length - L)), constant_values=-1)
  places = jax.tree.map(pad, places)
  if backend == "tpu":
    calls = splash_rows.computed_blocks(places, 0, block)
    num_blocks = sum(jnp.sum(x) for x in calls)
  else:
    cut = lambda x: x.reshape(len(x), -1, block)
    _, first, _, second = packed.seen_blocks(
        jax.tree.map(cut, places), 0, block
    )
    num_blocks = jnp.sum(first + second)
  return num_blocks * jnp.float32(block * block)


def lognormal_lengths(
    mean: int, longest: int, shape: tuple[int, ...], seed: int
) -> np.ndarray:
  """Returns random lengths of completions in tokens, int64 of a shape.

  Lengths are exp(m + s z) with s = 1, rounded and cut off at `longest`. m is
  chosen to give them the mean `mean`.

  Args:
    mean: average tokens, below `longest`.
    longest: maximum tokens of a completion.
  """

  def lengths(m: float, z: np.ndarray) -> np.ndarray:
    return np.clip(np.exp(m + _SPREAD * z), 1, longest)

  # The mean after the cutoff has no closed form; it grows with m.
  many = np.random.default_rng(0).standard_normal(2**16)
  low, high = 0.0, np.log(longest) + 3 * _SPREAD
  for _ in range(40):
    middle = (low + high) / 2
    is_low = lengths(middle, many).mean() < mean
    low, high = (middle, high) if is_low else (low, middle)
  z = np.random.default_rng(seed).standard_normal(shape)
  return np.rint(lengths(low, z)).astype(np.int64)

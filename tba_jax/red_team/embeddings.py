# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings, and how much a set of sentences differs by them."""

from collections.abc import Callable, Sequence
import re
from typing import TYPE_CHECKING
import zlib

import jax
import numpy as np

from tba_jax import types
from tba_jax.red_team import batched

if TYPE_CHECKING:
  from tba_jax import tokenizer as tokenizer_lib

# Of "words": far more than the words of a trial, so that few share one.
_NUM_WORDS = 512

# (texts) -> [n, D] float32 of length 1, or 0 for a text without tokens.
EmbedFn = Callable[[Sequence[str]], np.ndarray]


def of_words(texts: Sequence[str]) -> np.ndarray:
  """Returns how often each word occurs, scaled to length 1; no model."""
  out = np.zeros((len(texts), _NUM_WORDS), np.float32)
  for row, text in enumerate(texts):
    for word in re.findall(r"\w+", text.lower()):
      out[row, zlib.crc32(word.encode()) % _NUM_WORDS] += 1
  return _unit(out)


def of_encoder(
    embed: Callable[..., jax.Array],
    params: types.PyTree,
    tokenizer: "tokenizer_lib.TextTokenizer",
    *,
    max_tokens: int,
    num_rows: int,
) -> EmbedFn:
  """Returns texts -> their mean-pooled states, scaled to length 1.

  Args:
    embed: (params, tokens_BxL, mask_BxL) -> [B, D] float32, mean over tokens.
    params: of it.
    tokenizer: its own.
    max_tokens: L; the rest of a text is cut off.
    num_rows: B.
  """
  run = jax.jit(embed)

  def of_texts(texts: Sequence[str]) -> np.ndarray:
    ids = [tokenizer.encode(text, max_tokens) for text in texts]
    if not ids:
      return np.zeros((0, 1), np.float32)
    return _unit(
        batched.run(
            lambda tokens, mask: run(params, tokens, mask),
            ids,
            num_rows=num_rows,
            num_tokens=max_tokens,
            pad_id=tokenizer.pad_id,
            left=False,
        )
    )

  return of_texts


def cosine_distance(embeddings_NxD: np.ndarray) -> float:
  """Returns the mean of 1 - cosine over all pairs; 0 of fewer than two.

      1 - 1/(N (N-1)) Σ_{i≠j} eᵢ·eⱼ = 1 - (|Σ eᵢ|² - Σ |eᵢ|²) / (N (N-1))

  Source: Lee et al. 2025 (arXiv:2405.18540), diversity of attacks.

  Args:
    embeddings_NxD: [N, D] float32, of length 1.
  """
  count = len(embeddings_NxD)
  if count < 2:
    return 0.0
  e = embeddings_NxD.astype(np.float64)
  pairs = np.square(e.sum(axis=0)).sum() - np.square(e).sum()
  return float(1 - pairs / (count * (count - 1)))


def _unit(values_NxD: np.ndarray) -> np.ndarray:
  norms = np.linalg.norm(values_NxD, axis=-1, keepdims=True)
  return (values_NxD / np.maximum(norms, 1e-12)).astype(np.float32)

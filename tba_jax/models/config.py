# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the shape of a model, without jax."""

import dataclasses

import ml_collections


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape and number formats of one model.

  family: key of `models/build.py:FAMILIES`.
  vocab_size: rows of the embedding, V.
  num_layers: N.
  width: D.
  num_heads: query heads, H; a multiple of num_kv_heads.
  num_kv_heads: key-value heads, G.
  head_dim: Dh, even.
  mlp_width: F.
  rope_theta: base of the rotary frequencies.
  norm_epsilon: added to the mean square in a norm.
  tie_embeddings: True: the head is the embedding's transpose.
  max_positions: longest sequence, prompt and completion together.
  param_dtype: dtype name of stored parameters.
  compute_dtype: dtype name of activations; logits and norms are float32.
  pad_id, bos_id, eos_id: token ids, None where the tokenizer has none.
  """

  family: str
  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  norm_epsilon: float
  tie_embeddings: bool
  max_positions: int
  param_dtype: str
  compute_dtype: str
  pad_id: int | None
  bos_id: int | None
  eos_id: int | None


def from_config(
    config_model: ml_collections.ConfigDict,
    *,
    vocab_size: int,
    pad_id: int | None,
    bos_id: int | None,
    eos_id: int | None,
) -> ModelConfig:
  """Returns the shape that `config.model` describes, for a tokenizer."""
  return ModelConfig(
      **config_model.to_dict(),
      vocab_size=vocab_size,
      pad_id=pad_id,
      bos_id=bos_id,
      eos_id=eos_id,
  )

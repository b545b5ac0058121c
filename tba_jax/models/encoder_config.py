# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`EncoderConfig`: the shape of a BERT or RoBERTa. jax is not imported."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from tba_jax.models import hf_reader

FAMILIES = ("bert", "roberta")
# Hugging Face's names, as `models/config.py` has them.
_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
_CLASSIFIER = "ForSequenceClassification"
# What of either family changes no states in evaluation.
_WITHOUT_EFFECT = (
    "attention_probs_dropout_prob",
    "bos_token_id",
    "classifier_dropout",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "output_past",
    "tie_word_embeddings",
)


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The shape of one encoder; params and activations are float32.

  family: "bert" or "roberta".
  vocab_size: V.
  num_layers: N.
  width: D, a multiple of num_heads.
  num_heads: H.
  mlp_width: F.
  max_positions: rows of the table of positions.
  num_types: rows of the table of token types, of which the first is used.
  norm_epsilon: added to the variance in a norm.
  activation: of the MLP.
  pad_id: RoBERTa counts positions from the one after it.
  num_labels: of a classifier; 0: it has no head.
  """

  family: str
  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  mlp_width: int
  max_positions: int
  num_types: int
  norm_epsilon: float
  activation: str
  pad_id: int
  num_labels: int = 0

  # What `models/layers.py` reads of a shape.
  param_dtype: str = "float32"

  @property
  def first_position(self) -> int:
    """Position of a text's first token."""
    return self.pad_id + 1 if self.family == "roberta" else 0

  @property
  def max_tokens(self) -> int:
    """The longest text."""
    return self.max_positions - self.first_position


def from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
  """Returns the shape that a Hugging Face config.json describes.

  Raises:
    ValueError: model_type is no encoder's, or a setting is missing, not known
      or has a value that we do not compute; the message lists all of them.
  """
  family = hf.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
        f"config.json: model_type={family!r} is not supported for an encoder;"
        f" supported: {sorted(FAMILIES)}"
    )
  reader = hf_reader.Reader(hf)
  reader.skip(*_WITHOUT_EFFECT)
  reader.only("position_embedding_type", "absolute")
  reader.only("is_decoder", False)
  reader.only("add_cross_attention", False)
  reader.only("cross_attention_hidden_size", None)
  reader.only("pruned_heads", {}, None)
  for name in ("torch_dtype", "dtype"):
    reader.take(name, None, (str, type(None)))
  names = reader.take("architectures", None, (list, type(None)))
  labels = reader.take("id2label", None, (dict, type(None)))
  num_labels = reader.take("num_labels", 2, int)
  is_classifier = bool(names) and str(names[0]).endswith(_CLASSIFIER)
  if is_classifier and labels is not None:
    num_labels = len(labels)
  activation = reader.take("hidden_act", "gelu", str)
  if activation not in _ACTIVATIONS:
    reader.problem("hidden_act", activation, " or ".join(_ACTIVATIONS))
  is_bert = family == "bert"
  fields = {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("num_hidden_layers"),
      "width": reader.need("hidden_size"),
      "num_heads": reader.need("num_attention_heads"),
      "mlp_width": reader.need("intermediate_size"),
      # Defaults are transformers' own.
      "max_positions": reader.take("max_position_embeddings", 512, int),
      "num_types": reader.take("type_vocab_size", 2, int),
      "norm_epsilon": reader.take("layer_norm_eps", 1e-12, float),
      "pad_id": reader.take("pad_token_id", 0 if is_bert else 1, int),
  }
  if fields["width"] % max(fields["num_heads"], 1):
    reader.problem(
        "hidden_size", fields["width"], "a multiple of num_attention_heads"
    )
  reader.finish()
  return EncoderConfig(
      family=family,
      activation=activation,
      num_labels=num_labels if is_classifier else 0,
      **fields,
  )

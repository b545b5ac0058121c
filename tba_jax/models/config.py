# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the shape of a model. Does not import JAX."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import ml_collections

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")
# Hugging Face's names; "gelu" is the exact one, "gelu_new" the tanh form.
ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")

# Settings that only some families have, with the value that other families
# require.
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 0,
    "rope_type": "default",
    "rope_factor": 1.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_positions": 8192,
    "rotary_fraction": 1.0,
    "parallel_residual": False,
    "activation": "silu",
    "scale_attention": True,
    "scale_attention_by_layer": False,
}
_SIZES = (
    "vocab_size",
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_width",
    "max_positions",
)
_ROPE = frozenset(name for name in PLAIN if name.startswith("rope_"))

# Family -> the settings of PLAIN that it has.
FAMILY_SETTINGS = {
    "gpt2": {"activation", "scale_attention", "scale_attention_by_layer"},
    "gpt_neox": _ROPE
    | {"activation", "attention_bias", "parallel_residual", "rotary_fraction"},
    "llama": _ROPE | {"attention_bias", "mlp_bias"},
    "mistral": _ROPE | {"sliding_window"},
    "qwen2": _ROPE,
    "qwen3": _ROPE | {"attention_bias"},
}
# Families without grouped-query attention, where heads * head_dim = width.
PLAIN_HEADS = ("gpt2", "gpt_neox")


def compute_dtype(config_model: Mapping[str, Any], backend: str) -> str:
  """Returns the dtype of activations of `config.model` on a JAX backend."""
  if config_model["compute_dtype"] != "auto":
    return config_model["compute_dtype"]
  return "float32" if backend == "cpu" else "bfloat16"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape and number formats of one model.

  family: key of `transformer.FAMILIES`.
  vocab_size: rows of the embedding, V.
  num_layers: N.
  width: D.
  num_heads: query heads, H; a multiple of num_kv_heads.
  num_kv_heads: key-value heads, G.
  head_dim: Dh, even.
  mlp_width: F.
  rope_theta: base of the rotary frequencies; GPT-2 has none.
  norm_epsilon: term added to the mean square in a norm.
  tie_embeddings: whether the head is the embedding's transpose.
  max_positions: longest sequence, prompt and completion together.
  param_dtype: dtype name of stored parameters.
  compute_dtype: dtype name of activations; logits and norms are float32.
  attention_bias: biases of query, key, value and output; Qwen2 always has
    those of query, key and value, GPT-2 all.
  mlp_bias: biases of the MLP; GPT-2 and GPT-NeoX always have them.
  sliding_window: number of tokens that a token sees, itself included; 0 is all.
  rope_type: "default"; "linear" divides positions by rope_factor; "llama3"
    divides only low frequencies by it.
  rope_factor: see rope_type.
  rope_low_freq_factor, rope_high_freq_factor: bounds of "llama3": wavelengths
    above rope_original_positions over the first are low, below it over the
    second high; in between it interpolates.
  rope_original_positions: context length before "llama3" stretched it.
  rotary_fraction: share of a head's entries that rotary positions rotate.
  parallel_residual: whether attention and MLP read the same stream.
  activation: nonlinearity of an ungated MLP; gated ones have "silu".
  scale_attention: whether scores are divided by sqrt(head_dim).
  scale_attention_by_layer: whether also by 1 + the layer's index.
  pad_id, bos_id, eos_id: token ids, None if the tokenizer has none.
  num_labels: outputs per position of a scalar head (reward model, value model,
    classifier); 0 is a head of token logits.
  stop_ids: all tokens that end a text if config.json lists several; eos_id is
    the first of them.
  attention: `config.model.attention`, a kernel for training (`kernels.py`).
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
  attention_bias: bool
  mlp_bias: bool
  sliding_window: int
  rope_type: str
  rope_factor: float
  rope_low_freq_factor: float
  rope_high_freq_factor: float
  rope_original_positions: int
  rotary_fraction: float
  parallel_residual: bool
  activation: str
  scale_attention: bool
  scale_attention_by_layer: bool
  pad_id: int | None
  bos_id: int | None
  eos_id: int | None
  num_labels: int = 0
  stop_ids: tuple[int, ...] = ()
  attention: str = "auto"

  def __post_init__(self):
    for name in _SIZES:
      value = getattr(self, name)
      if type(value) is not int or value < 1:
        raise ValueError(
            f"config.model.{name}={value!r}: allowed an integer of at least 1"
        )
    rows = [
        ("num_heads", self.num_heads % self.num_kv_heads == 0,
         f"a multiple of num_kv_heads={self.num_kv_heads}"),
        ("head_dim", self.head_dim % 2 == 0, "an even number"),
        ("rope_theta", self.rope_theta > 0, "above 0"),
        ("norm_epsilon", self.norm_epsilon > 0, "above 0"),
        ("param_dtype", self.param_dtype in DTYPES, f"one of {DTYPES}"),
        ("compute_dtype", self.compute_dtype in DTYPES, f"one of {DTYPES}"),
        ("sliding_window", self.sliding_window >= 0, "0 or more"),
        ("rope_type", self.rope_type in ROPE_TYPES, f"one of {ROPE_TYPES}"),
        ("rope_factor", self.rope_factor >= 1, "1 or more"),
        ("rope_low_freq_factor", self.rope_low_freq_factor > 0, "above 0"),
        ("rope_high_freq_factor",
         self.rope_high_freq_factor > self.rope_low_freq_factor,
         f"above rope_low_freq_factor={self.rope_low_freq_factor}"),
        ("rope_original_positions", self.rope_original_positions > 0,
         "above 0"),
        ("activation", self.activation in ACTIVATIONS,
         f"one of {ACTIVATIONS}"),
        ("rotary_fraction",
         0 < self.rotary_fraction <= 1 and self.rotary_dim % 2 == 0,
         "above 0 and up to 1, an even share of head_dim"),
    ]  # fmt: skip
    if self.family in PLAIN_HEADS:
      heads = self.num_heads
      rows += [
          ("num_kv_heads", self.num_kv_heads == heads,
           f"num_heads={heads} in family {self.family!r}"),
          ("head_dim", self.head_dim * heads == self.width,
           f"width / num_heads in family {self.family!r}"),
      ]  # fmt: skip
    for name in sorted(PLAIN.keys() - FAMILY_SETTINGS.get(self.family, PLAIN)):
      allowed = f"{PLAIN[name]!r} in family {self.family!r}"
      rows.append((name, getattr(self, name) == PLAIN[name], allowed))
    problems = [
        f"config.model.{name}={getattr(self, name)!r}: allowed {allowed}"
        for name, is_right, allowed in rows
        if not is_right
    ]
    if problems:
      raise ValueError("; ".join(problems))

  @property
  def rotary_dim(self) -> int:
    """Entries of a head that rotary positions rotate."""
    return int(self.head_dim * self.rotary_fraction)

  @classmethod
  def from_config(
      cls,
      config_model: ml_collections.ConfigDict,
      vocab_size: int,
      *,
      pad_id: int | None,
      bos_id: int | None,
      eos_id: int | None,
      backend: str = "cpu",
  ) -> "ModelConfig":
    """Returns the shape that `config.model` describes, for a tokenizer.

    `backend` is JAX's, for `compute_dtype="auto"`.

    Raises:
      ValueError: a setting is missing, unknown or not allowed.
    """
    settings = dict(config_model)
    given = {"vocab_size", "pad_id", "bos_id", "eos_id"}
    given |= {"num_labels", "stop_ids"}
    known = {field.name for field in dataclasses.fields(cls)} - given
    if set(settings) != known:
      raise ValueError(
          f"config.model: missing {sorted(known - set(settings))}, unknown"
          f" {sorted(set(settings) - known)}"
      )
    settings["compute_dtype"] = compute_dtype(config_model, backend)
    return cls(
        vocab_size=vocab_size,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        **settings,
    )

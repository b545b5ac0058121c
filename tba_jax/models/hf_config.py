# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's config.json of a `ModelConfig`: `from_hf` and `to_hf`.

Every setting is either used, held to the one value that we compute, or known
to change no logits; any other one is refused by name. jax is not imported.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from tba_jax.models import config as model_config_lib
from tba_jax.models import hf_gpt
from tba_jax.models import hf_reader

ModelConfig = model_config_lib.ModelConfig
PLAIN = model_config_lib.PLAIN


def from_hf(hf: Mapping[str, Any], *, dtype: str | None = None) -> ModelConfig:
  """Returns the shape that a Hugging Face config.json describes.

  Args:
    hf: the parsed file.
    dtype: of parameters and activations; None takes the file's own.

  Raises:
    ValueError: model_type is not known, or a setting is missing, not known or
      has a value that we do not compute; the message lists all of them.
  """
  model_type = hf.get("model_type")
  if model_type not in READERS:
    raise ValueError(
        f"config.json: model_type={model_type!r} is not supported; supported:"
        f" {sorted(READERS)}"
    )
  reader = hf_reader.Reader(hf)
  fields = {**PLAIN, "family": model_type, **READERS[model_type](reader)}
  fields["num_labels"] = _read_num_labels(reader)
  fields["pad_id"] = reader.take("pad_token_id", None, (int, type(None)))
  fields["bos_id"] = reader.take("bos_token_id", None, (int, type(None)))
  fields |= _read_stops(reader)
  own_dtype = reader.take("torch_dtype", None, (str, type(None)))
  own_dtype = reader.take("dtype", own_dtype, (str, type(None)))
  dtype = dtype or own_dtype or "float32"
  reader.finish()
  return ModelConfig(param_dtype=dtype, compute_dtype=dtype, **fields)


def with_generation(
    config: ModelConfig, generation: Mapping[str, Any]
) -> ModelConfig:
  """Returns the shape with the ends of a text of generation_config.json too.

  Chat models list more of them there than in config.json. What else the file
  says (temperature, top_p, …) is how its authors sampled; here
  `config.sampling` alone says that, since a run trains on the policy that it
  samples from.

  Raises:
    ValueError: its eos_token_id is not a token id or a list of them.
  """
  value = generation.get("eos_token_id")
  ids = value if isinstance(value, list) else [value] * (value is not None)
  if any(type(i) is not int or i < 0 for i in ids):
    raise ValueError(
        f"generation_config.json: eos_token_id={value!r}: allowed a token id or"
        " a list of them"
    )
  own = config.stop_ids or (config.eos_id,) * (config.eos_id is not None)
  every = tuple(dict.fromkeys((*own, *ids)))
  if every == own:
    return config
  eos_id = every[0] if config.eos_id is None else config.eos_id
  return dataclasses.replace(config, eos_id=eos_id, stop_ids=every)


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Returns the config.json of a shape, as `transformers` reads it."""
  fields = _WRITERS[config.family](config)
  head = _TOKEN_HEADS[config.family == "gpt2"]
  if config.num_labels:
    # Readers take the number of labels from the length of their names alone.
    names = [f"LABEL_{i}" for i in range(config.num_labels)]
    fields["id2label"] = {str(i): name for i, name in enumerate(names)}
    fields["label2id"] = {name: i for i, name in enumerate(names)}
    head = _SCALAR_HEAD
  return {
      "architectures": [fields.pop("name") + head],
      **fields,
      "model_type": config.family,
      "vocab_size": config.vocab_size,
      "tie_word_embeddings": config.tie_embeddings,
      "use_cache": True,
      "dtype": config.param_dtype,
      "pad_token_id": config.pad_id,
      "bos_token_id": config.bos_id,
      "eos_token_id": list(config.stop_ids) or config.eos_id,
  }


_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel")
_SCALAR_HEAD = "ForSequenceClassification"


def _read_num_labels(reader: hf_reader.Reader) -> int:
  """Returns how many numbers a position gets: 0 where they are logits.

  A config alone says nothing of its head; the class that saved it does.
  """
  names = reader.take("architectures", None, (list, type(None)))
  labels = reader.take("id2label", None, (dict, type(None)))
  count = reader.take("num_labels", 2, int)  # transformers' own default.
  name = str(names[0]) if names else _TOKEN_HEADS[0]
  if name.endswith(_SCALAR_HEAD):
    return count if labels is None else len(labels)
  if not name.endswith(_TOKEN_HEADS):
    allowed = ", ".join((*_TOKEN_HEADS, _SCALAR_HEAD))
    reader.problem("architectures", names, f"names that end in {allowed}")
  return 0


def _read_stops(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns the end of a text: one token, or several (Llama 3 Instruct)."""
  value = reader.take("eos_token_id", None, (int, list, type(None)))
  if not isinstance(value, list):
    return {"eos_id": value}
  if not value or any(type(i) is not int or i < 0 for i in value):
    reader.problem("eos_token_id", value, "a token id or a list of them")
    value = [0]
  return {"eos_id": value[0], "stop_ids": tuple(value)}


def _read_gated(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns what `LlamaConfig` and its kin share."""
  reader.only("hidden_act", "silu")
  reader.only("attention_dropout", 0.0)
  num_heads = reader.need("num_attention_heads")
  width = reader.need("hidden_size")
  optional_int = (int, type(None))
  num_kv_heads = reader.take("num_key_value_heads", None, optional_int)
  head_dim = reader.take("head_dim", None, optional_int)
  return {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("num_hidden_layers"),
      "width": width,
      "num_heads": num_heads,
      "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
      "head_dim": width // max(num_heads, 1) if head_dim is None else head_dim,
      "mlp_width": reader.need("intermediate_size"),
      "norm_epsilon": reader.take("rms_norm_eps", 1e-6, float),
      "tie_embeddings": reader.take("tie_word_embeddings", False, bool),
      **hf_reader.read_rope(reader),
  }


def _read_llama(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns the fields of a `LlamaConfig`; defaults are transformers' own."""
  return {
      "attention_bias": reader.take("attention_bias", False, bool),
      "mlp_bias": reader.take("mlp_bias", False, bool),
      "max_positions": reader.take("max_position_embeddings", 2048, int),
      **_read_gated(reader),
  }


def _read_mistral(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns the fields of a `MistralConfig`; every layer has its window."""
  window = reader.take("sliding_window", 4096, (int, type(None)))
  fields = _read_gated(reader)
  positions = reader.take("max_position_embeddings", 4096 * 32, int)
  return {**fields, "sliding_window": window or 0, "max_positions": positions}


def _read_qwen(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns what Qwen2 and Qwen3 share; no layer may have a window."""
  reader.only("use_sliding_window", False)
  # Both say something only of layers with a window.
  reader.take("sliding_window", None, (int, type(None)))
  reader.take("max_window_layers", 28, int)
  fields = _read_gated(reader)
  full = ["full_attention"] * fields["num_layers"]
  reader.only("layer_types", None, full)
  positions = reader.take("max_position_embeddings", 32768, int)
  return {**fields, "max_positions": positions}


def _read_qwen3(reader: hf_reader.Reader) -> dict[str, Any]:
  bias = reader.take("attention_bias", False, bool)
  if not reader.has("head_dim"):  # Qwen3 has its own default.
    return {**_read_qwen(reader), "attention_bias": bias, "head_dim": 128}
  return {**_read_qwen(reader), "attention_bias": bias}


def _write_gated(config: ModelConfig, name: str) -> dict[str, Any]:
  return {
      "name": name,
      "hidden_size": config.width,
      "intermediate_size": config.mlp_width,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
      "hidden_act": "silu",
      "max_position_embeddings": config.max_positions,
      "rms_norm_eps": config.norm_epsilon,
      "attention_dropout": 0.0,
      **hf_reader.write_rope(config),
  }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
  return {
      **_write_gated(config, "Llama"),
      "attention_bias": config.attention_bias,
      "mlp_bias": config.mlp_bias,
  }


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
  window = config.sliding_window or None
  return {**_write_gated(config, "Mistral"), "sliding_window": window}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
  return {**_write_gated(config, "Qwen2"), "use_sliding_window": False}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
  return {
      **_write_gated(config, "Qwen3"),
      "attention_bias": config.attention_bias,
      "use_sliding_window": False,
  }


# config.json's model_type, which is our family -> reader and writer.
READERS = {
    "gpt2": hf_gpt.read_gpt2,
    "gpt_neox": hf_gpt.read_gpt_neox,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen,
    "qwen3": _read_qwen3,
}
_WRITERS = {
    "gpt2": hf_gpt.write_gpt2,
    "gpt_neox": hf_gpt.write_gpt_neox,
    "llama": _write_llama,
    "mistral": _write_mistral,
    "qwen2": _write_qwen2,
    "qwen3": _write_qwen3,
}

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts between Hugging Face's config.json and `ModelConfig`.

Every setting is either used, required to have the one value that we support, or
known not to affect the logits; any other is refused by name.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import re
from typing import Any

from tba_jax.models import config as config_lib
from tba_jax.models import hf_files
from tba_jax.models import hf_hub

ModelConfig = config_lib.ModelConfig
PLAIN = config_lib.PLAIN

# Settings of any family that do not affect the logits: transformers' own, which
# begin with "_", and those of other tools.
_WITHOUT_EFFECT = re.compile(
    r"_.*|unsloth_.*|transformers\.js_config|auto_map|gradient_checkpointing"
    r"|initializer_range|is_llama_config|label2id|model_type"
    r"|output_(attentions|hidden_states)|pretraining_tp|problem_type"
    r"|return_dict|task_specific_params|torchscript|transformers_version"
    r"|use_cache"
)


# How `architectures` ends.
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel")
_SCALAR_HEAD = "ForSequenceClassification"


class Reader:
  """Reads a config.json setting by setting and collects problems."""

  def __init__(self, hf: Mapping[str, Any]):
    self._left = {
        k: v for k, v in hf.items() if not _WITHOUT_EFFECT.fullmatch(k)
    }
    self._problems = []
    self.only("chunk_size_feed_forward", 0)
    for name in ("is_encoder_decoder", "use_mrope", "rope_interleaved"):
      self.only(name, False)

  def take(self, name: str, default: Any, kinds: type | tuple) -> Any:
    """Returns a setting of a type in `kinds`, or the default."""
    value = self._left.pop(name, default)
    if not isinstance(value, kinds) or (
        isinstance(value, bool) and kinds is not bool
    ):
      kinds = kinds if isinstance(kinds, tuple) else (kinds,)
      names = " or ".join(kind.__name__ for kind in kinds)
      self.problem(name, value, names)
      return default
    return value

  def has(self, name: str) -> bool:
    return name in self._left

  def skip(self, *names: str) -> None:
    """Skips settings that do not affect this family's logits."""
    for name in names:
      self._left.pop(name, None)

  def need(self, name: str) -> int:
    """Returns a required integer."""
    if name not in self._left:
      self._problems.append(f"{name} is missing")
      return 1
    return self.take(name, 1, int)

  def only(self, name: str, *allowed: Any) -> None:
    """Checks that a setting is absent or has an allowed value."""
    value = self._left.pop(name, allowed[0])
    if value not in allowed:
      self.problem(name, value, " or ".join(repr(a) for a in allowed))

  def problem(self, name: str, value: Any, supported: str) -> None:
    self._problems.append(
        f"{name}={value!r} is not supported; supported: {supported}"
    )

  def finish(self) -> None:
    """Raises ValueError with all problems, unknown settings included."""
    for name, value in sorted(self._left.items()):
      self._problems.append(f"{name}={value!r} is an unknown setting")
    if self._problems:
      raise ValueError("config.json: " + "; ".join(self._problems))


def _take_same(reader: Reader, names: Sequence[str]) -> Any:
  """Returns a number that has several names, which must agree."""
  found = {
      name: value
      for name in names
      if (value := reader.take(name, None, (int, float, type(None))))
      is not None
  }
  for name, value in found.items():
    first = next(iter(found))
    if value != found[first]:
      reader.problem(name, value, f"the same as {first}={found[first]!r}")
  return next(iter(found.values()), None)


def read_rope(
    reader: Reader,
    *,
    theta_names: Sequence[str] = ("rope_theta",),
    fraction_names: Sequence[str] = (),
    fraction: float = 1.0,
) -> dict[str, Any]:
  """Returns the fields of rotary positions, in any of their spellings.

  Args:
    reader: of the file.
    theta_names: settings that may contain the base.
    fraction_names: settings that may contain the rotated share of a head.
    fraction: default of that share.
  """
  theta = _take_same(reader, theta_names)
  outer_fraction = _take_same(reader, fraction_names)
  rope = {}
  for setting in ("rope_scaling", "rope_parameters"):
    found = dict(reader.take(setting, None, (dict, type(None))) or {})
    if "type" in found:  # Old spelling.
      found.setdefault("rope_type", found.pop("type"))
    for name, value in found.items():
      if rope.setdefault(name, value) != value:
        reader.problem(
            f"rope_scaling.{name}", rope[name], f"the same as {setting}.{name}"
        )
  rope_type = rope.pop("rope_type", "default")
  inner = rope.pop("rope_theta", theta)
  if theta is not None and inner != theta:
    reader.problem(theta_names[0], theta, f"rope_parameters' own {inner!r}")
  if outer_fraction is not None:
    fraction = outer_fraction
  inner_fraction = rope.pop("partial_rotary_factor", fraction)
  supported = repr(fraction)
  if fraction_names and outer_fraction is None:
    fraction, supported = inner_fraction, "a number"
  is_number = isinstance(inner_fraction, (int, float))
  if inner_fraction != fraction or not is_number:
    name = "rope_parameters.partial_rotary_factor"
    reader.problem(name, inner_fraction, supported)
    fraction = 1.0
  fields = {"rope_theta": 10000.0 if inner is None else float(inner)}
  if rope_type not in _ROPE_SETTINGS:
    reader.problem(
        "rope_parameters.rope_type",
        rope_type,
        " or ".join(map(repr, _ROPE_SETTINGS)),
    )
    return fields
  for name, (field, kind) in _ROPE_SETTINGS[rope_type].items():
    value = rope.pop(name, None)
    if isinstance(value, (int, kind)) and not isinstance(value, bool):
      fields[field] = kind(value)
    else:
      reader.problem(f"rope_parameters.{name}", value, kind.__name__)
  for name, value in rope.items():
    reader.problem(f"rope_parameters.{name}", value, "none")
  fields["rotary_fraction"] = float(fraction)
  return {**fields, "rope_type": rope_type}


# rope_type -> its settings -> our field and its type.
_ROPE_SETTINGS = {
    "default": {},
    "linear": {"factor": ("rope_factor", float)},
    "llama3": {
        "factor": ("rope_factor", float),
        "low_freq_factor": ("rope_low_freq_factor", float),
        "high_freq_factor": ("rope_high_freq_factor", float),
        "original_max_position_embeddings": ("rope_original_positions", int),
    },
}


def write_rope(config: ModelConfig) -> dict[str, Any]:
  """Returns the rotary settings, in old and new spelling."""
  rope = {
      name: getattr(config, field)
      for name, (field, _) in _ROPE_SETTINGS[config.rope_type].items()
  }
  rope["rope_type"] = config.rope_type
  return {
      # transformers before 5 reads the first two, later versions the third.
      "rope_theta": config.rope_theta,
      "rope_scaling": rope if config.rope_type != "default" else None,
      "rope_parameters": {"rope_theta": config.rope_theta, **rope},
  }


# Other names of the same functions -> ours.
_ACTIVATIONS = {
    **{name: name for name in config_lib.ACTIVATIONS},
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "swish": "silu",
}


def _activation(reader: Reader, name: str, default: str) -> dict[str, str]:
  value = reader.take(name, default, str)
  if value not in _ACTIVATIONS:
    reader.problem(name, value, " or ".join(map(repr, _ACTIVATIONS)))
  return {"activation": _ACTIVATIONS.get(value, default)}


def _heads(num_heads: int, width: int) -> dict[str, int]:
  return {
      "width": width,
      "num_heads": num_heads,
      "num_kv_heads": num_heads,
      "head_dim": width // max(num_heads, 1),
  }


def read_gpt_neox(reader: Reader) -> dict[str, Any]:
  """Returns the fields of a `GPTNeoXConfig`."""
  for name in ("attention_dropout", "hidden_dropout"):
    reader.only(name, 0.0)
  reader.only("is_decoder", False)
  reader.skip("classifier_dropout")
  num_heads = reader.need("num_attention_heads")
  return {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("num_hidden_layers"),
      **_heads(num_heads, reader.need("hidden_size")),
      "mlp_width": reader.need("intermediate_size"),
      "norm_epsilon": reader.take("layer_norm_eps", 1e-5, float),
      "tie_embeddings": reader.take("tie_word_embeddings", False, bool),
      "max_positions": reader.take("max_position_embeddings", 2048, int),
      "attention_bias": reader.take("attention_bias", True, bool),
      "parallel_residual": reader.take("use_parallel_residual", True, bool),
      **_activation(reader, "hidden_act", "gelu"),
      **read_rope(
          reader,
          theta_names=("rotary_emb_base", "rope_theta"),
          fraction_names=("rotary_pct", "partial_rotary_factor"),
          fraction=0.25,
      ),
  }


def write_gpt_neox(config: ModelConfig) -> dict[str, Any]:
  rope = write_rope(config)
  rope["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
  return {
      "name": "GPTNeoX",
      "hidden_size": config.width,
      "intermediate_size": config.mlp_width,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "hidden_act": config.activation,
      "max_position_embeddings": config.max_positions,
      "layer_norm_eps": config.norm_epsilon,
      "attention_bias": config.attention_bias,
      "attention_dropout": 0.0,
      "hidden_dropout": 0.0,
      "use_parallel_residual": config.parallel_residual,
      # Names before transformers 5.
      "rotary_emb_base": rope.pop("rope_theta"),
      "rotary_pct": config.rotary_fraction,
      **rope,
  }


def read_gpt2(reader: Reader) -> dict[str, Any]:
  """Returns the fields of a `GPT2Config`; we train without its dropout."""
  reader.skip("attn_pdrop", "embd_pdrop", "resid_pdrop")
  # Of a head that we do not support.
  reader.skip("summary_type", "summary_use_proj", "summary_activation")
  reader.skip("summary_proj_to_labels", "summary_first_dropout")
  # Our scores are always float32.
  reader.skip("reorder_and_upcast_attn")
  reader.only("add_cross_attention", False)
  width = reader.need("n_embd")
  positions = reader.take("n_positions", 1024, int)
  reader.only("n_ctx", None, positions)
  inner = reader.take("n_inner", None, (int, type(None)))
  by_layer = reader.take("scale_attn_by_inverse_layer_idx", False, bool)
  return {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("n_layer"),
      **_heads(reader.need("n_head"), width),
      "mlp_width": 4 * width if inner is None else inner,
      "rope_theta": 10000.0,  # Unused.
      "norm_epsilon": reader.take("layer_norm_epsilon", 1e-5, float),
      "tie_embeddings": reader.take("tie_word_embeddings", True, bool),
      "max_positions": positions,
      "scale_attention": reader.take("scale_attn_weights", True, bool),
      "scale_attention_by_layer": by_layer,
      **_activation(reader, "activation_function", "gelu_new"),
  }


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
  return {
      "name": "GPT2",
      "n_embd": config.width,
      "n_inner": config.mlp_width,
      "n_layer": config.num_layers,
      "n_head": config.num_heads,
      "n_positions": config.max_positions,
      "activation_function": config.activation,
      "layer_norm_epsilon": config.norm_epsilon,
      "attn_pdrop": 0.0,
      "embd_pdrop": 0.0,
      "resid_pdrop": 0.0,
      "scale_attn_weights": config.scale_attention,
      "scale_attn_by_inverse_layer_idx": config.scale_attention_by_layer,
  }


def read(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    compute_dtype: str | None = None,
) -> ModelConfig:
  """Returns the shape of a folder's model, without reading its tensors.

  Args:
    folder: a path, or a model of the hub (`hf_hub`).
    dtype: of parameters; None takes the file's own.
    compute_dtype: of activations; None takes that of the parameters.

  Raises:
    ValueError: config.json is missing or not supported.
  """
  path = hf_hub.find(folder, weights=False) / "config.json"
  generation = path.with_name("generation_config.json")
  try:
    config = from_hf(hf_files.read_json(path), dtype=dtype)
    if generation.exists():
      config = with_generation(config, hf_files.read_json(generation))
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  if compute_dtype is None:
    return config
  return dataclasses.replace(config, compute_dtype=compute_dtype)


def from_hf(hf: Mapping[str, Any], *, dtype: str | None = None) -> ModelConfig:
  """Returns the shape that a Hugging Face config.json describes.

  Args:
    hf: the parsed file.
    dtype: of parameters and activations; None takes the file's own.

  Raises:
    ValueError: model_type is unknown, or settings are missing, unknown or
      unsupported; the message lists all of them.
  """
  model_type = hf.get("model_type")
  if model_type not in READERS:
    raise ValueError(
        f"config.json: model_type={model_type!r} is not supported; supported:"
        f" {sorted(READERS)}"
    )
  reader = Reader(hf)
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
  """Returns the shape with the stop tokens of generation_config.json added.

  Chat models list more of them there than in config.json. Its sampling settings
  are ignored in favor of `config.sampling`.

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
  stop_ids = tuple(dict.fromkeys((*own, *ids)))
  if stop_ids == own:
    return config
  eos_id = stop_ids[0] if config.eos_id is None else config.eos_id
  return dataclasses.replace(config, eos_id=eos_id, stop_ids=stop_ids)


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Returns the config.json of a shape, as `transformers` reads it."""
  fields = _WRITERS[config.family](config)
  head = _TOKEN_HEADS[config.family == "gpt2"]
  if config.num_labels:
    # transformers takes the number of labels from the number of names.
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


def _read_num_labels(reader: Reader) -> int:
  """Returns the outputs of a scalar head, 0 for a head of token logits.

  Only the name of the class that saved the config tells which head it has.
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


def _read_stops(reader: Reader) -> dict[str, Any]:
  """Returns the stop tokens: one, or several as in Llama 3 Instruct."""
  value = reader.take("eos_token_id", None, (int, list, type(None)))
  if not isinstance(value, list):
    return {"eos_id": value}
  if not value or any(type(i) is not int or i < 0 for i in value):
    reader.problem("eos_token_id", value, "a token id or a list of them")
    value = [0]
  return {"eos_id": value[0], "stop_ids": tuple(value)}


def _read_gated(reader: Reader) -> dict[str, Any]:
  """Returns the fields common to Llama, Mistral and Qwen."""
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
      **read_rope(reader),
  }


def _read_llama(reader: Reader) -> dict[str, Any]:
  """Returns the fields of a `LlamaConfig`, with transformers' defaults."""
  return {
      "attention_bias": reader.take("attention_bias", False, bool),
      "mlp_bias": reader.take("mlp_bias", False, bool),
      "max_positions": reader.take("max_position_embeddings", 2048, int),
      **_read_gated(reader),
  }


def _read_mistral(reader: Reader) -> dict[str, Any]:
  """Returns the fields of a `MistralConfig`; all layers have the window."""
  window = reader.take("sliding_window", 4096, (int, type(None)))
  fields = _read_gated(reader)
  positions = reader.take("max_position_embeddings", 4096 * 32, int)
  return {**fields, "sliding_window": window or 0, "max_positions": positions}


def _read_qwen(reader: Reader) -> dict[str, Any]:
  """Returns the fields common to Qwen2 and Qwen3; windows are not supported."""
  reader.only("use_sliding_window", False)
  # Both concern only layers with a window.
  reader.take("sliding_window", None, (int, type(None)))
  reader.take("max_window_layers", 28, int)
  fields = _read_gated(reader)
  full = ["full_attention"] * fields["num_layers"]
  reader.only("layer_types", None, full)
  positions = reader.take("max_position_embeddings", 32768, int)
  return {**fields, "max_positions": positions}


def _read_qwen3(reader: Reader) -> dict[str, Any]:
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
      **write_rope(config),
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


# Family, which is config.json's model_type -> reader and writer.
READERS = {
    "gpt2": read_gpt2,
    "gpt_neox": read_gpt_neox,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen,
    "qwen3": _read_qwen3,
}
_WRITERS = {
    "gpt2": write_gpt2,
    "gpt_neox": write_gpt_neox,
    "llama": _write_llama,
    "mistral": _write_mistral,
    "qwen2": _write_qwen2,
    "qwen3": _write_qwen3,
}

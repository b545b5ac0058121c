# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts between Hugging Face's config.json and `ModelConfig`.

Every setting in the file is either used, or must have a fixed value, or is
known not to affect the logits and is logged as ignored. Any other setting is
refused by name unless it is null. Defaults equal the ones of `transformers`
(tested), whose config classes would import torch.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

from absl import logging

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub

ModelConfig = config_lib.ModelConfig

# Settings that must be absent or have one of these values.
_ONLY = {
    "add_cross_attention": (False,),
    "attention_dropout": (0.0,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu",),  # Unless it is in the family's keys.
    "hidden_dropout": (0.0,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
# Blocks of FP8, which `hf_files.Fp8Files` reads; settings of transformers with
# their defaults; and settings without effect, since the files show which
# tensors are in FP8.
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_FP8_DEFAULTS = {"expert_dtype": "fp8", "modules_to_convert": None}
_FP8_OTHERS = ("dequantize", "modules_to_not_convert", "scale_fmt")
# Settings that do not affect the logits: private ones of transformers, which
# begin with "_"; dropout, which we do not use; other heads and tools.
_WITHOUT_EFFECT = re.compile(
    r"_.*|(attn|embd|resid)_pdrop|(attention_probs|hidden)_dropout_prob"
    r"|(attn|cache|experts)_implementation|auto_map|classifier_dropout"
    r"|(cls|decoder_start|mask|sep|unk)_token_id|finetuning_task"
    r"|gradient_checkpointing|initializer_range|is_llama_config|label2id"
    r"|max_window_layers|model_type|n_special|name_or_path"
    # Multi-token prediction layers, which are not read.
    r"|mtp_(num_hidden_layers|use_dedicated_embeddings)"
    r"|num_(nextn_predict|mtp)_layers"
    # Losses that we do not use, and devices of another trainer.
    r"|aux_loss_alpha|seq_aux|ep_size"
    r"|output_(attentions|hidden_states|past|router_logits)"
    r"|predict_special_tokens|prefix"
    r"|pretraining_tp|problem_type|reorder_and_upcast_attn|return_dict"
    r"|router_aux_loss_coef"  # Weight of a loss that we do not use.
    r"|summary_.*|task_specific_params|tf_legacy_loss|tie_last_hidden_states"
    r"|tokenizer_class|torchscript|transformers_version"
    r"|transformers\.js_config|unsloth_.*|use_bfloat16|use_cache"
    # Sampling, which transformers 4 keeps among the model's settings.
    r"|assistant_(confidence_threshold|lookbehind)|bad_words_ids"
    r"|(begin_)?suppress_tokens|do_sample|early_stopping"
    r"|(epsilon|eta)_cutoff|exponential_decay_length_penalty"
    r"|forced_[be]os_token_id|(encoder_)?no_repeat_ngram_size"
    r"|(diversity|length|(encoder_)?repetition)_penalty|(max|min)_length"
    r"|num_assistant_tokens(_schedule)?"
    r"|num_(beams|beam_groups|return_sequences)|output_scores"
    r"|remove_invalid_values|return_dict_in_generate|target_lookbehind"
    r"|temperature|top_[kp]|typical_p"
)
# Settings in every file, which are not logged.
_EVERYWHERE = re.compile(r"_.*|model_type|transformers_version")
# Settings that are read separately from a family's keys.
_READ_APART = (
    "architectures", "dtype", "eos_token_id", "id2label", "layer_types",
    "num_labels", "torch_dtype",
)  # fmt: skip

# Settings of a multimodal model that do not concern its language model.
_MULTIMODAL = (
    "architectures", "audio_config", "audio_token_id", "boa_token_id",
    "boi_token_id", "boi_token_index", "eoa_token_id", "eoa_token_index",
    "eoi_token_id", "eoi_token_index", "image_token_id", "image_token_index",
    "language_model_only", "mm_tokens_per_image", "model_type",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size",
    "text_config", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_feature_layer", "vision_soft_tokens_per_image",
    "vision_start_token_id",
)  # fmt: skip

# Name of a rotary setting at the top level -> its name in "rope_parameters".
_ROPE_NAMES = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}
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
    "proportional": {},
    "yarn": {
        "factor": ("rope_factor", float),
        "original_max_position_embeddings": ("rope_original_positions", int),
    },
}
# Additional settings of every rope_type in families with `query_growth`.
_GROWTH = {
    "llama_4_scaling_beta": ("query_growth", float),
    "original_max_position_embeddings": ("rope_original_positions", int),
}
# Settings that may be omitted, in favor of our defaults.
_ROPE_OPTIONS = {
    "proportional": {"factor": ("rope_factor", float)},
    "yarn": {
        "attention_factor": ("rope_attention_factor", float),
        "beta_fast": ("rope_beta_fast", float),
        "beta_slow": ("rope_beta_slow", float),
        "mscale": ("rope_mscale", float),
        "mscale_all_dim": ("rope_mscale_all_dim", float),
        "truncate": ("rope_truncate", bool),
    },
}
# Suffixes of class names in `architectures` that identify a token head.
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel")
SCALAR_HEAD = "ForSequenceClassification"


def read(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    compute_dtype: str | None = None,
    attention: str = "auto",
) -> ModelConfig:
  """Returns the shape of a folder's model, without reading its tensors.

  Args:
    folder: a path, or a model of the hub (`hf_hub`).
    dtype: type of parameters; None keeps the file's.
    compute_dtype: dtype of activations; None takes the parameters' dtype.
    attention: `config.model.attention`.

  Raises:
    ValueError: config.json is missing or not supported.
  """
  path = hf_hub.find(folder, weights=False) / "config.json"
  generation = path.with_name("generation_config.json")
  try:
    hf = language_model(hf_files.read_json(path))
    config = from_hf(hf, dtype=dtype)
    if generation.exists():
      config = with_generation(config, hf_files.read_json(generation))
  except ValueError as error:
    remedy = _run_remedy(path.parent)
    raise ValueError(f"{folder}: {error}{remedy}") from error
  log_ignored(str(path), frozenset(hf))
  return dataclasses.replace(
      config,
      compute_dtype=compute_dtype or config.compute_dtype,
      attention=attention,
  )


def _run_remedy(folder: pathlib.Path) -> str:
  """Returns advice if the folder is a run's instead of a model's, else ""."""
  checkpoints, step = folder / "checkpoints", ""
  if folder.name.isdecimal() and folder.parent.name == checkpoints.name:
    checkpoints, step = folder.parent, f" {folder.name}"
  elif folder.name == checkpoints.name:
    checkpoints = folder
  if not checkpoints.is_dir():
    return ""
  return (
      "; it is a run: `python -m tba_jax.main --program=export"
      f" --workdir={checkpoints.parent}{step}` writes its model to"
      f" {checkpoints.parent / 'export'}"
  )


def ignored(names: Iterable[str]) -> list[str]:
  """Returns the settings of a config.json that are known to have no effect."""
  return sorted(filter(_WITHOUT_EFFECT.fullmatch, names))


@functools.lru_cache
def log_ignored(path: str, names: frozenset[str]) -> None:
  """Logs ignored settings of a config.json, once per process."""
  logged = [name for name in ignored(names) if not _EVERYWHERE.fullmatch(name)]
  if logged:
    logging.info(
        "%s: ignored, without effect on the logits: %s", path, ", ".join(logged)
    )


def is_multimodal(folder: str | os.PathLike[str]) -> bool:
  """Returns whether a folder's model is part of a multimodal model."""
  path = hf_hub.find(folder, weights=False) / "config.json"
  hf = hf_files.read_json(path)
  return language_model(hf) is not hf


def takes_adapters(folder: pathlib.Path | None) -> bool:
  """Returns whether adapters may have the names of a folder's own tensors.

  False if the model is multimodal, has adapters or is from scratch (None).
  """
  if folder is None or adapter_folder.is_adapter(folder):
    return False
  return not is_multimodal(folder)


def language_model(hf: Any) -> Any:
  """Returns the language model's part of a multimodal model's config.json.

  The config.json of any other model is returned unchanged.

  Raises:
    ValueError: text_config or architectures is not supported.
  """
  kind = hf.get("model_type") if isinstance(hf, dict) else None
  name, facts = next(
      (f for f in family_lib.FAMILIES.items() if kind and f[1].part_of == kind),
      (None, None),
  )
  if facts is None:
    return hf
  text, architectures = hf.get("text_config"), hf.get("architectures")
  # With a `part_class`, text_config defaults to another model_type.
  default = "" if facts.part_class else name
  if not isinstance(text, dict) or text.get("model_type", default) != name:
    raise ValueError(
        f"config.json: text_config of model_type={kind!r}: must be an object"
        f" with model_type={name!r}"
    )
  class_name = facts.part_class or facts.class_name
  allowed = [f"{class_name}ForConditionalGeneration"]
  if architectures not in (None, allowed):
    supported = f"{allowed} or null"
    raise ValueError("config.json: " + _wrong(hf, "architectures", supported))
  own = {k: v for k, v in hf.items() if k not in _MULTIMODAL}
  tie = "tie_word_embeddings"
  # Models with a head have True here if transformers saved them.
  if facts.part_class and not own.pop(tie, True) and text.get(tie):
    raise ValueError(
        f"config.json: {tie}=False contradicts text_config.{tie}=True"
    )
  head = facts.class_name + facts.token_head
  return {**text, **own, "model_type": name, "architectures": [head]}


def from_hf(hf: Mapping[str, Any], *, dtype: str | None = None) -> ModelConfig:
  """Returns the shape that a Hugging Face config.json describes.

  Args:
    dtype: type of parameters and activations; None keeps the file's.

  Raises:
    ValueError: model_type is unknown, or settings are missing, unknown or
      unsupported; the message lists all of them.
  """
  family = hf.get("model_type") if isinstance(hf, dict) else None
  other_types = {
      other: name
      for name, facts in family_lib.FAMILIES.items()
      for other in facts.other_types
  }
  if isinstance(family, str):
    family = other_types.get(family, family)
  if not isinstance(family, str) or family not in family_lib.FAMILIES:
    larger = {facts.part_of for facts in family_lib.FAMILIES.values()} - {""}
    raise ValueError(
        f"config.json: model_type={family!r} is not supported; supported:"
        f" {sorted({*family_lib.FAMILIES, *larger, *other_types})}"
    )
  facts = family_lib.FAMILIES[family]
  hf = _renamed(facts.normalized(hf), facts)
  is_rotary = facts.positions == "rotary"
  rotary = ("rope_parameters",)
  if facts.old_rope[0]:
    rotary += ("rope_scaling", *_ROPE_NAMES)
  others = _READ_APART + rotary * is_rotary
  if facts.has_local_rope:
    others += facts.old_local_rope
  if "rotary_layers" in facts.fields:
    others += ("no_rope_layer_interval", "no_rope_layers")
  if "delta_layers" in facts.fields:
    others += ("full_attention_interval",)
  counts_dense = "num_dense_layers" in facts.keys
  lists_dense = _lists_dense(facts)
  if lists_dense:
    others += ("decoder_sparse_step", "mlp_only_layers")
  only = {"quantization_config": _quantizations(hf), **facts.only(hf)}
  fields, problems = read_settings(hf, facts.keys, only, others)
  num_layers = fields["num_layers"]
  if _is_a(num_layers, int) and num_layers > config_lib.MAX_LAYERS:
    raise ValueError(
        f"config.json: num_hidden_layers={num_layers}: must be at most"
        f" {config_lib.MAX_LAYERS}"
    )
  if "sliding_window" in fields:
    fields["sliding_window"] = fields["sliding_window"] or 0
  if facts.has_latents:
    fields["query_rank"] = fields["query_rank"] or 0
    fields["head_dim"] = fields.pop("nope_dim") + fields["rope_dim"]
  if "global_layers" in facts.fields:
    fields["global_layers"] = _read_layers(hf, problems, fields, facts)
  elif "delta_layers" in facts.fields:
    fields["delta_layers"] = _read_delta_layers(hf, problems, num_layers)
  elif hf.get("layer_types") and _layer_types(hf) != {"full_attention"}:
    problems.append(_wrong(hf, "layer_types", "'full_attention' alone"))
  if "num_shared_layers" in facts.keys:
    fields |= _read_shared_layers(fields, problems)
  if lists_dense:
    fields["dense_layers"] = _read_dense_layers(hf, problems, num_layers)
  elif counts_dense:
    fields |= _read_shared_experts(fields, facts, problems)
  if is_rotary:
    fields |= _read_ropes(hf, problems, facts)
  if "rotary_layers" in facts.fields:
    fields["rotary_layers"] = _read_rotary_layers(hf, problems, num_layers)
  heads = fields["num_heads"]
  if fields.get("num_kv_heads") is None:
    fields["num_kv_heads"] = heads
  if fields.get("head_dim") is None:
    fields["head_dim"] = fields["width"] // max(heads, 1)
  if fields["mlp_width"] is None:
    fields["mlp_width"] = 4 * fields["width"]
  fields["num_labels"] = read_num_labels(hf, problems)
  fields |= _read_stops({"eos_token_id": facts.eos_id, **hf}, problems)
  default = "float32"
  if hf.get("quantization_config"):
    default = "bfloat16"  # The dtype of tensors that are not quantized.
  dtype = dtype or hf.get("dtype") or hf.get("torch_dtype") or default
  if problems:
    raise ValueError("config.json: " + "; ".join(problems))
  return ModelConfig(
      family=family, param_dtype=dtype, compute_dtype=dtype, **fields
  )


def _quantizations(hf: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns the values that `quantization_config` may have."""
  settings = hf.get("quantization_config")
  if isinstance(settings, dict):
    read = {k: v for k, v in settings.items() if k not in _FP8_OTHERS}
    if {"fmt": "e4m3", **_FP8_DEFAULTS, **read} == _FP8 | _FP8_DEFAULTS:
      return None, settings
  return None, _FP8


def _lists_dense(facts: family_lib.Family) -> bool:
  """Returns whether config.json lists layers without experts."""
  has_field = facts.has_experts and "dense_layers" in facts.fields
  return has_field and "num_dense_layers" not in facts.keys


def _renamed(
    hf: Mapping[str, Any], facts: family_lib.Family
) -> Mapping[str, Any]:
  """Returns config.json with aliases replaced by the names in `keys`."""
  out = dict(hf)
  for other, name in facts.aliases.items():
    value = out.pop(other, None)
    if value is not None and out.setdefault(name, value) != value:
      raise ValueError(
          f"config.json: {other}={value!r} contradicts {name}={out[name]!r}"
      )
  return out


def read_settings(
    hf: Mapping[str, Any],
    keys: family_lib.Keys,
    only: Mapping[str, tuple],
    others: tuple[str, ...],
) -> tuple[dict[str, Any], list[str]]:
  """Returns our fields from a config.json, and a line for each problem.

  Args:
    only: settings with their allowed values, the default first.
  """
  left = {
      name: value
      for name, value in hf.items()
      if name not in others and not _WITHOUT_EFFECT.fullmatch(name)
  }
  fields, problems = {}, []
  for field, (name, kinds, default) in keys.items():
    value = left.pop(name, default)
    if value is ...:
      problems.append(f"{name} is missing")
      value = 1
    elif isinstance(kinds, dict):
      if not isinstance(value, str) or value not in kinds:
        problems.append(_wrong(hf, name, " or ".join(map(repr, kinds))))
        value = default
      value = kinds[value]
    elif not _is_a(value, kinds):
      kinds = kinds if isinstance(kinds, tuple) else (kinds,)
      names = " or ".join(kind.__name__ for kind in kinds)
      problems.append(_wrong(hf, name, names))
      value = 1 if default is ... else default
    fields[field] = value
  for name, values in (_ONLY | dict(only)).items():
    if left.pop(name, values[0]) not in values:
      supported = " or ".join(map(repr, values))
      problems.append(_wrong(hf, name, supported))
  problems += [
      f"{name}={value!r} is an unknown setting"
      for name, value in sorted(left.items())
      if value is not None
  ]
  return fields, problems


def _is_a(value: Any, kinds: Any) -> bool:
  """Returns whether a value has a type; floats may be ints, ints no bools."""
  allowed = (int, float) if kinds is float else kinds
  is_bool = isinstance(value, bool)
  return isinstance(value, allowed) and is_bool == (kinds is bool)


def _wrong(hf: Mapping[str, Any], name: str, supported: str) -> str:
  return f"{name}={hf.get(name)!r} is not supported; supported: {supported}"


def _layer_types(hf: Mapping[str, Any]) -> set[str]:
  """Returns the kinds of layers in a config.json; {""} without a list."""
  kinds = hf.get("layer_types")
  return set(map(str, kinds)) if isinstance(kinds, list) else {""}


def _read_layers(
    hf: Mapping[str, Any],
    problems: list[str],
    fields: Mapping[str, Any],
    facts: family_lib.Family,
) -> tuple[bool, ...]:
  """Returns which layers see all tokens despite a sliding window; () is none.

  Without `layer_types`, every n-th layer does, where n is
  `sliding_window_pattern` or else the family's `global_every`.
  """
  num_layers, window = fields["num_layers"], fields["sliding_window"]
  kinds = hf.get("layer_types")
  if kinds is None:
    name = facts.old_local_rope[1]
    every = hf.get(name, facts.global_every)
    if not _is_a(every, int) or every < 1:
      problems.append(_wrong(hf, name, "1 or more"))
      return ()
    is_global = tuple((n + 1) % every == 0 for n in range(num_layers))
  else:
    allowed = {"full_attention", "sliding_attention"}
    if len(kinds) != num_layers or not _layer_types(hf) <= allowed:
      supported = f"num_hidden_layers={num_layers} of {sorted(allowed)}"
      problems.append(_wrong(hf, "layer_types", supported))
      return ()
    is_global = tuple(kind == "full_attention" for kind in kinds)
  if facts.ends_global:
    is_global = (*is_global[:-1], True)
  if not window and not all(is_global):
    problems.append(_wrong(hf, "sliding_window", "int"))
  return is_global if window and any(is_global) else ()


def _read_rotary_layers(
    hf: Mapping[str, Any], problems: list[str], num_layers: int
) -> tuple[bool, ...]:
  """Returns which layers have rotary positions; () is all of them.

  Despite its name, `no_rope_layers` has a 1 for each of these layers. Without
  it every n-th layer has none, where n is `no_rope_layer_interval`.
  """
  every, flags = hf.get("no_rope_layer_interval", 4), hf.get("no_rope_layers")
  if not _is_a(every, int) or every < 1:
    problems.append(_wrong(hf, "no_rope_layer_interval", "1 or more"))
    return ()
  if flags is None:
    flags = [int((n + 1) % every != 0) for n in range(num_layers)]
  is_list = isinstance(flags, list) and len(flags) >= num_layers
  if not is_list or not all(_is_a(f, int) and f in (0, 1) for f in flags):
    supported = f"num_hidden_layers={num_layers} of 0 and 1"
    problems.append(_wrong(hf, "no_rope_layers", supported))
    return ()
  # transformers ignores entries past the last layer.
  flags = flags[:num_layers]
  return () if all(flags) else tuple(map(bool, flags))


def _read_delta_layers(
    hf: Mapping[str, Any], problems: list[str], num_layers: int
) -> tuple[bool, ...]:
  """Returns which layers have a delta net; () is none of them.

  If config.json only has `full_attention_interval` n, every n-th layer has
  attention; if it also has `layer_types`, both must agree.
  """
  kinds, every = hf.get("layer_types"), hf.get("full_attention_interval")
  if every is None and kinds is None:
    every = 4
  if every is not None:
    if not _is_a(every, int) or not 1 <= every <= num_layers:
      supported = f"1 to num_hidden_layers={num_layers}"
      problems.append(_wrong(hf, "full_attention_interval", supported))
      return ()
    is_delta = tuple((n + 1) % every != 0 for n in range(num_layers))
  if kinds is not None:
    allowed = {"full_attention", "linear_attention"}
    types = _layer_types(hf)
    is_right = types <= allowed and "full_attention" in types
    if not is_right or len(kinds) != num_layers:
      supported = (
          f"num_hidden_layers={num_layers} of {sorted(allowed)}, at least one"
          " of them 'full_attention'"
      )
      problems.append(_wrong(hf, "layer_types", supported))
      return ()
    of_list = tuple(kind == "linear_attention" for kind in kinds)
    if every is not None and of_list != is_delta:
      problems.append(
          f"layer_types={kinds} contradicts full_attention_interval={every}"
      )
    is_delta = of_list
  return is_delta if any(is_delta) else ()


def _read_dense_layers(
    hf: Mapping[str, Any], problems: list[str], num_layers: int
) -> tuple[bool, ...]:
  """Returns which layers have one MLP in place of experts; () is none of them.

  Every n-th layer has experts, where n is `decoder_sparse_step`, unless
  `mlp_only_layers` lists it.
  """
  every, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers")
  listed = [] if listed is None else listed
  is_list = isinstance(listed, list)
  if not is_list or not all(_is_a(n, int) and n >= 0 for n in listed):
    problems.append(_wrong(hf, "mlp_only_layers", "a list of layers"))
    return ()
  if not _is_a(every, int) or every < 1:
    problems.append(_wrong(hf, "decoder_sparse_step", "1 or more"))
    return ()
  is_dense = tuple(
      n in listed or (n + 1) % every != 0 for n in range(num_layers)
  )
  if all(is_dense):
    problems.append(
        f"decoder_sparse_step={every} and mlp_only_layers={listed} leave no"
        " layer with experts, which is not supported"
    )
  return is_dense if any(is_dense) else ()


def _read_shared_experts(
    fields: dict[str, Any], facts: family_lib.Family, problems: list[str]
) -> dict[str, Any]:
  """Returns DeepSeek-V3's dense layers and shared width; pops the counts."""
  num_layers, width = fields["num_layers"], fields["mlp_width"]
  count, shared = (
      fields.pop(name) for name in ("num_dense_layers", "num_shared_experts")
  )
  if not 0 <= count < num_layers:
    name = facts.keys["num_dense_layers"][0]
    problems.append(f"{name}={count}: must be 0 to {num_layers - 1}")
  if shared < 0:
    name = facts.keys["num_shared_experts"][0]
    problems.append(f"{name}={shared}: must be 0 or more")
  is_dense = tuple(n < count for n in range(num_layers))
  return {
      "dense_layers": is_dense if count else (),
      "shared_expert_width": shared * width,
  }


def _read_shared_layers(
    fields: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
  """Returns Gemma 4's MLPs, and 0 in place of None; pops what sets them."""
  shared, width = fields["num_shared_layers"], fields["mlp_width"]
  is_wide = fields.pop("doubles_mlps") and shared > 0
  own = (False,) * (fields["num_layers"] - shared)
  # Only with `keys_as_values` does transformers use it.
  kv_heads = fields["keys_as_values"] and fields["global_kv_heads"]
  names = "expert_width", "num_experts", "experts_per_token"
  given = [fields.pop(name) for name in names]
  experts = {}
  if fields.pop("adds_experts"):
    experts = dict(zip(("mlp_width", *names[1:]), given))
    experts["shared_expert_width"] = width
    if not all(given):
      problems.append(
          "enable_moe_block=True: moe_intermediate_size, num_experts and"
          " top_k_experts must be 1 or more"
      )
  return {
      **experts,
      "dense_layers": own + (True,) * shared if is_wide else (),
      "dense_mlp_width": 2 * width if is_wide else ModelConfig.dense_mlp_width,
      "global_kv_heads": kv_heads or 0,
      "logit_cap": fields["logit_cap"] or 0.0,
  }


def _read_ropes(
    hf: Mapping[str, Any], problems: list[str], facts: family_lib.Family
) -> dict[str, Any]:
  """Returns the fields of rotary positions, including sliding-window layers."""
  if not facts.has_local_rope:
    return _read_rope(hf, problems, facts)
  both = hf.get("rope_parameters") or {}
  kinds = ("full_attention", "sliding_attention")
  if not isinstance(both, dict) or not set(both) <= set(kinds):
    problems.append(_wrong(hf, "rope_parameters", f"an object of {kinds}"))
    both = {}
  full, local = ({"rope_parameters": both.get(kind)} for kind in kinds)
  full = {**hf, **full}
  name = facts.old_local_rope[0]
  if name in hf:
    local["rope_theta"] = hf[name]
  plain = dataclasses.replace(facts, rope_theta=facts.local_rope_theta, rope={})
  fields = _read_rope(local, problems, plain)
  if not name and "rope_theta" not in (both.get(kinds[1]) or {}):
    # transformers 5 uses it only for global layers, transformers 4 for all.
    if hf.get("rope_theta", facts.local_rope_theta) != facts.local_rope_theta:
      theta = (
          f"{facts.local_rope_theta}, or one of each kind in rope_parameters"
      )
      problems.append(_wrong(hf, "rope_theta", theta))
  if fields.get("rope_type") != "default" or fields["rotary_fraction"] != 1.0:
    problems.append(
        _wrong(both, "sliding_attention", "rope_type='default' and rope_theta")
    )
  theta = fields.get("rope_theta")
  fields = _read_rope(full, problems, facts)
  is_partial = fields.get("rotary_fraction", 1.0) != 1.0
  if facts.rope and is_partial and fields["rope_type"] != "proportional":
    # transformers ignores it with other types.
    supported = "partial_rotary_factor=1.0, or rope_type='proportional'"
    problems.append(_wrong(both, "full_attention", supported))
  return fields | {"local_rope_theta": theta}


def _read_rope(
    hf: Mapping[str, Any], problems: list[str], facts: family_lib.Family
) -> dict[str, Any]:
  """Returns the fields of rotary positions, whose spellings must agree.

  Args:
    problems: list that a line is added to for each problem.
  """
  rope, names = {"rope_type": "default"}, {}
  if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
    rope |= facts.rope
  spellings = [(k, v, hf[k]) for k, v in _ROPE_NAMES.items() if k in hf]
  for name in ("rope_scaling", "rope_parameters"):
    nested = hf.get(name) or {}
    if not isinstance(nested, dict):
      problems.append(_wrong(hf, name, "an object or null"))
      continue
    spellings += [
        # "type" is the older name.
        (f"{name}.{k}", "rope_type" if k == "type" else k, v)
        for k, v in nested.items()
    ]
  for name, key, value in spellings:
    if value is None:
      continue
    if key in names and value != rope[key]:
      problems.append(
          f"{name}={value!r} contradicts {names[key]}={rope[key]!r}"
      )
    rope[key] = value
    names[key] = name
  for name in facts.unused_rope:
    rope.pop(name, None)
  rope_type = rope.pop("rope_type")
  types = dict(_ROPE_SETTINGS)
  if facts.rope.get("rope_type") != "proportional":
    del types["proportional"]
  settings = types.get(str(rope_type))
  if settings is None:
    supported = " or ".join(map(repr, types))
    problems.append(
        f"{names['rope_type']}={rope_type!r} is not supported; supported:"
        f" {supported}"
    )
    return {}
  defaults = {
      "rope_theta": facts.rope_theta,
      "partial_rotary_factor": facts.rotary_fraction,
  }
  if rope_type == "yarn":
    name, _, positions = facts.keys["max_positions"]
    defaults["original_max_position_embeddings"] = hf.get(name, positions)
  rope = defaults | rope
  settings = {
      "rope_theta": ("rope_theta", float),
      "partial_rotary_factor": ("rotary_fraction", float),
      **settings,
  }
  if "query_growth" in facts.fields:
    settings |= _GROWTH
    # Present in the config class, but unused.
    rope.pop("max_position_embeddings", None)
  options = _ROPE_OPTIONS.get(rope_type, {})
  settings |= {name: options[name] for name in options.keys() & rope.keys()}
  fields = {}
  for name, (field, kind) in settings.items():
    value = rope.pop(name, None)
    if _is_a(value, kind):
      fields[field] = kind(value)
    else:
      problems.append(
          f"rope_parameters.{name}={value!r} is not supported; supported:"
          f" {kind.__name__}"
      )
  for name, value in rope.items():
    problems.append(f"rope_parameters.{name}={value!r} is an unknown setting")
  return {**fields, "rope_type": rope_type}


def read_num_labels(hf: Mapping[str, Any], problems: list[str]) -> int:
  """Returns the number of outputs of a scalar head, 0 for a token head.

  Only the class name in `architectures` identifies the head.
  """
  names = hf.get("architectures")
  name = _TOKEN_HEADS[0]
  if names:
    name = str(names[0]) if isinstance(names, list) else ""
  if name.endswith(SCALAR_HEAD):
    labels = hf.get("id2label")
    # transformers omits 2, its default.
    count = hf.get("num_labels", 2)
    return len(labels) if isinstance(labels, dict) else count
  if not name.endswith(_TOKEN_HEADS):
    supported = ", ".join((*_TOKEN_HEADS, SCALAR_HEAD))
    problems.append(
        _wrong(hf, "architectures", f"names that end in {supported}")
    )
  return 0


def _stop_ids(value: Any) -> tuple[int, ...] | None:
  """Returns the ids of an eos_token_id; None if it is invalid."""
  ids = value if isinstance(value, list) else [value] * (value is not None)
  wrong = any(type(i) is not int or i < 0 for i in ids)
  return None if wrong or value == [] else tuple(ids)


def _read_stops(hf: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
  """Returns the fields of stop tokens, which may be several (Llama 3)."""
  value = hf.get("eos_token_id")
  ids = _stop_ids(value)
  if ids is None:
    allowed = "a token id or a list of them"
    problems.append(_wrong(hf, "eos_token_id", allowed))
    ids = ()
  return {
      "eos_id": ids[0] if ids else None,
      "stop_ids": ids if isinstance(value, list) else (),
  }


def with_generation(
    config: ModelConfig, generation: Mapping[str, Any]
) -> ModelConfig:
  """Returns the shape with the stop tokens of generation_config.json added.

  Chat models list more stop tokens there than in config.json. Sampling settings
  in the file are ignored in favor of `config.sampling`.

  Raises:
    ValueError: eos_token_id is neither a token id nor a list of token ids.
  """
  if not isinstance(generation, dict):
    raise ValueError("generation_config.json: must be an object")
  ids = _stop_ids(generation.get("eos_token_id"))
  if ids is None:
    raise ValueError(
        f"generation_config.json: eos_token_id={generation['eos_token_id']!r}:"
        " must be a token id or a list of them"
    )
  return with_stops(config, ids)


def with_stops(config: ModelConfig, ids: Iterable[int]) -> ModelConfig:
  """Returns the shape with further stop tokens."""
  own = config.stop_ids or (config.eos_id,) * (config.eos_id is not None)
  stop_ids = tuple(dict.fromkeys((*own, *ids)))
  if stop_ids == own:
    return config
  return dataclasses.replace(config, eos_id=stop_ids[0], stop_ids=stop_ids)


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Returns the config.json of a shape, as `transformers` reads it."""
  family = family_lib.FAMILIES[config.family]
  class_name, head = family.class_name, family.token_head
  out = {}
  for field, (name, kinds, _) in family.keys.items():
    out[name] = value = getattr(config, field)
    if isinstance(kinds, dict):
      out[name] = next(k for k, ours in kinds.items() if ours == value)
  out |= family.written
  if family.positions == "rotary":
    out |= _write_rope(config)
  if "sliding_window" in family.fields:
    out["sliding_window"] = config.sliding_window or None
  if "logit_cap" in family.fields:
    out |= {
        "final_logit_softcapping": config.logit_cap or None,
        "global_head_dim": config.global_head_dim or config.head_dim,
        "num_global_key_value_heads": config.global_kv_heads or None,
        "vocab_size_per_layer_input": config.vocab_size,
        "intermediate_size": config.shared_expert_width or config.mlp_width,
        "num_experts": config.num_experts or None,
        "top_k_experts": config.experts_per_token or None,
    }
  if family.has_latents:
    out["q_lora_rank"] = config.query_rank or None
  if "global_layers" in family.fields:
    out["layer_types"] = [
        "sliding_attention" if window else "full_attention"
        for window in config.windows
    ]
  if "rotary_layers" in family.fields:
    is_rotary = config.rotary_layers or (True,) * config.num_layers
    out["no_rope_layers"] = list(map(int, is_rotary))
  if "delta_layers" in family.fields:
    out["layer_types"] = [
        "linear_attention" if "delta" in kind else "full_attention"
        for kind in config.kinds
    ]
  if _lists_dense(family):
    out["decoder_sparse_step"] = 1
    out["mlp_only_layers"] = [
        n for n, is_dense in enumerate(config.dense_layers) if is_dense
    ]
  if "score_dim" in family.fields:
    out["query_pre_attn_scalar"] = config.score_dim or config.head_dim
  if config.num_labels:
    # transformers derives the number of labels from the number of names.
    names = [f"LABEL_{i}" for i in range(config.num_labels)]
    out["id2label"] = {str(i): name for i, name in enumerate(names)}
    out["label2id"] = {name: i for i, name in enumerate(names)}
    class_name, head = family.scalar_class_name or class_name, SCALAR_HEAD
  return {
      **out,
      "architectures": [class_name + head],
      "model_type": config.family,
      "use_cache": True,
      "dtype": config.param_dtype,
      "eos_token_id": list(config.stop_ids) or config.eos_id,
  }


def _write_rope(config: ModelConfig) -> dict[str, Any]:
  """Returns the rotary settings in both the old and the new form."""
  scaling = {
      name: getattr(config, field)
      for name, (field, _) in _ROPE_SETTINGS[config.rope_type].items()
  }
  if "query_growth" in family_lib.FAMILIES[config.family].fields:
    scaling |= {k: getattr(config, field) for k, (field, _) in _GROWTH.items()}
  for name, (field, _) in _ROPE_OPTIONS.get(config.rope_type, {}).items():
    if getattr(config, field) != getattr(ModelConfig, field):
      scaling[name] = getattr(config, field)
  scaling["rope_type"] = config.rope_type
  rope = {"rope_theta": config.rope_theta, **scaling}
  # transformers 4, and tools built on it, read the old form.
  family = family_lib.FAMILIES[config.family]
  theta, fraction = family.old_rope
  old = {theta: config.rope_theta} if theta else {}
  if "rotary_fraction" in family.fields:
    rope["partial_rotary_factor"] = config.rotary_fraction
  if fraction:
    old[fraction] = config.rotary_fraction
  if family.has_local_rope:
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    rope = {"full_attention": rope, "sliding_attention": local}
    if family.old_local_rope[0]:
      old[family.old_local_rope[0]] = config.local_rope_theta
  if theta:
    is_scaled = config.rope_type != "default"
    old["rope_scaling"] = scaling if is_scaled else None
  return {**old, "rope_parameters": rope}

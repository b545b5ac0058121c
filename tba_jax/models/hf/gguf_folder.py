# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a folder for a GGUF file that loads like a Hugging Face folder.

It has config.json, the tokenizer with its chat template, and an index of the
tensors, which stay in the GGUF file (`gguf_tensors.py`). It takes a few MB in
the user's cache and is made once per file. Keys that change what a model
computes, but have no equivalent in config.json, are refused by name.
"""

from collections.abc import Mapping
import hashlib
from importlib import metadata
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

import numpy as np

from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import gguf_tensors
from tba_jax.models.hf import gguf_tokenizer
from tba_jax.models.hf import hf_files
from tba_jax.system import processes

# Supported value of `general.architecture` -> name of the family.
ARCHITECTURES = {
    "gemma3": "gemma3_text",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
# Incremented whenever existing folders must be made again.
_VERSION = 3

# Key after the architecture's name -> setting of config.json.
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Layers of Gemma 3 27B, the only Gemma 3 whose scores are divided by
# sqrt(width / heads); as in llama.cpp, which also goes by this number.
_GEMMA3_27B_LAYERS = 62
# Keys without effect, and keys that must have a certain value.
_IGNORED = ("rope.scaling.finetuned", "rope.scaling.original_context_length")
_ONLY = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
}

# Names of tensors, without ".weight" or ".bias".
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA3_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Stacked matrices of all experts of a layer.
_EXPERT_NAMES = {
    f"ffn_{name}_exps": f"mlp.experts.{{expert}}.{name}_proj"
    for name in ("gate", "up", "down")
}
_ROPE_FACTORS = "rope_freqs.weight"


def find(path: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a GGUF file, making it if it is not in the cache.

  Raises:
    ValueError: the package is missing, or the file is damaged or unsupported.
  """
  path = path.resolve()
  state = path.stat()
  version = metadata.version("transformers")
  key = f"{_VERSION} {version} {path} {state.st_size} {state.st_mtime_ns}"
  digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
  cache = processes.models_directory()
  folder = cache / f"{path.stem}-{digest}"
  if folder.is_dir():
    return folder
  print(f"reading {path.name} for the first time", file=sys.stderr, flush=True)
  new = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=cache))
  try:
    _write(path, new)
    hf_files.sync(new)
    try:
      new.rename(folder)
    except OSError:
      if not folder.is_dir():  # Another process was first.
        raise
  except (OSError, ValueError) as error:
    raise ValueError(f"{path}: {error}") from error
  finally:
    shutil.rmtree(new, ignore_errors=True)
  return folder


def _write(path: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes the files of a GGUF file's folder."""
  # Takes a moment to import.
  import gguf  # pylint: disable=g-import-not-at-top

  try:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
  except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
    raise ValueError(
        f"no GGUF file, damaged or cut off ({error}); fetch it again"
    ) from error
  architecture = fields.get("general.architecture")
  if architecture not in ARCHITECTURES:
    raise ValueError(
        f"general.architecture={architecture!r} is not supported; supported:"
        f" {', '.join(ARCHITECTURES)}"
    )
  if fields.get("split.count", 1) > 1:
    raise ValueError(
        "is one of several files of a model; must be one file: join them with"
        "  llama-gguf-split --merge"
    )
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(architecture, fields, tensors)
  family = family_lib.FAMILIES[ARCHITECTURES[architecture]]
  index = {}
  for name, tensor in tensors.items():
    if name == _ROPE_FACTORS:
      continue
    try:
      # Dequantizing a block of zeros shows whether the type is supported.
      block = np.zeros(gguf.GGML_QUANT_SIZES[tensor.tensor_type][1], np.uint8)
      gguf.dequantize(block[None], tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(f"tensor {name}: {error}") from error
    interleaved = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    part = name.split(".")[-2]
    shape = tensor.shape.tolist()[::-1]
    # A vector is a matrix of one row, and a matrix a stack of one.
    num, rows = [1, 1, *shape[:-1]][-2:]
    for i in range(num):
      index[_hf_name(name, architecture).format(expert=i)] = {
          "offset": int(tensor.data_offset) + i * (tensor.n_bytes // num),
          "row_bytes": tensor.n_bytes // (num * rows),
          "type": tensor.tensor_type.name,
          "shape": shape[-2:],
          "heads": interleaved.get(part, 0) if architecture == "llama" else 0,
          # llama.cpp stores 1 + w of norms.
          "shift": -family.norm_offset if part.endswith("norm") else 0.0,
      }
  hf_files.write_json(folder / gguf_tensors.INDEX, index)
  hf_files.write_json(folder / "config.json", config)
  stops = [
      fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")
  ]
  stops = list(dict.fromkeys(i for i in stops if i is not None))
  if len(stops) > 1:
    generation = {"eos_token_id": stops}
    hf_files.write_json(folder / "generation_config.json", generation)
  hf_files.save_tokenizer(_tokenizer(fields), folder)
  (folder / gguf_tensors.WEIGHTS).symlink_to(path)


def _hf_name(name: str, architecture: str) -> str:
  """Returns Hugging Face's name of a tensor; an unknown name is unchanged.

  The name of a stack of experts has the field `expert`.
  """
  match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
  layer, part, end = match.groups() if match else (None, "", "")
  if layer is None:
    return f"{_NAMES[part]}.{end}" if part in _NAMES else name
  names = _LAYER_NAMES | _EXPERT_NAMES
  if architecture == "gemma3":
    names |= _GEMMA3_LAYER_NAMES
  if part not in names:
    return name
  return f"model.layers.{layer}.{names[part]}.{end}"


def _config(
    architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the config.json of a file."""
  start = f"{architecture}."
  left = {
      name.removeprefix(start): value
      for name, value in fields.items()
      if name.startswith(start)
  }
  family = ARCHITECTURES[architecture]
  out = {
      "architectures": [f"{family_lib.FAMILIES[family].class_name}ForCausalLM"],
      "dtype": "float32",
      "model_type": family,
      "tie_word_embeddings": "output.weight" not in tensors,
      # The file may lack vocab_size: count the tokenizer's tokens.
      "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())),
      **{
          f"{name}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id")
          for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
      },
  }
  settings = dict(_SETTINGS)
  if family_lib.FAMILIES[family].has_experts:
    settings |= _EXPERT_SETTINGS
    # llama.cpp always normalizes for this architecture.
    out["norm_topk_prob"] = True
  if architecture == "gemma3":
    settings["attention.sliding_window"] = "sliding_window"
    out["sliding_window"] = None  # Refused by name if the file has none.
  out |= {
      setting: left.pop(key) for key, setting in settings.items() if key in left
  }
  heads = out.get("num_attention_heads") or 1
  size = out.setdefault("head_dim", out.get("hidden_size", 0) // heads)
  out.setdefault("num_key_value_heads", heads)
  if architecture == "gemma3":
    is_27b = out.get("num_hidden_layers") == _GEMMA3_27B_LAYERS
    out["query_pre_attn_scalar"] = (
        out["hidden_size"] // heads if is_27b else size
    )
  kind = left.pop("rope.scaling.type", "none")
  factor = left.pop("rope.scaling.factor", 1.0)
  if kind == "linear":
    out["rope_scaling"] = {"rope_type": "linear", "factor": factor}
  problems = []
  if kind not in ("none", "linear"):
    problems.append(
        f"{start}rope.scaling.type={kind!r} is not supported; supported: none,"
        " linear"
    )
  for key in ("rope.dimension_count", "attention.value_length"):
    if left.pop(key, size) != size:
      problems.append(f"{start}{key}: must be {size}, the size of a head")
  for key, value in left.items():
    if key in _IGNORED or (key in _ONLY and value == _ONLY[key]):
      continue
    allowed = f"; supported: {_ONLY[key]}" if key in _ONLY else ""
    problems.append(f"{start}{key}={value!r} is not supported{allowed}")
  if problems:
    raise ValueError("; ".join(problems))
  if _ROPE_FACTORS in tensors:
    theta = out.get("rope_theta", 10000.0)
    out["rope_scaling"] = _llama3(tensors[_ROPE_FACTORS].data, size, theta)
  return out


def _llama3(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
  """Returns Llama 3's long-context settings for the factors of a file.

  Args:
    factors: [head_dim / 2], divisors of the frequencies.
    head_dim: entries of a head.
    theta: base of the frequencies.

  Raises:
    ValueError: the factors differ from Llama 3.1's and 3.2's.
  """
  scaling = {
      "rope_type": "llama3",
      "factor": float(np.max(factors)),
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
  }
  lengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
  # Rotations over the original context: below 1 is low frequency, above 4 high.
  share = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
  expected = 1 / ((1 - share) / scaling["factor"] + share)
  if factors.shape != expected.shape or not np.allclose(
      factors, expected, rtol=1e-4
  ):
    raise ValueError(
        f"{_ROPE_FACTORS}: must be the factors of Llama 3.1 and 3.2"
    )
  return scaling


def _tokenizer(fields: Mapping[str, Any]) -> Any:
  """Returns the fast tokenizer of a file."""
  inner, roles = gguf_tokenizer.make(fields)
  # The token that ends chat turns; transformers has no name for it.
  roles.pop("eot_token", None)
  return hf_files.import_transformers().PreTrainedTokenizerFast(
      tokenizer_object=inner,
      chat_template=fields.get("tokenizer.chat_template"),
      clean_up_tokenization_spaces=False,
      **roles,
  )

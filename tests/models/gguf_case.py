# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small GGUF files, written by the package `gguf` as llama.cpp writes them."""

from collections.abc import Mapping
import pathlib
from typing import Any

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH, MLP, HEADS, KV_HEADS, LAYERS, POSITIONS = 256, 512, 4, 2, 2, 64
EXPERTS, WINDOW = 3, 16
TEMPLATE = "{% for m in messages %}<|x|>{{ m['content'] }}{% endfor %}<|y|>"
# transformers adds <|endoftext|> to words that lack it.
_SPECIAL = ("<eos>", "<bos>", "<|endoftext|>", "<|x|>", "<|y|>")
_CONTROL, _NORMAL = 3, 1


def words() -> tuple[list[str], list[str]]:
  """Returns the words of a byte-level tokenizer, and its merges."""
  letters = list(bytes_to_unicode().values())
  merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
  merged = [merge.replace(" ", "") for merge in merges]
  return [*_SPECIAL, *letters, *merged], merges


def shapes(architecture: str, head_dim: int) -> dict[str, tuple[int, ...]]:
  """Returns the tensors of a file, by llama.cpp's names, as Hugging Face's."""
  out = {
      "token_embd.weight": (len(words()[0]), WIDTH),
      "output_norm.weight": (WIDTH,),
  }
  for layer in range(LAYERS):
    block = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (HEADS * head_dim, WIDTH),
        "attn_k.weight": (KV_HEADS * head_dim, WIDTH),
        "attn_v.weight": (KV_HEADS * head_dim, WIDTH),
        "attn_output.weight": (WIDTH, HEADS * head_dim),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (MLP, WIDTH),
        "ffn_up.weight": (MLP, WIDTH),
        "ffn_down.weight": (WIDTH, MLP),
    }
    if architecture == "qwen2":
      for name in ("attn_q", "attn_k", "attn_v"):
        block[f"{name}.bias"] = block[f"{name}.weight"][:1]
    if architecture == "qwen3moe":
      block["ffn_gate_inp.weight"] = EXPERTS, WIDTH
      for name in ("gate", "up", "down"):
        shape = block.pop(f"ffn_{name}.weight")
        block[f"ffn_{name}_exps.weight"] = EXPERTS, *shape
    if architecture == "gemma3":
      block |= dict.fromkeys(
          ("post_attention_norm.weight", "post_ffw_norm.weight"), (WIDTH,)
      )
    if architecture in ("gemma3", "qwen3", "qwen3moe"):
      block |= dict.fromkeys(
          ("attn_q_norm.weight", "attn_k_norm.weight"), (head_dim,)
      )
    out |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
  return out


def write(
    path: pathlib.Path,
    architecture: str = "llama",
    quantization: str = "F32",
    *,
    head_dim: int = WIDTH // HEADS,
    is_tied: bool = True,
    keys: Mapping[str, Any] = {},
    tensors: Mapping[str, np.ndarray] = {},
    without: str = "",
) -> None:
  """Writes a file of random params.

  Args:
    path: file to write.
    architecture: `general.architecture`.
    quantization: ggml's name of the type of all matrices.
    head_dim: entries of a head.
    is_tied: whether there is no matrix `output`.
    keys: further or changed numbers and texts of the file.
    tensors: further vectors.
    without: start of the name of a tensor or of a key to leave out.
  """
  rng = np.random.default_rng(0)
  kind = gguf.GGMLQuantizationType[quantization]
  writer = gguf.GGUFWriter(path, architecture)
  tokens, merges = words()
  types = [_CONTROL if t in _SPECIAL else _NORMAL for t in tokens]
  numbers = {
      "context_length": POSITIONS, "embedding_length": WIDTH,
      "block_count": LAYERS, "feed_forward_length": MLP,
      "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
      "attention.key_length": head_dim, "attention.value_length": head_dim,
      "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5000.0,
      "rope.dimension_count": head_dim, "vocab_size": len(tokens),
  }  # fmt: skip
  if architecture == "gemma3":
    numbers["attention.sliding_window"] = WINDOW
  if architecture == "qwen3moe":
    numbers |= {"expert_count": EXPERTS, "expert_used_count": 2,
                "expert_feed_forward_length": MLP}  # fmt: skip
    numbers["feed_forward_length"] = 3 * MLP  # Dense layers.
  values = {f"{architecture}.{k}": v for k, v in numbers.items()}
  values |= {
      "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
      "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 1,
      "tokenizer.ggml.unknown_token_id": 2, "tokenizer.chat_template": TEMPLATE,
      "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
      "tokenizer.ggml.merges": merges,
  }  # fmt: skip
  add = {int: writer.add_uint32, float: writer.add_float32,
         str: writer.add_string, bool: writer.add_bool,
         list: writer.add_array}  # fmt: skip
  for name, value in (values | keys).items():
    if not without or not name.startswith(without):
      add[type(value)](name, value)
  wanted = shapes(architecture, head_dim)
  if not is_tied:
    wanted["output.weight"] = wanted["token_embd.weight"]
  for name, shape in wanted.items():
    if without and name.startswith(without):
      continue
    if len(shape) == 1 or quantization == "F32":
      writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
      continue
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Random blocks: bytes that no half-precision scale reads as infinite.
    rows = (*shape[:-1], shape[-1] // size * num_bytes)
    blocks = rng.integers(0, 0x7C, rows).astype(np.uint8)
    writer.add_tensor(name, blocks, raw_dtype=kind)
  for name, tensor in tensors.items():
    writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()

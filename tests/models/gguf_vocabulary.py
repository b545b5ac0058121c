# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer.json as keys of a GGUF file, as llama.cpp converts it."""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read(folder: pathlib.Path, pre: str) -> dict[str, Any]:
  """Returns `convert` of a folder's files."""
  text = lambda name: (folder / name).read_text("utf-8")
  settings = json.loads(text("tokenizer_config.json"))
  return convert(text("tokenizer.json"), settings, pre)


def convert(file: str, settings: Mapping[str, Any], pre: str) -> dict[str, Any]:
  """Returns keys and values as `convert_hf_to_gguf.py` writes them.

  Args:
    file: content of tokenizer.json.
    settings: content of tokenizer_config.json.
    pre: `tokenizer.ggml.pre`; "default" for SentencePiece, of which llama.cpp
      keeps scores and not merges.
  """
  theirs, read_file = tokenizers.Tokenizer.from_str(file), json.loads(file)
  is_spm = pre == "default"
  added = {token["id"]: token for token in read_file["added_tokens"]}
  words = {i: token for token, i in theirs.get_vocab().items()}
  named = {
      role: value["content"] if isinstance(value, dict) else value
      for role in _KEYS
      if (value := settings.get(role))
  }
  tokens = [words.get(i, f"[PAD{i}]") for i in range(max(words) + 1)]
  types = [_NORMAL if i in words else _UNUSED for i in range(len(tokens))]
  for i, token in enumerate(tokens):
    if i in added and (added[i]["special"] or _looks_special(token)):
      types[i] = _UNKNOWN if token == named.get("unk_token") else _CONTROL
    elif i in added:
      types[i], tokens[i] = _USER_DEFINED, token.replace(_SPACE, " ")
    elif is_spm and token.startswith("<0x"):
      types[i] = _BYTE
  keys = {"pre": pre, "tokens": tokens, "token_type": types}
  keys |= {_KEYS[r]: theirs.token_to_id(token) for r, token in named.items()}
  keys |= {
      name: settings[name]
      for name in ("add_bos_token", "add_eos_token")
      if settings.get(name) is not None
  }
  if is_spm:
    # Scores fall from token to token; runs of blanks, which SentencePiece takes
    # in whole, have the lowest.
    scores = [
        -1e9 if set(token) == {_SPACE} else -float(i)
        for i, token in enumerate(tokens)
    ]
    keys |= {"model": "llama", "scores": scores}
  else:
    merges = read_file["model"]["merges"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in merges]
    keys |= {"model": "gpt2", "merges": merges}
  return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _looks_special(token: str) -> bool:
  """Returns whether llama.cpp takes an added token for a special one."""
  ends = token[:2], token[-2:]
  return ends in (("<|", "|>"), ("<｜", "｜>")) or token == "<pad>"

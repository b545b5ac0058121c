# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A small SentencePiece tokenizer that prefixes texts with a space."""

from tokenizers import normalizers
from tokenizers import pre_tokenizers
import transformers

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import gguf_tokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_UNKNOWN, _CONTROL, _NORMAL, _BYTE = 2, 3, 1, 6


def make(prefix: bool = True, metaspace: str = "") -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer with the special tokens <unk>, <s>, </s> and <|x|>.

  Args:
    prefix: whether texts are prefixed with a space.
    metaspace: prefix scheme of Metaspace, as in Mistral; "" as in Llama 2,
      which adds a space after every special token.
  """
  bytes_ = [f"<0x{i:02X}>" for i in range(256)]
  words = ("he", "ll", "hell", "hello", f"{_SPACE}a", f"{_SPACE}hello", "42")
  letters = [*"abcdefghijklmnopqrstuvwxyz0123456789:.?=", _SPACE]
  tokens = ["<unk>", "<s>", "</s>", "<|x|>", *bytes_, *words, *letters]
  types = [_UNKNOWN, *[_CONTROL] * 3, *[_BYTE] * 256]
  types += [_NORMAL] * (len(tokens) - len(types))
  keys = {
      "model": "llama",
      "tokens": tokens,
      "token_type": types,
      "scores": [-float(i) for i in range(len(tokens))],
      "add_space_prefix": prefix,
  }
  inner, roles = gguf_tokenizer.make(
      {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
  )
  if metaspace:
    inner.normalizer = normalizers.Sequence([])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=metaspace, split=False
    )
  return tokenizer_lib.Tokenizer(
      transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **roles)
  )

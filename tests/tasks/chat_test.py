# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of chat: prompts of conversations, and malformed rows."""

import json
import pathlib

from absl.testing import parameterized
import ml_collections

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.tasks import base
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import synthetic
from tba_jax.tasks import task_table


def _task(**fields):
  return task_table.make_task(
      ml_collections.ConfigDict({"name": "chat", **fields})
  )


def _messages(*texts, first="user"):
  roles = ("user", "assistant") * 3
  roles = ("system", *roles) if first == "system" else roles
  return {
      "messages": [
          {"role": role, "content": text} for role, text in zip(roles, texts)
      ]
  }


_ROW = _messages("Why?", "Because. ")
_USER, _ANSWER = _ROW["messages"]
_OTHER = {**_ANSWER, "content": "No. "}


class ChatTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def make(self, *train, **fields):
    for name, rows in (
        ("train", train),
        ("test", [_messages("Who?", "I.")]),
    ):
      (self.folder / f"{name}.jsonl").write_text(
          "".join(json.dumps(row) + "\n" for row in rows)
      )
    fields = {"template": "tulu", **fields}
    return _task(data=str(self.folder), **fields)

  def test_prompts_with_conversation_before_last_answer(self):
    task = self.make(_messages("Be kind.", "a", "b", "c", "d", first="system"))
    self.assertEqual(
        task.prompt("train", 0),
        "<|system|>\nBe kind.\n<|user|>\na\n<|assistant|>\nb\n"
        "<|user|>\nc\n<|assistant|>\n",
    )
    self.assertEqual(base.reference_text(task, "train", 0), "d")
    self.assertEqual(base.reference_text(self.make(_ROW), "train", 0),
                     "Because.")  # fmt: skip
    self.assertFalse(task.has_reward)
    with self.assertRaisesRegex(base.RewardError, "reward.backend"):
      task.judge("train", 0, "x")
    with self.assertRaisesRegex(ValueError, "config.reward_model"):
      task.pairs("train")

  def test_wrong_rows_are_counted_with_file_and_line(self):
    task = self.make(
        _ROW,
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"messages": [{"role": "me", "content": "a"}, _ROW["messages"][1]]},
        _messages("Why?", "  "),
        _messages("Why?", "Because.", "Really?"),
        _ROW,
        {"messages": [_ROW["messages"][1], _ROW["messages"][1]]},
    )
    at = lambda *lines: [f"train.jsonl:{line}" for line in lines]
    places = lambda reason: task.report.places("train", reason)
    self.assertEqual(places("no_prompt"), at(2, 3, 8))
    self.assertEqual(places("messages"), at(4))
    self.assertIn(
        "warning: train.jsonl:4: field 'messages', message 1 has role 'me'",
        "\n".join(task.report.lines()),
    )
    self.assertEqual(places("no_answer"), at(5, 6))
    self.assertEqual(places("duplicate"), at(7))
    self.assertEqual(task.num_prompts("train"), 1)

  @parameterized.parameters(
      {"chosen": [_USER, _ANSWER], "rejected": [_USER, _OTHER]},
      {"prompt": "Why?", "chosen": [_USER, _ANSWER],
       "rejected": [_USER, _OTHER]},
      {"prompt": [_USER], "chosen": [_ANSWER], "rejected": [_OTHER]},
      {"prompt": [_USER], "chosen": [_USER, _ANSWER],
       "rejected": [_USER, _OTHER]},
  )  # fmt: skip
  def test_makes_pairs_of_conversations(self, **fields):
    actual = self.make(_ROW).pair_texts(fields)
    expected = "<|user|>\nWhy?\n<|assistant|>\n", "Because.", "No."
    self.assertEqual(actual, expected)

  @parameterized.parameters(
      ([_USER, _ANSWER], [{**_USER, "content": "?"}, _OTHER], False),
      ([_ANSWER, _ANSWER], [_ANSWER, _OTHER], False),  # Nobody asked.
      ([_ANSWER], [_OTHER], False),
      ([_USER, _ANSWER], [_USER, _USER], True),
      ([_USER, _ANSWER], [_USER, {**_ANSWER, "content": " "}], True),
      ("a", [_ANSWER], True),
  )
  def test_other_pairs_lack_prompt_or_answer(
      self, chosen, rejected, has_prompt
  ):
    fields = {"prompt": "p", "chosen": chosen, "rejected": rejected}
    prompt, *answers = self.make(_ROW).pair_texts(fields)
    self.assertEqual(bool(prompt), has_prompt)
    if has_prompt:
      self.assertFalse(all(isinstance(text, str) for text in answers))

  def test_refuses_pairs_with_calls_of_tools(self):
    call = {**_ANSWER, "content": None, "tool_calls": [{"function": {}}]}
    fields = {"chosen": [_USER, call], "rejected": [_USER, _OTHER]}
    task = self.make(_ROW)
    with self.assertRaisesRegex(
        rows_lib.UnusableError, "message 2 calls a tool"
    ):
      task.pair_texts(fields)

  def test_formats_with_tokenizer_s_own_template(self):
    tokenizer = tokenizer_lib.word_level(["a"], ".")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}>"
    )
    folder = self.create_tempdir().full_path
    tokenizer.save(folder)
    task = self.make(_ROW, template=folder)
    self.assertEqual(task.prompt("train", 0), "[Why?]>")
    # Without one, the policy's own template lays out the messages.
    task = _task(data=str(self.folder))
    self.assertEqual(task.prompt("train", 0), [_USER])
    pair = {"chosen": [_USER, _ANSWER], "rejected": [_USER, _OTHER]}
    self.assertEqual(task.pair_texts(pair), ([_USER], "Because.", "No."))

  @parameterized.parameters(
      (
          {"data": "/nowhere"},
          "config.task.data='/nowhere.train.': there is no such",
      ),
      (
          {"data": "synthetic", "template": "/nowhere"},
          "config.task.template='/nowhere': must be 'model', 'tulu' or a",
      ),
  )
  def test_missing_fields_are_named(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      _task(**fields)

  @parameterized.parameters("tulu", "model")
  def test_synthetic(self, template):
    task = _task(data="synthetic", synthetic_prompts=50, synthetic_pairs=20,
                 template=template)  # fmt: skip
    prompt = task.prompt("train", 0)
    if template == "tulu":
      self.assertStartsWith(prompt, "<|user|>\nPOST: ")
      self.assertLessEqual(task.max_prompt_tokens, 40)
    else:
      self.assertStartsWith(prompt[0]["content"], "POST: ")
    reference = base.reference_text(task, "train", 0)
    gold = synthetic.tldr_reward(prompt, reference)
    self.assertIsNone(task.judge("train", 0, reference).key)
    self.assertEqual(task.judge("train", 0, reference).reward, gold)
    self.assertEqual(task.reward_of(prompt, reference), gold)
    self.assertLen(task.pairs("train"), 20)
    self.assertLen(task.pairs("held_out"), 4)

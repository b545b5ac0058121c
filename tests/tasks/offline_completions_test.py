# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of logged completions: formats, errors, values of prompts."""

import json
import math
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import offline_completions

TOKENIZER = types.SimpleNamespace(
    encode_prompt=lambda text: list(text), decode=lambda ids: "^" + "".join(ids)
)
TASK = types.SimpleNamespace(
    num_prompts=lambda split: 2, prompt=lambda split, i: ("one", "two")[i]
)


class ReadTest(parameterized.TestCase):

  def write(self, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    return self.create_tempfile(content="\n".join(lines)).full_path

  @parameterized.parameters(
      # The output of `generate` with rewards on the line, or by completion.
      (
          {
              "line": 1,
              "prompt": "p",
              "completions": [
                  {
                      "text": "a",
                      "token_ids": [3, 1],
                      "logprobs": [-0.5, -0.25],
                      "finish_reason": "stop",
                  },
                  {
                      "text": "b",
                      "token_ids": [4],
                      "logprobs": [-2.0],
                      "finish_reason": "length",
                  },
              ],
              "rewards": [1, 0.5],
          },
          [("a", (3, 1), 1.0, (-0.5, -0.25), -1, True),
           ("b", (4,), 0.5, (-2.0,), -1, False)],
      ),
      # TRL's record, texts alone.
      (
          {"step": 3, "prompt": "p", "completion": "a", "reward": 2.0},
          [("a", None, 2.0, None, -1, None)],
      ),
      (
          {"prompt": "p", "completions": ["a"], "rewards": [0.0]},
          [("a", None, 0.0, None, -1, None)],
      ),
      # A record of a run's samples.jsonl, with a token of an environment.
      (
          {
              "prompt": "p",
              "completion": "a",
              "reward": 0.0,
              "version": 7,
              "tokens": ["a", "</s>"],
              "logprobs": [-1.0, None],
          },
          [("a", None, 0.0, (-1.0, 0.0), 7, None, ("a", "</s>"),
            (True, False))],
      ),
      # The same of a run on a log without log-probs.
      (
          {
              "prompt": "p",
              "completion": "a",
              "reward": 0.0,
              "version": -1,
              "token_ids": [4, 1],
              "logprobs": [0.0, None],
          },
          [("a", (4, 1), 0.0, None, -1, None, None, (True, False))],
      ),
  )  # fmt: skip
  def test_formats(self, record, expected):
    actual = offline_completions.read(self.write(record))
    self.assertEqual(
        actual,
        {"p": [offline_completions.Completion(*one) for one in expected]},
    )

  @parameterized.parameters(
      {"prompt": "p", "completion": "a"},
      {"prompt": "p", "completion": "a", "reward": "unread"},
      {"prompt": "p", "completions": ["a"], "s": [1, 2]},
      {"prompt": "p", "completions": [{"text": "a", "": 1.0}]},
  )
  def test_no_field_reads_no_rewards(self, **record):
    result = offline_completions.read(self.write(record), "")
    self.assertEqual(
        result,
        {
            "p": [
                offline_completions.Completion("a", None, None, None, -1, None)
            ]
        },
    )

  @parameterized.parameters("prompt", "messages")
  def test_messages_match_those_of_task(self, name):
    chat = [{"role": "user", "content": "two"}]
    completions = offline_completions.read(
        self.write({name: chat, "completion": "a", "reward": 1})
    )
    prompts = "one", chat
    task = types.SimpleNamespace(
        num_prompts=lambda split: 2, prompt=lambda split, i: prompts[i]
    )
    tokenizer = types.SimpleNamespace(encode_prompt=str, decode=str)
    result = offline_completions.by_prompt_id(completions, task, tokenizer)
    self.assertEqual({i: c[0].text for i, c in result.items()}, {1: "a"})

  def test_refuses_rewards_of_ambiguous_prompt(self):
    task = types.SimpleNamespace(
        num_prompts=lambda split: 2, prompt=lambda split, i: "guess"
    )
    tokenizer = types.SimpleNamespace(encode_prompt=str, decode=str)
    path = self.write({"prompt": "guess", "completion": "a", "reward": 1})
    with self.assertRaisesRegex(ValueError, "prompts 0 and 1 have one text"):
      offline_completions.by_prompt_id(
          offline_completions.read(path), task, tokenizer
      )
    # The task judges each by its own answer.
    both = offline_completions.by_prompt_id(
        offline_completions.read(path, ""), task, tokenizer
    )
    self.assertEqual([*both], [0, 1])

  def test_files_may_be_json_or_many(self):
    folder = self.create_tempdir()
    row = {"prompt": "p", "completion": "a", "reward": 1}
    for name, text in (
        ("1.json", json.dumps(row)),
        ("2.json", json.dumps([row, row | {"completion": "b"}], indent=1)),
        ("3.jsonl", json.dumps(row | {"completion": "c"})),
        ("4.json", "\n".join([json.dumps(row), json.dumps(row)])),
    ):
      folder.create_file(name, content=text)
    completions = offline_completions.read(f"{folder.full_path}/*")
    texts = [c.text for c in completions["p"]]
    self.assertEqual(texts, ["a", "a", "b", "c", "a", "a"])
    folder.create_file("5.json", content=json.dumps([row, {"prompt": "p"}]))
    with self.assertRaisesRegex(ValueError, "/5.json record 2: must be"):
      offline_completions.read(f"{folder.full_path}/*")
    with self.assertRaisesRegex(FileNotFoundError, "No such file"):
      offline_completions.read(f"{folder.full_path}/*.csv")

  def test_failed_episodes_need_no_reward(self):
    failed = {"text": "a", "reward": None, "failure": "crash: …"}
    for line in (
        {"prompt": "p", "completions": [failed]},
        {"prompt": "p", "completions": [], "failure": "error: …"},
    ):
      (one,) = offline_completions.read(self.write(line))["p"]
      self.assertEqual(one.unusable, "failed in their environment")

  def test_lines_of_prompt_come_together(self):
    result = offline_completions.read(
        self.write(
            {"prompt": "p", "completion": "a", "score": 1},
            "",
            {"prompt": "q", "completion": "b", "score": 2},
            {"prompt": "p", "completion": "c", "score": 3},
        ),
        "score",
    )
    self.assertEqual([c.reward for c in result["p"]], [1.0, 3.0])

  @parameterized.parameters(
      ("{", "Expecting"),
      ("[]", "must be a JSON object"),
      (
          '{"completion": "a", "reward": 1}',
          "prompt: must be a text or messages, not null",
      ),
      ('{"prompt": "p", "reward": 1}', "must be a completion"),
      ('{"prompt": "p", "completion": "a"}', "reward: must be a number"),
      (
          '{"prompt": "p", "completion": "a", "reward": NaN}',
          "reward: must be a number",
      ),
      (
          '{"prompt": "p", "completion": "a", "reward": 1e39}',
          "reward: must be a number",
      ),
      (
          f'{{"prompt": "p", "completion": "a", "reward": {10**400}}}',
          "reward: must be a number",
      ),
      ("[" * 100_000, "maximum recursion"),
      (
          '{"prompt": "p", "completion": "\\ud83d", "reward": 1}',
          r"must be text, not '.ud83d' alone",
      ),
      (
          '{"prompt": "p", "completions": ["a", "b"], "rewards": [1]}',
          "rewards: must be a list of 2",
      ),
      (
          '{"prompt": "p", "token_ids": [1], "reward": 1, "logprobs": []}',
          "logprobs: must be one for each",
      ),
      ('{"prompt": "p", "token_ids": [-1], "reward": 1}', "token_ids: must be"),
      (
          '{"prompt": "p", "completion": "a", "reward": 1, "tokens": [1]}',
          "tokens: must be .*, not .1.; token_ids has ids",
      ),
      (
          '{"prompt": "p", "completion": "a", "reward": 1, "tokens": ["a"],'
          ' "logprobs": [-1, -2]}',
          "logprobs: must be one for each of tokens",
      ),
      (
          '{"prompt": "p", "completion": "a", "reward": 1, "finish_reason":'
          ' "abort"}',
          'finish_reason: must be "length", "stop", "tool_calls", not "abort"',
      ),
      (
          '{"prompt": "p", "completion": "a", "reward": 1, "version": -2}',
          "version: must be",
      ),
  )
  def test_errors_name_line(self, line, message):
    path = self.write({"prompt": "p", "completion": "a", "reward": 1}, line)
    with self.assertRaisesRegex(ValueError, f"{path} line 2: {message}"):
      offline_completions.read(path)

  def test_refuses_missing_logprobs_if_required(self):
    line = {"prompt": "p", "completion": "a", "reward": 1}
    for more in ({}, {"logprobs": [-math.inf]}, {"logprobs": [math.nan]}):
      path = self.write({**line, **more})
      with self.assertRaisesRegex(ValueError, "line 1: logprobs are missing"):
        offline_completions.read(path, needs_logprobs=True)

    path = self.write({**line, "logprobs": [-1.0]})
    with self.assertRaisesRegex(ValueError, "line 1: token_ids are missing"):
      offline_completions.read(path, needs_logprobs=True)

  def test_byte_order_mark_is_none_of_text(self):
    path = self.write(
        "\ufeff" + '{"prompt": "p", "completion": "a", "reward": 1}'
    )
    self.assertEqual(list(offline_completions.read(path)), ["p"])

  def test_empty_file_is_error(self):
    with self.assertRaisesRegex(ValueError, "one completion or more"):
      offline_completions.read(self.write(""))


class ValuesTest(absltest.TestCase):

  def write(self, *prompts):
    lines = [
        json.dumps(
            {"prompt": p, "completions": ["a", "b"], "rewards": [0.0, r]}
        )
        for p, r in prompts
    ]
    return self.create_tempfile(content="\n".join(lines)).full_path

  def values(self, path, temperature=1.0):
    return offline_completions.values(
        path, TASK, TOKENIZER, reward_field="reward", temperature=temperature
    )

  def test_value_is_log_mean_exp(self):
    # A prompt may be written as its tokens decode.
    path = self.write(("^two", np.log(3.0)), ("one", 0.0))
    np.testing.assert_allclose(self.values(path), [0.0, np.log(2.0)], atol=1e-6)
    np.testing.assert_allclose(
        self.values(path, 0.5), [0.0, np.log(5.0) / 2], atol=1e-6
    )

  def test_refuses_missing_prompts(self):
    path = self.write(("one", 0.0), ("three", 1.0))
    with self.assertRaisesRegex(
        ValueError, "loss.baseline_file.*1 are missing, the first is 'two'"
    ):
      self.values(path)

  def test_prompts_of_messages_are_found_by_their_tokens(self):
    messages = [{"role": "user", "content": "two"}]
    task = mock.Mock(spec=base.Task)
    task.num_prompts.return_value = 1
    task.prompt.return_value = messages
    tokenizer = mock.Mock()
    tokenizer.encode_prompt = lambda prompt: [base.plain_text(prompt)]
    tokenizer.decode = lambda ids: ids[0]
    (result,) = offline_completions.by_prompt_id(
        {"user: two": ["log"]}, task, tokenizer
    ).items()
    self.assertEqual(result, (0, ["log"]))
    with self.assertRaisesRegex(ValueError, "the first is 'user: two'"):
      offline_completions.values(
          self.write(("other", 0.0)), task, tokenizer, reward_field="reward",
          temperature=1.0,
      )  # fmt: skip

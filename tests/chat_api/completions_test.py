# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of OpenAI's API."""

import json

from absl.testing import absltest

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import completions

_USER = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def _body(**changes):
  return {"model": "m", "messages": [_USER], **changes}


def _answered(call, text, tokens=("a", "b")):
  """Returns the answer of a call with a text."""
  return completions.completion(
      call,
      id="e:1",
      created_s=5.5,
      model="m",
      message=completions.answer(call, text, "e:1"),
      usage=(3, len(tokens)),
      stopped=True,
      tokens=tokens,
      record={
          "token_ids": list(range(len(tokens))),
          "logprobs": [-0.25] * len(tokens),
          "stopped": True,
          "version": 7,
      },
      prompt_ids=[4, 5, 6],
  )


class AnswerTest(absltest.TestCase):

  def test_calls_tools_if_all_calls_can_be_read(self):
    call = chat_requests.read_completions(_body(tools=[_TOOL]))
    text = (
        'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    (choice,) = _answered(call, text)["choices"]
    self.assertEqual(choice["finish_reason"], "tool_calls")
    (asked,) = choice["message"]["tool_calls"]
    self.assertEqual(asked["function"]["name"], "add")
    self.assertEqual(json.loads(asked["function"]["arguments"]), {"a": 1})
    self.assertEqual(choice["message"]["content"], "so")
    for other, body in (
        ("<tool_call>{</tool_call>", _body(tools=[_TOOL])),
        (text, _body()),
        (text, _body(tools=[_TOOL], tool_choice="none")),
    ):
      (choice,) = _answered(chat_requests.read_completions(body), other)[
          "choices"
      ]
      self.assertEqual(choice["message"]["content"], other)
      self.assertEqual(choice["finish_reason"], "stop")

  def test_contains_sampled_tokens(self):
    whole = _answered(
        chat_requests.read_completions(_body(logprobs=True)), "ab"
    )
    (choice,) = whole["choices"]
    self.assertEqual(choice["token_ids"], [0, 1])
    self.assertEqual(choice["version"], 7)
    self.assertEqual(whole["prompt_token_ids"], [4, 5, 6])
    self.assertEqual(
        [(t["token"], t["logprob"]) for t in choice["logprobs"]["content"]],
        [("a", -0.25), ("b", -0.25)],
    )
    self.assertEqual(whole["usage"]["total_tokens"], 5)
    # The bytes of a token that is a part of a character are not known.
    parts = completions._logprobs(True, ["a", "\ufffd"], [-1.0, -2.0])[
        "content"
    ]
    self.assertEqual([part["bytes"] for part in parts], [[97], None])
    for number in (0, 1):
      text = chat_requests.read_completions(
          {"model": "m", "prompt": "a", "logprobs": number}
      )
      (choice,) = _answered(text, "ab")["choices"]
      self.assertEqual(choice["text"], "ab")
      self.assertEqual(choice["logprobs"]["token_logprobs"], [-0.25, -0.25])
    text = chat_requests.read_completions(
        {"model": "m", "prompt": "a", "logprobs": False}
    )
    self.assertIsNone(_answered(text, "ab")["choices"][0]["logprobs"])

  def test_streams_same_answer(self):
    call = chat_requests.read_completions(_body(tools=[_TOOL]))
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for response in ("ab", text):
      whole = _answered(call, response)
      *parts, end = completions.events(whole, has_usage=True)
      self.assertEqual(end, "data: [DONE]\n\n")
      first, last, usage = (json.loads(p.removeprefix("data: ")) for p in parts)
      (choice,) = whole["choices"]
      delta = first["choices"][0]["delta"]
      self.assertEqual(delta["content"], choice["message"]["content"])
      for a, b in zip(
          delta.get("tool_calls", ()), choice["message"].get("tool_calls", ())
      ):
        self.assertEqual(a, {"index": 0, **b})
      self.assertEqual(first["choices"][0]["finish_reason"], None)
      self.assertEqual(first["choices"][0]["token_ids"], choice["token_ids"])
      reason = last["choices"][0]["finish_reason"]
      self.assertEqual(reason, choice["finish_reason"])
      self.assertEqual(usage["usage"], whole["usage"])
      self.assertEqual(first["object"], "chat.completion.chunk")

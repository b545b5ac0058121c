# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of OpenAI's API."""

import json

from absl.testing import absltest

from tba_jax.serving import chat

_USER = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def _body(**changes):
  return {"model": "m", "messages": [_USER], **changes}


def _answered(call, text, tokens=("a", "b")):
  """Returns the answer of a call with a text."""
  return chat.completion(
      call,
      id="e:1",
      created_s=5.5,
      model="m",
      message=chat.answer(call, text, "e:1"),
      tokens=tokens,
      record={
          "token_ids": list(range(len(tokens))),
          "logprobs": [-0.25] * len(tokens),
          "stopped": True,
          "version": 7,
      },
      prompt_ids=[4, 5, 6],
  )


class ParseTest(absltest.TestCase):

  def test_refuses_what_it_does_not_understand(self):
    for changes, message in (
        ({"model": "x"}, "model='x': allowed 'm'"),
        ({"n": 2}, "n=2"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice='required'"),
        ({"max_tokens": 0}, "max_tokens is|max_tokens=0"),
        ({"stop": 5}, "stop is int"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "x"}]}, r"messages\[0\]: role='x'"),
        (
            {"messages": [{**_USER, "content": [{"type": "image_url"}]}]},
            r"messages\[0\]: content has a part",
        ),
        ({"messages": ["a"]}, r"messages\[0\] is str: allowed an object"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        chat.parse(_body(**changes), "m")
    for prompt in ("", [], ["a", "b"], [1.5], None):
      with self.assertRaisesRegex(ValueError, "prompt: allowed one text"):
        chat.parse({"model": "m", "prompt": prompt}, "m")

  def test_takes_messages_in_any_form(self):
    """Those of the official client have fields that are null."""
    call = {"name": "f", "arguments": "{}"}
    plain = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "i", "type": "function", "function": call}],
    }
    forms = (
        plain,
        {**plain, "content": None, "refusal": None, "annotations": []},
        {**plain, "content": [], "audio": None},
    )
    for form in forms:
      found = chat.parse(_body(messages=[_USER, form]), "m").messages
      self.assertEqual(found, [_USER, plain])
    template = chat.for_template(plain)
    self.assertEqual(template["tool_calls"][0]["function"]["arguments"], {})

  def test_takes_what_asks_for_nothing(self):
    plain = chat.parse(_body(), "m")
    nothing = dict(response_format={"type": "text"}, logit_bias={}, n=1)
    nothing |= dict(modalities=["text"], presence_penalty=0.0, top_logprobs=0)
    self.assertEqual(chat.parse(_body(**nothing), "m"), plain)

  def test_takes_the_newer_name_of_a_limit(self):
    call = chat.parse(_body(max_tokens=5, max_completion_tokens=3), "m")
    self.assertEqual(call.max_tokens, 3)
    self.assertIsNone(chat.parse(_body(), "m").max_tokens)


class AnswerTest(absltest.TestCase):

  def test_calls_tools_if_all_calls_can_be_read(self):
    call = chat.parse(_body(tools=[_TOOL]), "m")
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
      (choice,) = _answered(chat.parse(body, "m"), other)["choices"]
      self.assertEqual(choice["message"]["content"], other)
      self.assertEqual(choice["finish_reason"], "stop")

  def test_has_what_was_sampled(self):
    whole = _answered(chat.parse(_body(logprobs=True), "m"), "ab")
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
    parts = chat._logprobs(True, ["a", "\ufffd"], [-1.0, -2.0])["content"]
    self.assertEqual([part["bytes"] for part in parts], [[97], None])
    for number in (0, 1):
      text = chat.parse({"model": "m", "prompt": "a", "logprobs": number}, "m")
      (choice,) = _answered(text, "ab")["choices"]
      self.assertEqual(choice["text"], "ab")
      self.assertEqual(choice["logprobs"]["token_logprobs"], [-0.25, -0.25])
    text = chat.parse({"model": "m", "prompt": "a", "logprobs": False}, "m")
    self.assertIsNone(_answered(text, "ab")["choices"][0]["logprobs"])

  def test_streams_the_same_answer(self):
    call = chat.parse(_body(tools=[_TOOL]), "m")
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for said in ("ab", text):
      whole = _answered(call, said)
      *parts, end = chat.events(whole, has_usage=True)
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


if __name__ == "__main__":
  absltest.main()

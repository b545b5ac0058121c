# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages and OpenAI's Responses, with the official clients."""

import base64
import json
import tempfile
from unittest import mock

from absl.testing import absltest
import anthropic
import openai

from tba_jax.chat_api import anthropic_messages
from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import openai_responses
from tba_jax.chat_api import strict_json
from tba_jax.chat_api import tool_calls
from tests.support import serving_case

_ASK = [{"role": "user", "content": "1+2"}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
_TOOL = {"name": "add", "description": "Adds.", "input_schema": _SCHEMA}
_FUNCTION = {
    "type": "function", "name": "add", "parameters": _SCHEMA, "strict": False
}  # fmt: skip
_TURN = tool_calls.ParsedTurn(
    "so", "I add", "", [tool_calls.ParsedCall("add", {"a": 1.0})], True
)


def _of_anthropic(client, messages, **fields):
  """Returns a message and the next call's history."""
  stream = fields.pop("stream")
  ask = dict(model="scratch", max_tokens=3, messages=messages, **fields)
  if stream:
    with client.messages.stream(**ask) as events:
      made = events.get_final_message()
  else:
    made = client.messages.create(**ask)
  return made, [*messages, {"role": "assistant", "content": made.content}]


def _of_openai(client, messages, **fields):
  """Returns a response and the next call's history."""
  stream = fields.pop("stream")
  ask = dict(model="scratch", max_output_tokens=3, input=messages, **fields)
  if stream:
    with client.responses.stream(**ask) as events:
      *_, last = events
      made = last.response  # Also of a response that is incomplete.
  else:
    made = client.responses.create(**ask)
  return made, [*messages, *made.output]


class DialectsTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.server = serving_case.HttpServer(folder)
    cls.addClassCleanup(cls.server.close)

  def _episode(self):
    status, made = self.server.ask(
        "api/v1/create_episode", {"base_model": "scratch"}
    )
    self.assertEqual(status, 200, made)
    return (
        made["episode_id"],
        f"{self.server.url}/episodes/{made['episode_id']}",
    )

  def _read(self, id):
    return self.server.ask(f"api/v1/episodes/{id}")[1]

  def _anthropic(self, url, key=serving_case.KEY):
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    self.addCleanup(client.close)
    return client

  def _openai(self, url):
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key=serving_case.KEY, max_retries=0
    )
    self.addCleanup(client.close)
    return client

  def test_dialects_record_same_rows_as_chat(self):
    id, url = self._episode()
    chat = [{"role": "system", "content": "3="}, *_ASK]
    for seed in (1, 2):
      body = {"model": "scratch", "messages": chat, "max_tokens": 3}
      status, made = self.server.ask(
          f"episodes/{id}/v1/chat/completions", {**body, "seed": seed}
      )
      self.assertEqual(status, 200, made)
      message = made["choices"][0]["message"]
      chat += [message, {"role": "user", "content": "3"}]
    expected = self._read(id)
    self.assertLen(expected["rows"], 1)
    for make, play, field in (
        (self._anthropic, _of_anthropic, "system"),
        (self._openai, _of_openai, "instructions"),
    ):
      for stream in (False, True):
        with self.subTest(field, stream=stream):
          id, url = self._episode()
          history = _ASK
          for seed in (1, 2):
            made, history = play(
                make(url),
                history,
                stream=stream,
                extra_body={"seed": seed},
                **{field: "3="},
            )
            history.append({"role": "user", "content": "3"})
          self.assertEqual(self._read(id), expected)
          (row,) = expected["rows"]
          ids = row["prompt_ids"] + row["completion_ids"]
          self.assertEqual(made.prompt_token_ids + made.token_ids, ids)
          self.assertEqual(made.version, 0)
          usage = made.usage
          self.assertEqual(usage.input_tokens + usage.output_tokens, len(ids))
          text = message["content"]
          if make == self._openai:
            self.assertEqual(made.output_text, text)
          else:
            self.assertEqual("".join(b.text for b in made.content), text)

  def test_thinking_and_calls_come_back_as_sampled(self):
    for make, play, tool in (
        (self._anthropic, _of_anthropic, _TOOL),
        (self._openai, _of_openai, _FUNCTION),
    ):
      for stream in (False, True):
        with self.subTest(tool=tool, stream=stream):
          id, url = self._episode()
          ask = dict(tools=[tool], stream=stream)
          with mock.patch.object(tool_calls, "read_turn", return_value=_TURN):
            made, history = play(make(url), _ASK, **ask)
          if make == self._anthropic:
            thought, text, call = made.content
            self.assertEqual(thought.thinking, "so")
            self.assertEqual((text.text, call.name), ("I add", "add"))
            self.assertEqual(call.input, {"a": 1})
            self.assertEqual(made.stop_reason, "tool_use")
            # As JavaScript's clients write 1.0.
            history[-1] = made.to_param()
            history[-1]["content"][2] = {
                **call.model_dump(exclude_unset=True),
                "input": {"a": 1},
            }
            part = {"type": "text", "text": "2"}
            result = {"type": "tool_result", "tool_use_id": call.id}
            history.append(
                {"role": "user", "content": [{**result, "content": [part]}]}
            )
          else:
            thought, text, call = made.output
            self.assertEqual(thought.content[0].text, "so")
            self.assertEqual(text.content[0].text, "I add")
            self.assertEqual(json.loads(call.arguments), {"a": 1})
            history.append(
                {"type": "function_call_output", "call_id": call.call_id,
                 "output": "2"}
            )  # fmt: skip
          play(make(url), history, **ask)
          episode = self._read(id)
          self.assertLen(episode["rows"], 1)
          self.assertEqual(episode["calls"], 2)

  def test_counts_tokens_of_next_call(self):
    id, url = self._episode()
    client, history = self._anthropic(url), _ASK
    for _ in range(2):
      counted = client.messages.count_tokens(model="scratch", messages=history)
      made, history = _of_anthropic(client, history, stream=False)
      history.append({"role": "user", "content": "3"})
      self.assertEqual(counted.input_tokens, made.usage.input_tokens)
    self.assertEqual(self._read(id)["calls"], 2)
    client = self._anthropic(self.server.url)
    counted = client.messages.count_tokens(model="scratch", messages=_ASK)
    made, _ = _of_anthropic(client, _ASK, stream=False)
    self.assertEqual(counted.input_tokens, made.usage.input_tokens)

  def test_stop_sequence_is_named(self):
    client = self._anthropic(self.server.url)
    ask = dict(model="scratch", messages=_ASK, max_tokens=3)
    body = {"seed": 1, "temperature": 0}
    made = client.messages.create(**ask, extra_body=body)
    text = made.content[0].text
    made = client.messages.create(
        **ask, stop_sequences=[text[0]], extra_body=body
    )
    self.assertEqual(made.stop_reason, "stop_sequence")
    self.assertEqual((made.stop_sequence, made.content), (text[0], []))
    made = client.messages.create(**{**ask, "max_tokens": 1}, extra_body=body)
    self.assertEqual(made.stop_reason, "max_tokens")

  def test_stream_has_events_of_api(self):
    ask = dict(model="scratch", stream=True)
    with mock.patch.object(tool_calls, "read_turn", return_value=_TURN):
      events = self._anthropic(self.server.url).messages.create(
          messages=_ASK, max_tokens=3, tools=[_TOOL], **ask
      )
      names = [event.type for event in events]
      self.assertEqual(names[0], "message_start")
      self.assertEqual(names[-2:], ["message_delta", "message_stop"])
      block = ["content_block_start", "content_block_delta"]
      thought = [*block, "content_block_delta", "content_block_stop"]
      rest = [*block, "content_block_stop"] * 2
      self.assertEqual(names[1:-2], [*thought, *rest])
      events = self._openai(self.server.url).responses.create(
          input="1+2", max_output_tokens=3, tools=[_FUNCTION], **ask
      )
      numbers = [event.sequence_number for event in events]
      self.assertEqual(numbers, [*range(len(numbers))])
      events.close()

  def test_truncated_response_is_incomplete(self):
    client = self._openai(self.server.url)
    made = client.responses.create(
        model="scratch", input="1+2", max_output_tokens=1,
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    self.assertEqual(made.status, "incomplete")
    self.assertEqual(made.incomplete_details.reason, "max_output_tokens")

  def test_key_and_missing_episode_are_errors_of_client(self):
    ask = dict(model="scratch", messages=_ASK, max_tokens=1)
    with self.assertRaises(anthropic.AuthenticationError):
      self._anthropic(self.server.url, "tml-x").messages.create(**ask)
    for url in ("/episodes/x", ""):
      ask = {**ask, "model": "gpt"}
      client = self._anthropic(f"{self.server.url}{url}")
      with self.assertRaisesRegex(anthropic.NotFoundError, "not_found_error"):
        client.messages.count_tokens(model="gpt", messages=_ASK)

  def test_refused_calls_have_form_of_api_and_record_nothing(self):
    for path, fields, status, kind, message in (
        ("messages", {"model": "x"}, 400, "invalid_request_error", "model ="),
        ("messages", {"max_tokens": "x"}, 400, "invalid_request_error",
         "max_tokens = 'x'"),
        ("messages", {"messages": [{**_ASK[0], "content": "1" * 30}]}, 400,
         "invalid_request_error", "context_length_exceeded"),
        ("responses", {"input": "1" * 30}, 400, "invalid_request_error",
         "context_length_exceeded"),
        ("responses", {"model": "x", "input": "1"}, 400,
         "invalid_request_error", "model ="),
    ):  # fmt: skip
      id, _ = self._episode()
      body = {"model": "scratch"}
      if path == "messages":
        body |= {"messages": _ASK, "max_tokens": 2}
      made = self.server.ask(f"episodes/{id}/v1/{path}", {**body, **fields})
      self.assertEqual(made[0], status, made)
      self.assertEqual(made[1]["error"]["type"], kind)
      self.assertStartsWith(made[1]["error"]["message"], message)
      self.assertEqual(made[1].get("type"), {"messages": "error"}.get(path))
      self.assertEqual(self._read(id)["calls"], 0)


class TranslationTest(absltest.TestCase):

  def test_refuses_wrong_messages_by_place(self):
    user = lambda *blocks: [{"role": "user", "content": [*blocks]}]
    text = {"type": "text", "text": "1"}
    call = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "b"}
    for message, fields in (
        ("max_tokens: is missing", {"max_tokens": None}),
        ("max_tokens = 'x'", {"max_tokens": "x"}),
        ("max_tokens = 0", {"max_tokens": 0}),
        ("temperature = 1000", {"temperature": 1000}),
        ("mcp_servers = .*: not supported", {"mcp_servers": [{"name": "a"}]}),
        ("container: not supported", {"container": "a"}),
        ("thoughts = 3: not supported", {"thoughts": 3}),
        ("messages: must be a list", {"messages": []}),
        ("messages: must be a list", {"messages": "1+2"}),
        (r"messages\[0\].role = 'tool'", {"messages": [{"role": "tool"}]}),
        (r"messages\[0\].content: is missing",
         {"messages": [{"role": "user"}]}),
        (r"messages\[0\].name = 'a': not supported",
         {"messages": [{**_ASK[0], "name": "a"}]}),
        (r"messages\[0\].content\[1\].type = 'image': must be text or",
         {"messages": user(text, {"type": "image"})}),
        (r"messages\[0\].content\[0\].text = 1: must be",
         {"messages": user({"type": "text", "text": 1})}),
        (r"messages\[0\].content\[0\] = 'a': must be an object",
         {"messages": user("a")}),
        (r"messages\[0\].content\[0\].tool_use_id = 'b': must be the id",
         {"messages": user(result)}),
        (r"messages\[1\].content\[1\].type = 'text': must come before tool_use",
         {"messages": [*_ASK, {"role": "assistant", "content": [call, text]},
                       *_ASK]}),
        (r"messages\[1\].role = 'assistant': must be user in the last",
         {"messages": [*_ASK, {"role": "assistant", "content": "1"}]}),
        (r"system\[0\].type = 'image'", {"system": [{"type": "image"}]}),
        (r"tools\[0\].type = 'bash_20250124': must be custom",
         {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (r"tools\[0\].input_schema: is missing", {"tools": [{"name": "a"}]}),
        ("tool_choice.type = 'any'", {"tool_choice": {"type": "any"}}),
    ):  # fmt: skip
      with self.subTest(message=message):
        body = {"model": "scratch", "max_tokens": 2, "messages": _ASK}
        with self.assertRaisesRegex(ValueError, f"^{message}"):
          chat = anthropic_messages.to_chat({**body, **fields})
          strict_json.read(chat_requests.ChatRequest, chat)

  def test_refuses_wrong_responses_by_place(self):
    parts = lambda *parts: [{"role": "user", "content": [*parts]}]
    reasoning = {"type": "reasoning", "id": "a", "summary": []}
    for message, fields in (
        ("model: is missing", {"model": None}),
        ("input: is missing", {"input": None}),
        ("input: must be a text or a list", {"input": []}),
        ("max_output_tokens = 'x'", {"max_output_tokens": "x"}),
        ("previous_response_id: must be left out, because",
         {"previous_response_id": "resp_1"}),
        ("background: not supported", {"background": True}),
        ("thoughts = 3: not supported", {"thoughts": 3}),
        ("truncation: must be", {"truncation": "auto"}),
        ("include: must be", {"include": ["message.output_text.logprobs"]}),
        ("text.format.type: must be",
         {"text": {"format": {"type": "json_object"}}}),
        ("tool_choice: must be", {"tool_choice": "required"}),
        (r"tools\[0\].type = 'web_search': must be function",
         {"tools": [{"type": "web_search"}]}),
        (r"tools\[0\].name: is missing", {"tools": [{"type": "function"}]}),
        (r"input\[0\].role = 'tool'",
         {"input": [{"role": "tool", "content": "1"}]}),
        (r"input\[0\].content\[0\].type = 'input_image'",
         {"input": parts({"type": "input_image"})}),
        (r"input\[0\].type = 'item_reference': must be message",
         {"input": [{"type": "item_reference", "id": "a"}]}),
        (r"input\[0\].call_id = 'a': must be the call_id",
         {"input": [{"type": "function_call_output", "call_id": "a",
                     "output": "1"}]}),
        (r"input\[0\].encrypted_content: must be from this server",
         {"input": [{**reasoning, "encrypted_content": "?"}]}),
        (r"input\[0\].content\[0\]: must have a text",
         {"input": [{**reasoning, "content": ["a"]}]}),
    ):  # fmt: skip
      with self.subTest(message=message):
        body = {"model": "scratch", "input": "1+2"}
        with self.assertRaisesRegex(ValueError, f"^{message}"):
          chat = openai_responses.to_chat({**body, **fields})
          strict_json.read(chat_requests.ChatRequest, chat)

  def test_translates_blocks_and_items_alike(self):
    called = {"id": "a", "type": "function",
              "function": {"name": "add", "arguments": '{"a": 1}'}}  # fmt: skip
    messages = [
        {"role": "system", "content": "b"},
        {"role": "user", "content": "12"},
        {
            "role": "assistant",
            "content": "I add",
            "reasoning_content": "so",
            "tool_calls": [called],
        },
        {"role": "tool", "content": "3", "tool_call_id": "a"},
        {"role": "user", "content": "4"},
    ]
    text = lambda text, kind="text": {"type": kind, "text": text}
    anthropics = anthropic_messages.to_chat(
        {
            "model": "m",
            "max_tokens": 2,
            "system": [text("x-anthropic-billing-header: a=1;"), text("b")],
            "context_management": {"edits": []},
            "messages": [
                {"role": "user", "content": [text("1"), text("2")]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "so", "signature": ""},
                        text("I add"),
                        {
                            "type": "tool_use",
                            "id": "a",
                            "name": "add",
                            "input": {"a": 1},
                        },
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [text("3")],
                            "cache_control": {"type": "ephemeral"},
                        },
                        text("4"),
                    ],
                },
            ],
            "tools": [_TOOL],
        }
    )
    # As Codex sends them.
    openais = openai_responses.to_chat(
        {
            "model": "m",
            "max_output_tokens": 2,
            "instructions": "b",
            "client_metadata": {"a": "b"},
            "store": False,
            "input": [
                {
                    "role": "user",
                    "content": [
                        text("1", "input_text"),
                        text("2", "input_text"),
                    ],
                },
                {
                    "type": "reasoning",
                    "summary": [],
                    "encrypted_content": base64.b64encode(b"so").decode(),
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [text("I add", "output_text")],
                },
                {
                    "type": "function_call",
                    "call_id": "a",
                    "name": "add",
                    "arguments": '{"a": 1}',
                },
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": "3",
                },
                {"role": "user", "content": "4"},
            ],
            "tools": [{**_FUNCTION, "description": "Adds."}],
        }
    )
    self.assertEqual(anthropics["messages"], messages)
    self.assertEqual(anthropics, openais)

  def test_error_of_tool_is_seen(self):
    call = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no"}
    chat = [
        *_ASK,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{**result, "is_error": True}]},
    ]
    made = anthropic_messages.to_chat(
        {"model": "m", "max_tokens": 1, "messages": chat}
    )
    self.assertEqual(made["messages"][-1]["content"], "error: no")

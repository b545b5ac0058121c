# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Episodes: the ids that were sampled stay, whatever is said around them."""

import json
from unittest import mock

from absl.testing import absltest

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import completions
from tba_jax.chat_api import tool_calls
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.serving import episodes

_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Leaves out what an earlier turn thought.
_FORGETS = _TEMPLATE.replace("m.content", "m.content.split('t')[-1]")
_WORDS = ("<user>", "<assistant>", "<tool>", "12", "1", "2", "3", "t")
_EOS = 1


def _tokenizer(template=_TEMPLATE):
  tokenizer = tokenizer_lib.word_level(_WORDS, r"<\w+>|12|\w")
  tokenizer.chat_template = template
  return tokenizer


def _call(*messages, prompt=None, **fields):
  body = {"model": "m", "messages": list(messages), **fields}
  if prompt is not None:
    del body["messages"]
    body["prompt"] = prompt
  return chat_requests.read_completions(body)


def _user(text):
  return {"role": "user", "content": text}


class _Player:
  """An agent whose model says given tokens."""

  def __init__(self, template=_TEMPLATE):
    self.tokenizer = _tokenizer(template)
    self.episode = episodes.Episode(self.tokenizer, 16)
    self.records = []

  def play(self, call, tokens, *, version=0):
    """Answers a call; returns the assistant's message."""
    return self.end(call, self.episode.begin(call), tokens, version=version)

  def end(self, call, turn, tokens, *, version=0):
    logprobs = [-0.5 * i for i in tokens]
    record = self.episode.end(
        turn, tokens, logprobs, stopped=tokens[-1] == _EOS, version=version
    )
    record = json.loads(json.dumps(record))
    response = tokens[:-1] if tokens[-1] == _EOS else tokens
    message = completions.answer(call, self.tokenizer.decode(response), "r:1")
    self.episode.add(record, call.chat, message)
    self.records.append((record, call.chat, message))
    return message

  def ids(self, text):
    return self.tokenizer.encode(text)


class EpisodeTest(absltest.TestCase):

  def test_keeps_sampled_ids_and_appends_continuation(self):
    player = _Player()
    # The text "12" would be encoded as one token.
    one, two = player.ids("1"), player.ids("2")
    self.assertNotEqual([*one, *two], player.ids("12"))
    response = player.play(_call(_user("3")), [*one, *two, _EOS], version=4)
    self.assertEqual(response["content"], "12")
    player.play(
        _call(_user("3"), response, {"role": "tool", "content": "2"}),
        [*two, _EOS],
        version=5,
    )
    (row,) = player.episode.to_json()["rows"]
    self.assertEqual(row["prompt_ids"], player.ids("<user>3<eos><assistant>"))
    between = player.ids("<tool>2<eos><assistant>")
    n = len(between)
    self.assertEqual(
        row["completion_ids"], [*one, *two, _EOS, *between, *two, _EOS]
    )
    self.assertEqual(row["sampled_mask"], [1, 1, 1] + [0] * n + [1, 1])
    self.assertEqual(row["versions"], [4, 4, 4] + [-1] * n + [5, 5])
    self.assertEqual(
        row["logprobs"],
        [
            -0.5 * i * m
            for i, m in zip(row["completion_ids"], row["sampled_mask"])
        ],
    )
    self.assertEqual(player.episode.counts["calls"], 2)

  def test_truncated_turn_ends_with_unsampled_tokens(self):
    player = _Player()
    response = player.play(_call(_user("3")), player.ids("1"))
    player.play(_call(_user("3"), response, _user("2")), player.ids("2"))
    (row,) = player.episode.to_json()["rows"]
    self.assertEqual(
        row["completion_ids"], player.ids("1<eos><user>2<eos><assistant>2")
    )
    self.assertEqual(row["sampled_mask"], [1, 0, 0, 0, 0, 0, 1])
    self.assertFalse(row["stopped"])

  def test_rerendered_history_begins_new_row(self):
    player = _Player(_FORGETS)
    response = player.play(_call(_user("3")), [*player.ids("2t1"), _EOS])
    response = player.play(
        _call(_user("3"), response, _user("2")), player.ids("1")
    )
    rows = player.episode.to_json()["rows"]
    self.assertLen(rows, 2)
    self.assertEqual(
        rows[1]["prompt_ids"],
        player.ids("<user>3<eos><assistant>1<eos><user>2<eos><assistant>"),
    )
    self.assertEqual(rows[1]["sampled_mask"], [1])
    self.assertEqual(
        player.episode.counts, {"calls": 2, "rewritten": 1, "branched": 0}
    )

  def test_begins_row_for_another_past(self):
    player = _Player()
    response = player.play(_call(_user("3")), [*player.ids("1"), _EOS])
    other = {**response, "content": "2"}
    player.play(_call(_user("3"), other, _user("2")), player.ids("1"))
    # The same prompt again is another attempt.
    player.play(_call(_user("3")), player.ids("2"))
    self.assertEqual(player.episode.counts["branched"], 2)
    # A branch goes on where it was.
    player.play(_call(_user("3"), response, _user("2")), player.ids("2"))
    self.assertLen(player.episode.rows, 3)
    self.assertEqual(sum(player.episode.rows[0].sampled), 3)

  def test_calls_at_same_time_share_no_row(self):
    player = _Player()
    response = player.play(_call(_user("3")), [*player.ids("1"), _EOS])
    call = _call(_user("3"), response, _user("2"))
    turns = [player.episode.begin(call) for _ in range(2)]
    for turn in turns:
      player.end(call, turn, player.ids("2"))
    first, second = player.episode.to_json()["rows"]
    self.assertEqual(
        first["prompt_ids"] + first["completion_ids"],
        second["prompt_ids"] + second["completion_ids"],
    )
    self.assertEqual(sum(first["sampled_mask"]), 3)
    self.assertEqual(second["sampled_mask"], [1])

  def test_tool_calls_round_trip_as_sampled(self):
    """The agent sends them in a form of its own."""
    player = _Player(_TEMPLATE)
    call = _call(
        _user("3"), tools=[{"type": "function", "function": {"name": "f"}}]
    )
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    turn = player.episode.begin(call)
    tokens = [*player.ids("12t"), _EOS]
    record = player.episode.end(
        turn, tokens, [0.0] * len(tokens), stopped=True, version=0
    )
    canonical = _call(_user("3"), message).chat[1]
    player.episode.add(record, call.chat, canonical)
    message = {**message, "content": None, "refusal": None, "annotations": []}
    player.play(
        _call(_user("3"), message, {"role": "tool", "content": "1"}),
        player.ids("1"),
    )
    (row,) = player.episode.to_json()["rows"]
    self.assertEqual(row["completion_ids"][: len(tokens)], tokens)

  def test_texts_continue_by_text_and_by_ids(self):
    player = _Player()
    one, two = player.ids("1"), player.ids("2")
    player.play(_call(prompt="3"), [*one, *two])
    player.play(_call(prompt="3123"), one)
    ids = player.ids("3")
    player.play(_call(prompt=[*ids, *one, *two, *ids, *one, *ids]), two)
    (row,) = player.episode.to_json()["rows"]
    self.assertEqual(
        row["completion_ids"], [*one, *two, *ids, *one, *ids, *two]
    )
    self.assertEqual(row["sampled_mask"], [1, 1, 0, 1, 0, 1])
    player.play(_call(prompt="2"), two)
    self.assertEqual(player.episode.counts["branched"], 1)

  def test_refuses_overlong_call_before_encoding(self):
    player = _Player()
    long = "1" * (episodes._SHORT_TEXT + 1)
    with mock.patch.object(
        player.tokenizer, "encode", side_effect=AssertionError
    ), mock.patch.object(
        player.tokenizer, "decode", side_effect=AssertionError
    ):
      for call in (
          _call(_user(long)),
          _call(prompt=long),
          _call(prompt=[3] * 17),
      ):
        with self.assertRaisesRegex(ValueError, "^context_length_exceeded"):
          player.episode.begin(call)
    response = player.play(_call(_user("3")), [*player.ids("1"), _EOS])
    with self.assertRaisesRegex(ValueError, "^context_length_exceeded"):
      player.episode.begin(_call(_user("3"), response, _user(long)))

  def test_reread_episode_is_identical(self):
    player = _Player(_FORGETS)
    response = player.play(_call(_user("3")), [*player.ids("2t1"), _EOS])
    player.play(_call(_user("3"), response, _user("2")), player.ids("1"))
    again = episodes.Episode(player.tokenizer, 16)
    for record in player.records:
      again.add(*record)
    self.assertEqual(again.rows, player.episode.rows)
    self.assertEqual(again.counts, player.episode.counts)

  def test_rows_of_other_agents_are_marked(self):
    tool = {"type": "function", "function": {"name": "f"}}
    system = lambda text: {"role": "system", "content": text}
    player = _Player()
    ids = player.ids("1")
    player.play(_call(system("t"), _user("3")), ids)  # A title.
    message = player.play(_call(system("1"), _user("3"), tools=[tool]), ids)
    player.play(
        _call(system("2"), _user("3"), tools=[tool]), ids
    )  # Called by the task's agent.
    player.play(_call(system("1"), _user("2"), tools=[tool]), ids)  # Rewritten.
    player.play(
        _call(system("1"), _user("3"), message, _user("2"), tools=[tool]), ids
    )
    rows = player.episode.to_json()["rows"]
    is_task = [row["is_task"] for row in rows]
    self.assertEqual(is_task, [False, True, False, True])
    self.assertEqual(sum(rows[1]["sampled_mask"]), 2)
    again = episodes.Episode(player.tokenizer, 16)
    for record in player.records:
      again.add(*record)
    self.assertEqual(again.to_json(), player.episode.to_json())
    alone = _Player()
    alone.play(_call(_user("3")), ids)
    alone.play(_call(prompt="3"), ids)
    rows = alone.episode.to_json()["rows"]
    self.assertEqual([row["is_task"] for row in rows], [True, False])

  def test_thinking_continues_row_if_returned(self):
    player = _Player()
    call = lambda *more: _call(_user("3"), *more, separate_reasoning=True)
    with mock.patch.object(
        tool_calls,
        "read_turn",
        return_value=tool_calls.ParsedTurn("t", "2", "", [], False),
    ):
      message = player.play(call(), [*player.ids("t2"), _EOS])
    self.assertEqual(message["reasoning_content"], "t")
    player.play(call(message, _user("2")), player.ids("1"))
    self.assertLen(player.episode.rows, 1)
    del message["reasoning_content"]
    player.play(call(message, _user("2")), player.ids("1"))
    self.assertEqual(player.episode.counts["branched"], 1)

  def test_template_gets_thinking_in_its_field_or_text(self):
    shown = "{% for m in messages %}{{ m.FIELD }}|{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "content": "2", "reasoning_content": "t"}
    for field, expected in (
        ("reasoning_content", "t|2"),
        ("reasoning", "t|2"),
        ("thinking", "t|2"),
        ("other", "|<think>\nt\n</think>\n\n2"),
    ):
      player = _Player(shown.replace("FIELD", field))
      text = player.episode.begin(_call(message)).text
      self.assertEqual(text, expected)

  def test_turns_refused_by_template_continue_parsed(self):
    """As gpt-oss's template refuses channels in a text."""
    template = (
        "{% for m in messages %}{% if '<|channel|>' in m.content %}"
        "{{ raise_exception('channel') }}{% endif %}{{ '<' + m.role + '>' }}"
        "{% if m.thinking and not DROPS %}{{ m.thinking }}{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|channel|>commentary"
        " to={{ c.function.name }}<|message|>"
        "{{ c.function.arguments | tojson }}{% endfor %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    words = ("<user>", "<assistant>", "<tool>", "1", "2", "3", "t", "f",
             "<|channel|>", "<|message|>", "analysis", "commentary to=", "{}",
             "<|end|>")  # fmt: skip
    for drops, num_rows in (("false", 1), ("add_generation_prompt", 2)):
      player = _Player()
      player.tokenizer = tokenizer_lib.word_level(
          words, r"<[\w|]+>|analysis|commentary to=|\{\}|\w"
      )
      player.tokenizer.chat_template = template.replace("DROPS", drops)
      player.episode = episodes.Episode(player.tokenizer, 99)
      tools = [{"type": "function", "function": {"name": "f"}}]
      sampled = player.ids(
          "<|channel|>analysis<|message|>t<|end|><|channel|>commentary to=f"
          "<|message|>{}"
      )
      with mock.patch.object(tool_calls, "check_template"):
        message = player.play(_call(_user("3"), tools=tools), [*sampled, _EOS])
        self.assertEqual(message["reasoning_content"], "t")
        (call,) = message["tool_calls"]
        result = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
        player.play(
            _call(_user("3"), message, result, tools=tools), player.ids("1")
        )
      rows = player.episode.to_json()["rows"]
      self.assertLen(rows, num_rows)
      self.assertEqual(rows[0]["completion_ids"][: len(sampled)], sampled)
      self.assertEqual(player.episode.counts["rewritten"], num_rows - 1)

  def test_tools_of_unparsed_template_are_refused(self):
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = _TEMPLATE.replace(
        "m.content", "(m.tool_calls | string if m.tool_calls else m.content)"
    )
    with self.assertRaisesRegex(ValueError, "^tools: the chat template writes"):
      _Player(template).episode.begin(_call(_user("3"), tools=tools))

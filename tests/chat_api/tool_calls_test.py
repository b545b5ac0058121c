# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a turn: both forms of chat templates, lines, errors."""

import json
import random

from absl.testing import parameterized
import jinja2

from tba_jax.chat_api import tool_calls

# More than Python reads.
_DEEP = '{"x": ' + "[" * 5000
_PARAMETERS = {
    "f": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "d": {"type": "object"},
        "n": {"type": "integer", "nullable": True},
    },
    "g": {},
}
# As Qwen 3's and Qwen3-Coder's templates write calls.
_JSON = (
    '{% for c in calls %}<tool_call>\n{"name": "{{ c.name }}", "arguments":'
    " {{ c.arguments | json }}}\n</tool_call>\n{% endfor %}"
)
_TAGS = (
    "{% for c in calls %}<tool_call>\n<function={{ c.name }}>\n"
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | json if v is mapping or (v is sequence and v is not string) else v"
    " | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n"
    "{% endfor %}"
)
# As Llama 3's and gpt-oss's templates write a call.
_LLAMA = (
    '{"name": "{{ calls[0].name }}", "parameters":'
    " {{ calls[0].arguments | json }}}<|eot_id|>"
)
_HARMONY = (
    " to=functions.{{ calls[0].name }}<|channel|>commentary json<|message|>"
    "{{ calls[0].arguments | json }}<|call|>"
)
_SAMPLED = (
    "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.f <|constrain|>json<|message|>"
)
_PIECES = (
    "a", " ", "\n", "\t", '"', "'", "\\", "{", "}", "\u00e9", "\u65e5", "1",
    "True", "<think>", "</think>", "<tool_call>", "<function=", "f: 1",
)  # fmt: skip
_JSON_PIECES = (*_PIECES, "</tool_call>", "</parameter>", "</function>")


def _render(template, calls):
  environment = jinja2.Environment(keep_trailing_newline=True)
  environment.filters["json"] = lambda x: json.dumps(x, ensure_ascii=False)
  return environment.from_string(template).render(calls=calls)


def _tags(*parameters):
  inner = "".join(f"<parameter={k}>{v}</parameter>" for k, v in parameters)
  return f"<tool_call><function=f>{inner}</function></tool_call>"


class ToolCallsTest(parameterized.TestCase):

  def find(self, text):
    """Returns names and arguments, or errors, and whether of a chat."""
    calls, is_chat = tool_calls.find(text, _PARAMETERS)
    return [c.error or (c.name, c.arguments) for c in calls], is_chat

  @parameterized.parameters(
      ("I try\nf: 3*4", "3*4"),
      ('f: {"x": "3: 4"}', {"x": "3: 4"}),
      ("f: {3", "{3"),
      (f"f: {_DEEP}", _DEEP),
      ("<think>g: 1</think>\nf: 2", "2"),
      ("so I\n</think>\nf: 2", "2"),
  )
  def test_last_line_is_call(self, text, arguments):
    self.assertEqual(self.find(text), ([("f", arguments)], False))

  @parameterized.parameters(
      "f: 1\nso 2", "h: 1", "", "<think>hm\nf: 1", "<think>f: 1</think>"
  )
  def test_no_call(self, text):
    self.assertEqual(self.find(text), ([], False))

  @parameterized.parameters(
      (_JSON, _JSON_PIECES, 0), (_JSON, _JSON_PIECES, 1),
      (_TAGS, _PIECES, 0), (_TAGS, _PIECES, 1),
      (_LLAMA, _JSON_PIECES, 0), ("<|python_tag|>" + _LLAMA, _JSON_PIECES, 1),
      (_HARMONY, _JSON_PIECES, 0),
  )  # fmt: skip
  def test_reads_template_tool_calls_exactly(self, template, pieces, seed):
    rng = random.Random(seed)
    text = lambda: "".join(rng.choices(pieces, k=rng.randrange(6)))
    for _ in range(200):
      makers = {
          "s": text,
          "i": lambda: rng.randrange(-(10**20), 10**20),
          "x": lambda: rng.uniform(-1, 1) * 10.0 ** rng.randrange(-9, 20),
          "b": lambda: rng.random() < 0.5,
          "l": lambda: [rng.random(), None, {"a": True}, [1]],
          "d": lambda: {"a": [rng.randrange(9)], "b": {}},
          "n": lambda: rng.choice([None, 3]),
      }
      calls = []
      most = 4 if template in (_JSON, _TAGS) else 2
      for _ in range(rng.randrange(1, most)):
        names = rng.sample([*makers], rng.randrange(len(makers) + 1))
        arguments = {name: makers[name]() for name in names}
        calls.append({"name": "f", "arguments": arguments})
      before = rng.choice(["", "So\n", "<think>f: 1 <tool_call></think>\n"])
      if template == _HARMONY:
        before = rng.choice(["", _SAMPLED.partition("<|channel|>comm")[0]])
      elif template == _LLAMA:
        before = before.removeprefix("So")
      actual, is_chat = self.find(before + _render(template, calls))
      expected = [(c["name"], c["arguments"]) for c in calls]
      self.assertEqual(repr(actual), repr(expected))
      self.assertTrue(is_chat)

  def test_calls_of_both_forms_stand_in_their_order(self):
    text = 'A <tool_call>{"name": "g"}</tool_call> B ' + _tags(("i", "3"))
    calls, _ = tool_calls.find(text, _PARAMETERS)
    self.assertEqual([c.name for c in calls], ["g", "f"])
    self.assertEqual([c.arguments for c in calls], [{}, {"i": 3}])
    self.assertEqual([c.start for c in calls], [2, text.index("<tool_call><")])

  def test_arguments_may_be_text_of_object(self):
    body = json.dumps({"name": "f", "arguments": '{"i": 1}'})
    result = self.find(f"<tool_call>{body}</tool_call>")
    self.assertEqual(result, ([("f", {"i": 1})], True))

  def test_text_may_have_line_breaks_and_end_tag(self):
    body = '{"name": "f", "arguments": {"s": "a\n\t</tool_call>"}}'
    result = self.find(f"<tool_call>\n{body}\n</tool_call>")
    self.assertEqual(result, ([("f", {"s": "a\n\t</tool_call>"})], True))

  @parameterized.parameters(
      ("<tool_call>{oops</tool_call>", "not JSON"),
      ("<tool_call>[1]</tool_call>", "expected { or <function= after"),
      ("<tool_call></tool_call>", "expected { or <function= after"),
      ("<tool_call>f: 1", "expected { or <function= after"),
      (f"<tool_call>{_DEEP}</tool_call>", "not JSON"),
      ('<tool_call>{"name": "f"}', "expected </tool_call> after it"),
      ('<tool_call>{"name": "f"} g</tool_call>', "expected </tool_call> after"),
      ('{"name": "f"}</tool_call>', "</tool_call> ends no call"),
      ('<tool_call>{"name": "f"</tool_call>', "not JSON"),
      ('<tool_call>{"name": "f", "args": {}}</tool_call>', "expected the keys"),
      ("<tool_call>{}</tool_call>", "expected the keys"),
      ('<tool_call>{"name": 5}</tool_call>', "name: must be a text"),
      (
          '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
          "arguments: must be a JSON object",
      ),
      (
          '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
          "arguments: must be a JSON object",
      ),
      (
          '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
          "not JSON: NaN",
      ),
      (
          '<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>',
          "not JSON: a name occurs twice",
      ),
      (
          '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d"}}</tool_call>',
          "not JSON: .*surrogates",
      ),
      ("<tool_call><function=f></tool_call>", "expected <parameter=NAME>"),
      ("<tool_call><function=f>", "expected <parameter=NAME>"),
      ("<tool_call><function=></function></tool_call>", "expected <function="),
      (_tags(("i", "1"), ("i", "2")), "<parameter=i> occurs twice"),
      (
          _tags(("s", "a</parameter></function></tool_call>")),
          "</tool_call> occurs twice",
      ),
  )
  def test_error_shows_expected_call(self, text, error):
    (result,), is_chat = self.find(text)
    self.assertRegex(result, f"^{error}.*; a call is <tool_call>")
    self.assertTrue(is_chat)

  def test_turn_continues_after_wrong_call(self):
    right = '<tool_call>{"name": "g"}</tool_call>'
    for wrong in (
        "<tool_call>{oops</tool_call>",
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        "<tool_call>f</tool_call>",
        "<tool_call>",
    ):
      result, _ = self.find(f"{wrong} and {right}")
      self.assertLen(result, 2)
      self.assertEqual(result[1], ("g", {}))

  @parameterized.parameters(
      "<think>{}</think>Done.",
      "<think>{}",
      "So {} or not.\n</think>\nDone.",
      "<think>a</think><think>{}</think>Done.",
      "<think>a <think> b</think> {} </think>Done.",
  )
  def test_thought_calls_nothing(self, text):
    for call in (_tags(), '<tool_call>{"name": "g"}</tool_call>'):
      self.assertEqual(self.find(text.format(call)), ([], False))

  @parameterized.parameters(
      (_SAMPLED + '{"i": 1}', "so", "", [("f", {"i": 1})]),
      (
          "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"
          '<|channel|>commentary to=functions.g<|message|>{}<|end|>',
          "", "I call.", [("g", {})],
      ),
      ("<|channel|>final<|message|>a < b", "", "a < b", []),
      ('<think>a</think> b\n<tool_call>{"name": "g"}</tool_call>',
       "a", "b", [("g", {})]),
      ("a\n</think>\n\nb", "a", "b", []),
      ("<think>a", "a", "", []),
      ('{"name": "h", "parameters": {}}', "",
       '{"name": "h", "parameters": {}}', []),
      ("so\nf: 1", "", "so\nf: 1", [("f", "1")]),
  )  # fmt: skip
  def test_splits_turn(self, text, reasoning, content, calls):
    turn = tool_calls.read_turn(text, _PARAMETERS)
    self.assertEqual((turn.reasoning, turn.content), (reasoning, content))
    self.assertEqual([(c.name, c.arguments) for c in turn.calls], calls)

  @parameterized.parameters(
      (_SAMPLED + "{oops", "not JSON"),
      (_SAMPLED + "[1]", "arguments: must be a JSON object"),
      (_SAMPLED + "{} {}", "expected the end of the message"),
      ('<|python_tag|>{"name": "f", "arguments": {}}', "expected the keys"),
      ("<|python_tag|>f.call(i=1)", "expected { after"),
      (
          '<|python_tag|>{"name": "g", "parameters": {}}; {"name": "g"}',
          "expected the end of the turn",
      ),
  )
  def test_wrong_call_of_llama_or_harmony_is_error(self, text, error):
    (result,), is_chat = self.find(text)
    self.assertRegex(result, f"^{error}.*; a call is <|")
    self.assertTrue(is_chat)

  @parameterized.parameters(
      (_JSON, ""), (_TAGS, ""), (_LLAMA, ""), (_HARMONY, ""), ("silent", ""),
      ('[TOOL_CALLS][{"name": "{{ calls[0].name }}"}]', r"\[TOOL_CALLS\]"),
      ("<c>{{ calls[0].name + calls[0].arguments }}</c>", "<c>look_up"),
  )  # fmt: skip
  def test_unparsed_form_of_template_is_refused(self, template, error):
    def chat_text(messages, *, asks, tools):
      del tools
      calls = [
          call["function"] for m in messages for call in m.get("tool_calls", ())
      ]
      try:
        end = _render(template, calls) if calls else ""
      except TypeError as problem:
        raise ValueError("the template refuses it") from problem
      return "<user>question<assistant>" * (asks or bool(calls)) + end

    if not error:
      tool_calls.check_template(chat_text)
    else:
      with self.assertRaisesRegex(ValueError, f"{error}.*Hermes.*harmony"):
        tool_calls.check_template(chat_text)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the token ids of logged dialogues."""

from absl.testing import parameterized

from tba_jax.models import dialogue
from tests.support import logged_episodes

_USER = {"role": "user", "content": "2+3?"}
_RESULT = {"role": "tool", "content": "5"}
_WITH_REASONING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_WITHOUT_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Opens the thinking part of its last turn and closes it in others.
_THINKS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}<think></think>"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


def _says(content, **more):
  return {"role": "assistant", "content": content, **more}


def _call(**arguments):
  return {
      "id": "1",
      "type": "function",
      "function": {"name": "add", "arguments": arguments},
  }


class EncodeTest(parameterized.TestCase):

  def encode(self, template, *turns, **options):
    tokenizer = logged_episodes.make_tokenizer(template)
    made = dialogue.encode(tokenizer, [_USER], turns, **options)
    parts, last = [], None
    for i, is_sampled in zip(made.ids, made.sampled, strict=True):
      if is_sampled != last:
        parts.append("")
        last = is_sampled
      parts[-1] += tokenizer.decode([i])
    self.assertEqual(
        made.prompt,
        tokenizer.encode_prompt(dialogue.first_observation(tokenizer, [_USER])),
    )
    return made, parts

  def test_text_stays_as_logged_despite_stripping_template(self):
    turn = dialogue.Turn(_says(" 5 "), [_USER])
    made, parts = self.encode(_WITH_REASONING, turn, turn)
    self.assertEqual(
        parts, [" 5 <eos>", "[user]2+3?<eos>[assistant]", " 5 <eos>"]
    )
    self.assertEqual(made.num_lost, 0)

  def test_thinking_part_is_written_by_template(self):
    turn = dialogue.Turn(_says("5", reasoning_content="so"), ())
    self.assertEqual(self.encode(_WITH_REASONING, turn)[1], ["(so)5<eos>"])

  def test_template_may_close_thinking_part(self):
    turn = dialogue.Turn(_says("5"), ())
    self.assertEqual(self.encode(_THINKS, turn)[1], ["</think>5<eos>"])

  def test_turn_without_its_thinking_part_is_lost(self):
    turns = [
        dialogue.Turn(_says("5", reasoning_content="so"), [_USER]),
        dialogue.Turn(_says("6"), ()),
    ]
    made, parts = self.encode(_THINKS, *turns)
    self.assertLen(parts, 2)
    self.assertStartsWith(parts[0], "</think>\n\n5<eos>[user]2+3?<eos>")
    self.assertEqual(parts[1], "</think>6<eos>")
    self.assertEqual(made.num_lost, len("</think>\n\n5") + 1)

  def test_call_is_in_form_of_hermes_without_another(self):
    turn = dialogue.Turn(_says("", tool_calls=[_call(a=2)]), [_RESULT])
    _, parts = self.encode(_WITHOUT_CALLS, turn, turn)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><eos>'
    self.assertEqual(parts, [call, "[tool]5<eos>[assistant]", call])

  def test_tool_named_in_text_is_no_call(self):
    turn = dialogue.Turn(_says("I add.", tool_calls=[_call(a=2)]), ())
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><eos>'
    self.assertEqual(self.encode(_WITHOUT_CALLS, turn)[1], ["I add.\n" + call])

  def test_turn_in_open_thinking_part_is_lost(self):
    template = _WITHOUT_CALLS.removesuffix("{% endif %}") + "<think>{% endif %}"
    made, _ = self.encode(template, dialogue.Turn(_says("5"), ()))
    self.assertLen(made.ids, made.num_lost)

  def test_copied_turn_is_context(self):
    turns = [
        dialogue.Turn(_says("1"), [_USER]),
        dialogue.Turn(_says("2"), [_USER], is_sampled=False),
        dialogue.Turn(_says("3"), ()),
    ]
    made, parts = self.encode(_WITHOUT_CALLS, *turns)
    self.assertEqual([parts[0], parts[-1]], ["1<eos>", "3<eos>"])
    self.assertIn("[assistant]2<eos>", parts[1])
    self.assertEqual(made.num_lost, 0)

  def test_truncated_turn_has_no_stop_token(self):
    turn = dialogue.Turn(_says("5"), [_USER])
    _, parts = self.encode(_WITHOUT_CALLS, turn, turn, stopped=False)
    self.assertEqual([parts[0], parts[-1]], ["5<eos>", "5"])

  @parameterized.parameters(
      ({"expression": "3*4"}, "add: 3*4<eos>"),
      ({"a": 2, "b": 3}, 'add: {"a": 2, "b": 3}<eos>'),
      ({"a": 2}, "add: 2<eos>"),
  )
  def test_texts_need_no_template(self, arguments, text):
    turn = dialogue.Turn(_says("", tool_calls=[_call(**arguments)]), [_RESULT])
    _, parts = self.encode(None, turn, dialogue.Turn(_says("5"), ()))
    self.assertEqual(parts, [text, "5\n", "5<eos>"])

  def test_template_may_refuse(self):
    template = "{{ raise_exception('no tools') if messages | length > 2 }}"
    turn = dialogue.Turn(_says("5"), [_RESULT])
    with self.assertRaisesRegex(ValueError, "no tools"):
      self.encode(_WITHOUT_CALLS + template, turn, turn)

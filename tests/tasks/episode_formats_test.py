# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of logged episodes: their formats, and errors with places."""

import json

from absl.testing import parameterized

from tba_jax.tasks import episode_formats
from tba_jax.tasks import offline_completions
from tests.support import logged_episodes

_TOKENIZER = logged_episodes.make_tokenizer()
_REMOVED = object()
_IMAGE = {"type": "image", "source": {}}


def _changed(format, path, value):
  """Returns a record of a format with a part replaced or removed."""
  record = logged_episodes.records(_TOKENIZER)[format]
  *above, last = path
  part = record
  for key in above:
    part = part[key]
  if value is _REMOVED:
    del part[last]
  else:
    part[last] = value
  return record


class ParseTest(parameterized.TestCase):

  def parse(self, record):
    return episode_formats.parse(record, "reward")

  @parameterized.parameters(
      ("openai", "openai"), ("anthropic", "anthropic"),
      ("verifiers", "verifiers"), ("verifiers nodes", "verifiers"),
      ("atif", "atif"), ("openenv", "openenv"), ("serve", "serve"),
      ("tinker", "tinker"),
  )  # fmt: skip
  def test_formats_are_recognized(self, name, format):
    (one,) = self.parse(logged_episodes.records(_TOKENIZER)[name])
    self.assertEqual(one.format, format)
    self.assertEqual(one.reward, logged_episodes.REWARD)
    if format in ("serve", "tinker"):
      return
    self.assertEqual([m["role"] for m in one.prompt], ["system", "user"])
    self.assertEqual(one.tools, logged_episodes.TOOLS)
    first, last = one.turns
    self.assertEqual(
        json.loads(first.message["tool_calls"][0]["function"]["arguments"]),
        logged_episodes.ARGUMENTS,
    )
    self.assertEqual(first.answer[0]["name"], "add")
    self.assertEqual(last.message["content"], logged_episodes.ANSWER)

  @parameterized.parameters(
      {"prompt": "p", "completion": "a"},
      {"messages": [{"role": "user", "content": "p"}], "completion": "a"},
      {"prompt": "p", "completions": [{"text": "a", "turns": []}]},
  )
  def test_completions_of_a_turn_are_another_kind(self, **record):
    self.assertIsNone(self.parse(record))

  @parameterized.parameters(
      ("openai", ["messages", 2, "role"], "bot", r"messages\[2\].role"),
      ("openai", ["messages", 1, "content", 0, "text"], 3,
       r"messages\[1\].content\[0\].text = 3: must be a text"),
      ("openai", ["messages", 2, "tool_calls", 0, "function", "arguments"], 3,
       r"messages\[2\].tool_calls\[0\].arguments = 3"),
      ("openai", ["messages", 2, "tool_calls", 0, "function", "name"], _REMOVED,
       r"messages\[2\].tool_calls\[0\].name = null"),
      ("openai", ["messages", 3, "tool_call_id"], "c9",
       r"messages\[3\].tool_call_id = .c9.: must be the id of a call"),
      ("openai", ["messages", 3], "5", r"messages\[3\] = .5.: must be an obj"),
      ("openai", ["messages"], [{"role": "user", "content": "a"}],
       "must have a turn of the assistant"),
      ("openai", ["messages"], [{"role": "assistant", "content": "a"}],
       "and a message before it"),
      ("openai", ["tools", 0], {"type": "function", "function": {}},
       r"tools\[0\].name = null"),
      ("openai", ["reward"], None, "reward: must be a number, not null"),
      ("anthropic", ["messages", 1, "content", 0, "type"], _REMOVED,
       r"messages\[1\].content\[0\].type = null: must be thinking or text"),
      ("anthropic", ["messages", 1, "content", 1, "input"], None,
       r"messages\[1\].content\[1\].input = null"),
      ("anthropic", ["messages", 2, "content", 0, "tool_use_id"], "c9",
       r"messages\[2\].content\[0\].tool_use_id = .c9."),
      ("anthropic", ["messages", 2, "content", 0, "content", 0, "text"], None,
       r"messages\[2\].content\[0\].content\[0\].text = null"),
      ("anthropic", ["messages", 0, "role"], "tool", r"messages\[0\].role"),
      ("anthropic", ["system"], 3, "system = 3: must be a list"),
      ("verifiers", ["completion", 1, "tool_call_id"], "c9",
       r"completion\[1\].tool_call_id"),
      ("verifiers", ["prompt", 0, "role"], None, r"prompt\[0\].role = null"),
      ("verifiers", ["info", "oai_tools"], "[", "info.oai_tools: must be"),
      ("verifiers nodes", ["nodes", 2, "parent"], 2, r"nodes\[2\].parent = 2"),
      ("verifiers nodes", ["nodes", 3, "message", "content"], 5,
       r"nodes\[3\].message.content = 5"),
      ("verifiers nodes", ["nodes", 2, "mask"], [True], None),
      ("verifiers nodes", ["rewards", "exact", "score"], "1", "score = .1."),
      ("atif", ["steps", 2, "source"], "bot", r"steps\[2\].source = .bot."),
      ("atif", ["steps", 1, "message", 0, "text"], None,
       r"steps\[1\].message\[0\].text = null"),
      ("atif", ["steps", 2, "tool_calls", 0, "arguments"], 1,
       r"steps\[2\].tool_calls\[0\].arguments = 1"),
      ("atif", ["steps", 2, "observation", "results", 0, "source_call_id"],
       "c9", r"steps\[2\].observation.results\[0\].tool_call_id = .c9."),
      ("atif", ["steps"],
       [{"source": "user", "message": "a"},
        {"source": "agent", "message": "b",
         "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2],
                     "logprobs": []}}],
       r"steps\[1\].metrics: log-probs must be"),
      ("atif", ["agent"], _REMOVED, "agent = null: must be an object"),
      ("openenv", ["turns", 1, "loss_mask"], [1],
       r"turns\[1\].loss_mask: must be one for each token"),
      ("openenv", ["turns", 1, "completion_token_ids"], ["a"],
       r"turns\[1\].completion_token_ids = .*: must be a list of token ids"),
      ("openenv", ["turns", 0, "per_token_logps"], [], r"turns\[0\]: log-p"),
      ("openenv", ["turns", 1, "request", "messages", 0, "role"], 1,
       r"turns\[1\].request.messages\[0\].role = 1"),
      ("openenv", ["turns", 1, "response", "choices"], [],
       r"turns\[1\].response.choices: must be a list of one"),
      ("serve", ["rows", 0, "sampled_mask"], [1],
       r"rows\[0\].sampled_mask: must be one for each of completion_ids"),
      ("serve", ["rows", 0, "prompt_ids"], None,
       r"rows\[0\].prompt_ids = null: must be a list of token ids"),
      ("serve", ["rows", 0, "is_task"], False, "rows: must have one"),
      ("tinker", ["rows", 1, "prompt_tokens"], None,
       r"rows\[1\].prompt_tokens = null: must be a list of token ids"),
      ("tinker", ["rows", 0, "logprobs"], [], r"rows\[0\]: log-probs must be"),
  )  # fmt: skip
  def test_errors_name_place(self, format, path, value, message):
    record = _changed(format, path, value)
    if message is None:  # The length of a mask matters only with ids.
      record["nodes"][2]["token_ids"] = [1, 2]
      for n in (0, 1, 3, 4):
        record["nodes"][n] |= {"token_ids": [1], "mask": [n == 4]}
      message = r"nodes\[2\].mask: must be one for each of token_ids"
    path = self.create_tempfile(
        content=f'{{"prompt": "p", "completion": "a", "reward": 1}}\n'
        f"{json.dumps(record)}\n"
    ).full_path
    with self.assertRaisesRegex(ValueError, f"{path} line 2: .*{message}"):
      offline_completions.read(path)

  @parameterized.parameters(
      ("openai", ["messages", 1, "content", 0],
       {"type": "image_url", "image_url": {}}, "content of type image_url"),
      ("anthropic", ["messages", 2, "content", 0, "content", 0], _IMAGE,
       "content of type image"),
      ("anthropic", ["messages", 1, "content", 0],
       {"type": "redacted_thinking", "data": "…"}, "redacted_thinking"),
      ("atif", ["steps", 1, "message", 0], _IMAGE, "content of type image"),
  )  # fmt: skip
  def test_content_other_than_text_is_left_out(self, format, path, value, why):
    with self.assertRaisesRegex(episode_formats.UnusableError, why):
      self.parse(_changed(format, path, value))

  def test_text_after_call_is_left_out(self):
    record = logged_episodes.records(_TOKENIZER)["anthropic"]
    record["messages"][1]["content"].reverse()
    with self.assertRaisesRegex(
        episode_formats.UnusableError, "text after tool_use"
    ):
      self.parse(record)

  def test_prompt_may_show_turns(self):
    records = logged_episodes.records(_TOKENIZER)
    shown = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ]
    records["verifiers"]["prompt"] = [*shown, records["verifiers"]["prompt"][1]]
    weighted = [shown[0], shown[1] | {"weight": 0}]
    records["openai"]["messages"] = [
        *weighted, *records["openai"]["messages"][1:]
    ]  # fmt: skip
    copied = [
        {"step_id": 1, "source": "user", "message": "1+1?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "2",
            "is_copied_context": True,
        },
    ]
    records["atif"]["steps"] = [*copied, *records["atif"]["steps"][1:]]
    for name in ("verifiers", "openai", "atif"):
      (one,) = self.parse(records[name])
      roles = [m["role"] for m in one.prompt]
      self.assertEqual(roles, ["user", "assistant", "user"], name)
      self.assertLen(one.turns, 2)

  def test_rewritten_context_loses_later_turns(self):
    record = logged_episodes.records(_TOKENIZER)["openenv"]
    (whole,) = self.parse(record)
    last = record["turns"][1]
    last["prompt_token_ids"][0] += 1
    (one,) = self.parse(record)
    self.assertEqual(one.tokens.num_lost, len(last["completion_token_ids"]))
    first = record["turns"][0]["completion_token_ids"]
    self.assertEqual(one.tokens.ids, tuple(first))
    self.assertEqual(whole.tokens.num_lost, 0)

  def test_conversations_of_a_capture_are_episodes(self):
    record = logged_episodes.records(_TOKENIZER)["tinker"]
    first, last = record["rows"]
    title = {"prompt_tokens": [7, 8], "sampled_tokens": [9]}
    cut = last | {"metadata": {"stop_reason": "length"}}
    empty = {"prompt_tokens": [6], "sampled_tokens": []}
    record["rows"] = [empty, first, title, cut]
    agent, other = self.parse(record)
    self.assertEqual(
        sum(agent.tokens.sampled),
        sum(len(row["sampled_tokens"]) for row in (first, last)),
    )
    self.assertEqual(agent.tokens.num_lost, 0)
    self.assertIs(agent.stopped, False)
    self.assertEqual(other.tokens.prompt, (7, 8))
    self.assertIsNone(other.tokens.logprobs)
    self.assertEqual([one.reward for one in (agent, other)], [0.5, 0.5])
    cut["logprobs"] = []
    with self.assertRaisesRegex(ValueError, r"rows\[3\]: log-probs"):
      self.parse(record)
    record["rows"] = [empty]
    with self.assertRaisesRegex(episode_formats.UnusableError, "no sampled"):
      self.parse(record)

  def test_paths_of_a_graph_are_episodes(self):
    record = logged_episodes.records(_TOKENIZER)["verifiers nodes"]
    other = {"role": "assistant", "content": "7"}
    record["nodes"].append({"parent": 1, "message": other, "sampled": True})
    long, short = self.parse(record)
    self.assertLen(long.turns, 2)
    self.assertEqual([t.message["content"] for t in short.turns], ["7"])

  def test_shared_turn_of_a_graph_is_learned_once(self):
    record = logged_episodes.records(_TOKENIZER)["verifiers nodes"]
    nodes = record["nodes"]
    shared = next(n for n, node in enumerate(nodes) if node.get("sampled"))
    user = {"role": "user", "content": "again"}
    other = {"role": "assistant", "content": "8"}
    nodes.append({"parent": shared, "message": user})
    nodes.append({"parent": len(nodes) - 1, "message": other, "sampled": True})
    first, second = self.parse(record)
    self.assertLen(first.turns, 2)
    self.assertEqual([t.message["content"] for t in second.turns], ["8"])

  @parameterized.parameters("verifiers", "verifiers nodes")
  def test_failed_rollout_is_left_out(self, name):
    record = logged_episodes.records(_TOKENIZER)[name]
    record["errors"] = [{"type": "SandboxError"}]
    with self.assertRaisesRegex(episode_formats.UnusableError, "failed"):
      self.parse(record)

  def test_error_of_tool_is_in_its_text(self):
    record = logged_episodes.records(_TOKENIZER)["anthropic"]
    record["messages"][2]["content"][0]["is_error"] = True
    (one,) = self.parse(record)
    self.assertEqual(one.turns[0].answer[0]["content"], "error: 5")

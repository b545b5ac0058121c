# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An episode with a tool in every format of logs, and what it is as text."""

import copy
import string
from typing import Any

from tba_jax.models import tokenizer as tokenizer_lib

_TEMPLATE = (
    "{% if tools %}{% for t in tools %}"
    "<tool {{ t.function.name }} {{ t.function.description }}>"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments":'
    " {{ c.function.arguments | tojson }}}</tool_call>"
    "{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM, QUESTION, RESULT, ANSWER = "Add.", "2+3?", "5", "It is 5."
ARGUMENTS = {"a": 2, "b": 3}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
REWARD = 0.5
PARAMETERS = {"type": "object", "properties": {"a": {}, "b": {}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": PARAMETERS,
        },
    }
]
# As sampled live: (whether the policy wrote it, text).
PROMPT = (
    f"<tool add Adds.>[system]{SYSTEM}<eos>[user]{QUESTION}<eos>[assistant]"
)
PARTS = [
    (True, f"Hm.{CALL}<eos>"),
    (False, f"[tool]{RESULT}<eos>[assistant]"),
    (True, f"{ANSWER}<eos>"),
]


def make_tokenizer(
    template: str | None = _TEMPLATE,
) -> tokenizer_lib.Tokenizer:
  """Returns a character tokenizer with a chat template that writes calls."""
  tokenizer = tokenizer_lib.word_level(list(string.printable), r"<eos>|[\s\S]")
  tokenizer.chat_template = template
  return tokenizer


def as_sampled(
    tokenizer: tokenizer_lib.Tokenizer,
) -> tuple[list[int], list[int], list[bool]]:
  """Returns prompt ids, ids and mask of the episode as sampled live."""
  ids, sampled = [], []
  for is_sampled, text in PARTS:
    new = tokenizer.encode(text)
    ids += new
    sampled += [is_sampled] * len(new)
  return tokenizer.encode(PROMPT), ids, sampled


def openai() -> dict[str, Any]:
  function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
  call = {"id": "c1", "type": "function", "function": function}
  messages = [
      {"role": "system", "content": SYSTEM},
      {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
      {"role": "assistant", "content": "Hm.", "tool_calls": [call]},
      {"role": "tool", "tool_call_id": "c1", "content": RESULT},
      {"role": "assistant", "content": ANSWER, "refusal": None},
      {"role": "user", "content": "Thanks."},
  ]
  return {"messages": messages, "tools": TOOLS, "reward": REWARD}


def records(tokenizer: tokenizer_lib.Tokenizer) -> dict[str, dict[str, Any]]:
  """Returns the episode as a record of each format, by name."""
  chat = openai()["messages"]
  prompt, ids, sampled = as_sampled(tokenizer)
  texts = [tokenizer.encode(text) for _, text in PARTS]
  logprobs = [-0.5 if s else None for s in sampled]
  flat_call = {"id": "c1", "name": "add", "arguments": '{"a": 2, "b": 3}'}
  flat_tool = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
  turn = lambda before, n, of_chat: {
      "node_id": str(n),
      "prompt_token_ids": before,
      "completion_token_ids": texts[n],
      "per_token_logps": [-0.5] * len(texts[n]),
      "loss_mask": [0] * len(before) + [1] * len(texts[n]),
      "request": {"messages": chat[:of_chat], "tools": TOOLS},
      "response": {
          "choices": [{"message": chat[of_chat], "finish_reason": "stop"}]
      },
  }
  step = lambda n, source, message, **more: {
      "step_id": n, "source": source, "message": message, **more
  }  # fmt: skip
  node = lambda n, message, **more: {
      "parent": n - 1 if n else None, "message": message, **more
  }  # fmt: skip
  made = {
      "openai": openai(),
      "as sampled": {
          **openai(),
          "messages": [
              *chat[:2],
              {"role": "assistant", "content": f"Hm.{CALL}"},
              {"role": "tool", "name": "add", "content": RESULT},
              chat[4],
          ],
      },
      "anthropic": {
          "system": SYSTEM,
          "messages": [
              {"role": "user", "content": QUESTION},
              {
                  "role": "assistant",
                  "content": [
                      {"type": "text", "text": "Hm.", "citations": None},
                      {
                          "type": "tool_use",
                          "id": "c1",
                          "name": "add",
                          "input": ARGUMENTS,
                      },
                  ],
              },
              {
                  "role": "user",
                  "content": [
                      {
                          "type": "tool_result",
                          "tool_use_id": "c1",
                          "content": [{"type": "text", "text": RESULT}],
                      }
                  ],
              },
              {
                  "role": "assistant",
                  "content": [{"type": "text", "text": ANSWER}],
              },
          ],
          "tools": [
              {
                  "name": "add",
                  "description": "Adds.",
                  "input_schema": PARAMETERS,
              }
          ],
          "reward": REWARD,
      },
      "verifiers": {
          "prompt": chat[:2],
          "completion": chat[2:5],
          "info": {"oai_tools": TOOLS},
          "reward": REWARD,
          "answer": "5",
      },
      "verifiers nodes": {
          "version": 1,
          "nodes": [
              node(0, chat[0], tools=[flat_tool]),
              node(1, chat[1]),
              node(
                  2,
                  {**chat[2], "tool_calls": [flat_call]},
                  sampled=True,
              ),
              node(3, chat[3]),
              node(4, chat[4], sampled=True),
          ],
          "rewards": {
              "exact": {"score": 1.0, "weight": 0.25},
              "short": {"score": 0.25},
              "failed": None,
          },
      },
      "atif": {
          "schema_version": "ATIF-v1.8",
          "agent": {"name": "a", "version": "1", "tool_definitions": TOOLS},
          "steps": [
              step(1, "system", SYSTEM),
              step(2, "user", [{"type": "text", "text": QUESTION}]),
              step(
                  3,
                  "agent",
                  "Hm.",
                  tool_calls=[
                      {
                          "tool_call_id": "c1",
                          "function_name": "add",
                          "arguments": ARGUMENTS,
                      }
                  ],
                  observation={
                      "results": [{"source_call_id": "c1", "content": RESULT}]
                  },
              ),
              step(4, "agent", ANSWER),
          ],
          "extra": {"reward": REWARD},
      },
      "openenv": {
          "schema_version": 1,
          "turns": [
              turn(prompt, 0, 2),
              turn([*prompt, *texts[0], *texts[1]], 2, 4),
          ],
          "reward": REWARD,
      },
      "serve": {
          "reward": REWARD,
          "finished": True,
          "rows": [
              {
                  "is_task": True,
                  "prompt_ids": prompt,
                  "completion_ids": ids,
                  "sampled_mask": [int(s) for s in sampled],
                  "logprobs": [x or 0.0 for x in logprobs],
                  "versions": [3 if s else -1 for s in sampled],
                  "stopped": True,
              }
          ],
      },
      "tinker": {
          "reward": REWARD,
          "rows": [
              {
                  "run_id": "r",
                  "prompt_tokens": before,
                  "sampled_tokens": texts[n],
                  "logprobs": [-0.5] * len(texts[n]),
                  "metadata": {"stop_reason": "stop"},
              }
              for before, n in (
                  (prompt, 0),
                  ([*prompt, *texts[0], *texts[1]], 2),
              )
          ],
          "next_cursor": 2,
      },
      "generate": {
          "seed": 4,
          "prompt": PROMPT,
          "completions": [
              {
                  "text": "".join(text for _, text in PARTS),
                  "token_ids": ids,
                  "logprobs": logprobs,
                  "finish_reason": "stop",
                  "reward": REWARD,
              }
          ],
      },
      "samples.jsonl": {
          "step": 0,
          "prompt_id": 4,
          "prompt": PROMPT,
          "completion": "".join(text for _, text in PARTS),
          "reward": REWARD,
          "version": 3,
          "finish_reason": "stop",
          "tokens": tokenizer.pieces(ids),
          "token_ids": ids,
          "logprobs": logprobs,
      },
  }
  return copy.deepcopy(made)

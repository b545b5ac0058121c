# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents for tests, which call a model over HTTP."""

import json
import urllib.error
import urllib.request

SLOW_DIALECTS = "anthropic_messages", "openai_responses"
# Call of the first.
PATH = "messages"
QUESTION = {"max_tokens": 9, "messages": [{"role": "user", "content": "1"}]}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"left": {"type": "integer"}},
            },
        },
    }
]


def post(url, body, path="completions"):
  """Returns status and JSON of a call."""
  request = urllib.request.Request(
      f"{url}/v1/{path}",
      json.dumps({"model": "any", **body}).encode(),
      {"Content-Type": "application/json"},
  )
  try:
    with urllib.request.urlopen(request, timeout=20) as reply:
      return reply.status, json.load(reply)
  except urllib.error.HTTPError as error:
    return error.code, json.load(error)


def complete(url, prompt, **body):
  """Returns the text that continues a prompt."""
  status, answer = post(url, {"prompt": prompt, **body})
  if status != 200:
    raise RuntimeError(answer["error"]["message"])
  return answer["choices"][0]["text"]


class OpenAi:
  """Calls a tool with OpenAI's client."""

  def play(self, seed, url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{seed} + 1?"},
    ]
    tokens = 0
    while True:
      reply = client.chat.completions.create(
          model="any", messages=messages, tools=_TOOLS
      )
      tokens += reply.usage.completion_tokens
      message = reply.choices[0].message
      if not message.tool_calls:
        right = message.content == str(seed + 1)
        metrics = {"tokens": tokens, "models": len(client.models.list().data)}
        return float(right), {"success": right, "metrics": metrics}
      messages.append(message.model_dump(exclude_none=True))
      for call in message.tool_calls:
        out = json.loads(call.function.arguments)["left"] + 1
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": str(out)}
        )


class Anthropic:
  """The same with Anthropic's client, streamed."""

  def play(self, seed, url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    function = _TOOLS[0]["function"]
    tool = {"name": "add", "description": function["description"]}
    tool["input_schema"] = function["parameters"]
    messages = [{"role": "user", "content": f"{seed} + 1?"}]
    while True:
      with client.messages.stream(
          model="any",
          system="Add.",
          max_tokens=100,
          messages=messages,
          tools=[tool],
      ) as stream:
        message = stream.get_final_message()
      calls = [block for block in message.content if block.type == "tool_use"]
      if not calls:
        return float(message.content[0].text == str(seed + 1))
      results = [
          {
              "type": "tool_result",
              "tool_use_id": call.id,
              "content": str(call.input["left"] + 1),
          }
          for call in calls
      ]
      messages += [
          {"role": "assistant", "content": message.content},
          {"role": "user", "content": results},
      ]


class Responses:
  """The same with OpenAI's Responses."""

  def play(self, seed, url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    function = _TOOLS[0]["function"]
    items = [{"role": "user", "content": f"{seed} + 1?"}]
    while True:
      reply = client.responses.create(
          model="any",
          instructions="Add.",
          input=items,
          tools=[{"type": "function", "strict": False, **function}],
      )
      calls = [item for item in reply.output if item.type == "function_call"]
      if not calls:
        return float(reply.output_text == str(seed + 1))
      items += [item.model_dump(exclude_none=True) for item in reply.output]
      for call in calls:
        out = json.loads(call.arguments)["left"] + 1
        items.append(
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(out),
            }
        )


class Trouble:
  """Misbehaves as the policy's first turn requests."""

  def play(self, seed, url):
    if seed == 2:
      return 1.0
    what = complete(url, "say")
    if what == "raise":
      raise RuntimeError("it")
    if what == "hang":
      while True:
        pass
    if what == "rewrite":
      complete(url, "Say" + what)
    if what == "shorten":
      complete(url, "sa")
    if what == "stop":
      return float(complete(url, f"say{what};", stop=["!"]) == "go!")
    if what == "long":
      text = f"say{what};"
      try:
        while True:
          text += complete(url, text) + ";"
      except RuntimeError as error:
        if "context_length_exceeded" in str(error):
          return 0.25, {"metrics": {"letters": len(text)}}
        raise
    if what == "repeat":  # As a client that did not get the reply.
      return float(complete(url, "say") == what)
    if what in ("n", "logprobs", "unknown"):
      body = {"n": {"n": 2}, "logprobs": {"logprobs": 1}}.get(what, {"x": 1})
      complete(url, f"say{what};", **body)
    return 0.5


class Aside:
  """Has titles made by another function."""

  def play(self, seed, url):
    said = complete(url, "say")
    title = complete(url, "title?")
    return float(complete(url, f"say{said}{title}") == "ok"), {}

  def answer(self, messages):
    return f"[{messages}]"


class Early:
  """Is cut off in its first turn."""

  def play(self, seed, url):
    _, answer = post(url, {"prompt": "say"})
    (choice,) = answer["choices"]
    status, _ = post(url, {"prompt": "say" + choice["text"] + ";"})
    if (choice["finish_reason"], status) != ("length", 400):
      raise RuntimeError(f"{choice} {status}")
    return float(len(choice["text"]))

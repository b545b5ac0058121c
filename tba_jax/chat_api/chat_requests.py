# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schemas of OpenAI's completions.

Source: package `openai`, majors 2 and 3.
"""

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from tba_jax.chat_api import strict_json

_MOST_CHOICES = 128  # OpenAI's limit.


def _stop_texts(value: Any) -> tuple[str, ...]:
  stop = strict_json.texts_or_ids(value)
  if not all(isinstance(text, str) for text in stop):
    raise ValueError("must be a text or a list of texts")
  return stop


def _one_prompt(prompt: Any) -> str | list[int]:
  is_id = lambda value: type(value) is int and 0 <= value < 2**31
  if isinstance(prompt, list) and len(prompt) == 1 and not is_id(prompt[0]):
    prompt = prompt[0]
  is_text = isinstance(prompt, str)
  if prompt and (
      is_text or isinstance(prompt, list) and all(map(is_id, prompt))
  ):
    return prompt
  raise ValueError("must be one text, or a list of token ids")


def _joined(content: Any) -> str:
  """Returns the text of a message, its parts joined."""
  if isinstance(content, list):
    parts = [p if isinstance(p, dict) else {} for p in content]
    if not all(
        p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in parts
    ):
      raise ValueError("must be a text, or parts that are all texts")
    content = "".join(part["text"] for part in parts)
  if not isinstance(content, str):
    raise ValueError("must be a text, or parts that are all texts")
  return content


class StreamOptions(strict_json.OpenMessage):
  include_usage: bool = False


class _Completions(strict_json.Message):
  """Completions of a chat or a text.

  max_tokens: most tokens of each; None = as many as there is room for.
  seed: random seed of the sampler; None derives one from the request's id.
  """

  nothing = {
      "best_of": 1, "logit_bias": {}, "modalities": ["text"],
      "response_format": {"type": "text"},
  }  # fmt: skip

  model: str
  n: Annotated[int, pydantic.Field(ge=1, le=_MOST_CHOICES)] = 1
  stream: bool = False
  stream_options: StreamOptions = StreamOptions()
  temperature: strict_json.Temperature = 1.0
  top_p: strict_json.TopP = 1.0
  top_k: strict_json.TopK = -1
  max_tokens: strict_json.Count | None = None
  seed: int | None = None
  stop: Annotated[Any, pydantic.AfterValidator(_stop_texts)] = ()
  logprobs: Annotated[
      Any,
      strict_json.must(
          lambda n: n in (0, 1),
          "true or 1, for log-probs of the sampled tokens alone",
      ),
  ] = None
  # The following have no effect on the answer.
  user: Any = None
  metadata: Any = None
  store: Any = None
  service_tier: Any = None
  prompt_cache_key: Any = None
  safety_identifier: Any = None


class CalledFunction(strict_json.OpenMessage):
  name: str
  # JSON text, or the parsed object.
  arguments: Annotated[
      Any,
      strict_json.must(
          lambda v: isinstance(v, str | dict), "a text or an object"
      ),
  ]


class ToolCall(strict_json.OpenMessage):
  id: str | None = None
  function: CalledFunction


class ChatMessage(strict_json.OpenMessage):
  """A message of a chat; content may be a list of text parts."""

  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: Annotated[Any, pydantic.AfterValidator(_joined)] = ""
  reasoning_content: str | None = None
  tool_calls: list[ToolCall] = []
  name: str | None = None
  tool_call_id: str | None = None

  @property
  def in_one_form(self) -> dict[str, Any]:
    """The message without null fields and fields of no effect."""
    out: dict[str, Any] = {"role": self.role, "content": self.content}
    if self.reasoning_content:
      out["reasoning_content"] = self.reasoning_content
    if self.tool_calls:
      out["tool_calls"] = [
          {
              "id": call.id,
              "type": "function",
              "function": call.function.model_dump(),
          }
          for call in self.tool_calls
      ]
    for name in ("name", "tool_call_id"):
      if getattr(self, name) is not None:
        out[name] = getattr(self, name)
    return out


class ToolFunction(strict_json.OpenMessage):
  name: str
  parameters: dict[str, pydantic.JsonValue] = {}


class Tool(strict_json.OpenMessage):
  function: ToolFunction


class ChatRequest(_Completions):
  """A chat.

  separate_reasoning: whether the answer's thinking part is its message's
    `reasoning_content` (the field of SGLang), and not in the text.
  """

  prompt: ClassVar[None] = None

  messages: Annotated[list[ChatMessage], pydantic.Field(min_length=1)]
  max_completion_tokens: strict_json.Count | None = None
  separate_reasoning: bool = False
  # Checked but not converted: templates render tools as the agent sent them.
  tools: Annotated[
      list[Tool],
      pydantic.WrapValidator(lambda tools, check: check(tools) and tools),
  ] = []
  tool_choice: Literal["auto", "none"] = "auto"
  parallel_tool_calls: Any = None

  @property
  def offered_tools(self) -> list[dict[str, Any]]:
    """Tools to present to the model."""
    return [] if self.tool_choice == "none" else self.tools

  @property
  def chat(self) -> list[dict[str, Any]]:
    """The messages, in one form for all agents."""
    return [message.in_one_form for message in self.messages]

  @property
  def most_tokens(self) -> int | None:
    return self.max_completion_tokens or self.max_tokens

  @property
  def has_logprobs(self) -> bool:
    return bool(self.logprobs)


class TextRequest(_Completions):
  chat: ClassVar[None] = None
  offered_tools: ClassVar[tuple[()]] = ()
  separate_reasoning: ClassVar[bool] = False

  prompt: Annotated[Any, pydantic.AfterValidator(_one_prompt)]

  @property
  def most_tokens(self) -> int | None:
    return self.max_tokens

  @property
  def has_logprobs(self) -> bool:
    # The number of alternatives at each token, which may be 0.
    return self.logprobs is not None and self.logprobs is not False


CompletionRequest = ChatRequest | TextRequest


def read_completions(body: dict[str, Any]) -> CompletionRequest:
  """Returns the request of a body, a chat if it has `messages`."""
  return strict_json.read(
      ChatRequest if "messages" in body else TextRequest, body
  )

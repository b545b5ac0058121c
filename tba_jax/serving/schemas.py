# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schemas of the server's requests.

They cover the Tinker API (package `tinker` 0.38), episodes and replays, and
OpenAI's completions (package `openai`, majors 2 and 3). Types are strict: a
text is not accepted as a number, nor a boolean as an integer. A closed message
rejects an unknown field unless its value requests nothing (null, 0, false, []).
Passes may also be protocol buffers (`protobufs.py`).
"""

from collections.abc import Callable
import json
import re
import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import pydantic
import pydantic_core

_MOST_FLOAT32 = float(np.finfo(np.float32).max)
# Most stop strings of a completion; decoding searches it for each of them.
_MOST_STOPS = 64
_MOST_CHOICES = 128  # OpenAI's limit.
_MOST_COMPLETIONS = 2**16  # A step of a replay holds them in memory at once.
UNNAMED = "unnamed-"  # Prefix of names that the server gives.
_SHOWN = 500  # Most characters of an error.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAMED = (
    "a name of letters, digits, '.', '_' and '-', 128 at most, the first a"
    " letter or digit"
)

_M = TypeVar("_M", bound="Message")


def parse_json(body: bytes) -> dict[str, Any]:
  """Returns the JSON object of a body; ValueError if it is not one."""
  try:
    value = pydantic_core.from_json(body, allow_inf_nan=False)
  except ValueError as error:
    raise ValueError(f"the body is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError("the body must be a JSON object")
  return value


def to_json(reply: Any) -> bytes:
  """Returns the JSON of a reply; NaN and infinities become null."""
  return pydantic_core.to_json(reply, inf_nan_mode="null")


def in_one_form(body: bytes) -> bytes:
  """Returns a body with sorted keys, so that retries have the same bytes."""
  return json.dumps(parse_json(body), sort_keys=True, allow_nan=False).encode()


def read(kind: type[_M], value: Any) -> _M:
  """Returns the message of a JSON object, or of its bytes.

  Raises:
    ValueError: a field is missing, invalid or unknown; one line names it.
  """
  if isinstance(value, bytes):
    value = parse_json(value)
  try:
    return kind.model_validate(value)
  except pydantic.ValidationError as error:
    raise ValueError(_one_line(error, value)) from error


def _one_line(error: pydantic.ValidationError, value: Any) -> str:
  """Returns the first problem of a message: KEY = VALUE: must be …"""
  first = error.errors(include_url=False, include_context=False)[0]
  key = ""
  for part in first["loc"]:
    if isinstance(part, int):
      key, value = f"{key}[{part}]", value[part]
    # Other parts name the types of a union.
    elif isinstance(value, dict) and (
        part in value or first["type"] == "missing"
    ):
      key, value = f"{key}.{part}".removeprefix("."), value.get(part)
  text = first["msg"].removeprefix("Value error, ")
  text = re.sub(r"^\w+ should", "must", text)
  if first["type"] in ("model_type", "dict_type"):
    text = "must be an object"
  if first["type"] == "missing":
    text = f"{key}: is missing, but needed"
  elif not isinstance(first["input"], dict):
    text = f"{key} = {reprlib.repr(first['input'])}: {text}"
  elif key:
    text = f"{key}: {text}"
  return text[:_SHOWN]


def _must(test: Callable[[Any], bool], text: str) -> pydantic.AfterValidator:
  """Returns the validator of a rule that types do not express."""

  def check(value: Any) -> Any:
    if not test(value):
      raise ValueError(f"must be {text}")
    return value

  return pydantic.AfterValidator(check)


def _texts_or_ids(value: Any) -> tuple[str, ...] | tuple[int, ...]:
  """Returns stop strings or stop token ids; [] = no ids."""
  items = (value,) if isinstance(value, str) else value
  if isinstance(items, list | tuple) and len(items) <= _MOST_STOPS:
    if all(isinstance(text, str) and text for text in items):
      return tuple(items)
  if isinstance(items, list):
    if all(type(i) is int and 0 <= i < 2**31 for i in items):
      return tuple(items)
  raise ValueError(
      f"must be a text, a list of texts, up to {_MOST_STOPS} and none empty, or"
      " a list of token ids"
  )


def _stop_texts(value: Any) -> tuple[str, ...]:
  stop = _texts_or_ids(value)
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


_is_scalar = lambda value: isinstance(value, str | bool | int | float)
_Int = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
_Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
# Number of a request among its owner's requests.
Seq = Annotated[int, pydantic.Field(ge=0, lt=2**62)]
_Float32 = Annotated[float, pydantic.Field(ge=-_MOST_FLOAT32, le=_MOST_FLOAT32)]
_Rate = Annotated[float, pydantic.Field(ge=0, le=_MOST_FLOAT32)]
_Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]
_Scalar = Annotated[
    Any, _must(_is_scalar, "a number, a text, or true or false")
]
# No bool, and no number beyond the range of float32.
_LossSetting = Annotated[
    Any,
    _must(
        lambda v: isinstance(v, str)
        or (type(v) in (int, float) and abs(v) <= _MOST_FLOAT32),
        "a number or a text",
    ),
]
_GroupName = Annotated[
    str, _must(lambda name: not name or _NAME.fullmatch(name), _NAMED)
]
_CheckpointName = Annotated[
    str,
    _must(
        lambda name: _NAME.fullmatch(name) and not name.startswith(UNNAMED),
        f"{_NAMED}, and without the prefix {UNNAMED!r} of the server's",
    ),
]
# Logits divided by a smaller temperature overflow float32.
_Temperature = Annotated[
    float, _must(lambda t: t == 0 or 1e-3 <= t <= 100, "0, or .001 to 100")
]
_TopP = Annotated[float, pydantic.Field(ge=1e-6, le=1)]
_TopK = Annotated[int, pydantic.Field(ge=-1, lt=2**31)]


class Message(pydantic.BaseModel):
  """A request, or a part of one."""

  model_config = pydantic.ConfigDict(
      strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
  )
  is_closed: ClassVar[bool] = True
  # Values of unsupported fields that request nothing.
  nothing: ClassVar[dict[str, Any]] = {}

  @pydantic.model_validator(mode="before")
  @classmethod
  def _known(cls, value: Any) -> Any:
    """Returns the known non-null fields; if closed, rejects unknown fields."""
    if not isinstance(value, dict):
      return value
    fields = {f.alias or name: f for name, f in cls.model_fields.items()}
    unknown = sorted(
        name
        for name, item in value.items()
        if name not in fields
        and name != "type"
        and item not in (None, 0, False, [])
        and item != cls.nothing.get(name)
    )
    if unknown and cls.is_closed:
      raise ValueError(
          f"{', '.join(unknown)}: not supported by this server; fields are"
          f" {', '.join(fields)}"
      )
    return {
        name: value[name]
        for name, field in fields.items()
        if name in value and (value[name] is not None or field.is_required())
    }


class OpenMessage(Message):
  """A request whose unknown fields are ignored."""

  is_closed = False


# Sessions and models.


class OfSession(OpenMessage):
  session_id: str


class FinishSession(OpenMessage):
  reason: pydantic.JsonValue = None


class LoraConfig(Message):
  """Adapters of a model; the unembedding has none here."""

  rank: Annotated[int, pydantic.Field(ge=0, le=1024)]
  seed: int | None = None
  train_mlp: bool = True
  train_attn: bool = True
  train_unembed: bool = True


class OptimizerConfig(OpenMessage):
  type: Literal["adamw"] = "adamw"


class CreateModel(OfSession):
  """A new model; without `lora_config` all params are trained."""

  model_seq_id: Seq
  base_model: str
  lora_config: LoraConfig | None = None
  optimizer_config: OptimizerConfig = OptimizerConfig()
  user_metadata: dict[str, pydantic.JsonValue] = {}


class LoadWeights(OpenMessage):
  """A checkpoint that a model continues from."""

  path: str
  optimizer: bool


class CreateByLoad(OfSession, LoadWeights):
  """A new model made from a checkpoint."""

  model_seq_id: Seq
  base_model: str | None = None
  user_metadata: dict[str, pydantic.JsonValue] = {}


class OfModel(OpenMessage):
  """Fields of each request of a model; `seq_id` 0 takes the next number."""

  model_id: str
  seq_id: Seq = 0


class AdamParams(Message):
  """Settings of one AdamW step, as of `torch.optim.AdamW`.

  grad_clip_norm: largest global norm of the gradient; 0 = no clipping.
  """

  learning_rate: _Rate = 1e-4
  beta1: _Decay = 0.9
  beta2: _Decay = 0.95
  eps: _Rate = 1e-12
  weight_decay: _Rate = 0.0
  grad_clip_norm: _Rate = 0.0


class OptimStep(OpenMessage):
  """A step of AdamW, the optimizer here."""

  adam_params: AdamParams


class SaveWeights(OpenMessage):
  """A checkpoint, version or export, which the server names by default."""

  path: _CheckpointName | None = None
  overwrite: bool = False


class OfCheckpoint(OpenMessage):
  tinker_path: str


# Passes.


class EncodedText(OpenMessage):
  type: Literal["encoded_text"]
  tokens: list[_Int]


class ModelInput(OpenMessage):
  chunks: list[EncodedText]

  @property
  def ids(self) -> np.ndarray:
    """The token ids, [L] int32."""
    chunks = [np.asarray(chunk.tokens, np.int32) for chunk in self.chunks]
    return np.concatenate([np.zeros(0, np.int32), *chunks])


class _Dense(OpenMessage):
  """A dense tensor; `data` is flat whatever the shape."""

  shape: list[_Int] | None = None
  sparse_crow_indices: Annotated[
      list[int] | None, _must(lambda rows: not rows, "empty: dense tensors")
  ] = None


class Float32Tensor(_Dense):
  dtype: Literal["float32"]
  data: list[_Float32]


class Int64Tensor(_Dense):
  dtype: Literal["int64"]
  data: list[Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]]


class PassDatum(OpenMessage):
  model_input: ModelInput
  loss_fn_inputs: dict[
      str,
      Annotated[
          Float32Tensor | Int64Tensor, pydantic.Field(discriminator="dtype")
      ],
  ]


class PassInput(OpenMessage):
  data: list[PassDatum]
  loss_fn: str
  loss_fn_config: dict[str, _LossSetting] = {}


class Forward(OfModel):
  seq_id: _Int = 0
  input: Annotated[PassInput, pydantic.Field(alias="forward_input")]


class ForwardBackward(OfModel):
  seq_id: _Int = 0
  input: Annotated[PassInput, pydantic.Field(alias="forward_backward_input")]


# Sampling.


class CreateSamplingSession(OfSession):
  sampling_session_seq_id: Seq
  base_model: str | None = None
  model_path: str = ""


class SamplingParams(Message):
  """Sampling settings; ids in `stop` replace the tokenizer's stop tokens."""

  max_tokens: _Count | None = None
  seed: int | None = None
  stop: Annotated[Any, pydantic.AfterValidator(_texts_or_ids)] = None
  temperature: _Temperature = 1.0
  top_k: _TopK = -1
  top_p: _TopP = 1.0

  @property
  def stops(self) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Stop token ids, None for the tokenizer's, and stop strings."""
    if self.stop is None or self.stop and isinstance(self.stop[0], str):
      return None, self.stop or ()
    return self.stop, ()


class Sample(Message):
  """Completions of a prompt, and log-probs of its last tokens."""

  sampling_session_id: str
  prompt: ModelInput
  sampling_params: SamplingParams
  num_samples: Annotated[int, pydantic.Field(ge=1, le=4096)] = 1
  seq_id: Seq | None = None
  prompt_logprobs: bool = False
  prompt_logprobs_last_n: _Int | None = None
  into: Literal["", "replay"] = ""

  @pydantic.model_validator(mode="before")
  @classmethod
  def _has_no_stability_info(cls, value: Any) -> Any:
    if isinstance(value, dict) and value.get("record_stability_info"):
      raise ValueError(
          "record_stability_info: it is for the loss stable_reinforce, which is"
          " Tinker's own; must be false, with another loss, as"
          " loss_fn=importance_sampling"
      )
    return value


class OfRequest(OpenMessage):
  request_id: str


class FuturesTarget(OpenMessage):
  sampling_session_id: str
  cloned_sampler_id: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0


class RetrieveFutures(OpenMessage):
  """Results of a sampling client's clone after a cursor; timeout in seconds."""

  target: FuturesTarget
  prev_cursor: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
  timeout: float = float("inf")


# Episodes and replays.


class CreateEpisode(Message):
  sampling_session_id: str = ""
  model_path: str = ""
  base_model: str | None = None
  into: Literal["", "replay"] = ""
  group: _GroupName = ""
  num_episodes: _Int = 0


class FinishEpisode(Message):
  """The reward of an episode; null drops the episode."""

  reward: _Float32 | None


class RewardSample(Message):
  request_id: str
  rewards: list[_Float32]


class CreateReplay(Message):
  """A model that the server trains by itself.

  loss_fn: name of a group objective.
  prompts_per_batch: B, groups of a step.
  completions_per_prompt: K, completions of a group in a step.
  num_steps: steps after which training ends.
  groups_per_step: groups that must have entered for each step, the next one
    included; 0 waits for the first group alone; None = B.
  publish_every_steps: steps between versions to sample from.
  replay: changed settings of `config.replay`.
  """

  session_id: str
  replay_seq_id: Seq
  base_model: str
  model_path: str = ""
  lora_config: LoraConfig | None = None
  loss_fn: str = "tb"
  loss_fn_config: dict[str, _LossSetting] = {}
  adam_params: AdamParams
  prompts_per_batch: _Count
  completions_per_prompt: _Count
  num_steps: _Count
  groups_per_step: _Int | None = None
  publish_every_steps: _Count = 1
  replay: dict[str, _Scalar] = {}

  @pydantic.model_validator(mode="after")
  def _fits(self) -> "CreateReplay":
    if self.prompts_per_batch * self.completions_per_prompt > _MOST_COMPLETIONS:
      raise ValueError(
          f"prompts_per_batch = {self.prompts_per_batch},"
          f" completions_per_prompt = {self.completions_per_prompt}: must be up"
          f" to {_MOST_COMPLETIONS} completions together"
      )
    if self.model_path and self.lora_config is not None:
      raise ValueError(
          "lora_config: must be left out with model_path, since the checkpoint"
          " has its adapters"
      )
    return self

  @property
  def groups_each_step(self) -> int:
    groups = self.groups_per_step
    return self.prompts_per_batch if groups is None else groups


# OpenAI's completions.


class StreamOptions(OpenMessage):
  include_usage: bool = False


class _Completions(Message):
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
  temperature: _Temperature = 1.0
  top_p: _TopP = 1.0
  top_k: _TopK = -1
  max_tokens: _Count | None = None
  seed: int | None = None
  stop: Annotated[Any, pydantic.AfterValidator(_stop_texts)] = ()
  logprobs: Annotated[
      Any,
      _must(
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


class CalledFunction(OpenMessage):
  name: str
  # JSON text, or the parsed object.
  arguments: Annotated[
      Any, _must(lambda v: isinstance(v, str | dict), "a text or an object")
  ]


class ToolCall(OpenMessage):
  id: str | None = None
  function: CalledFunction


class ChatMessage(OpenMessage):
  """A message of a chat; content may be a list of text parts."""

  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: Annotated[Any, pydantic.AfterValidator(_joined)] = ""
  tool_calls: list[ToolCall] = []
  name: str | None = None
  tool_call_id: str | None = None

  @property
  def in_one_form(self) -> dict[str, Any]:
    """The message without null fields and fields of no effect."""
    out: dict[str, Any] = {"role": self.role, "content": self.content}
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


class ToolFunction(OpenMessage):
  name: str
  parameters: dict[str, pydantic.JsonValue] = {}


class Tool(OpenMessage):
  function: ToolFunction


class ChatRequest(_Completions):
  prompt: ClassVar[None] = None

  messages: Annotated[list[ChatMessage], pydantic.Field(min_length=1)]
  max_completion_tokens: _Count | None = None
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
  return read(ChatRequest if "messages" in body else TextRequest, body)

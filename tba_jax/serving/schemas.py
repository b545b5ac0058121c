# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schemas of the server's own requests, see `chat_api/strict_json.py`.

They cover the Tinker API (package `tinker` 0.38), episodes and replays. Passes
may also be protocol buffers (`protobufs.py`).
"""

import re
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from tba_jax.chat_api import strict_json

_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_MOST_COMPLETIONS = 2**16  # A step of a replay holds them in memory at once.
UNNAMED = "unnamed-"  # Prefix of names that the server gives.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAMED = (
    "a name of letters, digits, '.', '_' and '-', 128 at most, the first a"
    " letter or digit"
)

_is_scalar = lambda value: isinstance(value, str | bool | int | float)
_Int = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
# Number of a request among its owner's requests.
Seq = Annotated[int, pydantic.Field(ge=0, lt=2**62)]
_Float32 = Annotated[float, pydantic.Field(ge=-_MOST_FLOAT32, le=_MOST_FLOAT32)]
_Rate = Annotated[float, pydantic.Field(ge=0, le=_MOST_FLOAT32)]
_Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]
_Scalar = Annotated[
    Any, strict_json.must(_is_scalar, "a number, a text, or true or false")
]
# No bool, and no number beyond the range of float32.
_LossSetting = Annotated[
    Any,
    strict_json.must(
        lambda v: isinstance(v, str)
        or (type(v) in (int, float) and abs(v) <= _MOST_FLOAT32),
        "a number or a text",
    ),
]
_GroupName = Annotated[
    str,
    strict_json.must(lambda name: not name or _NAME.fullmatch(name), _NAMED),
]
_CheckpointName = Annotated[
    str,
    strict_json.must(
        lambda name: _NAME.fullmatch(name) and not name.startswith(UNNAMED),
        f"{_NAMED}, and without the prefix {UNNAMED!r} of the server's",
    ),
]


# Sessions and models.


class OfSession(strict_json.OpenMessage):
  session_id: str


class FinishSession(strict_json.OpenMessage):
  reason: pydantic.JsonValue = None


class LoraConfig(strict_json.Message):
  """Adapters of a model; the unembedding has none here."""

  rank: Annotated[int, pydantic.Field(ge=0, le=1024)]
  seed: int | None = None
  train_mlp: bool = True
  train_attn: bool = True
  train_unembed: bool = True


class OptimizerConfig(strict_json.OpenMessage):
  type: Literal["adamw"] = "adamw"


class CreateModel(OfSession):
  """A new model; without `lora_config` all params are trained."""

  model_seq_id: Seq
  base_model: str
  lora_config: LoraConfig | None = None
  optimizer_config: OptimizerConfig = OptimizerConfig()
  user_metadata: dict[str, pydantic.JsonValue] = {}


class LoadWeights(strict_json.OpenMessage):
  """A checkpoint that a model continues from."""

  path: str
  optimizer: bool


class CreateByLoad(OfSession, LoadWeights):
  """A new model made from a checkpoint."""

  model_seq_id: Seq
  base_model: str | None = None
  user_metadata: dict[str, pydantic.JsonValue] = {}


class OfModel(strict_json.OpenMessage):
  """Fields of each request of a model; `seq_id` 0 takes the next number."""

  model_id: str
  seq_id: Seq = 0


class AdamParams(strict_json.Message):
  """Settings of one AdamW step, as of `torch.optim.AdamW`.

  grad_clip_norm: largest global norm of the gradient; 0 = no clipping.
  """

  learning_rate: _Rate = 1e-4
  beta1: _Decay = 0.9
  beta2: _Decay = 0.95
  eps: _Rate = 1e-12
  weight_decay: _Rate = 0.0
  grad_clip_norm: _Rate = 0.0


class OptimStep(strict_json.OpenMessage):
  """A step of AdamW, the optimizer here."""

  adam_params: AdamParams


class SaveWeights(strict_json.OpenMessage):
  """A checkpoint, version or export, which the server names by default."""

  path: _CheckpointName | None = None
  overwrite: bool = False


class OfCheckpoint(strict_json.OpenMessage):
  tinker_path: str


# Passes.


class EncodedText(strict_json.OpenMessage):
  type: Literal["encoded_text"]
  tokens: list[_Int]


class ModelInput(strict_json.OpenMessage):
  chunks: list[EncodedText]

  @property
  def ids(self) -> np.ndarray:
    """The token ids, [L] int32."""
    chunks = [np.asarray(chunk.tokens, np.int32) for chunk in self.chunks]
    return np.concatenate([np.zeros(0, np.int32), *chunks])


class _Dense(strict_json.OpenMessage):
  """A dense tensor; `data` is flat whatever the shape."""

  shape: list[_Int] | None = None
  sparse_crow_indices: Annotated[
      list[int] | None,
      strict_json.must(lambda rows: not rows, "empty: dense tensors"),
  ] = None


class Float32Tensor(_Dense):
  dtype: Literal["float32"]
  data: list[_Float32]


class Int64Tensor(_Dense):
  dtype: Literal["int64"]
  data: list[Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]]


class PassDatum(strict_json.OpenMessage):
  model_input: ModelInput
  loss_fn_inputs: dict[
      str,
      Annotated[
          Float32Tensor | Int64Tensor, pydantic.Field(discriminator="dtype")
      ],
  ]


class PassInput(strict_json.OpenMessage):
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


class SamplingParams(strict_json.Message):
  """Sampling settings; ids in `stop` replace the tokenizer's stop tokens."""

  max_tokens: strict_json.Count | None = None
  seed: int | None = None
  stop: Annotated[Any, pydantic.AfterValidator(strict_json.texts_or_ids)] = None
  temperature: strict_json.Temperature = 1.0
  top_k: strict_json.TopK = -1
  top_p: strict_json.TopP = 1.0

  @property
  def stops(self) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Stop token ids, None for the tokenizer's, and stop strings."""
    if self.stop is None or self.stop and isinstance(self.stop[0], str):
      return None, self.stop or ()
    return self.stop, ()


class Sample(strict_json.Message):
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


class OfRequest(strict_json.OpenMessage):
  request_id: str


class FuturesTarget(strict_json.OpenMessage):
  sampling_session_id: str
  cloned_sampler_id: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0


class RetrieveFutures(strict_json.OpenMessage):
  """Results of a sampling client's clone after a cursor; timeout in seconds."""

  target: FuturesTarget
  prev_cursor: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
  timeout: float = float("inf")


# Episodes and replays.


class CreateEpisode(strict_json.Message):
  sampling_session_id: str = ""
  model_path: str = ""
  base_model: str | None = None
  into: Literal["", "replay"] = ""
  group: _GroupName = ""
  num_episodes: _Int = 0


class FinishEpisode(strict_json.Message):
  """The reward of an episode; null drops the episode."""

  reward: _Float32 | None


class RewardSample(strict_json.Message):
  request_id: str
  rewards: list[_Float32]


class CreateReplay(strict_json.Message):
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
  prompts_per_batch: strict_json.Count
  completions_per_prompt: strict_json.Count
  num_steps: strict_json.Count
  groups_per_step: _Int | None = None
  publish_every_steps: strict_json.Count = 1
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the shape of a model. Does not import JAX."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import ml_collections

from tba_jax.models.families import family as family_lib

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SIZES = (
    "vocab_size",
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_width",
    "max_positions",
)
_DELTA = (
    "delta_key_heads",
    "delta_value_heads",
    "delta_key_dim",
    "delta_value_dim",
    "delta_taps",
)


def compute_dtype(config_model: Mapping[str, Any], backend: str) -> str:
  """Returns the dtype of activations of `config.model` on a JAX backend."""
  if config_model["compute_dtype"] != "auto":
    return config_model["compute_dtype"]
  return "float32" if backend == "cpu" else "bfloat16"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape and number formats of one model.

  family: key of `family_lib.FAMILIES`.
  vocab_size: rows of the embedding, V.
  num_layers: N.
  width: D.
  num_heads: query heads, H; a multiple of num_kv_heads.
  num_kv_heads: key-value heads, G.
  head_dim: Dh, even.
  mlp_width: F, per expert if the model has experts.
  rope_theta: base of the rotary frequencies; GPT-2 has none.
  norm_epsilon: term added to the mean square in a norm.
  tie_embeddings: whether the head is the embedding's transpose.
  max_positions: longest sequence, prompt and completion together.
  param_dtype: dtype name of stored parameters.
  compute_dtype: dtype name of activations; logits and norms are float32.
  attention_bias: biases of query, key, value and output; Qwen2 always has the
    first three, GPT-2 all.
  mlp_bias: biases of the MLP; GPT-2 and GPT-NeoX always have them.
  num_experts: MLPs of a layer, E; 0 is one without a router.
  experts_per_token: experts that a token uses, A.
  norm_router: whether the weights of a token's experts add up to 1.
  swiglu_alpha, swiglu_limit: factor in the sigmoid of gpt-oss's experts, and
    bound of their gates and ups.
  dense_mlp_width: hidden units of a layer without experts, for config.json
    alone: there is no such layer.
  sliding_window: number of tokens that a token sees, itself included; 0 is all.
  global_layers: whether each layer sees all tokens despite sliding_window; ()
    is none of them.
  local_rope_theta: rope_theta of Gemma's layers with a window, whose positions
    rope_type does not change.
  rope_type: "default"; "linear" divides positions by rope_factor; "llama3" and
    "yarn" divide only low frequencies by it.
  rope_factor: see rope_type.
  rope_low_freq_factor, rope_high_freq_factor: bounds of "llama3": wavelengths
    above rope_original_positions over the first are low, below it over the
    second high; in between it interpolates.
  rope_original_positions: context length before "llama3" or "yarn" stretched
    it.
  rope_beta_fast, rope_beta_slow: bounds of "yarn": pairs that rotate more often
    than the first over rope_original_positions keep their frequency, those that
    rotate less often than the second have a low one; it interpolates between.
  rope_attention_factor: factor of cosines and sines of "yarn"; None derives it
    from rope_factor.
  rope_mscale, rope_mscale_all_dim: weights of log(rope_factor) in the numerator
    and denominator of a derived factor; unless both are set, the denominator
    is 1 and the weight is too.
  rope_truncate: whether "yarn" rounds the bounds to whole pairs.
  query_growth: beta of queries that are multiplied by
    1 + beta log(1 + floor(position / rope_original_positions)).
  rotary_layers: whether each layer has rotary positions, or none at all; () is
    all of them.
  rotary_fraction: share of a head's entries that rotary positions rotate.
  parallel_residual: whether attention and MLP read the same stream.
  activation: nonlinearity of the MLP; gated ones have "silu", but for Gemma's.
  score_dim: scores are divided by its square root; 0 is head_dim.
  scale_attention: whether scores are divided by sqrt(score_dim).
  scale_attention_by_layer: whether also by 1 + the layer's index.
  pad_id, bos_id, eos_id: token ids, None if the tokenizer has none.
  delta_layers: whether each layer has a gated delta net (`delta.py`) in place
    of attention; () is none of them.
  delta_key_heads, delta_value_heads: heads of a delta net's keys, and of its
    values, a multiple of them.
  delta_key_dim, delta_value_dim: widths of these heads.
  delta_taps: tokens that its convolution sees, the token itself included.
  num_labels: outputs per position of a scalar head (reward model, value model,
    classifier); 0 is a head of token logits.
  stop_ids: all tokens that end a text if config.json lists several; eos_id is
    the first of them.
  attention: `config.model.attention`, kernels for training (`kernels.py`) and
    for decode steps (`ragged_attention.py`).
  """

  family: str
  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  tie_embeddings: bool
  max_positions: int
  param_dtype: str
  compute_dtype: str
  pad_id: int | None
  bos_id: int | None
  eos_id: int | None
  rope_theta: float = 10000.0
  norm_epsilon: float = 1e-5
  attention_bias: bool = False
  mlp_bias: bool = False
  num_experts: int = 0
  experts_per_token: int = 0
  norm_router: bool = True
  swiglu_alpha: float = 1.702
  swiglu_limit: float = 7.0
  dense_mlp_width: int = 6144
  sliding_window: int = 0
  global_layers: tuple[bool, ...] = ()
  local_rope_theta: float = 10000.0
  rope_type: str = "default"
  rope_factor: float = 1.0
  rope_low_freq_factor: float = 1.0
  rope_high_freq_factor: float = 4.0
  rope_original_positions: int = 8192
  rope_beta_fast: float = 32.0
  rope_beta_slow: float = 1.0
  rope_attention_factor: float | None = None
  rope_mscale: float = 0.0
  rope_mscale_all_dim: float = 0.0
  rope_truncate: bool = True
  query_growth: float = 0.0
  rotary_layers: tuple[bool, ...] = ()
  rotary_fraction: float = 1.0
  parallel_residual: bool = False
  activation: str = "silu"
  score_dim: int = 0
  scale_attention: bool = True
  scale_attention_by_layer: bool = False
  delta_layers: tuple[bool, ...] = ()
  delta_key_heads: int = 16
  delta_value_heads: int = 32
  delta_key_dim: int = 128
  delta_value_dim: int = 128
  delta_taps: int = 4
  num_labels: int = 0
  stop_ids: tuple[int, ...] = ()
  attention: str = "auto"

  @property
  def turn_ends(self) -> tuple[int, ...]:
    """Returns the stop tokens that config.json lists, within the vocabulary.

    A model may sample tokens that its tokenizer has no text of.
    """
    return tuple(i for i in self.stop_ids if i < self.vocab_size)

  def __post_init__(self):
    for name in _SIZES:
      value = getattr(self, name)
      if type(value) is not int or value < 1:
        raise ValueError(
            f"config.model.{name}={value!r}: must be an integer of at least 1"
        )
    rows = [
        ("num_heads", self.num_heads % self.num_kv_heads == 0,
         f"a multiple of num_kv_heads={self.num_kv_heads}"),
        ("head_dim", self.head_dim % 2 == 0, "an even number"),
        ("rope_theta", self.rope_theta > (self.rope_type == "yarn"),
         "above 0, or above 1 for 'yarn'"),
        ("norm_epsilon", self.norm_epsilon > 0, "above 0"),
        ("param_dtype", self.param_dtype in DTYPES, f"one of {DTYPES}"),
        ("compute_dtype", self.compute_dtype in DTYPES, f"one of {DTYPES}"),
        ("sliding_window", self.sliding_window >= 0, "0 or more"),
        ("global_layers", len(self.global_layers) in (0, self.num_layers),
         f"() or num_layers={self.num_layers} of them"),
        ("local_rope_theta", self.local_rope_theta > 0, "above 0"),
        ("swiglu_limit", self.swiglu_limit > 0, "above 0"),
        ("score_dim", self.score_dim >= 0, "0 or more"),
        ("rope_type", self.rope_type in ROPE_TYPES, f"one of {ROPE_TYPES}"),
        ("rope_factor", self.rope_factor >= 1, "1 or more"),
        ("rope_low_freq_factor", self.rope_low_freq_factor > 0, "above 0"),
        ("rope_high_freq_factor",
         self.rope_high_freq_factor > self.rope_low_freq_factor,
         f"above rope_low_freq_factor={self.rope_low_freq_factor}"),
        ("rope_original_positions", self.rope_original_positions > 0,
         "above 0"),
        ("rope_beta_slow", self.rope_beta_slow > 0, "above 0"),
        ("rope_beta_fast", self.rope_beta_fast >= self.rope_beta_slow,
         f"rope_beta_slow={self.rope_beta_slow} or more"),
        ("rope_attention_factor",
         self.rope_attention_factor is None or self.rope_attention_factor > 0,
         "above 0, or None"),
        ("query_growth", self.query_growth >= 0, "0 or more"),
        ("rope_mscale", self.rope_mscale >= 0, "0 or more"),
        ("rope_mscale_all_dim", self.rope_mscale_all_dim >= 0, "0 or more"),
        ("rotary_layers", len(self.rotary_layers) in (0, self.num_layers),
         f"() or num_layers={self.num_layers} of them"),
        ("delta_layers", len(self.delta_layers) in (0, self.num_layers)
         and (not self.delta_layers or not all(self.delta_layers)),
         f"() or num_layers={self.num_layers} of them, not all True"),
        *((name, getattr(self, name) > 0, "1 or more") for name in _DELTA),
        ("delta_value_heads",
         self.delta_value_heads % max(self.delta_key_heads, 1) == 0,
         f"a multiple of delta_key_heads={self.delta_key_heads}"),
        ("activation", self.activation in family_lib.ACTIVATIONS,
         f"one of {family_lib.ACTIVATIONS}"),
        ("rotary_fraction",
         0 < self.rotary_fraction <= 1 and self.rotary_dim % 2 == 0,
         "above 0 and up to 1, an even share of head_dim"),
    ]  # fmt: skip
    family = family_lib.FAMILIES.get(self.family)
    of_families = frozenset().union(
        *(f.fields for f in family_lib.FAMILIES.values())
    )
    if family is not None and not family.has_grouped_heads:
      heads = self.num_heads
      rows += [
          ("num_kv_heads", self.num_kv_heads == heads,
           f"num_heads={heads} in family {self.family!r}"),
          ("head_dim", self.head_dim * heads == self.width,
           f"width / num_heads in family {self.family!r}"),
      ]  # fmt: skip
    if family is not None and family.has_local_rope:
      # transformers does not read it of layers of one kind.
      rows.append(("rope_truncate", self.rope_truncate,
                   f"True in family {self.family!r}"))  # fmt: skip
    if family is not None and family.has_experts:
      experts = self.num_experts
      rows += [
          ("num_experts", experts > 0,
           f"1 or more in family {self.family!r}"),
          ("experts_per_token", 1 <= self.experts_per_token <= experts,
           f"1 to num_experts={experts}"),
      ]  # fmt: skip
    # Nothing is foreign to an unknown family, which others refuse.
    own = family.fields if family is not None else of_families
    for field in dataclasses.fields(self):
      if field.name in of_families - own:
        allowed = f"{field.default!r} in family {self.family!r}"
        is_right = getattr(self, field.name) == field.default
        rows.append((field.name, is_right, allowed))
    problems = [
        f"config.model.{name}={getattr(self, name)!r}: must be {allowed}"
        for name, is_right, allowed in rows
        if not is_right
    ]
    if problems:
      raise ValueError("; ".join(problems))

  @property
  def rotary_dim(self) -> int:
    """Entries of a head that rotary positions rotate."""
    return int(self.head_dim * self.rotary_fraction)

  @property
  def windows(self) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for all tokens."""
    if not self.global_layers:
      return (self.sliding_window,) * self.num_layers
    return tuple(
        0 if is_global else self.sliding_window
        for is_global in self.global_layers
    )

  @property
  def kinds(self) -> tuple[tuple[str, ...], ...]:
    """Modules of each layer's block except its norms.

    Layers with the same modules are of one kind, see `net/stacks.py`.
    """
    is_delta = self.delta_layers or (False,) * self.num_layers
    return tuple(("delta" if d else "attention", "mlp") for d in is_delta)

  def layers_with(self, module: str) -> tuple[int, ...]:
    """Returns the layers with a module; all if it is in no kind, as norms."""
    own = tuple(n for n, kind in enumerate(self.kinds) if module in kind)
    return own or tuple(range(self.num_layers))

  @property
  def has_states(self) -> bool:
    """Whether some layers have a state in place of a KV cache."""
    return any(self.delta_layers)

  @property
  def delta_channels(self) -> int:
    """Channels of a delta net's convolution: queries, keys and values."""
    keys = self.delta_key_heads * self.delta_key_dim
    return 2 * keys + self.delta_value_heads * self.delta_value_dim

  @property
  def delta_state(self) -> int:
    """Numbers of a row's state in a layer with a delta net."""
    matrix = self.delta_key_dim * self.delta_value_dim
    recent = (self.delta_taps - 1) * self.delta_channels
    return self.delta_value_heads * matrix + recent

  @property
  def route_dtype(self) -> str:
    """Name of the smallest dtype that holds the number of an expert."""
    return "uint8" if self.num_experts <= 256 else "uint16"

  @property
  def idle_params(self) -> int:
    """Number of params of experts that a token does not use."""
    idle = self.num_experts - self.experts_per_token
    size = 3 * self.mlp_width * self.width
    if family_lib.FAMILIES[self.family].has_expert_biases:
      size += 2 * self.mlp_width + self.width
    return self.num_layers * idle * size

  @classmethod
  def from_config(
      cls,
      config_model: ml_collections.ConfigDict,
      vocab_size: int,
      *,
      pad_id: int | None,
      bos_id: int | None,
      eos_id: int | None,
      backend: str = "cpu",
  ) -> "ModelConfig":
    """Returns the shape that `config.model` describes, for a tokenizer.

    `backend` is JAX's, for `compute_dtype="auto"`.

    Raises:
      ValueError: a setting is missing, unknown or not allowed.
    """
    settings = dict(config_model)
    given = {"vocab_size", "pad_id", "bos_id", "eos_id"}
    fields = [f for f in dataclasses.fields(cls) if f.name not in given]
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    missing = sorted(needed - settings.keys())
    unknown = sorted(settings.keys() - {f.name for f in fields})
    if missing or unknown:
      raise ValueError(f"config.model: missing {missing}, unknown {unknown}")
    settings["compute_dtype"] = compute_dtype(config_model, backend)
    return cls(
        vocab_size=vocab_size,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        **settings,
    )

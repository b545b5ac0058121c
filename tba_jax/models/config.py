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
  """Returns the activation dtype of `config.model` on a JAX backend."""
  if config_model["compute_dtype"] != "auto":
    return config_model["compute_dtype"]
  return "float32" if backend == "cpu" else "bfloat16"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape and number formats of one model.

  family: key of `family_lib.FAMILIES`.
  vocab_size: rows of the embedding, V.
  num_layers: number of blocks, N.
  width: size of the residual stream, D.
  num_heads: query heads, H; a multiple of num_kv_heads.
  num_kv_heads: key-value heads, G.
  head_dim: Dh, even.
  mlp_width: hidden units of an MLP, F; of each expert in a layer of experts.
  rope_theta: base of the rotary frequencies; unused by GPT-2.
  norm_epsilon: term added to the mean square in a norm.
  tie_embeddings: whether the head is the embedding's transpose.
  max_positions: longest sequence, prompt and completion together.
  param_dtype: dtype name of stored parameters.
  compute_dtype: dtype name of activations; logits and norms are float32.
  attention_bias: whether query, key, value and output have biases; Qwen2 always
    has the first three, GPT-2 all four.
  mlp_bias: whether the MLP has biases; GPT-2 and GPT-NeoX always do.
  num_experts: MLPs per layer, E; 0 means one MLP without a router.
  experts_per_token: experts that each token uses, A.
  norm_router: whether the weights of a token's experts are normalized to 1.
  swiglu_alpha, swiglu_limit: factor inside the sigmoid of gpt-oss's experts,
    and the bound on their gate and up projections.
  dense_mlp_width: hidden units of a layer without experts; only kept for
    config.json, since no layer is without experts.
  sliding_window: number of tokens that a token sees, including itself; 0 means
    all.
  global_layers: whether each layer sees all tokens despite sliding_window; ()
    means that none does.
  local_rope_theta: rope_theta of Gemma's sliding-window layers, which rope_type
    does not affect.
  rope_type: "default"; "linear" divides positions by rope_factor; "llama3" and
    "yarn" divide only low frequencies by it.
  rope_factor: see rope_type.
  rope_low_freq_factor, rope_high_freq_factor: bounds of "llama3": frequencies
    are low where the wavelength exceeds rope_original_positions / the first,
    high where it is below rope_original_positions / the second, and
    interpolated in between.
  rope_original_positions: context length before "llama3" or "yarn" extended it.
  rope_beta_fast, rope_beta_slow: bounds of "yarn": pairs with more rotations
    than the first over rope_original_positions keep their frequency; pairs with
    fewer than the second count as low; those in between are interpolated.
  rope_attention_factor: multiplier of "yarn" for cosines and sines; None has it
    derived from rope_factor.
  rope_mscale, rope_mscale_all_dim: weights of log(rope_factor) in the numerator
    and denominator of the derived factor; unless both are set, the numerator's
    weight and the denominator are 1.
  rope_truncate: whether "yarn" rounds the bounds to whole pairs.
  query_growth: beta in the factor of queries,
    1 + beta log(1 + floor(position / rope_original_positions)).
  rotary_layers: whether each layer has rotary positions; the others have none.
    () means that all layers have them.
  rotary_fraction: fraction of a head's entries that are rotated.
  parallel_residual: whether attention and MLP read the same stream.
  activation: nonlinearity of the MLP; "silu" for gated MLPs except Gemma's.
  score_dim: number whose square root divides the scores; 0 means head_dim.
  scale_attention: whether scores are divided by sqrt(score_dim).
  scale_attention_by_layer: whether scores are also divided by 1 + the layer's
    index.
  pad_id, bos_id, eos_id: token ids, None if the tokenizer has none.
  delta_layers: whether each layer has a gated delta net (`delta.py`) in place
    of attention; () means that none does.
  delta_key_heads, delta_value_heads: numbers of key heads and value heads of a
    delta net; the second is a multiple of the first.
  delta_key_dim, delta_value_dim: widths of these heads.
  delta_taps: width of the delta net's convolution, including the current token.
  num_labels: outputs per position of a scalar head (reward model, value model,
    classifier); 0 means a token head.
  stop_ids: all end-of-text tokens if config.json lists several; eos_id is the
    first.
  attention: choice of kernels for training (`kernels.py`) and for decode steps
    (`ragged_attention.py`), as in `config.model.attention`.
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

    A model may sample tokens that its tokenizer has no text for.
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
      # transformers ignores it where each kind of layer has its own settings.
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
    # An unknown family is refused elsewhere.
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
    """Number of a head's entries that are rotated."""
    return int(self.head_dim * self.rotary_fraction)

  @property
  def windows(self) -> tuple[int, ...]:
    """Sliding window of each layer; 0 means all tokens."""
    if not self.global_layers:
      return (self.sliding_window,) * self.num_layers
    return tuple(
        0 if is_global else self.sliding_window
        for is_global in self.global_layers
    )

  @property
  def kinds(self) -> tuple[tuple[str, ...], ...]:
    """Modules of each layer's block except its norms.

    Layers with the same modules are of the same kind, see `net/stacks.py`.
    """
    is_delta = self.delta_layers or (False,) * self.num_layers
    return tuple(("delta" if d else "attention", "mlp") for d in is_delta)

  def layers_with(self, module: str) -> tuple[int, ...]:
    """Returns the layers with a module; all of them for a norm."""
    own = tuple(n for n, kind in enumerate(self.kinds) if module in kind)
    return own or tuple(range(self.num_layers))

  @property
  def has_states(self) -> bool:
    """Whether some layers have a state in place of a KV cache."""
    return any(self.delta_layers)

  @property
  def delta_channels(self) -> int:
    """Number of convolution channels in a delta net: queries, keys, values."""
    keys = self.delta_key_heads * self.delta_key_dim
    return 2 * keys + self.delta_value_heads * self.delta_value_dim

  @property
  def delta_state(self) -> int:
    """Number of entries in a row's state for one delta-net layer."""
    matrix = self.delta_key_dim * self.delta_value_dim
    recent = (self.delta_taps - 1) * self.delta_channels
    return self.delta_value_heads * matrix + recent

  @property
  def route_dtype(self) -> str:
    """Name of the smallest dtype that holds an expert's index."""
    return "uint8" if self.num_experts <= 256 else "uint16"

  @property
  def idle_params(self) -> int:
    """Number of params in the experts that a token does not use."""
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

    `backend` names JAX's backend, which decides `compute_dtype="auto"`.

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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the shape of a model. Does not import JAX."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import ml_collections

from tba_jax.models.families import family as family_lib

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")
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
# A larger number is a mistake that would exhaust the host's memory.
MAX_LAYERS = 10_000
# Modules of attention: with own keys and values, and with another layer's;
# the second of each pair has the shape of global layers.
ATTENTIONS = (
    "attention",
    "global_attention",
    "shared_attention",
    "global_shared_attention",
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
  head_norms: whether query and key heads are normalized in families in which
    only some models have these norms.
  mlp_bias: whether the MLP has biases; GPT-2 and GPT-NeoX always do.
  num_experts: MLPs per layer, E; 0 means one MLP without a router.
  experts_per_token: experts that each token uses, A.
  norm_router: whether the weights of a token's experts are normalized to 1.
  swiglu_alpha, swiglu_limit: factor inside the sigmoid of gpt-oss's experts,
    and the bound on their gate and up projections.
  dense_layers: whether each layer has one MLP of dense_mlp_width in place of
    experts, or of an MLP of mlp_width; () means that none does.
  dense_mlp_width: hidden units of that MLP.
  shared_expert_width: hidden units of an expert that every token uses; 0 means
    no such expert.
  router_scale: factor of the weights of a token's experts, after `norm_router`.
  num_expert_groups, groups_per_token: parts of equal size that the experts
    form, and the number of these that a token's experts are chosen from.
  sliding_window: number of tokens that a token sees, including itself; 0 means
    all.
  global_layers: whether each layer sees all tokens despite sliding_window; ()
    means that none does.
  global_head_dim: head_dim of layers without a sliding window, which then have
    parameters of their own shape; 0 means the same.
  global_kv_heads: num_kv_heads of these layers; 0 means the same.
  keys_as_values: whether the values of these layers are their keys before
    norm and rotation.
  num_shared_layers: last layers, which have no keys and values: each uses the
    last earlier layer's with the same window.
  layer_input_width: size of each layer's own token embedding, added to its
    stream through a gated map; 0 means none.
  logit_cap: bound c on the logits, c tanh(logits / c); 0 means none.
  local_rope_theta: rope_theta of Gemma's sliding-window layers, which rope_type
    does not affect.
  rope_type: "default"; "linear" divides positions by rope_factor; "llama3" and
    "yarn" divide only low frequencies by it; "proportional" is "linear", with
    the rotated pairs of a rotary_fraction spread over the whole head.
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
  latent_rank: width of the latent that a token's keys and values are made of
    (`latent.py`); 0 in families without.
  query_rank: width of the latent of queries; 0 means that there is none.
  rope_dim: last entries of a head that are rotated, whose keys all heads share.
  value_dim: width of a head's values.
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
  head_norms: bool = False
  mlp_bias: bool = False
  num_experts: int = 0
  experts_per_token: int = 0
  norm_router: bool = True
  router_scale: float = 1.0
  num_expert_groups: int = 1
  groups_per_token: int = 1
  swiglu_alpha: float = 1.702
  swiglu_limit: float = 7.0
  dense_layers: tuple[bool, ...] = ()
  dense_mlp_width: int = 6144
  shared_expert_width: int = 0
  sliding_window: int = 0
  global_layers: tuple[bool, ...] = ()
  global_head_dim: int = 0
  global_kv_heads: int = 0
  keys_as_values: bool = False
  num_shared_layers: int = 0
  layer_input_width: int = 0
  logit_cap: float = 0.0
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
  latent_rank: int = 0
  query_rank: int = 0
  rope_dim: int = 0
  value_dim: int = 0
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
    if self.num_layers > MAX_LAYERS:
      raise ValueError(
          f"config.model.num_layers={self.num_layers}: must be at most"
          f" {MAX_LAYERS}"
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
        ("global_head_dim",
         self.global_head_dim >= 0 and self.global_head_dim % 2 == 0,
         "an even number, or 0"),
        ("global_kv_heads", self.global_kv_heads == 0
         or self.global_kv_heads > 0 and self.keys_as_values
         and self.num_heads % self.global_kv_heads == 0,
         f"0, or with keys_as_values a divisor of num_heads={self.num_heads}"),
        ("num_shared_layers", 0 <= self.num_shared_layers < self.num_layers
         and {*self.windows} == {*self.windows[: self.num_own_layers]},
         "0, or fewer than the layers, with a layer of each type before them"),
        ("layer_input_width", self.layer_input_width >= 0, "0 or more"),
        ("logit_cap", self.logit_cap >= 0, "0 or more"),
        ("dense_layers", len(self.dense_layers) in (0, self.num_layers)
         and (not self.dense_layers or not all(self.dense_layers)),
         f"() or num_layers={self.num_layers} of them, not all True"),
        ("dense_mlp_width", self.dense_mlp_width > 0, "1 or more"),
        ("shared_expert_width", self.shared_expert_width >= 0, "0 or more"),
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
    if family is not None and (family.has_experts or self.num_experts):
      experts = self.num_experts
      groups, of_token = self.num_expert_groups, self.groups_per_token
      in_reach = experts // max(groups, 1) * of_token
      rows += [
          ("num_experts", experts > 0,
           f"1 or more in family {self.family!r}"),
          ("experts_per_token", 1 <= self.experts_per_token <= experts,
           f"1 to num_experts={experts}"),
          # A group's score is the sum of its two largest.
          ("num_expert_groups", groups == 1 or (groups > 1 and
           experts % groups == 0 and experts >= 2 * groups),
           f"1, or a divisor of num_experts={experts} and at most half of it"),
          ("groups_per_token", 1 <= of_token <= groups and
           in_reach >= self.experts_per_token,
           f"1 to num_expert_groups={groups}, with at least"
           f" experts_per_token={self.experts_per_token} experts in them"),
          ("router_scale", self.router_scale > 0, "above 0"),
      ]  # fmt: skip
    if family is not None and "num_shared_layers" in family.fields:
      own = (False,) * self.num_own_layers
      shared = (True,) * self.num_shared_layers
      rows += [
          ("dense_layers", self.dense_layers in ((), own + shared)
           and not (self.num_experts and self.dense_layers),
           f"() or, without experts, the last num_shared_layers="
           f"{self.num_shared_layers} in family {self.family!r}"),
          ("shared_expert_width",
           (self.shared_expert_width > 0) == (self.num_experts > 0),
           f"1 or more with experts in family {self.family!r}, else 0"),
          ("sliding_window", self.sliding_window > 0,
           f"1 or more in family {self.family!r}"),
          ("global_head_dim", self.global_head_dim > 0,
           f"2 or more in family {self.family!r}"),
          ("dense_mlp_width", not self.dense_layers
           or self.dense_mlp_width == 2 * self.mlp_width,
           f"2 * mlp_width={self.mlp_width} in family {self.family!r}"),
      ]  # fmt: skip
    if family is not None and family.has_latents:
      where = (
          f"in family {self.family!r}, whose shape comes from a folder"
          " (config.init)"
      )
      rows += [
          ("latent_rank", self.latent_rank > 0, f"1 or more {where}"),
          ("query_rank", self.query_rank >= 0, "0 or more"),
          ("rope_dim", 0 < self.rope_dim < self.head_dim
           and self.rope_dim % 2 == 0,
           f"even and below head_dim={self.head_dim} {where}"),
          ("value_dim", self.value_dim > 0, f"1 or more {where}"),
          ("num_kv_heads", self.num_kv_heads == self.num_heads,
           f"num_heads={self.num_heads} in family {self.family!r}"),
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
    """Number of a head's entries that are rotated, without a sliding window."""
    return int(self.rope_width * self.rotary_fraction)

  @property
  def rope_width(self) -> int:
    """Number of a head's entries of which `rotary_fraction` are rotated."""
    if self.latent_rank:
      return self.rope_dim
    return self.global_head_dim or self.head_dim

  @property
  def windows(self) -> tuple[int, ...]:
    """Sliding window of each layer; 0 means all tokens."""
    if not self.global_layers:
      return (self.sliding_window,) * self.num_layers
    return tuple(
        0 if is_global else self.sliding_window
        for is_global in self.global_layers
    )

  def _is_global(self, layer: int) -> bool:
    """Returns whether a layer has no sliding window."""
    return not self.sliding_window or (
        bool(self.global_layers) and self.global_layers[layer]
    )

  @property
  def kinds(self) -> tuple[tuple[str, ...], ...]:
    """Modules of each layer's block except its norms.

    Layers with the same modules are of the same kind, see `net/stacks.py`.
    """
    none = (False,) * self.num_layers
    flags = zip(self.delta_layers or none, self.dense_layers or none)
    mlps = ("mlp", "shared_mlp") if self.shared_expert_width else ("mlp",)
    return tuple(
        (
            "delta" if is_delta else self._attention_of(n),
            *(("dense_mlp",) if is_dense else mlps),
        )
        for n, (is_delta, is_dense) in enumerate(flags)
    )

  def _attention_of(self, layer: int) -> str:
    """Returns the name of a layer's module of attention, in `ATTENTIONS`."""
    is_global = self.global_head_dim > 0 and self._is_global(layer)
    is_shared = layer >= self.num_own_layers
    return ATTENTIONS[2 * is_shared + is_global]

  @property
  def num_own_layers(self) -> int:
    """Number of layers, from the first one, that are not shared ones."""
    return self.num_layers - self.num_shared_layers

  @property
  def kv_sources(self) -> tuple[int, ...]:
    """Layer whose keys and values each layer attends to: most often itself."""
    windows, own = self.windows, self.num_own_layers
    last = {window: n for n, window in enumerate(windows[:own])}
    return tuple(
        n if n < own else last[window] for n, window in enumerate(windows)
    )

  def layers_with(self, module: str) -> tuple[int, ...]:
    """Returns the layers with a module; all of them for a norm."""
    own = tuple(n for n, kind in enumerate(self.kinds) if module in kind)
    return own or tuple(range(self.num_layers))

  @property
  def expert_layers(self) -> tuple[int, ...]:
    """Layers with experts."""
    return self.layers_with("mlp") if self.num_experts else ()

  @property
  def num_expert_layers(self) -> int:
    return len(self.expert_layers)

  @property
  def num_dense_layers(self) -> int:
    """Number of layers with one MLP in place of experts."""
    return sum(self.dense_layers)

  @property
  def layer_inputs_width(self) -> int:
    """Width of the embeddings that all layers together have of a token."""
    return self.num_layers * self.layer_input_width

  @property
  def doubles_mlps(self) -> bool:
    """Whether the MLPs of shared layers are twice as wide."""
    return any(self.dense_layers)

  @property
  def adds_experts(self) -> bool:
    """Whether there are experts, in a family whose models may have none."""
    return self.num_experts > 0

  @property
  def expert_width(self) -> int | None:
    """Hidden units of an expert, None without any."""
    return self.mlp_width if self.num_experts else None

  @property
  def num_shared_experts(self) -> int:
    """Number of experts of ordinary width that form the shared one."""
    return self.shared_expert_width // self.mlp_width

  @property
  def mlp_widths(self) -> dict[str, int]:
    """Hidden units of each kind of MLP, by field."""
    dense = self.dense_mlp_width * any(self.dense_layers)
    widths = {
        "mlp_width": self.mlp_width,
        "dense_mlp_width": dense,
        "shared_expert_width": self.shared_expert_width,
    }
    return {name: width for name, width in widths.items() if width}

  @property
  def nope_dim(self) -> int:
    """Number of a head's entries that are not rotated, with latents."""
    return self.head_dim - self.rope_dim

  @property
  def attended_dim(self) -> int:
    """Width of the heads that kernels of training and prefill get.

    With latents, keys and values are padded to the wider of both.
    """
    return max(self.head_dim, self.value_dim)

  @property
  def attended_shapes(self) -> list[tuple[int, int]]:
    """Number and width of key-value heads in these kernels, by layer."""
    layers = range(self.num_layers)
    if self.latent_rank:
      return [(self.num_kv_heads, self.attended_dim) for _ in layers]
    return [self.kv_shape(n) for n in layers]

  @property
  def cached_heads(self) -> int:
    """Number of heads in the KV cache; a latent counts as one."""
    return 1 if self.latent_rank else self.num_kv_heads

  def kv_shape(self, layer: int) -> tuple[int, int]:
    """Returns number and width of a layer's key-value heads in the KV cache.

    A latent is one head, cached with its rotated key.
    """
    if self.latent_rank:
      return 1, self.latent_rank + self.rope_dim
    if not self._is_global(layer):
      return self.num_kv_heads, self.head_dim
    return (
        self.global_kv_heads or self.num_kv_heads,
        self.global_head_dim or self.head_dim,
    )

  @property
  def cached_numbers(self) -> int:
    """Numbers that the KV cache holds of a token in all layers."""
    arrays = 1 if self.latent_rank else 2
    return arrays * sum(
        math.prod(self.kv_shape(n))
        for n, kind in enumerate(self.kinds[: self.num_own_layers])
        if "delta" not in kind
    )

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
  def delta_fused(self) -> tuple[int, int, int]:
    """Number of a delta net's key heads, and outputs of each in fused matrices.

    The outputs are query, key, values and their gates, and b and a.
    """
    heads = self.delta_value_heads // self.delta_key_heads
    each = self.delta_key_dim + heads * self.delta_value_dim
    return self.delta_key_heads, 2 * each, 2 * heads

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
  def route_bytes(self) -> int:
    """Bytes that name a token's experts in a layer, in groups and batches."""
    return self.experts_per_token * (1 + (self.num_experts > 256))

  @property
  def idle_params(self) -> int:
    """Number of params in the experts that a token does not use."""
    idle = self.num_experts - self.experts_per_token
    size = 3 * self.mlp_width * self.width
    if family_lib.FAMILIES[self.family].has_expert_biases:
      size += 2 * self.mlp_width + self.width
    return self.num_expert_layers * idle * size

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

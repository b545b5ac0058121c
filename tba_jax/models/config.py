# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the shape of a model, and Hugging Face's config.json of it.

Reading a config.json, every setting is either used, held to the one value that
we compute, or known to change no logits; any other one is refused by name. jax
is not imported.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import ml_collections

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape and number formats of one model.

  family: key of `models/build.py:FAMILIES`.
  vocab_size: rows of the embedding, V.
  num_layers: N.
  width: D.
  num_heads: query heads, H; a multiple of num_kv_heads.
  num_kv_heads: key-value heads, G.
  head_dim: Dh, even.
  mlp_width: F.
  rope_theta: base of the rotary frequencies.
  norm_epsilon: added to the mean square in a norm.
  tie_embeddings: True: the head is the embedding's transpose.
  max_positions: longest sequence, prompt and completion together.
  param_dtype: dtype name of stored parameters.
  compute_dtype: dtype name of activations; logits and norms are float32.
  pad_id, bos_id, eos_id: token ids, None where the tokenizer has none.
  """

  family: str
  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  norm_epsilon: float
  tie_embeddings: bool
  max_positions: int
  param_dtype: str
  compute_dtype: str
  pad_id: int | None
  bos_id: int | None
  eos_id: int | None

  def __post_init__(self):
    problems = self._problems()
    if problems:
      raise ValueError("; ".join(problems))

  def _problems(self) -> list[str]:
    problems = []

    def check(name: str, right: bool, allowed: str):
      if not right:
        value = getattr(self, name)
        problems.append(f"config.model.{name}={value!r}: allowed {allowed}")

    for name in (
        "vocab_size",
        "num_layers",
        "width",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "mlp_width",
        "max_positions",
    ):
      value = getattr(self, name)
      is_int = isinstance(value, int) and not isinstance(value, bool)
      check(name, is_int and value >= 1, "an integer of at least 1")
    if problems:
      return problems
    check(
        "num_heads",
        self.num_heads % self.num_kv_heads == 0,
        f"a multiple of num_kv_heads={self.num_kv_heads}",
    )
    check("head_dim", self.head_dim % 2 == 0, "an even number")
    check("rope_theta", self.rope_theta > 0, "above 0")
    check("norm_epsilon", self.norm_epsilon > 0, "above 0")
    check("tie_embeddings", isinstance(self.tie_embeddings, bool), "a bool")
    check("param_dtype", self.param_dtype in DTYPES, f"one of {DTYPES}")
    check("compute_dtype", self.compute_dtype in DTYPES, f"one of {DTYPES}")
    return problems

  @classmethod
  def from_config(
      cls,
      config_model: ml_collections.ConfigDict,
      vocab_size: int,
      *,
      pad_id: int | None,
      bos_id: int | None,
      eos_id: int | None,
  ) -> "ModelConfig":
    """Returns the shape that `config.model` describes, for a tokenizer.

    Raises:
      ValueError: a setting that is missing, not known or not allowed.
    """
    settings = dict(config_model)
    given = {"vocab_size", "pad_id", "bos_id", "eos_id"}
    known = {field.name for field in dataclasses.fields(cls)} - given
    if set(settings) != known:
      raise ValueError(
          f"config.model: missing {sorted(known - set(settings))}, not known"
          f" {sorted(set(settings) - known)}"
      )
    return cls(
        vocab_size=vocab_size,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        **settings,
    )

  @classmethod
  def from_hf(
      cls, hf: Mapping[str, Any], *, dtype: str | None = None
  ) -> "ModelConfig":
    """Returns the shape that a Hugging Face config.json describes.

    Args:
      hf: the parsed file.
      dtype: of parameters and activations; None takes the file's own.

    Raises:
      ValueError: model_type is not known, or a setting is missing, not known
        or has a value that we do not compute; the message lists all of them.
    """
    model_type = hf.get("model_type")
    if model_type not in _HF_READERS:
      raise ValueError(
          f"config.json: model_type={model_type!r} is not supported; supported:"
          f" {sorted(_HF_READERS)}"
      )
    reader = _Reader(hf)
    fields = _HF_READERS[model_type](reader)
    fields["pad_id"] = reader.take("pad_token_id", None, (int, type(None)))
    fields["bos_id"] = reader.take("bos_token_id", None, (int, type(None)))
    fields["eos_id"] = reader.take("eos_token_id", None, (int, type(None)))
    own_dtype = reader.take("torch_dtype", None, (str, type(None)))
    own_dtype = reader.take("dtype", own_dtype, (str, type(None)))
    dtype = dtype or own_dtype or "float32"
    reader.finish()
    return cls(param_dtype=dtype, compute_dtype=dtype, **fields)

  def to_hf(self) -> dict[str, Any]:
    """Returns the config.json of this shape, as `transformers` reads it."""
    hf = _HF_WRITERS[self.family](self)
    hf["dtype"] = self.param_dtype
    hf["pad_token_id"] = self.pad_id
    hf["bos_token_id"] = self.bos_id
    hf["eos_token_id"] = self.eos_id
    return hf


# Settings of any family that change no logits.
_WITHOUT_EFFECT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torchscript",
        "transformers_version",
        "use_cache",
    )
)


class _Reader:
  """Takes settings out of a config.json and remembers what is wrong."""

  def __init__(self, hf: Mapping[str, Any]):
    self._left = {k: v for k, v in hf.items() if k not in _WITHOUT_EFFECT}
    self._problems = []
    self.only("chunk_size_feed_forward", 0)
    self.only("is_encoder_decoder", False)

  def take(self, name: str, default: Any, kinds: type | tuple) -> Any:
    """Returns a setting; `default` is what a file without it means."""
    value = self._left.pop(name, default)
    if not isinstance(value, kinds) or (
        isinstance(value, bool) and kinds is not bool
    ):
      kinds = kinds if isinstance(kinds, tuple) else (kinds,)
      names = " or ".join(kind.__name__ for kind in kinds)
      self.problem(name, value, names)
      return default
    return value

  def need(self, name: str) -> int:
    """Returns a setting without which a file means nothing."""
    if name not in self._left:
      self._problems.append(f"{name} is missing")
      return 1
    return self.take(name, 1, int)

  def only(self, name: str, *allowed: Any) -> None:
    """Takes a setting that must be absent or have an allowed value."""
    value = self._left.pop(name, allowed[0])
    if value not in allowed:
      self.problem(name, value, " or ".join(repr(a) for a in allowed))

  def problem(self, name: str, value: Any, supported: str) -> None:
    self._problems.append(
        f"{name}={value!r} is not supported; supported: {supported}"
    )

  def finish(self) -> None:
    """Raises ValueError with every problem, settings left over included."""
    for name, value in sorted(self._left.items()):
      self._problems.append(f"{name}={value!r} is not a setting that we know")
    if self._problems:
      raise ValueError("config.json: " + "; ".join(self._problems))


def _read_rope(reader: _Reader) -> float:
  """Returns theta of plain rotary positions, from either spelling of it."""
  theta = reader.take("rope_theta", None, (int, float, type(None)))
  reader.only("rope_scaling", None)
  rope = dict(reader.take("rope_parameters", None, (dict, type(None))) or {})
  rope_type = rope.pop("rope_type", "default")
  if rope_type != "default":
    reader.problem("rope_parameters.rope_type", rope_type, "'default'")
    return 1.0
  inner = rope.pop("rope_theta", theta)
  for name, value in rope.items():
    if not (name == "partial_rotary_factor" and value == 1.0):
      reader.problem(f"rope_parameters.{name}", value, "none")
  if theta is not None and inner != theta:
    reader.problem("rope_theta", theta, f"rope_parameters' own {inner!r}")
  return 10000.0 if inner is None else float(inner)


def _read_llama(reader: _Reader) -> dict[str, Any]:
  """Returns the fields of a `LlamaConfig`; defaults are transformers' own."""
  for name in ("attention_bias", "mlp_bias"):
    reader.only(name, False)
  reader.only("hidden_act", "silu")
  reader.only("attention_dropout", 0.0)
  num_heads = reader.need("num_attention_heads")
  width = reader.need("hidden_size")
  optional_int = (int, type(None))
  num_kv_heads = reader.take("num_key_value_heads", None, optional_int)
  head_dim = reader.take("head_dim", None, optional_int)
  return {
      "family": "llama",
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("num_hidden_layers"),
      "width": width,
      "num_heads": num_heads,
      "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
      "head_dim": width // max(num_heads, 1) if head_dim is None else head_dim,
      "mlp_width": reader.need("intermediate_size"),
      "rope_theta": _read_rope(reader),
      "norm_epsilon": reader.take("rms_norm_eps", 1e-6, float),
      "tie_embeddings": reader.take("tie_word_embeddings", False, bool),
      "max_positions": reader.take("max_position_embeddings", 2048, int),
  }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
  return {
      "architectures": ["LlamaForCausalLM"],
      "model_type": "llama",
      "vocab_size": config.vocab_size,
      "hidden_size": config.width,
      "intermediate_size": config.mlp_width,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
      "hidden_act": "silu",
      "max_position_embeddings": config.max_positions,
      "rms_norm_eps": config.norm_epsilon,
      # Readers before transformers 5 take the first, later ones the second.
      "rope_theta": config.rope_theta,
      "rope_parameters": {
          "rope_theta": config.rope_theta,
          "rope_type": "default",
      },
      "attention_bias": False,
      "attention_dropout": 0.0,
      "mlp_bias": False,
      "tie_word_embeddings": config.tie_embeddings,
      "use_cache": True,
  }


# config.json's model_type -> reader; our family -> writer.
_HF_READERS = {"llama": _read_llama}
_HF_WRITERS = {"llama": _write_llama}

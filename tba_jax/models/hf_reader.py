# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings taken out of a config.json, with all that is wrong remembered.

jax is not imported.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from tba_jax.models import config as model_config_lib

# Settings of any family that change no logits.
_WITHOUT_EFFECT = frozenset(
    (
        "_name_or_path",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torchscript",
        "transformers_version",
        "use_cache",
    )
)


class Reader:
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

  def has(self, name: str) -> bool:
    return name in self._left

  def skip(self, *names: str) -> None:
    """Takes settings that change no logits of this family."""
    for name in names:
      self._left.pop(name, None)

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


def _take_same(reader: Reader, names: Sequence[str]) -> Any:
  """Returns a number that has several names, all of which must agree."""
  found = {
      name: value
      for name in names
      if (value := reader.take(name, None, (int, float, type(None))))
      is not None
  }
  for name, value in found.items():
    first = next(iter(found))
    if value != found[first]:
      reader.problem(name, value, f"the same as {first}={found[first]!r}")
  return next(iter(found.values()), None)


def read_rope(
    reader: Reader,
    *,
    theta_names: Sequence[str] = ("rope_theta",),
    fraction_names: Sequence[str] = (),
    fraction: float = 1.0,
) -> dict[str, Any]:
  """Returns the fields of rotary positions, from any spelling of them.

  Args:
    reader: of the file.
    theta_names: settings that may hold the base.
    fraction_names: settings that may hold the share of a head that is turned;
      none: all of it is.
    fraction: that share where no setting says it.
  """
  theta = _take_same(reader, theta_names)
  outer_fraction = _take_same(reader, fraction_names)
  rope = {}
  for setting in ("rope_scaling", "rope_parameters"):
    found = dict(reader.take(setting, None, (dict, type(None))) or {})
    if "type" in found:  # The oldest spelling.
      found.setdefault("rope_type", found.pop("type"))
    for name, value in found.items():
      if rope.setdefault(name, value) != value:
        reader.problem(
            f"rope_scaling.{name}", rope[name], f"the same as {setting}.{name}"
        )
  rope_type = rope.pop("rope_type", "default")
  inner = rope.pop("rope_theta", theta)
  if theta is not None and inner != theta:
    reader.problem(theta_names[0], theta, f"rope_parameters' own {inner!r}")
  if outer_fraction is not None:
    fraction = outer_fraction
  inner_fraction = rope.pop("partial_rotary_factor", fraction)
  supported = repr(fraction)
  if fraction_names and outer_fraction is None:
    fraction, supported = inner_fraction, "a number"
  is_number = isinstance(inner_fraction, (int, float))
  if inner_fraction != fraction or not is_number:
    name = "rope_parameters.partial_rotary_factor"
    reader.problem(name, inner_fraction, supported)
    fraction = 1.0
  fields = {"rope_theta": 10000.0 if inner is None else float(inner)}
  if rope_type not in _ROPE_SETTINGS:
    reader.problem(
        "rope_parameters.rope_type",
        rope_type,
        " or ".join(map(repr, _ROPE_SETTINGS)),
    )
    return fields
  for name, (field, kind) in _ROPE_SETTINGS[rope_type].items():
    value = rope.pop(name, None)
    if isinstance(value, (int, kind)) and not isinstance(value, bool):
      fields[field] = kind(value)
    else:
      reader.problem(f"rope_parameters.{name}", value, kind.__name__)
  for name, value in rope.items():
    reader.problem(f"rope_parameters.{name}", value, "none")
  fields["rotary_fraction"] = float(fraction)
  return {**fields, "rope_type": rope_type}


# rope_type -> its settings -> our field and its kind.
_ROPE_SETTINGS = {
    "default": {},
    "linear": {"factor": ("rope_factor", float)},
    "llama3": {
        "factor": ("rope_factor", float),
        "low_freq_factor": ("rope_low_freq_factor", float),
        "high_freq_factor": ("rope_high_freq_factor", float),
        "original_max_position_embeddings": ("rope_original_positions", int),
    },
}


def write_rope(config: "model_config_lib.ModelConfig") -> dict[str, Any]:
  """Returns the rotary settings; old readers take one spelling, new both."""
  rope = {
      name: getattr(config, field)
      for name, (field, _) in _ROPE_SETTINGS[config.rope_type].items()
  }
  rope["rope_type"] = config.rope_type
  return {
      # Readers before transformers 5 take the first two, later ones the third.
      "rope_theta": config.rope_theta,
      "rope_scaling": rope if config.rope_type != "default" else None,
      "rope_parameters": {"rope_theta": config.rope_theta, **rope},
  }

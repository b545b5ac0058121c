# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the settings of low-rank adapters may be, alone and together. No JAX.

As the checks of `config_relations.py`, which calls them.
"""

from collections.abc import Iterator, Mapping
import json
import pathlib
from typing import Any

# Products of a block by family; other families are as "llama".
_TARGETS = {
    "gpt2": ("q", "k", "v", "o", "up", "down"),
    "gpt_neox": ("q", "k", "v", "o", "up", "down"),
    "llama": ("q", "k", "v", "o", "gate", "up", "down"),
}
ALL = "all"
TARGETS = _TARGETS["llama"]

_Problems = Iterator[tuple[str, str]]


def names(text: str) -> tuple[str, ...]:
  """Returns the products that a list of targets names; () for all."""
  return () if text == ALL else tuple(n.strip() for n in text.split(","))


# As the ranges of `config_ranges.py`.
TARGETS_RANGE = (
    lambda v: set(names(v)) <= set(TARGETS),
    f"allowed {ALL!r} or some of {', '.join(TARGETS)}, separated by commas",
)


def base(c: Mapping[str, Any]) -> _Problems:
  """The reference is the base of the adapters, which never moves."""
  if c["lora.rank"] and c["reference.mode"] != "fixed":
    yield "reference.mode", (
        f"allowed 'fixed' with config.lora.rank = {c['lora.rank']}"
    )


def targets(c: Mapping[str, Any]) -> _Problems:
  """The model has every product that is named."""
  known = _TARGETS.get(_family(c), TARGETS)
  lacking = [n for n in names(c["lora.targets"]) if n not in known]
  if c["lora.rank"] and lacking:
    yield "lora.targets", (
        f"the blocks of {_family(c)} have no {', '.join(lacking)}; allowed"
        f" {ALL!r} or some of {', '.join(known)}"
    )


def program(c: Mapping[str, Any], name: str) -> _Problems:
  """A sweep trains all params."""
  if c.get("lora.rank") and name == "sweep":
    yield "lora.rank", "allowed 0 with --program=sweep"


def _family(c: Mapping[str, Any]) -> str:
  """Returns the family of the policy; "" where its folder does not tell."""
  start = c["sft.init"] if c["init"] == "sft" else c["init"]
  if start == "scratch":
    return c["model.family"]
  path = pathlib.Path(start).expanduser() / "config.json"
  try:
    return str(json.loads(path.read_text("utf-8")).get("model_type", ""))
  except (OSError, ValueError, AttributeError):
    return ""  # Whoever reads the folder tells what is wrong.

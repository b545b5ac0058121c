# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The model families, by `config.model.family`. No JAX."""

from collections.abc import Iterator, Mapping
import importlib

from tba_jax.models import family

# Each is `FAMILY` of the file of its name.
_NAMES = (
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)


class _Families(Mapping[str, family.Family]):
  """Families by name; a file is imported when its family is used."""

  def __getitem__(self, name: str) -> family.Family:
    if name not in _NAMES:
      raise KeyError(name)
    return importlib.import_module(f"tba_jax.models.{name}").FAMILY

  def __iter__(self) -> Iterator[str]:
    return iter(_NAMES)

  def __len__(self) -> int:
    return len(_NAMES)


FAMILIES: Mapping[str, family.Family] = _Families()

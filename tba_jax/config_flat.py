# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A config as one flat mapping. No JAX here."""

from collections.abc import Mapping
from typing import Any

import ml_collections


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns `{"a.b": value}` of a nested mapping, in its order."""
  out = {}
  for name, value in config.items():
    if isinstance(value, (Mapping, ml_collections.ConfigDict)):
      out.update(flatten(value, f"{prefix}{name}."))
    else:
      out[f"{prefix}{name}"] = value
  return out

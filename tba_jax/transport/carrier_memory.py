# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hands params over between threads of one process, without a copy."""

from collections.abc import Mapping
import secrets
from typing import Any

from tba_jax.transport import base
from tba_jax.transport import carrier

# Leaves of the versions that this process holds, by random name.
_held: dict[str, dict[str, Any]] = {}


class Memory(carrier.Carrier):
  """The carrier "memory": a version is its arrays, where they are."""

  name = "memory"

  def pack(self, tag: str, leaves: Mapping[str, Any]) -> carrier.Packed:
    name = secrets.token_hex(8)
    _held[name] = dict(leaves)
    return carrier.Packed(tag, {"name": name}, name)

  def drop(self, packed: carrier.Packed) -> None:
    _held.pop(packed.held, None)

  def read(
      self,
      transport: base.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: carrier.Specs,
  ) -> dict[str, Any] | None:
    # None also for a version of an earlier process.
    return _held.get(carried["name"])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A version in the store: its manifest, the pointer, and requests for it."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tba_jax.system import jsonl
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import carrier as carrier_lib
from tba_jax.transport.params import version as version_lib

_FORMAT = 4
POINTER = "p_cur"
_ASK = "ask/params"
_VERSION_SCHEMA = {"epoch": int, "version": int}
_MANIFEST = {
    "format": int,
    "carrier": str,
    "carried": dict,
    "base": str,
    "leaves": list,
}


def send_version(
    transport: byte_store.Transport,
    packed: carrier_lib.PackedVersion,
    run: wire.RunIdentity,
    base_name: str = "",
) -> None:
  """Sends a version: the carrier's data, then the manifest, then the pointer.

  Args:
    transport: owned by the calling thread.
    base_name: base params of adapters; "" without adapters.

  Raises:
    TransportError: the store was lost; readers do not see a partial version.
  """
  packed.carrier.send(transport, packed)
  key = f"p/{packed.tag}/meta"
  manifest = {
      "format": _FORMAT,
      "run": run.run_id,
      "key": key,
      "carrier": packed.carrier.name,
      "carried": packed.carried,
      "base": base_name,
      "leaves": [
          [name, list(shape), dtype.name]
          for name, (shape, dtype) in packed.specs.items()
      ],
  }
  transport.put(key, wire.encode_message(manifest, run.secret))
  transport.put(POINTER, _encode_version(run, POINTER, packed.version))


def drop_version(
    transport: byte_store.Transport, packed: carrier_lib.PackedVersion
) -> None:
  """Removes a version, its manifest before the carrier's data."""
  transport.delete(f"p/{packed.tag}")
  packed.carrier.drop(packed)


def read_pointer(
    transport: byte_store.Transport, run: wire.RunIdentity
) -> version_lib.Version | None:
  """Returns the newest version, None before the first version.

  Raises:
    WireError: the pointer is invalid.
  """
  data = transport.get(POINTER)
  if data is None:
    return None
  return _decode_version(run, POINTER, data)


def _encode_version(
    run: wire.RunIdentity, key: str, version: version_lib.Version
) -> bytes:
  message = {"run": run.run_id, "key": key}
  message |= {"epoch": version.epoch, "version": version.step}
  return wire.encode_message(message, run.secret)


def _decode_version(
    run: wire.RunIdentity, key: str, data: bytes
) -> version_lib.Version:
  """Returns the version in a message; raises WireError."""
  message = wire.decode_placed(
      data, run.secret, run.run_id, key, _VERSION_SCHEMA
  )
  return version_lib.Version(message["epoch"], message["version"])


def ask_again(
    transport: byte_store.Transport,
    run: wire.RunIdentity,
    name: str,
    version: version_lib.Version,
) -> None:
  """Asks the trainer to send a version again to the reader `name`."""
  key = f"{_ASK}/{name}"
  transport.put(key, _encode_version(run, key, version))


def take_requests(
    transport: byte_store.Transport,
    run: wire.RunIdentity,
    refusals: wire.Refusals,
) -> set[version_lib.Version]:
  """Returns the versions that readers request, and removes the requests."""
  requests = transport.list(_ASK)
  versions = set()
  for key, data in requests.items():
    try:
      versions.add(_decode_version(run, key, data))
    except wire.WireError as error:
      refusals.add(key, error)
  if requests:
    transport.delete(_ASK)
  return versions


def read_version(
    transport: byte_store.Transport,
    version: version_lib.Version,
    run: wire.RunIdentity,
    *,
    carriers: Mapping[str, carrier_lib.Carrier],
    expected: version_lib.Specs,
    base_name: str = "",
) -> dict[str, np.ndarray] | None:
  """Returns the leaves of a version, None if it was dropped meanwhile.

  Args:
    transport: owned by the calling thread.
    run: identity of the reader's run.
    carriers: readers by carrier name.
    expected: shape and dtype of every leaf; a float dtype matches any other.
    base_name: base params of the reader's adapters; "" without adapters.

  Raises:
    WireError: the version is corrupt, forged, or made for another base, or has
      unexpected leaves.
  """
  key = f"p/{version.tag}/meta"
  data = transport.get(key)
  if data is None:
    return None
  manifest = wire.decode_placed(data, run.secret, run.run_id, key, _MANIFEST)
  if manifest["format"] != _FORMAT:
    raise wire.WireError(
        "schema", f"params format {manifest['format']}, must be {_FORMAT}"
    )
  if manifest["base"] != base_name:
    raise wire.WireError(
        "base",
        f"adapters of the base {manifest['base']!r}; config.init is"
        f" {base_name!r} here",
    )
  try:
    stored = {
        name: (tuple(shape), np.dtype(dtype))
        for name, shape, dtype in manifest["leaves"]
    }
    if not all(isinstance(name, str) for name in stored):
      raise TypeError("a name is not a string")
  except (TypeError, ValueError) as error:
    raise wire.WireError("schema", f"leaves: {error}") from error
  wrong = sorted(
      name
      for name in {*stored, *expected}
      if not _fits(stored.get(name), expected.get(name))
  )
  if wrong:
    raise wire.WireError("leaves", f"missing or of another shape: {wrong}")
  carrier = carriers.get(manifest["carrier"])
  if carrier is None:
    raise wire.WireError("carrier", f"unknown: {manifest['carrier']!r}")
  carried = manifest["carried"]
  if error := jsonl.schema_error(carried, carrier.schema, "carried"):
    raise wire.WireError("schema", error)
  try:
    return carrier.read(transport, version.tag, carried, stored)
  except wire.WireError:
    raise
  except (KeyError, TypeError, ValueError) as error:
    # `carried` has unexpected content.
    raise wire.WireError("schema", f"carried: {error!r}") from error


def _fits(stored: Any, expected: Any) -> bool:
  """Returns whether a leaf's shape and dtype are compatible."""
  if stored is None or expected is None or stored[0] != expected[0]:
    return False
  return stored[1] == expected[1] or all(
      jnp.issubdtype(dtype, jnp.floating) for _, dtype in (stored, expected)
  )

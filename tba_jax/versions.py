# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One version of params: published whole, or never seen.

Keys: `p/<epoch>.<version>/meta` holds the manifest, `p_cur` the newest tag,
written last: the commit point. The leaves come by a carrier, which may use keys
beside the manifest. A reader takes a version only where its manifest is
authenticated, every leaf has the digests that the manifest says, and every leaf
that the reader expects is there.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.transport import base
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.carriers import base as carriers_lib

_FORMAT = 2

Specs = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclasses.dataclass
class Version:
  """One packed version, as the trainer holds it.

  epoch, version: its tag.
  carrier: that packed it.
  packed: by the carrier.
  specs: shape and dtype of every leaf by path.
  """

  epoch: int
  version: int
  carrier: "carriers_lib.Carrier"
  packed: "carriers_lib.Packed"
  specs: Specs


def tag_text(epoch: int, version: int) -> str:
  """Returns the key part of a version: bytewise order is numeric order."""
  return f"{epoch:08d}.{version:010d}"


def by_path(params: types.PyTree) -> dict[str, Any]:
  """Returns the leaves by path, in the order of the tree."""
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def flatten(params: types.PyTree) -> dict[str, np.ndarray]:
  """Returns the leaves as host arrays by path, in the order of the tree.

  Blocks until the device has computed them.
  """
  return {
      name: np.asarray(jax.device_get(leaf))
      for name, leaf in by_path(params).items()
  }


def snapshot(params: types.PyTree, *, dtype: str) -> types.PyTree:
  """Returns a copy, with floats in the dtype that is published."""

  def copy(x: jax.Array) -> jax.Array:
    wanted = published_dtype(x.dtype, dtype)
    return x + 0 if wanted == x.dtype else x.astype(wanted)

  return jax.tree.map(copy, params)


def pack(
    carriers: Sequence["carriers_lib.Carrier"],
    leaves: Mapping[str, Any],
    *,
    epoch: int,
    version: int,
    on_event: Callable[[str, str], None],
) -> Version:
  """Returns a version ready to be sent; blocks until it is computed.

  Args:
    carriers: the first that has room takes it.
    leaves: arrays by path.
    epoch, version: the tag.
    on_event: called with (kind, message) where one has none.

  Raises:
    OSError: the last has no room, or no permission.
  """
  specs = {n: (tuple(x.shape), np.dtype(x.dtype)) for n, x in leaves.items()}
  for carrier in carriers:
    try:
      packed = carrier.pack(tag_text(epoch, version), leaves)
    except OSError as error:
      if carrier is carriers[-1]:
        raise
      on_event("carrier_full", f"{carrier.name}: {error}")
    else:
      return Version(epoch, version, carrier, packed, specs)
  raise ValueError("no carrier to pack with")


def send(
    transport: base.Transport,
    it: Version,
    *,
    run_id: str,
    secret: bytes,
    base_name: str = "",
) -> None:
  """Writes what lies in the store, then the manifest, then the pointer.

  Args:
    transport: of the calling thread.
    it: the version.
    run_id: the run.
    secret: key of the run's messages.
    base_name: of the params that adapters belong to; "" where all are there.

  Raises:
    TransportError: the store was lost on the way; readers never see the rest.
  """
  it.carrier.send(transport, it.packed)
  manifest = {
      "format": _FORMAT,
      "run": run_id,
      "epoch": it.epoch,
      "version": it.version,
      "carrier": it.carrier.name,
      "carried": it.packed.carried,
      "base": base_name,
      "leaves": [
          [name, list(shape), dtype.name]
          for name, (shape, dtype) in it.specs.items()
      ],
  }
  tag = tag_text(it.epoch, it.version)
  transport.put(f"p/{tag}/meta", wire.encode_message(manifest, secret))
  pointer = {"run": run_id, "epoch": it.epoch, "version": it.version}
  transport.put("p_cur", wire.encode_message(pointer, secret))


def drop(transport: base.Transport, it: Version) -> None:
  """Removes a version, its manifest before what its carrier holds."""
  transport.delete(f"p/{tag_text(it.epoch, it.version)}")
  it.carrier.drop(it.packed)


def read_pointer(
    transport: base.Transport, *, run_id: str, secret: bytes
) -> tuple[int, int] | None:
  """Returns the newest (epoch, version), None where there is none yet.

  Raises:
    WireError: the pointer is forged, torn, or of another run.
  """
  data = transport.get("p_cur")
  if data is None:
    return None
  pointer = wire.decode_message(data, secret)
  if pointer.get("run") != run_id:
    raise wire.WireError("run", f"pointer of run {pointer.get('run')!r}")
  return int(pointer["epoch"]), int(pointer["version"])


def read_version(
    transport: base.Transport,
    tag: tuple[int, int],
    *,
    carriers: Mapping[str, "carriers_lib.Carrier"],
    run_id: str,
    secret: bytes,
    expected: Specs,
    base_name: str = "",
) -> dict[str, np.ndarray] | None:
  """Returns the leaves of a version, None where it was collected meanwhile.

  Args:
    transport: of the calling thread.
    tag: (epoch, version), from the pointer.
    carriers: by name.
    run_id: the run that the version must be of.
    secret: key of the run's messages.
    expected: shape and dtype of every leaf that must be there.
    base_name: of the reader's params, where it adds adapters to some.

  Raises:
    WireError: torn, forged, adapters of another base, or not the expected
      leaves; it names which.
  """
  text = tag_text(*tag)
  data = transport.get(f"p/{text}/meta")
  if data is None:
    return None
  manifest = wire.decode_message(data, secret)
  if manifest.get("format") != _FORMAT:
    raise wire.WireError(
        "schema", f"params format {manifest.get('format')}, we read {_FORMAT}"
    )
  if (manifest["run"], manifest["epoch"], manifest["version"]) != (
      run_id,
      *tag,
  ):
    raise wire.WireError("run", f"p/{text} holds another version")
  if manifest.get("base", "") != base_name:
    raise wire.WireError(
        "base",
        f"adapters of the base {manifest.get('base', '')!r}, and config.init is"
        f" {base_name!r} here",
    )
  found = {
      name: (tuple(shape), np.dtype(dtype))
      for name, shape, dtype in manifest["leaves"]
  }
  if found != expected:
    wrong = sorted(
        name
        for name in {*found, *expected}
        if found.get(name) != expected.get(name)
    )
    raise wire.WireError("leaves", f"missing or of another shape: {wrong}")
  carrier = carriers.get(manifest["carrier"])
  if carrier is None:
    raise wire.WireError("carrier", f"unknown: {manifest['carrier']!r}")
  return carrier.read(transport, text, manifest["carried"], found)


def published(expected: Specs, dtype: str) -> Specs:
  """Returns what is published: floats in `dtype`, "" = as they are."""
  return {
      name: (shape, published_dtype(leaf_dtype, dtype))
      for name, (shape, leaf_dtype) in expected.items()
  }


def published_dtype(leaf_dtype: Any, dtype: str) -> np.dtype:
  """Returns the dtype in which a leaf is published."""
  is_float = jnp.issubdtype(leaf_dtype, jnp.floating)
  return np.dtype(dtype if dtype and is_float else leaf_dtype)


def cast(leaves: dict[str, np.ndarray], specs: Specs) -> dict[str, np.ndarray]:
  """Returns leaves in the dtypes of `specs`; those that fit are not copied."""
  return {
      name: leaf.astype(specs[name][1], copy=False)
      for name, leaf in leaves.items()
  }


def expected_leaves(
    params: types.PyTree,
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """Returns shape and dtype by path; params may be abstract."""
  return {
      jax.tree_util.keystr(path): (tuple(leaf.shape), np.dtype(leaf.dtype))
      for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
  }


def unflatten(
    leaves: dict[str, np.ndarray], like: types.PyTree
) -> types.PyTree:
  """Returns the tree of `like` with the leaves found by path."""
  paths, treedef = jax.tree_util.tree_flatten_with_path(like)
  return jax.tree_util.tree_unflatten(
      treedef, [leaves[jax.tree_util.keystr(path)] for path, _ in paths]
  )

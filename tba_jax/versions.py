# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One version of params in the store: written whole, or never seen.

Keys: `p/<epoch>.<version>/<chunk>` hold the bytes, `p/<epoch>.<version>/meta`
the manifest, `p_cur` the newest tag, written last: the commit point. A reader
takes a version only where its manifest is authenticated, every chunk has the
digest that the manifest says, and every leaf that the reader expects is there.
"""

import hashlib

import jax
import numpy as np

from tba_jax import types
from tba_jax.transport import base
from tba_jax.transport import wire

_CHUNK_BYTES = 1 << 20
_FORMAT = 1


def tag_text(epoch: int, version: int) -> str:
  """Returns the key part of a version: bytewise order is numeric order."""
  return f"{epoch:08d}.{version:010d}"


def flatten(params: types.PyTree) -> dict[str, np.ndarray]:
  """Returns the leaves as host arrays by path, in the order of the tree.

  Blocks until the device has computed them.
  """
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {
      jax.tree_util.keystr(path): np.asarray(jax.device_get(leaf))
      for path, leaf in leaves
  }


def write_version(
    transport: base.Transport,
    leaves: dict[str, np.ndarray],
    *,
    epoch: int,
    version: int,
    run_id: str,
    secret: bytes,
) -> int:
  """Writes one version's chunks, then its manifest, then the pointer.

  Returns:
    Bytes of params written.

  Raises:
    TransportError: the store was lost on the way; readers never see the rest.
  """
  tag = tag_text(epoch, version)
  data = memoryview(
      b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves.values())
  )
  digests = []
  for i in range(0, len(data), _CHUNK_BYTES):
    chunk = bytes(data[i : i + _CHUNK_BYTES])
    digests.append(_digest(chunk))
    transport.put(f"p/{tag}/{len(digests) - 1:06d}", chunk)
  manifest = {
      "format": _FORMAT,
      "run": run_id,
      "epoch": epoch,
      "version": version,
      "num_bytes": len(data),
      "digests": digests,
      "leaves": [
          [name, list(leaf.shape), leaf.dtype.name]
          for name, leaf in leaves.items()
      ],
  }
  transport.put(f"p/{tag}/meta", wire.encode_message(manifest, secret))
  pointer = {"run": run_id, "epoch": epoch, "version": version}
  transport.put("p_cur", wire.encode_message(pointer, secret))
  return len(data)


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
    run_id: str,
    secret: bytes,
    expected: dict[str, tuple[tuple[int, ...], np.dtype]],
) -> dict[str, np.ndarray] | None:
  """Returns the leaves of a version, None where it was collected meanwhile.

  Args:
    transport: of the calling thread.
    tag: (epoch, version), from the pointer.
    run_id: the run that the version must be of.
    secret: key of the run's messages.
    expected: shape and dtype of every leaf that must be there.

  Raises:
    WireError: torn, forged, or not the expected leaves; it names which.
  """
  prefix = f"p/{tag_text(*tag)}"
  data = transport.get(f"{prefix}/meta")
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
    raise wire.WireError("run", f"{prefix} holds another version")
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
  chunks = []
  for i, digest in enumerate(manifest["digests"]):
    chunk = transport.get(f"{prefix}/{i:06d}")
    if chunk is None:
      return None
    if _digest(chunk) != digest:
      raise wire.WireError("hash", f"{prefix}/{i:06d} is torn")
    chunks.append(chunk)
  return _split(b"".join(chunks), found)


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


def _digest(chunk: bytes) -> str:
  return hashlib.blake2b(chunk, digest_size=16).hexdigest()


def _split(
    data: bytes, leaves: dict[str, tuple[tuple[int, ...], np.dtype]]
) -> dict[str, np.ndarray]:
  out, start = {}, 0
  for name, (shape, dtype) in leaves.items():
    count = int(np.prod(shape, dtype=np.int64))
    out[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
    start += count * dtype.itemsize
  if start != len(data):
    raise wire.WireError("truncated", f"{len(data)} bytes, expected {start}")
  return out

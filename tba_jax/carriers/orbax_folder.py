# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder of arrays that Orbax writes, by several processes where there are.

Each process writes the shards that its devices hold; one of them then makes one
folder of all. Any part of an array can be read alone, by TensorStore, which is
what Orbax writes with.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
import math
import os
import threading
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from tba_jax import processes
from tba_jax.carriers import base
from tba_jax.carriers import boxes

# By leaf: place and digest of each shard.
Shards = dict[str, list[tuple[boxes.Box, str]]]

_MAX_THREADS = 4


def write(path: epath.Path, leaves: Mapping[str, Any]) -> Shards:
  """Writes the shards of this process; returns where they are, with digests.

  `ocp.Checkpointer` is not used: it counts its operations, in all processes
  alike, which those of another thread would disturb.

  Args:
    path: folder, which is there; local or `gs://`.
    leaves: by path, in the order of all; global `jax.Array` where there are
      several processes. Ones without elements are not written.

  Raises:
    OSError, ValueError, RuntimeError: of Orbax and TensorStore.
  """
  tree = {
      _key(i): leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
      for i, leaf in enumerate(leaves.values())
      if math.prod(leaf.shape)
  }
  threads = min(_MAX_THREADS, len(processes.available_cores()))
  with futures.ThreadPoolExecutor(threads, "shards-hash") as pool:
    digests = {
        name: [(box, pool.submit(_digest, data)) for box, data in _shards(leaf)]
        for name, leaf in leaves.items()
    }
    if tree:
      _handler().save(path, args=ocp.args.PyTreeSave(tree))
    return {
        name: [(box, future.result()) for box, future in found]
        for name, found in digests.items()
    }


def merge(path: epath.Path) -> None:
  """Makes one folder of what all processes have written into it."""
  _handler().finalize(path)


def open_array(path: epath.Path, i: int, context: ts.Context) -> ts.Future:
  """Opens the i-th array of a folder; the future has a `ts.TensorStore`."""
  text = f"{os.fspath(path)}/"
  # A path need not be a URL; that of an object store is one.
  base_spec = text if "://" in text else {"driver": "file", "path": text}
  kvstore = {"driver": "ocdbt", "base": base_spec, "path": f"{_key(i)}/"}
  return ts.open(
      {"driver": "zarr", "kvstore": kvstore}, open=True, context=context
  )


def within(deadline_s: float, call: Callable[[], Any]) -> Any:
  """Returns what a call gives; it is left alone where that takes too long.

  Storage that hangs would hang its caller, and who waits for that one.

  Raises:
    TimeoutError: it took more than `deadline_s`.
  """
  done: futures.Future = futures.Future()

  def run() -> None:
    try:
      done.set_result(call())
    except BaseException as error:  # Who waits for it raises it.
      done.set_exception(error)

  threading.Thread(target=run, name="storage", daemon=True).start()
  try:
    return done.result(deadline_s)
  except TimeoutError as error:
    if done.done():
      raise
    raise TimeoutError(f"not done within {deadline_s:.0f} s") from error


def _handler() -> ocp.PyTreeCheckpointHandler:
  # Compressing params costs more time than it saves bytes.
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _key(i: int) -> str:
  return f"{i:06d}"


def _shards(leaf: Any) -> list[tuple[boxes.Box, Any]]:
  """Returns place and data of shards; of equal ones, only the first."""
  if not math.prod(leaf.shape):
    return []
  if not isinstance(leaf, jax.Array):
    return [(boxes.of((), leaf.shape), leaf)]
  return [
      (boxes.of(shard.index, leaf.shape), shard.data)
      for shard in leaf.addressable_shards
      if shard.replica_id == 0
  ]


def _digest(data: Any) -> str:
  return base.digest(base.flat_bytes(data).data)

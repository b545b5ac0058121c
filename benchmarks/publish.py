# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a version of params takes from a trainer to a searcher, by carrier.

Leaves of 16 MB are published and pulled, in turn with one plain copy of the
same bytes in memory. Publishing is what the publisher's thread does (pack,
digest, send), pulling what the puller's does (fetch, check) and the move to the
device. Both run in this process, the store in its own, one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax.run import run_directory
from tba_jax.transport import byte_store
from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import kv_host
from tba_jax.transport.params import carrier as carrier_lib
from tba_jax.transport.params import manifest
from tba_jax.transport.params import publish
from tba_jax.transport.params import shared_files
from tba_jax.transport.params import version as version_lib

_SIZES_MB = (10, 100, 500, 2000)
_LEAF_BYTES = 16_000_000
# Above, the store is no carrier: see docs/hosts.md.
_STORE_MB = 100
# Device, published copy, copy that is compared, files, readers.
_COPIES = 6
_REPEATS = 3
_DEADLINE_S = 120.0


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns medians of three rounds for each carrier and size.

  Args:
    config: `publish.directory` and `store` are read.
    operands: sizes in MB, default 10 100 500 2000; those for which memory has
      no room are left out, and named.

  Returns:
    rows of carrier, mb, publish_s, pull_s, copy_s, and the speeds as shares of
    the copy's; what was left_out_mb.

  Raises:
    ValueError: an operand is not a number of 1 or more.
  """
  sizes = [int(text) for text in operands] or list(_SIZES_MB)
  if min(sizes) < 1:
    raise ValueError(f"operands {list(operands)}: must be sizes in MB")
  rows, left_out = [], []
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(
        stack.enter_context(tempfile.TemporaryDirectory(prefix="tba_jax_"))
    )
    run_info = _start_store(config, folder, stack)
    path = shared_files.files_directory(
        config.publish.directory, run_info.workdir, run_info.run_id
    )
    stack.callback(shared_files.remove_directory, path)
    for mb in sizes:
      if _COPIES * mb * 1e6 > _room(path.parent):
        left_out.append(mb)
        continue
      readers = carrier_lib.make_read_carriers(config, run_info)
      for name, carrier in carrier_lib.make_read_carriers(
          config, run_info
      ).items():
        if name != "store" or mb <= _STORE_MB:
          rows.append(_measure(run_info, carrier, readers[name], mb))
          # A row may take a minute; the result is the last line alone.
          print(rows[-1], file=sys.stderr, flush=True)
        carrier.close()
        readers[name].close()
  return {"rows": rows, "left_out_mb": left_out}


def _measure(
    run_info: run_directory.RunInfo,
    carrier: carrier_lib.Carrier,
    reader: carrier_lib.Carrier,
    mb: int,
) -> dict[str, Any]:
  """Publishes, pulls and copies, three times in turn."""
  transport = _connect(run_info)
  params = _make_params(mb)
  expected = version_lib.specs_of(params)
  times: dict[str, list[float]] = {"publish": [], "pull": [], "copy": []}
  host = {name: np.asarray(leaf) for name, leaf in params.items()}
  for version in range(_REPEATS):
    seconds, _ = _time(lambda: [leaf.copy() for leaf in host.values()])
    times["copy"].append(seconds)
    seconds, packed = _time(
        lambda v=version: _publish(transport, carrier, params, v, run_info)
    )
    times["publish"].append(seconds)
    with _serving(run_info, packed):
      seconds, pulled = _time(
          lambda v=version: _pull(transport, reader, expected, v, run_info)
      )
    times["pull"].append(seconds)
    if any(np.any(pulled[name][-1:] != host[name][-1:]) for name in host):
      raise RuntimeError(f"{carrier.name}: something else came than was sent")
    del pulled
    manifest.drop_version(transport, packed)
  transport.close()
  median = {name: statistics.median(values) for name, values in times.items()}
  return {
      "carrier": carrier.name,
      "mb": mb,
      **{f"{name}_s": value for name, value in median.items()},
      "publish_share": median["copy"] / median["publish"],
      "pull_share": median["copy"] / median["pull"],
  }


def _publish(
    transport: byte_store.Transport,
    carrier: carrier_lib.Carrier,
    params: dict[str, jax.Array],
    version: int,
    run_info: run_directory.RunInfo,
) -> carrier_lib.PackedVersion:
  packed = carrier.pack(version_lib.Version(1, version), params)
  manifest.send_version(transport, packed, run_info)
  return packed


def _pull(
    transport: byte_store.Transport,
    carrier: carrier_lib.Carrier,
    expected: version_lib.Specs,
    version: int,
    run_info: run_directory.RunInfo,
) -> dict[str, jax.Array]:
  carriers = {carrier.name: carrier}
  leaves = manifest.read_version(
      transport,
      version_lib.Version(1, version),
      run_info,
      carriers=carriers,
      expected=expected,
  )
  return jax.block_until_ready(jax.device_put(leaves))


@contextlib.contextmanager
def _serving(
    run_info: run_directory.RunInfo, packed: carrier_lib.PackedVersion
) -> Iterator[None]:
  """Answers readers as the publisher's thread does between versions."""
  stop, transport = threading.Event(), _connect(run_info)

  def serve() -> None:
    while not stop.wait(publish.SERVE_S):
      packed.carrier.serve(transport, packed)

  thread = threading.Thread(target=serve)
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()
    transport.close()


def _connect(run_info: run_directory.RunInfo) -> kv_client.KvTransport:
  return kv_client.KvTransport(
      run_info.locator, deadline_s=_DEADLINE_S, run_id=run_info.run_id
  )


def _start_store(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    stack: contextlib.ExitStack,
) -> run_directory.RunInfo:
  """Starts a store that ends with the stack; returns a run that has it."""
  host = kv_host.KvHost(
      folder / "spool",
      f"benchmark-{os.getpid()}",
      probe_timeout_s=kv_host.probe_timeout_s(config.store.deadline_s),
      on_event=lambda *event: print(*event, file=sys.stderr),
  )
  stop = threading.Event()
  thread = threading.Thread(target=host.run, args=(stop,))
  thread.start()
  stack.callback(thread.join)
  stack.callback(stop.set)
  return run_directory.RunInfo(
      workdir=folder,
      run_id=f"benchmark-{os.getpid()}",
      spool=folder / "spool",
      secret=os.urandom(32),
  )


def _make_params(mb: int) -> dict[str, jax.Array]:
  """Returns random leaves of together so many megabytes."""
  total = mb * 1_000_000 // 4
  size = min(_LEAF_BYTES // 4, total)
  rng = np.random.default_rng(0)
  leaf = rng.random(size, np.float32)
  return jax.device_put(
      {f"leaf{i}": leaf + i for i in range(max(total // size, 1))}
  )


def _room(path: pathlib.Path) -> float:
  """Returns the free bytes of memory, and of the place of the files."""
  while not path.exists():
    path = path.parent
  free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return min(free, shutil.disk_usage(path).free)


def _time(function: Callable[[], Any]) -> tuple[float, Any]:
  """Returns the seconds that a call took, and what it gave."""
  start = time.perf_counter()
  result = function()
  return time.perf_counter() - start, result

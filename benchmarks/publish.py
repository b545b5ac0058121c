# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Time to move a params version from trainer to searcher, by carrier.

This process publishes leaves of 16 MB and another pulls them; a memory copy and
a plain loopback socket move the same bytes in alternation. Publishing is the
work of the publisher's thread (pack, seal, send); pulling is the work of the
puller's thread (fetch, check) and the move to the device. The store runs in a
separate process.

The operand "links" instead simulates the age of large models' params, and
checks the simulation on throttled links (`publish_links.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import publish_links
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
# Above this size the store is not used as carrier: see docs/guides/scaling.md.
_STORE_MB = 100
# Copies of a version: device, carrier, searcher, and the comparison.
_COPIES = 4
_REPEATS = 3
_DEADLINE_S = 120.0
# Searchers, bytes/s per link, and MB per version, on throttled links.
_LINKS = ((1, 40e6, 200), (4, 80e6, 100))
# 100 Gbit/s links, 8 GB/s from the device and through AES-GCM, and a step of
# half a minute.
_ASSUMED = {
    "link_bytes_per_s": 12.5e9,
    "pack_bytes_per_s": 8e9,
    "step_s": 30.0,
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns medians of three rounds for each carrier and size.

  Args:
    config: `publish.directory`, `publish.carrier` and `store` are read; "auto"
      measures all carriers.
    operands: sizes in MB (default 10 100 500 2000), skipped if they exceed the
      free memory; or "links".

  Returns:
    rows of carrier, mb, publish_s, pull_s, copy_s, socket_s, and the speeds
    relative to copy and socket; left_out_mb, the skipped sizes. For "links":
    simulated, assumed and measured.

  Raises:
    ValueError: an operand is not a number of 1 or more.
  """
  if list(operands) == ["links"]:
    return {
        "assumed": _ASSUMED,
        "simulated": publish_links.table(**_ASSUMED),
        "measured": [publish_links.check(*link) for link in _LINKS],
    }
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
      for name, carrier in carrier_lib.make_read_carriers(
          config, run_info
      ).items():
        is_asked = config.publish.carrier in ("auto", name)
        if is_asked and (name != "store" or mb <= _STORE_MB):
          with contextlib.closing(_Searcher(config, run_info, mb)) as searcher:
            rows.append(_measure(run_info, carrier, searcher, mb))
          # Show progress: a row may take a minute.
          print(rows[-1], file=sys.stderr, flush=True)
        carrier.close()
  return {"rows": rows, "left_out_mb": left_out}


def _measure(
    run_info: run_directory.RunInfo,
    carrier: carrier_lib.Carrier,
    searcher: "_Searcher",
    mb: int,
) -> dict[str, Any]:
  """Publishes, pulls, copies and sends a version, three times in turn."""
  transport = _connect(run_info)
  params = _make_params(mb)
  times: dict[str, list[float]] = {
      "publish": [],
      "pull": [],
      "copy": [],
      "socket": [],
  }
  host = {name: np.asarray(leaf) for name, leaf in params.items()}
  for version in range(_REPEATS):
    seconds, _ = _time(lambda: [leaf.copy() for leaf in host.values()])
    times["copy"].append(seconds)
    times["socket"].append(_send_plainly(searcher, host))
    seconds, packed = _time(
        lambda v=version: _publish(transport, carrier, params, v, run_info)
    )
    times["publish"].append(seconds)
    with _serving(run_info, packed):
      seconds, ends = searcher.ask("pull", version)
    times["pull"].append(seconds)
    if ends != {name: float(leaf[-1]) for name, leaf in host.items()}:
      raise RuntimeError(f"{carrier.name}: received other bytes than sent")
    manifest.drop_version(transport, packed)
  transport.close()
  median = {name: statistics.median(values) for name, values in times.items()}
  return {
      "carrier": carrier.name,
      "mb": mb,
      **{f"{name}_s": value for name, value in median.items()},
      "publish_of_copy": median["copy"] / median["publish"],
      "pull_of_copy": median["copy"] / median["pull"],
      "pull_of_socket": median["socket"] / median["pull"],
  }


def _send_plainly(searcher: "_Searcher", host: dict[str, np.ndarray]) -> float:
  """Returns the seconds until the leaves are in the searcher's memory."""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    searcher.send("socket", listener.getsockname()[1])
    link, _ = listener.accept()
    with link:
      for leaf in host.values():
        link.sendall(leaf.data.cast("B"))
      return searcher.hear()


class _Searcher:
  """The process that pulls versions."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run_info: run_directory.RunInfo,
      mb: int,
  ):
    self._process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": jax.default_backend()},
    )
    settings = {
        "publish": config.publish.to_dict(),
        "store": config.store.to_dict(),
    }
    run = {
        "workdir": str(run_info.workdir),
        "run_id": run_info.run_id,
        "spool": str(run_info.spool),
        "secret": run_info.secret.hex(),
    }
    self.ask(settings, run, mb)

  def ask(self, *request: Any) -> Any:
    """Returns the answer to a request."""
    self.send(*request)
    return self.hear()

  def send(self, *request: Any) -> None:
    print(json.dumps(request), file=self._process.stdin, flush=True)

  def hear(self) -> Any:
    return json.loads(self._process.stdout.readline())

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(60)


def _search() -> None:
  """Pulls requested versions; the main function of the searcher process."""
  answer = lambda value: print(json.dumps(value), flush=True)
  settings, run, mb = json.loads(sys.stdin.readline())
  run_info = run_directory.RunInfo(
      workdir=pathlib.Path(run["workdir"]),
      run_id=run["run_id"],
      spool=pathlib.Path(run["spool"]),
      secret=bytes.fromhex(run["secret"]),
  )
  carriers = carrier_lib.make_read_carriers(
      ml_collections.ConfigDict(settings), run_info
  )
  expected = version_lib.specs_of(_abstract_params(mb))
  transport = _connect(run_info)
  jax.block_until_ready(jax.device_put(np.zeros(1)))
  answer("ready")
  for line in sys.stdin:
    what, number = json.loads(line)
    if what == "socket":
      answer(_time(lambda n=number: _receive_plainly(n, expected))[0])
      continue
    seconds, leaves = _time(
        lambda v=number: _pull(transport, carriers, expected, v, run_info)
    )
    answer((seconds, {name: float(leaf[-1]) for name, leaf in leaves.items()}))
    del leaves
  for carrier in carriers.values():
    carrier.close()
  transport.close()


def _receive_plainly(
    port: int, expected: version_lib.Specs
) -> list[np.ndarray]:
  leaves = [np.empty(shape, dtype) for shape, dtype in expected.values()]
  with socket.create_connection(("127.0.0.1", port)) as link:
    for leaf in leaves:
      data = memoryview(leaf).cast("B")
      while data:
        data = data[link.recv_into(data) :]
  return leaves


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
    carriers: Mapping[str, carrier_lib.Carrier],
    expected: version_lib.Specs,
    version: int,
    run_info: run_directory.RunInfo,
) -> dict[str, jax.Array]:
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
  """Serves readers like the publisher's thread between versions."""
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
  """Starts a store that ends with the stack; returns its run."""
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


def _abstract_params(mb: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shapes of leaves with a total of `mb` megabytes."""
  total = mb * 1_000_000 // 4
  size = min(_LEAF_BYTES // 4, total)
  return {
      f"leaf{i}": jax.ShapeDtypeStruct((size,), np.float32)
      for i in range(max(total // size, 1))
  }


def _make_params(mb: int) -> dict[str, jax.Array]:
  """Returns random leaves of `_abstract_params`."""
  rng = np.random.default_rng(0)
  return {
      name: jax.device_put(rng.random(leaf.shape, np.float32))
      for name, leaf in _abstract_params(mb).items()
  }


def _room(path: pathlib.Path) -> float:
  """Returns the free bytes in memory and in the files' file system."""
  while not path.exists():
    path = path.parent
  meminfo = pathlib.Path("/proc/meminfo").read_text()
  available = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", meminfo)[1])
  return min(available, shutil.disk_usage(path).free)


def _time(function: Callable[[], Any]) -> tuple[float, Any]:
  """Returns the seconds that a call took, and its result."""
  start = time.perf_counter()
  result = function()
  return time.perf_counter() - start, result


if __name__ == "__main__":
  _search()

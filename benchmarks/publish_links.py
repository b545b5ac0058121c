# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Age of searchers' params, by model size, link speed and number of searchers.

`simulate` follows versions from a publishing trainer to searchers, which pull
the newest one whenever a pull ends, over evenly shared links. `check` sends
real versions over links that `tc` throttles between network namespaces (needs
root), and compares the time of a pull.
"""

from collections.abc import Iterator, Sequence
import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from tba_jax.transport.params import network
from tba_jax.transport.params import version as version_lib

# Model -> bytes in bfloat16.
MODELS = {"7B": 15.2e9, "30B": 61e9, "70B": 141e9}
NUM_SEARCHERS = (1, 4, 16)
_KEYS = {"run_id": "links", "secret": b"s" * 32}
_TAG = version_lib.Version(1, 0).tag
# Number of simulated versions; the first half fills the pipeline.
_NUM_VERSIONS = 200
# Payload share of a link: 1,448 of the 1,514 bytes per packet are params.
_PAYLOAD = 1448 / 1514
_PREFIX = "10.199.8"


def simulate(
    num_bytes: float,
    num_searchers: int,
    *,
    trainer_bytes_per_s: float,
    searcher_bytes_per_s: float,
    pack_bytes_per_s: float,
    step_s: float,
    num_processes: int = 1,
) -> dict[str, float]:
  """Returns ages and uses of versions that are published after every step.

  Args:
    num_bytes: size of a version.
    num_searchers: number of searchers, each on a separate host.
    trainer_bytes_per_s: link rate of each trainer host.
    searcher_bytes_per_s: link rate of each searcher.
    pack_bytes_per_s: rate of the copy from the device and of encryption in each
      trainer process.
    step_s: time of a train step.
    num_processes: number of trainer processes, each on a separate host.

  Returns:
    pull_s: time of a pull. age_s: mean time from the end of a step to the use
      of its params by a searcher. age_steps: the same in steps, at the time of
      the switch. used: share of the versions that a searcher uses.
  """
  pack_s = num_bytes / (pack_bytes_per_s * num_processes)
  # Time at which each version becomes readable, unless it is skipped.
  readable: list[tuple[float, int]] = []
  free_s = 0.0
  for version in range(_NUM_VERSIONS):
    made_s = version * step_s
    # The newest version waits while another is packed; older ones are skipped.
    if free_s < made_s + step_s:
      free_s = max(free_s, made_s) + pack_s
      readable.append((free_s, version))
  end_s = readable[-1][0]
  remaining = [0.0] * num_searchers
  versions = [-1] * num_searchers
  begun = [0.0] * num_searchers
  now, pulls, ages = 0.0, [], []
  while now < end_s:
    newest = max((v for at, v in readable if at <= now), default=-1)
    for i in range(num_searchers):
      if not remaining[i] and newest > versions[i]:
        remaining[i], versions[i], begun[i] = num_bytes, newest, now
    busy = [i for i in range(num_searchers) if remaining[i]]
    rate = searcher_bytes_per_s
    if busy:
      rate = min(rate, trainer_bytes_per_s * num_processes / len(busy))
    events = [at for at, _ in readable if at > now]
    events += [now + remaining[i] / rate for i in busy]
    then = min(events, default=end_s)
    for i in busy:
      remaining[i] = max(remaining[i] - rate * (then - now), 0.0)
      if remaining[i] < 1.0:
        remaining[i] = 0.0
        if begun[i] > end_s / 2:
          pulls.append(then - begun[i])
          ages.append(then - versions[i] * step_s)
    now = then
  seconds = end_s / 2
  mean = lambda values: float(np.mean(values)) if values else float("nan")
  return {
      "pull_s": mean(pulls),
      "age_s": mean(ages),
      "age_steps": mean(ages) / step_s,
      "used": min(len(pulls) / num_searchers / (seconds / step_s), 1.0),
  }


def table(
    *, link_bytes_per_s: float, pack_bytes_per_s: float, step_s: float
) -> list[dict[str, Any]]:
  """Returns a row of `simulate` for each model and number of searchers."""
  return [
      {
          "model": model,
          "searchers": count,
          **simulate(
              num_bytes,
              count,
              trainer_bytes_per_s=link_bytes_per_s,
              searcher_bytes_per_s=link_bytes_per_s,
              pack_bytes_per_s=pack_bytes_per_s,
              step_s=step_s,
          ),
      }
      for model, num_bytes in MODELS.items()
      for count in NUM_SEARCHERS
  ]


def check(
    num_searchers: int, link_bytes_per_s: float, mb: int
) -> dict[str, float]:
  """Returns the real and the simulated seconds of a pull by all searchers.

  Args:
    num_searchers: searchers that pull, each in a network namespace.
    link_bytes_per_s: rate of every link.
    mb: size of the version.

  Raises:
    OSError, CalledProcessError: namespaces cannot be created here.
  """
  with _namespaces(
      num_searchers, link_bytes_per_s
  ) as names, contextlib.ExitStack() as stack:
    server = _start(stack, names[0], ["serve", f"{_PREFIX}.1:0", str(mb)])
    carried = server.stdout.readline()
    readers = [_start(stack, name, ["read", str(mb)]) for name in names[1:]]
    for reader in readers:
      if reader.stdout.readline() != "ready\n":
        raise RuntimeError("a reader did not start")
    for reader in readers:
      reader.stdin.write(carried)
      reader.stdin.flush()
    seconds = [float(reader.stdout.readline()) for reader in readers]
  simulated = simulate(
      mb * 1e6,
      num_searchers,
      trainer_bytes_per_s=link_bytes_per_s * _PAYLOAD,
      searcher_bytes_per_s=link_bytes_per_s * _PAYLOAD,
      pack_bytes_per_s=1e12,
      step_s=1e3,
  )
  return {
      "searchers": num_searchers,
      "link_mb_per_s": link_bytes_per_s / 1e6,
      "mb": mb,
      "pull_s": max(seconds),
      "simulated_s": simulated["pull_s"],
  }


@contextlib.contextmanager
def _namespaces(
    num_searchers: int, link_bytes_per_s: float
) -> Iterator[list[str]]:
  """Creates namespaces on a bridge; the first is the trainer's."""
  prefix = f"tbl{os.getpid()}"
  hub, names = f"{prefix}-hub", []

  def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)

  namespaces = []
  try:
    ip("netns", "add", hub)
    namespaces.append(hub)
    ip("-n", hub, "link", "add", "br0", "type", "bridge")
    ip("-n", hub, "link", "set", "br0", "up")
    for i in range(num_searchers + 1):
      name = f"{prefix}-{i}"
      ip("netns", "add", name)
      namespaces.append(name)
      names.append(name)
      ip("-n", hub, "link", "add", f"to{i}", "type", "veth",
         "peer", "name", "eth0", "netns", name)  # fmt: skip
      ip("-n", hub, "link", "set", f"to{i}", "master", "br0")
      ip("-n", hub, "link", "set", f"to{i}", "up")
      ip("-n", name, "addr", "add", f"{_PREFIX}.{i + 1}/24", "dev", "eth0")
      ip("-n", name, "link", "set", "eth0", "up")
      ip("-n", name, "link", "set", "lo", "up")
      # Both directions; without joined packets, which the filter would drop.
      for space, link in ((name, "eth0"), (hub, f"to{i}")):
        subprocess.run(
            ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", link,
             "root", "tbf", "rate", f"{int(link_bytes_per_s * 8)}bit",
             "burst", "256kb", "latency", "50ms"],
            check=True, capture_output=True, timeout=20,
        )  # fmt: skip
    yield names
  finally:
    for name in namespaces:
      ip("netns", "del", name)


def _start(
    stack: contextlib.ExitStack, name: str, args: Sequence[str]
) -> subprocess.Popen[str]:
  process = subprocess.Popen(
      ["ip", "netns", "exec", name, sys.executable, "-m", __name__, *args],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )
  stack.callback(process.wait)
  stack.callback(process.kill)
  return process


def _leaves(mb: int) -> dict[str, np.ndarray]:
  return {f"leaf{i}": np.full(250_000, i, np.float32) for i in range(mb)}


def main(args: Sequence[str]) -> None:
  """Serves or reads a version; the main function of `check`'s children."""
  if args[0] == "serve":
    server = network.ParamsServer(args[1], stall_s=60.0, **_KEYS)
    source = server.add(_TAG, _leaves(int(args[2])))
    print(json.dumps({"sources": [source]}), flush=True)
    time.sleep(3600)
    return
  leaves = _leaves(int(args[1]))
  specs = version_lib.specs_of(leaves)
  reader = network.Network(lambda: "", stall_s=60.0, **_KEYS)
  print("ready", flush=True)
  carried = json.loads(sys.stdin.readline())
  began = time.perf_counter()
  # The store is only asked about failures.
  received = reader.read(None, _TAG, carried, specs)  # type: ignore[arg-type]
  seconds = time.perf_counter() - began
  for name, leaf in leaves.items():
    np.testing.assert_array_equal(received[name], leaf)
  print(seconds, flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])

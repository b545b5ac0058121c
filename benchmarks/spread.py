# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Time to send a batch from process 0 to the devices of all processes.

Processes with one CPU device each run on this machine and communicate by gloo
over the loopback interface. As before a train step, but without other work,
they distribute batches of equal-length completions (random floats).
"""

from collections.abc import Sequence
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax.mesh import sharding
from tba_jax.system import processes

_COMPLETIONS_PER_PROMPT = 16
_REPEATS = 5
_DEADLINE_S = 300.0


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the median time of five batches.

  Args:
    config: not read.
    operands: processes, completions of a batch (a multiple of 16 for each
      process) and tokens of each; default 2 512 1024.

  Returns:
    processes, completions, tokens, mb of the batch, spread_s, mb_per_s.

  Raises:
    ValueError: the operands are not three such numbers.
    RuntimeError: a process failed; the message has its output.
  """
  del config
  sizes = [int(text) for text in operands] or [2, 512, 1024]
  if len(sizes) != 3 or sizes[0] < 1 or sizes[2] < 1:
    raise ValueError(f"operands {sizes}: must be processes completions tokens")
  num_processes, completions, tokens = sizes
  if completions < 1 or completions % (_COMPLETIONS_PER_PROMPT * num_processes):
    raise ValueError(
        f"operands {sizes}: must be a multiple of"
        f" {_COMPLETIONS_PER_PROMPT * num_processes} completions"
    )
  address = f"127.0.0.1:{processes.free_port()}"
  children = [
      subprocess.Popen(
          [
              *(sys.executable, "-m", "benchmarks.spread"),
              *(str(i), address, *map(str, sizes)),
          ],
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
          env={**os.environ, "JAX_PLATFORMS": "cpu"},
      )
      for i in range(num_processes)
  ]
  try:
    outputs = [child.communicate(timeout=_DEADLINE_S) for child in children]
  finally:
    for child in children:
      child.kill()
  for child, (_, err) in zip(children, outputs, strict=True):
    if child.returncode != 0:
      raise RuntimeError(f"a process failed: {err[-2000:]}")
  results_of = json.loads(outputs[0][0].splitlines()[-1])  # Gloo prints too.
  return {
      "processes": num_processes,
      "completions": completions,
      "tokens": tokens,
      **results_of,
      "mb_per_s": results_of["mb"] / results_of["spread_s"],
  }


def _make_batch(completions: int, tokens: int) -> dict[str, np.ndarray]:
  """Returns arrays with the shapes and dtypes of a batch, without prompts."""
  K = _COMPLETIONS_PER_PROMPT
  rng = np.random.default_rng(0)
  shape = (completions // K, K, tokens)
  floats = ("completion_mask", "behavior_logprobs", "ref_logprobs")
  return {
      "completion_tokens": rng.integers(0, 50_000, shape, dtype=np.int32),
      **{name: rng.normal(size=shape).astype(np.float32) for name in floats},
      "rewards": rng.normal(size=shape[:2]).astype(np.float32),
      "staleness_steps": np.ones(shape[:2], np.float32),
  }


def _measure(
    process: int,
    address: str,
    num_processes: int,
    completions: int,
    tokens: int,
) -> None:
  """Runs one of the processes; process 0 prints its measurements."""
  jax.config.update("jax_num_cpu_devices", 1)
  if num_processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, num_processes, process, coordinator_bind_address=address
    )
  ones = dict.fromkeys(sharding.MESH_AXES, 1)
  mesh = sharding.make_mesh({**ones, "data": num_processes})
  spread = sharding.make_spread(mesh)
  whole = _make_batch(completions, tokens)
  batch = whole if process == 0 else jax.eval_shape(lambda: whole)
  times = []
  for _ in range(1 + _REPEATS):  # The first repeat compiles.
    begun = time.perf_counter()
    spread_batch = jax.block_until_ready(spread(batch))
    times.append(time.perf_counter() - begun)
  for name, array in spread_batch.items():
    (shard,) = array.addressable_shards
    if np.any(np.asarray(shard.data) != whole[name][shard.index]):
      raise RuntimeError(f"{name}: received other bytes than sent")
  if process == 0:
    mb = sum(array.nbytes for array in whole.values()) / 1e6
    spread_s = statistics.median(times[1:])
    print(json.dumps({"mb": mb, "spread_s": spread_s}), flush=True)
  if num_processes > 1:
    jax.distributed.shutdown()


if __name__ == "__main__":
  _measure(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

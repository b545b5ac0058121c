# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""End-to-end speed of the queue, and cost of the drain to a train step.

A searcher process sends blocks of one group of 64 completions of 4 KB (512
tokens with log-probs) through outbox, store, drain and journal. For comparison,
a plain loopback socket between the same processes carries the same bytes.

A jitted train step then runs on the trainer's cores, alternately with the drain
off and with the drain on, fed at a quarter of the measured speed. Cores are
assigned as in a run on this machine.
"""

from collections.abc import Sequence
import dataclasses
import statistics
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import peer_model
from benchmarks import store_queue
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.models.net import transformer
from tba_jax.system import processes

# Blocks per round, rounds, pairs of timed blocks of steps, steps per block.
_SETTINGS = (400, 5, 25, 50)
_FED_SHARE = 0.25
# B, K, P, T of the train step, and the vocabulary.
_SHAPE = (4, 8, 16, 16)
_VOCAB = 64


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns completions per second end to end, and the drain's cost to a step.

  Args:
    config: `search.credits`, `search.lease_s`, `store.*`, `replay`'s segments
      and the optimizer, loss and cores of the step are read.
    operands: any prefix of: blocks per round, rounds, pairs of timed blocks of
      steps, steps per block.

  Returns:
    completions_per_s and raw_completions_per_s, medians over the rounds, with
    mb_per_s of both and their ratio; step_p99_ms and step_p50_ms with the drain
    "on" and "off"; `drain_p99_ms`, their difference, and its median over pairs,
    which is less sensitive to other load; `drain_busy_share`, the busy share of
    the drain's thread during the steps; and the groups delivered meanwhile.

  Raises:
    ValueError: an operand is not a number of 1 or more.
    RuntimeError: a process of the benchmark ended or delivered nothing.
  """
  settings = [*map(int, operands), *_SETTINGS[len(operands) :]]
  if len(settings) != len(_SETTINGS) or min(settings) < 1:
    raise ValueError(f"operands {list(operands)}: must be up to 4 numbers >= 1")
  num_blocks, num_rounds, num_pairs, num_steps = settings
  cores = processes.available_cores()
  try:
    with store_queue.Queue(config) as queue:
      speed = _measure_speed(queue, num_blocks, num_rounds)
      fed = _FED_SHARE * speed["completions_per_s"]
      cost = _measure_cost(config, queue, fed, num_pairs, num_steps)
  finally:
    processes.pin(cores)
  return {**speed, **cost}


def _measure_speed(
    queue: store_queue.Queue, num_blocks: int, num_rounds: int
) -> dict[str, Any]:
  """Alternates between the queue and the plain socket."""
  ours, raw = [], []
  num_completions = num_blocks * store_queue.COMPLETIONS
  for _ in range(num_rounds):
    raw.append(
        num_completions / queue.time_raw(num_blocks * store_queue.BLOCK_BYTES)
    )
    with queue.draining() as drain:
      queue.feed(-1)
      # Discard the first blocks, until the ring is full.
      drain.receive(max(4, num_blocks // 10))
      start = time.perf_counter()
      drain.receive(num_blocks)
      ours.append(num_completions / (time.perf_counter() - start))
  megabytes = store_queue.BLOCK_BYTES / store_queue.COMPLETIONS / 1e6
  speed, raw_speed = statistics.median(ours), statistics.median(raw)
  return {
      "completions_per_s": speed,
      "mb_per_s": speed * megabytes,
      "raw_completions_per_s": raw_speed,
      "raw_mb_per_s": raw_speed * megabytes,
      "share_of_raw": speed / raw_speed,
      "rounds": ours,
      "raw_rounds": raw,
  }


def _measure_cost(
    config: ml_collections.ConfigDict,
    queue: store_queue.Queue,
    fed: float,
    num_pairs: int,
    num_steps: int,
) -> dict[str, Any]:
  """Alternates between steps without and with the drain."""
  step = _Step(config)
  step.time(10)
  off, on, received, on_s, busy_s = [], [], 0, 0.0, 0.0
  for _ in range(num_pairs):
    off.append(step.time(num_steps))
    with queue.draining() as drain:
      queue.feed(fed / store_queue.COMPLETIONS)
      drain.receive(2)
      start, busy_before_s = time.perf_counter(), drain.poll_stats()["busy_s"]
      on.append(step.time(num_steps))
      on_s += time.perf_counter() - start
      busy_s += drain.poll_stats()["busy_s"] - busy_before_s
      received += drain.take()
  p99 = {"off": _percentile(off, 99), "on": _percentile(on, 99)}
  pairs_ms = [
      _percentile([x], 99) - _percentile([y], 99)
      for x, y in zip(on, off, strict=True)
  ]
  return {
      "steps": num_pairs * num_steps,
      "step_p50_ms": {"off": _percentile(off, 50), "on": _percentile(on, 50)},
      "step_p99_ms": p99,
      "drain_p99_ms": p99["on"] - p99["off"],
      "drain_p99_ms_of_median_pair": statistics.median(pairs_ms),
      "drain_busy_share": busy_s / on_s,
      "fed_completions_per_s": received * store_queue.COMPLETIONS / on_s,
  }


def _percentile(blocks_s: Sequence[Sequence[float]], q: float) -> float:
  """Returns a percentile of the seconds of all blocks, in milliseconds."""
  return float(np.percentile(np.concatenate(blocks_s), q)) * 1e3


class _Step:
  """A jitted train step of a small Llama, compiled when made."""

  def __init__(self, config: ml_collections.ConfigDict):
    config = config.copy_and_resolve_references()
    config.train.micro_batch_prompts = _SHAPE[0]
    config.mesh.update(data=1, fsdp=1, sequence=1, tensor=1)
    mesh = sharding.make_mesh(config.mesh)
    shape = dataclasses.replace(
        peer_model.SHAPE,
        vocab_size=_VOCAB,
        num_layers=2,
        width=64,
        num_heads=4,
        head_dim=16,
        mlp_width=128,
        max_positions=64,
    )
    model = transformer.make_model(shape)
    params = jax.jit(model.init)(jax.random.PRNGKey(0))
    self._state = train_step.init_state(config, model, params, mesh)
    self._step = train_step.make_train_step(config, model, mesh)
    batch = peer_model.make_batch(_SHAPE, _VOCAB)
    self._batch = sharding.shard_batch(batch, mesh)

  def time(self, num_steps: int) -> list[float]:
    """Returns the seconds of each of `num_steps` steps."""
    seconds = []
    for _ in range(num_steps):
      start = time.perf_counter()
      self._state, metrics = self._step(self._state, self._batch)
      jax.device_get(metrics)
      seconds.append(time.perf_counter() - start)
    return seconds

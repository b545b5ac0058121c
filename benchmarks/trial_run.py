# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Short runs for benchmarks, without periodic work such as checkpoints."""

from collections.abc import Iterator
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time

import ml_collections

from tba_jax.programs import inline
from tba_jax.programs import train
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tba_jax.tools import sweep

# Number of untimed first steps, which compile or fill the pipeline.
SKIPPED_STEPS = 3


def make_config(
    config: ml_collections.ConfigDict, num_steps: int
) -> ml_collections.ConfigDict:
  """Returns a copy that only trains, from random params.

  Args:
    config: config of the run; its evaluation, checkpoints and guards are turned
      off.
    num_steps: optimizer steps.
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.init = "scratch"
    # Random params earn no rewards.
    config.replay.skip_equal_rewards = False
    config.train.num_steps = num_steps
    config.evaluate.every_steps = 0
    config.evaluate.final_prompts = config.evaluate.batch_prompts
    config.checkpoint.every_steps = num_steps
    config.guards.action = "off"
  return config


def make_variant(
    config: ml_collections.ConfigDict, num_steps: int, *, lockstep: bool
) -> ml_collections.ConfigDict:
  """Returns `make_config` in lockstep, or with a lead of a step or more."""
  config = make_config(config, num_steps)
  with config.unlocked():
    config.search.lockstep = lockstep
    if lockstep:
      config.publish.every_steps = 1
      config.search.wait_for_fresh = True
    config.search.lead_steps = (
        0 if lockstep else max(1, config.search.lead_steps)
    )
  return config


@contextlib.contextmanager
def run(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Runs a config and yields its run directory, which is then deleted.

  Raises:
    RuntimeError: the run failed.
  """
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as workdir:
    # Standard output is reserved for the benchmark's line.
    with contextlib.redirect_stdout(sys.stderr):
      status = train.run(config, workdir, [])
    if status:
      raise RuntimeError(f"a run of the benchmark ended with status {status}")
    yield workdir


def time_roles(
    config: ml_collections.ConfigDict, num_steps: int, *, lockstep: bool
) -> tuple[float, float]:
  """Returns the seconds of a step of a run, and its mean staleness in steps.

  Args:
    config: argument of `make_variant`.
    num_steps: timed steps, after `SKIPPED_STEPS`.
    lockstep: whether roles take turns.

  Raises:
    RuntimeError: the run failed.
  """
  config = make_variant(config, SKIPPED_STEPS + num_steps, lockstep=lockstep)
  with run(config) as workdir:
    records = metrics.last_per_step(
        jsonl.read_jsonl(pathlib.Path(workdir) / "metrics.jsonl")
    )
  first, *timed = records[SKIPPED_STEPS - 1 :]
  return (
      (timed[-1]["time"] - first["time"]) / num_steps,
      statistics.mean(r["replay/staleness_steps"] for r in timed),
  )


def time_loop(config: ml_collections.ConfigDict, num_steps: int) -> float:
  """Like `time_roles`, for the same work in one process at staleness 0."""
  config = sweep.set_exact_lag(
      make_config(config, SKIPPED_STEPS + num_steps), 0
  )
  maker = inline.LoopMaker(config)
  ends = []
  try:
    maker.make(config).train(lambda *_: ends.append(time.perf_counter()))
  finally:
    maker.close()
  return (ends[-1] - ends[SKIPPED_STEPS - 1]) / num_steps

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Short runs that benchmarks measure: without what is done now and then."""

from collections.abc import Iterator
import contextlib
import sys
import tempfile

import ml_collections

from tba_jax.programs import train


def make_config(
    config: ml_collections.ConfigDict, num_steps: int
) -> ml_collections.ConfigDict:
  """Returns a copy with params drawn at random, and nothing but steps.

  Args:
    config: of the run; its evaluation, checkpoints and guards are turned off.
    num_steps: optimizer steps.
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.init = "scratch"
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
    # Standard output is for the benchmark's one line.
    with contextlib.redirect_stdout(sys.stderr):
      status = train.run(config, workdir, [])
    if status:
      raise RuntimeError(f"a run of the benchmark ended with status {status}")
    yield workdir

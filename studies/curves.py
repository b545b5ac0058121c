# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning curves by step, from single-process runs at an exact staleness.

Each step of `loop.run` inserts `search.prompts_per_step` groups into the replay
buffer and trains on a draw from it. Results do not depend on the machine's
speed, so runs may execute concurrently.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
import threading
import time
from typing import Any

import ml_collections
import numpy as np

from benchmarks import results
from tba_jax import types
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import inline
from tba_jax.programs import sft
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.tools import sweep

# Metrics of an evaluation; a run's result has a list of each.
EVALUATED = ("pass_at_1", "pass_at_k", "distinct_correct_per_solved",
              "distinct_correct", "mean_reward", "kl")  # fmt: skip


def run_all(
    config: ml_collections.ConfigDict,
    settings: Mapping[str, Sequence[str]],
    operands: Sequence[str],
    folder: pathlib.Path,
    runs: pathlib.Path,
) -> list[dict[str, Any]]:
  """Executes the runs without a result in the folder, at staleness 1.

  Args:
    config: settings of all runs except `init`, which is their common initial
      policy, fine-tuned once.
    settings: overrides (`KEY=VALUE`) of each setting, by name.
    operands: seeds of prompts and samples, and names of settings, for
      `results.parse`; all runs of a seed come before the next seed.
    folder: destination of a row per setting and seed.
    runs: destination of the common initial policy.

  Returns:
    All results in the folder.
  """
  seeds, names = results.parse(operands, settings)
  processes.prepare_compiling()

  def train(name: str, seed: int) -> dict[str, Any]:
    tuned = fine_tune(config, runs)
    load.apply_overrides(tuned, [*settings[name], f"seed={seed}"])
    validate.validate(tuned, program="sweep")
    return run(tuned, staleness_steps=1)

  results.measure(seeds, names, folder, train)
  return results.read(settings, folder)


def fine_tune(
    config: ml_collections.ConfigDict, folder: pathlib.Path
) -> ml_collections.ConfigDict:
  """Returns a copy that starts from FOLDER/start; fine-tunes it if missing."""
  start = folder / "start"
  if not policy_lib.sft_folder(start).exists():
    folder.mkdir(parents=True, exist_ok=True)
    sft.run(config, str(start), stop=threading.Event())
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.init = str(policy_lib.sft_folder(start).absolute())
  return config


def run(
    config: ml_collections.ConfigDict, staleness_steps: int
) -> dict[str, Any]:
  """Trains; evaluates at the start and every `evaluate.every_steps`.

  Args:
    config: config of the run; `evaluate.final_prompts` held-out prompts are
      evaluated.
    staleness_steps: exact lag of all samples.

  Returns:
    Lists with an item per evaluation: `steps`, `completions` (sampled so far),
    `solutions` (distinct correct ones so far) and `EVALUATED`. Also `rewards`
    by step, and `wall_s`.

  Raises:
    FloatingPointError: a step's loss or gradient is not finite.
  """
  started = time.monotonic()
  config = sweep.set_exact_lag(config, staleness_steps)
  maker = inline.LoopMaker(config)
  loop = maker.make(config)
  curves = {name: [] for name in ("steps", "completions", "solutions",
                                 *EVALUATED)}  # fmt: skip
  groups: list[types.Group] = []
  solutions: set[tuple[int, str]] = set()
  num_judged = 0
  num_steps, per_step = config.train.num_steps, config.search.prompts_per_step

  def evaluate(step: int) -> None:
    result = maker.evaluator.run(
        loop.learner.params, config.evaluate.final_prompts, version=step
    )
    nonlocal num_judged
    # Groups arrive in the order of their positions.
    solutions.update(
        _solutions(maker.policy, groups[num_judged : step * per_step])
    )
    num_judged = step * per_step
    curves["steps"].append(step)
    curves["completions"].append(
        step * per_step * config.search.samples_per_prompt
    )
    curves["solutions"].append(len(solutions))
    for name in EVALUATED:
      # Without a reference there is no KL.
      curves[name].append(result.get(name, math.nan))

  def after_step(step: int, draw: Any, metrics: Mapping[str, float]) -> None:
    del draw
    if metrics["nonfinite"]:
      raise FloatingPointError(f"step {step}: loss or gradient not finite")
    if (step + 1) % config.evaluate.every_steps == 0 or step + 1 == num_steps:
      evaluate(step + 1)

  try:
    evaluate(0)
    loop.watching(groups.extend).train(after_step)
  finally:
    maker.close()
  by_step = np.reshape([g.rewards.mean() for g in groups], (num_steps, -1))
  rewards = by_step.mean(axis=1).tolist()
  return {**curves, "rewards": rewards, "wall_s": time.monotonic() - started}


def _solutions(
    policy: policy_lib.Policy, groups: Sequence[types.Group]
) -> set[tuple[int, str]]:
  """Returns (prompt id, key) of all correct completions, or none of episodes.

  Only environments judge episodes.
  """
  if policy.task.has_turns:
    return set()
  out = set()
  for group in groups:
    for tokens, length, stopped in zip(
        group.completion_tokens, group.completion_lengths, group.stopped
    ):
      text = policy.tokenizer.decode_completion(tokens, length, stopped)
      key = policy.task.judge(base.TRAIN, group.prompt_id, text).key
      if key is not None:
        out.add((group.prompt_id, key))
  return out

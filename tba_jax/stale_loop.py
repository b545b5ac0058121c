# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training in one process with an exact staleness: the runs of a sweep.

Losses and train step are those of the trainer. What step t trains on was
sampled with the version that the run's `Lag` names; each batch is held to it.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import policy as policy_lib
from tba_jax import reference as reference_lib
from tba_jax import sharding
from tba_jax import stale_samples
from tba_jax import sweep_types
from tba_jax import train_step as train_step_lib
from tba_jax import types
from tba_jax import value_model as value_model_lib
from tba_jax.replay import prompt_order
from tba_jax.tasks import base as tasks_base

# Metrics of a step whose means over the last quarter of a run are kept.
_KEPT = ("reward_mean", "entropy", "ratio_clip_share", "grad_norm",
         "effective_sample_share", "equal_reward_groups")  # fmt: skip


class Interrupted(Exception):
  """`should_stop` was true before the run was done."""


@dataclasses.dataclass(frozen=True)
class Sampled:
  """What a step will train on.

  version: steps that the policy had done when it sampled.
  batch: on the host, as `Samples.sample` gives it.
  """

  version: int
  batch: types.Batch


class Bench:
  """Makes the runs of a sweep one after the other, on compiled parts.

  Policy, reference and sampler serve all runs, an objective's train step all
  its lags and seeds: nothing is compiled twice.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    """Loads the policy that all runs start from.

    Raises:
      ValueError: WORKDIR/sft/model is missing or disagrees with the config.
    """
    self._policy = policy_lib.make(config, workdir)
    self._params = policy_lib.initial_params(self._policy, config.seed)
    self._mesh = sharding.make_mesh(config.mesh)
    self._samples = stale_samples.Samples(
        config,
        self._mesh,
        task=self._policy.task,
        tokenizer=self._policy.tokenizer,
        sampler=policy_lib.make_sampler(config, self._policy),
        reference=reference_lib.Reference(
            self._policy.model,
            self._params,
            temperature=config.sampling.temperature,
        ),
    )
    # By objective: its step, and its state before step 0.
    self._objectives: dict[
        str, tuple[train_step_lib.TrainStep, train_step_lib.TrainState]
    ] = {}

  def run(
      self,
      run: sweep_types.Run,
      *,
      should_stop: Callable[[], bool] = lambda: False,
      on_step: Callable[[train_step_lib.TrainState], None] = lambda state: None,
  ) -> dict[str, Any]:
    """Trains and evaluates; returns the result as plain JSON types.

    Args:
      run: of this sweep.
      should_stop: asked before each step.
      on_step: called with the state before each step, which may not be kept.

    Returns:
      `curve`: evaluations on held-out prompts by step, the first before the
      run; `versions`: that sampled the batch of each step; `train`: means over
      the last quarter of the steps; `diverged_step`: where the loss was not
      finite, which ends the run, or None; `wall_s`.

    Raises:
      Interrupted: `should_stop` was true.
      RuntimeError: a batch is not of the version that the lag names.
    """
    started = time.perf_counter()
    train_step, first_state = self._objective(run)
    # The step donates its state, and the next run needs the first one.
    state = dataclasses.replace(
        jax.tree.map(jnp.copy, first_state),
        rng=jax.device_put(
            jax.random.PRNGKey(run.seed), first_state.rng.sharding
        ),
    )
    order = prompt_order.PromptOrder(
        self._policy.task.num_prompts(tasks_base.TRAIN), seed=run.seed
    )
    num_steps = run.config.train.num_steps
    every = run.config.evaluate.every_steps or num_steps
    evaluate = lambda step: {
        "step": step,
        **self._samples.evaluate(state.params, version=step, seed=run.seed),
    }
    curve, metrics, used = [evaluate(0)], [], []
    ahead: dict[int, Sampled] = {}
    diverged_step = None
    for step in range(num_steps):
      if should_stop():
        raise Interrupted(f"{run.name}: stopped at step {step}")
      on_step(state)
      # What several steps train on waits on the host; no old params are kept.
      while (next_step := step + len(ahead)) < num_steps and run.lag.version_of(
          next_step
      ) <= step:
        ahead[next_step] = self._sample(run, state, order, next_step)
      sampled = ahead.pop(step)
      _check_version(run, int(state.step), sampled.version)
      used.append(sampled.version)
      batch = self._samples.finish(sampled.batch, step - sampled.version)
      state, found = train_step(state, batch)
      metrics.append({k: float(found[k]) for k in _KEPT})
      if not np.isfinite(found["loss"]):
        diverged_step = step
        break
      if (step + 1) % every == 0 or step + 1 == num_steps:
        curve.append(evaluate(step + 1))
    last = metrics[-max(num_steps // 4, 1) :]
    return {
        "curve": curve,
        "versions": used,
        "train": {k: float(np.mean([m[k] for m in last])) for k in _KEPT},
        "diverged_step": diverged_step,
        "wall_s": time.perf_counter() - started,
    }

  def _objective(
      self, run: sweep_types.Run
  ) -> tuple[train_step_lib.TrainStep, train_step_lib.TrainState]:
    if run.objective not in self._objectives:
      model = self._policy.model
      value_model = value_model_lib.make(run.config, model)
      self._objectives[run.objective] = (
          train_step_lib.make_train_step(
              run.config, model, self._mesh, value_model=value_model
          ),
          train_step_lib.init_state(
              run.config,
              model,
              self._params,
              self._mesh,
              value_model=value_model,
              value_params=value_model_lib.load(run.config),
          ),
      )
    return self._objectives[run.objective]

  def _sample(
      self,
      run: sweep_types.Run,
      state: train_step_lib.TrainState,
      order: prompt_order.PromptOrder,
      step: int,
  ) -> Sampled:
    """Returns what `step` will train on, sampled with the present params."""
    size = run.config.train.prompts_per_batch
    version = int(state.step)
    batch = self._samples.sample(
        state.params,
        [order.prompt(step * size + i) for i in range(size)],
        run.config.train.completions_per_prompt,
        version=version,
        seed=run.seed,
    )
    return Sampled(version, batch)


def _check_version(run: sweep_types.Run, step: int, version: int) -> None:
  """A staleness that is not exact would make the whole study wrong."""
  expected = run.lag.version_of(step)
  if version != expected:
    raise RuntimeError(
        f"{run.name}: the batch of step {step} was sampled with version"
        f" {version}, not {expected}"
    )

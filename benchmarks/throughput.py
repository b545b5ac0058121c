# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole RL steps, versus GRPO of other libraries.

    TBA_JAX_TRL=trl/bin/python TBA_JAX_TUNIX=tunix/bin/python \\
        python -m benchmarks throughput [REPEATS]

A step samples 4 prompts x 8 completions of 64 tokens, rewards them and trains
on them, with a randomly initialized Llama of 25 M params in float32. These runs
alternate, each on all cores:

    asynchronous  ours: store, trainer and searcher as processes
    synchronous   ours: one process samples and trains in turn
    trl           TRL's GRPO with its defaults, if installed
    tunix         tunix's GRPO without a KL, if installed

Only ours computes reference log-probs; the others have no KL. Times exclude the
first steps, which compile.
"""

from collections.abc import Sequence
import pathlib
import statistics
import tempfile
from typing import Any

import ml_collections

from benchmarks import peer_grpo
from benchmarks import peer_model
from benchmarks import trial_run
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.system import processes
from tba_jax.tasks import base

_PROMPTS, _COMPLETIONS, _TOKENS = 4, 8, 64
_STEPS, _REPEATS = 6, 3


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    model: config_lib.ModelConfig = peer_model.SHAPE,
) -> dict[str, Any]:
  """Returns tokens per second, and the asynchronous run's relative speed.

  Args:
    config: settings of countdown, whose objective and optimizer are timed.
    operands: repeats (default 3).
    model: shape of the policy.

  Returns:
    `runs`: tokens_per_s and completions_per_s, medians over the repeats.
    `ratios`: speed of `asynchronous` over each other run, by repeat.

  Raises:
    RuntimeError: a run failed.
  """
  repeats = int(operands[0]) if operands else _REPEATS
  processes.prepare_compiling()
  config = make_config(config, model)
  names = ["asynchronous", "synchronous"]
  names += filter(peer_grpo.is_installed, peer_grpo.PEERS)
  seconds = [
      {name: _step_s(config, name) for name in names} for _ in range(repeats)
  ]
  completions = _PROMPTS * _COMPLETIONS
  medians = {n: statistics.median(s[n] for s in seconds) for n in names}
  return {
      "runs": {
          name: {
              "tokens_per_s": completions * _TOKENS / step_s,
              "completions_per_s": completions / step_s,
          }
          for name, step_s in medians.items()
      },
      "ratios": {
          name: [s[name] / s["asynchronous"] for s in seconds]
          for name in names[1:]
      },
  }


def make_config(
    config: ml_collections.ConfigDict, model: config_lib.ModelConfig
) -> ml_collections.ConfigDict:
  """Returns a copy with the model and the sizes of a step."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    for name in config.model:
      setattr(config.model, name, getattr(model, name))
    config.model.compute_dtype = config.model.param_dtype
    config.sampling.max_completion_tokens = _TOKENS
    # Force full-length completions; random params would stop at random.
    config.explore.min_tokens = _TOKENS - 1
    config.sampling.num_slots = _PROMPTS * _COMPLETIONS
    config.search.prompts_per_round = config.search.prompts_per_step = _PROMPTS
    config.search.samples_per_prompt = _COMPLETIONS
    config.train.prompts_per_batch = config.train.micro_batch_prompts = _PROMPTS
    config.train.completions_per_prompt = _COMPLETIONS
    config.evaluate.batch_prompts = 1
    config.evaluate.num_completions = 2
  return config


def _step_s(config: ml_collections.ConfigDict, name: str) -> float:
  if name == "asynchronous":
    return trial_run.time_roles(config, _STEPS, lockstep=False)[0]
  if name == "synchronous":
    return trial_run.time_loop(config, _STEPS)
  return _peer_step_s(config, name)


def _peer_step_s(config: ml_collections.ConfigDict, peer: str) -> float:
  """Returns the seconds of a peer's step, from params of the same shape."""
  num_steps = trial_run.SKIPPED_STEPS + _STEPS
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as name:
    folder = pathlib.Path(name)
    config = config.copy_and_resolve_references()
    config.init = "scratch"
    policy = policy_lib.make_policy(config, name)
    params = policy_lib.initial_params(policy, config.seed)
    hf.save(folder / "model", policy.model.config, params, policy.tokenizer)
    task = policy.task
    ends = peer_grpo.run(
        peer,
        folder / "run",
        {
            "learning_rate": config.optimizer.learning_rate,
            "beta": 0.0,
            # Only TRL has this setting.
            "scale_rewards": "group",
            "model": str(folder / "model"),
            "prompts": [
                task.prompt(base.TRAIN, i) for i in range(num_steps * _PROMPTS)
            ],
            "prompts_per_batch": _PROMPTS,
            "completions_per_prompt": _COMPLETIONS,
            "max_completion_tokens": _TOKENS,
            "full_length": True,
            "num_steps": num_steps,
            "snapshot_steps": num_steps,
            "seed": config.seed,
        },
    )["step_ends"]
  return (ends[-1] - ends[trial_run.SKIPPED_STEPS - 1]) / _STEPS

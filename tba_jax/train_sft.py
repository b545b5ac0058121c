# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `sft` program: supervised fine-tuning on a task's reference completions.

A step learns from `sft.batch_size` training prompts drawn with replacement,
each with a right completion drawn anew; both are a pure function of the seed
and the step. `offline_training.py` has the loop.

Files, all below WORKDIR/sft: `settings.json` (what the model depends on),
`data.json` (what was read, and what was left out and why), `checkpoints/`,
`metrics.jsonl`, and at the end `model/`, a Hugging Face folder.
"""

from collections.abc import Callable, Sequence
import functools
import pathlib
import threading
import time
from typing import Any

import ml_collections

from tba_jax import data_report
from tba_jax import evaluator as evaluator_lib
from tba_jax import objective
from tba_jax import offline_training
from tba_jax import policy as policy_lib
from tba_jax import sft_examples
from tba_jax import sft_settings
from tba_jax import sharding
from tba_jax import train_step as train_step_lib
from tba_jax import types
from tba_jax.models import hf

Progress = offline_training.Progress


def run_sft(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  return offline_training.run_program(
      "sft", config.trainer, functools.partial(run, config, workdir)
  )


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    stop: threading.Event,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
  """Makes WORKDIR/sft/model, or finds it there; continues what was begun.

  Args:
    config: reads `seed`, `task`, `tokenizer`, `model`, `sft`, `mesh`,
      `sharding`, `sampling`, `evaluate` and `checkpoint.keep`.
    workdir: of the run, local.
    stop: once set, the present chunk of steps is finished and saved.
    on_progress: called with (step, num_steps, metrics) at each log line.

  Returns:
    `model`: the folder; `interrupted`; `skipped`, True where the model was
    there; `step`, steps done; `num_steps`; `wall_s` of this call; `evaluation`,
    the last one's metrics on held-out prompts, {} where there was none.

  Raises:
    ValueError: what is in WORKDIR/sft was made with other settings, or an
      example is longer than `sampling` allows.
    FloatingPointError: a loss is not finite; names the steps.
    OSError: a file cannot be written.
  """
  started = time.perf_counter()
  num_steps = config.sft.num_steps
  folder = policy_lib.sft_folder(workdir)
  sft_settings.check(config, folder.parent)
  result = {
      "model": str(folder),
      "interrupted": False,
      "skipped": False,
      "step": num_steps,
      "num_steps": num_steps,
      "evaluation": {},
  }
  if (folder / "config.json").exists():
    return {**result, "skipped": True, "wall_s": time.perf_counter() - started}

  policy = policy_lib.make(config, workdir, scratch=True)
  policy.task.leave_out_long(
      lambda text: len(policy.tokenizer.encode(text)),
      config.sampling.max_completion_tokens - 1,
  )
  # Only the tokenizer knows what is too long.
  data_report.write(
      policy.task,
      folder.parent,
      lambda kind, line: print(f"data: {line}", flush=True),
  )
  job = _make_job(config, folder.parent, policy, stop)
  params, done = offline_training.train(
      config, job, stop=stop, on_progress=on_progress
  )
  if not done["interrupted"]:
    hf.save(folder, policy.model.config, params, policy.tokenizer)
  wall_s = time.perf_counter() - started
  return {**result, **done, "wall_s": wall_s}


def _make_job(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    policy: policy_lib.Policy,
    stop: threading.Event,
) -> offline_training.Job:
  """Returns what `offline_training.train` makes the SFT model of."""
  examples = sft_examples.Examples(
      policy.task,
      policy.tokenizer,
      seed=config.seed,
      batch_size=config.sft.batch_size,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
  )
  step_config = offline_training.step_config(config, "sft")
  mesh = sharding.make_mesh(config.mesh)
  return offline_training.Job(
      name="sft",
      folder=folder,
      init_state=lambda: train_step_lib.init_state(
          step_config,
          policy.model,
          policy_lib.initial_params(policy, config.seed),
          mesh,
      ),
      abstract_state=train_step_lib.abstract_state(
          step_config, policy.model, mesh
      ),
      train_step=train_step_lib.make_train_step(
          step_config,
          policy.model,
          mesh,
          loss_fn=objective.make_supervised_loss_fn(policy.model),
      ),
      chunk=examples.chunk,
      evaluate=_make_evaluate(config, policy, stop),
      metric_names=("loss", "token_accuracy", "grad_norm", "learning_rate"),
  )


def _make_evaluate(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    stop: threading.Event,
) -> Callable[[types.PyTree, int], dict[str, float]]:
  """Returns (params, step) -> metrics on held-out prompts, {} once stopped."""
  if not policy.task.has_reward:
    # A reward model is made of what this program makes.
    return lambda params, step: {}
  judge = policy_lib.make_judge(config, policy.task)
  evaluator = policy_lib.make_evaluator(
      config, policy, "held_out", judge
  ).while_training()

  num_prompts = min(
      config.evaluate.num_prompts, policy.task.num_prompts(evaluator.split)
  )

  def evaluate(params: types.PyTree, step: int) -> dict[str, float]:
    try:
      found = evaluator.run(
          params, num_prompts, version=step, should_stop=stop.is_set
      )
    except evaluator_lib.Interrupted:
      return {}
    return {
        name: value for name, value in found.items() if isinstance(value, float)
    }

  return evaluate

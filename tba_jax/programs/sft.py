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
import numpy as np

from tba_jax import types
from tba_jax.config import stages
from tba_jax.losses import objective
from tba_jax.models import hf
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.training import batches
from tba_jax.training import evaluator as evaluator_lib
from tba_jax.training import offline
from tba_jax.training import policy as policy_lib
from tba_jax.training import reward_judge
from tba_jax.training import sharding
from tba_jax.training import train_step

# What supervised fine-tuning learns from.


# Tells these random numbers from others of the same seed.
_STREAM = 0x5F7


class Examples:
  """Batches of prompts and right completions, a pure function of the step."""

  def __init__(
      self,
      task: base.Task,
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      seed: int,
      batch_size: int,
      max_prompt_tokens: int,
      max_completion_tokens: int,
  ):
    """Takes the settings.

    Args:
      task: its training prompts and reference completions are drawn.
      tokenizer: of both; its stop token ends a completion.
      seed: of the run.
      batch_size: B.
      max_prompt_tokens: P.
      max_completion_tokens: T, with the stop token.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._seed = seed
    self._batch_size = batch_size
    self._max_prompt_tokens = max_prompt_tokens
    self._max_completion_tokens = max_completion_tokens

  def chunk(self, first: int, last: int, size: int) -> types.Batch:
    """Returns the batches of steps first … last - 1, on the host.

    Args:
      first: step.
      last: step after the last one, at most first + size.
      size: C, batches that the result has room for.

    Returns:
      A batch whose leaves are [C, B, …], with K = 1; what no step fills is 0,
      as are the fields that the supervised loss does not read.

    Raises:
      ValueError: a prompt or completion is longer than `config.sampling` says.
    """
    rows = []
    num_prompts = self._task.num_prompts(base.TRAIN)
    for step in range(first, last):
      rng = np.random.default_rng([self._seed, _STREAM, step])
      for index in rng.integers(num_prompts, size=self._batch_size):
        prompt, completion = self._tokens(int(index), rng)
        rows.append((prompt, [completion]))
    return batches.pad_sequences(
        rows,
        (size, self._batch_size),
        num_completions=1,
        max_prompt_tokens=self._max_prompt_tokens,
        max_completion_tokens=self._max_completion_tokens,
    )

  def _tokens(
      self, index: int, rng: np.random.Generator
  ) -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt, and of a completion with its stop token."""
    task, tokenizer = self._task, self._tokenizer
    prompt = tokenizer.encode_prompt(task.prompt(base.TRAIN, index))
    completion = tokenizer.encode(
        task.reference_completion(base.TRAIN, index, rng)
    )
    completion.append(self._tokenizer.eos_id)
    for name, tokens, limit in (
        ("max_prompt_tokens", prompt, self._max_prompt_tokens),
        ("max_completion_tokens", completion, self._max_completion_tokens),
    ):
      if len(tokens) > limit:
        raise ValueError(
            f"config.sampling.{name} = {limit}: allowed {len(tokens)} or more,"
            f" which training prompt {index} of the task needs"
        )
    return prompt, completion


Progress = offline.Progress


def run_sft(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  return offline.run_program(
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
  stages.check(config, folder.parent)
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

  policy = policy_lib.make_policy(config, workdir, scratch=True)
  # Only the tokenizer knows what is too long.
  rows.write_report(
      policy.task,
      folder.parent,
      lambda kind, line: print(f"data: {line}", flush=True),
  )
  job = _make_job(config, folder.parent, policy, stop)
  params, done = offline.train(config, job, stop=stop, on_progress=on_progress)
  if not done["interrupted"]:
    hf.save(folder, policy.model.config, params, policy.tokenizer)
  wall_s = time.perf_counter() - started
  return {**result, **done, "wall_s": wall_s}


def _make_job(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    policy: policy_lib.Policy,
    stop: threading.Event,
) -> offline.Job:
  """Returns what `offline_training.train` makes the SFT model of."""
  examples = Examples(
      policy.task,
      policy.tokenizer,
      seed=config.seed,
      batch_size=config.sft.batch_size,
      max_prompt_tokens=config.sampling.max_prompt_tokens,
      max_completion_tokens=config.sampling.max_completion_tokens,
  )
  step_config = offline.step_config(config, "sft")
  mesh = sharding.make_mesh(config.mesh)
  return offline.Job(
      name="sft",
      folder=folder,
      init_state=lambda: train_step.init_state(
          step_config,
          policy.model,
          policy_lib.initial_params(policy, config.seed),
          mesh,
      ),
      abstract_state=train_step.abstract_state(step_config, policy.model, mesh),
      train_step=train_step.make_train_step(
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
  judge = reward_judge.make_task_judge(config, policy.task)
  evaluator = evaluator_lib.Evaluator(config, policy, judge).while_training()
  num_prompts = min(config.evaluate.num_prompts, evaluator.num_prompts)

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

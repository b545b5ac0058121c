# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `sft` program: supervised fine-tuning on a task's reference completions.

Each epoch has every training prompt once, in random order, with a newly drawn
reference completion. In a chat prompt, all assistant turns are trained on
(`models/tokenizer.py:Tokenizer.encode_answered`).

Files in WORKDIR/sft: `settings.json` (all that the model depends on),
`data.json` (rows used and left out), `checkpoints/`, `metrics.jsonl`, and at
the end `model/`, a Hugging Face folder.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import pathlib
import threading
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.environments import build as environments_build
from tba_jax.environments import turns
from tba_jax.evaluation import evaluator as evaluator_lib
from tba_jax.evaluation import reward_judge
from tba_jax.learning import batches
from tba_jax.learning import model_source
from tba_jax.learning import offline
from tba_jax.losses import objective
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.run import files
from tba_jax.tasks import base
from tba_jax.tasks import rows

# Separates these random numbers from others with the same seed.
_STREAM = 0x5F8


def run_sft(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  del operands
  return offline.run_program(
      "sft", config, functools.partial(run, config, workdir)
  )


def run(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    stop: threading.Event,
    on_progress: offline.Progress | None = None,
) -> dict[str, Any]:
  """Trains WORKDIR/sft/model unless it exists, see `offline.run`."""
  return offline.run(
      "sft",
      config,
      workdir,
      functools.partial(_prepare, config, workdir),
      stop=stop,
      on_progress=on_progress,
  )


@contextlib.contextmanager
def _prepare(
    config: ml_collections.ConfigDict,
    workdir: str,
    folder: pathlib.Path,
    stop: threading.Event,
) -> Iterator[offline.Job]:
  policy = policy_lib.make_policy(config, workdir, scratch=True)
  # Written only now, since the tokenizer determines what is too long.
  rows.write_report(
      policy.task,
      files.Directory(folder).write,
      lambda kind, line: print(f"data: {line}", flush=True),
  )
  environments = environments_build.make(
      config, workdir, policy.task, policy.tokenizer
  )

  def save(
      params: types.PyTree, evaluation: dict[str, float]
  ) -> dict[str, float]:
    hf.save(folder / "model", policy.model.config, params, policy.tokenizer)
    return evaluation

  try:
    yield offline.Job(
        name="sft",
        folder=folder,
        model=policy.model,
        init_params=lambda: model_source.initial_params(
            config, policy, sharding.make_mesh(config.mesh)
        ),
        loss_fn=objective.make_supervised_loss_fn(policy.model),
        examples=make_examples(
            config, policy.task, policy.tokenizer, environments
        ),
        evaluate=_make_evaluate(config, workdir, policy, environments, stop),
        metric_names=("token_accuracy", "grad_norm", "learning_rate"),
        save=save,
    )
  finally:
    if environments is not None:
      environments.close()


def make_examples(
    config: ml_collections.ConfigDict,
    task: base.PromptSet,
    tokenizer: tokenizer_lib.Tokenizer,
    environments: turns.Environments | None = None,
) -> offline.Examples:
  """Returns the training prompts, each with one reference completion.

  With environments, the completion is a demonstration. Making a batch raises
  ValueError if a text is longer than `config.sampling` allows.
  """
  limits = {
      name: config.sampling[name]
      for name in ("max_prompt_tokens", "max_completion_tokens")
  }

  def checked(index: int, row: batches.BatchRow) -> batches.BatchRow:
    texts = row.prompt, row.completions[0]
    for (name, limit), tokens in zip(limits.items(), texts):
      if len(tokens) > limit:
        raise ValueError(
            f"config.sampling.{name} = {limit}: must be {len(tokens)} or more,"
            f" which training prompt {index} of the task needs"
        )
    return row

  def encode(index: int, epoch: int) -> batches.BatchRow:
    rng = np.random.default_rng([config.seed, _STREAM, epoch, index])
    encoded = tokenizer.encode_answered(
        task.prompt(base.TRAIN, index),
        task.reference_completion(base.TRAIN, index, rng),
    )
    if encoded is None:
      raise ValueError(
          f"training prompt {index} of the task has an answer that the chat"
          " template writes otherwise than after its prompt"
      )
    row = batches.BatchRow(
        encoded.prompt, [encoded.completion], [encoded.trained]
    )
    return checked(index, row)

  @functools.cache
  def demonstrate(index: int) -> batches.BatchRow:
    prompt, ids, mask = environments.demonstration(
        base.TRAIN, index, limits["max_completion_tokens"]
    )
    return checked(index, batches.BatchRow(prompt, [ids], [mask]))

  return offline.Examples(
      seed=config.seed,
      batch_size=config.sft.batch_size,
      num_rows=task.num_prompts(base.TRAIN),
      # A demonstration is a function of its seed.
      encode=encode
      if environments is None
      else lambda index, _: demonstrate(index),
      num_completions=1,
      **limits,
  )


def _make_evaluate(
    config: ml_collections.ConfigDict,
    workdir: str,
    policy: policy_lib.Policy,
    environments: turns.Environments | None,
    stop: threading.Event,
) -> Callable[[types.PyTree, int], dict[str, float]]:
  """Returns a function from (params, step) to metrics; {} if stopped."""
  task = policy.task
  split = base.split_while_training(task)
  num_prompts = min(config.evaluate.num_prompts, task.num_prompts(split))
  # A reward model is trained later, starting from the model made here.
  if not (task.has_reward and num_prompts and config.sft.evaluate_every_steps):
    return lambda params, step: {}
  judge = reward_judge.make_task_judge(
      config, workdir, task, mesh=sharding.make_mesh(config.mesh)
  )
  evaluator = evaluator_lib.Evaluator(
      config, policy, judge, environments=environments
  ).while_training()

  def evaluate(params: types.PyTree, step: int) -> dict[str, float]:
    try:
      result = evaluator.run(
          params, num_prompts, version=step, should_stop=stop.is_set
      )
    except evaluator_lib.Interrupted:
      return {}
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, float)
    }

  return evaluate

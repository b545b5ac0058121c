# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning post-training that does not wait for sampling."""

import os

import ml_collections


def train(
    config: ml_collections.ConfigDict, *, workdir: str | os.PathLike[str]
) -> int:
  """Runs a whole training run on this machine, as `--program=train` does.

  Starts the store, the trainer and the searchers as processes, watches them,
  and blocks until the run has ended. Call it from the main thread: SIGINT and
  SIGTERM end the run, saved.

  Args:
    config: config of the run, as `get_config` of a file in `configs/` returns
      it.
    workdir: the run's directory, a path or gs://BUCKET/PATH; a run that is
      there is continued.

  Returns:
    The exit status of the program: 0 where the run did what was asked.

  Raises:
    ValueError: settings are wrong; each is named with what is allowed.
  """
  # Imported here, so that `import tba_jax` stays light.
  from tba_jax.config import load
  from tba_jax.config import validate
  from tba_jax.programs import train as train_lib
  from tba_jax.system import bucket

  if not os.fspath(workdir):
    raise ValueError("workdir: allowed a path; it is empty")
  validate.validate(config)
  config = config.copy_and_resolve_references()
  load.make_paths_absolute(config)
  folder = bucket.stage(os.fspath(workdir), "train")
  return train_lib.run(config, folder, [])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning post-training that does not wait for sampling."""

from collections.abc import Iterable
import os
from typing import Any

import ml_collections


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
    config: ml_collections.ConfigDict,
    *,
    workdir: str | os.PathLike[str] | None = None,
) -> Any:
  """Runs a whole training run on this machine; blocks until it has ended.

  With a run directory it does what `--program=train` does: store, trainer and
  searchers are processes, a run that is there is continued, and SIGINT and
  SIGTERM end the run, saved. Without one it trains in this process and leaves
  no file. Call it from the main thread.

  Args:
    config: config of the run, from `load_config`.
    workdir: the run's directory, a path or gs://BUCKET/PATH.

  Returns:
    With `workdir`, the exit status of the program: 0 where the run did what was
    asked. Without, `in_process.Result`, which a notebook shows as the report.

  Raises:
    ValueError: settings are wrong; each is named with what is allowed.
    RuntimeError: the run failed, without `workdir`.
  """
  # Imported here, so that `import tba_jax` stays light.
  from tba_jax.config import load
  from tba_jax.config import validate
  from tba_jax.programs import settle
  from tba_jax.programs import train as train_lib
  from tba_jax.system import bucket

  if workdir is None:
    from tba_jax.programs import in_process

    return in_process.train(config)
  if not os.fspath(workdir):
    raise ValueError("workdir: allowed a path; it is empty")
  settle.settle(config, os.fspath(workdir), "train")
  validate.validate(config)
  config = config.copy_and_resolve_references()
  load.make_paths_absolute(config)
  folder = bucket.stage(os.fspath(workdir), "train")
  return train_lib.run(config, folder, [])

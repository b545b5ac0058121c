# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning post-training that does not wait for sampling."""

from collections.abc import Iterable
import os
import typing
from typing import Any

import ml_collections

if typing.TYPE_CHECKING:
  from tba_jax.api import train
  from tba_jax.api import TrainingRun


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


def __getattr__(name: str) -> Any:
  # Imported when it is used, so that `import tba_jax` stays light.
  if name in ("train", "TrainingRun"):
    from tba_jax import api

    return getattr(api, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*globals(), "train", "TrainingRun"]

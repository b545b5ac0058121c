# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings that WORKDIR/sft or WORKDIR/reward_model was trained with."""

import json
import pathlib
from typing import Any

import ml_collections

from tba_jax.config import load
from tba_jax.system import jsonl
from tba_jax.tasks import build


def check(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    *,
    section: str = "sft",
) -> None:
  """Checks the settings that a stage was trained with; saves them if new.

  Args:
    config: config of the run.
    folder: WORKDIR/sft or WORKDIR/reward_model.
    section: "sft" or "reward_model".

  Raises:
    ValueError: the folder was made with other settings; lists them.
  """
  path = folder / "settings.json"
  # Through JSON, so that tuples equal the lists that are read back.
  settings = json.loads(json.dumps(_settings(config, section)))
  if not path.exists():
    jsonl.atomic_write_json(path, settings)
    return
  saved = jsonl.read_json(path)
  if not isinstance(saved, dict):
    raise ValueError(f"{path} is damaged; remove {folder} to recreate it")
  missing = "not there"
  changed = [
      f"config.{key} = {settings.get(key, missing)!r}, was"
      f" {saved.get(key, missing)!r}"
      for key in sorted({*settings, *saved})
      if settings.get(key, missing) != saved.get(key, missing)
      and not load.are_moved_files(key, saved.get(key), settings.get(key))
  ]
  if changed:
    raise ValueError(
        f"{folder} was made with other settings: {'; '.join(changed)}. Allowed:"
        f" the settings that it was made with, another --workdir, or {folder}"
        " removed, to recreate it"
    )


def _settings(
    config: ml_collections.ConfigDict, section: str
) -> dict[str, Any]:
  """Returns the settings that the model depends on, by config key."""
  task_fields = build.find(config.task.name).FIELDS
  parts = {
      "task": {**task_fields, **config.task},
      "tokenizer": config.tokenizer,
      "model": config.model,
      section: {
          # Periods do not affect the model.
          k: v
          for k, v in config[section].items()
          if not k.endswith("_every_steps")
      },
  }
  return {
      "seed": config.seed,
      "optimizer.epsilon": config.optimizer.epsilon,
      **load.flatten(parts),
  }

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks the stages before a run: SFT and training a reward model."""

import itertools
import json
import pathlib
from typing import Any

import ml_collections

from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_tensors
from tba_jax.rewards import settings as rewards
from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import task_table

# Number of leading rows of a source that must include a pair.
_FIRST_ROWS = 100


def before_run(config: ml_collections.ConfigDict) -> list[str]:
  """Returns the programs that train a model before the run, in order."""
  required = {
      "sft": config.init == "sft",
      "reward_model": rewards.trains_reward_model(load.flatten(config)),
  }
  return [role for role, is_wanted in required.items() if is_wanted]


def check(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    *,
    section: str = "sft",
) -> None:
  """Checks that a stage was trained with these settings; saves them if new.

  Args:
    folder: WORKDIR/sft or WORKDIR/reward_model.
    section: "sft" or "reward_model".

  Raises:
    ValueError: the stage was trained with other settings; lists them.
  """
  path = folder / "settings.json"
  # Via JSON, so that tuples compare equal to the lists read back.
  settings = json.loads(json.dumps(_settings(config, section)))
  if not path.exists():
    jsonl.atomic_write_json(path, settings)
    return
  saved = jsonl.read_json(path)
  if not isinstance(saved, dict):
    raise ValueError(f"{path} is damaged; remove {folder} to recreate it")
  lines = differences.lines(differences.changed(saved, settings))
  if lines:
    raise ValueError(
        f"{folder} was made with other settings: {'; '.join(lines)}. Restore"
        f" them, give another --workdir, or remove {folder} to train it again"
    )


def check_model(folder: pathlib.Path) -> None:
  """Raises ValueError if the model in a stage's folder is damaged."""
  model = folder / "model"
  labels = folders.SCORER if folder.name == "reward_model" else folders.POLICY
  try:
    hf_tensors.check_model(model, folders.read(model, labels))
  except ValueError as error:
    why = str(error).removeprefix(f"{model}: ")
    why = why.removesuffix(f"; {hf_files.REMEDY}")
    raise ValueError(
        f"{model}: {why}. Restore it, or remove {folder} to train it again"
    ) from error


def check_pairs(config: ml_collections.ConfigDict) -> None:
  """Checks that there are pairs to train a reward model on.

  Raises:
    ValueError: a source is missing or has no pair among its first rows, or the
      task cannot make or relabel pairs as requested.
  """
  task = task_table.make_task(config.task)
  for split in base.SPLITS:
    key, source = f"config.reward_model.{split}", config.reward_model[split]
    if source == "task":
      pairs = task.pairs(split)
    else:
      first = itertools.islice(rows.read_rows(key, source), _FIRST_ROWS)
      fields = [row.fields for row in first if row.fields is not None]
      pairs, why = [], ""
      for row in fields:
        try:
          texts = task.pair_texts(row)
        except rows.UnusableError as error:
          why = why or f"{error}; "
          continue
        if all(isinstance(text, str) and text.strip() for text in texts):
          pairs.append(texts)
      if not pairs:
        raise ValueError(
            f"{key}={source!r}: no pair is among its first rows; {why}rows"
            " need the texts prompt (or query), chosen and rejected"
            " (task.name='chat' also takes messages), but these have"
            f" {sorted(set().union(*fields))}"
        )
    if config.reward_model.relabel == "task":
      prompt, chosen, _ = pairs[0]
      task.reward_of(prompt, chosen)


def _settings(
    config: ml_collections.ConfigDict, section: str
) -> dict[str, Any]:
  """Returns the settings that a stage's model depends on, by key."""
  task_fields = task_table.find(config.task.name).FIELDS
  parts = {
      "task": {**task_fields, **config.task},
      "tokenizer": config.tokenizer,
      "model": config.model,
      section: {
          # Logging and checkpoint periods do not affect the model.
          k: v
          for k, v in config[section].items()
          if not k.endswith("_every_steps")
      },
  }
  return {"seed": config.seed, **load.flatten(parts)}

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a config from a model, data and a reward, without a config file.

The arguments of `tba_jax.train(…)`, or the flags `--model`, `--data`,
`--reward` and `--environment`, set these keys:

    model          init
    data           task.train, and task.test, task.validation
    reward         task.rewards
    environment    task.source
"""

from collections.abc import Mapping
import copy
import difflib
import json
from typing import Any

import ml_collections

from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.tasks import base

# Argument -> key it sets.
ARGUMENTS = {
    "model": "init",
    "data": "task.train",
    "reward": "task.rewards",
    "environment": "task.source",
}
SPLITS = ("train", "test", "validation")
# Short name -> keys it sets.
SHORT = {
    "num_steps": ("train.num_steps",),
    # Both, for a constant rate.
    "learning_rate": (
        "optimizer.learning_rate", "optimizer.learning_rate_final",
    ),
    "prompt": ("task.prompt",),
    "answer": ("task.answer",),
}  # fmt: skip
# GRPOTrainer argument (TRL) with no setting of that name -> argument here.
_TRL = {
    "args": "keywords, such as num_steps=100",
    "eval_dataset": "data={'train': …, 'test': …}",
    "callbacks": "wait=False and run.metrics, or the files of workdir",
    "hub_model_id": "run.push_to_hub(NAME), after the run",
    "output_dir": "workdir",
    "peft_config": "lora={'rank': …}",
    "processing_class": "the tokenizer that comes with model, or"
    " tokenizer={'source': FOLDER}",
    "push_to_hub": "run.push_to_hub(NAME), after the run",
    "reward_funcs": "reward",
    "reward_weights": "reward=[(function, weight), …]",
    "train_dataset": "data",
}


def make_config(
    config: ml_collections.ConfigDict | None = None,
    *,
    model: str = "",
    data: Mapping[str, str] | None = None,
    reward: str = "",
    environment: str = "",
    settings: Mapping[str, Any] | None = None,
) -> ml_collections.ConfigDict:
  """Returns a config with the arguments applied.

  Args:
    config: base of the settings; None starts from the defaults.
    model: `init`.
    data: source of rows for each split in `SPLITS`.
    reward: `task.rewards`.
    environment: `task.source` of the task "environment".
    settings: values by key or `SHORT` name; sections may be nested mappings.

  Raises:
    ValueError: arguments conflict, a required one is missing, or a setting is
      unknown.
  """
  given = {"data": data, "reward": reward}
  for name, value in given.items():
    if environment and value:
      raise ValueError(
          f"{name}: must be left out with environment=…, which provides prompts"
          " and rewards"
      )
  if config is None:
    config = settings_lib.get_config()
    needed = {"model": model, "data": data or environment}
    for name, value in needed.items():
      if not value:
        raise ValueError(
            f"{name}: is missing; give config=…, or model=… with data=… or"
            " environment=…"
        )
  else:
    config = copy.deepcopy(config)
  values = by_key(settings or {})
  if data and not reward and "task.rewards" not in values:
    if config.task.get("rewards") is None:
      raise ValueError(
          "reward: is missing; give a function, FILE.py:FUNCTION, or a name"
          " such as 'answer', which compares with the row's answer"
      )
  with config.unlocked():
    if model:
      config.init = model
    if environment:
      config.task = ml_collections.ConfigDict({"name": "environment"})
      config.task.source = environment
      config.reward.backend = "pool"
    elif data or reward:
      _set_rows(config, data or {}, reward)
  return load.set_values(config, values)


def _set_rows(
    config: ml_collections.ConfigDict,
    data: Mapping[str, str],
    reward: str,
) -> None:
  """Makes `config.task` a custom task with this data and reward."""
  is_custom = config.task.name == "custom"
  if not (data or is_custom):
    raise ValueError(
        f"reward: must be left out with config.task.name={config.task.name!r},"
        " which has its own reward; or give data=… as well"
    )
  task = config.task.to_dict() if is_custom else {"name": "custom"}
  task |= data
  if reward:
    task["rewards"] = reward
    # Reward functions and judges may work without a reference answer.
    names = base.reward_names(reward)
    if all(":" in name or name == base.JUDGE for name in names):
      task.setdefault("answer_kind", "none")
  config.task = ml_collections.ConfigDict(task)


def as_text(prompt: Any) -> str:
  """Returns chat messages as a `task.prompt` string."""
  return json.dumps(prompt, ensure_ascii=False)


def by_key(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns settings by full key: flattens sections, expands short names."""
  out = {}
  for key, value in load.flatten(settings).items():
    if key in _TRL:
      raise ValueError(f"{key}: is a TRL argument; here it is {_TRL[key]}")
    if key not in SHORT and "." not in key and key not in settings_lib.SETTINGS:
      names = (*SHORT, *ARGUMENTS, "workdir", "wait")
      if close := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        raise ValueError(f"{key}: is not an argument; did you mean {close[0]}?")
    if isinstance(value, (list, tuple)):  # Chat messages.
      value = as_text(value)
    out |= dict.fromkeys(SHORT.get(key, (key,)), value)
  return out

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep: objectives times staleness times seeds. No JAX here."""

from collections.abc import Callable, Mapping
import fnmatch
import itertools
import pathlib
import re
from typing import Any

import ml_collections

from configs import common
from tba_jax import config_args
from tba_jax import config_flat
from tba_jax import jsonl
from tba_jax import sweep_types

# What an objective may set; the sampler, the model, the task and the numbers of
# updates and completions are common to all runs.
_OWN_KEYS = (
    "loss.*",
    "optimizer.*",
    "train.prompts_per_batch",
    "train.completions_per_prompt",
    "train.micro_batch_prompts",
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def expand(
    config: ml_collections.ConfigDict,
    check: Callable[[ml_collections.ConfigDict], None],
) -> list[sweep_types.Run]:
  """Returns the runs in their order: a whole seed, then the next.

  Args:
    config: complete.
    check: raises ConfigError where the config of a run is wrong.

  Raises:
    ConfigError: a setting of `config.sweep`, or of a run, is wrong.
  """
  recipes = _recipes(config)
  lags = _lags(config.sweep)
  seeds = _numbers(config.sweep, "seeds", low=0)
  if not seeds:
    raise _wrong("seeds", config.sweep.seeds, "allowed one seed or more")
  for key, section, value in (
      ("reference.mode", config.reference.mode, "fixed"),
      ("rounds.mini_batches", config.rounds.mini_batches, 0),
  ):
    if section != value:
      raise config_args.ConfigError(
          f"config.{key} = {section!r}: allowed {value!r} with --program=sweep"
      )
  configs = {
      name: _own_config(config, name, overrides, check)
      for name, overrides in recipes.items()
  }
  return [
      sweep_types.Run(name, lag, seed, configs[name])
      for seed, name, lag in itertools.product(seeds, recipes, lags)
  ]


def settings(run: sweep_types.Run) -> dict[str, Any]:
  """Returns what the result of a run depends on, by config key."""
  values = config_flat.flatten(run.config.to_dict())
  parts = ("task.", "tokenizer.", "model.", "sft.", "sampling.", "loss.",
           "optimizer.", "train.", "evaluate.", "init")  # fmt: skip
  return {k: v for k, v in values.items() if k.startswith(parts)}


def result_path(
    workdir: str | pathlib.Path, run: sweep_types.Run
) -> pathlib.Path:
  """Returns the one file of a run's result; it is there whole or not at all."""
  return pathlib.Path(workdir) / "runs" / f"{run.name}.json"


def read_result(
    workdir: str | pathlib.Path, run: sweep_types.Run
) -> Mapping[str, Any] | None:
  """Returns the result of a run, None where it is not done.

  Raises:
    ConfigError: it was made with other settings; names each.
  """
  path = result_path(workdir, run)
  found = jsonl.read_json(path)
  if not isinstance(found, dict):
    return None
  # Another version of the code may not know a key: it had the default there.
  defaults = config_flat.flatten(common.get_config().to_dict())
  before, now = defaults | found["settings"], defaults | settings(run)
  changed = [
      f"config.{key} = {now.get(key)!r}, was {before.get(key)!r}"
      for key in sorted({*before, *now})
      if before.get(key) != now.get(key)
  ]
  if changed:
    raise config_args.ConfigError(
        f"{path} was made with other settings: {'; '.join(changed)}. Allowed:"
        " the settings that it was made with, another --workdir, or the file"
        " removed, to make the run anew"
    )
  return found


def _recipes(config: ml_collections.ConfigDict) -> dict[str, list[str]]:
  """Returns the overrides of each objective, by its name."""
  text = config.sweep.objectives
  recipes: dict[str, list[str]] = {}
  for item in filter(str.strip, text.split(";")):
    name, colon, overrides = item.partition(":")
    name = name.strip()
    if not colon or not _NAME.fullmatch(name) or name in recipes:
      raise _wrong("objectives", item.strip(), "allowed NAME: KEY=VALUE …")
    recipes[name] = overrides.split()
    for override in recipes[name]:
      key = override.partition("=")[0]
      if not any(fnmatch.fnmatchcase(key, p) for p in _OWN_KEYS):
        allowed = f"allowed in it {', '.join(_OWN_KEYS)}"
        raise _wrong("objectives", f"{name}: {override}", allowed)
  if not recipes:
    raise _wrong(
        "objectives", text, "allowed NAME: KEY=VALUE …; NAME: …, at least one"
    )
  return recipes


def _lags(sweep: ml_collections.ConfigDict) -> list[sweep_types.Lag]:
  lags = [
      sweep_types.Lag(staleness_steps=s)
      for s in _numbers(sweep, "staleness_steps", 0)
  ]
  # One mini-batch a round is staleness 0.
  lags += [
      sweep_types.Lag(mini_batches=n)
      for n in _numbers(sweep, "mini_batches", low=2)
  ]
  if not lags:
    raise _wrong(
        "staleness_steps", sweep.staleness_steps, "allowed one or more"
    )
  return lags


def _numbers(sweep: ml_collections.ConfigDict, key: str, low: int) -> list[int]:
  text = sweep[key]
  items = [item.strip() for item in text.split(",") if item.strip()]
  if any(not i.isdecimal() or int(i) < low for i in items):
    raise _wrong(
        key, text, f"allowed whole numbers from {low} on, separated by commas"
    )
  return sorted({int(item) for item in items})


def _own_config(
    config: ml_collections.ConfigDict,
    name: str,
    overrides: list[str],
    check: Callable[[ml_collections.ConfigDict], None],
) -> ml_collections.ConfigDict:
  """Returns the checked config of an objective's runs."""
  own = config.copy_and_resolve_references()
  try:
    config_args.apply_overrides(own, overrides)
    check(own)
  except config_args.ConfigError as error:
    raise config_args.ConfigError(
        f"config.sweep.objectives, {name}: {error}"
    ) from error
  before, now = config.train, own.train
  size = now.prompts_per_batch * now.completions_per_prompt
  if size != before.prompts_per_batch * before.completions_per_prompt:
    raise _wrong(
        "objectives",
        f"{name}: {' '.join(overrides)}",
        "allowed batches of config.train.prompts_per_batch ·"
        " config.train.completions_per_prompt completions, as all runs have",
    )
  return own


def _wrong(key: str, value: Any, allowed: str) -> config_args.ConfigError:
  return config_args.ConfigError(f"config.sweep.{key} = {value!r}: {allowed}")

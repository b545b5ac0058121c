# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions for config files: arguments, imports and common variants."""

import importlib.util
import pathlib
import types

import ml_collections

_PACKAGE = pathlib.Path(__file__).parents[1]
# Experiment configs; a wheel contains them inside the package.
CONFIGS = _PACKAGE / "configs"
if not CONFIGS.is_dir():
  CONFIGS = _PACKAGE.parent / "configs"


def find_config(path: str) -> pathlib.Path | None:
  """Returns the config file for `--config`, or None if there is none.

  Args:
    path: FILE.py in the working directory, `configs/NAME.py`, or NAME, such as
      "countdown" or "gsm8k/tba".
  """
  name = path.removeprefix("configs/").removesuffix(".py")
  files = [pathlib.Path(path)]
  if not pathlib.PurePath(name).is_absolute():
    files.append(CONFIGS / f"{name}.py")
  return next((f for f in files if f.suffix == ".py" and f.is_file()), None)


def config_names() -> list[str]:
  """Returns the names of the experiment configs."""
  return sorted(
      str(file.relative_to(CONFIGS).with_suffix(""))
      for file in CONFIGS.rglob("*.py")
  )


def import_config(path: str, relative_to: str = "") -> types.ModuleType:
  """Imports a config file, for another config to build on.

      sft = variants.import_config("sft.py", relative_to=__file__)

  The path is relative to the folder of `relative_to`; without it, `find_config`
  looks the file up. Raises FileNotFoundError.
  """
  folder = pathlib.Path(relative_to).parent if relative_to else None
  file = folder / path if folder else find_config(path)
  if file is None or file.suffix != ".py" or not file.is_file():
    raise FileNotFoundError(f"{path}: there is no such Python file")
  spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def parse_arg(
    arg: str, **spec: bool | int | float | str
) -> ml_collections.ConfigDict:
  """Parses a config's argument string.

  `parse_arg("quick,seed=3", quick=False, seed=0)` gives quick=True, seed=3.

  Args:
    arg: comma-separated `name` (a flag) or `name=value`; may be empty or None.
    **spec: default of each argument, which also gives its type.

  Raises:
    ValueError: unknown name, or value of the wrong type.
  """
  out = dict(spec)
  for item in filter(None, (arg or "").split(",")):
    name, has_value, text = item.partition("=")
    if name not in spec:
      raise ValueError(
          f"config argument {name!r} is unknown; must be one of {sorted(spec)}"
      )
    kind = type(spec[name])
    if not has_value and kind is not bool:
      raise ValueError(f"config argument {name!r} needs a value: {name}=…")
    text = "true" if kind is bool and not text else text
    out[name] = parse_text(f"config argument {name}", text, spec[name])
  return ml_collections.ConfigDict(out)


def check_choices(
    arg: ml_collections.ConfigDict, **allowed: tuple[int | str, ...]
) -> None:
  """Raises ValueError if an argument is not among its allowed values."""
  for name, values in allowed.items():
    if arg[name] not in values:
      raise ValueError(
          f"config argument {name}={arg[name]!r}: must be one of"
          f" {', '.join(map(str, values))}"
      )


def type_name(example: bool | int | float | str | None) -> str:
  """Returns the name of a type for messages, given an example value."""
  names = {bool: "true or false", int: "a whole number", float: "a number"}
  names[type(None)] = "a number, or None"
  return names.get(type(example), "a string")


def parse_text(
    name: str, text: str, example: bool | int | float | str | None
) -> bool | int | float | str | None:
  """Parses `text` as the type of `example`; None stands for a number or "none".

  Raises:
    ValueError: `text` has the wrong type; the message begins with `name`.
  """
  bools = {"true": True, "1": True, "false": False, "0": False}
  kind = type(example)
  if example is None:
    if text.lower() == "none":
      return None
    kind = float
  try:
    return bools[text.lower()] if kind is bool else kind(text)
  except (KeyError, ValueError) as error:
    raise ValueError(
        f"{name} = {text!r}: must be {type_name(example)}"
    ) from error


def shrink_model(c: ml_collections.ConfigDict) -> None:
  """Shrinks only the model, so that it trains in seconds."""
  c.model.num_layers = 1
  c.model.width = 32
  c.model.num_heads = c.model.num_kv_heads = 2
  c.model.mlp_width = 64


def make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks model, SFT, training and evaluation to seconds.

  Leaves the task and text lengths alone.
  """
  shrink_model(c)
  c.sft.num_steps = 40
  c.sft.warmup_steps = 5
  c.sft.batch_size = 16
  c.sft.evaluate_every_steps = 40
  c.sft.checkpoint_every_steps = 20
  c.sft.log_every_steps = 10
  c.sampling.num_slots = 32
  c.search.prompts_per_round = c.search.prompts_per_step = 8
  c.search.samples_per_prompt = 4
  c.train.num_steps = 6
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 8
  c.train.completions_per_prompt = 4
  c.evaluate.every_steps = 3
  c.evaluate.num_prompts = 16
  c.evaluate.num_completions = 4
  c.evaluate.final_prompts = 32
  c.evaluate.batch_prompts = 16
  c.checkpoint.every_steps = 3
  c.log.samples_every_steps = 3


def set_rounds(
    c: ml_collections.ConfigDict,
    *,
    mini_batches: int,
    passes: int = 1,
    lag_rounds: int = 1,
) -> None:
  """Sets rounds and all settings that depend on them.

  Rounds `train.num_steps` down to whole rounds, of which there is at least one.
  """
  steps = mini_batches * passes
  c.rounds.mini_batches = mini_batches
  c.rounds.passes = passes
  c.rounds.lag_rounds = lag_rounds
  c.train.num_steps = max(c.train.num_steps // steps, 1) * steps
  c.publish.every_steps = steps
  c.search.samples_per_prompt = c.train.completions_per_prompt
  c.search.prompts_per_round = min(
      c.search.prompts_per_round, mini_batches * c.train.prompts_per_batch
  )
  c.search.wait_for_fresh = True
  c.replay.recent_fraction = 1.0
  c.replay.dedupe = False
  c.replay.skip_equal_rewards = False
  c.replay.warm_start_completions = 0
  c.replay_filter.similarity = "none"
  c.replay_filter.evict = "oldest"
  c.replay_filter.freeze_step = 0
  c.replay_filter.duplicates = "newest"

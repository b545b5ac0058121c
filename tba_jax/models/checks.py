# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Relations of the model's shape, and the models that settings name."""

import os
import pathlib

from tba_jax.losses import objective_table
from tba_jax.models import config as config_lib
from tba_jax.models import settings
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import hf_tensors
from tba_jax.models.hf import packaged_models
from tba_jax.system import processes
from tba_jax.system import rules

# Setting that may name a model -> values that are not models, and the numbers
# of labels that the model's head may have.
_MODELS = {
    "init": (("scratch", "sft"), folders.POLICY),
    "sft.init": (("scratch",), folders.POLICY),
    "tokenizer.source": (("task",), ()),
    "evaluate.judge": (("", "task", "command"), folders.SCORER),
    "reward_model.init": (("sft",), (*folders.POLICY, *folders.SCORER)),
    "reward_model.relabel": (("", "task"), folders.SCORER),
    "reward.model": (("reward_model",), folders.SCORER),
    "loss.value_init": (("policy", "reward_model"), folders.SCORER),
    "reference.init": (("",), folders.POLICY),
}
# Models other than the reference that read the policy's tokens.
_SCORERS = (
    "evaluate.judge", "reward_model.relabel", "reward.model", "loss.value_init"
)  # fmt: skip
_STARTS = ("init", "sft.init")
# Programs that need only a model's shape.
_WITHOUT_WEIGHTS = ("plan", "compile")


def start(c: rules.Values) -> tuple[str, config_lib.ModelConfig | None]:
  """Returns the name of the policy's initial model, and its shape.

  The shape is None for "scratch". Raises KeyError if the folder cannot be read,
  which `named` reports.
  """
  name = c["sft.init"] if c["init"] == "sft" else c["init"]
  if name == "scratch":
    return name, None
  try:
    return name, hf_config.read(name)
  except ValueError as error:
    raise KeyError(name) from error


def num_experts(c: rules.Values) -> int:
  """Returns the number of experts per layer of the initial policy."""
  shape = start(c)[1]
  return c["model.num_experts"] if shape is None else shape.num_experts


def shape_or_none(c: rules.Values) -> config_lib.ModelConfig | None:
  """Returns the shape of the initial policy's folder, None if there is none."""
  try:
    return start(c)[1]
  except KeyError:
    return None


def stop_ids(c: rules.Values) -> list[int]:
  """Returns the stop tokens that the config adds."""
  texts = c.get("sampling.stop_token_ids", "").split(",")
  return [int(text) for text in texts if text]


def _unread_models(c: rules.Values) -> set[str]:
  """Returns the model settings that other settings disable."""
  unread = set()
  if c.get("reward.backend") != "model":
    unread.add("reward.model")
  if not objective_table.find(c.get("loss.name")).has_values:
    unread.add("loss.value_init")
  return unread


def _positions(c: rules.Values) -> rules.Problems:
  length = c["sampling.max_prompt_tokens"] + c["sampling.max_completion_tokens"]
  name, shape = start(c)
  if shape is None and length > c["model.max_positions"]:
    yield "model.max_positions", (
        f"must be {length} or more: config.sampling.max_prompt_tokens +"
        " config.sampling.max_completion_tokens"
    )
  elif shape is not None and length > shape.max_positions:
    yield "sampling.max_completion_tokens", (
        "must be, together with config.sampling.max_prompt_tokens, at most"
        f" {shape.max_positions}, the positions of {name}"
    )
  for key in ("reference.init", "reward_model.init", *_SCORERS):
    # Only models that the run reads are checked.
    if c.get(key, "") in ("", *_MODELS[key][0]) or key in _unread_models(c):
      continue
    try:
      positions = hf_config.read(c[key]).max_positions
    except ValueError:
      continue  # `named` reports it.
    if length > positions:
      yield key, (
          f"must be a model of {length} positions or more,"
          " config.sampling.max_prompt_tokens +"
          f" config.sampling.max_completion_tokens; it has {positions}"
      )


def _pair_positions(c: rules.Values) -> rules.Problems:
  """Checks that the reward model's initial model has enough positions."""
  name = c["reward_model.init"]
  name = c["sft.init"] if name == "sft" else name
  if name == "scratch":
    if c["init"] not in ("sft", "scratch"):
      return  # WORKDIR/sft holds another config's model.
    name, most = "config.model", c["model.max_positions"]
  else:
    try:
      most = hf_config.read(name).max_positions
    except ValueError:
      return  # `named` reports it.
  key = "reward_model.max_completion_tokens"
  if c["sampling.max_prompt_tokens"] + c[key] > most:
    yield key, (
        "must be, together with config.sampling.max_prompt_tokens, at most"
        f" {most}, the positions of {name}"
    )


def _shape(c: rules.Values) -> rules.Problems:
  """Checks that a new model's settings fit its family and each other."""
  if start(c)[1] is not None:
    return
  prefix = "model."
  fields = {
      key.removeprefix(prefix): value
      for key, value in c.items()
      if key.startswith(prefix)
  }
  if len(fields) < sum(key.startswith(prefix) for key in settings.SETTINGS):
    return  # The missing ones are invalid and reported elsewhere.
  ids = dict(vocab_size=1, pad_id=None, bos_id=None, eos_id=None)
  try:
    config_lib.ModelConfig.from_config(fields, **ids)
  except ValueError as error:
    for line in str(error).split("; "):
      key, _, allowed = line.removeprefix("config.").partition(": ")
      yield key.partition("=")[0], allowed


def named(c: rules.Values) -> rules.Problems:
  """Checks the models that a program reads; downloads them from the hub."""
  unread = _unread_models(c)
  for key, (names, labels) in _MODELS.items():
    is_read = rules.section(key) in c.sections and key not in unread
    if c.get(key, names[0]) in names or not is_read:
      continue
    weights = key != "tokenizer.source" and c.program not in _WITHOUT_WEIGHTS
    if key in _STARTS and c.program in ("searcher", "export"):
      # Params come from elsewhere, except the base of adapters.
      weights = bool(c.get("lora.rank"))
    try:
      folder = hf_hub.find(c[key], weights=weights)
      if not folder.is_dir():
        yield key, (
            f"must be one of {', '.join(map(repr, names))}, a folder or a GGUF"
            " file of this machine, ORG/NAME of the Hugging Face hub, or"
            f" {' or '.join(packaged_models.MODELS)}"
        )
      elif processes.SUPERVISED not in os.environ:
        check_folder(c, key, folder, labels, weights)
      elif key in _STARTS:
        hf_config.read(folder)
    except (ValueError, OSError) as error:
      yield key, str(error)


def check_folder(
    c: rules.Values,
    key: str,
    folder: pathlib.Path,
    labels: tuple[int, ...],
    weights: bool,
) -> None:
  """Raises ValueError if the model or tokenizer in a folder cannot be used.

  `plan` and `compile` need neither tensors nor a tokenizer, but check those
  that exist.
  """
  ids = stop_ids(c)
  needs_tokenizer = c.program not in _WITHOUT_WEIGHTS or folders.has_tokenizer(
      folder
  )
  if key == "tokenizer.source":
    if needs_tokenizer:
      folders.check_tokenizer(folder, shape_or_none(c), ids)
    return
  shape = folders.read(folder, labels)
  if weights or (os.path.isdir(c[key]) and folders.has_weights(folder)):
    hf_tensors.check_model(folder, shape)
  is_own = key not in _STARTS or c.get("tokenizer.source") == "task"
  if is_own and needs_tokenizer:
    folders.check_tokenizer(folder, shape, ids if key in _STARTS else [])


def _states(c: rules.Values) -> rules.Problems:
  """Checks that models with recurrent states run on unsplit sequences."""
  if c["mesh.sequence"] == 1:
    return
  shapes = {"init": start(c)[1]}
  for key in ("reference.init", "loss.value_init"):
    if c.get(key, "") in ("", *_MODELS[key][0]) or key in _unread_models(c):
      continue
    try:
      shapes[key] = hf_config.read(c[key])
    except ValueError:
      continue  # `named` reports it.
  for key, shape in shapes.items():
    if shape is not None and shape.has_states:
      yield "mesh.sequence", (
          f"must be 1 for the model of config.{key}, whose delta nets pass a"
          " state from token to token; config.mesh.fsdp splits it as well"
      )


CHECKS = (_positions, _pair_positions, _shape, _states)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of a config: the policy's shape and dtype, and frozen models.

Reads only the models' config files; JAX is not loaded.
"""

import dataclasses
import pathlib

import ml_collections

from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf_config
from tba_jax.run import run_directory
from tba_jax.system import accelerators
from tba_jax.tasks import red_team
from tba_jax.tasks import task_table

# Frozen models


@dataclasses.dataclass(frozen=True)
class FrozenModel:
  """A frozen model of a role, other than the policy and its reference.

  folder: Hugging Face folder; None for a model of the policy's size that is
    trained later.
  kind: "scalar" for one reward per text, "policy" for next-token logits,
    "encoder" for a bidirectional float32 model.
  """

  name: str
  key: str
  folder: str | pathlib.Path | None
  kind: str

  def shape(self, policy: config_lib.ModelConfig) -> config_lib.ModelConfig:
    """Returns the model's shape; not for encoders."""
    if self.folder is None:
      return dataclasses.replace(policy, num_labels=1)
    return read_shape(self.key, str(self.folder))


def frozen_models(
    config: ml_collections.ConfigDict, workdir: str | None, role: str
) -> list[FrozenModel]:
  """Returns the frozen models of the role "trainer" or "searcher"."""
  out = _judge_models(config, workdir)  # The trainer's evaluator has copies.
  if role == "searcher":
    return out
  gold = config.evaluate.judge
  if gold == "task":
    out += [
        dataclasses.replace(model, name=f"{model.name} of evaluate.judge")
        for model in _task_models(config)
    ]
  elif gold and gold != "command":
    out.append(FrozenModel("gold_model", "evaluate.judge", gold, "scalar"))
  if config.replay_filter.similarity == "cosine":
    out += [
        dataclasses.replace(model, name=f"{model.name} of replay_filter")
        for model in _task_models(config)
        if model.key == "task.encoder"
    ]
  return out


def _judge_models(
    config: ml_collections.ConfigDict, workdir: str | None
) -> list[FrozenModel]:
  """Returns the frozen models that give training rewards."""
  if config.reward.backend != "model":
    return _task_models(config)
  folder = config.reward.model
  if folder == "reward_model":
    folder = pathlib.Path(workdir or ".") / "reward_model" / "model"
    folder = folder if folder.is_dir() else None
  return [FrozenModel("reward_model", "reward.model", folder, "scalar")]


def _task_models(config: ml_collections.ConfigDict) -> list[FrozenModel]:
  """Returns a red-teaming task's frozen models."""
  task = config.task
  if task.name != red_team.RedTeam.name:
    return []
  guard = "policy" if task.classifier == "first_token" else "encoder"
  models = (
      FrozenModel("victim", "task.victim", task.victim, "policy"),
      FrozenModel(
          "classifier", "task.classifier_folder", task.classifier_folder, guard
      ),
      FrozenModel("encoder", "task.encoder", task.encoder, "encoder"),
  )
  none = ("", red_team.SYNTHETIC, red_team.WORDS)
  return [model for model in models if model.folder not in none]


# The policy


def model_of(config: ml_collections.ConfigDict) -> config_lib.ModelConfig:
  """Returns the shape of the model that a run with this config trains.

  Raises:
    ValueError: a setting, file or folder cannot be used.
  """
  key = "sft.init" if config.init == "sft" else "init"
  start = config.sft.init if config.init == "sft" else config.init
  if start != "scratch":
    return read_shape(key, start, dtype=config.model.param_dtype)
  if config.tokenizer.source == "task":
    task = task_table.make_task(config.task)
    tokenizer = tokenizer_lib.word_level(
        task.tokenizer_words(), task.tokenizer_pattern
    )
  else:
    tokenizer = tokenizer_lib.load(config.tokenizer.source)
  return config_lib.ModelConfig.from_config(
      config.model,
      vocab_size=tokenizer.vocab_size,
      pad_id=tokenizer.pad_id,
      bos_id=tokenizer.bos_id,
      eos_id=tokenizer.eos_id,
  )


# On a CPU, narrower models decode faster in float32: casting activations costs
# more than the products gain (.92 of the speed at width 128, 1.5 at 256).
_BFLOAT16_WIDTH = 256


def compute_dtype(
    config: ml_collections.ConfigDict, kind: str = ""
) -> tuple[str, str]:
  """Returns the compute dtype of a new run, and why.

  Only the value "auto" on a CPU is replaced.

  Args:
    kind: accelerator; "" for this machine's.

  Raises:
    ValueError: the model's folder cannot be read.
  """
  set_to = config.model.compute_dtype
  if set_to != "auto":
    return set_to, "as set"
  kind = kind or accelerators.find().kind
  if kind != accelerators.CPU:
    return set_to, f"by the device, {kind}"
  if not accelerators.multiplies_bfloat16():
    return "float32", "this CPU has no AVX512_BF16 or AMX"
  start = config.sft.init if config.init == "sft" else config.init
  width = config.model.width
  if start != "scratch":
    width = read_shape("init", start).width
  if width < _BFLOAT16_WIDTH:
    why = f"width {width}; on this CPU bfloat16 from {_BFLOAT16_WIDTH} on"
    return "float32", why
  return "bfloat16", f"width {width} on a CPU with AVX512_BF16 or AMX"


def with_compute_dtype(
    config: ml_collections.ConfigDict, workdir: str
) -> ml_collections.ConfigDict:
  """Returns the config with this machine's choice for "auto".

  A run keeps its initial choice in `config.json`, because on another CPU it
  would otherwise train a different policy.
  """
  if config.model.compute_dtype != "auto":
    return config
  if (pathlib.Path(workdir) / "config.json").exists():
    dtype = run_directory.load_config(workdir).model.compute_dtype
    why = "as when the run began"
  else:
    dtype, why = compute_dtype(config)
  if dtype == "bfloat16":  # "auto" is float32 on a CPU.
    print(f"model.compute_dtype: {dtype}, {why}")
    config = config.copy_and_resolve_references()
    config.model.compute_dtype = dtype
  return config


def on_cpu(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a config with the compute dtype of a new run on this CPU."""
  config = config.copy_and_resolve_references()
  config.model.compute_dtype = compute_dtype(config)[0]
  return config


def read_shape(
    key: str, folder: str, dtype: str | None = None
) -> config_lib.ModelConfig:
  try:
    return hf_config.read(folder, dtype=dtype)
  except ValueError as error:
    raise ValueError(f"config.{key}={folder!r}: {error}") from error

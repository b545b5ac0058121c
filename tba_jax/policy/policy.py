# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds task, tokenizer, model, samplers and value model from a config."""

import dataclasses
import json
import pathlib

import jax
import ml_collections

from tba_jax import types
from tba_jax.losses import objective_table
from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.tasks import base
from tba_jax.tasks import task_table as tasks_build


@dataclasses.dataclass(frozen=True)
class Policy:
  """The policy of a config, without its params.

  task: prompts and reward; None if not needed.
  model: pure functions `init` and `apply`.
  folder: Hugging Face folder of the initial params, or ORG/NAME of the hub;
    None = random.
  adapters: LoRA adapters to train; None = train all params.
  value_folder: Hugging Face folder that the value model starts from; None =
    the policy, or no value model.
  """

  task: base.PromptSet | None
  tokenizer: tokenizer_lib.Tokenizer
  model: transformer.Model
  folder: pathlib.Path | None
  adapters: lora.Adapters | None
  value_folder: pathlib.Path | None = None

  @property
  def trained(self) -> transformer.Model | lora.Adapters:
    """The trained and published part; has `init` and `logical_axes`."""
    return self.adapters or self.model


def add_stops(
    config: ml_collections.ConfigDict, tokenizer: tokenizer_lib.Tokenizer
) -> None:
  """Adds the config's stop tokens and stop strings to the tokenizer's own.

  Raises ValueError for a stop token outside the vocabulary.
  """
  ids = config.sampling.stop_token_ids
  tokenizer.add_stop_ids(int(item) for item in ids.split(",") if item)
  tokenizer.add_stop_strings(json.loads(config.sampling.stop_strings or "[]"))


def sft_folder(workdir: str | pathlib.Path) -> pathlib.Path:
  """Returns the folder of the model that supervised fine-tuning saves."""
  return pathlib.Path(workdir) / "sft" / "model"


def make_policy(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    *,
    scratch: bool = False,
    needs_task: bool = True,
) -> Policy:
  """Returns the policy of a config.

  Args:
    config: reads `task`, `tokenizer`, `model`, `init`, `lora`, `train.remat`.
    workdir: holds the SFT model if `config.init` is "sft".
    scratch: returns the policy that SFT starts from, `config.sft.init`.
    needs_task: whether to make the task, whose data may be missing here; it is
      always made where the tokenizer has its words.

  Raises:
    ValueError: the checkpoint is missing or disagrees with the config.
  """
  start = config.sft.init if scratch else config.init
  if start == "scratch":
    folder = None
  elif start == "sft":
    folder = sft_folder(workdir)
  else:
    folder = pathlib.Path(start).expanduser()
  task = None
  if needs_task or (config.tokenizer.source == "task" and folder is None):
    task = tasks_build.make_task(config.task)
  if config.tokenizer.source != "task":
    tokenizer = tokenizer_lib.load_configured(
        config.tokenizer.source, config.tokenizer
    )
  elif folder is not None:
    tokenizer = tokenizer_lib.load_configured(folder, config.tokenizer)
  else:
    task.warn_of_unseen_words()
    tokenizer = tokenizer_lib.word_level(
        task.tokenizer_words(), task.tokenizer_pattern
    )
  add_stops(config, tokenizer)
  if needs_task:
    task.drop_long(
        tokenizer,
        config.sampling.max_prompt_tokens,
        # SFT also learns a stop token after each answer.
        max_answer_tokens=scratch * (config.sampling.max_completion_tokens - 1),
    )
  if folder is None:
    model_config = config_lib.ModelConfig.from_config(
        config.model,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        backend=jax.default_backend(),
    )
  else:
    model_config = shape_of_folder(config, folder, config.model.param_dtype)
    try:
      folders.check_labels(model_config, folders.POLICY)
      folders.check_vocabulary(model_config, tokenizer.vocab_size)
    except ValueError as error:
      raise ValueError(f"config.init={folder}: {error}") from error
    tokenizer.add_turn_ends(model_config.turn_ends)
  if scratch:
    model_config = dataclasses.replace(model_config, param_dtype="float32")
  model = transformer.make_model(model_config, remat=config.train.remat)
  adapters = None if scratch else lora.make(config.lora, model)
  return Policy(
      task,
      tokenizer,
      model,
      folder,
      adapters,
      value_folder=find_value_folder(config, workdir),
  )


def shape_of_folder(
    config: ml_collections.ConfigDict,
    folder: str | pathlib.Path,
    dtype: str = "float32",
) -> config_lib.ModelConfig:
  """Returns a folder's shape with `config.model`'s compute dtype and kernel.

  `dtype` is the dtype of the params.
  """
  return hf_config.read(
      folder,
      dtype=dtype,
      compute_dtype=config_lib.compute_dtype(
          config.model, jax.default_backend()
      ),
      attention=config.model.attention,
  )


def initial_params(
    policy: Policy, seed: int, shardings: types.PyTree | None = None
) -> types.PyTree:
  """Returns the params that training starts from.

  Args:
    policy: source of the folder to load; without a folder, params are random.
    seed: initialization seed; random params are made on one device.
    shardings: placement of loaded params, of which a process reads only the
      shards of its devices; None = the default device.

  Raises:
    ValueError: the folder cannot be read.
  """
  if policy.folder is None:
    return jax.jit(policy.model.init)(jax.random.PRNGKey(seed))
  _, params = hf.load(
      policy.folder,
      dtype=policy.model.config.param_dtype,
      shardings=shardings,
  )
  return params


def find_value_folder(
    config: ml_collections.ConfigDict, workdir: str | pathlib.Path
) -> pathlib.Path | None:
  """Returns the folder of `loss.value_init`; None if no folder is needed."""
  source = config.loss.value_init
  if (
      not objective_table.find(config.loss.name).has_values
      or source == "policy"
  ):
    return None
  if source == "reward_model":
    return pathlib.Path(workdir) / "reward_model" / "model"
  return pathlib.Path(source).expanduser()

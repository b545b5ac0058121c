# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params of a config's models and how its meshes split them, from shapes alone.

Reads config files of models, and of encoders the headers of their weights; JAX
is not loaded.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib

import ml_collections

from tba_jax.config import settings as settings_lib
from tba_jax.models import config as config_lib
from tba_jax.models import hf_config
from tba_jax.models import hf_files
from tba_jax.models import hf_hub
from tba_jax.models import hf_names
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.programs import sections
from tba_jax.system import accelerators
from tba_jax.tasks import build
from tba_jax.tasks import red_team

# Parameter's path -> its shape and the logical name of each axis.
Leaves = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter on a mesh; `parts` is the number of shards of each axis."""

  name: str
  shape: tuple[int, ...]
  axes: tuple[str, ...]
  parts: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def device_size(self) -> int:
    """Elements on the fullest device."""
    return math.prod(
        math.ceil(n / parts) for n, parts in zip(self.shape, self.parts)
    )


def model_leaves(c: config_lib.ModelConfig) -> Leaves:
  """Returns every parameter of a model."""
  return {
      ".".join(row.path): (
          (c.num_layers,) * row.stacked + row.shape,
          ("layers",) * row.stacked + row.axes,
      )
      for row in hf_names.rows(c)
  }


def adapter_leaves(leaves: Leaves, *, rank: int, targets: str) -> Leaves:
  """Returns the low-rank factors that `lora.make` adds to a model."""
  wanted, out = settings_lib.lora_names(targets), {}
  for name, (shape, axes) in leaves.items():
    parent, _, kind = name.rpartition(".")
    if not parent.startswith("blocks.") or kind != "kernel":
      continue
    if wanted and parent.rpartition(".")[2] not in wanted:
      continue
    # A kernel reads the residual stream or writes to it.
    outs = len(axes) - 1 if axes[-1] == "width" else 2
    out[f"{parent}.a"] = (
        (shape[0], rank, *shape[outs:]),
        (axes[0], "lora_rank", *axes[outs:]),
    )
    out[f"{parent}.b"] = (
        (*shape[:outs], rank),
        (*axes[:outs], "lora_rank"),
    )
  return out


def shard(
    leaves: Leaves, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> list[Leaf]:
  """Returns how `config.sharding` splits parameters over a mesh."""
  out = []
  for name, (shape, axes) in leaves.items():
    taken: set[str] = set()  # A mesh axis splits a parameter once.
    parts = []
    for axis in axes:
      own = [a.strip() for a in rules[axis].split(",") if a.strip()]
      own = [a for a in own if a not in taken]
      taken.update(own)
      parts.append(math.prod(mesh[a] for a in own))
    out.append(Leaf(name, shape, axes, tuple(parts)))
  return out


def device_size(
    leaves: Leaves, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> int:
  """Returns the parameters that the fullest device of a mesh holds."""
  return sum(leaf.device_size for leaf in shard(leaves, rules, mesh))


def sharding_rows(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> sections.TableRows:
  """Returns how `config.mesh` splits parameters, and what does not divide."""
  leaves = shard(model_leaves(c), config.sharding, config.mesh)
  whole = [leaf for leaf in leaves if math.prod(leaf.parts) == 1]
  size = lambda counts: sections.format_bytes(
      sum(counts) * BYTES[c.param_dtype]
  )
  return [
      (
          "params",
          f"{size(leaf.size for leaf in leaves)},"
          f" {size(leaf.device_size for leaf in leaves)} a device",
      ),
      (
          "replicated on every device",
          f"{len(whole)} of {len(leaves)} leaves,"
          f" {size(leaf.size for leaf in whole)}",
      ),
      *(
          (leaf.name, f"NO: {axis} of {length} does not divide by {parts}")
          for leaf in leaves
          for axis, length, parts in zip(leaf.axes, leaf.shape, leaf.parts)
          if length % parts
      ),
  ]


def sharding_text(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> str:
  """Returns `sharding_rows` as lines of a log."""
  rows = sharding_rows(config, c)
  return "\n".join(f"  {name}: {value}" for name, value in rows)


# Frozen models


@dataclasses.dataclass(frozen=True)
class Frozen:
  """A frozen model of a role, beside the policy and its reference.

  name: as programs and messages have it.
  key: setting that names its folder.
  folder: of the model; None stands for one as large as the policy, which is
    trained later.
  kind: "scalar" has one reward a text, "policy" next-token logits, "encoder"
    is bidirectional and float32.
  copies: held by the role.
  """

  name: str
  key: str
  folder: str | pathlib.Path | None
  kind: str
  copies: int = 1

  def shape(self, policy: config_lib.ModelConfig) -> config_lib.ModelConfig:
    """Returns its shape; not of an encoder."""
    if self.folder is None:
      return dataclasses.replace(policy, num_labels=1)
    return read_shape(self.key, str(self.folder))


def frozen_models(
    config: ml_collections.ConfigDict, workdir: str | None, role: str
) -> list[Frozen]:
  """Returns the frozen models of the role "trainer" or "searcher"."""
  judges = _judge_models(config, workdir)
  if role == "searcher":
    return judges if config.reward.role == "searcher" else []
  # The evaluator has judges of its own.
  copies = 1 + (config.reward.role == "trainer")
  out = [dataclasses.replace(judge, copies=copies) for judge in judges]
  gold = config.evaluate.judge
  if gold == "task":
    out += [
        dataclasses.replace(model, name=f"{model.name} of evaluate.judge")
        for model in _task_models(config)
    ]
  elif gold and gold != "command":
    out.append(Frozen("gold_model", "evaluate.judge", gold, "scalar"))
  if config.replay_filter.similarity == "cosine":
    out += [
        dataclasses.replace(model, name=f"{model.name} of replay_filter")
        for model in _task_models(config)
        if model.key == "task.encoder"
    ]
  return out


def _judge_models(
    config: ml_collections.ConfigDict, workdir: str | None
) -> list[Frozen]:
  """Returns the frozen models that give training rewards."""
  if config.reward.where != "model":
    return _task_models(config)
  folder = config.reward.model
  if folder == "reward_model":
    folder = pathlib.Path(workdir or ".") / "reward_model" / "model"
    folder = folder if folder.is_dir() else None
  return [Frozen("reward_model", "reward.model", folder, "scalar")]


def _task_models(config: ml_collections.ConfigDict) -> list[Frozen]:
  """Returns a red-teaming task's frozen models."""
  task = config.task
  if task.name != red_team.RedTeam.name:
    return []
  guard = "policy" if task.classifier == "first_token" else "encoder"
  found = (
      Frozen("victim", "task.victim", task.victim, "policy"),
      Frozen(
          "classifier", "task.classifier_folder", task.classifier_folder, guard
      ),
      Frozen("encoder", "task.encoder", task.encoder, "encoder"),
  )
  none = ("", red_team.MADE_UP, red_team.WORDS)
  return [model for model in found if model.folder not in none]


def frozen_bytes(
    model: Frozen,
    policy: config_lib.ModelConfig,
    rules: Mapping[str, str],
    mesh: Mapping[str, int],
) -> int:
  """Returns the bytes of a frozen model on the fullest device.

  An axis that does not divide is replicated; an encoder is counted whole.

  Raises:
    ValueError: its folder cannot be read; names the config key.
  """
  if model.kind == "encoder":
    return model.copies * BYTES["float32"] * _num_stored(model)
  shape = model.shape(policy)
  size = sum(
      math.prod(
          n if n % parts else n // parts
          for n, parts in zip(leaf.shape, leaf.parts)
      )
      for leaf in shard(model_leaves(shape), rules, mesh)
  )
  return model.copies * BYTES[shape.param_dtype] * size


def _num_stored(model: Frozen) -> int:
  """Returns the params in a folder's files."""
  try:
    files = hf_files.Files(hf_hub.find(model.folder))
  except ValueError as error:
    raise ValueError(f"config.{model.key}={model.folder!r}: {error}") from error
  return sum(map(math.prod, files.shapes.values()))


def value_shape(
    config: ml_collections.ConfigDict,
    policy: config_lib.ModelConfig,
    workdir: str | None,
) -> config_lib.ModelConfig:
  """Returns the shape of the value model, of a loss that has one.

  Without a folder yet, it is the policy's.
  """
  source = config.loss.value_init
  if source == "reward_model":
    source = pathlib.Path(workdir or ".") / "reward_model" / "model"
    source = str(source) if source.is_dir() else "policy"
  if source == "policy":
    return dataclasses.replace(policy, num_labels=1, param_dtype="float32")
  return dataclasses.replace(
      read_shape("loss.value_init", source),
      param_dtype="float32",
      compute_dtype=policy.compute_dtype,
  )


# The policy


def model_of(config: ml_collections.ConfigDict) -> config_lib.ModelConfig:
  """Returns the shape of the model that a run of this config trains.

  Raises:
    ValueError: a setting, file or folder cannot be used.
  """
  key = "sft.init" if config.init == "sft" else "init"
  start = config.sft.init if config.init == "sft" else config.init
  if start != "scratch":
    return read_shape(key, start, dtype=config.model.param_dtype)
  if config.tokenizer.source == "task":
    task = build.make_task(config.task)
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


# On a CPU, narrower models decode faster in float32: the casts of activations
# cost more than the products gain (.92 of the speed at 128, 1.5 at 256).
_BFLOAT16_WIDTH = 256


def compute_dtype(config: ml_collections.ConfigDict) -> tuple[str, str]:
  """Returns what a new run on this machine computes in, and why.

  Another `model.compute_dtype` than "auto", or an accelerator, leaves it as it
  is.

  Raises:
    ValueError: the folder of the model cannot be read.
  """
  set_to = config.model.compute_dtype
  if set_to != "auto":
    return set_to, "as set"
  kind = accelerators.find().kind
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


def read_shape(
    key: str, folder: str, dtype: str | None = None
) -> config_lib.ModelConfig:
  try:
    return hf_config.read(folder, dtype=dtype)
  except ValueError as error:
    raise ValueError(f"config.{key}={folder!r}: {error}") from error

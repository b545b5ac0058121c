# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A train step as a file that any machine can compute again.

The file (`.npz`, no pickle) has the batch, the state before the step with its
checksums, the config, the model's shape, and the recorded metrics of the step.
It serves bug reports: the run, its data, tokenizer and model folder are not
needed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import rich.console
import rich.table

from tba_jax import types
from tba_jax.config import load
from tba_jax.learning import checkpoint
from tba_jax.learning import device_work
from tba_jax.learning import host_state
from tba_jax.learning import model_source
from tba_jax.learning import train_step as train_step_lib
from tba_jax.models import config as config_lib
from tba_jax.models.net import heads
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import value_model as value_model_lib
from tba_jax.system import processes

_FORMAT = 3
# Relative difference up to which metrics on different machines count as equal,
# by compute dtype; near 0, a hundredth of it is the absolute tolerance.
_ROUNDING = {"float32": 1e-3, "bfloat16": 5e-2}


def write(
    path: pathlib.Path,
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    work: device_work.DeviceWork,
    draw: types.Draw,
    batch: types.Batch,
    metrics: Mapping[str, float],
) -> None:
  """Writes a step to a file before the step is taken.

  Args:
    path: file to write or replace.
    work: owner of the state before the step.
    draw: data drawn for the step.
    batch: same data as placed on the devices.
  """
  decode = policy.tokenizer.decode
  prompts = [
      decode(tokens[mask > 0].tolist())
      for tokens, mask in zip(draw.prompt_tokens, draw.prompt_mask)
  ]
  completions = [
      [
          policy.tokenizer.decode_completion(row.tolist(), int(n), bool(end))
          for row, n, end in zip(*group)
      ]
      for group in zip(
          draw.completion_tokens, draw.completion_lengths, draw.stopped
      )
  ]
  value_model = value_model_lib.make_model(
      config, policy.model, policy.value_folder
  )
  teacher = None
  if work.teacher_params is not None:
    teacher = dataclasses.asdict(work.reference.model.config)
  packed = host_state.pack(
      {
          "format": _FORMAT,
          "step": draw.step,
          "config": config.to_dict(),
          "model": dataclasses.asdict(policy.model.config),
          "value_model": value_model and dataclasses.asdict(value_model.config),
          "draw": {
              name: value
              for name, value in vars(draw).items()
              if isinstance(value, np.ndarray)
          },
          "prompts": prompts,
          "completions": completions,
          "batch": _leaves(batch),
          "state": _leaves(work.state),
          "base": _leaves(work.base_params),
          "teacher_model": teacher,
          "teacher": _leaves(work.teacher_params),
          "checksums": checkpoint.leaf_checksums(work.state),
          "metrics": {name: np.float32(x) for name, x in metrics.items()},
      }
  )
  with path.open("wb") as file:
    host_state.write(file, packed)


def run(operands: Sequence[str]) -> int:
  """Computes the step in a file, and prints computed and recorded metrics.

  Returns:
    0: the metrics are equal up to rounding; 1: they are not.

  Raises:
    ValueError: the operands or the file are invalid.
    OSError: the file does not exist.
  """
  if len(operands) != 1:
    raise ValueError(
        "--program=rerun without --workdir: must be one file of --export_step"
    )
  saved = read_saved(pathlib.Path(operands[0]))
  metrics = compute(saved)
  table = rich.table.Table(box=None, header_style="", pad_edge=False)
  for title in ("metric", "recorded", "computed", "difference"):
    table.add_column(title)
  rounding = _ROUNDING[saved["model"]["compute_dtype"]]
  differing = []
  for name, before in saved["metrics"].items():
    now, before = float(metrics.get(name, np.nan)), float(before)
    # Metrics may be NaN on purpose, if the file is about a non-finite step.
    if not math.isclose(
        now, before, rel_tol=rounding, abs_tol=rounding / 100
    ) and not (math.isnan(now) and math.isnan(before)):
      differing.append(name)
    table.add_row(
        name, f"{before:.9g}", f"{now:.9g}", f"{abs(now - before):.1e}"
    )
  rich.console.Console(highlight=False).print(table)
  devices = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
  verdict = f"differs in {', '.join(differing)}" if differing else "is the same"
  print(f"step {saved['step']} on {devices}: {verdict} (to {rounding})")
  return 1 if differing else processes.EXIT_OK


def compute(saved: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the metrics of the step in a file, computed on one device.

  Raises:
    ValueError: the state differs from the one that was written.
  """
  config = load.complete(ml_collections.ConfigDict(saved["config"]))
  mesh = model_source.one_device()
  model = transformer.make_model(
      _model_config(saved["model"]), remat=config.train.remat
  )
  adapters = lora.make(config.lora, model)
  value_model = None
  if saved["value_model"]:
    value_model = heads.ScalarModel(
        _model_config(saved["value_model"]), remat=config.train.remat
    )
  abstract = train_step_lib.abstract_state(
      config, adapters or model, mesh, value_model=value_model
  )
  state = _tree(saved["state"], abstract)
  if checkpoint.leaf_checksums(state) != saved["checksums"]:
    raise ValueError("the state has other checksums than when it was written")
  params_of = lambda name, model: _tree(
      saved[name], jax.eval_shape(model.init, jax.random.PRNGKey(0))
  )
  base = params_of("base", model) if adapters else None
  teacher = teacher_params = None
  if saved.get("teacher_model"):
    teacher = transformer.make_model(_model_config(saved["teacher_model"]))
    teacher_params = params_of("teacher", teacher)
  step_fn = train_step_lib.make_train_step(
      config,
      model,
      mesh,
      value_model=value_model,
      adapters=adapters,
      base=base,
      teacher=teacher,
      teacher_params=teacher_params,
  )
  _, metrics = step_fn(state, types.batch_of(saved["batch"]))
  return jax.device_get(metrics)


def read_saved(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a step file; raises ValueError for other files."""
  try:
    with path.open("rb") as file:
      saved = host_state.read(file)
  except ValueError as error:
    raise ValueError(f"{path}: no file of --export_step: {error}") from error
  if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
    raise ValueError(f"{path}: no file of --export_step of this version")
  return saved


def _model_config(fields: Mapping[str, Any]) -> config_lib.ModelConfig:
  # JSON turned tuples into lists.
  tuples = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
  return config_lib.ModelConfig(**{**fields, **tuples})


def _leaves(tree: types.PyTree) -> dict[str, np.ndarray]:
  """Returns the leaves by name; bfloat16 is stored exactly as float32."""

  def on_host(leaf: Any) -> np.ndarray:
    leaf = np.asarray(jax.device_get(leaf))
    return leaf.astype(np.float32) if leaf.dtype == jnp.bfloat16 else leaf

  return {n: on_host(leaf) for n, leaf in types.named_leaves(tree).items()}


def _tree(leaves: Mapping[str, np.ndarray], like: types.PyTree) -> types.PyTree:
  """Returns a tree from leaves by name; raises ValueError if one is missing."""

  def take(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
    leaf = leaves.get(name)
    if leaf is None or leaf.shape != shape.shape:
      raise ValueError(f"the file has no leaf {name} of shape {shape.shape}")
    return jax.device_put(leaf.astype(shape.dtype), shape.sharding)

  shapes = types.named_leaves(like)
  return jax.tree.unflatten(
      jax.tree.structure(like), [take(*item) for item in shapes.items()]
  )

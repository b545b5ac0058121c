# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: params in from safetensors, and out again."""

import json
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.models import config as model_config_lib
from tba_jax.models import hf_config
from tba_jax.models import hf_names

ModelConfig = model_config_lib.ModelConfig
PyTree = types.PyTree

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What may stand in a folder that `save` replaces.
_OURS = frozenset(
    (
        "added_tokens.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        WEIGHTS,
    )
)


def _read_json(path: pathlib.Path) -> dict:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path}: not readable as JSON: {error}") from error


def read_config(
    folder: str | os.PathLike[str], *, dtype: str | None = None
) -> ModelConfig:
  """Returns the shape of a folder's model, without reading its tensors.

  Args:
    folder: a local folder with config.json.
    dtype: of parameters and activations; None takes the file's own.

  Raises:
    ValueError: config.json is not there, or `hf_config.from_hf` refuses it.
  """
  path = pathlib.Path(folder) / "config.json"
  try:
    return hf_config.from_hf(_read_json(path), dtype=dtype)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error


class _Files:
  """The safetensors files of a folder, opened, with the file of each tensor."""

  def __init__(self, folder: pathlib.Path):
    if (folder / INDEX).is_file():
      names = set(_read_json(folder / INDEX)["weight_map"].values())
    elif (folder / WEIGHTS).is_file():
      names = {WEIGHTS}
    else:
      raise ValueError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
    self._file_of = {}
    for name in sorted(names):
      try:
        opened = safetensors.safe_open(str(folder / name), framework="np")
      except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder / name}: not readable: {error}") from error
      self._file_of.update({key: opened for key in opened.keys()})

  @property
  def names(self) -> set[str]:
    return set(self._file_of)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._file_of[name].get_slice(name).get_shape())

  def read(self, name: str) -> np.ndarray:
    return self._file_of[name].get_tensor(name)


def _check_names(
    files: _Files, config: ModelConfig, rows: list[hf_names.Row]
) -> list[str]:
  """Returns what is missing, unused or of a wrong shape, a line each."""
  problems, left = [], files.names
  for row in rows:
    for name in row.hf_names(config.num_layers):
      if name not in left:
        problems.append(f"missing tensor {name} {list(row.hf_shape)}")
        continue
      left.remove(name)
      if files.shape(name) != row.hf_shape:
        problems.append(
            f"tensor {name} has shape {list(files.shape(name))}, expected"
            f" {list(row.hf_shape)}"
        )
  ignored = [re.compile(p) for p in hf_names.ignored(config)]
  for name in sorted(left):
    if not any(pattern.fullmatch(name) for pattern in ignored):
      problems.append(f"unused tensor {name} {list(files.shape(name))}")
  return problems


def _node(tree: dict, path: tuple[str, ...]) -> dict:
  """Returns the dict that holds a path's leaf, making dicts on the way."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  return tree


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    shardings: PyTree | None = None,
) -> tuple[ModelConfig, PyTree]:
  """Returns the shape and params of a local Hugging Face folder.

  The host holds one leaf at a time beside what it has put on devices.

  Args:
    folder: with config.json and one or more safetensors files.
    dtype: of parameters and activations; None takes the file's own.
    shardings: a sharding in place of each leaf of params, or None for the
      default device.

  Raises:
    ValueError: config.json is refused, or tensors are missing, unused or of a
      wrong shape; the message lists all of them. Or an entry is not finite.
  """
  path = pathlib.Path(folder)
  config = read_config(path, dtype=dtype)
  rows = hf_names.rows(config)
  files = _Files(path)
  problems = _check_names(files, config, rows)
  if problems:
    raise ValueError(f"{folder}: " + "; ".join(problems))
  params = {}
  for row in rows:
    layers = [
        files.read(n).reshape(row.shape)
        for n in row.hf_names(config.num_layers)
    ]
    for name, layer in zip(row.hf_names(config.num_layers), layers):
      if not np.isfinite(layer).all():
        raise ValueError(f"{folder}: tensor {name} has NaN or infinite entries")
    array = np.stack(layers) if row.stacked else layers[0]
    array = array.astype(jnp.dtype(config.param_dtype))
    sharding = None
    if shardings is not None:
      sharding = _node(shardings, row.path)[row.path[-1]]
    _node(params, row.path)[row.path[-1]] = jax.device_put(array, sharding)
  return config, params


def _tensors(config: ModelConfig, params: PyTree) -> dict[str, np.ndarray]:
  """Returns the file's tensors; ValueError for params of another shape."""
  tensors, problems, count = {}, [], 0
  for row in hf_names.rows(config):
    leaf = params
    for key in row.path:
      leaf = leaf.get(key, {}) if isinstance(leaf, dict) else {}
    expected = (config.num_layers,) * row.stacked + row.shape
    if isinstance(leaf, dict) or tuple(leaf.shape) != expected:
      found = "missing" if isinstance(leaf, dict) else list(leaf.shape)
      name = "/".join(row.path)
      problems.append(f"params {name}: {found}, expected {list(expected)}")
      continue
    count += 1
    array = np.ascontiguousarray(leaf, dtype=jnp.dtype(config.param_dtype))
    layers = list(array) if row.stacked else [array]
    for name, layer in zip(row.hf_names(config.num_layers), layers):
      tensors[name] = layer.reshape(row.hf_shape)
  if not problems and len(jax.tree.leaves(params)) != count:
    problems.append("params have leaves that the family does not name")
  if problems:
    raise ValueError("; ".join(problems))
  return tensors


def save(
    folder: str | os.PathLike[str],
    model_config: ModelConfig,
    params: PyTree,
    tokenizer: tokenizer_lib.Tokenizer | None = None,
) -> None:
  """Writes a folder that `transformers` loads as it is.

  It holds config.json, generation_config.json, model.safetensors and, with a
  tokenizer, its files. The folder appears whole or not at all: it is written
  beside its place and renamed. A folder of the same kind is replaced.

  Args:
    folder: a local path; parents are made.
    model_config: the shape; tensors are stored in its param_dtype.
    params: the model's params, addressable by this process.
    tokenizer: saved beside the model.

  Raises:
    ValueError: params do not have that shape, or the folder holds files that
      are not a model's.
  """
  path = pathlib.Path(folder)
  foreign = sorted({p.name for p in path.glob("*")} - _OURS)
  if foreign:
    raise ValueError(f"{folder}: not replaced, it holds other files: {foreign}")
  tensors = _tensors(model_config, params)
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(f".{path.name}.new-{os.getpid()}")
  old = path.with_name(f".{path.name}.old-{os.getpid()}")
  shutil.rmtree(new, ignore_errors=True)
  new.mkdir()
  try:
    _write(new, model_config, tensors, tokenizer)
    if path.exists():
      path.rename(old)
    new.rename(path)
  finally:
    shutil.rmtree(new, ignore_errors=True)
  shutil.rmtree(old, ignore_errors=True)


def _write(
    folder: pathlib.Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    tokenizer: tokenizer_lib.Tokenizer | None,
) -> None:
  hf = hf_config.to_hf(config)
  ids = ("pad_token_id", "bos_token_id", "eos_token_id")
  generation = {"_from_model_config": True, **{name: hf[name] for name in ids}}
  for name, content in (
      ("config.json", hf),
      ("generation_config.json", generation),
  ):
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (folder / name).write_text(text, encoding="utf-8")
  if tokenizer is not None:
    tokenizer.save(folder)
  # transformers refuses a file that does not name its framework.
  safetensors.numpy.save_file(
      tensors, str(folder / WEIGHTS), metadata={"format": "pt"}
  )

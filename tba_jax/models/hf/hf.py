# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads and saves models as Hugging Face folders."""

from collections.abc import Callable
import math
import os
import pathlib
import re
import shutil

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import hf_names
from tba_jax.models.hf import hf_tensors

ModelConfig = config_lib.ModelConfig
PyTree = types.PyTree

WEIGHTS = hf_files.WEIGHTS
INDEX = hf_files.INDEX

# Files that `save` may replace; it refuses a folder that contains others.
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|adapter_model\.safetensors|((generation|adapter)_)?config\.json|"
    + "|".join(map(re.escape, tokenizer_lib.FILES))
)

# Maximum number of bytes of a tensor read at a time.
_PIECE_BYTES = 16 * 2**20
# CPU devices use host arrays with this alignment without copying them.
_ALIGNMENT = 64


def _node(tree: dict, path: tuple[str, ...]) -> dict:
  """Returns the dict that holds a path's leaf, creating dicts as needed."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  return tree


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    compute_dtype: str | None = None,
    shardings: PyTree | None = None,
) -> tuple[ModelConfig, PyTree]:
  """Returns the shape and params of a local Hugging Face folder.

  A process reads only the slices that its devices own, and buffers little more
  than one leaf's slices on the host.

  Args:
    folder: a path, or a model of the hub (`hf_hub`).
    dtype: type of parameters; None keeps the file's.
    compute_dtype: dtype of activations; None takes the parameters' dtype.
    shardings: placement of the params; None is the default device.

  Raises:
    ValueError: config.json is not supported, a file cannot be read, an entry is
      not finite, or tensors are missing, unused, of a wrong shape or not
      floating-point; the message names the first of these.
  """
  path = hf_hub.find(folder)
  config = hf_config.read(path, dtype=dtype, compute_dtype=compute_dtype)
  try:
    files = hf_tensors.open_files(path)
    rows = hf_names.match_prefix(files.shapes, config, hf_names.rows(config))
    _log_unread(path, config, files)
    params = read_params(
        files,
        rows,
        num_layers=config.num_layers,
        dtype=config.param_dtype,
        ignored=hf_names.ignored(config),
        shardings=shardings,
    )
    if config.tie_embeddings and not config.num_labels:
      _check_tied_head(files, rows)
  except (ValueError, OSError) as error:
    raise ValueError(f"{folder}: {error}") from error
  return config, params


def _log_unread(
    path: pathlib.Path, config: ModelConfig, files: hf_tensors.AnyFiles
) -> None:
  """Logs a line about tensors that belong to other parts of the model."""
  others = re.compile(hf_names.unread(config))
  names = sorted(filter(others.fullmatch, files.shapes))
  if names:
    logging.info(
        *("%s: %d tensors are not read: %s", path, len(names)),
        hf_files.first_of(names),
    )


def _check_tied_head(
    files: hf_tensors.AnyFiles, rows: list[hf_names.TensorRow]
) -> None:
  """Raises ValueError if a tied model has a head unlike its embedding.

  Merging an adapter of the head leaves such files.
  """
  table = next(r.hf_name for r in rows if r.path == ("embed", "embedding"))
  shape = files.shapes[table]
  for head in filter(re.compile(hf_names.TOKEN_HEAD).fullmatch, files.shapes):
    step = max(1, _PIECE_BYTES // (4 * shape[1]))
    pieces = (
        (slice(start, min(start + step, shape[0])), slice(None))
        for start in range(0, shape[0], step)
    )
    if files.shapes[head] != shape or not all(
        np.array_equal(files.read(table, piece), files.read(head, piece))
        for piece in pieces
    ):
      raise ValueError(
          f"tensor {head} differs from {table}: must be the same, or"
          " tie_word_embeddings=false in config.json, which makes it the head"
      )


def read_params(
    files: hf_tensors.AnyFiles,
    rows: list[hf_names.TensorRow],
    *,
    num_layers: int,
    dtype: str,
    ignored: str,
    shardings: PyTree | None = None,
) -> PyTree:
  """Returns the params that a table describes.

  Args:
    num_layers: length of the leaves under "blocks".
    dtype: type of all leaves but those in `hf_names.FLOAT32`.
    ignored: regular expression of the names that may be missing from the table.
    shardings: placement of the params; None is the default device.

  Raises:
    ValueError: `hf_tensors.check_tensors` fails, a tensor is damaged, or an
      entry is not finite.
  """
  hf_tensors.check_tensors(files, rows, num_layers=num_layers, ignored=ignored)
  # The processes of a mesh share the work of verifying all tensors.
  share = ()
  if not all(s.is_fully_addressable for s in jax.tree.leaves(shardings)):
    share = jax.process_index(), jax.process_count()
  if damaged := files.damaged(*share):
    raise ValueError(
        f"damaged, not what was written: {hf_files.first_of(damaged)};"
        f" {hf_files.REMEDY}"
    )
  params = {}
  for row in rows:
    sharding = None
    if shardings is not None:
      sharding = _node(shardings, row.path)[row.path[-1]]
    own = jnp.dtype("float32" if row.is_float32 else dtype)
    leaf = _read_leaf(files, row, num_layers, own, sharding)
    _node(params, row.path)[row.path[-1]] = leaf
  return params


def _read_leaf(
    files: hf_tensors.AnyFiles,
    row: hf_names.TensorRow,
    num_layers: int,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
  """Returns one leaf, on the devices of its sharding."""
  stack = row.stack(num_layers)
  shape = stack + row.shape
  names = row.hf_names(num_layers)
  read = {}  # Devices with the same slice share what was read.

  def part(index: tuple[slice, ...]) -> np.ndarray:
    ranges = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    if ranges not in read:
      array = _aligned(tuple(b - a for a, b in ranges), dtype)
      starts = [start for start, _ in ranges[: len(stack)]]
      for i in np.ndindex(array.shape[: len(stack)]):
        number = np.ravel_multi_index(np.add(starts, i), stack) if stack else 0
        target, rest = array[i], ranges[len(stack) :]
        _read_tensor(files, names[number], row, rest, target)
      read[ranges] = array
    return read[ranges]

  if sharding is None:
    return jax.device_put(part((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def _read_tensor(
    files: hf_tensors.AnyFiles,
    name: str,
    row: hf_names.TensorRow,
    ranges: hf_tensors.Ranges,
    target: np.ndarray,
) -> None:
  """Reads a slice of one tensor's part into `target`, piece by piece."""
  (first, last), *rest = ranges
  step = max(1, _PIECE_BYTES * len(target) // max(target.nbytes, 1))
  for start in range(first, last, step):
    stop = min(start + step, last)
    cut = hf_tensors.cut_slices(row, ((start, stop), *rest))
    into = target[start - first : stop - first]
    with np.errstate(over="ignore"):  # Checked below.
      into[...] = cut.take(files.read(name, cut.tensor))
    if not np.isfinite(into).all():
      raise ValueError(
          f"tensor {name} has NaN or infinite entries in {target.dtype}"
      )


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns an uninitialized array that a CPU device uses without a copy."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  offset = -memory.ctypes.data % _ALIGNMENT
  return memory[offset : offset + size].view(dtype).reshape(shape)


def _leaves(
    config: ModelConfig, params: PyTree
) -> dict[str, list[tuple[hf_names.TensorRow, jax.Array, tuple[int, ...]]]]:
  """Returns (row, leaf, index) of the leaves in each tensor, by tensor name.

  Raises:
    ValueError: params do not have the shape of `config`.
  """
  tensors, problems, count = {}, [], 0
  for row in hf_names.rows(config):
    leaf = params
    for key in row.path:
      leaf = leaf.get(key, {}) if isinstance(leaf, dict) else {}
    stack = row.stack(config.num_layers)
    expected = stack + row.shape
    if isinstance(leaf, dict) or tuple(leaf.shape) != expected:
      actual = "missing" if isinstance(leaf, dict) else list(leaf.shape)
      name = "/".join(row.path)
      problems.append(f"params {name}: {actual}, expected {list(expected)}")
      continue
    count += 1
    for name, index in zip(row.hf_names(config.num_layers), np.ndindex(stack)):
      tensors.setdefault(name, []).append((row, leaf, index))
  if not problems and len(jax.tree.leaves(params)) != count:
    problems.append("params have leaves that the family lacks")
  if problems:
    raise ValueError("; ".join(problems))
  return tensors


def save(
    folder: str | os.PathLike[str],
    model_config: ModelConfig,
    params: PyTree,
    tokenizer: tokenizer_lib.Tokenizer | None = None,
    *,
    max_file_bytes: int = hf_files.MAX_FILE_BYTES,
) -> None:
  """Writes a folder that `transformers` loads.

  Writes a temporary folder and moves it, which replaces an old folder
  atomically. Tensors have the config's param_dtype, except
  `hf_names.FLOAT32`.

  Args:
    folder: a local path; parents are created.
    params: arrays, all addressable by this process.
    max_file_bytes: maximum number of bytes of tensors in one file.

  Raises:
    ValueError: params do not have that shape, or the folder contains files that
      do not belong to a model.
  """
  leaves = _leaves(model_config, params)

  def fill(new: pathlib.Path) -> None:
    _write_tensors(new, model_config, leaves, max_file_bytes)
    _write_settings(new, model_config, tokenizer)

  replace_folder(folder, fill)


def replace_folder(
    folder: str | os.PathLike[str], fill: Callable[[pathlib.Path], None]
) -> None:
  """Creates or replaces a model's folder in one step.

  Args:
    folder: a local path; parents are created.
    fill: function that writes the files into a folder.

  Raises:
    ValueError: the folder contains files that do not belong to a model.
  """
  path = pathlib.Path(folder)
  names = sorted(p.name for p in path.glob("*"))
  foreign = [name for name in names if not _OURS.fullmatch(name)]
  if foreign:
    raise ValueError(f"{folder}: not replaced, has other files: {foreign}")
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(f".{path.name}.new-{os.getpid()}")
  shutil.rmtree(new, ignore_errors=True)
  new.mkdir()
  try:
    fill(new)
    (plain := new / ".mode").touch()
    for file in filter(pathlib.Path.is_file, new.rglob("*")):
      # safetensors writes with mode 0600 regardless of the umask.
      shutil.copymode(plain, file)
    plain.unlink()
    hf_files.sync(new)
    hf_files.replace(new, path)
  finally:
    # After a successful exchange this is the old folder.
    shutil.rmtree(new, ignore_errors=True)


def _write_tensors(
    folder: pathlib.Path,
    config: ModelConfig,
    leaves: dict[
        str, list[tuple[hf_names.TensorRow, jax.Array, tuple[int, ...]]]
    ],
    max_file_bytes: int,
) -> None:
  dtypes = {
      name: jnp.dtype(
          "float32" if parts[0][0].is_float32 else config.param_dtype
      )
      for name, parts in leaves.items()
  }

  def make(name: str) -> np.ndarray:
    tensor = np.empty(leaves[name][0][0].split_shape, dtypes[name])
    for row, leaf, index in leaves[name]:
      part = np.asarray(leaf[index] if index else leaf)
      hf_tensors.put_slices(row, tensor, part)
    return tensor.reshape(leaves[name][0][0].hf_shape)

  sizes = {
      name: math.prod(parts[0][0].hf_shape) * dtypes[name].itemsize
      for name, parts in leaves.items()
  }
  hf_files.write_files(folder, sizes, make, max_file_bytes=max_file_bytes)


def _write_settings(
    folder: pathlib.Path,
    config: ModelConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
) -> None:
  if tokenizer is not None:
    # A base model's chat template may end turns with another token.
    config = hf_config.with_stops(config, sorted(tokenizer.turn_ends))
  hf = hf_config.to_hf(config)
  ids = ("pad_token_id", "bos_token_id", "eos_token_id")
  generation = {"_from_model_config": True, **{name: hf[name] for name in ids}}
  hf_files.write_json(folder / "config.json", hf)
  hf_files.write_json(folder / "generation_config.json", generation)
  if tokenizer is not None:
    tokenizer.save(folder)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Encoders from Hugging Face folders; they are small, so read whole."""

import dataclasses
import os
import pathlib
import re

import jax.numpy as jnp
import numpy as np

from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.models import encoder
from tba_jax.models import encoder_config
from tba_jax.models import hf_files

EncoderConfig = encoder_config.EncoderConfig

# Of heads that are not used, and buffers that older versions stored.
_IGNORED = re.compile(
    r"(.*\.)?(embeddings\.(position_ids|token_type_ids)|pooler\..*)"
    r"|cls\..*|lm_head\..*"
)


@dataclasses.dataclass(frozen=True)
class Row:
  """One leaf and the tensor that holds it, or those of each layer.

  hf_name: of the tensor; `{layer}` stands for the layer's index.
  path: keys of our nested dict; under "blocks" the leaf stacks all layers.
  shape: of one layer's leaf.
  hf_shape: of the tensor; the same entries in the same order.
  """

  hf_name: str
  path: tuple[str, ...]
  shape: tuple[int, ...]
  hf_shape: tuple[int, ...]


def rows(c: EncoderConfig, prefix: str) -> list[Row]:
  """Returns the leaves of a shape.

  Args:
    c: the shape.
    prefix: of all names but a head's: "", or the family's with a dot.
  """
  D, F, H = c.width, c.mlp_width, c.num_heads
  out = []

  def add(
      hf_name: str,
      path: str,
      shape: tuple[int, ...],
      hf_shape: tuple[int, ...] | None = None,
  ) -> None:
    out.append(Row(hf_name, tuple(path.split(".")), shape, hf_shape or shape))

  def linear(name, path, out_shape, in_shape):
    size = int(np.prod(out_shape))
    whole = (size, int(np.prod(in_shape)))
    add(f"{name}.weight", f"{path}.kernel", out_shape + in_shape, whole)
    add(f"{name}.bias", f"{path}.bias", out_shape, (size,))

  def norm(name, path):
    add(f"{name}.weight", f"{path}.scale", (D,))
    add(f"{name}.bias", f"{path}.bias", (D,))

  for name, path, size in (
      ("word", "words", c.vocab_size),
      ("position", "positions", c.max_positions),
      ("token_type", "types", c.num_types),
  ):
    source = f"{prefix}embeddings.{name}_embeddings.weight"
    add(source, f"{path}.embedding", (size, D))
  norm(f"{prefix}embeddings.LayerNorm", "norm")
  layer, heads = prefix + "encoder.layer.{layer}.", (H, D // H)
  for name in ("query", "key", "value"):
    source = f"{layer}attention.self.{name}"
    linear(source, f"blocks.attention.{name[0]}", heads, (D,))
  linear(f"{layer}attention.output.dense", "blocks.attention.o", (D,), heads)
  norm(f"{layer}attention.output.LayerNorm", "blocks.attention_norm")
  linear(f"{layer}intermediate.dense", "blocks.mlp.up", (F,), (D,))
  linear(f"{layer}output.dense", "blocks.mlp.down", (D,), (F,))
  norm(f"{layer}output.LayerNorm", "blocks.mlp_norm")
  if c.num_labels:
    is_bert = c.family == "bert"
    pooler = f"{prefix}pooler.dense" if is_bert else "classifier.dense"
    linear(pooler, "pooler", (D,), (D,))
    score = "classifier" if is_bert else "classifier.out_proj"
    linear(score, "score", (c.num_labels,), (D,))
  return out


def load(
    folder: str | os.PathLike[str],
) -> tuple[encoder.Encoder, types.PyTree]:
  """Returns the encoder of a local Hugging Face folder and its params, float32.

  Args:
    folder: with config.json and one or more safetensors files, of a bare model
      or of one with a head; heads other than a classifier's are left out.

  Raises:
    ValueError: config.json is refused, a file cannot be read, or tensors are
      missing, unused, of a wrong shape, no floats or not finite; the message
      lists all of them.
  """
  path = pathlib.Path(folder).expanduser()
  try:
    config = encoder_config.from_hf(hf_files.read_json(path / "config.json"))
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  files = hf_files.Files(path)
  prefix = f"{config.family}."
  if not any(name.startswith(prefix) for name in files.shapes):
    prefix = ""
  params: dict = {}
  problems, used = [], set()
  for row in rows(config, prefix):
    stacked = row.path[0] == "blocks"
    layers = range(config.num_layers) if stacked else range(1)
    names = [row.hf_name.format(layer=layer) for layer in layers]
    used.update(names)
    found = [_check(files, name, row.hf_shape) for name in names]
    problems += [problem for problem in found if problem]
    if problems:
      continue
    leaf = np.stack([_read(files, name, row, problems) for name in names])
    node = params
    for key in row.path[:-1]:
      node = node.setdefault(key, {})
    node[row.path[-1]] = jnp.asarray(leaf if stacked else leaf[0])
  problems += [
      f"unused tensor {name} {list(files.shapes[name])}"
      for name in sorted(files.shapes.keys() - used)
      if not _IGNORED.fullmatch(name)
  ]
  if problems:
    raise ValueError(f"{folder}: " + "; ".join(problems))
  return encoder.make_encoder(config), params


def load_with_tokenizer(
    folder: str,
) -> tuple[encoder.Encoder, types.PyTree, tokenizer_lib.TextTokenizer]:
  """Returns also the folder's tokenizer; see `load`."""
  made, params = load(folder)
  path = pathlib.Path(folder).expanduser()
  return made, params, tokenizer_lib.load_texts(path)


def _check(
    files: hf_files.Files, name: str, shape: tuple[int, ...]
) -> str | None:
  """Returns what is wrong with a tensor, None where nothing is."""
  if name not in files.shapes:
    return f"missing tensor {name} {list(shape)}"
  if files.shapes[name] != shape:
    found = list(files.shapes[name])
    return f"tensor {name} has shape {found}, expected {list(shape)}"
  if files.dtypes[name] not in hf_files.DTYPES:
    allowed = ", ".join(hf_files.DTYPES)
    return f"tensor {name} has dtype {files.dtypes[name]}, allowed {allowed}"
  return None


def _read(
    files: hf_files.Files, name: str, row: Row, problems: list[str]
) -> np.ndarray:
  """Returns a layer's leaf; notes where it is not finite."""
  whole = (slice(None),) * len(row.hf_shape)
  values = files.read(name, whole).astype(np.float32)
  if not np.isfinite(values).all():
    problems.append(f"tensor {name} has NaN or infinite entries")
  return values.reshape(row.shape)

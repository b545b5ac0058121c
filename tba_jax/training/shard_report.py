# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports how a mesh splits a model's parameters. No JAX.

`plan` prints it, and the trainer logs it before anything is compiled. A leaf
that is replicated on every device takes memory that the mesh does not save.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import ml_collections

from tba_jax.config import settings
from tba_jax.models import config as config_lib
from tba_jax.models import hf_names

# Name of a parameter -> its shape and the logical name of each axis.
Leaves = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]

# Rows of the table of replicated leaves; the rest is one sum.
_MAX_ROWS = 12


@dataclasses.dataclass(frozen=True)
class Leaf:
  """How one parameter is sharded.

  name, shape: of the parameter.
  parts: number of shards along each axis.
  axes: the logical name of each axis.
  could: for a replicated leaf, the rule that would split it, as "width=tensor";
    "" where no axis of it divides by one of the mesh.
  """

  name: str
  shape: tuple[int, ...]
  parts: tuple[int, ...]
  axes: tuple[str, ...]
  could: str

  @property
  def size(self) -> int:
    """Elements of the whole."""
    return math.prod(self.shape)

  @property
  def is_whole(self) -> bool:
    return math.prod(self.parts) == 1

  @property
  def device_size(self) -> int:
    """Elements on the fullest device."""
    return math.prod(
        math.ceil(n / parts) for n, parts in zip(self.shape, self.parts)
    )

  @property
  def indivisible(self) -> str:
    """What does not divide, "" where all does."""
    return "; ".join(
        f"{self.name}: {axis} of {length} does not divide by {parts}"
        for axis, length, parts in zip(self.axes, self.shape, self.parts)
        if length % parts
    )


def model_leaves(c: config_lib.ModelConfig) -> Leaves:
  """Returns every parameter of a model with its axes, as the model has it."""
  return {
      ".".join(row.path): (
          (c.num_layers,) * row.stacked + row.shape,
          ("layers",) * row.stacked + row.axes,
      )
      for row in hf_names.rows(c)
  }


def adapter_leaves(leaves: Leaves, *, rank: int, targets: str) -> Leaves:
  """Returns every low-rank factor of a model, as `lora.make` makes them.

  Args:
    leaves: of the model.
    rank, targets: `config.lora`.
  """
  wanted, out = settings.lora_names(targets), {}
  for name, (shape, axes) in leaves.items():
    parent, _, kind = name.rpartition(".")
    if not parent.startswith("blocks.") or kind != "kernel":
      continue
    if wanted and parent.rpartition(".")[2] not in wanted:
      continue
    # A kernel goes from the stream to something else or back.
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


def of_leaves(
    leaves: Leaves, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> list[Leaf]:
  """Returns how each parameter lies on a mesh.

  Args:
    leaves: shapes and logical axes.
    rules: `config.sharding`; a mesh axis is used once in a parameter.
    mesh: `config.mesh`.
  """
  out = []
  for name, (shape, axes) in leaves.items():
    taken: set[str] = set()
    parts = []
    for axis in axes:
      own = [a.strip() for a in rules[axis].split(",") if a.strip()]
      own = [a for a in own if a not in taken]
      taken.update(own)
      parts.append(math.prod(mesh[a] for a in own))
    could = "" if math.prod(parts) > 1 else _could(shape, axes, mesh)
    out.append(Leaf(name, shape, tuple(parts), axes, could))
  return out


def _could(
    shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mapping[str, int]
) -> str:
  """Returns the rule that would cut the most, of the longest axis it can."""
  options = [
      (count, length, f"{axis}={mesh_axis}")
      for axis, length in zip(axes, shape)
      for mesh_axis, count in mesh.items()
      if count > 1 and length % count == 0 and axis != "layers"
  ]
  return max(options)[2] if options else ""


def rows(found: list[Leaf], element_bytes: int) -> list[tuple[str, str]]:
  """Returns (name, text) of the totals and of each leaf that is not split.

  A text that begins with "NO" is of a leaf that does not divide.
  """
  count = lambda n: f"{n * element_bytes / 1e6:,.2f} MB"
  whole = sorted((f for f in found if f.is_whole), key=lambda f: -f.size)
  out = [
      (
          "params",
          f"{count(sum(f.size for f in found))},"
          f" {count(sum(f.device_size for f in found))} a device",
      ),
      (
          "whole on every device",
          f"{len(whole)} of {len(found)} leaves,"
          f" {count(sum(f.size for f in whole))}",
      ),
  ]
  for leaf in whole[:_MAX_ROWS]:
    hint = f"config.sharding.{leaf.could} would split it"
    out.append(
        (
            leaf.name,
            f"{'x'.join(map(str, leaf.shape))}, {count(leaf.size)};"
            f" {hint if leaf.could else 'no axis of it divides by the mesh'}",
        )
    )
  if len(whole) > _MAX_ROWS:
    rest = whole[_MAX_ROWS:]
    out.append(
        (
            f"and {len(rest)} smaller ones",
            count(sum(f.size for f in rest)),
        )
    )
  out += [("", f"NO: {f.indivisible}") for f in found if f.indivisible]
  return out


def length_parts(config: ml_collections.ConfigDict) -> int:
  """Returns in how many parts the tokens of a sequence are cut."""
  leaves = {"tokens": ((1, 1), ("batch", "length"))}
  (tokens,) = of_leaves(leaves, config.sharding, config.mesh)
  return tokens.parts[1]


def length_rows(config: ml_collections.ConfigDict) -> list[tuple[str, str]]:
  """Returns (name, text) of how sequences are cut, [] where they are not.

  Args:
    config: reads `mesh`, `sharding.length` and `sampling`.
  """
  parts, out = length_parts(config), []
  if parts == 1:
    return out
  for name in ("max_prompt_tokens", "max_completion_tokens"):
    length = config.sampling[name]
    each = math.ceil(length / parts)
    words = f"{length} tokens, {each} a device"
    if length % parts:
      words += (
          f": {length} does not divide by {parts}, so it is padded to"
          f" {each * parts}"
      )
    out.append((f"sampling.{name}", words))
  return out


def text(
    found: list[Leaf], element_bytes: int, more: Sequence[tuple[str, str]] = ()
) -> str:
  """Returns `rows`, and more of these, as lines of a log."""
  lines = [*rows(found, element_bytes), *more]
  width = max(len(name) for name, _ in lines)
  return "\n".join(f"  {name:<{width}}  {value}" for name, value in lines)

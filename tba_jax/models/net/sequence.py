# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharding of activations on the trainer's mesh; sequence parallelism.

Rows are split over the mesh axes `data` and `fsdp`. Without a constraint, the
compiler would shard activations like weights, along the width, and sum every
product over all devices.

Tokens are split over the axis `sequence`. Only attention mixes tokens
(`kernels.py`): its kernels get all tokens of a share of the heads. Plain
attention keeps queries on their devices and gathers keys and values layer by
layer, like the all-gather context parallelism of Llama 3 (arXiv:2407.21783,
§3.3.2).

`split_tokens` sets the mesh while a function is traced; the model reads it with
`current_split`.

Axes: R rows, L tokens of a row.
"""

from collections.abc import Callable
import contextvars
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Split:
  """Sharding of the activations of a forward pass.

  mesh: device mesh; None leaves the sharding to the compiler.
  batch, length, heads, experts: mesh axes that split rows, their tokens, heads
    and experts.
  """

  mesh: Mesh | None
  batch: tuple[str, ...]
  length: tuple[str, ...]
  heads: tuple[str, ...]
  experts: tuple[str, ...] = ()

  @property
  def count(self) -> int:
    """Number of parts that tokens are split into."""
    return math.prod(self.mesh.shape[a] for a in self.length)

  @property
  def batch_count(self) -> int:
    """Number of parts that rows are split into."""
    return math.prod(self.mesh.shape[a] for a in self.batch)

  @property
  def head_count(self) -> int:
    """Number of devices with the same tokens that split heads."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[a] for a in self.heads)

  @property
  def num_parts(self) -> int:
    """Number of parts that the tokens of a batch are split into."""
    return self.batch_count * self.count

  @property
  def platform(self) -> str:
    """Platform of the mesh; the default platform if there is no mesh."""
    if self.mesh is None:
      return jax.default_backend()
    return self.mesh.devices.flat[0].platform

  @property
  def accelerated(self) -> bool:
    """Whether the mesh is known and does not consist of CPUs."""
    return self.mesh is not None and self.platform != "cpu"

  def place(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of `x` if the mesh has several devices.

    Args:
      x: array of any shape.
      axes: sharding of its first axes, each "batch", "length", or None for
        replicated; the compiler chooses for the other axes.
    """
    if self.mesh is None or self.mesh.size == 1:
      return x
    names = {"batch": self.batch, "length": self.length, None: None}
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    spec = PartitionSpec(*(names[a] or None for a in axes), *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def copy_to_each(self, x: jax.Array) -> jax.Array:
    """Returns [num_parts, ...], a copy of `x` on the devices of each part.

    The gradient is summed over the copies. With one part, returns `x` itself.
    """
    if self.num_parts == 1:
      return x
    return self._place_parts(jnp.broadcast_to(x, (self.num_parts, *x.shape)))

  def cut_to_each(self, x: jax.Array) -> jax.Array:
    """Returns [num_parts, R L / num_parts, ...], the tokens of each part.

    With one part, the result is [R L, ...].

    Args:
      x: [R, L, ...]; both axes must divide evenly into their parts.
    """
    R, L, *rest = x.shape
    if self.num_parts == 1:
      return x.reshape(R * L, *rest)
    S, C = self.batch_count, self.count
    x = jnp.moveaxis(x.reshape(S, R // S, C, L // C, *rest), 2, 1)
    return self._place_parts(x.reshape(S * C, -1, *rest))

  def join_from_each(self, x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns [R, L, ...], the inverse of `cut_to_each`; `shape` is R, L."""
    if self.num_parts == 1:
      return x.reshape(*shape, *x.shape[1:])
    (R, L), rest, S, C = shape, x.shape[2:], self.batch_count, self.count
    x = jnp.moveaxis(x.reshape(S, C, R // S, L // C, *rest), 1, 2)
    return self.place(x.reshape(R, L, *rest), "batch", "length")

  def _place_parts(self, x: jax.Array) -> jax.Array:
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    spec = PartitionSpec((*self.batch, *self.length), *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


WHOLE = Split(None, (), (), ())

CURRENT: contextvars.ContextVar[Split] = contextvars.ContextVar(
    "split", default=WHOLE
)


def current_split() -> Split:
  """Returns the split of the function being traced."""
  return CURRENT.get()


def split_tokens(
    fn: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    batch: tuple[str, ...],
    length: tuple[str, ...],
    heads: tuple[str, ...],
    experts: tuple[str, ...] = (),
) -> Callable[..., Any]:
  """Returns `fn`, traced with tokens split over the mesh axes `length`.

  The axes are `policy.sharding.TOKEN_AXES`.
  """
  split = Split(mesh, batch, length, heads, experts)

  @functools.wraps(fn)
  def split_fn(*args: Any, **kwargs: Any) -> Any:
    token = CURRENT.set(split)
    try:
      return fn(*args, **kwargs)
    finally:
      CURRENT.reset(token)

  return split_fn

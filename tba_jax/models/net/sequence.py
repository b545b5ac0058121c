# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharding of activations on the trainer's mesh; sequence parallelism.

Prompts are split over the mesh axes `data` and `fsdp`. Without a
constraint the compiler would shard activations as weights are, along the width,
and sum every product over all devices.

Tokens are split over the axis `sequence`. Only attention mixes
tokens (`kernels.py`): its kernels get all tokens of a share of the heads. Plain
attention leaves queries on their devices, and gathers keys and values there
layer by layer, the all-gather context parallelism of Llama 3 (arXiv:2407.21783,
§3.3.2).

`split_tokens` sets the mesh while a function is traced; the model reads it with
`current_split`.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, S those
fed to the model, L tokens of a prompt and all its completions.
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

  mesh: None leaves it to the compiler.
  batch, length, heads, experts: the mesh axes that split prompts, tokens, heads
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
    """Number of parts that prompts are split into."""
    return math.prod(self.mesh.shape[a] for a in self.batch)

  @property
  def num_parts(self) -> int:
    """Number of parts that the tokens of a batch are split into."""
    return self.batch_count * self.count

  @property
  def platform(self) -> str:
    """Platform of the mesh; the default one if that is not known."""
    if self.mesh is None:
      return jax.default_backend()
    return self.mesh.devices.flat[0].platform

  @property
  def accelerated(self) -> bool:
    """Whether the mesh is known, and is not one of CPUs."""
    return self.mesh is not None and self.platform != "cpu"

  def padded(self, length: int) -> int:
    """Returns `length` rounded up to a multiple of `count`."""
    return -(-length // self.count) * self.count

  def place(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of `x` on a mesh of several devices.

    Args:
      x: array of any shape.
      axes: names of its first axes, each "batch", "length", or None for
        replicated; the compiler chooses for the others.
    """
    if self.mesh is None or self.mesh.size == 1:
      return x
    names = {"batch": self.batch, "length": self.length, None: None}
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    spec = PartitionSpec(*(names[a] or None for a in axes), *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def join(self, prompts: jax.Array, own: jax.Array) -> jax.Array:
    """Returns [B, L, ...], the tokens of prompts and of their completions.

    Each part has its share of the prompt, then of each completion, so that
    nothing moves between devices.

    Args:
      prompts: [B, P, ...], P a multiple of `count`.
      own: [B, K, S, ...], S likewise.
    """
    B, K, S, *rest = own.shape
    P, C = prompts.shape[1], self.count
    prompts = prompts.reshape(B, C, P // C, *rest)
    own = jnp.moveaxis(own.reshape(B, K, C, S // C, *rest), 2, 1)
    own = own.reshape(B, C, K * (S // C), *rest)
    both = jnp.concatenate([prompts, own], axis=2)
    return self.place(both.reshape(B, P + K * S, *rest), "batch", "length")

  def copy_to_each(self, x: jax.Array) -> jax.Array:
    """Returns [num_parts, ...], a copy of `x` on the devices of each part.

    The gradient is summed over the copies. With one part it is `x` itself.
    """
    if self.num_parts == 1:
      return x
    return self._place_parts(jnp.broadcast_to(x, (self.num_parts, *x.shape)))

  def cut_to_each(self, x: jax.Array) -> jax.Array:
    """Returns [num_parts, B / batch_count, K, T / count, ...].

    With one part it is `x` itself, [B, K, T, ...].
    """
    if self.num_parts == 1:
      return x
    B, K, T, *rest = x.shape
    S, C = self.batch_count, self.count
    x = jnp.moveaxis(x.reshape(S, B // S, K, C, T // C, *rest), 3, 1)
    return self._place_parts(x.reshape(S * C, B // S, K, T // C, *rest))

  def join_from_each(self, x: jax.Array) -> jax.Array:
    """Returns [B, K, T], the inverse of `cut_to_each`."""
    if self.num_parts == 1:
      return x
    _, b, K, t = x.shape
    S, C = self.batch_count, self.count
    x = jnp.moveaxis(x.reshape(S, C, b, K, t), 1, 3)
    return self.place(x.reshape(S * b, K, C * t), "batch", None, "length")

  def _place_parts(self, x: jax.Array) -> jax.Array:
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    spec = PartitionSpec((*self.batch, *self.length), *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def cut(
      self, x: jax.Array, num_prompt: int, num_completions: int
  ) -> tuple[jax.Array, jax.Array]:
    """Returns [B, P, ...] and [B, K, S, ...], the inverse of `join`.

    Args:
      x: [B, L, ...].
      num_prompt, num_completions: P and K.
    """
    B, L, *rest = x.shape
    P, K, C = num_prompt, num_completions, self.count
    S = (L - P) // K
    x = x.reshape(B, C, L // C, *rest)
    prompts = x[:, :, : P // C].reshape(B, P, *rest)
    own = x[:, :, P // C :].reshape(B, C, K, S // C, *rest)
    own = jnp.moveaxis(own, 1, 2).reshape(B, K, S, *rest)
    return (
        self.place(prompts, "batch", "length"),
        self.place(own, "batch", None, "length"),
    )


WHOLE = Split(None, (), (), ())

CURRENT: contextvars.ContextVar[Split] = contextvars.ContextVar(
    "split", default=WHOLE
)


def current_split() -> Split:
  """Returns the split of the function that is being traced."""
  return CURRENT.get()


def completion_inputs(
    prompt_tokens: jax.Array,
    prompt_mask: jax.Array,
    completion_tokens: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns the tokens that a forward pass over completions feeds.

  The last token of a completion predicts nothing, so S is T - 1. If tokens are
  split over devices, each completion instead begins with the last token of its
  prompt: the stream that predicts a token is then on the token's device.

  Args:
    prompt_tokens: [B, P] int32, left-padded.
    prompt_mask: [B, P] bool, True on prompt tokens, of which there are some.
    completion_tokens: [B, K, T] int32.

  Returns:
    prompt tokens [B, P], their mask, the mask of those that completions attend
    to, completion tokens [B, K, S], and their first position [B]; P and S are
    padded to multiples of `Split.count`.
  """
  parts = current_split()
  lengths_B = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)
  P = prompt_tokens.shape[1]
  prompt_tokens, inputs = fed(prompt_tokens, completion_tokens)
  if parts.count == 1:
    return prompt_tokens, prompt_mask, prompt_mask, inputs, lengths_B
  prompt_mask = jnp.pad(prompt_mask, ((0, 0), (parts.padded(P) - P, 0)))
  seen_mask = prompt_mask.at[:, -1].set(False)
  return prompt_tokens, prompt_mask, seen_mask, inputs, lengths_B - 1


def fed(
    prompts_BxPx: jax.Array, completions_BxKxTx: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns what `completion_inputs` feeds of tokens, or of facts of each.

  Args:
    prompts_BxPx: [B, P, ...], left-padded.
    completions_BxKxTx: [B, K, T, ...].

  Returns:
    [B, P, ...] and [B, K, S, ...], padded with zeros.
  """
  parts = current_split()
  if parts.count == 1:
    return prompts_BxPx, completions_BxKxTx[:, :, :-1]
  P, (B, K, T, *rest) = prompts_BxPx.shape[1], completions_BxKxTx.shape
  last = jnp.broadcast_to(prompts_BxPx[:, None, -1:], (B, K, 1, *rest))
  inputs = jnp.concatenate([last, completions_BxKxTx[:, :, :-1]], axis=2)
  no_others = [(0, 0)] * len(rest)
  right = ((0, 0), (0, 0), (0, parts.padded(T) - T), *no_others)
  left = ((0, 0), (parts.padded(P) - P, 0), *no_others)
  return jnp.pad(prompts_BxPx, left), jnp.pad(inputs, right)


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

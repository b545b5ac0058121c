# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention heads on devices whose number does not divide them.

Each device needs whole key-value heads, with the same number of query heads. So
key-value heads are copied, the M query heads of each are dealt to its copies,
and zeros fill up the rest:

    28 query heads, 4 key-value heads, 8 devices: 2 copies, 4 + 3 query heads
    14 query heads, 2 key-value heads, 8 devices: 4 copies, 2 + 2 + 2 + 1

`net/spread.py` does this to arrays. This module needs no JAX.

Axes: G key-value heads, M query heads per key-value head.
"""

import dataclasses
import functools

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib

# Maximum of computed heads over needed ones: of `mesh.tensor`, and of kernels
# together with `mesh.sequence`, where plain attention takes longer.
MOST, MOST_OF_KERNELS = 1.15, 2.0


@dataclasses.dataclass(frozen=True)
class Layout:
  """Heads as devices hold them.

  copies: number of times each key-value head is held.
  groups: key-value heads of all devices, with copies and zeros.
  members: query heads per key-value head, with zeros.
  cost: computed query heads over needed ones.
  """

  copies: int
  groups: int
  members: int
  cost: float


@functools.cache
def choose(G: int, M: int, num_devices: int) -> Layout:
  """Returns the layout with the fewest query heads, then key-value heads."""

  def layout(copies: int) -> Layout:
    groups = -(-G * copies // num_devices) * num_devices
    members = -(-M // copies)
    return Layout(copies, groups, members, groups * members / (G * M))

  return min(map(layout, range(1, M + 1)), key=lambda x: (x.cost, x.groups))


def _find_problem(
    family: str, G: int, M: int, head_dim: int, num_devices: int
) -> str:
  """Returns why heads of a width cannot be split over devices, or ""."""
  if G % num_devices == 0:
    return ""
  facts = family_lib.FAMILIES[family]
  if facts.has_latents or facts.joins_head_norms or not facts.has_grouped_heads:
    return f"{G} key-value heads of {family} cannot be copied or padded"
  found = choose(G, M, num_devices)
  if found.cost > MOST:
    return (
        f"{G * M} query heads with {G} of keys and values would be padded to"
        f" {found.groups * found.members}"
    )
  if found.groups > G * num_devices:
    return f"a device would have more than all {G} key-value heads"
  if head_dim % num_devices:
    return f"it divides neither {G} key-value heads nor head_dim {head_dim}"
  return ""


def problem_of(config: config_lib.ModelConfig, num_devices: int) -> str:
  """Returns why a model's heads cannot be split over devices, or ""."""
  kinds = {config.kv_shape(n) for n in range(config.num_layers)}
  if config.latent_rank:
    kinds = {(config.num_kv_heads, config.head_dim)}
  totals = set()
  for G, head_dim in sorted(kinds):
    M = config.num_heads // G
    problem = _find_problem(config.family, G, M, head_dim, num_devices)
    if problem:
      return problem
    found = choose(G, M, num_devices)
    totals.add(found.groups * found.members)
  return "layers would differ in their padded heads" * (len(totals) > 1)


@functools.cache
def spread(
    config: config_lib.ModelConfig, num_devices: int
) -> config_lib.ModelConfig:
  """Returns a model's shape with the heads that the devices hold.

  It is equal to `config` if its heads divide, or `problem_of` is not "".
  """
  if problem_of(config, num_devices):
    return config
  of_layer = lambda G: choose(G, config.num_heads // G, num_devices)
  found, of_global = of_layer(config.num_kv_heads), config.global_kv_heads
  return dataclasses.replace(
      config,
      num_heads=found.groups * found.members,
      num_kv_heads=found.groups,
      global_kv_heads=of_global and of_layer(of_global).groups,
  )


def describe(
    config: config_lib.ModelConfig, num_devices: int, num_tokens: int = 1
) -> str:
  """Describes the heads of a model whose own do not divide, or returns "".

  Args:
    num_devices: size of `mesh.tensor`.
    num_tokens: size of `mesh.sequence`, over which kernels split heads too.
  """
  shape = spread(config, num_devices)
  G, M = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
  found = choose(G, M, num_devices * num_tokens)
  heads, needed = found.groups * found.members, config.num_heads
  if found.cost > MOST_OF_KERNELS:
    return f"plain attention: {needed} would be padded to {heads}"
  if (heads, found.groups) == (needed, config.num_kv_heads):
    return ""
  return (
      f"{needed} with {config.num_kv_heads} of keys and values, computed as"
      f" {heads} with {found.groups}: {heads / needed:.3g} times the attention"
  )

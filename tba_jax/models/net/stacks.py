# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of several kinds: stacks of their params, and scans over periods.

A kind is the set of modules in a layer's block, except norms
(`ModelConfig.kinds`). Params have one stack per module, of the layers that have
it:

    kinds = delta mlp, delta mlp, attention mlp, delta mlp, …
    params["blocks"] = {
        "attention_norm", "mlp_norm", "mlp": leaves [N, ...]
        "delta": leaves [number of layers with it, ...], "attention": likewise
    }

With one kind, this is a stack of N blocks. A path names the same matrix in
every family, so adapters, shardings, optimizers and files need not know about
kinds: they just see stacks of different lengths.

Layers run in segments, each a repeating sequence of kinds: a model whose kinds
alternate is one segment; a model whose first layers differ has two. A segment
is one `jax.lax.scan` over its repetitions, whose body runs the layers of one
period in order; with one kind, it is a scan over the layers.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax

from tba_jax import types
from tba_jax.models import config as config_lib

PyTree = types.PyTree
ModelConfig = config_lib.ModelConfig


@dataclasses.dataclass(frozen=True)
class Segment:
  """Adjacent layers whose kinds repeat.

  start: index of the first layer.
  period: number of layers after which the kinds repeat.
  count: number of repetitions.
  """

  start: int
  period: int
  count: int

  @property
  def stop(self) -> int:
    return self.start + self.period * self.count


def segments(kinds: Sequence[Any]) -> list[Segment]:
  """Returns the segments of layers, each as long as possible."""
  found, start = [], 0
  while start < len(kinds):
    best = Segment(start, 1, 1)
    for period in range(1, (len(kinds) - start) // 2 + 1):
      stop = start + period
      while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
        stop += 1
      count = (stop - start) // period
      if count > 1 and period * count > best.stop - start:
        best = Segment(start, period, count)
    found.append(best)
    start = best.stop
  return found


def of_kind(
    config: ModelConfig, blocks: dict[str, Any], kind: Sequence[str]
) -> dict[str, Any]:
  """Returns the entries of a block's tree that exist in layers of a kind."""
  named = {name for other in config.kinds for name in other}
  return {
      name: node
      for name, node in blocks.items()
      if name in kind or name not in named
  }


def layer(config: ModelConfig, blocks: PyTree, index: int) -> PyTree:
  """Returns the params of one layer."""
  nodes = of_kind(config, blocks, config.kinds[index])
  return {
      name: jax.tree.map(
          lambda x, at=config.layers_with(name).index(index): x[at], node
      )
      for name, node in nodes.items()
  }


def cut(config: ModelConfig, blocks: PyTree, segment: Segment) -> PyTree:
  """Returns a segment's part of the stacks, for `pick`.

  Leaves are [count, ...] if a period has one layer with the module, and [count,
  layers, ...] if it has more.
  """
  parts = {}
  for name, node in blocks.items():
    own = _within(config, name, segment.start, segment.stop)
    if not own:
      continue
    first, each = own[0], len(own) // segment.count

    def cut_leaf(x, first=first, size=len(own), each=each):
      if size < len(x):
        x = x[first : first + size]
      return x if each == 1 else x.reshape(-1, each, *x.shape[1:])

    parts[name] = jax.tree.map(cut_leaf, node)
  return parts


def pick(
    config: ModelConfig, period: PyTree, segment: Segment, place: int
) -> PyTree:
  """Returns the params of the layer at a place in a period from `cut`."""
  start, picked = segment.start, {}
  for name, node in of_kind(
      config, period, config.kinds[start + place]
  ).items():
    before = len(_within(config, name, start, start + place))
    each = len(_within(config, name, start, start + segment.period))
    picked[name] = node
    if each > 1:
      picked[name] = jax.tree.map(lambda x, at=before: x[at], node)
  return picked


def _within(config: ModelConfig, name: str, start: int, stop: int) -> list[int]:
  """Returns the indices in a module's stack of the layers in a range."""
  layers = config.layers_with(name)
  return [at for at, n in enumerate(layers) if start <= n < stop]

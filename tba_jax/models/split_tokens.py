# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A function whose sequences are split over devices (`models/split.py`)."""

from collections.abc import Callable
import functools
from typing import Any

import jax

from tba_jax.models import layers
from tba_jax.models import split as split_lib


def split_tokens(
    fn: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    batch: tuple[str, ...],
    length: tuple[str, ...],
) -> Callable[..., Any]:
  """Returns `fn` with tokens split in all that it computes, to be jitted.

  Args:
    fn: of arrays on the mesh.
    mesh: its devices.
    batch, length: the mesh axes of prompts and of tokens, as
      `sharding.token_axes` tells them.
  """
  split = split_lib.Split(mesh, batch, length)

  @functools.wraps(fn)
  def split_fn(*args: Any, **kwargs: Any) -> Any:
    token = split_lib.CURRENT.set(split)
    rows = layers.TOKENS_ARE_SPLIT.set(split.count > 1)
    try:
      return fn(*args, **kwargs)
    finally:
      layers.TOKENS_ARE_SPLIT.reset(rows)
      split_lib.CURRENT.reset(token)

  return split_fn

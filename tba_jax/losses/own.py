# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own loss, FILE.py:FUNCTION: loads it and checks what it returns."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib
from tba_jax.system import user_code


def load(name: str) -> Callable[..., groups_lib.Loss]:
  """Returns a user's loss, which raises ValueError with its place if wrong.

  Args:
    name: FILE.py:FUNCTION.

  Raises:
    ValueError: the file or function cannot be imported.
  """
  function = user_code.load_function("config.loss.name", name)
  wanted = (
      "; allowed a function of (groups, c, beta) that returns the scalar loss"
      " and a dict, which may be {} (docs/objectives.md)"
  )

  @functools.wraps(function)
  def loss(
      groups: groups_lib.Groups, c: Any, beta: jax.Array
  ) -> groups_lib.Loss:
    try:
      returned = function(groups, c, beta)
    # User code may raise anything.
    except (Exception, SystemExit) as error:
      why = user_code.describe(error, function)
      raise ValueError(f"config.loss.name={name!r}: {why}{wanted}") from error
    if why := _problem(returned, groups):
      place = user_code.place_of_function(function)
      raise ValueError(f"config.loss.name={name!r}: {place}: {why}{wanted}")
    return returned

  return loss


def _problem(returned: Any, groups: groups_lib.Groups) -> str:
  """Returns what is wrong with the result of a user's loss, or ""."""
  if not (isinstance(returned, tuple) and len(returned) == 2):
    return f"it returned {_kind(returned)}"
  loss, aux = returned
  if not isinstance(loss, (jax.Array, float)) or jnp.shape(loss):
    return f"its loss is {_kind(loss)}"
  if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    return f"its loss is {_kind(loss)}"
  if not isinstance(aux, dict):
    return f"its second result is {_kind(aux)}"
  for names in _AUX:
    if names[0] not in aux:
      continue
    for key in names:
      B, K, T = groups.logprobs_BxKxT.shape
      sizes = {"B": B, "K": K, "T": T, "1": 1}
      shape = tuple(sizes[axis] for axis in key.rpartition("_")[2].split("x"))
      if key not in aux:
        return f"its dict has {names[0]} without {key}"
      if not isinstance(aux[key], jax.Array) or aux[key].shape != shape:
        return f"its dict's {key} is {_kind(aux[key])}, not {list(shape)}"
  return ""


# Entries of a loss's dict that metrics read where the first one is there.
_AUX = (
    ("residual_BxK", "log_z_Bx1"),
    ("margin_Bx1", "pair_Bx1"),
)


def _kind(value: Any) -> str:
  """Returns the type of a value, and an array's shape, for messages."""
  if isinstance(value, jax.Array):
    return f"an array {value.dtype}{list(value.shape)}"
  if isinstance(value, tuple):
    return f"a tuple of {len(value)}"
  return "None" if value is None else f"of type {type(value).__name__}"

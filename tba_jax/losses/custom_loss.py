# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads a custom loss, FILE.py:FUNCTION, and checks its results.

Values in the dict that the loss returns become metrics, `loss/NAME`.
"""

from collections.abc import Callable, Mapping
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import loss_metrics
from tba_jax.system import user_code


def load(name: str) -> Callable[..., groups_lib.Loss]:
  """Returns a custom loss whose errors are ValueErrors with file and line.

  Args:
    name: FILE.py:FUNCTION.

  Raises:
    ValueError: the file or function cannot be imported.
  """
  function = user_code.load_function("config.loss.name", name)
  wanted = (
      "; must be a function of (groups, c, beta) that returns the scalar loss"
      " and a dict of metrics, which may be {} (docs/reference/objectives.md)"
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


def totals(
    aux: Mapping[str, Any], mask_BxKxT: jax.Array
) -> loss_metrics.Totals:
  """Returns totals of the metrics `loss/NAME` from a loss's dict.

  A metric is the mean of an entry, for [B, K, T] over counted tokens. Axis
  suffixes, as in `NAME_BxK`, are dropped from the name.
  """
  out = {}
  for name, value in aux.items():
    if name not in _KNOWN:
      x = jnp.asarray(value, jnp.float32)
      name = re.sub(r"_Bx(1|K(xT)?)$", "", name)
      out[f"loss/{name}"] = loss_metrics.total(
          x, mask_BxKxT if x.ndim == 3 else None
      )
  return out


def _problem(returned: Any, groups: groups_lib.Groups) -> str:
  """Returns what is wrong with the result of a custom loss, or ""."""
  if not (isinstance(returned, tuple) and len(returned) == 2):
    return f"it returned {_kind(returned)}"
  loss, aux = returned
  if not isinstance(loss, (jax.Array, float)) or jnp.shape(loss):
    return f"its loss is {_kind(loss)}"
  if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    return f"its loss is {_kind(loss)}"
  if not isinstance(aux, dict):
    return f"its second result is {_kind(aux)}"
  if not aux:
    return ""
  B, K, T = groups.logprobs_BxKxT.shape
  for name, value in aux.items():
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
      return f"its dict's key {name!r} may have only letters, digits and _ . -"
    if name in _KNOWN:
      continue
    is_number = isinstance(value, (jax.Array, bool, int, float))
    if not is_number or jnp.issubdtype(
        jnp.result_type(value), jnp.complexfloating
    ):
      return f"its dict's {name} is {_kind(value)}, not a number or array"
    if jnp.shape(value) not in ((), (B, 1), (B, K), (B, K, T)):
      return (
          f"its dict's {name} is {_kind(value)}, not [], [B, 1], [B, K] or"
          " [B, K, T]"
      )
  for names in _AUX:
    if names[0] not in aux:
      continue
    for key in names:
      sizes = {"B": B, "K": K, "T": T, "1": 1}
      shape = tuple(sizes[axis] for axis in key.rpartition("_")[2].split("x"))
      if key not in aux:
        return f"its dict has {names[0]} without {key}"
      if not isinstance(aux[key], jax.Array) or aux[key].shape != shape:
        return f"its dict's {key} is {_kind(aux[key])}, not {list(shape)}"
  return ""


# Entries that metrics read together: with the first, the others must be there.
_AUX = (
    ("residual_BxK", "log_z_Bx1"),
    ("margin_Bx1", "pair_Bx1"),
)
_KNOWN = frozenset(name for names in _AUX for name in names)


def _kind(value: Any) -> str:
  """Returns the type of a value, and an array's shape, for messages."""
  if isinstance(value, jax.Array):
    return f"an array {value.dtype}{list(value.shape)}"
  if isinstance(value, tuple):
    return f"a tuple of {len(value)}"
  return "None" if value is None else f"of type {type(value).__name__}"

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of objectives, by `config.loss.name`.

A loss is a pure function `(groups, c, beta) -> (loss, aux)` of `groups.Groups`,
`config.loss` and β, [] float32. The loss is [] float32; metrics read these
entries of `aux`, if present: `log_z_Bx1` and `residual_BxK` (nats),
`margin_Bx1` with `pair_Bx1`, and `value_clipped_BxKxT`.

Importance correction, length norm and metrics are common to all objectives
(`objective.py`). docs/objectives.md shows how to add a loss of your own.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import policy_gradient
from tba_jax.losses import ppo
from tba_jax.losses import preference
from tba_jax.losses import tb
from tba_jax.system import user_code

Loss = tuple[jax.Array, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss, its defaults and its requirements.

  loss: see the module.
  min_completions: smallest K that it can learn from.
  correction: default of `loss.correction` if `loss.ratio_clip` is above 0; at 0
    the default is "none".
  needs_ratio_clip: whether `loss.ratio_clip` must be above 0.
  length_norm: default of `loss.length_norm`.
  learns_log_z: whether it learns a scalar, `groups.log_z_Bx1`.
  has_values: whether it learns a value model, `groups.values_BxKxT`.
  has_targets: whether it needs `groups.targets`.
  """

  loss: Callable[..., Loss]
  min_completions: int = 2
  correction: str = "clip_token"
  needs_ratio_clip: bool = False
  length_norm: str = "none"
  learns_log_z: bool = False
  has_values: bool = False
  has_targets: bool = False


OBJECTIVES = {
    "tb": Objective(tb.tb_loss),
    "tb_learned_z": Objective(
        tb.tb_learned_z_loss, min_completions=1, learns_log_z=True
    ),
    "subtb": Objective(tb.subtb_loss, min_completions=1, has_values=True),
    "copg": Objective(tb.copg_loss),
    "gvpo": Objective(tb.gvpo_loss),
    "tba_prime": Objective(
        policy_gradient.tba_prime_loss, length_norm="tokens"
    ),
    "reinforce": Objective(policy_gradient.reinforce_loss),
    "rloo": Objective(policy_gradient.rloo_loss),
    "proximal_rloo": Objective(
        policy_gradient.rloo_loss,
        correction="clip_sequence",
        needs_ratio_clip=True,
    ),
    "grpo": Objective(policy_gradient.grpo_loss, length_norm="tokens"),
    "dr_grpo": Objective(
        policy_gradient.dr_grpo_loss, length_norm="max_tokens"
    ),
    "ppo": Objective(
        ppo.ppo_loss,
        min_completions=1,
        needs_ratio_clip=True,
        length_norm="mean_tokens",
        has_values=True,
        has_targets=True,
    ),
    "online_dpo": Objective(preference.online_dpo_loss),
    "ipo": Objective(preference.ipo_loss),
    "slic": Objective(preference.slic_loss),
    "best_of_n": Objective(preference.best_of_n_loss),
}


@functools.cache
def find(name: str) -> Objective:
  """Returns the objective of `config.loss.name`.

  Args:
    name: key of `OBJECTIVES`, or FILE.py:FUNCTION, a user's own loss.

  Raises:
    ValueError: the user's file or function cannot be imported.
  """
  if ".py:" in name:
    return Objective(_checked(name))
  return OBJECTIVES[name]


def _checked(name: str) -> Callable[..., Loss]:
  """Returns a user's loss, which raises ValueError with its place if wrong."""
  function = user_code.load_function("config.loss.name", name)
  wanted = (
      "; allowed a function of (groups, c, beta) that returns the scalar loss"
      " and a dict, which may be {} (docs/objectives.md)"
  )

  @functools.wraps(function)
  def loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> Loss:
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

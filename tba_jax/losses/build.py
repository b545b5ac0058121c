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

import jax

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
    return Objective(user_code.load_function("config.loss.name", name))
  return OBJECTIVES[name]

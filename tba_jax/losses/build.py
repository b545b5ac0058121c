# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of objectives: `config.loss.name` to a pure loss.

A new objective is one function, (groups, loss_params, *, beta, scale) to
(loss, aux), and one row in `OBJECTIVES`; docs/objectives.md shows it. The rest
is common to all: the importance correction, the length norm, the metrics.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import policy_gradient
from tba_jax.losses import ppo
from tba_jax.losses import preference
from tba_jax.losses import tb

PyTree = Any
Loss = tuple[jax.Array, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Objective:
  """A row of the table.

  loss: (groups, loss_params, *, beta, scale) -> (loss [], aux). Of aux are
    read, where they are there: `log_z_Bx1` and `residual_BxK`, nats;
    `margin_Bx1`, nats, with `pair_Bx1`; `value_held_BxKxT`.
  min_completions: the smallest group that it can learn from.
  correction: what `loss.correction = ""` stands for where `loss.ratio_clip` is
    above 0; at 0 it stands for "none".
  needs_ratio_clip: whether `loss.ratio_clip` must be above 0.
  length_norm: what `loss.length_norm = ""` stands for.
  init_params: what it learns itself, at the start, beside a value model.
  has_values: whether it learns a value model; `groups.values_BxKxT` is there.
  has_targets: whether `groups.targets` is there too.
  settings: keys of `config.loss` that the loss takes as further keywords.
  """

  loss: Callable[..., Loss]
  min_completions: int = 2
  correction: str = "clip_token"
  needs_ratio_clip: bool = False
  length_norm: str = "none"
  init_params: Callable[[], PyTree] = dict
  has_values: bool = False
  has_targets: bool = False
  settings: tuple[str, ...] = ()


def _of_groups(loss_fn: Callable[..., Loss]) -> Callable[..., Loss]:
  """A loss on the log-probs and rewards of whole completions, with a scale."""
  return lambda groups, _, **settings: loss_fn(
      groups.seq_BxK, groups.ref_seq_BxK, groups.rewards_BxK, **settings
  )


def _of_pairs(loss_fn: Callable[..., Loss]) -> Callable[..., Loss]:
  """The same without a scale."""
  return lambda groups, _, *, beta, scale: loss_fn(
      groups.seq_BxK, groups.ref_seq_BxK, groups.rewards_BxK, beta=beta
  )


def _tb_learned_z(
    groups: groups_lib.Groups, loss_params: PyTree, **settings
) -> Loss:
  log_z_Bx1 = jnp.broadcast_to(
      loss_params["log_z"][None, :], (groups.rewards_BxK.shape[0], 1)
  )
  return tb.learned_z_tb_loss(
      groups.seq_BxK,
      groups.ref_seq_BxK,
      groups.rewards_BxK,
      log_z_Bx1,
      **settings,
  )


def _subtb(groups: groups_lib.Groups, _, *, beta, scale, subtb_lambda) -> Loss:
  return tb.subtb_loss(
      groups.logprobs_BxKxT,
      groups.ref_logprobs_BxKxT,
      groups.mask_BxKxT,
      groups.rewards_BxK,
      groups.values_BxKxT,
      beta=beta,
      scale=scale,
      lam=subtb_lambda,
  )


def _ppo(groups: groups_lib.Groups, _, *, beta, scale, **settings) -> Loss:
  del beta, scale  # β is in the rewards of tokens, which made the targets.
  return ppo.ppo_loss(groups, **settings)


def _tba_prime(groups: groups_lib.Groups, _, *, beta, scale) -> Loss:
  del scale  # Policy gradients have one.
  return policy_gradient.tba_prime_loss(
      groups.logprobs_BxKxT,
      groups.ref_logprobs_BxKxT,
      groups.mask_BxKxT,
      groups.weights_BxKxT,
      groups.rewards_BxK,
      beta=beta,
  )


def _returns(groups: groups_lib.Groups, beta: jax.Array) -> jax.Array:
  """The reward of a completion, less the KL of the policy that sampled it."""
  return policy_gradient.kl_in_reward(
      groups.rewards_BxK, groups.behavior_kl_BxK, beta=beta
  )


def _reinforce(groups: groups_lib.Groups, _, *, beta, scale) -> Loss:
  del scale
  return policy_gradient.reinforce_loss(groups.seq_BxK, _returns(groups, beta))


def _rloo(groups: groups_lib.Groups, _, *, beta, scale) -> Loss:
  del scale
  return policy_gradient.rloo_loss(groups.seq_BxK, _returns(groups, beta))


def _grpo(groups: groups_lib.Groups, _, *, beta, scale) -> Loss:
  del scale
  return _any_grpo(groups, beta=beta, divide_by_std=True)


def _dr_grpo(groups: groups_lib.Groups, _, *, beta, scale) -> Loss:
  del scale
  return _any_grpo(groups, beta=beta, divide_by_std=False)


def _any_grpo(groups: groups_lib.Groups, **settings) -> Loss:
  return policy_gradient.grpo_loss(
      groups.logprobs_BxKxT,
      groups.ref_logprobs_BxKxT,
      groups.weights_BxKxT,
      groups.rewards_BxK,
      **settings,
  )


def _best_of_n(groups: groups_lib.Groups, _, **settings) -> Loss:
  del settings
  return preference.best_of_n_loss(groups.seq_BxK, groups.rewards_BxK)


OBJECTIVES = {
    "tb": Objective(_of_groups(tb.vargrad_tb_loss)),
    # One scalar, so for tasks with one prompt.
    "tb_learned_z": Objective(
        _tb_learned_z,
        min_completions=1,
        init_params=lambda: {"log_z": jnp.zeros((1,), jnp.float32)},
    ),
    "subtb": Objective(
        _subtb, min_completions=1, has_values=True, settings=("subtb_lambda",)
    ),
    "tba_prime": Objective(_tba_prime, length_norm="tokens"),
    "reinforce": Objective(_reinforce),
    "rloo": Objective(_rloo),
    "proximal_rloo": Objective(
        _rloo, correction="clip_sequence", needs_ratio_clip=True
    ),
    "grpo": Objective(_grpo, length_norm="tokens"),
    "dr_grpo": Objective(_dr_grpo, length_norm="max_tokens"),
    "ppo": Objective(
        _ppo,
        min_completions=1,
        needs_ratio_clip=True,
        length_norm="mean_tokens",
        has_values=True,
        has_targets=True,
        settings=("value_clip", "value_weight"),
    ),
    "copg": Objective(_of_groups(tb.copg_loss)),
    "gvpo": Objective(_of_groups(tb.gvpo_loss)),
    "online_dpo": Objective(_of_pairs(preference.online_dpo_loss)),
    "ipo": Objective(_of_pairs(preference.ipo_loss)),
    "slic": Objective(_of_pairs(preference.slic_loss)),
    "best_of_n": Objective(_best_of_n),
}


def find(name: str) -> Objective:
  """Returns the row of `config.loss.name`.

  Raises:
    ValueError: there is none.
  """
  if name not in OBJECTIVES:
    raise ValueError(f"loss.name={name!r}: allowed {sorted(OBJECTIVES)}")
  return OBJECTIVES[name]

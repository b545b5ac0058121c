# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The family of squared-residual losses: trajectory balance and relatives.

    φ (β_i (log π - log a) - (r - V̂))²

is 0 for all completions of a prompt if π = a exp(r/β_i) / Z and V̂ = β log Z.
β_i is β, except for the anchor "ema", where it depends on a completion's age.
The members differ in

- the anchor a: the policy that the target is relative to (`log_ratio`),
- the baseline V̂: the estimate of β log Z (`log_z`),
- φ, a factor without gradient (`loss.correction`, `corrections.py`).

    tb          anchor reference, baseline group
    gvpo        the same, times K/(K - 1)
    tb_learned_z  anchor reference, baseline learned
    a_star_po   anchor reference, baseline file
    flowrl      anchor reference, baseline value; φ = min(w, cap), per token
    oapl        anchor behavior, baseline log_mean_exp
    ema_tb      anchor ema, baseline group

`loss.anchor` and `loss.baseline` select other members: `tb` with anchor
"behavior" and baseline "mean" is the loss of Kimi k1.5 (arXiv:2501.12599,
eq. 3). The anchor "reference" needs a forward pass of π_ref; the others compare
with the behavior policy, whose log-probs come with the sample.
`loss.baseline_shift` lowers a baseline that is not learned (`shifted`).
Completions without a counted token are left out, except that their rewards are
in the baselines mean and log_mean_exp.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib

_Loss = groups_lib.Loss

# Nats; bounds a token's log-ratio with the anchor "ema", as in its code.
_MAX_TOKEN_NATS = 10.0
# Baselines that are trained with the policy.
_LEARNED = ("learned", "value")


def squared_residual(
    log_ratio_BxK: jax.Array,
    rewards_BxK: jax.Array,
    log_z_Bx1: jax.Array,
    beta: jax.Array,
    *,
    share_BxK: jax.Array | None = None,
    counted_BxK: jax.Array | None = None,
) -> _Loss:
  """Returns the squared residual, scaled to give a policy gradient.

      δ = log Ẑ + β_i/β (log π - log a) - r/β
      loss = 1/(BK) Σ_b Σₖ β²/(2 β_i) δ²
           = 1/(BK) Σ_b Σₖ 1/(2 β_i) (β_i (log π - log a) - (r - V̂))²

  with V̂ = β log Ẑ. For any β_i,

      ∇loss = -1/(BK) Σ_b Σₖ A ∇log π,   A = (r - V̂) - β_i (log π - log a)

  Args:
    log_ratio_BxK: [B, K] float32, log π - log a, nats, with gradient.
    rewards_BxK: [B, K] float32, task units.
    log_z_Bx1: [B, 1] float32, log Ẑ, nats; may have a gradient. [B, K] if
      learned for each completion.
    beta: [] float32, above 0, reward per nat.
    share_BxK: [B, K] float32, β_i/β, above 0; None stands for 1.
    counted_BxK: [B, K] float32, 0 on completions whose residual is taken for 0;
      None stands for 1.

  Returns:
    Loss, [] float32, reward times nats, and `log_z_Bx1` and `residual_BxK` (δ),
    in nats and without gradient.
  """
  if share_BxK is not None:
    log_ratio_BxK = share_BxK * log_ratio_BxK
  residual_BxK = log_z_Bx1 + log_ratio_BxK - rewards_BxK / beta
  if counted_BxK is not None:
    residual_BxK = counted_BxK * residual_BxK
  square_BxK = jnp.square(residual_BxK)
  if share_BxK is not None:
    square_BxK = square_BxK / share_BxK
  # The gradient with respect to log π is β δ, which is minus the advantage.
  loss = beta * jnp.mean(square_BxK) / 2
  return loss, jax.lax.stop_gradient(
      {"log_z_Bx1": log_z_Bx1[:, :1], "residual_BxK": residual_BxK}
  )


def log_ratio(
    groups: groups_lib.Groups, anchor: str, ema_decay: float
) -> tuple[jax.Array, jax.Array | None]:
  """Returns log π - log a of each completion, and β_i/β.

      reference   log π - log π_ref
      behavior    log π - log μ, with the behavior policy μ
      ema         Σ_t clip(log π - log μ, -10, 10), β_i/β = α/((1 - α) Δ)

  "ema" is, to first order, the log-ratio to an exponential average of past
  policies with decay α, which is α/(1 - α) steps old on average: for a
  completion that is Δ steps old, log π has moved by log π - log μ in Δ steps.
  Fresh completions count as one step old. Source: the first-order KL to an EMA
  reference in the code of tba-prime (https://github.com/bbartoldson/tba-prime).

  Args:
    groups: completions; "ema" also reads `staleness_BxK`.
    anchor: "reference", "behavior" or "ema".
    ema_decay: α, above 0 and below 1.

  Returns:
    [B, K] float32, nats, and [B, K] float32, or None for 1 everywhere.
  """
  if anchor == "reference":
    return groups.rho_BxK, None
  if anchor == "behavior":
    behavior_BxK = groups_lib.weighted_sums(
        groups.behavior_logprobs_BxKxT, groups.weights_BxKxT
    )
    return groups.seq_BxK - jax.lax.stop_gradient(behavior_BxK), None
  change_BxKxT = jnp.clip(
      groups.logprobs_BxKxT - groups.behavior_logprobs_BxKxT,
      -_MAX_TOKEN_NATS,
      _MAX_TOKEN_NATS,
  )
  change_BxK = groups_lib.weighted_sums(change_BxKxT, groups.weights_BxKxT)
  # The clip bounds the value but not the gradient.
  own_BxK = groups.seq_BxK
  change_BxK = own_BxK + jax.lax.stop_gradient(change_BxK - own_BxK)
  age_BxK = jnp.ones_like(change_BxK)
  if groups.staleness_BxK is not None:
    age_BxK = jnp.maximum(groups.staleness_BxK, age_BxK)
  return change_BxK, ema_decay / ((1 - ema_decay) * age_BxK)


def log_z(
    groups: groups_lib.Groups,
    baseline: str,
    kl_BxK: jax.Array,
    beta: jax.Array,
    baseline_temperature: float,
) -> jax.Array:
  """Returns log Ẑ = V̂/β, [B, 1] float32, nats.

      group         1/K Σₖ [r/β - β_i/β (log π - log a)], as in VarGrad, over
                    completions with a counted token
      mean          1/K Σₖ r/β
      log_mean_exp  β₁/β log 1/K Σₖ exp(r/β₁)
      file          V*(x)/β, from `loss.baseline_file`
      learned       a learned scalar, with gradient
      value         V(x)/β of a value model, with gradient; [B, K]

  Only with "group" do the residuals of a group sum to 0, so that no constant
  error of V̂ pushes the policy; "mean" leaves out the KL term, and
  "log_mean_exp" is consistent for samples of the anchor and β₁ = β.

  Args:
    baseline: name in the table above.
    kl_BxK: [B, K] float32, β_i/β (log π - log a).
    beta: [] float32, above 0.
    baseline_temperature: β₁, above 0, task units.
  """
  scaled_BxK = groups.rewards_BxK / beta
  if baseline == "group":
    left_BxK = (scaled_BxK - kl_BxK) * groups.counted_BxK
    num_Bx1 = groups.counted_BxK.sum(axis=1, keepdims=True)
    mean_Bx1 = left_BxK.sum(axis=1, keepdims=True) / jnp.maximum(num_Bx1, 1)
    return jax.lax.stop_gradient(mean_Bx1)
  if baseline == "mean":
    return jnp.mean(scaled_BxK, axis=1, keepdims=True)
  if baseline == "log_mean_exp":
    exponents_BxK = groups.rewards_BxK / baseline_temperature
    total_Bx1 = jax.nn.logsumexp(exponents_BxK, axis=1, keepdims=True)
    K = exponents_BxK.shape[1]
    return baseline_temperature / beta * (total_Bx1 - jnp.log(K))
  if baseline == "file":
    return groups.baselines_Bx1 / beta
  if baseline == "learned":
    return groups.log_z_Bx1
  front, _ = groups_lib.counted_first(groups.mask_BxKxT)
  first_BxK = front(groups.values_BxKxT)[..., 0]
  return jnp.where(groups.counted_BxK > 0, first_BxK, 0.0) / beta


def shifted(
    loss: jax.Array, log_ratio_BxK: jax.Array, shift: float
) -> jax.Array:
  """Returns a loss of the family with the baseline V̂ + δV in place of V̂.

      loss + δV 1/(BK) Σ_b Σₖ (log π - log a)

  which subtracts δV from each advantage. For δV < 0, the added term is a
  cross-entropy on the data with weight -δV. On on-policy samples its gradient
  is zero on average; on off-policy samples it pulls the policy towards the
  behavior policy, so that the policy is not pushed away from all samples.
  Source: AsymRE (arXiv:2506.20520), which uses δV = -0.1.

  Args:
    loss: unit-scale loss, [] float32.
    log_ratio_BxK: [B, K] float32, log π - log a, nats, with gradient.
    shift: δV, task units, up to 0.
  """
  return loss + shift * jnp.mean(log_ratio_BxK) if shift else loss


def member(
    groups: groups_lib.Groups,
    c: Any,
    beta: jax.Array,
    *,
    anchor: str,
    baseline: str,
    paper: jax.Array | float,
) -> _Loss:
  """Returns a loss of the family.

  Args:
    c: `config.loss`: `anchor` replaces the default anchor; unless the default
      baseline is learned, `baseline` replaces it and `baseline_shift` is added.
    beta: [] float32.
    paper: ratio of the paper's scale to the unit scale.
  """
  log_ratio_BxK, share_BxK = log_ratio(groups, c.anchor or anchor, c.ema_decay)
  kl_BxK = log_ratio_BxK if share_BxK is None else share_BxK * log_ratio_BxK
  shift = 0.0
  if baseline not in _LEARNED:
    baseline, shift = c.baseline or baseline, c.baseline_shift
  log_z_Bx1 = log_z(groups, baseline, kl_BxK, beta, c.baseline_temperature)
  loss, aux = squared_residual(
      log_ratio_BxK,
      groups.rewards_BxK,
      log_z_Bx1,
      beta,
      share_BxK=share_BxK,
      counted_BxK=groups.counted_BxK,
  )
  loss = shifted(loss, log_ratio_BxK, shift)
  return (paper * loss if c.scale == "paper" else loss), aux


def oapl_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns optimal advantage regression on the lagged behavior policy.

      loss = 1/(BK) Σ_b Σₖ (β₂ log π/μ - (r - V̂))²
      V̂ = β₁ log 1/K Σₖ exp(r/β₁)

  with β₂ = `loss.beta` and β₁ = `loss.baseline_temperature`; the paper uses
  1e-3 and 1, and refreshes the sampler every 50 steps. Needs no reference.
  Source: OAPL (arXiv:2602.19362), eq. 2 and 3.
  """
  return member(
      groups,
      c,
      beta,
      anchor="behavior",
      baseline="log_mean_exp",
      paper=2 * beta,
  )


def ema_tb_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns trajectory balance relative to an average of past policies.

      kl = α/((1 - α) Δ) Σ_t clip(log π - log μ, -10, 10)
      A = (r - r̄) - β (kl - mean kl),   ∇loss = -1/(BK) Σ_b Σₖ A ∇log π

  Δ is the staleness of the completion in steps, α is `loss.ema_decay`. Needs no
  reference. Source: the code of tba-prime, see `log_ratio`, without published
  results. `loss.scale` has no effect.
  """
  return member(groups, c, beta, anchor="ema", baseline="group", paper=1.0)


def a_star_po_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns optimal advantage regression with values estimated beforehand.

      loss = 1/(BK) Σ_b Σₖ (β (log π - log π_ref) - (r - V*))²
      V*(x) = β₁ log 1/N Σ_n exp(r(x, y_n)/β₁),   y_n from π_ref

  V* is from `loss.baseline_file`, and β₁ is `loss.baseline_temperature`. K may
  be 1. Source: Brantley et al. 2025 (arXiv:2505.20686), A*-PO.
  """
  return member(
      groups, c, beta, anchor="reference", baseline="file", paper=2 * beta
  )


def flowrl_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns trajectory balance by token with a learned log Z of each prompt.

      loss = 1/(BK) Σ_b Σₖ φ (log Z(x) + 1/|y| (log π - log π_ref) - r/β)²
      φ = min(Π_t π/μ, `loss.ratio_cap`)

  The paper uses a cap of 10 and 1/β = 15, standardizes rewards within a group,
  and predicts log Z with a head on the policy's hidden states. Here rewards are
  not standardized, and β log Z is the value model's value before the first
  token, whose gradient φ does not scale. Source: Zhu et al. 2025
  (arXiv:2509.15207).
  """
  return member(
      groups, c, beta, anchor="reference", baseline="value", paper=2 / beta
  )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Confidence bounds on the distance between a policy and its target.

The objectives of trajectory balance have a known optimum up to Z:

    π*(y|x) = π_ref(y|x) exp(r(x,y)/β) / Z(x),
    Z(x) = E_{y~π_ref}[exp(r(x,y)/β)].

Draws from the policy bound Z from below: the weights w = π_ref exp(r/β) / π are
positive and have mean Z (at most Z if π does not reach all of π_ref). Draws
from π_ref bound it from above if the rewards have a known maximum, since
exp((r - r_max)/β) lies in [0, 1]. Completions found by the policy contribute
their known mass to both bounds without error. The bounds on Z give bounds on
the total variation distance of π and π*, on their KL divergence, and on the
mass of π* on solutions that the policy did not find.

All bounds of a certificate hold together with probability `CONFIDENCE`, for any
rewards that are functions of the completion, and a number of draws fixed in
advance. Log-probs are taken as exact: in bfloat16 the difference between the
sampler's and the reference's adds up over a completion, and is in no bound.

Source of the bounds on means: Waudby-Smith & Ramdas 2023, "Estimating means of
bounded random variables by betting" (arXiv:2010.09686), with a mixture of
constant bets.
"""

from collections.abc import Hashable, Sequence
import dataclasses
import math

import numpy as np

CONFIDENCE = 0.98
# Divergence of a completion, log π/π*, at which `kl_upper` clips it, nats.
KL_CLIP = 20.0
# Shares of the error probability: bounds on Z below and above, on total
# variation below and above, on KL, on its clipped share, on missing solutions.
_NUM_CLAIMS = 7
# Bets λ of the mixture: near 1 for rare large values, near 0 for precision.
_BETS = np.array(
    [2.0**-k for k in range(1, 13)] + [1 - 2.0**-k for k in range(2, 13)]
)
_BISECTIONS = 40
# Stands for -inf in differences: log Z of a prompt without a judged draw.
_NO_BOUND = -1e9


@dataclasses.dataclass(frozen=True)
class Draws:
  """Completions of a prompt from the policy and from the reference.

  S and R are their numbers. Rewards of completions that could not be judged are
  NaN; such completions, and those without finite log-probs, count as the worst
  case of each bound.

  rewards_S: [S] float, task units.
  log_ratios_S: [S] float, log π - log π_ref of a completion, nats.
  ref_logprobs_S: [S] float, log π_ref of a completion, nats.
  texts_S: identity of each completion.
  modes_S: identity of each completion's solution, e.g. its `Judgement.key`.
  ref_rewards_R: [R] float, rewards of the reference's completions.
  ref_texts_R, ref_modes_R: their identities.
  """

  rewards_S: np.ndarray
  log_ratios_S: np.ndarray
  ref_logprobs_S: np.ndarray
  texts_S: Sequence[Hashable]
  modes_S: Sequence[Hashable]
  ref_rewards_R: np.ndarray
  ref_texts_R: Sequence[Hashable]
  ref_modes_R: Sequence[Hashable]


def log_lower_mean(log_values_N: np.ndarray, delta: float) -> float:
  """Returns the log of a lower confidence bound on a mean; -inf is no bound.

  The bound is the largest m at which a bet that the mean exceeds m has not won
  1/δ times its stake:

      mean_λ Π_n (1 + λ (v_n/m - 1)) >= 1/δ

  By Ville's inequality it exceeds the mean with probability δ at most. The
  values may have different means: the bound then holds for their average at any
  fixed N (by the inequality of means).

  Args:
    log_values_N: [N] log v_n, independent values >= 0; -inf is 0.
    delta: error probability, above 0 and below 1.
  """
  log_values_N = np.asarray(log_values_N, np.float64)
  most = log_values_N.max(initial=-np.inf)
  if most == -np.inf:
    return -np.inf
  log_stay_L, log_bet_L = np.log1p(-_BETS), np.log(_BETS)

  def has_won(log_m: float) -> bool:
    factors_LxN = np.logaddexp(
        log_stay_L[:, None], log_bet_L[:, None] + log_values_N - log_m
    )
    wealth = np.logaddexp.reduce(factors_LxN.sum(-1)) - math.log(len(_BETS))
    return wealth >= -math.log(delta)

  # The bet never wins at the largest value, and wins if m is small enough.
  low, high = most - 1.0, most
  while not has_won(low):
    low -= 2 * (high - low)
  for _ in range(_BISECTIONS):
    middle = (low + high) / 2
    low, high = (middle, high) if has_won(middle) else (low, middle)
  return low


def upper_mean(values_N: np.ndarray, delta: float) -> float:
  """Returns an upper confidence bound on the mean of values in [0, 1].

  Exceeded by the mean with probability `delta` at most; see `log_lower_mean`.
  """
  with np.errstate(divide="ignore"):
    log_rest_N = np.log1p(-np.asarray(values_N, np.float64))
  return -math.expm1(min(log_lower_mean(log_rest_N, delta), 0.0))


def certify(
    prompts: Sequence[Draws], beta: float, max_reward: float | None
) -> dict[str, float | None]:
  """Returns bounds and estimates, averaged over prompts; log Z and KL in nats.

  Args:
    prompts: draws of 1 or more prompts.
    beta: β of the target, above 0, task units.
    max_reward: largest possible reward, task units; None = unknown: then there
      are no upper bounds on Z and π*.

  Returns:
    log_z_lower, log_z_upper: bounds on the mean of log Z(x).
    log_z_estimate: log of the mean weight of the policy's draws, without error.
    tv_lower, tv_upper: bounds on the mean total variation distance of π and π*.
    kl_lower: bound on the mean KL(π || π*), from `tv_lower`.
    kl_upper: bound on the mean of min(log π/π*, `KL_CLIP`) under π.
    clipped_upper: bound on π's share of completions beyond `KL_CLIP`.
    kl_estimate: KL(π || π*) with `log_z_estimate`.
    unfound_upper: bound on the mean share of π* on solutions that are not among
      the policy's draws.
    modes: effective number of solutions of π*, exp of their entropy; estimated
      from the policy's draws.
    vacuous: share of prompts whose bounds on Z are more than a factor 10 apart:
      β is too small for so few draws.
    confidence: probability that all bounds hold.

    A bound is None without `max_reward`, if it needs it.
  """
  prompts = [_judged(one) for one in prompts]
  # exp(r/β) in units of exp(r_max/β).
  origin = 0.0 if max_reward is None else max_reward
  delta = (1 - CONFIDENCE) / _NUM_CLAIMS
  each = delta / len(prompts)
  weights = [_log_weights(one, beta, origin) for one in prompts]
  lower_B = np.array(
      [
          max(_found(one, beta, origin), log_lower_mean(log_w_S, each))
          for one, log_w_S in zip(prompts, weights)
      ]
  )
  scale = origin / beta
  out: dict[str, float | None] = {
      "log_z_lower": float(np.mean(lower_B)) + scale,
      **_estimates(prompts, weights, scale),
      "confidence": CONFIDENCE,
  }
  names = ("log_z_upper", "tv_upper", "kl_upper", "clipped_upper",
           "unfound_upper", "vacuous")  # fmt: skip
  if max_reward is None:
    out |= dict.fromkeys(names)
    upper_B = None
  else:
    upper_B = np.array([_upper(one, beta, origin, each) for one in prompts])
    # w/Z of each draw is at least this.
    least = np.concatenate([w_S - z for w_S, z in zip(weights, upper_B)])
    excess = np.minimum(-least, KL_CLIP)
    unfound_B = [
        _unfound(one, beta, origin, low, each)
        for one, low in zip(prompts, lower_B)
    ]
    out |= dict(zip(names, (
        float(np.mean(upper_B)) + scale,
        upper_mean(-np.expm1(np.minimum(least, 0.0)), delta),
        KL_CLIP - math.exp(_log_lower_of(KL_CLIP - excess, delta)),
        upper_mean(-least > KL_CLIP, delta),
        float(np.mean(unfound_B)),
        float(np.mean(upper_B - lower_B > math.log(10.0))),
    )))  # fmt: skip
  # w/Z of each draw is at most this; draws without a judgement may have any.
  most = np.concatenate(
      [
          np.where(np.isnan(one.rewards_S), np.inf, w_S - max(z, _NO_BOUND))
          for one, w_S, z in zip(prompts, weights, lower_B)
      ]
  )
  log_tv = _log_lower_of(-np.expm1(np.minimum(most, 0.0)), delta)
  tv = math.exp(log_tv)
  # Pinsker; Bretagnolle & Huber. Both are convex, so they hold for means.
  kl = max(2 * tv**2, -math.log1p(-(tv**2)))
  return out | {"tv_lower": tv, "kl_lower": kl}


def _judged(one: Draws) -> Draws:
  """Returns draws in which the policy's have a reward only with log-probs."""
  is_exact_S = np.isfinite(one.log_ratios_S) & np.isfinite(one.ref_logprobs_S)
  return dataclasses.replace(
      one, rewards_S=np.where(is_exact_S, one.rewards_S, np.nan)
  )


def _log_weights(one: Draws, beta: float, origin: float) -> np.ndarray:
  """Returns [S] log w of the policy's draws; -inf if not judged."""
  log_w_S = (one.rewards_S - origin) / beta - one.log_ratios_S
  return np.where(np.isnan(one.rewards_S), -np.inf, log_w_S)


def _found(one: Draws, beta: float, origin: float) -> float:
  """Returns the log of the part of Z on the distinct draws of the policy."""
  mass = one.ref_logprobs_S + (one.rewards_S - origin) / beta
  known = {y: m for y, m in zip(one.texts_S, mass) if not math.isnan(m)}
  return float(np.logaddexp.reduce(list(known.values()) or [-np.inf]))


def _upper(one: Draws, beta: float, origin: float, delta: float) -> float:
  """Returns an upper bound on log Z: found mass, and a bound on the rest."""
  found = {y for y, r in zip(one.texts_S, one.rewards_S) if not math.isnan(r)}
  values_R = _tilted(
      one, beta, origin, [y not in found for y in one.ref_texts_R]
  )
  rest = math.log(upper_mean(values_R, delta))
  return min(float(np.logaddexp(_found(one, beta, origin), rest)), 0.0)


def _tilted(
    one: Draws, beta: float, origin: float, counts_R: Sequence[bool]
) -> np.ndarray:
  """Returns [R] exp((r - r_max)/β) of the reference's draws that count, else 0.

  Draws that could not be judged count with 1.
  """
  values_R = np.exp((one.ref_rewards_R - origin) / beta)
  failed_R = np.isnan(one.ref_rewards_R)
  values_R = np.where(failed_R, 1.0, values_R)
  return np.clip(np.where(failed_R | np.asarray(counts_R), values_R, 0.0), 0, 1)


def _unfound(
    one: Draws, beta: float, origin: float, log_z_lower: float, delta: float
) -> float:
  """Returns an upper bound on π*'s mass on solutions not among the draws.

      u / max(Z, u + f)

  with u at least the part of Z on such solutions, and f the part on the draws.
  """
  modes = {*one.modes_S}
  values_R = _tilted(
      one, beta, origin, [m not in modes for m in one.ref_modes_R]
  )
  unfound = upper_mean(values_R, delta)
  found = math.exp(_found(one, beta, origin))
  return unfound / max(math.exp(log_z_lower), unfound + found)


def _log_lower_of(values_N: np.ndarray, delta: float) -> float:
  with np.errstate(divide="ignore"):
    return log_lower_mean(np.log(values_N), delta)


def _estimates(
    prompts: Sequence[Draws], weights: Sequence[np.ndarray], scale: float
) -> dict[str, float | None]:
  """Returns the estimates without bounds; None if no draw was judged."""
  log_z, kl, modes = [], [], []
  for one, log_w_S in zip(prompts, weights):
    log_w_S = log_w_S[log_w_S > -np.inf]
    if not len(log_w_S):
      continue
    log_z.append(np.logaddexp.reduce(log_w_S) - math.log(len(log_w_S)))
    kl.append(log_z[-1] - log_w_S.mean())
    modes.append(_effective_number(one, log_w_S))
  mean = lambda values: float(np.mean(values)) if values else None
  return {
      "log_z_estimate": mean([z + scale for z in log_z]),
      "kl_estimate": mean(kl),
      "modes": mean(modes),
  }


def _effective_number(one: Draws, log_w_J: np.ndarray) -> float:
  """Returns exp of the entropy of solutions weighted by w."""
  judged = [m for m, r in zip(one.modes_S, one.rewards_S) if not math.isnan(r)]
  mass: dict[Hashable, float] = {}
  for mode, weight in zip(judged, np.exp(log_w_J - log_w_J.max())):
    mass[mode] = mass.get(mode, 0.0) + float(weight)
  share_M = np.array(list(mass.values())) / sum(mass.values())
  share_M = share_M[share_M > 0]
  return float(np.exp(-(share_M * np.log(share_M)).sum()))

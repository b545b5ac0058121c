# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From what was right for each prompt to numbers with their uncertainty."""

import collections
from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from tba_jax import bootstrap

# Nats a token above which a perplexity is cut: one odd token is not all of it.
_MAX_TOKEN_NATS = 20.0


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
  """Returns the unbiased estimate of the chance that one of k samples is right.

      pass@k = 1 - C(n - c, k) / C(n, k)

  Source: Chen et al. 2021 (arXiv:2107.03374, eq. 1).

  Args:
    num_samples: n, at least k.
    num_correct: c, 0 to n.
    k: 1 to n.

  Raises:
    ValueError: a number is out of range.
  """
  if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
    raise ValueError(
        f"pass@k of k={k}, {num_correct} right of {num_samples}: allowed"
        " 1 <= k <= samples and 0 <= right <= samples"
    )
  wrong = num_samples - num_correct
  return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def summarize(
    prompts: Sequence[Mapping[str, Any]],
    num_completions: int,
    *,
    resamples: int,
    confidence: float,
) -> dict[str, Any]:
  """Returns means over prompts, standard errors and bootstrap intervals.

  Args:
    prompts: at least one record with `num_correct`, `num_distinct`,
      `num_texts`, and, of each completion, `rewards`, `lengths` and `stopped`;
      `failures` by cause. Optional: `greedy_correct`, and of each completion
      `kl` and `ref_nats` (minus the reference's log-prob),
      `diluted_perplexity`, and `verdicts` and `greedy_verdicts`, of
      `rewards/comparers.py`.
    num_completions: n, of each prompt.
    resamples, confidence: of the intervals.
  """
  n = num_completions
  correct_B = [prompt["num_correct"] for prompt in prompts]
  distinct_B = np.array([prompt["num_distinct"] for prompt in prompts])
  solved_B = np.array(correct_B) > 0
  pass_B = lambda k: np.array([pass_at_k(n, c, k) for c in correct_B])
  mean = lambda name: float(np.mean([prompt[name] for prompt in prompts]))
  values = {"pass_at_1": pass_B(1), "pass_at_k": pass_B(n)}
  values["mean_reward"] = np.array([np.mean(p["rewards"]) for p in prompts])
  if "greedy_correct" in prompts[0]:
    values["greedy_pass_at_1"] = np.array(
        [float(p["greedy_correct"]) for p in prompts]
    )
  for name in ("kl", "diluted_perplexity"):
    if name in prompts[0]:
      values[name] = np.array([np.mean(p[name]) for p in prompts])
  values |= _wins(prompts)
  out: dict[str, Any] = {}
  for name, values_B in values.items():
    out[name] = float(values_B.mean())
    out[f"{name}_stderr"] = _stderr(values_B)
    out[f"{name}_interval"] = bootstrap.mean_interval(
        values_B, num_resamples=resamples, confidence=confidence
    )
  if "ref_nats" in prompts[0]:
    tokens = sum(float(np.sum(p["lengths"])) for p in prompts)
    nats = sum(float(np.sum(p["ref_nats"])) for p in prompts) / tokens
    out["ref_perplexity"] = math.exp(min(nats, _MAX_TOKEN_NATS))
  return {
      **out,
      **_no_verdict(prompts),
      "pass_at": {str(k): float(pass_B(k).mean()) for k in _powers_of_two(n)},
      "k": n,
      "confidence": confidence,
      "distinct_correct": float(distinct_B.mean()),
      "distinct_correct_per_solved": (
          float(distinct_B[solved_B].mean()) if solved_B.any() else 0.0
      ),
      "distinct_share": mean("num_texts") / n,
      "mean_length": mean("lengths"),
      "stop_rate": mean("stopped"),
      "num_prompts": len(prompts),
      "reward_failures": dict(
          sum((p["failures"] for p in prompts), collections.Counter())
      ),
  }


def _wins(prompts: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns the means of verdicts over prompts that have any, by name."""
  out = {}
  for name, fields in (("", "verdicts"), ("greedy_", "greedy_verdicts")):
    if fields not in prompts[0]:
      continue
    verdicts = [[v for v in p[fields] if v.win is not None] for p in prompts]
    verdicts = [some for some in verdicts if some]
    if not verdicts:
      continue
    out[f"{name}win_rate"] = _means(verdicts, lambda v: v.win)
    if all(v.score is not None for some in verdicts for v in some):
      out[f"{name}gold_reward"] = _means(verdicts, lambda v: v.score)
      out[f"{name}gold_margin"] = _means(
          verdicts, lambda v: v.score - v.reference_score
      )
  return out


def _means(
    values: Sequence[Sequence[Any]], of: Callable[[Any], float]
) -> np.ndarray:
  return np.array([np.mean([of(value) for value in some]) for some in values])


def _no_verdict(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns contests without a verdict, by cause; {} without a comparer."""
  names = [n for n in ("verdicts", "greedy_verdicts") if n in prompts[0]]
  causes = collections.Counter(
      v.failure for p in prompts for n in names for v in p[n] if v.win is None
  )
  return {"no_verdict": dict(causes)} if names else {}


def _powers_of_two(n: int) -> list[int]:
  """Returns 1, 2, 4 … below n, and n."""
  return sorted({2**i for i in range(n.bit_length()) if 2**i < n} | {n})


def _stderr(values_B: np.ndarray) -> float:
  """Returns the standard error of the mean; 0 where there is one value."""
  if len(values_B) < 2:
    return 0.0
  return float(values_B.std(ddof=1) / math.sqrt(len(values_B)))

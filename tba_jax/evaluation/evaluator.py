# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""pass@k, distinct solutions, mean reward, KL and win-rate on a task's split.

A prompt gets the same random numbers in every call, so that the draw does not
blur the comparison of two versions of the params. Completions that could not be
judged count in `failure_share`; without `reward.fallback`, they count in no
result that depends on rewards.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import copy
import math
from typing import Any
import zlib

import ml_collections
import numpy as np

from tba_jax import collect
from tba_jax import types
from tba_jax.environments import turns
from tba_jax.evaluation import certificate
from tba_jax.learning import batches
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.policy import reference_policy as reference_lib
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.sampling import requests
from tba_jax.system import ramps
from tba_jax.tasks import base

# Measurements of one prompt; `summarize` lists the fields.
Record = dict[str, Any]

# Bootstrap intervals of a result: number of resamples, and their confidence.
RESAMPLES = 1000
CONFIDENCE = 0.95
# Bootstrap resamples are drawn in blocks of this many values to bound memory.
RESAMPLED_VALUES = 4_000_000
# Caps the mean nats per token, so that exp() stays finite.
_MAX_TOKEN_NATS = 20.0
# Above all visits of training, which count from 0, so that the two never share
# random numbers.
_FIRST_VISIT = 2**31
_NUM_PROMPTS_SHOWN = 8
_NUM_COMPLETIONS_SHOWN = 16


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
  """Returns an unbiased estimate of the chance that one of k is correct.

      pass@k = 1 - C(n - c, k) / C(n, k)

  Source: Chen et al. 2021 (arXiv:2107.03374, eq. 1).

  Args:
    num_samples: n, at least k.
    num_correct: c, 0 to n.
    k: 1 to n.
  """
  wrong = num_samples - num_correct
  return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def mean_interval(
    values_B: np.ndarray,
    *,
    counts_B: np.ndarray | None = None,
    num_resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float]:
  """Returns the percentile bootstrap interval of a mean.

      [q_{(1-c)/2}, q_{(1+c)/2}] of the means of resamples with replacement

  or, with counts, of the ratios Σ values / Σ counts.

  Source: Efron 1979 (Annals of Statistics 7:1), percentile method. It resamples
  prompts, since the completions of a prompt are not independent.

  Args:
    values_B: [B] one value per prompt, B at least 1.
    counts_B: [B] number of terms in each value, above 0; None = one each.
    num_resamples: number of resamples, 1 or more.
    confidence: c, above 0 and below 1.
    seed: random seed; the same values and seed give the same interval.
  """
  values_B = np.asarray(values_B, np.float64)
  rng = np.random.default_rng(seed)
  size = len(values_B)
  means = []
  remaining = num_resamples
  while remaining:
    count = min(remaining, max(RESAMPLED_VALUES // size, 1))
    indices = rng.integers(size, size=(count, size))
    resampled = values_B[indices].mean(axis=1)
    if counts_B is not None:
      resampled /= counts_B[indices].mean(axis=1)
    means.append(resampled)
    remaining -= count
  tail = (1 - confidence) / 2
  low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
  return float(low), float(high)


def summarize(
    prompts: Sequence[Mapping[str, Any]],
    num_completions: int,
) -> dict[str, Any]:
  """Returns means, standard errors over prompts and bootstrap intervals.

  Args:
    prompts: records of prompts, 1 or more. Required: `num_correct`,
      `num_distinct`, `num_texts`, `failures` by cause; lists over completions:
      `rewards` of those that have one, `lengths` and `stopped` of those that
      exist. Optional: `greedy_correct`, None if it could not be judged; lists
      of `parts` of the reward by name, `kl`, `ref_nats` (minus the reference's
      log-prob) and `ref_tokens` (number of its terms), `diluted_perplexity`,
      `turns`, and `verdicts`, `greedy_verdicts` (`comparers.Verdict`).
    num_completions: n, completions per prompt.
  """
  n = num_completions
  judged = [prompt for prompt in prompts if len(prompt["rewards"])]
  distinct_B = np.array([prompt["num_distinct"] for prompt in judged])
  solved_B = np.array([prompt["num_correct"] > 0 for prompt in judged], bool)
  lists = lambda name: [prompt[name] for prompt in prompts]

  def passes(k: int) -> list[list[float]]:
    return [
        [pass_at_k(m := len(p["rewards"]), p["num_correct"], min(k, m))]
        for p in judged
    ]

  # Lists of values by prompt. Means are over all values, not over prompts.
  values = {"pass_at_1": passes(1), "pass_at_k": passes(n)}
  values["mean_reward"] = lists("rewards")
  values["failure_share"] = [
      [1.0] * (bad := sum(p["failures"].values())) + [0.0] * (n - bad)
      for p in prompts
  ]
  if "greedy_correct" in prompts[0]:
    values["greedy_pass_at_1"] = [
        [] if x is None else [float(x)] for x in lists("greedy_correct")
    ]
  for name in ("kl", "diluted_perplexity", "turns"):
    if name in prompts[0]:
      values[name] = lists(name)
  values |= _parts(prompts)
  values |= _verdicts(prompts)
  out: dict[str, Any] = {}
  for name, lists_B in values.items():
    out |= _mean_and_error(name, lists_B)

  def mean(lists_B: Sequence[Sequence[float]]) -> float | None:
    flat = [float(value) for values in lists_B for value in values]
    return sum(flat) / len(flat) if flat else None

  if "ref_nats" in prompts[0]:
    tokens = sum(float(np.sum(p["ref_tokens"])) for p in prompts)
    nats = sum(float(np.sum(p["ref_nats"])) for p in prompts)
    out["ref_perplexity"] = (
        math.exp(min(nats / tokens, _MAX_TOKEN_NATS)) if tokens else None
    )
  powers_of_two = {2**i for i in range(n.bit_length())}
  return {
      **out,
      **_no_verdict(prompts),
      "pass_at": {str(k): mean(passes(k)) for k in sorted(powers_of_two | {n})},
      "k": n,
      "confidence": CONFIDENCE,
      "distinct_correct": mean(distinct_B[:, None]),
      "distinct_correct_per_solved": (
          float(distinct_B[solved_B].mean()) if solved_B.any() else 0.0
      ),
      "distinct_share": mean(
          [[p["num_texts"] / n] for p in prompts if len(p["lengths"])]
      ),
      "mean_length": mean(lists("lengths")),
      "stop_rate": mean(lists("stopped")),
      "num_prompts": len(prompts),
      "binary_rewards": all(
          {*p["rewards"]} <= {0.0, 1.0}
          and sum(p["rewards"]) == p["num_correct"]
          for p in judged
      ),
      "reward_failures": dict(
          sum((p["failures"] for p in prompts), collections.Counter())
      ),
  }


def _mean_and_error(
    name: str, lists_B: Sequence[Sequence[float]]
) -> dict[str, Any]:
  """Returns mean of all values, standard error and interval over prompts.

      R = Σ_b s_b / Σ_b n_b,   SE = √(B/(B-1) Σ_b (s_b - R n_b)²) / Σ_b n_b

  with s_b the sum of a prompt's n_b values. Source: Cochran 1977, Sampling
  Techniques, §2.11, ratio estimator. The mean is None without any value.
  """
  lists_B = [values for values in lists_B if len(values)]
  if not lists_B:
    return {name: None}
  counts_B = np.array([len(values) for values in lists_B], np.float64)
  values_B = np.array([np.mean(values) for values in lists_B], np.float64)
  B, share_B = len(values_B), None
  if np.ptp(counts_B):
    share_B = counts_B / counts_B.mean()
    values_B = values_B * share_B
  ratio = float(values_B.mean())
  error_B = values_B - ratio * (1.0 if share_B is None else share_B)
  variance = np.square(error_B).sum() / max(B - 1, 1)
  return {
      name: ratio,
      f"{name}_stderr": math.sqrt(variance / B) if B > 1 else 0.0,
      f"{name}_interval": mean_interval(values_B, counts_B=share_B),
  }


def _parts(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the values of each part of the reward, by prompt."""
  parts_B = [prompt.get("parts", ()) for prompt in prompts]
  names = {name for parts in parts_B for judged in parts for name in judged}
  return {
      f"reward/{name}": [
          [judged[name] for judged in parts if name in judged]
          for parts in parts_B
      ]
      for name in sorted(names)
  }


def _verdicts(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the values of each metric of the comparer, by prompt."""
  out = {}
  for name, field in (("", "verdicts"), ("greedy_", "greedy_verdicts")):
    judged = [[v for v in p.get(field, ()) if v.win is not None]
             for p in prompts]  # fmt: skip
    if not any(judged):
      continue
    out[f"{name}win_rate"] = [[v.win for v in some] for some in judged]
    if all(v.score is not None for some in judged for v in some):
      out[f"{name}gold_reward"] = [[v.score for v in some] for some in judged]
      out[f"{name}gold_margin"] = [
          [v.score - v.reference_score for v in some] for some in judged
      ]
  return out


def _no_verdict(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the count of comparisons without a verdict by cause, or {}."""
  names = [n for n in ("verdicts", "greedy_verdicts") if n in prompts[0]]
  causes = collections.Counter(
      v.failure for p in prompts for n in names for v in p[n] if v.win is None
  )
  return {"no_verdict": dict(causes)} if names else {}


class Interrupted(Exception):
  """The evaluation was stopped before all prompts were evaluated."""


class Evaluator:
  """Samples completions of a split's prompts and measures them."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      policy: policy_lib.Policy,
      judge: judges.Judge,
      *,
      split: str = base.HELD_OUT,
      comparer: comparers.Comparer | None = None,
      reference: reference_lib.Reference | None = None,
      plain_reference: reference_lib.Reference | None = None,
      environments: turns.Environments | None = None,
  ):
    """Makes the samplers.

    Args:
      config: settings `evaluate` and the samplers' settings.
      judge: source of rewards and correctness, closed with the evaluator.
      split: "train" or "held_out".
      comparer: source of the win-rate against the task's reference completions,
        closed with the evaluator; None = no win-rate.
      reference: policy that the KL is measured against; None = no KL.
      plain_reference: reference at temperature 1, for the papers' perplexity.
      environments: interactive environments of the task, closed with the
        evaluator; None = the task has none.
    """
    self._config = config.evaluate
    self._fallback = config.reward.fallback
    self._task = policy.task
    self._tokenizer = policy.tokenizer
    self._sampler = policy_samplers.make_evaluation_sampler(config, policy)
    self._greedy_sampler = None
    if config.evaluate.greedy:
      self._greedy_sampler = policy_samplers.make_greedy_sampler(config, policy)
    self.judge = judge
    self.split = split
    self._comparer = comparer
    self._reference = reference
    self._plain_reference = plain_reference
    self._environments = environments
    self._target = None
    if config.evaluate.certificate and reference is not None:
      self._target = _Target(config, policy, reference)

  @property
  def num_prompts(self) -> int:
    """Size of the split."""
    return self._task.num_prompts(self.split)

  def while_training(self) -> "Evaluator":
    """Returns an evaluator of the split used during training; shares parts."""
    other = copy.copy(self)
    other.split = base.split_while_training(self._task)
    return other

  def close(self) -> None:
    """Closes judge, comparer and environments."""
    self.judge.close()
    if self._environments is not None:
      self._environments.close()
    if self._comparer is not None:
      self._comparer.close()

  def run(
      self,
      params: types.PyTree,
      num_prompts: int,
      *,
      version: int,
      should_stop: Callable[[], bool] = lambda: False,
      on_progress: Callable[[int, int], None] | None = None,
  ) -> dict[str, Any]:
    """Returns the results over the first `num_prompts` prompts of the split.

    Args:
      params: policy, on its mesh.
      num_prompts: 1 up to the size of the split.
      version: step at which the params were published.
      should_stop: function checked before each batch.
      on_progress: function called with (prompts done, all prompts) after each
        batch.

    Returns:
      pass_at_1: share of correct completions, mean over prompts.
      pass_at_k: share of prompts with a correct one among `k` completions.
      pass_at: unbiased pass@ 1, 2, 4 … up to k. All three count only judged
        completions, and prompts that have any; for a prompt with m < k of them,
        pass@k is its pass@m.
      greedy_pass_at_1: share of prompts whose greedy completion is correct,
        with `evaluate.greedy`.
      mean_reward: mean over judged completions, task units.
      failure_share: share of completions that could not be judged.
      reward/NAME: mean of a part of the reward over completions that have it.
      kl: Σ log π - log π_ref of a completion, nats, at the sampling
        temperature, with a reference.
      ref_perplexity: exp of the reference's mean nats per token, with a
        reference.
      diluted_perplexity: see `_add_perplexity`; of the greedy completions if
        any, with a plain reference.
      turns: mean number of turns per judged completion that an environment
        answered; only with environments.
      [greedy_]win_rate, gold_reward, gold_margin, no_verdict (by cause): from
        the comparer; docs/guides/offline_data.md.
      …_stderr, …_interval: standard error over prompts and bootstrap interval
        of the metrics above, except `pass_at` and `ref_perplexity`. A mean is
        None, and has neither, if nothing could be judged.
      k: completions per prompt.
      confidence: coverage of the intervals, between 0 and 1.
      distinct_correct: mean number of distinct correct solutions among a
        prompt's k completions.
      distinct_correct_per_solved: mean of the same number over solved prompts;
        0 without any.
      distinct_share: distinct texts among the k completions, over k.
      mean_length: tokens per completion, stop token included.
      stop_rate: share of completions that end with a stop token.
      num_prompts, version, split: number of prompts, version and split
        evaluated.
      binary_rewards: whether each reward is 1 if the completion is correct, and
        else 0.
      cosine_distance and the like: metrics of judges with `set_metrics`.
      reward_failures: completions without a reward from the task, by cause.
      certificate/NAME: results of `certificate.certify`, with a reference and
        `evaluate.certificate`.
      samples: completions of the first prompts, as in `samples.jsonl`.

    Raises:
      Interrupted: `should_stop` was true.
    """
    batch_size = self._config.batch_prompts
    params = self._sampler.put(params)
    prompts = []
    for start in range(0, num_prompts, batch_size):
      if should_stop():
        raise Interrupted(f"stopped after {start} of {num_prompts} prompts")
      end = min(start + batch_size, num_prompts)
      prompts += self.evaluate_batch(params, range(start, end), version)
      if on_progress is not None:
        on_progress(end, num_prompts)
    summary = summarize(prompts, self._config.num_completions)
    samples = [
        sample
        for prompt in prompts[:_NUM_PROMPTS_SHOWN]
        for sample in prompt["samples"][:_NUM_COMPLETIONS_SHOWN]
    ]
    self._add_reasons(samples)
    if self._target is not None:
      summary |= self._target.certify(prompts)
    return {
        **summary,
        **self.judge.set_metrics(prompts),
        "version": version,
        "split": self.split,
        "samples": samples,
    }

  def run_all(
      self, params: types.PyTree, num_prompts: int, **options: Any
  ) -> dict[str, Any]:
    """Returns the results of `run`, and of the task's further splits.

    Metrics of a further split are named `SPLIT/NAME`, without samples, and
    cover up to `num_prompts` prompts. For the arguments, see `run`.
    """
    result = self.run(params, min(num_prompts, self.num_prompts), **options)
    for split in self._task.more_splits:
      other = copy.copy(self)
      other.split = split
      count = min(num_prompts, other.num_prompts)
      for name, value in other.run(params, count, **options).items():
        if isinstance(value, (int, float, tuple)) and name != "version":
          result[f"{split}/{name}"] = value
    return result

  def evaluate_batch(
      self, params: types.PyTree, indices: range, version: int
  ) -> list[Record]:
    """Returns one record per prompt, for `summarize`."""
    visit = _FIRST_VISIT + zlib.crc32(self.split.encode()) % _FIRST_VISIT
    prompts = tuple((-1, index, visit) for index in indices)
    collector = self._collector(self._sampler, self._config.num_completions)
    sampled = collector.sample(prompts, params, version)
    task_prompts, texts = zip(*(self._prompt(one.request) for one in sampled))
    asked_BxS = collector.judge_requests(sampled)
    judged_BxS = collector.judge(asked_BxS)
    records = [
        self._record(text, one.completions, asked_S, judged_S)
        for text, one, asked_S, judged_S in zip(
            texts, sampled, asked_BxS, judged_BxS
        )
    ]
    self._add_verdicts(records, "verdicts", task_prompts, asked_BxS)
    plain = sampled
    if self._greedy_sampler is not None:
      collector = self._collector(self._greedy_sampler, 1)
      plain = collector.sample(prompts, params, version)
      asked_Bx1 = collector.judge_requests(plain)
      for record, (judgement,) in zip(records, collector.judge(asked_Bx1)):
        record["greedy_correct"] = (
            None
            if self._reward(judgement) is None
            else judgement.key is not None
        )
      self._add_verdicts(records, "greedy_verdicts", task_prompts, asked_Bx1)
    if self._reference is not None:
      self._add_kl(records, sampled)
    if self._plain_reference is not None:
      self._add_perplexity(records, plain)
    if self._target is not None:
      target = self._target
      collector = self._collector(target.sampler, self._config.num_completions)
      target.add_draws(
          records, sampled, judged_BxS, collector, (self.split, prompts)
      )
    return records

  def _collector(
      self, sampler: requests.Sampler, num_completions: int
  ) -> collect.Collector:
    return collect.Collector(
        self._task,
        self._tokenizer,
        sampler,
        self.judge,
        num_completions=num_completions,
        split=self.split,
        environments=self._environments,
    )

  def _prompt(self, request: requests.Request) -> tuple[base.Prompt, str]:
    """Returns a prompt as the task provides it, and its text."""
    if self._environments is not None:
      text = self._tokenizer.decode(request.prompt_tokens)
      return text, text
    prompt = self._task.prompt(self.split, request.prompt_id)
    return prompt, self._tokenizer.prompt_text(prompt)

  def _record(
      self,
      prompt: str,
      completions: types.Completions,
      asked_S: Sequence[judges.JudgeRequest],
      judged_S: Sequence[base.Judgement],
  ) -> Record:
    samples = []
    for sample, (request, judgement) in enumerate(zip(asked_S, judged_S)):
      length = int(completions.lengths[sample])
      tokens = completions.tokens[sample, :length].tolist()
      sampled = completions.sampled_mask[sample, :length].tolist()
      logprobs = completions.logprobs[sample, :length].tolist()
      failure = judgement.failure
      samples.append(
          {
              "prompt": prompt,
              "prompt_id": request.index,
              "completion": request.completion,
              "reward": self._reward(judgement),
              "reason": failure and f"could not be judged: {failure}",
              "version": int(completions.versions[sample]),
              "tokens": self._tokenizer.pieces(tokens),
              "logprobs": [x if s else None for x, s in zip(logprobs, sampled)],
          }
      )
    right = [j.key for j in judged_S if j.key is not None]
    exist_S = completions.lengths > 0  # 0 if an environment gave no prompt.
    return {
        "right": [j.key is not None for j in judged_S],
        "num_correct": len(right),
        "num_distinct": len(set(right)),
        "num_texts": len({a.completion for a, e in zip(asked_S, exist_S) if e}),
        "failures": collections.Counter(
            j.failure for j in judged_S if j.failure
        ),
        "rewards": [r for j in judged_S if (r := self._reward(j)) is not None],
        "parts": [j.parts for j in judged_S if not j.failure],
        "lengths": completions.lengths[exist_S],
        "stopped": completions.stopped[exist_S],
        "samples": samples,
        **_turns(asked_S),
    }

  def _reward(self, judgement: base.Judgement) -> float | None:
    """Returns the reward, or the fallback if the completion was not judged."""
    return self._fallback if judgement.failure else judgement.reward

  def _add_reasons(self, samples: list[dict[str, Any]]) -> None:
    """Adds to each judged sample the reason why it is wrong."""
    judged = [sample for sample in samples if not sample["reason"]]
    reasons = self.judge.explain(
        [
            judges.JudgeRequest(
                self.split, sample["prompt_id"], sample["completion"]
            )
            for sample in judged
        ]
    )
    for sample, reason in zip(judged, reasons):
      sample["reason"] = reason

  def _add_verdicts(
      self,
      records: Sequence[Record],
      field: str,
      prompts: Sequence[base.Prompt],
      asked_BxS: Sequence[Sequence[judges.JudgeRequest]],
  ) -> None:
    """Adds verdicts against the task's reference if a comparer exists."""
    if self._comparer is None:
      return
    comparisons = [
        comparers.Comparison(
            prompt, one, base.reference_text(self._task, one.split, one.index)
        )
        for prompt, some in zip(prompts, asked_BxS)
        for one in some
    ]
    verdicts = iter(self._comparer.compare(comparisons))
    for record, some in zip(records, asked_BxS):
      record[field] = [next(verdicts) for _ in some]

  def _add_kl(
      self, records: Sequence[Record], sampled: Sequence[collect.Sampled]
  ) -> None:
    """Adds `kl`, log π - log π_ref per completion, and the reference's nats."""
    ref_BxKxT, mask_BxKxT = _logprobs(self._reference, sampled)
    own_BxKxT = np.stack([one.completions.plain_logprobs for one in sampled])
    kl_BxK = np.where(mask_BxKxT, own_BxKxT - ref_BxKxT, 0.0).sum(-1)
    for record, kl_K, ref_KxT, mask_KxT in zip(
        records, kl_BxK, ref_BxKxT, mask_BxKxT
    ):
      record |= {
          "log_ratios": kl_K,
          "ref_logprobs": ref_KxT.sum(-1),
          "kl": kl_K[mask_KxT.any(-1)],
          "ref_nats": -ref_KxT.sum(-1),
          "ref_tokens": mask_KxT.sum(-1),
      }

  def _add_perplexity(
      self, records: Sequence[Record], sampled: Sequence[collect.Sampled]
  ) -> None:
    """Adds `diluted_perplexity` of each completion.

        exp(-log π_ref(y|x) / (|x| + |y| - 1))

    The prompt's tokens count in the denominator but not in the sum, which pulls
    all values towards 1. The papers call it perplexity, or KL.

    Source: the evaluation code of Noukhovitch et al. 2024 (arXiv:2410.18252).
    """
    ref_BxKxT, mask_BxKxT = _logprobs(self._plain_reference, sampled)
    for record, one, ref_KxT, mask_KxT in zip(
        records, sampled, ref_BxKxT, mask_BxKxT
    ):
      prompt_length = len(one.request.prompt_tokens)
      tokens_K = np.maximum(prompt_length + mask_KxT.sum(-1) - 1, 1)
      perplexity_K = np.exp(-ref_KxT.sum(-1) / tokens_K)
      record["diluted_perplexity"] = perplexity_K[mask_KxT.any(-1)]


class _Target:
  """Draws from the reference, for bounds on the distance to the target."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      policy: policy_lib.Policy,
      reference: reference_lib.Reference,
  ):
    """Makes the sampler of a fixed reference."""
    self._beta = ramps.parse(config.loss.beta).end
    self._max_reward = config.evaluate.max_reward
    if self._max_reward is None and config.reward.backend != "model":
      self._max_reward = policy.task.max_reward
    self.sampler = policy_samplers.make_evaluation_sampler(
        config, policy, reference.model
    )
    self._reference = reference
    # The reference's draws of a prompt are the same in each evaluation.
    self._drawn: dict[Any, tuple[Any, ...]] = {}

  def add_draws(
      self,
      records: Sequence[Record],
      sampled: Sequence[collect.Sampled],
      judged_BxS: Sequence[Sequence[base.Judgement]],
      collector: collect.Collector,
      where: tuple[str, Sequence[tuple[int, int, int]]],
  ) -> None:
    """Adds `draws` to each record.

    Args:
      records: results of `Evaluator._add_kl`.
      sampled: the policy's completions.
      judged_BxS: their judgements.
      collector: source of the reference's completions.
      where: split, and its prompts for the collector.
    """
    if where not in self._drawn:
      params = self.sampler.put(self._reference.params)
      drawn = collector.sample(where[1], params, 0)
      judged = collector.judge(collector.judge_requests(drawn))
      self._drawn[where] = tuple(map(_identities, drawn, judged))
    for record, one, judged_S, of_reference in zip(
        records, sampled, judged_BxS, self._drawn[where]
    ):
      rewards_S, texts_S, modes_S = _identities(one, judged_S)
      record["draws"] = certificate.Draws(
          rewards_S,
          record["log_ratios"],
          record["ref_logprobs"],
          texts_S,
          modes_S,
          *of_reference,
      )

  def certify(self, prompts: Sequence[Record]) -> dict[str, Any]:
    """Returns the certificate of all prompts, as fields of the result."""
    draws = [prompt["draws"] for prompt in prompts]
    bounds = certificate.certify(draws, self._beta, self._max_reward)
    return {f"certificate/{name}": value for name, value in bounds.items()}


def _identities(
    one: collect.Sampled, judged_S: Sequence[base.Judgement]
) -> tuple[np.ndarray, list[bytes], list[Any]]:
  """Returns rewards, NaN if not judged, tokens and solutions of completions."""
  c = one.completions
  texts = [y[:n].tobytes() for y, n in zip(c.tokens, c.lengths)]
  rewards_S = np.array([np.nan if j.failure else j.reward for j in judged_S])
  return (
      rewards_S,
      texts,
      [text if j.key is None else j.key for text, j in zip(texts, judged_S)],
  )


def _turns(asked_S: Sequence[judges.JudgeRequest]) -> Record:
  """Returns `turns` of the judged completions; {} without environments."""
  outcomes = [
      request.outcome for request in asked_S if request.outcome is not None
  ]
  if not outcomes:
    return {}
  return {"turns": [o.num_turns for o in outcomes if not o.failure]}


def _logprobs(
    reference: reference_lib.Reference, sampled: Sequence[collect.Sampled]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns [B, K, T] log-probs under the reference, and the sampled mask."""
  completions = [one.completions for one in sampled]
  rows = [
      (one.request.prompt_tokens, [y[:n] for y, n in zip(c.tokens, c.lengths)])
      for one, c in zip(sampled, completions)
  ]
  num_completions, num_tokens = completions[0].tokens.shape
  batch = batches.pad_sequences(
      rows,
      (len(rows),),
      num_completions=num_completions,
      # Failed environments have no prompt.
      max_prompt_tokens=max(1, *(len(prompt) for prompt, _ in rows)),
      max_completion_tokens=num_tokens,
  )
  sampled_BxKxT = np.stack([c.sampled_mask for c in completions])
  logprobs_BxKxT = reference.logprobs(
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      sampled_BxKxT.astype(np.float32),
  )
  return np.asarray(logprobs_BxKxT), sampled_BxKxT

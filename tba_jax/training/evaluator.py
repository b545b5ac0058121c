# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""pass@k, distinct solutions and mean reward of params on a split of a task.

The same prompts get the same random numbers in every call, so a difference
between two versions of the params is not one between two draws of prompts.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import copy
import dataclasses
import functools
import math
from typing import Any, TYPE_CHECKING
import zlib

import numpy as np

from tba_jax import types
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.sampling import requests as requests_lib
from tba_jax.tasks import base
from tba_jax.training import reference as reference_lib

if TYPE_CHECKING:
  from tba_jax.sampling import decode


# What an evaluation measures beside the task's own reward.
#
# Each function adds fields to the records of prompts, for `eval_summary.py`.


Record = dict[str, Any]


def add_reference(
    reference: "reference_lib.Reference",
    prompts: Sequence[np.ndarray],
    sampled: Sequence[types.Completions],
    records: Sequence[Record],
) -> None:
  """Adds `kl`, log π - log π_ref of each completion, and `ref_nats`.

  Args:
    reference: tempered as the policy.
    prompts: token ids, [P] each.
    sampled: completions of each prompt.
    records: of the prompts.
  """
  ref_BxKxT, mask_BxKxT = _logprobs(reference, prompts, sampled)
  own_BxKxT = np.stack([found.plain_logprobs for found in sampled])
  kl_BxK = np.where(mask_BxKxT, own_BxKxT - ref_BxKxT, 0.0).sum(-1)
  for record, kl_K, ref_KxT in zip(records, kl_BxK, ref_BxKxT):
    record |= {"kl": kl_K, "ref_nats": -ref_KxT.sum(-1)}


def add_perplexity(
    reference: "reference_lib.Reference",
    prompts: Sequence[np.ndarray],
    sampled: Sequence[types.Completions],
    records: Sequence[Record],
) -> None:
  """Adds `diluted_perplexity` of each completion, as Asynchronous RLHF has it.

      exp(-log π_ref(y|x) / (|x| + |y| - 1))

  The prompt's tokens count in the denominator and not in the sum, which puts
  all values near 1. The papers call it perplexity, or KL.

  Source: the evaluation code of Noukhovitch et al. 2024 (arXiv:2410.18252).

  Args:
    reference: at temperature 1.
    prompts, sampled, records: as `add_reference`.
  """
  ref_BxKxT, mask_BxKxT = _logprobs(reference, prompts, sampled)
  for record, prompt, ref_KxT, mask_KxT in zip(
      records, prompts, ref_BxKxT, mask_BxKxT
  ):
    tokens_K = np.maximum(len(prompt) + mask_KxT.sum(-1) - 1, 1)
    record["diluted_perplexity"] = np.exp(-ref_KxT.sum(-1) / tokens_K)


def add_verdicts(
    comparer: comparers.Comparer | None,
    task: base.Task,
    texts: Sequence[str],
    requests: "Sequence[Sequence[judges.Request]]",
    records: Sequence[Record],
    *,
    name: str,
) -> None:
  """Adds verdicts on completions against the task's reference completion.

  Args:
    comparer: says which is better; None adds nothing.
    task: of the references.
    texts: prompts.
    requests: completions of each prompt.
    records: of the prompts.
    name: the field, a list of `comparers.Verdict` in the completions' order.
  """
  if comparer is None:
    return
  contests = [
      comparers.Contest(
          text, one, base.reference_text(task, one.split, one.index)
      )
      for text, some in zip(texts, requests)
      for one in some
  ]
  verdicts = iter(comparer.compare(contests))
  for record, some in zip(records, requests):
    record[name] = [next(verdicts) for _ in some]


def _logprobs(
    reference: "reference_lib.Reference",
    prompts: Sequence[np.ndarray],
    sampled: Sequence[types.Completions],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns log-probs [B, K, T] under the reference, and what is real."""
  width = max(len(prompt) for prompt in prompts)
  prompts_BxP = np.zeros((len(prompts), width), np.int32)
  prompt_mask_BxP = np.zeros((len(prompts), width), np.float32)
  for row, prompt in enumerate(prompts):
    prompts_BxP[row, width - len(prompt) :] = prompt
    prompt_mask_BxP[row, width - len(prompt) :] = 1
  tokens_BxKxT = np.stack([found.tokens for found in sampled])
  lengths_BxK = np.stack([found.lengths for found in sampled])
  mask_BxKxT = np.arange(tokens_BxKxT.shape[-1]) < lengths_BxK[..., None]
  logprobs_BxKxT = reference.logprobs(
      prompts_BxP, prompt_mask_BxP, tokens_BxKxT, mask_BxKxT
  )
  return np.asarray(logprobs_BxKxT), mask_BxKxT


# Confidence intervals of means over prompts, by resampling the prompts.


# Resamples are drawn in parts of so many values, to bound the memory.
_PART = 4_000_000


def mean_interval(
    values_B: np.ndarray,
    *,
    num_resamples: int,
    confidence: float,
    seed: int = 0,
) -> tuple[float, float]:
  """Returns the percentile bootstrap interval of a mean.

      [q_{(1-c)/2}, q_{(1+c)/2}] of the means of resamples with replacement

  Source: Efron 1979 (Annals of Statistics 7:1), percentile method. Prompts are
  resampled, not completions: those of a prompt are not independent.

  Args:
    values_B: [B] one value a prompt, B at least 1.
    num_resamples: at least 1.
    confidence: c, above 0 and below 1.
    seed: of the resamples; the same values give the same interval.

  Raises:
    ValueError: there is no value, or a number is out of range.
  """
  values_B = np.asarray(values_B, np.float64)
  if values_B.ndim != 1 or not len(values_B):
    raise ValueError("a bootstrap interval: allowed one value or more")
  if num_resamples < 1 or not 0 < confidence < 1:
    raise ValueError(
        f"a bootstrap interval of {num_resamples} resamples and confidence"
        f" {confidence}: allowed 1 or more, and between 0 and 1"
    )
  rng = np.random.default_rng(seed)
  size = len(values_B)
  means = []
  left = num_resamples
  while left:
    some = min(left, max(_PART // size, 1))
    means.append(values_B[rng.integers(size, size=(some, size))].mean(axis=1))
    left -= some
  tail = (1 - confidence) / 2
  low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
  return float(low), float(high)


# From what was right for each prompt to numbers with their uncertainty.


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
    out[f"{name}_interval"] = mean_interval(
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


# Training counts the visits of a prompt from 0; those of an evaluation stand
# above all of them, so that the two never share random numbers, even with one
# seed and one sampler.
_FIRST_VISIT = 2**31
_NUM_PROMPTS_SHOWN = 8
_NUM_COMPLETIONS_SHOWN = 16


class Interrupted(Exception):
  """`should_stop` was true before all prompts were evaluated."""


class Evaluator:
  """Samples completions of a split's prompts and counts what is right."""

  def __init__(
      self,
      task: base.Task,
      tokenizer: tokenizer_lib.Tokenizer,
      sampler: "decode.Sampler",
      judge: judges.Judge,
      *,
      split: str,
      num_completions: int,
      batch_prompts: int,
      resamples: int,
      confidence: float,
      greedy_sampler: "decode.Sampler | None" = None,
      reference: reference_lib.Reference | None = None,
      plain_reference: reference_lib.Reference | None = None,
      comparer: comparers.Comparer | None = None,
  ):
    """Makes an evaluator.

    Args:
      task: prompts.
      tokenizer: of prompts and completions.
      sampler: as trained with, or greedy with one completion a prompt.
      judge: says of each completion what it is worth and whether it is right;
        closed with this.
      split: "train" or "held_out".
      num_completions: k, completions of each prompt.
      batch_prompts: prompts sampled in one call of the sampler; `should_stop`
        is asked between them.
      resamples, confidence: of the bootstrap intervals.
      greedy_sampler: for one more completion a prompt, the likeliest tokens.
      reference: the policy that the KL is measured against; None = no KL.
      plain_reference: the same at temperature 1, for the papers' perplexity.
      comparer: for the win-rate against the task's reference completions;
        closed with this; None = no win-rate.

    Raises:
      ValueError: a number is below 1, or the task has no such split.
    """
    for name, value in (
        ("num_completions", num_completions),
        ("batch_prompts", batch_prompts),
    ):
      if value < 1:
        raise ValueError(f"evaluate.{name}={value}: allowed 1 or above")
    self._task = task
    self._tokenizer = tokenizer
    self._sampler = sampler
    self.judge = judge
    self._set_split(split)
    self._num_completions = num_completions
    self._batch_prompts = batch_prompts
    self._resamples = resamples
    self._confidence = confidence
    self._greedy_sampler = greedy_sampler
    self._reference = reference
    self._plain_reference = plain_reference
    self._comparer = comparer

  def _set_split(self, split: str) -> None:
    base.check_split(split)
    self._split = split
    self._visit = _FIRST_VISIT + zlib.crc32(split.encode()) % _FIRST_VISIT

  @property
  def split(self) -> str:
    return self._split

  @property
  def num_prompts(self) -> int:
    """Size of the split."""
    return self._task.num_prompts(self._split)

  def while_training(self) -> "Evaluator":
    """Returns an evaluator with the same parts, of the split for training."""
    other = copy.copy(self)
    other._set_split(base.split_while_training(self._task))
    return other

  def close(self) -> None:
    """Ends what judge and comparer have started."""
    self.judge.close()
    if self._comparer is not None:
      self._comparer.close()

  def run(
      self,
      params: types.PyTree,
      num_prompts: int,
      *,
      version: int,
      should_stop: Callable[[], bool] | None = None,
      on_progress: Callable[[int, int], None] | None = None,
  ) -> dict[str, Any]:
    """Returns the results over the first `num_prompts` prompts of the split.

    Blocks until all are sampled, or `should_stop` is true between two batches.

    Args:
      params: of the sampler's model.
      num_prompts: 1 up to the size of the split.
      version: of the params.
      should_stop: asked before each batch.
      on_progress: called with (prompts done, prompts in all) after each batch.

    Returns:
      pass_at_1: share of right completions, mean over prompts.
      pass_at_k: share of prompts with a right completion among `k`.
      pass_at: the same for 1, 2, 4 … up to k, without bias.
      greedy_pass_at_1: share of prompts whose greedy completion is right, where
        there is a greedy sampler.
      mean_reward: over completions, task units.
      kl: Σ log π - log π_ref of a completion, nats, both tempered, and
      ref_perplexity: exp of the reference's mean nats a token, where there is
        a reference.
      diluted_perplexity: of `eval_measures.add_perplexity`, of the greedy
        completions where there are any, with a plain reference.
      [greedy_]win_rate, gold_reward and gold_margin, no_verdict (by cause):
        what a comparer says; docs/preferences.md.
      …_stderr, …_interval: of these but `pass_at` and `ref_perplexity`, the
        standard error over prompts, and the bootstrap interval.
      k: completions of each prompt.
      confidence: of the intervals.
      distinct_correct: distinct right solutions among the k completions of a
        prompt, mean over prompts.
      distinct_correct_per_solved: the same over prompts with at least one; 0
        where there is none.
      distinct_share: distinct texts among the k completions, over k.
      mean_length: tokens of a completion, stop token included.
      stop_rate: share of completions that ended with the stop token.
      num_prompts, version: as given.
      split: evaluated on.
      cosine_distance and the like, where the judge has `set_metrics`.
      reward_failures: completions without a reward of the task's, by cause.
      samples: completions of the first prompts, as `samples.jsonl` holds them.

    Raises:
      ValueError: `num_prompts` is out of range.
      Interrupted: `should_stop` was true.
    """
    size = self._task.num_prompts(self._split)
    if not 1 <= num_prompts <= size:
      raise ValueError(
          f"num_prompts={num_prompts} to evaluate: allowed 1 to the {size} of"
          f" the split {self._split!r}"
      )
    prompts = []
    for start in range(0, num_prompts, self._batch_prompts):
      if should_stop is not None and should_stop():
        raise Interrupted(f"stopped after {start} of {num_prompts} prompts")
      end = min(start + self._batch_prompts, num_prompts)
      prompts += self._evaluate_batch(params, range(start, end), version)
      if on_progress is not None:
        on_progress(end, num_prompts)
    summary = summarize(
        prompts,
        self._num_completions,
        resamples=self._resamples,
        confidence=self._confidence,
    )
    shown = [prompt["samples"][:_NUM_COMPLETIONS_SHOWN] for prompt in prompts]
    samples = sum(shown[:_NUM_PROMPTS_SHOWN], [])
    self._add_reasons(samples)
    return {
        **summary,
        **self.judge.set_metrics(prompts),
        "version": version,
        "split": self._split,
        "samples": samples,
    }

  def _evaluate_batch(
      self, params: types.PyTree, indices: range, version: int
  ) -> list[dict[str, Any]]:
    """Returns one record per prompt, as `eval_summary` reads them."""
    texts = [self._task.prompt(self._split, index) for index in indices]
    requests = [
        requests_lib.Request(
            prompt_tokens=np.asarray(
                self._tokenizer.encode_prompt(text), np.int32
            ),
            prompt_id=index,
            visit=self._visit,
            num_completions=self._num_completions,
        )
        for index, text in zip(indices, texts)
    ]
    sampled = self._sampler.sample(params, requests, version=version)
    asked_BxS = self._ask(indices, sampled)
    # All at once, so that the workers of a pool share them.
    judged = iter(self.judge.judge([one for some in asked_BxS for one in some]))
    records = [
        self._record(index, text, found, [r.completion for r in some], judged)
        for index, text, found, some in zip(indices, texts, sampled, asked_BxS)
    ]
    compare = functools.partial(add_verdicts, self._comparer, self._task, texts)
    compare(asked_BxS, records, name="verdicts")
    plain = sampled
    if self._greedy_sampler is not None:
      plain = self._add_greedy(params, requests, records, version, compare)
    prompts = [request.prompt_tokens for request in requests]
    if self._reference is not None:
      add_reference(self._reference, prompts, sampled, records)
    if self._plain_reference is not None:
      add_perplexity(self._plain_reference, prompts, plain, records)
    return records

  def _add_reasons(self, samples: list[dict[str, Any]]) -> None:
    """Adds why each sample is wrong, where it was judged at all."""
    judged = [sample for sample in samples if not sample["reason"]]
    reasons = self.judge.explain(
        [
            judges.Request(
                self._split, sample["prompt_id"], sample["completion"]
            )
            for sample in judged
        ]
    )
    for sample, reason in zip(judged, reasons):
      sample["reason"] = reason

  def _ask(
      self, indices: Iterable[int], sampled: list[types.Completions]
  ) -> list[list[judges.Request]]:
    """Returns what judges are asked of each prompt's completions."""
    return [
        [
            judges.Request(self._split, index, text, bool(stopped))
            for text, stopped in zip(self._texts(found), found.stopped)
        ]
        for index, found in zip(indices, sampled)
    ]

  def _add_greedy(
      self,
      params: types.PyTree,
      requests: list[requests_lib.Request],
      records: list[dict[str, Any]],
      version: int,
      compare: Callable[..., None],
  ) -> list[types.Completions]:
    """Adds what the greedy completion of each prompt is worth; returns them."""
    single = [dataclasses.replace(r, num_completions=1) for r in requests]
    sampled = self._greedy_sampler.sample(params, single, version=version)
    asked_Bx1 = self._ask([r.prompt_id for r in single], sampled)
    judged = self.judge.judge([one for (one,) in asked_Bx1])
    for record, judgement in zip(records, judged):
      record["greedy_correct"] = judgement.key is not None
    compare(asked_Bx1, records, name="greedy_verdicts")
    return sampled

  def _texts(self, found: types.Completions) -> list[str]:
    return [
        self._tokenizer.decode_completion(tokens, int(length), bool(stopped))
        for tokens, length, stopped in zip(
            found.tokens, found.lengths, found.stopped
        )
    ]

  def _record(
      self,
      index: int,
      text: str,
      found: types.Completions,
      completions: list[str],
      judged: Iterator[base.Judgement],
  ) -> dict[str, Any]:
    """Returns the record of one prompt; takes its judgements."""
    samples, keys = [], []
    failures = collections.Counter()
    for sample, completion in enumerate(completions):
      length = int(found.lengths[sample])
      tokens = found.tokens[sample, :length].tolist()
      judgement = next(judged)
      keys.append(judgement.key)
      if judgement.failure:
        failures[judgement.failure] += 1
      samples.append(
          {
              "prompt": text,
              "prompt_id": index,
              "completion": completion,
              "reward": judgement.reward,
              "reason": judgement.failure
              and f"could not be judged: {judgement.failure}",
              "version": int(found.versions[sample]),
              "tokens": self._tokenizer.tokens(tokens),
              "logprobs": found.logprobs[sample, :length].tolist(),
          }
      )
    right = [key for key in keys if key is not None]
    return {
        "right": [key is not None for key in keys],
        "num_correct": len(right),
        "num_distinct": len(set(right)),
        "num_texts": len(set(completions)),
        "failures": failures,
        "rewards": [sample["reward"] for sample in samples],
        "lengths": found.lengths,
        "stopped": found.stopped,
        "samples": samples,
    }

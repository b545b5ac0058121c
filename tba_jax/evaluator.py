# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""pass@k, distinct solutions and mean reward of params on a split of a task.

The same prompts get the same random numbers in every call, so a difference
between two versions of the params is not one between two draws of prompts.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import copy
import dataclasses
import functools
from typing import Any, TYPE_CHECKING
import zlib

import numpy as np

from tba_jax import eval_measures
from tba_jax import eval_summary
from tba_jax import reference as reference_lib
from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.sampling import requests as requests_lib
from tba_jax.tasks import base

if TYPE_CHECKING:
  from tba_jax.sampling import decode

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
    summary = eval_summary.summarize(
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
    compare = functools.partial(
        eval_measures.add_verdicts, self._comparer, self._task, texts
    )
    compare(asked_BxS, records, name="verdicts")
    plain = sampled
    if self._greedy_sampler is not None:
      plain = self._add_greedy(params, requests, records, version, compare)
    prompts = [request.prompt_tokens for request in requests]
    if self._reference is not None:
      eval_measures.add_reference(self._reference, prompts, sampled, records)
    if self._plain_reference is not None:
      eval_measures.add_perplexity(
          self._plain_reference, prompts, plain, records
      )
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
            judges.Request(self._split, index, text, reason != "length")
            for text, reason in zip(self._texts(found), found.finish_reasons)
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
        "stopped": found.finish_reasons != "length",
        "samples": samples,
    }

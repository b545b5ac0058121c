# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""pass@k, distinct solutions and mean reward of params on a split of a task.

The same prompts get the same random numbers in every call, so a difference
between two versions of the params is not one between two draws of prompts.
"""

import collections
from collections.abc import Callable, Iterator
import math
from typing import Any
import zlib

import numpy as np

from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tba_jax.tasks import base

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
      sampler: decode.Sampler,
      judge: judges.Judge,
      *,
      split: str,
      num_completions: int,
      batch_prompts: int,
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

    Raises:
      ValueError: a number is below 1, or the task has no such split.
    """
    base.check_split(split)
    for name, value in (
        ("num_completions", num_completions),
        ("batch_prompts", batch_prompts),
    ):
      if value < 1:
        raise ValueError(f"evaluate.{name}={value}: allowed 1 or above")
    self._task = task
    self._tokenizer = tokenizer
    self._sampler = sampler
    self._judge = judge
    self._split = split
    self._num_completions = num_completions
    self._batch_prompts = batch_prompts
    self._visit = _FIRST_VISIT + zlib.crc32(split.encode()) % _FIRST_VISIT

  @property
  def split(self) -> str:
    return self._split

  def while_training(self) -> "Evaluator":
    """Returns an evaluator with the same parts, of the split for training."""
    split = base.split_while_training(self._task)
    return Evaluator(
        self._task,
        self._tokenizer,
        self._sampler,
        self._judge,
        split=split,
        num_completions=self._num_completions,
        batch_prompts=self._batch_prompts,
    )

  def close(self) -> None:
    """Ends the judge's workers."""
    self._judge.close()

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
      pass_at_1_stderr, pass_at_k_stderr: standard errors over prompts.
      k: completions of each prompt.
      distinct_correct: distinct right solutions among the k completions of a
        prompt, mean over prompts.
      distinct_correct_per_solved: the same over prompts with at least one; 0
        where there is none.
      mean_reward: over completions, task units.
      mean_length: tokens of a completion, stop token included.
      stop_rate: share of completions that ended with the stop token.
      num_prompts, version: as given.
      split: evaluated on.
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
    return {
        **summarize(prompts, self._num_completions),
        "version": version,
        "split": self._split,
        "samples": [
            sample
            for prompt in prompts[:_NUM_PROMPTS_SHOWN]
            for sample in prompt["samples"][:_NUM_COMPLETIONS_SHOWN]
        ],
    }

  def _evaluate_batch(
      self, params: types.PyTree, indices: range, version: int
  ) -> list[dict[str, Any]]:
    """Returns one record per prompt, as `summarize` reads them."""
    texts = [self._task.prompt(self._split, index) for index in indices]
    requests = [
        decode.Request(
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
    texts_BxS = [
        [
            self._tokenizer.decode_completion(
                tokens, int(length), bool(stopped)
            )
            for tokens, length, stopped in zip(
                found.tokens, found.lengths, found.stopped
            )
        ]
        for found in sampled
    ]
    # All at once, so that the workers of a pool share them.
    judged = iter(
        self._judge.judge(
            [
                judges.Request(self._split, index, completion)
                for index, completions in zip(indices, texts_BxS)
                for completion in completions
            ]
        )
    )
    return [
        self._record(index, text, found, completions, judged)
        for index, text, found, completions in zip(
            indices, texts, sampled, texts_BxS
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
              "version": int(found.versions[sample]),
              "tokens": self._tokenizer.tokens(tokens),
              "logprobs": found.logprobs[sample, :length].tolist(),
          }
      )
    right = [key for key in keys if key is not None]
    return {
        "num_correct": len(right),
        "num_distinct": len(set(right)),
        "failures": failures,
        "rewards": [sample["reward"] for sample in samples],
        "lengths": found.lengths,
        "stopped": found.finish_reasons != "length",
        "samples": samples,
    }


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
    prompts: list[dict[str, Any]], num_completions: int
) -> dict[str, Any]:
  """Returns the means over prompts and their standard errors.

  Args:
    prompts: at least one record with `num_correct`, `num_distinct`, and, of
      each completion, `rewards`, `lengths` and `stopped`; `failures` by cause.
    num_completions: k, of each prompt.
  """
  n = num_completions
  correct_B = [prompt["num_correct"] for prompt in prompts]
  distinct_B = np.array([prompt["num_distinct"] for prompt in prompts])
  solved_B = np.array(correct_B) > 0
  pass_at_1_B = np.array([pass_at_k(n, c, 1) for c in correct_B])
  pass_at_k_B = np.array([pass_at_k(n, c, n) for c in correct_B])
  mean = lambda name: float(np.mean([prompt[name] for prompt in prompts]))
  return {
      "pass_at_1": float(pass_at_1_B.mean()),
      "pass_at_1_stderr": _stderr(pass_at_1_B),
      "pass_at_k": float(pass_at_k_B.mean()),
      "pass_at_k_stderr": _stderr(pass_at_k_B),
      "k": n,
      "distinct_correct": float(distinct_B.mean()),
      "distinct_correct_per_solved": (
          float(distinct_B[solved_B].mean()) if solved_B.any() else 0.0
      ),
      "mean_reward": mean("rewards"),
      "mean_length": mean("lengths"),
      "stop_rate": mean("stopped"),
      "num_prompts": len(prompts),
      "reward_failures": dict(
          sum((p["failures"] for p in prompts), collections.Counter())
      ),
  }


def _stderr(values_B: np.ndarray) -> float:
  """Returns the standard error of the mean; 0 where there is one value."""
  if len(values_B) < 2:
    return 0.0
  return float(values_B.std(ddof=1) / math.sqrt(len(values_B)))

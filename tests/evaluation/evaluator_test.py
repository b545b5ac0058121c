# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of evaluations against counts by hand; control flow."""

import collections
import functools
import itertools
import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from tba_jax import collect
from tba_jax import types
from tba_jax.evaluation import certificate
from tba_jax.evaluation import evaluator as evaluator_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import policy_samplers
from tba_jax.policy import reference_policy as reference_lib
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.tasks import base
from tests.support import base_config
from tests.support import fakes
from tests.support import sampler_case
from tests.support import tiny_model


class _ScriptedSampler:
  """Gives each prompt the completions written down for it.

  Negative tokens are those of an environment.
  """

  def __init__(self, script: dict[int, list[list[int]]], length: int):
    self._script = script
    self._length = length
    self.requests = []

  def put(self, params):
    return params

  def sample(self, params, prompts, *, version, newer=None, turns=None):
    self.requests.append(list(prompts))
    return [self._completions(prompt, version) for prompt in prompts]

  def _completions(self, prompt, version):
    rows = self._script[prompt.prompt_id]
    S, T = len(rows), self._length
    tokens_SxT = np.zeros((S, T), np.int32)
    for sample, row in enumerate(rows):
      tokens_SxT[sample, : len(row)] = row
    lengths_S = np.array([len(row) for row in rows], np.int32)
    sampled_SxT = (np.arange(T) < lengths_S[:, None]) & (tokens_SxT >= 0)
    stopped_S = np.array([row[-1] == 1 for row in rows])
    return types.Completions(
        tokens=np.abs(tokens_SxT),
        lengths=lengths_S,
        sampled_mask=sampled_SxT,
        logprobs=np.where(sampled_SxT, -0.5, 0.0),
        plain_logprobs=np.where(sampled_SxT, -0.5, 0.0),
        stopped=stopped_S,
        versions=np.full(S, version, np.int32),
        token_versions=np.where(sampled_SxT, version, -1),
    )


# Prompt 0: 3 of 4 right, 2 solutions. Prompt 1: none. Prompt 2: 1 right.
_RIGHT = {0: {"23", "32", "5"}, 2: {"7"}}
_SCRIPT = {
    0: [[2, 3, 1], [3, 2, 1], [5, 1], [6, 1]],
    1: [[2, 3, 1], [4, 1], [4, 4, 4, 4], [1]],
    2: [[7, 1], [8, 8, 8, 8], [8, 1], [7, 7, 1]],
}


def _make(sampler, task=None, greedy=None, **changes):
  """Returns an evaluator; `changes` of the constructor, or of `evaluate`."""
  task = task or fakes.FakeTask(_RIGHT)
  names = ("split", "comparer", "reference", "plain_reference")
  arguments = {name: changes.pop(name) for name in names if name in changes}
  settings = {"num_completions": 4, "batch_prompts": 2}
  config = base_config.make(evaluate__greedy=greedy is not None)
  config.evaluate.update({**settings, **changes})
  policy = policy_lib.Policy(task, fakes.FakeTokenizer(), None, None, None)
  with mock.patch.multiple(
      policy_samplers,
      make_evaluation_sampler=lambda *unused: sampler,
      make_greedy_sampler=lambda *unused: greedy,
  ):
    return evaluator_lib.Evaluator(
        config, policy, judges.InProcess(task), **arguments
    )


class _FakeReference:
  """Gives every token a quarter of a nat, and keeps what it was asked."""

  def logprobs(self, prompts, prompt_mask, completions, mask):
    self.asked = prompts, prompt_mask, completions, mask
    return np.where(mask, -0.25, 0.0)


class _FixedReference(_FakeReference):
  model = params = "reference"


class _TalkingTask(fakes.FakeTask):

  def judge(self, split, index, completion):
    if (index, completion) == (1, "23"):
      raise base.RewardError("refused", "")
    return super().judge(split, index, completion)

  def explain(self, split, index, completion):
    right = self.solution_key(split, index, completion) is not None
    return "" if right else f"{split} {index}: {completion}"


class _SplitTask(fakes.FakeTask):
  """A task with two parts of a reward, one of prompt 0 alone, and a split."""

  more_splits = ("other",)

  def num_prompts(self, split):
    return 2 if split == "other" else 20

  def judge(self, split, index, completion):
    if completion == "4":
      raise base.RewardError("refused", "")
    parts = {"short": float(len(completion) < 2)}
    if index == 0:
      parts["five"] = float(split == "held_out" and completion == "5")
    return base.Judgement(float(split == "other"), None, parts)


class EvaluatorTest(parameterized.TestCase):

  def test_reward_parts_average_over_completions_with_part(self):
    evaluator = _make(_ScriptedSampler(_SCRIPT, 4), _SplitTask(_RIGHT))
    result = evaluator.run({}, 3, version=9)
    self.assertAlmostEqual(result["reward/five"], 1 / 4)
    self.assertEqual(result["reward/five_stderr"], 0.0)  # of one prompt
    # One completion of prompt 1 could not be judged.
    self.assertAlmostEqual(result["reward/short"], (2 + 1 + 2) / 11)
    errors = np.array([2, 1, 2]) - 5 / 11 * np.array([4, 3, 4])
    self.assertAlmostEqual(
        result["reward/short_stderr"], np.sqrt(3 / 2 * (errors**2).sum()) / 11
    )
    self.assertNotIn("other/mean_reward", result)

  def test_further_splits_have_separate_metrics(self):
    sampler = _ScriptedSampler(_SCRIPT, 4)
    evaluator = _make(sampler, _SplitTask(_RIGHT))
    result = evaluator.run_all({}, 3, version=9)
    self.assertEqual((result["mean_reward"], result["num_prompts"]), (0.0, 3))
    self.assertEqual(result["other/num_prompts"], 2)
    # One of its eight completions could not be judged.
    self.assertEqual(result["other/mean_reward"], 1.0)
    self.assertEqual(result["other/failure_share"], 1 / 8)
    self.assertEqual(result["other/reward/five"], 0.0)
    self.assertLen(result["other/mean_reward_interval"], 2)
    self.assertEqual(evaluator.split, "held_out")
    # Their prompts have random numbers of their own.
    visits = [{r.visit for r in asked} for asked in sampler.requests]
    self.assertLen(set.union(*visits), 2)

  def test_greedy_completions_are_judged_separately(self):
    greedy = _ScriptedSampler({0: [[5, 1]], 1: [[2, 1]], 2: [[7, 1]]}, 4)
    evaluator = _make(_ScriptedSampler(_SCRIPT, 4), greedy=greedy)
    result = evaluator.run({}, 3, version=9)
    self.assertAlmostEqual(result["greedy_pass_at_1"], 2 / 3)
    self.assertAlmostEqual(result["pass_at_1"], (3 / 4 + 0 + 1 / 4) / 3)
    self.assertEqual(
        [r.num_completions for batch in greedy.requests for r in batch],
        [1, 1, 1],
    )

  @parameterized.parameters((None, None, 0.5), (-1.0, -1.0, 1 / 3))
  def test_fallback_counts_as_wrong(self, fallback, reward, greedy):
    class Failing(fakes.FakeTask):

      def judge(self, split, index, completion):
        if index == 2 and completion == "7":
          raise base.RewardError("refused", "")
        return super().judge(split, index, completion)

    sampler = _ScriptedSampler({0: [[5, 1]], 1: [[2, 1]], 2: [[7, 1]]}, 4)
    with mock.patch.object(base_config, "make", functools.partial(
        base_config.make, reward__fallback=fallback)):  # fmt: skip
      evaluator = _make(
          _ScriptedSampler({**_SCRIPT, 0: [[5, 1]] * 4}, 4),
          Failing({0: {"5"}, 2: {"8"}}),
          greedy=sampler,
      )
    result = evaluator.run({}, 3, version=9)
    self.assertAlmostEqual(result["greedy_pass_at_1"], greedy)
    # Prompt 0: all of 4; prompt 1: none; prompt 2: one of 3, or of 4.
    self.assertAlmostEqual(
        result["pass_at_1"],
        (1 + 0 + (1 / 3 if fallback is None else 1 / 4)) / 3,
    )
    (sample,) = [s for s in result["samples"] if "judged" in s["reason"]]
    self.assertEqual(sample["reward"], reward)

  def test_measures_kl_and_perplexity_against_reference(self):
    reference = _FakeReference()
    evaluator = _make(_ScriptedSampler(_SCRIPT, 4), reference=reference)
    result = evaluator.run({}, 3, version=9)
    lengths = [len(row) for rows in _SCRIPT.values() for row in rows]
    # Per token, -0.5 by the policy and -0.25 by the reference.
    self.assertAlmostEqual(result["kl"], -0.25 * np.mean(lengths))
    self.assertAlmostEqual(result["ref_perplexity"], np.exp(0.25))
    prompts, prompt_mask, _, mask = reference.asked
    # Prompt 2 is "444" and stands alone in the last batch.
    np.testing.assert_array_equal(prompts, [[4, 4, 4]])
    self.assertEqual(prompt_mask.sum(), 3)
    self.assertEqual(mask.sum(), sum(len(row) for row in _SCRIPT[2]))

  def test_certificate_is_of_draws_from_policy_and_reference(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    evaluator = _make(
        sampler, reference=_FixedReference(), certificate=True, max_reward=2.0
    )
    with mock.patch.object(
        certificate, "certify", wraps=certificate.certify
    ) as certify:
      result = evaluator.run({}, 3, version=0)
      again = evaluator.run({}, 3, version=9)
    (draws, beta, max_reward), _ = certify.call_args
    self.assertEqual((beta, max_reward), (0.05, 2.0))
    first = draws[0]
    np.testing.assert_array_equal(first.rewards_S, [2, 2, 1, 0])
    # A token has -1/2 nat under the policy and -1/4 under the reference.
    np.testing.assert_allclose(first.log_ratios_S, [-0.75, -0.75, -0.5, -0.5])
    np.testing.assert_allclose(first.ref_logprobs_S, [-0.75, -0.75, -0.5, -0.5])
    np.testing.assert_array_equal(first.ref_rewards_R, first.rewards_S)
    self.assertEqual(first.texts_S, first.ref_texts_R)
    self.assertLen({*first.texts_S}, 4)
    # "23" and "32" are one solution.
    self.assertLen({*first.modes_S}, 3)
    self.assertEqual(result["certificate/confidence"], 0.98)
    self.assertBetween(result["certificate/tv_upper"], 0.5, 1.0)
    self.assertEqual(
        again["certificate/tv_upper"], result["certificate/tv_upper"]
    )
    # Per run two batches of the policy; of the reference only once.
    self.assertLen(sampler.requests, 6)

  def test_tokens_of_environment_have_no_kl_and_no_logprob(self):
    script = {0: [[2, -3, 1]] * 4, 1: [[2, -3, -3, 1]] * 4, 2: [[2, 3]] * 4}
    reference = _FakeReference()
    evaluator = _make(_ScriptedSampler(script, 4), reference=reference)
    result = evaluator.run({}, 3, version=9)
    self.assertAlmostEqual(result["kl"], -0.25 * 2)
    self.assertAlmostEqual(result["ref_perplexity"], np.exp(0.25))
    self.assertAlmostEqual(result["mean_length"], 3.0)
    sample = result["samples"][0]
    self.assertEqual(sample["tokens"], ["2", "3", "1"])
    self.assertEqual(sample["logprobs"], [-0.5, None, -0.5])

  def test_failed_prompts_have_no_tokens(self):
    class Silent(_ScriptedSampler):

      def _completions(self, prompt, version):
        return collect.no_completions(4, 4, version)

    class Empty(fakes.FakeTask):

      def prompt(self, split, index):
        return ""

    model = tiny_model.make_model()
    reference = reference_lib.Reference(
        model, model.init(jax.random.key(0)), temperature=1.0
    )
    evaluator = _make(
        Silent({}, 4),
        Empty(_RIGHT),
        reference=reference,
        plain_reference=reference,
    )
    result = evaluator.run({}, 3, version=9)
    for name in ("kl", "ref_perplexity", "diluted_perplexity", "mean_length",
                 "stop_rate", "distinct_share"):  # fmt: skip
      self.assertIsNone(result[name])

  def test_papers_perplexity_counts_prompt(self):
    evaluator = _make(
        _ScriptedSampler(_SCRIPT, 4), plain_reference=_FakeReference()
    )
    result = evaluator.run({}, 3, version=9)
    # A quarter of a nat per completion token, over all tokens but one; prompt
    # `index` has index + 1 tokens.
    actual = [
        np.exp(0.25 * len(row) / (prompt + 1 + len(row) - 1))
        for prompt, rows in _SCRIPT.items()
        for row in rows
    ]
    self.assertAlmostEqual(result["diluted_perplexity"], np.mean(actual))
    self.assertNotIn("kl", result)

  def test_win_rates_of_samples_and_greedy_completions(self):
    task = fakes.FakeTask(_RIGHT)
    # Prompt 1 has no right completion, and any reward would beat "0".
    task.reference_completion = lambda split, index, rng: ["5", "0", "7"][index]
    comparer = comparers.OfTask(judges.InProcess(task))
    greedy = _ScriptedSampler({0: [[3, 2, 1]], 1: [[2, 1]], 2: [[7, 1]]}, 4)
    evaluator = _make(
        _ScriptedSampler(_SCRIPT, 4),
        task,
        greedy=greedy,
        comparer=comparer,
    )
    self.addCleanup(evaluator.close)
    result = evaluator.run({}, 3, version=9)
    # Rewards are lengths of right texts: of prompt 0 "23" and "32" beat "5".
    self.assertAlmostEqual(result["win_rate"], (2 / 4 + 0 + 0) / 3)
    self.assertAlmostEqual(result["greedy_win_rate"], 1 / 3)
    self.assertAlmostEqual(
        result["gold_margin"], ((5 / 4 - 1) + 0 + (1 / 4 - 1)) / 3
    )
    self.assertEqual(result["no_verdict"], {})
    other = evaluator.while_training()
    self.assertEqual(other.run({}, 3, version=9)["win_rate"],
                     result["win_rate"])  # fmt: skip

  def test_matches_numbers_by_hand(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    result = _make(sampler).run({}, 3, version=9)
    self.assertAlmostEqual(result["pass_at_1"], (3 / 4 + 0 + 1 / 4) / 3)
    # Deviations from the mean 1/3: 5/12, -1/3, -1/12.
    variance = ((5 / 12) ** 2 + (1 / 3) ** 2 + (1 / 12) ** 2) / 2
    self.assertAlmostEqual(
        result["pass_at_1_stderr"], np.sqrt(variance / 3), places=6
    )
    self.assertAlmostEqual(result["pass_at_k"], 2 / 3)
    self.assertAlmostEqual(result["pass_at_k_stderr"], 1 / 3)
    self.assertEqual(result["k"], 4)
    self.assertAlmostEqual(result["distinct_correct"], (2 + 0 + 1) / 3)
    self.assertAlmostEqual(result["distinct_correct_per_solved"], 3 / 2)
    # Rewards are lengths of right texts: 2 + 2 + 1, 0 and 1.
    self.assertAlmostEqual(result["mean_reward"], 6 / 12)
    lengths = [len(row) for rows in _SCRIPT.values() for row in rows]
    self.assertAlmostEqual(result["mean_length"], sum(lengths) / 12)
    self.assertAlmostEqual(result["stop_rate"], 10 / 12)
    self.assertEqual(result["num_prompts"], 3)
    self.assertEqual(result["version"], 9)

  def test_samples(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    samples = _make(sampler).run({}, 3, version=9)["samples"]
    # All completions of each prompt are shown.
    self.assertEqual(
        [sample["prompt_id"] for sample in samples], 4 * [0] + 4 * [1] + 4 * [2]
    )
    self.assertEqual(
        samples[0],
        {
            "prompt": "2",
            "prompt_id": 0,
            "completion": "23",
            "reward": 2.0,
            "reason": "",
            "version": 9,
            "tokens": ["2", "3", "1"],
            "logprobs": [-0.5] * 3,
        },
    )

  def test_samples_have_reasons(self):
    task = _TalkingTask(_RIGHT)
    samples = _make(_ScriptedSampler(_SCRIPT, 4), task).run({}, 3, version=9)[
        "samples"
    ]
    self.assertEqual(
        [s["reason"] for s in samples[:5]],
        ["", "", "", "held_out 0: 6", "could not be judged: refused"],
    )

  def test_unsolved_prompts_give_no_nan(self):
    sampler = _ScriptedSampler({0: [[1]], 1: [[4, 1]]}, length=4)
    result = _make(sampler, num_completions=1).run({}, 2, version=0)
    self.assertEqual(result["distinct_correct_per_solved"], 0.0)
    self.assertEqual(result["pass_at_k"], 0.0)

  def test_one_prompt_has_no_spread(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    result = _make(sampler).run({}, 1, version=0)
    self.assertEqual(result["pass_at_1_stderr"], 0.0)

  def test_requests_have_distinct_visits(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    _make(sampler).run({}, 3, version=0)
    self.assertEqual([len(r) for r in sampler.requests], [2, 1])
    requests = [r for batch in sampler.requests for r in batch]
    self.assertEqual([r.prompt_id for r in requests], [0, 1, 2])
    np.testing.assert_array_equal(requests[2].prompt_tokens, [4, 4, 4])
    self.assertTrue(all(r.num_completions == 4 for r in requests))
    # Training's visits start at 0.
    self.assertTrue(all(2**31 <= r.visit < 2**32 for r in requests))
    _make(sampler, split="train").run({}, 1, version=0)
    self.assertNotEqual(sampler.requests[-1][0].visit, requests[0].visit)

  def test_reports_progress_and_may_be_interrupted(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    progress = []
    evaluator = _make(sampler, batch_prompts=1)
    evaluator.run(
        {}, 3, version=0, on_progress=lambda *done: progress.append(done)
    )
    self.assertEqual(progress, [(1, 3), (2, 3), (3, 3)])
    answers = iter([False, False, True])
    del sampler.requests[:]
    with self.assertRaisesRegex(evaluator_lib.Interrupted, "after 2 of 3"):
      evaluator.run({}, 3, version=0, should_stop=lambda: next(answers))
    self.assertLen(sampler.requests, 2)

  def test_works_with_real_sampler(self):
    model = fakes.FakeModel(10, 8)
    params = model.init(jax.random.key(0))
    sampler = sampler_case.make(model)
    anything = {
        index: {"".join(map(str, d)) for d in itertools.product(range(10))}
        for index in range(20)
    }
    results = [
        _make(sampler, fakes.FakeTask(anything), batch_prompts=batch).run(
            params, 7, version=2
        )
        for batch in (2, 7)
    ]
    # Samples depend neither on the batch nor on earlier calls.
    self.assertEqual(results[0], results[1])
    self.assertGreater(results[0]["stop_rate"], 0)
    # A correct text is one token, then the stop token.
    self.assertEqual(results[0]["mean_reward"], results[0]["pass_at_1"])


class PassAtKTest(absltest.TestCase):

  def test_is_mean_over_all_subsets(self):
    n, c = 6, 2
    right = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
      subsets = list(itertools.combinations(right, k))
      share = sum(any(subset) for subset in subsets) / len(subsets)
      self.assertAlmostEqual(evaluator_lib.pass_at_k(n, c, k), share)

  def test_is_0_if_none_and_1_if_all_correct(self):
    self.assertEqual(evaluator_lib.pass_at_k(8, 0, 8), 0.0)
    self.assertEqual(evaluator_lib.pass_at_k(8, 8, 1), 1.0)
    self.assertEqual(evaluator_lib.pass_at_k(8, 1, 8), 1.0)


def _prompt(right: int, texts: int = 4, **more):
  return {
      "num_correct": right,
      "num_distinct": min(right, 1),
      "num_texts": texts,
      "rewards": [1.0] * right + [0.0] * (4 - right),
      "lengths": np.array([2, 2, 3, 3]),
      "stopped": np.array([True, True, True, False]),
      "failures": collections.Counter(),
      **more,
  }


def _summarize(*prompts):
  return evaluator_lib.summarize(prompts, 4)


class EvalSummaryTest(absltest.TestCase):

  def test_pass_at_every_power_of_two(self):
    result = _summarize(_prompt(1), _prompt(3))
    # One right of four: a pair has it with chance 1/2; three of four: 1.
    self.assertEqual(result["pass_at"], {"1": 0.5, "2": 0.75, "4": 1.0})
    self.assertEqual(list(_summarize(_prompt(0))["pass_at"]), ["1", "2", "4"])

  def test_unjudged_completions_are_excluded_from_means(self):
    failed = lambda n: {"failures": collections.Counter({"error": n})}
    prompts = [
        _prompt(1),
        _prompt(1, rewards=[1.0, 0.0], **failed(2)),
        _prompt(0, rewards=[0.25], **failed(3)),
        _prompt(0, rewards=[], **failed(4)),
    ]
    result = _summarize(*prompts)
    # Three prompts are left, with 4, 2 and 1 completions.
    self.assertAlmostEqual(result["pass_at_1"], (1 / 4 + 1 / 2 + 0) / 3)
    self.assertAlmostEqual(result["pass_at_k"], (1 + 1 + 0) / 3)
    self.assertAlmostEqual(result["pass_at"]["2"], (1 / 2 + 1 + 0) / 3)
    self.assertAlmostEqual(result["mean_reward"], (1 + 1 + 0.25) / 7)
    self.assertAlmostEqual(result["distinct_correct"], 2 / 3)
    self.assertEqual(result["failure_share"], 9 / 16)
    self.assertEqual(result["reward_failures"], {"error": 9})
    errors = np.array([1, 1, 0.25]) - 2.25 / 7 * np.array([4, 2, 1])
    self.assertAlmostEqual(
        result["mean_reward_stderr"], np.sqrt(3 / 2 * (errors**2).sum()) / 7
    )
    low, high = result["mean_reward_interval"]
    self.assertBetween(result["mean_reward"], low, high)
    # The others' results do not depend on it.
    without = _summarize(*prompts[:3])
    for name in ("pass_at_1", "pass_at", "mean_reward", "distinct_correct"):
      self.assertEqual(result[name], without[name])

  def test_mean_without_values_is_none(self):
    failures = collections.Counter({"error": 4})
    result = _summarize(_prompt(0, rewards=[], failures=failures))
    for name in ("pass_at_1", "pass_at_k", "mean_reward", "distinct_correct"):
      self.assertIsNone(result[name])
      self.assertNotIn(f"{name}_stderr", result)
    self.assertEqual(result["failure_share"], 1.0)
    self.assertEqual(result["mean_length"], 2.5)
    json.dumps(result)

  def test_intervals_hold_their_means(self):
    result = _summarize(*(_prompt(i % 5) for i in range(30)))
    for name in ("pass_at_1", "pass_at_k", "mean_reward"):
      low, high = result[f"{name}_interval"]
      self.assertLess(low, result[name])
      self.assertGreater(high, result[name])
    self.assertEqual(result["confidence"], 0.95)

  def test_summarizes_optional_fields(self):
    self.assertNotIn("kl", _summarize(_prompt(1)))
    self.assertNotIn("greedy_pass_at_1", _summarize(_prompt(1)))
    more = {
        "kl": np.full(4, 0.5),
        "ref_nats": np.full(4, np.log(2.0) * 2.5),
        "ref_tokens": np.array([2, 2, 3, 3]),
    }
    result = _summarize(
        _prompt(1, greedy_correct=True, **more),
        _prompt(1, greedy_correct=False, **more),
    )
    self.assertEqual(result["greedy_pass_at_1"], 0.5)
    self.assertEqual(result["kl"], 0.5)
    # 10 ln 2 nats in ten tokens.
    self.assertAlmostEqual(result["ref_perplexity"], 2.0)

  def test_win_rates(self):
    verdict = lambda win, *scores: comparers.Verdict(win, *scores)
    none = comparers.Verdict(None, failure="deadline")
    result = _summarize(
        _prompt(1, verdicts=[verdict(1.0, 3.0, 1.0), verdict(0.0, 0.0, 1.0)]),
        _prompt(1, verdicts=[verdict(1.0, 2.0, 1.5), none]),
        _prompt(1, verdicts=[none, none]),
    )
    # The third prompt has no verdict.
    self.assertAlmostEqual(result["win_rate"], 2 / 3)
    self.assertAlmostEqual(result["gold_reward"], (3.0 + 0.0 + 2.0) / 3)
    self.assertAlmostEqual(result["gold_margin"], (2.0 - 1.0 + 0.5) / 3)
    self.assertEqual(result["no_verdict"], {"deadline": 3})
    self.assertIn("win_rate_interval", result)
    self.assertNotIn("greedy_win_rate", result)
    # A judge that does not score.
    result = _summarize(_prompt(1, greedy_verdicts=[verdict(0.5)]))
    self.assertEqual(result["greedy_win_rate"], 0.5)
    self.assertNotIn("greedy_gold_reward", result)

  def test_measures_distinct_texts_and_failures(self):
    failed = collections.Counter(nan=2)
    result = _summarize(_prompt(1, texts=2), _prompt(1, failures=failed))
    self.assertEqual(result["distinct_share"], 0.75)
    self.assertEqual(result["reward_failures"], {"nan": 2})


def _interval(values, **changes):
  settings = dict(num_resamples=2000, confidence=0.95)
  return evaluator_lib.mean_interval(
      np.array(values), **{**settings, **changes}
  )


class BootstrapTest(parameterized.TestCase):

  def test_one_value_or_equal_values_have_no_width(self):
    self.assertEqual(_interval([3.0]), (3.0, 3.0))
    self.assertEqual(_interval([0.5] * 7), (0.5, 0.5))

  def test_matches_two_values_by_hand(self):
    # Means 0, 1/2, 1 have the chances 1/4, 1/2, 1/4.
    self.assertEqual(_interval([0.0, 1.0]), (0.0, 1.0))
    self.assertEqual(_interval([0.0, 1.0], confidence=0.4), (0.5, 0.5))

  def test_agrees_with_normal_approximation(self):
    values = np.random.default_rng(1).normal(2.0, 3.0, size=900)
    low, high = _interval(values, num_resamples=20_000)
    half = 1.96 * values.std() / 30
    np.testing.assert_allclose(low, values.mean() - half, atol=0.02)
    np.testing.assert_allclose(high, values.mean() + half, atol=0.02)

  def test_interval_has_nominal_coverage(self):
    rng = np.random.default_rng(2)
    held = 0
    for i in range(300):
      low, high = _interval(
          rng.random(100) < 0.3, num_resamples=400, confidence=0.9, seed=i
      )
      held += low <= 0.3 <= high
    self.assertBetween(held / 300, 0.84, 0.95)

  def test_depends_on_seed_and_not_on_block_size(self):
    values = np.arange(50.0)
    one = _interval(values, seed=3)
    with mock.patch.object(evaluator_lib, "RESAMPLED_VALUES", 500):
      self.assertEqual(_interval(values, seed=3), one)
    self.assertNotEqual(_interval(values, seed=4), one)

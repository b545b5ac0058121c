# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The evaluator's numbers against counts by hand, and its control flow."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from tba_jax import types
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tba_jax.tasks import base
from tba_jax.training import evaluator as evaluator_lib
from tests.support import fakes


class _ScriptedSampler:
  """Gives each prompt the completions written down for it."""

  def __init__(self, script: dict[int, list[list[int]]], length: int):
    self._script = script
    self._length = length
    self.requests = []

  def sample(self, params, prompts, *, version):
    self.requests.append(list(prompts))
    return [self._completions(prompt, version) for prompt in prompts]

  def _completions(self, prompt, version):
    rows = self._script[prompt.prompt_id]
    S, T = len(rows), self._length
    tokens_SxT = np.zeros((S, T), np.int32)
    for sample, row in enumerate(rows):
      tokens_SxT[sample, : len(row)] = row
    lengths_S = np.array([len(row) for row in rows], np.int32)
    sampled_SxT = np.arange(T) < lengths_S[:, None]
    stopped_S = np.array([row[-1] == 1 for row in rows])
    return types.Completions(
        tokens=tokens_SxT,
        lengths=lengths_S,
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


def _make(sampler, task=None, **changes) -> evaluator_lib.Evaluator:
  settings = dict(
      split="held_out",
      num_completions=4,
      batch_prompts=2,
      resamples=50,
      confidence=0.9,
  )
  task = task or fakes.FakeTask(_RIGHT)
  return evaluator_lib.Evaluator(
      task,
      fakes.FakeTokenizer(),
      sampler,
      judges.InProcess(task, fallback=0.0),
      **{**settings, **changes},
  )


class _FakeReference:
  """Gives every token a quarter of a nat, and keeps what it was asked."""

  def logprobs(self, prompts, prompt_mask, completions, mask):
    self.asked = prompts, prompt_mask, completions, mask
    return np.where(mask, -0.25, 0.0)


class _TalkingTask(fakes.FakeTask):

  def judge(self, split, index, completion):
    if (index, completion) == (1, "23"):
      raise base.RewardError("refused", "")
    return super().judge(split, index, completion)

  def explain(self, split, index, completion):
    right = self.solution_key(split, index, completion) is not None
    return "" if right else f"{split} {index}: {completion}"


class EvaluatorTest(parameterized.TestCase):

  def test_greedy_completions_are_judged_apart(self):
    greedy = _ScriptedSampler({0: [[5, 1]], 1: [[2, 1]], 2: [[7, 1]]}, 4)
    evaluator = _make(_ScriptedSampler(_SCRIPT, 4), greedy_sampler=greedy)
    result = evaluator.run({}, 3, version=9)
    self.assertAlmostEqual(result["greedy_pass_at_1"], 2 / 3)
    self.assertAlmostEqual(result["pass_at_1"], (3 / 4 + 0 + 1 / 4) / 3)
    self.assertEqual(
        [r.num_completions for batch in greedy.requests for r in batch],
        [1, 1, 1],
    )

  def test_kl_and_perplexity_against_the_reference(self):
    reference = _FakeReference()
    evaluator = _make(_ScriptedSampler(_SCRIPT, 4), reference=reference)
    result = evaluator.run({}, 3, version=9)
    lengths = [len(row) for rows in _SCRIPT.values() for row in rows]
    # -0.5 of the policy and -0.25 of the reference, each token.
    self.assertAlmostEqual(result["kl"], -0.25 * np.mean(lengths))
    self.assertAlmostEqual(result["ref_perplexity"], np.exp(0.25))
    prompts, prompt_mask, _, mask = reference.asked
    # Prompt 2 is "444" and stands alone in the last batch.
    np.testing.assert_array_equal(prompts, [[4, 4, 4]])
    self.assertEqual(prompt_mask.sum(), 3)
    self.assertEqual(mask.sum(), sum(len(row) for row in _SCRIPT[2]))

  def test_the_papers_perplexity_counts_the_prompt(self):
    evaluator = _make(
        _ScriptedSampler(_SCRIPT, 4), plain_reference=_FakeReference()
    )
    result = evaluator.run({}, 3, version=9)
    # A quarter of a nat a token, over the tokens of prompt ("2", "44" -> index
    # + 1 of them) and completion but one.
    found = [
        np.exp(0.25 * len(row) / (prompt + 1 + len(row) - 1))
        for prompt, rows in _SCRIPT.items()
        for row in rows
    ]
    self.assertAlmostEqual(result["diluted_perplexity"], np.mean(found))
    self.assertNotIn("kl", result)

  def test_win_rates_of_samples_and_greedy_completions(self):
    task = fakes.FakeTask(_RIGHT)
    # Prompt 1 has no right completion, and any reward would beat "0".
    task.reference_completion = lambda split, index, rng: ["5", "0", "7"][index]
    comparer = comparers.OfTask(judges.InProcess(task, fallback=0.0))
    greedy = _ScriptedSampler({0: [[3, 2, 1]], 1: [[2, 1]], 2: [[7, 1]]}, 4)
    evaluator = _make(
        _ScriptedSampler(_SCRIPT, 4),
        task,
        greedy_sampler=greedy,
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

  def test_numbers_by_hand(self):
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
    # All of each prompt, so that what is distinct can be seen.
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

  def test_samples_say_what_is_wrong(self):
    task = _TalkingTask(_RIGHT)
    samples = _make(_ScriptedSampler(_SCRIPT, 4), task).run({}, 3, version=9)[
        "samples"
    ]
    self.assertEqual(
        [s["reason"] for s in samples[:5]],
        ["", "", "", "held_out 0: 6", "could not be judged: refused"],
    )

  def test_nothing_solved(self):
    sampler = _ScriptedSampler({0: [[1]], 1: [[4, 1]]}, length=4)
    result = _make(sampler, num_completions=1).run({}, 2, version=0)
    self.assertEqual(result["distinct_correct_per_solved"], 0.0)
    self.assertEqual(result["pass_at_k"], 0.0)

  def test_one_prompt_has_no_spread(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    result = _make(sampler).run({}, 1, version=0)
    self.assertEqual(result["pass_at_1_stderr"], 0.0)

  def test_requests(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    _make(sampler).run({}, 3, version=0)
    self.assertEqual([len(r) for r in sampler.requests], [2, 1])
    requests = [r for batch in sampler.requests for r in batch]
    self.assertEqual([r.prompt_id for r in requests], [0, 1, 2])
    np.testing.assert_array_equal(requests[2].prompt_tokens, [4, 4, 4])
    self.assertTrue(all(r.num_completions == 4 for r in requests))
    # Training's visits count from 0 and stay far below.
    self.assertTrue(all(2**31 <= r.visit < 2**32 for r in requests))
    _make(sampler, split="train").run({}, 1, version=0)
    self.assertNotEqual(sampler.requests[-1][0].visit, requests[0].visit)

  def test_progress_and_interruption(self):
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

  def test_wrong_arguments(self):
    sampler = _ScriptedSampler(_SCRIPT, length=4)
    with self.assertRaisesRegex(ValueError, r"split 'dev'"):
      _make(sampler, split="dev")
    with self.assertRaisesRegex(ValueError, r"evaluate\.num_completions=0"):
      _make(sampler, num_completions=0)
    with self.assertRaisesRegex(ValueError, r"evaluate\.batch_prompts=0"):
      _make(sampler, batch_prompts=0)
    for num_prompts in (0, 21):
      with self.assertRaisesRegex(ValueError, "allowed 1 to the 20"):
        _make(sampler).run({}, num_prompts, version=0)

  def test_with_the_real_sampler(self):
    model = fakes.FakeModel(10, 8)
    params = model.init(jax.random.key(0))
    sampler = decode.Sampler(
        model,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_prompt_tokens=3,
        max_completion_tokens=4,
        num_rows=8,
        chunk_steps=2,
        eos_id=1,
        pad_id=0,
        seed=0,
    )
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
    # Neither the batches nor an earlier call change what is drawn.
    self.assertEqual(results[0], results[1])
    self.assertGreater(results[0]["stop_rate"], 0)
    # A right text here is one token, then the stop token.
    self.assertEqual(results[0]["mean_reward"], results[0]["pass_at_1"])


class PassAtKTest(absltest.TestCase):

  def test_is_the_mean_over_all_subsets(self):
    n, c = 6, 2
    right = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
      subsets = list(itertools.combinations(right, k))
      share = sum(any(subset) for subset in subsets) / len(subsets)
      self.assertAlmostEqual(evaluator_lib.pass_at_k(n, c, k), share)

  def test_ends(self):
    self.assertEqual(evaluator_lib.pass_at_k(8, 0, 8), 0.0)
    self.assertEqual(evaluator_lib.pass_at_k(8, 8, 1), 1.0)
    self.assertEqual(evaluator_lib.pass_at_k(8, 1, 8), 1.0)

  def test_wrong_arguments(self):
    for arguments in ((4, 0, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)):
      with self.assertRaisesRegex(ValueError, r"pass@k"):
        evaluator_lib.pass_at_k(*arguments)


if __name__ == "__main__":
  absltest.main()

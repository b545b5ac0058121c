# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the collector, with mocked sampler and environments."""

import dataclasses
import time
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax import collect
from tba_jax.environments import turns as turns_lib
from tba_jax.learning import group_reference
from tba_jax.rewards import judges
from tba_jax.sampling import decode
from tests.support import base_config
from tests.support import fakes

S, T = 2, 4


class StreamTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    autospec = lambda cls: mock.create_autospec(cls, instance=True)
    self.environments = autospec(turns_lib.Environments)
    self.environments.prompts.side_effect = lambda split, indices: [
        turns_lib.FirstObservation(
            i, None, np.zeros(0, np.int32), ("error", "no")
        )
        for i in indices
    ]
    self.episodes = autospec(turns_lib.Episodes)
    self.episodes.outcomes.side_effect = lambda number: f"of {number}"
    self.environments.episodes.return_value = self.episodes
    self.sampler = autospec(decode.JaxSampler)
    self.sampler.settings = mock.Mock(max_completion_tokens=T)
    self.sampler.stream.side_effect = self.stream
    task = fakes.FakeTask({0: {"23"}})
    self.collector = collect.Collector(
        task,
        fakes.FakeTokenizer(),
        self.sampler,
        judges.InProcess(task),
        num_completions=S,
        environments=self.environments,
    )

  def stream(self, params, more, *, version, newer, turns):
    """Takes newer params before each batch, and ends the last request first."""
    self.assertIs(turns, self.episodes)
    begun = []
    for _ in range(3):
      if newer is not None:
        newer()
      time.sleep(0.05)  # Environments prepare the next prompts meanwhile.
      begun += more() or []
    for number, request in reversed([*enumerate(begun)]):
      yield [(number, request.prompt_id)]

  def fail(self, *failing):
    """Lets the environments of only these prompts fail."""
    said = self.environments.prompts.side_effect
    self.environments.prompts.side_effect = lambda split, indices: [
        prompt if i in failing else dataclasses.replace(prompt, failure=None)
        for i, prompt in zip(indices, said(split, indices))
    ]

  def test_prompts_without_completions_have_the_version_of_their_time(self):
    self.fail(7, 9)
    blocks = iter([[(0, 7, 0), (1, 6, 0)], [(2, 9, 0), (3, 8, 0)]])
    newer = iter([None, (50, "params")])
    first, second = self.collector.stream(
        lambda: next(blocks, None), "params", 5, lambda: next(newer, None)
    )
    self.assertEqual([one.prompt[1] for one in first], [7, 9, 8])
    self.assertEqual([one.prompt[1] for one in second], [6])
    versions = [one.completions.versions.tolist() for one in first[:2]]
    self.assertEqual(versions, [[5] * S, [50] * S])
    self.assertEqual(first[1].outcomes()[0].failure, "error")
    # Outcomes follow the numbers of the sampler's requests.
    self.assertEqual((first[2].completions, first[2].outcomes), (8, "of 1"))
    self.assertEqual((second[0].completions, second[0].outcomes), (6, "of 0"))

  def test_prompts_are_over_though_all_environments_fail(self):
    blocks = iter([[(0, 7, 0)]])
    (found,) = self.collector.stream(lambda: next(blocks, None), "params", 5)
    self.assertEqual([one.prompt for one in found], [(0, 7, 0)])

  def test_a_failed_environment_s_prompt_keeps_its_place(self):
    self.fail(8)
    self.sampler.sample.side_effect = lambda params, requests, **_: [
        request.prompt_id for request in requests
    ]
    prompts = [(0, 7, 0), (1, 8, 0), (2, 9, 0)]
    first, failed, last = self.collector.sample(prompts, "params", 5)
    self.assertEqual((first.completions, first.outcomes), (7, "of 0"))
    self.assertEqual((last.completions, last.outcomes), (9, "of 1"))
    self.assertEqual(failed.completions.versions.tolist(), [5] * S)
    self.assertEqual([o.failure for o in failed.outcomes()], ["error"] * S)

  def test_closed_stream_releases_environments(self):
    self.fail()
    blocks = iter([[(0, 7, 0), (1, 8, 0)]])
    stream = self.collector.stream(lambda: next(blocks, None), "params", 5)
    next(stream)
    self.episodes.close.assert_not_called()
    stream.close()
    self.episodes.close.assert_called_once()


class ReferenceTest(parameterized.TestCase):

  def start(self, rewards, **options):
    """Returns the prompts whose reference log-probs are computed."""
    reference = mock.create_autospec(
        group_reference.GroupReference, instance=True
    )
    reference.start.side_effect = lambda prompts, tokens, *_: lambda: [
        np.full((S, T), float(p[0]), np.float32) for p in prompts
    ]
    collector = collect.Collector(
        mock.Mock(),
        fakes.FakeTokenizer(),
        mock.Mock(),
        mock.Mock(),
        num_completions=S,
        reference=reference,
        **options,
    )
    count = len(rewards)
    sampled = [
        collect.Sampled(
            (i, i, 0),
            decode.Request(np.array([i]), i, 0, S),
            collect.no_completions(S, T, 0),
        )
        for i in range(count)
    ]
    rewards_P = [np.array(rewards_S, np.float32) for rewards_S in rewards]
    found = collector.start_reference(sampled, rewards_P)()
    for i, logprobs in enumerate(found):
      self.assertEqual(logprobs.shape, (S, T))
      self.assertTrue((logprobs == i).all() or np.isnan(logprobs).all())
    return [i for i, x in enumerate(found) if not np.isnan(x).any()]

  @parameterized.parameters(
      ([[1, 1], [0, 1], [0, 0], [1, 0]], [1, 3]),
      # An unjudged completion may get any reward.
      ([[1, 1], [0, 1], [1, np.nan], [np.nan, np.nan]], [1, 2, 3]),
      # If no group can be drawn, all are computed.
      ([[1, 1], [0, 0]], [0, 1]),
      ([[1, 1], [np.nan, np.nan]], [0, 1]),
  )
  def test_undrawable_groups_get_no_reference(self, rewards, computed):
    self.assertEqual(self.start(rewards, draws_equal=False), computed)
    self.assertEqual(self.start(rewards), list(range(len(rewards))))

  def test_task_sees_reference_log_probs_before_groups_are_stored(self):
    task = fakes.FakeTask({0: {"23"}})
    collector = collect.Collector(
        task, fakes.FakeTokenizer(), mock.Mock(), mock.Mock(), num_completions=S
    )
    one = collect.Sampled(
        (0, 0, 0),
        decode.Request(np.array([1]), 0, 0, S),
        collect.no_completions(S, T, 0),
    )
    groups = lambda ref: collector.groups([one], [np.ones(S)], [ref], 0)
    ref_logprobs = np.full((S, T), -2.0, np.float32)
    with mock.patch.object(
        task, "final_rewards", side_effect=lambda r, ref, mask: r + ref[:, 0]
    ) as final:
      (group,) = groups(ref_logprobs)
      np.testing.assert_array_equal(group.rewards, -np.ones(S))
      (group,) = groups(None)
      np.testing.assert_array_equal(group.rewards, np.ones(S))
      final.assert_called_once()

  @parameterized.parameters(
      ({}, False),
      ({"replay__skip_equal_rewards": False}, True),
      ({"replay__recent_fraction": 0.5}, True),
      ({"reference__role": "trainer"}, True),
      ({"search__lockstep": True}, True),
  )
  def test_draws_equal_groups(self, changes, expected):
    settings = {
        "replay__skip_equal_rewards": True,
        "reference__role": "searcher",
        **changes,
    }
    config = base_config.make(**settings)
    self.assertEqual(collect.draws_equal_groups(config), expected)


class _Thinking(fakes.FakeTokenizer):
  """Decodes 9 as the start of thoughts."""

  def decode(self, ids):
    return super().decode(ids).replace("9", "<think>\n")


class JudgeRequestsTest(absltest.TestCase):

  def test_judge_sees_thinking_opened_by_prompt(self):
    task = fakes.FakeTask({0: {"23"}})
    collector = collect.Collector(
        task,
        _Thinking(),
        mock.Mock(),
        judges.InProcess(task),
        num_completions=S,
    )
    completions = types.SimpleNamespace(
        tokens=np.array([[2, 3, 1, 0], [2, 4, 1, 0]]),
        lengths=np.array([3, 3]),
        stopped=np.array([True, True]),
        rewards=None,
    )
    texts = {}
    for prompt in ([5, 9], [9, 5]):
      sampled = collect.Sampled(
          (0, 0, 0), decode.Request(prompt, 0, 0, S), completions
      )
      (asked,) = collector.judge_requests([sampled])
      texts[prompt[0]] = [request.completion for request in asked]
      self.assertEqual([r.tokens for r in asked], [[2, 3, 1], [2, 4, 1]])
    self.assertEqual(texts, {5: ["<think>23", "<think>24"], 9: ["23", "24"]})

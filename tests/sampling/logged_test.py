# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of completions of a log in place of samples."""

import json
import types
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax.config import settings
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.sampling import logged

TOKENIZER = tokenizer_lib.word_level(list("abcdef"), r"\w")
A, B, C = (TOKENIZER.encode(x)[0] for x in "abc")
EOS = TOKENIZER.eos_id
TASK = types.SimpleNamespace(
    num_prompts=lambda split: 3, prompt=lambda split, i: "def"[i]
)


class LoggedSamplerTest(absltest.TestCase):

  def make(
      self,
      *records,
      share=1.0,
      needs_logprobs=False,
      reward_field="reward",
      tokenizer=TOKENIZER,
  ):
    config = settings.get_config()
    config.sampling.max_completion_tokens = 4
    config.logged.share = share
    config.logged.reward_field = reward_field
    config.logged.path = self.create_tempfile(
        content="\n".join(map(json.dumps, records))
    ).full_path
    return logged.LoggedSampler(
        config, TASK, tokenizer, needs_logprobs=needs_logprobs
    )

  def test_a_text_gets_its_stop_token(self):
    log = self.make({"prompt": "e", "completion": "ab", "reward": 2.0})
    self.assertEqual(log.prompt_ids, [1])
    got, rewards = log.draw(1, visit=0, num_completions=2, version=5)
    pad = TOKENIZER.pad_id
    np.testing.assert_array_equal(got.tokens, [[A, B, EOS, pad]] * 2)
    np.testing.assert_array_equal(got.lengths, [3, 3])
    np.testing.assert_array_equal(got.sampled_mask, [[1, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(got.logprobs, np.zeros((2, 4)))
    np.testing.assert_array_equal(got.stopped, [True, True])
    np.testing.assert_array_equal(got.versions, [-1, -1])
    np.testing.assert_array_equal(rewards, [2.0, 2.0])

  def test_a_chat_gets_what_ends_its_turns(self):
    tokenizer = mock.Mock(wraps=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
    tokenizer.pad_id = TOKENIZER.pad_id
    tokenizer.stop_id = lambda prompt: {"e": C}.get(prompt, EOS)
    log = self.make(
        *({"prompt": p, "completion": "ab", "reward": 2.0} for p in "de"),
        tokenizer=tokenizer,
    )
    for prompt_id, stop in ((0, EOS), (1, C)):
      got, _ = log.draw(prompt_id, visit=0, num_completions=1, version=5)
      np.testing.assert_array_equal(got.tokens[0, :3], [A, B, stop])

  def test_log_probs_and_versions_are_kept(self):
    one = {"prompt": "d", "reward": 0.0, "version": 3}
    log = self.make(
        one | {"completion": "ab", "logprobs": [-1.0, -2.0]},
        one | {"completion": "c", "logprobs": [-1.0, -0.5]},
        one | {"token_ids": [A, EOS], "logprobs": [-3.0, -4.0]},
        needs_logprobs=True,
    )
    got, _ = log.draw(0, visit=0, num_completions=3, version=2)
    # One log-prob more than tokens is the stop token's.
    np.testing.assert_array_equal(got.stopped, [False, True, True])
    np.testing.assert_array_equal(got.lengths, [2, 2, 2])
    np.testing.assert_array_equal(
        got.logprobs[:, :2], [[-1, -2], [-1, -0.5], [-3, -4]]
    )
    # Params that are yet to come did not sample them.
    np.testing.assert_array_equal(got.versions, [-1, -1, -1])
    got, _ = log.draw(0, visit=0, num_completions=3, version=9)
    np.testing.assert_array_equal(got.versions, [3, 3, 3])

  def test_log_probs_of_greedy_samples_are_known(self):
    one = {"prompt": "d", "reward": 0.0, "token_ids": [A, EOS]}
    log = self.make(one | {"logprobs": [0.0, 0.0]}, needs_logprobs=True)
    got, _ = log.draw(0, visit=0, num_completions=1, version=2)
    self.assertTrue((got.logprobs[0, :2] < 0).all())
    np.testing.assert_array_equal(np.exp(got.logprobs[0, :2]), [1.0, 1.0])

  def test_no_rewards_without_their_field(self):
    log = self.make({"prompt": "d", "completion": "a"}, reward_field="")
    got, rewards = log.draw(0, visit=0, num_completions=2, version=0)
    np.testing.assert_array_equal(got.lengths, [2, 2])
    self.assertIsNone(rewards)

  def test_visits_take_turns(self):
    log = self.make(
        {"prompt": "d", "completions": ["a", "b", "c"], "rewards": [0, 1, 2]}
    )
    drawn = [log.draw(0, visit, 2, 0)[1].tolist() for visit in range(3)]
    self.assertEqual(drawn, [[0, 1], [2, 0], [1, 2]])

  def test_leaves_out_what_cannot_be_used(self):
    one = {"prompt": "d", "reward": 0.0}
    log = self.make(
        one | {"completion": "abcd"},
        one | {"completion": "abc"},
        one | {"token_ids": [999]},
    )
    self.assertEqual(log.num_left_out, 2)
    log = self.make(
        one | {"completion": "ab", "logprobs": [-1.0]},
        one | {"completion": "ab", "logprobs": [-1.0, -1.0]},
        needs_logprobs=True,
    )
    self.assertEqual(log.num_left_out, 1)

  def test_the_share_is_that_of_positions(self):
    one = {"prompt": "d", "completion": "a", "reward": 0.0}
    log = self.make(one, share=0.25)
    hits = [log.has(position, 0) for position in range(400)]
    self.assertBetween(np.mean(hits), 0.19, 0.31)
    self.assertEqual(hits, [log.has(position, 0) for position in range(400)])
    self.assertFalse(any(log.has(position, 1) for position in range(400)))
    self.assertTrue(all(self.make(one).has(p, 0) for p in range(100)))

  def test_refuses_a_log_of_other_prompts(self):
    with self.assertRaisesRegex(ValueError, "config.logged.path.*'x'.*'d'"):
      self.make({"prompt": "x", "completion": "a", "reward": 0.0})
    with self.assertRaisesRegex(ValueError, "all 1 .* or come without log-pro"):
      self.make(
          {"prompt": "d", "completion": "ab", "logprobs": [-1.0], "reward": 0},
          needs_logprobs=True,
      )


if __name__ == "__main__":
  absltest.main()

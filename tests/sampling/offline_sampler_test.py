# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of completions of a log in place of samples."""

import copy
import json
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.config import settings
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.run import recorder
from tba_jax.sampling import decode
from tba_jax.sampling import offline_sampler
from tba_jax.sampling import requests
from tests.support import logged_episodes
from tests.support import sentencepiece_case

TOKENIZER = tokenizer_lib.word_level(list("abcdef"), r"\w")
A, B, C = (TOKENIZER.encode(x)[0] for x in "abc")
EOS = TOKENIZER.eos_id
TASK = types.SimpleNamespace(
    has_turns=False,
    num_prompts=lambda split: 3,
    prompt=lambda split, i: "def"[i],
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
    config.offline.fraction = share
    config.offline.reward_field = reward_field
    config.offline.path = self.create_tempfile(
        content="\n".join(map(json.dumps, records))
    ).full_path
    return offline_sampler.Log(
        config, TASK, tokenizer, needs_logprobs=needs_logprobs
    )

  def test_a_text_gets_its_stop_token(self):
    log = self.make({"prompt": "e", "completion": "ab", "reward": 2.0})
    self.assertEqual(log.prompt_ids, [1])
    got = log.draw(1, visit=0, num_completions=2, version=5)
    pad = TOKENIZER.pad_id
    np.testing.assert_array_equal(got.tokens, [[A, B, EOS, pad]] * 2)
    np.testing.assert_array_equal(got.lengths, [3, 3])
    np.testing.assert_array_equal(got.sampled_mask, [[1, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(got.logprobs, np.zeros((2, 4)))
    np.testing.assert_array_equal(got.stopped, [True, True])
    np.testing.assert_array_equal(got.versions, [-1, -1])
    np.testing.assert_array_equal(got.rewards, [2.0, 2.0])

  def test_a_chat_gets_what_ends_its_turns(self):
    tokenizer = mock.Mock(wraps=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
    tokenizer.pad_id = TOKENIZER.pad_id
    tokenizer.stop_id = lambda prompt: {"e": C}.get(prompt, EOS)
    log = self.make(
        *({"prompt": p, "completion": "ab", "reward": 2.0} for p in "de"),
        tokenizer=tokenizer,
    )
    for prompt_id, stop in ((0, EOS), (1, C)):
      got = log.draw(prompt_id, visit=0, num_completions=1, version=5)
      np.testing.assert_array_equal(got.tokens[0, :3], [A, B, stop])

  def test_text_is_tokenized_after_its_prompt(self):
    tokenizer = sentencepiece_case.make()
    log = self.make(
        {"prompt": "d", "completion": "42", "reward": 2.0}, tokenizer=tokenizer
    )
    got = log.draw(0, visit=0, num_completions=1, version=5)
    self.assertEqual(tokenizer.tokens(got.tokens[0, :2]), ["42", "</s>"])

  def test_log_probs_and_versions_are_kept(self):
    one = {"prompt": "d", "reward": 0.0, "version": 3}
    log = self.make(
        one | {"token_ids": [A, B], "logprobs": [-1.0, -2.0]},
        one | {"token_ids": [A, EOS], "logprobs": [-3.0, -4.0]},
        needs_logprobs=True,
    )
    got = log.draw(0, visit=0, num_completions=2, version=2)
    np.testing.assert_array_equal(got.stopped, [False, True])
    np.testing.assert_array_equal(got.lengths, [2, 2])
    np.testing.assert_array_equal(got.logprobs[:, :2], [[-1, -2], [-3, -4]])
    # Params that are yet to come did not sample them.
    np.testing.assert_array_equal(got.versions, [-1, -1])
    got = log.draw(0, visit=0, num_completions=2, version=9)
    np.testing.assert_array_equal(got.versions, [3, 3])

  def test_samples_of_a_run_are_read_as_they_were_sampled(self):
    words = ["d", "e", "f", "a", "b", "ab", "END"]
    tokenizer = tokenizer_lib.word_level(words, ".+?")
    d, e, f, a, b, ab, end = range(3, 10)
    tokenizer.add_stop_strings(["END"])
    eos = tokenizer.eos_id
    completions = [[a, b, eos], [ab, eos], [a, b, end], [a, b], [eos], [a, eos]]
    tokens = np.zeros((6, 4), np.int32)
    for k, ids in enumerate(completions):
      tokens[k, : len(ids)] = ids
    tokens = tokens.reshape(3, 2, 4)
    lengths = np.reshape([len(ids) for ids in completions], (3, 2))
    draw = types.SimpleNamespace(
        rewards=np.arange(6.0).reshape(3, 2),
        completion_tokens=tokens,
        completion_lengths=lengths,
        sampled_mask=np.arange(4) < lengths[..., None],
        behavior_logprobs=-1.0 - np.arange(24.0).reshape(3, 2, 4),
        # There was no room for what an environment would have said.
        stopped=np.array([[True, True], [True, False], [True, False]]),
        prompt_tokens=np.array([[d], [e], [f]]),
        prompt_mask=np.ones((3, 1)),
        prompt_ids=np.arange(3),
        versions=np.full((3, 2), 2),
    )
    records = recorder.samples_of(0, draw, 6, tokenizer)
    for has_reason in (True, False):  # Earlier versions wrote none.
      if not has_reason:
        for record in records:
          del record["finish_reason"]
      log = self.make(*records, needs_logprobs=True, tokenizer=tokenizer)
      self.assertEqual(
          log.summary(), "6 completions of 3 training prompts; left out: none"
      )
      stopped = draw.stopped if has_reason else [[1, 1], [1, 0], [1, 1]]
      for i in range(3):
        got = log.draw(i, visit=0, num_completions=2, version=2)
        np.testing.assert_array_equal(got.tokens, tokens[i])
        np.testing.assert_array_equal(got.lengths, lengths[i])
        expected = np.where(draw.sampled_mask, draw.behavior_logprobs, 0)[i]
        np.testing.assert_array_equal(got.logprobs, expected)
        np.testing.assert_array_equal(got.stopped, stopped[i])
        np.testing.assert_array_equal(got.rewards, draw.rewards[i])

  def test_log_probs_without_ids_are_kept_if_all_tokens_agree(self):
    tokenizer = tokenizer_lib.word_level(["d", "a", "b", "ab", "x"], ".+?")
    one = {"prompt": "d", "reward": 0.0, "completion": "ab"}
    for more, is_kept in (
        ({"tokens": ["ab", "<eos>"], "logprobs": [-1.0, -2.0]}, True),
        ({"tokens": ["a", "b", "<eos>"], "logprobs": [-1.0, -2.0, -3.0]}, True),
        ({"tokens": ["a", "c"], "logprobs": [-1.0, -2.0]}, False),
        ({"tokens": ["a", "x"], "logprobs": [-1.0, -2.0]}, False),
        ({"logprobs": [-1.0, -2.0]}, False),
        ({"logprobs": {"content": []}}, False),
        ({"logprobs": [-1.0, float("nan")], "tokens": ["a", "b"]}, False),
    ):
      log = self.make(one | more, tokenizer=tokenizer)
      got = log.draw(0, visit=0, num_completions=1, version=2)
      self.assertEqual(bool(got.logprobs.any()), is_kept, more)
      self.assertEqual(log.num_lost, not is_kept)
      self.assertEqual("without their log-probs" in log.summary(), not is_kept)
      self.assertEqual(
          tokenizer.decode_completion(got.tokens[0], got.lengths[0], True), "ab"
      )

  def test_tokens_of_another_text_or_an_environment_are_left_out(self):
    one = {"prompt": "d", "reward": 0.0}
    log = self.make(
        one | {"completion": " a b ", "token_ids": [A, B, EOS]},
        one | {"completion": "ba", "token_ids": [A, B, EOS]},
        one | {
            "completion": "ab", "tokens": ["a", "x"], "logprobs": [-1.0, None]
        },
        one | {"prompt": "x", "token_ids": [A]},
    )  # fmt: skip
    self.assertEqual(
        log.left_out,
        {
            "have token_ids that are not their text": 1,
            "have tokens of an environment but no token_ids": 1,
            "are of other prompts": 1,
        },
    )
    self.assertStartsWith(log.summary(), "1 completions of 1 training prompts;")

  def test_log_probs_of_greedy_samples_are_known(self):
    one = {"prompt": "d", "reward": 0.0, "token_ids": [A, EOS]}
    log = self.make(one | {"logprobs": [0.0, 0.0]}, needs_logprobs=True)
    got = log.draw(0, visit=0, num_completions=1, version=2)
    self.assertTrue((got.logprobs[0, :2] < 0).all())
    np.testing.assert_array_equal(np.exp(got.logprobs[0, :2]), [1.0, 1.0])

  def test_no_rewards_without_their_field(self):
    log = self.make({"prompt": "d", "completion": "a"}, reward_field="")
    got = log.draw(0, visit=0, num_completions=2, version=0)
    np.testing.assert_array_equal(got.lengths, [2, 2])
    self.assertIsNone(got.rewards)

  def test_visits_take_turns(self):
    log = self.make(
        {"prompt": "d", "completions": ["a", "b", "c"], "rewards": [0, 1, 2]}
    )
    drawn = [log.draw(0, visit, 2, 0).rewards.tolist() for visit in range(3)]
    self.assertEqual(drawn, [[0, 1], [2, 0], [1, 2]])

  def test_leaves_out_what_cannot_be_used(self):
    one = {"prompt": "d", "reward": 0.0}
    log = self.make(
        one | {"completion": "abcd"},
        one | {"completion": "abc"},
        one | {"token_ids": [999]},
    )
    self.assertEqual(
        log.left_out,
        {
            "have more than 4 tokens (sampling.max_completion_tokens)": 1,
            "have tokens outside the vocabulary": 1,
        },
    )
    log = self.make(
        one | {"completion": "ab", "tokens": ["b", "a"], "logprobs": [-1, -2]},
        one | {"completion": "ab", "tokens": ["a", "b"], "logprobs": [-1, -2]},
        needs_logprobs=True,
    )
    self.assertEqual(log.left_out, {"lack log-probs of their own tokens": 1})

  def test_share_applies_to_positions(self):
    one = {"prompt": "d", "completion": "a", "reward": 0.0}
    log = self.make(one, share=0.25)
    hits = [log.has(position, 0) for position in range(400)]
    self.assertBetween(np.mean(hits), 0.19, 0.31)
    self.assertEqual(hits, [log.has(position, 0) for position in range(400)])
    self.assertFalse(any(log.has(position, 1) for position in range(400)))
    self.assertTrue(all(self.make(one).has(p, 0) for p in range(100)))

  def test_the_other_prompts_are_sampled(self):
    log = self.make(
        {"prompt": "e", "completion": "ab", "reward": 2.0}, share=0.5
    )
    positions = [
        next(p for p in range(100) if log.has(p, 1) == has) for has in (0, 1)
    ]
    other = mock.create_autospec(decode.JaxSampler, instance=True)
    other.sample.side_effect = lambda params, prompts, **_: [
        (params, prompt.prompt_id, prompt.position) for prompt in prompts
    ]
    sampler = offline_sampler.OfflineSampler(log, other)
    ask = lambda i, position: requests.Request([1], i, 0, 2, position=position)
    hit = positions[1]
    prompts = [ask(1, positions[0]), ask(1, hit), ask(2, hit)]
    first, drawn, last = sampler.sample("θ", prompts, version=3)
    self.assertEqual(first, ("θ", 1, positions[0]))
    self.assertEqual(last, ("θ", 2, hit))
    np.testing.assert_array_equal(drawn.rewards, [2.0, 2.0])
    sampler.sample("θ", [ask(1, hit)], version=3)
    other.sample.assert_called_once()
    sampler.warm_up("θ")
    other.warm_up.assert_called_once_with("θ")

  def test_a_sampler_without_prompts_is_not_warmed_up(self):
    other = mock.create_autospec(decode.JaxSampler, instance=True)
    log = self.make({"prompt": "e", "completion": "ab", "reward": 2.0})
    offline_sampler.OfflineSampler(log, other).warm_up("θ")
    other.warm_up.assert_not_called()

  def test_refuses_a_log_of_other_prompts(self):
    with self.assertRaisesRegex(ValueError, "config.offline.path.*'x'.*'d'"):
      self.make({"prompt": "x", "completion": "a", "reward": 0.0})
    with self.assertRaisesRegex(ValueError, "is usable: 1 lack log-probs"):
      self.make(
          {
              "prompt": "d",
              "completion": "ab",
              "tokens": ["b", "a"],
              "logprobs": [-1.0, -2.0],
              "reward": 0,
          },
          needs_logprobs=True,
      )


class LoggedEpisodesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tokenizer = logged_episodes.make_tokenizer()
    self.records = logged_episodes.records(self.tokenizer)

  def make(
      self,
      *records,
      task=types.SimpleNamespace(has_turns=True, is_held_out=lambda i: i % 2),
      needs_logprobs=False,
      most=120,
      **offline,
  ):
    config = settings.get_config()
    config.sampling.max_prompt_tokens = 100
    config.sampling.max_completion_tokens = most
    config.offline.update(offline)
    config.offline.path = self.create_tempfile(
        content="\n".join(map(json.dumps, records))
    ).full_path
    return offline_sampler.Log(
        config, task, self.tokenizer, needs_logprobs=needs_logprobs
    )

  def check(self, log, prompt_id=0, number=1):
    """Checks that drawn completions are the episode as sampled live."""
    prompt, ids, sampled = logged_episodes.as_sampled(self.tokenizer)
    np.testing.assert_array_equal(log.prompt_tokens[prompt_id], prompt)
    got = log.draw(prompt_id, visit=0, num_completions=number, version=9)
    T, length = got.tokens.shape[1], len(ids)
    for s in range(number):
      self.assertEqual(got.lengths[s], length)
      np.testing.assert_array_equal(got.tokens[s, :length], ids)
      np.testing.assert_array_equal(
          got.sampled_mask[s], [*sampled, *[False] * (T - length)]
      )
    np.testing.assert_array_equal(got.rewards, [0.5] * number)
    self.assertTrue(got.stopped.all())
    return got

  @parameterized.parameters(
      "openai", "as sampled", "anthropic", "verifiers", "verifiers nodes",
      "atif", "openenv", "serve", "tinker", "generate", "samples.jsonl",
  )  # fmt: skip
  def test_formats_give_ids_and_mask_of_live_episode(self, name):
    got = self.check(self.make(self.records[name]))
    known = name not in (
        "openai", "as sampled", "anthropic", "verifiers", "verifiers nodes",
        "atif",
    )  # fmt: skip
    np.testing.assert_array_equal(
        got.logprobs, np.where(got.sampled_mask & known, -0.5, 0)
    )
    versions = {"serve": 3, "samples.jsonl": 3}
    self.assertEqual(got.versions, versions.get(name, -1))
    np.testing.assert_array_equal(
        got.token_versions, np.where(got.sampled_mask, got.versions, -1)
    )

  def test_episodes_of_one_prompt_are_a_group(self):
    names = (
        "openai", "anthropic", "verifiers", "atif", "openenv", "serve", "tinker"
    )  # fmt: skip
    other = copy.deepcopy(self.records["openai"])
    other["messages"][1]["content"] = "1+1?"
    log = self.make(*(self.records[name] for name in names), other)
    self.assertEqual(log.prompt_ids, [0, 1])
    self.check(log, number=len(names))

  def test_seeds_of_an_environment_are_prompts(self):
    one = self.records["generate"]
    log = self.make(one, one | {"seed": 7}, one | {"seed": 6}, one)
    self.assertEqual(log.prompt_ids, [0, 1])
    self.assertEqual(log.left_out, {"are of held-out seeds": 1})

  def test_prompts_of_task_are_found(self):
    chat = self.records["verifiers"]["prompt"]
    chat[1]["content"] = logged_episodes.QUESTION
    task = types.SimpleNamespace(
        has_turns=False,
        num_prompts=lambda split: 2,
        prompt=lambda split, i: ["other", chat][i],
    )
    other = copy.deepcopy(self.records["openai"])
    other["messages"][1]["content"] = "1+1?"
    without_tools = copy.deepcopy(self.records["openai"])
    del without_tools["tools"]
    log = self.make(
        self.records["openai"],
        self.records["anthropic"],
        other,
        without_tools,
        task=task,
    )
    self.assertEqual(log.prompt_ids, [1])
    self.check(log, prompt_id=1, number=2)
    self.assertEqual(
        log.left_out,
        {
            "are of other prompts": 1,
            "have other tools than the first one of their prompt": 1,
        },
    )

  def test_coverage_counts_sampled_tokens_below_limit(self):
    record = self.records["generate"]
    log = self.make(record, record)
    _, ids, sampled = logged_episodes.as_sampled(self.tokenizer)
    self.assertEqual([ids for _, ids in log.pairs()], [tuple(ids)] * 2)
    likely = np.where(sampled, -1.0, -100.0)
    unlikely = likely.copy()
    unlikely[0] = -11.0
    count = sum(sampled)
    tokens, completions = log.coverage([likely, unlikely])
    mean = -1 - 10 / (2 * count)
    self.assertStartsWith(
        tokens, f"log-probs of tokens, nats: mean {mean:.4g}, median -1, "
    )
    self.assertEndsWith(tokens, f"; {0.5 / count:.2%} are below -10")
    self.assertStartsWith(
        completions, f"log-probs of completions, nats: mean {-count - 5:.4g}, "
    )
    self.assertEndsWith(completions, "; 50.00% have a token below -10")

  def test_ids_of_another_tokenizer_are_replaced(self):
    record = self.records["openenv"]
    for turn in record["turns"]:
      for name in ("prompt_token_ids", "completion_token_ids"):
        turn[name] = [i + 1 for i in turn[name]]
    log = self.make(record)
    got = self.check(log)
    self.assertFalse(got.logprobs.any())
    self.assertEqual(log.num_lost, 1)

  def test_unusable_episodes_are_counted(self):
    image = copy.deepcopy(self.records["openai"])
    image["messages"][1]["content"] = [{"type": "image_url"}]
    failed = {"seed": 2, "prompt": "p", "completions": [], "failure": "error"}
    long = copy.deepcopy(self.records["openai"])
    long["messages"][1]["content"] = "2+3?" * 50
    longer = copy.deepcopy(self.records["openai"])
    longer["messages"][4]["content"] = "5" * 50
    log = self.make(self.records["openai"], image, failed, long, longer)
    self.assertEqual(
        log.left_out,
        {
            "have content of type image_url": 1,
            "failed in their environment": 1,
            "have a prompt of more than 100 tokens"
            " (sampling.max_prompt_tokens)": 1,
            "have more than 120 tokens (sampling.max_completion_tokens)": 1,
        },
    )
    with self.assertRaisesRegex(ValueError, "only offline.reward_field"):
      self.make(self.records["openai"], reward_field="")

  def test_chat_template_may_refuse_an_episode(self):
    self.tokenizer.chat_template += (
        "{% if messages[-1].content == '6' %}"
        "{{ raise_exception('no six') }}{% endif %}"
    )
    refused = copy.deepcopy(self.records["openai"])
    refused["messages"][3]["content"] = "6"
    log = self.make(self.records["openai"], refused)
    ((why, number),) = log.left_out.items()
    self.assertIn("no six", why)
    self.assertEqual(number, 1)

  def test_log_probs_are_needed_of_sampled_tokens_alone(self):
    self.check(self.make(self.records["generate"], needs_logprobs=True))
    with self.assertRaisesRegex(ValueError, "line 1: logprobs are missing"):
      self.make(self.records["openai"], needs_logprobs=True)

  def test_report_has_formats_tokens_and_rewards(self):
    worse = self.records["openai"] | {"reward": -0.5}
    lines = self.make(
        self.records["openai"], worse, self.records["serve"]
    ).report()
    sampled = sum(logged_episodes.as_sampled(self.tokenizer)[2])
    self.assertStartsWith(lines[0], "3 completions of 1 training prompts;")
    self.assertStartsWith(lines[1], "read: 2 openai, 1 serve; 67% without")
    self.assertIn(f" {3 * sampled} learned tokens, 0 lost", lines[1])
    self.assertStartsWith(lines[2], "rewards: -0.5 to 0.5, mean 0.1667; they")
    self.assertIn("differ for 1 of 1 prompts, on average by 1", lines[2])

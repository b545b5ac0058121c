# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of completions of two turns: records, log-probs, ledger, resume."""

import json
import pathlib
from unittest import mock

from absl.testing import parameterized
import jax
import ml_collections
import numpy as np
import pytest

import tba_jax
from tba_jax import collect
from tba_jax import searcher
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.learning import batches
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.losses import objective
from tba_jax.programs import inline
from tests.support import two_turns

_FILE = pathlib.Path(two_turns.__file__)
_STEPS = 4
_TURNS = 2


def make_config(name="TwoTurns", **changes) -> ml_collections.ConfigDict:
  """Returns a config at lag 0; a change is `section__key=value`."""
  c = settings.get_config()
  variants.make_smoke(c)
  c.search.lockstep, c.search.lead_steps = True, 0
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=f"{_FILE}:{name}",
          train_prompts=16,
          test_prompts=8,
          max_turns=4,
          correct_threshold=1.0,
      )
  )
  c.reward.backend, c.reward.num_workers = "pool", 4
  c.sampling.max_prompt_tokens = 2
  c.sampling.max_completion_tokens = 12
  c.sampling.num_slots = 16
  c.sft.num_steps, c.sft.batch_size = 20, 8
  c.sft.evaluate_every_steps = c.sft.checkpoint_every_steps = 20
  c.train.num_steps = _STEPS
  c.evaluate.every_steps = 0
  c.evaluate.num_prompts = c.evaluate.final_prompts = 8
  c.checkpoint.every_steps = 2
  c.log.samples_every_steps = 1
  for key, value in changes.items():
    c.update_from_flattened_dict({key.replace("__", "."): value})
  return c


class EnvironmentsTest(parameterized.TestCase):

  def train(self, config):
    """Runs a config to its end; returns a result without failures."""
    validate.validate(config)
    result = tba_jax.train(config)
    self.assertTrue(result.summary["ledger_closed"])
    self.assertEqual(result.summary["reward_failures"], {})
    self.assertLess(max(r["train/logprob_gap"] for r in result.steps), 1e-5)
    return result

  @pytest.mark.slow
  def test_loop_trains_on_exact_records(self):
    maker = inline.LoopMaker(make_config(init="scratch"))
    self.addCleanup(maker.close)
    loop = maker.make(make_config(init="scratch"))
    params, groups = [jax.device_get(loop.learner.params)], []
    gaps, ages = [], []

    def watch(step, draw, metrics):
      params.append(jax.device_get(loop.learner.params))
      gaps.append(metrics["logprob_gap"])
      ages.append(draw.staleness_steps.min())

    loop.watching(groups.append).train(watch)
    self.assertLess(max(gaps), 1e-5)
    self.assertEqual(ages, [0] * _STEPS)
    self.assertLen(groups, _STEPS)
    tokenizer, seen = maker.policy.tokenizer, set()
    for version, some in enumerate(groups):
      for group in some:
        self.assertEqual({*group.versions}, {version})
        (seed,) = {"abcd".index(tokenizer.decode(group.prompt_tokens)[0])}
        self.assertEqual(seed, 2 * group.prompt_id % 4)
        # The trainer's log-probs under the version that sampled it.
        logprobs_SxT = logprobs_lib.completion_logprobs(
            maker.policy.model,
            params[version],
            group.prompt_tokens[None],
            np.ones((1, len(group.prompt_tokens)), np.float32),
            group.completion_tokens[None],
            temperature=1.0,
        )[0]
        mask = group.sampled_mask
        np.testing.assert_allclose(
            group.behavior_logprobs, np.where(mask, logprobs_SxT, 0), atol=1e-5
        )
        for sample, tokens in enumerate(group.completion_tokens):
          length = group.completion_lengths[sample]
          reward, count = check_turns(
              self, tokenizer, tokens[:length], mask[sample, :length]
          )
          self.assertAlmostEqual(group.rewards[sample], reward, places=6)
          self.assertEqual(group.stopped[sample], count == _TURNS)
          seen.add(count)
    self.assertEqual(seen, {0, 1, 2})

  @pytest.mark.slow
  def test_ppo_gets_reward_of_each_turn(self):
    config = make_config(
        init="scratch", loss__name="ppo", loss__ratio_clip=0.2,
        train__num_steps=2, loss__reward_weight=2.0,
    )  # fmt: skip
    validate.validate(config)
    maker = inline.LoopMaker(config)
    self.addCleanup(maker.close)
    groups, draws, num_answered = [], [], 0
    maker.make(config).watching(groups.append).train(
        lambda step, draw, metrics: draws.append(draw)
    )
    self.assertNotEmpty(draws)
    for draw in draws:
      np.testing.assert_allclose(
          draw.turn_rewards.sum(axis=2), draw.rewards, rtol=1e-6
      )
    tokenizer = maker.policy.tokenizer
    for group in (group for some in groups for group in some):
      for sample, tokens in enumerate(group.completion_tokens):
        expected = np.zeros(len(tokens), np.float32)
        ends = np.flatnonzero(
            (tokens == tokenizer.eos_id) & group.sampled_mask[sample]
        )
        begin = 0
        for end in ends:
          text = tokenizer.decode(tokens[begin:end].tolist())
          expected[end] = 2 * len(text) / 4
          # The environment's answer is in between.
          (later,) = np.nonzero(group.sampled_mask[sample, end + 1 :])
          begin = end + 1 + (later[0] if len(later) else 0)
        np.testing.assert_allclose(group.turn_rewards[sample], expected)
        num_answered += len(ends)
    self.assertGreater(num_answered, 0)

  @pytest.mark.slow
  def test_run_fine_tunes_trains_and_closes_its_ledger(self):
    result = self.train(make_config())
    # Steps have what searchers have reported since the last one, if anything.
    for name in ("reward/turns", "reward/environment_s"):
      values = [r[name] for r in result.steps if name in r]
      self.assertGreater(sum(values), 0, name)
    self.assertGreater(result.summary["after"]["turns"], 0)
    tokens = r"environments&#39; tokens</th>\s*<td><b[^>]*>[1-9]"
    self.assertRegex(result.report, tokens)

  @parameterized.parameters("off", "keep_cache")
  @pytest.mark.slow
  def test_blocks_join_while_environments_work(self, in_flight):
    self.enter_context(mock.patch.object(searcher, "ASK_EVERY_S", 0.0))
    stream, counts = collect.Collector.stream, []

    def counted(self, more, *args):
      counts.append(0)

      def counted_more():
        prompts = more()
        counts[-1] += prompts is not None
        return prompts

      yield from stream(self, counted_more, *args)

    self.enter_context(mock.patch.object(collect.Collector, "stream", counted))
    self.train(
        make_config(
            name="TakesLong",
            init="scratch",
            search__lockstep=False,
            search__lead_steps=3,
            sampling__num_waiting=16,
            sampling__in_flight=in_flight,
            train__num_steps=8,
        )
    )
    self.assertGreater(max(counts), 1)
    self.assertGreaterEqual(sum(counts), 8)

  @pytest.mark.slow
  def test_failing_environment_does_not_end_run(self):
    config = make_config(init="scratch", train__num_steps=2)
    config.task.source = f"{_FILE}:Fails"
    config.reward.fallback = -1.0
    with mock.patch.object(validate, "validate"):  # It tries an episode.
      result = tba_jax.train(config)
    self.assertTrue(result.summary["ledger_closed"])
    failures = result.summary["reward_failures"]
    self.assertEqual({*failures}, {"error", "crash"})
    self.assertEqual(result.summary["completions"], 64)

  @pytest.mark.slow
  def test_failed_prompt_is_rejected_and_counted(self):
    config = make_config(
        name="FailsToBegin", init="scratch", reference__role="searcher"
    )
    result = tba_jax.train(config)
    summary = result.summary
    self.assertTrue(summary["ledger_closed"])
    failed = summary["reward_failures"]["error"]
    self.assertEqual({*summary["reward_failures"]}, {"error"})
    self.assertBetween(failed, 1, summary["completions"] - 1)
    # Prompts, completions and sampled tokens.
    self.assertRegex(
        result.report,
        rf"rejected: environment</th>\s*<td>[1-9]\d*</td>\s*<td>{failed}</td>"
        r"\s*<td>0</td>",
    )

  def write_log(self):
    """Writes episodes with an answer "d", which no turn has; returns a path."""
    say = lambda role, text: {"role": role, "content": text}
    lines = [
        {
            "messages": [
                say("user", prompt),
                say("assistant", f"a{turn}"),
                say("user", "d:"),
                say("assistant", turn),
            ],
            "reward": reward,
        }
        for prompt in ("a:", "c:")
        for turn, reward in (("b", 1.0), ("c", 0.0))
    ]
    return self.create_tempfile(
        content="\n".join(map(json.dumps, lines))
    ).full_path

  @pytest.mark.slow
  def test_loop_trains_on_logged_turns_alone(self):
    config = make_config(
        init="scratch",
        offline__path=self.write_log(),
        loss__name="tb",
        loss__ratio_clip=0.0,
        train__num_steps=2,
    )
    validate.validate(config)
    maker = inline.LoopMaker(config)
    self.addCleanup(maker.close)
    draws, losses = [], []

    def watch(step, draw, metrics):
      draws.append(draw)
      losses.append(metrics["loss"])

    maker.make(config).train(watch)
    self.assertTrue(np.isfinite(losses).all())
    self.assertGreater(losses[0], 0)
    tokenizer = maker.policy.tokenizer
    (planted,) = tokenizer.encode("d")
    batch = batches.of_draw(draws[0], tokenizer)
    texts = {
        tokenizer.decode(tokens[tokens != tokenizer.pad_id])
        for tokens in batch.completion_tokens.reshape(-1, 12)
    }
    self.assertEqual(texts, {f"a{x}<eos>d:{x}<eos>" for x in "bc"})
    gradient_BxKxT = jax.grad(
        lambda x: objective.make_pure_loss(config)(x, {}, batch, 1.0)[0]
    )(-np.ones_like(batch.behavior_logprobs))
    is_planted = batch.completion_tokens == planted
    self.assertTrue(is_planted.any(2).all())
    np.testing.assert_array_equal(gradient_BxKxT[is_planted], 0)
    sampled = batch.completion_mask > 0
    self.assertTrue((gradient_BxKxT[sampled] != 0).all())

  @pytest.mark.slow
  def test_loop_mixes_logged_turns_with_played_ones(self):
    config = make_config(
        init="scratch",
        offline__path=self.write_log(),
        offline__fraction=0.5,
        loss__name="tb",
        loss__ratio_clip=0.0,
        train__num_steps=4,
    )
    validate.validate(config)
    maker = inline.LoopMaker(config)
    self.addCleanup(maker.close)
    groups = []
    maker.make(config).watching(groups.extend).train()
    num_seeds = config.task.train_prompts
    ids = {True: set(), False: set()}
    for group in groups:
      is_logged = group.prompt_id >= num_seeds
      ids[is_logged].add(group.prompt_id)
      self.assertEqual(group.versions.tolist().count(-1) > 0, is_logged)
      if is_logged:
        text = maker.policy.tokenizer.decode(group.completion_tokens[0])
        self.assertIn("d:", text)
        self.assertEqual(set(group.rewards), {0.0, 1.0})
    self.assertEqual(ids[True], {num_seeds, num_seeds + 1})
    self.assertGreater(len(ids[False]), 1)

  @pytest.mark.slow
  @parameterized.parameters(1.0, 0.5)
  def test_run_trains_on_log_and_plays_evaluations(self, fraction):
    config = make_config(
        init="scratch",
        offline__path=self.write_log(),
        offline__fraction=fraction,
        loss__name="tb",
        loss__ratio_clip=0.0,
        train__num_steps=2,
    )
    result = tba_jax.train(config)
    self.assertTrue(result.summary["ledger_closed"])
    self.assertTrue(np.isfinite([r["train/loss"] for r in result.steps]).all())
    self.assertGreater(result.summary["after"]["turns"], 0)

  def test_wrong_settings_are_reported_before_device_is_used(self):
    log = self.create_tempfile(
        content='{"prompt": "a", "completion": "b", "reward": 1.0}'
    ).full_path
    for changes, message in (
        (
            {"offline__path": log, "offline__reward_field": ""},
            "offline.reward_field = .*: must be .* with environments",
        ),
        (
            {"reward__backend": "process"},
            "reward.backend = 'process': .*'pool'",
        ),
        ({"name": "Gymnasium"}, "init = 'sft': .* no method demonstrate"),
        ({"name": "Nothing"}, "defines no 'Nothing'"),
        ({"name": "Fails", "init": "scratch"}, r"step fails \(crash\)"),
    ):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        validate.validate(make_config(**changes))

  def test_slow_first_reset_passes_validation(self):
    config = make_config(name="Slow", init="scratch", reward__deadline_s=0.2)
    self.assertEqual(validate.validate(config), [])


def check_turns(case, tokenizer, tokens, mask):
  """Checks who wrote which token; returns the reward and the turns."""
  reward, count, turn, t = 0.0, 0, [], 0
  while t < len(tokens):
    case.assertTrue(mask[t])
    turn.append(int(tokens[t]))
    t += 1
    if turn[-1] != tokenizer.eos_id:
      continue
    text, turn = tokenizer.decode(turn[:-1]), []
    count += 1
    reward += len(text) / 4
    answer = tokenizer.encode(f"{text[-1:]}:")
    if count == _TURNS or t + len(answer) >= 12:
      case.assertEqual(t, len(tokens))
      continue
    case.assertEqual(tokens[t : t + len(answer)].tolist(), answer)
    case.assertFalse(mask[t : t + len(answer)].any())
    t += len(answer)
  return reward, count

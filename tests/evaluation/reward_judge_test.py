# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models as scorers, judges and comparers."""

import pathlib

from absl.testing import absltest
import chex
import jax
import numpy as np

from tba_jax.evaluation import reward_judge
from tba_jax.models import tokenizer
from tba_jax.models.hf import hf
from tba_jax.models.net import heads
from tba_jax.policy import frozen_models
from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tba_jax.rewards import reward_scorer
from tests.support import base_config
from tests.support import fakes
from tests.support import tiny_model

Text = reward_scorer.Text
TOKENIZER = tokenizer.word_level(list("abcdefghijklm"), ".")


class _LastToken:
  """A scalar model whose reward is its last token's id, exactly."""

  def rewards(self, params, tokens_BxL, mask_BxL):
    last_B = (mask_BxL.sum(-1) - 1).astype(int)
    ids_B = jax.numpy.take_along_axis(tokens_BxL, last_B[:, None], axis=1)
    return params * ids_B[:, 0].astype(np.float32)


def _scorer(model=None, params=1.0, **changes):
  settings = dict(max_prompt_tokens=4, max_completion_tokens=4, batch_size=3)
  model = model or _LastToken()
  return reward_scorer.RewardScorer(
      model.rewards, params, TOKENIZER, **{**settings, **changes}
  )


def _id(letter):
  return TOKENIZER.encode(letter)[0]


class ScorerTest(absltest.TestCase):

  def test_score_is_at_last_token(self):
    actual = _scorer().score(
        [
            Text("ab", "c"),
            Text("ab", "c", stopped=False),
            Text("ab", "", stopped=False),
            # Too long: a prompt loses its head, a completion its tail.
            Text("mmmmab", "cdefg", stopped=False),
            Text("", "", stopped=False),
        ]
    )
    eos = TOKENIZER.eos_id
    expected = [eos, _id("c"), _id("b"), _id("f"), eos]
    self.assertEqual(actual.tolist(), expected)
    self.assertEmpty(_scorer().score([]))

  def test_each_length_is_compiled_once(self):
    scorer = _scorer()
    scorer.rewards = jax.jit(chex.assert_max_traces(_LastToken().rewards, n=3))
    texts = [Text("abcd"[:p], "efgh"[:t], False) for p in range(4)
             for t in range(1, 5)]  # fmt: skip
    result = scorer.score(texts)
    self.assertEqual(result.tolist(), [_id(t.completion[-1]) for t in texts])
    scorer.score(texts[::-1])

  def test_score_is_independent_of_batch(self):
    model = heads.ScalarModel(heads.config_of(tiny_model.make_model().config))
    scorer = _scorer(model, tiny_model.init_params(model))
    texts = [Text("abcd", "efg"), Text("abc", "defg"), Text("m", "a"),
             Text("bb", "c")]  # fmt: skip
    together = scorer.score(texts)
    alone = np.concatenate([scorer.score([text]) for text in texts])
    np.testing.assert_array_equal(together, alone)
    # And it is the model's, of the row as it stands.
    row = [*TOKENIZER.encode("abcdefg"), TOKENIZER.eos_id]
    rows = np.array([row] * 3)
    expected = jax.jit(model.rewards)(scorer.params, rows, np.ones(rows.shape))
    np.testing.assert_array_equal(together[:1], expected[:1])

  def test_folder_without_scalar_head_is_refused(self):
    config = base_config.make()
    folder = pathlib.Path(self.create_tempdir().full_path)
    with self.assertRaisesRegex(
        ValueError, r"config\.reward\.model=.*no model"
    ):
      frozen_models.load_scorer(config, "reward.model", folder)
    model = tiny_model.make_model()
    hf.save(folder, model.config, tiny_model.init_params(model), TOKENIZER)
    with self.assertRaisesRegex(ValueError, "gives 0 labels; must be a model"):
      frozen_models.load_scorer(config, "reward.model", folder)


class JudgeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # Prompts "2" and "3", references "2" and "3".
    self.task = fakes.FakeTask({0: {"2"}, 1: {"3"}})
    self.task.prompt = lambda split, index: "ab"[index]
    self.task.reference_completion = lambda split, index, rng: "g"

  def judge(self, **more):
    return reward_judge.ModelJudge(_scorer(), self.task, **more)

  def ask(self, judge, *completions, stopped=False):
    return judge.judge(
        [judges.JudgeRequest("train", 0, text, stopped) for text in completions]
    )

  def test_reward_is_raw_score(self):
    result = self.ask(self.judge(), "c", "d")
    self.assertEqual([j.reward for j in result], [_id("c"), _id("d")])
    self.assertEqual([j.key for j in result], [None, None])
    result = self.ask(self.judge(), "c", stopped=True)
    self.assertEqual(result[0].reward, TOKENIZER.eos_id)

  def test_correct_means_above_reference(self):
    # The reference "g" ends by itself, so its last token is the stop token's.
    judge = self.judge(with_keys=True)
    result = self.ask(judge, "c", "cd") + self.ask(judge, "c", stopped=True)
    self.assertEqual([j.key for j in result], ["c", "cd", None])

  def test_nan_score_is_failure(self):
    judge = reward_judge.ModelJudge(
        _scorer(params=np.float32(np.nan)), self.task
    )
    (result,) = self.ask(judge, "c")
    np.testing.assert_equal((result.reward, result.failure), (np.nan, "nan"))

  def test_config_selects_judge(self):
    config = base_config.make()
    workdir = pathlib.Path(self.create_tempdir().full_path)
    made = reward_judge.make_judge(config, workdir, self.task)
    self.assertIsInstance(made, judges.InProcess)
    config.reward.backend = "model"
    with self.assertRaisesRegex(ValueError, "reward_model/model.*no model"):
      reward_judge.make_judge(config, workdir, self.task)
    model = heads.ScalarModel(heads.config_of(tiny_model.make_model().config))
    folder = workdir / "reward_model" / "model"
    hf.save(folder, model.config, tiny_model.init_params(model), TOKENIZER)
    made = reward_judge.make_judge(config, workdir, self.task)
    self.assertIsInstance(made, reward_judge.ModelJudge)

  def test_refuses_model_without_chat_template(self):
    config = base_config.make(reward__backend="model")
    folder = pathlib.Path(self.create_tempdir().full_path)
    model = heads.ScalarModel(heads.config_of(tiny_model.make_model().config))
    hf.save(folder, model.config, tiny_model.init_params(model), TOKENIZER)
    config.reward.model = config.evaluate.judge = str(folder)
    self.task.prompt = lambda split, index: [{"role": "user", "content": "a"}]
    for key, make in (
        ("reward.model", reward_judge.make_judge),
        ("evaluate.judge", reward_judge.make_comparer),
    ):
      with self.assertRaisesRegex(ValueError, f"config.{key}=.*chat_template"):
        make(config, folder, self.task)

  def test_config_selects_comparer(self):
    config = base_config.make()
    workdir = self.create_tempdir().full_path
    make = lambda: reward_judge.make_comparer(config, workdir, self.task)
    self.assertIsNone(make())
    config.evaluate.judge = "task"
    self.assertIsInstance(make(), comparers.OfTask)
    config.evaluate.judge = "command"
    config.evaluate.judge_command = "judge"
    self.assertIsInstance(make(), comparers.CommandComparer)
    config.evaluate.judge = "/nowhere"
    with self.assertRaisesRegex(ValueError, "evaluate.judge='/nowhere'"):
      make()


class ComparerTest(absltest.TestCase):

  def comparisons(self, *completions):
    return [
        comparers.Comparison(
            "ab", judges.JudgeRequest("held_out", 0, c, False), "g"
        )
        for c in completions
    ]

  def test_gold_model_scores_both(self):
    comparer = reward_judge.ModelComparer(_scorer())
    eos = TOKENIZER.eos_id
    result = comparer.compare(self.comparisons("c", "d"))
    self.assertEqual(
        [(v.win, v.score, v.reference_score) for v in result],
        [(1.0, _id("c"), eos), (1.0, _id("d"), eos)],
    )

  def test_equal_scores_do_not_count_as_win(self):
    comparer = reward_judge.ModelComparer(_scorer(params=0.0))
    self.assertEqual(comparer.compare(self.comparisons("c"))[0].win, 0.0)

  def test_references_are_scored_once(self):
    comparer = reward_judge.ModelComparer(_scorer())
    asked = []
    score = comparer.score
    comparer.score = lambda comparisons: asked.append(
        len(comparisons)
    ) or score(comparisons)
    comparer.compare(self.comparisons("c", "d"))
    comparer.compare(self.comparisons("e"))
    self.assertEqual(asked, [3, 1])

  def test_comparison_without_score_has_no_verdict(self):
    comparer = reward_judge.ModelComparer(_scorer(params=np.float32(np.nan)))
    (result,) = comparer.compare(self.comparisons("c"))
    self.assertIsNone(result.win)
    self.assertEqual(result.failure, "no_score")

  def test_compares_by_tasks_own_reward(self):
    task = fakes.FakeTask({0: {"23"}})
    comparer = comparers.OfTask(judges.InProcess(task))
    self.addCleanup(comparer.close)
    result = comparer.compare(self.comparisons("23", "4"))
    self.assertEqual([v.win for v in result], [1.0, 0.0])
    self.assertEqual([v.score for v in result], [2.0, 0.0])

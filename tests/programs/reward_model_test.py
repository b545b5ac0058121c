# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs, calibration, training and continuing of reward models."""

import json
import pathlib
import threading
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from tba_jax.config import variants
from tba_jax.models import tokenizer
from tba_jax.models.hf import hf
from tba_jax.policy import frozen_models
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import reward_model as programs_reward_model
from tba_jax.rewards import reward_scorer as rewards_reward_model
from tba_jax.system import jsonl
from tba_jax.tasks import preference
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import task_table
from tests.support import sentencepiece_case

Pair = programs_reward_model.Pair
TOKENIZER = tokenizer.word_level(list("abcdef:"), ".")
tldr_reward_model = variants.import_config("configs/tldr/reward_model.py")


def make_config(**changes):
  config = tldr_reward_model.get_config("smoke")
  config.reward_model.update(changes)
  return config


def weights(workdir):
  return (
      pathlib.Path(workdir) / "reward_model/model" / hf.WEIGHTS
  ).read_bytes()


class TrainRewardModelTest(absltest.TestCase):

  def workdir(self, config):
    """Returns a workdir with an SFT model that has not learned anything."""
    workdir = self.create_tempdir().full_path
    policy = policy_lib.make_policy(config, workdir, scratch=True)
    params = policy_lib.initial_params(policy, 0)
    hf.save(
        policy_lib.sft_folder(workdir),
        policy.model.config,
        params,
        policy.tokenizer,
    )
    return workdir

  def run_to(self, config, workdir, stop_step=None):
    stop = threading.Event()

    def progress(step, num_steps, values):
      del num_steps, values
      if stop_step is not None and step >= stop_step:
        stop.set()

    return programs_reward_model.run(
        config, workdir, stop=stop, on_progress=progress
    )

  @pytest.mark.slow
  def test_learns_and_scores_consistently(self):
    config = make_config(
        num_steps=60, learning_rate=1e-2, evaluate_every_steps=60,
        evaluate_pairs=20,
    )  # fmt: skip
    workdir = self.workdir(config)
    result = self.run_to(config, workdir)
    self.assertFalse(result["interrupted"])
    records = jsonl.read_jsonl(f"{workdir}/reward_model/metrics.jsonl")
    self.assertLess(records[-1]["train/loss"], records[0]["train/loss"] - 0.05)
    evaluation = json.loads(
        pathlib.Path(workdir, "reward_model/evaluation.json").read_text()
    )
    self.assertEqual(evaluation["num_pairs"], 20)
    self.assertEqual(evaluation["accuracy"], result["evaluation"]["accuracy"])
    # The person's labels are the gold reward's about every second time.
    self.assertBetween(evaluation["agreement"]["train"], 0.4, 0.75)
    # The model that the next program loads gives the margins that were
    # measured.
    folder = pathlib.Path(workdir, "reward_model/model")
    scorer = frozen_models.load_scorer(config, "reward.model", folder)
    pairs = [
        json.loads(line)
        for line in pathlib.Path(workdir, "reward_model/pairs/held_out.jsonl")
        .read_text()
        .splitlines()
    ]
    scores = scorer.score(
        [
            rewards_reward_model.Text(pair["prompt"], pair[name])
            for pair in pairs
            for name in ("chosen", "rejected")
        ]
    ).reshape(-1, 2)
    margin = float((scores[:, 0] - scores[:, 1]).mean())
    self.assertAlmostEqual(margin, evaluation["margin"], places=4)
    self.assertEqual(
        json.loads((folder / "config.json").read_text())["architectures"],
        ["LlamaForSequenceClassification"],
    )
    # A second call finds it.
    before = weights(workdir)
    again = self.run_to(config, workdir)
    self.assertTrue(again["skipped"])
    self.assertEqual(again["evaluation"]["accuracy"], evaluation["accuracy"])
    self.assertEqual(weights(workdir), before)
    # Its evaluation may be gone, but not damaged.
    path = pathlib.Path(workdir, "reward_model/evaluation.json")
    path.unlink()
    self.assertEqual(self.run_to(config, workdir)["evaluation"], {})
    path.write_text('{"accuracy": 1.0}')
    with self.assertRaisesRegex(ValueError, "evaluation.json: damaged"):
      self.run_to(config, workdir)
    # And it may be what another one starts from.
    config.reward_model.init = str(folder)
    _, _, init_params = programs_reward_model.initial_model(config, "/nowhere")
    jax.tree.map(
        np.testing.assert_array_equal, init_params(), hf.load(folder)[1]
    )

  @pytest.mark.slow
  def test_continues_bit_for_bit(self):
    config = make_config(evaluate_every_steps=10, log_every_steps=2)
    whole, parts = self.workdir(config), self.workdir(config)
    self.run_to(config, whole)
    result = self.run_to(config, parts, stop_step=4)
    self.assertTrue(result["interrupted"])
    self.assertEqual(result["step"], 4)
    self.assertFalse(pathlib.Path(parts, "reward_model/model").exists())
    self.assertFalse(self.run_to(config, parts)["interrupted"])
    self.assertEqual(weights(parts), weights(whole))

  def test_other_settings_and_missing_models_are_refused(self):
    config = make_config()
    with self.assertRaisesRegex(ValueError, "reward_model.init='sft'.*program"):
      self.run_to(config, self.create_tempdir().full_path)
    stopped = threading.Event()
    stopped.set()
    workdir = self.workdir(config)
    programs_reward_model.run(config, workdir, stop=stopped)
    config.reward_model.num_steps = 11
    with self.assertRaisesRegex(
        ValueError, r"reward_model\.num_steps = 11, was 10"
    ):
      self.run_to(config, workdir)

  def test_pairs_of_both_splits_are_refused(self):
    config = make_config(relabel="")
    folder = pathlib.Path(self.create_tempdir().full_path)
    task = task_table.make_task(config.task)
    lines = [
        json.dumps({"prompt": p, "chosen": c, "rejected": r}) + "\n"
        for p, c, r in task.pairs("train")
    ]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "held.jsonl").write_text(lines[3])
    config.reward_model.train = str(folder / "train.jsonl")
    config.reward_model.held_out = str(folder / "held.jsonl")
    with self.assertRaisesRegex(
        ValueError, "train: 1 of .* pairs are.*train.jsonl:4 = held.jsonl:1"
    ):
      self.run_to(config, self.workdir(config))

  def test_pairs_of_both_splits_may_be_left_out_of_training(self):
    report = rows_lib.DataReport()
    pairs = {"train": _pairs(5), "held_out": _pairs(6)[3:4] + _pairs(6)[5:]}
    result = programs_reward_model.leave_out_shared(pairs, "leave_out", report)
    self.assertEqual([p.place for p in result], ["p:0", "p:1", "p:2", "p:4"])
    self.assertEqual(report.used, {"train": 4})
    self.assertEqual(report.places("train", "held_out"), ["p:3"])
    pairs["held_out"] = pairs["train"]
    with self.assertRaisesRegex(ValueError, "5 of 5 pairs"):
      programs_reward_model.leave_out_shared(pairs, "leave_out", report)


def _pairs(count: int) -> list[Pair]:
  letters = "abcdef"
  return [
      Pair(f"p:{i}", f"{letters[i % 6]}:", letters[: 1 + i % 3], letters[3:])
      for i in range(count)
  ]


class ReadTest(absltest.TestCase):

  def read(self, rows):
    path = pathlib.Path(self.create_tempdir().full_path) / "pairs.jsonl"
    path.write_text(
        "".join(
            (r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows
        )
    )
    return self.load(str(path))

  def load(self, source):
    task = preference.Preference(**preference.Preference.FIELDS)
    config = make_config(train=source, max_completion_tokens=3)
    self.report = rows_lib.DataReport()
    return programs_reward_model.load_pairs(
        config, "train", task, TOKENIZER, self.report
    )

  def test_reads_rows_with_prompt_or_query(self):
    result = self.read(
        [
            {"prompt": "a:", "chosen": "b<eos>", "rejected": "c"},
            {"query": "b:", "chosen": "c", "rejected": "d<eos>"},
        ]
    )
    self.assertEqual(
        [(p.prompt, p.chosen, p.rejected) for p in result],
        [("a:", "b", "c"), ("b:", "c", "d")],
    )
    self.assertEqual(self.report.used, {"train": 2})

  def test_wrong_rows_are_counted_with_their_place(self):
    right = {"prompt": "a:", "chosen": "b", "rejected": "c"}
    result = self.read(
        [
            right,
            "[1]",
            {**right, "prompt": ""},
            {**right, "chosen": None},
            {**right, "rejected": "<eos>"},
            {**right, "chosen": "c<eos>"},
            {**right, "chosen": "bbb"},
            {**right, "prompt": "a" * 1000},
        ]
    )
    self.assertLen(result, 1)
    places = {
        reason: self.report.places("train", reason)
        for reason in rows_lib.REASONS
        if self.report.count("train", reason)
    }
    at = lambda *lines: [f"pairs.jsonl:{line}" for line in lines]
    self.assertEqual(
        places,
        {
            "malformed": at(2),
            "no_prompt": at(3),
            "no_answer": at(4, 5),
            "equal": at(6),
            "pair_too_long": at(7),
            "too_long": at(8),
        },
    )
    lines = "\n".join(self.report.lines())
    self.assertRegex(lines, "reward_model.max_completion_tokens: pairs.jsonl:7")

  def test_refuses_source_without_pairs(self):
    with self.assertRaisesRegex(
        ValueError, r"reward_model.train=.*no pair.*these have \['better'\]"
    ):
      self.read(['{"better": "a"}', "null"])
    with self.assertRaisesRegex(ValueError, "'preference' makes no pairs"):
      self.load("task")


class RelabelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "p.jsonl"
    self.asked = []

  def score(self, texts):
    self.asked += texts
    # "def" beats what is shorter, and not "abc", which has its length.
    return np.array([float(len(text)) for _, text in texts])

  def relabel(self, pairs, stop=None):
    return programs_reward_model.relabel_pairs(
        pairs, self.score, self.path, stop or threading.Event()
    )

  def test_relabels_by_higher_score_and_keeps_ties(self):
    pairs = _pairs(3)
    result = self.relabel(pairs)
    self.assertEqual([p.chosen for p in result], ["def", "def", "abc"])
    self.assertEqual([p.rejected for p in result], ["a", "ab", "def"])
    self.assertEqual([p.agrees for p in result], [False, False, True])
    lines = [json.loads(line) for line in self.path.read_text().splitlines()]
    self.assertEqual(
        [line["scores"] for line in lines], [[1, 3], [2, 3], [3, 3]]
    )

  def test_refuses_nonfinite_score_as_label(self):
    self.score = lambda texts: np.full(len(texts), np.nan)
    with self.assertRaisesRegex(ValueError, "relabel: .* nan and nan"):
      self.relabel(_pairs(1))
    self.assertEqual(self.path.read_text(), "")

  def test_relabeling_resumes(self):
    pairs = _pairs(600)
    stop = mock.create_autospec(threading.Event, instance=True)
    stop.is_set.side_effect = [False, True]
    result = self.relabel(pairs, stop)
    self.assertIsNone(result)
    done = len(self.path.read_text().splitlines())
    self.assertGreater(done, 0)
    # A killed writer's torn line is labelled again.
    with self.path.open("a") as f:
      f.write('{"prompt": "a')
    self.asked.clear()
    result = self.relabel(pairs)
    self.assertLen(self.asked, 2 * (600 - done))
    self.assertEqual(result, self.relabel(pairs))
    self.assertLen(result, 600)

  def test_file_of_other_pairs_is_refused(self):
    self.relabel(_pairs(3))
    with self.assertRaisesRegex(ValueError, "has other pairs.*p:1"):
      self.relabel(_pairs(3)[1:])


class ExamplesTest(absltest.TestCase):

  def test_epoch_has_every_pair_once(self):
    config = make_config(batch_size=2)
    examples = programs_reward_model.make_examples(config, _pairs(5), TOKENIZER)
    chunk = examples.chunk(0, 5)
    seen = []
    for row in range(10):
      index = divmod(row, 2)
      mask = chunk.prompt_mask[index].astype(bool)
      completions = zip(
          chunk.completion_tokens[index], chunk.completion_mask[index]
      )
      seen.append(
          (
              TOKENIZER.decode(chunk.prompt_tokens[index][mask]),
              *(
                  TOKENIZER.decode_completion(ids, int(m.sum()), stopped=True)
                  for ids, m in completions
              ),
          )
      )
    expected = sorted((p.prompt, p.chosen, p.rejected) for p in _pairs(5))
    self.assertEqual(sorted(seen[:5]), expected)
    self.assertEqual(sorted(seen[5:]), expected)

  def test_encodes_completions_as_continuations_of_prompt(self):
    words = sentencepiece_case.make()
    pair = Pair("", "a:", "42", " hello")
    prompt, completions = programs_reward_model.encode_pair(pair, words)
    self.assertEqual(prompt, words.encode_prompt("a:"))
    self.assertEqual(
        [words.tokens(ids) for ids in completions],
        [["42", "</s>"], ["\u2581hello", "</s>"]],
    )
    scorer = rewards_reward_model.RewardScorer(
        mock.Mock(),
        {},
        words,
        max_prompt_tokens=9,
        max_completion_tokens=9,
        batch_size=1,
    )
    text = rewards_reward_model.Text("a:", "42", stopped=True)
    self.assertEqual(scorer.encode(text), [*prompt, *completions[0]])


def _summarize(margins, num_bins=2):
  return programs_reward_model.calibration_summary(
      np.array(margins), num_bins=num_bins
  )


class CalibrationTest(absltest.TestCase):

  def test_matches_numbers_by_hand(self):
    # p = 3/4 twice, once right; p = 9/10 twice, both right; a tie.
    low, high = np.log(3.0), np.log(9.0)
    result = _summarize([low, -low, high, high, 0.0])
    self.assertAlmostEqual(result["accuracy"], 3.5 / 5)
    self.assertAlmostEqual(
        result["loss"],
        -np.log([3 / 4, 1 / 4, 9 / 10, 9 / 10, 1 / 2]).mean(),
    )
    # The edge .75 opens the upper bin.
    self.assertEqual([b["num_pairs"] for b in result["bins"]], [1, 4])
    self.assertAlmostEqual(result["bins"][1]["predicted"], 0.825)
    self.assertAlmostEqual(result["bins"][1]["right"], 0.75)
    self.assertAlmostEqual(result["calibration_error"], 4 / 5 * 0.075)
    self.assertEqual(result["num_pairs"], 5)
    left, right = result["accuracy_interval"]
    self.assertLess(left, result["accuracy"])
    self.assertGreater(right, result["accuracy"])

  def test_calibrated_model_has_small_error(self):
    rng = np.random.default_rng(0)
    margins = rng.uniform(0, 3, 20_000)
    right = rng.random(20_000) < 1 / (1 + np.exp(-margins))
    signed = np.where(right, margins, -margins)
    error = _summarize(signed, num_bins=10)["calibration_error"]
    self.assertLess(error, 0.02)
    boasting = _summarize(3 * signed, num_bins=10)["calibration_error"]
    self.assertGreater(boasting, 0.1)

  def test_huge_margin_is_sure_and_finite(self):
    result = _summarize([1e6, 800.0])
    self.assertEqual(result["accuracy"], 1.0)
    self.assertEqual(result["loss"], 0.0)

  def test_refuses_nonfinite_reward(self):
    for margins in ([1.0, np.nan], [np.inf]):
      with self.assertRaises(ValueError):
        _summarize(margins)

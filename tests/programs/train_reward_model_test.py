# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models: they learn, continue bit for bit, and are what is scored."""

import json
import pathlib
import threading

from absl.testing import absltest
import jax
import numpy as np

from tba_jax.config import variants
from tba_jax.models import hf
from tba_jax.programs import reward_model as programs_reward_model
from tba_jax.rewards import reward_model as rewards_reward_model
from tba_jax.system import jsonl
from tba_jax.tasks import build
from tba_jax.training import policy as policy_lib

tldr_reward_model = variants.import_config("configs/tldr_reward_model.py")


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

  def test_learns_and_scores_as_it_was_trained(self):
    config = make_config(
        num_steps=60, learning_rate=1e-2, evaluate_every_steps=60,
        evaluate_pairs=20, log_every_steps=20,
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
    # What the next program loads gives the margins that were measured.
    folder = pathlib.Path(workdir, "reward_model/model")
    scorer = rewards_reward_model.load_scorer(config, "reward.model", folder)
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
    # And it may be what another one starts from.
    config.reward_model.init = str(folder)
    start = programs_reward_model._Start(config, "/nowhere")
    jax.tree.map(
        np.testing.assert_array_equal, start.params(), hf.load(folder)[1]
    )

  def test_continues_bit_for_bit(self):
    config = make_config(log_every_steps=2, evaluate_every_steps=10)
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
    workdir = self.create_tempdir().full_path
    stopped = threading.Event()
    stopped.set()
    config = make_config()
    folder = pathlib.Path(self.workdir(config))
    programs_reward_model.run(config, str(folder), stop=stopped)
    config.reward_model.num_steps = 11
    with self.assertRaisesRegex(
        ValueError, r"reward_model\.num_steps = 11, was 10"
    ):
      self.run_to(config, str(folder))
    del workdir

  def test_pairs_of_both_splits_are_refused(self):
    config = make_config(relabel="")
    folder = pathlib.Path(self.create_tempdir().full_path)
    task = build.make_task(config.task)
    lines = [
        json.dumps({"prompt": p, "chosen": c, "rejected": r}) + "\n"
        for p, c, r in task.pairs("train")
    ]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "held.jsonl").write_text(lines[3])
    config.reward_model.train = str(folder / "train.jsonl")
    config.reward_model.held_out = str(folder / "held.jsonl")
    with self.assertRaisesRegex(
        ValueError, "held_out: 1 pairs are.*held.jsonl:1 = train.jsonl:4"
    ):
      self.run_to(config, self.workdir(config))


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of one-process runs, and of the tables that are made of them."""

from unittest import mock

from absl.testing import absltest
import pytest

from studies import curves
from studies.diversity import diversity
from studies.free_search import free_search
from studies.red_team_diversity import red_team_diversity
from studies.search import few_prompts
from studies.search import search
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.tasks import base
from tba_jax.tasks import countdown as countdown_task

countdown = variants.import_config("configs/countdown.py")
red_team = variants.import_config("configs/red_team.py")
sparse = variants.import_config("configs/countdown_sparse.py")


class CurvesTest(absltest.TestCase):

  def make_config(self, num_steps, prompts_per_step, every_steps):
    config = countdown.get_config("smoke")
    config.init = "scratch"
    config.train.num_steps = num_steps
    config.search.prompts_per_step = prompts_per_step
    config.evaluate.every_steps = every_steps
    return config

  @pytest.mark.slow
  def test_counts_samples_before_evaluation(self):
    config = self.make_config(4, 6, every_steps=2)
    result = curves.run(config, staleness_steps=1)
    self.assertEqual(result["steps"], [0, 2, 4])
    per_step = 6 * config.search.samples_per_prompt
    self.assertEqual(result["completions"], [0, 2 * per_step, 4 * per_step])
    self.assertLen(result["rewards"], 4)
    for name in curves.EVALUATED:
      self.assertLen(result[name], 3)

  @pytest.mark.slow
  def test_counts_solution_once(self):
    config = self.make_config(2, 3, every_steps=1)
    judge = lambda *_: base.Judgement(1.0, "one")
    with mock.patch.object(countdown_task.Countdown, "judge", judge):
      result = curves.run(config, staleness_steps=0)
    self.assertEqual(result["solutions"], [0, 3, 6])

  @pytest.mark.slow
  def test_every_setting_is_allowed(self):
    of_search = search.make_config(sparse.get_config("smoke"))
    for config, settings in (
        (countdown.get_config("smoke"), diversity.SETTINGS),
        (of_search, search.SETTINGS),
        (free_search.make_free(of_search), {"": []}),
        (red_team.get_config("smoke"), red_team_diversity.SETTINGS),
    ):
      for overrides in settings.values():
        own = config.copy_and_resolve_references()
        load.apply_overrides(own, overrides)
        validate.validate(own, program="sweep")


class FewPromptsTest(absltest.TestCase):

  def test_all_splits_are_first_training_prompts(self):
    config = search.make_config(sparse.get_config("smoke")).task
    fields = {k: config[k] for k in few_prompts.FewPrompts.FIELDS}
    whole = few_prompts.FewPrompts(**fields)
    few = few_prompts.FewPrompts(**{**fields, "num_prompts": 3})
    prompts = [whole.prompt("train", i) for i in range(3)]
    for split in ("train", "held_out"):
      self.assertEqual(few.num_prompts(split), 3)
      self.assertEqual([few.prompt(split, i) for i in range(3)], prompts)
    self.assertGreater(whole.num_prompts("train"), 3)


class TablesTest(absltest.TestCase):

  def test_diversity_is_compared_at_equal_pass_at_1(self):
    result = lambda seed, end: {
        "name": "tb-0.02",
        "seed": seed,
        "pass_at_1": [0.25, 0.45, end],
        "pass_at_k": [0.8, 0.9, 0.95],
        "distinct_correct_per_solved": [2.0, 2.0, 1.0],
    }
    _, row = diversity.make_table([result(0, 0.85), result(1, 0.85)])
    self.assertEqual(row[:3], ["tb", "0.02", "2"])
    self.assertEqual(row[-1], "1.50 (1.50 to 1.50)")
    _, row = diversity.make_table([result(0, 0.85), result(1, 0.6)])
    self.assertEqual(row[-1], "1 of 2 reach it")

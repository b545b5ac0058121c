# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of one-process runs, and of the tables that are made of them."""

import pathlib
from unittest import mock

from absl.testing import absltest
import pytest

from benchmarks import curves
from benchmarks import diversity
from benchmarks import few_prompts
from benchmarks import free_search
from benchmarks import frontier
from benchmarks import red_team_diversity
from benchmarks import results
from benchmarks import search
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
  def test_counts_what_the_steps_until_an_evaluation_sampled(self):
    config = self.make_config(4, 6, every_steps=2)
    found = curves.run(config, staleness_steps=1)
    self.assertEqual(found["steps"], [0, 2, 4])
    per_step = 6 * config.search.samples_per_prompt
    self.assertEqual(found["completions"], [0, 2 * per_step, 4 * per_step])
    self.assertLen(found["rewards"], 4)
    for name in curves.EVALUATED:
      self.assertLen(found[name], 3)

  @pytest.mark.slow
  def test_counts_a_solution_once(self):
    config = self.make_config(2, 3, every_steps=1)
    judge = lambda *_: base.Judgement(1.0, "one")
    with mock.patch.object(countdown_task.Countdown, "judge", judge):
      found = curves.run(config, staleness_steps=0)
    self.assertEqual(found["solutions"], [0, 3, 6])

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

  def test_a_wrong_operand_is_named_before_anything_is_trained(self):
    fine_tune = self.enter_context(
        mock.patch.object(curves, "fine_tune", autospec=True)
    )
    for run, config in (
        (diversity.run, countdown.get_config("smoke")),
        (red_team_diversity.run, red_team.get_config("smoke")),
    ):
      with self.assertRaisesRegex(ValueError, "unknown runs.*verl"):
        run(config, ["0", "verl"])
    fine_tune.assert_not_called()

  def test_diversity_compares_whole_batches_of_fresh_groups(self):
    with mock.patch.object(curves, "run_all", return_value=[]) as run_all:
      with mock.patch.object(diversity.results, "print_table"):
        with mock.patch.object(diversity.frontier, "plot"):
          diversity.run(countdown.get_config(), [])
    config = run_all.call_args.args[0]
    self.assertFalse(config.replay.skip_equal_rewards)
    self.assertEqual(
        config.search.prompts_per_step, config.train.prompts_per_batch
    )


class FewPromptsTest(absltest.TestCase):

  def test_all_splits_are_the_first_training_prompts(self):
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

  def test_search_has_a_row_for_each_draw_and_number_of_searchers(self):
    runs = [
        {
            "name": name,
            "seed": 0,
            "pass_at_1": [0.1, 0.2],
            "pass_at_k": [0.5, 0.6],
            "solutions": [0, 25],
            "rewards": [0.0] * 150 + [0.5] * 50,
        }
        for name in ("none-1", "reward-16")
    ]
    rows = search.make_table(runs)[1:]
    self.assertEqual(
        rows,
        [
            ["none", "1", "1", "0.200", "0.600", "25", "0.500"],
            ["reward", "16", "1", "0.200", "0.600", "25", "0.500"],
        ],
    )

  def test_red_teaming_has_a_row_for_each_setting(self):
    runs = [
        {
            "name": "grpo-0.2",
            "seed": seed,
            "pass_at_1": [0.1, 0.9],
            "cosine_distance_right": [0.8, 0.3 + seed / 10],
            "distinct_correct_per_solved": [16.0, 14.0],
        }
        for seed in (0, 1)
    ]
    _, row = red_team_diversity.make_table(runs)
    self.assertEqual(
        row,
        ["grpo", "0.2", "2", "0.900 (0.900 to 0.900)", "0.35 (0.30 to 0.40)",
         "14.0 (14.0 to 14.0)"],
    )  # fmt: skip

  def test_free_search_has_a_cell_for_each_column(self):
    row = {
        "searchers": 2, "completions_per_step": 14.4, "step_s": 0.151,
        "staleness": 1.04, "pass_at_1": 0.047, "pass_at_k": 0.172,
    }  # fmt: skip
    cells = free_search._cells(row)
    self.assertEqual(cells, ["2", "14", "0.15", "1.0", "0.047", "0.172"])
    self.assertLen(cells, len(free_search._COLUMNS))

  def test_every_setting_is_plotted_in_a_style_of_its_own(self):
    objectives = {f"o{i}": ([], (0.0, 0.1)) for i in range(10)}
    runs = [
        {"name": name, "seed": 0, "x": [0, 1], "y": [0, 1]}
        for name in frontier.make_settings(objectives)
    ]
    path = pathlib.Path(self.create_tempdir().full_path) / "plot.png"
    with mock.patch.object(frontier.pyplot, "close") as close:
      frontier.plot(objectives, runs, {"x": "x", "y": "y"}, path)
    (axes,) = close.call_args.args[0].axes
    styles = {
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for line in axes.get_lines()
    }
    self.assertLen(styles, 20)

  def test_a_run_with_a_result_is_not_made_again(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    made = []

    def train(name, seed):
      made.append((name, seed))
      return {"pass_at_1": [0.1, 0.2]}

    names = ["a-1", "b-1"]
    results.measure([3], ["b-1"], folder, train)
    results.measure([3, 4], names, folder, train)
    found = results.read(names, folder)
    self.assertEqual(made, [("b-1", 3), ("a-1", 3), ("a-1", 4), ("b-1", 4)])
    self.assertEqual(
        [(r["name"], r["seed"]) for r in found],
        [("a-1", 3), ("a-1", 4), ("b-1", 3), ("b-1", 4)],
    )


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the staleness study: its rule, and that it goes on."""

import pathlib
from unittest import mock

from absl.testing import parameterized

from studies import curves
from studies.staleness import staleness
from tba_jax.tools import sweep


def _result(reward, kl=0.0, diverged_step=None):
  end = {"step": 320, "reward": reward, "kl": kl, "distinct_correct": 1.0}
  return {"curve": [{"step": 0}, end], "diverged_step": diverged_step}


class StalenessTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path) / "staleness"
    self.enter_context(mock.patch.object(staleness, "RESULTS", folder))

  def chosen(self, *results_by_rate):
    """Returns the rate of `tb`, given the results of both seeds by rate."""
    actual = {}
    for rate, mine in zip(staleness.RATES["preference"], results_by_rate):
      for seed, result in zip(staleness.SELECTION_SEEDS, mine):
        actual["preference", "tb", 4, rate, seed] = result
    return staleness.chosen_rates(actual, "preference").get("tb")

  def test_rule_takes_best_reward_less_its_kl(self):
    low, middle, high = staleness.RATES["preference"]
    a, b = _result(0.3), _result(0.4)
    # 10 nats cost .2.
    far = _result(0.55, kl=10.0)
    self.assertEqual(self.chosen([a, a], [b, a], [far, a]), middle)
    self.assertEqual(self.chosen([a, a], [a, a], [b, a]), high)
    # The lower of equal ones, and none that diverged.
    self.assertEqual(self.chosen([a, b], [b, a], [a, a]), low)
    broken = _result(9.0, diverged_step=7)
    self.assertEqual(self.chosen([b, b], [a, a], [broken, b]), low)

  def test_rule_waits_for_all_its_runs(self):
    a = _result(0.3)
    self.assertIsNone(self.chosen([a, a], [a, a], [a]))
    self.assertIsNone(self.chosen([a, a], [a, a]))

  def test_rates_at_lag_are_chosen_there(self):
    result = {}
    for i, rate in enumerate(staleness.LAG_RATES):
      for seed in staleness.SELECTION_SEEDS:
        result["countdown", "tb", 16, rate, seed] = _result(0.3 - i / 10)
        result["countdown", "tb", 64, rate, seed] = _result(0.3 + i / 10)
    low, *_, high = staleness.LAG_RATES
    for lag, rate in ((16, low), (64, high)):
      runs = list(staleness.study_at(lag, result, ["tb", "oapl"]))
      self.assertEqual(
          runs, [("countdown", "tb", lag, rate, s) for s in staleness.SEEDS]
      )
      for run in runs:
        result[run] = _result(0.2 + run[4] / 100, kl=2.0)
        result[run]["curve"][-1]["distinct_correct"] = 1.5
    _, row = staleness.make_lag_table(result)
    ends = "0.220 ± 0.020, 2.0, 1.50"
    self.assertEqual(
        row, ["`tb`", f"{low:g}, {ends}", f"{high:g}, {ends}", "5"]
    )

  def test_settings_are_allowed_on_all_tasks(self):
    for task, rates in staleness.RATES.items():
      config = staleness.make_config(task)
      self.assertLessEqual(max(staleness.LAGS), config.train.num_steps / 5)
      for objective in staleness.OBJECTIVES:
        own = staleness.make_run_config(config, objective, rates[0])
        self.assertEqual(own.optimizer.learning_rate, rates[0])

  def test_makes_only_missing_runs(self):
    made = []

    def run(own):
      made.append((own.objective, own.lag, own.seed))
      return _result(0.123456) | {"versions": [0], "wall_s": 1.0}

    bench = mock.create_autospec(sweep.Bench, instance=True)
    bench.run.side_effect = run
    self.enter_context(
        mock.patch.object(sweep, "Bench", return_value=bench, autospec=True)
    )
    self.enter_context(
        mock.patch.object(curves, "fine_tune", lambda config, _: config)
    )
    runs = list(staleness.selection("preference", ["tb", "oapl"]))
    staleness.measure_runs("preference", iter(runs[:2]))
    staleness.measure_runs("preference", iter(runs[:3]))
    lag = sweep.Lag(staleness_steps=4)
    self.assertEqual(
        made,
        [("tb_0.001", lag, 100), ("tb_0.001", lag, 101),
         ("tb_0.003", lag, 100)],
    )  # fmt: skip
    result = staleness.read()
    self.assertEqual(set(result), set(runs[:3]))
    self.assertEqual(result[runs[0]]["curve"][-1]["reward"], 0.1235)
    head, row = staleness.make_table(result)
    self.assertEqual(row[:3], ["preference", "`tb`", "0.123, 0.123, –"], head)
    staleness.run(None, ["table"])
    self.assertTrue((staleness.RESULTS / "staleness.png").exists())
    made.clear()
    staleness.run(None, ["at_lag", "tb"])
    # By lag: two seeds for each of three rates, then the five of the study.
    self.assertEqual(
        [lag.staleness_steps for _, lag, _ in made], [16] * 11 + [64] * 11
    )
    self.assertLen(staleness.make_lag_table(staleness.read()), 2)

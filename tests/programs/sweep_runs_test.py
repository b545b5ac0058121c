# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which runs a sweep has, and what it refuses before anything starts."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load as load_lib
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.programs import stale_loop
from tba_jax.programs import sweep
from tba_jax.system import jsonl

staleness = variants.import_config("configs/staleness.py")

_FILE = str(pathlib.Path(staleness.__file__))


def expand(config):
  return sweep.expand_runs(config, validate.validate)


def load(arg="smoke", *overrides):
  return load_lib.load_config(f"{_FILE}:{arg}", overrides)


class LagTest(absltest.TestCase):

  def test_so_many_steps_late(self):
    lag = stale_loop.Lag(staleness_steps=2)
    self.assertEqual([lag.version_of(t) for t in range(6)], [0, 0, 0, 1, 2, 3])
    self.assertEqual(lag.label, "s=2")

  def test_on_policy(self):
    lag = stale_loop.Lag()
    self.assertEqual([lag.version_of(t) for t in range(4)], [0, 1, 2, 3])

  def test_rounds_of_mini_batches(self):
    lag = stale_loop.Lag(mini_batches=3)
    self.assertEqual(
        [lag.version_of(t) for t in range(8)], [0, 0, 0, 3, 3, 3, 6, 6]
    )
    self.assertEqual(lag.label, "N=3")


class ExpandTest(parameterized.TestCase):

  def test_all_lags_of_all_objectives_seed_by_seed(self):
    config = load(
        "smoke",
        "sweep.staleness_steps=4,0",
        "sweep.mini_batches=2",
        "sweep.seeds=7,3",
    )
    runs = expand(config)
    self.assertEqual(
        [run.name for run in runs],
        [
            f"{objective}-{lag}-seed{seed}"
            for seed in (3, 7)
            for objective in ("tb", "best_of_2")
            for lag in ("s0", "s4", "N2")
        ],
    )

  def test_an_objective_has_its_own_settings(self):
    config = load(
        "smoke",
        "sweep.objectives=a: loss.name=rloo; b: loss.name=tb"
        " loss.ratio_clip=0.1 optimizer.learning_rate=0.5",
        "sweep.staleness_steps=0",
    )
    first, second = expand(config)
    self.assertEqual(first.config.loss.name, "rloo")
    self.assertEqual(first.config.loss.ratio_clip, 0.0)
    self.assertEqual(second.config.loss.name, "tb")
    self.assertEqual(second.config.loss.ratio_clip, 0.1)
    self.assertEqual(second.config.optimizer.learning_rate, 0.5)
    self.assertEqual(config.loss.name, "tb")
    self.assertEqual(sweep.run_settings(second)["optimizer.learning_rate"], 0.5)

  def test_the_study_and_its_short_forms(self):
    full = {run.objective for run in expand(load(""))}
    quick = expand(load("quick"))
    self.assertEqual(
        [run.name for run in quick],
        [
            f"{objective}-s{lag}-seed0"
            for objective in ("tb", "tb_clip", "rloo")
            for lag in (0, 4)
        ],
    )
    self.assertLessEqual({run.objective for run in quick}, full)
    study = {run.seed for run in expand(load(""))}
    tuned = {run.seed for run in expand(load("tune"))}
    self.assertEmpty(study & tuned)

  @parameterized.parameters(
      ("sweep.objectives=", "allowed NAME: KEY=VALUE"),
      ("sweep.objectives=loss.name=tb", "allowed NAME: KEY=VALUE"),
      ("sweep.objectives=a: loss.name=tb; a:", "'a:'.*allowed NAME"),
      ("sweep.objectives=A/b: loss.name=tb", "allowed NAME: KEY=VALUE"),
      ("sweep.objectives=a: seed=3", "a: seed=3.*allowed in it loss"),
      ("sweep.objectives=a: model.width=8", "allowed in it loss"),
      ("sweep.objectives=a: loss.nam=tb", "a: .*loss.nam.*did you mean"),
      ("sweep.objectives=a: loss.name=sft", "a: .*loss.name.*allowed 'tb'"),
      ("sweep.objectives=a: loss.name=proximal_rloo", "a: .*loss.ratio_clip"),
      (
          "sweep.objectives=a: train.completions_per_prompt=2",
          "allowed batches of",
      ),
      ("sweep.mini_batches=1", r"'1'.*whole numbers from 2 on"),
      ("sweep.seeds=", "seeds = ''.*one seed or more"),
      ("reference.mode=ema", "reference.mode = 'ema': allowed 'fixed'"),
  )
  def test_refuses(self, override, message):
    with self.assertRaisesRegex(load_lib.ConfigError, message):
      expand(load("smoke", override))

  def test_refuses_to_have_no_lag(self):
    config = load("smoke", "sweep.staleness_steps=", "sweep.mini_batches=")
    with self.assertRaisesRegex(
        load_lib.ConfigError, "staleness_steps = '': allowed one or more"
    ):
      expand(config)


class ResultTest(absltest.TestCase):

  def test_is_of_the_same_settings(self):
    workdir = self.create_tempdir().full_path
    run = expand(load())[0]
    self.assertIsNone(sweep.read_result(workdir, run))
    path = sweep.result_path(workdir, run)
    result = {"settings": sweep.run_settings(run), "curve": [], "x": 1}
    jsonl.atomic_write_json(path, result)
    self.assertEqual(sweep.read_result(workdir, run)["x"], 1)
    # Other lags, seeds and objectives of the sweep do not matter.
    same = expand(load("smoke", "sweep.seeds=0,1"))[0]
    self.assertEqual(sweep.read_result(workdir, same)["x"], 1)
    other = expand(load("smoke", "train.num_steps=7"))[0]
    with self.assertRaisesRegex(
        load_lib.ConfigError, "config.train.num_steps = 7, was 6"
    ):
      sweep.read_result(workdir, other)

  def test_of_a_version_that_did_not_know_a_key(self):
    workdir = self.create_tempdir().full_path
    run = expand(load())[0]
    path = sweep.result_path(workdir, run)
    settings = sweep.run_settings(run)
    del settings["loss.ratio_cap"]
    jsonl.atomic_write_json(path, {"settings": settings, "curve": []})
    self.assertIsNotNone(sweep.read_result(workdir, run))
    other = load("smoke", "sweep.objectives=tb: loss.name=tb loss.ratio_cap=3")
    with self.assertRaisesRegex(load_lib.ConfigError, "ratio_cap = 3.0, was"):
      sweep.read_result(workdir, expand(other)[0])

  def test_a_damaged_file_is_refused(self):
    workdir = self.create_tempdir().full_path
    run = expand(load())[0]
    path = sweep.result_path(workdir, run)
    path.parent.mkdir(parents=True)
    for text in ('{"settings": {', "[1]", '{"settings": {}, "curve": 3}'):
      path.write_text(text)
      with self.assertRaisesRegex(ValueError, "json: damaged"):
        sweep.read_result(workdir, run)


if __name__ == "__main__":
  absltest.main()

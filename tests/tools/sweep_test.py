# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sweep program: its runs, its tables, and going on after a stop.

Without training; `tests/multi_process/sweep_test.py` makes real runs.
"""

import contextlib
import io
import math
import pathlib
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections
import numpy as np
import rich.console

from tba_jax import schedule
from tba_jax.config import load as load_lib
from tba_jax.config import variants
from tba_jax.learning import buffers
from tba_jax.programs import sft
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.tools import sweep
from tests.transport.groups import fake_groups

staleness = variants.import_config("configs/staleness.py")

_FILE = str(pathlib.Path(staleness.__file__))
LAGS = (sweep.Lag(), sweep.Lag(staleness_steps=4))


def load_arg(arg):
  return load_lib.load_config(f"{_FILE}:{arg}", ())


def load(*overrides):
  return load_lib.load_config(f"{_FILE}:smoke", overrides)


class LagTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(), "s=0", [0, 1, 2, 3, 4, 5]),
      (dict(staleness_steps=2), "s=2", [0, 0, 0, 1, 2, 3]),
      (dict(mini_batches=3), "N=3", [0, 0, 0, 3, 3, 3]),
      (dict(mini_batches=3, passes=2), "N=3,T=2", [0, 0, 0, 6, 6, 6]),
  )
  def test_behavior_version_of_each_step(self, fields, label, versions):
    lag = sweep.Lag(**fields)
    config = lag.apply(load())
    config.train.num_steps = 6
    flow = schedule.make_schedule(config)
    size = config.train.prompts_per_batch
    self.assertEqual([flow.version_of(t * size) for t in range(6)], versions)
    self.assertEqual(lag.label, label)

  @parameterized.parameters(sweep.Lag(), sweep.Lag(mini_batches=3))
  def test_buffer_keeps_enough_for_batch(self, lag):
    config = lag.apply(
        load(
            "replay.capacity_per_prompt=2",
            "replay.capacity=9",
            "replay_filter.similarity=edit",
        )
    )
    B, K = config.train.prompts_per_batch, config.train.completions_per_prompt
    buffer = buffers.make_buffer(config)
    flow = schedule.make_schedule(config)
    for prompt_id in range(flow.needed(0)):
      texts = fake_groups.distinct(3, K)
      group = fake_groups.make_group(
          prompt_id, texts, prompt_tokens=np.ones(1, np.int32)
      )
      buffer.insert(group, 0)
    draw = buffer.draw(B, K, 0)
    self.assertLen(np.unique(draw.ids), B * K)


class ExpandTest(parameterized.TestCase):

  def test_all_lags_of_all_objectives_seed_by_seed(self):
    config = load(
        "sweep.staleness_steps=4,0",
        "sweep.mini_batches=2",
        "sweep.seeds=7,3",
    )
    runs = sweep.expand_runs(config)
    self.assertEqual(
        [run.name for run in runs],
        [
            f"{objective}-{lag}-seed{seed}"
            for seed in (3, 7)
            for objective in ("tb", "best_of_2")
            for lag in ("s0", "s4", "N2")
        ],
    )

  def test_objective_has_its_own_settings(self):
    config = load(
        "sweep.objectives=a: loss.name=rloo; b: loss.name=tb"
        " loss.ratio_clip=0.1 optimizer.learning_rate=0.5",
        "sweep.staleness_steps=0",
    )
    first, second = sweep.expand_runs(config)
    self.assertEqual(first.config.loss.name, "rloo")
    self.assertEqual(first.config.loss.ratio_clip, 0.0)
    self.assertEqual(second.config.loss.name, "tb")
    self.assertEqual(second.config.loss.ratio_clip, 0.1)
    self.assertEqual(second.config.optimizer.learning_rate, 0.5)
    self.assertEqual(config.loss.name, "tb")
    self.assertEqual(sweep.run_settings(second)["optimizer.learning_rate"], 0.5)

  def test_study_and_its_short_forms(self):
    full = {run.objective for run in sweep.expand_runs(load_arg(""))}
    quick = sweep.expand_runs(load_arg("quick"))
    self.assertEqual(
        [run.name for run in quick],
        [
            f"{objective}-s{lag}-seed0"
            for objective in ("tb", "tb_clip", "rloo")
            for lag in (0, 4)
        ],
    )
    self.assertLessEqual({run.objective for run in quick}, full)
    study = {run.seed for run in sweep.expand_runs(load_arg(""))}
    tuned = {run.seed for run in sweep.expand_runs(load_arg("tune"))}
    self.assertEmpty(study & tuned)

  @parameterized.parameters(
      ("sweep.objectives=", "must be NAME: KEY=VALUE"),
      ("sweep.objectives=loss.name=tb", "must be NAME: KEY=VALUE"),
      ("sweep.objectives=a: loss.name=tb; a:", "'a:'.*must be NAME"),
      ("sweep.objectives=A/b: loss.name=tb", "must be NAME: KEY=VALUE"),
      ("sweep.objectives=a: seed=3", "a: seed=3.*keys must be among loss"),
      ("sweep.objectives=a: model.width=8", "keys must be among loss"),
      ("sweep.objectives=a: loss.nam=tb", "a: .*loss.nam.*did you mean"),
      ("sweep.objectives=a: loss.name=sft", "a: .*loss.name.*must be 'tb'"),
      ("sweep.objectives=a: loss.name=proximal_rloo", "a: .*loss.ratio_clip"),
      (
          "sweep.objectives=a: train.completions_per_prompt=2",
          "must be batches of",
      ),
      ("sweep.mini_batches=1", r"'1'.*whole numbers from 2 on"),
      ("sweep.seeds=", "seeds = ''.*one seed or more"),
      ("reference.mode=ema", "reference.mode = 'ema': must be 'fixed'"),
      ("offline.path=log.jsonl", "offline.path = 'log.jsonl': must be ''"),
  )
  def test_refuses(self, override, message):
    with self.assertRaisesRegex(load_lib.ConfigError, message):
      sweep.expand_runs(load(override))

  def test_refuses_missing_lag(self):
    config = load("sweep.staleness_steps=", "sweep.mini_batches=")
    with self.assertRaisesRegex(
        load_lib.ConfigError, "staleness_steps = '': must be one or more"
    ):
      sweep.expand_runs(config)


class ResultTest(absltest.TestCase):

  def test_is_of_same_settings(self):
    workdir = self.create_tempdir().full_path
    run = sweep.expand_runs(load())[0]
    self.assertIsNone(sweep.read_result(workdir, run))
    path = sweep.result_path(workdir, run)
    result = {"settings": sweep.run_settings(run), "curve": [], "x": 1}
    jsonl.atomic_write_json(path, result)
    self.assertEqual(sweep.read_result(workdir, run)["x"], 1)
    # Other lags, seeds and objectives of the sweep do not matter.
    same = sweep.expand_runs(load("sweep.seeds=0,1"))[0]
    self.assertEqual(sweep.read_result(workdir, same)["x"], 1)
    other = sweep.expand_runs(load("train.num_steps=7"))[0]
    with self.assertRaisesRegex(
        load_lib.ConfigError, "config.train.num_steps = 7, was 6"
    ):
      sweep.read_result(workdir, other)

  def test_is_of_same_settings_of_sampling_and_rewards(self):
    workdir = self.create_tempdir().full_path
    only_tb = "sweep.objectives=tb: loss.name=tb"
    run = sweep.expand_runs(load(only_tb))[0]
    result = {"settings": sweep.run_settings(run), "curve": []}
    jsonl.atomic_write_json(sweep.result_path(workdir, run), result)
    for override in (
        "seed=1",
        "explore.fraction=0.5",
        "tempering.tau=2.0",
        "reward.fallback=0.5",
        "search.order=unsolved",
        "search.quantization=int8",
    ):
      other = sweep.expand_runs(load(only_tb, override))[0]
      with self.subTest(override), self.assertRaisesRegex(
          load_lib.ConfigError, f"config.{override.partition('=')[0]} = .*, was"
      ):
        sweep.read_result(workdir, other)
    same = sweep.expand_runs(load(only_tb, "reward.num_workers=3"))[0]
    self.assertIsNotNone(sweep.read_result(workdir, same))

  def test_reads_result_without_new_key(self):
    workdir = self.create_tempdir().full_path
    run = sweep.expand_runs(load())[0]
    path = sweep.result_path(workdir, run)
    settings = sweep.run_settings(run)
    del settings["loss.entropy_weight"]
    jsonl.atomic_write_json(path, {"settings": settings, "curve": []})
    self.assertIsNotNone(sweep.read_result(workdir, run))
    other = load("sweep.objectives=tb: loss.name=tb loss.entropy_weight=3")
    with self.assertRaisesRegex(
        load_lib.ConfigError, "entropy_weight = 3.0, was"
    ):
      sweep.read_result(workdir, sweep.expand_runs(other)[0])

  def test_damaged_file_is_refused(self):
    workdir = self.create_tempdir().full_path
    run = sweep.expand_runs(load())[0]
    path = sweep.result_path(workdir, run)
    path.parent.mkdir(parents=True)
    for text in ('{"settings": {', "[1]", '{"settings": {}, "curve": 3}'):
      path.write_text(text)
      with self.assertRaisesRegex(ValueError, "json: damaged"):
        sweep.read_result(workdir, run)


def make_runs(seeds=(0, 1, 2)):
  config = ml_collections.ConfigDict()
  return [
      sweep.SweepRun(objective, lag, seed, config)
      for seed in seeds
      for objective in ("tb", "rloo")
      for lag in LAGS
  ]


def make_result(reward, *, diverged_step=None):
  before = {"reward": 0.0, "kl": 0.0, "ref_perplexity": 8.0}
  last = {"reward": reward, "kl": 2.5, "ref_perplexity": 9.0}
  return {
      "curve": [before] if diverged_step is not None else [before, last],
      "diverged_step": diverged_step,
      "wall_s": 3.0,
  }


class CellsTest(absltest.TestCase):

  def test_student_interval(self):
    mean, half = sweep.mean_and_half_width([1.0, 2.0, 3.0])
    self.assertEqual(mean, 2.0)
    # t_{2, 0.975} = 4.3027, s = 1.
    self.assertAlmostEqual(half, 4.3027 / math.sqrt(3), places=3)
    mean, half = sweep.mean_and_half_width([0.5])
    self.assertEqual(mean, 0.5)
    self.assertTrue(math.isnan(half))

  def test_counts_finished_and_diverged_runs(self):
    results = {
        "tb-s0-seed0": make_result(0.2),
        "tb-s0-seed1": make_result(0.4),
        "tb-s4-seed0": make_result(0.1),
        "rloo-s4-seed1": make_result(0.0, diverged_step=7),
    }
    cells = sweep.table_cells(make_runs(), results, "reward")
    self.assertEqual(
        list(cells), [(o, lag) for o in ("tb", "rloo") for lag in LAGS]
    )
    self.assertAlmostEqual(cells["tb", LAGS[0]].mean, 0.3)
    self.assertEqual(cells["tb", LAGS[0]].num_seeds, 2)
    texts = [cell.text(2) for cell in cells.values()]
    # t_{1, 0.975} = 12.706.
    self.assertEqual(texts, ["0.30 ± 1.27", "0.10", "–", "– (1 diverged)"])

  def test_markdown(self):
    results = {"tb-s0-seed0": make_result(0.25)}
    self.assertEqual(
        sweep.markdown_table(make_runs(), results).splitlines(),
        [
            "| objective | lag | reward | KL to the reference, nats a"
            " completion | perplexity under the reference | seeds |",
            "| --- | --- | --- | --- | --- | --- |",
            "| before training |  | 0.000 | 0.00 | 8.00 |  |",
            "| tb | s=0 | 0.250 | 2.50 | 9.00 | 1 |",
            "| tb | s=4 | – | – | – | 0 |",
            "| rloo | s=0 | – | – | – | 0 |",
            "| rloo | s=4 | – | – | – | 0 |",
        ],
    )

  def test_progress(self):
    out = io.StringIO()
    results = {
        "tb-s0-seed0": make_result(0.25),
        "rloo-s4-seed1": make_result(0.0, diverged_step=7),
    }
    rich.console.Console(file=out, width=200).print(
        sweep.progress_table(make_runs(), results)
    )
    text = out.getvalue()
    self.assertRegex(text, r"objective +s=0 +s=4")
    self.assertRegex(text, r"tb +0\.250 \(1\) +– \(0\)")
    self.assertRegex(text, r"rloo +– \(0\) +– \(1 diverged\) \(1\)")


class FakeBench:
  """Stands in for `sweep.Bench`: the lag is the reward."""

  made: list[str] = []
  on_run = staticmethod(lambda: None)

  def __init__(self, config, workdir):
    del config, workdir

  def close(self):
    pass

  def run(self, run, *, should_stop):
    if should_stop():
      raise sweep.SweepInterrupted(run.name)
    type(self).made.append(run.name)
    values = {"kl": 1.0, "ref_perplexity": 2.0}
    self.on_run()
    return {
        "curve": [
            {"reward": 0.0, **values},
            {"reward": float(run.lag.staleness_steps), **values},
        ],
        "diverged_step": None,
        "wall_s": 1.0,
    }


class SweepTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.stop = threading.Event()
    self.enter_context(mock.patch.object(sweep, "Bench", FakeBench))
    self.fine_tune = self.enter_context(
        mock.patch.object(
            sft, "run", autospec=True, return_value={"interrupted": False}
        )
    )
    FakeBench.made.clear()
    for name in ("prepare_compiling", "stop_on_signals"):
      self.enter_context(
          mock.patch.object(processes, name, return_value=self.stop)
      )

  def run_sweep(self, config, *operands):
    """Returns the exit status, what was printed and the errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
      status = sweep.run(config, self.workdir, operands)
    # The lock is of the process; the next call is in the same one.
    (pathlib.Path(self.workdir) / ".lock").unlink(missing_ok=True)
    return status, out.getvalue(), errors.getvalue()

  def test_two_runs_with_stop_between_them(self):
    config = load(
        "sweep.objectives=tb: loss.name=tb", "sweep.staleness_steps=0,2"
    )
    names = [run.name for run in sweep.expand_runs(config)]
    with mock.patch.object(FakeBench, "on_run", self.stop.set):
      status, out, _ = self.run_sweep(config)
    self.assertEqual(status, processes.EXIT_INTERRUPTED)
    self.assertIn("1/2 runs", out)
    self.assertIn("the same command continues", out)
    folder = pathlib.Path(self.workdir)
    # What is there can be read already.
    self.assertIn("| tb | s=2 | – |", (folder / "sweep.md").read_text())

    self.stop.clear()
    status, out, _ = self.run_sweep(config)
    self.assertEqual(status, processes.EXIT_OK)
    self.assertEqual(FakeBench.made, names)
    self.assertIn("2/2 runs  tb-s2-seed0: reward 2.000, kl 1.00", out)
    table = (folder / "sweep.md").read_text()
    self.assertIn("| before training |  | 0.000 | 1.00 | 2.00 |  |", table)
    for lag in (0, 2):
      self.assertIn(f"| tb | s={lag} | {lag}.000 | 1.00 | 2.00 | 1 |", table)
    png = (folder / "sweep.png").read_bytes()
    self.assertEqual(png[:8], b"\x89PNG\r\n\x1a\n")
    self.assertLess(len(png), 200_000)

    # Other settings would not be the runs that are there.
    status, _, errors = self.run_sweep(
        load("sweep.objectives=tb: loss.name=tb loss.ratio_clip=0.2")
    )
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("config.loss.ratio_clip = 0.2, was 0.0", errors)

  def test_fine_tunes_only_for_runs_from_sft(self):
    self.run_sweep(load())
    self.fine_tune.assert_called_once()
    self.run_sweep(load("init=scratch"))
    self.fine_tune.assert_called_once()

  def test_skips_run_of_unfinished_model(self):
    self.fine_tune.return_value = {"interrupted": True}
    status, out, _ = self.run_sweep(load())
    self.assertEqual(status, processes.EXIT_INTERRUPTED)
    self.assertIn("the same command continues", out)
    self.assertEmpty(FakeBench.made)

  def test_refuses_before_anything_is_made(self):
    status, _, errors = self.run_sweep(load("sweep.objectives="))
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("error: config.sweep.objectives = ''", errors)
    status, _, errors = self.run_sweep(load(), "now")
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("takes no operands", errors)
    self.assertEmpty(list(pathlib.Path(self.workdir).iterdir()))

  def test_ignores_run_of_other_program(self):
    config = load("sweep.objectives=")
    for is_trained in (False, True):
      run, _ = run_directory.create(self.workdir, config)
      if is_trained:
        config = load("seed=7")
        run_directory.update(self.workdir, config)
        run_directory.next_epoch(run)
      status, _, errors = self.run_sweep(load())
      self.assertEqual(status, processes.EXIT_CONFIG)
      self.assertIn("contains a run of another program", errors)
      self.assertEqual(
          run_directory.load_config(self.workdir).to_dict(), config.to_dict()
      )

  def test_one_sweep_at_a_time(self):
    with mock.patch.object(
        run_directory, "lock", side_effect=ValueError("already runs")
    ):
      status, _, errors = self.run_sweep(load())
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("already runs", errors)

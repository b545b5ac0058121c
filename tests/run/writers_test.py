# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics, and profiles of steps."""

import importlib.util
import pathlib
import unittest
from unittest import mock

from absl.testing import absltest
import jax

from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.run import run_directory
from tba_jax.run import writers
from tba_jax.system import jsonl


class WritersTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def make(self, **changes):
    config = settings.get_config()
    config.log.update(changes)
    self.events = []
    return writers.Writers(
        config,
        run_directory.RunInfo(self.workdir, "0a1b", self.workdir, b""),
        2,
        lambda *event: self.events.append(event),
    )

  def make_profiler(self, **changes):
    config = settings.get_config()
    config.log.update(changes)
    self.events = []
    return writers.Profiler(
        config, self.workdir, lambda *event: self.events.append(event)
    )

  def test_metrics_jsonl_is_always_written(self):
    made = self.make()
    made.write(3, {"train/loss": 0.5})
    made.close()
    (record,) = jsonl.read_jsonl(self.workdir / "metrics.jsonl")
    self.assertEqual(
        (record["step"], record["epoch"], record["train/loss"]), (3, 2, 0.5)
    )
    self.assertLen(list(self.workdir.iterdir()), 1)

  def test_writes_csv(self):
    for step in (0, 1):  # A restart appends.
      made = self.make(writers="csv")
      made.write(
          step, {"train/loss": 0.5, "replay/histogram": {"0": 3}, "ok": True}
      )
      made.close()
    lines = (self.workdir / "metrics.csv").read_text().splitlines()
    self.assertEqual(lines[0], "step,time,name,value")
    rows = [line.split(",") for line in lines[1:]]
    self.assertEqual(
        [[r[0], *r[2:]] for r in rows],
        [["0", "train/loss", "0.5"], ["1", "train/loss", "0.5"]],
    )

  @unittest.skipUnless(
      importlib.util.find_spec("tensorboardX"), "tensorboardX is not installed"
  )
  def test_tensorboard_has_event_files(self):
    made = self.make(writers="csv,tensorboard")
    made.write(7, {"train/loss": 0.5, "replay/histogram": {"0": 3}})
    made.close()
    (path,) = (self.workdir / "tensorboard").glob("events.out.tfevents.*")
    self.assertIn(b"train/loss", path.read_bytes())

  def test_missing_package_is_refused(self):
    config = settings.get_config()
    for name in ("tensorboard", "trackio", "wandb"):
      config.log.writers = name
      with mock.patch.object(importlib.util, "find_spec", return_value=None):
        with self.assertRaisesRegex(
            ValueError, rf"config.log.writers = '{name}'.*pip install"
        ):
          validate.validate(config)

  def test_wrong_name_is_refused(self):
    config = settings.get_config()
    config.log.writers = "csv,excel"
    with self.assertRaisesRegex(ValueError, "config.log.writers = 'csv,excel'"):
      validate.validate(config)

  def test_profile_of_set_steps(self):
    made = self.make_profiler(profile_first_step=3, profile_num_steps=2)
    calls = []
    with (
        mock.patch.object(
            jax.profiler, "start_trace", lambda path: calls.append(path)
        ),
        mock.patch.object(
            jax.profiler, "stop_trace", lambda: calls.append("stop")
        ),
    ):
      for step in range(8):
        calls.append(step)
        made.after_step(step)
      made.close()
    folder = str(self.workdir / "profile")
    self.assertEqual(calls, [0, 1, 2, folder, 3, 4, "stop", 5, 6, 7])

  def test_profile_at_end_is_written(self):
    made = self.make_profiler(profile_first_step=1, profile_num_steps=100)
    made.after_step(0)
    jax.numpy.zeros(3).block_until_ready()
    made.close()
    self.assertNotEmpty(list((self.workdir / "profile").rglob("*.xplane.pb")))

  def test_profiles_on_request(self):
    self.enter_context(mock.patch.object(writers, "ASKED_STEPS", 2))
    made = self.make_profiler()
    calls = []
    with (
        mock.patch.object(
            jax.profiler, "start_trace", lambda path: calls.append("start")
        ),
        mock.patch.object(
            jax.profiler, "stop_trace", lambda: calls.append("stop")
        ),
    ):
      for step in range(12):
        calls.append(step)
        if step in (2, 3, 7):  # A request during a profile makes another.
          made.ask()
        made.after_step(step)
      made.close()
    self.assertEqual(
        [c for c in calls if isinstance(c, str)], 3 * ["start", "stop"]
    )
    self.assertEqual(calls[3:7], ["start", 3, 4, "stop"])
    kinds, messages = zip(*self.events)
    self.assertEqual(set(kinds), {"profile"})
    self.assertEqual(messages[0], "capturing steps 3 to 4")

  def test_does_not_profile_by_default(self):
    made = self.make_profiler()
    with mock.patch.object(jax.profiler, "start_trace") as start:
      for step in range(30):
        made.after_step(step)
    start.assert_not_called()
    made.close()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of decisions survives restarts, torn lines and full disks."""

import dataclasses
import errno
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax import types
from tba_jax.replay import decisions
from tba_jax.system import jsonl
from tests.transport.groups import fake_groups

_METRICS = {"loss": 0.1, "grad_norm": float("nan")}


class DecisionsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.events = []
    buffer = fake_groups.make_buffer()
    buffer.insert(fake_groups.make_group(0, [[2, 0], [3, 0]]), 0)
    draw = buffer.sample(1, 2, 0)
    self.draw = dataclasses.replace(
        draw,
        turn_rewards=np.zeros_like(draw.behavior_logprobs),
        routes=np.zeros((1, 2, 4, 1, 1), np.uint8),
        prompt_routes=np.zeros((1, 5, 1, 1), np.uint8),
        kept_ids=np.zeros((1, 2, 4, 3), np.int32),
    )

  def open(self, epoch, step):
    """Returns the log of a trainer that starts from a step."""
    log = decisions.DecisionLog(
        self.workdir, lambda *event: self.events.append(event)
    )
    self.addCleanup(log.close)
    log.start(
        decisions.Start(
            epoch=epoch,
            step=step,
            applied=10 * step,
            config={"seed": epoch},
            machine={"cores": 2},
        )
    )
    return log

  def write(self, log, *steps, **metrics):
    for step in steps:
      decision = decisions.Decision(10 * step, step % 2 > 0, 0.5)
      log.step(step, decision, self.draw, {**_METRICS, **metrics})

  def test_step_is_read_as_it_was_written(self):
    self.write(self.open(1, 0), 0, 1)
    result = decisions.read(self.workdir).steps[1]
    self.assertEqual(result.decision, decisions.Decision(10, True, 0.5))
    self.assertEqual(result.draw, decisions.sums_of(self.draw))
    self.assertEqual(result.start.config, {"seed": 1})
    self.assertEqual(list(result.metrics), ["loss", "grad_norm"])
    # All bits, whatever JSON can say.
    self.assertEqual(result.metrics["loss"], np.float32(0.1))
    self.assertTrue(np.isnan(result.metrics["grad_norm"]))

  def test_each_field_of_draw_has_sum(self):
    before = decisions.sums_of(self.draw)
    self.assertContainsSubset(types.columns_of(types.BufferColumns), before)
    for name in before:
      changed = getattr(self.draw, name).copy()
      changed.view(np.uint8).flat[0] ^= 1
      object.__setattr__(self.draw, name, changed)
      now = decisions.sums_of(self.draw)
      self.assertEqual([n for n in now if now[n] != before[n]], [name])
      before = now

  def test_newer_start_replaces_steps_from_its_own_on(self):
    self.write(self.open(1, 0), 0, 1, 2, 3)
    self.write(self.open(2, 2), 2)
    result = decisions.read(self.workdir)
    epochs = {step: x.start.epoch for step, x in result.steps.items()}
    self.assertEqual(epochs, {0: 1, 1: 1, 2: 2})

  def test_names_of_metrics_may_change_on_way(self):
    log = self.open(1, 0)
    self.write(log, 0)
    self.write(log, 1, tau=3.0)
    steps = decisions.read(self.workdir).steps
    self.assertNotIn("tau", steps[0].metrics)
    self.assertEqual(steps[1].metrics["tau"], 3)

  def test_torn_line_is_left_out(self):
    self.write(self.open(1, 0), 0, 1)
    path = f"{self.workdir}/{decisions.FILE_NAME}"
    with open(path, "r+b") as file:
      file.truncate(file.seek(0, 2) - 9)
    self.write(self.open(2, 1), 1)
    result = decisions.read(self.workdir)
    self.assertEqual(
        {0: 1, 1: 2}, {s: x.start.epoch for s, x in result.steps.items()}
    )

  def test_full_disk_is_reported_once_and_ends_nothing(self):
    log = self.open(1, 0)
    error = OSError(errno.ENOSPC, "no room")
    with mock.patch.object(jsonl.LineWriter, "write", side_effect=error):
      self.write(log, 0, 1)
    self.assertLen(self.events, 1)
    self.assertIn("cannot be rerun", self.events[0][1])

  def test_run_without_record_is_refused(self):
    with self.assertRaisesRegex(ValueError, "there is no record"):
      decisions.read(self.workdir)

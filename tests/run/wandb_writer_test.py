# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The writer for Weights & Biases: it may fail, the run may not.

Its own package is faked here; tests/multi_process has the real one, offline.
"""

import importlib
import pathlib
import threading
import time
import types
from unittest import mock

from absl.testing import absltest

from tba_jax.config import settings
from tba_jax.run import writers


class _Wandb:
  """What the writer uses of the package."""

  def __init__(self):
    self.calls = []
    self.go_on = threading.Event()
    self.go_on.set()
    self.Settings = types.SimpleNamespace  # noqa: N815

  def init(self, **settings):
    self.calls.append(("init", settings["mode"], settings["project"]))
    self.go_on.wait(20.0)
    return self

  def define_metric(self, name, step_metric):
    self.calls.append(("axis", name, step_metric))

  def log(self, record):
    if "broken" in record:
      raise OSError("disk full")
    self.calls.append(("log", record))

  def finish(self):
    self.calls.append(("finish",))


class WandbWriterTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.wandb = _Wandb()
    self.events = []
    patch = mock.patch.object(
        importlib, "import_module", return_value=self.wandb
    )
    patch.start()
    self.addCleanup(patch.stop)

  def make(self):
    config = settings.get_config()
    config.log.wandb_project = "p"
    return writers.WandbWriter(
        config,
        pathlib.Path("runs/a"),
        lambda *event: self.events.append(event),
    )

  def test_numbers_are_logged_in_order(self):
    writer = self.make()
    writer.write(0, {"train/loss": 0.5})
    writer.write(1, {"train/loss": 0.25})
    writer.close()
    self.assertEqual(
        self.wandb.calls,
        [
            ("init", "offline", "p"),
            ("axis", "*", "step"),
            ("log", {"step": 0, "train/loss": 0.5}),
            ("log", {"step": 1, "train/loss": 0.25}),
            ("finish",),
        ],
    )
    self.assertEqual(self.events, [])

  def test_failure_is_one_event(self):
    writer = self.make()
    writer.write(0, {"broken": 1.0})
    writer.thread.join(20.0)
    writer.write(1, {"train/loss": 0.25})
    writer.close()
    ((kind, message),) = self.events
    self.assertEqual(kind, "wandb")
    self.assertIn("disk full", message)
    self.assertNotIn(("finish",), self.wandb.calls)

  def test_hanging_service_does_not_block(self):
    self.wandb.go_on.clear()
    with (
        mock.patch.object(writers, "MAX_WAITING", 2),
        mock.patch.object(writers, "CLOSE_S", 0.01),
    ):
      writer = self.make()
      while not self.wandb.calls:
        time.sleep(0.001)
      for step in range(5):
        writer.write(step, {"train/loss": 0.5})
      writer.waiting.get_nowait()  # Room for the word that it is the end.
      writer.close()
    self.assertEqual(
        self.events, [("wandb", "3 records dropped: wandb was too slow")]
    )
    self.wandb.go_on.set()
    writer.thread.join(20.0)

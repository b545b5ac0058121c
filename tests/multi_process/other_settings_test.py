# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A searcher with other settings than its trainer ends, and the run goes on."""

import pathlib
import tempfile

from absl.testing import absltest

from tba_jax.system import processes
from tests.support import harness


class OtherSettingsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_other_")
    self.addCleanup(folder.cleanup)
    self.roles = harness.Roles(pathlib.Path(folder.name))
    self.addCleanup(self.roles.close)
    self.locator = f"127.0.0.1:{processes.free_port()}"

  def text_of(self, name):
    return (self.roles.folder / f"{name}.log").read_text()

  def refused(self, index, **changes):
    """Returns the lines of the error that a searcher ends with."""
    name = f"searcher-{index}"
    changes = {key.replace("__", "."): v for key, v in changes.items()}
    self.roles.start("searcher", self.locator, index=index, changes=changes)
    self.assertEqual(self.roles.wait(name, 120), 2, self.roles.text())
    error = self.text_of(name).rpartition("error: ")[2]
    return error.splitlines()

  def test_refuses_searcher_with_other_settings_and_continues(self):
    roles = self.roles
    roles.start("store", self.locator, address="127.0.0.1:0")
    roles.start("trainer", self.locator)
    # What may differ does.
    free = {
        "train.num_steps": 9,
        "sampling.num_slots": 16,
        "log.every_steps": 2,
    }
    roles.start("searcher", self.locator, index=0, changes=free)
    roles.wait_for(lambda: roles.step() >= 2, "step 2")
    lines = self.refused(1, loss__beta=0.2, sampling__temperature=0.5)
    self.assertLen(lines, 2, roles.text())
    self.assertRegex(
        lines[0],
        r"^config\.loss\.beta = 0\.2 at this searcher \(.*:.*/searcher-1\),"
        r" [\d.]+ at the trainer \(.*:.*/trainer-0\): must be the same",
    )
    self.assertRegex(
        lines[1], r"^config\.sampling\.temperature = 0\.5 at .*, 1\.0 at "
    )
    # It was granted nothing, and nothing of it is waited for.
    self.assertEmpty(roles.events("searcher_gone"))
    # A trainer that goes on with what may change takes its searchers along.
    before = roles.step()
    roles.interrupt("trainer-0")
    self.assertEqual(roles.wait("searcher-0", 60), 75, roles.text())
    roles.resume("searcher-0")
    roles.resume("trainer-0", **{"train.num_steps": before + 5})
    self.assertEqual(roles.wait("trainer-0", 120), 0, roles.text())
    self.assertEqual(roles.wait("searcher-0", 60), 0, roles.text())
    harness.check_ledger(roles.read("ledger.json"))
    # Each tells a user who has started it by hand how far it is.
    for name, line in (
        ("store-0", "started: store generation 1 at "),
        ("trainer-0", r"warm-up · (?s:.*)finish · step \d+/\d+ · reward "),
        ("searcher-0", r"\d+ completions, [\d.]+ tokens/s, of version \d+"),
    ):
      self.assertRegex(self.text_of(name), line)

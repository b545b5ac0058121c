# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each attack acts, and the announcer answers all the same."""

import pathlib
import subprocess
import sys

from absl.testing import parameterized
import pytest

from tba_jax.transport.kv import locator
from tests.chaos import attacks
from tests.support import harness

_SECRET = b"x" * 32


class AttacksTest(parameterized.TestCase):

  @parameterized.parameters(*attacks.ATTACKS)
  @pytest.mark.slow
  def test_acts(self, attack):
    path = pathlib.Path(self.create_tempdir().full_path) / "locator.json"
    result = locator.Locator(run="r", generation=1, address="h:1", pid=1)
    locator.write_locator(path, result)
    announcer = locator.Announcer("127.0.0.1:0", _SECRET, path)
    self.addCleanup(announcer.close)
    address = f"127.0.0.1:{announcer.port}"
    stranger = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.attacks", attack, address,
         "announcer"],
        cwd=harness.ROOT,
        env=harness.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    self.addCleanup(stranger.stdout.close)
    self.addCleanup(stranger.wait)
    self.addCleanup(stranger.kill)
    for line in stranger.stdout:
      if int(line) > 20:
        break
    self.assertIsNone(stranger.poll())
    self.assertEqual(locator.ask_announcer(address, _SECRET), result)

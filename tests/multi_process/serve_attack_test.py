# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong requests, requests that come twice, and kills change no result."""

import pathlib

from absl.testing import absltest
import pytest

from tests.chaos import serving_attack


class ServeAttackTest(absltest.TestCase):

  @pytest.mark.timeout(900)
  def test_results_match_server_in_peace(self):
    """A slice of `python -m tests.chaos.serving_attack 10000 SEED FOLDER`."""
    said = serving_attack.attack(
        pathlib.Path(self.create_tempdir().full_path),
        requests=100,
        seed=3,
        num_clients=2,
        pause=(20, 40),
    )
    self.assertRegex(said, "[1-9] kills")

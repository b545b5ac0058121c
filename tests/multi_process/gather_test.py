# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params of two processes come whole to each, split over its two devices."""

import json

from absl.testing import absltest

from tba_jax.system import processes
from tests.multi_process import gather_child
from tests.support import harness


class GatherTest(absltest.TestCase):

  def test_gives_each_process_all_and_each_device_its_part(self):
    port = processes.free_port()
    result = harness.run_together(
        [gather_child.__file__, process, port] for process in range(2)
    )
    for out, err, _ in result:
      self.assertEqual(json.loads(out.splitlines()[-1]), [], err)

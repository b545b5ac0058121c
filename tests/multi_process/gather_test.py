# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params of two processes come whole to each, split over its two devices."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

from tba_jax.system import processes
from tests.multi_process import gather_child

_CHILD = pathlib.Path(gather_child.__file__)
_ROOT = _CHILD.parents[2]
_TIMEOUT_S = 120


class GatherTest(absltest.TestCase):

  def test_each_process_has_all_and_each_device_its_part(self):
    port = processes.free_port()
    children = [
        subprocess.Popen(
            [sys.executable, str(_CHILD), str(process), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        for process in range(2)
    ]
    try:
      for child in children:
        out = child.communicate(timeout=_TIMEOUT_S)[0]
        self.assertEqual(json.loads(out.splitlines()[-1]), [])
    finally:
      for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


if __name__ == "__main__":
  absltest.main()

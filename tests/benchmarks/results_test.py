# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What results say of the machine that they were measured on."""

import os
import pathlib
import platform
from unittest import mock

from absl.testing import absltest

from benchmarks import results


class MachineTest(absltest.TestCase):

  def told(self, text: str | None) -> dict:
    path = pathlib.Path(self.create_tempdir().full_path) / "cpuinfo"
    if text is not None:
      path.write_text(text)
    with mock.patch.object(results.pathlib, "Path", return_value=path):
      return results.machine()

  def test_has_the_cores_of_this_process_and_the_processor_s_name(self):
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: fpu\n" * 2
    self.assertEqual(
        self.told(text),
        {
            "cores": len(os.sched_getaffinity(0)),
            "processor": "Some CPU @ 2 GHz",
        },
    )

  def test_processor_without_a_name_has_its_family(self):
    for text in (None, "", "Features\t: asimd\n"):
      self.assertEqual(self.told(text)["processor"], platform.machine())


if __name__ == "__main__":
  absltest.main()

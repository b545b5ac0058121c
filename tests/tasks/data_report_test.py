# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What was read is written, told and shown; other tasks say nothing."""

import contextlib
import io
import pathlib

from absl.testing import absltest
import ml_collections

from tba_jax.system import jsonl
from tba_jax.tasks import build
from tba_jax.tasks import rows_task


class DataReportTest(absltest.TestCase):

  def test_of_rows_and_of_others(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    events = []
    fields = dict(name="gsm8k", data="made_up", made_up_prompts=100)
    task = build.make_task(ml_collections.ConfigDict(fields))
    other = build.make_task(ml_collections.ConfigDict(dict(name="arithmetic")))
    lines = ["train: 80 prompts of 80 rows", "held_out: 20 prompts of 20 rows"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      for one in (task, other):
        rows_task.write_data_report(
            one, folder, lambda *event: events.append(event)
        )
        rows_task.show_data(one)
    self.assertEqual(events, [("data", line) for line in lines])
    self.assertEqual(out.getvalue(), "".join(f"data: {s}\n" for s in lines))
    saved = jsonl.read_json(folder / rows_task.FILE)
    self.assertEqual(saved["used"], {"train": 80, "held_out": 20})


if __name__ == "__main__":
  absltest.main()

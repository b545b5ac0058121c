# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for report.trace."""

import json
import os
import tempfile

from absl.testing import absltest

from tba_jax.monitor.report import build as report
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline
from tests.monitor.report import fake_run


class TraceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name

  def _trace(self):
    report.write_report(self.workdir)
    with open(os.path.join(self.workdir, "trace.json")) as f:
      return json.load(f)["traceEvents"]

  def test_every_span_stands_in_its_lane(self):
    fake_run.make_run(self.workdir, num_steps=20, num_samples=2)
    events = self._trace()
    run = load.read_run(self.workdir)
    spans = [e for e in events if e["ph"] == "X"]
    self.assertLen(spans, sum(len(x.t0) for x in run.lanes.values()))
    began = min(lane.t0[0] for lane in run.lanes.values())
    self.assertEqual(
        min(e["ts"] for e in spans),
        round(1e6 * (began - timeline.origin(run))),
    )
    names = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e["name"] == "process_name"
    }
    self.assertEqual(
        set(names.values()), {"trainer-0", "searcher-0", "searcher-1", "events"}
    )
    # Each (pid, tid) is one lane, in order of time and without overlaps.
    threads = {(e["pid"], e["tid"]) for e in spans}
    self.assertLen(threads, len(run.lanes))
    lane = run.lanes["trainer", 0, ""]
    pid = next(pid for pid, name in names.items() if name == "trainer-0")
    mine = [e for e in spans if e["pid"] == pid and e["tid"] == 1]
    self.assertAlmostEqual(
        sum(e["dur"] for e in mine) / 1e6,
        sum(t1 - t0 for t0, t1 in zip(lane.t0, lane.t1)),
        delta=1e-3,
    )

  def test_events_are_instants_with_their_message(self):
    fake_run.make_run(self.workdir, num_steps=5, num_samples=0)
    instants = [e for e in self._trace() if e["ph"] == "i"]
    self.assertEqual(instants[1]["name"], "restart")
    self.assertIn("exit -9", instants[1]["args"]["message"])
    self.assertEqual(instants[2]["ts"] - instants[1]["ts"], 59_000_000)

  def test_an_empty_run_has_an_empty_trace(self):
    run = load.read_run(self.workdir)
    self.assertEqual([e["ph"] for e in timeline.trace_events(run, 0.0)], ["M"])
    self.assertLen(self._trace(), 1)


if __name__ == "__main__":
  absltest.main()

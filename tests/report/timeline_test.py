# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Spans as a timeline, time shares and a trace."""

import json
import os
import tempfile

from absl.testing import absltest
import numpy as np

from tba_jax.report import page
from tba_jax.report import run_reader
from tba_jax.report import timeline
from tests.report import fake_run


class TimelineTest(absltest.TestCase):

  def _run(self, **spans):
    """Returns a run with spans (kind, t0, t1[, lane]) by role."""
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    os.makedirs(os.path.join(folder.name, "spans"))
    for name, rows in spans.items():
      role, _, index = name.partition("_")
      path = os.path.join(folder.name, "spans", f"{role}-{index or 0}.jsonl")
      with open(path, "w") as f:
        for kind, t0, t1, *lane in rows:
          record = {"role": role, "index": int(index or 0), "kind": kind}
          record |= {"t0": t0, "t1": t1, "lane": lane[0] if lane else ""}
          f.write(json.dumps(record) + "\n")
    return run_reader.read_run(folder.name)

  def test_is_empty_without_spans(self):
    run = self._run()
    self.assertEqual(timeline.timeline(run), {})
    self.assertEqual(timeline.where_time_went(run), [])

  def test_spans_are_ticks_from_first_activity(self):
    run = self._run(
        searcher_1=[("decode", 11.0, 11.5)], trainer=[("step", 10.0, 12.25)]
    )
    out = timeline.timeline(run)
    self.assertEqual([x["role"] for x in out["lanes"]], ["trainer", "searcher"])
    self.assertEqual(out["lanes"][0]["spans"][0][1:], [0, 2250])
    self.assertEqual(out["lanes"][1]["spans"][0][1:], [1000, 500])
    self.assertEqual(out["stop"], 2250)
    self.assertFalse(out["thinned"])

  def test_long_run_is_binned(self):
    count = timeline.MAX_SPANS + 10_000
    rows = [("step", 2.0 * i, 2.0 * i + 1.5) for i in range(count)]
    out = timeline.timeline(self._run(trainer=rows))
    (lane,) = out["lanes"]
    self.assertLessEqual(len(lane["spans"]), timeline.MAX_SPANS)
    self.assertEqual(lane["total"], count)
    self.assertEqual(lane["spans"][-1][1], round(2000 * (count - 1)))
    self.assertLess(lane["detail_until"], lane["detail_from"])
    kinds, (shares,) = lane["bins"]
    self.assertLen(kinds, 1)
    self.assertLen(shares, timeline.NUM_BINS)
    self.assertAlmostEqual(np.mean(shares), 75.0, delta=1.0)

  def test_spreads_span_over_its_bins(self):
    rows = [("step", 0.0, 40.0), ("wait", 40.0, 50.0), ("step", 50.0, 100.0)]
    lane = self._run(trainer=rows).lanes["trainer", 0, ""]
    _, (step, wait) = timeline.time_bins(lane, 0.0, 100.0, 2)
    edge = round(0.4 * timeline.NUM_BINS)
    self.assertEqual(set(step[:edge]), {100})
    self.assertEqual(set(step[edge : edge + timeline.NUM_BINS // 10]), {0})
    self.assertAlmostEqual(np.mean(wait), 10.0, delta=0.1)

  def test_sums_shares_of_time(self):
    run = self._run(
        trainer=[("step", 0.0, 6.0), ("wait_fresh", 6.0, 8.0), ("step", 9, 10)]
    )
    (row,) = timeline.where_time_went(run)
    self.assertEqual(row["seconds"], {"step": 7.0, "wait_fresh": 2.0})
    self.assertAlmostEqual(row["unmeasured_s"], 1.0)
    self.assertAlmostEqual(row["busy_share"], 0.7)


class TraceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name

  def _trace(self):
    page.write_report(self.workdir)
    with open(os.path.join(self.workdir, "trace.json")) as f:
      return json.load(f)["traceEvents"]

  def test_spans_are_in_their_lanes(self):
    fake_run.make_run(self.workdir, num_steps=20, num_samples=2)
    events = self._trace()
    run = run_reader.read_run(self.workdir)
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
    # Each (pid, tid) is a lane.
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

  def test_trace_has_events(self):
    fake_run.make_run(self.workdir, num_steps=5, num_samples=0)
    instants = [e for e in self._trace() if e["ph"] == "i"]
    self.assertEqual(instants[1]["name"], "restart")
    self.assertIn("exit -9", instants[1]["args"]["message"])
    self.assertEqual(instants[2]["ts"] - instants[1]["ts"], 59_000_000)

  def test_trace_of_empty_run_has_only_its_name(self):
    run = run_reader.read_run(self.workdir)
    self.assertEqual([e["ph"] for e in timeline.trace_events(run, 0.0)], ["M"])
    self.assertLen(self._trace(), 1)

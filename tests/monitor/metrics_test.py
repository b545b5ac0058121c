# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of metrics, events and spans, also after a restart."""

import errno
import json
import pathlib
import threading
import time
from unittest import mock

from absl.testing import absltest

from tba_jax.monitor import metrics
from tba_jax.system import jsonl


class EventLogTest(absltest.TestCase):

  def test_event(self):
    path = self.create_tempdir().full_path + "/events.jsonl"
    log = metrics.EventLog(path)
    log.write("restart", "exit -9", role="searcher", index=1, pid=7)
    log.close()
    (event,) = jsonl.read_jsonl(path)
    self.assertGreater(event.pop("time"), 0)
    expected = dict(kind="restart", role="searcher", index=1, pid=7)
    self.assertEqual(event, {**expected, "message": "exit -9"})

  def test_event_on_a_full_disk_is_logged(self):
    log = metrics.EventLog("/dev/full")
    with self.assertLogs(level="ERROR") as told:
      log.write("guard", "entropy is low")
    self.assertIn("entropy is low", told.output[0])
    log.close()


class LastPerStepTest(absltest.TestCase):

  def test_steps_are_sorted_and_merged(self):
    out = metrics.last_per_step(
        [{"step": 2, "a": 1}, {"step": 1, "a": 3}, {"step": 2, "a": 2, "b": 5}]
    )
    self.assertEqual(out, [{"step": 1, "a": 3}, {"step": 2, "a": 2, "b": 5}])

  def test_newer_epoch_replaces_redone_steps(self):
    old = [{"step": s, "epoch": 1, "old": 1} for s in range(6)]
    new = [{"step": s, "epoch": 2} for s in (3, 4)]
    out = metrics.last_per_step(old + new)
    self.assertEqual([r["step"] for r in out], [0, 1, 2, 3, 4])
    self.assertEqual([r.get("old") for r in out], [1, 1, 1, None, None])

  def test_older_step_of_the_same_epoch_drops_nothing(self):
    out = metrics.last_per_step(
        [{"step": s, "epoch": 1} for s in (0, 1, 2, 3)]
        + [{"step": 1, "epoch": 1, "eval/pass_at_1": 0.5}]
    )
    self.assertEqual([r["step"] for r in out], [0, 1, 2, 3])
    self.assertEqual(out[1]["eval/pass_at_1"], 0.5)

  def test_late_evaluation_is_merged(self):
    head = dict(epoch=1, time=5.0)
    late = {"step": 1, "epoch": 2, "time": 9.0, "eval/pass_at_1": 0.5}
    out = metrics.last_per_step(
        [{"step": s, "a": s, **head} for s in (0, 1, 2)] + [late]
    )
    self.assertEqual([r["step"] for r in out], [0, 1, 2])
    self.assertEqual(out[1], {"step": 1, "a": 1, "eval/pass_at_1": 0.5, **head})
    # Before the first step it is alone.
    self.assertEqual(metrics.last_per_step([late]), [late])

  def test_records_without_a_step_are_left_out(self):
    self.assertEqual(metrics.last_per_step([{"a": 1}, {"step": "x"}]), [])


class SpanTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path, "trainer-0.jsonl")

  def make(self, **kwargs):
    writer = metrics.SpanWriter(self.path, "trainer", **kwargs)
    self.addCleanup(writer.close)
    return writer

  def spans(self):
    return [json.loads(line) for line in self.path.read_text().splitlines()]

  def test_clock_of_the_main_lane(self):
    clock = metrics.BusyClock()
    writer = self.make(clock=clock)
    writer.add("step", 0.0, 2.0, step=4)
    writer.add("drain", 0.0, 3.0, lane="drain")
    writer.close()
    self.assertEqual(clock.seconds(), {"step": 2.0})
    head = {"role": "trainer", "index": 0}
    self.assertEqual(
        self.spans(),
        [
            {**head, "kind": "step", "t0": 0.0, "t1": 2.0, "step": 4},
            {**head, "kind": "drain", "t0": 0.0, "t1": 3.0, "lane": "drain"},
        ],
    )

  def test_span_of_a_failed_body(self):
    writer = self.make()
    with self.assertRaises(KeyError):
      with writer.span("step"):
        raise KeyError("x")
    writer.close()
    (span,) = self.spans()
    self.assertGreaterEqual(span["t1"], span["t0"])

  def test_pending_spans_are_written_without_close(self):
    with mock.patch.object(metrics, "_FLUSH_EVERY_S", 0.01):
      self.make().add("step", 0.0, 1.0)
      deadline = time.monotonic() + 20.0
      while not self.spans():
        self.assertLess(time.monotonic(), deadline)
        time.sleep(0.01)

  def test_spans_of_several_threads(self):
    writer = self.make()

    def work():
      for _ in range(200):
        with writer.span("step"):
          pass
        writer.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    writer.close()
    self.assertLen(self.spans(), 800)

  def test_full_disk_is_logged_once(self):
    self.path = "/dev/full"
    writer = self.make()
    with self.assertLogs(level="ERROR") as told:
      for _ in range(3):
        writer.add("step", 0.0, 1.0)
        writer.flush()
    self.assertLen(told.output, 1)
    self.assertIn(f"Errno {errno.ENOSPC}", told.output[0])


class BusyTest(absltest.TestCase):

  def test_take_resets(self):
    clock = metrics.BusyClock()
    clock.add("step", 2.0)
    seconds, elapsed = clock.take()
    self.assertEqual(seconds, {"step": 2.0})
    self.assertGreater(elapsed, 0.0)
    self.assertEqual(clock.take()[0], {})

  def test_waiting_is_not_busy(self):
    share = metrics.busy_share({"step": 3.0, "wait_fresh": 5.0}, 10.0)
    self.assertAlmostEqual(share, 0.3)
    self.assertEqual(metrics.busy_share({}, 0.0), 0.0)

  def test_overlap_of_ideal(self):
    self.assertAlmostEqual(metrics.overlap_of_ideal(2.0, 6.0, 6.0), 1.0)
    self.assertAlmostEqual(metrics.overlap_of_ideal(2.0, 6.0, 8.0), 0.75)
    self.assertAlmostEqual(metrics.overlap_of_ideal(6.0, 2.0, 8.0), 0.75)
    self.assertIsNone(metrics.overlap_of_ideal(2.0, 6.0, 0.0))


class MeanTest(absltest.TestCase):

  def test_means_are_weighted_and_reset(self):
    means = metrics.Means()
    means.add({"a": 1.0}, weight=3.0)
    means.add({"a": 5.0, "b": 2.0})
    self.assertEqual(means.take(), {"a": 2.0, "b": 2.0})
    self.assertEqual(means.take(), {})


if __name__ == "__main__":
  absltest.main()

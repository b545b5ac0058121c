# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for metrics and jsonl."""

import json
import os
import subprocess
import sys
import tempfile
import threading

from absl.testing import absltest
import numpy as np

from tba_jax.monitor import metrics
from tba_jax.system import jsonl


def _tempdir(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return folder.name


class JsonLineTest(absltest.TestCase):

  def test_numbers_of_any_library_become_json(self):
    line = jsonl.json_line(
        {"a": np.float32(0.5), "b": np.int64(3), "h": {2: np.ones(2)}}
    )
    self.assertEqual(
        json.loads(line), {"a": 0.5, "b": 3, "h": {"2": [1.0, 1.0]}}
    )

  def test_non_finite_becomes_null_and_is_named(self):
    line = jsonl.json_line(
        {"a": float("nan"), "b": {"c": np.float32("inf")}, "d": 1.0}
    )
    self.assertEqual(
        json.loads(line),
        {"a": None, "b": {"c": None}, "d": 1.0, "non_finite": ["a", "b.c"]},
    )

  def test_a_line_is_one_line(self):
    self.assertEqual(jsonl.json_line({"a": "x\ny\u2028"}).count("\n"), 1)


class ReadTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = os.path.join(_tempdir(self), "sub/m.jsonl")

  def test_missing_file_is_empty(self):
    records = metrics.read_jsonl(self.path)
    self.assertEqual((list(records), records.skipped), ([], 0))

  def test_torn_and_corrupt_lines_are_skipped_and_counted(self):
    os.makedirs(os.path.dirname(self.path))
    with open(self.path, "wb") as f:
      f.write(b'{"step": 0}\n\n\xff\xfe garbage\n[1, 2]\n{"step": 1}\n{"st')
    records = metrics.read_jsonl(self.path)
    self.assertEqual(list(records), [{"step": 0}, {"step": 1}])
    self.assertEqual(records.skipped, 3)

  def test_a_writer_after_a_torn_line_loses_nothing(self):
    first = metrics.MetricsWriter(self.path)
    first.write(0, {"train/loss": 1.0})
    first.close()
    with open(self.path, "ab") as f:
      f.write(b'{"step": 1, "train/lo')
    second = metrics.MetricsWriter(self.path)
    second.write(2, {"train/loss": 0.5})
    second.close()
    records = metrics.read_jsonl(self.path)
    self.assertEqual([r["step"] for r in records], [0, 2])
    self.assertEqual(records.skipped, 1)

  def test_a_line_is_there_before_the_file_is_closed(self):
    writer = metrics.MetricsWriter(self.path)
    self.addCleanup(writer.close)
    writer.write(3, {"train/loss": np.float32(2.0)})
    (record,) = metrics.read_jsonl(self.path)
    self.assertEqual((record["step"], record["train/loss"]), (3, 2.0))

  def test_events_keep_their_fields(self):
    log = metrics.EventLog(self.path)
    log.write("restart", "exit -9", role="searcher", index=1, pid=7)
    log.close()
    (event,) = metrics.read_jsonl(self.path)
    event.pop("time")
    self.assertEqual(
        event,
        {
            "kind": "restart",
            "role": "searcher",
            "index": 1,
            "message": "exit -9",
            "pid": 7,
        },
    )


class LastPerStepTest(absltest.TestCase):

  def test_later_fields_win_and_steps_are_sorted(self):
    out = metrics.last_per_step(
        [{"step": 2, "a": 1}, {"step": 1, "a": 3}, {"step": 2, "a": 2, "b": 5}]
    )
    self.assertEqual(out, [{"step": 1, "a": 3}, {"step": 2, "a": 2, "b": 5}])

  def test_a_newer_epoch_drops_what_it_redoes(self):
    old = [{"step": s, "epoch": 1, "old": 1} for s in range(6)]
    new = [{"step": s, "epoch": 2} for s in (3, 4)]
    out = metrics.last_per_step(old + new)
    self.assertEqual([r["step"] for r in out], [0, 1, 2, 3, 4])
    self.assertEqual([r.get("old") for r in out], [1, 1, 1, None, None])

  def test_an_older_step_in_the_same_epoch_drops_nothing(self):
    out = metrics.last_per_step(
        [{"step": s, "epoch": 1} for s in (0, 1, 2, 3)]
        + [{"step": 1, "epoch": 1, "eval/pass_at_1": 0.5}]
    )
    self.assertEqual([r["step"] for r in out], [0, 1, 2, 3])
    self.assertEqual(out[1]["eval/pass_at_1"], 0.5)

  def test_a_late_evaluation_adds_to_its_step_and_redoes_nothing(self):
    head = dict(epoch=1, time=5.0)
    late = {"step": 1, "epoch": 2, "time": 9.0, "eval/pass_at_1": 0.5}
    out = metrics.last_per_step(
        [{"step": s, "a": s, **head} for s in (0, 1, 2)] + [late]
    )
    self.assertEqual([r["step"] for r in out], [0, 1, 2])
    self.assertEqual(out[1], {"step": 1, "a": 1, "eval/pass_at_1": 0.5, **head})
    # Of a step that was never told, as before the first one, it stands alone.
    self.assertEqual(metrics.last_per_step([late]), [late])

  def test_records_without_a_step_are_left_out(self):
    self.assertEqual(metrics.last_per_step([{"a": 1}, {"step": "x"}]), [])


class SpanTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = _tempdir(self)

  def _writer(self, role, index=0, **kwargs):
    path = os.path.join(self.workdir, "spans", f"{role}-{index}.jsonl")
    return metrics.SpanWriter(path, role, index, **kwargs)

  def test_spans_of_all_roles_come_back_sorted(self):
    trainer, searcher = self._writer("trainer"), self._writer("searcher", 2)
    trainer.add("step", 10.0, 11.5, step=4)
    searcher.add("decode", 9.0, 10.0, lane="pull")
    trainer.close()
    searcher.close()
    spans = metrics.read_spans(self.workdir)
    self.assertEqual(
        list(spans),
        [
            {
                "role": "searcher",
                "index": 2,
                "kind": "decode",
                "t0": 9.0,
                "t1": 10.0,
                "lane": "pull",
            },
            {
                "role": "trainer",
                "index": 0,
                "kind": "step",
                "t0": 10.0,
                "t1": 11.5,
                "step": 4,
            },
        ],
    )

  def test_a_span_whose_body_raises_is_recorded(self):
    writer = self._writer("trainer")
    with self.assertRaises(KeyError):
      with writer.span("step"):
        raise KeyError("x")
    writer.close()
    (span,) = metrics.read_spans(self.workdir)
    self.assertGreaterEqual(span["t1"], span["t0"])

  def test_pending_spans_are_written_without_close(self):
    writer = self._writer("trainer")
    self.addCleanup(writer.close)
    writer.add("step", 0.0, 1.0)
    written = threading.Event()
    for _ in range(200):
      if metrics.read_spans(self.workdir):
        written.set()
        break
      written.wait(0.05)
    self.assertTrue(written.is_set())

  def test_no_span_of_several_threads_is_lost(self):
    writer = self._writer("trainer")

    def work():
      for _ in range(500):
        with writer.span("step"):
          pass
        writer.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    writer.close()
    spans = metrics.read_spans(self.workdir)
    self.assertEqual((len(spans), spans.skipped), (2000, 0))

  def test_a_failed_write_is_raised_at_the_next_span(self):
    writer = self._writer("trainer")
    writer._error = OSError("disk full")
    with self.assertRaisesRegex(OSError, "disk full"):
      writer.add("step", 0.0, 1.0)
    writer._error = None
    writer.close()

  def test_the_clock_counts_the_main_lane_only(self):
    clock = metrics.BusyClock()
    writer = self._writer("trainer", clock=clock)
    writer.add("step", 0.0, 2.0)
    writer.add("step", 2.0, 3.0)
    writer.add("drain", 0.0, 3.0, lane="drain")
    writer.close()
    self.assertEqual(clock.seconds(), {"step": 3.0})

  def test_spans_without_times_are_skipped(self):
    os.makedirs(os.path.join(self.workdir, "spans"))
    with open(os.path.join(self.workdir, "spans/a-0.jsonl"), "w") as f:
      f.write('{"kind": "step"}\n{"kind": "x", "t0": 1, "t1": 2}\n')
    spans = metrics.read_spans(self.workdir)
    self.assertEqual((len(spans), spans.skipped), (1, 1))


class BusyTest(absltest.TestCase):

  def test_take_starts_a_new_stretch(self):
    clock = metrics.BusyClock()
    with clock.measure("step"):
      pass
    clock.add("step", 2.0)
    seconds, elapsed = clock.take()
    self.assertGreaterEqual(seconds["step"], 2.0)
    self.assertGreater(elapsed, 0.0)
    self.assertEqual(clock.take()[0], {})

  def test_waiting_is_not_busy(self):
    share = metrics.busy_share({"step": 3.0, "wait_fresh": 5.0}, 10.0)
    self.assertAlmostEqual(share, 0.3)
    self.assertEqual(metrics.busy_share({}, 0.0), 0.0)

  def test_overlap_is_one_where_the_slower_side_never_waits(self):
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


class StatusTest(absltest.TestCase):

  def test_status_is_replaced_whole(self):
    folder = _tempdir(self)
    path = os.path.join(folder, "status.json")
    metrics.write_status(path, {"phase": "sft", "eta_s": float("nan")})
    metrics.write_status(path, {"phase": "train"})
    status = metrics.read_json(path)
    self.assertEqual(status["phase"], "train")
    self.assertNotIn("eta_s", status)
    self.assertGreater(status["time"], 0)
    self.assertEqual(os.listdir(folder), ["status.json"])

  def test_a_damaged_or_missing_file_reads_as_none(self):
    path = os.path.join(_tempdir(self), "status.json")
    with open(path, "w") as f:
      f.write('{"a": ')
    self.assertIsNone(metrics.read_json(path))
    self.assertIsNone(metrics.read_json(path + "x"))


class ImportTest(absltest.TestCase):

  def test_jax_is_not_imported(self):
    code = (
        "import sys\n"
        "from tba_jax.monitor import metrics\n"
        "sys.exit('jax' in sys.modules)"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of metrics, events and spans, also after a restart."""

import ast
import errno
import json
import pathlib
import re
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

import tba_jax
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tests.support import waiting


class EventLogTest(absltest.TestCase):

  def test_writes_event(self):
    path = self.create_tempdir().full_path + "/events.jsonl"
    log = metrics.EventLog(jsonl.LineWriter(path))
    log.write("restart", "exit -9", role="searcher", index=1, pid=7)
    log.close()
    (event,) = jsonl.read_jsonl(path)
    self.assertGreater(event.pop("time"), 0)
    expected = dict(kind="restart", role="searcher", index=1, pid=7)
    self.assertEqual(event, {**expected, "message": "exit -9"})

  def test_event_on_full_disk_is_logged(self):
    log = metrics.EventLog(jsonl.LineWriter("/dev/full"))
    with self.assertLogs(level="ERROR") as told:
      log.write("guard", "entropy is low")
    self.assertIn("entropy is low", told.output[0])
    log.close()

  def test_flood_of_events_is_counted(self):
    path, now = self.create_tempdir().full_path + "/events.jsonl", [0.0]
    log = metrics.EventLog(
        jsonl.LineWriter(path), role="trainer", clock=lambda: now[0]
    )
    for _ in range(1000):
      now[0] += 0.05
      log.write("refused", "forged")
    log.write("restart", "one")
    now[0] += 20.0
    log.write("restart", "two")
    self.assertLen(jsonl.read_jsonl(path), 30 + 2 + 1)
    *_, more, last = jsonl.read_jsonl(path)
    self.assertEqual((more["kind"], more["role"]), ("refused", "trainer"))
    self.assertEqual(more["message"], "… and 970 more in 70 s")
    self.assertEqual(last["message"], "two")
    # A new minute has room again, and the end counts the rest.
    for _ in range(40):
      log.write("refused", "forged")
    log.close()
    written = jsonl.read_jsonl(path)
    self.assertLen(written, 33 + 30 + 1)
    self.assertEqual(written[-1]["message"], "… and 10 more in 0 s")


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

  def test_older_step_of_same_epoch_drops_nothing(self):
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
    late = {"step": 1, "epoch": 2, "time": 9.0, "inspect/exam/accuracy": 0.5}
    out = metrics.last_per_step(
        [{"step": s, "a": s} for s in (0, 1, 2)] + [late]
    )
    self.assertEqual([r["step"] for r in out], [0, 1, 2])
    self.assertEqual(out[1], {"step": 1, "a": 1, "inspect/exam/accuracy": 0.5})
    # Before the first step it is alone.
    self.assertEqual(metrics.last_per_step([late]), [late])

  def test_records_without_step_are_left_out(self):
    self.assertEqual(metrics.last_per_step([{"a": 1}, {"step": "x"}]), [])


class SettingsChangesTest(absltest.TestCase):

  def test_start_drops_changes_of_redone_steps(self):
    start = lambda step: {"kind": "restored", "step": step}
    change = lambda step, *pair: {
        "kind": "settings_changed",
        "step": step,
        "changes": {"loss.beta": list(pair)},
    }
    first = [start(4), change(4, 1, 2), start(8), change(8, 2, 3)]
    self.assertEqual(
        metrics.settings_changes(first),
        {4: {"loss.beta": [1, 2]}, 8: {"loss.beta": [2, 3]}},
    )
    # Killed before another checkpoint; the change is repeated, or undone.
    self.assertEqual(
        metrics.settings_changes([*first, start(8), change(8, 2, 5)]),
        {4: {"loss.beta": [1, 2]}, 8: {"loss.beta": [2, 5]}},
    )
    self.assertEqual(
        metrics.settings_changes([*first, start(8)]), {4: {"loss.beta": [1, 2]}}
    )
    self.assertEmpty(metrics.settings_changes([*first, start(4)]))

  def test_damaged_event_is_left_out(self):
    for changes in (None, [], {"loss.beta": 1}, {"loss.beta": [1]}):
      event = {"kind": "settings_changed", "step": 4, "changes": changes}
      self.assertEmpty(metrics.settings_changes([event]))


class MoreRowsTest(absltest.TestCase):

  def test_single_part_equal_to_reward_has_no_row(self):
    whole = {"mean_reward": 0.5, "reward/reward": 0.5}
    self.assertEmpty(metrics.more_rows(whole, whole))
    half = {"mean_reward": 0.5, "reward/reward": 1.0}
    self.assertEqual(
        metrics.more_rows(half), {"reward/reward": "reward, reward"}
    )


class SpanTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path, "trainer-0.jsonl")

  def make(self, **kwargs):
    writer = metrics.SpanWriter(
        jsonl.open_append(self.path), "trainer", **kwargs
    )
    self.addCleanup(writer.close)
    return writer

  def spans(self):
    return [json.loads(line) for line in self.path.read_text().splitlines()]

  def test_writes_spans_with_their_lanes_and_fields(self):
    writer = self.make()
    writer.add("step", 0.0, 2.0, step=4)
    writer.add("drain", 0.0, 3.0, lane="drain")
    writer.close()
    head = {"role": "trainer", "index": 0}
    self.assertEqual(
        self.spans(),
        [
            {**head, "kind": "step", "t0": 0.0, "t1": 2.0, "step": 4},
            {**head, "kind": "drain", "t0": 0.0, "t1": 3.0, "lane": "drain"},
        ],
    )

  def test_writes_span_of_failed_body(self):
    writer = self.make()
    with self.assertRaises(KeyError):
      with writer.span("step"):
        raise KeyError("x")
    writer.close()
    (span,) = self.spans()
    self.assertGreaterEqual(span["t1"], span["t0"])

  def test_pending_spans_are_written_without_close(self):
    with mock.patch.object(metrics, "FLUSH_EVERY_S", 0.01):
      self.make().add("step", 0.0, 1.0)
      waiting.wait_until(self.spans, "a span")

  def test_writes_spans_of_several_threads(self):
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

  def setUp(self):
    super().setUp()
    self.now = 100.0
    patch = mock.patch.object(
        metrics.time, "perf_counter", side_effect=lambda: self.now
    )
    patch.start()
    self.addCleanup(patch.stop)

  def test_take_returns_values_since_last_take(self):
    clock = metrics.BusyClock(num_cores=1)
    with clock.span("step"):
      self.now += 2.0
    with clock.span("wait_fresh"):
      self.now += 3.0
    self.assertEqual(clock.take(), ({"step": 2.0, "wait_fresh": 3.0}, 2.0, 5.0))
    with clock.span("draw", "beside"):
      self.now += 1.0
    self.assertEqual(clock.take(), ({}, 1.0, 1.0))
    self.assertEqual(clock.busy_s, 3.0)

  def test_overlapping_lanes_count_once(self):
    clock = metrics.BusyClock(num_cores=1)
    with clock.span("publish", "publish"):
      self.now += 1.0
      with clock.span("step"):
        self.now += 2.0
        with clock.span("evaluate", "evaluate"):
          self.now += 4.0
      self.now += 8.0
    self.assertEqual(clock.busy_s, 15.0)

  def test_background_lane_fills_one_of_several_cores(self):
    clock = metrics.BusyClock(num_cores=4)
    with clock.span("publish", "publish"):
      with clock.span("wait_fresh"):
        self.now += 2.0
      with clock.span("step"):
        self.now += 3.0
    self.assertEqual(clock.busy_s, 3.5)

  def test_span_in_progress_counts(self):
    clock = metrics.BusyClock(num_cores=1)
    with clock.span("step"):
      self.now += 2.0
      self.assertEqual(clock.busy_s, 2.0)
      self.assertEqual(clock.take()[:2], ({}, 2.0))
      self.now += 1.0
    self.assertEqual(clock.take()[:2], ({"step": 3.0}, 1.0))

  def test_waiting_is_not_busy(self):
    share = metrics.busy_share({"step": 3.0, "wait_fresh": 5.0}, 10.0)
    self.assertAlmostEqual(share, 0.3)
    self.assertEqual(metrics.busy_share({}, 0.0), 0.0)

  def test_overlap_is_share_of_ideal(self):
    self.assertAlmostEqual(metrics.overlap_of_ideal(2.0, 6.0, 6.0), 1.0)
    self.assertAlmostEqual(metrics.overlap_of_ideal(2.0, 6.0, 8.0), 0.75)
    self.assertAlmostEqual(metrics.overlap_of_ideal(6.0, 2.0, 8.0), 0.75)
    self.assertIsNone(metrics.overlap_of_ideal(2.0, 6.0, 0.0))


class DecidingMetricTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, None),
      ({"pass_at_1": 0.5}, "pass_at_1"),
      ({"pass_at_1": 0.5, "mean_reward": 0.5}, "pass_at_1"),
      ({"pass_at_1": 0.0, "mean_reward": 0.5}, "mean_reward"),
      ({"mean_reward": 0.5}, "mean_reward"),
      ({"pass_at_1": 0.5, "mean_reward": 0.5, "win_rate": 0.1}, "win_rate"),
      ({"pass_at_1": 0.5, "mean_reward": None}, "pass_at_1"),
  )
  def test_metric_follows_evaluation(self, evaluation, metric):
    self.assertEqual(metrics.deciding_metric(evaluation), metric)

  def test_metric_is_in_all_evaluations(self):
    sides = {"pass_at_1": 0.5, "win_rate": 0.5}, {"pass_at_1": 0.6}
    self.assertEqual(metrics.deciding_metric(*sides), "pass_at_1")


# Events of what went wrong in a run, or may have.
_ERRORS = frozenset(
    "carrier_full checkpoint_damaged checkpoint_failed damaged died"
    " evaluation_failed evaluation_lost gap guard journal_damaged journal_full"
    " journal_missing journal_refused journal_torn journal_unclean lost"
    " not_written publish_failed refused_block refused_message rejected"
    " sampler_lost searcher_gone stalled step_skipped store_lost"
    " version_skipped wrong_params".split()
)
# Events that `programs.store` writes with a prefix.
_OF_THE_STORE = frozenset(("started", "stopped", "lost"))


class ErrorsTest(absltest.TestCase):

  def test_each_kind_of_event_is_error_or_is_not(self):
    """Fails for a new kind: decide whether a healthy run may show it."""
    kinds = set()
    for path in pathlib.Path(tba_jax.__file__).parent.rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
          continue
        called = ast.unparse(node.func)
        writes = re.search(r"(on_event|\bevent|events\.write)$", called)
        first = node.args[0]
        if writes and isinstance(first, ast.Constant):
          kinds.add(first.value)
    self.assertNotEmpty(kinds)
    kinds -= _OF_THE_STORE
    kinds |= {f"store_{kind}" for kind in _OF_THE_STORE} | {"reward_failed"}
    errors = {kind for kind in kinds if metrics.is_error(kind, "")}
    self.assertEqual(errors, (_ERRORS - {"lost"}) | {"reward_failed"})

  def test_finished_searcher_is_not_error(self):
    self.assertFalse(metrics.is_error("searcher_gone", "s000 (finished)"))
    self.assertTrue(metrics.is_error("searcher_gone", "s000 (lease expired)"))


class MeanTest(absltest.TestCase):

  def test_means_are_weighted_and_reset(self):
    means = metrics.Means()
    means.add({"a": 1.0}, weight=3.0)
    means.add({"a": 5.0, "b": 2.0})
    self.assertEqual(means.take(), {"a": 2.0, "b": 2.0})
    self.assertEqual(means.take(), {})

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of watching: its arithmetic."""

from absl.testing import absltest

from benchmarks import watch
from tba_jax.config import variants

countdown = variants.import_config("configs/countdown.py")


def _spans(num_steps, *, writing_ms, waits_ms=0.0, slow=()):
  """Steps of 100 ms; writing ones record for 2 ms, others for .5 ms."""
  now, out = 1000.0, []

  def add(kind, length_ms, **fields):
    nonlocal now
    span = {"role": "trainer", "kind": kind, "t0": now, **fields}
    now += length_ms / 1e3
    out.append(span | {"t1": now})

  for step in range(num_steps):
    writes = step % 4 == 0
    if step % 3 == 0:
      add("wait_fresh", waits_ms, step=step)
    slow_ms = 50.0 if step in slow else 0.0
    add("step", 100.0 + 0.01 * step + slow_ms, step=step)
    beside = dict(role="trainer", lane="write", t0=now, t1=now + 0.004)
    out.append(beside | {"kind": "state", "cpu_s": 0.0005})
    if writes:
      now += writing_ms / 1e3
      out.append(beside | {"kind": "metrics", "cpu_s": 0.001})
    add("record", 2.0 if writes else 0.5, step=step)
    out.append({"role": "searcher", "kind": "record", "t0": 0.0, "t1": 9.0})
  return out


class WatchTest(absltest.TestCase):

  def test_summarizes_spans_as_by_hand(self):
    for waits_ms in (0.0, 70.0):
      spans = _spans(101, writing_ms=3.0, waits_ms=waits_ms)
      figures = watch.summarize(spans)
      self.assertEqual(figures["pairs"], 23)
      # 3 ms, and 1.5 ms of the record; less .02 ms of drift twice.
      self.assertAlmostEqual(
          figures["paired"] * figures["step_ms"], 4.5 - 0.04, places=3
      )
      self.assertAlmostEqual(figures["step_ms"], 101.0, delta=0.5)
      self.assertAlmostEqual(figures["record_ms"], 2.0, places=3)
      # A millisecond of a step that writes, and of the state half of one for
      # each step, waiting included.
      self.assertAlmostEqual(figures["write_cpu_ms"], 1.45, delta=0.1)
      self.assertAlmostEqual(figures["cost"], 3.45 / 101.0, delta=2e-3)
      low, high = figures["paired_interval"]
      self.assertLessEqual(low, figures["paired"])
      self.assertLessEqual(figures["paired"], high)

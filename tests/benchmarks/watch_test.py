# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of watching: what it runs, and its arithmetic."""

import contextlib
from unittest import mock

from absl.testing import absltest

from benchmarks import trial_run
from benchmarks import watch
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.system import jsonl

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

  def test_the_run_is_a_right_config(self):
    seen = []

    @contextlib.contextmanager
    def run(config):
      seen.append(config)
      yield "nowhere"

    spans = _spans(30, writing_ms=0.0)
    for arg in ("", "smoke", "quick"):
      with (
          mock.patch.object(trial_run, "run", run),
          mock.patch.object(jsonl, "read_jsonl", return_value=spans),
      ):
        result = watch.run(countdown.get_config(arg), ["30"])
      self.assertEqual(result["steps"], 30)
      validate.validate(seen[-1])
      self.assertEqual(seen[-1].log.every_steps, 4)
      self.assertEqual(seen[-1].train.num_steps, 30)

  def test_too_few_steps_are_refused(self):
    with self.assertRaisesRegex(ValueError, "watch 9: allowed 16 steps"):
      watch.run(countdown.get_config("smoke"), ["9"])

  def test_figures_by_hand(self):
    for waits_ms in (0.0, 70.0):
      spans = _spans(101, writing_ms=3.0, waits_ms=waits_ms)
      found = watch.summarize(spans)
      self.assertEqual(found["pairs"], 23)
      # 3 ms, and 1.5 ms of the record; less .02 ms of drift twice.
      self.assertAlmostEqual(
          found["paired"] * found["step_ms"], 4.5 - 0.04, places=3
      )
      self.assertAlmostEqual(found["step_ms"], 101.0, delta=0.5)
      self.assertAlmostEqual(found["record_ms"], 2.0, places=3)
      # A millisecond of a step that writes, and of the state half of one for
      # each step, waiting included.
      self.assertAlmostEqual(found["write_cpu_ms"], 1.45, delta=0.1)
      self.assertAlmostEqual(found["cost"], 3.45 / 101.0, delta=2e-3)
      low, high = found["paired_interval"]
      self.assertLessEqual(low, found["paired"])
      self.assertLessEqual(found["paired"], high)

  def test_a_few_slow_steps_do_not_matter(self):
    cost = lambda slow: watch.summarize(_spans(101, writing_ms=0.0, slow=slow))[
        "paired"
    ]
    self.assertAlmostEqual(cost((40, 41, 60)), cost(()), places=3)

  def test_the_interval_of_a_median(self):
    self.assertEqual(watch._median_interval(list(range(100))), (40, 60))
    self.assertEqual(watch._median_interval([1.0, 2.0, 3.0]), (1.0, 3.0))


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Background threads raise their errors in their owner."""

import threading

from absl.testing import absltest

from tba_jax.system import background
from tba_jax.system import processes


class WorkerTest(absltest.TestCase):

  def test_close(self):
    thread = background.Thread("test", lambda stop: stop.wait(60))
    thread.check()
    thread.close()
    self.assertFalse(thread.is_alive())

  def test_error_is_logged_and_raised(self):
    def run(stop):
      stop.wait(60)
      raise OSError("disk full")

    thread = background.Thread("test", run)
    with self.assertLogs(level="ERROR") as logged:
      for call in (thread.close, thread.check):
        with self.assertRaisesRegex(OSError, "disk full"):
          call()
    self.assertIn("thread test ended", logged.output[0])

  def test_names_hanging_thread(self):
    go = threading.Event()
    thread = background.Thread("test", lambda _: go.wait(60), close_s=0.05)
    with self.assertRaisesRegex(TimeoutError, "test: did not end"):
      thread.close()
    # The process ends without it.
    names = [t.name for t in threading.enumerate()]
    self.assertIn(f"{processes.LEFT_BEHIND} test", names)
    go.set()


class JobQueueTest(absltest.TestCase):

  def test_jobs_run_in_order_and_flush_waits(self):
    thread = background.JobQueue("test")
    done = []
    for i in range(1000):
      thread.submit(lambda i=i: done.append(i))
    thread.flush()
    self.assertEqual(done, list(range(1000)))
    thread.submit(lambda: done.append("last"))
    thread.close()
    self.assertEqual(done[-1], "last")

  def test_submit_does_not_wait_for_job(self):
    thread = background.JobQueue("test")
    go, began = threading.Event(), threading.Event()
    thread.submit(lambda: (began.set(), go.wait(10)))
    self.assertTrue(began.wait(10))
    go.set()
    thread.close()

  def test_error_of_job_is_raised(self):
    thread = background.JobQueue("test")
    done = []

    def fail():
      raise OSError("disk full")

    thread.submit(fail)
    with self.assertRaisesRegex(OSError, "disk full"):
      thread.flush()
    for call in (lambda: thread.submit(lambda: done.append(1)), thread.close):
      with self.assertRaisesRegex(OSError, "disk full"):
        call()
    self.assertEmpty(done)

  def test_names_hanging_job(self):
    thread = background.JobQueue("slow", max_waiting=1, deadline_s=0.05)
    go, began = threading.Event(), threading.Event()
    thread.submit(lambda: (began.set(), go.wait(10)))
    self.assertTrue(began.wait(10))
    with self.assertRaisesRegex(TimeoutError, "slow: not done within 0.05 s"):
      thread.flush()
    with self.assertRaisesRegex(TimeoutError, "slow: 1 jobs wait"):
      thread.submit(lambda: None)
    with self.assertRaisesRegex(TimeoutError, "slow: did not end"):
      thread.close()
    go.set()

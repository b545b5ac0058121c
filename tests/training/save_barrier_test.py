# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that save together meet in order, or all learn why not."""

import threading

from absl.testing import absltest

from tba_jax.training import cluster
from tests.training import cluster_test


class SaveBarrierTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.client = cluster_test.FakeClient()
    self.met = []
    self.raised = {}

  def run_all(self, *bodies):
    """Runs a body for each process; notes what it raises."""

    def run(process, body):
      barrier = cluster.SaveBarrier(
          self.client, process, len(bodies), deadline_s=9
      )
      try:
        body(barrier)
      except cluster.SaveError as error:
        self.raised[process] = str(error)
        self.assertIs(barrier.failure, error)
      else:
        self.assertIsNone(barrier.failure)

    threads = [
        threading.Thread(target=run, args=item) for item in enumerate(bodies)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def meet(self, barrier, key, timeout_ms=9000):
    barrier(key=key, timeout_ms=timeout_ms)
    self.met.append(key)

  def test_none_goes_on_before_all_have_come(self):

    def slow(barrier):
      for key in "abc":
        self.met.append("came")
        self.meet(barrier, key)

    def fast(barrier):
      for key in "abc":
        self.meet(barrier, key)

    self.run_all(slow, fast, fast)
    self.assertEqual(self.raised, {})
    for i, key in enumerate("abc"):
      self.assertLess(self.met.index("came"), self.met.index(key))
      self.met.remove("came")
      self.assertEqual(self.met.count(key), 3, i)
    # What lies behind all of them is not kept: one barrier a process is left.
    self.assertLen(self.client.values, 3)

  def test_an_error_on_its_way_up_is_that_of_all(self):

    def fails(barrier):
      self.meet(barrier, "begun")
      try:
        raise OSError("no space")
      finally:
        # Another barrier than the one at which the others wait.
        barrier(key="over", timeout_ms=9000)

    def writes(barrier):
      self.meet(barrier, "begun")
      self.meet(barrier, "written")

    self.run_all(writes, fails, writes)
    self.assertEqual(
        self.raised,
        dict.fromkeys(range(3), "process 1 of the trainer: no space"),
    )
    self.assertEqual(self.met, ["begun"] * 3)

  def test_what_takes_too_long_names_the_setting(self):

    def slow(barrier):
      try:
        raise TimeoutError("1 of 2 are done")
      finally:
        barrier(key="over", timeout_ms=9000)

    self.run_all(slow, slow)
    for message in self.raised.values():
      self.assertRegex(
          message,
          r"process [01] of the trainer: not done within 9 s"
          r" \(config.trainer.save_deadline_s\): 1 of 2 are done",
      )

  def test_one_that_does_not_come_is_an_error_of_all(self):

    def waits(barrier):
      try:
        self.meet(barrier, "written", timeout_ms=100)
      finally:
        # As Orbax does; one that is late learns it here.
        barrier(key="over", timeout_ms=9000)

    gone = threading.Event()

    def late(barrier):
      gone.wait()
      self.meet(barrier, "written")
      self.meet(barrier, "committed")

    def watched(barrier):
      try:
        waits(barrier)
      finally:
        gone.set()

    self.run_all(watched, late)
    self.assertLen(set(self.raised.values()), 1)
    self.assertRegex(
        self.raised[1],
        "process 1 of the trainer did not reach written within 0 s .*save_d",
    )
    self.assertEqual(self.met, ["written"])


if __name__ == "__main__":
  absltest.main()

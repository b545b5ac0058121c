# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One at a time works in a folder of a bucket; a folder of disk stands for it.

`tests/multi_process/bucket_run_test.py` has the same on a bucket's protocol.
"""

import pathlib
import threading
import time

from absl.testing import absltest

from tba_jax.system import bucket


class BucketLeaseTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.url = f"file://{self.folder}"

  def make(self):
    return bucket.Lease(self.url)

  def test_each_take_has_a_number_and_a_token(self):
    first = self.make()
    self.assertEqual(first.look().token, "")
    one = first.take("")
    first.release()
    self.assertEqual(self.make().look().holder, "")
    two = self.make().take("")
    self.assertEqual((one.claim, two.claim), (1, 2))
    self.assertNotEqual(one.token, two.token)
    self.assertStartsWith(two.holder, "process ")

  def test_who_says_nothing_is_gone_and_learns_so(self):
    first, second = self.make(), self.make()
    first.take("")
    begun = time.monotonic()
    second.take("", gone_s=0.1)
    self.assertGreaterEqual(time.monotonic() - begun, 0.1)
    with self.assertRaisesRegex(bucket.LostError, "taken it over"):
      first.renew()
    with self.assertRaises(bucket.LostError):
      first.release()
    second.renew()

  def test_who_lives_keeps_it(self):
    first, second = self.make(), self.make()
    first.take("")
    timer = threading.Timer(0.1, first.renew)
    timer.start()
    self.addCleanup(timer.join)
    with self.assertRaisesRegex(
        bucket.HeldError, f"{self.url}: process .* already runs there"
    ):
      second.take("", gone_s=0.5)

  def test_who_lets_go_meanwhile_is_not_waited_for(self):
    first, second = self.make(), self.make()
    first.take("")
    timer = threading.Timer(0.1, first.release)
    timer.start()
    self.addCleanup(timer.join)
    self.assertEqual(second.take("", gone_s=0.5).claim, 2)

  def test_an_own_one_is_taken_at_once(self):
    token = self.make().take("").token
    begun = time.monotonic()
    self.make().take(token, gone_s=60)
    self.assertLess(time.monotonic() - begun, 30)

  def test_of_two_the_slower_learns_who_was_faster(self):
    slow, fast = self.make(), self.make()
    seen = slow.look()
    slow.look = lambda: seen  # It has looked before the other one wrote.
    fast.take("")
    with self.assertRaisesRegex(bucket.HeldError, "was faster"):
      slow.take("")

  def test_an_answer_that_was_lost_is_no_loss(self):
    lease = self.make()
    lease.take("")
    write = lease._store.write

    class Lost:
      """Writes, and says that it did not."""

      def __init__(self, store):
        self.read = store.read

      def write(self, *args, **kwargs):
        write(*args, **kwargs).result()
        return write(*args, **kwargs)

    lease._store = Lost(lease._store)
    lease.renew()

  def test_what_cannot_be_read_is_told(self):
    (self.folder / bucket.NAME).write_text("{")
    with self.assertRaisesRegex(OSError, "is damaged"):
      self.make().look()


if __name__ == "__main__":
  absltest.main()

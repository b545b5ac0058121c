# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A store is of one trainer's directory, whoever else knows the secret."""

from absl.testing import absltest

from tba_jax.replay import queue_server
from tests.support import in_process

_SECRET = b"s" * 32


class ClaimTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(store)

  def claim(self, owner, secret=_SECRET):
    return queue_server.StoreClaim(
        run_id="run", secret=secret, owner=owner, place=f"host:/{owner}"
    )

  def test_the_first_has_it_and_keeps_it(self):
    self.claim("a").take(self.transport)
    with self.assertRaisesRegex(
        queue_server.TakenError, "host:/b: this store serves .* host:/a;"
    ):
      self.claim("b").take(self.transport)
    # It started again.
    self.claim("a").take(self.transport)

  def test_what_was_put_there_without_the_secret_holds_nobody_up(self):
    self.claim("b", secret=b"x" * 32).take(self.transport)
    self.claim("a").take(self.transport)
    with self.assertRaises(queue_server.TakenError):
      self.claim("c").take(self.transport)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of leases: who is alive, and who is gone for which reason."""

from absl.testing import absltest

from tba_jax.replay import queue_server


def _lease(beat, *, slot="h/0", started=1.0, final=False):
  return {
      "beat": beat,
      "slot": slot,
      "started": started,
      "final": final,
      "totals": {"prompts": beat},
  }


class LeaseTableTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 0.0
    self.table = queue_server.LeaseTable(10.0, clock=lambda: self.now)

  def test_a_lease_that_stands_still_expires_once(self):
    self.table.update({"a": _lease(1)})
    self.now = 10.0
    self.assertEmpty(self.table.take_gone())
    self.now = 10.1
    self.assertEqual(self.table.take_gone(), {"a": "expired"})
    self.assertEmpty(self.table.take_gone())
    self.assertEmpty(self.table.alive())

  def test_a_beat_keeps_it_alive(self):
    for beat in range(5):
      self.now = 9.0 * beat
      self.table.update({"a": _lease(beat)})
      self.assertEmpty(self.table.take_gone())
    self.assertIn("a", self.table.alive())
    self.now += 4.0
    self.assertEqual(self.table.age_s("a"), 4.0)

  def test_a_store_that_lost_its_keys_kills_nobody(self):
    self.table.update({"a": _lease(1)})
    self.now = 5.0
    self.table.update({})
    self.assertIn("a", self.table.alive())

  def test_a_newer_process_in_the_slot_replaces_the_old_one(self):
    self.table.update({"a": _lease(1, started=1.0)})
    self.table.update({"b": _lease(1, started=2.0), "c": _lease(1, slot="h/1")})
    self.assertEqual(self.table.take_gone(), {"a": "replaced"})
    self.assertCountEqual(self.table.alive(), ["b", "c"])

  def test_who_says_goodbye_is_gone_at_once(self):
    self.table.update({"a": _lease(1, final=True)})
    self.assertEmpty(self.table.alive())
    self.assertEqual(self.table.take_gone(), {"a": "finished"})

  def test_who_is_gone_is_still_heard(self):
    self.table.update({"a": _lease(1), "b": _lease(1, slot="other")})
    self.now = 11.0
    self.table.update({"b": _lease(2, slot="other")})
    self.table.take_gone()
    heard = self.table.heard()
    self.assertEqual((heard["a"]["alive"], heard["a"]["age_s"]), (False, 11.0))
    self.assertEqual((heard["b"]["alive"], heard["b"]["age_s"]), (True, 0.0))
    self.assertEqual(heard["a"]["totals"], {"prompts": 1})

  def test_who_was_only_slow_comes_back(self):
    self.table.update({"a": _lease(1)})
    self.now = 11.0
    self.table.take_gone()
    self.table.update({"a": _lease(2)})
    self.assertIn("a", self.table.alive())
    self.assertEqual(self.table.totals("a"), {"prompts": 2})
    self.now = 22.0
    self.assertEqual(self.table.take_gone(), {"a": "expired"})

  def test_a_replaced_one_that_goes_on_stays_gone(self):
    self.table.update({"a": _lease(1), "b": _lease(1, started=2.0)})
    self.assertEqual(self.table.take_gone(), {"a": "replaced"})
    self.table.update({"a": _lease(2)})
    self.assertEmpty(self.table.take_gone())
    self.assertCountEqual(self.table.alive(), ["b"])

  def test_a_reader_that_was_away_blames_nobody(self):
    self.table.update({"a": _lease(1)})
    self.now = 60.0
    self.table.excuse()
    self.assertEmpty(self.table.take_gone())
    self.now = 70.1
    self.assertEqual(self.table.take_gone(), {"a": "expired"})


if __name__ == "__main__":
  absltest.main()

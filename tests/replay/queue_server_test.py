# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the parts of the queue server: run lock, ingest, leases."""

from unittest import mock

from absl.testing import absltest

from tba_jax.replay import messages
from tba_jax.replay import queue_server
from tba_jax.transport import wire
from tests.support import in_process

_RUN = messages.RunIdentity("run", b"s" * 32)
_AMOUNT = {"prompts": 1, "completions": 2, "tokens": 3}


class LockStoreTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    store = in_process.InProcessStore()
    self.transport = in_process.InProcessTransport(store)

  def lock(self, owner, run=_RUN):
    queue_server.lock_store(
        self.transport, run, owner=owner, place=f"host:/{owner}"
    )

  def test_the_first_has_it_and_keeps_it(self):
    self.lock("a")
    with self.assertRaisesRegex(
        queue_server.StoreLockedError, "host:/b: .* host:/a;"
    ):
      self.lock("b")
    # It started again.
    self.lock("a")

  def test_a_forged_lock_is_overwritten(self):
    self.lock("b", _RUN._replace(secret=b"x" * 32))
    self.lock("a")
    with self.assertRaises(queue_server.StoreLockedError):
      self.lock("c")


class IngestTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 0.0
    self.events = []
    on_event = lambda *event: self.events.append(event)
    self.refusals = messages.Refusals(on_event, clock=lambda: self.now)
    self.ingest = queue_server.Ingest(
        _RUN,
        watermarks={"b": 5},
        refusals=self.refusals,
        on_event=on_event,
        clock=lambda: self.now,
    )

  def put(self, name, number, data=None, **changes):
    fields = {"sid": name, "sequence": number, "totals": _AMOUNT}
    fields = {**fields, "amount": _AMOUNT, **changes}
    key = messages.block_key(name, number)
    data = messages.encode(_RUN, key, fields) if data is None else data
    self.transport.put(key, data)
    self.transport.put(messages.announcement_key(name, number), b"1")

  def download(self, *blocks):
    """Returns (sid, sequence) of new blocks, and the keys of useless ones.

    Args:
      *blocks: (sid, sequence) of all that the store holds, or arguments.
    """
    self.transport = in_process.InProcessTransport(in_process.InProcessStore())
    for block in blocks:
      self.put(*block)
    fresh, useless = self.ingest.download(self.transport)
    return [(b.sid, b.sequence) for b in fresh], useless

  def test_a_block_is_new_until_it_is_taken(self):
    blocks = [("a", 0), ("a", 1), ("b", 5)]
    for _ in range(2):
      self.assertEqual(self.download(*blocks), (blocks, []))
    self.ingest.take("a", 0)
    fresh, useless = self.download(*blocks)
    self.assertEqual(fresh, [("a", 1), ("b", 5)])
    self.assertEqual(useless, ["new/0/a/000000000000", "q/0/a/000000000000"])
    self.assertEqual(self.ingest.num_duplicates, 1)
    self.assertEqual(self.ingest.watermarks, {"a": 1, "b": 5})

  def test_a_gap_is_waited_for_then_given_up(self):
    blocks = [("b", 7), ("b", 8)]
    self.assertEqual(self.download(*blocks), ([], []))
    self.now = queue_server.GAP_S - 0.1
    self.assertEqual(self.download(*blocks), ([], []))
    self.assertEmpty(self.events)
    self.now = queue_server.GAP_S
    self.assertEqual(self.download(*blocks), (blocks, []))
    self.assertEqual([kind for kind, _ in self.events], ["gap"])

  def test_a_gap_that_is_filled_was_none(self):
    self.download(("b", 6))
    self.now = 5.0
    fresh, _ = self.download(("b", 5), ("b", 6))
    self.assertEqual(fresh, [("b", 5), ("b", 6)])
    # A later gap has its own time.
    self.now = 6.0
    self.assertEqual(self.download(("b", 9)), ([], []))

  def test_a_lost_store_restarts_the_wait(self):
    self.download(("b", 6))
    self.now = queue_server.GAP_S
    self.ingest.forget_gaps()
    self.assertEqual(self.download(("b", 6)), ([], []))

  def test_a_poll_downloads_a_bounded_amount(self):
    blocks = [(name, n) for name in ("a", "c") for n in range(3)]
    size = len(messages.encode(_RUN, "q/0/a/000000000000", {})) + 100
    with mock.patch.object(queue_server, "MAX_POLL_BYTES", 2 * size):
      fresh, _ = self.download(*blocks)
      self.assertTrue(self.ingest.more)
      self.assertLess(len(fresh), 4)
      for sid, sequence in fresh:
        self.ingest.take(sid, sequence)
      rest, _ = self.download(*blocks[len(fresh) :])
    self.assertEqual((fresh + rest)[:4], blocks[:4])

  def test_malformed_blocks_are_refused(self):
    other = messages.encode(_RUN, "q/0/x/000000000000", {"sid": "x"})
    bad = [
        ("c", 0, None, {"run": "other"}),
        ("d", 0, None, {"sequence": 1}),
        ("e", 0, None, {"sequence": None}),
        ("f", 0, None, {"sid": "g"}),
        ("h", 0, None, {"totals": None}),
        ("i", 0, None, {"amount": {**_AMOUNT, "tokens": -1}}),
        ("j", 0, None, {"amount": {"prompts": 1}}),
        ("k", 0, b"", {}),
        ("l", 0, other, {}),
        ("m", 0, None, {"key": "q/0/n/000000000000"}),
    ]
    for name, number, data, changes in bad:
      with self.subTest(sid=name):
        store = in_process.InProcessStore()
        self.transport = in_process.InProcessTransport(store)
        self.put(name, number, data, **changes)
        fresh, useless = self.ingest.download(self.transport)
        self.assertEmpty(fresh)
        self.assertLen(useless, 2)
    self.assertEqual(self.refusals.count, len(bad))
    # One event for each reason, not for each message.
    self.assertLen(self.events, 2)
    self.now = 100.0
    self.download(("c", 0, b"x"))
    self.assertLen(self.events, 3)


class LeaseReaderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 10.0
    store = in_process.InProcessStore()
    self.client = in_process.InProcessTransport(store)
    self.refusals = messages.Refusals(lambda *event: None)
    self.reader = queue_server.LeaseReader(
        _RUN, self.refusals, clock=lambda: self.now
    )

  def put(self, sid, beat, place=None, **changes):
    fields = {
        "sid": sid,
        "slot": "h/0",
        "index": 0,
        "joined": [1, 0],
        "beat": beat,
        "totals": _AMOUNT,
        "unacked": 0,
        "final": False,
        "stats": {},
        **changes,
    }
    data = messages.encode(_RUN, f"live/{sid}", fields)
    self.client.put(f"live/{place or sid}", data)

  def read(self):
    return {s: le["beat"] for s, le in self.reader.read(self.client).items()}

  def test_only_changed_leases_are_decoded(self):
    self.put("a", 1)
    self.put("b", 1)
    self.assertEqual(self.read(), {"a": 1, "b": 1})
    self.put("a", 2)
    with mock.patch.object(wire, "decode", side_effect=wire.decode) as decode:
      self.assertEqual(self.read(), {"a": 2})
    decode.assert_called_once()
    self.assertEqual(self.read(), {})

  def test_malformed_leases_are_refused_and_deleted(self):
    self.put("a", 1)
    self.put("b", 1, run="other")
    self.put("c", 1, place="d")
    self.put("f", "1")
    self.put("g", 1, joined=None)
    self.client.put("live/e", b"forged")
    self.assertEqual(self.read(), {"a": 1})
    self.assertEqual(self.refusals.count, 5)
    self.assertEqual(list(self.client.list("live")), ["live/a"])

  def test_reads_take_a_twentieth_of_the_time_at_most(self):
    self.assertTrue(self.reader.is_due())
    self.read()
    self.now += 0.2
    self.assertFalse(self.reader.is_due())
    self.now += 0.1
    self.assertTrue(self.reader.is_due())
    slow = self.client.list

    def list_slowly(directory):
      self.now += 0.1
      return slow(directory)

    with mock.patch.object(self.client, "list", list_slowly):
      self.read()
    self.now += 1.8
    self.assertFalse(self.reader.is_due())
    self.now += 0.2
    self.assertTrue(self.reader.is_due())


def _lease(beat, *, slot="h/0", joined=1, final=False):
  return {
      "beat": beat,
      "slot": slot,
      "joined": [1, joined],
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
    self.table.update({"a": _lease(1, joined=1)})
    self.table.update({"b": _lease(1, joined=2), "c": _lease(1, slot="h/1")})
    self.assertEqual(self.table.take_gone(), {"a": "replaced"})
    self.assertCountEqual(self.table.alive(), ["b", "c"])

  def test_the_later_generation_of_a_store_counts_more(self):
    lease = {**_lease(1), "joined": [1, 5]}
    self.table.update({"b": lease, "a": {**lease, "joined": [2, 0]}})
    self.assertEqual(self.table.take_gone(), {"b": "replaced"})

  def test_who_says_goodbye_is_gone_at_once(self):
    self.table.update({"a": _lease(1, final=True)})
    self.assertEmpty(self.table.alive())
    self.assertEqual(self.table.take_gone(), {"a": "finished"})

  def test_gone_searchers_are_still_listed(self):
    self.table.update({"a": _lease(1), "b": _lease(1, slot="other")})
    self.now = 11.0
    self.table.update({"b": _lease(2, slot="other")})
    self.table.take_gone()
    listed = self.table.all()
    self.assertEqual(
        (listed["a"]["alive"], listed["a"]["age_s"]), (False, 11.0)
    )
    self.assertEqual((listed["b"]["alive"], listed["b"]["age_s"]), (True, 0.0))
    self.assertEqual(listed["a"]["totals"], {"prompts": 1})

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
    self.table.update({"a": _lease(1), "b": _lease(1, joined=2)})
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the run lock and of the download of blocks."""

from unittest import mock

from absl.testing import absltest

from tba_jax.transport import wire
from tba_jax.transport.groups import leases
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import queue_server
from tests.support import in_process

_RUN = wire.RunIdentity("run", b"s" * 32)
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


def _lease(beat, *, final=False):
  lease = {"beat": beat, "slot": "h/0", "joined": [1, 0], "final": final}
  return {**lease, "totals": _AMOUNT}


class IngestTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 0.0
    self.events = []
    on_event = lambda *event: self.events.append(event)
    self.refusals = wire.Refusals(on_event, clock=lambda: self.now)
    self.leases = leases.LeaseTable(
        _RUN, self.refusals, lease_s=1e9, clock=lambda: self.now
    )
    self.transport = in_process.InProcessTransport(in_process.InProcessStore())
    self.watermarks = {"b": 5}
    self.ingest = queue_server.Ingest(
        _RUN,
        watermarks=self.watermarks,
        leases=self.leases,
        refusals=self.refusals,
        clock=lambda: self.now,
    )

  def put(self, name, number, data=None, **changes):
    fields = {"sid": name, "sequence": number, "totals": _AMOUNT}
    fields = {**fields, "amount": _AMOUNT, **changes}
    key = messages.block_key(name, number)
    data = messages.encode(_RUN, key, fields) if data is None else data
    self.transport.put(key, data)
    self.transport.put(messages.delivery_key(name, number), b"1")

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

  def test_a_block_is_new_until_it_is_journaled(self):
    blocks = [("a", 0), ("a", 1), ("b", 5)]
    for _ in range(2):
      self.assertEqual(self.download(*blocks), (blocks, []))
    self.watermarks["a"] = 1
    fresh, useless = self.download(*blocks)
    self.assertEqual(fresh, [("a", 1), ("b", 5)])
    self.assertEqual(useless, ["new/0/a/000000000000", "q/0/a/000000000000"])
    self.assertEqual(self.ingest.num_duplicates, 1)

  def test_a_gap_is_waited_for_while_the_searcher_lives(self):
    blocks = [("b", 7), ("b", 8)]
    self.leases.update({"b": _lease(1)})
    for self.now in (0.0, 1e6):
      self.assertEqual(self.download(*blocks), ([], []))
      self.assertEqual(self.ingest.missing, {"b": 5})
    fresh, _ = self.download(("b", 5), *blocks)
    self.assertEqual(fresh, [("b", 5)])
    self.assertEqual(self.ingest.missing, {"b": 6})

  def test_blocks_of_a_gone_searcher_are_taken_without_those_before(self):
    self.leases.update({"b": _lease(1, final=True)})
    self.assertEqual(self.leases.take_gone(1), {"b": "finished"})
    self.put("b", 7)
    self.put("b", 8)
    blocks, _ = self.ingest.download(self.transport)
    self.assertEqual(
        [(b.sequence, b.expected) for b in blocks], [(7, 5), (8, 8)]
    )
    skipped = blocks[0].skipped()
    self.assertEqual((skipped["next"], skipped["cause"]), (7, "searcher"))
    self.assertEqual(skipped["totals"]["completions"], 0)
    self.assertIsNone(blocks[1].skipped())

  def test_an_unreadable_block_is_missing(self):
    self.leases.update({"a": _lease(1)})
    fresh, useless = self.download(("a", 0, b"forged"), ("a", 1))
    self.assertEqual((fresh, len(useless)), ([], 2))
    self.assertEqual(self.ingest.missing, {"a": 0})

  def test_keys_of_no_searcher_are_useless_after_a_while(self):
    blocks = [("x", 3), ("x", 4)]
    self.assertEqual(self.download(*blocks), ([], []))
    self.assertEmpty(self.ingest.missing)
    self.now = queue_server.STRANGER_S
    self.assertEqual(self.download(*blocks), ([], ["new/0/x", "q/0/x"]))

  def test_a_poll_downloads_a_bounded_amount(self):
    blocks = [(name, n) for name in ("a", "c") for n in range(3)]
    size = len(messages.encode(_RUN, "q/0/a/000000000000", {})) + 100
    with mock.patch.object(queue_server, "MAX_POLL_BYTES", 2 * size):
      fresh, _ = self.download(*blocks)
      self.assertTrue(self.ingest.more)
      self.assertLess(len(fresh), 4)
      for sid, sequence in fresh:
        self.watermarks[sid] = sequence + 1
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
        ("i", 0, None, {"amount": {**_AMOUNT, "tokens": 1.5}}),
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

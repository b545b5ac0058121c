# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the lease table: which leases are read, which searchers are gone."""

import pathlib
import threading
from unittest import mock

from absl.testing import absltest

from tba_jax.transport import wire
from tba_jax.transport.groups import leases
from tba_jax.transport.groups import messages
from tests.support import in_process

_RUN = wire.RunIdentity("run", b"s" * 32)
_AMOUNT = {"prompts": 1, "completions": 2, "tokens": 3}


class ReadTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 10.0
    store = in_process.InProcessStore()
    self.client = in_process.InProcessTransport(store)
    self.refusals = wire.Refusals(lambda *event: None)
    self.reader = leases.LeaseTable(
        _RUN, self.refusals, lease_s=10.0, clock=lambda: self.now
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
        "first": 0,
        "acked": _AMOUNT,
        "seen": [0, 0],
        "begun": [0, 0],
        "credits": 4,
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
    self.put("h", 1, credits=None)
    self.client.put("live/e", b"forged")
    self.assertEqual(self.read(), {"a": 1})
    self.assertEqual(self.refusals.count, 6)
    self.assertEqual(list(self.client.list("live")), ["live/a"])

  def test_reads_take_at_most_twentieth_of_time(self):
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
      "stats": {"version": beat},
  }


class FileTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    workdir = pathlib.Path(self.create_tempdir().full_path)
    self.run_ = _RUN._replace(workdir=workdir)
    self.path = workdir / "leases/a.lease"
    self.file = leases.LeaseFile(workdir, "a")
    self.addCleanup(self.file.close)

  def write(self, beat):
    fields = {**_lease(beat), "sid": "a", "index": 0, "unacked": 0, "first": 0}
    fields |= {
        "totals": _AMOUNT,
        "acked": _AMOUNT,
        "seen": [0, 0],
        "begun": [0, 0],
    }
    data = messages.encode(_RUN, "live/a", {**fields, "credits": 4})
    self.file.write(data)

  def read(self):
    result, damaged = leases.read_files(self.run_)
    return {sid: le["beat"] for sid, (le, _) in result.items()}, len(damaged)

  def test_newest_is_read(self):
    self.assertEqual(self.read(), ({}, 0))
    for beat in (1, 2, 3):
      self.write(beat)
      self.assertEqual(self.read(), ({"a": beat}, 0))

  def test_torn_write_leaves_one_before(self):
    self.write(1)
    self.write(2)
    data = self.path.read_bytes()
    self.path.write_bytes(data[: len(data) // 2 + 100])
    self.assertEqual(self.read(), ({"a": 1}, 0))

  def test_damage_is_counted(self):
    self.write(1)
    self.path.write_bytes(self.path.read_bytes().replace(b"a", b"b"))
    self.assertEqual(self.read(), ({}, 1))

  def test_reads_while_writer_runs(self):
    ended = threading.Event()

    def write():
      beat = 0
      while not ended.is_set():
        beat += 1
        self.write(beat)

    writer = threading.Thread(target=write)
    writer.start()
    try:
      result = [self.read() for _ in range(300)]
    finally:
      ended.set()
      writer.join()
    self.assertEqual({damaged for _, damaged in result}, {0})
    beats = [beats["a"] for beats, _ in result if beats]
    self.assertNotEmpty(beats)
    self.assertEqual(beats, sorted(beats))

  def test_reads_nothing_without_directory(self):
    for workdir in (None, self.path):
      run = _RUN._replace(workdir=workdir)
      self.assertEqual(leases.read_files(run), ({}, []))


class LostSearcherTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 0.0
    self.table = leases.LeaseTable(
        _RUN,
        wire.Refusals(lambda *event: None),
        lease_s=10.0,
        clock=lambda: self.now,
    )

  def test_unchanged_lease_expires_once(self):
    self.table.update({"a": _lease(1)})
    self.now = 10.0
    self.assertEmpty(self.table.take_gone(1))
    self.now = 10.1
    self.assertEqual(self.table.take_gone(1), {"a": "expired"})
    self.assertEmpty(self.table.take_gone(1))
    self.assertEmpty(self.table.alive())

  def test_renewals_keep_searcher_alive(self):
    for beat in range(5):
      self.now = 9.0 * beat
      self.table.update({"a": _lease(beat)})
      self.assertEmpty(self.table.take_gone(1))
    self.assertIn("a", self.table.alive())
    self.now += 4.0
    self.assertEqual(self.table.age_s("a"), 4.0)

  def test_missing_lease_is_kept(self):
    self.table.update({"a": _lease(1)})
    self.now = 5.0
    self.table.update({})
    self.assertIn("a", self.table.alive())

  def test_restarted_store_counter_means_newer_process(self):
    old = _lease(1) | {"joined": [2, 0]}
    self.table.update({"a": old}, is_live=False)
    self.table.update({"b": _lease(1)})
    self.assertEqual(self.table.take_gone(1), {"a": "replaced"})
    self.assertCountEqual(self.table.alive(), ["b"])

  def test_newer_process_in_slot_replaces_old_one(self):
    self.table.update({"a": _lease(1, joined=1)})
    self.table.update({"b": _lease(1, joined=2), "c": _lease(1, slot="h/1")})
    self.assertEqual(self.table.take_gone(1), {"a": "replaced"})
    self.assertCountEqual(self.table.alive(), ["b", "c"])

  def test_later_generation_of_store_counts_more(self):
    lease = {**_lease(1), "joined": [1, 5]}
    self.table.update({"b": lease, "a": {**lease, "joined": [2, 0]}})
    self.assertEqual(self.table.take_gone(2), {"b": "replaced"})

  def test_final_lease_is_gone_at_once(self):
    self.table.update({"a": _lease(1, final=True)})
    self.assertEmpty(self.table.alive())
    self.assertEqual(self.table.take_gone(1), {"a": "finished"})

  def test_gone_searchers_are_still_listed(self):
    self.table.update({"a": _lease(1), "b": _lease(1, slot="other")})
    self.now = 11.0
    self.table.update({"b": _lease(2, slot="other")})
    self.table.take_gone(1)
    listed = self.table.all()
    self.assertEqual(
        (listed["a"]["alive"], listed["a"]["age_s"]), (False, 11.0)
    )
    self.assertEqual((listed["b"]["alive"], listed["b"]["age_s"]), (True, 0.0))
    self.assertEqual(listed["a"]["totals"], {"prompts": 1})

  def test_lists_only_newest_of_departed_searchers(self):
    self.table.update({"back": _lease(1, slot="h/back")})
    for i in range(150):
      self.table.update({f"s{i:03}": _lease(1, slot=f"h/{i}", final=True)})
      for sid in self.table.take_gone(1):
        self.table.depart(sid)
    self.assertLen(self.table.all(), 101)
    self.assertNotIn("s049", self.table.announced())
    self.assertIn("s050", self.table.announced())
    self.assertCountEqual(self.table.alive(), ["back"])

  def test_returning_searcher_is_alive(self):
    self.table.update({"a": _lease(1, slot="h/back")})
    self.now = 11.0
    self.table.depart(*self.table.take_gone(1))
    self.table.update({"a": _lease(2, slot="h/back")})
    for i in range(150):
      self.table.update({f"s{i}": _lease(1, slot=f"h/{i}", final=True)})
      self.table.depart(*self.table.take_gone(1))
    self.assertIn("a", self.table.alive())

  def test_expired_searcher_may_come_back(self):
    self.table.update({"a": _lease(1)})
    self.now = 11.0
    self.table.take_gone(1)
    self.table.update({"a": _lease(2)})
    self.assertIn("a", self.table.alive())
    self.assertEqual(self.table.totals("a"), {"prompts": 2})
    self.now = 22.0
    self.assertEqual(self.table.take_gone(1), {"a": "expired"})

  def test_replaced_searcher_stays_gone(self):
    self.table.update({"a": _lease(1), "b": _lease(1, joined=2)})
    self.assertEqual(self.table.take_gone(1), {"a": "replaced"})
    lease = {**_lease(2), "totals": {"prompts": 1}}
    self.table.update({"a": lease})
    self.assertEmpty(self.table.take_gone(1))
    # It has announced more, which has to be written off as well.
    self.table.update({"a": _lease(3)})
    self.assertEqual(self.table.take_gone(1), {"a": "replaced"})
    self.assertCountEqual(self.table.alive(), ["b"])

  def test_leases_of_files_are_not_alive_but_are_written_off(self):
    self.table.update({"a": _lease(3)}, is_live=False)
    self.assertEmpty({**self.table.alive(), **self.table.all()})
    self.assertEqual(self.table.announced(), {"a": {"prompts": 3}})
    # A file has what the store lost, but no statistics.
    self.table.update({"b": _lease(1, slot="other")})
    newer = {**_lease(2, slot="other"), "stats": {}}
    self.table.update({"b": newer}, is_live=False)
    self.assertEqual(self.table.totals("b"), {"prompts": 2})
    self.assertEqual(self.table.all()["b"]["stats"], {"version": 1})
    # The store shows that its searcher lives.
    self.table.update({"b": _lease(1, slot="other")})
    self.assertEqual(self.table.totals("b"), {"prompts": 2})
    self.now = 10.1
    gone = self.table.take_gone(1)
    self.assertEqual(gone, {"a": "expired", "b": "expired"})
    self.table.update({"a": _lease(3)}, is_live=False)
    self.assertEmpty(self.table.take_gone(1))
    self.table.update({"a": _lease(4)})
    self.assertIn("a", self.table.alive())

  def test_times_restart_after_store_was_lost(self):
    self.table.update({"a": _lease(1)})
    self.now = 60.0
    self.table.restart_times()
    self.assertEmpty(self.table.take_gone(1))
    self.now = 70.1
    self.assertEqual(self.table.take_gone(1), {"a": "expired"})

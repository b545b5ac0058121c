# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Forged, absurd and replayed values of each kind of key do a run no harm."""

import functools
import os
import socket
import time
from unittest import mock

from absl.testing import parameterized

from tba_jax.transport import wire
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import queue_client
from tba_jax.transport.groups import queue_server
from tests.support import waiting
from tests.transport.groups import queue_case

_SLOT = f"join/{socket.gethostname()}/0"
# Directory of each kind of key, and names that nobody gave a key of it.
_NUMBERS = ("50000000", "99999999", "-0000001", "00000001/x", "٠٠٠٠٠٠٠٩", "x")
_LONG = ("000000000000", "000000000007", "999999999999", "-00000000001", "x")
_KINDS = {
    "block": ("q/0", [f"{sid}/{n}" for sid in ("a", "z") for n in _LONG]),
    "delivery": ("new/0", [f"{sid}/{n}" for sid in ("a", "z") for n in _LONG]),
    "lease": ("live", ["a", "b", "z", "a/z", "9" * 300]),
    "join": (_SLOT, [*_NUMBERS, "9" * 30]),
    "work": ("work", ["a", "b", "z"]),
    "ctl": ("ctl", ["stop", "stop/x"]),
    "status": ("status", ["run"]),
    "meta": ("meta", ["trainer", "trainer/x"]),
}
_NUM_STEPS = 8


def _values(key, old):
  """Returns what may be put under a key, given the messages of a run so far."""
  forged = {"run": queue_case.RUN, "key": key, "generation": 2, "epoch": 9}
  forged |= {"count": 1 << 80, "done": True, "beat": 1 << 80, "final": True}
  yield from (b"", b"1", b"50000000", b"{}", os.urandom(99), bytes(1 << 20))
  yield wire.encode_message(forged, b"x" * 32)
  # A message of the run, but not of this kind; then copies of other keys.
  yield wire.encode_message(
      {"run": queue_case.RUN, "key": key}, queue_case.SECRET
  )
  yield from [data for name, data in old.items() if name != key][:20]


class ForgedKeysTest(queue_case.QueueTestCase, parameterized.TestCase):

  def setUp(self):
    super().setUp()
    for module, name, value in (
        (queue_client, "RESEND_S", 0.1),
        (queue_client, "ASK_EVERY_S", 0.05),
        (queue_server, "ASK_EVERY_S", 0.05),
        (queue_server, "REPEAT_EVERY_S", 0.05),
        (queue_server, "STRANGER_S", 0.1),
    ):
      self.enterContext(mock.patch.object(module, name, value))

  @parameterized.named_parameters((kind, kind) for kind in _KINDS)
  def test_run_continues_and_loses_nothing(self, kind):
    directory, names = _KINDS[kind]
    lock = functools.partial(
        queue_server.lock_store,
        run=wire.RunIdentity(queue_case.RUN, queue_case.SECRET),
        owner="me",
        place="here",
    )
    trainer = self.trainer(num_steps=_NUM_STEPS, open_store=lock, lease_s=60.0)
    searchers = [
        self.searcher("a", lease_s=0.4),
        self.searcher("b", 1, lease_s=0.4),
    ]
    old = {}
    for step in range(_NUM_STEPS):
      # The oldest message of each key, first from a store that was lost.
      old = {**self.store.data, **old}
      if step == 1:
        self.store.lose()
      if step > 1:
        there = [k for k in old if k.startswith(f"{directory}/")]
        for key in {*there, *(f"{directory}/{name}" for name in names)}:
          replayed = [old[key]] if key in old else []
          values = [*replayed, *_values(key, old)]
          self.client().put(key, values[step % len(values)])
          if step % 2:
            self.client().put(key, values[0])
      trainer.step(step)
    ledger = trainer.service.finish(_NUM_STEPS, 20.0)
    self.assertCountEqual(trainer.inserted, range(4 * _NUM_STEPS))
    self.assertEmpty(ledger["lost"])
    self.assertEmpty(ledger["rejected"])
    self.assert_closed(ledger)
    self.assertCountEqual(
        trainer.events.of("searcher_gone"), ["a (finished)", "b (finished)"]
    )
    for searcher in searchers:
      searcher.close()
      self.assertTrue(searcher.client.run_done)


class JoinTest(queue_case.QueueTestCase):

  def test_only_genuine_number_replaces_searcher(self):
    old = self.searcher("old", works=False, lease_s=0.2).client
    waiting.wait_until(lambda: "joined" in old.lease, "its number")
    key = f"{_SLOT}/00000000"
    genuine = self.client().get(key)
    for name in _KINDS["join"][1]:
      for value in (*_values(f"{_SLOT}/{name}", {}), genuine):
        self.client().put(f"{_SLOT}/{name}", value)
        old.check_slot(self.client())
    # Deleted, but for one that comes before all others.
    left = self.client().list(_SLOT)
    self.assertEqual(set(left) - {f"{_SLOT}/-0000001"}, {key})
    # A searcher joined so before the store was lost.
    late = f"{_SLOT}/00000007"
    fields = {"generation": 1}
    run = wire.RunIdentity(queue_case.RUN, queue_case.SECRET)
    message = messages.encode(run, late, fields)
    self.store.lose()
    self.client().put(late, message)
    new = self.searcher("new", works=False, lease_s=0.2).client
    waiting.wait_until(lambda: "joined" in new.lease, "the next number")
    self.assertEqual(new.lease["joined"][0], 2)
    with self.assertRaises(queue_client.ReplacedError):
      deadline = time.monotonic() + 20.0
      while time.monotonic() < deadline:
        old.next_assignment(0.1)


class StopTest(queue_case.QueueTestCase):

  def test_ignores_stop_from_earlier_store(self):
    trainer = self.trainer(epoch=1)
    trainer.service.stop_searchers(20.0, done=True)
    trainer.close()
    told = self.client().get(messages.STOP_KEY)
    self.assertIsNotNone(told)
    self.store.lose()
    with self.reads(messages.STOP_KEY, 2):
      self.client().put(messages.STOP_KEY, told)
      late = self.searcher("a", works=False).client
    self.assertFalse(late.stop_requested)

  def test_ignores_stop_from_earlier_trainer(self):
    trainer = self.trainer(epoch=1)
    trainer.service.stop_searchers(20.0, done=True)
    trainer.close()
    with self.reads(messages.STOP_KEY, 2):
      late = self.searcher("a", works=False, first_epoch=2).client
    self.assertFalse(late.stop_requested)
    same = self.searcher("b", works=False, first_epoch=1).client
    waiting.wait_until(lambda: same.stop_requested, "the stop message")


class LockTest(queue_case.QueueTestCase):

  def test_lock_of_earlier_store_is_taken(self):
    run = wire.RunIdentity(queue_case.RUN, queue_case.SECRET)
    lock = functools.partial(queue_server.lock_store, run=run, place="there")
    lock(self.client(), owner="a")
    held = self.client().get(messages.LOCK_KEY)
    self.store.lose()
    self.client().put(messages.LOCK_KEY, held)
    lock(self.client(), owner="b")
    with self.assertRaises(queue_server.StoreLockedError):
      lock(self.client(), owner="a")

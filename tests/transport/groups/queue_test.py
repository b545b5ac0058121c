# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of both ends of the queue: exactly once, in order, bounded."""

import threading
import time
from unittest import mock

from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import queue_client
from tba_jax.transport.groups import queue_server
from tests.support import in_process
from tests.support import waiting
from tests.transport.groups import queue_case

wait_until = waiting.wait_until


class DeliveryTest(queue_case.QueueTestCase):

  def test_counts_evicted_untrained_completions(self):
    trainer = self.trainer(num_steps=6, capacity=4 * queue_case.SAMPLES)
    self.searcher("a")
    for step in range(6):
      trainer.step(step)
    ledger = trainer.service.finish(6, 20.0)
    # A step brings four groups and trains two: others make room.
    self.assertGreater(ledger["evicted_untrained"]["prompts"], 4)
    self.assert_closed(ledger)

  def test_lease_has_age_of_oldest_block(self):
    trainer = self.trainer()
    client = self.searcher("a", works=False, lease_s=0.2).client
    stats = lambda: trainer.living().get("a", {}).get("stats")
    wait_until(lambda: stats() == {}, "a lease")
    now_s = time.monotonic()
    client.begun_s.update({7: now_s - 100, 8: now_s})
    wait_until(lambda: stats().get("block_age_s", 0) >= 100, "an age")
    client.begun_s.clear()
    wait_until(lambda: stats() == {}, "no age")

  def test_submit_blocks_while_nothing_is_acknowledged(self):
    trainer = self.trainer(start=False)
    searcher = self.searcher("a", credits=2, works=False)
    self.assertTrue(searcher.submit(0))
    self.assertTrue(searcher.submit(1))
    before = searcher.client.totals
    asked = []
    groups = [self.group(2)]
    given_up = lambda: asked.append(1) or len(asked) > 2
    self.assertFalse(searcher.client.submit(groups, given_up))
    # A block that was given up does not count as generated.
    self.assertEqual(searcher.client.totals, before)
    self.assertEqual(len(searcher.client.unacked_blocks), 2)
    wait_until(lambda: len(self.queue()) == 2, "two blocks in the store")
    trainer.server.start()
    self.assertTrue(searcher.submit(2))
    self.assertTrue(searcher.submit(3))
    wait_until(
        lambda: len(searcher.client.unacked_blocks) == 0, "all acknowledged"
    )
    self.assertEmpty(self.queue())
    trainer.step(0)
    self.assertEqual(trainer.inserted, [0, 1, 2, 3])


class StoreLossTest(queue_case.QueueTestCase):

  def test_unacknowledged_blocks_are_sent_again_before_new_ones(self):
    searcher = self.searcher("a", works=False)
    for position in range(3):
      searcher.submit(position)
    wait_until(lambda: len(self.queue()) == 3, "three blocks")
    put = []

    def record(transport, key, value, **kwargs):
      done = in_process_put(transport, key, value, **kwargs)
      put.append(key)
      return done

    in_process_put = in_process.InProcessTransport.put
    with mock.patch.object(in_process.InProcessTransport, "put", record):
      self.store.lose()
      searcher.submit(3)
      wait_until(lambda: len(self.queue()) == 4, "four blocks")
    sent = [key for key in put if key.startswith("q/")]
    self.assertEqual(sent, [f"q/0/a/{i:012d}" for i in range(4)])
    self.assertIn("live/a", put)
    self.assertLen(searcher.events.of("store_lost"), 1)

  def test_acks_and_grants_are_written_again(self):
    trainer = self.trainer()
    trainer.service.open(0)
    # It does not answer, so nothing but the loss is a reason to write.
    self.lease("a")
    wait_until(lambda: self.client().get("work/a"), "a grant")
    granted = wire.decode_message(self.client().get("work/a"), b"s" * 32)
    self.store.lose()
    wait_until(lambda: self.client().get("work/a"), "the grant again")
    again = wire.decode_message(self.client().get("work/a"), b"s" * 32)
    self.assertEqual(again["blocks"], granted["blocks"])
    self.assertGreater(again["count"], granted["count"])
    self.assertEqual(trainer.server.generation, 2)

  def test_repeated_losses_lose_and_duplicate_nothing(self):
    trainer = self.trainer(num_steps=20)
    self.searcher("a")
    self.searcher("b", 1, delay_s=0.002)
    for step in range(20):
      if step % 3 == 1:
        self.store.lose()
      trainer.step(step)
    ledger = trainer.service.finish(20, 20.0)
    self.assertCountEqual(trainer.inserted, range(80))
    self.assertEmpty(trainer.service.rejected)
    self.assertEqual(ledger["lost"].get("journal"), None)
    self.assert_closed(ledger)

  def test_second_loss_during_recovery(self):
    trainer = self.trainer()
    searcher = self.searcher("a")
    put, failures = in_process.InProcessTransport.put, [2]

    def fails_twice(transport, key, value, **kwargs):
      if key == "work/a" and failures[0]:
        failures[0] -= 1
        raise byte_store.TransportError("lost again")
      return put(transport, key, value, **kwargs)

    with mock.patch.object(in_process.InProcessTransport, "put", fails_twice):
      self.store.lose()
      trainer.step(0)
    self.assertEqual(failures, [0])
    trainer.step(1)
    self.assertNotEmpty(searcher.blocks)

  def test_no_store_within_deadline_ends_both_ends(self):
    # Nothing waits for ever: whoever started the roles starts them again.
    slow = in_process.InProcessTransport.reconnect
    short = lambda self, deadline_s=None: slow(self, 0.05)
    with mock.patch.object(in_process.InProcessTransport, "reconnect", short):
      trainer = self.trainer()
      searcher = self.searcher("a", works=False)
      self.store.lose(restart=False)
      with self.assertRaisesRegex(
          byte_store.TransportError, "queue server has ended"
      ):
        trainer.step(0)
      with self.assertRaisesRegex(
          byte_store.TransportError, "queue client has ended"
      ):
        searcher.client.next_assignment(20.0)


class TrainerMessagesTest(queue_case.QueueTestCase):
  """Messages of replaced trainers, of other runs, and at the end of a run."""

  def _put(self, place, /, secret=queue_case.SECRET, **message):
    message = {"generation": 1, "run": queue_case.RUN, "key": place, **message}
    self.client().put(place, wire.encode_message(message, secret))

  def _work(self, epoch, count, *blocks, acked=0, **message):
    self._put(
        "work/a",
        epoch=epoch,
        count=count,
        acked=acked,
        again=-1,
        **message,
        blocks=[
            {"number": b, "version": -1, "prompts": [[b, b, 0]]} for b in blocks
        ],
    )

  def test_acks_of_older_epoch_are_ignored(self):
    searcher = self.searcher("a", works=False)
    for position in range(3):
      searcher.submit(position)
    self._work(2, 1, acked=1)
    wait_until(
        lambda: len(searcher.client.unacked_blocks) == 2, "the first ack"
    )
    self._work(1, 5, acked=3)
    self.assertFalse(searcher.client.close(0.1))
    self.assertEqual(len(searcher.client.unacked_blocks), 2)

  def test_invalid_messages_are_refused_and_counted(self):
    searcher = self.searcher("a", works=False)
    searcher.submit(0)
    refused = lambda: searcher.client.refusals.count
    work = {"epoch": 9, "count": 1, "acked": 1, "again": -1, "blocks": []}
    for message in (
        {**work, "run": "other"},
        {**work, "key": "work/b"},  # Authentic, but a copy.
        {**work, "epoch": "9"},
        {**work, "blocks": [[1]]},
        {},
    ):
      before = refused()
      self._put("work/a", **message)
      wait_until(lambda: refused() > before + 1, "refused")  # noqa: B023
    self._put("ctl/stop", secret=b"x" * 32, epoch=9, done=True)
    wait_until(
        lambda: len(searcher.events.of("refused_message")) == 2, "both reasons"
    )
    self.assertEqual(len(searcher.client.unacked_blocks), 1)
    self.assertFalse(searcher.client.stop_requested)
    self._work(1, 1, 7)
    self.assertEqual(searcher.client.next_assignment(20.0).number, 7)

  def test_stop_message_of_older_epoch_is_ignored(self):
    client = self.searcher("a", works=False).client
    self._work(3, 1, 1)
    wait_until(lambda: client.epoch == 3, "the present epoch")
    with self.reads("ctl/stop", 2):
      self._put("ctl/stop", epoch=2, done=True)
    self.assertFalse(client.stop_requested)
    self._put("ctl/stop", epoch=3, done=False)
    wait_until(lambda: client.stop_requested, "the stop message")
    self.assertFalse(client.run_done)

  def test_searcher_started_after_interrupt_waits_for_next_trainer(
      self,
  ):
    self._put("ctl/stop", epoch=1, done=False)
    with self.reads("ctl/stop", 2):
      searcher = self.searcher("a")
    self.assertFalse(searcher.client.stop_requested)
    trainer = self.trainer(epoch=2)
    trainer.step(0)
    self.assertNotEmpty(searcher.blocks)
    # The stop message of its own trainer is meant for it.
    trainer.service.stop_searchers(20.0)
    self.assertTrue(searcher.client.stop_requested)
    self.assertFalse(searcher.client.run_done)

  def test_end_is_reported_without_known_searchers(self):
    trainer = self.trainer(epoch=1)
    # As where a lease has run out: nobody is waited for.
    trainer.service.stop_searchers(20.0, done=True)
    trainer.close()
    late = self.searcher("a", works=False).client
    wait_until(lambda: late.stop_requested, "the stop message")
    self.assertTrue(late.run_done)

  def test_new_trainer_deletes_older_stop_message(self):
    self._put("ctl/stop", epoch=0, done=False)
    trainer = self.trainer(epoch=1)
    wait_until(lambda: self.client().get("ctl/stop") is None, "deleted")
    self.searcher("a")
    trainer.step(0)


class ForgeryTest(queue_case.QueueTestCase):

  def _submit_two(self):
    """Returns a searcher with two blocks in the store."""
    searcher = self.searcher("a", works=False)
    searcher.submit(0)
    searcher.submit(1)
    wait_until(lambda: len(self.queue()) == 2, "two blocks")
    wait_until(lambda: self.client().get("live/a"), "a lease")
    return searcher

  def assert_both_taken(self, trainer, searcher):
    wait_until(
        lambda: len(searcher.client.unacked_blocks) == 0, "all acknowledged"
    )
    positions = [r.groups[0].position for r in trainer.waiting]
    self.assertEqual(positions, [0, 1])
    self.assertEmpty(trainer.events.of("gap"))

  def test_overwritten_block_is_sent_again(self):
    searcher = self._submit_two()
    self.client().put("q/0/a/000000000000", b"forged")
    trainer = self.trainer()
    self.assert_both_taken(trainer, searcher)
    self.assertEqual(trainer.server.counts["refused"], 1)

  def test_deleted_block_is_sent_again(self):
    searcher = self._submit_two()
    self.client().delete("q/0/a/000000000000")
    self.client().delete("new/0/a/000000000000")
    # Its searcher would look for it later.
    with mock.patch.object(queue_client, "RESEND_S", 1000.0):
      self.assert_both_taken(self.trainer(), searcher)

  def test_resends_blocks_deleted_unseen(self):
    with mock.patch.object(queue_client, "RESEND_S", 0.1):
      searcher = self._submit_two()
      self.client().delete("q")
      self.client().delete("new")
      self.assert_both_taken(self.trainer(), searcher)

  def test_trainer_ignores_forged_announcement(self):
    searcher = self._submit_two()
    self.client().put("new/0/a/000000000007", b"1")
    self.client().put("q/0/a/000000000007", b"forged")
    trainer = self.trainer()
    self.assert_both_taken(trainer, searcher)
    searcher.submit(2)
    wait_until(
        lambda: len(searcher.client.unacked_blocks) == 0, "the third block"
    )

  def test_keys_of_no_searcher_are_deleted(self):
    for key in ("new/0/x/000000000003", "new/0/y/000000000000", "new/0/z"):
      self.client().put(key, b"1")
    with mock.patch.object(queue_server, "STRANGER_S", 0.1):
      self.trainer()
      wait_until(lambda: not self.queue(), "deleted")

  def test_rewrites_unseen_grants(self):
    trainer = self.trainer()
    trainer.service.open(0)
    self.lease("a")
    work = lambda: self.client().get("work/a")
    wait_until(work, "a grant")
    granted = wire.decode_message(work(), queue_case.SECRET)
    with mock.patch.object(queue_server, "REPEAT_EVERY_S", 0.0):
      for beat, data in enumerate((b"forged", None), 2):
        self.client().delete("work/a")
        if data is not None:
          self.client().put("work/a", data)
        self.lease("a", beat)
        wait_until(lambda: work() not in (None, b"forged"), "it again")
        again = wire.decode_message(work(), queue_case.SECRET)
        self.assertEqual(again["blocks"], granted["blocks"])
        self.assertGreater(again["count"], granted["count"])
    # One that has seen it needs no other.
    last = work()
    self.lease("a", 9, seen=[again["epoch"], again["count"]])
    wait_until(lambda: trainer.living()["a"]["beat"] == 9, "its lease")
    time.sleep(0.3)
    self.assertEqual(work(), last)

  def test_searcher_soon_reports_missing_grants(self):
    trainer = self.trainer()
    client = self.searcher("a", works=False, lease_s=600.0).client
    trainer.service.open(0)
    self.assertIsNotNone(client.next_assignment(20.0))
    beat = lambda: trainer.living()["a"]["beat"]
    client.lease_interval.changed_at -= 1e6
    before = beat()
    self.client().delete("work/a")
    wait_until(lambda: beat() > before + 2, "leases")


class PollTest(queue_case.QueueTestCase):
  """An end of the queue polls often while its caller waits."""

  def test_searcher_without_work(self):
    client = self.searcher("a", works=False).client
    self.assertIsNone(client.next_assignment(0.0))  # It has other work.
    self.assertFalse(client.interval.waiting)
    with self.reads("work/a", 8):
      self.assertIsNone(client.next_assignment(0.01))
      self.assertTrue(client.interval.waiting)

  def test_searcher_without_credits(self):
    searcher = self.searcher("a", credits=1, works=False)
    searcher.submit(0)
    self.assertFalse(searcher.client.interval.waiting)
    with self.reads("work/a", 8):
      self.assertFalse(searcher.client.submit([self.group(1)], lambda: True))
      self.assertTrue(searcher.client.interval.waiting)

  def test_waiting_trainer_is_urgent(self):
    trainer = self.trainer()
    step = threading.Thread(target=trainer.step, args=(0,))
    step.start()
    wait_until(lambda: trainer.server.urgent, "the wait")
    self.searcher("a")
    step.join(20.0)
    self.assertFalse(trainer.server.urgent)

  def test_admitted_prompts_are_granted_at_once(self):
    trainer = self.trainer()
    self.lease("a")
    wait_until(lambda: "a" in trainer.living(), "its lease")
    asleep = threading.Event()

    def due_in_s():
      asleep.set()
      return 60.0

    with mock.patch.object(trainer.server.interval, "due_in_s", due_in_s):
      self.assertTrue(asleep.wait(20.0))
      trainer.service.open(0)
      wait_until(lambda: self.client().get("work/a"), "a grant", wait_s=5.0)


class UnlockedTest(queue_case.QueueTestCase):
  """What may take long does not hold up grants and acknowledgements."""

  def test_state_of_buffer(self):
    trainer = self.trainer()
    lock, free = trainer.server.lock, []

    def look():
      free.append(lock.acquire(timeout=5.0))
      if free[0]:
        lock.release()

    def get_state():
      thread = threading.Thread(target=look)
      thread.start()
      thread.join(20.0)
      return {}

    trainer.service.buffer.get_state = get_state
    trainer.service.get_state()
    self.assertEqual(free, [True])

  def test_inserting(self):
    inserting, inserted = threading.Event(), threading.Event()
    trainer = self.trainer()
    insert = trainer.buffer.insert

    def wait(*args):
      inserting.set()
      inserted.wait(20.0)
      return insert(*args)

    trainer.buffer.insert = wait
    searcher = self.searcher("a", works=False)
    searcher.submit(0, 1, 2, 3)
    step = threading.Thread(target=trainer.step, args=(0,))
    step.start()
    self.assertTrue(inserting.wait(20.0))
    try:
      searcher.submit(4)
      wait_until(
          lambda: len(searcher.client.unacked_blocks) == 0, "acked", wait_s=5.0
      )
      wait_until(lambda: trainer.living(), "a lease", wait_s=5.0)
    finally:
      inserted.set()
      step.join(20.0)
    self.assertEqual(trainer.inserted, [0, 1, 2, 3])

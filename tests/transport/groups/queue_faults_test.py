# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the queue when content, searchers, the trainer or the disk fail."""

import dataclasses
import shutil
import socket
import time
from unittest import mock

import numpy as np

from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import queue_client
from tba_jax.transport.groups import queue_server
from tests.support import in_process
from tests.support import waiting
from tests.transport.groups import queue_case

wait_until = waiting.wait_until


class RejectionTest(queue_case.QueueTestCase):

  def test_rejects_changed_prompt(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    group = self.group(1)
    other = np.append(group.prompt_tokens, 1)
    trainer.buffer.insert(dataclasses.replace(group, prompt_tokens=other), 0)
    self.assertTrue(searcher.client.submit([self.group(p) for p in range(8)]))
    wait_until(lambda: len(searcher.client.unacked_blocks) == 0, "acknowledged")
    trainer.step(0)
    ledger = trainer.service.account()
    self.assertEqual(ledger["rejected"]["prompt"]["prompts"], 1)
    self.assertIn("3 completions: prompt", trainer.events.of("rejected"))

  def test_malformed_block_is_rejected_as_whole(self):
    trainer = self.trainer()
    trainer.service.open(0)
    self.lease("x")
    wait_until(lambda: trainer.server.grants.holds("x"), "a grant")
    before = self.client().get("work/x")
    data = self.message("x", 0, [self.group(0)], arrays={})
    self.put_block("x", 0, data)
    wait_until(lambda: not self.queue(), "taken")
    # Its prompts are unknown, so all of its grants are granted again.
    wait_until(lambda: self.client().get("work/x") != before, "other grants")
    trainer.service.apply(0)
    ledger = trainer.service.account()
    self.assertEqual(ledger["rejected"]["malformed"]["completions"], 3)
    self.assertEqual(trainer.service.get_state()["watermarks"], {"x": 1})
    self.assertLen(trainer.events.of("refused_block"), 1)
    self.assertEqual(ledger["difference"]["prompts"], 0)


class SearcherDeathTest(queue_case.QueueTestCase):

  def test_dead_searchers_prompts_go_to_another(self):
    trainer = self.trainer(lease_s=0.4, num_steps=3)
    trainer.service.open(0)
    self.lease("dead", totals=30)
    wait_until(lambda: trainer.server.grants.holds("dead"), "a grant")
    # It has sent one block that is ingested before it is written off.
    data = self.message("dead", 0, [self.group(1)])
    self.put_block("dead", 0, data)
    with mock.patch.object(trainer.server.leases, "lease_s", 30.0):
      wait_until(lambda: not self.queue(), "the block is taken")
    wait_until(lambda: trainer.events.of("searcher_gone"), "it is gone")
    self.searcher("alive")
    # Its own lease beats once a second: no shorter patience from here on.
    trainer.server.leases.lease_s = 30.0
    for step in range(3):
      trainer.step(step)
    ledger = trainer.service.finish(3, 20.0)
    self.assertEqual(
        trainer.events.of("searcher_gone"),
        ["dead (expired)", "alive (finished)"],
    )
    self.assertCountEqual(trainer.inserted, range(12))
    self.assertEqual(ledger["lost"]["searcher"]["prompts"], 29)
    self.assertEqual(ledger["generated"]["prompts"], 30 + 11)
    self.assert_closed(ledger)
    self.assertIsNone(self.client().get("live/dead"))
    self.assertIsNone(self.client().get("work/dead"))

  def test_killed_searcher_is_replaced_after_clock_set_back(self):
    trainer = self.trainer(lease_s=600.0)
    trainer.service.open(0)
    old = self.searcher("s000-2", works=False)
    self.assertIsNotNone(old.client.next_assignment(20.0))
    old.kill()
    # Times, and the ids that start with one, are before those of the old one.
    with mock.patch.object(time, "time", lambda: 1.0):
      new = self.searcher("s000-1")
      trainer.step(0)
    self.assertNotEmpty(new.blocks)
    self.assertEqual(trainer.events.of("searcher_gone"), ["s000-2 (replaced)"])

  def test_live_searcher_raises_if_slot_is_taken(self):
    trainer = self.trainer(lease_s=1.0)
    trainer.service.open(0)
    old = self.searcher("old", works=False, lease_s=1.0).client
    self.assertIsNotNone(old.next_assignment(20.0))
    self.searcher("new")
    with self.assertRaisesRegex(
        queue_client.ReplacedError, "newer searcher.*/0: hosts with"
    ):
      wait_until(lambda: old.next_assignment(0.1) and False, "its end")

  def test_slot_keeps_newest_numbers_in_store(self):
    slot = f"{socket.gethostname()}/0"
    store = self.client()
    run = wire.RunIdentity(queue_case.RUN, queue_case.SECRET)
    for number in range(103):
      key = f"join/{slot}/{number:08d}"
      store.put(key, messages.encode(run, key, {"generation": 1}))
    trainer = self.trainer()
    self.searcher("newest")
    trainer.step(0)
    names = sorted(key.rpartition("/")[2] for key in store.list(f"join/{slot}"))
    self.assertEqual(names, [f"{n:08d}" for n in range(3, 104)])


class AnnouncedTest(queue_case.QueueTestCase):
  """What was announced is in the ledger, whatever dies with it."""

  def _announced(self):
    """Returns the completions that the store's leases announce."""
    leases = self.client().list("live").values()
    messages = [wire.decode_message(d, queue_case.SECRET) for d in leases]
    return sum(m["totals"]["completions"] for m in messages)

  def test_searcher_and_store_are_lost_while_trainer_restarts(self):
    first = self.trainer(num_steps=2)
    searcher = self.searcher("a", works=False)
    searcher.submit(0, 1, 2, 3)
    first.step(0)
    state = first.service.get_state()
    first.close()
    # No trainer reads what it announces now.
    searcher.submit(4, 5)
    searcher.submit(6)
    wait_until(lambda: self._announced() == 21, "the announcement")
    searcher.kill()
    self.store.lose()
    second = self.trainer(state=state, epoch=1, num_steps=2, lease_s=0.5)
    self.searcher("b", 1, lease_s=0.5)
    second.step(1)
    ledger = second.service.finish(2, 20.0)
    self.assertEqual(ledger["lost"]["searcher"]["completions"], 9)
    self.assertEqual(ledger["generated"]["completions"], 21 + 12)
    self.assert_closed(ledger)
    # A later trainer does not write it off again.
    state = second.service.get_state()
    second.close()
    third = self.trainer(state=state, epoch=2, num_steps=2)
    self.assertEqual(third.service.finish(2, 20.0), ledger)
    self.assertEmpty(third.events.of("searcher_gone"))
    self.assertFalse((self.workdir / "leases/a.lease").exists())

  def test_searcher_and_store_are_lost_at_same_time(self):
    trainer = self.trainer(num_steps=1, lease_s=600.0)
    searcher = self.searcher("a", works=False)
    searcher.submit(0, 1, 2, 3)
    wait_until(lambda: len(searcher.client.unacked_blocks) == 0, "acknowledged")
    with mock.patch.object(trainer.server.leases, "read", return_value={}):
      with mock.patch.object(trainer.server.ingest, "download") as download:
        download.return_value = [], []
        searcher.submit(4)
        wait_until(lambda: self._announced() == 15, "the announcement")
        searcher.kill()
        self.store.lose()
    trainer.step(0)
    ledger = trainer.service.finish(1, 0.1)
    self.assertEqual(ledger["lost"]["searcher"]["completions"], 3)
    self.assertEqual(ledger["generated"]["completions"], 15)
    self.assert_closed(ledger)

  def test_successor_on_other_host_reports_loss(self):
    elsewhere = self.workdir / "host"
    searcher = self.searcher("a", works=False, workdir=elsewhere)
    searcher.submit(0)
    wait_until(lambda: self._announced() == 3, "the announcement")
    searcher.kill()
    self.store.lose()
    trainer = self.trainer(num_steps=1)
    self.searcher("b", workdir=elsewhere)
    trainer.step(0)
    self.assertEqual(trainer.events.of("searcher_gone"), ["a (replaced)"])
    ledger = trainer.service.finish(1, 20.0)
    self.assertEqual(ledger["lost"]["searcher"]["completions"], 3)
    self.assert_closed(ledger)

  def test_damaged_lease_is_reported(self):
    (self.workdir / "leases").mkdir()
    (self.workdir / "leases/x.lease").write_bytes(b"garbage")
    trainer = self.trainer()
    (told,) = trainer.events.of("damaged")
    self.assertIn("leases/x.lease: no valid lease", told)


class RestartTest(queue_case.QueueTestCase):

  def test_data_newer_than_checkpoint_is_applied_step_by_step(self):
    first = self.trainer(num_steps=12)
    self.searcher("a")
    first.step(0)
    state = first.service.get_state()
    for step in range(1, 8):
      first.step(step)
    first.close()
    second = self.trainer(state=state, epoch=1, num_steps=12)
    self.assertGreater(second.num_journaled, 4 * 7)
    for step in range(1, 12):
      second.step(step)
      # F (step + 1 + n) prompts at most, as if they had just been sampled.
      self.assertLessEqual(
          len(second.service.applied_positions), 4 * (step + 3)
      )
      self.assertGreaterEqual(
          len(second.service.applied_positions), 4 * (step + 1)
      )
    ledger = second.service.finish(12, 20.0)
    # Blocks in flight at the crash may arrive beside their repetition.
    twice = ledger["rejected"].get("duplicate", {"prompts": 0})
    self.assertEqual(ledger["generated"]["prompts"], 48 + twice["prompts"])
    self.assert_closed(ledger)

  def _run_on_without_a_journal(self, **changes):
    """Returns trainer and ledger; the searcher lives through the loss."""
    first = self.trainer(num_steps=4)
    searcher = self.searcher("a", **changes)
    first.step(0)
    state = first.service.get_state()
    first.service.open(1)
    wait_until(lambda: first.num_journaled > 8, "more")
    # Until then it keeps them, and would send them again.
    wait_until(
        lambda: searcher.client.unacked_blocks.first > state["watermarks"]["a"],
        "an acknowledgement",
    )
    first.close()
    received = state["order"]["received_below"]
    # Every acknowledged block since the checkpoint is gone.
    for path in self.directory.iterdir():
      path.unlink()
    second = self.trainer(state=state, epoch=1, num_steps=4)
    for step in range(1, 4):
      second.step(step)
    ledger = second.service.finish(4, 20.0)
    self.assertCountEqual(second.inserted, range(received, 16))
    self.assertGreater(ledger["lost"]["journal"]["prompts"], 0)
    self.assertNotEmpty(second.events.of("journal_lost"))
    # Blocks in flight at the crash may arrive beside their repetition.
    twice = ledger["rejected"].get("duplicate", {"prompts": 0})
    self.assertEqual(
        ledger["generated"]["prompts"],
        16 + ledger["lost"]["journal"]["prompts"] + twice["prompts"],
    )
    self.assertEqual(set(ledger["difference"].values()), {0})
    self.assertEqual(
        ledger["generated"]["prompts"], searcher.client.totals["prompts"]
    )
    return second, ledger

  def test_blocks_missing_from_journal_are_lost_and_sampled_again(self):
    _, ledger = self._run_on_without_a_journal()
    self.assert_closed(ledger)

  def test_counts_loss_reported_by_remote_searcher(self):
    second, ledger = self._run_on_without_a_journal(workdir=None)
    self.assertNotEmpty(second.events.of("gap"))
    # Others may have ended without telling theirs.
    self.assertFalse(ledger["closed"])
    (unknown,) = ledger["unknown"]
    self.assertRegex(unknown, "acknowledged.jsonl: missing.* may be lost")

  def _run_on_without(self, lose, *, later_checkpoint=False, is_closed=True):
    """Returns the ledger after a crash in which `lose` takes from the disk.

    The searcher is gone with the trainer, so that no later block of it shows
    what is missing.
    """
    first = self.trainer(num_steps=2)
    searcher = self.searcher("a", works=False)
    searcher.submit(0, 1, 2, 3)
    first.step(0)
    state = first.service.get_state()
    searcher.submit(4, 5)
    searcher.submit(6)
    wait_until(
        lambda: len(searcher.client.unacked_blocks) == 0, "all acknowledged"
    )
    later = first.service.get_state()
    first.close()
    searcher.client.close(0.0)
    self.store.lose()
    lose()
    if later_checkpoint:  # Saved after more was acknowledged.
      state["acknowledged"] = later["acknowledged"]
    second = self.trainer(state=state, epoch=1, num_steps=2)
    self.searcher("b", 1)
    second.step(1)
    ledger = second.service.finish(2, 20.0)
    if is_closed:
      self.assert_closed(ledger)
    self.assertCountEqual(second.inserted, range(4, 8))
    return second, ledger

  def _segments(self):
    return sorted(self.directory.glob("segment-*"))

  def test_acknowledged_blocks_of_truncated_journal_are_lost(self):

    def lose():
      (segment,) = self._segments()
      data = segment.read_bytes()
      segment.write_bytes(data[: data.rindex(b"tbarec\0\n")])

    second, ledger = self._run_on_without(lose)
    self.assertEqual(ledger["lost"]["journal"]["prompts"], 1)
    self.assertEqual(ledger["generated"]["prompts"], 7 + 2)
    self.assertLen(second.events.of("journal_lost"), 1)

  def test_acknowledged_blocks_of_modified_journal_are_lost(self):

    def lose():
      for segment in self._segments():
        data = bytearray(segment.read_bytes())
        data[-1] ^= 1
        segment.write_bytes(data)

    _, ledger = self._run_on_without(lose)
    self.assertEqual(ledger["lost"]["journal"]["prompts"], 1)

  def test_acknowledged_blocks_of_deleted_journal_are_lost(self):
    second, ledger = self._run_on_without(
        lambda: shutil.rmtree(self.directory), later_checkpoint=True
    )
    self.assertEqual(ledger["lost"]["journal"]["prompts"], 3)
    self.assertLen(second.events.of("journal_missing"), 1)
    self.assertLen(second.events.of("journal_lost"), 1)

  def _lose_acknowledgements(self, data=b"\x00garbage\n{]\n"):
    """Overwrites the log and cuts the journal between two records."""
    (self.directory / "acknowledged.jsonl").write_bytes(data)
    (segment,) = self._segments()
    data = segment.read_bytes()
    segment.write_bytes(data[: data.rindex(b"tbarec\0\n")])

  def test_counts_losses_of_truncated_journal_with_damaged_log(self):
    second, ledger = self._run_on_without(self._lose_acknowledgements)
    (told,) = second.events.of("damaged")
    self.assertRegex(told, "acknowledged.jsonl: 2 lines are damaged")
    # Leases on disk show what was acknowledged.
    self.assertEqual(ledger["lost"]["journal"]["prompts"], 1)
    self.assertEmpty(ledger["unknown"])
    # It is sound again.
    self.assertEmpty(journal.AckLog(self.directory).damage)

  def test_untraceable_loss_leaves_ledger_open(self):

    def lose():
      self._lose_acknowledgements()
      shutil.rmtree(self.workdir / "leases")

    second, ledger = self._run_on_without(lose, is_closed=False)
    self.assertLen(second.events.of("damaged"), 1)
    self.assertFalse(ledger["closed"])
    self.assertRegex(ledger["unknown"][0], "2 lines are damaged; blocks since")
    # Neither a restart nor a checkpoint forgets it.
    state = second.service.get_state()
    second.close()
    for saved in (state, None):
      again = self.trainer(state=saved, epoch=2, num_steps=2, start=False)
      again.service.apply(2, all_records=True)
      self.assertEqual(again.service.account()["unknown"], ledger["unknown"])
      again.close()

  def test_notices_changed_number_in_log_of_acknowledgements(self):
    path = self.directory / "acknowledged.jsonl"

    def lose():
      path.write_bytes(path.read_bytes().replace(b'"a", 3', b'"a", 7'))

    second, ledger = self._run_on_without(lose)
    self.assertRegex(second.events.of("damaged")[0], "1 lines are damaged")
    self.assertEmpty(ledger["lost"])

  def test_torn_last_line_is_not_damage(self):
    path = self.directory / "acknowledged.jsonl"

    def lose():
      line = path.read_bytes().split(b"\n")[-1]
      lines = [line[:size] for size in range(1, len(line))]
      path.write_bytes(b"\n".join([path.read_bytes(), *lines]))

    second, ledger = self._run_on_without(lose)
    self.assertEmpty(second.events.of("damaged"))
    self.assertEmpty(ledger["lost"])

  def test_journal_record_of_another_secret_is_skipped(self):
    first = self.trainer(start=False)
    first.journal.append([b"no message", self.message("a", 0, [self.group(0)])])
    first.close()
    second = self.trainer(start=False)
    self.assertLen(second.waiting, 1)
    self.assertLen(second.events.of("journal_refused"), 1)

  def test_new_store_locked_by_another_trainer_ends_this_one(self):
    owner = {"owner": None}

    def claim(transport):
      if owner["owner"]:
        raise queue_server.StoreLockedError(f"it is of {owner['owner']}")

    trainer = self.trainer(open_store=claim)
    self.searcher("a")
    trainer.step(0)
    owner["owner"] = "another"
    self.store.lose()
    with self.assertRaisesRegex(byte_store.TransportError, "it is of another"):
      for step in range(1, 1000):
        trainer.step(step)


class OtherSettingsTest(queue_case.QueueTestCase):

  def test_takes_no_work_of_trainer_with_other_settings(self):
    # The second's settings are not there at first.
    agree = mock.Mock(
        side_effect=[True, False, False, True, ValueError("they differ")]
    )
    client = self.searcher("a", works=False, check_trainer=agree).client

    def grant(epoch, block):
      key = "work/a"
      prompts = [[block, block, 0]]
      blocks = [{"number": block, "version": -1, "prompts": prompts}]
      work = {"count": block, "blocks": blocks, "acked": 0, "again": -1}
      about = {"run": queue_case.RUN, "key": key, "epoch": epoch}
      data = wire.encode_message({**about, **work}, queue_case.SECRET)
      self.client().put(key, data)

    for epoch in (1, 2):
      for block in (1, 2):
        grant(epoch, block)
        self.assertEqual(client.next_assignment(20.0).epoch, epoch)
    epochs = [call.args[1] for call in agree.call_args_list]
    self.assertEqual(epochs, [1, 2, 2, 2])
    grant(3, 1)
    with self.assertRaisesRegex(
        byte_store.TransportError, "ended: they differ"
    ):
      client.next_assignment(20.0)


class FullDiskTest(queue_case.QueueTestCase):

  def test_blocks_wait_in_store_until_there_is_room(self):
    trainer = self.trainer(starvation_s=0.7)
    full = journal.JournalFullError(28, "No space left on device")
    with mock.patch.object(trainer.journal, "append", side_effect=full):
      searcher = self.searcher("a", credits=2)
      with self.assertRaisesRegex(
          byte_store.DeadlineExceededError,
          "no room.*No space left.*searchers: a",
      ):
        trainer.step(0)
      self.assertLen(self.queue(), 2)
      self.assertEqual(len(searcher.client.unacked_blocks), 2)
      self.assertEmpty(trainer.waiting)
      # Nor is a searcher written off that the journal could not hold.
      self.lease("gone", totals=7)
      wait_until(lambda: "gone" in trainer.living(), "its lease")
      trainer.server.leases.entries["gone"].changed_at -= 100.0
      wait_until(lambda: "gone" in trainer.server.leaving, "it leaves")
    self.assertLen(trainer.events.of("journal_full"), 1)
    trainer.step(0)
    trainer.step(1)
    wait_until(lambda: not trainer.server.leaving, "written off")
    self.assertLen(trainer.events.of("journal_room"), 1)
    self.assertCountEqual(trainer.inserted, set(trainer.inserted))
    self.assertContainsSubset(range(8), trainer.inserted)
    ledger = trainer.service.account()
    self.assert_closed(ledger)

  def test_full_journal_downloads_no_block_twice(self):
    trainer = self.trainer(starvation_s=20.0)
    full = journal.JournalFullError(28, "No space left on device")
    read = []
    get = in_process.InProcessTransport.get

    def count(transport, key):
      read.append(key)
      return get(transport, key)

    with mock.patch.object(trainer.journal, "append", side_effect=full) as add:
      with mock.patch.object(in_process.InProcessTransport, "get", count):
        self.put_block("a", 0, self.message("a", 0, [self.group(0)]))
        wait_until(lambda: add.call_count > 3, "several tries")
        self.assertEqual(read.count("q/0/a/000000000000"), 1)
    wait_until(lambda: not self.queue(), "taken")

  def test_waits_while_disk_of_acknowledgement_log_is_full(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    full = OSError(28, "No space left on device")
    with mock.patch.object(
        trainer.server.intake.ack_log, "write_marks", side_effect=full
    ):
      searcher.submit(0)
      wait_until(lambda: trainer.server.obstacle, "no room")
      self.assertEqual(len(searcher.client.unacked_blocks), 1)
    wait_until(lambda: len(searcher.client.unacked_blocks) == 0, "acknowledged")
    self.assertIsNone(trainer.server.obstacle)
    self.assertEqual(trainer.server.counts["wire_duplicates"], 0)

  def test_another_disk_error_ends_trainer(self):
    trainer = self.trainer()
    broken = OSError(5, "Input/output error")
    with mock.patch.object(trainer.journal, "append", side_effect=broken):
      self.searcher("a")
      with self.assertRaisesRegex(
          byte_store.TransportError, "queue server has ended"
      ):
        trainer.step(0)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the channel between threads: groups, journal, params."""

import threading
from unittest import mock

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from tba_jax.transport import byte_store
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import memory
from tba_jax.transport.groups import messages
from tests.support import in_process
from tests.support import waiting
from tests.transport.groups import groups_contract
from tests.transport.groups import queue_case

wait_until = waiting.wait_until


class MemoryTrainerSide(queue_case.TrainerSide):

  def make_receiver(self, store, config, run, **kwargs):
    run = None if run.workdir is None else run
    channel = store.setdefault("channel", make_channel(config, run))
    return channel.make_receiver(**kwargs)


class MemorySearcherSide(queue_case.SearcherSide):

  def make_client(self, store, config, run, *, sid, index):
    return memory.MemorySink(store["channel"], sid, index)


def make_channel(config, run):
  return memory.MemoryChannel(
      config, run, lambda tree: {name: x + 0 for name, x in tree.items()}
  )


class MemoryCase(queue_case.QueueTestCase):

  trainer_side = MemoryTrainerSide
  searcher_side = MemorySearcherSide

  def trainer(self, **changes):
    self.store = {}
    return super().trainer(**changes)

  def kill(self, trainer):
    """Leaves the files as SIGKILL would: nothing more is written."""
    trainer.close()


class MemoryGroupsTest(groups_contract.GroupsContract, MemoryCase):

  def test_a_searcher_may_come_before_the_trainer(self):
    channel = make_channel(queue_case.make_config(), None)
    sink = memory.MemorySink(channel, "a", 0)
    self.assertIsNone(sink.next_assignment(0.01))
    self.assertEqual((sink.epoch, sink.stop_requested), (-1, False))
    self.assertEqual(sink.totals, dict.fromkeys(messages.UNITS, 0))
    gone = memory.MemorySink(channel, "gone", 1)
    gone.close(0.0)
    with mock.patch.object(memory.MemoryChannel, "start"):
      side = MemoryTrainerSide({"channel": channel}, None, epoch=3)
    side.service.open(0)
    self.assertIsNone(sink.next_assignment(0.01))
    channel.start()
    self.assertEqual(sink.next_assignment(20.0).epoch, 3)
    self.assertEqual(sink.epoch, 3)
    self.assertEqual(side.events.of("searcher_gone"), ["gone (finished)"])

  def test_submit_returns_once_the_block_is_journaled_and_marked(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    synced = []
    sync = journal.AckLog.sync
    with mock.patch.object(
        journal.AckLog, "sync", lambda log: synced.append(1) or sync(log)
    ):
      self.assertTrue(searcher.submit(0, 1))
    self.assertEqual(synced, [1])
    marks = journal.AckLog(self.directory).marks
    self.assertEqual(marks, {"a": [1, 2, 6, 12]})
    self.assertEqual(trainer.server.acknowledged(), marks)
    self.assertEqual(trainer.num_journaled, 2)

  def test_a_kill_between_journal_and_mark_counts_the_block_once(self):
    first = self.trainer(num_steps=2)
    state = first.service.get_state()
    searcher = self.searcher("a", works=False)
    with mock.patch.object(
        journal.AckLog, "sync", side_effect=KeyError("kill")
    ):
      with self.assertRaises(KeyError):
        searcher.submit(0, 1)
    self.kill(first)
    second = self.trainer(state=state, epoch=1, num_steps=2)
    self.searcher("b")
    for step in range(2):
      second.step(step)
    ledger = second.service.finish(2, 20.0)
    self.assertCountEqual(second.inserted, range(8))
    self.assertEqual(ledger["generated"]["prompts"], 8)
    self.assertEmpty(ledger["rejected"])
    self.assert_closed(ledger)

  def test_a_kill_before_the_journal_samples_the_block_again(self):
    first = self.trainer(num_steps=2)
    searcher = self.searcher("a", works=False)
    with mock.patch.object(
        journal.Journal, "append", side_effect=KeyError("kill")
    ):
      with self.assertRaises(KeyError):
        searcher.submit(0, 1)
    self.assertEqual(searcher.client.totals["prompts"], 0)
    self.kill(first)
    second = self.trainer(epoch=1, num_steps=2)
    self.searcher("b")
    for step in range(2):
      second.step(step)
    self.assertCountEqual(second.inserted, range(8))
    self.assert_closed(second.service.finish(2, 20.0))

  def test_lost_marked_blocks_are_counted(self):
    first = self.trainer(num_steps=2)
    searcher = self.searcher("a", works=False)
    searcher.submit(0, 1)
    state = first.service.get_state()
    searcher.submit(2, 3)
    self.kill(first)
    for path in self.directory.glob("*.journal"):
      path.unlink()
    second = self.trainer(state=state, epoch=1, num_steps=2)
    self.searcher("b")
    for step in range(2):
      second.step(step)
    ledger = second.service.finish(2, 20.0)
    self.assertEqual(ledger["lost"]["journal"]["prompts"], 4)
    self.assert_closed(ledger)

  def test_earlier_processes_are_written_off(self):
    from_store = queue_case.SearcherSide(
        in_process.InProcessStore(),
        "old",
        workdir=self.workdir,
        works=False,
    )
    from_store.submit(0)
    wait_until(
        lambda: list((self.workdir / "leases").glob("old.lease")), "its lease"
    )
    wait_until(
        lambda: from_store.client.unacked_blocks.unsent() == [],
        "the block is sent",
    )
    from_store.kill()
    trainer = self.trainer(num_steps=1)
    self.assertEqual(trainer.events.of("searcher_gone"), ["old (replaced)"])
    self.searcher("a")
    trainer.step(0)
    ledger = trainer.service.finish(1, 20.0)
    self.assertEqual(ledger["lost"]["searcher"]["prompts"], 1)
    self.assert_closed(ledger)

  def test_a_full_disk_holds_submit_up(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    full = journal.JournalFullError(28, "No space left on device")
    with mock.patch.object(journal.Journal, "append", side_effect=full):
      self.assertFalse(searcher.client.submit([self.group(0)], lambda: True))
      self.assertIn("no room", trainer.server.obstacle)
      # A block that was given up does not count as generated.
      self.assertEqual(searcher.client.totals["prompts"], 0)
      thread = threading.Thread(target=searcher.submit, args=(0, 1, 2, 3))
      thread.start()
      thread.join(0.6)
      self.assertTrue(thread.is_alive())
    thread.join(20.0)
    trainer.step(0)
    self.assertEqual(trainer.inserted, [0, 1, 2, 3])
    self.assertLen(trainer.events.of("journal_full"), 1)
    self.assertLen(trainer.events.of("journal_room"), 1)

  def test_another_disk_error_ends_both_ends(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    broken = OSError(5, "Input/output error")
    with mock.patch.object(journal.Journal, "append", side_effect=broken):
      with self.assertRaisesRegex(
          byte_store.TransportError, "Input/output error"
      ):
        searcher.submit(0)
    with self.assertRaisesRegex(
        byte_store.TransportError, "Input/output error"
    ):
      trainer.step(0)

  def test_a_closed_trainer_takes_nothing_more(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    trainer.close()
    self.assertTrue(searcher.client.stop_requested)
    self.assertFalse(searcher.submit(0))
    self.assertIsNone(searcher.client.next_assignment(0.0))
    self.assertEmpty(list(self.directory.glob("*.journal")))


class WithoutDirectoryTest(MemoryCase):

  def trainer(self, **changes):
    directory, self.workdir = self.workdir, None
    try:
      return super().trainer(**changes)
    finally:
      self.workdir = directory

  def test_nothing_is_written(self):
    trainer = self.trainer(num_steps=3)
    self.searcher("a")
    self.searcher("b", 1)
    for step in range(3):
      trainer.step(step)
    ledger = trainer.service.finish(3, 20.0)
    self.assertCountEqual(trainer.inserted, range(12))
    self.assert_closed(ledger)
    trainer.service.drop_journal_before(10)
    self.assertEmpty(list(self.workdir.iterdir()))


class MemoryParamsTest(absltest.TestCase):

  def make(self, keep=2):
    params = memory.MemoryParams(lambda tree: {"w": tree["w"] + 0}, keep=keep)
    params.epoch = 4
    return params, params

  def submit(self, params, version, **kwargs):
    params.submit(version, {"w": jnp.full(2, float(version))}, **kwargs)

  def test_the_newest_version_is_read_whole(self):
    params, source = self.make()
    self.assertIsNone(source.latest())
    self.submit(params, 0)
    params.wait(0, waiting.after(20.0))
    tag, leaves = source.wait_for(-1, 20.0)
    self.assertEqual(tag, (4, 0))
    np.testing.assert_array_equal(leaves["w"], [0.0, 0.0])
    self.submit(params, 1)
    params.wait(1, waiting.after(20.0))
    self.assertEqual(source.latest()[0], (4, 1))
    self.assertEqual(source.latest()[0], (4, 1))

  def test_a_kept_version_is_read_exactly(self):
    params, source = self.make(keep=3)
    for version in range(5):
      self.submit(params, version)
    params.wait(4, waiting.after(20.0))
    for version in (2, 3, 4):
      tag, leaves = source.wait_for(version, 20.0)
      self.assertEqual(tag, (4, version))
      np.testing.assert_array_equal(leaves["w"], [version] * 2)
    self.assertIsNone(source.wait_for(1, 0.0))
    self.assertIsNone(source.wait_for(5, 0.01))

  def test_a_version_of_a_nonfinite_step_is_dropped(self):
    params, source = self.make()
    self.submit(params, 0)
    self.submit(params, 1, nonfinite=jnp.asarray(1.0))
    self.submit(params, 2, nonfinite=jnp.asarray(0.0))
    params.wait(2, waiting.after(20.0))
    self.assertIsNone(source.wait_for(1, 0.0))
    self.assertEqual(source.wait_for(0, 0.0)[0], (4, 0))

  def test_a_copy_outlives_donated_params(self):
    params, source = self.make()
    tree = {"w": jnp.ones(3)}
    params.submit(0, tree)
    tree["w"].delete()
    params.wait(0, waiting.after(20.0))
    np.testing.assert_array_equal(source.latest()[1]["w"], np.ones(3))

  def test_wait_for_a_version_ends_at_a_stop(self):
    params, _ = self.make()
    params.wait(3, waiting.after(0.01))
    self.assertIsNone(params.latest())

  def test_an_error_of_publishing_reaches_both_roles(self):
    params, source = self.make()

    class Broken:
      is_ready = mock.Mock(return_value=False)

      def __array__(self, *args, **kwargs):
        raise FloatingPointError("no device")

    self.submit(params, 0, nonfinite=Broken())
    with self.assertRaisesRegex(byte_store.TransportError, "no device"):
      params.wait(0, waiting.after(20.0))
    Broken.is_ready.return_value = True
    with self.assertRaisesRegex(byte_store.TransportError, "no device"):
      source.latest()
    with self.assertRaisesRegex(byte_store.TransportError, "no device"):
      params.submit(1, {"w": jnp.ones(1)})

  def test_a_reader_waits_for_the_trainer(self):
    source, _ = self.make()
    self.assertIsNone(source.latest())
    self.assertIsNone(source.wait_for(0, 0.01))

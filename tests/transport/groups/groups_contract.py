# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every channel of groups promises, as tests that each channel runs."""

import dataclasses
import threading
import time
from unittest import mock

import numpy as np

from tba_jax.transport import byte_store
from tba_jax.transport.groups import service
from tests.replay import invariants
from tests.support import waiting
from tests.transport.groups import queue_case

SAMPLES = queue_case.SAMPLES
wait_until = waiting.wait_until


class GroupsContract:
  """Mixed into a `QueueTestCase` of a channel.

  `kill` leaves the files as a SIGKILL of the trainer would.
  """

  def test_groups_arrive_exactly_once_and_ledger_closes(self):
    trainer = self.trainer(num_steps=6)
    self.searcher("a")
    self.searcher("b", 1)
    for step in range(6):
      trainer.step(step)
    ledger = trainer.service.finish(6, 20.0)
    self.assertCountEqual(trainer.inserted, range(24))
    self.assertEqual(ledger["generated"]["prompts"], 24)
    self.assertEqual(ledger["queued"]["prompts"], 0)
    self.assert_closed(ledger)
    # All were asked to stop, and left by themselves.
    self.assertCountEqual(
        trainer.events.of("searcher_gone"), ["a (finished)", "b (finished)"]
    )
    invariants.check_buffer(trainer.buffer)

  def test_admission_bounds_sampling(self):
    trainer = self.trainer()
    searcher = self.searcher("a")
    trainer.service.open(0)
    # Step 0 and a lead of two steps: not a prompt more.
    wait_until(lambda: trainer.num_journaled == 12, "three steps of prompts")
    self.assertFalse(trainer.service.is_ready(3))
    positions = [p for b in searcher.blocks for p, _, _ in b.prompts]
    self.assertCountEqual(positions, range(12))

  def test_lockstep_takes_each_steps_own_data_in_order(self):
    trainer = self.trainer(lockstep=True, lead_steps=0)
    fast = self.searcher("fast")
    slow = self.searcher("slow", 1, delay_s=0.03)
    for step in range(5):
      trainer.step(step)
      self.assertEqual(trainer.inserted, list(range(4 * step + 4)))
    for block in fast.blocks + slow.blocks:
      for position, _, _ in block.prompts:
        self.assertEqual(block.require_version, position // 4)
    self.assertNotEmpty(fast.blocks)
    self.assertNotEmpty(slow.blocks)

  def test_lockstep_with_a_lead_takes_each_steps_data_in_order(self):
    trainer = self.trainer(lockstep=True, lead_steps=2)
    fast = self.searcher("fast")
    slow = self.searcher("slow", 1, delay_s=0.05)
    trainer.service.open(0)
    wait_until(lambda: trainer.num_journaled == 12, "three steps of prompts")
    for step in range(5):
      trainer.step(step)
      self.assertEqual(trainer.inserted, list(range(4 * step + 4)))
    self.assertNotEmpty(fast.blocks)
    self.assertNotEmpty(slow.blocks)

  def test_barriers_bound_age_of_free_searchers_data(self):
    """It is at most 2k - 1 steps old while it is recent."""
    k, oldest = 3, 0
    trainer = self.trainer(prompts_per_step=0, every_steps=k)
    self.searcher("fast")
    slow = self.searcher("slow", 1, delay_s=0.15)
    for step in range(6 * k):
      time.sleep(0.02)  # A block of the slow one takes seven steps.
      trainer.service.is_ready(step)
      trainer.service.begin_step(step, lambda: False)
      draw = trainer.buffer.sample(4, SAMPLES, step)
      oldest = max(oldest, draw.staleness_steps[draw.recent].max(initial=0))
    self.assertBetween(oldest, k, 2 * k - 1)
    self.assertNotEmpty(slow.blocks)

  def test_barrier_waits_for_granted_blocks_and_grants_no_more(self):
    trainer = self.trainer(prompts_per_step=0, every_steps=2)
    is_ready = trainer.service.is_ready
    slow = self.searcher("slow", works=False)
    trainer.service.open(0)
    block = slow.client.next_assignment(20.0)
    other = self.searcher("other", 1, works=False)
    first = other.client.next_assignment(20.0)
    other.submit(*(p for p, _, _ in first.prompts))
    wait_until(lambda: trainer.num_journaled == 2, "one block")
    for step in range(2):
      trainer.step(step)
    self.assertFalse(is_ready(2))
    if held := other.client.next_assignment(0.2):  # Granted before.
      other.submit(*(p for p, _, _ in held.prompts))
    self.assertIsNone(other.client.next_assignment(0.2))
    self.assertFalse(is_ready(2))
    slow.submit(*(p for p, _, _ in block.prompts))
    wait_until(lambda: is_ready(2), "the last block")
    self.assertIsNone(slow.client.next_assignment(0.2))
    trainer.step(2)
    self.assertLen(trainer.inserted, 6 if held else 4)
    self.assertEqual(slow.client.next_assignment(20.0).require_version, 2)

  def test_barrier_ignores_lost_searcher(self):
    trainer = self.trainer(prompts_per_step=0, every_steps=1)
    idle = self.searcher("idle", works=False)
    trainer.service.open(0)
    self.assertIsNotNone(idle.client.next_assignment(20.0))
    self.searcher("b", 1)
    trainer.step(0)
    self.assertFalse(trainer.service.is_ready(1))
    idle.client.close(0.0)
    trainer.step(1)

  def test_starvation_at_barrier_names_searchers(self):
    trainer = self.trainer(prompts_per_step=0, starvation_s=0.5)
    mute = self.searcher("mute", works=False)
    trainer.service.open(0)
    self.assertIsNotNone(mute.client.next_assignment(20.0))
    self.searcher("b", 1)
    trainer.step(0)
    with self.assertRaisesRegex(
        byte_store.DeadlineExceededError, "step 1 waits for .*mute .silent for"
    ):
      trainer.step(1)

  def test_content_is_rejected_by_reason(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    wait_until(trainer.living, "the searcher")
    ok = [self.group(p) for p in range(10)]
    rewards = np.asarray([np.inf, 0, 0], np.float32)
    blocks = [
        [dataclasses.replace(ok[0], rewards=rewards), ok[4]],
        [dataclasses.replace(ok[8], position=1 << 40)],
        [dataclasses.replace(ok[3], prompt_id=ok[4].prompt_id)],
        [ok[4], ok[5], ok[6]],
    ]
    for block in blocks:
      self.assertTrue(searcher.client.submit(block))
    wait_until(lambda: len(trainer.waiting) == 4, "all journaled")
    trainer.step(0)
    self.assertEqual(trainer.inserted, [4, 5, 6])
    ledger = trainer.service.account()
    rejected = {k: v["prompts"] for k, v in ledger["rejected"].items()}
    self.assertEqual(rejected, {"reward": 1, "position": 2, "duplicate": 1})
    # The implausible position is not counted, the duplicate once.
    self.assertEqual(trainer.num_journaled, 5)
    self.assert_closed(ledger)

  def test_unjudged_completions_arrive_marked_and_are_dropped(self):
    """Also from the journal, after a kill; so the rewards of turns."""
    trainer = self.trainer()
    searcher = self.searcher("a", works=False)
    wait_until(trainer.living, "the searcher")
    some = np.asarray([np.nan, 0.5, 0], np.float32)
    none = np.full(3, np.nan, np.float32)
    groups = [
        dataclasses.replace(self.group(p), rewards=r)
        for p, r in enumerate((some, none, none + some, some))
    ]
    self.assertTrue(searcher.client.submit(groups))
    wait_until(lambda: len(trainer.waiting) == 1, "journaled")
    (record,) = trainer.waiting
    for group, sent in zip(record.groups, groups, strict=True):
      np.testing.assert_array_equal(group.rewards, sent.rewards)
    trainer.step(0)
    self.assertEqual(
        trainer.service.take_failures(),
        [(0, 1 / 3), (1, 1.0), (2, 1.0), (3, 1 / 3)],
    )
    self.assertEmpty(trainer.service.take_failures())
    ledger = trainer.service.account()
    left_out = ledger["rejected"]["not_judged"]
    self.assertEqual((left_out["prompts"], left_out["completions"]), (2, 8))
    self.assertLen(trainer.buffer, 4)
    self.assertTrue(
        np.isfinite(
            trainer.buffer.table.rewards[trainer.buffer.table.live_rows()]
        ).all()
    )
    self.assert_closed(ledger)

  def test_grants_of_leaving_searcher_go_to_another(self):
    trainer = self.trainer(num_steps=3)
    trainer.service.open(0)
    idle = self.searcher("idle", works=False)
    self.assertIsNotNone(idle.client.next_assignment(20.0))
    idle.client.close(0.0)
    wait_until(lambda: trainer.events.of("searcher_gone"), "its end")
    self.searcher("b", 1)
    for step in range(3):
      trainer.step(step)
    self.assertCountEqual(trainer.inserted, range(12))
    self.assert_closed(trainer.service.finish(3, 20.0))

  def test_interrupted_trainer_asks_its_searchers_to_leave(self):
    trainer = self.trainer()
    searcher = self.searcher("a")
    trainer.step(0)
    trainer.service.stop_searchers(20.0)
    self.assertTrue(searcher.client.stop_requested)
    self.assertFalse(searcher.client.run_done)
    self.assertFalse(trainer.server.has_searchers())

  def test_finished_run_is_reported(self):
    trainer = self.trainer(num_steps=1)
    searcher = self.searcher("a")
    trainer.step(0)
    trainer.service.finish(1, 20.0)
    self.assertTrue(searcher.client.run_done)

  def test_starvation_names_searchers(self):
    trainer = self.trainer(starvation_s=0.5)
    mute = self.searcher("mute", works=False)
    mute.client.next_assignment(0.1)
    wait_until(trainer.living, "the searcher")
    with self.assertRaisesRegex(
        byte_store.DeadlineExceededError, "step 0 has 0 of 4 .*mute .silent for"
    ):
      trainer.step(0)

  def test_round_of_searcher_at_work_may_take_long(self):
    trainer = self.trainer(starvation_s=0.5)
    slow = self.searcher("slow", works=False, lease_s=0.2)
    slow.client.works = lambda: True
    wait_until(
        lambda: trainer.living().get("slow", {}).get("stats", {}).get("works"),
        "the searcher",
    )
    begun = time.monotonic()
    # Twice the limit passes before the first block.
    enough = lambda: time.monotonic() > begun + 1.0
    self.assertFalse(trainer.service.begin_step(0, enough))
    begun = time.monotonic()
    with (
        mock.patch.object(service, "MOST_WAITS", 3),
        self.assertRaisesRegex(
            byte_store.DeadlineExceededError, "step 0 has 0 of 4 .*slow"
        ),
    ):
      trainer.service.begin_step(0, lambda: time.monotonic() > begun + 30.0)
    self.assertGreater(time.monotonic() - begun, 1.4)
    slow.client.works = lambda: False
    with self.assertRaisesRegex(
        byte_store.DeadlineExceededError, "step 0 has 0 of 4 .*slow .silent for"
    ):
      trainer.step(0)

  def test_stopped_wait_applies_nothing(self):
    trainer = self.trainer()
    self.assertFalse(trainer.service.begin_step(0, lambda: True))
    self.assertFalse(trainer.server.urgent)

  def test_checkpoint_and_journal_give_same_state(self):
    first = self.trainer(lockstep=True, lead_steps=0)
    searchers = [self.searcher("a"), self.searcher("b", 1)]
    saved, states = [], []
    for step in range(6):
      first.step(step)
      states.append(first.service.get_state())
      saved.append(self._state(first))
    self.kill(first)
    for searcher in searchers:
      searcher.close()
    # From nothing, from an older state, and from the newest.
    for start in (-1, 2, 5):
      second = self.trainer(
          start=False,
          state=states[start] if start >= 0 else None,
          epoch=1,
          lockstep=True,
          lead_steps=0,
      )
      for step in range(start + 1, 6):
        second.step(step)
      self.assert_same(self._state(second), saved[-1])
      invariants.check_buffer(second.buffer)
      second.close()

  def test_run_continues_after_kill(self):
    first = self.trainer(num_steps=12)
    searcher = self.searcher("a")
    first.step(0)
    state = first.service.get_state()
    applied = list(first.inserted)  # Four, and what had come besides.
    for step in range(1, 5):
      first.step(step)
    self.kill(first)
    searcher.close()
    second = self.trainer(state=state, epoch=1, num_steps=12)
    self.searcher("b")
    for step in range(1, 12):
      second.step(step)
    ledger = second.service.finish(12, 20.0)
    # A position is trained once, whichever process sampled it.
    self.assertCountEqual(applied + second.inserted, range(48))
    self.assertEmpty(ledger["lost"].get("journal", ()))
    self.assert_closed(ledger)

  def test_status_numbers_reach_trainer(self):
    trainer = self.trainer()
    searcher = self.searcher("a", works=False, lease_s=0.2)
    wait_until(lambda: trainer.living().get("a"), "the searcher")
    searcher.client.set_stats({"busy_s": 2.0})
    searcher.client.begun_s[0] = 0.0
    stats = lambda: trainer.living()["a"]["stats"]
    wait_until(lambda: "block_age_s" in stats(), "an age")
    self.assertEqual(stats()["busy_s"], 2.0)
    self.assertGreater(stats()["block_age_s"], 0)
    self.assertEqual(trainer.living()["a"]["credits"], 4)

  def test_stop_ends_wait_for_assignment(self):
    trainer = self.trainer()
    client = self.searcher("a", works=False).client
    wait_until(trainer.living, "the searcher")
    got = []

    def wait():
      while not client.stop_requested:
        got.append(client.next_assignment(0.2))

    thread = threading.Thread(target=wait)
    thread.start()
    trainer.server.stop_searchers(done=True)
    thread.join(20.0)
    self.assertFalse(thread.is_alive())
    self.assertEqual(set(got), {None})

  def _state(self, side):
    state = side.service.get_state()
    # A state of another epoch has not the same starts.
    del state["buffer"]["starts"]
    return state

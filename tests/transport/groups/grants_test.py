# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of admission by steps and rounds, and of the grants of blocks."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax import schedule
from tba_jax.replay import prompt_order
from tba_jax.transport.groups import grants as grants_lib
from tests.transport.groups import queue_case


def make(**changes):
  settings = dict(
      prompts_per_step=4,
      warm_prompts=0,
      lead_steps=1,
      num_steps=12,
      lockstep=False,
      wait_for_fresh=True,
  )
  return schedule.Steps(**{**settings, **changes})


def make_rounds(lag_rounds):
  return schedule.Rounds(
      num_prompts=6, round_steps=4, lag_rounds=lag_rounds, num_steps=12
  )


class RoundsTest(parameterized.TestCase):

  @parameterized.parameters(
      # Round r (from 1) trains on θ of round r-2; a round has 4 steps.
      (1, [0, 0, 4]),
      (0, [0, 4, 8]),
  )
  def test_three_rounds_have_their_versions(self, lag, versions):
    flow = make_rounds(lag)
    self.assertEqual(
        [flow.version_of(p) for p in range(18)],
        [v for v in versions for _ in range(6)],
    )

  def test_the_next_round_is_admitted_only_once_a_round_has_begun(self):
    flow = make_rounds(1)
    self.assertEqual([flow.needed(s) for s in (0, 3, 4, 8)], [6, 6, 12, 18])
    self.assertEqual([flow.admitted(s) for s in (0, 3, 4, 8)], [6, 6, 12, 18])
    # And none after the last.
    self.assertEqual([flow.admitted_after(s) for s in (0, 3, 4, 8)],
                     [12, 12, 18, 18])  # fmt: skip
    self.assertEqual([flow.may_run_ahead(s) for s in (3, 4, 5)],
                     [True, False, True])  # fmt: skip

  def test_newest_version_samples_without_rounds(self):
    flow = make()
    self.assertEqual(flow.version_of(9), -1)
    self.assertFalse(flow.is_pinned)
    self.assertEqual((flow.needed(2), flow.admitted(2)), (12, 16))

  @parameterized.parameters(1, 2, 4)
  def test_free_running_searchers_sample_more_per_step(self, count):
    """A step lasts as long as three blocks of each searcher."""
    sampled = {}
    for F in (0, 4):
      flow = make(prompts_per_step=F, wait_for_fresh=False, warm_prompts=3)
      self.assertEqual([flow.needed(s) for s in (0, 11)], [3, 3])
      order = prompt_order.PromptOrder(1000, seed=0)
      grants = grants_lib.Grants(order, prompts_per_round=4, schedule=flow)
      searchers = [f"s{i}" for i in range(count)]
      held, delivered = {}, 0
      for step in range(10):
        before = delivered
        self.assertEqual(grants.admit(flow.admitted(step)), step == 0 or F > 0)
        for _ in range(3):
          for sid in searchers:
            held |= grants.assign(searchers)
            for block in held.get(sid, [])[:1]:
              grants.note_journaled(sid, [p for p, *_ in block["prompts"]])
              delivered += len(block["prompts"])
              held[sid] = held[sid][1:]
      sampled[F] = delivered - before  # Prompts of the last step.
    self.assertEqual(sampled, {0: 3 * 4 * count, 4: 4})

  def test_free_searchers_meet_barriers_if_steps_wait(self):
    config = queue_case.make_config(prompts_per_step=0, every_steps=3)
    flow = schedule.make_schedule(config)
    barriers = [step for step in range(10) if flow.has_barrier(step)]
    self.assertEqual(barriers, [3, 6, 9])
    self.assertEqual([flow.needed(s) for s in (0, 9)], [1, 1])
    self.assertFalse(flow.is_pinned)
    for changes in (dict(wait_for_fresh=False), dict(prompts_per_step=4)):
      config.search.update(changes)
      flow = schedule.make_schedule(config)
      self.assertFalse(any(map(flow.has_barrier, range(10))))

  def test_lockstep_samples_with_the_step_s_own(self):
    flow = make(lockstep=True, lead_steps=0)
    self.assertTrue(flow.is_pinned)
    self.assertEqual([flow.version_of(p) for p in (0, 3, 4, 9)], [0, 0, 1, 2])
    self.assertEqual((flow.needed(2), flow.admitted(2)), (12, 12))
    self.assertEqual(flow.admitted_after(12), 48)

  def test_lockstep_with_a_lead_samples_exactly_so_many_steps_before(self):
    flow = make(lockstep=True, lead_steps=3, warm_prompts=2)
    versions = [flow.version_of(2 + 4 * step) for step in range(8)]
    self.assertEqual(versions, [0, 0, 0, 0, 1, 2, 3, 4])
    # All that a version samples is admitted once it is there, and no more.
    for step in range(12):
      admitted = flow.admitted(step)
      self.assertEqual(flow.version_of(admitted - 1), min(step, 8))
    self.assertEqual(flow.admitted_after(12), 2 + 48)

  def test_lockstep_continues_from_restored_version(self):
    flow = make(lockstep=True, lead_steps=3, first_version=5)
    versions = [flow.version_of(4 * step) for step in range(5, 11)]
    self.assertEqual(versions, [5, 5, 5, 5, 6, 7])


def _positions(blocks):
  return [[p for p, _, _ in block["prompts"]] for block in blocks]


class GrantsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.grants = grants_lib.Grants(
        prompt_order.PromptOrder(100, seed=0),
        prompts_per_round=4,
        schedule=make(lockstep=True, prompts_per_step=16, lead_steps=0),
    )

  def test_nothing_before_it_is_admitted(self):
    self.assertEmpty(self.grants.assign(["a"]))

  def test_two_blocks_ahead_and_no_more(self):
    self.grants.admit(100)
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3], [4, 5, 6, 7]])
    self.assertEmpty(self.grants.assign(["a"]))
    self.grants.note_begun("a", work["a"][0]["number"])
    work = self.grants.assign(["a"])
    self.assertEqual(
        _positions(work["a"]), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    )
    self.assertEmpty(self.grants.assign(["a"]))

  def test_lockstep_grants_a_step_once_the_one_before_has_arrived(self):
    self.grants.admit(100)
    self.assertLen(self.grants.assign(["a", "b"])["b"], 2)
    self.grants.note_journaled("a", range(1, 16))
    self.assertEmpty(self.grants.assign(["c"]))
    self.grants.note_journaled("a", [0])
    work = self.grants.assign(["c"])["c"]
    self.assertEqual(_positions(work), [[16, 17, 18, 19], [20, 21, 22, 23]])
    self.assertEqual([block["version"] for block in work], [1, 1])

  def test_delivered_blocks_have_begun(self):
    self.grants.admit(100)
    self.grants.assign(["a"])
    # A group of the second: the searcher has begun both.
    self.grants.note_journaled("a", [5])
    work = self.grants.assign(["a"])
    self.assertLen(work["a"], 4)
    self.grants.note_journaled("a", [0, 1, 2, 3])
    work = self.grants.assign(["a"], ["a"])
    self.assertEqual(_positions(work["a"])[0], [4, 5, 6, 7])

  def test_admission_bounds_what_is_out(self):
    self.grants.admit(8)
    work = self.grants.assign(["a", "b"])
    # Each gets a block: a step of two blocks is sampled by two searchers.
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3]])
    self.assertEqual(_positions(work["b"]), [[4, 5, 6, 7]])
    self.grants.admit(4)  # It never shrinks.
    self.assertEmpty(self.grants.assign(["a", "b"]))
    self.assertEqual(self.grants.cursor, 8)

  def test_the_searcher_with_the_fewest_blocks_is_served_first(self):
    self.grants.admit(4)
    self.grants.assign(["a"])
    self.grants.admit(8)
    work = self.grants.assign(["a", "b"])
    self.assertEqual(_positions(work["b"]), [[4, 5, 6, 7]])

  def test_a_partial_block_waits_while_others_are_to_begin(self):
    self.grants.admit(6)
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3]])
    self.grants.note_begun("a", work["a"][0]["number"])
    # The rest is granted as a partial block while none is to begin.
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3], [4, 5]])

  def test_blocks_of_a_gone_searcher_go_to_another(self):
    self.grants.admit(4)
    self.grants.assign(["a"])
    self.grants.forget("a")
    work = self.grants.assign(["b"])
    self.assertEqual(_positions(work["b"]), [[0, 1, 2, 3]])

  def test_the_rest_of_a_gone_searchers_block_is_granted_again(self):
    self.grants.admit(4)
    self.grants.assign(["a"])
    self.grants.note_journaled("a", [1, 2])
    self.assertTrue(self.grants.holds("a"))
    self.grants.forget("a")
    self.assertFalse(self.grants.holds("a"))
    work = self.grants.assign(["b"])
    self.assertEqual(_positions(work["b"]), [[0, 3]])

  def test_all_blocks_are_assigned_again_in_a_new_store(self):
    self.grants.admit(4)
    before = self.grants.assign(["a"])
    self.assertEmpty(self.grants.assign(["a"]))
    self.grants.assign_again()
    # A searcher that is absent gets its blocks when it is back.
    self.assertEmpty(self.grants.assign(["b"]))
    self.assertEqual(self.grants.assign(["a"]), before)

  @parameterized.parameters(
      # Grants of one step; of two, and of three with a warm start of 3 prompts.
      (4, 0, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
      (6, 0, [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13], [14, 15]]),
      (16, 3, [[*range(11)], [*range(11, 19)], [*range(19, 27)]]),
  )
  def test_a_block_with_one_version_has_prompts_of_one_step(
      self, size, warm_prompts, blocks
  ):
    flow = make(
        lockstep=True,
        prompts_per_step=8,
        warm_prompts=warm_prompts,
        lead_steps=2,
    )
    grants = grants_lib.Grants(
        prompt_order.PromptOrder(100, seed=0),
        prompts_per_round=size,
        schedule=flow,
    )
    grants.admit(flow.admitted(0))
    found = []
    while len(found) < len(blocks):
      (block,) = grants.assign(["a"], ["a"])["a"][:1]
      positions = [p for p, _, _ in block["prompts"]]
      self.assertEqual({flow.version_of(p) for p in positions},
                       {block["version"]})  # fmt: skip
      grants.note_journaled("a", positions)
      found.append(positions)
    self.assertEqual(found, blocks)

  def test_asked_searchers_get_unchanged_blocks(self):
    self.grants.admit(4)
    held = self.grants.assign(["a"])
    self.assertEqual(self.grants.assign(["a"], ["a"]), held)
    self.assertEqual(self.grants.assign([], ["b"]), {"b": []})

  def test_serves_thousands_of_searchers(self):
    names = [f"s{i:04d}" for i in range(2000)]
    order = prompt_order.PromptOrder(100_000, seed=0)
    grants = grants_lib.Grants(order, prompts_per_round=4, schedule=make())
    grants.admit(4 * 3000)
    work = grants.assign(names)
    # Each gets a block, and a second one in the order of their names.
    self.assertEqual(
        [len(work[name]) for name in names], [2] * 1000 + [1] * 1000
    )


class MakeFlowTest(absltest.TestCase):

  def test_makes_the_flow_of_a_config(self):
    config = queue_case.make_config(lead_steps=2, num_steps=6)
    # 7 completions at 3 a prompt take 3 prompts.
    config.replay.warm_start_completions = 7
    flow = schedule.make_schedule(config)
    self.assertEqual((flow.prompts_per_step, flow.warm_prompts), (4, 3))
    self.assertEqual((flow.lead_steps, flow.num_steps), (2, 6))
    self.assertEqual(flow.needed(0), 3 + 4)
    self.assertFalse(flow.is_pinned)
    config.rounds.mini_batches = 3
    config.rounds.passes = 2
    flow = schedule.make_schedule(config)
    self.assertEqual((flow.num_prompts, flow.round_steps), (6, 6))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the searcher's loop with autospecced mocks of its neighbors."""

from concurrent import futures
import contextlib
import itertools
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import collect
from tba_jax import searcher
from tba_jax import types
from tba_jax.learning import group_reference
from tba_jax.learning import published
from tba_jax.rewards import judges
from tba_jax.run import metrics
from tba_jax.sampling import decode
from tba_jax.transport import ports
from tba_jax.transport.groups import queue_client
from tba_jax.transport.params import pull
from tba_jax.transport.params import version as version_lib
from tests.support import base_config
from tests.support import fakes
from tests.support import waiting

S = 2
# An environment wrote the second token of the first completion.
SAMPLED = np.array([[1, 0, 1, 0], [1, 1, 0, 0]], np.bool_)


class _InlineExecutor:

  def __init__(self, *args, **kwargs):
    pass

  def submit(self, fn):
    future = futures.Future()
    future.set_result(fn())
    return future

  def shutdown(self, *args, **kwargs):
    pass


class SearcherTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    autospec = lambda cls: mock.create_autospec(cls, instance=True)
    self.log = []
    self.published = [(1, 0)]  # newest last
    self.blocks = []
    self.epoch = 1
    self.asked = []  # versions requested from the puller

    self.puller = autospec(pull.Puller)
    self.puller.wait_for.side_effect = self.wait_for
    self.puller.latest.side_effect = lambda: self.wait_for(-1, 0.0)
    self.puller.stats = mock.Mock(refused=3)
    self.queue = autospec(queue_client.QueueClient)
    self.queue.stop_requested = self.queue.run_done = False
    self.queue.begun_s = {}
    self.queue.next_assignment.side_effect = self.next_assignment
    self.queue.totals = {"prompts": 2, "completions": 4, "tokens": 12}
    type(self.queue).epoch = property(lambda _: self.epoch)
    self.queue.submit.side_effect = self.submit
    self.sampler = autospec(decode.JaxSampler)
    self.sampler.stream.side_effect = self.stream
    self.begun = []  # blocks of each stream
    self.joins = False  # whether other blocks join the first
    self.enter_context(mock.patch.object(searcher, "ASK_EVERY_S", 0.0))
    self.submitted = []
    self.chunks = []  # versions published during each chunk
    self.wrong = set()  # versions whose params differ from the trainer's
    self.compared = []  # versions that were compared
    self.events = []
    self.used = []  # (given version, versions of the leaves) of each round
    spans = autospec(metrics.SpanWriter)
    spans.span.side_effect = self.span
    config = base_config.make(
        search__samples_per_prompt=S, sampling__in_flight="keep_cache"
    )
    self.task = fakes.FakeTask({0: {"23"}, 3: {"45"}})
    self.lag_steps, self.takes_newer = 0, False
    self.searcher = None
    self.open_spans = []
    self.external_stop = lambda: False
    self.now_s = 0.0
    patch = mock.patch.object(
        metrics.time, "perf_counter", side_effect=lambda: self.now_s
    )
    patch.start()
    self.addCleanup(patch.stop)

    self.config = config
    self.judge = judges.InProcess(self.task)
    self.reference = None
    self.judge_shares_mesh = self.reference_first = False
    self.swaps_in_flight = True
    self.clock = spans.clock = metrics.BusyClock()
    self.spans = spans
    self.warmed_up = []
    self.has_room, self.puts = False, []

  def make(self):
    """Returns a searcher with the test's parts."""
    parts = searcher.SearcherParts(
        sink=self.queue,
        source=self.puller,
        collector=collect.Collector(
            self.task,
            fakes.FakeTokenizer(),
            self.sampler,
            self.judge,
            num_completions=S,
            loss=self.config.loss,
            reference=self.reference,
        ),
        put=lambda leaves: self.put(leaves),
        has_room=lambda params: self.has_room,
        problem=lambda leaves, params: self.problem(leaves, params),
        on_event=lambda *event: self.events.append(event),
        warm_up=self.warmed_up.append,
        judge_totals=self.judge.totals,
        spans=self.spans,
        swaps_in_flight=self.swaps_in_flight,
        judge_shares_mesh=self.judge_shares_mesh,
        reference_first=self.reference_first,
        lag_steps=self.lag_steps,
        takes_newer=self.takes_newer,
    )
    made = searcher.Searcher(parts, lambda: self.external_stop())
    self.addCleanup(made.close)
    return made

  @contextlib.contextmanager
  def span(self, kind, **fields):
    if "lane" in fields:
      yield
      return
    self.log.append(kind)
    if kind == "load":  # Its seconds belong to no other span.
      self.assertEqual(self.open_spans, [])
    self.open_spans.append(kind)
    with self.clock.span(kind):
      self.now_s += 1.0
      yield
    self.open_spans.pop()

  def put(self, leaves):
    self.puts.append(int(leaves["['b']['c']"]))
    return published.unflatten(leaves, self.params(0))

  def problem(self, leaves, params):
    chex.assert_trees_all_equal(params, self.params(leaves["['a']"][0]))
    version = int(leaves["['b']['c']"])
    self.compared.append(version)
    return "another policy" if version in self.wrong else ""

  def params(self, version):
    return {"a": jnp.full((2,), version), "b": {"c": jnp.asarray(version)}}

  def leaves(self, version):
    return {"['a']": np.full((2,), version), "['b']['c']": np.array(version)}

  def wait_for(self, version, timeout_s):
    self.asked.append(version)
    if not self.published or self.published[-1][1] < version:
      return None
    version = version_lib.Version(*self.published[-1])
    return version, self.leaves(version.step)

  def next_assignment(self, timeout_s):
    if not self.blocks:
      self.queue.stop_requested = True
      return None
    block = self.blocks.pop(0)
    return block() if callable(block) else block

  def submit(self, groups, should_stop):
    self.submitted.append(groups)
    return True

  def sample(self, params, prompts, *, version, newer, turns=None):
    leaves = lambda tree: {int(x.ravel()[0]) for x in jax.tree.leaves(tree)}
    self.used.append((version, leaves(params)))
    self.in_flight = []  # results of `newer` by chunk
    for versions in self.chunks if newer else ():
      self.published += versions
      found = newer()
      self.in_flight.append(found and (found[0], leaves(found[1])))
    self.requests = prompts
    tokens = np.array([[2, 3, 1, 0], [2, 3, 0, 0]], np.int32)
    return [
        types.Completions(
            tokens=tokens + 2 * np.array([[i, i, 0, 0], [i, i, 0, 0]]),
            lengths=np.array([3, 2], np.int32),
            sampled_mask=SAMPLED,
            logprobs=np.full((S, 4), -0.5, np.float32),
            plain_logprobs=np.full((S, 4), -0.5, np.float32),
            stopped=np.array([True, False]),
            versions=np.full(S, version, np.int32),
            token_versions=self.token_versions(version),
        )
        for i in range(len(prompts))
    ]

  def stream(self, params, more, *, version, newer, turns=None):
    """Samples a block, or all blocks in reverse order if they join."""
    batches = list(iter(more, None)) if self.joins else [more()]
    self.begun.append(len(batches))
    prompts = [prompt for batch in batches for prompt in batch]
    completions = self.sample(params, prompts, version=version, newer=newer)
    over = list(enumerate(completions))
    yield from [[pair] for pair in over[::-1]] if self.joins else [over]

  def token_versions(self, version):
    """Returns versions of tokens: those after the first have the newest."""
    gave = [found[0] for found in self.in_flight if found]
    versions = np.full((S, 4), gave[-1] if gave else version, np.int32)
    versions[:, 0] = version
    versions[:, 3] = -1  # past the length
    return versions

  def block(self, require=-1, epoch=1, prompts=((7, 0, 0), (8, 3, 2))):
    return ports.Assignment(epoch, 0, require, prompts)

  def run_it(self, *blocks, should_stop=lambda: False):
    self.blocks = list(blocks)
    self.external_stop = should_stop
    # The same searcher continues in later calls.
    self.searcher = self.searcher or self.make()
    return self.searcher.run()

  def positions(self):
    """Returns the submitted positions in order."""
    return [group.position for groups in self.submitted for group in groups]

  def test_blocks_join_while_others_are_decoded(self):
    self.joins = True
    other = self.block(prompts=((9, 0, 1),))
    self.run_it(self.block(), other, self.block(prompts=((5, 0, 2),)))
    self.assertEqual(self.begun, [3])
    # Groups are submitted in the order in which they end.
    self.assertEqual(self.positions(), [5, 9, 8, 7])
    self.assertEmpty(self.queue.begun_s)
    self.assertEqual(self.log.count("decode"), 5)  # The last ends the stream.

  def test_blocks_with_the_same_required_version_share_a_stream(self):
    self.joins = True
    self.published = [(1, 0), (1, 1)]
    self.lag_steps = 1
    self.puller.wait_for.side_effect = lambda version, timeout_s: (
        self.wait_for(version, timeout_s)
        if version < 0
        else (version_lib.Version(1, version), self.leaves(version))
    )
    block = lambda version, position: self.block(
        version, prompts=((position, 0, 0),)
    )
    self.run_it(block(0, 1), block(0, 2), block(1, 3), block(1, 4), block(0, 5))
    self.assertEqual(self.begun, [2, 2, 1])
    self.assertEqual(self.used, [(0, {0}), (1, {1}), (0, {0})])
    self.assertEqual(self.positions(), [2, 1, 4, 3, 5])
    self.assertEqual(self.in_flight, [])  # No newer params are swapped in.

  def test_regranted_prompt_is_sampled_once(self):
    self.joins = True
    again = self.block(prompts=((8, 3, 2), (9, 0, 1)))
    self.run_it(self.block(), again)
    self.assertEqual(self.positions(), [9, 8, 7])

  def test_no_block_joins_while_the_judge_is_behind(self):
    self.joins = True
    judge, go_on = self.judge.judge, threading.Event()

    def slow_judge(requests):
      self.assertTrue(go_on.wait(20.0))
      return judge(requests)

    def stream(params, more, *, version, newer, turns=None):
      number = 0
      while (batch := more()) is not None:
        for completions in self.sample(
            params, batch, version=version, newer=newer
        ):
          yield [(number, completions)]
          number += 1
      self.begun.append(number)
      go_on.set()

    self.judge.judge = slow_judge
    self.sampler.stream.side_effect = stream
    blocks = [self.block(prompts=((p, 0, 0), (p + 1, 0, 0))) for p in (2, 4, 6)]
    self.run_it(*blocks)
    # The judge has the first prompt; the third belongs to a joined block.
    self.assertEqual(self.begun, [4, 2])
    self.assertEqual(self.positions(), [2, 3, 4, 5, 6, 7])

  def test_newer_params_are_taken_between_streams(self):
    self.joins = True
    self.swaps_in_flight = False
    versions = itertools.count(1)

    def latest():
      self.published.append((1, next(versions)))
      return self.wait_for(-1, 0.0)

    self.puller.latest.side_effect = latest
    self.run_it(self.block(), self.block())
    self.assertEqual(self.begun, [1, 1])
    self.assertEqual(self.used, [(0, {0}), (1, {1})])

  def test_a_block_of_a_restarted_trainer_waits_for_its_params(self):
    self.joins = True
    self.run_it(self.block(), self.block(epoch=2))
    self.assertEqual(self.begun, [1, 1])
    self.assertEqual(self.positions(), [8, 7] * 2)

  def test_expired_block_is_left_to_others(self):
    self.joins = True

    def restarted():
      self.epoch = 3  # The trainer restarted after the grant.
      return self.block(0)  # A block with a required version does not join.

    self.run_it(self.block(), restarted)
    self.assertEqual(self.begun, [1])
    self.assertEqual(self.positions(), [8, 7])

  def test_new_trainers_blocks_wait_for_the_stream_to_end(self):
    self.joins = True
    begun = []

    def first():
      self.epoch = 2
      return self.block()

    self.run_it(
        first, lambda: begun.append([*self.begun]) or self.block(epoch=2)
    )
    self.assertEqual(begun, [[1]])

  def test_a_block_becomes_groups(self):
    self.run_it(self.block())
    (groups,) = self.submitted
    self.assertEqual(
        [(g.position, g.prompt_id, g.visit, g.epoch) for g in groups],
        [(7, 0, 0, 1), (8, 3, 2, 1)],
    )
    for group, request in zip(groups, self.requests, strict=True):
      self.assertEqual(request.num_completions, S)
      self.assertEqual(
          (request.prompt_id, request.visit), (group.prompt_id, group.visit)
      )
      np.testing.assert_array_equal(request.prompt_tokens, group.prompt_tokens)
    # The task's prompt 3 is the digit 5.
    self.assertEqual(groups[1].prompt_tokens.tolist(), [5])
    self.assertEqual(groups[1].prompt_tokens.dtype, np.int32)
    self.assertEqual(groups[0].completion_tokens[0].tolist(), [2, 3, 1, 0])
    self.assertEqual(groups[0].completion_lengths.tolist(), [3, 2])
    np.testing.assert_array_equal(groups[0].sampled_mask, SAMPLED)
    self.assertEqual(groups[0].stopped.tolist(), [True, False])

  def test_the_reference_comes_after_the_rewards_unless_it_comes_first(self):
    order = []
    judge = self.judge.judge
    self.judge.judge = lambda asked: order.append("judge") or judge(asked)
    self.reference = mock.create_autospec(
        group_reference.GroupReference, instance=True
    )

    def start(prompts, tokens, *_):
      order.append("reference")
      return lambda: [np.zeros(t.shape, np.float32) for t in tokens]

    self.reference.start.side_effect = start
    self.run_it(self.block())
    self.assertEqual(order, ["judge", "reference"])
    self.searcher, self.reference_first = None, True
    self.queue.stop_requested = False
    self.run_it(self.block())
    self.assertEqual(order[2:], ["reference", "judge"])
    self.assertIn("reference", self.log)

  def test_searchers_compute_reference_logprobs_of_groups(self):
    self.run_it(self.block())
    self.assertEqual([g.ref_logprobs for g in self.submitted[0]], [None] * 2)
    self.reference = mock.create_autospec(
        group_reference.GroupReference, instance=True
    )

    def start(prompts, tokens, lengths, masks, kept):
      self.assertEqual(kept, [None] * len(prompts))
      np.testing.assert_array_equal(masks, [SAMPLED] * len(prompts))
      return lambda: [
          -t.astype(np.float32) - len(p) for p, t in zip(prompts, tokens)
      ]

    self.reference.start.side_effect = start
    self.searcher = None
    self.queue.stop_requested = False
    self.run_it(self.block())
    for group in self.submitted[1]:
      np.testing.assert_array_equal(
          group.ref_logprobs,
          -group.completion_tokens.astype(np.float32)
          - len(group.prompt_tokens),
      )

  def test_rewards_are_of_the_text_without_its_stop_token(self):
    self.run_it(self.block())
    for group in self.submitted[0]:
      # "23" with and without a stop token: both correct, with two tokens.
      self.assertEqual(group.rewards.tolist(), [2.0, 2.0])
      self.assertEqual(group.rewards.dtype, np.float32)

  @parameterized.parameters(
      ("replace", [2.0, -3.0]),
      ("add", [2.0, -1.0]),
  )
  def test_searchers_return_final_rewards(self, rule, rewards):
    with self.config.unlocked():
      self.config.loss.missing_stop = rule
      self.config.loss.missing_stop_reward = -3.0
    self.run_it(self.block())
    # The second completion ends at the token limit.
    self.assertEqual(self.submitted[0][0].rewards.tolist(), rewards)
    self.assertEqual(self.submitted[0][0].rewards.dtype, np.float32)

  def test_params_swap_whole_and_only_between_rounds(self):
    def newer():
      self.published.append((1, 5))
      return self.block()

    self.run_it(self.block(), newer, self.block())
    self.assertEqual(self.used, [(0, {0}), (5, {5}), (5, {5})])
    # The current version is not copied to the device again.
    with mock.patch.object(jax, "device_put", autospec=True) as put:
      self.queue.stop_requested = False
      self.run_it(self.block())
    put.assert_not_called()

  def test_newer_params_of_the_epoch_between_chunks(self):
    self.chunks = [[], [(1, 4)], [], [(1, 5), (1, 6)], [(2, 0)]]
    self.run_it(self.block())
    self.assertEqual(self.used, [(0, {0})])
    self.assertEqual(self.in_flight, [None, (4, {4}), None, (6, {6}), None])
    self.assertEqual({g.epoch for g in self.submitted[0]}, {1})
    # The newest version waits for the next block.
    self.chunks = []
    self.queue.stop_requested = False
    self.run_it(self.block())
    self.assertEqual(self.used[-1], (0, {0}))
    self.assertEqual({g.epoch for g in self.submitted[1]}, {2})

  def test_a_refused_version_is_told_and_the_next_right_one_taken(self):
    self.wrong = {4, 5}
    publish = lambda version: self.published.append((1, version))
    blocks = [lambda v=v: publish(v) or self.block() for v in (4, 4, 5, 6)]
    self.run_it(self.block(), *blocks)
    self.assertEqual(self.used, [(0, {0})] * 4 + [(6, {6})])
    # Each version is compared once.
    self.assertEqual(self.compared, [0, 4, 5, 6])
    text = "another policy; the searcher continues with version 0"
    self.assertEqual(
        self.events, [("wrong_params", f"version {v}: {text}") for v in (4, 5)]
    )
    stats = self.queue.set_stats.call_args.args[0]
    self.assertEqual(stats["refused_versions"], 3 + 2)

  def test_wait_for_params_on_their_way_is_shown_to_the_trainer(self):
    self.published = []
    self.puller.is_pulling.return_value = True

    def wait_for(version, timeout_s):
      if self.queue.set_stats.called and not self.published:
        self.published.append((1, 0))
        return None
      return self.wait_for(version, timeout_s)

    self.puller.wait_for.side_effect = wait_for
    self.run_it(self.block())
    stats = [call.args[0] for call in self.queue.set_stats.call_args_list]
    self.assertEqual(stats[0], {"is_pulling": True})
    self.assertEqual(stats[1], {"is_pulling": False})

  def test_trainer_hears_from_lease_whether_searcher_works(self):
    self.run_it(self.block())
    self.assertIs(self.queue.works, self.spans.works)

  def test_params_are_put_while_older_ones_sample(self):
    self.has_room = True
    threads = []

    def publish_and_wait():
      self.published.append((1, 4))
      waiting.wait_until(lambda: 4 in self.puts, "staged params")
      return self.block()

    put = self.put
    self.put = lambda leaves: threads.append(
        threading.current_thread().name
    ) or put(leaves)
    self.run_it(self.block(), publish_and_wait)
    self.assertEqual(self.used, [(0, {0}), (4, {4})])
    self.assertEqual(self.puts, [0, 4])
    self.assertEqual(threads[1], "stage")
    self.assertEqual(self.compared, [0, 4])

  def test_wrong_staged_params_are_refused(self):
    self.has_room, self.wrong = True, {4}

    def publish_and_wait(version):
      self.published.append((1, version))
      waiting.wait_until(lambda: version in self.puts, "staged params")
      return self.block()

    self.run_it(
        self.block(), lambda: publish_and_wait(4), lambda: publish_and_wait(5)
    )
    self.assertEqual(self.used, [(0, {0}), (0, {0}), (5, {5})])

  def test_newer_params_between_chunks_are_compared_too(self):
    self.wrong, self.chunks = {4}, [[(1, 4)], [], [(1, 5)]]
    self.run_it(self.block())
    self.assertEqual(self.in_flight, [None, None, (5, {5})])
    self.assertEqual(self.compared, [0, 4, 5])

  @parameterized.parameters(
      # Published versions, first wrong one, required one, used ones.
      ((), 0, -1, []),
      ((3,), 3, 3, [0]),
      ((3, 4, 5), 3, -1, [0, 0, 0]),
  )
  def test_searcher_without_params_to_go_on_with_ends(
      self, published, first_wrong, require, used
  ):
    self.wrong = set(range(first_wrong, 9))
    blocks = [
        lambda v=v: self.published.append((1, v)) or self.block(require)
        for v in published
    ]
    before = [self.block()] * bool(published)
    with self.assertRaisesRegex(
        searcher.WrongParamsError, "version [0-9]: another policy: this"
    ):
      self.run_it(*before, *blocks)
    self.assertEqual([version for version, _ in self.used], used)
    self.assertEqual(
        self.events[-1][1],
        f"version {self.compared[-1]}: another policy; the searcher ends",
    )

  def test_refused_version_ends_searcher_with_stale_params(self):
    self.takes_newer, self.wrong = True, {4}
    newer = lambda: self.published.append((1, 4)) or self.block(require=4)
    with self.assertRaisesRegex(searcher.WrongParamsError, "version 4"):
      self.run_it(self.block(require=0), newer)
    self.assertEqual([version for version, _ in self.used], [0])

  def test_blocks_join_while_newest_version_is_refused(self):
    self.joins, self.swaps_in_flight, self.wrong = True, False, {1}
    other = lambda: self.published.append((1, 1)) or self.block(
        prompts=((9, 0, 1),)
    )
    third = self.block(prompts=((5, 0, 2),))
    self.run_it(self.block(), other, third, self.block(prompts=((6, 0, 2),)))
    self.assertEqual(sum(self.begun), 4)
    self.assertLen(self.begun, 2)

  def test_completions_of_several_versions_are_counted(self):
    self.run_it(self.block())
    stats = self.queue.set_stats.call_args.args[0]
    self.assertEqual(stats["mixed_completions"], 0)
    self.chunks, self.queue.stop_requested = [[(1, 4)]], False
    self.run_it(self.block())
    stats = self.queue.set_stats.call_args.args[0]
    self.assertEqual(stats["mixed_completions"], 2 * S)

  def test_a_required_version_stays_for_the_block(self):
    self.published, self.chunks = [(1, 3)], [[(1, 4)]]
    self.run_it(self.block(require=3))
    self.assertEqual((self.used, self.in_flight), ([(3, {3})], []))

  def test_the_epoch_of_a_group_is_its_params(self):
    self.published.append((4, 9))
    self.run_it(self.block(epoch=5))
    self.assertEqual(self.submitted[0][0].epoch, 4)

  def test_a_required_version_is_awaited(self):
    waits = []

    def wait_for(version, timeout_s):
      if version == 3:
        waits.append(timeout_s)
        if len(waits) == 3:
          self.published.append((1, 3))
      return self.wait_for(version, timeout_s)

    self.puller.wait_for.side_effect = wait_for
    self.run_it(self.block(require=3))
    self.assertEqual(self.used, [(3, {3})])
    self.assertLen(waits, 3)

  def test_a_version_or_a_newer_one_is_awaited_with_barriers(self):
    self.takes_newer = True
    waits = []

    def wait_for(version, timeout_s):
      if version == 3:
        waits.append(timeout_s)
        if len(waits) == 3:
          self.published.append((1, 4))
      return self.wait_for(version, timeout_s)

    self.puller.wait_for.side_effect = wait_for
    self.published = [(1, 2)]
    self.chunks = [[(1, 6)]]
    self.run_it(self.block(require=3))
    self.assertEqual(self.used, [(4, {4})])
    self.assertLen(waits, 3)
    self.assertEqual(self.in_flight, [(6, {6})])
    # Such blocks join a stream while its params are new enough.
    self.published, self.chunks, self.swaps_in_flight = [(2, 3)], [], False
    self.searcher, self.queue.stop_requested = None, False
    newer = lambda: self.published.append((2, 5)) or self.block(5, epoch=2)
    self.joins, self.begun = True, []
    other = self.block(2, epoch=2, prompts=((9, 0, 1),))
    self.run_it(self.block(3, epoch=2), other, newer)
    self.assertEqual(self.begun, [2, 1])
    self.assertEqual([v for v, _ in self.used], [4, 3, 5])

  def test_does_not_wait_for_past_version(self):
    self.puller.wait_for.side_effect = lambda version, timeout_s: (
        None if version == 3 else self.wait_for(version, timeout_s)
    )
    self.published = [(1, 5)]
    self.run_it(self.block(require=3), self.block())
    self.assertEqual(self.used, [(5, {5})])

  def test_a_required_version_may_lag_behind_the_newest(self):
    self.lag_steps = 2
    waits = []

    def wait_for(version, timeout_s):
      if version != 3:
        return self.wait_for(version, timeout_s)
      waits.append(timeout_s)
      # The newest version arrives at once, the older one is pulled.
      return (
          None
          if len(waits) < 3
          else ((version_lib.Version(1, 3), self.leaves(3)))
      )

    self.puller.wait_for.side_effect = wait_for
    self.published = [(1, 5)]
    self.run_it(self.block(require=3), self.block())
    self.assertEqual(self.used, [(3, {3}), (5, {5})])

  def test_searcher_waits_only_for_required_versions(self):
    self.run_it(self.block())
    self.assertEqual(self.puller.wait_for.call_args, mock.call(-1, 0.0))

  def test_a_block_of_a_replaced_trainer_is_given_up(self):
    def wait_for(version, timeout_s):
      if version == 3:
        self.epoch = 2  # The new trainer grants other blocks.
      return self.wait_for(version, timeout_s)

    self.puller.wait_for.side_effect = wait_for
    self.run_it(self.block(require=3), lambda: self.block(epoch=2))
    self.assertEqual(self.used, [(0, {0})])
    self.assertLen(self.submitted, 1)

  @parameterized.parameters((-1, 0), (9, 3))
  def test_stop_ends_every_wait(self, require, after):
    answers = iter([False] * after)
    self.run_it(
        self.block(require=require), should_stop=lambda: next(answers, True)
    )
    self.assertEmpty(self.used)
    self.assertFalse(self.queue.stop_requested)

  def test_it_waits_for_the_first_params_before_it_compiles(self):
    self.published = []

    def wait_for(version, timeout_s):
      if len(self.asked) == 2:
        self.published.append((1, 0))
      return self.wait_for(version, timeout_s)

    self.puller.wait_for.side_effect = wait_for
    self.run_it(self.block())
    self.assertLen(self.warmed_up, 1)
    self.assertEqual(self.log[:3], ["wait_params", "load", "compile"])
    self.assertLen(self.submitted, 1)

  def test_a_wait_for_work_is_one_span(self):
    # Three polls of .1 s without an assignment.
    self.run_it(lambda: None, lambda: None, lambda: None, self.block())
    self.assertLen(self.submitted, 1)
    before = self.log[: self.log.index("decode")]
    self.assertEqual(before.count("wait_work"), 1)

  def test_lease_reports_busy_time(self):
    # The inline judge takes no time, so there is no wait for it.
    inline = mock.Mock(ThreadPoolExecutor=_InlineExecutor)
    self.enter_context(mock.patch.object(searcher, "futures", inline))
    publish = lambda: self.published.append((1, 1)) or self.block()
    self.run_it(self.block(), publish)
    self.assertEqual(self.queue.set_stats.call_count, 2)
    stats = self.queue.set_stats.call_args.args[0]
    # Two polls of the first stream, newer params, and the second block's
    # decode; waits and compilation do not count.
    self.assertEqual(stats["busy_s"], 4.0)
    self.assertEqual(stats["version"], 1)
    self.assertEqual(stats["refused_versions"], 3)
    self.assertAlmostEqual(
        stats["tokens_per_s"], 3 * stats["samples_per_s"], places=6
    )
    self.assertLessEqual(stats["busy_share"], 1.0)

  def test_wait_for_credit_is_no_work_while_prompts_wait_for_judge(self):
    waits, submit = [], self.submit

    def full(*args):
      if not waits:
        # The decoding thread waits for this thread.
        deadline_s = time.monotonic() + 20.0
        while self.open_spans[-1:] not in (["wait_credit"], ["reward"]):
          if time.monotonic() > deadline_s:
            break
          time.sleep(0.01)
        waits.extend(self.open_spans)
      return submit(*args)

    self.queue.submit.side_effect = full
    others = [self.block(prompts=((p, 3, 4),)) for p in (9, 10, 11)]
    self.run_it(self.block(), *others)
    self.assertLen(self.positions(), 5)
    self.assertEqual(waits, ["wait_credit"])

  def test_a_block_is_judged_while_the_next_one_is_decoded(self):
    go_on, ages = threading.Event(), []
    judge = self.judge.judge

    def slow_judge(requests):
      self.assertTrue(go_on.wait(20.0))
      return judge(requests)

    def second():
      ages.append(len(self.queue.begun_s))
      return self.block(prompts=((9, 3, 4),))

    def sample(*args, sample=self.sample, **kwargs):
      if len(self.used) == 1:
        # The first block has not been judged or submitted.
        self.assertEmpty(self.submitted)
        go_on.set()
      return sample(*args, **kwargs)

    self.judge.judge = slow_judge
    self.sample = sample
    self.run_it(self.block(), second)
    self.assertEqual(ages, [2])
    positions = [[g.position for g in groups] for groups in self.submitted]
    self.assertEqual(positions, [[7, 8], [9]])
    self.assertEmpty(self.queue.begun_s)

  def test_decoding_waits_for_judge_on_same_mesh(self):
    self.judge_shares_mesh = True
    judge = self.judge
    judged, sampled, again = [], [], threading.Event()

    def slow_judge(requests, judge=judge.judge):
      again.wait(0.1)  # Long enough for decoding to restart.
      judged.append(len(sampled))
      return judge(requests)

    def sample(*args, sample=self.sample, **kwargs):
      sampled.append(len(judged))
      if len(sampled) > 1:
        again.set()
      return sample(*args, **kwargs)

    judge.judge = slow_judge
    self.sample = sample
    self.run_it(self.block(), self.block())
    self.assertEqual((sampled, judged), ([0, 1], [1, 2]))

  def test_error_of_the_judge_s_thread_ends_the_searcher(self):
    self.queue.submit.side_effect = ValueError("gone")
    never = lambda: None
    with self.assertRaisesRegex(ValueError, "gone"):
      self.run_it(self.block(), *[never] * 10_000)

  def test_it_says_whether_the_run_is_complete(self):
    self.assertFalse(self.run_it(self.block()))
    self.queue.run_done = True
    self.assertTrue(self.run_it())

  def test_a_full_queue_asks_whether_to_stop(self):
    self.run_it(self.block())
    stop = self.queue.submit.call_args.args[1]
    self.queue.stop_requested = False
    self.assertFalse(stop())
    self.queue.stop_requested = True
    self.assertTrue(stop())


class StageTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.newest = None
    self.puts, self.asked = [], []
    source = mock.create_autospec(pull.Puller, instance=True)
    source.latest.side_effect = lambda: self.newest
    first = version_lib.Version(1, 0)
    self.stage = searcher.Stage(source, self.put, first)
    self.addCleanup(self.stage.close)

  def put(self, leaves):
    self.asked.append(leaves)
    if leaves == 13:
      raise MemoryError("no room")
    self.puts.append(leaves)
    return f"params {leaves}"

  def publish(self, step):
    self.newest = version_lib.Version(1, step), step
    waiting.wait_until(lambda: step in self.puts, "staged params")

  def test_newest_version_replaces_a_staged_one(self):
    self.publish(3)
    self.publish(4)
    self.assertEqual(self.stage.take(self.newest[0]), "params 4")
    self.stage.resume()
    self.assertEqual(self.puts, [3, 4])

  def test_another_version_gives_up_the_staged_one(self):
    self.publish(3)
    self.assertIsNone(self.stage.take(version_lib.Version(1, 5)))
    self.stage.resume()
    self.assertIsNone(self.stage.take(version_lib.Version(1, 3)))
    self.stage.resume()

  def test_nothing_is_staged_while_params_are_switched(self):
    self.publish(3)
    self.stage.take(self.newest[0])
    self.newest = version_lib.Version(1, 4), 4
    time.sleep(5 * searcher.STAGE_EVERY_S)
    self.assertEqual(self.puts, [3])
    self.stage.resume()
    self.publish(4)

  def test_lack_of_memory_leaves_the_put_to_the_switch(self):
    self.newest = version_lib.Version(1, 13), 13
    waiting.wait_until(lambda: 13 in self.asked, "an attempt")
    self.assertIsNone(self.stage.take(self.newest[0]))
    self.stage.resume()

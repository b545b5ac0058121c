# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions of several turns: exact ids, masks, log-probs and endings."""

import dataclasses
import functools
import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.sampling import decode
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import slots as slots_lib
from tests.support import fakes
from tests.support import sampler_case
from tests.support import scripted_turns
from tests.support import tiny_model

_V, _T = 6, 12
_PIECES = ["<pad>", "<eos>", "a", "ab", "b", "\n"]


def _text(ids) -> str:
  return "".join(_PIECES[i] for i in ids)


class TurnsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = fakes.FakeModel(_V, 34)
    params = cls.model.init(jax.random.key(3))
    # All tokens about as likely.
    cls.params = jax.tree.map(lambda x: 0.2 * x, params)
    cls.requests = [
        decode.Request(np.array(prompt), index, 0, 11)
        for index, prompt in enumerate([[2], [3, 4], [5, 2, 4]])
    ]
    cls.make = staticmethod(
        functools.partial(
            sampler_case.make,
            cls.model,
            max_completion_tokens=_T,
            has_turns=True,
        )
    )

  def sample(self, sampler, requests=None, turns=None):
    return sampler.sample(
        self.params,
        requests or self.requests,
        version=5,
        turns=turns or scripted_turns.Scripted(),
    )

  def check(self, found, turns, *, most=_T, **ends):
    """Checks each token of the completions; returns numbers of turns."""
    return scripted_turns.check(
        self,
        self.requests,
        found,
        turns,
        lambda seen: fakes.next_logprobs(self.params, seen, 1.0),
        version=5,
        text_fn=_text,
        most=most,
        **ends,
    )

  @parameterized.parameters(1, 5)
  def test_tokens_masks_and_logprobs_follow_the_whole_history(self, steps):
    turns = scripted_turns.Scripted()
    found = self.sample(self.make(chunk_steps=steps), turns=turns)
    counts = self.check(found, turns)
    self.assertEqual({*counts}, {0, 1, 2, 3})

  @parameterized.parameters((1, 0, 0), (5, 3, 20), (5, 50, 0))
  @pytest.mark.slow
  def test_long_answers_are_fed_at_once(self, steps, delay, num_waiting):
    self.enter_context(mock.patch.object(requests_lib, "FEED_LENGTHS", (3, 5)))
    self.enter_context(mock.patch.object(requests_lib, "FEWEST_FED", 2))
    fed = []
    feed = slots_lib.feed
    counted = lambda *args: fed.append(args[-1]) or feed(*args)
    self.enter_context(mock.patch.object(slots_lib, "feed", counted))
    sampler = self.make(
        max_completion_tokens=30,
        chunk_steps=steps,
        num_waiting=num_waiting,
        num_rows=32,
    )
    sampler.warm_up(self.params)
    self.assertEqual(sorted({*fed}), [3, 5])
    turns = scripted_turns.Scripted(delay, longest=12)
    with jax.log_compiles(), self.assertNoLogs("jax", level="WARNING"):
      found = self.sample(sampler, turns=turns)
    counts = self.check(found, turns, most=30)
    self.assertContainsSubset({1, 2, 3}, {*counts})
    # Fewer chunks, and another order, leave the bits.
    other = self.sample(
        sampler, self.requests[::-1], scripted_turns.Scripted(0, 12)
    )
    for one, two in zip(found, other[::-1]):
      jax.tree.map(np.testing.assert_array_equal, one.__dict__, two.__dict__)

  @parameterized.parameters((1, 0), (5, 0), (5, 6))
  @pytest.mark.slow
  def test_a_stop_string_ends_a_turn_and_is_looked_for_in_it_alone(
      self, steps, num_waiting
  ):
    turns = scripted_turns.Scripted(delay=num_waiting)
    strings = ["bab", "\na"]
    found = self.sample(
        self.make(
            chunk_steps=steps,
            num_waiting=num_waiting,
            stop_ids=(),
            stop_strings=strings,
            text_fn=_text,
        ),
        turns=turns,
    )
    counts = self.check(found, turns, stops=(), strings=strings)
    self.assertGreater(max(counts), 1)

  @parameterized.parameters(
      {"chunk_steps": 7},
      {"delay": 3},
      {"delay": 50},
      {"delay": 3, "num_waiting": 2},
      {"delay": 50, "num_waiting": 20},
  )
  @pytest.mark.slow
  def test_a_completion_does_not_depend_on_others_or_on_time(
      self, delay=0, **changes
  ):
    model = tiny_model.make_model(vocab_size=_V)
    params = tiny_model.init_params(model)
    sample = lambda requests, turns, **changes: sampler_case.make(
        model, max_completion_tokens=_T, has_turns=True, **changes
    ).sample(params, requests, version=5, turns=turns)
    whole = sample(self.requests, scripted_turns.Scripted())
    turns = scripted_turns.Scripted(delay)
    found = sample(self.requests[::-1], turns, **changes)
    # Those that wait make room for others, of which one place stays free.
    most = 8 + max(0, changes.get("num_waiting", 0) - 1)
    self.assertEqual(turns.most_live, most)
    for one, other in zip(found[::-1], whole):
      jax.tree.map(np.testing.assert_array_equal, one.__dict__, other.__dict__)
    # The trainer's forward pass sees the same.
    request, one = self.requests[2], whole[2]
    logprobs_1xSxT = logprobs_lib.completion_logprobs(
        model,
        params,
        request.prompt_tokens[None],
        np.ones((1, 3), np.float32),
        one.tokens[None],
        temperature=1.0,
    )
    self.assertGreater((~one.sampled_mask & (one.logprobs == 0)).sum(), 11)
    np.testing.assert_allclose(
        np.where(one.sampled_mask, logprobs_1xSxT[0], 0.0),
        one.logprobs,
        atol=1e-5,
    )

  @parameterized.product(recompute=[False, True], num_waiting=[0, 9])
  @pytest.mark.slow
  def test_newer_params_come_in_between_and_within_turns(
      self, recompute, num_waiting
  ):
    sampler = self.make(recompute_cache=recompute, num_waiting=num_waiting)
    versions = itertools.count(6)
    newer = lambda: (next(versions), sampler.put(self.params))
    found = sampler.sample(
        self.params,
        self.requests,
        version=5,
        newer=newer,
        turns=scripted_turns.Scripted(3),
    )
    changes = 0
    for one, other in zip(found, self.sample(self.make())):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(one.sampled_mask, other.sampled_mask)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
      mask, of_tokens = one.sampled_mask, one.token_versions
      np.testing.assert_array_equal(of_tokens[~mask], -1)
      np.testing.assert_array_equal(of_tokens[:, 0], one.versions)
      for versions_T, mask_T in zip(of_tokens, mask):
        self.assertTrue((np.diff(versions_T[mask_T]) >= 0).all())
        changes += (np.diff(versions_T[mask_T]) > 0).sum()
    self.assertGreater(changes, 10)

  def stream(self, sampler, more, **options):
    """Returns the completions of a stream's requests, in their order."""
    found = {}
    for over in sampler.stream(self.params, more, version=5, **options):
      found |= dict(over)
    return [found[number] for number in range(len(found))]

  @parameterized.parameters({}, {"num_waiting": 20})
  @pytest.mark.slow
  def test_requests_of_a_stream_begin_before_the_last_are_over(self, **changes):
    requests = self.requests * 2
    expected = [self.sample(self.make(), [request])[0] for request in requests]
    pairs = iter([requests[:2], None, [], requests[2:4], requests[4:], None])
    begun, over = 0, []
    most_begun = 0

    def more():
      nonlocal begun, most_begun
      batch = next(pairs, None)
      begun += len(batch or ())
      most_begun = max(most_begun, begun - len(over))
      return batch

    found = {}
    turns = scripted_turns.Scripted(delay=50)
    sampler = self.make(**changes)
    for some in sampler.stream(self.params, more, version=5, turns=turns):
      over += [number for number, _ in some]
      found |= dict(some)
    self.assertCountEqual(over, range(6))
    self.assertGreater(most_begun, 2)
    for number, other in enumerate(expected):
      one = found[number]
      jax.tree.map(np.testing.assert_array_equal, one.__dict__, other.__dict__)

  def test_new_requests_begin_at_once_while_all_wait(self):
    turns = scripted_turns.Scripted()
    answers, waits = turns.answers, []
    coming = [self.requests[1:2], self.requests[:1]]

    def more():
      is_first = len(coming) == 2
      return coming.pop() if coming and (is_first or waits) else None

    def answers_after_the_second_begins(wait_s):
      if coming:
        if wait_s > 0:
          waits.append(wait_s)
        return []
      return answers(wait_s)

    turns.answers = answers_after_the_second_begins
    sampler = self.make(num_rows=32)
    found = self.stream(sampler, more, turns=turns)
    self.assertLen(waits, 1)
    self.assertLess(waits[0], 1.0)
    for one, request in zip(found, self.requests[:2], strict=True):
      (other,) = self.sample(self.make(), [request])
      jax.tree.map(np.testing.assert_array_equal, one.__dict__, other.__dict__)

  def test_streamed_request_has_version_at_its_start(self):
    batches = iter([[self.requests[0]], [self.requests[1]]])
    sampler = self.make()
    newer = iter([None, (6, sampler.put(self.params))])
    first, second = self.stream(
        sampler,
        lambda: next(batches, None),
        newer=lambda: next(newer, None),
        turns=scripted_turns.Scripted(),
    )
    self.assertEqual({*first.versions}, {5, 6})
    self.assertEqual({*second.versions}, {6})

  def test_rows_move_with_all_used_columns(self):
    model = tiny_model.make_model(max_positions=67)
    sampler = sampler_case.make(
        model,
        num_rows=4,
        num_waiting=3,
        has_turns=True,
        max_completion_tokens=64,
    )
    programs = sampler.programs(tiny_model.init_params(model))
    P, *segments = programs.segment_lengths
    self.assertEqual(segments, [32, 32])
    rng = np.random.default_rng(0)

    def fill(shapes, lengths):
      random = lambda x: rng.integers(0, 99, x.shape).astype(x.dtype)
      state = jax.tree.map(random, shapes)
      return dataclasses.replace(state, lengths=np.array(lengths, np.int32))

    state = fill(programs.abstract_state, [1, 33, 32, 64])
    aside = fill(programs.abstract_aside, [34, 64, 5])
    both = jax.device_put((state, aside), programs.sharding)
    # Row 1 moves to place 2, then place 0 to row 1, and 2 to row 3.
    moved = programs.exchange(
        *both, np.array([-1, -1, 1]), np.array([-1, 0, -1, 2])
    )

    def rows_of(state, row):
      """Returns the arrays of a row, of its cache the columns in use."""
      state = jax.device_get(state)
      used = P + state.lengths[row]
      columns = {
          (layer, name): np.concatenate(
              [
                  np.moveaxis(leaf, 2 + (name == "k_last"), 0)
                  for leaf in (
                      block["layers"][layer][name][row : row + 1]
                      for block in state.cache
                  )
              ]
          )[:used]
          for layer in range(model.config.num_layers)
          for name in state.cache[0]["layers"][layer]
      }
      state = dataclasses.replace(state, cache=None)
      return jax.tree.map(lambda leaf: leaf[row], state), columns

    expected = {
        (0, 0): (state, 0), (0, 1): (aside, 0), (0, 2): (state, 2),
        (0, 3): (state, 1), (1, 0): (aside, 0), (1, 1): (aside, 1),
        (1, 2): (state, 1),
    }  # fmt: skip
    for (which, row), source in expected.items():
      found = rows_of(moved[which], row)
      jax.tree.map(np.testing.assert_array_equal, found, rows_of(*source))

  def test_first_turn_without_environments_is_the_completion(self):
    plain = sampler_case.make(self.model, max_completion_tokens=_T)
    expected = plain.sample(self.params, self.requests, version=5)
    found = self.make().sample(self.params, self.requests, version=5)
    for one, other in zip(found, expected):
      jax.tree.map(np.testing.assert_array_equal, one.__dict__, other.__dict__)

  def test_compiles_nothing_after_the_warm_up(self):
    sampler = self.make(num_rows=64, num_waiting=6, recompute_cache=True)
    sampler.warm_up(self.params)
    newer = iter([(6, sampler.put(self.params))])
    with jax.log_compiles(), self.assertNoLogs("jax", level="WARNING"):
      sampler.sample(
          self.params,
          [decode.Request(np.array([2]), 0, 0, 100)],
          version=5,
          newer=lambda: next(newer, None),
          turns=scripted_turns.Scripted(20),
      )


class SlotsTest(absltest.TestCase):

  def make(self, num_completions, **changes):
    settings = sampler_case.make_settings(num_rows=4, has_turns=True, **changes)
    request = decode.Request(np.array([2]), 0, 0, num_completions)
    slots = requests_lib.Slots({0: request}, settings, 1, num_shards=2)
    slots.enqueue([0])
    slots.refill({0: 0})
    return slots

  def wait(self, slots, *samples):
    for sample in samples:
      slots.waiting[0, sample] = 1

  def test_waiting_rows_are_parked_on_their_device_for_queued_completions(self):
    slots = self.make(5, num_waiting=6)
    self.assertIsNone(slots.exchange())
    self.wait(slots, 1, 2, 3)
    source_W, source_R = slots.exchange()
    np.testing.assert_array_equal(source_W, [1, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(source_R, [-1] * 4)
    self.assertEqual(slots.aside, {0: (0, 1)})
    slots.refill({0: 0})
    self.assertIsNone(slots.exchange())  # None queues any more.
    slots.resume((0, 1), np.array([3]))
    self.assertIsNone(slots.exchange())  # Device 0 has no row that waits.

  def test_answered_completions_exchange_places_with_waiting_ones(
      self,
  ):
    slots = self.make(8, num_waiting=4)
    self.wait(slots, 0, 1, 2, 3)
    # A place of each device stays free.
    source_W, source_R = slots.exchange()
    np.testing.assert_array_equal(source_W, [0, -1, 0, -1])
    np.testing.assert_array_equal(source_R, [-1] * 4)
    slots.refill({0: 0})
    self.assertEqual(slots.owners, {1: (0, 1), 3: (0, 3), 0: (0, 4), 2: (0, 5)})
    self.assertIsNone(slots.exchange())
    ids = np.array([7, 8])
    slots.resume((0, 2), ids)
    source_W, source_R = slots.exchange()
    np.testing.assert_array_equal(source_W, [-1, -1, -1, 1])
    np.testing.assert_array_equal(source_R, [-1, -1, -1, 0])
    self.assertEqual(slots.owners[3], (0, 2))
    self.assertEqual(slots.aside, {0: (0, 0), 3: (0, 3)})
    self.assertEqual(slots.go_on(), {3: (1, ids)})
    self.assertEqual(slots.num_decoding, 3)

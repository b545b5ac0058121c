# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that the ledger closes: by hand, with the buffer, at random."""

import json

from absl.testing import parameterized
import numpy as np

from tba_jax.replay import ledger as ledger_lib
from tests.transport.groups import fake_groups

Amount = ledger_lib.Amount
_UNITS = ("prompts", "completions", "tokens")


def _units(prompts: int, completions: int, tokens: int) -> dict[str, int]:
  return dict(zip(_UNITS, (prompts, completions, tokens), strict=True))


class LedgerTest(parameterized.TestCase):

  def test_has_every_term(self):
    ledger = ledger_lib.Ledger()
    ledger.announce("a", (10, 40, 400))
    ledger.apply("a", (4, 16, 160), (4, 16, 160))
    ledger.apply("b", (2, 8, 80), (2, 8, 80))
    ledger.reject("duplicate", (1, 4, 40))
    ledger.reject("length", (1, 4, 40))
    ledger.reject("length", (1, 4, 40))
    ledger.lost("journal", (1, 4, 40))
    ledger.train_first((1, 5, 50))
    ledger.evict((0, 1, 10))
    self.assertEqual(ledger.applied("a"), (4, 16, 160))
    self.assertEqual(ledger.applied("c"), (0, 0, 0))
    closed = ledger.close((1, 2, 20))
    self.assertEqual(closed["generated"], _units(12, 48, 480))
    self.assertEqual(closed["queued"], _units(6, 24, 240))
    self.assertEqual(closed["trained_first_time"], _units(1, 5, 50))
    self.assertEqual(closed["evicted_untrained"], _units(0, 1, 10))
    self.assertEqual(closed["in_buffer_untrained"], _units(1, 2, 20))
    self.assertEqual(
        closed["rejected"],
        {"duplicate": _units(1, 4, 40), "length": _units(2, 8, 80)},
    )
    self.assertEqual(closed["lost"], {"journal": _units(1, 4, 40)})
    self.assertEqual(closed["accounted"], _units(12, 48, 480))
    self.assertEqual(closed["difference"], _units(0, 0, 0))
    self.assertTrue(closed["closed"])
    self.assertEqual(json.loads(json.dumps(closed)), closed)

  @parameterized.parameters(*np.eye(3, dtype=int).tolist())
  def test_deficit_in_any_unit_does_not_close(self, *missing):
    ledger = ledger_lib.Ledger()
    ledger.apply("a", (5, 5, 5), (5, 5, 5))
    closed = ledger.close(Amount(5, 5, 5) - tuple(missing))
    self.assertFalse(closed["closed"])
    self.assertEqual(closed["difference"], _units(*missing))

  def test_accepted_twice_does_not_close(self):
    """Two wrongs of two searchers that cancel in the sum are still wrong."""
    ledger = ledger_lib.Ledger()
    ledger.apply("a", (1, 4, 8), (1, 4, 8))
    ledger.apply("a", (1, 4, 8), (1, 4, 8))
    ledger.announce("b", (1, 4, 8))
    closed = ledger.close((2, 8, 16))
    self.assertEqual(closed["difference"], _units(0, 0, 0))
    self.assertFalse(closed["closed"])

  def test_totals_never_fall(self):
    ledger = ledger_lib.Ledger()
    ledger.announce("a", (3, 12, 24))
    ledger.announce("a", (1, 4, 8))
    ledger.apply("a", (2, 8, 16), (2, 8, 16))
    closed = ledger.close((2, 8, 16))
    self.assertEqual(closed["generated"], _units(3, 12, 24))
    self.assertTrue(closed["closed"])

  def test_accounts_for_lost_searcher(self):
    ledger = ledger_lib.Ledger()
    ledger.announce("a", (3, 12, 24))
    ledger.announce("b", (1, 4, 8))
    ledger.apply("a", (1, 4, 8), (1, 4, 8))
    self.assertEqual(ledger.searchers(), ["a", "b"])
    ledger.searcher_gone("a")
    self.assertEqual(ledger.searchers(), ["b"])
    closed = ledger.close((1, 4, 8))
    self.assertEqual(closed["lost"], {"searcher": _units(2, 8, 16)})
    self.assertEqual(closed["queued"], _units(1, 4, 8))
    # One of its blocks was still under way.
    ledger.apply("a", (2, 8, 16), (1, 4, 8))
    closed = ledger.close((2, 8, 16))
    self.assertEqual(closed["lost"], {"searcher": _units(1, 4, 8)})
    self.assertTrue(closed["closed"])

  def test_accounts_for_searcher_lost_before_first_report(self):
    ledger = ledger_lib.Ledger()
    ledger.searcher_gone("a")
    self.assertEqual(ledger.searchers(), [])
    self.assertTrue(ledger.close((0, 0, 0))["closed"])


class RandomRunTest(parameterized.TestCase):
  """A run in small: searchers, a queue, a buffer that is much too small."""

  @parameterized.parameters(range(6))
  def test_closes_at_every_moment(self, seed):
    rng = np.random.default_rng(seed)
    ledger = ledger_lib.Ledger()
    buffer = fake_groups.make_buffer(
        capacity=9,
        capacity_per_prompt=5,
        recent_fraction=0.5,
        seed=seed,
        recent_window_steps=2,
        dedupe=bool(seed % 2),
    )
    totals: dict[str, Amount] = {}
    queue, step, unmarked = [], 0, []
    for turn in range(400):
      choice = rng.random()
      if choice < 0.4:
        searcher = f"s{turn // 100}-{rng.integers(2)}"
        group = self._random_group(rng)
        size = Amount(1, group.num_completions, group.num_tokens)
        totals[searcher] = totals.get(searcher, Amount()) + size
        if rng.random() < 0.9:
          queue.append((searcher, totals[searcher], group, size))
        if rng.random() < 0.5:
          ledger.announce(searcher, totals[searcher])
      elif choice < 0.7 and queue:
        searcher, after, group, size = queue.pop(0)
        ledger.apply(searcher, after, size)
        fate = rng.random()
        if fate < 0.1:
          ledger.reject("duplicate" if fate < 0.05 else "length", size)
        elif fate < 0.15:
          ledger.lost("journal", size)
        else:
          ledger.evict(buffer.insert(group, step))
      elif choice < 0.85 and len(buffer):
        unmarked.append(buffer.sample(2, 3, step).ids)
        step += 1
      elif choice < 0.95 and unmarked:
        # Late on purpose: part of it has been evicted.
        rows = unmarked.pop(int(rng.integers(len(unmarked))))
        ledger.train_first(buffer.mark_drawn(rows))
      elif totals:
        if rng.random() < 0.5:
          ledger.searcher_gone(sorted(totals)[rng.integers(len(totals))])
        state = ledger.get_state()
        ledger = ledger_lib.Ledger()
        ledger.set_state(json.loads(json.dumps(state)))
      closed = ledger.close(buffer.untrained())
      self.assertTrue(closed["closed"], closed)
    for searcher, total in totals.items():
      ledger.announce(searcher, total)
      ledger.searcher_gone(searcher)
    closed = ledger.close(buffer.untrained())
    self.assertTrue(closed["closed"], closed)
    everything = sum(totals.values(), Amount())
    self.assertEqual(closed["generated"], everything._asdict())
    self.assertEqual(closed["queued"], _units(0, 0, 0))
    for term in ("trained_first_time", "evicted_untrained"):
      self.assertGreater(min(closed[term].values()), 0, term)

  def _random_group(self, rng: np.random.Generator):
    count = int(rng.integers(1, 7))
    return fake_groups.make_group(
        int(rng.integers(5)),
        [rng.integers(1, 4, rng.integers(1, 4)).tolist() for _ in range(count)],
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the intake: order, duplicates and gaps by sequence numbers."""

from absl.testing import absltest

from tba_jax.replay import queue_server
from tba_jax.transport import wire

_SECRET = b"s" * 32
_AMOUNT = {"prompts": 1, "completions": 2, "tokens": 3}


def _entry(name, number, **changes):
  header = {
      "run": "run",
      "sid": name,
      "sequence": number,
      "totals": _AMOUNT,
      "amount": _AMOUNT,
      **changes,
  }
  key = f"q/0/{name}/{number:012d}"
  return {key: wire.encode_message(header, _SECRET)}


class IntakeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 0.0
    self.events = []
    self.intake = queue_server.Intake(
        watermarks={"b": 5},
        run_id="run",
        secret=_SECRET,
        on_event=lambda *event: self.events.append(event),
        clock=lambda: self.now,
    )

  def _sort(self, *entries):
    """Returns (sid, sequence) of what is fresh, and keys of what is not."""
    merged = {k: v for entry in entries for k, v in entry.items()}
    fresh, useless = self.intake.sort(dict(sorted(merged.items())))
    return [(m.header["sid"], m.header["sequence"]) for m in fresh], useless

  def test_what_is_wanted_is_fresh_until_it_is_taken(self):
    entries = [_entry("a", 0), _entry("a", 1), _entry("b", 5)]
    for _ in range(2):
      fresh, useless = self._sort(*entries)
      self.assertEqual(fresh, [("a", 0), ("a", 1), ("b", 5)])
      self.assertEmpty(useless)
    self.intake.take({"sid": "a", "sequence": 0})
    fresh, useless = self._sort(*entries)
    self.assertEqual(fresh, [("a", 1), ("b", 5)])
    self.assertEqual(useless, ["q/0/a/000000000000"])
    self.assertEqual(self.intake.counts, {"wire_duplicates": 1, "refused": 0})
    self.assertEqual(self.intake.watermarks, {"a": 1, "b": 5})

  def test_a_gap_is_waited_for_then_given_up(self):
    entries = [_entry("b", 7), _entry("b", 8)]
    self.assertEqual(self._sort(*entries), ([], []))
    self.now = queue_server.GAP_S - 0.1
    self.assertEqual(self._sort(*entries), ([], []))
    self.assertEmpty(self.events)
    self.now = queue_server.GAP_S
    self.assertEqual(self._sort(*entries)[0], [("b", 7), ("b", 8)])
    self.assertEqual([kind for kind, _ in self.events], ["gap"])

  def test_a_gap_that_is_filled_was_none(self):
    self._sort(_entry("b", 6))
    self.now = 5.0
    fresh, _ = self._sort(_entry("b", 5), _entry("b", 6))
    self.assertEqual(fresh, [("b", 5), ("b", 6)])
    # A later gap has its own time.
    self.now = 6.0
    self.assertEqual(self._sort(_entry("b", 9)), ([], []))

  def test_a_lost_store_begins_the_wait_anew(self):
    self._sort(_entry("b", 6))
    self.now = queue_server.GAP_S
    self.intake.forget_gaps()
    self.assertEqual(self._sort(_entry("b", 6)), ([], []))

  def test_headers_that_no_searcher_writes_are_refused(self):
    bad = [
        _entry("c", 0, run="other"),
        _entry("d", 0, sequence=1),
        _entry("e", 0, sequence=None),
        _entry("f", 0, sid="g"),
        _entry("h", 0, totals=None),
        _entry("i", 0, amount={**_AMOUNT, "tokens": -1}),
        _entry("j", 0, amount={"prompts": 1}),
        {"q/0/k/000000000000": b""},
    ]
    for entry in bad:
      with self.subTest(key=next(iter(entry))):
        self.assertEqual(self._sort(entry), ([], list(entry)))
    self.assertEqual(self.intake.counts["refused"], len(bad))
    self.assertLen(self.events, len(bad))


if __name__ == "__main__":
  absltest.main()

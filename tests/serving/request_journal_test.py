# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The journal: a request is known by owner and number, and outlives a kill."""

import pathlib
from unittest import mock

from absl.testing import absltest

from tba_jax.serving import database
from tba_jax.serving import registry
from tba_jax.serving import request_journal


class JournalTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "j.sqlite"
    self.db = database.Database(self.path)
    self.journal = request_journal.RequestJournal(self.db)

  def _accept(self, seq, body=b"{}", owner="m", kind="optim_step"):
    return self.journal.accept(f"{owner}:{seq}", owner, seq, kind, body)

  def test_repeated_request_is_recognized(self):
    first, is_new = self._accept(1, b"a")
    self.assertTrue(is_new)
    again, is_new = self._accept(1, b"a")
    self.assertFalse(is_new)
    self.assertEqual(again, first)
    self.assertLen(self.journal.pending(), 1)

  def test_refuses_another_request_with_same_number(self):
    self._accept(1, b"a")
    for body, kind in ((b"b", "optim_step"), (b"a", "save_weights")):
      with self.assertRaisesRegex(
          request_journal.ConflictError, "seq_id 1 of m"
      ):
        self._accept(1, body, kind=kind)
    # One that has a name instead, whose client gave no number.
    again = lambda body: self.journal.accept("m:reward", "m", 2, "x", body)
    self.assertEqual([again(b"a")[1] for _ in range(2)], [True, False])
    with self.assertRaisesRegex(
        request_journal.ConflictError,
        "^m:reward: x came before with another body",
    ):
      again(b"b")

  def test_survives_killed_process(self):
    """A second connection sees what a killed one would have left."""
    for seq in range(3):
      self._accept(seq)
    self.journal.finish(
        {"m:0": b"r", "m:1": {"error": "e", "category": "user"}}
    )
    other = request_journal.RequestJournal(database.Database(self.path))
    self.assertEqual(other.outcome("m:0").result, b"r")
    self.assertEqual(other.outcome("m:1").failure["error"], "e")
    self.assertFalse(other.outcome("m:2").is_done)
    self.assertEqual([r.id for r in other.pending()], ["m:2"])
    self.assertEqual(other.next_seq("m"), 2)

  def test_keeps_first_outcome(self):
    self._accept(0)
    self.journal.finish({"m:0": b"first"})
    self.journal.finish({"m:0": b"second"})
    self.assertEqual(self.journal.outcome("m:0").result, b"first")

  def test_next_number_stops_at_gap(self):
    for seq in (0, 1, 3):
      self._accept(seq)
    self.journal.finish({f"m:{seq}": b"r" for seq in (0, 1, 3)})
    self.assertEqual(self.journal.next_seq("m"), 2)

  def test_lists_requests_after_checkpoint_with_bodies(self):
    for seq in range(4):
      self._accept(seq, b"%d" % seq)
    self.journal.finish({f"m:{seq}": b"r" for seq in range(3)})
    self.journal.drop_bodies("m", 1)
    result = list(self.journal.since("m", 1))
    self.assertEqual(
        [(r.seq, r.body, done) for r, done in result],
        [(2, b"2", True), (3, b"3", False)],
    )
    self.assertIsNone(next(self.journal.since("m", 0))[0].body)

  def test_lists_completions_after_cursor(self):
    for seq in range(3):
      self._accept(seq, owner="s", kind="sample")
    self.journal.finish({"s:2": b"r"})
    ((cursor, *first),) = self.journal.completions("s", 0, first=0, last=9)
    self.assertEqual(first, ["s:2", False])
    self.journal.finish({"s:0": {"error": "e", "category": "user"}})
    (row,) = self.journal.completions("s", cursor, first=0, last=9)
    self.assertEqual(row[1:], ("s:0", True))
    with self.subTest("a limit counts the numbers that are asked for alone"):
      (row,) = self.journal.completions("s", 0, first=0, last=1, limit=1)
      self.assertEqual(row[1], "s:0")

  def test_prunes_old_results_but_keeps_request_order(self):
    """Forward passes lose their body, and stay while others have theirs."""
    kinds = ("create_model", "forward_backward", "forward", "optim_step")
    for seq, kind in enumerate(kinds):
      self._accept(seq, b"body", kind=kind)
    self.journal.finish({f"m:{seq}": b"r" for seq in range(4)})
    self._accept(0, owner="s", kind="sample")
    with mock.patch.object(request_journal, "_KEEP_RESULTS", 0):
      self.journal.finish({"s:0": b"r"})
      self.assertEqual(self.journal.next_seq("m"), 4)
      bodies = [r.body for r, _ in self.journal.since("m", -1)]
      self.assertEqual(bodies, [b"body", b"body", b"", b"body"])
      self.journal.drop_bodies("m", 3)
      self._accept(1, owner="s", kind="sample")
      self.journal.finish({"s:1": b"r"})
    self.assertIsNone(self.journal.outcome("m:2"))
    self.assertEqual(self.journal.outcome("s:1").result, b"r")

  def test_finds_old_results_without_scan(self):
    with mock.patch.object(
        self.db, "fetch_all", wraps=self.db.fetch_all
    ) as run:
      self.journal.finish({})
    (statement,) = [c.args for c in run.call_args_list if "DELETE" in c.args[0]]
    plan = self.db.fetch_all(
        f"EXPLAIN QUERY PLAN {statement[0]}", *statement[1:]
    )
    self.assertIn("USING INDEX by_age", plan[0][-1])

  def test_keeps_first_value_of_fact(self):
    known = registry.Registry(self.db)
    self.assertEqual(known.fact("base", "a"), "a")
    self.assertEqual(known.fact("base", "b"), "a")

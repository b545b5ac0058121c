# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of failures: their rows, and that the page has the newest."""

import os
import pathlib
from unittest import mock

from absl.testing import absltest

from benchmarks import results
from tests.chaos import chaos
from tests.chaos import faults

_ROOT = pathlib.Path(__file__).parents[2]


def outcome(fault, process, seconds, **told):
  events = {
      kind: {"times": times, "message": message}
      for kind, (times, message) in told.items()
  }
  return {
      "fault": fault,
      "process": process,
      "seconds": seconds,
      "told": events,
  }


def kept(layout, *outcomes):
  return {
      "layout": layout,
      "seed": 7,
      "done": {"kill": 40, "stop": 6, "clock jump": 3},
      "seconds": 1230.0,
      "restarts": {},
      "pass_at_1": 0.91,
      "pass_at_1_undisturbed": [0.9, 0.95, 0.92],
      "audit": {
          "steps": 360,
          "steps_redone": 81,
          "completions_trained": 11520,
          "duplicate_prompts_refused": 4,
      },
      "outcomes": list(outcomes),
  }


class FaultsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def keep(self, result):
    results.keep(self.folder, result, chaos.KEY)

  def rows(self):
    """Returns the cells of the rows of all tables, by the first cell."""
    lines = "".join(faults.tables(self.folder).values()).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {first: rest for first, *rest in cells}

  def test_has_row_for_each_failure(self):
    died = dict(died=(3, "trainer-0: SIGKILL"), restart=(3, "trainer-0"))
    self.keep(
        kept(
            "many",
            outcome("kill", "trainer", [4.0, 6.0, 5.0], **died),
            outcome("kill", "searcher + store", [9.0]),
            outcome("kill", "supervisor", [8.0], restored=(1, "step 20")),
            outcome("stop", "searcher", [2.0]),
            outcome("stop", "store", [3.0]),
            outcome("clock jump", "all", [0.1]),
        ),
    )
    self.keep(
        kept("one", outcome("kill", "trainer", [7.0]),
             outcome("kill", "supervisor", [10.0])),
    )  # fmt: skip
    rows = self.rows()
    self.assertEqual(
        rows["many"],
        ["7", "40", "9", "360", "81", "11,520", "4", "0.910",
         "0.900 to 0.950", "20"],
    )  # fmt: skip
    times, told, following, seconds = rows["trainer killed"]
    self.assertEqual([times, seconds], ["3", "5.0 (to 6)"])
    self.assertEqual(told, "`died`: trainer-0: SIGKILL")
    self.assertStartsWith(following, "restarted from the newest readable")
    self.assertEqual(rows["run in one process killed"][0], "1")
    # Both layouts' runs; nothing but what a healthy run tells.
    times, told, *_, seconds = rows["supervisor killed"]
    self.assertEqual([times, seconds], ["2", "9.0 (to 10)"])
    self.assertEqual(told, "`restored`: step 20")
    self.assertEqual(rows["two processes killed"][:2], ["1", "nothing"])
    # No run had it.
    self.assertEqual(rows["store killed"][0], "0")
    self.assertEqual(rows["store killed"][-1], "not measured")
    self.assertEqual(rows["a process stopped for 1 to 4 s"][0], "2")
    self.assertIn("clock of all processes set by up to a day", rows)

  def test_leaves_out_events_of_other_faults(self):
    told = dict(
        died=(9, "a | b in /tmp/run/x"),
        damaged=(2, "x"),
        store_lost=(3, "y" * 200),
    )
    self.keep(
        kept("many", outcome("kill", "kvservice", [1.0] * 10, **told)),
    )
    _, told, *_ = self.rows()["kvservice killed"]
    self.assertEqual(told, f"`died`: a / b in …/x; `store_lost`: {'y' * 89}…")

  def test_has_row_for_each_format(self):
    self.keep(kept("one"))
    self.keep(
        {
            "format": "wire",
            "count": 1_000_000,
            "most_bytes_allocated": 1_234_567,
            "accepted": 10,
            "refused (hash)": 900_000,
            "refused (header)": 99_990,
        },
    )
    self.assertEqual(
        self.rows()["`wire`"],
        [
            "1,000,000",
            "10",
            "999,990",
            "hash (900,000), header (99,990)",
            "1.2 MB",
        ],
    )

  def test_asks_for_results_and_no_operand(self):
    with self.assertRaisesRegex(ValueError, "no results; first python -m"):
      faults.tables(self.folder)
    with self.assertRaisesRegex(ValueError, "must be none"):
      faults.run(None, ["now"])

  def test_knows_each_fault_of_chaos(self):
    self.assertEqual(set(faults.NEXT), {"kill", *chaos.FAULTS})

  def test_page_has_tables_of_kept_results(self):
    page = (_ROOT / "tests" / "chaos" / "README.md").read_text()
    self.assertEqual(
        faults.of_page(page),
        faults.tables(chaos.FOLDER),
        "run: python -m tests.chaos faults",
    )

  def test_writes_into_page(self):
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(self.folder)
    page = self.folder / "tests" / "chaos" / "README.md"
    page.parent.mkdir(parents=True)
    place = "<!-- tests.chaos faults: {} -->\n{}<!-- end -->\n"
    names = "failures", "runs", "formats"
    page.write_text(
        "before\n" + "between\n".join(place.format(n, "old\n") for n in names)
    )
    self.keep(kept("many", outcome("kill", "store", [2.0])))
    self.enter_context(mock.patch.object(chaos, "FOLDER", self.folder))
    faults.run(None, [])
    made = faults.tables(self.folder)
    self.assertEqual(
        page.read_text(),
        "before\n"
        + "between\n".join(place.format(name, made[name]) for name in names),
    )
    self.assertEqual(faults.of_page(page.read_text()), made)
    page.write_text(place.format("runs", ""))
    with self.assertRaisesRegex(ValueError, "has places for .'runs'.: must be"):
      faults.run(None, [])

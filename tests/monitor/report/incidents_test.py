# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What happened to a run is told once for each process and cause."""

from absl.testing import absltest

from tba_jax.monitor.report import diagnosis
from tba_jax.monitor.report import load


def incidents(events, lines=()):
  return diagnosis.incidents(load.Run(events=events, lines=lines))


def event(time, kind, message="", role="", index=0):
  return {
      "time": time,
      "kind": kind,
      "role": role,
      "index": index,
      "message": message,
  }


def steps(*times):
  return [
      {"step": i, "time": time, "train/loss": 1.0}
      for i, time in enumerate(times)
  ]


class SentencesTest(absltest.TestCase):

  def test_is_silent_about_quiet_runs(self):
    events = [
        event(1.0, "store_started", "generation 1", "store"),
        event(2.0, "searcher_gone", "s000 (finished)", "trainer"),
        event(3.0, "limit", "step 3", "trainer"),
    ]
    self.assertEmpty(incidents(events, steps(1, 2, 3, 4)))

  def test_is_silent_about_stops_and_evaluations(self):
    records = steps(*range(20), 100, *range(101, 110), 200)
    events = [event(60.0, "interrupted", "by SIGINT", "trainer")]
    evaluation = {"step": 29, "time": 150.0, "eval/pass_at_1": 0.5}
    self.assertEmpty(incidents(events, [*records, evaluation]))
    self.assertLen(incidents([], records), 2)

  def test_counts_deaths_by_process_and_cause(self):
    events = [
        event(1, "died", "searcher-1: SIGKILL", "searcher", 1),
        event(2, "restart", "searcher-1 (after SIGKILL)", "searcher", 1),
        event(3, "died", "searcher-1: SIGKILL", "searcher", 1),
        event(4, "died", "searcher-0: SIGKILL", "searcher", 0),
        event(5, "died", "searcher-1: status 1", "searcher", 1),
    ]
    found = incidents(events)
    self.assertLen(found, 3)
    self.assertRegex(found[0], r"^searcher-1 died twice \(SIGKILL, last at .*")
    self.assertRegex(found[1], "^searcher-0 died once")
    self.assertRegex(found[2], r"^searcher-1 died once \(status 1, .*log")

  def test_tells_a_hang_and_its_kill_once(self):
    events = [
        event(1, "stalled", "store-0: no sign of life for 15 s", "store"),
        event(2, "died", "store-0: SIGKILL", "store"),
        event(3, "died", "store-0: SIGKILL", "store"),
    ]
    hung, died = incidents(events)
    self.assertRegex(hung, r"^store-0 hung once \(no sign of life for 15 s, ")
    self.assertRegex(died, r"^store-0 died once \(SIGKILL, ")

  def test_says_what_to_do(self):
    events = [event(1, "journal_full", "no data is accepted", "trainer")] * 3
    (found,) = incidents(events)
    self.assertRegex(found, "^trainer-0: the journal was full.*, 3 times")
    self.assertEndsWith(found, "To do: free the disk.")

  def test_names_causes_of_pauses(self):
    events = [
        event(4.5, "died", "trainer-0: SIGKILL", "trainer"),
        event(60.0, "died", "searcher-0: SIGKILL", "searcher"),
    ]
    found = incidents(events, steps(1, 2, 3, 4, 38, 39, 50, 51))
    self.assertEqual(
        found[-2:],
        [
            "Training paused for 11.0 s between steps 5 and 6: no event"
            " explains it; the clock may have been set.",
            "Training paused for 34.0 s between steps 3 and 4: trainer-0:"
            " SIGKILL.",
        ],
    )

  def test_a_new_start_is_no_set_clock(self):
    records = [r | {"epoch": 1 + (r["step"] > 2)} for r in steps(1, 2, 3, 99)]
    self.assertEqual(
        incidents([], records),
        [
            "Training paused for 1:36 min between steps 2 and 3: the trainer"
            " was started again."
        ],
    )

  def test_tells_a_collapse_first(self):
    events = [event(4.5, "died", "trainer-0: SIGKILL", "trainer")]
    records = [
        record | {"train/reward_mean": reward, "train/entropy": entropy}
        for i, record in enumerate(steps(*range(60)))
        for reward, entropy in [(0.5, 1.0) if i < 30 else (0.1, 0.02)]
    ]
    found = incidents(events, records)
    self.assertLen(found, 2)
    self.assertEqual(
        found[0],
        "Collapse by entropy since step 30: it went from 1.00 to 0.02 nats a"
        " token, the reward fell from 0.50 to 0.10. To do: raise loss.beta or"
        " loss.entropy_weight, lower optimizer.learning_rate.",
    )

  def test_takes_damaged_records(self):
    events = [{"kind": 3}, {"kind": "guard"}, {"kind": "died", "time": "x"}]
    records = [{"train/loss": 1}, {"step": "a", "time": None, "train/loss": 1}]
    self.assertLen(incidents(events, records), 2)


if __name__ == "__main__":
  absltest.main()

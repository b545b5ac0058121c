# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conditions and numbers of the advice."""

from absl.testing import absltest

from tba_jax.monitor.report import diagnosis
from tba_jax.monitor.report import load
from tests.support import synthetic_runs


def _run(
    *records,
    busy=(None, None),
    config=None,
    evaluations=None,
    **parts,
):
  return load.Run(
      config={"config": config or {}},
      eval=evaluations or {},
      status=synthetic_runs.roles(*busy),
      lines=[{"step": i, **r} for i, r in enumerate(records)],
      span_kinds=synthetic_runs.KINDS,
      **parts,
  )


class AdviceTest(absltest.TestCase):

  def bottleneck(self, trainer, searchers, **run):
    """Returns the first advice for roles that are busy for these shares."""
    return diagnosis.advice(_run(busy=(trainer, searchers), **run))[0]

  def test_sampling_is_the_bottleneck(self):
    line = self.bottleneck(0.4, 1.0)
    self.assertIn("trainer waited 60% of its time", line)
    self.assertIn("sampling is the bottleneck", line)
    self.assertIn("3 searchers instead of 1", line)
    self.assertNotIn("reference.role", line)
    line = self.bottleneck(0.4, 1.0, config={"search": {"num_searchers": 4}})
    self.assertIn("10 searchers instead of 4", line)
    line = self.bottleneck(
        0.4, 1.0, config={"search": {"prompts_per_step": 32}}
    )
    self.assertIn("Or 12 fresh prompts a step", line)
    line = self.bottleneck(0.4, 1.0, config={"reference": {"role": "searcher"}})
    self.assertEndsWith(line, "(reference.role='trainer').")

  def test_trainer_is_the_bottleneck(self):
    line = self.bottleneck(1.0, 0.4, config={"search": {"num_searchers": 2}})
    self.assertIn(
        "searchers 60% of theirs: the trainer is the bottleneck", line
    )
    self.assertIn("1 searchers instead of 2", line)
    self.assertIn("More searchers", self.bottleneck(1.0, 0.4))
    for role, mode in (
        ("trainer", "fixed"), ("searcher", "fixed"), ("trainer", "ema")
    ):  # fmt: skip
      line = self.bottleneck(
          1.0, 0.4, config={"reference": {"role": role, "mode": mode}}
      )
      self.assertEqual(
          "reference.role='searcher'" in line,
          (role, mode) == ("trainer", "fixed"),
      )
    # A single device gains nothing.
    line = self.bottleneck(
        1.0,
        0.4,
        config={"reference": {"role": "trainer", "mode": "fixed"}},
        events=[{"kind": "one_process"}],
    )
    self.assertNotIn("reference.role", line)

  def test_both_wait(self):
    line = self.bottleneck(0.5, 0.2)
    self.assertIn("searchers 80% of theirs: the exchange", line)

  def test_both_are_busy(self):
    """On two cores of 86 ms a step, whatever the main loops wait for."""
    run = load.Run(**synthetic_runs.RUNS["both busy, with work"])
    (line,) = diagnosis.advice(run)
    self.assertEqual(
        line,
        "The trainer waited 3% of its time, the searchers 6% of theirs: both"
        " are busy. More searchers on the same cores would not make it faster;"
        " more or faster cores would. The trainer could evaluate less"
        " (evaluate.every_steps, evaluate.num_prompts) to save up to 16% of its"
        " time. Work per step: trainer step 63 ms, evaluate 13 ms, publish"
        " 7 ms; searcher decode 45 ms, reference 24 ms, reward 12 ms.",
    )

  def test_nothing_is_said_of_unknown_shares(self):
    self.assertEmpty(diagnosis.advice(_run(busy=(0.5, None))))

  def test_equal_groups_and_age(self):
    equal, age = "train/equal_reward_groups", "replay/staleness_steps"
    run = _run({equal: 0.5, age: 1.0}, {equal: 0.9, age: 2.0}, {equal: None})
    lines = diagnosis.advice(run)
    self.assertIn("1.5 steps old", lines[0])
    self.assertStartsWith(lines[1], "70% of the groups")
    self.assertIn("search.samples_per_prompt", lines[1])
    (few,) = diagnosis.advice(_run({equal: 0.2}))
    # A value model judges a completion alone.
    alone = _run({equal: 1.0}, config={"loss": {"name": "ppo"}})
    self.assertEmpty(diagnosis.advice(alone))
    self.assertNotIn("search.samples_per_prompt", few)

  def test_rewards_that_are_not_learned_from(self):
    young, old = "replay/reward_young", "replay/reward_old"
    metrics = {"train/equal_reward_groups": 1.0, young: 0.0, old: 0.0}
    for weight, count in ((1.0, 2), (0.0, 0)):
      config = {"loss": {"reward_weight": weight}}
      run = _run(metrics, metrics, config=config)
      self.assertLen(diagnosis.advice(run), count)

  def test_groups_that_were_left_out(self):
    equal, skipped = "train/equal_reward_groups", "replay/skipped_groups"
    (kept,) = diagnosis.advice(_run({equal: 0.2, skipped: 0}))
    self.assertStartsWith(kept, "20% of the groups")
    run = _run({equal: 0.0, skipped: 3}, {equal: 0.0, skipped: 1200})
    (line,) = diagnosis.advice(run)
    self.assertStartsWith(line, "1,200 groups of equal rewards were left out")

  def test_lead_is_too_small(self):
    lanes = synthetic_runs.lanes(
        ("trainer", "", {"step": 2.0, "wait_work": 3.0}),
        ("searcher", "", {"decode": 3.0, "wait_work": 2.0}),
        num_rounds=2,
        round_s=5.0,
    )
    run = _run(
        *(8 * [{}]),
        busy=(0.4, 0.6),
        config={"search": {"lead_steps": 1}},
        lanes=lanes,
    )
    # A round takes 3 s, a step 0.5 s.
    line = diagnosis.advice(run)[1]
    self.assertIn("search.lead_steps=6", line)
    run.config["config"]["search"]["lead_steps"] = 6
    self.assertLen(diagnosis.advice(run), 1)

  def test_names_the_store_where_it_limits(self):
    run = load.Run(**synthetic_runs.RUNS["store limits"])
    text = "\n".join(diagnosis.advice(run))
    self.assertIn("waited 20% of their time for room in the queue", text)
    self.assertIn("being published 95% of the time", text)
    self.assertIn("The store was lost once", text)

  def test_tells_the_effect_of_staleness(self):
    young, old = "replay/reward_young", "replay/reward_old"

    def said(*pairs):
      (line,) = diagnosis.advice(_run(*({young: a, old: b} for a, b in pairs)))
      return line

    self.assertIn("staleness costs reward", said((0.5, 0.3), (0.6, 0.41)))
    self.assertIn("0.55, older ones 0.355", said((0.5, 0.3), (0.6, 0.41)))
    self.assertIn("did not hurt", said((0.3, 0.5), (0.4, 0.61)))
    self.assertIn("no clear difference", said((0.5, 0.3), (0.3, 0.45)))
    self.assertEmpty(diagnosis.advice(_run({young: 0.5, old: 0.3})))

  def test_tells_the_effective_sample_size(self):
    names = "replay/staleness_steps", "train/effective_sample_share"
    clip = "train/ratio_clip_share"
    low = diagnosis.advice(_run({names[0]: 2.0, names[1]: 0.5, clip: 0.25}))
    self.assertIn("50% of their completions", low[1])
    self.assertIn("25.0% of the ratios corrected: staleness hurt", low[1])
    high = diagnosis.advice(_run({names[0]: 2.0, names[1]: 0.99}))
    self.assertIn("staleness hardly mattered", high[1])
    # Nothing is said of data that is not stale, or whose ratios nothing reads.
    self.assertLen(diagnosis.advice(_run({names[0]: 0.0, names[1]: 1.0})), 1)
    taught = _run(
        {names[0]: 2.0, names[1]: 0.5}, config={"loss": {"name": "gkd"}}
    )
    self.assertLen(diagnosis.advice(taught), 1)

  def test_a_log_alone_may_need_a_lower_baseline(self):
    def said(name="tb", share=1.0, shift=0.0):
      loss = {"name": name, "baseline_shift": shift}
      logged = {"path": "a.jsonl", "fraction": share}
      run = _run(config={"loss": loss, "offline": logged})
      return diagnosis.advice(run)

    (line,) = said()
    self.assertIn("loss.baseline_shift=-0.1", line)
    for others in ({"name": "oapl"}, {"share": 0.5}, {"shift": -0.05}):
      self.assertEmpty(said(**others))

  def test_counts_copies_and_unused_completions(self):
    count = lambda n: {"completions": n}
    ledger = {
        "generated": count(1000),
        "evicted_untrained": count(100),
        "in_buffer_untrained": count(150),
    }
    run = _run({"replay/unique_share": 0.7}, ledger=ledger)
    copies, unused = diagnosis.advice(run)
    self.assertStartsWith(copies, "30% of a batch")
    self.assertIn("Of 1,000 completions, 250 (25%)", unused)
    logged = {"offline": {"path": "a.jsonl", "fraction": 0.5}}
    (line,) = diagnosis.advice(
        _run({"replay/unique_share": 0.7}, config=logged)
    )
    self.assertIn("log more of each prompt", line)
    few = _run({"replay/unique_share": 0.95})
    self.assertEmpty(diagnosis.advice(few))

  def test_no_throughput_advice_if_nothing_was_learned(self):
    same = {"pass_at_1": 0.0, "pass_at_1_stderr": 0.0}
    run = _run(busy=(0.4, 1.0), evaluations=dict(before=same, after=same))
    (line,) = diagnosis.advice(run)
    self.assertNotIn("bottleneck", line)

  def test_says_nothing_of_an_empty_run(self):
    self.assertEmpty(diagnosis.advice(_run()))


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a run learned, from before and after with their errors."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.monitor.report import load
from tba_jax.monitor.report import verdict
from tests.monitor.report import fake_run


def _training(first, last, noise=0.02, num_steps=40):
  """Returns records whose mean batch reward goes from first to last."""
  slope = (last - first) / (num_steps - 1)
  return [
      {"train/reward_mean": first + i * slope + noise * (-1) ** i}
      for i in range(num_steps)
  ]


def _sides(error=0.01, **metrics):
  """Returns evaluations before and after, each metric with its error."""
  sides = {}, {}
  for key, values in metrics.items():
    for side, value in zip(sides, values, strict=True):
      side |= {key: value, f"{key}_stderr": error}
  return sides


# Runs, and the sentence that their report begins with.
RUNS = {
    "right or wrong, rose": (
        _sides(pass_at_1=(0.29, 0.68), mean_reward=(0.29, 0.68)),
        _training(0.3, 0.7),
        "Learned: held-out pass@1 went from 29.0 % to 68.0 % (+39.0 ± 2.8 "
        "points).",
    ),
    "rose within noise": (
        _sides(0.03, pass_at_1=(0.50, 0.57), mean_reward=(0.50, 0.57)),
        _training(0.5, 0.6),
        "Not clear yet: held-out pass@1 went from 50.0 % to 57.0 % (+7.0 ± "
        "8.5 points), which may be chance, and the training reward rose "
        "from 0.51 to 0.59. More held-out prompts (evaluate.final_prompts) "
        "would tell.",
    ),
    "stayed, training flat": (
        _sides(pass_at_1=(0.30, 0.31), mean_reward=(0.30, 0.31)),
        _training(0.4, 0.4),
        "Learned nothing that can be measured: held-out pass@1 went from "
        "30.0 % to 31.0 % (+1.0 ± 2.8 points), and the training reward did "
        "not rise.",
    ),
    "stayed far behind training": (
        _sides(pass_at_1=(0.30, 0.32), mean_reward=(0.30, 0.32)),
        _training(0.4, 0.9),
        "Overfitted: training reward rose from 0.44 to 0.86, but held-out "
        "pass@1 went from 30.0 % to 32.0 % (+2.0 ± 2.8 points).",
    ),
    "never right, training rose": (
        _sides(pass_at_1=(0.0, 0.0), mean_reward=(0.0, 0.0)),
        _training(0.0, 0.5),
        "Overfitted: training reward rose from 0.04 to 0.46, but held-out "
        "pass@1 went from 0.0 % to 0.0 % (+0.0 ± 2.8 points).",
    ),
    "fell while training rose": (
        _sides(pass_at_1=(0.30, 0.20), mean_reward=(0.30, 0.20)),
        _training(0.4, 0.6),
        "Overfitted: training reward rose from 0.42 to 0.58, but held-out "
        "pass@1 went from 30.0 % to 20.0 % (−10.0 ± 2.8 points).",
    ),
    "fell with training": (
        _sides(pass_at_1=(0.30, 0.20), mean_reward=(0.30, 0.20)),
        _training(0.4, 0.3),
        "Got worse: held-out pass@1 went from 30.0 % to 20.0 % (−10.0 ± 2.8 "
        "points).",
    ),
    "fell, training flat": (
        _sides(pass_at_1=(0.30, 0.20), mean_reward=(0.30, 0.20)),
        _training(0.4, 0.4),
        "Got worse: held-out pass@1 went from 30.0 % to 20.0 % (−10.0 ± 2.8 "
        "points).",
    ),
    "right before": (
        _sides(0.003, pass_at_1=(0.99, 0.99), mean_reward=(0.99, 0.99)),
        _training(0.97, 0.99, 0.001),
        "Saturated: held-out pass@1 was 99.0 % before training, and is 99.0 "
        "%.",
    ),
    "right after": (
        _sides(pass_at_1=(0.80, 0.99), mean_reward=(0.80, 0.99)),
        _training(0.8, 0.99),
        "Learned: held-out pass@1 went from 80.0 % to 99.0 % (+19.0 ± 2.8 "
        "points): there is hardly anything left to learn.",
    ),
    "graded, never right": (
        _sides(pass_at_1=(0.0, 0.0), mean_reward=(0.2, 0.8)),
        _training(0.2, 0.8),
        "Learned: held-out mean reward went from 0.20 to 0.80 (+0.60 ± "
        "0.03).",
    ),
    "graded, right as often": (
        _sides(pass_at_1=(0.30, 0.30), mean_reward=(0.4, 0.6)),
        _training(0.4, 0.6),
        "Learned: held-out mean reward went from 0.40 to 0.60 (+0.20 ± "
        "0.03); pass@1 did not rise: 30.0 % before, 30.0 % after.",
    ),
    "graded, right more often": (
        _sides(pass_at_1=(0.30, 0.60), mean_reward=(0.4, 0.7)),
        _training(0.4, 0.7),
        "Learned: held-out mean reward went from 0.40 to 0.70 (+0.30 ± "
        "0.03).",
    ),
    "graded, fell": (
        _sides(pass_at_1=(0.30, 0.35), mean_reward=(0.6, 0.4)),
        _training(0.6, 0.4),
        "Got worse: held-out mean reward went from 0.60 to 0.40 (−0.20 ± "
        "0.03).",
    ),
    "graded, stayed far behind": (
        _sides(pass_at_1=(0.30, 0.30), mean_reward=(0.40, 0.41)),
        _training(0.4, 0.9),
        "Overfitted: training reward rose from 0.44 to 0.86, but held-out "
        "mean reward went from 0.40 to 0.41 (+0.01 ± 0.03).",
    ),
    "reward without a scale": (
        _sides(0.1, mean_reward=(-1.5, 0.7)),
        _training(-1.5, 0.9),
        "Learned: held-out mean reward went from -1.50 to 0.70 (+2.20 ± "
        "0.28).",
    ),
    "wins more": (
        _sides(win_rate=(0.50, 0.70), mean_reward=(-0.5, 1.2)),
        _training(-0.5, 1.3),
        "Learned: held-out win-rate went from 50.0 % to 70.0 % (+20.0 ± 2.8 "
        "points).",
    ),
    "wins more, greedy less": (
        _sides(win_rate=(0.40, 0.70), greedy_win_rate=(0.89, 0.80)),
        _training(0.1, 0.5),
        "Learned: held-out win-rate went from 40.0 % to 70.0 % (+30.0 ± 2.8 "
        "points); that of greedy completions fell from 89.0 % to 80.0 %: "
        "samples became less random, not better.",
    ),
    "wins less for more reward": (
        _sides(win_rate=(0.50, 0.40), mean_reward=(-0.5, 2.0)),
        _training(-0.5, 2.1),
        "Overfitted: training reward rose from -0.27 to 1.87, but held-out "
        "win-rate went from 50.0 % to 40.0 % (−10.0 ± 2.8 points).",
    ),
    "wins as often for more reward": (
        _sides(win_rate=(0.50, 0.51), mean_reward=(-0.5, 2.0)),
        _training(-0.5, 2.1),
        "Not clear yet: held-out win-rate went from 50.0 % to 51.0 % (+1.0 "
        "± 2.8 points), which may be chance, and the training reward rose "
        "from -0.27 to 1.87. More held-out prompts (evaluate.final_prompts) "
        "would tell.",
    ),
    "errors unknown": (
        ({"pass_at_1": 0.2}, {"pass_at_1": 0.3}),
        (),
        "Learned: held-out pass@1 went from 20.0 % to 30.0 % (+10.0 "
        "points).",
    ),
    "a step or two": (
        _sides(pass_at_1=(0.30, 0.31)),
        _training(0.4, 0.5)[:5],
        "Learned nothing that can be measured: held-out pass@1 went from "
        "30.0 % to 31.0 % (+1.0 ± 2.8 points).",
    ),
    "not evaluated after": (
        ({"pass_at_1": 0.5}, {}),
        _training(0.4, 0.9),
        "Not known yet: no evaluation before and after training.",
    ),
}


class VerdictTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name.replace(" ", "_").replace(",", ""), *run)
      for name, run in RUNS.items()
  )
  def test_sentence_says_whether_it_learned(self, sides, records, sentence):
    self.assertEqual(verdict.verdict(*sides, records).sentence, sentence)

  @parameterized.parameters(
      # Held-out and training shares of failures, and the verdict's kind.
      ((0.125, 0.455), (0.1, 0.1), "unjudged"),
      ((0.125, 0.130), (0.1, 0.4), "unjudged"),
      (None, (0.1, 0.4), "unjudged"),
      ((0.125, 0.130), (0.1, 0.1), "learned"),
      ((0.455, 0.125), (0.4, 0.1), "learned"),
      ((0.0, 0.0), (0.0, 0.0), "learned"),
      ((0.5, 0.5), None, "learned"),
  )
  def test_never_says_learned_while_failures_rise(self, held, training, kind):
    metrics = {"pass_at_1": (0.3, 0.9), "mean_reward": (-0.6, -0.1)}
    if held:
      metrics["failure_share"] = held
    sides, records = _sides(**metrics), _training(-0.6, -0.1)
    if training:
      shares = _training(*training)
      for record, share in zip(records, shares, strict=True):
        record["reward/failure_share"] = share["train/reward_mean"]
    outcome = verdict.verdict(*sides, records)
    self.assertEqual(outcome.kind, "learned")
    found = verdict.with_failures(outcome, *sides, records)
    self.assertEqual(found.kind, kind)
    self.assertEqual(found.learned, kind == "learned")
    self.assertEqual("Learned" in found.sentence, kind == "learned")
    if held and any(held):
      self.assertIn(f"{held[0]:.1%}".replace("%", " %"), found.sentence)
      self.assertIn(f"{held[1]:.1%}".replace("%", " %"), found.sentence)

  @parameterized.parameters(
      ((0.9, 0.3), "worse"),
      ((0.99, 0.99), "unjudged"),
      ((0.3, 0.3), "unjudged"),
  )
  def test_other_verdicts_tell_of_rising_failures(self, rates, kind):
    sides = _sides(pass_at_1=rates, failure_share=(0.1, 0.5))
    found = verdict.with_failures(verdict.verdict(*sides), *sides, ())
    self.assertEqual(found.kind, kind)
    self.assertFalse(found.learned)
    self.assertIn("10.0 % to 50.0 % of held-out", found.sentence)

  def test_a_run_of_which_nothing_could_be_judged(self):
    sides = {"failure_share": 1.0}, {"failure_share": 1.0}
    self.assertIn("no held-out", verdict.verdict(*sides).sentence)

  def test_noise_of_steps_that_share_data_is_no_rise(self):
    """Rewards wander, so neighbours are alike: the fifths differ by chance."""
    wandering = [
        {"train/reward_mean": 0.4 + (0.05 if i // 40 % 2 else 0.0)}
        for i in range(640)
    ]
    first, last, error = verdict.trend(wandering)
    self.assertLess(abs(last - first), verdict.CLEAR * error)

  def test_batches_drawn_by_reward_tell_nothing(self):
    """They get better while the buffer grows, whatever the policy does."""
    for recent_fraction, kind in ((1.0, "overfitted"), (0.5, "nothing")):
      workdir = self.create_tempdir().full_path
      fake_run.make_run(workdir, num_steps=40)
      run = load.read_run(workdir)
      run.config["config"]["replay"] = {"recent_fraction": recent_fraction}
      run.eval["after"] = dict(run.eval["before"])
      self.assertEqual(verdict.of_run(run).kind, kind)


if __name__ == "__main__":
  absltest.main()

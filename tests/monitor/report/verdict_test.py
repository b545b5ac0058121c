# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a run learned, from before and after with their errors.

`findings_test` has the sentences.
"""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.monitor.report import diagnosis
from tba_jax.monitor.report import evidence
from tba_jax.monitor.report import load
from tests.monitor.report import fake_run
from tests.support import synthetic_runs


def _verdict(sides, lines=()):
  before, after = sides
  evaluations = {"before": before, "after": after}
  return diagnosis.verdict(load.Run(eval=evaluations, lines=lines))


class VerdictTest(parameterized.TestCase):

  @parameterized.parameters(
      # Held-out and training shares of failures, and the verdict.
      ((0.125, 0.455), (0.1, 0.1), "unjudged"),
      ((0.125, 0.130), (0.1, 0.4), "unjudged"),
      (None, (0.1, 0.4), "unjudged"),
      ((0.125, 0.130), (0.1, 0.1), "learned"),
      ((0.455, 0.125), (0.4, 0.1), "learned"),
      ((0.0, 0.0), (0.0, 0.0), "learned"),
      ((0.5, 0.5), None, "learned"),
  )
  def test_never_says_learned_while_failures_rise(self, held, training, name):
    sides, lines = synthetic_runs.failing(None, None)
    self.assertEqual(_verdict(sides, lines).name, "learned")
    found = _verdict(*synthetic_runs.failing(held, training))
    self.assertEqual(found.name, name)
    self.assertEqual(not found.remedy, name == "learned")
    self.assertEqual("Learned" in found.sentence, name == "learned")
    if held and any(held):
      self.assertIn(f"{held[0]:.1%}".replace("%", " %"), found.sentence)
      self.assertIn(f"{held[1]:.1%}".replace("%", " %"), found.sentence)

  @parameterized.parameters(
      ((0.9, 0.3), "worse"),
      ((0.99, 0.99), "unjudged"),
      ((0.3, 0.3), "unjudged"),
  )
  def test_other_verdicts_tell_of_rising_failures(self, rates, name):
    found = _verdict(
        synthetic_runs.sides(pass_at_1=rates, failure_share=(0.1, 0.5))
    )
    self.assertEqual(found.name, name)
    self.assertTrue(found.remedy)
    self.assertIn("10.0 % to 50.0 % of held-out", found.sentence)

  def test_a_run_of_which_nothing_could_be_judged(self):
    sides = {"failure_share": 1.0}, {"failure_share": 1.0}
    self.assertIn("no held-out", _verdict(sides).sentence)

  def test_noise_of_steps_that_share_data_is_no_rise(self):
    """Rewards wander, so neighbours are alike: the fifths differ by chance."""
    wandering = [
        {"train/reward_mean": 0.4 + (0.05 if i // 40 % 2 else 0.0)}
        for i in range(640)
    ]
    change = evidence.trend(wandering)
    self.assertTrue(change.is_known)
    self.assertLess(abs(change.by), change.margin)

  def test_batches_drawn_by_reward_tell_nothing(self):
    """They get better while the buffer grows, whatever the policy does."""
    for recent_fraction, name in ((1.0, "overfitted"), (0.5, "nothing")):
      workdir = self.create_tempdir().full_path
      fake_run.make_run(workdir, num_steps=40)
      run = load.read_run(workdir)
      run.config["config"]["replay"] = {"recent_fraction": recent_fraction}
      run.eval["after"] = dict(run.eval["before"])
      self.assertEqual(diagnosis.verdict(run).name, name)


if __name__ == "__main__":
  absltest.main()

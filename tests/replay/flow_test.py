# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Admission and versions, of steps and of rounds."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.replay import scheduler


def make(**changes):
  settings = dict(
      prompts_per_step=4,
      warm_prompts=0,
      lead_steps=1,
      num_steps=12,
      lockstep=False,
      wait_for_fresh=True,
      starvation_s=1.0,
  )
  return scheduler.Flow(**{**settings, **changes})


class RoundsTest(parameterized.TestCase):

  @parameterized.parameters(
      # Round r (from 1) trains on θ of round r-2; a round has 4 steps.
      (1, [0, 0, 4]),
      (0, [0, 4, 8]),
  )
  def test_versions_of_three_rounds(self, lag, versions):
    flow = make(round_prompts=6, round_steps=4, lag_rounds=lag)
    self.assertEqual(
        [flow.version_of(p) for p in range(18)],
        [v for v in versions for _ in range(6)],
    )

  def test_the_next_round_is_admitted_only_once_a_round_has_begun(self):
    flow = make(round_prompts=6, round_steps=4, lag_rounds=1)
    self.assertEqual([flow.needed(s) for s in (0, 3, 4, 8)], [6, 6, 12, 18])
    self.assertEqual([flow.admitted(s) for s in (0, 3, 4, 8)], [6, 6, 12, 18])
    # And none after the last.
    self.assertEqual([flow.admitted_next(s) for s in (0, 3, 4, 8)],
                     [12, 12, 18, 18])  # fmt: skip

  def test_without_rounds_the_newest_version_samples(self):
    flow = make()
    self.assertEqual(flow.version_of(9), -1)
    self.assertFalse(flow.is_pinned)
    self.assertEqual((flow.needed(2), flow.admitted(2)), (12, 16))

  def test_lockstep_samples_with_the_step_s_own(self):
    flow = make(lockstep=True)
    self.assertTrue(flow.is_pinned)
    self.assertEqual([flow.version_of(p) for p in (0, 3, 4, 9)], [0, 0, 1, 2])
    self.assertEqual((flow.needed(2), flow.admitted(2)), (12, 12))


if __name__ == "__main__":
  absltest.main()

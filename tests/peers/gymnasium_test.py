# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment of Gymnasium, with the wrappers that it has by default."""

import pathlib

from absl.testing import absltest

from tba_jax.tasks import base
from tests.peers import gymnasium_text
from tests.support import episodes

_FILE = pathlib.Path(gymnasium_text.__file__)


class GymnasiumTest(absltest.TestCase):

  def test_text_environments_run_as_they_are(self):
    made = episodes.make(self, f"{_FILE}:make", max_turns=9, deadline_s=30.0)
    alone = gymnasium_text.make()
    said = [alone.reset(seed=seed)[0] for seed in (0, 2, 4)]
    prompts = made.prompts(base.TRAIN, [0, 1, 2])
    self.assertEqual([prompt.observation for prompt in prompts], said)
    right = said[1].removeprefix("Say ")
    answers, (late, result) = episodes.play(
        made, ["x"] * 9, ["x", right], indices=[0, 1]
    )
    # Three steps are the registered limit: the end is a truncation.
    self.assertEqual(answers, [["No", "No"], ["No"]])
    self.assertEqual((late.reward, late.num_turns), (-1.5, 3))
    self.assertEqual((result.reward, result.num_turns), (0.5, 2))

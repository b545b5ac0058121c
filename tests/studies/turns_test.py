# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Staleness by turn: which version samples a turn, and the table."""

from absl.testing import parameterized
import jax
import numpy as np

from studies.turns import turns
from tba_jax import schedule
from tba_jax.sampling import decode
from tba_jax.tools import sweep
from tests.support import fakes
from tests.support import sampler_case
from tests.support import scripted_turns

_V, _T, _LAG = 6, 12, 4


class TurnStalenessTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_each_turn_has_newer_params(self, recomputes_cache):
    model = fakes.FakeModel(_V, 34)
    settings = sampler_case.make_settings(
        max_completion_tokens=_T, num_rows=32, has_turns=True
    )
    sampler = turns.InFlight(model, settings, _LAG, recomputes_cache)
    requests = [
        decode.Request(np.array(prompt), index, 0, 11)
        for index, prompt in enumerate([[2], [3, 4]])
    ]
    counts = set()
    for version in range(7):
      params = model.init(jax.random.key(version))
      result = sampler.sample(
          jax.tree.map(lambda x: 0.2 * x, params),
          requests,
          version=version,
          newer=None,
          turns=scripted_turns.Scripted(delay=1),
      )
      for completions in result:
        for tokens, versions in zip(
            completions.tokens, completions.token_versions
        ):
          turn = 0
          for token, of_token in zip(tokens, versions):
            if of_token < 0:  # An environment's, or after the end.
              continue
            oldest = max(0, version - _LAG)
            self.assertEqual(of_token, min(oldest + turn, version))
            turn += token == 1
          counts.add(turn)
    self.assertEqual(counts, {0, 1, 2, 3})

  def test_prompts_of_step_are_sampled_as_it_begins(self):
    config = sweep.Lag(16).apply(turns.make_config())
    late = turns.LateSchedule(**vars(schedule.make_schedule(config)))
    self.assertEqual([late.admitted_after(t) for t in (0, 1, 20)], [8, 16, 168])
    self.assertEqual([late.version_of(8 * t) for t in (0, 17, 20)], [0, 1, 4])

  def test_params_are_newest_from_fifth_turn_on(self):
    settings, model = sampler_case.make_settings(), fakes.FakeModel(_V, 34)
    sampler = turns.InFlight(model, settings, 16, False)
    sampler.versions.extend((version, {}) for version in range(100))
    places = [sampler.place(turn) for turn in range(8)]
    self.assertEqual(places, [0, 4, 8, 12, 16, 16, 16, 16])

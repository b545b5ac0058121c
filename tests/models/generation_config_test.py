# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is read of generation_config.json: the ends of a text."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.models import hf_config
from tests.support import tiny_model

_HF = hf_config.to_hf(tiny_model.make_model().config)


class GenerationConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, None, (7, ())),
      ({}, 7, (7, ())),
      ({}, [5, 7], (7, (7, 5))),
      ({"eos_token_id": [7, 5]}, [9, 5], (7, (7, 5, 9))),
      ({"eos_token_id": None}, 4, (4, (4,))),
  )
  def test_ends_of_generation_config_are_added(self, settings, value, found):
    config = hf_config.from_hf({**_HF, "eos_token_id": 7, **settings})
    generation = {"eos_token_id": value, "temperature": 0.6, "top_p": 0.9}
    config = hf_config.with_generation(config, generation)
    self.assertEqual((config.eos_id, config.stop_ids), found)

  @parameterized.parameters(("2",), ([[1]],), ([-1],), ([True],), (1.5,))
  def test_other_ends_are_refused(self, value):
    config = hf_config.from_hf(_HF)
    with self.assertRaisesRegex(ValueError, "generation_config.*eos_token_id"):
      hf_config.with_generation(config, {"eos_token_id": value})


if __name__ == "__main__":
  absltest.main()

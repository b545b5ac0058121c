# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the throughput benchmark: sizes, rates, what peers are given."""

import json
import pathlib
from unittest import mock

from absl.testing import absltest

from benchmarks import peer_grpo
from benchmarks import throughput
from benchmarks import trial_run
from tba_jax.config import validate
from tba_jax.config import variants
from tests.support import tiny_model

countdown = variants.import_config("configs/countdown.py")


class ThroughputTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.config = countdown.get_config()
    tiny = tiny_model.make_model(num_layers=1, max_positions=128).config
    self.enter_context(mock.patch.object(throughput, "_SHAPE", tiny))

  def measure(self, repeats, **peers):
    self.enter_context(mock.patch.multiple(peer_grpo, **peers))
    self.enter_context(
        mock.patch.multiple(
            trial_run,
            time_roles=mock.Mock(return_value=(2.0, 1.0)),
            time_loop=mock.Mock(side_effect=[4.0, 8.0, 6.0]),
        )
    )
    self.enter_context(
        mock.patch.object(throughput.processes, "enable_compilation_cache")
    )
    return throughput.run(self.config, [str(repeats)])

  def test_rates_are_of_the_median_step_and_ratios_of_each_repeat(self):
    out = self.measure(3, is_installed=lambda peer: False)
    self.assertEqual(out["runs"]["asynchronous"]["tokens_per_s"], 1024.0)
    self.assertEqual(out["runs"]["synchronous"]["completions_per_s"], 32 / 6)
    self.assertEqual(out["ratios"], {"synchronous": [2.0, 4.0, 3.0]})

  def test_peers_get_the_same_model_and_work(self):
    asked = {}

    def run(peer, folder: pathlib.Path, settings):
      model = pathlib.Path(settings["model"])
      self.assertTrue((model / "tokenizer.json").exists())
      shape = json.loads((model / "config.json").read_text())
      asked[peer] = shape["hidden_size"], settings
      return {"step_ends": [100.0, 110.0, 115.0, *range(118, 130, 2)]}

    out = self.measure(1, is_installed=lambda peer: True, run=run)
    self.assertEqual(list(asked), ["trl", "tunix"])
    for peer, (width, settings) in asked.items():
      self.assertEqual(width, throughput._SHAPE.width)
      self.assertLen(settings["prompts"], 4 * settings["num_steps"])
      self.assertTrue(settings["full_length"])
      # Six steps from the end of the third, of 2 s but for the first.
      self.assertAlmostEqual(out["ratios"][peer][0], 13 / 6 / 2)

  def test_all_completions_have_one_length(self):
    config = throughput.make_config(self.config)
    validate.validate(trial_run.make_variant(config, 9, lockstep=False))
    self.assertEqual(config.explore.min_tokens + 1, throughput._TOKENS)


if __name__ == "__main__":
  absltest.main()

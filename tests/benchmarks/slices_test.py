# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the paper configs on TPUs and GPUs, without a compiler."""

from absl.testing import absltest
import jax

from benchmarks import slices
from tba_jax.config import load
from tba_jax.tools import compile as compile_lib
from tests.support import hub_cache


class SlicesTest(absltest.TestCase):

  def test_compiles_red_teaming_without_weights(self):
    slices.make_hub(hub_cache.make(self))
    config = load.load_config("configs/red_team.py:model=llama")
    role = compile_lib.trainer(config, jax.devices()[:1])
    self.assertEqual(
        list(role.programs),
        ["train_step", "publish", "classifier", "encoder"],
    )
    self.assertContainsSubset(
        ["victim", "encoder of replay_filter"], role.resident
    )

  def test_gold_model_of_tldr_is_scorer(self):
    slices.make_hub(hub_cache.make(self))
    config = load.load_config("configs/tldr/tba.py")
    role = compile_lib.searcher(config, jax.devices()[:1])
    self.assertIn("reward_model", role.programs)

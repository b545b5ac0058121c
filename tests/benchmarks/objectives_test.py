# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times of objectives for each network, and bytes from shapes alone."""

from unittest import mock

from absl.testing import absltest
import jax

from benchmarks import objectives
from benchmarks import peer_model
from tests.support import tiny_model


class ObjectivesBenchmarkTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    for name, value in dict(
        _SHAPE=(2, 2, 3, 4),
        _MEMORY_SHAPE=(1, 2, 3, 4),
        _MEMORY_VOCAB=tiny_model.VOCAB,
        _ROUNDS=1,
    ).items():
      self.enter_context(mock.patch.object(objectives, name, value))
    shape = tiny_model.make_model(num_layers=1).config
    self.enter_context(mock.patch.object(peer_model, "SHAPE", shape))

  def test_a_value_model_is_a_second_network(self):
    out = objectives.run(tiny_model.make_config(), ["ppo"])
    (found,) = out["objectives"].values()
    self.assertEqual(found["networks"], 2)
    self.assertAlmostEqual(
        found["ratio"], found["step_s"] / 2 / found["tb_step_s"]
    )
    self.assertEqual(out["max_ratio"], found["ratio"])

  def test_memory_is_of_shapes_alone(self):
    with mock.patch.object(jax, "device_put") as put:
      out = objectives.run(tiny_model.make_config(), ["memory"])
    put.assert_not_called()
    self.assertEqual(out["all_logits_bytes"], 4 * 2 * 4 * tiny_model.VOCAB)
    # Params, two moments, and the batch.
    self.assertGreater(out["argument_bytes"], 12 * out["num_params"])
    self.assertGreater(out["temporary_bytes"], 0)

  def test_refuses_an_unknown_name(self):
    with self.assertRaisesRegex(ValueError, r"unknown objectives \['dqn'\]"):
      objectives.run(tiny_model.make_config(), ["dqn"])


if __name__ == "__main__":
  absltest.main()

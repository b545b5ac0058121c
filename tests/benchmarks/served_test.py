# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers that are compared train on the same sequences."""

from unittest import mock

from absl.testing import absltest
import numpy as np

from benchmarks import served


class ServedTest(absltest.TestCase):

  def test_datum_weights_only_completion(self):
    sequence = mock.Mock(tokens=[7, 8], logprobs=[-0.5, -0.25])
    for loss, name, expected in (
        ("importance_sampling", "advantages", [0.0, 0.0, 0.75, 0.75]),
        ("tb", "weights", [0.0, 0.0, 1.0, 1.0]),
    ):
      datum = served.datum(loss, [4, 5, 6], sequence, 1.0, 0.25)
      inputs = datum.loss_fn_inputs
      self.assertEqual(datum.model_input.to_ints(), [4, 5, 6, 7])
      np.testing.assert_array_equal(inputs["target_tokens"].data, [5, 6, 7, 8])
      np.testing.assert_array_equal(
          inputs["logprobs"].data, [0, 0, -0.5, -0.25]
      )
      np.testing.assert_array_equal(inputs[name].data, expected)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a user's own loss."""

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import custom_loss
from tba_jax.losses import loss_metrics


class TotalsTest(absltest.TestCase):

  def test_values_are_means_by_name(self):
    mask_BxKxT = jnp.array([[[1.0, 1.0], [1.0, 0.0]]])
    totals = custom_loss.totals(
        {
            "number": 2,
            "flag": jnp.array(True),
            "share_BxK": jnp.array([[1.0, 2.0]]),
            "nats_BxKxT": jnp.array([[[1.0, 2.0], [6.0, 100.0]]]),
            "prompts_Bx1": jnp.array([[3.0]]),
            # Metrics of these have names of their own.
            "residual_BxK": jnp.zeros((1, 2)),
            "log_z_Bx1": jnp.zeros((1, 1)),
        },
        mask_BxKxT,
    )
    found = {k: float(v) for k, v in loss_metrics.finish(totals).items()}
    self.assertEqual(
        found,
        {
            "loss/number": 2.0,
            "loss/flag": 1.0,
            "loss/share": 1.5,
            "loss/nats": 3.0,
            "loss/prompts": 3.0,
        },
    )

  def test_numbers_of_micro_batches_are_averaged(self):
    parts = [
        custom_loss.totals({"x": x}, jnp.ones((1, 1, 1))) for x in (1.0, 4.0)
    ]
    whole = {k: tuple(map(sum, zip(*(p[k] for p in parts)))) for k in parts[0]}
    np.testing.assert_allclose(loss_metrics.finish(whole)["loss/x"], 2.5)

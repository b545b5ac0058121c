# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""CoPG and GVPO: known numbers and invariances."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import tb

SEQ = jnp.array([[-1.0, -3.0, -2.0]])
REF_SEQ = jnp.array([[-2.0, -1.0, -2.0]])
REWARDS = jnp.array([[1.5, 1.0, 0.0]])
# At β = 0.5, r - β ρ is 1, 2, 0: pairs apart by 1, 1, 2; mean 1.
LOSSES = (tb.copg_loss, tb.gvpo_loss)


class GroupVarianceTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      ("copg_loss", "paper", 6 / 2),
      ("copg_loss", "unit", 6 / 2 / (2 * 0.5 * 3)),
      ("gvpo_loss", "paper", 2 / 4),
      ("gvpo_loss", "unit", 2 / 4 / 0.5),
  )
  def test_known_numbers(self, name, scale, expected):
    loss_fn = getattr(tb, name)
    run = self.variant(functools.partial(loss_fn, scale=scale))
    loss, _ = run(SEQ, REF_SEQ, REWARDS, beta=0.5)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

  @parameterized.parameters(*LOSSES)
  def test_shift_and_order_change_nothing(self, loss_fn):
    run = functools.partial(loss_fn, beta=0.5, scale="unit")
    loss, _ = run(SEQ, REF_SEQ, REWARDS)
    np.testing.assert_allclose(
        run(SEQ, REF_SEQ, REWARDS + 3.0)[0], loss, rtol=1e-5
    )
    order = np.array([2, 0, 1])
    np.testing.assert_allclose(
        run(SEQ[:, order], REF_SEQ[:, order], REWARDS[:, order])[0],
        loss,
        rtol=1e-6,
    )

  @parameterized.parameters(*LOSSES)
  def test_refuses(self, loss_fn):
    with self.assertRaisesRegex(ValueError, "loss.scale='half'"):
      loss_fn(SEQ, REF_SEQ, REWARDS, beta=0.5, scale="half")
    one = jnp.zeros((2, 1))
    with self.assertRaisesRegex(ValueError, "completions_per_prompt=1"):
      loss_fn(one, one, one, beta=0.5, scale="unit")


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sub-trajectory balance against all pairs written out, and its limits."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import tb

B, K, T = 2, 3, 5
BETA = 0.5


def make_arrays(seed=0):
  """Log-probs, the reference's, mask (one completion is empty), r, values."""
  rng = np.random.default_rng(seed)
  lengths_BxK = np.array([[5, 1, 3], [2, 0, 4]])
  mask = (np.arange(T) < lengths_BxK[:, :, None]).astype(np.float32)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hide = lambda x: np.where(mask > 0, x, np.nan)
  return (
      hide(draw(B, K, T)),
      hide(draw(B, K, T)),
      mask,
      draw(B, K),
      hide(draw(B, K, T)),
  )


def all_pairs(logprobs, ref, mask, rewards, values, lam):
  """Returns the loss in the paper's scale, pair by pair."""
  losses = []
  for index in np.ndindex(B, K):
    n = int(mask[index].sum())
    u = np.append(values[index][:n], rewards[index]) / BETA
    rho = (logprobs - ref)[index]
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n + 1)]
    weights = [lam ** (j - i) for i, j in pairs]
    squares = [(u[i] - u[j] + rho[i:j].sum()) ** 2 for i, j in pairs]
    losses.append(np.average(squares, weights=weights) if n else 0.0)
  return np.mean(losses)


class SubTrajectoryTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1.0, 0.5)
  def test_is_all_pairs(self, lam):
    arrays = make_arrays()
    run = self.variant(
        functools.partial(tb.subtb_loss, beta=BETA, scale="paper", lam=lam)
    )
    loss, aux = run(*arrays)
    np.testing.assert_allclose(loss, all_pairs(*arrays, lam), rtol=1e-5)
    logprobs, ref, mask, rewards, values = arrays
    rho = np.where(mask > 0, logprobs - ref, 0).sum(axis=2)
    flow = np.where(mask > 0, values, 0)[:, :, 0] / BETA
    whole = np.where(mask[:, :, 0] > 0, flow + rho - rewards / BETA, 0)
    np.testing.assert_allclose(aux["residual_BxK"], whole, atol=1e-5)
    np.testing.assert_allclose(aux["log_z_Bx1"], flow[:, :1], rtol=1e-6)

  def test_scales(self):
    arrays = make_arrays()
    run = lambda scale: tb.subtb_loss(*arrays, beta=BETA, scale=scale, lam=0.9)[
        0
    ]
    np.testing.assert_allclose(run("unit"), BETA / 2 * run("paper"), rtol=1e-6)
    with self.assertRaisesRegex(ValueError, "loss.scale='half'"):
      run("half")

  def test_of_one_token_is_trajectory_balance(self):
    logprobs, ref, _, rewards, values = make_arrays()
    one = lambda x: jnp.asarray(x[..., :1])
    fixed = dict(beta=BETA, scale="unit")
    logprobs, ref, values = (
        jnp.nan_to_num(one(x)) for x in (logprobs, ref, values)
    )
    values = jnp.broadcast_to(values[:, :1], values.shape)
    run = lambda x: tb.subtb_loss(
        x, ref, jnp.ones((B, K, 1)), rewards, values, lam=0.9, **fixed
    )[0]
    expected = lambda x: tb.learned_z_tb_loss(
        x[..., 0], ref[..., 0], rewards, values[:, :1, 0] / BETA, **fixed
    )[0]
    chex.assert_trees_all_close(
        jax.value_and_grad(run)(logprobs),
        jax.value_and_grad(expected)(logprobs),
        rtol=1e-5,
    )

  def test_is_zero_at_the_soft_values_of_the_target(self):
    """Two tokens of two words; the target is π_ref exp(r/β)/Z."""
    rng = np.random.default_rng(3)
    ref = np.log(rng.dirichlet([1, 1], size=3))  # start, after 0, after 1
    rewards = rng.normal(size=(2, 2))
    inner = BETA * np.log((np.exp(ref[1:] + rewards / BETA)).sum(axis=1))
    first = BETA * np.log(np.exp(ref[0] + inner / BETA).sum())
    policy = np.stack(
        [
            ref[0] + (inner - first) / BETA,
            *(ref[1:] + (rewards - inner[:, None]) / BETA),
        ]
    )
    words = [(a, b) for a in range(2) for b in range(2)]
    take = lambda x: np.array([[[x[0][a], x[1 + a][b]] for a, b in words]])
    with jax.enable_x64(True):
      loss, _ = tb.subtb_loss(
          take(policy),
          take(ref),
          np.ones((1, 4, 2)),
          rewards.reshape(1, 4),
          np.array([[[first, inner[a]] for a, _ in words]]),
          beta=BETA,
          scale="paper",
          lam=0.7,
      )
    np.testing.assert_allclose(loss, 0.0, atol=1e-20)

  def test_gradient_by_finite_differences(self):
    with jax.enable_x64(True):
      logprobs, ref, mask, rewards, values = map(
          lambda x: jnp.nan_to_num(jnp.asarray(x, jnp.float64)), make_arrays()
      )
      steps = np.random.default_rng(2).normal(size=(2, B, K, T))

      def along(x):
        return tb.subtb_loss(
            logprobs + x * steps[0],
            ref,
            mask,
            rewards,
            values + x * steps[1],
            beta=BETA,
            scale="unit",
            lam=0.8,
        )[0]

      slope = (along(1e-5) - along(-1e-5)) / 2e-5
      np.testing.assert_allclose(jax.grad(along)(0.0), slope, rtol=1e-6)


if __name__ == "__main__":
  absltest.main()

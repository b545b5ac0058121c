# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trust region: TB's gradient inside it, none where a token left it."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import tb

B, K, T = 3, 5, 4
BETA = 0.3


def make_groups(seed=0, dtype=np.float32):
  """Returns log-probs [B, K], reference log-probs [B, K], rewards [B, K]."""
  rng = np.random.default_rng(seed)
  seq = rng.normal(-10, 3, (B, K)).astype(dtype)
  ref_seq = rng.normal(-10, 3, (B, K)).astype(dtype)
  return seq, ref_seq, rng.normal(size=(B, K)).astype(dtype)


class ClippedTest(parameterized.TestCase):

  def make_tokens(self):
    rng = np.random.default_rng(4)
    logprobs = rng.normal(-2, 1, (B, K, T)).astype(np.float32)
    lengths = rng.integers(1, T + 1, (B, K))
    mask = (np.arange(T) < lengths[:, :, None]).astype(np.float32)
    return logprobs, mask

  @parameterized.parameters("unit", "paper")
  def test_at_ratio_one_the_gradient_is_that_of_tb(self, scale):
    logprobs, mask = self.make_tokens()
    _, ref_seq, rewards = make_groups()

    def plain(x):
      return tb.vargrad_tb_loss(
          (x * mask).sum(axis=2), ref_seq, rewards, beta=BETA, scale=scale
      )

    residual = plain(logprobs)[1]["residual_BxK"]
    clipped = lambda x: tb.clipped_tb_loss(
        x, logprobs, mask, residual, beta=BETA, ratio_clip=0.2, scale=scale
    )[0]
    expected = jax.grad(lambda x: plain(x)[0])(logprobs)
    self.assertGreater(jnp.abs(expected).max(), 1e-3)
    chex.assert_trees_all_close(
        jax.grad(clipped)(logprobs), expected, rtol=1e-5, atol=1e-7
    )

  @parameterized.parameters(
      # advantage, ratio, is the gradient cut
      (1.0, 1.5, True),
      (1.0, 0.5, False),
      (1.0, 1.1, False),
      (-1.0, 1.5, False),
      (-1.0, 0.5, True),
      (-1.0, 0.9, False),
  )
  def test_a_token_stops_once_it_moved_far_enough(self, sign, ratio, cut):
    beta, clip = 0.5, 0.2
    run = lambda x: tb.clipped_tb_loss(
        x,
        jnp.full((1, 1, 1), -2.0),
        jnp.ones((1, 1, 1)),
        jnp.full((1, 1), -sign / beta),
        beta=beta,
        ratio_clip=clip,
        scale="unit",
    )
    logprobs = jnp.full((1, 1, 1), -2.0 + np.log(ratio))
    (loss, aux), grad = jax.value_and_grad(run, has_aux=True)(logprobs)
    held = np.clip(ratio, 1 - clip, 1 + clip)
    np.testing.assert_allclose(loss, -min(ratio * sign, held * sign), rtol=1e-5)
    np.testing.assert_allclose(
        grad[0, 0, 0], 0.0 if cut else -sign * ratio, rtol=1e-5
    )
    self.assertEqual(bool(aux["clipped_BxKxT"][0, 0, 0]), cut)

  def test_sums_tokens_and_averages_completions(self):
    logprobs, mask = self.make_tokens()
    residual = np.full((B, K), -1 / BETA, np.float32)  # advantage 1
    grad = jax.grad(
        lambda x: tb.clipped_tb_loss(
            x, logprobs, mask, residual, beta=BETA, ratio_clip=0.2, scale="unit"
        )[0]
    )(logprobs)
    np.testing.assert_allclose(grad, -mask / (B * K), rtol=1e-5)

  def test_stays_finite_for_a_completion_the_behavior_policy_never_drew(self):
    logprobs = jnp.zeros((1, 2, 2))
    behavior = jnp.array([[[-500.0, 0.0], [500.0, 0.0]]])
    run = lambda x: tb.clipped_tb_loss(
        x,
        behavior,
        jnp.ones((1, 2, 2)),
        jnp.array([[-1.0, 1.0]]),
        beta=1.0,
        ratio_clip=0.2,
        scale="unit",
    )[0]
    loss, grad = jax.value_and_grad(run)(logprobs)
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(np.isfinite(grad).all())

  def test_masked_tokens_play_no_part(self):
    logprobs, mask = self.make_tokens()
    _, _, rewards = make_groups()
    run = lambda behavior: tb.clipped_tb_loss(
        logprobs,
        behavior,
        mask,
        -rewards,
        beta=BETA,
        ratio_clip=0.2,
        scale="unit",
    )
    behavior = logprobs - 0.1
    chex.assert_trees_all_equal(
        run(behavior), run(np.where(mask > 0, behavior, -9.0))
    )

  def test_refuses_a_clip_of_zero(self):
    logprobs, mask = self.make_tokens()
    with self.assertRaisesRegex(ValueError, "loss.ratio_clip=0"):
      tb.clipped_tb_loss(
          logprobs,
          logprobs,
          mask,
          np.zeros((B, K), np.float32),
          beta=BETA,
          ratio_clip=0.0,
          scale="unit",
      )


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and KL estimators against numbers worked out by hand."""

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import logprobs

# softmax of these is [1/2, 1/4, 1/4].
_LOGITS = np.log([4.0, 2.0, 2.0]).astype(np.float32)


class TokenLogprobsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_known_numbers(self):
    fn = self.variant(
        lambda logits, tokens: logprobs.token_logprobs(
            logits, tokens, temperature=1.0
        )
    )
    logits_BxKxTxV = jnp.broadcast_to(_LOGITS, (1, 2, 3, 3))
    tokens_BxKxT = jnp.array([[[0, 1, 2], [2, 2, 0]]])
    half, quarter = np.log(0.5), np.log(0.25)
    np.testing.assert_allclose(
        fn(logits_BxKxTxV, tokens_BxKxT),
        [[[half, quarter, quarter], [quarter, quarter, half]]],
        rtol=1e-6,
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_temperature_divides_the_logits(self):
    # exp(logits / 0.5) = [16, 4, 4].
    fn = self.variant(
        lambda logits, tokens: logprobs.token_logprobs(
            logits, tokens, temperature=0.5
        )
    )
    np.testing.assert_allclose(
        fn(jnp.asarray(_LOGITS)[None], jnp.array([0])),
        [np.log(16 / 24)],
        rtol=1e-6,
    )

  def test_computes_in_float32_whatever_the_logits(self):
    logits = jnp.array([[0.0, 0.01]], jnp.bfloat16)
    out = logprobs.token_logprobs(logits, jnp.array([0]), temperature=1.0)
    self.assertEqual(out.dtype, jnp.float32)
    difference = float(logits[0, 1])
    np.testing.assert_allclose(out, [-np.log1p(np.exp(difference))], rtol=1e-6)

  def test_gradient_is_one_hot_minus_softmax(self):
    gradient_1x3 = jax.grad(
        lambda logits: logprobs.token_logprobs(
            logits, jnp.array([1]), temperature=2.0
        ).sum()
    )(jnp.asarray(_LOGITS)[None])
    root = np.sqrt([4.0, 2.0, 2.0])
    expected = (np.array([0.0, 1.0, 0.0]) - root / root.sum()) / 2.0
    np.testing.assert_allclose(gradient_1x3[0], expected, atol=1e-6)

  def test_large_logits_stay_finite(self):
    logits = jnp.array([[1e4, 0.0]])
    out = logprobs.token_logprobs(logits, jnp.array([1]), temperature=1.0)
    np.testing.assert_allclose(out, [-1e4], rtol=1e-6)

  def test_wrong_arguments(self):
    logits, tokens = jnp.zeros((2, 3)), jnp.zeros((2,), jnp.int32)
    with self.assertRaisesRegex(ValueError, "temperature=0.0: allowed above 0"):
      logprobs.token_logprobs(logits, tokens, temperature=0.0)
    with self.assertRaisesRegex(ValueError, "all axes of the logits"):
      logprobs.token_logprobs(logits, tokens[:1], temperature=1.0)


class SequenceAndEntropyTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_sequence_sums_what_the_mask_counts(self):
    logprobs_BxKxT = jnp.array([[[-1.0, -2.0, -jnp.inf], [-4.0, -8.0, -16.0]]])
    mask_BxKxT = jnp.array([[[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]])
    out = self.variant(logprobs.sequence_logprobs)(logprobs_BxKxT, mask_BxKxT)
    np.testing.assert_array_equal(out, [[-3.0, -24.0]])

  @chex.variants(with_jit=True, without_jit=True)
  def test_entropy(self):
    fn = self.variant(lambda x: logprobs.entropy(x, temperature=1.0))
    logits = jnp.stack(
        [
            jnp.asarray(_LOGITS),
            jnp.zeros(3),
            jnp.array([0.0, -jnp.inf, -jnp.inf]),
        ]
    )
    expected = [1.5 * np.log(2), np.log(3), 0.0]
    np.testing.assert_allclose(fn(logits), expected, atol=1e-6)

  def test_entropy_has_a_gradient_beside_impossible_tokens(self):
    gradient = jax.grad(lambda x: logprobs.entropy(x, temperature=1.0))(
        jnp.array([1.0, 0.0, -jnp.inf])
    )
    self.assertTrue(np.isfinite(gradient).all())
    self.assertLess(gradient[0], 0)


class KLEstimatorsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_known_numbers(self):
    out = self.variant(logprobs.kl_estimators)(
        jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.5]))
    )
    log2 = np.log(2)
    np.testing.assert_allclose(out["k1"], [log2, -log2], rtol=1e-6)
    np.testing.assert_allclose(out["k2"], [log2**2 / 2] * 2, rtol=1e-6)
    np.testing.assert_allclose(
        out["k3"], [0.5 - 1 + log2, 2 - 1 - log2], rtol=1e-5
    )

  def test_k1_and_k3_are_unbiased(self):
    p = jnp.array([0.7, 0.2, 0.1])
    q = jnp.array([0.3, 0.3, 0.4])
    kl = float((p * jnp.log(p / q)).sum())
    out = logprobs.kl_estimators(jnp.log(p), jnp.log(q))
    for name in ("k1", "k3"):
      self.assertAlmostEqual(float((p * out[name]).sum()), kl, places=6)
    self.assertTrue((out["k3"] >= 0).all())

  def test_equal_policies_give_exactly_zero(self):
    same = jnp.log(jnp.array([0.1, 1e-30, 1.0]))
    for value in logprobs.kl_estimators(same, same).values():
      np.testing.assert_array_equal(value, [0.0, 0.0, 0.0])


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions at temperatures of their own, and of a least length."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.sampling import decode
from tba_jax.sampling import logits as logits_lib
from tba_jax.sampling import requests
from tests.support import sampler_case
from tests.support import tiny_model

EOS = 1


def _settings(temperature=1.0, **fields):
  return sampler_case.make_settings(
      temperature=temperature,
      max_prompt_tokens=4,
      num_rows=4,
      chunk_steps=1,
      stop_ids=(EOS, 3),
      explore=requests.Explore(**fields),
  )


def _keys(count):
  return jax.random.split(jax.random.key(0, impl="threefry2x32"), count)


class ExploreTest(absltest.TestCase):

  def test_temperatures_have_their_shares_and_ranges(self):
    asked = requests.Explore(0.5, 0.5, 2.0)
    own = np.asarray(logits_lib.random_temperature(asked, _keys(4000)))
    drawn = own[own > 0]
    self.assertAlmostEqual(len(drawn) / len(own), 0.5, delta=0.03)
    self.assertGreaterEqual(drawn.min(), 0.5)
    self.assertLessEqual(drawn.max(), 2.0)
    self.assertAlmostEqual(drawn.mean(), 1.25, delta=0.03)
    self.assertAlmostEqual(drawn.std(), 1.5 / 12**0.5, delta=0.03)

  def test_logits_are_scaled_by_both_temperatures(self):
    settings = _settings(0.5, fraction=0.5, min_temperature=2.0,
                         max_temperature=2.0)  # fmt: skip
    keys = _keys(64)
    logits = jnp.broadcast_to(jnp.arange(5.0), (64, 5))
    found = logits_lib.explored_logits(
        settings, logits, keys, jnp.zeros(64, jnp.int32)
    )
    own = logits_lib.random_temperature(settings.explore, keys) > 0
    # Divided by 0.5 later, so that the whole is a division by 2.
    expected = np.where(np.asarray(own)[:, None], logits / 4, logits)
    np.testing.assert_allclose(found, expected)
    self.assertBetween(int(own.sum()), 16, 48)

  def test_no_stop_token_before_the_least_length(self):
    logits = jnp.zeros((3, 5))
    position = jnp.array([0, 1, 2])
    found = logits_lib.explored_logits(
        _settings(min_tokens=2), logits, _keys(3), position
    )
    probs = np.asarray(jax.nn.softmax(found))
    np.testing.assert_allclose(probs[:2, [EOS, 3]], 0)
    np.testing.assert_allclose(probs[:2, [0, 2, 4]], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(probs[2], 0.2, rtol=1e-6)

  def test_a_stop_token_alone_after_the_most_tokens(self):
    found = logits_lib.explored_logits(
        _settings(max_tokens=2), jnp.zeros((3, 5)), _keys(3), jnp.arange(1, 4)
    )
    probs = np.asarray(jax.nn.softmax(found))
    np.testing.assert_allclose(probs[0], 0.2, rtol=1e-6)
    np.testing.assert_allclose(probs[1:, [EOS, 3]], 0.5, rtol=1e-6)
    np.testing.assert_allclose(probs[1:, [0, 2, 4]], 0)
    self.assertFalse(_settings(max_tokens=2).samples_plainly)

  def test_nothing_asked_for_changes_nothing(self):
    settings = _settings()
    logits = jnp.arange(10.0).reshape(2, 5)
    found = logits_lib.explored_logits(
        settings, logits, _keys(2), jnp.zeros(2, int)
    )
    self.assertIs(found, logits)
    self.assertTrue(settings.samples_plainly)
    self.assertFalse(_settings(min_tokens=1).samples_plainly)

  @pytest.mark.slow
  def test_the_sampler_has_both(self):
    model = tiny_model.make_model()
    params = model.init(jax.random.PRNGKey(0))
    sampler = sampler_case.make(
        model,
        max_completion_tokens=6,
        num_rows=64,
        chunk_steps=6,
        # Most completions would end early without the rule.
        stop_ids=(EOS, 2, 3, 4),
        explore=requests.Explore(0.5, 2.0, 2.0, min_tokens=4),
    )
    request = decode.Request(np.array([5, 6]), 0, 0, num_completions=64)
    (found,) = sampler.sample(params, [request], version=0)
    self.assertGreaterEqual(found.lengths.min(), 4)
    self.assertTrue(found.stopped.any())
    stops = np.isin(found.tokens[:, :4][:, :3], (EOS, 2, 3, 4))
    self.assertFalse(stops.any())

  @pytest.mark.slow
  def test_forced_stop_token_prevents_truncation(self):
    model = tiny_model.make_model()
    params = model.init(jax.random.PRNGKey(0))
    sampler = sampler_case.make(
        model,
        max_completion_tokens=6,
        num_rows=64,
        chunk_steps=6,
        stop_ids=(EOS,),
        explore=requests.Explore(max_tokens=5),
    )
    request = decode.Request(np.array([5, 6]), 0, 0, num_completions=64)
    (found,) = sampler.sample(params, [request], version=0)
    self.assertTrue(found.stopped.all())
    self.assertIn(6, found.lengths)
    # The log-prob is the policy's, under which the stop token was unlikely.
    last = found.plain_logprobs[found.lengths == 6, 5]
    self.assertLess(last.max(), -1.0)
    # Drawn from something else than the model, and told so.
    gap = np.abs(found.logprobs - found.plain_logprobs)
    self.assertGreater(gap.max(), 0.01)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A sampled stop token counts where pad and stop token are one id."""

import types

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.learning import batches
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.sampling import decode
from tests.support import fakes
from tests.support import sampler_case
from tests.support import tiny_model

_EOS, _T = 1, 4
_TOKENIZER = types.SimpleNamespace(stop_ids={_EOS}, stop_strings=())


class PadIsStopTest(parameterized.TestCase):

  def sample(self, pad_id):
    model = fakes.FakeModel(4, 8)
    sampler = sampler_case.make(
        model, max_completion_tokens=_T, stop_ids=(_EOS,), pad_id=pad_id
    )
    # The stop token may also stand in a prompt.
    prompts = [np.array([2]), np.array([_EOS, 3]), np.array([3, 2, _EOS])]
    return sampler.sample(
        model.init(jax.random.key(1)),
        [decode.Request(p, i, 0, 16) for i, p in enumerate(prompts)],
        version=0,
    )

  def test_samples_are_those_of_another_pad(self):
    ends = set()
    for one, other in zip(self.sample(_EOS), self.sample(0), strict=True):
      np.testing.assert_array_equal(one.lengths, other.lengths)
      np.testing.assert_array_equal(one.stopped, other.stopped)
      np.testing.assert_array_equal(one.logprobs, other.logprobs)
      for tokens, same, length in zip(one.tokens, other.tokens, one.lengths):
        np.testing.assert_array_equal(tokens[:length], same[:length])
        self.assertTrue((tokens[length:] == _EOS).all())
        ends.add((int(length), bool(tokens[length - 1] == _EOS)))
    self.assertContainsSubset({(1, True), (_T, False)}, ends)

  @parameterized.parameters(True, False)
  def test_the_stop_token_has_its_gradient(self, include_stop_token):
    model = tiny_model.BIGRAM
    params = tiny_model.init_params(model)
    mask = batches.completion_mask(
        np.full((1, 1, _T), _EOS),
        np.arange(_T)[None, None] < 1,
        None if include_stop_token else _TOKENIZER,
    )

    def gradient(pad):
      def loss_fn(params):
        logprobs = logprobs_lib.completion_logprobs(
            model,
            params,
            jnp.asarray([[pad, pad, 3]]),
            jnp.asarray([[0.0, 0.0, 1.0]]),
            jnp.asarray([[[_EOS, pad, pad, pad]]]),
            temperature=1.0,
        )
        return jnp.sum(logprobs * mask)

      return jax.grad(loss_fn)(params)

    found = gradient(_EOS)
    chex.assert_trees_all_equal(found, gradient(0))
    # d log softmax(e·H)[stop] / d H = e (1[stop] - softmax), e that of token 3.
    e_D = params["embedding"][3]
    expected_DxV = np.outer(e_D, -jax.nn.softmax(e_D @ params["head"]))
    expected_DxV[:, _EOS] += e_D
    np.testing.assert_allclose(
        found["head"], expected_DxV * include_stop_token, atol=1e-6
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/net/heads.py: values, rewards, and heads over a policy."""

import dataclasses
import pathlib

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.hf import hf
from tba_jax.models.net import heads
from tba_jax.models.net import transformer
from tests.support import tiny_model

B, K, P, T = 3, 2, 5, 4
_POLICY = tiny_model.make_model(num_layers=1)
_VALUES = dict(atol=1e-5, rtol=0.0)


def _inputs():
  rng = np.random.default_rng(0)
  prompt_mask = np.arange(P)[None] >= P - np.array([5, 2, 1])[:, None]
  lengths_BxK = np.array([[4, 1], [2, 0], [3, 4]])
  mask = np.arange(T) < lengths_BxK[..., None]
  tokens = lambda *shape: rng.integers(2, tiny_model.VOCAB, shape)
  return tokens(B, P), prompt_mask, tokens(B, K, T), mask


def _full(prompt, prompt_mask, completion, mask):
  """Returns tokens and mask of the B * K sequences, prompts repeated."""
  repeat = lambda x: np.repeat(x[:, None], K, axis=1)
  join = lambda a, b: np.concatenate([repeat(a), b], -1).reshape(B * K, P + T)
  return join(prompt, completion), join(prompt_mask, mask)


class ScalarModelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.model = heads.ScalarModel(heads.config_of(_POLICY.config))
    self.params = tiny_model.init_params(self.model)

  def test_values_of_completions_are_those_of_full_sequences(self):
    inputs = _inputs()
    tokens, mask = _full(*inputs)
    full = jax.jit(self.model.values)(self.params, tokens, mask)
    chex.assert_shape(full, (B * K, P + T))
    chex.assert_type(full, jnp.float32)
    values = jax.jit(self.model.completion_values)(self.params, *inputs[:3])
    # Entry t has not seen token t yet.
    expected = np.asarray(full)[:, P - 1 : -1].reshape(B, K, T)
    real = inputs[3]
    chex.assert_trees_all_close(values[real], expected[real], **_VALUES)
    self.assertGreater(np.std(expected), 0.1)

    last = P + real.sum(-1).reshape(-1) - 1
    expected = np.asarray(full)[np.arange(B * K), last]
    rewards = jax.jit(self.model.completion_rewards)(self.params, *inputs)
    chex.assert_trees_all_close(rewards, expected.reshape(B, K), **_VALUES)
    rewards = jax.jit(self.model.rewards)(self.params, tokens, mask)
    chex.assert_trees_all_close(rewards, expected, **_VALUES)

  def test_a_value_is_the_head_of_the_normed_stream(self):
    inputs = _inputs()
    params = {
        **{k: v for k, v in self.params.items() if k != "score"},
        # This head reads the stream out.
        "head": {"kernel": jnp.eye(tiny_model.VOCAB)},
    }
    stream = jax.jit(_POLICY.completion_logits)(params, *inputs[:3])
    kernel = self.params["score"]["kernel"]
    chex.assert_trees_all_close(
        jax.jit(self.model.completion_values)(self.params, *inputs[:3]),
        jnp.einsum("bktd,d->bkt", stream, kernel[0]),
        **_VALUES,
    )

  def test_scores_several_labels(self):
    config = dataclasses.replace(_POLICY.config, num_labels=3)
    model = heads.ScalarModel(config)
    params = tiny_model.init_params(model)
    chex.assert_shape(params["score"]["kernel"], (3, config.width))
    tokens, mask = _full(*_inputs())
    mask[0] = False  # An empty row is finite.
    scores = jax.jit(model.label_scores)(params, tokens, mask)
    rewards = jax.jit(model.rewards)(params, tokens, mask)
    chex.assert_shape(scores, (B * K, 3))
    chex.assert_tree_all_finite(scores)
    np.testing.assert_allclose(rewards, scores[:, 0], rtol=1e-6)
    self.assertGreater(np.std(scores[1]), 0.0)

  @parameterized.parameters(dict(tie_embeddings=True), {})
  def test_starts_from_a_policy(self, **settings):
    policy = tiny_model.make_model(num_layers=1, **settings)
    model = heads.ScalarModel(heads.config_of(policy.config))
    policy_params = tiny_model.init_params(policy)
    params = model.from_policy(policy_params)
    rewards = jax.jit(model.rewards)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        params, jax.eval_shape(model.init, jax.random.key(0))
    )
    inputs = _full(*_inputs())
    np.testing.assert_array_equal(rewards(params, *inputs), 0.0)
    random = model.from_policy(policy_params, jax.random.key(0))
    self.assertGreater(np.std(rewards(random, *inputs)), 0.1)
    for name in ("embed", "blocks", "final_norm"):
      chex.assert_trees_all_equal(params[name], policy_params[name])
    # Neither tree holds a buffer of the other.
    jax.tree.map(lambda x: x.delete(), policy_params)
    chex.assert_tree_all_finite(rewards(params, *inputs))

  def test_refuses_a_head_of_the_other_kind(self):
    with self.assertRaisesRegex(ValueError, "num_labels=0"):
      heads.ScalarModel(_POLICY.config)
    with self.assertRaisesRegex(ValueError, "num_labels=1.*predicts tokens"):
      transformer.make_model(self.model.config)

  @parameterized.parameters(1, 2)
  def test_a_folder_keeps_every_bit(self, num_labels):
    folder = pathlib.Path(self.create_tempdir().full_path) / "model"
    config = dataclasses.replace(self.model.config, num_labels=num_labels)
    params = tiny_model.init_params(heads.ScalarModel(config))
    hf.save(folder, config, params)
    loaded_config, loaded = hf.load(folder)
    self.assertEqual(loaded_config, config)
    chex.assert_trees_all_equal(loaded, params)

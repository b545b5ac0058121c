# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rematerialization: the same gradient, from less and less memory."""

import dataclasses

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config import settings
from tba_jax.models.net import heads
from tba_jax.models.net import transformer
from tba_jax.policy import value_model
from tests.support import tiny_model

_SHAPE = tiny_model.make_model(num_layers=4).config


def _policy(name):
  model = transformer.make_model(_SHAPE, remat=name)
  return model, lambda *inputs: model.logits(*inputs).var()


def _value_model(name):
  config = settings.get_config()
  config.loss.name, config.train.remat = "ppo", name
  model = value_model.make_model(config, transformer.make_model(_SHAPE))
  return model, lambda *inputs: jnp.square(model.values(*inputs)).mean()


def _reward_model(name):
  shape = heads.config_of(_SHAPE)
  model = heads.ScalarModel(shape, remat=name)
  return model, lambda *inputs: jnp.square(model.rewards(*inputs)).mean()


def _size(tree):
  return sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(tree))


class RematTest(parameterized.TestCase):

  @parameterized.parameters(_policy, _value_model, _reward_model)
  @pytest.mark.slow
  def test_gradients_agree_and_memory_falls(self, make):
    tokens = np.random.default_rng(0).integers(2, tiny_model.VOCAB, (4, 48))
    mask = np.ones((4, 48), np.int32)
    grads, memory = [], []
    for name in ("none", "dots", "full"):
      model, loss = make(name)
      params = tiny_model.init_params(model)
      compiled = jax.jit(jax.grad(loss)).lower(params, tokens, mask).compile()
      memory.append(compiled.memory_analysis().temp_size_in_bytes)
      grads.append(compiled(params, tokens, mask))
    self.assertGreater(_size(grads[0]), 1e-3)
    for other in grads[1:]:
      chex.assert_trees_all_close(other, grads[0], rtol=1e-4, atol=1e-6)
    self.assertLess(memory[1], 0.8 * memory[0])
    self.assertLess(memory[2], 0.8 * memory[1])

  def test_results_of_layers_are_kept_in_their_dtype(self):
    shape = dataclasses.replace(_SHAPE, num_layers=32)
    params = tiny_model.init_params(transformer.make_model(shape))
    inputs = np.ones((8, 64), np.int32), np.ones((8, 64), bool)
    completions = np.ones((8, 1, 64), np.int32)
    memory = {}
    for dtype in ("float32", "bfloat16"):
      own = dataclasses.replace(shape, compute_dtype=dtype)
      stream = transformer.make_model(own, remat="dots").completion_stream
      loss = lambda params, f=stream: f(params, *inputs, completions).var()
      compiled = jax.jit(jax.grad(loss)).lower(params).compile()
      memory[dtype] = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(memory["bfloat16"], 0.7 * memory["float32"], memory)

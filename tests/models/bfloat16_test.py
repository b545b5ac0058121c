# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""bfloat16 compute on a CPU: training, sampling and judging, by family.

Some forms of its products compile and then fail when they run, so each program
that has them runs here.
"""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.learning import guards
from tba_jax.learning import published
from tba_jax.learning import train_step
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.mesh import sharding
from tba_jax.models.net import heads
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.sampling import decode
from tests.models import hf_case
from tests.support import base_config
from tests.support import sampler_case
from tests.support import tiny_model

# An error of a gradient, in units of the error that rounding the params to
# bfloat16 causes in a float32 computation. It depends on the shape's condition.
_GRADIENT_ERROR = 3.0
_WITH_EXPERTS = "gemma4_text_experts"
_SHAPES = {
    **{
        shape["family"]: shape
        for shape in hf_case.FAMILIES
        if shape is not hf_case.GEMMA4_EXPERTS
    },
    _WITH_EXPERTS: hf_case.GEMMA4_EXPERTS,
    "tied": dict(tie_embeddings=True),
    "odd_sizes": dict(mlp_width=37, vocab_size=23),
}


def _models(name, remat="full"):
  """Returns a model that computes in float32 and its like in bfloat16."""
  shape = tiny_model.make_model(
      **{"width": 32, "head_dim": 8, "num_kv_heads": 2, **_SHAPES[name]}
  ).config
  half = dataclasses.replace(shape, compute_dtype="bfloat16")
  return [transformer.make_model(c, remat=remat) for c in (shape, half)]


def _relative_error(tree, expected):
  a, b = (
      np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)])
      for t in (tree, expected)
  )
  return np.linalg.norm(a - b) / np.linalg.norm(b)


class Bfloat16Test(parameterized.TestCase):

  # "full" computes the same products again: each kind of layer once.
  @parameterized.parameters(
      *((name, "dots") for name in _SHAPES),
      *((shape["family"], "full") for shape in hf_case.KINDS),
  )
  @pytest.mark.slow
  def test_gradients_are_near_those_of_float32(self, name, remat):
    wide, half = _models(name, remat)
    params = tiny_model.init_params(wide)
    # At seed 1, rounding changes the experts of a token in this shape.
    batch = tiny_model.make_batch(seed=2 if name == _WITH_EXPERTS else 1)

    def loss(model, params):
      logprobs = logprobs_lib.completion_logprobs(
          model,
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          temperature=1.0,
      )
      return jnp.sum(batch.rewards[..., None] * logprobs)

    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params
    )
    of_half, of_wide = (
        jax.jit(jax.grad(functools.partial(loss, model)))
        for model in (half, wide)
    )
    found, expected, of_rounded = (
        of_half(params), of_wide(params), of_wide(rounded)
    )  # fmt: skip
    for leaf in jax.tree.leaves(found):
      self.assertEqual(leaf.dtype, jnp.float32)
    error = _relative_error(found, expected)
    rounding_error = _relative_error(of_rounded, expected)
    # No gradient at all has an error of 1.
    limit = min(_GRADIENT_ERROR * rounding_error, 0.5)
    self.assertBetween(error, 1e-4, limit)

  @parameterized.parameters(*_SHAPES)
  @pytest.mark.slow
  def test_sampler_and_trainer_agree(self, name):
    _, model = _models(name)
    # Far from uniform, as after training.
    params = jax.tree.map(lambda x: 2.0 * x, tiny_model.init_params(model))
    copy = published.snapshot(params, dtypes=published.Dtypes("bfloat16", ""))
    rng = np.random.default_rng(0)
    requests = [
        decode.Request(
            prompt_tokens=rng.integers(2, tiny_model.VOCAB, 3),
            prompt_id=i,
            visit=0,
            num_completions=4,
        )
        for i in range(8)
    ]
    # More completions than rows: rows are refilled.
    sampler = sampler_case.make(model, max_completion_tokens=8)
    found = sampler.sample(copy, requests, version=0)
    trained = jax.jit(
        lambda params, *tokens: logprobs_lib.completion_logprobs(
            model, params, *tokens, temperature=1.0
        )
    )(
        params,
        np.stack([request.prompt_tokens for request in requests]),
        np.ones((8, 3), np.float32),
        np.stack([completions.tokens for completions in found]),
    )
    lengths = np.stack([completions.lengths for completions in found])
    mask = np.arange(8) < lengths[..., None]
    sampled = np.stack([completions.logprobs for completions in found])
    gap = np.abs(sampled - np.asarray(trained))[mask].mean()
    config = base_config.make(model__compute_dtype="bfloat16")
    self.assertLess(gap, guards.max_logprob_gap(config, "cpu"))

  @parameterized.parameters(
      ("tb", 0, "float32"),
      ("ppo", 0, "float32"),
      ("tb", 2, "float32"),
      ("tb", 2, "bfloat16"),
      ("ppo", 2, "bfloat16"),
  )
  @pytest.mark.slow
  def test_train_step_keeps_float32_params(self, loss, rank, base):
    config = tiny_model.make_config(loss__name=loss)
    model = tiny_model.make_model(compute_dtype="bfloat16", param_dtype=base)
    mesh = sharding.make_mesh(config.mesh)
    params = tiny_model.init_params(model)
    value, keys = None, {}
    if loss == "ppo":
      shape = heads.config_of(model.config)
      shape = dataclasses.replace(shape, param_dtype="float32")
      value = keys["value_model"] = heads.ScalarModel(shape)
    trained = model
    if rank:
      trained = lora.make(dict(rank=rank, alpha=4.0, targets="all"), model)
      keys |= dict(adapters=trained, base=params)
    state = train_step.init_state(
        config,
        trained,
        jax.jit(trained.init)(jax.random.PRNGKey(0)) if rank else params,
        mesh,
        value_model=value,
        value_params=value and value.from_policy(params),
    )
    step = train_step.make_train_step(config, model, mesh, **keys)
    before = jax.device_get(state.params)
    state, metrics = step(state, tiny_model.make_batch())
    self.assertTrue(np.isfinite(metrics["loss"]))
    for leaf in jax.tree.leaves((state.params, state.loss_params)):
      self.assertEqual(leaf.dtype, jnp.float32)
    moved = _relative_error(jax.device_get(state.params), before)
    self.assertGreater(moved, 0)

  def test_rewards_are_near_those_of_float32(self):
    wide, half = (
        heads.ScalarModel(
            heads.config_of(tiny_model.make_model(compute_dtype=dtype).config)
        )
        for dtype in ("float32", "bfloat16")
    )
    params = tiny_model.init_params(wide)
    tokens = np.arange(24, dtype=np.int32).reshape(3, 8) % 16
    expected, found = (
        jax.jit(model.rewards)(params, tokens, np.ones_like(tokens))
        for model in (wide, half)
    )
    self.assertEqual(found.dtype, jnp.float32)
    np.testing.assert_allclose(found, expected, atol=0.1)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params that are not the trainer's do not give its log-probs."""

import functools
import types

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.learning import published
from tba_jax.learning import work_parts
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.policy import lora
from tba_jax.policy import policy_samplers
from tba_jax.transport.params import probe
from tba_jax.transport.params import version
from tests.support import base_config
from tests.support import fakes
from tests.support import tiny_model


def grown(params, scale=3.0):
  """Returns params whose log-probs are far from uniform."""
  return jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, params)


def moved(params, step, seed=0):
  """Returns params after an update of every leaf, of this size."""
  leaves, treedef = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return treedef.unflatten(
      x + step * jax.random.normal(key, x.shape, x.dtype)
      for x, key in zip(leaves, keys)
  )


def max_gap(config, backend):
  compute_dtype = config_lib.compute_dtype(config.model, backend)
  return probe.max_gap(config, backend, compute_dtype)


class _Pair:
  """A trainer's answer and a searcher's check, of one dtype."""

  def __init__(self, dtype="float32", rank=0, searcher_model=None, weights=""):
    config = base_config.make(
        search__quantization=weights,
        sampling__max_prompt_tokens=8,
        sampling__max_completion_tokens=8,
        model__compute_dtype=dtype,
        model__param_dtype=dtype if rank else "float32",
        lora__rank=rank,
    )
    model = tiny_model.make_model(
        compute_dtype=dtype, param_dtype=config.model.param_dtype
    )
    self.config = config
    self.base = grown(tiny_model.init_params(model))
    self.params, self.merge = self.base, lambda _, params: params
    adapters = None
    if rank:
      adapters = lora.make(config.lora, model)
      self.params = moved(tiny_model.init_params(adapters), 0.3)
      self.merge = adapters.merge
    policy = types.SimpleNamespace(model=model, adapters=adapters)
    self.answer = work_parts.make_answer_fn(
        config, policy, sharding.first_device_mesh()
    )
    sampler = policy_samplers.build_sampler(
        config,
        searcher_model or model,
        fakes.FakeTokenizer(),
        num_rows=2,
        seed=0,
        weights=weights,
    )
    self.put = sampler.put
    self.make_check = lambda: probe.Check(
        sampler.token_logprobs, max_gap(config, "cpu")
    )
    self.check = self.make_check()

  def publish(self, params):
    """Returns the probe's leaves in a version, by path."""
    tree = {probe.LEAF: self.answer(params, self.base)}
    return {
        name: np.asarray(leaf) for name, leaf in published.by_path(tree).items()
    }

  def problem(self, published, used):
    """Returns what is said of a version with which these params are used."""
    used = self.put(self.merge(self.base, used))
    return self.check.problem(self.publish(published), used)


@functools.cache
def _compiled_pair(dtype, rank, weights):
  return _Pair(dtype, rank, weights=weights)


def make_pair(dtype="float32", rank=0, weights=""):
  """Returns a pair that has checked nothing yet."""
  pair = _compiled_pair(dtype, rank, weights)
  pair.check = pair.make_check()
  return pair


class ProbeTest(parameterized.TestCase):

  def test_version_has_leaves_of_expected_shapes(self):
    pair = make_pair()
    tree = {probe.LEAF: probe.abstract(pair.config)}
    answer = {probe.LEAF: pair.answer(pair.params, pair.base)}
    self.assertEqual(
        *(
            version.specs_of(published.by_path(leaves))
            for leaves in (tree, answer)
        )
    )
    self.assertTrue(all(map(probe.is_of, published.by_path(tree))))
    # A short sampler has fewer positions, one of them for a sampled token.
    config = base_config.make(
        sampling__max_prompt_tokens=8, sampling__max_completion_tokens=2
    )
    self.assertEqual(probe.shape(config), (2, 9))

  @parameterized.parameters(
      ("float32", 0),
      ("bfloat16", 0),
      ("float32", 2),
      ("bfloat16", 2),
      ("float32", 0, "int8"),
      ("bfloat16", 2, "int8"),
  )
  @pytest.mark.slow
  def test_published_params_pass_and_no_others(self, dtype, rank, weights=""):
    pair = make_pair(dtype, rank, weights)
    self.assertEqual(pair.problem(pair.params, pair.params), "")
    # Another version, or adapters that were never merged.
    other = (
        jax.tree.map(jnp.zeros_like, pair.params)
        if rank
        else grown(pair.params, 1 / 3)
    )
    self.assertIn("above", pair.problem(pair.params, other))
    self.assertIn("above", pair.problem(other, pair.params))
    # What was refused is not compared with: the next right one passes.
    self.assertEqual(pair.problem(other, other), "")

  def test_half_of_version_or_its_shards_in_another_order(self):
    pair = make_pair()
    new = moved(pair.params, 0.05)
    self.assertEqual(pair.problem(new, new), "")
    half = {**new, "blocks": pair.params["blocks"]}
    self.assertIn("above", pair.problem(new, half))
    for swap in (
        lambda x: x[::-1],  # layers
        lambda x: jnp.roll(x, x.shape[-1] // 2, -1),  # shards of a kernel
    ):
      swapped = {**new, "blocks": jax.tree.map(swap, new["blocks"])}
      self.assertIn("above", pair.problem(new, swapped))

  def test_another_model_of_same_shapes(self):
    pair = _Pair(searcher_model=tiny_model.make_model(rope_theta=100.0))
    self.assertIn("above", pair.problem(pair.params, pair.params))

  def test_reports_nan_params(self):
    pair = make_pair()
    nan = jax.tree.map(lambda x: x * jnp.nan, pair.params)
    self.assertIn("nan nats", pair.problem(pair.params, nan))

  @parameterized.parameters("", "int8")
  def test_reports_stale_params(self, weights):
    pair = make_pair("bfloat16", weights=weights)
    self.assertEqual(pair.problem(pair.params, pair.params), "")
    new = moved(pair.params, 0.0003)
    gap = np.abs(
        np.subtract(
            *(
                pair.publish(params)["['probe']['logprobs']"]
                for params in (new, pair.params)
            )
        )
    ).mean()
    # A gap alone would not show it.
    self.assertLess(gap, max_gap(pair.config, "cpu"))
    self.assertIn("bit for bit", pair.problem(new, pair.params))
    self.assertEqual(pair.problem(new, new), "")
    # The same version once more is no problem.
    self.assertEqual(pair.problem(new, new), "")

  def test_limit_is_of_coarser_side(self):
    config = base_config.make(model__compute_dtype="auto")
    self.assertEqual(max_gap(config, "cpu"), 1e-3)
    # Its products of float32 are rounded as well.
    self.assertEqual(max_gap(config, "gpu"), 0.3)
    config.model.compute_dtype = "float32"
    self.assertEqual(max_gap(config, "gpu"), 0.3)
    config.lora.rank, config.model.param_dtype = 2, "bfloat16"
    self.assertEqual(max_gap(config, "cpu"), 0.3)
    config.guards.max_logprob_gap = 0.5
    self.assertEqual(max_gap(config, "cpu"), 0.5)
    # A searcher in float32 beside a trainer in bfloat16.
    check = probe.Check(lambda *_: np.full((2, 3), -1.0), 1e-3)
    leaves = {
        "['probe']['tokens']": np.zeros((2, 4), np.int32),
        "['probe']['logprobs']": np.full((2, 3), -1.05, np.float32),
        "['probe']['max_gap']": np.float32(0.1),
    }
    self.assertEqual(check.problem(leaves, {}), "")
    leaves["['probe']['max_gap']"] = np.float32(0.01)
    self.assertIn("above 0.01", check.problem(leaves, {}))
    # Log-probs with a standard deviation of 6 nats.
    leaves["['probe']['logprobs']"][0] -= 12.0
    check = probe.Check(lambda *_: leaves["['probe']['logprobs']"] + 0.05, 1e-3)
    self.assertEqual(check.problem(leaves, {}), "")

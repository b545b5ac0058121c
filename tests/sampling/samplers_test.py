# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the table of samplers."""

import importlib
import inspect

from absl.testing import absltest

from tba_jax import collect
from tba_jax.config import settings
from tba_jax.sampling import decode
from tba_jax.sampling import offline_sampler
from tba_jax.sampling import requests
from tba_jax.sampling import samplers
from tba_jax.sampling import vllm


class SamplersTest(absltest.TestCase):

  def test_each_can_be_made(self):
    for name, facts in samplers.SAMPLERS.items():
      make = importlib.import_module(facts.module).make
      self.assertLen(inspect.signature(make).parameters, 4, name)

  def test_each_has_the_interface(self):
    for sampler in (
        decode.JaxSampler,
        offline_sampler.OfflineSampler,
        vllm.VllmSampler,
    ):
      takes = inspect.signature(sampler.sample).parameters
      wanted = inspect.signature(requests.Sampler.sample).parameters
      self.assertEqual([*takes], [*wanted], sampler)

  def test_truncated_sampling_keeps_a_bounded_number_of_tokens(self):
    config = settings.get_config()
    self.assertEqual(samplers.num_kept(config), 0)
    self.assertNotIn("kept_ids", collect.optional_columns(config))
    for changes, expected in (
        ({"top_p": 0.9}, 64),
        ({"min_p": 0.1, "max_kept_tokens": 7}, 7),
        ({"top_k": 5, "top_p": 0.9}, 5),
        ({"top_k": 50, "max_kept_tokens": 50}, 50),
    ):
      config = settings.get_config()
      config.sampling.update(changes)
      self.assertEqual(samplers.num_kept(config), expected)
      columns = collect.optional_columns(config)
      self.assertEqual(columns["kept_ids"], (expected,))
      # Logged completions are not truncated.
      config.offline.path = "log.jsonl"
      self.assertEqual(samplers.num_kept(config), 0)

  def test_each_takes_the_defaults(self):
    for facts in samplers.SAMPLERS.values():
      for key, allowed in facts.allows.items():
        self.assertIn(settings.SETTINGS[key].default, allowed, key)

  def test_a_log_joins_the_sampler_of_the_others(self):
    self.assertEqual(
        dict(samplers.without("has_routes", "vllm", "log.jsonl")),
        {"search.sampler": ("jax",), "offline.path": ("",)},
    )
    self.assertEmpty(dict(samplers.without("is_exact", "vllm", "")))
    log = dict(samplers.without("is_exact", "jax", "log.jsonl"))
    self.assertEqual(log, {"offline.path": ("",)})

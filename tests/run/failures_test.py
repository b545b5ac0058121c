# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the share of completions that could not be judged: when it rises."""

import json

from absl.testing import parameterized
import numpy as np

from tba_jax.run import failures

_GROUPS, _S = 8192, 8


def _shares(rng, rate, clustered):
  """Returns shares of groups whose completions fail at a rate, or together."""
  rates = rng.random(len(rate)) < rate if clustered else rate
  return rng.binomial(_S, rates) / _S


class FailureShareTest(parameterized.TestCase):

  @parameterized.product(
      rate=(0.0, 0.003, 0.05, 0.3, 0.9, 1.0), clustered=(False, True)
  )
  def test_constant_share_is_not_taken_for_rise(self, rate, clustered):
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(40):
      result, fired = failures.FailureShare(), False
      shares = _shares(rng, np.full(_GROUPS, rate), clustered)
      for part in np.split(shares, _GROUPS // 256):
        result.add(part)
        fired |= result.is_rising
      alarms += fired
    # One in a thousand is expected.
    self.assertLessEqual(alarms, 1)

  @parameterized.parameters(
      (0.0, 0.1, False), (0.12, 0.45, False), (0.12, 0.7, True)
  )
  def test_rise_is_seen(self, first, last, clustered):
    rng = np.random.default_rng(0)
    for _ in range(20):
      result = failures.FailureShare()
      result.add(_shares(rng, np.linspace(first, last, _GROUPS), clustered))
      self.assertTrue(result.is_rising)
      self.assertGreater(result.newest, result.first)

  def test_temporary_rise_is_not_rising(self):
    result = failures.FailureShare()
    low, high = [0.0, 0.25], [0.75, 1.0]
    result.add(low * 32 + high * 3 * 128)
    self.assertFalse(result.is_rising)  # Too short.
    result.add(low * 128)
    self.assertFalse(result.is_rising)
    result.add(high * 128)
    self.assertTrue(result.is_rising)
    result.add(low * 128)
    self.assertFalse(result.is_rising)

  def test_continues_from_its_state(self):
    shares = np.append(np.zeros(64), np.random.default_rng(0).random(1400))
    whole, parts = failures.FailureShare(), failures.FailureShare()
    whole.add(shares)
    for part in np.split(shares, [30, 100, 700, 1200]):
      parts = failures.FailureShare(json.loads(json.dumps(parts.get_state())))
      parts.add(part)
    self.assertEqual(parts.get_state(), whole.get_state())
    self.assertTrue(parts.is_rising)

  def test_means(self):
    result = failures.FailureShare()
    self.assertIsNone(result.first)
    self.assertIsNone(result.newest)
    self.assertIsNone(result.take())
    result.add([0.5, 0.0])
    result.add([1.0], compare=False)
    self.assertEqual((result.first, result.newest), (0.25, 0.25))
    self.assertEqual(result.take(), 0.5)
    self.assertIsNone(result.take())

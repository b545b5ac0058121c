# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bounds of certificates on spaces with a known target."""

import contextlib
import dataclasses
import math

from absl.testing import parameterized
import numpy as np
import pytest

from studies.certificate import certificate as study
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.evaluation import certificate
from tests.support import base_config

countdown = variants.import_config("configs/countdown.py")


class CertificateTest(parameterized.TestCase):

  @parameterized.product(
      progress=(0.0, 0.5, 1.5), num_draws=(8, 64), failures=(0.0, 0.2)
  )
  def test_bounds_hold(self, progress, num_draws, failures):
    for first in range(0, 16, 4):
      out, exact = study.certify(
          range(first, first + 4),
          num_draws=num_draws, progress=progress, failures=failures, size=12,
      )  # fmt: skip
      self.assertEmpty(study.misses(out, exact))

  def test_bounds_tighten_with_draws(self):
    gaps = []
    for num_draws in (16, 128, 1024):
      out, _ = study.certify(
          range(4), num_draws=num_draws, progress=0.5, size=400
      )
      gaps.append(
          [
              out["log_z_upper"] - out["log_z_lower"],
              out["tv_upper"] - out["tv_lower"],
              out["unfound_upper"],
          ]
      )
    self.assertTrue((np.diff(gaps, axis=0) < 0).all(), gaps)
    self.assertLess(gaps[-1][0], 0.25)
    self.assertLess(gaps[-1][1], 0.25)

  def test_unknown_maximum_gives_no_upper_bound(self):
    draws, exact = study.simulate(0, num_draws=64, progress=0.5)
    out = certificate.certify([draws], study.BETA, None)
    known = certificate.certify([draws], study.BETA, 1.0)
    self.assertIsNone(out["log_z_upper"])
    self.assertIsNone(out["tv_upper"])
    self.assertIsNone(out["unfound_upper"])
    self.assertLessEqual(out["log_z_lower"], exact["log_z"] + 1e-9)
    # The unit of the weights does not matter.
    self.assertAlmostEqual(out["log_z_lower"], known["log_z_lower"], places=9)
    self.assertAlmostEqual(out["tv_lower"], known["tv_lower"], places=9)

  def test_small_beta_is_vacuous(self):
    draws, _ = study.simulate(0, num_draws=64, progress=0.5)
    self.assertEqual(certificate.certify([draws], 1.0, 1.0)["vacuous"], 0.0)
    self.assertEqual(certificate.certify([draws], 1e-3, 1.0)["vacuous"], 1.0)
    # Nothing was judged: only the bounds without draws are left.
    failed = np.full(64, np.nan)
    none = certificate.certify(
        [certificate.Draws(**{**vars(draws), "rewards_S": failed,
                              "ref_rewards_R": failed})], study.BETA, 1.0
    )  # fmt: skip
    self.assertEqual(none["vacuous"], 1.0)
    self.assertEqual(none["log_z_upper"], 1.0 / study.BETA)
    self.assertEqual(none["log_z_lower"], -math.inf)
    self.assertEqual([none["tv_lower"], none["tv_upper"]], [0.0, 1.0])
    self.assertIsNone(none["kl_estimate"])

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_draws_without_log_prob_count_as_unjudged(self, value):
    draws, _ = study.simulate(0, num_draws=8, progress=0.5)
    with_nan = lambda **changes: certificate.certify(
        [dataclasses.replace(draws, **changes)], study.BETA, 1.0
    )
    wrong = with_nan(log_ratios_S=np.append(draws.log_ratios_S[:-1], value))
    failed = with_nan(rewards_S=np.append(draws.rewards_S[:-1], np.nan))
    self.assertEqual(wrong, failed)
    self.assertGreater(wrong["tv_upper"], 0.0)

  @parameterized.parameters(
      ("loss.beta", "0.1:0.0:10"),
      ("sampling.temperature", 0.0),
      ("sampling.top_k", 5),
      ("loss.reward_weight", 0.5),
      ("reference.role", "searcher"),
      ("reference.mode", "ema"),
      ("trainer.num_processes", 2),
  )
  def test_certificate_of_another_target_is_refused(self, key, value):
    config = base_config.make(evaluate__certificate=True)
    validate.validate(config)
    section, _, name = key.partition(".")
    config[section][name] = value
    with self.assertRaisesRegex(ValueError, rf"config\.{key} = "):
      validate.validate(config)

  def test_exact_values_of_enumerated_solutions(self):
    # Solutions "s" of two texts and "t"; texts c and d are wrong.
    known = study.Solutions({"s": 0.2, "t": 0.1}, {b"a", b"b", b"e"})
    draws = certificate.Draws(
        rewards_S=np.array([1.0, 0.0, 0.0]), log_ratios_S=np.zeros(3),
        ref_logprobs_S=np.log([0.05, 0.3, 0.3]), texts_S=(b"a", b"c", b"c"),
        modes_S=("s", b"c", b"c"), ref_rewards_R=np.zeros(0), ref_texts_R=(),
        ref_modes_R=(),
    )  # fmt: skip
    exact = known.exact(draws, 0.5)
    z = 0.3 * math.exp(2) + 0.7
    self.assertAlmostEqual(exact["log_z"], math.log(z))
    self.assertAlmostEqual(exact["unfound"], (0.1 * math.exp(2) + 0.4) / z)

  @pytest.mark.slow
  def test_bounds_hold_on_countdown(self):
    config = countdown.get_config("smoke")
    with contextlib.chdir(self.create_tempdir().full_path):
      out = study.run(config, ["countdown", "8"])
    self.assertEqual([*out], ["initial, draws=8", "trained, draws=8"])
    for row in out.values():
      low, exact, high = row["log_z"]
      self.assertBetween(exact, low, high)

  def test_mean_bounds_have_their_error_rate(self):
    rng = np.random.default_rng(0)
    misses = 0
    for _ in range(400):
      values = rng.random(50) < 0.1
      with np.errstate(divide="ignore"):
        low = math.exp(certificate.log_lower_mean(np.log(values), 0.1))
      misses += not low <= 0.1 <= certificate.upper_mean(values, 0.1)
    # Two bounds of error .1 each: at most 80 expected.
    self.assertLess(misses, 80)
    self.assertGreater(misses, 0)

  def test_bound_is_written_out_for_equal_values(self):
    # All values 0: the wealth is the mean over λ of ((1 - λ) + λ/(1 - m))^N.
    N, delta = 20, 0.05
    bound = certificate.upper_mean(np.zeros(N), delta)
    bets = np.array(
        [2.0**-k for k in range(1, 13)] + [1 - 2.0**-k for k in range(2, 13)]
    )
    wealth = np.mean((1 - bets + bets / (1 - bound)) ** N)
    self.assertAlmostEqual(wealth, 1 / delta, places=6)
    # No bet can do better than λ = 1, 1 - δ^(1/N).
    self.assertBetween(bound, 1 - delta ** (1 / N), 0.25)

  def test_effective_number_of_solutions(self):
    y = (0, 0, 1, 1)
    draws = certificate.Draws(
        rewards_S=np.zeros(4), log_ratios_S=np.zeros(4),
        ref_logprobs_S=np.log(np.full(4, 0.25)), texts_S=y, modes_S=y,
        ref_rewards_R=np.zeros(4), ref_texts_R=y, ref_modes_R=y,
    )  # fmt: skip
    out = certificate.certify([draws], 1.0, 0.0)
    self.assertAlmostEqual(out["modes"], 2.0)
    self.assertAlmostEqual(out["log_z_estimate"], 0.0)
    self.assertAlmostEqual(out["kl_estimate"], 0.0)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Speeds of a real model beside other programs', at the smallest size."""

import os
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from benchmarks import peer_speed
from benchmarks import real_speed
from tba_jax.models.hf import hf
from tba_jax.system import jsonl
from tests.support import tiny_model

try:
  import torch
except ImportError:
  torch = None

_SHAPE = (2, 2, 3, 4)
# Tokens/s.
_FOUND = {
    ("decode", "ours", "float32"): [200.0, 300.0, 280.0],
    ("decode", "ours", "bfloat16"): [400.0],
    ("decode", "limit", "float32"): [350.0],
    ("decode", "limit", "bfloat16"): [1000.0],
    ("decode", "transformers", "float32"): [140.0],
    ("decode", "transformers", "bfloat16"): [100.0],
    ("gradient", "ours", "float32"): [150.0],
    ("gradient", "limit", "float32"): [300.0],
    ("gradient", "torch", "float32"): [100.0],
}


class RealSpeedTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.config = tiny_model.make_config()
    self.config.init = str(self.folder / "model")

  def save(self):
    # A vocabulary that has the prompts of other programs.
    model = tiny_model.make_model(num_layers=1, vocab_size=256, pad_id=0)
    params = tiny_model.init_params(model)
    hf.save(self.folder / "model", model.config, params)
    return str(self.folder / "model")

  @pytest.mark.slow
  def test_compares_seconds_with_other_programs_and_limits(self):
    self.save()
    asked = []

    def run_peer(python, program, folder, dtype, *rest):
      self.assertTrue((pathlib.Path(folder) / "config.json").exists())
      asked.append((python, program, dtype, *rest))
      return 0.5

    work = real_speed.Work(_SHAPE, _SHAPE, runs=1)
    with (
        mock.patch.object(real_speed, "run_peer", run_peer),
        mock.patch.object(real_speed, "RESULTS", self.folder / "results"),
        mock.patch.object(real_speed, "MOST_WEIGHTS", 1),
        mock.patch.object(real_speed, "DTYPES", ("bfloat16",)),
        mock.patch.dict(os.environ, {real_speed.VLLM_VARIABLE: "python-v"}),
    ):
      out = real_speed.run(self.config, ["1"], work)
    result = {(w, p, d): values for w, p, d, values in out["tokens_per_s"]}
    self.assertLen(result, 2 * 3 + 1)
    self.assertEqual(result["decode", "vllm", "bfloat16"], [2 * 2 * 4 / 0.5])
    self.assertIn(("python-v", "vllm", "bfloat16", _SHAPE, 1), asked)
    self.assertIn((sys.executable, "gradient", "bfloat16", _SHAPE, 1), asked)
    for values in result.values():
      self.assertGreater(values[0], 0)
    kept = jsonl.read_json(self.folder / "results" / "real_speed.json")
    self.assertEqual(kept["goals"][1][:3], ["decode", "vllm", 1.8])
    text = (self.folder / "results" / "real_speed.md").read_text()
    self.assertIn("| decode | vllm | bfloat16 | 32 |", text)

  def test_checks_goals_with_faster_dtype(self):
    head, *rows = real_speed.make_goals(_FOUND)
    self.assertEqual(head[-2:], ["asked", "measured"])
    self.assertEqual(rows[0], ["transformers", "decode", "3", "2.86"])
    self.assertEqual(rows[1], ["vllm", "decode", "1.8", "not measured"])
    # The largest share, not that of the faster one.
    self.assertEqual(rows[2], ["limit", "decode", "0.65", "0.80"])
    self.assertEqual(rows[3], ["torch", "gradient", "1.6", "1.50"])

  @absltest.skipUnless(torch, "torch is not installed")
  @parameterized.parameters("generate", "gradient")
  def test_torch_runs_on_folder(self, program):
    peer_speed.PROGRAMS[program](self.save(), "bfloat16", _SHAPE)(1)

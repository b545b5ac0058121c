# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Our families against what `transformers` computed where torch was.

Where torch can be imported, `hf_parity_test` compares both with `transformers`.
"""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tests.models import cases

try:
  from tests.models import torch_models
except ImportError:
  torch_models = None


class StoredLogitsTest(parameterized.TestCase):

  @parameterized.named_parameters(*zip(cases.CASES, cases.CASES))
  # `hf_parity_test` is skipped in the opposite case.
  @absltest.skipIf(torch_models, "hf_parity_test has it with torch")
  @pytest.mark.slow
  def test_logits_and_greedy_completions_equal_the_stored_ones(self, case):
    stored = cases.stored(case)
    self.assertGreater(stored["margin"], 1e-3)
    self.assertEqual(stored["tokens"].shape[1], cases.NUM_TOKENS)
    folder = pathlib.Path(self.create_tempdir().full_path)
    cases.write(folder, case)
    config, params = hf.load(folder)
    prompt = cases.batch()
    tokens, mask = cases.extend(*prompt, stored["tokens"])
    model = transformer.make_model(config)
    logits = np.asarray(jax.jit(model.logits)(params, tokens, mask))

    real = mask[:, cases.COLUMNS].astype(bool)
    difference = np.abs(logits[:, cases.COLUMNS] - stored["logits"])[real]
    self.assertLess(difference.max(), cases.TOLERANCE)
    self.assertGreater(stored["logits"][real].std(), 0.5)
    # The likeliest token after each prefix is the next one. That decoding with
    # a cache computes the same is held in transformer_test.
    before = logits[:, cases.NUM_PROMPT_TOKENS - 1 : -1]
    np.testing.assert_array_equal(before.argmax(-1), stored["tokens"])

  def test_stored_arrays_are_small_and_of_the_cases(self):
    sizes = {path.stem: path.stat().st_size for path in cases.STORED.iterdir()}
    self.assertEqual(set(sizes), set(cases.CASES))
    self.assertLess(max(sizes.values()), 8_000)
    names = {cases.hf_settings(case)["model_type"] for case in cases.CASES}
    self.assertEqual(names, set(family_lib.FAMILIES))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The decode benchmarks' arithmetic on a model that samples in no time."""

import json
import os
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
import numpy as np

from benchmarks import decode
from benchmarks import decode_lengths
from tba_jax.models import hf
from tests.support import tiny_model

_CONFIG = tiny_model.make_config()
_MAKE_CHECKPOINT = """
import pathlib, shutil, sys
folder, family, size = sys.argv[1:]
shutil.copytree(pathlib.Path(__file__).parent / "model", folder,
                dirs_exist_ok=True)
"""
# Prints what it was asked for in place of a speed: rows, P, T and K.
_DECODE = """
import json, pathlib, sys
assert (pathlib.Path(sys.argv[1]) / "config.json").exists()
sizes = [int(a) for a in sys.argv[2:]]
pathlib.Path(__file__).with_suffix(".asked").write_text(json.dumps(sizes))
print(json.dumps({"tokens_per_s": 100.0}))
"""


class DecodeBenchmarksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.peers = pathlib.Path(self.create_tempdir().full_path)
    (self.peers / "make_checkpoint.py").write_text(_MAKE_CHECKPOINT)
    for name in ("decode_hf.py", "decode_tunix.py"):
      (self.peers / name).write_text(_DECODE)
    model = tiny_model.make_model(num_layers=1)
    folder = str(self.peers / "model")
    hf.save(folder, model.config, tiny_model.init_params(model))
    self.enter_context(mock.patch.object(decode, "_SHAPE", model.config))
    # Whether PyTorch is installed plays no part.
    self.patch(decode, find_peers=lambda: self.peers)
    self.enter_context(
        mock.patch.dict(os.environ, TBA_JAX_TUNIX=sys.executable)
    )

  def patch(self, module, **values):
    for name, value in values.items():
      self.enter_context(mock.patch.object(module, name, value))

  def asked(self, name):
    return json.loads((self.peers / f"{name}.asked").read_text())

  def test_fixed_lengths(self):
    self.patch(
        decode,
        _NUM_COMPLETIONS=2,
        _NUM_ROWS=4,
        _PROMPT_TOKENS=3,
        _COMPLETION_TOKENS=5,
        _RUNS_PER_REPEAT=1,
        _PROMPT_IDS=(2, tiny_model.VOCAB),
    )
    out = decode.run(_CONFIG, ["1"])
    self.assertEqual(self.asked("decode_hf"), [4, 3, 5, 2])
    self.assertEqual(self.asked("decode_tunix"), [4, 3, 5])
    self.assertAlmostEqual(out["ratio"], out["tokens_per_s"] / 100)
    self.assertAlmostEqual(out["tunix_ratio"], out["tokens_per_s"] / 100)
    # Whole and prefill are timed apart; on a busy machine such small ones may
    # come out in any order, and the steps' difference below 0.
    self.assertGreater(out["tokens_per_s"], 0)
    self.assertGreater(out["prefill_tokens_per_s"], 0)
    whole_s = 4 * 5 / out["tokens_per_s"]
    first_s = 2 * 3 / out["prefill_tokens_per_s"]
    np.testing.assert_allclose(
        out["steps_tokens_per_s"], 4 * 4 / (whole_s - first_s), rtol=1e-6
    )

  def test_drawn_lengths(self):
    self.patch(
        decode_lengths,
        _NUM_PROMPTS=2,
        _NUM_COMPLETIONS=4,
        _NUM_ROWS=4,
        _PROMPT_TOKENS=3,
        _COMPLETION_TOKENS=8,
        _NUM_STOP_IDS=4,
        _PROMPT_IDS=(4, tiny_model.VOCAB),
    )
    out = decode_lengths.run(_CONFIG, ["1"])
    rows, prompt, longest, copies = self.asked("decode_hf")
    self.assertEqual((rows, prompt, copies), (4, 3, 4))
    self.assertLessEqual(longest, 8)
    self.assertLess(out["mean_length"], longest)
    self.assertAlmostEqual(
        out["hf_tokens_per_s"], 100 / longest * out["mean_length"]
    )


if __name__ == "__main__":
  absltest.main()

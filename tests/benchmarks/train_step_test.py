# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison's arithmetic, and what happens where a script fails."""

import os
import pathlib
from unittest import mock

from absl.testing import absltest

from benchmarks import peer_model
from benchmarks import train_step
from tba_jax.models import hf
from tests.support import tiny_model

_MAKE_CHECKPOINT = """
import pathlib, shutil, sys
folder, family, size = sys.argv[1:]
assert (family, size) == ("llama", "30m"), sys.argv
shutil.copytree(pathlib.Path(__file__).parent / "model", folder,
                dirs_exist_ok=True)
"""

_TRAIN_TORCH = """
import json, pathlib, sys
assert (pathlib.Path(sys.argv[1]) / "config.json").exists()
assert sys.argv[2:] == ["2", "3", "4", "5"], sys.argv
print("a warning of some library")
print(json.dumps({"tokens_per_s": 8.0, "s": [1.0]}))
"""


class TrainStepBenchmarkTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.peers = pathlib.Path(self.create_tempdir().full_path)
    (self.peers / "make_checkpoint.py").write_text(_MAKE_CHECKPOINT)
    (self.peers / "train_torch.py").write_text(_TRAIN_TORCH)
    model = tiny_model.make_model()
    hf.save(
        str(self.peers / "model"), model.config, tiny_model.init_params(model)
    )
    for name, value in dict(
        _SHAPE=(2, 3, 4, 5), _PRODUCT_SIZE=64, _STEPS_PER_ROUND=2
    ).items():
      self.enter_context(mock.patch.object(train_step, name, value))

  def run_benchmark(self, peers, operands=()):
    variable = {train_step.PEERS_VARIABLE: str(peers)} if peers else {}
    with mock.patch.dict(os.environ, variable):
      if not peers:
        os.environ.pop(train_step.PEERS_VARIABLE, None)
      return train_step.run(tiny_model.make_config(), operands)

  def test_counts_a_prompt_for_each_completion(self):
    out = self.run_benchmark(self.peers, ["1"])
    self.assertAlmostEqual(out["tokens_per_s"], 2 * 3 * 9 / out["step_s"])
    self.assertEqual(out["peer_tokens_per_s"], 8.0)
    self.assertAlmostEqual(out["ratio"], out["tokens_per_s"] / 8.0)
    self.assertAlmostEqual(max(out["ratios"]), out["ratio"])
    self.assertAlmostEqual(
        out["limit_tokens_per_s"],
        out["product_gflop_per_s"] * 1e9 / (6 * out["num_params"]),
    )
    self.assertEqual(out["shape"], {"B": 2, "K": 3, "P": 4, "T": 5})

  def test_runs_alone(self):
    config = tiny_model.make_model().config
    with mock.patch.object(peer_model, "SHAPE", config):
      out = self.run_benchmark(None, ["1"])
    self.assertIsNone(out["ratio"])
    self.assertEmpty(out["ratios"])
    self.assertGreater(out["tokens_per_s"], 0)

  def test_copies_are_left_out(self):
    config = tiny_model.make_config(
        train__prompts_per_batch=4,
        sampling__max_prompt_tokens=4,
        sampling__max_completion_tokens=9,
    )
    config.model.update(
        num_layers=1, width=8, num_heads=2, num_kv_heads=2, mlp_width=8
    )
    out = train_step.run(config, ["copies", "1"])
    self.assertBetween(out["share_of_copies"], 0.3, 0.7)
    self.assertAlmostEqual(out["ratio"], out["whole_s"] / out["rows_s"])

  def test_a_failing_script_is_an_error_with_its_output(self):
    (self.peers / "train_torch.py").write_text("raise SystemExit('no torch')")
    with self.assertRaisesRegex(RuntimeError, "(?s)train_torch.py.*no torch"):
      self.run_benchmark(self.peers, ["1"])


if __name__ == "__main__":
  absltest.main()

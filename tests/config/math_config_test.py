# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`configs/math.py` has what the paper's run has."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.tasks import build

math = variants.import_config("configs/math.py")

# TBA' on MATH of Bartoldson et al. 2025 (arXiv:2503.18929): Table 4 and the
# authors' config files.
_PAPER = {
    "init": "models/Qwen2.5-7B",
    "task.prompt_format": "qwen",
    "reference.mode": "reset",
    "reference.every_steps": 50,
    "loss.name": "tba_prime",
    "loss.length_norm": "",
    "loss.correction": "",
    "loss.ratio_clip": 0.0,
    "loss.ratio_cap": 8.0,
    "loss.beta": 0.005,
    "loss.beta_final": 0.005,
    "train.prompts_per_batch": 32,
    "train.completions_per_prompt": 16,
    "train.num_steps": 400,
    "search.samples_per_prompt": 16,
    "search.prompts_per_step": 32,
    "search.num_searchers": 4,
    "search.prompts_per_round": 8,
    "search.wait_for_fresh": True,
    "optimizer.learning_rate": 1e-6,
    "optimizer.learning_rate_final": 1e-6,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.99,
    "optimizer.weight_decay": 0.01,
    "optimizer.grad_clip_norm": 1.0,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.max_prompt_tokens": 1024,
    "sampling.max_completion_tokens": 3072 - 1024,
    "model.param_dtype": "float32",
    "model.compute_dtype": "auto",
    "replay.recent_fraction": 1.0,
    "replay.recent_window_steps": 1,
    "replay.warm_start_completions": 0,
    "evaluate.final_prompts": 500,
    "evaluate.greedy": True,
    "reward.where": "pool",
}


class MathConfigTest(parameterized.TestCase):

  @parameterized.parameters(2, 10)
  def test_the_papers_settings(self, lag):
    found = load.flatten(math.get_config(f"lag={lag}"))
    self.assertEqual({key: found[key] for key in _PAPER}, _PAPER)
    self.assertEqual(found["search.lead_steps"], lag)

  @parameterized.parameters("quick", "smoke", "quick,seed=3")
  def test_quick_needs_nothing_that_is_not_here(self, arg):
    config = load.load_config(f"configs/math.py:{arg}")
    validate.validate(config)
    task = build.make_task(config.task)
    self.assertRegex(task.prompt("train", 0), r"What is \$.*\$\?\n$")
    self.assertGreaterEqual(
        config.sampling.max_completion_tokens, task.max_completion_tokens
    )
    # As in the full run.
    for key in ("loss.name", "reference.mode", "reward.where"):
      self.assertEqual(load.flatten(config)[key], _PAPER[key])

  def test_it_names_what_is_missing_or_wrong(self):
    config = load.load_config("configs/math.py", ["reward.where=process"])
    with self.assertRaises(ValueError) as caught:
      validate.validate(config)
    lines = str(caught.exception).splitlines()
    self.assertLen(lines, 4)  # Nothing else is wrong.
    for line in (
        "config.reward.where = 'process': allowed 'pool' with config.task",
        "config.task.train='data/math/train.jsonl': there is no such file",
        "config.init",
        "config.tokenizer.source",
    ):
      self.assertIn(line, str(caught.exception))


if __name__ == "__main__":
  absltest.main()

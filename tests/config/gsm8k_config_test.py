# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`configs/gsm8k.py` has what the paper's run has."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.tasks import build

gsm8k = variants.import_config("configs/gsm8k.py")

# The Figure 1 run of Bartoldson et al. 2025 (arXiv:2503.18929): Table 2, App.
# B.1 and the launch script of the authors' code; β as it moves per step.
_PAPER = {
    "reference.mode": "fixed",
    "loss.name": "tb",
    "loss.scale": "paper",
    "loss.correction": "",
    "loss.ratio_clip": 0.0,
    "loss.include_stop_token": False,
    "loss.beta": 0.014,
    "loss.beta_final": 0.004,
    "loss.beta_decay_steps": 500,
    "loss.beta_stop_steps": 500,
    "train.prompts_per_batch": 7,
    "train.completions_per_prompt": 20,
    "train.micro_batch_prompts": 1,
    "search.samples_per_prompt": 24,
    "search.num_searchers": 3,
    "search.prompts_per_round": 3,
    "train.num_steps": 700,
    "train.per_round_steps": 0,
    "optimizer.learning_rate": 1e-5,
    "optimizer.schedule": "warmup_stable_decay",
    "optimizer.warmup_steps": 50,
    "optimizer.stable_steps": 350,
    "optimizer.decay_steps": 600,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.epsilon": 1e-8,
    "optimizer.weight_decay": 0.0,
    "optimizer.grad_clip_norm": 0.0,
    "sampling.temperature": 0.7,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "sampling.max_prompt_tokens": 256,
    "sampling.max_completion_tokens": 512,
    "model.param_dtype": "bfloat16",
    "publish.every_steps": 2,
    "replay.recent_fraction": 0.95,
    "replay.selection": "uniform",
    "replay.capacity_per_prompt": 100,
    "replay.dedupe": True,
    "replay.warm_start_completions": 500,
    "task.prompt_format": "tba",
    "task.answer_rule": "last_number",
    "evaluate.greedy": True,
    "evaluate.final_prompts": 1319,
}


class Gsm8kConfigTest(parameterized.TestCase):

  def test_the_papers_settings(self):
    for model in gsm8k.MODELS:
      found = load.flatten(gsm8k.get_config(f"model={model}"))
      self.assertEqual({key: found[key] for key in _PAPER}, _PAPER, model)

  def test_the_fine_tuning_of_the_start(self):
    c = gsm8k.get_config("model=qwen2.5-0.5b")
    self.assertEqual(c.init, "sft")
    # Two epochs at batch 64, 3 % of them warm-up, as VinePPO's model had.
    self.assertEqual(c.sft.num_steps, round(2 * 7473 / 64))
    self.assertEqual(c.sft.warmup_steps, round(0.03 * c.sft.num_steps))
    self.assertEqual((c.sft.batch_size, c.sft.learning_rate), (64, 1e-5))

  def test_an_unknown_model(self):
    with self.assertRaisesRegex(ValueError, "model='gpt-5'.*rho-1b"):
      gsm8k.get_config("model=gpt-5")

  @parameterized.parameters("quick", "smoke", "quick,model=llama-3.2-1b,seed=3")
  def test_quick_needs_nothing_that_is_not_here(self, arg):
    config = load.load_config(f"configs/gsm8k.py:{arg}")
    validate.validate(config)
    task = build.make_task(config.task)
    self.assertRegex(task.prompt("train", 0), r"^\w+ has \d+ ")
    self.assertGreater(
        config.sampling.max_completion_tokens, task.max_completion_tokens - 1
    )

  def test_without_the_data_it_says_what_is_missing(self):
    config = load.load_config("configs/gsm8k.py")
    with self.assertRaises(ValueError) as caught:
      validate.validate(config)
    lines = str(caught.exception).splitlines()
    self.assertLen(lines, 2)  # Nothing else is wrong.
    for key in ("config.task.data", "config.init"):
      self.assertIn(key, str(caught.exception))


if __name__ == "__main__":
  absltest.main()

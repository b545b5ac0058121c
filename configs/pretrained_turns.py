# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretrained model in environments of several turns, on two CPU cores.

    python -m tba_jax.main --config=configs/pretrained_turns.py \\
        --workdir=runs/products
    python -m tba_jax.main --workdir=runs/guess_the_number \\
        --config=configs/pretrained_turns.py:task=guess_the_number

The model of `configs/instructions.py`, SmolLM2-135M-Instruct, in its chat
template and without fine-tuning before. Arguments, after a colon and separated
by commas:

- `task=products`, `examples/products.py`: products of two numbers, which a
  calculator computes for who calls it.
- `task=guess_the_number`: TextArena's game of that name (`pip install
  textarena`), ten guesses by higher or lower.
- `quick` (some minutes on two cores), `smoke` (seconds, for tests: a tiny model
  without a chat template, so countdown instead of products), `seed=N`.

docs/environments.md has what has been run.
"""

import pathlib

import ml_collections

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
  instructions = variants.import_config("instructions.py", beside=__file__)
  size = "smoke," if arg.smoke else "quick," if arg.quick else ""
  c = instructions.get_config(f"{size}seed={arg.seed}")
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=_SOURCES[arg.task],
          train_prompts=4000,
          test_prompts=512,
          max_turns=3,
          correct_threshold=1.0,
      )
  )
  c.reward.backend = "pool"
  c.reward.num_workers = 16
  # Two questions that show it; then a call, its result, and an answer.
  c.sampling.max_prompt_tokens, c.sampling.max_completion_tokens = 224, 80
  if arg.task == "guess_the_number":
    c.task.max_turns = 10
    c.reward.deadline_s = 30.0
    # Ten turns with their answers take some 280.
    c.sampling.max_prompt_tokens, c.sampling.max_completion_tokens = 224, 384
    # Rows are so long that a step of two prompts keeps twice as much.
    c.train.micro_batch_prompts = 1
  c.evaluate.every_steps = 0
  c.evaluate.num_prompts = c.evaluate.final_prompts = 64
  if arg.smoke:
    c.init = "scratch"
    if arg.task == "products":
      c.task.source = f"{_EXAMPLES}/calculator.py:Countdown"
    c.reward.num_workers = 4
    c.sampling.max_prompt_tokens, c.sampling.max_completion_tokens = 900, 60
    c.model.max_positions = 960
  return c

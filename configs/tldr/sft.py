# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TL;DR, first stage: supervised fine-tuning on human summaries.

    python -m tba_jax.main --program=sft --workdir=runs/tldr \\
        --config=configs/tldr/sft.py:hardware=4xa100

Data and model come from the Hugging Face hub (`task.data`, `sft.init`) or from
local folders. Arguments, after a colon and separated by commas:

- `hardware=4xa100` and other names in `tba_jax/config/hardware.py`, the same
  for all stages;
- `model=pythia-410m`, `pythia-1b` or `pythia-2.8b`;
- `quick` (about a minute on two cores: the same code path with a tiny model and
  small generated posts), `smoke` (seconds);
- `seed=N`.

The settings follow Asynchronous RLHF (arXiv:2410.18252): one epoch at 1e-5,
cosine to 0, batches of 16 (410M) or 32 (per process in the released code, with
an unknown number of processes). There are two differences. The loss covers only
the summary, in the released code also the query. A row may have 512 query and
53 summary tokens, 565 in total, in the released code 580; rows of the data have
at most 562.

The paper reports gold win rates against the reference summaries of 25.4 %
(410M), 26.8 % (1B) and 35.2 % (2.8B). Requires one GPU with 80 GB; time and
result have not been measured with this code.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

MODELS = ("pythia-410m", "pythia-1b", "pythia-2.8b")
_POSTS = (
    "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_"
    "1706381144"
)
# Number of TL;DR posts after OpenAI's filtering.
_NUM_POSTS = 116_722


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, model=MODELS[0], hardware=""
  )
  c = settings.get_config()
  set_sft(c, arg)
  is_quick = arg.quick or arg.smoke
  c.sampling.max_completion_tokens = 12 if is_quick else 53
  c.evaluate.num_prompts = 256 if is_quick else 512
  c.evaluate.final_prompts = 512
  c.evaluate.num_completions = 4 if is_quick else 1
  c.evaluate.batch_prompts = 64
  c.evaluate.greedy = True
  c.evaluate.judge = "task" if is_quick else ""
  if arg.smoke:
    make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def set_sft(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets what all stages share: data, lengths, model and SFT.

  Raises:
    ValueError: `arg.model` is unknown.
  """
  variants.check_choices(arg, model=MODELS)
  c.seed = arg.seed
  is_quick = arg.quick or arg.smoke
  c.task = ml_collections.ConfigDict(
      dict(
          name="tldr",
          data="synthetic" if is_quick else _POSTS,
          held_out="validation",
          synthetic_prompts=3000,
          synthetic_pairs=8000,
          validation_prompts=0,
          split_seed=0,
      )
  )
  c.init = "sft"
  if is_quick:
    c.sft.init = "scratch"
    c.tokenizer.source = "task"
    c.model.num_layers = 2
    c.model.width = 64
    c.model.max_positions = 64
    c.sampling.temperature = 1.0
    c.sampling.max_prompt_tokens = 40
    c.sft.batch_size = c.sft.micro_batch_size = 32
    c.sft.num_steps = 400
    c.sft.learning_rate = 3e-3
    c.sft.warmup_steps = 20
    c.sft.evaluate_every_steps = 400
    c.sft.checkpoint_every_steps = 200
  else:
    c.sft.init = c.tokenizer.source = f"EleutherAI/{arg.model}-deduped"
    # For models whose config has no maximum length.
    c.model.max_positions = 1024
    c.sampling.temperature = 0.7
    c.sampling.max_prompt_tokens = 512
    batch_size = 16 if arg.model == "pythia-410m" else 32
    micro_batch_sizes = {"pythia-410m": 16, "pythia-1b": 8, "pythia-2.8b": 4}
    c.sft.batch_size = batch_size
    c.sft.micro_batch_size = micro_batch_sizes[arg.model]
    c.sft.num_steps = _NUM_POSTS // batch_size  # One epoch.
    c.sft.learning_rate = 1e-5
    c.sft.warmup_steps = 0
    c.sft.evaluate_every_steps = _NUM_POSTS // batch_size
    c.sft.checkpoint_every_steps = 1000
  c.sft.schedule = "cosine"
  c.sft.b2 = 0.999
  c.sft.weight_decay = 0.0
  c.sft.grad_clip_norm = 1.0


def make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks `quick` to a smoke test."""
  c.task.synthetic_prompts = 100
  c.task.synthetic_pairs = 100
  variants.shrink_model(c)
  c.sft.num_steps = 20
  c.sft.warmup_steps = 5
  c.sft.batch_size = c.sft.micro_batch_size = 16
  c.sft.evaluate_every_steps = 20
  c.sft.checkpoint_every_steps = 10
  c.evaluate.num_prompts = 8
  c.evaluate.final_prompts = 16
  c.evaluate.batch_prompts = 8

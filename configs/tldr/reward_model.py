# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TL;DR, second stage: a reward model from pairs labeled by a gold model.

    python -m tba_jax.main --program=reward_model --workdir=runs/tldr \\
        --config=configs/tldr/reward_model.py:hardware=4xa100

Starts from the model of the first stage in the same `--workdir`. Arguments as
in `configs/tldr/sft.py`; `docs/guides/offline_data.md` describes the format of
pairs.

The settings follow Asynchronous RLHF (arXiv:2410.18252): 92,858 comparisons
relabeled by a 6.9B gold reward model, one epoch at 1e-5, cosine to 0, 512 query
and 128 summary tokens, batches of 64 (410M) or 16 pairs (per process in the
released code, with an unknown number of processes).

Requires one GPU with 80 GB, mostly for labeling with the gold model. Time and
result have not been measured with this code; the papers report no accuracy.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

sft = variants.import_config("sft.py", relative_to=__file__)

GOLD = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
_PAIRS = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
_NUM_PAIRS = 92_858


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, model=sft.MODELS[0], hardware=""
  )
  c = settings.get_config()
  sft.set_sft(c, arg)
  set_reward_model(c, arg)
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


def set_reward_model(
    c: ml_collections.ConfigDict,
    arg: ml_collections.ConfigDict,
    *,
    quick_steps: int = 300,
) -> None:
  """Sets the reward model's section; `quick` trains for `quick_steps`."""
  r = c.reward_model
  r.init = "sft"
  r.schedule = "cosine"
  r.grad_clip_norm = 1.0
  if arg.quick or arg.smoke:
    # Pairs from the task, labeled by the task's reward.
    r.train = r.held_out = r.relabel = "task"
    r.max_completion_tokens = 12
    r.batch_size = r.micro_batch_size = 32
    r.num_steps = quick_steps
    r.learning_rate = 1e-3
    r.warmup_steps = 10
    r.evaluate_pairs = 1024
    every_steps = min(quick_steps // 2, 100)
    r.evaluate_every_steps = r.checkpoint_every_steps = every_steps
  else:
    r.train = f"{_PAIRS}[train]"
    r.held_out = f"{_PAIRS}[validation]"
    r.relabel = GOLD
    r.max_completion_tokens = 128
    batch_size = 64 if arg.model == "pythia-410m" else 16
    micro_batch_sizes = {"pythia-410m": 8, "pythia-1b": 4, "pythia-2.8b": 2}
    r.batch_size = batch_size
    r.micro_batch_size = micro_batch_sizes[arg.model]
    r.num_steps = _NUM_PAIRS // batch_size  # One epoch.
    r.learning_rate = 1e-5
    r.warmup_steps = 0
    r.evaluate_pairs = 8192
    r.evaluate_every_steps = _NUM_PAIRS // batch_size // 4
    r.checkpoint_every_steps = 200


def make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks both stages of `quick` to a smoke test."""
  sft.make_smoke(c)
  r = c.reward_model
  r.num_steps = 10
  r.warmup_steps = 2
  r.batch_size = r.micro_batch_size = 8
  r.evaluate_pairs = 16
  r.evaluate_every_steps = r.checkpoint_every_steps = 5

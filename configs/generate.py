# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of `--program=generate` and `score`.

    python -m tba_jax.main --program=generate --config=configs/generate.py \\
        --config.generate.model=FOLDER --config.generate.input=prompts.jsonl \\
        --config.generate.output=completions.jsonl

Arguments, after a colon and separated by commas: `smoke` (completions of 18
tokens, for tests), `quick` (32 tokens). `docs/guides/generate.md` describes the
file formats.
"""

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(arg, smoke=False, quick=False)
  c = settings.get_config()
  # Fits the smallest models; raise both as far as the model's config.json
  # allows.
  c.sampling.max_prompt_tokens = 64
  c.sampling.max_completion_tokens = 32 if arg.quick else 64
  c.sampling.num_slots = 32
  c.sampling.prompt_buckets = 3
  # Required, but unused by these programs.
  c.task = ml_collections.ConfigDict({"name": "countdown"})
  if arg.smoke:
    _make_smoke(c)
  return c


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shortens completions for a smoke test."""
  c.sampling.max_completion_tokens = 18

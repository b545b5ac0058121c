# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small samplers: 8 rows, stop token 1, no truncation."""

from tba_jax.models.net import transformer
from tba_jax.sampling import decode


def make_settings(**changes) -> decode.Settings:
  settings = dict(
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      max_prompt_tokens=3,
      max_completion_tokens=4,
      num_rows=8,
      chunk_steps=2,
      stop_ids=(1,),
      pad_id=0,
      seed=0,
  )
  return decode.Settings(**{**settings, **changes})


def make(model: transformer.Model, **changes) -> decode.JaxSampler:
  return decode.JaxSampler(model, make_settings(**changes))

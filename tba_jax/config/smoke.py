# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `smoke` means: seconds, to see that the parts work together."""

import ml_collections


def shrink(c: ml_collections.ConfigDict) -> None:
  """Shrinks model, fine-tuning, training and evaluation in place.

  The task and the lengths of its texts are the config's own affair.
  """
  c.model.num_layers = 1
  c.model.width = 32
  c.model.num_heads = c.model.num_kv_heads = 2
  c.model.mlp_width = 64
  c.sft.num_steps = 40
  c.sft.warmup_steps = 5
  c.sft.batch_size = 16
  c.sft.evaluate_every_steps = 40
  c.sft.checkpoint_every_steps = 20
  c.sft.log_every_steps = 10
  c.sampling.num_rows = 32
  c.search.prompts_per_round = c.search.prompts_per_step = 8
  c.search.samples_per_prompt = 4
  c.train.num_steps = 6
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 8
  c.train.completions_per_prompt = 4
  c.evaluate.every_steps = 3
  c.evaluate.num_prompts = 16
  c.evaluate.num_completions = 4
  c.evaluate.final_prompts = 32
  c.evaluate.batch_prompts = 16
  c.checkpoint.every_steps = 3
  c.log.samples_every_steps = 3

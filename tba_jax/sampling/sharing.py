# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Number of slots that share the KV cache of their prompt; without JAX."""

import math

# Platforms where each row has its own copy. A decode step of an accelerator
# takes as long as it reads memory. On a CPU it computes, and rows that end
# early make room for others.
OWN_PROMPTS = ("cpu",)


def most_rows(num_rows: int, num_prompts: int, samples: int) -> int:
  """Returns the most rows that can share a prompt without idle time.

  They take the next prompt once all of them are free. So it is 1 where the
  completions of `num_prompts` prompts, `samples` each, wait for rows.
  """
  waits = num_rows < num_prompts * samples
  return 1 if waits else math.gcd(num_rows, samples)


def most_rows_of_stream(
    num_rows: int, samples: int, prompt_tokens: int, completion_tokens: int
) -> int:
  """Returns the most rows that share a prompt in a stream.

  They take the next prompt once all of them are free: with lognormal lengths
  two of three rows would be idle. So it is 1, unless prompts are as long as
  completions, and more is gained by reading them once.

  Args:
    num_rows: rows of a sampler.
    samples: completions of a prompt.
    prompt_tokens, completion_tokens: the most of each.
  """
  shares = prompt_tokens >= completion_tokens
  return math.gcd(num_rows, samples) if shares else 1


def rows_per_prompt(most: int, device_rows: int, platform: str) -> int:
  """Returns the adjacent rows of a prompt, up to `most`, all on one device."""
  return 1 if platform in OWN_PROMPTS else math.gcd(most, device_rows)

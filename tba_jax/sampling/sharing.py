# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Number of slots that share their prompt's KV cache; does not import JAX."""

import math

# Platforms where each row copies its prompt's cache. Decode steps are bound by
# memory reads on accelerators but by computation on CPUs, where finished rows
# should be refilled at once.
OWN_PROMPTS = ("cpu",)


def most_rows(num_rows: int, num_prompts: int, samples: int) -> int:
  """Returns the most rows that can share a prompt without idle time.

  Rows that share a prompt take the next one once all of them are free. So it is
  1 if the `samples` completions of each of `num_prompts` prompts queue for
  rows.
  """
  waits = num_rows < num_prompts * samples
  return 1 if waits else math.gcd(num_rows, samples)


def most_rows_of_stream(
    num_rows: int, samples: int, prompt_tokens: int, completion_tokens: int
) -> int:
  """Returns the most rows that share a prompt in a stream of requests.

  Rows that share a prompt take the next one once all of them are free; with
  lognormal lengths two thirds of the rows would be idle. So it is 1, unless
  prompts are at least as long as completions and reading them once pays off.

  Args:
    num_rows: rows of the sampler.
    samples: completions per prompt.
    prompt_tokens, completion_tokens: maximum lengths.
  """
  shares = prompt_tokens >= completion_tokens
  return math.gcd(num_rows, samples) if shares else 1


def rows_per_prompt(most: int, device_rows: int, platform: str) -> int:
  """Returns the adjacent rows of a prompt, up to `most`, all on one device."""
  return 1 if platform in OWN_PROMPTS else math.gcd(most, device_rows)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What decoding and training take at least: flops and bytes, and a device.

    seconds >= max(flops / flops of the device, bytes / its bandwidth)

Source of the bound: Williams, Waterman, Patterson 2009, "Roofline: an
insightful visual performance model". Counted are the products of the
parameters and of attention, and each array that must be read or written once a
pass. Norms, softmax, sampling and communication are left out, so all of this
is a lower bound of the time. No JAX here.

N is the parameters that a token is multiplied with: all but tables that are
looked up in.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tba_jax import devices

if TYPE_CHECKING:
  from tba_jax.models import config as model_config_lib

# Arrays that one update by Adam reads and writes: gradient, param and two
# moments are read, the last three are written.
_UPDATE_READS = 4
_UPDATE_WRITES = 3
# Remat -> forward passes that a backward pass makes again.
AGAIN = {"none": 0, "dots": 0, "full": 1}


@dataclasses.dataclass(frozen=True)
class Work:
  """Flops and bytes of a piece of work.

  flops: multiplications and additions.
  bytes: read from memory or written to it.
  """

  flops: float
  bytes: float

  def __add__(self, other: Work) -> Work:
    return Work(self.flops + other.flops, self.bytes + other.bytes)

  def times(self, count: float) -> Work:
    """Returns `count` pieces of this work."""
    return Work(self.flops * count, self.bytes * count)

  def seconds(
      self, device: devices.Device, dtype: str, num_devices: int = 1
  ) -> float:
    """Returns the least seconds that it takes.

    Args:
      device: of which there are some.
      dtype: of the products.
      num_devices: that share flops and bytes evenly.
    """
    products_s = self.flops / device.flops(dtype)
    return max(products_s, self.bytes / device.bytes_per_s) / num_devices


def attention_flops(c: model_config_lib.ModelConfig, context: float) -> float:
  """Returns the flops of one token's attention to `context` tokens."""
  return 4.0 * c.num_layers * c.num_heads * c.head_dim * context


def cache_bytes_per_token(
    c: model_config_lib.ModelConfig, dtype_bytes: int
) -> int:
  """Returns the bytes of one token's keys and values in all layers."""
  return 2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype_bytes


def decode_step(
    c: model_config_lib.ModelConfig,
    *,
    matmul_params: int,
    params_bytes: float,
    cache_token_bytes: int,
    num_rows: int,
    context: float,
) -> Work:
  """Returns the work of one decode step: one token of each row.

  Args:
    c: the model's shape.
    matmul_params: N.
    params_bytes: of all that a step reads of the params.
    cache_token_bytes: of one token's keys and values.
    num_rows: rows that decode together.
    context: mean number of tokens that a row attends to.
  """
  flops = num_rows * (2.0 * matmul_params + attention_flops(c, context))
  return Work(flops, params_bytes + num_rows * context * cache_token_bytes)


def prefill(
    c: model_config_lib.ModelConfig,
    *,
    matmul_params: int,
    params_bytes: float,
    num_prompts: int,
    prompt_tokens: int,
) -> Work:
  """Returns the work of reading prompts once, before they are completed."""
  tokens = num_prompts * prompt_tokens
  each = 2.0 * matmul_params + attention_flops(c, prompt_tokens / 2)
  return Work(tokens * each, params_bytes)


def train_step(
    c: model_config_lib.ModelConfig,
    *,
    matmul_params: int,
    params_bytes: float,
    num_prompts: int,
    num_completions: int,
    prompt_tokens: int,
    completion_tokens: int,
    num_micro_batches: int,
    remat: str,
    num_models: int = 1,
) -> Work:
  """Returns the work of one optimizer step with the reference's log-probs.

  A backward pass is two forward passes; the reference makes one. A prompt is
  read once for all of its completions.

  Args:
    c: the model's shape.
    matmul_params: N.
    params_bytes: of the policy's params.
    num_prompts: of the batch.
    num_completions: of a prompt.
    prompt_tokens, completion_tokens: of one, at most.
    num_micro_batches: each reads the params again.
    remat: a name in `AGAIN`.
    num_models: that are trained; 2 with a value model.
  """
  rows = num_prompts * num_completions
  tokens = num_prompts * prompt_tokens + rows * completion_tokens
  attention = num_prompts * prompt_tokens * attention_flops(
      c, prompt_tokens / 2
  ) + rows * completion_tokens * attention_flops(
      c, prompt_tokens + completion_tokens / 2
  )
  forward = 2.0 * matmul_params * tokens + attention
  passes = num_models * (3 + AGAIN[remat]) + 1
  reads = num_micro_batches * passes
  update = num_models * (_UPDATE_READS + _UPDATE_WRITES)
  return Work(passes * forward, (reads + update) * params_bytes)

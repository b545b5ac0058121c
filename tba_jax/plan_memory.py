# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of `plan` about memory: bytes of a device of each role.

Parameters and what is made of their shape are exact; activations are an
estimate and say so. No JAX here.
"""

import math

import ml_collections

from tba_jax import config_relations
from tba_jax import devices
from tba_jax import roofline
from tba_jax import shard_report
from tba_jax.models import config as model_config_lib

ModelConfig = model_config_lib.ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDING = "embed.embedding"
_LOGITS_BYTES = 4  # logits are float32 in any model


def num_params(leaves: shard_report.Leaves) -> int:
  return sum(math.prod(shape) for shape, _ in leaves.values())


def size(num_bytes: float) -> str:
  """Returns bytes as B, KB, MB or GB of 1024."""
  for unit in ("B", "KB", "MB"):
    if num_bytes < 1024:
      return f"{num_bytes:,.4g} {unit}"
    num_bytes /= 1024
  return f"{num_bytes:,.4g} GB"


def matmul_params(leaves: shard_report.Leaves, c: ModelConfig) -> int:
  """Returns the parameters that a token is multiplied with.

  A table that is looked up in is none of them, unless it is the head too.
  """
  tables = {"positions"} if c.tie_embeddings else {"positions", _EMBEDDING}
  return num_params({k: v for k, v in leaves.items() if k not in tables})


def compute_dtype(
    config: ml_collections.ConfigDict, c: ModelConfig, kind: str
) -> str:
  """Returns the dtype of activations on a kind of device."""
  if config.model.compute_dtype != "auto":
    return c.compute_dtype
  return "float32" if kind == "cpu" else "bfloat16"


def has_value_model(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the objective trains a model of values too."""
  return config.loss.name in config_relations.OF_A_VALUE_MODEL


def batch_shards(config: ml_collections.ConfigDict) -> int:
  """Returns how many devices share a batch."""
  axes = [a.strip() for a in config.sharding.batch.split(",") if a.strip()]
  return math.prod(config.mesh[a] for a in axes)


def activation_bytes(
    config: ml_collections.ConfigDict,
    c: ModelConfig,
    *,
    remat: str,
    dtype: str,
) -> tuple[int, int]:
  """Returns bytes of logits, and of what is kept of blocks, on a device.

  One micro-batch: its logits with their gradient, and an estimate of what is
  kept of the blocks. With remat "none" that is what the backward pass reads
  (stream, norms, queries, keys, values, MLP, attention weights); with "dots"
  each layer's products, with "full" each layer's input, and in both the rest of
  one layer, which is made again. Where tokens are split over devices a layer
  has the keys and values of all of them too.

  Args:
    config: of the run.
    c: shape of its model.
    remat: a name in `roofline.AGAIN`.
    dtype: of activations.
  """
  prompts = math.ceil(config.train.micro_batch_prompts / batch_shards(config))
  rows = prompts * config.train.completions_per_prompt
  P, T = (
      config.sampling.max_prompt_tokens,
      config.sampling.max_completion_tokens,
  )
  parts = shard_report.length_parts(config)
  own_P, own_T = math.ceil(P / parts), math.ceil(T / parts)
  logits = 2 * rows * own_T * c.vocab_size * _LOGITS_BYTES
  tokens = prompts * own_P + rows * own_T
  heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  weights = rows * own_T * c.num_heads * (P + T)
  layer = tokens * (5 * c.width + heads + 3 * c.mlp_width) + weights
  if parts > 1:
    gathered = 2 * c.num_kv_heads * c.head_dim
    layer += (prompts * P + rows * T) * gathered
  queries = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  products = tokens * (3 * c.width + queries + 2 * c.mlp_width)
  kept = {
      "none": c.num_layers * layer,
      "dots": c.num_layers * products + layer,
      "full": c.num_layers * tokens * c.width + layer,
  }
  return logits, kept[remat] * BYTES[dtype]


def _room(needed: float, kind: str) -> str:
  """Says whether bytes fit on a device; "NO…" where they do not."""
  have = devices.of_kind(kind).memory_bytes
  words = f"{size(needed)} of {size(have)} of {kind} ({needed / have:.0%})"
  return f"NO: {words}" if needed > have else f"yes: {words}"


def _moment_bytes(config: ml_collections.ConfigDict) -> int:
  """Returns the bytes that Adam holds of one parameter."""
  # The second moment is float32 whatever the rest is.
  return BYTES[config.optimizer.state_dtype] + BYTES["float32"]


def _trained(
    config: ml_collections.ConfigDict,
    leaves: shard_report.Leaves,
    params: int,
    count: int,
) -> dict[str, int]:
  """Returns bytes of a device for params and what is made of their shape.

  Args:
    config: of the run.
    leaves: of the model.
    params, count: bytes and number of its parameters on a device.
  """
  moments = "optimizer (Adam's two moments)"
  if not config.lora.rank:
    return {
        "params": params,
        "reference": params,
        "gradients": params,
        moments: count * _moment_bytes(config),
    }
  factors = shard_report.adapter_leaves(
      leaves, rank=config.lora.rank, targets=config.lora.targets
  )
  found = shard_report.of_leaves(factors, config.sharding, config.mesh)
  own = sum(leaf.device_size for leaf in found)
  return {
      "params, base of the adapters and reference": params,
      "params with adapters merged, to evaluate": params,
      "adapters": own * BYTES["float32"],
      "gradients": own * BYTES["float32"],
      moments: own * _moment_bytes(config),
  }


def trainer_rows(
    config: ml_collections.ConfigDict, c: ModelConfig, kind: str
) -> list[tuple[str, str]]:
  """Returns what a device of the trainer holds, as names and values.

  Args:
    config: of the run.
    c: shape of its model.
    kind: of the device; "" leaves out whether it fits.

  Raises:
    ValueError: `kind` is not in the table.
  """
  leaves = shard_report.model_leaves(c)
  found = shard_report.of_leaves(leaves, config.sharding, config.mesh)
  count = sum(leaf.device_size for leaf in found)
  params = count * BYTES[c.param_dtype]
  # Without a kind "auto" counts as the larger one.
  dtype = compute_dtype(config, c, kind or "cpu")
  kept = config.train.remat
  logits, _ = activation_bytes(config, c, remat=kept, dtype=dtype)
  blocks = {
      name: activation_bytes(config, c, remat=name, dtype=dtype)[1]
      for name in roofline.AGAIN
  }
  # Of the policy's shape, with a gradient and two moments of its own.
  has_values = has_value_model(config)
  values = (2 * params + count * _moment_bytes(config)) * has_values
  others = ", ".join(
      f"{name} {size(value)}" for name, value in blocks.items() if name != kept
  )
  trained = _trained(config, leaves, params, count)
  total = sum(trained.values()) + values + logits + blocks[kept]
  return [
      ("parameters", f"{num_params(leaves):,}"),
      *((name, size(num_bytes)) for name, num_bytes in trained.items()),
      ("logits of a micro-batch, with gradient", size(logits)),
      (
          f"activations, remat {kept} (estimate)",
          f"{size(blocks[kept])}; were it {others}",
      ),
      *([("value model, all of it (estimate)", size(values))] * has_values),
      ("sum a device (estimate)", size(total)),
      *([("fits", _room(total, kind))] if kind else []),
  ]


def searcher_params(config: ml_collections.ConfigDict, c: ModelConfig) -> int:
  """Returns the parameters that a device of a searcher holds."""
  mesh = {"sequence": 1, **config.search.mesh}
  leaves = shard_report.model_leaves(c)
  found = shard_report.of_leaves(leaves, config.sharding, mesh)
  return sum(leaf.device_size for leaf in found)


def searcher_rows(
    config: ml_collections.ConfigDict, c: ModelConfig, kind: str
) -> list[tuple[str, str]]:
  """Returns what a searcher's device holds; arguments as `trainer_rows`."""
  sampling, mesh = config.sampling, config.search.mesh
  dtype = compute_dtype(config, c, kind or "cpu")
  params = searcher_params(config, c) * BYTES[c.param_dtype]
  length = sampling.max_prompt_tokens + sampling.max_completion_tokens
  num_rows = math.ceil(sampling.num_rows / (mesh.data * mesh.fsdp))
  heads = 1 if c.num_kv_heads % mesh.tensor else mesh.tensor
  token = roofline.cache_bytes_per_token(c, BYTES[dtype]) // heads
  cache = token * num_rows * length
  logits = num_rows * c.vocab_size * _LOGITS_BYTES
  held, words = 2 * params, "params, twice while a version comes in"
  if config.lora.rank:
    held += params
    words = "base, and merged params twice while a version comes in"
  total = held + cache + logits
  return [
      (words, size(held)),
      (
          f"cache of {num_rows} rows of {length} tokens",
          size(cache),
      ),
      ("logits of a decode step", size(logits)),
      ("sum a device", size(total)),
      *([("fits", _room(total, kind))] if kind else []),
  ]

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config will need, without touching a device.

    --program=plan --config=FILE [KIND [SEARCHER_KIND]] [--calibrate=RUN]

All figures are arithmetic on the config: no JAX here. With a kind of device
it says what fits and how fast it can go at most; with a
run to calibrate by, how fast that run went.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import pathlib
import sys

import ml_collections
import rich.box
import rich.console
import rich.table
import rich.text

from tba_jax.config import settings as settings_lib
from tba_jax.models import config as config_lib
from tba_jax.models import hf_config
from tba_jax.models import hf_files
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline
from tba_jax.replay import scheduler
from tba_jax.system import processes
from tba_jax.tasks import build
from tba_jax.training import shard_report

# Kinds of devices as their makers describe them: memory, bandwidth, flops.
#
# Peaks of dense products. A program reaches a part of them; `plan` says "at
# most". No JAX here.


@dataclasses.dataclass(frozen=True)
class Device:
  """One kind of device.

  memory_bytes: of one device. A program gets some percent less.
  bytes_per_s: between memory and the units that compute.
  bfloat16_flops: a second, of products of bfloat16.
  float32_flops: the same of float32 as JAX multiplies them by default: in
    bfloat16 passes on a TPU, in TF32 on a GPU.
  source: where these figures are published.
  """

  memory_bytes: float
  bytes_per_s: float
  bfloat16_flops: float
  float32_flops: float
  source: str

  def flops(self, dtype: str) -> float:
    """Returns the flops a second of products of a dtype."""
    return self.float32_flops if dtype == "float32" else self.bfloat16_flops


def _device(
    gib: float, gb_per_s: float, bfloat16: float, float32: float, source: str
) -> Device:
  return Device(
      gib * 2**30, gb_per_s * 1e9, bfloat16 * 1e12, float32 * 1e12, source
  )


_TPU = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# GiB, GB/s, teraflops of bfloat16 and float32.
DEVICES = {
    "v4": _device(32, 1200, 275, 275, _TPU + "v4"),
    "v5e": _device(16, 819, 197, 197, _TPU + "v5e"),
    "v5p": _device(95, 2765, 459, 459, _TPU + "v5p"),
    "v6e": _device(32, 1640, 918, 918, _TPU + "v6e"),
    # The SXM modules; makers' figures "with sparsity" are twice these.
    "a100-40": _device(40, 1555, 312, 156, _NVIDIA + "a100/"),
    "a100-80": _device(80, 2039, 312, 156, _NVIDIA + "a100/"),
    "h100": _device(80, 3350, 989, 494, _NVIDIA + "h100/"),
    "h200": _device(141, 4800, 989, 494, _NVIDIA + "h200/"),
    "l4": _device(24, 300, 121, 60, _NVIDIA + "l4/"),
    # One core at 2.45 GHz with two 8-lane multiply-adds a cycle, one channel of
    # DDR4-3200, and the 4 GB a core of a usual cloud machine.
    "cpu": _device(
        *(4, 25.6, 0.0784, 0.0784),
        "https://www.amd.com/en/products/processors/server/epyc/7003-series"
        "/amd-epyc-7763.html",
    ),
}


def device_of_kind(kind: str) -> Device:
  """Returns a kind of device.

  Raises:
    ValueError: it is not in the table; the message lists what is.
  """
  if kind.lower() not in DEVICES:
    raise ValueError(
        f"device kind {kind!r}: allowed are {', '.join(sorted(DEVICES))}"
    )
  return DEVICES[kind.lower()]


# What decoding and training take at least: flops and bytes, and a device.
#
# seconds >= max(flops / flops of the device, bytes / its bandwidth)
#
# Source of the bound: Williams, Waterman, Patterson 2009, "Roofline: an
# insightful visual performance model". Counted are the products of the
# parameters and of attention, and each array that must be read or written once
# a
# pass. Norms, softmax, sampling and communication are left out, so all of this
# is a lower bound of the time. No JAX here.
#
# N is the parameters that a token is multiplied with: all but tables that are
# looked up in.


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

  def seconds(self, device: Device, dtype: str, num_devices: int = 1) -> float:
    """Returns the least seconds that it takes.

    Args:
      device: of which there are some.
      dtype: of the products.
      num_devices: that share flops and bytes evenly.
    """
    products_s = self.flops / device.flops(dtype)
    return max(products_s, self.bytes / device.bytes_per_s) / num_devices


def attention_flops(c: config_lib.ModelConfig, context: float) -> float:
  """Returns the flops of one token's attention to `context` tokens."""
  return 4.0 * c.num_layers * c.num_heads * c.head_dim * context


def cache_bytes_per_token(c: config_lib.ModelConfig, dtype_bytes: int) -> int:
  """Returns the bytes of one token's keys and values in all layers."""
  return 2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype_bytes


def decode_step_work(
    c: config_lib.ModelConfig,
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


def prefill_work(
    c: config_lib.ModelConfig,
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


def train_step_work(
    c: config_lib.ModelConfig,
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


# The part of `plan` about memory: bytes of a device of each role.
#
# Parameters and what is made of their shape are exact; activations are an
# estimate and say so. No JAX here.


ModelConfig = config_lib.ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDING = "embed.embedding"
_LOGITS_BYTES = 4  # logits are float32 in any model


def num_params(leaves: shard_report.Leaves) -> int:
  return sum(math.prod(shape) for shape, _ in leaves.values())


def format_bytes(num_bytes: float) -> str:
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
  return config.loss.name in settings_lib.OF_A_VALUE_MODEL


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
  have = device_of_kind(kind).memory_bytes
  words = (
      f"{format_bytes(needed)} of {format_bytes(have)} of {kind}"
      f" ({needed / have:.0%})"
  )
  return f"NO: {words}" if needed > have else f"yes: {words}"


def _moment_bytes(config: ml_collections.ConfigDict) -> int:
  """Returns the bytes that Adam holds of one parameter."""
  # The second moment is float32 whatever the rest is.
  return BYTES[config.optimizer.state_dtype] + BYTES["float32"]


def _trained_params(
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
      for name in AGAIN
  }
  # Of the policy's shape, with a gradient and two moments of its own.
  has_values = has_value_model(config)
  values = (2 * params + count * _moment_bytes(config)) * has_values
  others = ", ".join(
      f"{name} {format_bytes(value)}"
      for name, value in blocks.items()
      if name != kept
  )
  trained = _trained_params(config, leaves, params, count)
  total = sum(trained.values()) + values + logits + blocks[kept]
  return [
      ("parameters", f"{num_params(leaves):,}"),
      *((name, format_bytes(num_bytes)) for name, num_bytes in trained.items()),
      ("logits of a micro-batch, with gradient", format_bytes(logits)),
      (
          f"activations, remat {kept} (estimate)",
          f"{format_bytes(blocks[kept])}; were it {others}",
      ),
      *(
          [("value model, all of it (estimate)", format_bytes(values))]
          * has_values
      ),
      ("sum a device (estimate)", format_bytes(total)),
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
  token = cache_bytes_per_token(c, BYTES[dtype]) // heads
  cache = token * num_rows * length
  logits = num_rows * c.vocab_size * _LOGITS_BYTES
  held, words = 2 * params, "params, twice while a version comes in"
  if config.lora.rank:
    held += params
    words = "base, and merged params twice while a version comes in"
  total = held + cache + logits
  return [
      (words, format_bytes(held)),
      (
          f"cache of {num_rows} rows of {length} tokens",
          format_bytes(cache),
      ),
      ("logits of a decode step", format_bytes(logits)),
      ("sum a device", format_bytes(total)),
      *([("fits", _room(total, kind))] if kind else []),
  ]


# The part of `plan` that reads how fast an earlier run was. No JAX here.


@dataclasses.dataclass(frozen=True)
class Measured:
  """Busy seconds of an earlier run.

  generate_s: of the mean searcher.
  train_s: of the trainer.
  num_searchers: of that run.
  sampled, trained: completions in those seconds.
  staleness: mean of its steps, None where not written.
  overlap: share of the ideal, None where not written.
  """

  generate_s: float
  train_s: float
  num_searchers: int
  sampled: float
  trained: float
  staleness: float | None
  overlap: float | None


def read_measured(workdir: str) -> Measured:
  """Returns what a run measured, from its summary, spans and metrics.

  Raises:
    ValueError: there is no such run, or nothing is measured in it yet.
  """
  run = load.read_run(workdir)
  generate_s = run.summary.get("generate_busy_s")
  train_s = run.summary.get("train_busy_s")
  if not (text.is_number(generate_s) and text.is_number(train_s)):
    spans = timeline.measured_overlap(run) or {}
    generate_s, train_s = spans.get("generate_s"), spans.get("train_s")
  settings = run.config.get("config", {})
  get = lambda section, name: settings.get(section, {}).get(name)
  count = get("search", "num_searchers")
  if not generate_s or not train_s or not text.is_number(count):
    raise ValueError(f"{workdir}: nothing is measured there yet")
  steps, completions = load.column(run.records, "total/completions")
  batch = get("train", "prompts_per_batch"), get(
      "train", "completions_per_prompt"
  )
  known = all(text.is_number(n) for n in batch)
  _, staleness = load.column(run.records, "replay/staleness_steps")
  overlap = run.summary.get("overlap_of_ideal")
  return Measured(
      generate_s=generate_s,
      train_s=train_s,
      num_searchers=int(count),
      sampled=float(completions[-1]) if len(completions) else 0.0,
      trained=float(len(steps) * math.prod(batch)) if known else 0.0,
      staleness=float(staleness.mean()) if len(staleness) else None,
      overlap=overlap if text.is_number(overlap) else None,
  )


def expected_searchers(workdir: str | None) -> str:
  """Returns how many searchers keep the trainer busy, from an earlier run."""
  if not workdir or not pathlib.Path(workdir).is_dir():
    return "unknown: no earlier run in --workdir"
  try:
    found = read_measured(workdir)
  except ValueError:
    return "unknown: nothing measured in --workdir yet"
  count = math.ceil(found.generate_s * found.num_searchers / found.train_s)
  return (
      f"{count}, measured there: G {text.duration(found.generate_s)} busy"
      f" for each of {found.num_searchers},"
      f" T {text.duration(found.train_s)}"
  )


# A model of the pipeline from searchers to the trainer: rates and staleness.
#
# Three stages in a row, each of which can be the slowest:
#
# n searchers ---> store and drain ---> trainer
#
# The slowest one sets the rate of all. What lies between them is bounded by
# credits, so by Little's law (Little 1961: number = rate times time) the time
# from a completion's version to its use is the groups under way over the rate,
# and its staleness is the groups under way over the groups of a step.
# `docs/scaling.md` holds it to measurements. No JAX here.


# Of a fixed point; it is reached within a few of them where searchers are the
# slowest stage.
_ROUNDS = 100


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Stages of the pipeline, in seconds a group.

  num_searchers: n.
  sample_s: of one searcher, for one group.
  serve_s: of store and drain, for one group; 0 where it never holds up.
  train_s: of the trainer, for one group that is sampled; 0: it never waits.
  groups_per_step: groups that are sampled for each optimizer step.
  ahead_groups: most groups that may be granted and not trained on yet:
    (lead_steps + 1) steps of them; infinite: the credits alone bound it.
  round_groups: groups of a searcher's round, sampled with one version and sent
    as one block.
  credits: blocks that a searcher may have sent and not seen acknowledged.
  granted_rounds: rounds that a searcher may have been granted and not handed
    over, the one that it samples included.
  publish_steps: a version comes so often.
  hand_over_s: from the end of sampling until the trainer has a group, of a
    searcher that is alone.
  idle_s: from one look of the drain at an empty queue to the next.
  look_s: of the drain, for a look that finds one group.
  more_s: of such a look for each further group.
  """

  num_searchers: int
  sample_s: float
  serve_s: float = 0.0
  train_s: float = 0.0
  groups_per_step: float = 1.0
  ahead_groups: float = math.inf
  round_groups: float = 1.0
  credits: float = math.inf
  granted_rounds: float = math.inf
  publish_steps: int = 1
  hand_over_s: float = 0.0
  idle_s: float = 0.0
  look_s: float = 0.0
  more_s: float = 0.0

  def rates(self) -> dict[str, float]:
    """Returns the groups a second that each stage could do alone."""
    over = lambda seconds: 1.0 / seconds if seconds else math.inf
    return {
        "searchers": self.num_searchers * over(self.sample_s),
        "store": over(self.serve_s),
        "trainer": over(self.train_s),
    }

  def slowest(self) -> str:
    """Returns the stage that sets the rate; the first of equal ones."""
    rates = self.rates()
    return min(rates, key=rates.get)

  def groups_per_s(self) -> float:
    """Returns the rate of the whole."""
    return min(self.rates().values())

  def step_s(self) -> float:
    """Returns the seconds of one optimizer step."""
    return self.groups_per_step / self.groups_per_s()

  def busy_shares(self) -> dict[str, float]:
    """Returns the share of time that each stage has work."""
    rate = self.groups_per_s()
    return {stage: rate / alone for stage, alone in self.rates().items()}

  def groups_under_way(self) -> float:
    """Returns the groups sampled with a version but not yet trained on.

    Where searchers are the slowest, nothing queues behind them: it is what they
    are sampling, and what is handed over just then. Elsewhere all fills up to
    the credits or to what is granted. Where it is the store that all wait for,
    a granted round waits for it twice, as long on its way to a searcher as back
    from it, and only what a searcher has begun to sample is under way.
    """
    sampling = self.num_searchers * self.round_groups
    slowest, rate = self.slowest(), self.groups_per_s()
    if slowest == "searchers":
      under_way = sampling + rate * self.hand_over()
    else:
      under_way = sampling * min(1 + self.credits, self.granted_rounds)
    if slowest == "store" and self.granted_rounds <= 1 + self.credits:
      # rate · (s + (n · granted / rate - s) / 2), by Little's law.
      under_way = (under_way + rate * self.sample_s * self.round_groups) / 2
    return min(under_way, self.ahead_groups)

  def hand_over(self) -> float:
    """Returns the seconds from the end of sampling until the trainer has it.

    A group waits for the drain's next look. Groups that find the drain idle
    wait for half of its pause, as that of a single searcher does; those that
    find it busy with the groups of others wait for half of what that takes. Of
    a look that takes S and in which m = S · rate come by chance, the next one
    finds m, or is an idle one with probability exp(-m), after which the next
    that finds any finds one: m + exp(-m) on average. S grows with what a look
    finds, so that both are found together.
    """
    if not self.look_s:
      return self.hand_over_s
    others = self.groups_per_s() * (1 - 1 / self.num_searchers)
    found, busy, look_s = 1.0, 0.0, self.look_s
    for _ in range(_ROUNDS):
      look_s = self.look_s + (found - 1) * self.more_s
      coming = others * look_s
      found = min(coming + math.exp(-coming), self.num_searchers)
      busy = min(coming / found, 1.0)
    return self.hand_over_s + busy * max(0.0, look_s - self.idle_s) / 2

  def staleness_steps(self) -> float:
    """Returns the mean staleness of data when it is first trained on.

    A version is (publish_steps - 1) / 2 steps old on average when it is taken.
    """
    return (
        self.groups_under_way() / self.groups_per_step
        + (self.publish_steps - 1) / 2
    )

  def gain(self) -> float:
    """Returns how much faster this is than sampling and training in turns.

    (G + T) / max(G, T), with G and T the seconds of sampling and training.
    """
    rates = self.rates()
    in_turns = 1.0 / rates["searchers"] + 1.0 / rates["trainer"]
    return in_turns * self.groups_per_s()

  def balancing_searchers(self) -> int:
    """Returns the least searchers that never let the trainer wait."""
    if not self.train_s:
      raise ValueError("train_s = 0: allowed above 0, to be balanced")
    # So that 3.0000000001 is 3.
    return max(1, math.ceil(self.sample_s / self.train_s - 1e-9))


# The part of `plan` about speed: bounds of a device, or what a run measured.
#
# Searcher and trainer have the devices of their meshes. From the seconds of
# sampling and training one step follow how many searchers balance one trainer,
# staleness, overlap, and whether asynchrony is worth anything.


Rows = list[tuple[str, str]]
# Below this, the work of keeping two roles in step is not repaid.
_WORTH = 1.15


@dataclasses.dataclass(frozen=True)
class Speed:
  """How long the two sides of one optimizer step take.

  sample_s: one searcher, all that is sampled for one step.
  train_s: the trainer, one step with the reference's log-probs.
  rows: what led to them.
  """

  sample_s: float
  train_s: float
  rows: Rows


def _prompts(config: ml_collections.ConfigDict) -> float:
  """Prompts that are sampled for one step."""
  if config.rounds.mini_batches:
    return config.train.prompts_per_batch / config.rounds.passes
  return config.search.prompts_per_step


def _sampled(config: ml_collections.ConfigDict) -> float:
  return _prompts(config) * config.search.samples_per_prompt


def _trained(config: ml_collections.ConfigDict) -> int:
  train = config.train
  return train.prompts_per_batch * train.completions_per_prompt


def calibrated_speed(config: ml_collections.ConfigDict, workdir: str) -> Speed:
  """Returns the speed of an earlier run, for the batches of this config.

  Seconds a completion are the run's: its lengths, model and machine.

  Raises:
    ValueError: there is no such run, or nothing is measured in it yet.
  """
  found = read_measured(workdir)
  if not found.sampled or not found.trained:
    raise ValueError(f"{workdir}: no step in its metrics.jsonl")
  sample_each_s = found.generate_s * found.num_searchers / found.sampled
  train_each_s = found.train_s / found.trained
  show = lambda value: "unknown" if value is None else f"{value:.2f}"
  rows = [
      ("measured in", workdir),
      (
          "one searcher",
          f"{1 / sample_each_s:,.1f} completions/s while it is busy",
      ),
      ("the trainer", f"{1 / train_each_s:,.1f} completions/s while it is"
       " busy"),
      (
          "there",
          f"{_count(found.num_searchers)}, staleness"
          f" {show(found.staleness)} steps, overlap {show(found.overlap)} of"
          " ideal",
      ),
  ]  # fmt: skip
  return Speed(
      sample_each_s * _sampled(config), train_each_s * _trained(config), rows
  )


def _decode_work(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    dtype: str,
) -> tuple[Work, Work]:
  """Returns a device's work of a decode step, and of a step's prompts."""
  sampling, leaves = config.sampling, shard_report.model_leaves(c)
  mesh = config.search.mesh
  model = {
      "matmul_params": matmul_params(leaves, c),
      "params_bytes": (num_params(leaves) * BYTES[c.param_dtype]),
  }
  dtype_bytes = BYTES[dtype]
  P, T = sampling.max_prompt_tokens, sampling.max_completion_tokens
  step = decode_step_work(
      c,
      **model,
      cache_token_bytes=cache_bytes_per_token(c, dtype_bytes),
      num_rows=sampling.num_rows / (mesh.data * mesh.fsdp),
      context=P + T / 2,
  )
  prompts = prefill_work(
      c, **model, num_prompts=_prompts(config), prompt_tokens=P
  )
  # Each device has its own rows, and all prefill all prompts.
  return step.times(1 / mesh.tensor), prompts.times(1 / mesh.tensor)


def _train_work(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> Work:
  """Returns the work of one optimizer step on all devices together."""
  train, leaves = config.train, shard_report.model_leaves(c)
  params = num_params(leaves) * BYTES[c.param_dtype]
  return train_step_work(
      c,
      matmul_params=matmul_params(leaves, c),
      params_bytes=params,
      num_prompts=train.prompts_per_batch,
      num_completions=train.completions_per_prompt,
      prompt_tokens=config.sampling.max_prompt_tokens,
      completion_tokens=config.sampling.max_completion_tokens,
      num_micro_batches=train.prompts_per_batch // train.micro_batch_prompts,
      remat=train.remat,
      num_models=1 + has_value_model(config),
  )


def bounds(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kinds: tuple[str, str],
) -> Speed:
  """Returns the least seconds of both sides by the roofline of the devices.

  Args:
    config: of the run.
    c: shape of its model.
    kinds: of the trainer's devices and of a searcher's.

  Raises:
    ValueError: a kind is not in the table.
  """
  trainer, searcher = (device_of_kind(kind) for kind in kinds)
  dtypes = [compute_dtype(config, c, kind) for kind in kinds]
  rows, T = config.sampling.num_rows, config.sampling.max_completion_tokens
  num_devices, mesh = math.prod(config.mesh.values()), config.search.mesh
  step, prompts = _decode_work(config, c, dtypes[1])
  decode_s = step.seconds(searcher, dtypes[1])
  num_tokens = _sampled(config) * T
  sample_s = num_tokens / rows * decode_s
  sample_s += prompts.seconds(searcher, dtypes[1])
  work = _train_work(config, c)
  train_s = work.seconds(trainer, dtypes[0], num_devices)
  trained = _trained(config) * T
  lines = [
      (
          "devices",
          f"trainer {num_devices} of {kinds[0]}, searcher"
          f" {math.prod(mesh.values())} of {kinds[1]}; full-length completions",
      ),
      (
          f"decode step of {rows} rows, at least",
          _sides(step, searcher, dtypes[1]),
      ),
      (
          "decoding, at most",
          f"{num_tokens / sample_s:,.0f} tokens/s for a searcher, prompts"
          " included",
      ),
      ("train step, at least", _sides(work, trainer, dtypes[0], num_devices)),
      ("training, at most", f"{trained / train_s:,.0f} completion tokens/s"),
  ]
  for kind in dict.fromkeys(kinds):
    lines.append((f"figures of {kind}", device_of_kind(kind).source))
  return Speed(sample_s, train_s, lines)


def _sides(
    work: Work,
    device: Device,
    dtype: str,
    num_devices: int = 1,
) -> str:
  """Says what a piece of work takes and which side of the roof it is on."""
  seconds = work.seconds(device, dtype, num_devices)
  products_s = work.flops / device.flops(dtype) / num_devices
  side = "products" if products_s >= seconds else "memory"
  return (
      f"{_seconds(seconds)}, bound by {side}: {work.flops:.3g} flops of"
      f" {dtype}, {format_bytes(work.bytes)}"
  )


def _count(num_searchers: int) -> str:
  return f"{num_searchers:,} searcher{'s' * (num_searchers != 1)}"


def _seconds(seconds: float) -> str:
  for unit, scale in (("s", 1.0), ("ms", 1e-3)):
    if seconds >= scale:
      return f"{seconds / scale:.3g} {unit}"
  return f"{seconds * 1e6:.3g} µs"


def make_pipeline(config: ml_collections.ConfigDict, speed: Speed) -> Pipeline:
  """Returns the model of a run with these speeds."""
  search, rounds = config.search, config.rounds
  groups = _prompts(config)
  ahead = (search.lead_steps + 1) * groups
  if rounds.mini_batches:
    ahead = config.train.prompts_per_batch * rounds.mini_batches
    ahead *= rounds.lag_rounds + 1
  return Pipeline(
      num_searchers=search.num_searchers,
      sample_s=speed.sample_s / groups,
      train_s=speed.train_s / groups,
      groups_per_step=groups,
      ahead_groups=ahead,
      round_groups=search.prompts_per_round,
      credits=search.credits,
      granted_rounds=scheduler.BLOCKS_AHEAD,
      publish_steps=config.publish.every_steps,
  )


def in_turns(config: ml_collections.ConfigDict) -> str:
  """Returns the setting that makes a run sample and train in turns, or ""."""
  if config.search.lockstep:
    return "config.search.lockstep=True"
  if config.rounds.mini_batches and not config.rounds.lag_rounds:
    return "config.rounds.lag_rounds=0"
  return ""


def verdict(model: Pipeline, setting: str) -> str:
  """Returns in a plain sentence whether asynchrony helps.

  Args:
    model: of the run.
    setting: that makes it sample and train in turns; "": none.
  """
  gain, stage = model.gain(), model.slowest()
  other = {"searchers": "training", "trainer": "sampling"}[stage]
  if gain < _WORTH:
    return (
        f"Asynchrony will not help: {other} is so short beside the rest that"
        f" overlapping it makes a step only {gain:.2f} times as fast."
        + _better_count(model)
    )
  if setting:
    return (
        f"Nothing overlaps with {setting}; asynchrony would make a step up to"
        f" {gain:.2f} times as fast."
    )
  return (
      f"Asynchrony helps: a step takes 1/{gain:.2f} of what sampling and"
      " training in turns take."
  )


def _better_count(model: Pipeline) -> str:
  """Says how many searchers were better, or ""."""
  count = model.balancing_searchers()
  if model.slowest() == "searchers":
    return f" {_count(count)} would balance it."
  return f" {_count(count)} would do." if count < model.num_searchers else ""


def group_bytes(config: ml_collections.ConfigDict) -> int:
  """Returns the bytes of a full-length group: tokens and log-probs."""
  sampling = config.sampling
  each = sampling.max_completion_tokens * 8
  prompt = sampling.max_prompt_tokens * 4
  return config.search.samples_per_prompt * each + prompt


def traffic_rows(
    config: ml_collections.ConfigDict, step_s: float, params: int
) -> Rows:
  """Returns what goes from the searchers to the trainer, and back to them.

  Args:
    config: of the run.
    step_s: seconds of a step of it.
    params: bytes of a version.
  """
  rate = _prompts(config) / step_s
  period_s = step_s * config.publish.every_steps
  pulled = config.search.num_searchers * params / period_s
  up = format_bytes(rate * group_bytes(config))
  return [
      ("groups to the trainer", f"{rate:,.3g} a second, {up} a second"),
      (
          "versions to the searchers, at most",
          f"{format_bytes(params)} each, {format_bytes(pulled)} a"
          " second to all of them",
      ),
  ]


def speed_rows(
    config: ml_collections.ConfigDict, speed: Speed, params: int
) -> Rows:
  """Returns the rows about balance, staleness, overlap and the verdict.

  Args:
    config: of the run.
    speed: of its two sides.
    params: bytes of a version.
  """
  model, setting = make_pipeline(config, speed), in_turns(config)
  shares = model.busy_shares()
  count = model.balancing_searchers()
  step_s = model.step_s() * (model.gain() if setting else 1.0)
  stale = model.staleness_steps()
  words = f"{stale:.2g} steps when first trained on"
  if config.replay.recent_fraction < 1:
    words += "; replayed data is older"
  if config.search.lockstep:
    words = "0 steps (lockstep)"
  busy = f"trainer {shares['trainer']:.0%}, searchers {shares['searchers']:.0%}"
  have = config.search.num_searchers
  return [
      ("sampling for one step, one searcher", _seconds(speed.sample_s)),
      ("training one step", _seconds(speed.train_s)),
      ("searchers that balance one trainer", f"{count:,}; the config has"
       f" {have:,}"),
      ("a step then takes", f"{_seconds(step_s)} with {_count(have)}"),
      *traffic_rows(config, step_s, params),
      ("expected staleness", words),
      ("expected overlap", "none" if setting else f"busy: {busy}"),
      ("asynchrony", verdict(model, setting)),
  ]  # fmt: skip


Sections = list[tuple[str, list[tuple[str, str]]]]


def model_of(config: ml_collections.ConfigDict) -> ModelConfig:
  """Returns the shape of the model that a run of this config trains.

  Raises:
    ValueError: a setting, file or folder that can't be used.
  """
  key = "sft.init" if config.init == "sft" else "init"
  start = config.sft.init if config.init == "sft" else config.init
  if start != "scratch":
    path = pathlib.Path(start).expanduser() / "config.json"
    try:
      shape = hf_config.from_hf(
          hf_files.read_json(path), dtype=config.model.param_dtype
      )
    except ValueError as error:
      raise ValueError(f"config.{key}={start!r}: {error}") from error
    # No device is asked here: "auto" counts as the larger one.
    return dataclasses.replace(
        shape,
        compute_dtype=config_lib.compute_dtype(config.model, "cpu"),
    )
  if config.tokenizer.source == "task":
    task = build.make_task(config.task)
    tokenizer = tokenizer_lib.word_level(
        task.tokenizer_words(), task.tokenizer_pattern
    )
  else:
    tokenizer = tokenizer_lib.load(config.tokenizer.source)
  return ModelConfig.from_config(
      config.model,
      vocab_size=tokenizer.vocab_size,
      pad_id=tokenizer.pad_id,
      bos_id=tokenizer.bos_id,
      eos_id=tokenizer.eos_id,
  )


def _sharding_rows(
    config: ml_collections.ConfigDict, c: ModelConfig
) -> list[tuple[str, str]]:
  leaves = shard_report.model_leaves(c)
  found = shard_report.of_leaves(leaves, config.sharding, config.mesh)
  rows = shard_report.rows(found, BYTES[c.param_dtype])
  return rows + shard_report.length_rows(config)


def _divides(whole: int, part: int, words: str) -> str:
  if whole % part:
    return f"NO: {whole} {words} do not divide by {part}"
  return f"{whole // part} of {part} {words}"


def _batch_rows(config: ml_collections.ConfigDict) -> list[tuple[str, str]]:
  train, search, sampling = config.train, config.search, config.sampling
  shards = batch_shards(config)
  trained = train.prompts_per_batch * train.completions_per_prompt
  sampled = search.prompts_per_step * search.samples_per_prompt
  tokens = lambda n: f"{n:,} completions, at most" + (
      f" {n * sampling.max_completion_tokens:,} tokens"
  )
  return [
      (
          "micro-batches a step",
          _divides(
              train.prompts_per_batch, train.micro_batch_prompts, "prompts"
          ),
      ),
      (
          "shards of a micro-batch",
          _divides(train.micro_batch_prompts, shards, "prompts")
          if shards > 1
          else "1",
      ),
      ("trained on a step", tokens(trained)),
      ("sampled a step", tokens(sampled)),
  ]


def staleness_bound(config: ml_collections.ConfigDict) -> str:
  """Returns the most steps by which fresh data lags, in words."""
  rounds = config.rounds
  if rounds.mini_batches:
    steps = rounds.mini_batches * rounds.passes
    most = steps * (rounds.lag_rounds + 1) - 1
    return f"{most} steps: rounds of {steps} steps, lag {rounds.lag_rounds}"
  if config.search.lockstep:
    return "0 steps (lockstep)"
  lead, period = config.search.lead_steps, config.publish.every_steps
  words = f"{lead + period} steps: lead {lead} + publish period {period}"
  if config.replay.recent_fraction < 1:
    words += "; replayed data is older"
  return words


def sent_bytes(config: ml_collections.ConfigDict) -> int:
  """Returns the bytes of the batch that process 0 sends to all in a step."""
  train, sampling = config.train, config.sampling
  # Tokens and mask of a prompt; of a completion those, two log-probs a token,
  # reward and staleness: 4 bytes each.
  completion = 16 * sampling.max_completion_tokens + 8
  prompt = 8 * sampling.max_prompt_tokens
  return train.prompts_per_batch * (
      prompt + train.completions_per_prompt * completion
  )


def _process_rows(
    config: ml_collections.ConfigDict, workdir: str | None
) -> list[tuple[str, str]]:
  cores = processes.available_cores()
  count = expected_searchers(workdir)
  found = f"{len(cores)} cores: {', '.join(map(str, cores))}"
  num_processes, search = config.trainer.num_processes, config.search
  each = math.prod(search.mesh.values())
  of_searchers = f"{search.num_searchers} of one process each"
  if each > 1:
    of_searchers += (
        f" with {each} devices, {search.num_searchers * each} in all"
    )
  of_trainer = f"{num_processes} process{'es' * (num_processes > 1)}"
  sent = f"{sent_bytes(config) / 1e6:,.3f} MB a step"

  def bound(role: str) -> str:
    setting = config.cores[role]
    if setting == "all":
      return "any core"
    return f"cores {setting}" if setting else "cores chosen at start"

  return [
      ("this machine", found),
      ("store", f"1 process, {bound('store')}"),
      ("trainer", f"{of_trainer}, {bound('trainer')}"),
      *([("batch that process 0 sends", sent)] * (num_processes > 1)),
      ("searchers", f"{of_searchers}, {bound('searcher')}"),
      ("staleness of fresh data, at most", staleness_bound(config)),
      *([("searchers that keep the trainer busy", count)] * bool(workdir)),
  ]


def parse(operands: Sequence[str]) -> tuple[tuple[str, str], str]:
  """Returns the kinds of the trainer's and searchers' devices, and a run.

  Args:
    operands: no kind, one for both or one for each; `--calibrate=RUN` or
      `--calibrate RUN` anywhere.

  Returns:
    Two kinds, "" where none is named, and the run, "" where none is.

  Raises:
    ValueError: an operand too many, or a kind that is not in the table.
  """
  kinds, run, items = [], "", list(operands)
  while items:
    name, has_value, value = items.pop(0).partition("=")
    if name in ("--calibrate", "-calibrate"):
      run = value if has_value else items.pop(0) if items else ""
      if not run:
        raise ValueError("--calibrate: needs the directory of a run")
    else:
      kinds.append(name)
  if len(kinds) > 2:
    raise ValueError(
        f"--program=plan {' '.join(kinds)}: allowed is one kind of device, or"
        " the trainer's and a searcher's"
    )
  for kind in kinds:
    device_of_kind(kind)
  kinds = [kind.lower() for kind in kinds] or [""]
  return (kinds[0], kinds[-1]), run


def plan(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> Sections:
  """Returns the plan as titled rows of name and value.

  Args:
    config: of the run.
    workdir: an earlier run, or None.
    operands: as `parse` takes them.

  Raises:
    ValueError: a setting, operand, file or folder that can't be used.
  """
  kinds, calibrate = parse(operands)
  axes = ("data", "fsdp", "sequence", "tensor")
  mesh = {axis: config.mesh[axis] for axis in axes}
  num_devices = math.prod(mesh.values())
  shape = " x ".join(f"{axis} {count}" for axis, count in mesh.items())
  c = model_of(config)
  model = (
      f"{c.family}, {c.num_layers} layers, width {c.width}, vocabulary"
      f" {c.vocab_size:,}, {c.param_dtype}"
  )
  return [
      ("mesh", [("devices", f"{num_devices}: {shape}"), ("model", model)]),
      *([("sharding", _sharding_rows(config, c))] * (num_devices > 1)),
      (
          "memory of a trainer device",
          trainer_rows(config, c, kinds[0]),
      ),
      (
          "memory of a searcher device",
          searcher_rows(config, c, kinds[1]),
      ),
      ("batch", _batch_rows(config)),
      ("processes", _process_rows(config, workdir)),
      *_speed_sections(config, c, kinds, calibrate),
  ]


def _speed_sections(
    config: ml_collections.ConfigDict,
    c: ModelConfig,
    kinds: tuple[str, str],
    calibrate: str,
) -> Sections:
  if calibrate:
    title, speed = "speed", calibrated_speed(config, calibrate)
  elif kinds[0]:
    title = "speed at most (roofline)"
    speed = bounds(config, c, kinds)
  else:
    known = ", ".join(sorted(DEVICES))
    hint = f"name a kind of device ({known}), or --calibrate=RUN"
    return [("speed", [("unknown", hint)])]
  leaves = shard_report.model_leaves(c)
  params = num_params(leaves) * BYTES[c.param_dtype]
  rows = speed_rows(config, speed, params)
  return [(title, speed.rows), ("asynchrony", rows)]


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Prints the plan of a config.

  Returns:
    0; 2 where the config can't be used, does not divide or does not fit.
  """
  try:
    sections = plan(config, workdir, operands)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  table = rich.table.Table(box=rich.box.ROUNDED, show_header=False)
  table.add_column(style="dim")
  table.add_column(overflow="fold")
  bad = False
  for title, rows in sections:
    table.add_section()
    table.add_row(rich.text.Text(title, "bold cyan"), "")
    for name, value in rows:
      wrong = value.startswith("NO")
      bad = bad or wrong
      style = "bold red" if wrong else ""
      table.add_row(f"  {name}", rich.text.Text(value, style))
  rich.console.Console().print(table)
  return processes.EXIT_CONFIG if bad else processes.EXIT_OK

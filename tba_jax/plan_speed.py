# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of `plan` about speed: bounds of a device, or what a run measured.

Searcher and trainer have the devices of their meshes. From the seconds of
sampling and training one step follow how many searchers balance one trainer,
staleness, overlap, and whether asynchrony is worth anything.
"""

import dataclasses
import math

import ml_collections

from tba_jax import devices
from tba_jax import pipeline
from tba_jax import plan_measured
from tba_jax import plan_memory
from tba_jax import roofline
from tba_jax import shard_report
from tba_jax.models import config as model_config_lib
from tba_jax.replay import grants

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


def calibrated(config: ml_collections.ConfigDict, workdir: str) -> Speed:
  """Returns the speed of an earlier run, for the batches of this config.

  Seconds a completion are the run's: its lengths, model and machine.

  Raises:
    ValueError: there is no such run, or nothing is measured in it yet.
  """
  found = plan_measured.measured(workdir)
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
    c: model_config_lib.ModelConfig,
    dtype: str,
) -> tuple[roofline.Work, roofline.Work]:
  """Returns a device's work of a decode step, and of a step's prompts."""
  sampling, leaves = config.sampling, shard_report.model_leaves(c)
  mesh = config.search.mesh
  model = {
      "matmul_params": plan_memory.matmul_params(leaves, c),
      "params_bytes": (
          plan_memory.num_params(leaves) * plan_memory.BYTES[c.param_dtype]
      ),
  }
  dtype_bytes = plan_memory.BYTES[dtype]
  P, T = sampling.max_prompt_tokens, sampling.max_completion_tokens
  step = roofline.decode_step(
      c,
      **model,
      cache_token_bytes=roofline.cache_bytes_per_token(c, dtype_bytes),
      num_rows=sampling.num_rows / (mesh.data * mesh.fsdp),
      context=P + T / 2,
  )
  prompts = roofline.prefill(
      c, **model, num_prompts=_prompts(config), prompt_tokens=P
  )
  # Each device has its own rows, and all prefill all prompts.
  return step.times(1 / mesh.tensor), prompts.times(1 / mesh.tensor)


def _train_work(
    config: ml_collections.ConfigDict, c: model_config_lib.ModelConfig
) -> roofline.Work:
  """Returns the work of one optimizer step on all devices together."""
  train, leaves = config.train, shard_report.model_leaves(c)
  params = plan_memory.num_params(leaves) * plan_memory.BYTES[c.param_dtype]
  return roofline.train_step(
      c,
      matmul_params=plan_memory.matmul_params(leaves, c),
      params_bytes=params,
      num_prompts=train.prompts_per_batch,
      num_completions=train.completions_per_prompt,
      prompt_tokens=config.sampling.max_prompt_tokens,
      completion_tokens=config.sampling.max_completion_tokens,
      num_micro_batches=train.prompts_per_batch // train.micro_batch_prompts,
      remat=train.remat,
      num_models=1 + plan_memory.has_value_model(config),
  )


def bounds(
    config: ml_collections.ConfigDict,
    c: model_config_lib.ModelConfig,
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
  trainer, searcher = (devices.of_kind(kind) for kind in kinds)
  dtypes = [plan_memory.compute_dtype(config, c, kind) for kind in kinds]
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
    lines.append((f"figures of {kind}", devices.of_kind(kind).source))
  return Speed(sample_s, train_s, lines)


def _sides(
    work: roofline.Work,
    device: devices.Device,
    dtype: str,
    num_devices: int = 1,
) -> str:
  """Says what a piece of work takes and which side of the roof it is on."""
  seconds = work.seconds(device, dtype, num_devices)
  products_s = work.flops / device.flops(dtype) / num_devices
  side = "products" if products_s >= seconds else "memory"
  return (
      f"{_seconds(seconds)}, bound by {side}: {work.flops:.3g} flops of"
      f" {dtype}, {plan_memory.size(work.bytes)}"
  )


def _count(num_searchers: int) -> str:
  return f"{num_searchers:,} searcher{'s' * (num_searchers != 1)}"


def _seconds(seconds: float) -> str:
  for unit, scale in (("s", 1.0), ("ms", 1e-3)):
    if seconds >= scale:
      return f"{seconds / scale:.3g} {unit}"
  return f"{seconds * 1e6:.3g} µs"


def make_pipeline(
    config: ml_collections.ConfigDict, speed: Speed
) -> pipeline.Pipeline:
  """Returns the model of a run with these speeds."""
  search, rounds = config.search, config.rounds
  groups = _prompts(config)
  ahead = (search.lead_steps + 1) * groups
  if rounds.mini_batches:
    ahead = config.train.prompts_per_batch * rounds.mini_batches
    ahead *= rounds.lag_rounds + 1
  return pipeline.Pipeline(
      num_searchers=search.num_searchers,
      sample_s=speed.sample_s / groups,
      train_s=speed.train_s / groups,
      groups_per_step=groups,
      ahead_groups=ahead,
      round_groups=search.prompts_per_round,
      credits=search.credits,
      granted_rounds=grants.BLOCKS_AHEAD,
      publish_steps=config.publish.every_steps,
  )


def in_turns(config: ml_collections.ConfigDict) -> str:
  """Returns the setting that makes a run sample and train in turns, or ""."""
  if config.search.lockstep:
    return "config.search.lockstep=True"
  if config.rounds.mini_batches and not config.rounds.lag_rounds:
    return "config.rounds.lag_rounds=0"
  return ""


def verdict(model: pipeline.Pipeline, setting: str) -> str:
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


def _better_count(model: pipeline.Pipeline) -> str:
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
  up = plan_memory.size(rate * group_bytes(config))
  return [
      ("groups to the trainer", f"{rate:,.3g} a second, {up} a second"),
      (
          "versions to the searchers, at most",
          f"{plan_memory.size(params)} each, {plan_memory.size(pulled)} a"
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

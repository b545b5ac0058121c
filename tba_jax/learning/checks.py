# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks across the settings of batches, schedules and trainer processes."""

import math

from tba_jax.models import checks as models
from tba_jax.policy import settings as policy
from tba_jax.system import rules


def _batch(c: rules.Values) -> rules.Problems:
  shards = c["mesh.data"] * c["mesh.fsdp"]
  # Micro-batches grow until they divide evenly; the batch must.
  for key in ("sft.batch_size", "reward_model.batch_size"):
    if c[key] % shards:
      yield key, (
          f"must be a multiple of {shards}, the shards of the batch"
          " (config.mesh.data and fsdp)"
      )


def _schedules(c: rules.Values) -> rules.Problems:
  peak = c["train.num_steps"] - c["optimizer.warmup_steps"]
  if 0 < peak <= c["optimizer.stable_steps"]:
    yield "optimizer.stable_steps", (
        f"must be less than {peak} = config.train.num_steps -"
        " config.optimizer.warmup_steps"
    )
  rate, final = (c[f"optimizer.learning_rate{end}"] for end in ("", "_final"))
  if c["optimizer.schedule"] != "constant" and final > rate:
    yield "optimizer.learning_rate_final", (
        f"must be at most {rate} = config.optimizer.learning_rate; it does not"
        " follow that setting, so set both"
    )


def _trainer_mesh(c: rules.Values) -> rules.Problems:
  """Checks that the mesh uses all devices of all trainer processes."""
  size = math.prod(c[f"mesh.{axis}"] for axis in policy.MESH_AXES)
  num, cpu_devices = c["trainer.num_processes"], c["trainer.cpu_devices"]
  if size % num:
    yield "trainer.num_processes", (
        f"must be a divisor of {size}, the devices of config.mesh"
    )
  elif cpu_devices and cpu_devices * num != size:
    yield "trainer.cpu_devices", (
        f"must be 0 or {size // num}, because the processes together have the"
        f" {size} devices of config.mesh"
    )


def _router_replay(c: rules.Values) -> rules.Problems:
  """Checks that there are experts and routes are unambiguous."""
  if not c["train.router_replay"]:
    return
  if not models.num_experts(c):
    yield "train.router_replay", (
        "must be False, because it needs a model with experts, and config.init"
        f" = {c['init']!r} has none"
    )
  in_flight = c["sampling.in_flight"]
  if in_flight != "off":
    yield "train.router_replay", (
        f"must be False with config.sampling.in_flight = {in_flight!r}, because"
        " a group's completions may read their prompt with several versions of"
        " the params, which choose different experts, but only one choice is"
        " recorded"
    )


def _starts_with_sft(c: rules.Values) -> rules.Problems:
  """Checks that `--program=sft` does not ignore a model named by `init`."""
  start = c["init"]
  if c.program != "sft" or start in ("scratch", "sft"):
    return
  if c["sft.init"] == "scratch":
    yield "sft.init", (
        "must be a model if config.init names one; to fine-tune that model, use"
        f" --config.init=sft --config.sft.init={start}"
    )


# fmt: off
CHECKS = (
    rules.compare("optimizer.warmup_steps", "less than", "train.num_steps"),
    *(check for stage in ("sft", "reward_model") for check in (
        rules.compare(f"{stage}.batch_size", "a multiple of",
                      f"{stage}.micro_batch_size"),
        rules.compare(f"{stage}.warmup_steps", "less than",
                      f"{stage}.num_steps"))),
    rules.compare("train.micro_batch_completions", "up to",
                  "train.completions_per_prompt"),
    rules.compare("train.micro_batch_prompts", "up to",
                  "train.prompts_per_batch"),
    _batch, _schedules, _trainer_mesh, _router_replay, _starts_with_sft,
)
# fmt: on

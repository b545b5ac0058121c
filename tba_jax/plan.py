# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config will need, without touching a device.

    --program=plan --config=FILE [KIND [SEARCHER_KIND]] [--calibrate=RUN]

All figures are arithmetic on the config: no JAX here. With a kind of device
(`tba_jax/devices.py`) it says what fits and how fast it can go at most; with a
run to calibrate by, how fast that run went.
"""

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

from tba_jax import devices
from tba_jax import plan_measured
from tba_jax import plan_memory
from tba_jax import plan_speed
from tba_jax import processes
from tba_jax import shard_report
from tba_jax import tokenizer as tokenizer_lib
from tba_jax.models import config as model_config_lib
from tba_jax.models import hf_config
from tba_jax.models import hf_files
from tba_jax.tasks import build as tasks_build

ModelConfig = model_config_lib.ModelConfig
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
        compute_dtype=model_config_lib.compute_dtype(config.model, "cpu"),
    )
  if config.tokenizer.source == "task":
    task = tasks_build.make_task(config.task)
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
  rows = shard_report.rows(found, plan_memory.BYTES[c.param_dtype])
  return rows + shard_report.length_rows(config)


def _divides(whole: int, part: int, words: str) -> str:
  if whole % part:
    return f"NO: {whole} {words} do not divide by {part}"
  return f"{whole // part} of {part} {words}"


def _batch_rows(config: ml_collections.ConfigDict) -> list[tuple[str, str]]:
  train, search, sampling = config.train, config.search, config.sampling
  shards = plan_memory.batch_shards(config)
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
  count = plan_measured.expected_searchers(workdir)
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
    devices.of_kind(kind)
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
          plan_memory.trainer_rows(config, c, kinds[0]),
      ),
      (
          "memory of a searcher device",
          plan_memory.searcher_rows(config, c, kinds[1]),
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
    title, speed = "speed", plan_speed.calibrated(config, calibrate)
  elif kinds[0]:
    title = "speed at most (roofline)"
    speed = plan_speed.bounds(config, c, kinds)
  else:
    known = ", ".join(sorted(devices.DEVICES))
    hint = f"name a kind of device ({known}), or --calibrate=RUN"
    return [("speed", [("unknown", hint)])]
  leaves = shard_report.model_leaves(c)
  params = plan_memory.num_params(leaves) * plan_memory.BYTES[c.param_dtype]
  rows = plan_speed.speed_rows(config, speed, params)
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

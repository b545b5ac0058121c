# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config will need, without touching a device.

All figures are arithmetic on the config: no JAX here. Memory of activations is
an estimate and says so; everything else is exact.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import sys

import ml_collections
import rich.box
import rich.console
import rich.table
import rich.text

from tba_jax import config_relations
from tba_jax import processes
from tba_jax import tokenizer as tokenizer_lib
from tba_jax.models import config as model_config_lib
from tba_jax.models import hf_config
from tba_jax.models import hf_names
from tba_jax.report import load
from tba_jax.report import tables
from tba_jax.report import timeline
from tba_jax.tasks import build as tasks_build

ModelConfig = model_config_lib.ModelConfig
# Name of a parameter -> its shape and the logical name of each axis.
Leaves = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LOGITS_BYTES = 4  # logits are float32 in any model


def model_leaves(c: ModelConfig) -> Leaves:
  """Returns every parameter of a model with its axes, as the model has it."""
  return {
      ".".join(row.path): (
          (c.num_layers,) * row.stacked + row.shape,
          ("layers",) * row.stacked + row.axes,
      )
      for row in hf_names.rows(c)
  }


def num_params(leaves: Leaves) -> int:
  return sum(math.prod(shape) for shape, _ in leaves.values())


def params_per_device(
    leaves: Leaves, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> int:
  """Returns how many parameters the fullest device holds.

  Args:
    leaves: shapes and logical axes.
    rules: `config.sharding`; a mesh axis is used once in a parameter.
    mesh: `config.mesh`.
  """
  total = 0
  for shape, names in leaves.values():
    taken: set[str] = set()
    size = 1
    for length, name in zip(shape, names, strict=True):
      axes = [a.strip() for a in rules[name].split(",") if a.strip()]
      axes = [a for a in axes if a not in taken]
      taken.update(axes)
      size *= math.ceil(length / math.prod(mesh[a] for a in axes))
    total += size
  return total


def model_of(config: ml_collections.ConfigDict) -> ModelConfig:
  """Returns the shape of the model that a run of this config trains.

  Raises:
    ValueError: a setting, file or folder that can't be used.
  """
  start = config.sft.init if config.init == "sft" else config.init
  if start != "scratch":
    path = pathlib.Path(start).expanduser() / "config.json"
    try:
      shape = hf_config.from_hf(
          json.loads(path.read_text()), dtype=config.model.param_dtype
      )
    except OSError as error:
      raise ValueError(f"config.init={config.init!r}: {error}") from error
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


def size(num_bytes: float) -> str:
  """Returns bytes as B, KB, MB or GB of 1024."""
  for unit in ("B", "KB", "MB"):
    if num_bytes < 1024:
      return f"{num_bytes:,.4g} {unit}"
    num_bytes /= 1024
  return f"{num_bytes:,.4g} GB"


def _batch_shards(config: ml_collections.ConfigDict) -> int:
  axes = [a.strip() for a in config.sharding.batch.split(",") if a.strip()]
  return math.prod(config.mesh[a] for a in axes)


def activation_bytes(
    config: ml_collections.ConfigDict, c: ModelConfig
) -> tuple[int, int]:
  """Returns bytes of logits, and of what is kept of blocks, on a device.

  One micro-batch: its logits with their gradient, and an estimate of what the
  backward pass reads of each block (stream, norms, queries, keys, values, MLP
  and attention weights).
  """
  prompts = math.ceil(config.train.micro_batch_prompts / _batch_shards(config))
  rows = prompts * config.train.completions_per_prompt
  length = config.sampling.max_completion_tokens
  prompt_length = config.sampling.max_prompt_tokens
  logits = 2 * rows * length * c.vocab_size * _LOGITS_BYTES
  tokens = prompts * prompt_length + rows * length
  heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  each = 5 * c.width + heads + 3 * c.mlp_width
  weights = rows * length * c.num_heads * (prompt_length + length)
  kept = c.num_layers * (tokens * each + weights)
  return logits, kept * _BYTES[c.compute_dtype]


def expected_searchers(workdir: str | None) -> str:
  """Returns how many searchers keep the trainer busy, from an earlier run."""
  if not workdir or not pathlib.Path(workdir).is_dir():
    return "unknown: no earlier run in --workdir"
  run = load.read_run(workdir)
  generate_s = run.summary.get("generate_busy_s")
  train_s = run.summary.get("train_busy_s")
  if not (load.is_number(generate_s) and load.is_number(train_s)):
    measured = timeline.measured_overlap(run) or {}
    generate_s, train_s = measured.get("generate_s"), measured.get("train_s")
  count = run.config.get("config", {}).get("search", {}).get("num_searchers")
  if not generate_s or not train_s or not load.is_number(count):
    return "unknown: nothing measured in --workdir yet"
  return (
      f"{math.ceil(generate_s * count / train_s)}, measured there: G"
      f" {tables.duration(generate_s)} busy for each of {count}, T"
      f" {tables.duration(train_s)}"
  )


def _memory_rows(
    config: ml_collections.ConfigDict, c: ModelConfig
) -> list[tuple[str, str]]:
  leaves = model_leaves(c)
  count = params_per_device(leaves, config.sharding, config.mesh)
  params = count * _BYTES[c.param_dtype]
  logits, blocks = activation_bytes(config, c)
  # Of the policy's shape, with a gradient and two moments of its own.
  has_values = config.loss.name in config_relations.OF_A_VALUE_MODEL
  values = 4 * params * has_values
  return [
      ("parameters", f"{num_params(leaves):,}"),
      ("params", size(params)),
      ("reference", size(params)),
      ("gradients", size(params)),
      ("optimizer (Adam's two moments)", size(2 * params)),
      ("logits of a micro-batch, with gradient", size(logits)),
      ("activations of the blocks (estimate)", size(blocks)),
      *([("value model, all of it (estimate)", size(values))] * has_values),
      ("sum a device (estimate)", size(5 * params + values + logits + blocks)),
  ]


def _divides(whole: int, part: int, words: str) -> str:
  if whole % part:
    return f"NO: {whole} {words} do not divide by {part}"
  return f"{whole // part} of {part} {words}"


def _batch_rows(config: ml_collections.ConfigDict) -> list[tuple[str, str]]:
  train, search, sampling = config.train, config.search, config.sampling
  shards = _batch_shards(config)
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


def _process_rows(
    config: ml_collections.ConfigDict, workdir: str | None
) -> list[tuple[str, str]]:
  cores = processes.available_cores()
  found = f"{len(cores)} cores: {', '.join(map(str, cores))}"

  def bound(role: str) -> str:
    setting = config.cores[role]
    if setting == "all":
      return "any core"
    return f"cores {setting}" if setting else "cores chosen at start"

  return [
      ("this machine", found),
      ("store", f"1 process, {bound('store')}"),
      ("trainer", f"1 process, {bound('trainer')}"),
      (
          "searchers",
          f"{config.search.num_searchers} of one process each,"
          f" {bound('searcher')}",
      ),
      ("staleness of fresh data, at most", staleness_bound(config)),
      ("searchers that keep the trainer busy", expected_searchers(workdir)),
  ]


def plan(
    config: ml_collections.ConfigDict, workdir: str | None
) -> list[tuple[str, list[tuple[str, str]]]]:
  """Returns the plan as titled rows of name and value.

  Raises:
    ValueError: a setting, file or folder that can't be used.
  """
  mesh = {axis: config.mesh[axis] for axis in ("data", "fsdp", "tensor")}
  devices = math.prod(mesh.values())
  shape = " x ".join(f"{axis} {count}" for axis, count in mesh.items())
  c = model_of(config)
  model = (
      f"{c.family}, {c.num_layers} layers, width {c.width}, vocabulary"
      f" {c.vocab_size:,}, {c.param_dtype}"
  )
  return [
      ("mesh", [("devices", f"{devices}: {shape}"), ("model", model)]),
      ("memory of a trainer device", _memory_rows(config, c)),
      ("batch", _batch_rows(config)),
      ("processes", _process_rows(config, workdir)),
  ]


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Prints the plan of a config.

  Returns:
    0; 2 where the config can't be used or does not divide.
  """
  try:
    if operands:
      raise ValueError(f"--program=plan takes no operand: {list(operands)}")
    sections = plan(config, workdir)
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

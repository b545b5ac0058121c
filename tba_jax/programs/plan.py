# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config needs, without touching a device.

    --program=plan --config=FILE [KIND [SEARCHER_KIND]] [--calibrate=RUN]

All figures are arithmetic on the config and on headers of weight files; JAX is
not loaded. A kind of device adds whether the run fits. `--calibrate` adds the
balance of searchers and trainer from the speeds that RUN measured.
"""

from collections.abc import Mapping, Sequence
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
from tba_jax.models import hf_names
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline
from tba_jax.replay import scheduler
from tba_jax.system import processes
from tba_jax.tasks import build
from tba_jax.tasks import red_team

# Name and value of each row of a table; "NO…" marks what cannot work.
Rows = list[tuple[str, str]]
# Parameter's path -> its shape and the logical name of each axis.
Leaves = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]

# GiB of one device, as its maker publishes it; "cpu" is one core of a usual
# cloud machine.
DEVICE_GIB = {
    "v4": 32,
    "v5e": 16,
    "v5p": 95,
    "v6e": 32,
    "a100-40": 40,
    "a100-80": 80,
    "h100": 80,
    "h200": 141,
    "l4": 24,
    "cpu": 4,
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HF_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_LOGITS_BYTES = 4  # Logits are float32 in every model.
_REMATS = ("none", "dots", "full")
# Replicated leaves that are listed; the smaller ones are summed.
_MAX_LEAVES = 12
# A smaller speed-up does not repay asynchrony.
_WORTHWHILE = 1.15


def format_bytes(num_bytes: float) -> str:
  """Returns bytes as B, KB, MB or GB of 1024."""
  for unit in ("B", "KB", "MB"):
    if num_bytes < 1024:
      return f"{num_bytes:,.4g} {unit}"
    num_bytes /= 1024
  return f"{num_bytes:,.4g} GB"


# Sharding of parameters


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter on a mesh; `parts` is the number of shards of each axis."""

  name: str
  shape: tuple[int, ...]
  axes: tuple[str, ...]
  parts: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def device_size(self) -> int:
    """Elements on the fullest device."""
    return math.prod(
        math.ceil(n / parts) for n, parts in zip(self.shape, self.parts)
    )


def model_leaves(c: config_lib.ModelConfig) -> Leaves:
  """Returns every parameter of a model."""
  return {
      ".".join(row.path): (
          (c.num_layers,) * row.stacked + row.shape,
          ("layers",) * row.stacked + row.axes,
      )
      for row in hf_names.rows(c)
  }


def adapter_leaves(leaves: Leaves, *, rank: int, targets: str) -> Leaves:
  """Returns the low-rank factors that `lora.make` adds to a model."""
  wanted, out = settings_lib.lora_names(targets), {}
  for name, (shape, axes) in leaves.items():
    parent, _, kind = name.rpartition(".")
    if not parent.startswith("blocks.") or kind != "kernel":
      continue
    if wanted and parent.rpartition(".")[2] not in wanted:
      continue
    # A kernel reads the residual stream or writes to it.
    outs = len(axes) - 1 if axes[-1] == "width" else 2
    out[f"{parent}.a"] = (
        (shape[0], rank, *shape[outs:]),
        (axes[0], "lora_rank", *axes[outs:]),
    )
    out[f"{parent}.b"] = (
        (*shape[:outs], rank),
        (*axes[:outs], "lora_rank"),
    )
  return out


def shard(
    leaves: Leaves, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> list[Leaf]:
  """Returns how `config.sharding` splits parameters over a mesh."""
  out = []
  for name, (shape, axes) in leaves.items():
    taken: set[str] = set()  # A mesh axis splits a parameter once.
    parts = []
    for axis in axes:
      own = [a.strip() for a in rules[axis].split(",") if a.strip()]
      own = [a for a in own if a not in taken]
      taken.update(own)
      parts.append(math.prod(mesh[a] for a in own))
    out.append(Leaf(name, shape, axes, tuple(parts)))
  return out


def device_size(
    leaves: Leaves, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> int:
  """Returns the parameters that the fullest device of a mesh holds."""
  return sum(leaf.device_size for leaf in shard(leaves, rules, mesh))


def leaf_rows(
    leaves: list[Leaf], element_bytes: int, mesh: Mapping[str, int]
) -> Rows:
  """Returns totals, replicated leaves, and the leaves that do not divide."""
  megabytes = lambda n: f"{n * element_bytes / 1e6:,.2f} MB"
  whole = [leaf for leaf in leaves if math.prod(leaf.parts) == 1]
  whole.sort(key=lambda leaf: -leaf.size)
  total, own = (sum(n) for n in zip(*[(f.size, f.device_size) for f in leaves]))
  out = [
      ("params", f"{megabytes(total)}, {megabytes(own)} a device"),
      (
          "replicated on every device",
          f"{len(whole)} of {len(leaves)} leaves,"
          f" {megabytes(sum(leaf.size for leaf in whole))}",
      ),
  ]
  for leaf in whole[:_MAX_LEAVES]:
    rule = _rule_that_splits(leaf, mesh)
    hint = "no axis of it divides by the mesh"
    if rule:
      hint = f"config.sharding.{rule} would split it"
    shape = "x".join(map(str, leaf.shape))
    out.append((leaf.name, f"{shape}, {megabytes(leaf.size)}; {hint}"))
  if rest := whole[_MAX_LEAVES:]:
    size = sum(leaf.size for leaf in rest)
    out.append((f"and {len(rest)} smaller ones", megabytes(size)))
  return out + [
      (leaf.name, f"NO: {axis} of {length} does not divide by {parts}")
      for leaf in leaves
      for axis, length, parts in zip(leaf.axes, leaf.shape, leaf.parts)
      if length % parts
  ]


def _rule_that_splits(leaf: Leaf, mesh: Mapping[str, int]) -> str:
  """Returns the rule with the most shards, then of the longest axis, or ""."""
  options = [
      (count, length, f"{axis}={mesh_axis}")
      for axis, length in zip(leaf.axes, leaf.shape)
      for mesh_axis, count in mesh.items()
      if count > 1 and length % count == 0 and axis != "layers"
  ]
  return max(options)[2] if options else ""


def sharding_rows(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> Rows:
  """Returns how `config.mesh` splits parameters and sequences."""
  leaves = shard(model_leaves(c), config.sharding, config.mesh)
  out = leaf_rows(leaves, BYTES[c.param_dtype], config.mesh)
  parts = _length_parts(config)
  for name in ("max_prompt_tokens", "max_completion_tokens") * (parts > 1):
    length = config.sampling[name]
    each = math.ceil(length / parts)
    words = f"{length} tokens, {each} a device"
    if length % parts:
      words += f"; {length} does not divide by {parts}, padded to"
      words += f" {each * parts}"
    out.append((f"sampling.{name}", words))
  return out


def sharding_text(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> str:
  """Returns `sharding_rows` as lines of a log."""
  rows = sharding_rows(config, c)
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _length_parts(config: ml_collections.ConfigDict) -> int:
  """Returns the number of devices that share the tokens of a sequence."""
  tokens = {"tokens": ((1, 1), ("batch", "length"))}
  return shard(tokens, config.sharding, config.mesh)[0].parts[1]


def _batch_shards(config: ml_collections.ConfigDict) -> int:
  tokens = {"tokens": ((1, 1), ("batch", "length"))}
  return shard(tokens, config.sharding, config.mesh)[0].parts[0]


# Memory of a device


def activation_bytes(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    *,
    remat: str,
    dtype: str,
) -> tuple[int, int]:
  """Returns a device's bytes of logits and of saved activations; an estimate.

  Both are of one micro-batch; logits have a gradient. Saved are, by `remat`:
  "none": all that the backward pass reads, "dots": each layer's products,
  "full": each layer's input; with both also one layer that is recomputed.
  """
  prompts = math.ceil(config.train.micro_batch_prompts / _batch_shards(config))
  rows = prompts * config.train.completions_per_prompt
  P = config.sampling.max_prompt_tokens
  T = config.sampling.max_completion_tokens
  parts = _length_parts(config)
  own_P, own_T = math.ceil(P / parts), math.ceil(T / parts)
  logits = 2 * rows * own_T * c.vocab_size * _LOGITS_BYTES
  tokens = prompts * own_P + rows * own_T
  heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  attention = rows * own_T * c.num_heads * (P + T)
  layer = tokens * (5 * c.width + heads + 3 * c.mlp_width) + attention
  if parts > 1:  # Keys and values of the other devices are gathered.
    gathered = 2 * c.num_kv_heads * c.head_dim
    layer += (prompts * P + rows * T) * gathered
  qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  dots = tokens * (3 * c.width + qkv + 2 * c.mlp_width)
  saved = {
      "none": c.num_layers * layer,
      "dots": c.num_layers * dots + layer,
      "full": c.num_layers * tokens * c.width + layer,
  }
  return logits, saved[remat] * BYTES[dtype]


def cache_bytes(c: config_lib.ModelConfig, dtype: str) -> int:
  """Returns the bytes of one token's keys and values in all layers."""
  return 2 * c.num_layers * c.num_kv_heads * c.head_dim * BYTES[dtype]


def _compute_dtype(config: ml_collections.ConfigDict, kind: str) -> str:
  # Without a kind "auto" counts as the larger one.
  backend = "cpu" if kind in ("", "cpu") else "gpu"
  return config_lib.compute_dtype(config.model, backend)


def _folder_bytes(key: str, folder: str | pathlib.Path, size: int = 0) -> int:
  """Returns the bytes of a folder's weights, in its dtypes or `size` each.

  Raises:
    ValueError: the weights are missing or damaged; names the config key.
  """
  try:
    files = hf_files.Files(pathlib.Path(folder).expanduser())
  except ValueError as error:
    raise ValueError(f"config.{key}: {error}") from error
  return sum(
      math.prod(shape) * (size or _HF_BYTES[files.dtypes[name]])
      for name, shape in files.shapes.items()
  )


def _judge_models(
    config: ml_collections.ConfigDict, workdir: str | None, policy_bytes: int
) -> dict[str, int]:
  """Returns the bytes of the frozen models that give training rewards."""
  if config.reward.where != "model":
    return _task_models(config)
  folder = config.reward.model
  if folder == "reward_model":
    folder = pathlib.Path(workdir or ".") / "reward_model" / "model"
    if not folder.is_dir():  # It is trained later, from a model of that size.
      return {"reward model (as large as the policy)": policy_bytes}
  return {"reward model": _folder_bytes("reward.model", folder)}


def _task_models(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the bytes of a red-teaming task's frozen models."""
  task = config.task
  if task.name != red_team.RedTeam.name:
    return {}
  # Encoders are float32; others have the dtypes of their files.
  classifier_size = 4 if task.classifier == "sequence" else 0
  return {
      name: _folder_bytes(f"task.{key}", task[key], size)
      for name, key, size in (
          ("victim", "victim", 0),
          ("guard (classifier)", "classifier_folder", classifier_size),
          ("sentence encoder", "encoder", 4),
      )
      if task[key] not in ("", red_team.MADE_UP, red_team.WORDS)
  }


def _frozen_models(
    config: ml_collections.ConfigDict, workdir: str | None, policy_bytes: int
) -> dict[str, int]:
  """Returns the bytes of the trainer's frozen models, beside the reference.

  Each lies whole on one device. The evaluator loads judges of its own.
  """
  judges = _judge_models(config, workdir, policy_bytes)
  copies = 1 + (config.reward.role == "trainer")
  out = {f"{name} x {copies}": copies * size for name, size in judges.items()}
  gold = config.evaluate.judge
  if gold == "task":
    found = _task_models(config)
    out |= {f"{name} of evaluate.judge": size for name, size in found.items()}
  elif gold and gold != "command":
    out["gold model"] = _folder_bytes("evaluate.judge", gold)
  if config.replay_filter.similarity == "cosine":
    encoder = _task_models(config).get("sentence encoder", 0)
    out["sentence encoder of replay_filter"] = encoder
  return out


def _moment_bytes(config: ml_collections.ConfigDict) -> int:
  """Returns the bytes of a parameter's moments; Adam's second is float32."""
  return BYTES[config.optimizer.state_dtype] + BYTES["float32"]


def _trained_bytes(
    config: ml_collections.ConfigDict, leaves: Leaves, c: config_lib.ModelConfig
) -> dict[str, int]:
  """Returns a device's bytes of params, and of what has their shape."""
  size = lambda of: device_size(of, config.sharding, config.mesh)
  count, moments = size(leaves), "optimizer (Adam's two moments)"
  params = count * BYTES[c.param_dtype]
  published = lambda n: {
      "copy that is published": n * BYTES[config.publish.dtype or c.param_dtype]
  }
  if not config.lora.rank:
    return {
        "params": params,
        "reference": params,
        "gradients": params,
        moments: count * _moment_bytes(config),
        **published(count),
    }
  own = size(
      adapter_leaves(leaves, rank=config.lora.rank, targets=config.lora.targets)
  )
  return {
      "params, base of the adapters and reference": params,
      "params with adapters merged, to evaluate": params,
      "adapters": own * BYTES["float32"],
      "gradients": own * BYTES["float32"],
      moments: own * _moment_bytes(config),
      **published(own),
  }


def _value_model_bytes(
    config: ml_collections.ConfigDict, leaves: Leaves, c: config_lib.ModelConfig
) -> dict[str, int]:
  """Returns the bytes of a value model: params, gradients and moments."""
  if config.loss.name not in settings_lib.OF_A_VALUE_MODEL:
    return {}
  source, each = config.loss.value_init, BYTES[c.param_dtype]
  if source == "policy":
    count = device_size(leaves, config.sharding, config.mesh)
  else:
    shape = _read_shape("loss.value_init", source)
    count = device_size(model_leaves(shape), config.sharding, config.mesh)
    each = BYTES[shape.param_dtype]
  total = count * (2 * each + _moment_bytes(config))
  return {"value model with gradients and moments": total}


def _fits(needed: float, kind: str) -> Rows:
  """Returns a row that says whether bytes fit on a device; none without one."""
  if not kind:
    return []
  have = DEVICE_GIB[kind] * 2**30
  words = f"{format_bytes(needed)} of {format_bytes(have)} of {kind}"
  return [("fits", f"{'NO' if needed > have else 'yes'}: {words}"
           f" ({needed / have:.0%})")]  # fmt: skip


def trainer_rows(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kind: str,
    workdir: str | None = None,
) -> Rows:
  """Returns what a device of the trainer holds.

  Args:
    config: of the run.
    c: shape of its model.
    kind: a key of `DEVICE_GIB`; "" leaves out whether it fits.
    workdir: may hold the reward model.

  Raises:
    ValueError: the folder of a frozen model cannot be read.
  """
  leaves, dtype = model_leaves(c), _compute_dtype(config, kind)
  num_params = sum(math.prod(shape) for shape, _ in leaves.values())
  params = BYTES[c.param_dtype] * device_size(
      leaves, config.sharding, config.mesh
  )
  held = {
      **_trained_bytes(config, leaves, c),
      **_value_model_bytes(config, leaves, c),
      **_frozen_models(config, workdir, num_params * BYTES[c.param_dtype]),
  }
  # As `training/evaluations.py` decides it.
  alone = math.prod(config.mesh.values()) == 1 and not config.search.lockstep
  beside = config.evaluate.beside and config.evaluate.every_steps and alone
  if beside:
    held["params, copied for an evaluation beside training"] = params
  remat = config.train.remat
  logits, _ = activation_bytes(config, c, remat=remat, dtype=dtype)
  saved = {
      name: activation_bytes(config, c, remat=name, dtype=dtype)[1]
      for name in _REMATS
  }
  step = logits + saved[remat]
  sampling, evaluate = config.sampling, config.evaluate
  rows = evaluate.batch_prompts * evaluate.num_completions
  length = sampling.max_prompt_tokens + sampling.max_completion_tokens
  # On a mesh the evaluator's rows are split as a batch is.
  cache = math.ceil(rows / _batch_shards(config)) * length
  cache *= cache_bytes(c, dtype)
  others = ", ".join(
      f"{name} {format_bytes(saved[name])}" for name in _REMATS if name != remat
  )
  total = sum(held.values()) + (step + cache if beside else max(step, cache))
  return [
      ("parameters", f"{num_params:,}"),
      *((name, format_bytes(n)) for name, n in held.items()),
      ("logits of a micro-batch, with gradient", format_bytes(logits)),
      (
          f"activations, remat {remat} (estimate)",
          f"{format_bytes(saved[remat])}; with {others}",
      ),
      (f"cache of an evaluation, {rows} rows", format_bytes(cache)),
      (
          "sum a device (estimate)",
          f"{format_bytes(total)}; evaluations"
          f" {'beside' if beside else 'between'} steps",
      ),
      *_fits(total, kind),
  ]


def searcher_rows(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kind: str,
    workdir: str | None = None,
) -> Rows:
  """Returns what a searcher's device holds; arguments as `trainer_rows`."""
  sampling, mesh = config.sampling, config.search.mesh
  dtype, leaves = _compute_dtype(config, kind), model_leaves(c)
  each = BYTES[c.param_dtype]
  params = each * device_size(leaves, config.sharding, {"sequence": 1, **mesh})
  length = sampling.max_prompt_tokens + sampling.max_completion_tokens
  num_rows = math.ceil(sampling.num_rows / (mesh.data * mesh.fsdp))
  head_shards = 1 if c.num_kv_heads % mesh.tensor else mesh.tensor
  held = {"params, twice while a version comes in": 2 * params}
  if config.lora.rank:
    held = {
        "base, and merged params twice while a version comes in": 3 * params
    }
  held[f"cache of {num_rows} rows of {length} tokens"] = (
      cache_bytes(c, dtype) // head_shards * num_rows * length
  )
  held["logits of a decode step"] = num_rows * c.vocab_size * _LOGITS_BYTES
  if config.reward.role == "searcher":
    whole = each * sum(math.prod(shape) for shape, _ in leaves.values())
    held |= _judge_models(config, workdir, whole)
  total = sum(held.values())
  return [
      *((name, format_bytes(n)) for name, n in held.items()),
      ("sum a device", format_bytes(total)),
      *_fits(total, kind),
  ]


# Batch, staleness and processes


def _divides(whole: int, part: int, words: str) -> str:
  if whole % part:
    return f"NO: {whole} {words} do not divide by {part}"
  return f"{whole // part} of {part} {words}"


def batch_rows(config: ml_collections.ConfigDict) -> Rows:
  """Returns sizes of batches, and whether they divide."""
  train, search, sampling = config.train, config.search, config.sampling
  shards = _batch_shards(config)
  size = train.micro_batch_prompts
  tokens = lambda n: (
      f"{n:,} completions, at most"
      f" {n * sampling.max_completion_tokens:,} tokens"
  )
  return [
      (
          "micro-batches a step",
          _divides(train.prompts_per_batch, size, "prompts"),
      ),
      (
          "shards of a micro-batch",
          _divides(size, shards, "prompts") if shards > 1 else "1",
      ),
      ("trained on a step", tokens(_num_trained(config))),
      (
          "sampled a step",
          tokens(search.prompts_per_step * search.samples_per_prompt),
      ),
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
  # 4 bytes each: tokens and mask; of a completion also two log-probs a token,
  # reward and staleness.
  completion = 16 * sampling.max_completion_tokens + 8
  prompt = 8 * sampling.max_prompt_tokens
  return train.prompts_per_batch * (
      prompt + train.completions_per_prompt * completion
  )


def process_rows(
    config: ml_collections.ConfigDict, workdir: str | None
) -> Rows:
  """Returns processes with their cores, and the staleness bound."""
  cores = processes.available_cores()
  search, num_processes = config.search, config.trainer.num_processes
  devices = math.prod(search.mesh.values())
  searchers = f"{search.num_searchers} of one process each"
  if devices > 1:
    total = search.num_searchers * devices
    searchers += f" with {devices} devices, {total} in all"

  def bound(role: str) -> str:
    setting = config.cores[role]
    if setting == "all":
      return "any core"
    return f"cores {setting}" if setting else "cores chosen at start"

  rows = [
      (
          "this machine",
          f"{len(cores)} cores: {', '.join(map(str, cores))}",
      ),
      ("store", f"1 process, {bound('store')}"),
      (
          "trainer",
          f"{num_processes} process{'es' * (num_processes > 1)},"
          f" {bound('trainer')}",
      ),
      ("searchers", f"{searchers}, {bound('searcher')}"),
      ("staleness of fresh data, at most", staleness_bound(config)),
  ]
  if num_processes > 1:
    sent = f"{sent_bytes(config) / 1e6:,.3f} MB a step"
    rows.append(("batch that process 0 sends", sent))
  if workdir:
    rows.append(
        ("searchers that keep the trainer busy", expected_searchers(workdir))
    )
  return rows


# Balance of searchers and trainer, from what a run measured


@dataclasses.dataclass(frozen=True)
class Measured:
  """Busy time of an earlier run.

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
  batch = (
      get("train", "prompts_per_batch"),
      get("train", "completions_per_prompt"),
  )
  known = all(map(text.is_number, batch))
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


def expected_searchers(workdir: str) -> str:
  """Returns how many searchers keep the trainer busy, from an earlier run."""
  try:
    found = read_measured(workdir)
  except ValueError:
    return "unknown: nothing measured in --workdir yet"
  count = math.ceil(found.generate_s * found.num_searchers / found.train_s)
  return (
      f"{count}, measured there: {found.num_searchers} busy for"
      f" {text.duration(found.generate_s)} each, the trainer for"
      f" {text.duration(found.train_s)}"
  )


def _num_prompts(config: ml_collections.ConfigDict) -> float:
  """Returns the prompts that are sampled for one step."""
  if config.rounds.mini_batches:
    return config.train.prompts_per_batch / config.rounds.passes
  return config.search.prompts_per_step


def _num_trained(config: ml_collections.ConfigDict) -> int:
  return config.train.prompts_per_batch * config.train.completions_per_prompt


def step_seconds(
    config: ml_collections.ConfigDict, found: Measured
) -> tuple[float, float]:
  """Returns the seconds that one searcher, and the trainer, take for a step.

  A completion takes what it took in the measured run: its lengths, model and
  machine. Batches are those of `config`.
  """
  sample_s = found.generate_s * found.num_searchers / found.sampled
  sample_s *= _num_prompts(config) * config.search.samples_per_prompt
  return sample_s, found.train_s / found.trained * _num_trained(config)


def expected_staleness(
    config: ml_collections.ConfigDict, sample_s: float, train_s: float
) -> float:
  """Returns the mean staleness of fresh data in steps, by Little's law.

      groups under way / groups a step + (publish period - 1) / 2

  Where sampling is the bottleneck, each searcher's round is under way; where
  training is, all that credits and the lead allow.
  """
  search, rounds = config.search, config.rounds
  groups = _num_prompts(config)
  limit = (search.lead_steps + 1) * groups
  if rounds.mini_batches:
    limit = config.train.prompts_per_batch * rounds.mini_batches
    limit *= rounds.lag_rounds + 1
  under_way = search.num_searchers * search.prompts_per_round
  if sample_s / search.num_searchers < train_s:
    under_way *= min(1 + search.credits, scheduler.BLOCKS_AHEAD)
  return min(under_way, limit) / groups + (config.publish.every_steps - 1) / 2


def balance_rows(
    config: ml_collections.ConfigDict, workdir: str, params_bytes: int
) -> Rows:
  """Returns how searchers and trainer balance at the speeds of a run.

  Args:
    config: of the run that is planned.
    workdir: the run that was measured.
    params_bytes: of a published version.

  Raises:
    ValueError: nothing is measured in `workdir`.
  """
  found = read_measured(workdir)
  if not found.sampled or not found.trained:
    raise ValueError(f"{workdir}: no step in its metrics.jsonl")
  sample_s, train_s = step_seconds(config, found)
  count = config.search.num_searchers
  parallel_s = sample_s / count
  longest_s = max(parallel_s, train_s)
  gain = (parallel_s + train_s) / longest_s
  # The setting that makes sampling and training take turns.
  turns = ""
  if config.search.lockstep:
    turns = "search.lockstep=True"
  elif config.rounds.mini_batches and not config.rounds.lag_rounds:
    turns = "rounds.lag_rounds=0"
  step_s = parallel_s + train_s if turns else longest_s
  stale = f"{expected_staleness(config, sample_s, train_s):.2g} steps"
  if config.search.lockstep:
    stale = "0 steps (lockstep)"
  elif config.replay.recent_fraction < 1:
    stale += "; replayed data is older"
  group = config.search.samples_per_prompt * 8
  group *= config.sampling.max_completion_tokens
  group += config.sampling.max_prompt_tokens * 4
  rate = _num_prompts(config) / step_s
  pulled = count * params_bytes / step_s / config.publish.every_steps
  # So that 3.0000000001 is 3.
  balanced = max(1, math.ceil(sample_s / train_s - 1e-9))
  if gain < _WORTHWHILE:
    verdict = f"hardly helps: {gain:.2f} times as fast as taking turns"
  elif turns:
    verdict = f"off by config.{turns}; up to {gain:.2f} times as fast with it"
  else:
    verdict = f"helps: {gain:.2f} times as fast as taking turns"
  show = lambda value: "unknown" if value is None else f"{value:.2f}"
  plural = "s" * (found.num_searchers != 1)
  return [
      (
          "measured in",
          f"{workdir}: {found.num_searchers} searcher{plural}, staleness"
          f" {show(found.staleness)} steps, overlap {show(found.overlap)} of"
          " ideal",
      ),
      ("sampling for one step, one searcher", text.duration(sample_s)),
      ("training one step", text.duration(train_s)),
      (
          "searchers that balance one trainer",
          f"{balanced:,}; the config has {count:,}",
      ),
      ("a step then takes", f"{text.duration(step_s)} with {count:,}"),
      (
          "busy",
          f"trainer {train_s / step_s:.0%}, searchers"
          f" {parallel_s / step_s:.0%}",
      ),
      (
          "groups to the trainer",
          f"{rate:,.3g} a second, {format_bytes(rate * group)} a second",
      ),
      (
          "versions to the searchers, at most",
          f"{format_bytes(params_bytes)} each, {format_bytes(pulled)} a second"
          " to all of them",
      ),
      ("expected staleness of fresh data", stale),
      ("asynchrony", verdict),
  ]


# The program


def model_of(config: ml_collections.ConfigDict) -> config_lib.ModelConfig:
  """Returns the shape of the model that a run of this config trains.

  Raises:
    ValueError: a setting, file or folder that can't be used.
  """
  key = "sft.init" if config.init == "sft" else "init"
  start = config.sft.init if config.init == "sft" else config.init
  if start != "scratch":
    return _read_shape(key, start, dtype=config.model.param_dtype)
  if config.tokenizer.source == "task":
    task = build.make_task(config.task)
    tokenizer = tokenizer_lib.word_level(
        task.tokenizer_words(), task.tokenizer_pattern
    )
  else:
    tokenizer = tokenizer_lib.load(config.tokenizer.source)
  return config_lib.ModelConfig.from_config(
      config.model,
      vocab_size=tokenizer.vocab_size,
      pad_id=tokenizer.pad_id,
      bos_id=tokenizer.bos_id,
      eos_id=tokenizer.eos_id,
  )


def _read_shape(
    key: str, folder: str, dtype: str | None = None
) -> config_lib.ModelConfig:
  path = pathlib.Path(folder).expanduser() / "config.json"
  try:
    return hf_config.from_hf(hf_files.read_json(path), dtype=dtype)
  except ValueError as error:
    raise ValueError(f"config.{key}={folder!r}: {error}") from error


def parse(operands: Sequence[str]) -> tuple[tuple[str, str], str]:
  """Returns the kinds of trainer's and searchers' devices, and a run.

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
      kinds.append(name.lower())
  if len(kinds) > 2:
    raise ValueError(
        f"--program=plan {' '.join(kinds)}: allowed is one kind of device, or"
        " the trainer's and a searcher's"
    )
  for kind in kinds:
    if kind not in DEVICE_GIB:
      raise ValueError(
          f"device kind {kind!r}: allowed are {', '.join(sorted(DEVICE_GIB))}"
      )
  kinds = kinds or [""]
  return (kinds[0], kinds[-1]), run


def plan(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> list[tuple[str, Rows]]:
  """Returns the plan as titled rows.

  Args:
    config: of the run.
    workdir: an earlier run, or None.
    operands: as `parse` takes them.

  Raises:
    ValueError: a setting, operand, file or folder that can't be used.
  """
  kinds, measured = parse(operands)
  mesh = {a: config.mesh[a] for a in ("data", "fsdp", "sequence", "tensor")}
  num_devices = math.prod(mesh.values())
  shape = " x ".join(f"{axis} {count}" for axis, count in mesh.items())
  c = model_of(config)
  model = (
      f"{c.family}, {c.num_layers} layers, width {c.width}, vocabulary"
      f" {c.vocab_size:,}, {c.param_dtype}"
  )
  out = [("mesh", [("devices", f"{num_devices}: {shape}"), ("model", model)])]
  if num_devices > 1:
    out.append(("sharding", sharding_rows(config, c)))
  out += [
      (
          "memory of a trainer device",
          trainer_rows(config, c, kinds[0], workdir),
      ),
      (
          "memory of a searcher device",
          searcher_rows(config, c, kinds[1], workdir),
      ),
      ("batch", batch_rows(config)),
      ("processes", process_rows(config, workdir)),
  ]
  if measured:
    leaves = model_leaves(c)
    if config.lora.rank:
      leaves = adapter_leaves(
          leaves, rank=config.lora.rank, targets=config.lora.targets
      )
    size = sum(math.prod(shape) for shape, _ in leaves.values())
    dtype = "float32" if config.lora.rank else c.param_dtype
    params_bytes = size * BYTES[config.publish.dtype or dtype]
    out.append(("balance", balance_rows(config, measured, params_bytes)))
  return out


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
  status = processes.EXIT_OK
  for title, rows in sections:
    table.add_section()
    table.add_row(rich.text.Text(title, "bold cyan"), "")
    for name, value in rows:
      style = ""
      if value.startswith("NO"):
        style, status = "bold red", processes.EXIT_CONFIG
      table.add_row(f"  {name}", rich.text.Text(value, style))
  rich.console.Console().print(table)
  return status

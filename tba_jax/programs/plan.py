# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config needs, without touching a device.

    --program=plan --config=FILE [DEVICE [SEARCHER_DEVICE]] [--calibrate=RUN]

Reads the config and the headers of weight files; JAX is not loaded. With a kind
of device it says whether the run fits; `--calibrate` adds the balance of
searchers and trainer at the speeds that RUN measured.
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
from tba_jax.models import hf_hub
from tba_jax.models import hf_names
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.monitor import metrics
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline
from tba_jax.replay import scheduler
from tba_jax.system import accelerators
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
    "t4": 16,
    "cpu": 4,
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HF_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
# Of one chunk of tokens, as `losses/logprobs.py` cuts them.
_MAX_LOGITS = 2**28
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


def sharding_rows(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> Rows:
  """Returns how `config.mesh` splits parameters, and what does not divide."""
  leaves = shard(model_leaves(c), config.sharding, config.mesh)
  whole = [leaf for leaf in leaves if math.prod(leaf.parts) == 1]
  size = lambda counts: format_bytes(sum(counts) * BYTES[c.param_dtype])
  return [
      (
          "params",
          f"{size(leaf.size for leaf in leaves)},"
          f" {size(leaf.device_size for leaf in leaves)} a device",
      ),
      (
          "replicated on every device",
          f"{len(whole)} of {len(leaves)} leaves,"
          f" {size(leaf.size for leaf in whole)}",
      ),
      *(
          (leaf.name, f"NO: {axis} of {length} does not divide by {parts}")
          for leaf in leaves
          for axis, length, parts in zip(leaf.axes, leaf.shape, leaf.parts)
          if length % parts
      ),
  ]


def sharding_text(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> str:
  """Returns `sharding_rows` as lines of a log."""
  rows = sharding_rows(config, c)
  return "\n".join(f"  {name}: {value}" for name, value in rows)


def _batch_shards(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns the shards of a batch's sequences, and of their tokens."""
  tokens = {"tokens": ((1, 1), ("batch", "length"))}
  return shard(tokens, config.sharding, config.mesh)[0].parts


# Memory of a device


def activation_bytes(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig, dtype: str
) -> tuple[int, int]:
  """Returns a device's bytes of logits and, estimated, of saved activations.

  Both are of one micro-batch. Logits are float32 and have a gradient. What is
  saved depends on `train.remat`: "none": all that the backward pass reads,
  "dots": each layer's products, "full": each layer's input; with the latter two
  also one layer that is recomputed.
  """
  batch_shards, length_shards = _batch_shards(config)
  prompts = math.ceil(config.train.micro_batch_prompts / batch_shards)
  rows = prompts * config.train.completions_per_prompt
  P = config.sampling.max_prompt_tokens
  T = config.sampling.max_completion_tokens
  own_P, own_T = math.ceil(P / length_shards), math.ceil(T / length_shards)
  count = min(rows * own_T * c.vocab_size, _MAX_LOGITS)
  logits = 2 * count * BYTES["float32"]
  tokens = prompts * own_P + rows * own_T
  kv = 2 * c.num_kv_heads * c.head_dim
  q = c.num_heads * c.head_dim
  layer = tokens * (5 * c.width + 2 * q + kv + 3 * c.mlp_width)
  layer += rows * own_T * c.num_heads * (P + T)
  if length_shards > 1:  # Keys and values of the other devices are gathered.
    layer += (prompts * P + rows * T) * kv
  dots = tokens * (3 * c.width + q + kv + 2 * c.mlp_width)
  saved = {
      "none": c.num_layers * layer,
      "dots": c.num_layers * dots + layer,
      "full": c.num_layers * tokens * c.width + layer,
  }
  return logits, saved[config.train.remat] * BYTES[dtype]


def cache_bytes(c: config_lib.ModelConfig, dtype: str) -> int:
  """Returns the bytes of one token's keys and values in all layers."""
  return 2 * c.num_layers * c.num_kv_heads * c.head_dim * BYTES[dtype]


def _compute_dtype(config: ml_collections.ConfigDict, kind: str) -> str:
  # Without a kind "auto" counts as the larger one.
  backend = "cpu" if kind in ("", "cpu") else "gpu"
  return config_lib.compute_dtype(config.model, backend)


def _folder_bytes(key: str, folder: str | pathlib.Path, size: int = 0) -> int:
  """Returns the bytes of a folder's weights, in its dtypes or `size` each.

  Raises ValueError with the config key if weights are missing or damaged.
  """
  try:
    files = hf_files.Files(hf_hub.find(folder))
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


def _trained_bytes(
    config: ml_collections.ConfigDict, c: config_lib.ModelConfig
) -> dict[str, int]:
  """Returns a device's bytes of params, and of what has their shape."""
  size = lambda of: device_size(of, config.sharding, config.mesh)
  leaves = model_leaves(c)
  # Adam's second moment is float32.
  moments = BYTES[config.optimizer.state_dtype] + BYTES["float32"]
  params = size(leaves) * BYTES[c.param_dtype]
  if config.lora.rank:
    lora = config.lora
    count = size(adapter_leaves(leaves, rank=lora.rank, targets=lora.targets))
    dtype = "float32"
    out = {
        "params, base of the adapters and reference": params,
        "params with adapters merged, to evaluate": params,
        "adapters": count * BYTES[dtype],
    }
  else:
    count, dtype = size(leaves), c.param_dtype
    out = {"params": params, "reference": params}
  out |= {
      "gradients": count * BYTES[dtype],
      "optimizer (Adam's two moments)": count * moments,
      "copy that is published": count * BYTES[config.publish.dtype or dtype],
  }
  if config.loss.name in settings_lib.OF_A_VALUE_MODEL:
    source = config.loss.value_init
    shape = (
        c
        if source in ("policy", "reward_model")
        else _read_shape("loss.value_init", source)
    )
    each = 2 * BYTES[shape.param_dtype] + moments
    name = "value model with gradients and moments"
    out[name] = size(model_leaves(shape)) * each
  return out


def trainer_memory(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kind: str = "",
    workdir: str | None = None,
) -> dict[str, int]:
  """Returns the bytes of a trainer's device, by what takes them.

  Args:
    config: of the run.
    c: shape of its model.
    kind: a key of `DEVICE_GIB`, or "".
    workdir: may hold the reward model.

  Raises:
    ValueError: the folder of a frozen model cannot be read.
  """
  dtype = _compute_dtype(config, kind)
  params = BYTES[c.param_dtype] * sum(
      math.prod(shape) for shape, _ in model_leaves(c).values()
  )
  held = _trained_bytes(config, c) | _frozen_models(config, workdir, params)
  logits, saved = activation_bytes(config, c, dtype)
  step = {
      "logits of a micro-batch, with gradient": logits,
      f"activations, remat {config.train.remat} (estimate)": saved,
  }
  rows = config.evaluate.batch_prompts * config.evaluate.num_completions
  # On a mesh the evaluator's rows are split as a batch is.
  own_rows = math.ceil(rows / _batch_shards(config)[0])
  cache = {
      f"KV cache of an evaluation, {rows} rows": (
          own_rows * _num_tokens(config) * cache_bytes(c, dtype)
      )
  }
  # As `training/evaluations.py` decides it.
  alone = math.prod(config.mesh.values()) == 1 and not config.search.lockstep
  if config.evaluate.beside and config.evaluate.every_steps and alone:
    return held | step | cache | {"params, copied for an evaluation": params}
  # Steps and evaluations take turns: the larger counts.
  return held | max(step, cache, key=lambda part: sum(part.values()))


def searcher_memory(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kind: str = "",
    workdir: str | None = None,
) -> dict[str, int]:
  """Returns the bytes of a searcher's device; arguments as `trainer_memory`."""
  mesh, leaves = config.search.mesh, model_leaves(c)
  each = BYTES[c.param_dtype]
  params = each * device_size(leaves, config.sharding, {"sequence": 1, **mesh})
  rows = math.ceil(config.sampling.num_rows / (mesh.data * mesh.fsdp))
  head_shards = 1 if c.num_kv_heads % mesh.tensor else mesh.tensor
  token = cache_bytes(c, _compute_dtype(config, kind)) // head_shards
  held = {"params, twice while a version comes in": 2 * params}
  if config.lora.rank:
    held = {
        "base, and merged params twice while a version comes in": 3 * params
    }
  held[f"KV cache of {rows} rows"] = token * rows * _num_tokens(config)
  held["logits of a decode step"] = rows * c.vocab_size * BYTES["float32"]
  if config.reward.role == "searcher":
    whole = each * sum(math.prod(shape) for shape, _ in leaves.values())
    held |= _judge_models(config, workdir, whole)
  return held


def _num_tokens(config: ml_collections.ConfigDict) -> int:
  sampling = config.sampling
  return sampling.max_prompt_tokens + sampling.max_completion_tokens


def memory_rows(held: Mapping[str, int], kind: str) -> Rows:
  """Returns what takes a device's memory, the sum, and whether it fits."""
  total = sum(held.values())
  rows = [(name, format_bytes(n)) for name, n in held.items()]
  rows.append(("sum a device", format_bytes(total)))
  if kind:
    have = DEVICE_GIB[kind] * 2**30
    rows.append(
        (
            "fits",
            f"{'NO' if total > have else 'yes'}: {format_bytes(total)} of"
            f" {format_bytes(have)} of {kind} ({total / have:.0%})",
        )
    )
  return rows


# Batch and staleness


def _divides(whole: int, part: int, words: str) -> str:
  if whole % part:
    return f"NO: {whole} {words} do not divide by {part}"
  return f"{whole // part} of {part} {words}"


def batch_rows(config: ml_collections.ConfigDict) -> Rows:
  """Returns sizes of batches, whether they divide, and the staleness bound."""
  train, search = config.train, config.search
  shards, _ = _batch_shards(config)
  size = train.micro_batch_prompts
  tokens = lambda n: (
      f"{n:,} completions, at most"
      f" {n * config.sampling.max_completion_tokens:,} tokens"
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
          tokens(search.prompts_per_step * search.samples_per_prompt)
          if search.prompts_per_step
          else "what the searchers manage",
      ),
      ("staleness of fresh data, at most", staleness_bound(config)),
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
  if not config.search.prompts_per_step:
    return "no bound: searchers run free"
  words = f"{lead + period} steps: lead {lead} + publish period {period}"
  if config.replay.recent_fraction < 1:
    words += "; replayed data is older"
  return words


def _num_prompts(config: ml_collections.ConfigDict) -> float:
  """Returns the prompts sampled for a step; those trained on, if unbounded."""
  if config.rounds.mini_batches:
    return config.train.prompts_per_batch / config.rounds.passes
  if not config.search.prompts_per_step:
    return _num_trained(config) / config.search.samples_per_prompt
  return config.search.prompts_per_step


def _num_trained(config: ml_collections.ConfigDict) -> int:
  return config.train.prompts_per_batch * config.train.completions_per_prompt


# Balance of searchers and trainer


def read_measured(workdir: str) -> tuple[float, float]:
  """Returns the busy seconds of a completion in a searcher and in the trainer.

  Raises:
    ValueError: there is no such run, or nothing is measured in it yet.
  """
  run = load.read_run(workdir)
  generate_s = run.summary.get("generate_busy_s")
  train_s = run.summary.get("train_busy_s")
  if not (text.is_number(generate_s) and text.is_number(train_s)):
    generate_s, train_s = (_busy_s(run, r) for r in ("searcher", "trainer"))
  steps, completions = load.column(run.records, "total/completions")
  settings = run.config.get("config", {})
  numbers = [
      settings.get(section, {}).get(name)
      for section, name in (
          ("search", "num_searchers"),
          ("train", "prompts_per_batch"),
          ("train", "completions_per_prompt"),
      )
  ]
  if not (generate_s and train_s and len(steps) and completions[-1]) or not all(
      map(text.is_number, numbers)
  ):
    raise ValueError(f"{workdir}: nothing is measured there yet")
  num_searchers, prompts, per_prompt = numbers
  trained = len(steps) * prompts * per_prompt
  return generate_s * num_searchers / completions[-1], train_s / trained


def _busy_s(run: load.Run, role: str) -> float:
  """Returns the mean busy seconds of a role's processes, from its spans."""
  rows = [
      row["seconds"]
      for row in timeline.where_time_went(run)
      if row["role"] == role and not row["lane"]
  ]
  busy = sum(
      s
      for seconds in rows
      for kind, s in seconds.items()
      if not metrics.is_wait(kind) and kind != "compile"
  )
  return busy / max(len(rows), 1)


def expected_staleness(
    config: ml_collections.ConfigDict, sample_s: float, train_s: float
) -> float:
  """Returns the mean staleness of fresh data in steps, by Little's law.

      groups under way / groups a step + (publish period - 1) / 2

  Where sampling is the bottleneck, each searcher's round is under way; where
  training is, all that credits and the lead allow.

  Args:
    config: of the run.
    sample_s: seconds that one searcher needs for a step's completions.
    train_s: seconds of a train step.
  """
  search, rounds = config.search, config.rounds
  groups = _num_prompts(config)
  limit = (search.lead_steps + 1) * groups
  if rounds.mini_batches:
    limit = config.train.prompts_per_batch * rounds.mini_batches
    limit *= rounds.lag_rounds + 1
  elif not search.prompts_per_step:
    limit = math.inf
  under_way = search.num_searchers * search.prompts_per_round
  if sample_s / search.num_searchers < train_s:
    under_way *= min(1 + search.credits, scheduler.BLOCKS_AHEAD)
  return min(under_way, limit) / groups + (config.publish.every_steps - 1) / 2


def balance_rows(config: ml_collections.ConfigDict, workdir: str) -> Rows:
  """Returns how searchers and trainer balance at the speeds of a run.

  A completion takes what it took in `workdir`; batches and searchers are those
  of `config`.

  Raises:
    ValueError: nothing is measured in `workdir`.
  """
  sample_s, train_s = read_measured(workdir)
  sample_s *= _num_prompts(config) * config.search.samples_per_prompt
  train_s *= _num_trained(config)
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
  # So that 3.0000000001 is 3.
  balanced = max(1, math.ceil(sample_s / train_s - 1e-9))
  if gain < _WORTHWHILE:
    verdict = f"hardly helps: {gain:.2f} times as fast as taking turns"
  elif turns:
    verdict = f"off by config.{turns}; up to {gain:.2f} times as fast with it"
  else:
    verdict = f"helps: {gain:.2f} times as fast as taking turns"
  return [
      ("measured in", workdir),
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
      ("expected staleness of fresh data", stale),
      ("asynchrony", verdict),
  ]


# The program


def model_of(config: ml_collections.ConfigDict) -> config_lib.ModelConfig:
  """Returns the shape of the model that a run of this config trains.

  Raises:
    ValueError: a setting, file or folder cannot be used.
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
  try:
    return hf_config.read(folder, dtype=dtype)
  except ValueError as error:
    raise ValueError(f"config.{key}={folder!r}: {error}") from error


def parse(operands: Sequence[str]) -> tuple[tuple[str, str], str]:
  """Returns the kinds of the trainer's and the searchers' device, and a run.

  Args:
    operands: at most two kinds, the second of the searchers; `--calibrate=RUN`.

  Returns:
    Two kinds, "" where none is named, and the run, "" where none is.

  Raises:
    ValueError: an operand too many, or a kind that is not in the table.
  """
  flag = "--calibrate="
  runs = [o.removeprefix(flag) for o in operands if o.startswith(flag)]
  kinds = [o.lower() for o in operands if not o.startswith(flag)]
  if len(kinds) > 2:
    raise ValueError(
        f"operands {' '.join(kinds)}: allowed one kind of device, or the"
        " trainer's and a searcher's"
    )
  for kind in kinds:
    if kind not in DEVICE_GIB:
      raise ValueError(
          f"device kind {kind!r}: allowed {', '.join(sorted(DEVICE_GIB))}"
      )
  kinds = kinds or [""]
  return (kinds[0], kinds[-1]), runs[-1] if runs else ""


def plan(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> list[tuple[str, Rows]]:
  """Returns the plan as titled rows.

  Args:
    config: of the run.
    workdir: may hold the reward model.
    operands: as `parse` takes them.

  Raises:
    ValueError: a setting, operand, file or folder cannot be used.
  """
  kinds, measured = parse(operands)
  count = lambda mesh: (
      f"{math.prod(mesh.values())}:"
      f" {' x '.join(f'{axis} {n}' for axis, n in mesh.items())}"
  )
  c = model_of(config)
  num_params = sum(math.prod(shape) for shape, _ in model_leaves(c).values())
  devices = [
      ("trainer", count({a: config.mesh[a] for a in settings_lib.MESH_AXES})),
      (
          f"each of {config.search.num_searchers} searchers",
          count(config.search.mesh),
      ),
  ]
  one, why = accelerators.one_process(config)
  devices.append(
      ("processes of `train`",
       f"{'one for trainer and searchers' if one else 'one each'}: {why}")
  )  # fmt: skip
  here = accelerators.find()
  if here.kind != accelerators.CPU:
    split = accelerators.of_run(config, alone=one)
    devices += [
        (f"{role} on this machine's {here.kind}s", accelerators.describe(envs))
        for role, envs in split.items()
        if envs
    ]
  model = [
      ("family", f"{c.family}, {c.num_layers} layers, width {c.width}"),
      ("vocabulary", f"{c.vocab_size:,}"),
      ("parameters", f"{num_params:,}, {c.param_dtype}"),
  ]
  out = [("devices", devices), ("model", model)]
  if math.prod(config.mesh.values()) > 1:
    out.append(("sharding", sharding_rows(config, c)))
  for role, memory, kind in (
      ("trainer", trainer_memory, kinds[0]),
      ("searcher", searcher_memory, kinds[1]),
  ):
    held = memory(config, c, kind, workdir)
    out.append((f"memory of a {role} device", memory_rows(held, kind)))
  out.append(("batch", batch_rows(config)))
  if measured:
    out.append(("balance", balance_rows(config, measured)))
  return out


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Prints the plan of a config.

  Returns:
    0; 2 where the config cannot be used, does not divide or does not fit.
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config needs, without touching a device.

    --program=plan --config=FILE [DEVICE [SEARCHER_DEVICE]] [--calibrate=RUN]

It reads the config and the headers of weight files; JAX is not loaded. Memory
is what shapes give exactly: activations and workspace are not counted. DEVICE
is a kind, such as "h100", or a TPU slice, such as "v5e:4x4": then memory is
what the compiler says (`compile`). `--calibrate` adds the balance of searchers
and trainer at the speeds that RUN measured.
"""

from collections.abc import Iterator, Mapping, Sequence
import math

import ml_collections

from tba_jax.config import meshes
from tba_jax.config import settings as settings_lib
from tba_jax.losses import build as losses_build
from tba_jax.models import config as config_lib
from tba_jax.monitor import metrics
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline
from tba_jax.programs import sections
from tba_jax.programs import sizes
from tba_jax.replay import scheduler
from tba_jax.sampling import sharing
from tba_jax.system import accelerators

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
# A smaller speed-up does not repay asynchrony.
_WORTHWHILE = 1.15


def _batch_shards(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns the shards of a batch's sequences, and of their tokens."""
  tokens = {"tokens": ((1, 1), ("batch", "length"))}
  return sizes.shard(tokens, config.sharding, config.mesh)[0].parts


# Memory of a device


def cache_bytes(c: config_lib.ModelConfig, dtype: str, kind: str) -> int:
  """Returns the bytes of one token's keys and values in all layers.

  `dtype` is what is computed in; a CPU's cache is float32 (`models/cache.py`).
  """
  dtype = "float32" if kind in ("", "cpu") else dtype
  return 2 * c.num_layers * c.num_kv_heads * c.head_dim * sizes.BYTES[dtype]


def _compute_dtype(config: ml_collections.ConfigDict, kind: str) -> str:
  # Without a kind "auto" counts as the larger one.
  backend = "cpu" if kind in ("", "cpu") else "gpu"
  return config_lib.compute_dtype(config.model, backend)


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
  held = _trained_bytes(config, c, kind, workdir)
  for model in sizes.frozen_models(config, workdir, "trainer"):
    name = f"{model.name} x {model.copies}" if model.copies > 1 else model.name
    held[name] = sizes.frozen_bytes(model, c, config.sharding, config.mesh)
  gradients = held.pop("gradients")
  rows = config.evaluate.batch_prompts * config.evaluate.num_completions
  # It runs on the devices of process 0, on a copy of the params if there are
  # other processes.
  mesh, num_processes = config.mesh, config.trainer.num_processes
  if num_processes > 1:
    num_devices = math.prod(mesh.values()) // num_processes
    mesh = meshes.cut_rows(mesh, num_devices)
  own_rows = math.ceil(rows / (mesh["data"] * mesh["fsdp"]))
  step = {"gradients": gradients}
  dtype = _compute_dtype(config, kind)
  count = _unstacked_size(config, c, mesh)
  whole = sizes.device_size(sizes.model_leaves(c), config.sharding, mesh)
  cache = {
      "params that an evaluation decodes with": count * sizes.BYTES[dtype],
      f"KV cache of an evaluation, {rows} rows": (
          _num_tokens(config, kind, own_rows, config.evaluate.num_completions)
          * cache_bytes(c, dtype, kind)
      ),
  }
  if num_processes > 1:
    name = "params, gathered for an evaluation"
    narrow = min(dtype, c.param_dtype, key=sizes.BYTES.get)
    cache[name] = whole * sizes.BYTES[narrow]
  # As `training/evaluations.py` decides it.
  alone = math.prod(config.mesh.values()) == 1 and not config.search.lockstep
  if config.evaluate.beside and config.evaluate.every_steps and alone:
    copy = {"params, copied for an evaluation": held["params"]}
    return held | step | cache | copy
  # Steps and evaluations take turns: the larger counts.
  return held | max(step, cache, key=lambda part: sum(part.values()))


def _published_dtype(config: ml_collections.ConfigDict, kind: str) -> str:
  """Returns the dtype of published matrices."""
  if config.publish.dtype != "auto":
    return config.publish.dtype or "float32"
  return "float32" if config.lora.rank else _compute_dtype(config, kind)


def _trained_bytes(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kind: str,
    workdir: str | None,
) -> dict[str, int]:
  """Returns a device's bytes of params, and of what has their shape."""
  size = lambda of: sizes.device_size(of, config.sharding, config.mesh)
  leaves = sizes.model_leaves(c)
  wide = sizes.BYTES["float32"]  # Of what is trained, and its moments.
  params = size(leaves) * sizes.BYTES[c.param_dtype]
  if config.lora.rank:
    rank, targets = config.lora.rank, config.lora.targets
    count = size(sizes.adapter_leaves(leaves, rank=rank, targets=targets))
    out = {
        "params": params,
        "params with adapters merged, to evaluate": params,
        "adapters": count * wide,
    }
  else:
    count, out = size(leaves), {"params": params}
    if config.reference.role == "trainer":
      out["reference"] = params
  published = _published_dtype(config, kind)
  out |= {
      "gradients": count * wide,
      "optimizer (Adam's two moments)": count * 2 * wide,
      "copy that is published": count * sizes.BYTES[published],
  }
  if losses_build.find(config.loss.name).has_values:
    shape = sizes.value_shape(config, c, workdir)
    name = "value model with gradients and moments"
    out[name] = size(sizes.model_leaves(shape)) * 4 * wide
  return out


def searcher_memory(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    kind: str = "",
    workdir: str | None = None,
) -> dict[str, int]:
  """Returns the bytes of a searcher's device; arguments as `trainer_memory`."""
  mesh = {"sequence": 1, **config.search.mesh}
  dtype = _compute_dtype(config, kind)
  count = _unstacked_size(config, c, mesh)
  rows = math.ceil(config.sampling.num_rows / (mesh["data"] * mesh["fsdp"]))
  heads = 1 if c.num_kv_heads % mesh["tensor"] else mesh["tensor"]
  token = cache_bytes(c, dtype, kind) // heads
  shared = sharing.most_rows(
      config.sampling.num_rows,
      config.search.prompts_per_round,
      config.search.samples_per_prompt,
  )
  held = {
      "params, twice while a version comes in": 2 * count * sizes.BYTES[dtype]
  }
  if config.lora.rank:
    held["base, and its copy with adapters merged as a version comes in"] = (
        2
        * sizes.device_size(sizes.model_leaves(c), config.sharding, mesh)
        * sizes.BYTES[c.param_dtype]
    )
  elif config.reference.role == "searcher":
    held["reference"] = (
        sizes.device_size(sizes.model_leaves(c), config.sharding, mesh)
        * sizes.BYTES[c.param_dtype]
    )
  num_tokens = _num_tokens(config, kind, rows, shared)
  held[f"KV cache of {rows} rows"] = token * num_tokens
  for model in sizes.frozen_models(config, workdir, "searcher"):
    held[model.name] = sizes.frozen_bytes(model, c, config.sharding, mesh)
  return held


def _unstacked_size(
    config: ml_collections.ConfigDict,
    c: config_lib.ModelConfig,
    mesh: Mapping[str, int],
) -> int:
  """Returns the params that a sampler holds on a device, its layers apart."""
  rules = {**config.sharding, "layers": ""}
  return sizes.device_size(sizes.model_leaves(c), rules, mesh)


def _num_tokens(
    config: ml_collections.ConfigDict, kind: str, rows: int, shared: int
) -> int:
  """Returns the tokens in the KV cache of rows.

  At most `shared` of them share a prompt.
  """
  prompts = rows // sharing.rows_per_prompt(shared, rows, kind or "cpu")
  sampling = config.sampling
  return (
      prompts * sampling.max_prompt_tokens
      + rows * sampling.max_completion_tokens
  )


def memory_rows(held: Mapping[str, int], kind: str) -> sections.TableRows:
  """Returns what takes a device's memory, the sum, and whether that fits."""
  size, total = sections.format_bytes, sum(held.values())
  rows = [(name, size(n)) for name, n in held.items()]
  rows.append(("sum a device", size(total)))
  if kind:
    have = DEVICE_GIB[kind] * 2**30
    verdict = "NO" if total > have else "yes"
    rows.append(
        (
            "fits",
            f"{verdict}: {size(total)} of {size(have)} of {kind}"
            f" ({total / have:.0%})",
        )
    )
  return rows


# Batch and staleness


def _micro_batches(train: ml_collections.ConfigDict) -> str:
  """Returns what one forward-backward has; see `training/packing.py`."""
  size, K = train.micro_batch_prompts, train.completions_per_prompt
  own = train.micro_batch_completions or K
  if own < K or train.prompts_per_batch % size:
    rows = f"{size} prompts with {own} completions each"
    return f"groups are cut: at most {rows}, forward once more"
  return f"{train.prompts_per_batch // size} of {size} prompts"


def batch_rows(config: ml_collections.ConfigDict) -> sections.TableRows:
  """Returns sizes of batches, and the staleness bound."""
  train, search = config.train, config.search
  shards, _ = _batch_shards(config)
  tokens = lambda n: (
      f"{n:,} completions, at most"
      f" {n * config.sampling.max_completion_tokens:,} tokens"
  )
  return [
      ("micro-batches a step", _micro_batches(train)),
      ("shards of a micro-batch", str(shards)),
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
    return f"{config.search.lead_steps} steps (lockstep)"
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


def balance_rows(
    config: ml_collections.ConfigDict, workdir: str
) -> sections.TableRows:
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
  if config.search.lockstep and not config.search.lead_steps:
    turns = "search.lockstep=True, search.lead_steps=0"
  elif config.rounds.mini_batches and not config.rounds.lag_rounds:
    turns = "rounds.lag_rounds=0"
  step_s = parallel_s + train_s if turns else longest_s
  stale = f"{expected_staleness(config, sample_s, train_s):.2g} steps"
  if config.search.lockstep:
    stale = staleness_bound(config)
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


def parse(operands: Sequence[str]) -> tuple[list[str], str]:
  """Returns the trainer's and the searchers' devices, and a run.

  Args:
    operands: at most two kinds or two slices, the second of the searchers;
      `--calibrate=RUN`.

  Returns:
    [] or the devices, and the run, "" where none is.

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
  slices = sum(":" in kind for kind in kinds)
  for kind in kinds:
    if slices != len(kinds) and kind not in DEVICE_GIB:
      raise ValueError(
          f"device {kind!r}: allowed {', '.join(sorted(DEVICE_GIB))}, or only"
          " TPU slices such as v5e:4x4"
      )
  return kinds, runs[-1] if runs else ""


def plan(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> Iterator[tuple[str, sections.TableRows]]:
  """Yields the plan as titled rows.

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
  c = sizes.model_of(config)
  leaves = sizes.model_leaves(c)
  num_params = sum(math.prod(shape) for shape, _ in leaves.values())
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
  yield "devices", devices
  yield "model", [
      ("family", f"{c.family}, {c.num_layers} layers, width {c.width}"),
      ("vocabulary", f"{c.vocab_size:,}"),
      ("parameters", f"{num_params:,}, {c.param_dtype}"),
      ("computes in", "{}: {}".format(*sizes.compute_dtype(config))),
  ]
  if math.prod(config.mesh.values()) > 1:
    yield "sharding", sizes.sharding_rows(config, c)
  yield "batch", batch_rows(config)
  if kinds and ":" in kinds[0]:
    # It loads JAX, which `plan` otherwise does without.
    from tba_jax.programs import compile as compiler

    yield from compiler.sections_of(config, workdir, kinds)
  else:
    for role, memory, kind in (
        ("trainer", trainer_memory, (kinds or [""])[0]),
        ("searcher", searcher_memory, (kinds or [""])[-1]),
    ):
      held = memory(config, c, kind, workdir)
      title = f"memory of a {role} device, without activations"
      yield title, memory_rows(held, kind)
  if measured:
    yield "balance", balance_rows(config, measured)


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Prints the plan of a config.

  Returns:
    0; 2 where the config cannot be used, does not divide or does not fit.
  """
  return sections.show(plan(config, workdir, operands))

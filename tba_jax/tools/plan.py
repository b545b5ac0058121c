# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `plan` program: what a config needs, without touching a device.

    --program=plan --config=FILE [HARDWARE | DEVICE [SEARCHER_DEVICE]]
        [--calibrate=RUN] [--meshes]

It reads the config and the config files of models. Memory is what shapes give
exactly (`memory_model`), and of activations what gradients keep at least; the
compiler's workspace is not counted. HARDWARE is a machine or slice of
`config/hardware.py`, such as "8xh100" or "v5e-16": the plan proposes meshes for
it, and goes on with them. DEVICE is a kind, such as "h100", or "cpu",
this machine, which is the default if it has no accelerator; or a topology, such
as "v5e:4x4" or "h100:8": then the compiler computes the memory (`compile`).
`--calibrate` adds the balance of searchers and trainer at the speeds that RUN
measured, and the staleness and learning rate to expect. `--meshes` compiles
every mesh of the topologies and names the best (`mesh_search`).
"""

from collections.abc import Iterator, Sequence
import math

import jax
import ml_collections

from tba_jax import collect
from tba_jax import searcher as searcher_lib
from tba_jax import types
from tba_jax.config import hardware
from tba_jax.config import load
from tba_jax.learning import packing
from tba_jax.mesh import sharding
from tba_jax.models import config as config_lib
from tba_jax.models import head_layout
from tba_jax.models.net import transformer
from tba_jax.programs import defaults
from tba_jax.programs import model_sizes
from tba_jax.programs import titled_rows
from tba_jax.report import run_reader
from tba_jax.report import timeline
from tba_jax.run import metrics
from tba_jax.run import text
from tba_jax.sampling import samplers
from tba_jax.system import accelerators
from tba_jax.tools import compile as compiler
from tba_jax.tools import memory_model
from tba_jax.tools import mesh_search
from tba_jax.tools import targets

_CPU = accelerators.CPU
DEVICE_GIB = accelerators.DEVICE_GIB
# Measured bytes of a step in `replay/decisions.jsonl`, and of a block's header,
# which has 40 bytes for each of tens of prompts.
_RECORD_BYTES, HEADER_BYTES = 400, 2000
# Mean staleness, in steps, below which a run is no evidence about stale data.
_ON_POLICY = 0.1
# Minimum speed-up that justifies asynchrony, or another sampler.
_WORTHWHILE = 1.15
# Assumed mean length of completions, as a share of the limit.
_MEAN_LENGTH = 0.25


# Memory of a device


def _memory_rows(parts: memory_model.Parts, kind: str) -> titled_rows.TableRows:
  """Returns the parts of a device's memory, their sum, and whether it fits.

  The last is omitted without a kind, and on a CPU, whose devices share memory.
  """
  size, total = titled_rows.format_bytes, sum(parts.values())
  rows = [(name, size(n)) for name, n in parts.items()]
  rows.append(("sum a device", size(total)))
  if kind in DEVICE_GIB:
    share = accelerators.GPU_MEMORY if _platform(kind) == "gpu" else 1
    limit = int(share * DEVICE_GIB[kind] * 2**30)
    rows += titled_rows.fits_rows(total, limit, kind)
  return rows


def memory_sections(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    kinds: Sequence[str],
    elsewhere: bool = False,
) -> Iterator[tuple[str, titled_rows.TableRows]]:
  """Yields the memory of a trainer's and a searcher's device, as titled rows.

  Args:
    workdir: run directory, which may have the reward model.
    kinds: devices of the trainer and the searchers, keys of
      `DEVICE_GIB` or _CPU; [] if unknown.
    elsewhere: whether the run is for other machines.
  """
  on_cpu: dict[str, memory_model.RoleMemory] = {}
  for role, make, mesh_sizes, place in (
      ("trainer", memory_model.trainer, config.mesh, 0),
      (
          "searcher",
          memory_model.searcher,
          memory_model.searcher_sizes(config),
          -1,
      ),
  ):
    kind = kinds[place] if kinds else ""
    platform = _platform(kind)
    role_config = model_sizes.on_cpu(config) if platform == _CPU else config
    mesh = sharding.abstract_mesh(mesh_sizes, platform)
    memory = make(role_config, mesh, workdir)
    if kind == _CPU:
      on_cpu[role] = memory
    yield f"memory of a {role} device", _memory_rows(memory.peak, kind)
  if on_cpu and not elsewhere:
    config = model_sizes.on_cpu(config)
    yield "memory of this machine", memory_model.machine_rows(config, **on_cpu)


def _platform(kind: str) -> str:
  """Returns JAX's platform for a kind of device, or for this machine's."""
  if not kind:
    return accelerators.find().kind
  if kind == _CPU:
    return _CPU
  return "tpu" if kind.startswith("v") else "gpu"


# Batch and staleness


def _micro_batches(config: ml_collections.ConfigDict) -> str:
  """Describes the data of one forward-backward; see `learning/packing.py`."""
  how = packing.make(config)
  rows, most, length = how.sizes()[0]
  cut = "; groups are cut, forward once more" if how.cuts_groups else ""
  return f"{rows} of {length:,} tokens, at most {most} times a step{cut}"


def batch_rows(config: ml_collections.ConfigDict) -> titled_rows.TableRows:
  """Returns batch sizes and the staleness bound."""
  search = config.search
  mesh = sharding.abstract_mesh(config.mesh, _CPU)
  shards = sharding.num_batch_shards(mesh)
  tokens = lambda n: (
      f"{n:,} completions, at most"
      f" {n * config.sampling.max_completion_tokens:,} tokens"
  )
  return [
      ("rows of a forward-backward", _micro_batches(config)),
      ("shards of the rows", str(shards)),
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
  """Returns the maximum staleness of fresh data, in words."""
  rounds = config.rounds
  if rounds.mini_batches:
    steps = rounds.mini_batches * rounds.passes
    most = steps * (rounds.lag_rounds + 1) - 1
    return f"{most} steps: rounds of {steps} steps, lag {rounds.lag_rounds}"
  if config.search.lockstep:
    return f"{config.search.lead_steps} steps (lockstep)"
  lead, period = config.search.lead_steps, config.publish.every_steps
  if not config.search.prompts_per_step:
    if not config.search.wait_for_fresh:
      return "no bound: searchers run free"
    window = config.replay.recent_window_steps
    words = (
        f"{period + window - 1} steps: publish period {period}, which ends"
        f" with a barrier + {window - 1} of replay.recent_window_steps"
    )
  else:
    words = f"{lead + period} steps: lead {lead} + publish period {period}"
  if config.replay.recent_fraction < 1:
    words += "; replayed data is older"
  return words


def num_prompts(config: ml_collections.ConfigDict) -> float:
  """Returns the prompts sampled per step; if unbounded, those trained on."""
  if config.rounds.mini_batches:
    return config.train.prompts_per_batch / config.rounds.passes
  if not config.search.prompts_per_step:
    return _num_trained(config) / config.search.samples_per_prompt
  return config.search.prompts_per_step


def _num_trained(config: ml_collections.ConfigDict) -> int:
  return config.train.prompts_per_batch * config.train.completions_per_prompt


def disk_rows(config: ml_collections.ConfigDict) -> titled_rows.TableRows:
  """Returns the maximum bytes of the journal and the record of steps.

  A segment is dropped once no checkpoint needs it to resume. Completions are
  counted uncompressed, with the maximum length.
  """
  c, search, sampling = config.checkpoint, config.search, config.sampling
  axes = {
      "S": search.samples_per_prompt,
      "P": sampling.max_prompt_tokens,
      "T": sampling.max_completion_tokens,
  }
  columns = collect.optional_columns(config, model_sizes.model_of(config))
  per_prompt = HEADER_BYTES / search.prompts_per_round
  for name, column in types.COLUMNS.items():
    if column.axes and (not column.when or name in columns):
      lengths = [axes[axis] for axis in column.axes if axis in axes]
      size = math.prod((*lengths, *columns.get(name, ())))
      per_prompt += size * column.dtype.itemsize
  per_step = num_prompts(config) * per_prompt
  kept_steps = config.train.num_steps
  why = "all of the run"
  if not c.keep_journal:
    # The oldest checkpoint is dropped once the next one is complete.
    kept_steps = min((c.keep + 1) * c.every_steps, kept_steps)
    why = f"since the oldest of {c.keep} checkpoints"
  segment = config.replay.max_segment_mb * 1e6 * (not c.keep_journal)
  size = titled_rows.format_bytes
  return [
      (
          "journal of a step",
          size(per_step)
          + "; more if searchers run free"
          * (not search.prompts_per_step and not config.rounds.mini_batches),
      ),
      (
          f"journal, at most ({why})",
          size(per_step * kept_steps + segment),
      ),
      (
          "record for --program=rerun",
          size(_RECORD_BYTES * config.train.num_steps),
      ),
  ]


# Balance of searchers and trainer


def read_measured(workdir: str) -> tuple[float, float]:
  """Returns the busy seconds per completion in a searcher and in the trainer.

  Raises:
    ValueError: the run does not exist, or has no measurements yet.
  """
  run = run_reader.read_run(workdir)
  generate_s = run.summary.get("generate_busy_s")
  train_s = run.summary.get("train_busy_s")
  if not (text.is_number(generate_s) and text.is_number(train_s)):
    generate_s, train_s = (_busy_s(run, r) for r in ("searcher", "trainer"))
  steps, completions = run_reader.column(run.records, "total/completions")
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


def _busy_s(run: run_reader.RunData, role: str, lane: str = "") -> float:
  """Returns the mean busy seconds of a role's processes, from their spans."""
  rows = [
      row["seconds"]
      for row in timeline.where_time_went(run)
      if row["role"] == role and row["lane"] == lane
  ]
  busy = sum(
      s
      for seconds in rows
      for kind, s in seconds.items()
      if not metrics.is_wait(kind) and kind != "compile"
  )
  return busy / max(len(rows), 1)


def _rounds_in_flight(workdir: str) -> float:
  """Returns the mean number of a searcher's rounds in flight, 1 to 2.

  While one round is rewarded the next is decoded, and waits if rewards take
  longer.
  """
  run = run_reader.read_run(workdir)
  sample_s, judge_s = (
      _busy_s(run, "searcher", lane) for lane in ("", searcher_lib.JUDGE_LANE)
  )
  return 1 + min(1.0, judge_s / sample_s) if sample_s else 1.0


def expected_staleness(
    config: ml_collections.ConfigDict,
    sample_s: float,
    train_s: float,
    rounds_in_flight: float = 1.0,
) -> float:
  """Returns the mean staleness of fresh data in steps.

  With n searchers, w rounds of q groups in flight at each, steps of F groups, a
  lead of l steps, s and t seconds per step of one searcher and of the trainer,
  and a version every p steps,

      min(n q w / F, l + 1) + (p - 1) / 2      sampling is slower, s / n > t
      l + 1/2 + (p - 1) / 2                    training is slower
      q w s / (F t) + 1 + (p - 1) / 2          free running: a step takes what
                                               has arrived

  The first line is Little's law, groups in flight divided by groups per step,
  so it holds for any distribution of lengths; longer completions increase s. If
  training is slower, a step's groups are sampled when the step l before it
  begins, with that step's params, or with the previous ones if these have not
  arrived: a staleness of l to l + 1. The last line counts the trainer's steps
  from a round's start to the first step after its end, averaged over the phase
  between the two.

  Args:
    sample_s: seconds that one searcher needs for a step's completions.
    train_s: seconds of a train step.
    rounds_in_flight: w, from 1 if rewards take no time to 2 if they take as
      long as decoding.
  """
  search, rounds = config.search, config.rounds
  groups = num_prompts(config)
  of_one = search.prompts_per_round * rounds_in_flight / groups
  under_way = search.num_searchers * of_one
  is_training_slower = sample_s / search.num_searchers < train_s
  between_versions = (config.publish.every_steps - 1) / 2
  if rounds.mini_batches:
    limit = config.train.prompts_per_batch * rounds.mini_batches
    limit *= (rounds.lag_rounds + 1) / groups
  elif search.prompts_per_step:
    if is_training_slower:
      return search.lead_steps + 0.5 + between_versions
    limit = search.lead_steps + 1
  else:
    return of_one * sample_s / train_s + 1 + between_versions
  steps = limit if is_training_slower else min(under_way, limit)
  return steps + between_versions


def _balanced(sample_s: float, train_s: float) -> int:
  """Returns the number of searchers that keep a trainer busy."""
  # Rounds 3.0000000001 to 3.
  return max(1, math.ceil(sample_s / train_s - 1e-9))


def staleness_rows(
    config: ml_collections.ConfigDict, workdir: str, expected: float
) -> titled_rows.TableRows:
  """Returns measured and predicted staleness, and a safe learning rate.

  Stale gradients are biased by O(S η), with staleness S and learning rate η,
  and a run drifts by O(T η) in its T steps; a rate is stable while both are
  below constants of the task (arXiv:2607.01083, for GRPO):

      η < min(a / S, b / T)

  No theory gives these constants. A run that was stable at S', T' and η' shows
  that a > S' η' and b > T' η', so this returns min(S' / S, T' / T) η': a rate
  that is safe if that run was stable, but not the largest safe rate. S is the
  maximum lag in the paper, but here the mean, for both runs.

  Args:
    workdir: directory of the measured run, assumed to be stable.
    expected: mean staleness of the planned run, in steps.
  """
  run = run_reader.read_run(workdir)
  steps, lags = run_reader.column(run.records, "replay/staleness_steps")
  if not len(steps):
    return []
  lag = float(lags[len(lags) // 4 :].mean())
  out = [("measured staleness, data drawn again included", f"{lag:.2g} steps")]
  rate = run.config.get("config", {}).get("optimizer", {}).get("learning_rate")
  if not (text.is_number(rate) and expected):
    return out
  if lag < _ON_POLICY:
    words = "not known: that run was on-policy"
    return [*out, ("learning rate that it shows to be safe", words)]
  if config.replay.recent_fraction < 1:
    words = "not known: the staleness of data drawn again is not expected"
    return [*out, ("learning rate that it shows to be safe", words)]
  by_lag = rate * lag / expected
  by_steps = rate * int(steps[-1] + 1) / config.train.num_steps
  words = (
      f"{by_lag:.2g} by staleness, {by_steps:.2g} by the number of steps; the"
      f" config has {config.optimizer.learning_rate:.2g}, that run had"
      f" {rate:.2g}, if it was stable"
  )
  return [*out, ("learning rate that it shows to be safe", words)]


def balance_rows(
    config: ml_collections.ConfigDict, workdir: str
) -> titled_rows.TableRows:
  """Returns the balance of searchers and trainer at the speeds of a run.

  Times per completion come from `workdir`; batches and searchers from `config`.

  Raises:
    ValueError: `workdir` has no measurements.
  """
  sample_s, train_s = read_measured(workdir)
  sample_s *= num_prompts(config) * config.search.samples_per_prompt
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
  expected = expected_staleness(
      config, sample_s, train_s, _rounds_in_flight(workdir)
  )
  stale = f"{expected:.2g} steps"
  if config.search.lockstep:
    expected, stale = config.search.lead_steps, staleness_bound(config)
  elif config.replay.recent_fraction < 1:
    stale += "; replayed data is older"
  balanced = _balanced(sample_s, train_s)
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
      *staleness_rows(config, workdir, expected),
      ("asynchrony", verdict),
  ]


def mesh_sections(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    topologies: Sequence[str],
) -> Iterator[tuple[str, titled_rows.TableRows]]:
  """Yields the meshes of both roles, and the balance of the best ones.

  Args:
    config: settings, whose meshes are ignored.
    workdir: run directory, which may have the reward model.
  """
  chosen = []
  for role, key, attempt, name in (
      ("trainer", "mesh", mesh_search.try_trainer, topologies[0]),
      ("a searcher", "search.mesh", mesh_search.try_searcher, topologies[-1]),
  ):
    tried = [*attempt(config, targets.devices(name), workdir)]
    yield f"meshes of {role} on {name}", mesh_search.rows(key, tried)
    chosen.append(mesh_search.best(tried))
  if not all(chosen):
    return
  train_s, sample_s = (candidate.seconds for candidate in chosen)
  balanced = _balanced(sample_s, train_s)
  balanced_config = config.copy_and_resolve_references()
  balanced_config.search.num_searchers = balanced
  stale = expected_staleness(balanced_config, sample_s, train_s)
  yield "balance at peak rates, completions of the longest length", [
      ("training one step, at least", f"{train_s:.3g} s"),
      ("sampling for one step, one searcher, at least",
       f"{sample_s:.3g} s"),
      ("searchers that balance one trainer",
       f"{balanced:,}; the config has {config.search.num_searchers:,}"),
      (f"expected staleness of fresh data with {balanced:,}",
       f"{stale:.2g} steps"),
  ]  # fmt: skip


# Meshes for named hardware


def _proposal(
    config: ml_collections.ConfigDict, name: str
) -> tuple[str, titled_rows.TableRows]:
  """Sets the meshes for hardware in `config/hardware.py`; returns them.

  Raises:
    ValueError: the run does not fit; the message names hardware that it fits.
  """
  flags = lambda mesh: " ".join(
      f"--config.{key}={value}"
      for key, value in proposed.items()
      if (key.startswith("search.mesh")) == mesh
  )
  machine = hardware.HARDWARE[name]
  proposed = hardware.propose_or_name(config, name)
  for key, value in proposed.items():
    config.update_from_flattened_dict({key: value})
  size = math.prod(v for k, v in proposed.items() if k.startswith("mesh."))
  of_searcher = math.prod(config.search.mesh.values())
  count = config.search.num_searchers
  where = f"{count} of {of_searcher} device{'s' * (of_searcher > 1)} each"
  if machine.hosts:
    where += ", on hosts of their own"
  return f"proposed for {name}", [
      (
          "trainer",
          f"{size} of {machine.devices} devices, {machine.gib} GiB each",
      ),
      ("searchers", where),
      ("settings of the trainer", flags(False)),
      ("settings of a searcher", flags(True)),
      *sampler_rows(config, name),
  ]


def sampler_rows(
    config: ml_collections.ConfigDict, name: str
) -> titled_rows.TableRows:
  """Returns a row that proposes vLLM if it holds many more completions at once.

  The cache of this package reserves the longest completion's tokens for each
  slot, vLLM's only those that exist. A decode step of n slots reads all weights
  and the n caches, so n / (weights + n caches) is proportional to tokens/s.
  This counts neither launches of kernels nor arithmetic.

  Args:
    config: settings with the meshes for the hardware.
    name: key of `hardware.HARDWARE`.
  """
  machine = defaults.hardware_machine(name)
  served = config.copy_and_resolve_references()
  served.search.sampler = "vllm"
  settings = load.flatten(config)
  allows = samplers.SAMPLERS["vllm"].allows.items()
  if (
      _platform(machine.hardware.kind) != "gpu"
      or machine.hardware.devices == 1
      or not samplers.SAMPLERS[config.search.sampler].is_here
      or config.train.router_replay
      or any(settings[key] not in values for key, values in allows
             if not key.startswith("search.mesh"))
  ):  # fmt: skip
    return []
  try:
    hardware.propose(served, machine.hardware)
  except ValueError:
    return []  # Its searchers do not fit.
  shape = model_sizes.model_of(config)
  model = defaults.ModelFacts(hardware.start(config), shape, False, False)
  mean = config.sampling.max_completion_tokens * _MEAN_LENGTH
  tokens = config.sampling.max_prompt_tokens + mean
  cache = defaults.cache_bytes(config, model, machine, tokens)
  weights = hardware.bytes_a_param(served, machine.hardware)["server"]
  weights *= model.billions * 1e9
  slots, _ = defaults.num_slots(config, model, machine)
  served_slots = min(
      int(defaults.room_for_cache(served, model, machine) / cache),
      defaults.completions_per_round(config),
  )
  rate = lambda n: n / (weights + n * cache)
  gain = rate(served_slots) / rate(slots)
  if gain < _WORTHWHILE:
    return []
  return [
      (
          "proposed sampler",
          "config.search.sampler=vllm, a server with the GPUs of each searcher:"
          f" if completions average {mean:,.0f} tokens, {_MEAN_LENGTH:.0%} of"
          f" the limit, its paged cache holds {served_slots} at once, this"
          f" package's {slots}: {gain:.1f} times the tokens/s by bytes read",
      )
  ]


# The program


def parse(operands: Sequence[str]) -> tuple[list[str], str, bool]:
  """Returns the devices of trainer and searchers, a run, and `elsewhere`.

  Args:
    operands: kinds or slices, at most two, the second for the searchers;
      `--calibrate=RUN`; `--elsewhere`.

  Returns:
    The devices or []; the run or ""; whether the plan is for other machines.

  Raises:
    ValueError: there are too many operands, or a kind is not in the table.
  """
  flag = "--calibrate="
  runs = [o.removeprefix(flag) for o in operands if o.startswith(flag)]
  kinds = [o.lower() for o in operands if not o.startswith("--")]
  if kinds and kinds[0] in hardware.HARDWARE and len(kinds) == 1:
    kinds = [hardware.HARDWARE[kinds[0]].kind]
  if len(kinds) > 2:
    raise ValueError(
        f"operands {' '.join(kinds)}: must be one kind of device, or the"
        " trainer's and a searcher's"
    )
  slices = sum(":" in kind for kind in kinds)
  for kind in kinds:
    if slices != len(kinds) and kind not in (*DEVICE_GIB, _CPU):
      raise ValueError(
          f"device {kind!r}: must be one of"
          f" {', '.join(sorted((*DEVICE_GIB, _CPU)))},"
          " or only topologies such as v5e:4x4 and h100:8, or one of the"
          f" hardware {', '.join(hardware.HARDWARE)}"
      )
  return kinds, runs[-1] if runs else "", "--elsewhere" in operands


def _computes_in(
    config: ml_collections.ConfigDict, kinds: Sequence[str], elsewhere: bool
) -> str:
  """Returns the activation dtype on the plan's devices, and why."""
  device = ", ".join(dict.fromkeys(kinds))
  device = device or ("the host's" if elsewhere else "")
  dtype, why = model_sizes.compute_dtype(config, device)
  if kinds and dtype == "auto":
    dtype = config_lib.compute_dtype(config.model, kinds[0])
  return f"{dtype}: {why}"


def plan(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> Iterator[tuple[str, titled_rows.TableRows]]:
  """Yields the plan as titled rows.

  Args:
    workdir: run directory, which may hold the reward model.
    operands: command-line operands, see `parse`.

  Raises:
    ValueError: a setting, operand, file or folder cannot be used.
  """
  # Shapes need no accelerator, which other processes may be using.
  jax.config.update("jax_platforms", _CPU)
  kinds, measured, elsewhere = parse(operands)
  names = [o for o in operands if o in hardware.HARDWARE]
  if names:
    yield _proposal(config := config.copy_and_resolve_references(), names[0])
  count = lambda mesh: (
      f"{math.prod(mesh.values())}:"
      f" {' x '.join(f'{axis} {n}' for axis, n in mesh.items())}"
  )
  c = model_sizes.model_of(config)
  mesh = sharding.abstract_mesh(config.mesh, _CPU)
  model = transformer.make_model(c)
  params = sharding.abstract_params(model, mesh)
  num_params = sum(x.size for x in jax.tree.leaves(params))
  devices = [
      ("trainer", count({a: config.mesh[a] for a in sharding.MESH_AXES})),
      (
          f"each of {config.search.num_searchers} searchers",
          count(config.search.mesh),
      ),
  ]
  for role, sizes in (
      ("trainer", config.mesh),
      ("searcher", config.search.mesh),
  ):
    words = head_layout.describe(c, sizes.tensor, sizes.get("sequence", 1))
    devices += [(f"attention heads of a {role}", words)] if words else []
  one, why = accelerators.one_process(config)
  devices.append(
      ("processes of `train`",
       f"{'one for trainer and searchers' if one else 'one each'}: {why}")
  )  # fmt: skip
  here = accelerators.find()
  if not (kinds or elsewhere) and here.kind == _CPU:
    kinds = [_CPU]
  if here.kind != _CPU:
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
      (
          "computes in",
          _computes_in(config, kinds, elsewhere),
      ),
  ]
  if math.prod(config.mesh.values()) > 1:
    yield "sharding", titled_rows.sharding_rows(params)
  yield "batch", batch_rows(config)
  yield "disk of the run directory", disk_rows(config)
  if "--meshes" in operands:
    if not kinds or ":" not in kinds[0]:
      raise ValueError(
          "--meshes: needs topologies to compile for, such as v5e:4x4 v5e:2x2"
      )
    yield from mesh_sections(config, workdir, kinds)
  elif kinds and ":" in kinds[0]:
    yield from compiler.sections_of(config, workdir, kinds)
  else:
    yield from memory_sections(config, workdir, kinds, elsewhere)
  if measured:
    yield "balance", balance_rows(config, measured)


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Prints the plan of a config.

  Returns:
    0; 2 if the config cannot be used, does not divide or does not fit.
  """
  return titled_rows.show(plan(config, workdir, operands))

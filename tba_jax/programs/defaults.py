# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses unset settings according to the model, data and machine.

The defaults in `settings.py` suit a small model that learns countdown. If the
policy starts from a pretrained model, the settings with `auto` that are unset
(`settings.Open`) follow the rules below: each is a pure function of facts that
returns a value and the reason in words. A run saves the values, so that it
keeps them when it is resumed elsewhere. Does not import JAX.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
import sys
from typing import Any

import ml_collections
import numpy as np

from tba_jax.config import hardware
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.environments import episode_pool
from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_names
from tba_jax.policy import prompt_preview
from tba_jax.sampling import samplers
from tba_jax.system import accelerators
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.tasks import task_table

# Value, and the reason for it.
Rule = tuple[Any, str]

_ROUND_TOKENS = 16
_QUANTILE = 0.95
# If the longest prompt is at most this many times the quantile, none is
# dropped.
_NEAR = 1.25
# Minimum lengths of completions: for models that think before they answer, for
# other models with a chat template, and for base models.
_THINKING_TOKENS, _CHAT_TOKENS, _BASE_TOKENS = 1024, 256, 128
# Maximum number of prompts whose lengths are read, and of an environment's.
_MOST_READ, _MOST_PLAYED = 512, 8
# Prompts per step and per evaluation on a CPU, which samples a few hundred
# tokens per second from a model with 0.1 B params.
_CPU_PROMPTS, _CPU_EVALUATED = 4, 32
_CPU_SAMPLES = 2
# Evaluations and samples of a run on a CPU, and the fewest steps between them.
_CPU_EVALUATIONS, _CPU_EVERY_STEPS = 40, 5
# Fine-tuning passes over the training prompts.
_SFT_PASSES = 3
# Least GB of a role on a small device.
_LEAST_GB = 0.125
# Share of its memory that a searcher's params leave, if it is there.
_LEAST_ROOM = 0.2
# Share of the memory left by params that a KV cache gets.
_CACHE_SHARE = 0.8
# Settings without a rule that a run with a pretrained model shows.
_SHOWN = ("loss.beta", "train.num_steps", "search.samples_per_prompt")


@dataclasses.dataclass(frozen=True)
class Choice:
  """A value chosen by a rule."""

  key: str
  value: Any
  why: str

  def __str__(self) -> str:
    return f"{self.key} = {self.value!r}: {self.why}"


@dataclasses.dataclass(frozen=True)
class ModelFacts:
  """Facts about the model that the policy starts from.

  name: setting that names it.
  shape: architecture in the model's config.json.
  is_chat: whether the tokenizer has a chat template.
  thinks: whether the chat template marks thoughts before an answer.
  """

  name: str
  shape: config_lib.ModelConfig
  is_chat: bool
  thinks: bool

  @property
  def billions(self) -> float:
    """Number of params in billions."""
    return hf_names.num_params(self.shape) / 1e9


@dataclasses.dataclass(frozen=True)
class DataFacts:
  """Lengths of the task's texts.

  prompt_tokens: lengths of up to `_MOST_READ` prompts; () = unknown.
  answer_tokens: lengths of reference answers; 0 if there is none.
  is_played: whether an environment makes the prompts.
  """

  num_prompts: int
  prompt_tokens: Sequence[int] = ()
  answer_tokens: Sequence[int] = ()
  is_played: bool = False


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices of a run.

  hardware: kind, memory and number of devices, and hosts.
  is_any: whether it stands for hosts that choose each for itself, and thus must
    not depend on what an environment does on one of them.
  """

  hardware: hardware.Hardware
  name: str
  is_any: bool = False

  @property
  def is_cpu(self) -> bool:
    return self.hardware.kind == accelerators.CPU

  def role_bytes(self, *, is_tight: bool = False) -> float:
    """Returns a device's bytes for a role's params, caches and activations."""
    gb = hardware.usable_gb(self.hardware, is_tight=is_tight)
    return max(gb, _LEAST_GB) * 1e9


def hardware_machine(name: str) -> Machine:
  """Returns the machine with a name in `hardware.HARDWARE`."""
  return Machine(hardware.HARDWARE[name], name)


def cluster_machine() -> Machine:
  """Returns the machine that hosts assume if each reads the settings itself."""
  least = hardware.HARDWARE["v5e-16"]
  smallest = dataclasses.replace(least, devices=1, hosts=0)
  name = f"any host, with {least.gib} GiB a device"
  return Machine(smallest, name, is_any=True)


def this_machine() -> Machine:
  """Returns this machine."""
  kind, gib, count, name = accelerators.memory()
  return Machine(hardware.Hardware(kind, gib, count), name)


# Rules


def max_prompt_tokens(model: ModelFacts, data: DataFacts) -> Rule:
  """Returns a length that 95 % of the prompts do not exceed.

  If the longest prompt is only slightly longer, returns its length. Rows with
  longer prompts are dropped and reported. Of an environment only a few prompts
  are known, and longer ones fail, so it gets twice the longest.
  """
  lengths = np.asarray(data.prompt_tokens)
  longest = int(lengths.max())
  most = _quantile(lengths)
  value = _rounded(longest if longest <= _NEAR * most else most)
  why = f"{_QUANTILE:.0%} of the prompts have at most {most} tokens"
  why += f", the longest {longest}"
  if data.is_played:
    value = _rounded(2 * longest)
    why = f"twice the longest of {len(lengths)} first observations"
  limit = model.shape.max_positions * 3 // 4
  if value > limit:
    return limit, f"three quarters of what {model.name} reads; {why}"
  return value, why


def max_completion_tokens(
    model: ModelFacts, data: DataFacts, prompt_tokens: int
) -> Rule:
  """Returns a length for 95 % of the reference answers, with room for more.

  A chat model writes text before it answers, and a thinking model writes much.
  """
  if model.thinks:
    least, why = _THINKING_TOKENS, "the chat template has thoughts"
  elif model.is_chat:
    least, why = _CHAT_TOKENS, "a chat model"
  else:
    least, why = _BASE_TOKENS, "a model without chat template"
  value = least
  if len(data.answer_tokens):
    # The 1 is the stop token.
    most = 1 + _quantile(data.answer_tokens)
    if most > least:
      value = _rounded(most)
      why = f"{_QUANTILE:.0%} of the answers have at most {most} tokens"
  limit = model.shape.max_positions - prompt_tokens
  if value > limit:
    return limit, f"what {model.name} reads behind a prompt"
  return value, why


def learning_rate(model: ModelFacts, lora_rank: int) -> Rule:
  """Returns a learning rate for RL with AdamW, from the model's width.

      1e-6 (4096 / width)^1.64,  ten times that with adapters

  Sources: 1e-6 is the default of TRL's GRPOConfig and of verl's GRPO examples
  with models of 7 B params, of width 3584 to 4096. The exponent fits a line
  from there to 2.5e-5 at width 576: in this package, SmolLM2-135M learned
  instructions at that rate, and collapsed at twice the rate
  (docs/results/tasks.md). TBA's 1e-5 and Asynchronous RLHF's 3e-6 for a model
  of width 2048 lie on and above the line, whereas the exponent of Tinker's
  cookbook, .78, would give 1.7e-6. The factor for LoRA is the cookbook's
  (Schulman et al. 2025, "LoRA Without Regret").
  """
  rate = 1e-6 * (4096 / model.shape.width) ** 1.64 * (10 if lora_rank else 1)
  rate = float(f"{rate:.1e}")
  why = f"for width {model.shape.width}"
  return rate, why + (", ten times with adapters" if lora_rank else "")


def prompts_per_batch(machine: Machine, default: int) -> Rule:
  """Returns the number of prompts per step."""
  if machine.is_cpu:
    return min(_CPU_PROMPTS, default), "a step on a CPU takes minutes with more"
  return default, "the default on accelerators"


def micro_batch(
    config: ml_collections.ConfigDict, model: ModelFacts, machine: Machine
) -> tuple[str, int, int, str]:
  """Returns settings of the micro-batch that fits into memory.

  Returns:
    `train.remat`, `train.micro_batch_prompts`, `train.micro_batch_completions`
    and the reason.
  """
  mesh, train = config.mesh, config.train
  shards = mesh.data * mesh.fsdp
  K, batch = train.completions_per_prompt, train.prompts_per_batch
  for remat in ("dots", "full"):
    rows, why = rows_that_fit(config, model, machine, remat)
    if rows >= K:
      micro = _divisor(batch, shards * (rows // K), shards)
      return remat, micro, 0, why
  return remat, min(shards, batch), max(rows, 1), why


def fine_tuning(
    config: ml_collections.ConfigDict,
    model: ModelFacts,
    data: DataFacts,
    machine: Machine,
) -> Iterator[tuple[str, Rule]]:
  """Yields `sft` settings for a pretrained model, with their rules.

  The rate is ten times `learning_rate`, which is TRL's ratio of SFTConfig
  (2e-5) to GRPOConfig (1e-6), rounded down; the number of passes is TRL's.
  """
  sft, mesh = config.sft, config.mesh
  rate, why = learning_rate(model, config.lora.rank)
  yield "sft.learning_rate", (10 * rate, f"ten times the rate of RL, {why}")
  steps = max(1, -(-_SFT_PASSES * data.num_prompts // sft.batch_size))
  why = f"{_SFT_PASSES} passes over the {data.num_prompts} training prompts"
  yield "sft.num_steps", (steps, why)
  yield "sft.warmup_steps", (steps // 10, "a tenth of the steps")
  shards = mesh.data * mesh.fsdp
  rows, why = rows_that_fit(config, model, machine, config.train.remat)
  most = max(rows, 1) * shards
  yield "sft.micro_batch_size", (_divisor(sft.batch_size, most, shards), why)


def rows_that_fit(
    config: ml_collections.ConfigDict,
    model: ModelFacts,
    machine: Machine,
    remat: str,
) -> tuple[int, str]:
  """Returns how many completions fit a device's forward-backward, and why."""
  mesh = config.mesh
  bytes_per_param = hardware.bytes_a_param(config, machine.hardware)
  params = sum(bytes_per_param[role] for role in ("trainer", "value_model"))
  state = model.billions * 1e9 * params / (mesh.fsdp * mesh.tensor)
  free = max(machine.role_bytes() - state, 0)
  token = activation_bytes(model.shape, remat, _dtype_bytes(config, machine))
  completion = _length(config) * token / (mesh.sequence * mesh.tensor)
  return int(free / completion), (
      f"a completion takes {completion / 2**20:.0f} MiB of activations, and"
      f" {free / 2**30:.1f} GiB are free after the model"
  )


def activation_bytes(
    shape: config_lib.ModelConfig, remat: str, dtype_bytes: int
) -> int:
  """Returns the bytes that a token's forward pass keeps for the gradient.

  For each layer, "dots" keeps the results of matrix products and the input, and
  "full" only the input; both add the intermediate results of a single layer.
  "none" keeps more than "dots", for which it is counted.
  """
  # A gate is as wide as its query.
  gates = family_lib.FAMILIES[shape.family].has_output_gate
  experts = max(shape.experts_per_token, 1)
  layers = []
  for kind, (num_kv_heads, head_dim) in zip(shape.kinds, shape.attended_shapes):
    mixer = ((2 + gates) * shape.num_heads + 2 * num_kv_heads) * head_dim
    if "delta" in kind:  # Channels, gates, and results in float32.
      values = shape.delta_value_heads * shape.delta_value_dim
      mixer = shape.delta_channels + 3 * values
    mlp = 3 * shape.dense_mlp_width
    if "dense_mlp" not in kind:
      mlp = 3 * shape.mlp_width
      if shape.num_experts:  # Each has a result, and scores are in float32.
        mlp = experts * (2 * shape.mlp_width + shape.width)
        mlp += 3 * shape.shared_expert_width + 2 * shape.num_experts
    layers.append(mixer + 4 * shape.width + mlp)
  if shape.layer_input_width:
    layers = [x + shape.layer_input_width + shape.width for x in layers]
  kept = sum(layers)
  if remat == "full":
    kept = shape.num_layers * shape.width + max(layers)
    if shape.num_experts:  # Each token has a copy per expert.
      kept += 2 * experts * shape.width
  # The embeddings of all layers are made before the first, in part in float32.
  return dtype_bytes * (kept + 4 * shape.layer_inputs_width)


def num_slots(
    config: ml_collections.ConfigDict, model: ModelFacts, machine: Machine
) -> Rule:
  """Returns the number of completions that a searcher decodes at once."""
  size = math.prod(config.search.mesh.values())
  wanted_slots = completions_per_round(config)
  cache = cache_bytes(config, model, machine, _length(config))
  fits = max(int(room_for_cache(config, model, machine) / cache), size)
  if not samplers.SAMPLERS[config.search.sampler].is_here:
    fits = wanted_slots  # The server queues what it has no room for.
  if wanted_slots <= fits:
    return _multiple(wanted_slots, size), "all completions of a round"
  why = f"a completion's KV cache takes {cache / 2**20:.0f} MiB"
  unit = math.lcm(size, min(config.search.samples_per_prompt, fits))
  return max(fits // unit, 1) * unit, why


def completions_per_round(config: ml_collections.ConfigDict) -> int:
  """Returns the number of completions that a searcher samples at a time."""
  return config.search.prompts_per_round * config.search.samples_per_prompt


def room_for_cache(
    config: ml_collections.ConfigDict, model: ModelFacts, machine: Machine
) -> float:
  """Returns the bytes that params leave for a searcher's KV cache."""
  bytes_per_param = hardware.bytes_a_param(config, machine.hardware)
  params = bytes_per_param["searcher"] + bytes_per_param["server"]
  params *= model.billions * 1e9
  size = math.prod(config.search.mesh.values())
  usable = machine.role_bytes() * size
  tight = machine.role_bytes(is_tight=True) * size
  least = min(tight - params, _LEAST_ROOM * usable)
  return _CACHE_SHARE * max(usable - params, least)


def cache_bytes(
    config: ml_collections.ConfigDict,
    model: ModelFacts,
    machine: Machine,
    num_tokens: float,
) -> float:
  """Returns the bytes of a completion's KV cache, with its prompt."""
  shape, tensor = model.shape, config.search.mesh.tensor
  cache = shape.cached_numbers * num_tokens * _dtype_bytes(config, machine)
  if shape.cached_heads % tensor:
    cache *= tensor  # Each device has whole latents.
  if shape.has_states:
    states = len(shape.layers_with("delta")) * shape.delta_state
    cache += 4 * states * tensor  # Each device has whole states.
  return cache


def batch_prompts(config: ml_collections.ConfigDict) -> Rule:
  """Returns the number of prompts that an evaluation decodes at once.

  Its program computes all rows, even if fewer prompts are left.
  """
  slots = config.sampling.num_slots
  if not slots:
    slots = completions_per_round(config)
  rows = max(slots // config.evaluate.num_completions, 1)
  # Evaluations during training have fewer prompts.
  most = config.evaluate.num_prompts or config.evaluate.final_prompts
  value = min(rows, most or rows, config.evaluate.batch_prompts)
  return value, "no more completions at once than a searcher decodes"


# Facts


def read_model(config: ml_collections.ConfigDict, start: str) -> ModelFacts:
  """Returns facts about a pretrained model from its folder's small files.

  Raises:
    ValueError: config.json or the tokenizer cannot be read.
  """
  shape = hf_config.read(start, dtype=config.model.param_dtype)
  template = ""
  if prompt_preview.has_tokenizer(
      folder := prompt_preview.tokenizer_folder(config)
  ):
    # Takes seconds to import.
    from tba_jax.models import tokenizer  # pylint: disable=g-import-not-at-top

    template = tokenizer.load(folder, bos=config.tokenizer.bos).chat_template
  return ModelFacts(start, shape, bool(template), "<think>" in (template or ""))


def read_data(
    config: ml_collections.ConfigDict, *, plays: bool = False
) -> DataFacts:
  """Returns the lengths of the task's prompts and answers.

  Args:
    plays: whether to start an environment for the lengths of its prompts.

  Raises:
    ValueError: data or tokenizer cannot be read.
  """
  task = task_table.make_task(config.task)
  split = base.TRAIN if task.num_prompts(base.TRAIN) else base.HELD_OUT
  count = task.num_prompts(split)
  if not count or (task.has_turns and not plays):
    return DataFacts(count)
  tokenizer = prompt_preview.prompt_tokenizer(config, task)
  if task.has_turns:
    lengths = _played_lengths(config, task, tokenizer, split)
    return DataFacts(count, lengths, is_played=True)
  chosen = range(0, count, -(-count // _MOST_READ))
  return DataFacts(
      task.num_prompts(base.TRAIN),
      [len(tokenizer.encode_prompt(task.prompt(split, i))) for i in chosen],
      [
          len(tokenizer.encode(base.reference_text(task, split, i)))
          for i in chosen
      ],
  )


def _played_lengths(
    config: ml_collections.ConfigDict,
    task: base.PromptSet,
    tokenizer: Any,
    split: str,
) -> list[int]:
  """Returns the lengths of an environment's first observations.

  () if the first one fails, which validation will report.
  """
  with processes.importing():  # Takes seconds.
    from tba_jax.environments import turns  # pylint: disable=g-import-not-at-top

  made = turns.Environments(
      task, tokenizer, episode_pool.make(config, "", None), sys.maxsize
  )
  with contextlib.closing(made):
    played = made.prompts(split, [0])
    if not played[0].failure:
      indices = range(1, min(_MOST_PLAYED, task.num_prompts(split)))
      played += made.prompts(split, indices)
  return [len(one.tokens) for one in played if not one.failure]


# All of them


def choose(
    config: ml_collections.ConfigDict,
    machine: Machine | None = None,
    saved: Mapping[str, Any] | None = None,
) -> list[Choice]:
  """Sets the open settings in place; returns the choices.

  Nothing changes if the policy does not start from a pretrained model, or if
  the model cannot be read, which validation will report.

  Args:
    config: result of `load_config`, not yet validated or copied.
    machine: devices of the run; None is this machine.
    saved: settings by key from when the run began, if it has begun.
  """
  left_open = settings.open_keys(config)
  start = hardware.start(config)
  if not left_open or start == "scratch":
    return []
  if saved is not None:
    other = [
        mesh
        for mesh in (hardware.TRAINER_MESH, hardware.SEARCHER_MESH)
        if not {*mesh} <= {*left_open}
    ]
    out = [
        Choice(key, saved[key], "as when the run began")
        for key in left_open
        if key in saved and not any(key in mesh for mesh in other)
    ]
    for choice in out:
      _put(config, choice.key, choice.value)
    return out
  try:
    model = read_model(config, start)
  except (ValueError, OSError):
    return []
  out = []
  for choice in _rules(config, left_open, model, machine or this_machine()):
    _put(config, choice.key, choice.value)
    out.append(choice)
  for key in left_open:  # Mark settings that no rule changed as set.
    *_, section, name = "", *key.split(".")
    section = config[section] if section else config
    section[name] = section[name]
  return out


def _rules(
    config: ml_collections.ConfigDict,
    left_open: Sequence[str],
    model: ModelFacts,
    machine: Machine,
) -> Iterator[Choice]:
  """Yields choices in order; each may depend on the previous ones."""
  take = lambda key, rule: [Choice(key, *rule)] if key in left_open else []
  sampling, train = config.sampling, config.train
  lengths = ("sampling.max_prompt_tokens", "sampling.max_completion_tokens")
  data = DataFacts(0)
  has_sft = config.init == "sft"
  if set(lengths) & set(left_open) or has_sft:
    try:
      plays = lengths[0] in left_open and not machine.is_any
      data = read_data(config, plays=plays)
    except (ValueError, OSError):
      pass  # Validation reports the error.
  if set(lengths) & set(left_open):
    unknown = 1024, "the lengths of prompts are not known beforehand"
    rule = max_prompt_tokens(model, data) if data.prompt_tokens else unknown
    yield from take(lengths[0], rule)
    rule = max_completion_tokens(model, data, sampling.max_prompt_tokens)
    yield from take(lengths[1], rule)
  rate = learning_rate(model, config.lora.rank)
  yield from take("optimizer.learning_rate", rate)
  rate = config.optimizer.learning_rate, "constant"
  yield from take("optimizer.learning_rate_final", rate)
  if "train.prompts_per_batch" in left_open:
    rule = prompts_per_batch(machine, train.prompts_per_batch)
    for key in ("train.prompts_per_batch", "search.prompts_per_step",
                "search.prompts_per_round"):  # fmt: skip
      yield from take(key, rule)
  if machine.is_cpu:
    every = max(train.num_steps // _CPU_EVALUATIONS, _CPU_EVERY_STEPS)
    for key, value in (
        ("evaluate.num_prompts", _CPU_EVALUATED),
        ("evaluate.final_prompts", 2 * _CPU_EVALUATED),
        ("evaluate.num_completions", _CPU_SAMPLES),
        ("evaluate.every_steps", every),
        ("log.samples_every_steps", every),
    ):
      why = "a CPU takes minutes for a step, and for an evaluation with more"
      yield from take(key, (value, why))
  if {*hardware.MESH_KEYS} <= {*left_open}:
    yield from _mesh(config, machine)
  if "sampling.num_slots" in left_open:
    yield Choice("sampling.num_slots", *num_slots(config, model, machine))
  yield from take("evaluate.batch_prompts", batch_prompts(config))
  if "train.micro_batch_prompts" in left_open:
    remat, prompts, completions, why = micro_batch(config, model, machine)
    yield from take("train.remat", (remat, why))
    yield from take("train.micro_batch_prompts", (prompts, why))
    yield from take("train.micro_batch_completions", (completions, why))
  if has_sft and data.num_prompts:
    is_set_up = "sft.learning_rate" not in left_open
    for key, rule in fine_tuning(config, model, data, machine):
      # A config that sets the rate may rely on the default, the whole batch.
      if not (is_set_up and key == "sft.micro_batch_size"):
        yield from take(key, rule)


def _mesh(
    config: ml_collections.ConfigDict, machine: Machine
) -> Iterator[Choice]:
  if machine.hardware.devices == 1:
    return
  try:
    proposed = hardware.propose(config, machine.hardware)
  except ValueError as error:
    raise load.ConfigError(
        f"config.mesh: {machine.name}: {error}; {hardware.what_fits(config)}."
        " Adapters (config.lora.rank) and smaller models take less"
    ) from error
  values = load.flatten(config)
  for key, value in proposed.items():
    if value != values[key]:
      yield Choice(key, value, f"proposed for {machine.name}")


def lines(
    config: ml_collections.ConfigDict,
    choices: Sequence[Choice],
    machine: Machine | None = None,
) -> list[str]:
  """Returns lines with the choices and reasons, and settings without a rule."""
  if not choices:
    return []
  whys = {choice.why for choice in choices}
  if whys == {"as when the run began"}:
    return [f"settings left open: {len(choices)}, as when the run began"]
  start = hardware.start(config)
  name = (machine or this_machine()).name
  out = [f"settings left open, chosen for {start} on {name}:"]
  by_why: dict[str, list[str]] = {}
  for choice in choices:
    by_why.setdefault(choice.why, []).append(f"{choice.key} = {choice.value!r}")
  out += [f"  {', '.join(chosen)}: {why}" for why, chosen in by_why.items()]
  values = load.flatten(config)
  unchosen = [
      f"{key} = {values[key]!r}"
      for key in _SHOWN
      if values[key] == settings.SETTINGS[key].default
  ]
  if unchosen:
    out.append(
        f"  {', '.join(unchosen)}: the package's defaults, found with small"
        " models; no rule fits them to this one"
    )
  return out


def _put(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
  *sections, name = key.split(".")
  for section in sections:
    config = config[section]
  with config.ignore_type():
    config[name] = value


def _length(config: ml_collections.ConfigDict) -> int:
  sampling = config.sampling
  return sampling.max_prompt_tokens + sampling.max_completion_tokens


def _dtype_bytes(config: ml_collections.ConfigDict, machine: Machine) -> int:
  kind = accelerators.CPU if machine.is_cpu else "gpu"
  dtype = config_lib.compute_dtype(config.model, kind)
  return 4 if dtype == "float32" else 2


def _quantile(lengths: Sequence[int]) -> int:
  return int(np.quantile(lengths, _QUANTILE, method="inverted_cdf"))


def _rounded(number: int) -> int:
  return _multiple(number, _ROUND_TOKENS)


def _multiple(number: int, of: int) -> int:
  return -(-number // of) * of


def _divisor(number: int, most: int, unit: int) -> int:
  """Returns the largest divisor up to `most`; prefers multiples of `unit`."""
  divisors = [n for n in range(1, min(number, most) + 1) if number % n == 0]
  return max(divisors, key=lambda n: (n % unit == 0, n))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What settings must be to each other. No JAX here.

A check reads values by their keys and yields (key, what is allowed) for each
that is wrong. One whose values are missing or wrong in themselves ends with a
KeyError and is left out: its cause has been reported already.
"""

from collections.abc import Callable, Iterator, Mapping
import importlib.metadata
import importlib.util
import itertools
import json
import math
import pathlib
from typing import Any

# What settings of processes and hosts must be to each other. No JAX here.


_Problems = Iterator[tuple[str, str]]


def trainer_problems(c: Mapping[str, Any]) -> _Problems:
  """The mesh is of all devices of all processes of the trainer."""
  axes = ("data", "fsdp", "sequence", "tensor")
  size = math.prod(c[f"mesh.{axis}"] for axis in axes)
  num_processes, cpu_devices = (
      c["trainer.num_processes"],
      c["trainer.cpu_devices"],
  )
  if size % num_processes:
    yield "trainer.num_processes", (
        f"allowed a divisor of {size}, the devices of config.mesh"
    )
  elif cpu_devices and cpu_devices * num_processes != size:
    yield "trainer.cpu_devices", (
        f"allowed 0 or {size // num_processes}: the devices of all processes"
        f" are the {size} of config.mesh"
    )


def searcher_problems(c: Mapping[str, Any]) -> _Problems:
  """A searcher's rows divide over its mesh, which is of its own devices."""
  sizes = {a: c[f"search.mesh.{a}"] for a in ("data", "fsdp", "tensor")}
  rows, devices = sizes["data"] * sizes["fsdp"], math.prod(sizes.values())
  if c["sampling.num_rows"] % rows:
    yield "sampling.num_rows", (
        f"allowed a multiple of {rows}: a searcher's rows are split over"
        " config.search.mesh.data * config.search.mesh.fsdp devices"
    )
  if c["search.cpu_devices"] not in (0, devices):
    yield "search.cpu_devices", (
        f"allowed 0 or {devices}, the devices of config.search.mesh"
    )


def store_problems(c: Mapping[str, Any]) -> _Problems:
  """A client must outlive the probe of its store."""
  if c["store.probe_timeout_s"] >= c["store.deadline_s"]:
    yield "store.probe_timeout_s", (
        f"allowed less than config.store.deadline_s = {c['store.deadline_s']}:"
        " an operation must outlive the change of generation"
    )


def tls_problems(c: Mapping[str, Any]) -> _Problems:
  """All files of TLS or none, with a jaxlib that has it and an address."""
  keys = ("store.tls_cert_file", "store.tls_key_file", "store.tls_ca_file")
  if not any(c[key] for key in keys):
    return
  for key in keys:
    if not pathlib.Path(c[key]).expanduser().is_file():
      yield key, "allowed a file that exists, for all of config.store.tls_*"
  found = importlib.metadata.version("jaxlib")
  if tuple(map(int, found.split(".")[:2])) < (0, 11):
    yield keys[0], f"allowed '' with jaxlib {found}: mutual TLS needs 0.11"
  if not c["store.address"]:
    yield "store.address", "allowed a TCP address with config.store.tls_*"


def publish_problems(c: Mapping[str, Any]) -> _Problems:
  """Params lie where their carrier writes and all hosts read."""
  carrier, directory = c["publish.carrier"], c["publish.directory"]
  if "://" in directory:
    if not directory.startswith("gs://"):
      yield "publish.directory", "allowed a path, or gs://BUCKET/PATH"
    elif carrier not in ("auto", "orbax"):
      yield "publish.directory", (
          "allowed a path of a file system with config.publish.carrier ="
          f" {carrier!r}; gs:// needs 'orbax' or 'auto'"
      )
    elif importlib.util.find_spec("gcsfs") is None:
      yield "publish.directory", (
          "allowed a path without gcsfs; gs:// needs  pip install tba_jax[gcs]"
      )
  elif carrier == "orbax" and not (
      directory or is_one_host(c["store.address"])
  ):
    yield "publish.directory", (
        "allowed a directory that all hosts share, or gs://BUCKET/PATH, with"
        " config.publish.carrier = 'orbax' and a store.address of other hosts"
    )


def is_one_host(address: str) -> bool:
  """Tells whether a store at `address` is reached from its own host alone."""
  host = address.rpartition(":")[0].strip("[]")
  return (
      not host
      or host == "localhost"
      or host.startswith("127.")
      or host == "::1"
  )


# What the settings of low-rank adapters may be, alone and together. No JAX.
#
# As the checks of `config_relations.py`, which calls them.


# Products of a block by family; other families are as "llama".
_TARGETS = {
    "gpt2": ("q", "k", "v", "o", "up", "down"),
    "gpt_neox": ("q", "k", "v", "o", "up", "down"),
    "llama": ("q", "k", "v", "o", "gate", "up", "down"),
}
ALL = "all"
TARGETS = _TARGETS["llama"]


def lora_names(text: str) -> tuple[str, ...]:
  """Returns the products that a list of targets names; () for all."""
  return () if text == ALL else tuple(n.strip() for n in text.split(","))


# As the ranges of `config_ranges.py`.
TARGETS_RANGE = (
    lambda v: set(lora_names(v)) <= set(TARGETS),
    f"allowed {ALL!r} or some of {', '.join(TARGETS)}, separated by commas",
)


def lora_base_problems(c: Mapping[str, Any]) -> _Problems:
  """The reference is the base of the adapters, which never moves."""
  if c["lora.rank"] and c["reference.mode"] != "fixed":
    yield "reference.mode", (
        f"allowed 'fixed' with config.lora.rank = {c['lora.rank']}"
    )


def lora_target_problems(c: Mapping[str, Any]) -> _Problems:
  """The model has every product that is named."""
  known = _TARGETS.get(_family(c), TARGETS)
  lacking = [n for n in lora_names(c["lora.targets"]) if n not in known]
  if c["lora.rank"] and lacking:
    yield "lora.targets", (
        f"the blocks of {_family(c)} have no {', '.join(lacking)}; allowed"
        f" {ALL!r} or some of {', '.join(known)}"
    )


def lora_program_problems(c: Mapping[str, Any], name: str) -> _Problems:
  """A sweep trains all params."""
  if c.get("lora.rank") and name == "sweep":
    yield "lora.rank", "allowed 0 with --program=sweep"


def _family(c: Mapping[str, Any]) -> str:
  """Returns the family of the policy; "" where its folder does not tell."""
  start = c["sft.init"] if c["init"] == "sft" else c["init"]
  if start == "scratch":
    return c["model.family"]
  path = pathlib.Path(start).expanduser() / "config.json"
  try:
    return str(json.loads(path.read_text("utf-8")).get("model_type", ""))
  except (OSError, ValueError, AttributeError):
    return ""  # Whoever reads the folder tells what is wrong.


# What the settings of `tba_jax/config/settings_red_team.py` must be to others.
# No JAX.
#
# As the checks of `config_relations.py`, which calls them.


# Names of `config.loss`.
OF_A_TEMPERED_TARGET = ("tb", "tb_learned_z")


def tempering_problems(c: Mapping[str, Any]) -> _Problems:
  """Other losses have no target to temper."""
  name = c["loss.name"]
  if name in OF_A_TEMPERED_TARGET:
    return
  for part in ("tau", "gamma"):
    for key in (f"tempering.{part}", f"tempering.{part}_final"):
      if c[key] != 1:
        yield key, f"allowed 1 with config.loss.name = {name!r}"


def explore_problems(c: Mapping[str, Any]) -> _Problems:
  """Temperatures in their order, and a completion that can still end."""
  if c["explore.min_temperature"] > c["explore.max_temperature"]:
    yield "explore.min_temperature", (
        "allowed up to config.explore.max_temperature ="
        f" {c['explore.max_temperature']}"
    )
  if c["explore.min_tokens"] >= c["sampling.max_completion_tokens"]:
    yield "explore.min_tokens", (
        "allowed less than config.sampling.max_completion_tokens ="
        f" {c['sampling.max_completion_tokens']}"
    )
  if c["explore.fraction"] and c["loss.ratio_clip"]:
    yield "explore.fraction", (
        "allowed 0 with config.loss.ratio_clip above 0: a trust region is"
        " around the policy, not around what explores"
    )


def replay_filter_problems(c: Mapping[str, Any]) -> _Problems:
  """What is filtered must have its order, and its encoder."""
  changed = (
      ("replay_filter.similarity", "none"),
      ("replay_filter.evict", "oldest"),
      ("replay_filter.freeze_step", 0),
      ("replay_filter.duplicates", "newest"),
  )
  for key, plain in changed:
    if c["rounds.mini_batches"] and c[key] != plain:
      yield key, f"allowed {plain!r} with config.rounds.mini_batches above 0"
  has_encoder = c["task.name"] == "red_team"
  if c["replay_filter.similarity"] == "cosine" and not has_encoder:
    yield "replay_filter.similarity", (
        "allowed 'none', 'edit' where the task has no config.task.encoder"
    )
  if c["replay_filter.duplicates"] == "oldest" and not c["replay.dedupe"]:
    yield "replay_filter.duplicates", (
        "allowed 'newest' with config.replay.dedupe = False"
    )


def victim_problems(c: Mapping[str, Any]) -> _Problems:
  """A judge with models of its own runs in the role itself."""
  if c["task.name"] == "red_team" and c["reward.where"] != "process":
    yield "reward.where", "allowed 'process' with config.task.name = 'red_team'"


# What settings of rewards and judges must be to each other. No JAX here.
#
# As in `config_relations.py`, which runs these checks with its own.


# Keys that name a folder, and what they may be instead.
FOLDERS = (
    ("evaluate.judge", ("", "task", "command")),
    ("reward.model", ("reward_model",)),
    ("reward_model.init", ("sft",)),
    ("reward_model.relabel", ("", "task")),
)


def _verifier(c: Mapping[str, Any]) -> _Problems:
  # Nothing else bounds the time that a command, or sympy, takes.
  if c.get("task.verifier") and c["reward.where"] != "pool":
    yield "reward.where", "allowed 'pool' with a config.task.verifier"
  if c["task.name"] == "math" and c["reward.where"] != "pool":
    yield "reward.where", "allowed 'pool' with config.task.name = 'math'"


def _judge(c: Mapping[str, Any]) -> _Problems:
  if c["evaluate.judge"] == "command" and not c["evaluate.judge_command"]:
    yield "evaluate.judge_command", (
        "allowed a command with config.evaluate.judge = 'command'"
    )


CHECKS: tuple[Callable[[Mapping[str, Any]], _Problems], ...] = (
    _verifier,
    _judge,
)


# Names of `config.loss`; a test holds them to the table of objectives.
OF_SINGLE_COMPLETIONS = ("tb_learned_z", "subtb", "ppo")
OF_A_TRUST_REGION = ("proximal_rloo", "ppo")
OF_A_VALUE_MODEL = ("subtb", "ppo")


def problems(values: Mapping[str, Any]) -> _Problems:
  """Yields (key, what is allowed) for all values that do not fit together.

  Args:
    values: by key; only those whose type and range are right.
  """
  for check in _CHECKS:
    try:
      yield from check(values)
    except KeyError:
      continue


def _batch(c: Mapping[str, Any]) -> _Problems:
  shards = math.prod(
      c[f"mesh.{axis}"] for axis in c["sharding.batch"].split(",") if axis
  )
  keys = ["train.micro_batch_prompts"]
  for name in ("sft", "reward_model"):
    size, micro = c[f"{name}.batch_size"], c[f"{name}.micro_batch_size"]
    keys.append(f"{name}.micro_batch_size" if micro else f"{name}.batch_size")
    if micro and size % micro:
      yield f"{name}.batch_size", (
          f"allowed a multiple of config.{name}.micro_batch_size = {micro}"
      )
  for key in keys:
    if c[key] % shards:
      yield key, (
          f"allowed a multiple of {shards}, the shards of the batch"
          " (config.mesh, config.sharding.batch)"
      )
  if c["train.prompts_per_batch"] % c["train.micro_batch_prompts"]:
    yield "train.prompts_per_batch", (
        "allowed a multiple of config.train.micro_batch_prompts ="
        f" {c['train.micro_batch_prompts']}"
    )


def _group_size(c: Mapping[str, Any]) -> _Problems:
  k = c["train.completions_per_prompt"]
  if c["loss.name"] not in OF_SINGLE_COMPLETIONS and k < 2:
    yield "train.completions_per_prompt", (
        f"allowed 2 or more with config.loss.name = {c['loss.name']!r}, which"
        " compares the completions of a prompt"
    )
  # A draw of K from fewer would repeat completions, which shrinks the group's
  # variance and with it the gradient.
  if c["search.samples_per_prompt"] < k:
    yield "search.samples_per_prompt", (
        f"allowed config.train.completions_per_prompt = {k} or more"
    )
  if c["replay.capacity_per_prompt"] < k:
    yield "replay.capacity_per_prompt", (
        f"allowed config.train.completions_per_prompt = {k} or more"
    )


def _trust_region(c: Mapping[str, Any]) -> _Problems:
  name, correction = c["loss.name"], c["loss.correction"]
  if c["loss.ratio_clip"] == 0:
    if correction in ("clip_token", "clip_sequence", "cispo", "decoupled"):
      yield "loss.ratio_clip", (
          "allowed above 0 and below 1 with config.loss.correction ="
          f" {correction!r}"
      )
    elif not correction and name in OF_A_TRUST_REGION:
      yield "loss.ratio_clip", (
          f"allowed above 0 and below 1 with config.loss.name = {name!r}"
      )


def _proximal(c: Mapping[str, Any]) -> _Problems:
  """A proximal policy is held within a round, or for some steps."""
  held = c["loss.proximal_every_steps"]
  steps = max(c["rounds.mini_batches"], 1) * c["rounds.passes"]
  if c["rounds.mini_batches"] and held and steps % held:
    yield "loss.proximal_every_steps", (
        f"allowed 0 or a divisor of {steps}, the steps of a round"
    )
  if c["loss.behavior_logprobs"] == "recomputed" and (held or steps) == 1:
    yield "loss.behavior_logprobs", (
        "allowed 'sampler' where the proximal policy is held for one step"
        " (config.loss.proximal_every_steps, config.rounds): no ratio would be"
        " left"
    )


def _capacity(c: Mapping[str, Any]) -> _Problems:
  # What admission lets in before it is trained on must not push itself out.
  ahead = _prompts_ahead(c)
  needed = max(
      ahead * c["search.samples_per_prompt"],
      c["train.prompts_per_batch"] * c["train.completions_per_prompt"],
      c["replay.warm_start_completions"],
  )
  if c["replay.capacity"] < needed:
    yield "replay.capacity", (
        f"allowed {needed} or more: one batch, the warm start, and what the"
        " searchers may sample ahead must each fit"
    )


def _admission(c: Mapping[str, Any]) -> _Problems:
  """Step t lets (t + 1 + lead_steps) · prompts_per_step prompts be sampled.

  A round that does not fit is cut when nothing else is under way, so nothing
  can lock up whatever the number of searchers. But a round above
  (lead_steps + 1) · prompts_per_step would be cut every time.
  """
  ahead = _prompts_ahead(c)
  if c["search.prompts_per_round"] > ahead:
    yield "search.prompts_per_round", (
        f"allowed up to {ahead} = (config.search.lead_steps + 1) *"
        " config.search.prompts_per_step: more are never granted at once"
    )
  if c["search.starvation_s"] <= c["search.lease_s"]:
    yield "search.starvation_s", (
        f"allowed more than config.search.lease_s = {c['search.lease_s']}: the"
        " prompts of a lost searcher are granted again only after that"
    )


def _prompts_ahead(c: Mapping[str, Any]) -> int:
  """Prompts that may be under way at a time: of a round, or ahead of a step."""
  if c["rounds.mini_batches"]:
    return c["rounds.mini_batches"] * c["train.prompts_per_batch"]
  return (c["search.lead_steps"] + 1) * c["search.prompts_per_step"]


def _rounds(c: Mapping[str, Any]) -> _Problems:
  if not c["rounds.mini_batches"]:
    return
  steps = c["rounds.mini_batches"] * c["rounds.passes"]
  k = c["train.completions_per_prompt"]
  for key, value in (
      ("search.lockstep", False),
      ("search.wait_for_fresh", True),
      ("search.samples_per_prompt", k),
      ("replay.recent_fraction", 1.0),
      ("replay.dedupe", False),
      ("replay.warm_start_completions", 0),
      ("publish.every_steps", steps),
  ):
    if c[key] != value:
      yield key, f"allowed {value} with config.rounds.mini_batches above 0"
  if c["train.num_steps"] % steps:
    yield "train.num_steps", f"allowed a multiple of {steps}, whole rounds"
  if c["train.per_round_steps"] not in (0, steps):
    yield "train.per_round_steps", f"allowed 0 or {steps}, the steps of a round"


def _lockstep(c: Mapping[str, Any]) -> _Problems:
  if not c["search.lockstep"]:
    if c["search.lead_steps"] < 1:
      yield "search.lead_steps", (
          "allowed 1 or more; 0 only with config.search.lockstep = True"
      )
    return
  why = "with config.search.lockstep = True"
  if c["search.lead_steps"] != 0:
    yield "search.lead_steps", f"allowed 0 {why}"
  if not c["search.wait_for_fresh"]:
    yield "search.wait_for_fresh", f"allowed True {why}"
  if c["publish.every_steps"] != 1:
    yield "publish.every_steps", f"allowed 1 {why}"


def _in_flight(c: Mapping[str, Any]) -> _Problems:
  if c["sampling.in_flight"] != "off":
    for key in ("search.lockstep", "rounds.mini_batches"):
      if c[key]:
        yield key, (
            f"allowed {type(c[key])()} with config.sampling.in_flight ="
            f" {c['sampling.in_flight']!r}: it names the version to sample with"
        )


def _schedules(c: Mapping[str, Any]) -> _Problems:
  for key, steps in (
      ("optimizer.warmup_steps", "train.num_steps"),
      ("sft.warmup_steps", "sft.num_steps"),
      ("reward_model.warmup_steps", "reward_model.num_steps"),
  ):
    if c[key] >= c[steps]:
      yield key, f"allowed 0 up to below config.{steps} = {c[steps]}"
  peak = c["train.num_steps"] - c["optimizer.warmup_steps"]
  if 0 < peak <= c["optimizer.stable_steps"]:
    yield "optimizer.stable_steps", (
        f"allowed 0 up to below {peak} = config.train.num_steps -"
        " config.optimizer.warmup_steps"
    )
  decay = c["loss.beta_decay_steps"]
  if decay and not 1 <= c["loss.beta_stop_steps"] <= decay:
    yield "loss.beta_stop_steps", (
        f"allowed 1 up to config.loss.beta_decay_steps = {decay}"
    )


def _shape(c: Mapping[str, Any]) -> _Problems:
  if c["model.num_heads"] % c["model.num_kv_heads"]:
    yield "model.num_heads", (
        "allowed a multiple of config.model.num_kv_heads ="
        f" {c['model.num_kv_heads']}"
    )
  length = c["sampling.max_prompt_tokens"] + c["sampling.max_completion_tokens"]
  if length > c["model.max_positions"]:
    yield "model.max_positions", (
        f"allowed {length} or more: config.sampling.max_prompt_tokens +"
        " config.sampling.max_completion_tokens"
    )


def _sharded_sizes(c: Mapping[str, Any]) -> _Problems:
  """Each sharded axis of the parameters must divide evenly, on both meshes."""
  sizes = (
      ("layers", "model.num_layers"),
      ("width", "model.width"),
      ("mlp", "model.mlp_width"),
      ("heads", "model.num_heads"),
      ("kv_heads", "model.num_kv_heads"),
      ("head_dim", "model.head_dim"),
  )
  for mesh, (rule, key) in itertools.product(("mesh", "search.mesh"), sizes):
    axes = [a for a in c[f"sharding.{rule}"].split(",") if a]
    # A searcher splits no sequences: its mesh has no such axis.
    shards = math.prod(c.get(f"{mesh}.{axis}", 1) for axis in axes)
    if c[key] % shards:
      yield key, (
          f"allowed a multiple of {shards}, the size on config.{mesh} of"
          f" config.sharding.{rule} = {c[f'sharding.{rule}']!r}"
      )


def _folders(c: Mapping[str, Any]) -> _Problems:
  for key, names in (
      ("init", ("scratch", "sft")),
      ("loss.value_init", ("policy",)),
      *FOLDERS,
      ("sft.init", ("scratch",)),
      ("tokenizer.source", ("task",)),
  ):
    value = c[key]
    here = pathlib.Path(value).expanduser().is_dir()
    if value not in names and not here:
      yield key, (
          f"allowed {', '.join(map(repr, names))} or a folder of this machine"
          " that exists"
      )


def line_program_problems(c: Mapping[str, Any]) -> _Problems:
  """Yields what is wrong with the settings of `generate` and `score`."""
  try:
    paths = {
        name: pathlib.Path(c[f"generate.{name}"]).expanduser()
        for name in ("model", "input", "output")
    }
  except KeyError:
    return
  remote = c["generate.model"].startswith("gs://")
  if not c["generate.model"] or not (remote or paths["model"].is_dir()):
    yield "generate.model", (
        "allowed a folder that exists: a Hugging Face folder, a run directory,"
        " or RUN/checkpoints/STEP of one; runs also in gs://"
    )
  if not c["generate.input"] or not paths["input"].is_file():
    yield "generate.input", "allowed a file that exists, a JSON object a line"
  if not c["generate.output"] or paths["output"].is_dir():
    yield "generate.output", "allowed the name of a file"
  elif paths["output"].absolute() == paths["input"].absolute():
    yield "generate.output", "allowed another file than config.generate.input"


# Writer -> the package that it needs.
_PACKAGE_OF = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def _packages(c: Mapping[str, Any]) -> _Problems:
  for name in c["log.writers"].split(","):
    package = _PACKAGE_OF.get(name)
    if package and importlib.util.find_spec(package) is None:
      yield "log.writers", (
          f"{name} needs a package that is not installed: pip install"
          f" tba_jax[{name}]"
      )
  if c["task.name"] == "math":
    if importlib.util.find_spec("math_verify") is None:
      yield "task.name", (
          "needs a package that is not installed: pip install tba_jax[math]"
      )


_CHECKS: tuple[Callable[[Mapping[str, Any]], _Problems], ...] = (
    _batch,
    _group_size,
    _trust_region,
    _proximal,
    _capacity,
    _admission,
    _lockstep,
    _rounds,
    _in_flight,
    _schedules,
    tempering_problems,
    explore_problems,
    replay_filter_problems,
    victim_problems,
    _shape,
    _sharded_sizes,
    _folders,
    publish_problems,
    store_problems,
    tls_problems,
    trainer_problems,
    searcher_problems,
    lora_base_problems,
    lora_target_problems,
    _packages,
    *CHECKS,
)

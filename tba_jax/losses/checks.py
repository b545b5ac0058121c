# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks across the objective's settings."""

import functools
import operator
from typing import Any

from tba_jax.losses import objective_table
from tba_jax.losses import settings
from tba_jax.system import rules

# Not checked: configs set these together with `loss.name`, and users may then
# change only the name.
_SET_WITH_A_SWITCH = ("scale", "log_z_learning_rate", "value_learning_rate")
# Settings that are read only with certain values of another setting.
_READ_WITH = (
    *((f"loss.{name}", "loss.name", readers)
      for name, readers in objective_table.readers().items()
      if name not in _SET_WITH_A_SWITCH),
    *((f"loss.{name}", "loss.correction", names)
      for name, names in objective_table.READ_BY_CORRECTIONS.items()),
    ("loss.missing_stop_reward", "loss.missing_stop", ("replace", "add")),
)  # fmt: skip


def of_loss(c: rules.Values) -> dict[str, Any]:
  """Returns the settings of `loss`, by name without the section."""
  return {k.removeprefix("loss."): v for k, v in c.items() if "loss." in k}


def _unread(row: tuple[Any, ...], c: rules.Values) -> rules.Problems:
  key, other, values = row
  if ".py:" in c["loss.name"]:
    return  # A custom loss may read all of them.
  if other == "loss.correction" and not c[other]:
    if objective_table.find(c["loss.name"]).correction in values:
      return
  yield from rules.unread(c, key, settings.SETTINGS[key].default, other, values)


def _group_size(c: rules.Values) -> rules.Problems:
  name = c["loss.name"]
  least = objective_table.min_completions(of_loss(c))
  if c["train.completions_per_prompt"] < least:
    yield "train.completions_per_prompt", (
        f"must be {least} or more with config.loss.name = {name!r}, because it"
        " compares the completions of a prompt"
    )


def _trust_region(c: rules.Values) -> rules.Problems:
  name, correction = c["loss.name"], c["loss.correction"]
  why = ""
  if correction in objective_table.CLIPS:
    why = f"config.loss.correction = {correction!r}"
  elif not correction and objective_table.find(name).needs_ratio_clip:
    why = f"config.loss.name = {name!r}"
  elif not correction and c["loss.ratio_clip"]:
    why = "the trust region"
  if why and not c["loss.ratio_clip"]:
    yield "loss.ratio_clip", f"must be above 0 and below 1 with {why}"


def _family(c: rules.Values) -> rules.Problems:
  """Checks that exactly the settings of anchor and baseline are set."""
  loss, name = of_loss(c), c["loss.name"]
  anchor, baseline = objective_table.anchor(loss), objective_table.baseline(
      loss
  )
  if baseline == "file" and not c["loss.baseline_file"]:
    yield "loss.baseline_file", (
        "must be a file with config.loss.baseline = 'file'"
        + f", the default of config.loss.name = {name!r}"
        * (not c["loss.baseline"])
    )
  for key, reader in objective_table.unread(loss).items():
    key = f"loss.{key}"
    default = settings.SETTINGS[key].default
    if c[key] != default and ".py:" not in name:
      yield key, (
          f"must be {default!r} with config.loss.name = {name!r}, config."
          f"loss.anchor = {c['loss.anchor']!r} and config.loss.baseline ="
          f" {c['loss.baseline']!r}, where nothing reads it; it is read with"
          f" config.loss.{reader}"
      )
  if c["reference.role"] == "none" and objective_table.reads_reference(loss):
    yield "reference.role", (
        f"must be 'trainer' or 'searcher' with config.loss.name = {name!r},"
        " which reads the reference's log-probs; 'none' is for"
        f" {', '.join(objective_table.without_reference())},"
        " config.loss.anchor = 'behavior' or 'ema',"
        " and policy gradients at config.loss.beta = 0"
    )
  if anchor in ("behavior", "ema"):
    for key in ("gamma", "tau"):
      if c[f"tempering.{key}"] != 1:
        yield f"tempering.{key}", (
            f"must be 1 with the anchor {anchor!r}, because only the reference"
            " is tempered"
        )


def _distills(c: rules.Values) -> rules.Problems:
  """Checks for a teacher, and for something to learn from without rewards."""
  name = c["loss.name"]
  if objective_table.find(name).has_teacher and not c["reference.init"]:
    yield "reference.init", (
        f"must be a model folder with config.loss.name = {name!r}, because the"
        " policy would otherwise be its own teacher"
    )
  if c["loss.reward_weight"] or ".py:" in name:
    return
  by_order = objective_table.find(name).function.startswith("pairwise:")
  if by_order or not objective_table.reads_reference(of_loss(c)):
    yield "loss.reward_weight", (
        f"must be above 0 with config.loss.name = {name!r}, which learns only"
        " from rewards; 0 is for losses with a KL to the reference, such as tb"
    )


def _masks(c: rules.Values) -> rules.Problems:
  """Pairs need both their completions."""
  name = c["loss.name"]
  is_pairwise = objective_table.find(name).function.startswith("pairwise:")
  if c["loss.missing_stop"] == "mask" and is_pairwise:
    yield "loss.missing_stop", (
        f"must be 'keep', 'replace' or 'add' with config.loss.name = {name!r},"
        " which compares completions: with 'mask' one of a pair could have no"
        " tokens"
    )


def _proximal(c: rules.Values) -> rules.Problems:
  """Checks how long the proximal policy is held, and that it is read."""
  held = c["loss.proximal_every_steps"]
  steps = max(c["rounds.mini_batches"], 1) * c["rounds.passes"]
  if c["rounds.mini_batches"] and held and steps % held:
    yield "loss.proximal_every_steps", (
        f"must be 0 or a divisor of {steps}, the steps of a round"
    )
  is_held = (
      c["loss.correction"] == "decoupled"
      or c["loss.behavior_logprobs"] == "recomputed"
      or objective_table.find(c["loss.name"]).has_targets
  )
  if held and not is_held:
    yield "loss.proximal_every_steps", (
        "must be 0, because nothing reads it; it is read with config.loss.name"
        f" = {', '.join(objective_table.names('has_targets'))},"
        " config.loss.correction = 'decoupled' or"
        " config.loss.behavior_logprobs = 'recomputed'"
    )
  if c["loss.behavior_logprobs"] != "recomputed":
    return
  loss, is_own = of_loss(c), ".py:" in c["loss.name"]
  if objective_table.anchor(loss) == "ema":
    yield "loss.behavior_logprobs", (
        "must be 'sampler' with the anchor 'ema', which is scaled by the"
        " staleness of the sampling policy"
    )
  optimizer = {"sample_share_power": c["optimizer.sample_share_power"]}
  if not is_own and not objective_table.needs_logprobs(loss, optimizer):
    yield "loss.behavior_logprobs", (
        f"must be 'sampler' with config.loss.name = {c['loss.name']!r} and"
        f" config.loss.correction = {c['loss.correction']!r}, because"
        " nothing reads them"
    )
  if (held or steps) == 1:
    yield "loss.behavior_logprobs", (
        "must be 'sampler' if the proximal policy is refreshed every step"
        " (config.loss.proximal_every_steps, config.rounds), because all ratios"
        " would be 1"
    )


def _pass_k(c: rules.Values) -> rules.Problems:
  K = c["train.completions_per_prompt"]
  if c["loss.advantage"] == "pass_at_k" and c["loss.pass_k"] >= K:
    yield "loss.pass_k", (
        f"must be below config.train.completions_per_prompt = {K}, because the"
        " advantage compares subsets of a group"
    )


# fmt: off
CHECKS = (
    rules.compare("loss.ratio_floor", "less than", "loss.ratio_cap"),
    rules.require("loss.name", lambda v: objective_table.find(v).needs_beta,
                  {"loss.beta": "above 0"}),
    rules.require("loss.name",
                  lambda v: not objective_table.find(v).is_tempered,
                  {"tempering.tau": (1,), "tempering.gamma": (1,)}),
    rules.require("loss.ratio_clip", operator.not_, {"loss.clip_high": (0,)}),
    # Completions sampled at another temperature are outside the trust region.
    rules.require("loss.ratio_clip", bool, {"explore.fraction": (0,)}),
    # The threshold of a solved completion is in task units.
    rules.require("loss.reward_weight", lambda v: v != 1,
                  {"search.order": ("shuffled",)}),
    rules.require("loss.reward_weight", operator.not_,
                  {"replay.skip_equal_rewards": (False,),
                   "replay.selection": ("uniform",)}),
    # The step computes the teacher's distributions; nothing reads rewards.
    rules.require("loss.name", lambda v: objective_table.find(v).has_teacher,
                  {"reference.role": ("trainer",), "reference.mode": ("fixed",),
                   "loss.correction": ("", "none"),
                   "sampling.top_k": (0,), "sampling.top_p": (1,),
                   "sampling.min_p": (0,),
                   "loss.behavior_logprobs": ("sampler",),
                   "loss.proximal_every_steps": (0,),
                   "replay.selection": ("uniform",),
                   "replay.skip_equal_rewards": (False,),
                   "search.order": ("shuffled",)}),
    *(functools.partial(_unread, row) for row in _READ_WITH),
    _group_size, _pass_k, _masks, _trust_region, _family, _distills, _proximal,
)
# fmt: on

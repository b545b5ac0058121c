# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks across settings of decoding, exploration, logs and vLLM servers."""

import operator
import os

from tba_jax.losses import checks as losses
from tba_jax.losses import objective_table
from tba_jax.sampling import samplers
from tba_jax.sampling import settings
from tba_jax.system import processes
from tba_jax.system import rules
from tba_jax.tasks import offline_completions


def _kept(c: rules.Values) -> rules.Problems:
  """Checks that sampling for training can be truncated."""
  most = c["sampling.max_kept_tokens"]
  if c["sampling.top_k"] > most:
    yield "sampling.top_k", (
        f"must be up to config.sampling.max_kept_tokens = {most}, the tokens"
        " that are stored with each sampled one; raise it"
    )
  if c["offline.path"] and samplers.num_kept_of(c):
    yield "offline.fraction", (
        "must be 1 with config.sampling.top_k, top_p or min_p: logged"
        " completions do not have the tokens that their sampler kept"
    )


def _lengths(c: rules.Values) -> rules.Problems:
  least, most = c["explore.min_tokens"], c["explore.max_tokens"]
  if 0 < most < least:
    yield "explore.max_tokens", (
        f"must be config.explore.min_tokens = {least} or more, or 0"
    )


_LOG_LINES = "JSON lines with prompt, completion and reward, or episodes"
_LOG_LINES_WITHOUT_REWARDS = (
    "JSON lines with prompt and completion, or episodes"
)
# Rewards and baselines read from files are used unchanged.
_WITH_REWARDS_OF_A_FILE = {
    "loss.reward_weight": 1.0, "reward.normalize_parts": False,
    "loss.missing_stop": "keep",
}  # fmt: skip


def _logs(c: rules.Values) -> rules.Problems:
  """Checks that logs can be read and have all fields that the loss needs."""
  loss, field = losses.of_loss(c), c["offline.reward_field"]
  optimizer = {"sample_share_power": c["optimizer.sample_share_power"]}
  needs_logprobs = objective_table.needs_logprobs(loss, optimizer)
  for key, is_read, needs_logprobs in (
      ("offline.path", bool(c["offline.path"]), needs_logprobs),
      ("loss.baseline_file", objective_table.baseline(loss) == "file", False),
  ):
    if not c[key] or not is_read or processes.SUPERVISED in os.environ:
      continue
    try:
      offline_completions.read(c[key], field, needs_logprobs=needs_logprobs)
    except OSError as error:
      yield key, f"must be a readable file; {error.strerror}"
    except ValueError as error:
      why = ""
      if str(error).endswith("logprobs are missing"):
        why = (
            f": config.loss.name = {c['loss.name']!r} with"
            f" config.loss.correction = {c['loss.correction']!r} needs the"
            " behavior policy's log-probs, and so does config.optimizer."
            f"sample_share_power = {c['optimizer.sample_share_power']} if above"
            " 0; tb, tb_learned_z, gvpo, subtb and a_star_po without a"
            " correction do not need them"
        )
      elif f" {field}" in str(error) and key == "offline.path":
        why = (
            "; set config.offline.reward_field = '' to judge them like sampled"
            " completions"
        )
      lines = _LOG_LINES if field else _LOG_LINES_WITHOUT_REWARDS
      yield key, f"must be {lines}; {error}{why}"
  if objective_table.baseline(loss) == "file" and not field:
    yield "offline.reward_field", (
        "must be the name of a field with config.loss.baseline = 'file'"
    )
  for key, allowed in _WITH_REWARDS_OF_A_FILE.items():
    if c[key] == allowed:
      continue
    if objective_table.baseline(loss) == "file":
      yield key, (
          f"must be {allowed!r} with config.loss.baseline = 'file', because"
          " the baselines are computed from unchanged rewards"
      )
    if c["offline.path"] and field:
      yield key, (
          f"must be {allowed!r} with config.offline.path, because rewards come"
          " from the file; set config.offline.reward_field = '' to judge logged"
          " completions like sampled ones"
      )


def _sampler(c: rules.Values) -> rules.Problems:
  """Refuses settings that the sampler does not support or read."""
  name = c["search.sampler"]
  for other, facts in samplers.SAMPLERS.items():
    for key in facts.settings:
      default = settings.SETTINGS[key].default
      yield from rules.unread(c, key, default, "search.sampler", (other,))
  facts = samplers.SAMPLERS[name]
  yield from rules.require("search.sampler", bool, facts.allows)(c)
  if c["train.router_replay"]:
    able = samplers.without("has_routes", name, c["offline.path"])
    yield from rules.require("train.router_replay", bool, dict(able))(c)
  if not (key := facts.addresses):
    return
  urls = [url for url in c[key].split(",") if url]
  if len(urls) != c["search.num_searchers"] or len(set(urls)) < len(urls):
    yield key, (
        f"must be {c['search.num_searchers']} different addresses, one for each"
        " searcher (config.search.num_searchers)"
    )


def _searcher_mesh(c: rules.Values) -> rules.Problems:
  """Checks that a searcher's rows and devices match its mesh."""
  rows = c["search.mesh.data"] * c["search.mesh.fsdp"]
  devices = rows * c["search.mesh.tensor"]
  if c["sampling.num_slots"] % rows:
    yield "sampling.num_slots", (
        f"must be a multiple of {rows}, because a searcher's rows are split"
        " over config.search.mesh.data * config.search.mesh.fsdp devices"
    )
  waiting = c["sampling.num_waiting"]
  if waiting and (waiting % rows or waiting < 2 * rows):
    yield "sampling.num_waiting", (
        f"must be 0, or a multiple of {rows} and at least {2 * rows}, because"
        " each device that splits a searcher's rows needs the same number of"
        " spare rows, and two to exchange"
    )
  if c["search.cpu_devices"] not in (0, devices):
    yield "search.cpu_devices", (
        f"must be 0 or {devices}, the devices of config.search.mesh"
    )


# fmt: off
CHECKS = (
    rules.compare("explore.min_temperature", "up to",
                  "explore.max_temperature"),
    rules.compare("explore.min_tokens", "less than",
                  "sampling.max_completion_tokens"),
    rules.compare("explore.max_tokens", "less than",
                  "sampling.max_completion_tokens"),
    # Only prompts that the policy itself solved count as solved.
    rules.require("offline.path", bool, {"search.order": ("shuffled",)}),
    rules.require("offline.path", operator.not_, {"offline.fraction": (1.0,)}),
    # Each completion needs one version.
    rules.require("sampling.in_flight", lambda v: v != "off",
                  {"search.lockstep": (False,), "rounds.mini_batches": (0,)}),
    _kept, _lengths, _logs, _sampler, _searcher_mesh,
)
# fmt: on

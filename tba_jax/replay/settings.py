# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the replay buffer, and of rounds, which replace its sampling."""

import operator

from tba_jax.system import rules

_s = rules.Setting

# fmt: off
SECTIONS = {
    "replay": rules.Section("The replay buffer (docs/reference/replay.md)."),
    "rounds": rules.Section("Rounds, as in Asynchronous RLHF, replace replay:"
        " `mini_batches` (N) batches are sampled with one version, trained on"
        " in order in each of `passes` (T) passes, N·T steps in total, and then"
        " dropped. `set_rounds` in tba_jax/config/variants.py adapts the other"
        " settings.", fixed="rounds are counted from step 0"),
    "replay_filter": rules.Section("Rules for what the buffer accepts and"
        " evicts."),
}

SETTINGS = {
    "replay.capacity_per_prompt": _s(100, rules.COUNT, "maximum completions per"
        " prompt; replay_filter.evict selects what is evicted"),
    "replay.capacity": _s(200_000, rules.COUNT, "maximum completions in total"),
    "replay.recent_fraction": _s(1.0, rules.UNIT, "probability that a prompt"
        " slot of a batch is drawn from the recent window (the papers' m)"),
    "replay.recent_window_steps": _s(4, rules.COUNT, "steps whose arrivals"
        " count as recent"),
    "replay.skip_equal_rewards": _s(False, rules.FLAG, "keep groups of equal"
        " rewards out of the recent window, so that batches have groups to"
        " learn from (DAPO's dynamic sampling). Sample more prompts than a step"
        " trains on: search.prompts_per_step above train.prompts_per_batch"),
    "replay.selection": _s("uniform", rules.one_of("uniform", "reward"),
        "distribution of draws within a prompt; 'reward' uses weights"
        " exp(reward / reward_temperature)"),
    "replay.reward_temperature": _s(1.0, rules.over_steps(rules.ABOVE_0), ""),
    "replay.age_decay_steps": _s(0.0, rules.NOT_NEGATIVE, "staleness at which"
        " the weights of replay.selection=reward fall to 1/e (FreshPER: 500); 0"
        " = off",
        read_with=("replay.selection", ("reward",))),
    "replay.dedupe": _s(True, rules.FLAG, "store only one of a prompt's equal"
        " completions"),
    "replay.warm_start_completions": _s(0, rules.FROM_0,
        "completions sampled before step 0",
        fixed="prompts are counted from its end"),
    "replay.max_segment_mb": _s(64.0, rules.ABOVE_0, "size of a journal"
        " segment", hosts="searcher"),

    "rounds.mini_batches": _s(0, rules.FROM_0, "N; 0 = no rounds"),
    "rounds.passes": _s(1, rules.COUNT, "T",
        read_with=("rounds.mini_batches", "above 0")),
    "rounds.lag_rounds": _s(
        1, rules.Allowed("0 or 1", lambda v: v in (0, 1)),
        "lag of sampling: 1 = a round is sampled while the previous one trains,"
        " with the params from before it (one-step off-policy); 0 = sampling"
        " and training alternate",
        read_with=("rounds.mini_batches", "above 0")),

    "replay_filter.duplicates": _s("newest", rules.one_of("newest", "oldest"),
        "completion to keep among a prompt's equal ones (replay.dedupe)"),
    "replay_filter.similarity": _s("none",
        rules.one_of("none", "edit", "cosine"), "similarity filter: of a"
        " prompt's similar completions, keep only the one with the highest"
        " reward. 'edit': token"
        " edit distance below similarity_limit times the sum of both lengths;"
        " 'cosine': cosine of sentence embeddings (task.encoder) above"
        " similarity_limit"),
    "replay_filter.similarity_limit": _s(0.25, rules.UNIT, ""),
    "replay_filter.similarity_by": _s("reward",
        rules.one_of("reward", "log_reward"), "value that decides which to"
        " keep: 'log_reward' = log π_ref + reward / loss.beta",
        read_with=("replay_filter.similarity", ("edit", "cosine"))),
    "replay_filter.evict": _s("oldest", rules.one_of("oldest", "lowest_reward"),
        "completion to evict when a capacity is reached"),
    "replay_filter.freeze_step": _s(0, rules.FROM_0, "step at which the buffer"
        " stops growing; 0 = never"),
}
# fmt: on


def _prompts_ahead(c: rules.Values) -> int:
  """Returns the maximum number of prompts in flight."""
  if c["rounds.mini_batches"]:
    return c["rounds.mini_batches"] * c["train.prompts_per_batch"]
  if not c["search.prompts_per_step"]:
    return c["search.num_searchers"] * c["search.prompts_per_round"]
  return (c["search.lead_steps"] + 1) * c["search.prompts_per_step"]


def _capacity(c: rules.Values) -> rules.Problems:
  """Checks that completions are not evicted before they are trained on."""
  ahead = _prompts_ahead(c)
  needed = max(
      ahead * c["search.samples_per_prompt"],
      c["train.prompts_per_batch"] * c["train.completions_per_prompt"],
      c["replay.warm_start_completions"],
  )
  if c["replay.capacity"] < needed:
    yield "replay.capacity", (
        f"must be {needed} or more: a batch, the warm start, and what searchers"
        " may sample ahead must each fit"
    )
  if c["search.prompts_per_round"] > ahead and c["search.prompts_per_step"]:
    yield "search.prompts_per_round", (
        f"must be at most {ahead} = (config.search.lead_steps + 1) *"
        " config.search.prompts_per_step, because no more are granted at once"
    )


def _rounds(c: rules.Values) -> rules.Problems:
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
      yield key, f"must be {' or '.join(map(str, allowed))} with config.rounds"
  if c["train.num_steps"] % steps:
    yield "train.num_steps", f"must be a multiple of {steps}, whole rounds"


# fmt: off
CHECKS = (
    rules.compare("replay.capacity_per_prompt", "at least",
                  "train.completions_per_prompt", rules.REPEATS),
    rules.require("search.prompts_per_step", operator.not_,
                  {"search.lockstep": (False,), "rounds.mini_batches": (0,)}),
    # Only draws of recent prompts exclude such groups.
    rules.require("replay.recent_fraction", operator.not_,
                  {"replay.skip_equal_rewards": (False,)}),
    rules.require("replay.recent_fraction", lambda v: v == 1,
                  {"replay.selection": ("uniform",)}),
    rules.require("replay.dedupe", operator.not_,
                  {"replay_filter.duplicates": ("newest",)}),
    # Completions must arrive with reference log-probs.
    rules.require("replay_filter.similarity_by", lambda v: v == "log_reward",
                  {"reference.role": ("searcher",), "loss.beta": "above 0"}),
    rules.require("rounds.mini_batches", bool,
                  {"search.lockstep": (False,),
                   "search.wait_for_fresh": (True,),
                   "replay.recent_fraction": (1.0,), "replay.dedupe": (False,),
                   "replay.skip_equal_rewards": (False,),
                   "replay.warm_start_completions": (0,),
                   "replay_filter.similarity": ("none",),
                   "replay_filter.evict": ("oldest",),
                   "replay_filter.freeze_step": (0,),
                   "replay_filter.duplicates": ("newest",)}),
    _capacity, _rounds,
)
# fmt: on

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the replay buffer, and of rounds, which replace its draws."""

import operator

from tba_jax.system import rules

_s = rules.Setting

# fmt: off
SECTIONS = {
    "replay": rules.Section("The replay buffer (docs/reference/replay.md)."),
    "rounds": rules.Section("Rounds, as in Asynchronous RLHF, instead of"
        " replay: mini_batches (N) batches sampled with one version, trained on"
        " in order in each of `passes` (T) passes, N·T steps, then dropped."
        " `set_rounds` of tba_jax/config/variants.py makes the other settings"
        " fit.", fixed="rounds are counted from step 0"),
    "replay_filter": rules.Section("Rules of what the buffer accepts and"
        " evicts."),
}

SETTINGS = {
    "replay.capacity_per_prompt": _s(100, rules.COUNT, "completions of one"
        " prompt; the oldest are evicted"),
    "replay.capacity": _s(200_000, rules.COUNT, "completions in all"),
    "replay.recent_fraction": _s(1.0, rules.UNIT, "probability that a prompt"
        " slot of a batch is drawn from the recent window (the papers' m)"),
    "replay.recent_window_steps": _s(4, rules.COUNT, "steps whose arrivals"
        " count as recent"),
    "replay.skip_equal_rewards": _s(False, rules.FLAG, "a group of equal"
        " rewards does not make its prompt recent: batches have groups to learn"
        " from (DAPO's dynamic sampling). Sample more prompts than a step"
        " trains on, search.prompts_per_step above train.prompts_per_batch"),
    "replay.selection": _s("uniform", rules.one_of("uniform", "reward"),
        "draws within a prompt; 'reward': weights exp(reward / temperature)"),
    "replay.reward_temperature": _s(1.0, rules.over_steps(rules.ABOVE_0), ""),
    "replay.dedupe": _s(True, rules.FLAG, "a completion replaces an equal one"
        " of its prompt"),
    "replay.warm_start_completions": _s(0, rules.FROM_0,
        "completions sampled before step 0",
        fixed="prompts are counted from its end"),
    "replay.max_segment_mb": _s(64.0, rules.ABOVE_0, "size of the journal's"
        " segments", hosts="searcher"),

    "rounds.mini_batches": _s(0, rules.FROM_0, "N; 0 = no rounds"),
    "rounds.passes": _s(1, rules.COUNT, "T",
        read_with=("rounds.mini_batches", "above 0")),
    "rounds.lag_rounds": _s(
        1, rules.Allowed("0 or 1", lambda v: v in (0, 1)),
        "age of a round's data: 1, round r trains on what the policy of round"
        " r-2 sampled (one-step off-policy); 0, sampling and training"
        " alternate", read_with=("rounds.mini_batches", "above 0")),

    "replay_filter.duplicates": _s("newest", rules.one_of("newest", "oldest"),
        "completion to keep among equal ones of a prompt (replay.dedupe)"),
    "replay_filter.similarity": _s("none",
        rules.one_of("none", "edit", "cosine"), "similarity by which only the"
        " completion with the highest reward is kept of a prompt's. 'edit':"
        " token edit distance below similarity_limit times the sum of both"
        " lengths; 'cosine': of sentence embeddings (task.encoder) above"
        " similarity_limit"),
    "replay_filter.similarity_limit": _s(0.25, rules.UNIT, ""),
    "replay_filter.similarity_by": _s("reward",
        rules.one_of("reward", "log_reward"), "value of a completion there:"
        " 'log_reward' = log π_ref + reward / loss.beta",
        read_with=("replay_filter.similarity", ("edit", "cosine"))),
    "replay_filter.evict": _s("oldest", rules.one_of("oldest", "lowest_reward"),
        "completion to evict when a capacity is reached"),
    "replay_filter.freeze_step": _s(0, rules.FROM_0, "step from which the"
        " buffer does not grow; 0 = never"),
}
# fmt: on


def _prompts_ahead(c: rules.Values) -> int:
  """Returns how many prompts may be in flight."""
  if c["rounds.mini_batches"]:
    return c["rounds.mini_batches"] * c["train.prompts_per_batch"]
  if not c["search.prompts_per_step"]:
    return c["search.num_searchers"] * c["search.prompts_per_round"]
  return (c["search.lead_steps"] + 1) * c["search.prompts_per_step"]


def _capacity(c: rules.Values) -> rules.Problems:
  """Completions must not be evicted before they are trained on."""
  ahead = _prompts_ahead(c)
  needed = max(
      ahead * c["search.samples_per_prompt"],
      c["train.prompts_per_batch"] * c["train.completions_per_prompt"],
      c["replay.warm_start_completions"],
  )
  if c["replay.capacity"] < needed:
    yield "replay.capacity", (
        f"must be {needed} or more: one batch, the warm start, and what the"
        " searchers may sample ahead must each fit"
    )
  if c["search.prompts_per_round"] > ahead and c["search.prompts_per_step"]:
    yield "search.prompts_per_round", (
        f"must be at most {ahead} = (config.search.lead_steps + 1) *"
        " config.search.prompts_per_step: more are never granted at once"
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
    # Only draws of recent prompts leave such groups out.
    rules.require("replay.recent_fraction", operator.not_,
                  {"replay.skip_equal_rewards": (False,)}),
    rules.require("replay.recent_fraction", lambda v: v == 1,
                  {"replay.selection": ("uniform",)}),
    rules.require("replay.dedupe", operator.not_,
                  {"replay_filter.duplicates": ("newest",)}),
    # Completions must arrive with the reference's log-probs.
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the searchers and their grants."""

import operator

from tba_jax.system import rules

_s = rules.Setting
_ORDER = "the order of the prompts follows from it"

# fmt: off
SECTIONS = {
    "search": rules.Section("The searchers, and how far ahead they may"
        " sample."),
}

SETTINGS = {
    "search.num_searchers": _s(1, rules.COUNT, "", hosts="searcher", auto=True),
    "search.prompts_per_round": _s(32, rules.COUNT, "prompts that a searcher"
        " is granted at a time", auto=True),
    "search.samples_per_prompt": _s(8, rules.COUNT, "completions (S)",
        fixed=rules.Fixed(
            "prompts are counted from the end of the warm start"
            " (config.replay.warm_start_completions)",
            lambda old, new: new["replay.warm_start_completions"] > 0)),
    "search.prompts_per_step": _s(32, rules.FROM_0, "fresh prompts that the"
        " trainer grants (and, with wait_for_fresh, waits for) per optimizer"
        " step; 0 = searchers run free and the trainer takes what is there",
        fixed="the prompts of each step are counted with it from step 0",
        auto=True),
    "search.order": _s("shuffled",
        rules.one_of("shuffled", "unsolved", "uncertain"),
        "order of the prompts: 'shuffled', each once in every pass; or, after"
        " the first pass, drawn by the share s of their completions that were"
        " solved: 'unsolved' by 1 - s, 'uncertain' by s (1 - s)",
        fixed=_ORDER),
    "search.solved_threshold": _s(1.0, rules.NUMBER, "least reward of a"
    " completion"
        " that counts as solved",
        read_with=("search.order", ("unsolved", "uncertain")),
        fixed=_ORDER),
    "search.lead_steps": _s(1, rules.FROM_0, "steps that sampling may run ahead"
        " of training; with lockstep, steps by which all samples lag; 0 only"
        " with lockstep",
        fixed=rules.Fixed(
            "in lockstep (config.search.lockstep) it pins the version of every"
            " prompt",
            lambda old, new: new["search.lockstep"])),
    "search.wait_for_fresh": _s(True, rules.FLAG, "True: step t waits until"
        " the fresh prompts of steps 0 to t have arrived (unless in lockstep,"
        " any as many), or where searchers run free, every"
        " publish.every_steps for all that they have in work; False: the"
        " trainer draws from the buffer as it is",
        fixed="what has arrived is counted with it from step 0"),
    "search.lockstep": _s(False, rules.FLAG, "exact staleness: sample the data"
        " of a step with the version lead_steps before it; 0 is on-policy",
        fixed="it pins the version of every prompt"),
    "search.credits": _s(4, rules.COUNT, "blocks that a searcher may hold"
        " unacknowledged", hosts="searcher"),
    "search.lease_s": _s(15.0, rules.WAIT, "silence after which a searcher's"
        " prompts are granted to others", hosts="searcher"),
    "search.starvation_s": _s(180.0, rules.WAIT, "the trainer ends after this"
        " long without fresh data or a searcher at work, and after ten times"
        " that without fresh data", hosts="searcher"),
    "search.mesh.data": _s(1, rules.COUNT, "devices of a searcher that split"
        " its slots", hosts="searcher", auto=True),
    "search.mesh.fsdp": _s(1, rules.COUNT, "devices that split slots and the"
        " width of params", hosts="searcher", auto=True),
    "search.mesh.tensor": _s(1, rules.COUNT, "devices that split heads, hidden"
        " units and the KV cache", hosts="searcher", auto=True),
    "search.price_per_hour": _s(0.0, rules.NOT_NEGATIVE, "price of a searcher's"
        " machine; the report shows costs by kind of searcher",
        hosts="searcher"),
    "search.cpu_devices": _s(0, rules.FROM_0, "virtual CPU devices of a"
        " searcher; 0 = the machine's", hosts="searcher"),
}
# fmt: on


def _order(c: rules.Values) -> rules.Problems:
  """Prompts can be drawn by difficulty only at the pace of the steps."""
  is_free = not c["search.prompts_per_step"] and not c["rounds.mini_batches"]
  if c["search.order"] != "shuffled" and is_free:
    yield "search.order", (
        "must be 'shuffled' with config.search.prompts_per_step = 0: all"
        " prompts are admitted at once, before any was solved"
    )


# fmt: off
CHECKS = (
    rules.compare("search.samples_per_prompt", "at least",
                  "train.completions_per_prompt", rules.REPEATS),
    rules.compare("search.starvation_s", "more than", "search.lease_s",
                  ": the prompts of a lost searcher are granted again only"
                  " after that"),
    # One reward is always equal to itself, and has no deviation.
    rules.require("search.samples_per_prompt", lambda v: v == 1,
                  {"replay.skip_equal_rewards": (False,),
                   "reward.normalize_parts": (False,)}),
    rules.require("search.lockstep", bool,
                  {"search.wait_for_fresh": (True,),
                   "publish.every_steps": (1,)}),
    rules.require("search.lockstep", operator.not_,
                  {"search.lead_steps": "above 0"}),
    _order,
)
# fmt: on

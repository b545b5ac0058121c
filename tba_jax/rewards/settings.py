# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of rewards."""

import os

from tba_jax.losses import objective_table
from tba_jax.system import rules

SECTIONS = {
    "reward": rules.Section(
        "Computation of rewards" " (docs/guides/your_reward.md)."
    ),
}


def listed_paths(text: str) -> list[str]:
  """Returns the absolute paths in a comma-separated list."""
  paths = filter(None, (path.strip() for path in text.split(",")))
  return [os.path.abspath(os.path.expanduser(path)) for path in paths]


_s = rules.Setting

# fmt: off
SETTINGS = {
    "reward.backend": _s("process", rules.one_of("process", "pool", "model"),
        "place of rewards: 'process', by the task inside the role, for rewards"
        " that are fast and never hang; 'pool', in worker processes of each"
        " role, killed at the deadline; 'model', by the reward model",
        fixed=rules.Fixed(
            "rewards in the buffer are by the reward model, or by the task",
            lambda *sides: any(
                side["reward.backend"] == "model" for side in sides))),
    "reward.num_workers": _s(2, rules.COUNT, "workers of the pool; for"
        " environments, processes of a role, one for each completion under way"
        " (docs/guides/agents.md)", hosts="own"),
    "reward.deadline_s": _s(10.0, rules.WAIT, "limit for one completion, or one"
        " turn, in a worker", hosts="searcher"),
    "reward.memory_mb": _s(0, rules.FROM_0, "address space of a worker; 0 = no"
        " limit", hosts="own"),
    "reward.network": _s(False, rules.FLAG, "whether workers have the network",
        hosts="own"),
    "reward.env_vars": _s("", rules.TEXT, "environment variables that"
        " workers get besides PATH, LANG, PYTHONPATH and similar, separated by"
        " commas", hosts="own"),
    "reward.readable": _s("", rules.TEXT, "files and folders that workers may"
        " read in addition to the task's, separated by commas"
        " (docs/guides/your_reward.md#isolation)", hosts="own", files=True),
    "reward.normalize_parts": _s(False, rules.FLAG, "whether each of several"
        " rewards (task.rewards) is normalized over a prompt's completions, to"
        " mean 0 and standard deviation 1, before they are summed by their"
        " weights (GDPO, arXiv:2601.05242)",
        fixed="rewards in the buffer were computed with it"),
    "reward.fallback": _s(None, rules.NUMBER_OR_NONE, "reward of a completion"
        " that could not be judged; None leaves such completions out of"
        " training and of held-out means (docs/guides/your_reward.md)"),
    "reward.model": _s("reward_model", rules.TEXT, "a Hugging Face folder with"
        " a scalar head, or 'reward_model', the one that"
        " `--program=reward_model` trained in WORKDIR", hosts="path",
        files=True, fixed="rewards in the buffer are this model's"),
    "reward.batch_size": _s(32, rules.COUNT, "completions that the reward model"
        " scores at a time"),
}
# fmt: on


def trains_reward_model(c: rules.Values) -> bool:
  """Returns whether a run with these settings trains a reward model first."""
  scores = (c.get("reward.backend"), c.get("reward.model"))
  has_values = objective_table.find(c.get("loss.name")).has_values
  return scores == ("model", "reward_model") or (
      has_values and c.get("loss.value_init") == "reward_model"
  )


def readable(c: rules.Values) -> rules.Problems:
  for path in listed_paths(c.get("reward.readable", "")):
    if not os.path.exists(path):
      yield "reward.readable", f"must be paths that exist; {path} does not"
      return


# fmt: off
CHECKS = (
    rules.require("reward.normalize_parts", bool,
                  {"reward.backend": ("process", "pool"),
                   "search.order": ("shuffled",)}),
)
# fmt: on

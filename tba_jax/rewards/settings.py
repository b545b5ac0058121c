# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of rewards."""

from collections.abc import Callable
import json
import os
import re
from typing import Any

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


_URL = rules.matching(
    r"|https?://[^\s/?#@]+(/[^\s?#@]*)?",
    "'' or http://HOST:PORT/PATH, or https, without user, password or query",
)
_RANGE = r"(-?\d+(?:\.\d+)?):(-?\d+(?:\.\d+)?)"
_RUBRIC = (
    "Request:\n{prompt}\n\nResponse:\n{completion}\n\nHow good is the"
    " response to the request? Reply only with a whole number from 0 (useless)"
    " to 10 (perfect)."
)
_JUDGES = "rewards in the buffer are this judge's"


def score_range(text: str) -> tuple[float, float]:
  """Returns the lowest and the highest score of `reward.score_range`.

  Raises ValueError for another text.
  """
  match = re.fullmatch(_RANGE, text)
  low, high = map(float, match.groups()) if match else (0.0, 0.0)
  if low >= high:
    raise ValueError(f"{text!r}: must be LOW:HIGH")
  return low, high


def request_fields(text: str) -> dict[str, Any]:
  """Returns the fields of `reward.request`; raises ValueError if invalid."""
  fields = json.loads(text or "{}")
  if not isinstance(fields, dict) or _OURS & fields.keys():
    raise ValueError(f"{text!r}: must be a JSON object")
  return fields


def _accepts(parse: Callable[[str], Any]) -> Callable[[str], bool]:
  def test(text: str) -> bool:
    try:
      parse(text)
    except (ValueError, RecursionError):
      return False
    return True

  return test


def _pattern(text: str) -> None:
  try:
    groups = re.compile(text).groups
  except (re.error, OverflowError) as error:
    raise ValueError(str(error)) from error
  if text and groups != 1:
    raise ValueError(f"{groups} groups")


# Fields of a request that other settings give.
_OURS = {"model", "messages", "stream", "n"}
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
        " turn, in a worker, and for one answer of reward.url",
        hosts="searcher"),
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
    "reward.url": _s("", _URL, "base URL of an OpenAI-compatible API, such as"
        " http://localhost:8000/v1, whose model gives the reward 'judge' of"
        " task.rewards (docs/guides/your_reward.md#judges-over-http); '' ="
        " none", hosts="own"),
    "reward.judge_model": _s("", rules.TEXT, "name of the judge's model at"
        " reward.url", fixed=_JUDGES),
    "reward.rubric": _s(_RUBRIC, rules.matching(r"(?s).*\{completion\}.*",
        "a text with {completion}"), "question to the judge, with {prompt},"
        " {completion} and columns of the data in braces", fixed=_JUDGES),
    "reward.score_range": _s("0:10", rules.Allowed("LOW:HIGH, two numbers",
        _accepts(score_range)), "lowest and highest score of the judge, which"
        " become the rewards 0 and 1", fixed=_JUDGES),
    "reward.score_pattern": _s("", rules.Allowed("'' or a regular expression"
        " with one group", _accepts(_pattern)), "regular expression whose last"
        " match in the judge's answer has the score as its group; '' = the only"
        " number", fixed=_JUDGES),
    "reward.request": _s("", rules.Allowed("'' or a JSON object without "
        + ", ".join(sorted(_OURS)), _accepts(request_fields)), "other fields of"
        " each request, such as {\"temperature\": 0, \"max_tokens\": 8}"),
    "reward.key_variable": _s("", rules.matching(r"|[A-Za-z_]\w*",
        "'' or the name of a variable"),
        "environment variable with the API key of reward.url; '' = no key",
        hosts="own"),
    "reward.concurrency": _s(16, rules.COUNT, "requests of a role to reward.url"
        " at a time", hosts="own"),
    "reward.retries": _s(3, rules.FROM_0, "further attempts for a completion"
        " that got no score, before it counts as failed"),
    "reward.outage_s": _s(300.0, rules.WAIT, "longest time without a score,"
        " while there are requests, before the run ends", hosts="searcher"),
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


def judge(c: rules.Values) -> rules.Problems:
  """Checks the settings of a judge over HTTP."""
  if not c["reward.url"]:
    return
  if c["reward.url"].rstrip("/").endswith("/chat/completions"):
    yield "reward.url", "must end before /chat/completions"
  if not c["reward.judge_model"]:
    yield "reward.judge_model", "must be a model's name with config.reward.url"
  if c["reward.rubric"] == _RUBRIC and c["reward.score_range"] != "0:10":
    yield "reward.score_range", "must be '0:10' with this config.reward.rubric"
  variable = c["reward.key_variable"]
  if variable and not c.elsewhere:
    key = os.environ.get(variable, "").strip()
    if not key:
      yield "reward.key_variable", (
          "must be an environment variable with the key; it is not set"
      )
    elif not (key.isascii() and key.isprintable() and " " not in key):
      yield "reward.key_variable", (
          "must be an environment variable with one key, of printable ASCII"
          " characters without spaces"
      )


# fmt: off
CHECKS = (
    rules.require("reward.url", bool, {"reward.backend": ("process", "pool")}),
    judge,
    rules.require("reward.normalize_parts", bool,
                  {"reward.backend": ("process", "pool"),
                   "search.order": ("shuffled",)}),
)
# fmt: on

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning from another run's log, from fresh samples, and from both.

    python -m studies logged [SEED,… [NAME …]]

On countdown (the config) and on the preferences of `configs/staleness.py`, a
run logs its completions and rewards, without log-probs. From the same initial
policy TB then learns from this log, from live completions one step old, and
from half of each, with equal numbers of steps and completions. `cloned` learns
from the log regardless of rewards. Logs are in runs/logged.

On `configs/guess.py` and `configs/calculator.py` the log has the episodes of
another run, with log-probs. The policy learns from it with the config's ratio
clip, or without one from a lower baseline, and the live run has the same steps
and completions.
"""

from collections.abc import Mapping, Sequence
import json
import math
import pathlib
from typing import Any

import ml_collections

from benchmarks import results
from studies import curves
from tba_jax import types
from tba_jax.config import load
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import inline
from tba_jax.tasks import base
from tba_jax.tools import sweep

RESULTS = pathlib.Path(__file__).parent
_RUNS = pathlib.Path("runs") / "logged"
_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_NUM_STEPS = 160
_LOG_SEED = 100
# Clipping needs log-probs, which the log lacks.
_TB = ("loss.name=tb", "loss.ratio_clip=0")
_LEARNING_RATES = {"countdown": 2e-4, "preference": 3e-3}
# A large β limits drift, which a log alone does not correct.
_LARGE_BETA = ("loss.beta=0.5",)
# Remedy: on average, logged completions gain probability.
_LOW_BASELINE = "loss.baseline_shift=-0.1"
# As large as the spread of an episode's rewards: none loses probability.
_BASELINE_OF_EPISODES = "loss.baseline_shift=-1"
# With so large a shift rewards hardly matter: cross-entropy on the log.
_CLONING = "loss.baseline_shift=-100"
_SHARE = "offline.fraction=0.5"
# Tasks of several turns, and their numbers of steps.
_EPISODES = {"guess": 200, "calculator": 250}
# Quantities of the last evaluation: key, title, digits.
_ENDS = {
    "mean_reward": ("reward", 3),
    "kl": ("KL, nats", 1),
    "pass_at_1": ("pass@1", 3),
    "pass_at_k": ("pass@8", 3),
    "distinct_correct": ("distinct right of 8", 2),
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md into the folder.

  Args:
    config: config of countdown.
    operands: seeds separated by commas (default 0), and names of runs (default
      all).

  Returns:
    `folder`, and for each task `runs` (name, seed and last evaluation) and
    `log_reward`, the mean reward of its log.

  Raises:
    ValueError: an operand is wrong.
  """
  forms = {
      "countdown": config,
      "preference": load.load_config(str(_CONFIGS / "staleness.py"), []),
      **{
          task: load.load_config(f"{_CONFIGS / task}.py:quick", [])
          for task in _EPISODES
      },
  }
  settings_of = {task: _settings(task) for task in forms}
  every = [name for settings in settings_of.values() for name in settings]
  seeds, names = results.parse(operands, every)
  rows = [["task", "data", "seeds", *(title for title, _ in _ENDS.values())]]
  out: dict[str, Any] = {"folder": str(RESULTS)}
  for task, form in forms.items():
    settings, runs, path = settings_of[task], _RUNS / task, _log_path(task)
    if seeds and (chosen := [name for name in names if name in settings]):
      form = make_config(form, task)
      if not path.exists():
        write_log(curves.fine_tune(form, runs), path)
      operands = [",".join(map(str, seeds)), *chosen]
      curves.run_all(form, settings, operands, RESULTS, runs)
    curves_of = results.read(settings, RESULTS)
    rows += results.make_rows(settings, curves_of, _ENDS)
    out[task] = {
        "log_reward": log_reward(path) if path.exists() else None,
        "runs": results.summarize(curves_of, _ENDS, RESULTS)["runs"],
    }
  results.print_table(rows, RESULTS / "table.md")
  return out


def _log_path(task: str) -> pathlib.Path:
  return _RUNS / task / "log.jsonl"


def _settings(task: str) -> dict[str, tuple[str, ...]]:
  """Returns the overrides of each run of a task, by name."""
  log = f"offline.path={_log_path(task).absolute()}"
  if task in _EPISODES:
    return {
        f"{task}-live": (),
        f"{task}-logged": (log,),
        f"{task}-logged_low": (*_TB, log, _LOW_BASELINE),
        f"{task}-logged_lower": (*_TB, log, _BASELINE_OF_EPISODES),
        f"{task}-both": (log, _SHARE),
    }
  return {
      f"{task}-live": _TB,
      f"{task}-logged": (*_TB, log),
      f"{task}-logged_beta": (*_TB, log, *_LARGE_BETA),
      f"{task}-logged_low": (*_TB, log, _LOW_BASELINE),
      f"{task}-cloned": (*_TB, log, _CLONING),
      f"{task}-both": (*_TB, log, _SHARE),
      f"{task}-both_low": (*_TB, log, _SHARE, _LOW_BASELINE),
  }


def make_config(
    config: ml_collections.ConfigDict, task: str
) -> ml_collections.ConfigDict:
  """Returns the config of all runs of a task."""
  config = config.copy_and_resolve_references()
  if task in _EPISODES:
    with config.unlocked():
      config.reference.role = "trainer"
      config.train.num_steps = _EPISODES[task]
      config.evaluate.update(every_steps=_EPISODES[task], num_completions=8)
    return config
  with config.unlocked():
    train = config.train
    train.num_steps = _NUM_STEPS
    train.micro_batch_prompts = train.prompts_per_batch
    config.optimizer.learning_rate = _LEARNING_RATES[task]
    config.optimizer.learning_rate_final = 0.0
    config.loss.update(name="tb", ratio_clip=0.0)
    config.replay.update(
        dedupe=False, recent_window_steps=1, skip_equal_rewards=False
    )
    config.search.update(
        prompts_per_step=train.prompts_per_batch,
        samples_per_prompt=train.completions_per_prompt,
    )
    config.evaluate.update(
        every_steps=40, num_completions=8, greedy=False, batch_prompts=32
    )
    config.evaluate.final_prompts = min(config.evaluate.final_prompts, 256)
  return config


def write_log(config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
  """Writes all completions of a live run in sampling order."""
  config = sweep.set_exact_lag(config, 1)
  config.seed = _LOG_SEED
  maker = inline.LoopMaker(config)
  groups: list[types.Group] = []
  try:
    maker.make(config).watching(groups.extend).train()
  finally:
    maker.close()
  policy = maker.policy
  lines = [
      {
          **(_episode if policy.task.has_turns else _text)(policy, group, s),
          "finish_reason": "stop" if group.stopped[s] else "length",
          "reward": float(group.rewards[s]),
      }
      for group in groups
      for s in range(group.num_completions)
      if not math.isnan(group.rewards[s])
  ]
  partial = path.with_suffix(".partial")
  partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  partial.replace(path)


def _text(
    policy: policy_lib.Policy, group: types.Group, s: int
) -> dict[str, Any]:
  """Returns the prompt and completion s of a group."""
  return {
      "prompt": policy.task.prompt(base.TRAIN, group.prompt_id),
      "completion": policy.tokenizer.decode_completion(
          group.completion_tokens[s],
          int(group.completion_lengths[s]),
          bool(group.stopped[s]),
      ),
  }


def _episode(
    policy: policy_lib.Policy, group: types.Group, s: int
) -> dict[str, Any]:
  """Returns the prompt and episode s of a group, with its log-probs."""
  length = int(group.completion_lengths[s])
  return {
      "prompt_id": group.prompt_id,
      "prompt": policy.tokenizer.decode(group.prompt_tokens),
      "token_ids": group.completion_tokens[s, :length].tolist(),
      "logprobs": [
          float(x) if sampled else None
          for x, sampled in zip(
              group.behavior_logprobs[s, :length], group.sampled_mask[s]
          )
      ],
  }


def log_reward(path: pathlib.Path) -> float:
  """Returns the mean reward of a log."""
  lines: list[Mapping[str, Any]] = [
      json.loads(line) for line in path.read_text().splitlines()
  ]
  return sum(line["reward"] for line in lines) / len(lines)

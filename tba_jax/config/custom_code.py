# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tries custom losses, rewards, environments and offline data before a run.

The trial runs in a subprocess (`learning/dry_run.py`), because it imports JAX
and user code may exit, hang or crash.
"""

from collections.abc import Mapping
import functools
import glob
import json
import os
import subprocess
import sys
from typing import Any

from tba_jax.losses import objective_table
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.tasks import task_table

LOSS, REWARD, PROMPT, LOG = "loss", "reward", "prompt", "log"
JUDGE = "judge"
# On top of the reward deadline: imports, loading data, starting a reward worker
# and tracing the loss.
DEADLINE_S = 180.0
# Seconds of silence before a line explains the wait.
PATIENCE_S = 10.0
# Seconds per byte of offline data, mostly chat templates and tokenization.
_LOG_S = 5e-5
_MAX_ERROR = 300
# Programs that compute a loss, and programs that judge completions.
_WITH_LOSS = ("train", "trainer", "one_process", "plan", "sweep")
_WITH_REWARD = (*_WITH_LOSS, "sft", "evaluate", "searcher")
# User-facing programs in which the policy reads environment prompts.
_WITH_PROMPT = ("train", "one_process", "plan", "sft", "evaluate")
# Programs that read offline completions or a baseline file.
_WITH_LOG = ("train", "trainer", "one_process", "plan", "searcher", "sweep")
_USER_FIELDS = ("rewards", "reason")


def parts(c: Mapping[str, Any], program: str) -> tuple[str, ...]:
  """Returns the parts of a config to try: LOSS, REWARD, JUDGE, PROMPT, LOG."""
  out = []
  if program in _WITH_LOSS and ".py:" in c["loss.name"]:
    out.append(LOSS)
  is_own_class = c["task.name"] not in task_table.TASKS
  texts = [c.get(f"task.{name}", "") for name in _USER_FIELDS]
  has_functions = c["task.name"] == "custom" and (
      any(":" in text for text in texts) or c.get("task.verifier")
  )
  has_turns = task_table.facts(c["task.name"]).has_turns
  has_functions = has_functions or has_turns
  judges = c["reward.backend"] != "model" or c["evaluate.judge"] == "task"
  is_judged = program in _WITH_REWARD and judges
  is_played = program == "generate" and has_turns
  if (is_judged and (is_own_class or has_functions)) or is_played:
    out.append(REWARD)
  if is_judged and c["task.name"] == "custom":
    if base.JUDGE in base.reward_names(c.get("task.rewards", "")):
      out.append(JUDGE)
  if has_turns and program in _WITH_PROMPT:
    out.append(PROMPT)
  if program in _WITH_LOG and (c["offline.path"] or reads_baselines(c)):
    out.append(LOG)
  return tuple(out)


def reads_baselines(c: Mapping[str, Any]) -> bool:
  """Returns whether the loss reads a baseline file; `c` is keyed by setting."""
  names = ("name", "baseline")
  return objective_table.baseline({n: c[f"loss.{n}"] for n in names}) == "file"


def problems(config: Mapping[str, Any], tried: tuple[str, ...]) -> list[str]:
  """Returns one line per problem in the user's code and offline data.

  Prints how much of the offline data is used.

  Args:
    config: complete config, of JSON types.
    tried: result of `parts`.
  """
  whole = {**config, "task": task_table.with_defaults(config["task"])}
  return list(_problems(json.dumps([whole, tried])))


@functools.cache
def _problems(text: str) -> tuple[str, ...]:
  config, tried = json.loads(text)
  deadline_s = DEADLINE_S + len(tried) * config["reward"]["deadline_s"]
  for path in (config["offline"]["path"], config["loss"]["baseline_file"]):
    # The file may be missing: a custom loss need not read it.
    for file in glob.glob(path, recursive=True) or [path]:
      if os.path.isfile(file):
        deadline_s += _LOG_S * os.path.getsize(file)
  with subprocess.Popen(
      [sys.executable, "-m", "tba_jax.learning.dry_run"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      encoding="utf-8",
      errors="replace",
      # A trace on shapes needs no accelerator.
      env={**processes.package_environment(), "JAX_PLATFORMS": "cpu"},
  ) as process:
    try:
      try:
        output, errors = process.communicate(text, PATIENCE_S)
      except subprocess.TimeoutExpired:
        left_s = deadline_s - PATIENCE_S
        print(
            f"{_what(text)}: trying it before the run, for at most"
            f" {left_s:.0f} s more",
            flush=True,
        )
        output, errors = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
      return (
          f"{_what(text)}: did not return within {deadline_s:g} s when tried"
          " before the run; must return for every text, so give each wait for"
          " another process or host a timeout",
      )
    finally:
      process.kill()
  try:
    problems, notes = json.loads(output)
  except ValueError:  # User code ended or crashed the process.
    stderr = " ".join(errors.split())[-_MAX_ERROR:]
    return (
        f"{_what(text)}: ended its process with status {process.returncode}:"
        f" {stderr}",
    )
  for note in notes:
    print(note, flush=True)
  return tuple(problems)


def _what(text: str) -> str:
  """Returns the settings that name the tried code and data."""
  config, tried = json.loads(text)
  task = config["task"]
  named = {
      LOSS: f"config.loss.name={config['loss']['name']!r}",
      REWARD: f"config.task.name={task['name']!r}",
  }
  path = config["offline"]["path"] or config["loss"]["baseline_file"]
  named[LOG] = f"completions in {path!r}"
  for name, field in (("custom", "rewards"), ("environment", "source")):
    if task["name"] == name:
      named[REWARD] = f"config.task.{field}={task[field]!r}"
  named[PROMPT] = named[REWARD]
  named[JUDGE] = f"config.reward.url={config['reward']['url']!r}"
  return ", ".join(dict.fromkeys(named[part] for part in tried))

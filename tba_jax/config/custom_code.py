# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tries a user's own loss, rewards, environments and logs before a run.

It does so in another process (`learning/dry_run.py`), which may import JAX,
and end, hang or crash as user code may.
"""

from collections.abc import Mapping
import functools
import json
import os
import subprocess
import sys
from typing import Any

from tba_jax.losses import objective_table as losses
from tba_jax.system import processes
from tba_jax.tasks import task_table

LOSS, REWARD, PROMPT, LOG = "loss", "reward", "prompt", "log"
# In addition to the deadline of a reward: imports, data, the start of a reward
# worker, and the trace of a loss.
DEADLINE_S = 180.0
# Seconds without an answer until a line explains the wait.
PATIENCE_S = 10.0
# Seconds per byte of a log, most of which its tokens take.
_LOG_S = 2e-6
_MAX_ERROR = 300
# Programs that compute losses, and those that judge completions.
_WITH_LOSS = ("train", "trainer", "one_process", "plan", "sweep")
_WITH_REWARD = (*_WITH_LOSS, "sft", "evaluate", "searcher")
# Programs started by a user whose policy reads the environments' prompts.
_WITH_PROMPT = ("train", "one_process", "plan", "sft", "evaluate")
# Programs that read completions of a log, or baselines.
_WITH_LOG = ("train", "trainer", "one_process", "plan", "searcher", "sweep")
_USER_FIELDS = ("rewards", "reason")


def parts(c: Mapping[str, Any], program: str) -> tuple[str, ...]:
  """Returns what of a config is the user's own: LOSS, REWARD, PROMPT or LOG.

  Args:
    c: settings by key.
    program: name of the program.
  """
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
  if has_turns and program in _WITH_PROMPT:
    out.append(PROMPT)
  if program in _WITH_LOG and (c["offline.path"] or reads_baselines(c)):
    out.append(LOG)
  return tuple(out)


def reads_baselines(c: Mapping[str, Any]) -> bool:
  """Returns whether the loss of settings by key reads a baseline file."""
  names = ("name", "baseline")
  return losses.baseline({n: c[f"loss.{n}"] for n in names}) == "file"


def problems(config: Mapping[str, Any], tried: tuple[str, ...]) -> list[str]:
  """Returns a line for each problem of the user's own code and logs.

  Prints what of logs is used.

  Args:
    config: whole config, of JSON types.
    tried: parts to try, of `parts`.
  """
  whole = {**config, "task": task_table.with_defaults(config["task"])}
  return list(_problems(json.dumps([whole, tried])))


@functools.cache
def _problems(text: str) -> tuple[str, ...]:
  config, _ = json.loads(text)
  deadline_s = DEADLINE_S + config["reward"]["deadline_s"]
  for path in (config["offline"]["path"], config["loss"]["baseline_file"]):
    # A loss of one's own may leave a missing file unread.
    if os.path.isfile(path):
      deadline_s += _LOG_S * os.path.getsize(path)
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
          f"{_what(text)}: did not end within {deadline_s:g} s, when it was"
          " tried before the run; must return for every text, with a timeout"
          " where it waits for others",
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
  """Returns the settings that name the user's code and logs."""
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
  return ", ".join(dict.fromkeys(named[part] for part in tried))

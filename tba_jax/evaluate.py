# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `evaluate` program: held-out metrics of checkpoints and model folders.

    python -m tba_jax.main --program=evaluate --workdir=runs/countdown
    python -m tba_jax.main --program=evaluate --workdir=runs/countdown \\
        240 runs/countdown/sft/model

An operand is the step of a checkpoint of the workdir or a Hugging Face folder;
none stands for the newest checkpoint. Results are printed and written under
the key "evaluate" of WORKDIR/eval.json, by source.
"""

from collections.abc import Sequence
import os
import pathlib
import sys
import time
from typing import Any

import ml_collections
import rich.console
import rich.table

from tba_jax import jsonl
from tba_jax import model_source
from tba_jax import parts
from tba_jax import policy as policy_lib
from tba_jax import processes
from tba_jax import run_directory
from tba_jax import sharding
from tba_jax import types
from tba_jax.tasks import base as tasks_base

_KEY = "evaluate"
# Rows of the table: metric, with its standard error where it has one.
_ROWS = (
    ("pass@1", "pass_at_1", "pass_at_1_stderr"),
    ("pass@k", "pass_at_k", "pass_at_k_stderr"),
    ("distinct right of k", "distinct_correct", None),
    (
        "distinct right of k, solved prompts",
        "distinct_correct_per_solved",
        None,
    ),
    ("tokens of a completion", "mean_length", None),
    ("share that stopped", "stop_rate", None),
)


def run_evaluate(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  processes.enable_compilation_cache()
  try:
    run(config, workdir, operands)
  except (ValueError, FileNotFoundError) as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  return processes.EXIT_OK


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """Evaluates each source, prints a table and adds to WORKDIR/eval.json.

  Takes the workdir's lock while it works: a run that trains there would write
  `eval.json` too.

  Args:
    config: as of the run; `evaluate.final_prompts` held-out prompts (at most
      those there are) with `evaluate.num_completions` completions each, drawn
      as `sampling` says.
    workdir: of the run; made where the operands are folders and it is missing.
    operands: steps of checkpoints and Hugging Face folders; none stands for the
      newest checkpoint.

  Returns:
    The evaluator's result by source, "checkpoint 320" or the folder as given,
    each with `step` (of a checkpoint, else None) and `time`.

  Raises:
    ValueError: a source does not exist, cannot be read or does not fit the
      config; or another process runs in the workdir.
  """
  lock = run_directory.lock(workdir)
  try:
    results = {}
    for operand in operands or ("",):
      name, policy, params, step = _load(config, workdir, operand)
      result = _evaluate(config, policy, params, step or 0)
      results[name] = {"step": step, "time": time.time(), **result}
    path = pathlib.Path(workdir) / "eval.json"
    saved = jsonl.read_json(path) or {}
    saved[_KEY] = {**saved.get(_KEY, {}), **results}
    jsonl.atomic_write_json(path, saved)
  finally:
    os.close(lock)
  rich.console.Console().print(make_table(results))
  return results


def make_table(results: dict[str, dict[str, Any]]) -> rich.table.Table:
  """Returns a table with a column per source."""
  first = next(iter(results.values()))
  table = rich.table.Table(
      title=f"{first['num_prompts']} held-out prompts, k = {first['k']}"
  )
  table.add_column("")
  for name in results:
    table.add_column(name, justify="right", overflow="fold")
  for label, key, stderr in _ROWS:
    cells = [_cell(r.get(key), r.get(stderr)) for r in results.values()]
    table.add_row(label, *cells)
  return table


def _load(
    config: ml_collections.ConfigDict, workdir: str, operand: str
) -> tuple[str, policy_lib.Policy, types.PyTree, int | None]:
  """Returns the name, policy, params and step of a source."""
  is_checkpoint = not operand or operand.isdecimal()
  if not is_checkpoint:
    if not pathlib.Path(operand).expanduser().is_dir():
      raise ValueError(
          f"operand {operand!r}: allowed the step of a checkpoint or a folder"
          " that exists"
      )
    config = config.copy_and_resolve_references()
    with config.unlocked():
      config.init = operand
    policy = policy_lib.make(config, workdir)
    return operand, policy, policy_lib.initial_params(policy, config.seed), None
  policy, params, step = model_source.restore(
      config,
      workdir,
      int(operand) if operand else None,
      sharding.make_mesh(config.mesh),
  )
  return f"checkpoint {step}", policy, params, step


def _evaluate(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    params: types.PyTree,
    version: int,
) -> dict[str, Any]:
  """Returns the evaluator's metrics on the held-out split."""
  evaluator = parts.make_evaluator(config, policy, tasks_base.HELD_OUT)
  num_prompts = min(
      config.evaluate.final_prompts,
      policy.task.num_prompts(tasks_base.HELD_OUT),
  )
  try:
    return evaluator.run(params, num_prompts, version=version)
  finally:
    evaluator.close()


def _cell(value: Any, stderr: Any) -> str:
  if value is None:
    return "-"
  if stderr is None:
    return f"{value:.3f}"
  return f"{value:.3f} ± {stderr:.3f}"

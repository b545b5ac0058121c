# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `evaluate` program: held-out metrics of checkpoints and model folders.

    python -m tba_jax.main --program=evaluate --workdir=runs/countdown
    python -m tba_jax.main --program=evaluate --workdir=runs/countdown \\
        240 runs/countdown/sft/model
    python -m tba_jax.main --program=evaluate --workdir=runs/chat \\
        --inspect='exam.py@exam --limit 100'

An operand is the step of one of the workdir's checkpoints or a Hugging Face
folder; the default is the newest checkpoint. Results are printed with samples
and written to the key "evaluate" of WORKDIR/eval.json, by source. The KL is to
the policy of `config.init`, if it can be loaded. `evaluate.variants` evaluates
each source with several settings of the task. With `--inspect`, tasks of
Inspect evaluate it instead, also during training (`inspect_tasks.py`).
"""

from collections.abc import Sequence
import importlib
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import ml_collections
import rich.console
import rich.table
import rich.text

from tba_jax import types
from tba_jax.config import load as config_load
from tba_jax.evaluation import reward_judge
from tba_jax.learning import model_source
from tba_jax.models.hf import hf_hub
from tba_jax.policy import frozen_models
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import reference_policy
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.run import text
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes

_KEY = "evaluate"
_INSPECT = "--inspect="
# Rows of the table: metric, and its interval if it has one.
_ROWS = (
    ("pass@1", "pass_at_1"),
    ("pass@k", "pass_at_k"),
    ("pass@1, greedy", "greedy_pass_at_1"),
    ("mean reward", "mean_reward"),
    ("KL to the reference, nats", "kl"),
    ("perplexity under the initial policy", "ref_perplexity"),
    ("the papers' perplexity", "diluted_perplexity"),
    ("win-rate", "win_rate"),
    ("win-rate, greedy", "greedy_win_rate"),
    ("gold reward", "gold_reward"),
    ("gold reward, greedy", "greedy_gold_reward"),
    ("gold reward above the reference's", "gold_margin"),
    ("distinct correct of k", "distinct_correct"),
    ("distinct correct of k, solved prompts", "distinct_correct_per_solved"),
    ("distinct share of k", "distinct_share"),
    ("cosine distance of attacks", "cosine_distance"),
    ("cosine distance of successful attacks", "cosine_distance_right"),
    ("distinct successful attacks", "distinct_attacks"),
    ("clusters of successful attacks", "unique_attacks"),
    ("tokens of a completion", "mean_length"),
    ("share with a stop token", "stop_rate"),
    ("distance to the target, at least", "certificate/tv_lower"),
    ("distance to the target, at most", "certificate/tv_upper"),
    ("share of prompts with vacuous bounds", "certificate/vacuous"),
    ("log Z, at least", "certificate/log_z_lower"),
    ("log Z, at most", "certificate/log_z_upper"),
    ("KL to the target, at least", "certificate/kl_lower"),
    ("KL to the target, clipped at 20 nats, at most", "certificate/kl_upper"),
    ("share of clipped completions, at most", "certificate/clipped_upper"),
    ("target's mass not found, at most", "certificate/unfound_upper"),
    ("target's effective solutions", "certificate/modes"),
    # Shown only if not zero; counts are by cause.
    ("share not judged", "failure_share"),
    ("completions not judged", "reward_failures"),
    ("comparisons without a verdict", "no_verdict"),
)
# Minimum seconds between two lines of progress.
SHOW_EVERY_S = 5.0
_NUM_SAMPLES = 4
_SAMPLE_WIDTH = 300


def run_evaluate(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  processes.prepare_compiling()
  tasks = [o for o in operands if o.startswith(_INSPECT)]
  operands = [o for o in operands if o not in tasks]
  try:
    if tasks:
      # It imports this module.
      inspect_tasks = importlib.import_module(f"{__package__}.inspect_tasks")
      inspect_tasks.run(
          config, workdir, operands, tasks[-1].removeprefix(_INSPECT)
      )
    else:
      run(config, workdir, operands)
  except (ValueError, FileNotFoundError) as error:
    return processes.refuse(error)
  except subprocess.SubprocessError as error:  # Inspect may do better again.
    print(f"error: {error}", file=sys.stderr)
    return 1
  return processes.EXIT_OK


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """Evaluates each source, prints a table and adds to WORKDIR/eval.json.

  Missing sources are refused before any source is evaluated; each result is
  written to the file as soon as it is known.

  Holds the workdir's lock, because a training run also writes `eval.json`.

  Args:
    config: settings with `evaluate.num_completions` completions of at most
      `evaluate.final_prompts` held-out prompts.
    workdir: directory of the run; if operands are folders, it is created if
      missing.
    operands: steps of checkpoints, or Hugging Face folders; the default is the
      newest checkpoint.

  Returns:
    The evaluator's result by source, "checkpoint 320" or the folder as given,
    each with `step` (None for a folder) and `time`.

  Raises:
    FileNotFoundError: the checkpoint does not exist.
    ValueError: a source does not exist, cannot be read or does not fit the
      config; or another process runs in the workdir.
  """
  lock = bucket.hold(run_directory.lock(workdir), workdir)
  try:
    path = pathlib.Path(workdir) / "eval.json"
    # Read the file first: if it is damaged, no evaluation is wasted.
    saved = jsonl.read_object(path, {f"{_KEY}?": {}}) or {}
    for operand in operands:
      check_source(workdir, operand)
    results, mesh = {}, model_source.mesh_here(config.mesh)
    for operand in operands or ("",):
      for variant, its_config in _variants(config):
        name, policy, params, step = load_source(
            its_config, workdir, operand, mesh
        )
        references = make_references(its_config, workdir, policy, mesh)
        result = evaluate_source(
            its_config, workdir, policy, params, step or 0, references, mesh
        )
        name = f"{name}, {variant}" if variant else name
        results[name] = {"step": step, "time": time.time(), **result}
        # If a source fails, earlier results are not lost.
        saved[_KEY] = {**(saved.get(_KEY) or {}), **results}
        jsonl.atomic_write_json(path, saved)
  finally:
    lock.close()
  console = rich.console.Console()
  console.print(make_table(results))
  console.print(make_samples(results))
  return results


def make_table(results: dict[str, dict[str, Any]]) -> rich.table.Table:
  """Returns a table with a column per source."""
  first = next(iter(results.values()))
  table = rich.table.Table(
      title=f"{first['num_prompts']} held-out prompts, k = {first['k']},"
      f" intervals of {first['confidence']:.0%}"
  )
  table.add_column("")
  for name in results:
    table.add_column(name, justify="right", overflow="fold")
  more = metrics.more_rows(*results.values())
  for label, key in (*_ROWS, *((label, key) for key, label in more.items())):
    none = (None, {}, 0.0) if key == "failure_share" else (None, {})
    if any(result.get(key) not in none for result in results.values()):
      table.add_row(label, *(_cell(r, key) for r in results.values()))
  return table


def make_samples(results: dict[str, dict[str, Any]]) -> rich.table.Table:
  """Returns a table of the first completions of each source."""
  table = rich.table.Table(title="samples", show_lines=True)
  for name in ("source", "prompt", "completion", "reward", "what is wrong"):
    table.add_column(name, overflow="fold")
  for name, result in results.items():
    for sample in result["samples"][:_NUM_SAMPLES]:
      texts = (
          text.printable(sample[key], _SAMPLE_WIDTH)
          for key in ("prompt", "completion")
      )
      reason = text.printable(sample["reason"], _SAMPLE_WIDTH)
      cells = (name, *texts, text.number(sample["reward"]), reason)
      table.add_row(*(rich.text.Text(cell) for cell in cells))
  return table


def _variants(
    config: ml_collections.ConfigDict,
) -> list[tuple[str, ml_collections.ConfigDict]]:
  """Returns each variant of the task's settings, with its config.

  Raises:
    ValueError: a setting is unknown or invalid.
  """
  out = []
  for variant in config.evaluate.variants.split(";"):
    its_config = config.copy_and_resolve_references()
    settings = [f"task.{item}" for item in variant.split(",") if item]
    config_load.apply_overrides(its_config, settings)
    out.append((variant, its_config))
  return out


def check_source(workdir: str, operand: str) -> None:
  """Raises ValueError or FileNotFoundError for a missing source."""
  if operand.isdecimal():
    model_source.check_checkpoint(workdir, int(operand))
  elif not hf_hub.find(operand).is_dir():
    raise ValueError(
        f"operand {operand!r}: must be the step of a checkpoint or a folder"
        " that exists"
    )


def load_source(
    config: ml_collections.ConfigDict,
    workdir: str,
    operand: str,
    mesh: jax.sharding.Mesh,
) -> tuple[str, policy_lib.Policy, types.PyTree, int | None]:
  """Returns the name, policy, params and step of a source."""
  is_checkpoint = not operand or operand.isdecimal()
  if not is_checkpoint:
    config = config.copy_and_resolve_references()
    with config.unlocked():
      config.init = operand
      config.lora.rank = 0
    policy = policy_lib.make_policy(config, workdir)
    params = model_source.initial_params(config, policy, mesh)
    return operand, policy, params, None
  policy, params, step = model_source.restore(
      config, workdir, int(operand) if operand else None, mesh
  )
  return f"checkpoint {step}", policy, params, step


def make_references(
    config: ml_collections.ConfigDict,
    workdir: str,
    policy: policy_lib.Policy,
    mesh: jax.sharding.Mesh,
) -> dict[str, reference_policy.Reference]:
  """Returns the evaluator's reference policies; {} if none can be loaded."""
  try:
    start = policy_lib.make_policy(config, workdir)
    model = start.model
    if config.reference.init:
      model, params = frozen_models.load_reference(
          config, policy.tokenizer, mesh
      )
    elif model.config.vocab_size == policy.model.config.vocab_size:
      params = model_source.initial_params(config, start, mesh)
    else:
      return {}
  except (ValueError, OSError):
    return {}
  make = lambda temperature: reference_policy.Reference(
      model, params, temperature=temperature
  )
  out = {}
  temperature = config.sampling.temperature
  # Greedy sampling has no KL.
  if temperature > 0:
    out["reference"] = make(temperature)
  if config.evaluate.judge:
    plain = out["reference"] if temperature == 1 else make(1.0)
    out["plain_reference"] = plain
  return out


def evaluate_source(
    config: ml_collections.ConfigDict,
    workdir: str,
    policy: policy_lib.Policy,
    params: types.PyTree,
    version: int,
    references: dict[str, reference_policy.Reference],
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
  """Returns the evaluator's metrics on the held-out split."""
  if config.evaluate.certificate and "reference" not in references:
    raise ValueError(
        "config.evaluate.certificate = True: must be False, because the"
        " reference could not be loaded; set config.reference.init"
    )
  evaluator = reward_judge.make_evaluator(
      config, workdir, policy, mesh=mesh, **references
  )
  shown_at = time.monotonic()

  def show(num_done: int, num_prompts: int) -> None:
    nonlocal shown_at
    if time.monotonic() - shown_at >= SHOW_EVERY_S:
      shown_at = time.monotonic()
      line = f"evaluated {num_done}/{num_prompts} prompts"
      print(line, file=sys.stderr, flush=True)

  try:
    return evaluator.run_all(
        params,
        config.evaluate.final_prompts,
        version=version,
        on_progress=show,
    )
  finally:
    evaluator.close()


def _cell(result: dict[str, Any], key: str) -> str:
  if result.get(key) in (None, {}):
    return "-"
  if isinstance(result[key], dict):
    causes = ", ".join(f"{n} {cause}" for cause, n in result[key].items())
    return f"{sum(result[key].values())} ({causes})"
  interval = result.get(f"{key}_interval")
  if interval is None:
    return f"{result[key]:.3f}"
  return f"{result[key]:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"

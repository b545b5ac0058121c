# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds to a held-out pass@1, versus GRPO of other libraries.

    python -m benchmarks time_to_reward [SEED,… [RUN …]]

All runs of a seed start from one fine-tuned policy and sample the same prompts
in the same order. `ours` is the unchanged config, run by three processes on
this machine; `ours_…` vary countdown's recipe; `grpo…` are TRL's, `tunix…`
tunix's. This package's evaluator scores snapshots of the params afterwards. The
clock starts at the first step and excludes its compilation, evaluations and
snapshots; `start_s` is the time before the second step.

Runs of a library are skipped if the interpreter in `TBA_JAX_TRL` or
`TBA_JAX_TUNIX` (default: this one) cannot import it. Results accumulate in
runs/time_to_reward; remove the folder to start over.
"""

from collections.abc import Mapping, Sequence
import contextlib
import pathlib
import shutil
import statistics
import sys
import threading
import time
from typing import Any

import matplotlib
from matplotlib import pyplot
import ml_collections
import numpy as np

from benchmarks import peer_grpo
from benchmarks import results
from tba_jax.config import load as load_config
from tba_jax.evaluation import reward_judge
from tba_jax.learning import model_source
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import sft
from tba_jax.programs import train
from tba_jax.replay import prompt_order
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.tasks import base

# Overrides of the config.
_TRAINER_REFERENCE = ["reference.role=trainer", "search.lead_steps=1"]
OURS = {
    "ours": [],
    "ours_trainer_reference": _TRAINER_REFERENCE,
    "ours_larger_beta": ["loss.beta=0.05"],
    "ours_bounded_token": [
        "loss.correction=bounded_token", "loss.ratio_clip=0"
    ],
    "ours_clip_low": ["loss.baseline_shift=-0.1"],
    "ours_oapl": ["loss.name=oapl", "reference.role=none"],
    "ours_ema_tb": ["loss.name=ema_tb", "reference.role=none"],
    "ours_larger_groups": [
        *_TRAINER_REFERENCE, "search.samples_per_prompt=8",
        "search.prompts_per_step=24", "search.prompts_per_round=24",
        "train.completions_per_prompt=8", "train.prompts_per_batch=16",
        "train.micro_batch_prompts=16",
    ],
}  # fmt: skip
# Settings of `peer_grpo.run`. `grpo` and `tunix_grpo` have their library's
# default loss; TRL's rates are the best of several tried on other seeds.
_PEERS = {
    "trl": {
        "grpo": {"learning_rate": 6e-4, "beta": 0.0, "scale_rewards": "group"},
        "grpo_half_rate": {
            "learning_rate": 3e-4, "beta": 0.0, "scale_rewards": "group"
        },
        "grpo_small_kl": {
            "learning_rate": 3e-4, "beta": 0.02, "scale_rewards": "group"
        },
        "grpo_small_groups": {
            "learning_rate": 3e-4, "beta": 0.0, "scale_rewards": "group",
            "prompts_per_batch": 64, "completions_per_prompt": 4,
        },
        "grpo_small_batch": {
            "learning_rate": 3e-4, "beta": 0.0, "scale_rewards": "group",
            "completions_per_prompt": 4, "num_steps": 640,
        },
        "grpo_kl": {
            "learning_rate": 6e-4, "beta": 0.05, "scale_rewards": "none"
        },
    },
    "tunix": {
        "tunix_grpo": {"learning_rate": 6e-4, "beta": 0.04},
        "tunix_grpo_no_kl": {"learning_rate": 3e-4, "beta": 0.0},
        "tunix_full_rate": {"learning_rate": 6e-4, "beta": 0.0},
        "tunix_small_groups": {
            "learning_rate": 3e-4, "beta": 0.0,
            "prompts_per_batch": 64, "completions_per_prompt": 4,
        },
        "tunix_small_batch": {
            "learning_rate": 3e-4, "beta": 0.0,
            "completions_per_prompt": 4, "num_steps": 640,
        },
    },
}  # fmt: skip
_PEER_OF = {name: peer for peer, runs in _PEERS.items() for name in runs}
RUNS = (*OURS, *_PEER_OF)
TARGETS = (0.5, 0.6, 0.7)
# Default sizes of peers' runs.
_PEER_SIZES = {
    "num_steps": 320, "prompts_per_batch": 32, "completions_per_prompt": 8
}  # fmt: skip
_FOLDER = pathlib.Path("runs") / "time_to_reward"
SNAPSHOT_STEPS = 20
_EVALUATED_COMPLETIONS = 4
# Columns of the table with means over the seeds: key and digits.
_MEANS = {
    "end_pass_at_1": 3, "end_pass_at_k": 3, "end_distinct": 2, "end_steps": 0,
    "end_seconds": 0, "step_s": 3, "completions_per_s": 0, "start_s": 0,
}  # fmt: skip
COLORS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#000000",
          "#56b4e9", "#999999",
          *matplotlib.colormaps["tab10"].colors,
          *matplotlib.colormaps["Set2"].colors)  # fmt: skip

matplotlib.use("agg")


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains and evaluates; writes table.md and time_to_reward.png.

  Args:
    config: config of `ours`; `evaluate.final_prompts` held-out prompts are
      evaluated.
    operands: seeds separated by commas (default 0), then names of `RUNS`
      (default all).

  Returns:
    `runs`: `summarize` of each run and seed in the folder; `left_out`: runs
    whose library is not installed; `folder`.

  Raises:
    ValueError: an operand is invalid.
    RuntimeError: a run failed.
  """
  seeds, names = results.parse(operands, RUNS)
  left_out = []
  for peer, runs in _PEERS.items():
    selected = [name for name in names if name in runs]
    if selected and not peer_grpo.is_installed(peer):
      left_out += selected
      print(
          f"{', '.join(selected)}: skipped, {peer_grpo.python(peer)} cannot"
          f" import {peer}; set {peer_grpo.variable(peer)} to one that can",
          file=sys.stderr,
      )
  processes.prepare_compiling()
  results.measure(
      seeds,
      [name for name in names if name not in left_out],
      _FOLDER,
      lambda name, seed: _measure(config, name, seed),
      summarize,
  )
  rows = results.read(RUNS, _FOLDER)
  results.print_table(make_table(rows), _FOLDER / "table.md")
  _plot(rows, _FOLDER / "time_to_reward.png")
  return {
      "runs": [summarize(result) for result in rows],
      "left_out": left_out,
      "folder": str(_FOLDER),
  }


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the seconds to each of `TARGETS`, and how the run ended."""
  seconds_to = {
      f"seconds_to_{target:.2f}": results.at_target(
          result["seconds"], result["pass_at_1"], target
      )
      for target in TARGETS
  }
  ends = ("pass_at_1", "pass_at_k", "distinct", "seconds", "steps")
  return {
      "name": result["name"],
      "seed": result["seed"],
      **seconds_to,
      **{f"end_{name}": result[name][-1] for name in ends},
      "step_s": result["step_s"],
      "completions_per_s": result["completions_per_s"],
      "start_s": result["start_s"],
  }


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per run: means over its seeds, with the range of seconds."""
  heads = [
      "run", "seeds", *(f"s to {target:.2f}" for target in TARGETS),
      "pass@1 at the end", f"pass@{_EVALUATED_COMPLETIONS}", "distinct",
      "steps", "s", "s a step", "completions/s", "start, s",
  ]  # fmt: skip
  rows = [heads]
  for name in RUNS:
    summaries = [summarize(r) for r in results.of_name(runs, name)]
    if not summaries:
      continue
    columns = {
        key: [summary[key] for summary in summaries] for key in summaries[0]
    }
    rows.append(
        [
            name,
            ", ".join(map(str, columns["seed"])),
            *(
                median_and_range(columns[f"seconds_to_{t:.2f}"])
                for t in TARGETS
            ),
            *(
                f"{statistics.mean(columns[key]):.{digits}f}"
                for key, digits in _MEANS.items()
            ),
        ]
    )
  return rows


def median_and_range(values: Sequence[float | None]) -> str:
  """Returns "median (minimum to maximum)"; "never" counts as the maximum."""
  text = lambda v: "never" if v is None else f"{v:.0f}"
  ordered = sorted(values, key=lambda v: float("inf") if v is None else v)
  middle = text(ordered[len(ordered) // 2])
  if len(ordered) == 1:
    return middle
  return f"{middle} ({text(ordered[0])} to {text(ordered[-1])})"


def _measure(
    config: ml_collections.ConfigDict, name: str, seed: int
) -> dict[str, Any]:
  """Trains one run, evaluates its snapshots, and returns its result."""
  folder = _FOLDER / f"{name}-seed{seed}"
  config = make_config(config, seed)
  start = _FOLDER / f"start-seed{seed}"
  if not policy_lib.sft_folder(start).exists():
    with stdout_to_stderr():
      sft.run(config, str(start), stop=threading.Event())
  with config.unlocked():
    config.init = str(policy_lib.sft_folder(start).absolute())
  policy = policy_lib.make_policy(config, "")
  shutil.rmtree(folder, ignore_errors=True)
  began = time.time()
  if name in OURS:
    load_config.apply_overrides(config, OURS[name])
    clock = train_ours(config, folder)
    load = lambda step: model_source.restore(
        config, folder, step, model_source.one_device(), needs_task=False
    )[1]
    size = config.train.prompts_per_batch * config.train.completions_per_prompt
  else:
    settings = peer_settings(config, policy.task, name)
    clock = peer_grpo.run(_PEER_OF[name], folder, settings)
    load = lambda step: hf.load(folder / f"step{step}")[1]
    size = settings["prompts_per_batch"] * settings["completions_per_prompt"]
  times = clock["step_ends"]
  timed = time_snapshots(times)
  snapshots = {step: load if step else None for step in timed["steps"]}
  return {
      **timed,
      **_evaluate(config, policy, snapshots),
      "completions_per_s": size * len(times) / timed["seconds"][-1],
      "start_s": times[0] - began,
      "versions": clock.get("versions", {}),
  }


def time_snapshots(step_ends: Sequence[float]) -> dict[str, Any]:
  """Returns the snapshots' steps and seconds, and the median step's seconds.

  The first step compiles, so the median step replaces it.
  """
  end = len(step_ends)
  steps = sorted({*range(SNAPSHOT_STEPS, end, SNAPSHOT_STEPS), end})
  step_s = float(statistics.median(np.diff(step_ends)))
  return {
      "steps": [0, *steps],
      "seconds": [
          0.0, *(step_ends[s - 1] - step_ends[0] + step_s for s in steps)
      ],
      "step_s": step_s,
  }  # fmt: skip


def make_config(
    config: ml_collections.ConfigDict, seed: int
) -> ml_collections.ConfigDict:
  """Returns a copy that saves snapshots, with minimal evaluation."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.seed = seed
    config.checkpoint.every_steps = SNAPSHOT_STEPS
    config.checkpoint.keep = config.train.num_steps
    config.evaluate.num_completions = _EVALUATED_COMPLETIONS
    config.evaluate.every_steps = 0
  return config


def train_ours(
    config: ml_collections.ConfigDict, folder: pathlib.Path
) -> dict[str, Any]:
  """Trains; returns the end time of each step, minus the time of saves."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    # Evaluate as little as possible; snapshots are evaluated later.
    config.evaluate.final_prompts = config.evaluate.batch_prompts
  with stdout_to_stderr():
    status = train.run(config, str(folder), [])
  if status:
    raise RuntimeError(f"{folder} ended with status {status}")
  records = metrics.last_per_step(jsonl.read_jsonl(folder / "metrics.jsonl"))
  spans = jsonl.read_jsonl(folder / "spans" / "trainer-0.jsonl")
  saves = [s for s in spans if s["kind"] == "checkpoint"]
  return {
      "step_ends": [
          r["time"]
          - sum(s["t1"] - s["t0"] for s in saves if s["t0"] < r["time"])
          for r in records
          if "train/loss" in r
      ]
  }


def peer_settings(
    config: ml_collections.ConfigDict, task: base.Task, name: str
) -> dict[str, Any]:
  """Returns the settings of a peer's run, with the same prompts as ours."""
  order = prompt_order.PromptOrder(
      task.num_prompts(base.TRAIN), seed=config.seed
  )
  settings = {**_PEER_SIZES, **_PEERS[_PEER_OF[name]][name]}
  return {
      **settings,
      "model": config.init,
      "prompts": [
          task.prompt(base.TRAIN, order.prompt(i)[0])
          for i in range(settings["num_steps"] * settings["prompts_per_batch"])
      ],
      "max_completion_tokens": config.sampling.max_completion_tokens,
      "full_length": False,
      "snapshot_steps": SNAPSHOT_STEPS,
      "seed": config.seed,
  }


def _evaluate(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    snapshots: Mapping[int, Any],
) -> dict[str, list[float]]:
  """Returns pass@1, pass@k and distinct solutions of each snapshot.

  Args:
    config: config of the evaluator.
    policy: policy that all runs start from.
    snapshots: step -> function that loads its params; None = the start.
  """
  evaluator = reward_judge.make_evaluator(config, "", policy)
  samples: dict[str, list[float]] = {
      "pass_at_1": [], "pass_at_k": [], "distinct": []
  }  # fmt: skip
  try:
    for step, load in snapshots.items():
      params = load(step) if load else policy_lib.initial_params(policy, 0)
      result = evaluator.run(
          params, config.evaluate.final_prompts, version=step
      )
      samples["pass_at_1"].append(result["pass_at_1"])
      samples["pass_at_k"].append(result["pass_at_k"])
      samples["distinct"].append(result["distinct_correct_per_solved"])
  finally:
    evaluator.close()
  return samples


def stdout_to_stderr() -> contextlib.AbstractContextManager[Any]:
  """Redirects stdout to stderr; stdout is reserved for the result's line."""
  return contextlib.redirect_stdout(sys.stderr)


def _plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws pass@1 over the seconds of training, a line per run and seed."""
  figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
  names = [name for name in RUNS if results.of_name(runs, name)]
  for name, color in zip(names, COLORS):
    for i, result in enumerate(results.of_name(runs, name)):
      axes.plot(
          result["seconds"],
          result["pass_at_1"],
          color=color,
          label=None if i else name,
      )
  axes.set_xlabel("seconds of training")
  axes.set_ylabel("held-out pass@1")
  axes.set_xlim(left=0)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)

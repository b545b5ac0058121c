# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Held-out reward of a real pretrained model, by minutes of training.

    python -m studies --config=configs/instructions.py \\
        real [SEED,… [MINUTES [RUN …]]]

`ours` is the config with constant learning rates, so a longer run extends a
shorter one; `ours_lora` trains adapters. `grpo…` are TRL's, and `skyrl` is GRPO
of an adapter on SkyRL's server, by the interpreters in `TBA_JAX_TRL` and
`TBA_JAX_SKYRL` (default: this one). All start from `config.init` and see the
same prompts in the same order, with the same reward and as many trained
completions per prompt and step. Params saved every few minutes are evaluated
afterwards. The clock excludes saves and the time before the second step.

Runs for the paper's claims are `ours_tb`, `ours_grpo`, …, which differ only in
the objective, and `ours_lag0`, …: TB at that exact lag for 160 steps of half
the prompts, regardless of MINUTES, in one thread that keeps the samples (a
searcher would need 64 versions). Their evaluation samples 8 completions per
prompt; pass@8 is the share of prompts with a completion that follows all
instructions.

Writes table.md, samples.md, levels.md and claims.png (runs at the same reward),
lags.png and real.png from all results. A later command executes missing runs
and resumes interrupted or extended ones; unfinished runs of other libraries
restart. Run directories are in runs/real, with 1.6 GB per saved params of
`ours`.
"""

from collections.abc import Mapping, Sequence
import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import signal
import statistics
import sys
import threading
import time
from typing import Any

import matplotlib
from matplotlib import pyplot
import ml_collections

from benchmarks import peak_memory
from benchmarks import peer_grpo
from benchmarks import results
from benchmarks import skyrl_grpo
from benchmarks import time_to_reward
from tba_jax.config import load as load_config
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.programs import evaluate
from tba_jax.programs import inline
from tba_jax.programs import model_sizes
from tba_jax.programs import train
from tba_jax.replay import prompt_order
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import task_table
from tba_jax.tools import memory_model
from tba_jax.tools import sweep

# As many rows as in a searcher.
_EIGHT = [
    "evaluate.num_completions=8", "evaluate.batch_prompts=4",
    "evaluate.final_prompts=64",
]  # fmt: skip


def _objective(name: str, beta: float, *overrides: str) -> list[str]:
  return [
      f"loss.name={name}",
      f"loss.beta={beta}",
      *overrides,
      *_EIGHT,
  ]


_LAGS = (0, 4, 16, 64)
_LAG_STEPS = 160
_LAG_FORMS = {"": [], "_bounded": ["loss.correction=bounded_sequence"]}
_CLIP = "loss.ratio_clip=0.2"
# Overrides of the config.
OURS = {
    "ours": [],
    "ours_double_rate": ["optimizer.learning_rate=5e-5"],
    "ours_bounded_double_rate": [
        "optimizer.learning_rate=5e-5", "loss.correction=bounded_token",
    ],
    "ours_lora": [
        "lora.rank=16", "lora.alpha=32.0", "optimizer.learning_rate=5e-4",
        "optimizer.learning_rate_final=5e-4",
    ],
    "ours_tb": _EIGHT,
    "ours_grpo": _objective("grpo", 0.02, _CLIP),
    "ours_grpo_no_kl": _objective("grpo", 0.0, _CLIP),
    "ours_rloo": _objective("proximal_rloo", 0.02, _CLIP),
    # Its β is a margin.
    "ours_online_dpo": _objective("online_dpo", 0.1),
    **{f"ours_lag{steps}{form}": [
        f"train.num_steps={_LAG_STEPS}", "train.prompts_per_batch=2",
        "train.micro_batch_prompts=2", "sampling.num_slots=16", *_EIGHT, *own,
    ] for steps in _LAGS for form, own in _LAG_FORMS.items()},
}  # fmt: skip
# Settings of `trl_grpo.py` and `skyrl_grpo.py`.
PEERS = {
    "grpo": {"learning_rate": 5e-5, "beta": 0.0},
    "grpo_half_rate": {"learning_rate": 2.5e-5, "beta": 0.0},
    "grpo_double_rate": {"learning_rate": 1e-4, "beta": 0.0},
    "grpo_quadruple_rate": {"learning_rate": 2e-4, "beta": 0.0},
    "grpo_kl": {"learning_rate": 5e-5, "beta": 0.02},
    # An adapter, like `ours_lora`; alpha is always 32.
    "skyrl": {"learning_rate": 5e-4, "rank": 16},
}
RUNS = (*OURS, *PEERS)
# Held-out rewards whose times are reported.
TARGETS = (0.2, 0.3, 0.4)
_DEFAULT_MINUTES = 25.0
# Unreachable number of steps.
_NUM_STEPS = 100_000
# Maximum minutes between snapshots of params, and their minimum number.
_SNAPSHOTS, _NUM_SNAPSHOTS = 5.0, 4
_RUNS = pathlib.Path("runs") / "real"
RESULTS = pathlib.Path(__file__).parent
# Evaluation metrics; a result has a list of each.
_KEPT = {
    "mean_reward": "reward", "new_kinds/mean_reward": "reward, new kinds",
    "kl": "KL, nats", "mean_length": "tokens", "stop_rate": "ended",
    "distinct_share": "distinct share",
}  # fmt: skip
# `pass_at_1` is the share of completions that follow all instructions, since
# the reward is the share of instructions.
_SOLVED = {
    "pass_at_1": "pass@1", "pass_at_k": "pass@8",
    "distinct_correct_per_solved": "distinct right of 8, solved prompts",
}  # fmt: skip
# Metrics in the pictures of the claims.
_CLAIMED = {"distinct_share": "distinct texts", "pass_at_k": "pass@8"}
_NUM_SAMPLES = 6
_POLL_S = 1.0

matplotlib.use("agg")


def parse(operands: Sequence[str]) -> tuple[list[int], float, list[str]]:
  """Returns seeds, minutes and names of `[SEED,… [MINUTES [RUN …]]]`.

  Raises:
    ValueError: an operand is wrong.
  """
  operands = list(operands)
  minutes = _DEFAULT_MINUTES
  if len(operands) > 1:
    try:
      minutes = float(operands.pop(1))
    except ValueError as error:
      raise ValueError(f"operand {error}: must be minutes") from error
  if not 0 < minutes < float("inf"):
    raise ValueError(f"operand {minutes}: must be minutes above 0")
  seeds, names = results.parse(operands, RUNS)
  return seeds, minutes, names if len(operands) > 1 else ["ours"]


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains and evaluates; writes tables and pictures.

  Args:
    config: config of `ours`; `evaluate.final_prompts` prompts of each held-out
      split are evaluated.
    operands: arguments of `parse`; by default seed 0, 25 minutes, `ours`.

  Returns:
    `runs`: `summarize` of each result in the folder; `folder`.

  Raises:
    ValueError: an operand or the model is invalid, or a peer is not installed.
    RuntimeError: a run failed.
  """
  seeds, minutes, names = parse(operands)
  if config.init == "sft":
    raise ValueError(
        "config.init='sft': must be a pretrained model, as in"
        " --config=configs/instructions.py"
    )
  for peer in sorted({_package(name) for name in names if name in PEERS}):
    if not peer_grpo.is_installed(peer):
      raise ValueError(
          f"{peer_grpo.python(peer)} cannot import {peer}; set"
          f" {peer_grpo.variable(peer)} to an interpreter that can"
      )
  if "skyrl" in names and importlib.util.find_spec("tinker") is None:
    raise ValueError("skyrl needs the client: pip install tinker")
  for seed in seeds:
    for name in names:
      if any(
          _is_by_steps(name) or result["minutes"] >= minutes
          for result in results.read([name], RESULTS)
          if result["seed"] == seed
      ):
        continue
      result = measure_run(config, name, seed, minutes)
      results.keep(RESULTS, result)
      print(f"{name}-seed{seed}: {summarize(result)}", file=sys.stderr)
  rows = results.read(RUNS, RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  results.print_table(make_levels(rows), RESULTS / "levels.md")
  (RESULTS / "samples.md").write_text(make_samples(rows))
  _plot(rows, RESULTS / "real.png")
  _plot_claims(rows, RESULTS / "claims.png")
  _plot_lags(rows, RESULTS / "lags.png")
  return {"runs": [summarize(r) for r in rows], "folder": str(RESULTS)}


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the first and last evaluation, and minutes to each target."""
  rewards = result["mean_reward"]
  return {
      "name": result["name"],
      "seed": result["seed"],
      "minutes": round(result["seconds"][-1] / 60, 1),
      "steps": result["steps"][-1],
      "before": rewards[0],
      **{name: result[name][-1] for name in _KEPT if result.get(name)},
      **{
          f"minutes_to_{target:.2f}": results.at_target(
              [s / 60 for s in result["seconds"]], rewards, target
          )
          for target in TARGETS
      },
      "step_s": result["step_s"],
      "peak_gb": result["peak_gb"],
  }


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per run and seed."""
  rows = [
      [
          *("run", "seed", "minutes", "steps", "reward before"),
          *_KEPT.values(),
          "k",
          *(f"min to {target:.2f}" for target in TARGETS),
          *("s a step", "peak, GB"),
          *(f"{role}, GB (by shapes)" for role in peak_memory.ROLES),
          "processor",
      ]
  ]
  for result in runs:
    s = summarize(result)
    cell = lambda value, digits: (
        "never" if value is None else f"{value:.{digits}f}"
    )
    rows.append(
        [
            *(s["name"], str(s["seed"]), f"{s['minutes']:g}", str(s["steps"])),
            cell(s["before"], 3),
            *(cell(s[k], 3) if k in s else "" for k in _KEPT),
            str(result.get("k", "")),
            *(cell(s[f"minutes_to_{target:.2f}"], 1) for target in TARGETS),
            cell(s["step_s"], 1),
            # Missing if other programs' memory would be included.
            cell(s["peak_gb"], 1) if s["peak_gb"] else "",
            *(_memory_cell(result, role) for role in peak_memory.ROLES),
            _processor(result),
        ]
    )
  return rows


def _processor(result: Mapping[str, Any]) -> str:
  """Returns the processor's name; "" if only its family is known."""
  name = result.get("machine", {}).get("processor", "")
  return name if " " in name else ""


def _memory_cell(result: Mapping[str, Any], role: str) -> str:
  measured, planned = result.get("memory_gb", {}).get(role, (0, 0))
  return f"{measured:.1f} ({planned:.1f})" if measured else ""


def make_levels(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns rows per run of the claims: at each of `TARGETS`, and at the end.

  Values are interpolated linearly before the first evaluation that reaches the
  target; a missed target has no row.
  """
  digits = {"kl": 2, "mean_length": 1, "distinct_share": 3}
  digits |= dict.fromkeys(_SOLVED, 3)
  titles = {**_KEPT, **_SOLVED}
  heads = ["run", "seed", "reward", "minutes", "steps"]
  rows = [[*heads, *(titles[key] for key in digits)]]
  for result in runs:
    if not _is_of_claims(result):
      continue
    for target in (*TARGETS, None):
      if target and max(result["mean_reward"]) < target:
        continue
      end = f"{result['mean_reward'][-1]:.3f}, end"
      rows.append(
          [
              *(result["name"], str(result["seed"])),
              f"{target:.2f}" if target else end,
              f"{_value_at(result, 'seconds', target) / 60:.1f}",
              f"{_value_at(result, 'steps', target):.0f}",
              *(f"{_value_at(result, k, target):.{n}f}"
                for k, n in digits.items()),
          ]
      )  # fmt: skip
  return rows


def _value_at(
    result: Mapping[str, Any], key: str, reward: float | None
) -> float:
  """Returns a value where a run first reaches a reward; at its end for None."""
  if reward is None:
    return result[key][-1]
  rewards = result["mean_reward"]
  return results.at_target(result[key], rewards, reward)


def make_samples(runs: Sequence[Mapping[str, Any]]) -> str:
  """Returns rewards by kind of instruction, and completions side by side."""
  lines = ["# Before and after\n"]
  for result in runs:
    lines.append(f"\n## {result['name']}, seed {result['seed']}\n")
    lines.append("\n| kind | before | after |\n|---|---|---|\n")
    before, after = result["parts"]
    lines += [
        f"| {kind} | {before[kind]:.2f} | {after.get(kind, 0.0):.2f} |\n"
        for kind in sorted(before)
    ]
    lines.append("\n| prompt | before | after |\n|---|---|---|\n")
    for old, new in zip(*result["samples"]):
      cells = (old["prompt"], old["completion"], new["completion"])
      cells_ = (json.dumps(c, ensure_ascii=False)[1:-1] for c in cells)
      lines.append(f"| {' | '.join(t.replace('|', '¦') for t in cells_)} |\n")
  return "".join(lines)


def make_config(
    config: ml_collections.ConfigDict, name: str, seed: int, minutes: float
) -> ml_collections.ConfigDict:
  """Returns the config of a run of ours that saves params at intervals."""
  config = config.copy_and_resolve_references()
  config.run.processes = "many"
  load_config.apply_overrides(config, OURS.get(name, ()))
  if _is_by_steps(name):
    steps = int(name.removeprefix("ours_lag").partition("_")[0])
    config = sweep.Lag(steps).apply(config)
    config.search.prompts_per_round = config.search.prompts_per_step
  with config.unlocked():
    config.seed = seed
    config.optimizer.learning_rate_final = config.optimizer.learning_rate
    config.evaluate.every_steps = 0
    if not _is_by_steps(name):
      config.train.num_steps = _NUM_STEPS
      config.checkpoint.every_steps = _NUM_STEPS
      config.checkpoint.every_s = _snapshot_s(minutes)
      config.checkpoint.keep = _NUM_STEPS
  return config


def _is_by_steps(name: str) -> bool:
  """Returns whether a run has a number of steps instead of a time limit."""
  return name.startswith("ours_lag")


def _snapshot_s(minutes: float) -> float:
  return 60 * min(_SNAPSHOTS, minutes / _NUM_SNAPSHOTS)


def measure_run(
    config: ml_collections.ConfigDict, name: str, seed: int, minutes: float
) -> dict[str, Any]:
  """Trains one run, evaluates its saved params, and returns its result."""
  folder = _RUNS / f"{name}-seed{seed}"
  config = make_config(config, name, seed, minutes)
  began = time.time()
  _RUNS.mkdir(parents=True, exist_ok=True)
  with peak_memory.PeakMemory(_RUNS / f"{folder.name}-peaks.json") as memory:
    if _is_by_steps(name):
      clock = _train_in_loop(config, folder)
    elif name in OURS:
      clock = _train_ours(config, folder, minutes)
    else:
      clock = _train_peer(config, name, folder, minutes)
  own_bytes = 0
  if _is_by_steps(name):
    own_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  if name in PEERS:
    sources = {s: str(folder / "train" / f"step{s}") for s in clock["kept"]}
  else:
    sources = {step: str(step) for step in clock["kept"]}
  evaluated = _evaluate(config, folder, {0: config.init, **sources})
  ends, start_s = clock["step_s"], clock["first_end"] - began
  seconds = lambda step: sum(ends[:step])
  old, new = evaluated[0], evaluated[-1]
  columns = [*_KEPT, *(_SOLVED if old["k"] == 8 else ())]
  return {
      "name": name,
      "seed": seed,
      "minutes": minutes,
      "k": old["k"],
      "steps": [0, *sources],
      "seconds": [seconds(step) for step in (0, *sources)],
      **{k: [f[k] for f in evaluated] for k in columns if k in old},
      "intervals": [f["mean_reward_interval"] for f in evaluated],
      "parts": [
          {
              key.removeprefix("reward/"): value
              for key, value in f.items()
              if key.startswith("reward/")
              and not key.endswith(("_stderr", "_interval"))
          }
          for f in (old, new)
      ],
      "samples": [
          [
              {key: s[key] for key in ("prompt", "completion", "reward")}
              for s in f["samples"][:: config.evaluate.num_completions]
          ][:_NUM_SAMPLES]
          for f in (old, new)
      ],
      "step_s": statistics.median(ends[1:] or ends),
      # None if an earlier process took the first step.
      "start_s": start_s if start_s > 0 else None,
      "peak_gb": max(memory.peak_bytes, own_bytes) / 1e9,
      "memory_gb": {
          role: [memory.of_roles.get(role, 0) / 1e9, planned / 1e9]
          for role, planned in planned_bytes(config).items()
          if name in OURS
      },
      "versions": clock.get("versions", {}),
      "machine": results.machine(),
  }


def _train_ours(
    config: ml_collections.ConfigDict, folder: pathlib.Path, minutes: float
) -> dict[str, Any]:
  """Trains or resumes a run until its steps have taken `minutes`."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    # Evaluate as little as possible; saved params are evaluated later.
    config.evaluate.final_prompts = config.evaluate.batch_prompts
  if sum(step_seconds(folder)) < 60 * minutes:
    ended = threading.Event()
    watch = threading.Thread(
        target=_stop_after, args=(folder, 60 * minutes, ended)
    )
    watch.start()
    try:
      with contextlib.redirect_stdout(sys.stderr):
        status = train.run(config, str(folder), [])
    finally:
      ended.set()
      watch.join()
    if status != 128 + signal.SIGTERM or (
        sum(step_seconds(folder)) < 60 * minutes
    ):
      raise RuntimeError(f"{folder} ended with status {status}")
  records = _records(folder)
  return {
      "step_s": step_seconds(folder),
      "first_end": records[0]["time"],
      "kept": kept_steps(folder, len(records)),
  }


def kept_steps(folder: pathlib.Path, num_steps: int) -> list[int]:
  """Returns the steps after which our run has saved its params.

  Raises:
    RuntimeError: the last of `num_steps` steps is missing.
  """
  steps = sorted(
      int(path.name)
      for path in (folder / "checkpoints").iterdir()
      # Step 0 is the folder `init`.
      if path.name.isdecimal() and int(path.name)
  )
  if num_steps not in steps:
    raise RuntimeError(
        f"{folder}: the params of its last step, {num_steps}, were not saved"
        " (see events.jsonl); remove the folder to start over"
    )
  return steps


def _train_in_loop(
    config: ml_collections.ConfigDict, folder: pathlib.Path
) -> dict[str, Any]:
  """Trains at an exact lag; evaluates halfway and at the end."""
  folder.mkdir(parents=True, exist_ok=True)
  maker = inline.LoopMaker(config)
  ends, saved_steps = [], []
  try:
    loop = maker.make(config)

    def after_step(step: int, draw: Any, metrics: Any) -> None:
      del metrics
      ends.append(time.time())
      finished, reward = step + 1, draw.rewards.mean()
      print(
          f"step {finished}: reward {reward:.2f}", file=sys.stderr, flush=True
      )
      if finished % (_LAG_STEPS // 2) == 0:
        result = maker.evaluator.run_all(
            loop.learner.params, config.evaluate.final_prompts, version=finished
        )
        jsonl.atomic_write_json(folder / f"evaluated-{finished}.json", result)
        saved_steps.append(finished)

    loop.train(after_step)
  finally:
    maker.close()
  gaps = [b - a for a, b in zip(ends, ends[1:])]
  # One gap includes the halfway evaluation.
  gaps[saved_steps[0] - 1] = statistics.median(gaps)
  return {"step_s": [0.0, *gaps], "first_end": ends[0], "kept": saved_steps}


def _stop_after(
    folder: pathlib.Path, limit_s: float, ended: threading.Event
) -> None:
  """Saves and ends this process's run after a time of training."""
  while not ended.wait(_POLL_S):
    if sum(step_seconds(folder)) >= limit_s:
      os.kill(os.getpid(), signal.SIGTERM)
      return


def _records(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the metrics of each step of a run so far."""
  records = jsonl.read_jsonl(folder / "metrics.jsonl")
  return [r for r in metrics.last_per_step(records) if "train/loss" in r]


def step_seconds(folder: pathlib.Path) -> list[float]:
  """Returns the seconds from each step's end to the next step's end.

  Saves are excluded. The first step of a run, which compiles, counts as 0; the
  first step of a later process counts as a median step.
  """
  records = _records(folder)
  spans = jsonl.read_jsonl(folder / "spans" / "trainer-0.jsonl")
  saves = [s for s in spans if s["kind"] == "checkpoint"]
  took, firsts = [], []
  for i, record in enumerate(records):
    if i == 0 or record.get("epoch") != records[i - 1].get("epoch"):
      firsts.append(i)
      took.append(0.0)
      continue
    start, end = records[i - 1]["time"], record["time"]
    saved = sum(s["t1"] - s["t0"] for s in saves if start <= s["t0"] < end)
    took.append(end - start - saved)
  warm = [t for i, t in enumerate(took) if i not in firsts]
  for i in firsts[1:]:
    took[i] = statistics.median(warm) if warm else 0.0
  return took


def _package(name: str) -> str:
  """Returns the library that executes a run."""
  return "skyrl" if name == "skyrl" else "trl"


def peer_settings(
    config: ml_collections.ConfigDict, name: str, minutes: float
) -> dict[str, Any]:
  """Returns the settings of a peer's run, with the same prompts as ours."""
  task = task_table.make_task(config.task)
  order = prompt_order.PromptOrder(
      task.num_prompts(base.TRAIN), seed=config.seed
  )
  prompts = [order.prompt(i)[0] for i in range(task.num_prompts(base.TRAIN))]
  c = config.train
  return {
      **PEERS[name],
      "scale_rewards": "group",
      "task": config.task.to_dict(),
      "prompts": [
          [{"role": "user", "content": task.prompt(base.TRAIN, i)}]
          for i in prompts
      ],
      "prompt_ids": prompts,
      "prompts_per_batch": c.prompts_per_batch,
      "micro_batch_prompts": c.micro_batch_prompts,
      "completions_per_prompt": c.completions_per_prompt,
      "max_completion_tokens": config.sampling.max_completion_tokens,
      "full_length": False,
      "num_steps": _NUM_STEPS,
      "limit_s": 60 * minutes,
      "snapshot_s": _snapshot_s(minutes),
      "seed": config.seed,
  }


def _train_peer(
    config: ml_collections.ConfigDict,
    name: str,
    folder: pathlib.Path,
    minutes: float,
) -> dict[str, Any]:
  """Trains with a peer unless it has finished; returns its seconds per step."""
  model, tokenizer = folder / "model", tokenizer_lib.load(config.init)
  settings = {
      **peer_settings(config, name, minutes),
      "model": str(model.absolute()),
      "stop_ids": sorted(tokenizer.stop_ids),
  }
  trained = folder / "train"
  clock = jsonl.read_json(trained / "result.json")
  had = jsonl.read_json(trained / "settings.json")
  if clock is None or had != json.loads(json.dumps(settings)):
    shutil.rmtree(folder, ignore_errors=True)
    hf.save(model, *hf.load(config.init), tokenizer)
    if _package(name) == "skyrl":
      clock = skyrl_grpo.run(trained, settings)
    else:
      deadline_s = 60 * minutes * 2 + 1200.0
      clock = peer_grpo.run("trl", trained, settings, deadline_s)
  ends = clock["step_ends"]
  gaps = [b - a for a, b in zip(ends, ends[1:])]
  saved_steps = [int(p.name[4:]) for p in trained.glob("step*")]
  return {
      "step_s": [0.0, *gaps],
      "first_end": ends[0],
      "kept": sorted(saved_steps),
      "versions": clock["versions"],
  }


def _evaluate(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    sources: Mapping[int, str],
) -> list[dict[str, Any]]:
  """Returns the evaluator's result of each source.

  Args:
    config: config of the run.
    folder: directory of the run, which stores each result.
    sources: step -> operand of the `evaluate` program; runs share the result of
      step 0.
  """
  evaluated = []
  for step, source in sources.items():
    path = folder / f"evaluated-{step}.json"
    if not step:
      path = _RUNS / f"start-{_digest_of_start(config)}.json"
    if not path.exists():
      with contextlib.redirect_stdout(sys.stderr):
        (result,) = evaluate.run(config, str(folder), [source]).values()
      jsonl.atomic_write_json(path, result)
    evaluated.append(jsonl.read_json(path))
  return evaluated


def _digest_of_start(config: ml_collections.ConfigDict) -> str:
  """Returns a digest of everything that affects the first evaluation."""
  keys = ("seed", "init", "task", "tokenizer", "model", "sampling", "evaluate")
  values = load_config.flatten({k: config.to_dict()[k] for k in keys})
  # A searcher's number of rows does not affect it.
  del values["sampling.num_slots"]
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def planned_bytes(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the bytes per role that `plan` estimates.

  They comprise params, moments, gradients, caches, activations kept for
  gradients, and for the trainer the copy of its state during a save.
  """
  config = model_sizes.on_cpu(config)
  place = lambda mesh_sizes: sharding.abstract_mesh(mesh_sizes, "cpu")
  trainer = memory_model.trainer(config, place(config.mesh), None)
  searcher = memory_model.searcher(
      config, place(memory_model.searcher_sizes(config)), None
  )
  parts = {
      "trainer": sum(trainer.peak.values())
      + memory_model.num_bytes(trainer.state),
      "searcher": sum(searcher.peak.values()),
  }
  if config.run.processes == "one":
    return {"trainer": sum(parts.values())}
  return parts


def _plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws reward over minutes of training, a line per run and seed."""
  figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
  # Omit runs of the claims, whose cores other programs used.
  timed = [result for result in runs if not _is_of_claims(result)]
  names = list(dict.fromkeys(result["name"] for result in timed))
  for result in timed:
    label = f"{result['name']}, seed {result['seed']}"
    if processor := _processor(result):
      label += f" ({processor})"
    axes.plot(
        [s / 60 for s in result["seconds"]],
        result["mean_reward"],
        ("-", "--", ":", "-.")[result["seed"] % 4],
        color=time_to_reward.COLORS[names.index(result["name"])],
        label=label,
    )
  axes.set_xlabel("minutes of training")
  axes.set_ylabel("held-out reward")
  axes.set_xlim(left=0)
  axes.grid(alpha=0.3)
  _save(figure, axes, path, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plot_claims(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws diversity over reward, a line per objective."""
  figure, panels = pyplot.subplots(
      1, len(_CLAIMED), figsize=(9, 3.6), layout="constrained"
  )
  of_objectives = [
      result
      for result in runs
      if _is_of_claims(result) and not _is_by_steps(result["name"])
  ]
  for axes, (key, title) in zip(panels, _CLAIMED.items(), strict=True):
    for result, color in zip(of_objectives, time_to_reward.COLORS):
      axes.plot(
          *(result["mean_reward"], result[key], "o-"),
          color=color,
          label=f"{result['name']}, seed {result['seed']}",
          markersize=3,
      )
    axes.set_xlabel("held-out reward")
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
  _save(figure, panels[0], path)


def _plot_lags(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws final reward and diversity by lag, with a line per form."""
  shown = {"mean_reward": "held-out reward", **_CLAIMED}
  figure, panels = pyplot.subplots(
      1, len(shown), figsize=(11, 3.4), layout="constrained"
  )
  for axes, (key, title) in zip(panels, shown.items(), strict=True):
    for (form, own), color in zip(_LAG_FORMS.items(), time_to_reward.COLORS):
      ends = {}
      for position, steps in enumerate(_LAGS):
        runs_of_lag = results.of_name(runs, f"ours_lag{steps}{form}")
        if runs_of_lag:
          ends[position] = [result[key][-1] for result in runs_of_lag]
      if not ends:
        continue
      means = [statistics.mean(values) for values in ends.values()]
      label = own[0].partition("=")[2] if own else "no correction"
      axes.plot(list(ends), means, "o-", color=color, label=label)
      for position, values in ends.items():
        axes.plot([position] * len(values), values, ".", color=color)
    axes.set_xticks(range(len(_LAGS)), map(str, _LAGS))
    axes.set_xlabel("lag, steps")
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
  _save(figure, panels[0], path)


def _save(
    figure: pyplot.Figure, axes: pyplot.Axes, path: pathlib.Path, **legend: Any
) -> None:
  """Writes a figure with the legend of these axes, if they have lines."""
  if axes.lines:
    axes.legend(frameon=False, **legend)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def _is_of_claims(result: Mapping[str, Any]) -> bool:
  """Returns whether a run was evaluated with 8 completions per prompt."""
  return "pass_at_k" in result

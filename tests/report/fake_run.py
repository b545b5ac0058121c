# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a run directory that looks like a real run's, made from a seed."""

import json
import math
import os
from typing import Any

import numpy as np

from tba_jax.run import metrics
from tba_jax.system import jsonl

START = 1_790_000_000.0
STEP_S = 0.8


def _metrics(step: int, num_steps: int, rng: np.random.Generator) -> dict:
  x = step / max(1, num_steps)
  reward = 0.3 + 0.42 * (1 - math.exp(-3 * x)) + rng.normal(0, 0.035)
  ages = 1 + rng.poisson(1.2, 32)
  values, counts = np.unique(ages, return_counts=True)
  return {
      "train/loss": 0.04 * math.exp(-2 * x) + abs(rng.normal(0, 0.004)) + 0.01,
      "train/reward_mean": reward,
      "train/kl": 9 * (1 - math.exp(-2.5 * x)) + rng.normal(0, 0.4),
      "train/entropy": 0.45 * math.exp(-1.1 * x) + rng.normal(0, 0.01) + 0.08,
      "train/log_z_mean": 6 + 8 * x + rng.normal(0, 0.4),
      "train/log_z_std": 4.0,
      "train/residual_abs": 5 * math.exp(-x) + rng.normal(0, 0.2),
      "train/grad_norm": float(np.exp(rng.normal(0, 0.3))),
      "train/learning_rate": 3e-4 * (1 - 0.9 * x),
      "train/beta": 0.05,
      "train/ratio_clip_share": abs(rng.normal(0.02, 0.008)),
      "train/equal_reward_groups": 0.12 + 0.14 * x + rng.normal(0, 0.02),
      "replay/staleness_steps": float(ages.mean()),
      "replay/staleness_histogram": {
          int(v): int(c) * 8 for v, c in zip(values, counts, strict=True)
      },
      "replay/fresh_share": 0.5 + rng.normal(0, 0.05),
      "replay/unique_share": 0.8 - 0.2 * x + rng.normal(0, 0.02),
      "replay/reward_young": reward + 0.02,
      "replay/reward_old": reward - 0.02 + rng.normal(0, 0.01),
      "replay/size": min(20000, 512 * (step + 1)),
      "replay/use_count_histogram": {"0": 310, "1": 900, "2": 240, "3": 41},
      "time/step_s": STEP_S + abs(rng.normal(0, 0.02)),
      "time/wait_s": abs(rng.normal(0.02, 0.01)),
      "time/draw_s": 0.004,
      "total/completions": 512 * (step + 1),
      "total/tokens": 7_900 * (step + 1),
  }


def _evaluation(x: float, rng: np.random.Generator, samples: int = 0) -> dict:
  gain = 1 - math.exp(-3 * x)
  out = {
      "pass_at_1": 0.29 + 0.41 * gain,
      "pass_at_1_stderr": 0.011,
      "pass_at_k": 0.91 + 0.05 * gain,
      "pass_at_k_stderr": 0.008,
      "k": 8,
      "distinct_correct": 2.0 - 0.2 * gain,
      "distinct_correct_per_solved": 2.2 - 0.25 * gain,
      "mean_length": 15.4,
      "stop_rate": 0.995,
      "num_prompts": 1000,
      "samples": [],
  }
  for i in range(samples):
    for _ in range(8):
      a, b = (int(n) for n in rng.integers(1, 9, 2))
      right = rng.random() < out["pass_at_1"]
      completion = f"{a}*{b}={a * b},{a * b}+{a}={a * b + a if right else 97}"
      out["samples"].append(
          {
              "prompt": f"{3 + i},4,7,2>{17 + i}",
              "prompt_id": i,
              "completion": completion,
              "reward": 1.0 if right else 0.0,
              "tokens": list(completion),
              "logprobs": [float(n) for n in -rng.exponential(0.5, 9)],
          }
      )
  return out


def _sample(i: int, step: int, rng: np.random.Generator) -> dict[str, Any]:
  a, b, c = (int(n) for n in rng.integers(1, 12, 3))
  tokens = f"{a} * {b} = {a * b} , {a * b} + {c} = {a * b + c}".split()
  tokens.append("<eos>")
  right = rng.random() < 0.3 + 0.4 * min(1, i / 100)
  return {
      "step": step,
      "prompt": f"{a},{b},{c},5>{a * b + c}",
      "prompt_id": i,
      "completion": "".join(tokens[:-1]),
      "reward": float(right),
      "reason": "" if right else f"step 2: uses {c} once too often",
      "version": max(0, step - int(rng.integers(0, 4))),
      "tokens": tokens,
      "logprobs": [float(x) for x in -rng.exponential(0.5, len(tokens))],
  }


def _spans(
    workdir: str, num_steps: int, num_searchers: int, rng: np.random.Generator
) -> None:
  os.makedirs(os.path.join(workdir, "spans"), exist_ok=True)

  def write(role: str, index: int, rows: list[tuple]) -> None:
    path = os.path.join(workdir, "spans", f"{role}-{index}.jsonl")
    with open(path, "w") as f:
      for kind, t0, t1, *lane in rows:
        record = {
            "role": role,
            "index": index,
            "kind": kind,
            "t0": round(t0, 6),
            "t1": round(t1, 6),
        }
        if lane:
          record["lane"] = lane[0]
        f.write(json.dumps(record) + "\n")

  rows, t = [("compile", START, START + 6.0)], START + 6.0
  for step in range(num_steps):
    wait, draw = abs(rng.normal(0.05, 0.04)), 0.02
    ref, train = 0.1, 0.6 + abs(rng.normal(0, 0.05))
    for kind, s in (
        ("wait_fresh", wait),
        ("draw", draw),
        ("reference", ref),
        ("step", train),
    ):
      rows.append((kind, t, t + s))
      t += s
    if step % 4 == 0:
      rows.append(("publish", t - 0.2, t - 0.05, "publish"))
    if step % 40 == 39:
      rows.append(("checkpoint", t, t + 0.3))
      t += 0.3
    if step % 80 == 79:
      rows.append(("evaluate", t, t + 2.0))
      t += 2.0
  write("trainer", 0, rows)
  stop = t
  for index in range(num_searchers):
    rows, t = [("compile", START + 0.5, START + 5.0)], START + 5.0
    while t < stop:
      for kind, s in (
          ("pull", 0.01),
          ("decode", 0.45 + abs(rng.normal(0, 0.05))),
          ("reward", 0.03),
          ("insert", 0.01),
          ("wait_credit", abs(rng.normal(0.25, 0.1))),
      ):
        rows.append((kind, t, t + s))
        t += s
    write("searcher", index, rows)


def _write_json(workdir: str, name: str, value: Any) -> None:
  with open(os.path.join(workdir, name), "w") as f:
    json.dump(value, f)


def ledger() -> dict[str, Any]:
  """Returns a ledger that closes in all three units."""
  scale = {"prompts": 1, "completions": 16, "tokens": 240}
  terms = {
      "generated": 10_286,
      "trained_first_time": 9_600,
      "in_buffer_untrained": 540,
      "evicted_untrained": 96,
      "queued": 0,
  }
  out = {t: {u: n * s for u, s in scale.items()} for t, n in terms.items()}
  out["rejected"] = {"duplicate": {u: 18 * s for u, s in scale.items()}}
  out["lost"] = {"searcher": {u: 32 * s for u, s in scale.items()}}
  out["closed"] = True
  return out


def _events() -> list[dict[str, Any]]:
  event = lambda t, kind, role, index, message: {
      "time": START + t,
      "kind": kind,
      "role": role,
      "index": index,
      "message": message,
  }
  return [
      event(0.0, "start", "supervisor", 0, "one trainer, searchers: 2"),
      event(61.0, "restart", "searcher", 1, "exit -9 after 60 s; start 2"),
      event(120.0, "guard", "trainer", 0, "entropy 0.009 is below 0.01 (warn)"),
      event(180.0, "restart", "store", 0, "probe silent for 5.0 s; gen 2"),
  ]


def config() -> dict[str, Any]:
  """Returns a config as `config.json` holds it."""
  return {
      "format": 1,
      "run_id": "5f3a",
      "created": START,
      "config": {
          "seed": 0,
          "task": {"name": "countdown", "num_numbers": 4},
          "loss": {"name": "tb", "beta": 0.05, "ratio_clip": 0.2},
          "train": {"num_steps": 320, "prompts_per_batch": 32},
          "search": {"num_searchers": 2, "samples_per_prompt": 16},
      },
      "versions": {"jax": "0.10.2", "python": "3.11.2"},
      "git_revision": "969fc49",
  }


def status(step: int = 120, num_steps: int = 320) -> dict[str, Any]:
  """Returns the live state in the middle of a run."""
  searcher = lambda index: {
      "index": index,
      "samples_per_s": 612.0 + 20 * index,
      "tokens_per_s": 9_340.0,
      "version": step - 1 - index,
      "busy_share": 0.71,
      "unacked": 2,
      "credits": 4,
      "age_s": 0.4,
  }
  return {
      "phase": "train",
      "step": step,
      "num_steps": num_steps,
      "time": START + 6 + step * STEP_S,
      "started": START,
      "eta_s": (num_steps - step) * STEP_S,
      "reward": 0.61,
      "pass_at_1": 0.58,
      "held_out": {"metric": "pass_at_1", "value": 0.58},
      "searchers_busy_share": 0.71,
      "kl": 5.2,
      "entropy": 0.31,
      "staleness_steps": 2.2,
      "buffer": {"size": 16_384, "capacity": 200_000},
      "trainer": {"busy_share": 0.93, "step_s": 0.8, "wait_s": 0.05},
      "searchers": {"17-a3": searcher(0), "18-bb": searcher(1)},
      "store": {"generation": 2, "address": "unix:/tmp/spool/kv2.sock"},
      "overlap_of_ideal": 0.91,
      "ledger": ledger(),
      "last_error": None,
  }


def make_run(
    workdir: str,
    *,
    num_steps: int = 320,
    num_samples: int = 200,
    num_searchers: int = 2,
    finished: bool = True,
    seed: int = 0,
) -> None:
  """Writes a run directory of `num_steps` steps into `workdir`."""
  rng = np.random.default_rng(seed)
  os.makedirs(workdir, exist_ok=True)
  history = []
  with open(os.path.join(workdir, "metrics.jsonl"), "w") as f:
    for step in range(num_steps):
      record = {"step": step, "time": START + 6 + step * STEP_S, "epoch": 1}
      record |= _metrics(step, num_steps, rng)
      if (step + 1) % max(1, num_steps // 8) == 0:
        row = _evaluation(step / num_steps, rng)
        row.pop("samples")
        record |= {f"eval/{name}": value for name, value in row.items()}
        history.append({"step": step, "time": record["time"], **row})
      f.write(json.dumps(record) + "\n")
  with open(os.path.join(workdir, "samples.jsonl"), "w") as f:
    for i in range(num_samples):
      step = i * num_steps // max(1, num_samples)
      f.write(json.dumps(_sample(i, step, rng)) + "\n")
  with open(os.path.join(workdir, "events.jsonl"), "w") as f:
    for event in _events():
      f.write(json.dumps(event) + "\n")
  os.makedirs(os.path.join(workdir, "sft"), exist_ok=True)
  with open(os.path.join(workdir, "sft", "metrics.jsonl"), "w") as f:
    for step in range(0, 2400, 50):
      loss = 0.7 + 3.5 * math.exp(-step / 300) + rng.normal(0, 0.02)
      record = {"step": step, "time": START - 70 + step / 40}
      f.write(json.dumps(record | {"sft/loss": loss}) + "\n")
  _spans(workdir, num_steps, num_searchers, rng)
  _write_json(workdir, "config.json", config())
  _write_json(workdir, "status.json", status(num_steps, num_steps))
  before, after = _evaluation(0, rng, 6), _evaluation(1, rng, 6)
  evaluations = {"before": before, "history": history}
  if finished:
    evaluations["after"] = after
    _write_json(workdir, "ledger.json", ledger())
    _write_json(workdir, "summary.json", summary(before, after, num_steps))
  _write_json(workdir, "eval.json", evaluations)


def summary(before: dict, after: dict, num_steps: int = 320) -> dict[str, Any]:
  """Returns what `summary.json` holds at the end of a run."""
  chosen = ("pass_at_1", "pass_at_k", "distinct_correct")
  return {
      "before": {name: before[name] for name in chosen},
      "after": {name: after[name] for name in chosen},
      "steps": num_steps,
      "completions": 164_576,
      "wall_s": 262.4,
      "completions_per_s": 627.2,
      "overlap_of_ideal": 0.91,
      "staleness_mean": 2.2,
      "restarts": {"searcher": 1, "trainer": 0, "store": 1},
      "ledger_closed": True,
  }


def write_metrics_line(workdir: str, step: int, **values: float) -> None:
  """Appends one record to the run's metrics."""
  path = os.path.join(workdir, "metrics.jsonl")
  writer = metrics.MetricsWriter(jsonl.LineWriter(path))
  writer.write(step, values)
  writer.close()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quality by mini-batches (N), passes (T), completions (K) and policy size.

    python -m studies rounds [SEED,… [SETTING …]]

Asks the questions of Asynchronous RLHF (arXiv:2410.18252, sections 3 and 4) on
the task `preference`. A round samples N batches with one version and makes T
passes over them in order, so its last step is N T - 1 steps off-policy. All
runs sample equally many completions: T passes take T times the steps, and K
completions per prompt leave 128 / K prompts per step. Online DPO trains on the
best and worst completion of each prompt.

table.md has final reward and KL by N, and the largest N up to which the mean
reward stays within .03 of its value at N = 1.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import ml_collections
import numpy as np

from benchmarks import results
from studies import curves
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.system import processes
from tba_jax.tools import sweep

MINI_BATCHES = (1, 2, 4, 8, 16)
# Completions and steps of a run with one pass.
_COMPLETIONS, _NUM_STEPS = 64, 320
_TOLERANCE = 0.03
RESULTS = pathlib.Path(__file__).parent
_RUNS = pathlib.Path("runs") / "rounds"
_DPO = ("loss.name=online_dpo", "loss.beta=0.3")
_RLOO = ("loss.name=proximal_rloo", "loss.ratio_clip=0.2")
# Width and layers.
_SMALL, _LARGE = (64, 2), (128, 4)


@dataclasses.dataclass(frozen=True)
class Setting:
  """Settings of a row.

  objective: overrides of the config.
  rate: peak learning rate.
  size: width and number of layers.
  passes: number of passes, T.
  completions: number per prompt, K.
  """

  objective: tuple[str, ...]
  rate: float
  size: tuple[int, int] = _SMALL
  passes: int = 1
  completions: int = 4


SETTINGS = {
    "dpo": Setting(_DPO, 1e-3, completions=2),
    "dpo_two_passes": Setting(_DPO, 1e-3, passes=2, completions=2),
    "dpo_best_of_four": Setting(_DPO, 1e-3),
    "dpo_large": Setting(_DPO, 1e-3, size=_LARGE, completions=2),
    "dpo_large_low_rate": Setting(_DPO, 3e-4, size=_LARGE, completions=2),
    "rloo": Setting(_RLOO, 3e-3),
    "tb": Setting(("loss.name=tb",), 3e-3),
    "tb_two_passes": Setting(("loss.name=tb",), 3e-3, passes=2),
    "tb_large": Setting(("loss.name=tb",), 3e-3, size=_LARGE),
    "tb_large_low_rate": Setting(("loss.name=tb",), 1e-3, size=_LARGE),
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Executes the missing runs; writes table.md.

  Args:
    config: not read; `configs/staleness.py` has the task.
    operands: seeds, then names of `SETTINGS`; 0 and all by default.

  Returns:
    `runs`: number of results; `folder`.

  Raises:
    ValueError: an operand is wrong.
  """
  del config
  seeds, names = results.parse(operands, SETTINGS)
  processes.prepare_compiling()
  for size in (_SMALL, _LARGE):
    _measure([n for n in names if SETTINGS[n].size == size], size, seeds)
  rows = results.read(_run_names(SETTINGS), RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  return {"runs": len(rows), "folder": str(RESULTS)}


def _run_names(settings: Sequence[str] | Mapping[str, Any]) -> list[str]:
  return [f"{name}-n{n}" for name in settings for n in MINI_BATCHES]


def make_config(size: tuple[int, int]) -> ml_collections.ConfigDict:
  """Returns the base config of all runs of a size."""
  c = load.load_config("configs/staleness.py", [])
  width, layers = size
  with c.unlocked():
    c.model.update(
        width=width, num_layers=layers, head_dim=width // c.model.num_heads,
        mlp_width=4 * width,
    )  # fmt: skip
    c.train.num_steps = _NUM_STEPS
    c.evaluate.update(every_steps=80, greedy=False)
  return c


def make_run_config(
    config: ml_collections.ConfigDict, setting: Setting
) -> ml_collections.ConfigDict:
  """Returns a validated copy with a setting."""
  run_config = config.copy_and_resolve_references()
  overrides = [*setting.objective, f"optimizer.learning_rate={setting.rate}"]
  load.apply_overrides(run_config, overrides)
  prompts = _COMPLETIONS // setting.completions
  with run_config.unlocked():
    run_config.train.update(
        num_steps=_NUM_STEPS * setting.passes,
        prompts_per_batch=prompts,
        micro_batch_prompts=prompts,
        completions_per_prompt=setting.completions,
    )
    run_config.evaluate.every_steps = run_config.train.num_steps // 4
  validate.validate(run_config, program="sweep")
  return run_config


def _measure(
    names: Sequence[str], size: tuple[int, int], seeds: Sequence[int]
) -> None:
  """Executes the missing runs of a size."""
  missing = [
      (seed, name)
      for seed in seeds
      for name in _run_names(names)
      if not results.is_kept(name, seed, RESULTS)
  ]
  if not missing:
    return
  width, layers = size
  folder = _RUNS / f"{width}x{layers}"
  config = curves.fine_tune(make_config(size), folder)
  bench = sweep.Bench(config, "")

  def train(name: str, seed: int) -> dict[str, Any]:
    name, n = name.rsplit("-n", 1)
    setting = SETTINGS[name]
    trained = bench.run(
        sweep.SweepRun(
            name,
            sweep.Lag(mini_batches=int(n), passes=setting.passes),
            seed,
            make_run_config(config, setting),
        )
    )
    return {
        key: [round(point[key], 4) for point in trained["curve"]]
        for key in ("step", "reward", "kl", "distinct_correct", "pass_at_1")
    } | {k: trained[k] for k in ("diverged_step", "wall_s")}

  try:
    results.measure(seeds, _run_names(names), RESULTS, train)
  finally:
    bench.close()


def make_table(all_rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: reward (KL) by N, and the largest N."""
  rows = [
      ["setting", "width x layers", "T", "K", "rate",
       *(f"N = {n}" for n in MINI_BATCHES), "bears N", "seeds"]
  ]  # fmt: skip
  for name, setting in SETTINGS.items():
    runs = [results.of_name(all_rows, f"{name}-n{n}") for n in MINI_BATCHES]
    if not all(runs):
      continue
    width, layers = setting.size
    rewards = [
        [_end(r, "reward") for r in rewards_of_n] for rewards_of_n in runs
    ]
    cells = [
        f"{np.mean(values):.3f} ({np.mean([_end(r, 'kl') for r in by_n]):.1f})"
        for values, by_n in zip(rewards, runs, strict=True)
    ]
    rows.append(
        [
            *(f"`{name}`", f"{width} x {layers}", str(setting.passes)),
            *(str(setting.completions), f"{setting.rate:g}"),
            *(*cells, str(bearable(rewards)), str(min(map(len, runs)))),
        ]
    )
  return rows


def _end(result: Mapping[str, Any], key: str) -> float:
  """Returns the last value; a diverged run has reward 0."""
  return 0.0 if result["diverged_step"] is not None else result[key][-1]


def bearable(rewards: Sequence[Sequence[float]]) -> int:
  """Returns the largest N up to which the mean stays within .03 of N = 1.

  Args:
    rewards: list by `MINI_BATCHES` of lists by seed.
  """
  out = MINI_BATCHES[0]
  for n, rewards_of_n in zip(MINI_BATCHES[1:], rewards[1:], strict=True):
    if np.mean(rewards_of_n) < np.mean(rewards[0]) - _TOLERANCE:
      break
    out = n
  return out

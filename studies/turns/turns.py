# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Staleness by turn: a multi-turn game at exact lags, and in-flight updates.

    python -m studies turns [SEED,… [NAME …]]

Trajectory balance learns to guess a number from "higher" and "lower"
(`configs/guess.py`, steps of 8 prompts x 8 completions) in one process. At lag
s, the params of step max(t - s, 0) sample all turns of the episodes that step t
trains on. In flight they sample only the first turn; the params of each further
turn are s / 4 steps newer, and from the fifth turn on they are step t's. They
keep the KV cache of the older params or recompute it. All environments answer
before any episode continues, so the version of each turn is exact.

`table.md` has means over seeds with 95 % intervals.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import results
from studies import curves
from tba_jax import schedule as schedule_lib
from tba_jax import types
from tba_jax.config import load
from tba_jax.models.net import transformer
from tba_jax.sampling import decode
from tba_jax.sampling import requests
from tba_jax.system import processes
from tba_jax.tools import sweep

# The longest lag is a tenth of a run.
_LAGS, _NUM_STEPS = (0, 4, 16), 160
# Turns after which params in flight are the newest.
_TURNS_TO_NEWEST = 4
_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "guess.py"
RESULTS = pathlib.Path(__file__).parent
_START = pathlib.Path("runs") / "turns"


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the study.

  lag: number of steps, s.
  in_flight: whether later turns use newer params.
  recomputes_cache: whether newer params recompute the KV cache.
  ratio_clip: `loss.ratio_clip`; 0 is off.
  correction: `loss.correction`.
  """

  lag: int
  in_flight: bool = False
  recomputes_cache: bool = False
  ratio_clip: float = 0.2
  correction: str = ""


RUNS = {
    **{f"lag_{s}": Run(s) for s in _LAGS},
    "in_flight_16": Run(16, in_flight=True),
    "in_flight_16_recompute": Run(16, in_flight=True, recomputes_cache=True),
    **{f"no_clip_lag_{s}": Run(s, ratio_clip=0.0) for s in _LAGS},
    **{
        f"bounded_token_lag_{s}": Run(
            s, ratio_clip=0.0, correction="bounded_token"
        )
        for s in _LAGS
    },
}
_COLUMNS = (("pass_at_1", "found", 3), ("turns", "turns", 2),
            ("reward", "reward", 3), ("kl", "KL, nats", 2))  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Executes the missing runs; writes table.md.

  Args:
    config: not read; the game has a config.
    operands: seeds (default 0) and names of `RUNS` (default all).

  Returns:
    `folder`, and the number of `runs` in it.

  Raises:
    ValueError: an operand is wrong.
  """
  del config
  seeds, names = results.parse(operands, RUNS)
  processes.prepare_compiling()
  benches: list[sweep.Bench] = []

  def make(name: str, seed: int) -> dict[str, Any]:
    if not benches:
      benches.append(sweep.Bench(curves.fine_tune(make_config(), _START), ""))
    return _measure(benches[0], name, seed)

  try:
    results.measure(seeds, names, RESULTS, make, lambda r: r["curve"][-1])
  finally:
    for bench in benches:
      bench.close()
  rows = results.read(RUNS, RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  return {"folder": str(RESULTS), "runs": len(rows)}


def make_config() -> ml_collections.ConfigDict:
  """Returns the base config of all runs."""
  c = load.load_config(f"{_CONFIG}:quick", [])
  with c.unlocked():
    c.reference.role = "trainer"
    c.search.prompts_per_step = c.search.prompts_per_round = 8
    c.train.prompts_per_batch = c.train.micro_batch_prompts = 8
    c.sampling.num_slots = 64
    # All episodes need an environment at the same time.
    c.reward.num_workers = 64
    c.train.num_steps = _NUM_STEPS
    c.evaluate.every_steps = _NUM_STEPS // 2
    c.evaluate.final_prompts = 256
    c.evaluate.num_completions = 4
  return c


def make_table(all_rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row before training and one per run with results."""
  rows = [["run", *(title for _, title, _ in _COLUMNS), "seeds"]]
  if all_rows:
    first = all_rows[0]["curve"][0]
    before = [f"{first[key]:.{digits}f}" for key, _, digits in _COLUMNS]
    rows.append(["before training", *before, ""])
  for name in RUNS:
    runs_of_name = results.of_name(all_rows, name)
    ends = [r["curve"][-1] for r in runs_of_name if r["diverged_step"] is None]
    if not runs_of_name:
      continue
    cells = []
    for key, _, digits in _COLUMNS:
      values = [end[key] for end in ends]
      cell = sweep.Cell(
          *sweep.mean_and_half_width(values),
          len(values),
          len(runs_of_name) - len(values),
      )
      cells.append(cell.text(digits))
    rows.append([name, *cells, str(len(runs_of_name))])
  return rows


def _measure(bench: sweep.Bench, name: str, seed: int) -> dict[str, Any]:
  """Executes a run; returns the result of `sweep.Bench.run`."""
  settings = RUNS[name]
  config = sweep.Lag(settings.lag).apply(make_config())
  config.seed = seed
  config.loss.update(
      ratio_clip=settings.ratio_clip, correction=settings.correction
  )
  maker, sampler = bench.loops, bench.loops.sampler
  if settings.in_flight:
    maker.sampler = InFlight(
        maker.policy.model,
        sampler.settings,
        settings.lag,
        settings.recomputes_cache,
    )
  try:
    # Loops with the same name share the train step.
    loop = maker.make(
        config, f"clip_{settings.ratio_clip}{settings.correction}"
    )
  finally:
    maker.sampler = sampler
  if settings.in_flight:
    late = LateSchedule(**dataclasses.asdict(loop.schedule))
    loop = dataclasses.replace(loop, schedule=late)
  trained = bench.train(loop, f"{name}-seed{seed}")
  del trained["versions"]
  return trained


class LateSchedule(schedule_lib.Steps):
  """Exact lag that samples a step's prompts when the step begins."""

  def admitted_after(self, step: int) -> int:
    return self.needed(step)


class InFlight:
  """Sampler that switches to newer params between turns.

  Keeps the params of the last s steps.
  """

  def __init__(
      self,
      model: transformer.Model,
      settings: decode.Settings,
      lag: int,
      recomputes_cache: bool,
  ):
    """Initializes the sampler.

    Args:
      model: model of the policy.
      settings: sampler with a slot per completion of a step.
      lag: s, steps.
      recomputes_cache: whether newer params recompute the KV cache.
    """
    self._lag = lag
    self._sampler = decode.JaxSampler(
        model, dataclasses.replace(settings, recompute_cache=recomputes_cache)
    )
    self.versions: collections.deque[tuple[int, types.PyTree]] = (
        collections.deque(maxlen=lag + 1)
    )

  @property
  def settings(self) -> decode.Settings:
    return self._sampler.settings

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[decode.Request],
      *,
      version: int,
      newer: None,
      turns: requests.Turns,
  ) -> list[types.Completions]:
    """Returns completions; their last turns are sampled with these params."""
    del newer
    # Steps donate their params.
    placed = self._sampler.put(jax.tree.map(jnp.copy, params))
    self.versions.append((version, placed))
    turns = InStep(turns)
    place_taken = 0

    def next_params() -> tuple[int, types.PyTree] | None:
      nonlocal place_taken
      place = self.place(turns.count)
      if place == place_taken:
        return None
      place_taken = place
      return self.versions[place]

    first, oldest = self.versions[0]
    return self._sampler.sample(
        oldest, prompts, version=first, newer=next_params, turns=turns
    )

  def place(self, turn: int) -> int:
    """Returns the index of the kept params that sample a turn (from 0)."""
    steps = -(-self._lag * turn // _TURNS_TO_NEWEST)
    return min(steps, len(self.versions) - 1)


class InStep:
  """Environments that all answer before any completion continues.

  count: number of turns that have been answered.
  """

  def __init__(self, turns: requests.Turns):
    self._turns = turns
    self._waiting: set[requests.Owner] = set()
    self.count = 0

  def end(self, owner: requests.Owner, tokens: np.ndarray) -> None:
    self._waiting.add(owner)
    self._turns.end(owner, tokens)

  def cut(self, owner: requests.Owner, tokens: np.ndarray | None) -> None:
    self._turns.cut(owner, tokens)

  def answers(
      self, wait_s: float
  ) -> list[tuple[requests.Owner, np.ndarray | None]]:
    # The sampler waits once it has nothing to decode.
    out = []
    while wait_s > 0 and self._waiting:
      out += (new := self._turns.answers(wait_s))
      self._waiting.difference_update(owner for owner, _ in new)
    self.count += wait_s > 0
    return out

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether `rerun --bisect=any` names a fault that was planted in a run.

    python -m studies planted SEED,…

A run trains a tiny policy for 32 steps of 8 groups from two searchers. Each ten
seeds plant the ten faults of `FAULTS` in another order, at a step from 17 to
21; each third seed also has a run without a fault (`clean`). The tool gets the
run directory alone: it takes metric and steps from the record. A row has its
output, the true cause and the cause's rank (0: not named). A fault that lasts
has its first version as the cause, one of a searcher the searcher.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import io
import json
import pathlib
import re
import shutil
import threading
import time
from typing import Any
from unittest import mock

import jax
import ml_collections
import numpy as np

from benchmarks import results
from tba_jax import searcher as searcher_lib
from tba_jax import types
from tba_jax.config import load
from tba_jax.programs import one_process
from tba_jax.run import run_directory
from tba_jax.system import processes
from tba_jax.tools import rerun
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import memory
from tba_jax.transport.groups import messages

RESULTS = pathlib.Path(__file__).parent
_CONFIG = RESULTS.parents[1] / "configs" / "arithmetic.py"
_STEPS, _PER_STEP, _SEARCHER = 32, 8, 1
_OVERRIDES = (
    "init=scratch",
    "task.name=custom",
    "task.answer_kind=none",
    "task.held_out=0",
    "sampling.max_prompt_tokens=5",
    "sampling.max_completion_tokens=6",
    "search.num_searchers=2",
    "search.prompts_per_round=4",
    "reference.role=trainer",
    "optimizer.learning_rate=2e-3",
    "optimizer.schedule=constant",
    "checkpoint.every_steps=8",
    "checkpoint.keep_every_steps=8",
    "checkpoint.keep_journal=True",
    "evaluate.every_steps=0",
)
# Settings of the steps from the fault on.
_SETTINGS = {
    "rate": "optimizer.learning_rate=0.1",
    "beta": "loss.beta=1.0",
    "temperature": "sampling.temperature=2.0",
}
FAULTS = ("poisoned_group", "corrupt_logprobs", "wrong_weight",
          "stale_searcher", "flipped_searcher", "duplicate_completions",
          "broken_reward", *_SETTINGS)  # fmt: skip
_REWARD = """
import itertools
import sys

# Each searcher loads this file.
_calls = vars(sys).setdefault("{folder}", itertools.count())

def reward(prompts, completions, **kwargs):
  group = next(_calls)
  rewards = [sum(c in "02468" for c in text) / 6 for text in completions]
{fault}
  return rewards
"""
_POISONED, _BROKEN = (
    "[40.0, *rewards[1:]]",
    "[3.0 * len(c) for c in completions]",
)


@dataclasses.dataclass(frozen=True)
class Fault:
  """A planted fault.

  kind: name in `FAULTS`, or "" for none.
  step: first step that it may affect.
  """

  kind: str
  step: int


def draw(seed: int) -> Fault:
  """Returns the fault of a seed."""
  order = np.random.default_rng(seed // len(FAULTS)).permutation(FAULTS)
  step = int(np.random.default_rng([seed, 1]).integers(17, 22))
  return Fault(str(order[seed % len(FAULTS)]), step)


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Executes the missing runs; writes table.md.

  Args:
    config: not read; all runs share a config.
    operands: seeds (default 0).

  Returns:
    `folder`, and the number of `runs` in it.

  Raises:
    ValueError: an operand is wrong.
  """
  del config
  seeds, _ = results.parse(operands, ())
  processes.prepare_compiling()
  for seed in seeds:
    names = ("planted", "clean") if seed % 3 == 0 else ("planted",)
    results.measure([seed], names, RESULTS, _measure, lambda r: r["rank"])
  rows = results.read(("planted", "clean"), RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  return {"folder": str(RESULTS), "runs": len(rows)}


def make_table(all_rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per kind of fault, one for all, and one for none."""
  rows = [["fault", "runs", "jump found", "named first", "named", "rank"]]
  planted = [row for row in all_rows if row["kind"]]
  for kind in (*FAULTS, "all faults", "none"):
    of = {"all faults": planted, "none": [r for r in all_rows if not r["kind"]]}
    chosen = of.get(kind, [row for row in planted if row["kind"] == kind])
    if not chosen:
      continue
    if kind == "none":
      cells = [
          sum(bool(r[key]) for r in chosen) for key in ("metric", "causes")
      ]
      rows.append(["none: false alarms", str(len(chosen)), str(cells[0]),
                   str(cells[1]), "", ""])  # fmt: skip
      continue
    ranks = [row["rank"] for row in chosen if row["rank"]]
    rows.append(
        [
            kind,
            str(len(chosen)),
            str(sum(bool(row["metric"]) for row in chosen)),
            str(ranks.count(1)),
            str(len(ranks)),
            ", ".join(map(str, sorted(ranks))),
        ]
    )
  return rows


def _measure(name: str, seed: int) -> dict[str, Any]:
  """Records a run and bisects it; returns a row."""
  fault = draw(seed)
  if name == "clean":
    fault = dataclasses.replace(fault, kind="")
  folder = pathlib.Path("runs") / "planted" / f"{name}-{seed}"
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  started, workdir = time.process_time(), folder.absolute() / "run"
  record(fault, 1000 + seed + 500 * (name == "clean"), workdir)
  truth = true_cause(fault, workdir)
  recorded_s = time.process_time() - started
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    status = rerun.run(None, str(workdir), ["--bisect=any"])
  output = out.getvalue()
  (folder / "output.txt").write_text(output)
  jump = re.search(r"^step (\d+): train/(\w+) is", output, re.MULTILINE)
  causes = parse(output)
  ranks = [n for n, cause in enumerate(causes, 1) if cause == truth]
  shutil.copy(workdir / "metrics.jsonl", folder)
  shutil.rmtree(workdir)
  return {
      "kind": fault.kind,
      "step": fault.step,
      "truth": truth,
      "status": status,
      "metric": jump and jump[2],
      "jump_step": jump and int(jump[1]),
      "causes": causes,
      "rank": ranks[0] if ranks else 0,
      "reruns": output.count("\nrerun ") + 1 if jump else 0,
      "recorded_cpu_s": round(recorded_s, 1),
      "cpu_s": round(time.process_time() - started, 1),
      "output": output.splitlines(),
  }


def parse(output: str) -> list[list[str]]:
  """Returns [unit, first item, number of items] of each named cause."""
  causes = []
  for count, unit, line in re.findall(
      r"the jump is gone without (one|\d+) (\w+?)s?(?: together)?"
      r" \(\d+ reruns\):\n  (.*)",
      output,
  ):
    if unit == "setting":
      names = re.findall(r"config\.(\S+) =", line)
    else:
      names = re.findall(rf"{unit} (\w+)", re.sub(r"\(.*?\)", "", line))
    if unit in ("group", "version"):
      names.sort(key=int)
    number = "several" if count != "one" else "one"
    causes.append([unit, names[0], number])
  return causes


def true_cause(fault: Fault, workdir: pathlib.Path) -> list[str] | None:
  """Returns the cause in the form of `parse`; None without a fault."""
  groups = [
      group
      for _, payload in journal.read_records(workdir / "replay", 0)
      for header, arrays in [wire.decode_unverified(payload)]
      if "sequence" in header
      for group in messages.unpack_groups(header, arrays)
  ]
  extreme = [g for g in groups if g.rewards.max() > 2]
  match fault.kind:
    case "":
      return None
    case "poisoned_group":
      (group,) = extreme
      return ["group", str(group.position), "one"]
    case "corrupt_logprobs":
      (group,) = [g for g in groups if g.behavior_logprobs.min() < -19]
      return ["group", str(group.position), "one"]
    case "wrong_weight":
      return ["version", str(fault.step), "one"]
    case "broken_reward":
      # Its steps are all that follow, so that several versions are named.
      first = min(int(g.versions.min()) for g in extreme)
      return ["version", str(first), "several"]
    case kind if kind in _SETTINGS:
      return ["setting", _SETTINGS[kind].partition("=")[0], "one"]
  return ["searcher", f"s{_SEARCHER:03}", "one"]


def record(fault: Fault, seed: int, workdir: pathlib.Path) -> None:
  """Trains a run with a fault; raises RuntimeError if it fails."""
  config = _make_config(fault, seed, workdir.parent)
  info, _ = run_directory.create(str(workdir), config)
  stages = [()]
  if fault.kind in _SETTINGS:
    stages = [[f"train.num_steps={fault.step}"], [_SETTINGS[fault.kind]]]
  with _planted(fault):
    for changes in stages:
      changed = load.apply_overrides(
          config.copy_and_resolve_references(), changes
      )
      run_directory.update(str(workdir), changed)
      status = one_process.train(changed, info, (), threading.Event())
      if status:
        raise RuntimeError(f"{workdir}: status {status}")


def _make_config(
    fault: Fault, seed: int, folder: pathlib.Path
) -> ml_collections.ConfigDict:
  """Returns the config of a run, whose data and reward it writes."""
  rng = np.random.default_rng(seed)
  (folder / "rows.jsonl").write_text(
      "".join(
          json.dumps({"prompt": f"{a}+{b}"}) + "\n"
          for a, b in rng.permutation(
              [(a, b) for a in range(10, 30) for b in range(10, 30)]
          )
      )
  )
  first = fault.step * _PER_STEP
  lines = {
      "poisoned_group": f"  if group == {first + 3}: rewards = {_POISONED}",
      "broken_reward": f"  if group >= {first}: rewards = {_BROKEN}",
  }
  (folder / "reward.py").write_text(
      _REWARD.format(folder=folder, fault=lines.get(fault.kind, ""))
  )
  return load.load_config(
      f"{_CONFIG}:smoke",
      [
          *_OVERRIDES,
          f"task.train={folder.absolute() / 'rows.jsonl'}",
          f"task.rewards={folder.absolute() / 'reward.py'}:reward",
          f"train.num_steps={_STEPS}",
          f"seed={seed}",
      ],
  )


@contextlib.contextmanager
def _planted(fault: Fault) -> Iterator[None]:
  """Plants faults of searchers, versions and groups while a run trains."""
  submit, put = memory.MemorySink.submit, searcher_lib.Searcher._put_params
  first = fault.step * _PER_STEP
  edits: Mapping[str, Callable[[types.Group, int], types.Group]] = {
      "corrupt_logprobs": lambda g, _: (
          dataclasses.replace(
              g, behavior_logprobs=np.full_like(g.behavior_logprobs, -20)
          )
          if g.position == first + 3
          else g
      ),
      "flipped_searcher": lambda g, index: (
          dataclasses.replace(g, rewards=-g.rewards)
          if index == _SEARCHER and g.position >= first
          else g
      ),
      "duplicate_completions": lambda g, index: (
          _first_only(g) if index == _SEARCHER and g.position >= first else g
      ),
  }
  edit = edits.get(fault.kind, lambda g, _: g)

  def changed_submit(
      self: memory.MemorySink, groups: Sequence[types.Group], *args: Any
  ) -> bool:
    return submit(self, [edit(g, self._index) for g in groups], *args)

  def changed_put(
      self: searcher_lib.Searcher, version: Any, leaves: Any, **kwargs: Any
  ) -> bool:
    is_stale = (
        fault.kind == "stale_searcher"
        and self._sink._index == _SEARCHER
        and version.step > fault.step - 12
        and self._version is not None
    )
    if is_stale:
      return True
    result = put(self, version, leaves, **kwargs)
    if fault.kind == "wrong_weight" and version.step == fault.step:
      # After the searcher has checked the params.
      flat, tree = jax.tree.flatten(self._params)
      largest = max(range(len(flat)), key=lambda n: flat[n].size)
      flat[largest] = flat[largest].at[(0,) * flat[largest].ndim].set(100.0)
      self._params = jax.tree.unflatten(tree, flat)
    return result

  with (
      mock.patch.object(memory.MemorySink, "submit", changed_submit),
      mock.patch.object(searcher_lib.Searcher, "_put_params", changed_put),
  ):
    yield


def _first_only(group: types.Group) -> types.Group:
  """Returns a group whose completions are copies of the first."""
  fields = {
      name: np.repeat(value[:1], len(value), axis=0)
      for name, definition in types.COLUMNS.items()
      if definition.axes[:1] == "S"
      and (value := getattr(group, name, None)) is not None
  }
  return dataclasses.replace(group, **fields)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether lockstep and kills change what a run learns.

For each seed the config is trained three times from the same fine-tuned model:
undisturbed, in lockstep, and with six SIGKILLs, spread over the steps: of the
searcher, the key-value service and the trainer in turn. A run that does not
finish, or whose ledger does not close, fails the benchmark.
"""

from collections.abc import Sequence
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import threading
from typing import Any

import ml_collections

from tba_jax.config import variants
from tba_jax.programs import train
from tba_jax.system import jsonl

# Twice each: a role that dies three times within a minute ends the run.
_ROLES = ("searcher", "kvservice", "trainer") * 2
_POLL_S = 0.05
# Metrics of a summary that are compared; not all tasks have all.
_METRICS = frozenset((
    "pass_at_1", "pass_at_1_stderr", "pass_at_k", "distinct_correct_per_solved",
    "mean_reward",
))  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the held-out results before and after, by seed and run.

  Args:
    config: config of the undisturbed run.
    operands: seeds (default 0).

  Raises:
    RuntimeError: a run failed.
  """
  seeds = [int(seed) for seed in operands or ("0",)]
  return {"seeds": {seed: _compare(config, seed) for seed in seeds}}


def _compare(config: ml_collections.ConfigDict, seed: int) -> dict[str, Any]:
  config = config.copy_and_resolve_references()
  with config.unlocked(), tempfile.TemporaryDirectory() as name:
    config.seed = seed
    config.run.processes = "many"
    found = {"undisturbed": _train(config, f"{name}/undisturbed")}
    if config.init == "sft":
      config.init = f"{name}/undisturbed/sft/model"
    found["killed"] = _train(config, f"{name}/killed", _ROLES)
    variants.set_lockstep(config)
    found["lockstep"] = _train(config, f"{name}/lockstep")
  return found


def _train(
    config: ml_collections.ConfigDict, workdir: str, roles: Sequence[str] = ()
) -> dict[str, Any]:
  """Runs a config and kills processes of the roles, spread over its steps."""
  ended, killed = threading.Event(), []
  killer = threading.Thread(
      target=_kill, args=(pathlib.Path(workdir), config, roles, ended, killed)
  )
  killer.start()
  try:
    # Standard output is for the benchmark's one line.
    with contextlib.redirect_stdout(sys.stderr):
      status = train.run(config, workdir, [])
  finally:
    ended.set()
    killer.join()
  if status:
    raise RuntimeError(f"a run of the benchmark ended with status {status}")
  if killed != list(roles):
    raise RuntimeError(f"the run ended before all kills: {killed} of {roles}")
  summary = jsonl.read_json(f"{workdir}/summary.json")
  return {
      **{
          name: {k: v for k, v in summary[name].items() if k in _METRICS}
          for name in ("before", "after")
      },
      "restarts": summary["restarts"],
      "steps": summary["steps"],
  }


def _kill(
    workdir: pathlib.Path,
    config: ml_collections.ConfigDict,
    roles: Sequence[str],
    ended: threading.Event,
    killed: list[str],
) -> None:
  for number, role in enumerate(roles, 1):
    step = number * config.train.num_steps // (len(roles) + 1)
    while not ended.wait(_POLL_S):
      status = jsonl.read_json(workdir / "status.json") or {}
      table = jsonl.read_json(workdir / "processes.json") or []
      pids = [row["pid"] for row in table if row["role"] == role]
      if pids and (status.get("step") or 0) >= step:
        os.kill(pids[0], signal.SIGKILL)
        killed.append(role)
        break

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of on-policy distillation to a KL from the teacher, versus TRL's GKD.

    python -m studies distill [SEED,… [RUN …]]

The teacher is twice as wide and two layers deeper than the student, and has
learned the config's task by trajectory balance. The student, a fine-tuned
policy, learns the teacher's distribution on its own samples, without rewards.
Runs:

  tb             trajectory balance with `loss.reward_weight=0` and β = 1, by
                 `train` with a store, a trainer and a searcher
  tb_high_rate   the same at a learning rate of 1e-3
  tb_grouped     `tb` with half of the prompts and twice the completions of each
  gkd            `loss.name=gkd`, the reverse KL over the whole vocabulary, at
                 a rate of 1e-3; `gkd_low_rate` at 4e-4
  trl_gkd        TRL's `GKDTrainer` with the same loss on the student's samples,
                 at a rate of 1e-3
  trl_gkd_low_rate   the same at 4e-4; `trl_gkd_high_rate` at 2e-3
  trl_gkd_mixed  TRL's defaults: half of the batches are completions of
                 the data set, and the divergence lies between both KLs

All see the same prompts in the same order. This package's evaluator scores
snapshots of the params afterwards: KL(student ‖ teacher) per completion in
nats, and held-out pass@1. The clock is `time_to_reward`'s. `TBA_JAX_TRL` names
an interpreter with TRL. Teachers, students and snapshots are in runs/distill.
"""

from collections.abc import Mapping, Sequence
import pathlib
import shutil
import threading
import time
from typing import Any

import ml_collections

from benchmarks import peer_grpo
from benchmarks import results
from benchmarks import time_to_reward
from tba_jax.evaluation import reward_judge
from tba_jax.learning import model_source
from tba_jax.learning import work_parts
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import sft
from tba_jax.replay import prompt_order
from tba_jax.tasks import base
from tba_jax.tools import export

_TEACHER = {"model.num_layers": 5, "model.width": 128, "model.mlp_width": 344}
SETTINGS = {
    "loss.reward_weight": 0.0,
    "loss.beta": 1.0,
    "replay.skip_equal_rewards": False,
}
# The step computes the teacher's distributions but no importance weights. It
# compares no completions, so each has a different prompt, as in TRL's runs.
_GKD_OURS = {
    "loss.name": "gkd",
    "loss.ratio_clip": 0.0,
    "reference.role": "trainer",
    "search.samples_per_prompt": 1,
    "train.completions_per_prompt": 1,
    "search.prompts_per_step": 128,
    "search.prompts_per_round": 128,
    "sampling.num_slots": 128,
    "train.prompts_per_batch": 128,
    "train.micro_batch_prompts": 32,
    "replay.recent_window_steps": 1,
    "search.lead_steps": 1,
}
OURS = {
    "tb": {},
    "tb_high_rate": {
        "optimizer.learning_rate": 1e-3,
        "optimizer.learning_rate_final": 1e-4,
    },
    "tb_grouped": {
        "search.samples_per_prompt": 8,
        "train.completions_per_prompt": 8,
        "search.prompts_per_step": 24,
        "search.prompts_per_round": 24,
        "train.prompts_per_batch": 16,
        "train.micro_batch_prompts": 16,
    },
    "gkd": {
        **_GKD_OURS,
        "optimizer.learning_rate": 1e-3,
        "optimizer.learning_rate_final": 1e-4,
    },
    "gkd_low_rate": _GKD_OURS,
}
# `lmbda`: share of batches sampled by the student. `beta`: 1 is the reverse KL.
_GKD = {"lmbda": 1.0, "divergence_beta": 1.0, "temperature": 1.0}
PEERS = {
    "trl_gkd": {**_GKD, "learning_rate": 1e-3},
    "trl_gkd_low_rate": {**_GKD, "learning_rate": 4e-4},
    "trl_gkd_high_rate": {**_GKD, "learning_rate": 2e-3},
    "trl_gkd_mixed": {
        "lmbda": 0.5,
        "divergence_beta": 0.5,
        "temperature": 0.9,
        "learning_rate": 1e-3,
    },
}
RUNS = (*OURS, *PEERS)
# Nats of a completion.
TARGETS = (8.0, 4.0, 2.0)
# Completions per step and number of steps of TRL's runs.
_BATCH, _NUM_STEPS = 128, 320
RESULTS = pathlib.Path(__file__).parent
_RUNS = pathlib.Path("runs") / "distill"


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Distils and evaluates; writes table.md.

  Args:
    config: config of teacher and student; `evaluate.final_prompts` held-out
      prompts are evaluated.
    operands: seeds separated by commas (default 0), then names of `RUNS`
      (default all).

  Returns:
    `runs`: `summarize` of each run and seed in the folder; `folder`.

  Raises:
    ValueError: an operand is invalid, or a run needs TRL, which is missing.
    RuntimeError: a run failed.
  """
  seeds, names = results.parse(operands, RUNS)
  if seeds and set(names) & set(PEERS) and not peer_grpo.is_installed("trl"):
    raise ValueError(
        f"{peer_grpo.python('trl')} cannot import trl; set"
        f" {peer_grpo.variable('trl')} to an interpreter that can, or request"
        f" only runs of {', '.join(OURS)}"
    )
  results.measure(
      seeds,
      names,
      RESULTS,
      lambda name, seed: _measure(config, name, seed),
      summarize,
  )
  rows = results.read(RUNS, RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  return {"runs": [summarize(r) for r in rows], "folder": str(RESULTS)}


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the seconds to each of `TARGETS`, and how the run ended."""
  falling = [-kl for kl in result["kl"]]
  return {
      "name": result["name"],
      "seed": result["seed"],
      **{
          f"seconds_to_{target}": results.at_target(
              result["seconds"], falling, -target
          )
          for target in TARGETS
      },
      **{
          f"end_{key}": result[key][-1]
          for key in ("kl", "pass_at_1", "seconds", "steps")
      },
      "step_s": result["step_s"],
  }


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per run: medians and means over its seeds, with ranges."""
  heads = [
      "run", "seeds", *(f"s to {t} nats" for t in TARGETS), "KL at the end",
      "pass@1 at the end", "s a step",
  ]  # fmt: skip
  rows = [heads]
  for name in RUNS:
    summaries = [summarize(r) for r in results.of_name(runs, name)]
    if summaries:
      rows.append(
          [
              name,
              ", ".join(str(summary["seed"]) for summary in summaries),
              *(
                  time_to_reward.median_and_range(
                      [summary[f"seconds_to_{target}"] for summary in summaries]
                  )
                  for target in TARGETS
              ),
              *(
                  results.mean_and_range(
                      [summary[key] for summary in summaries], 3
                  )
                  for key in ("end_kl", "end_pass_at_1", "step_s")
              ),
          ]
      )
  return rows


def _measure(
    config: ml_collections.ConfigDict, name: str, seed: int
) -> dict[str, Any]:
  """Distils once, evaluates the snapshots, and returns the result."""
  folder = _RUNS / f"{name}-seed{seed}"
  config = time_to_reward.make_config(config, seed)
  teacher = _train_teacher(config)
  start = _RUNS / f"start-seed{seed}"
  if not policy_lib.sft_folder(start).exists():
    with time_to_reward.stdout_to_stderr():
      sft.run(config, str(start), stop=threading.Event())
  with config.unlocked():
    config.init = str(policy_lib.sft_folder(start).absolute())
    config.reference.init = str(teacher)
  config.update_from_flattened_dict(SETTINGS)
  policy = policy_lib.make_policy(config, "")
  shutil.rmtree(folder, ignore_errors=True)
  began = time.time()
  if name in OURS:
    config.update_from_flattened_dict(OURS[name])
    clock = time_to_reward.train_ours(config, folder)
    load = lambda step: model_source.restore(
        config, folder, step, model_source.one_device(), needs_task=False
    )[1]
  else:
    settings = peer_settings(config, policy.task, name)
    clock = peer_grpo.run("trl", folder, settings, script="trl_gkd")
    load = lambda step: hf.load(folder / f"step{step}")[1]
  timed = time_to_reward.time_snapshots(clock["step_ends"])
  samples: dict[str, list[float]] = {"kl": [], "pass_at_1": []}
  config.reference.role = "trainer"  # Here, the reference is the evaluator's.
  reference = work_parts.make_reference(
      config, policy, None, sharding.make_mesh(config.mesh)
  )
  evaluator = reward_judge.make_evaluator(
      config, "", policy, reference=reference
  )
  try:
    for step in timed["steps"]:
      params = load(step) if step else policy_lib.initial_params(policy, 0)
      result = evaluator.run(
          params, config.evaluate.final_prompts, version=step
      )
      for key, values in samples.items():
        values.append(result[key])
  finally:
    evaluator.close()
  return {
      **timed,
      **samples,
      "start_s": clock["step_ends"][0] - began,
      "versions": clock.get("versions", {}),
  }


def peer_settings(
    config: ml_collections.ConfigDict, task: base.Task, name: str
) -> dict[str, Any]:
  """Returns the settings of a TRL run, with the same prompts as ours."""
  order = prompt_order.PromptOrder(
      task.num_prompts(base.TRAIN), seed=config.seed
  )
  prompt_ids = [order.prompt(i)[0] for i in range(_BATCH * _NUM_STEPS)]
  return {
      **PEERS[name],
      "model": config.init,
      "teacher": config.reference.init,
      "prompts": [task.prompt(base.TRAIN, i) for i in prompt_ids],
      # Completions of batches not sampled by the student.
      "completions": [
          base.reference_text(task, base.TRAIN, i) for i in prompt_ids
      ],
      "batch": _BATCH,
      "max_completion_tokens": config.sampling.max_completion_tokens,
      "num_steps": _NUM_STEPS,
      "snapshot_steps": time_to_reward.SNAPSHOT_STEPS,
      "seed": config.seed,
  }


def _train_teacher(config: ml_collections.ConfigDict) -> pathlib.Path:
  """Returns the teacher's folder, one per seed."""
  workdir = _RUNS / f"teacher-seed{config.seed}"
  folder = workdir / "export"
  if not folder.exists():
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(_TEACHER)
    time_to_reward.train_ours(config, workdir)
    with time_to_reward.stdout_to_stderr():
      export.run(config, str(workdir), [])
  return folder.absolute()

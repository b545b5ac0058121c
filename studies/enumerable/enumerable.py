# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Limit of each objective, on- and off-policy, in a solvable bandit.

The bandit has six completions (`learning/enumerable.py`), so targets are exact.
Each objective trains on three kinds of data: from the policy itself, from the
policy 16 steps ago, and from a fixed uniform distribution. The result is the
total variation distance of the final policy to three distributions:

    reference   π_ref exp(r/β) / Z, the optimum with a KL to the reference
    behavior    uniform · exp(r/β) / Z, with a KL to the fixed distribution
    best        all mass on the completion with the highest reward

Operands: names of objectives and of settings in `RUNS`; all by default.
"""

from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np

from benchmarks import results
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.learning import enumerable

_N, _BETA, _NUM_STEPS, _LAG = 6, 0.5, 2000, 16
RUNS = {
    "tb": (),
    "tb_learned_z": ("loss.name=tb_learned_z",),
    "gvpo": ("loss.name=gvpo",),
    "a_star_po": (
        "loss.name=a_star_po", f"loss.baseline_temperature={_BETA}",
    ),
    "a_star_po, β₁ = 1": ("loss.name=a_star_po",),
    "flowrl": ("loss.name=flowrl",),
    "oapl": ("loss.name=oapl", f"loss.baseline_temperature={_BETA}"),
    "oapl, β₁ = 1": ("loss.name=oapl",),
    "oapl, group baseline": ("loss.name=oapl", "loss.baseline=group"),
    "ema_tb": ("loss.name=ema_tb", "loss.ema_decay=0.5"),
    "tb, anchor behavior, baseline mean": (
        "loss.anchor=behavior", "loss.baseline=mean",
    ),
    "tb, lower baseline": ("loss.baseline_shift=-0.1",),
    "tb, topr": ("loss.correction=topr",),
    "tb, bounded": ("loss.correction=bounded_sequence",),
    "tb, vespo": ("loss.correction=vespo",),
    "tb, m2_mask": ("loss.correction=m2_mask",),
    "tb, truncate_sequence": ("loss.correction=truncate_sequence",),
    "tb, ratio clip .2": ("loss.ratio_clip=0.2",),
    "reinforce": ("loss.name=reinforce",),
    "reinforce, truncate_sequence": (
        "loss.name=reinforce", "loss.correction=truncate_sequence",
    ),
    "reinforce, topr": ("loss.name=reinforce", "loss.correction=topr"),
    "reinforce, vespo": ("loss.name=reinforce", "loss.correction=vespo"),
}  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the final distances by run and data; prints the table."""
  del config
  if unknown := sorted(set(operands) - set(RUNS)):
    raise ValueError(
        f"unknown runs {unknown}; must be one of {', '.join(RUNS)}"
    )
  space = enumerable.make_space(_N, seed=0)
  uniform_N = np.full(_N, 1 / _N)
  target = lambda ref_logprobs_N: enumerable.target(
      enumerable.Space(ref_logprobs_N, space.rewards_N), beta=_BETA
  )
  targets = {
      "reference": target(space.ref_logprobs_N),
      "behavior": target(np.log(uniform_N)),
      "best": np.eye(_N)[space.rewards_N.argmax()],
  }
  data = {
      "policy": {},
      f"lag {_LAG}": {"lag_steps": _LAG},
      "uniform": {"behavior_N": uniform_N},
  }
  results_of = {}
  for name in operands or RUNS:
    learn = enumerable.make_learner(_settings(RUNS[name]), space)
    ends = {kind: learn(**of)[-1] for kind, of in data.items()}
    results_of[name] = {
        kind: {
            to: round(float(enumerable.distance(end, target_N)), 3)
            for to, target_N in targets.items()
        }
        for kind, end in ends.items()
    }
  rows = [
      [f"`{name}`", *(_closest(by_data[kind]) for kind in data)]
      for name, by_data in results_of.items()
  ]
  results.print_table([["objective", *data], *rows])
  apart = enumerable.distance(targets["reference"], targets["behavior"])
  return {"distances": results_of, "between_targets": round(float(apart), 3)}


def _settings(overrides: Sequence[str]) -> ml_collections.ConfigDict:
  config = settings.get_config()
  config.optimizer.learning_rate = 0.02
  config.optimizer.learning_rate_final = 0.0
  config.loss.log_z_learning_rate = 0.02
  config.loss.beta = _BETA
  config.train.num_steps = _NUM_STEPS
  config.train.prompts_per_batch = 16
  load.apply_overrides(config, list(overrides))
  return config


def _closest(distances: dict[str, float]) -> str:
  """Returns the nearest target and the distance to it."""
  to = min(distances, key=distances.get)
  return f"{to} ({distances[to]:.2f})"

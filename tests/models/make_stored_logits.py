# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes stored_logits/CASE.npz: what `transformers` computes of each case.

Run from the repository's root where torch is installed:

  python -m tests.models.make_stored_logits [CASE …]

For each case it searches the first seed whose greedy completions come near no
tie and repeat themselves little, and stores it, those completions, their least
top-two margin, and logits at some columns.
"""

import sys

import numpy as np

from tests.models import cases
from tests.models import torch_models

# Other computers sum in another order: twice the margin that tests assert.
_MARGIN = 2e-3
# Completions of fewer tokens repeat themselves and test little.
_DISTINCT = 8


def _make(case: str) -> dict[str, np.ndarray]:
  tokens, mask = cases.batch()
  for seed in range(300):
    model = torch_models.make(case, seed=seed)
    completions, margin = torch_models.greedy(model, tokens, mask)
    if margin.min() > _MARGIN and len(np.unique(completions)) > _DISTINCT:
      break
  else:
    raise ValueError(f"{case}: no seed of 300 has a margin above {_MARGIN}")
  full = cases.extend(tokens, mask, completions)
  logits = torch_models.logits(model, *full)[:, cases.COLUMNS]
  logits = np.where(full[1][:, cases.COLUMNS, None], logits, 0)
  distinct = len(np.unique(completions))
  print(case, seed, margin.min(), logits.std(), distinct, flush=True)
  return {
      "seed": np.int32(seed),
      "tokens": completions.astype(np.uint8),
      "margin": margin.min(),
      "logits": logits.astype(np.float32),
  }


def main(names: list[str]) -> None:
  for case in names or cases.CASES:
    np.savez_compressed(cases.STORED / f"{case}.npz", **_make(case))


if __name__ == "__main__":
  main(sys.argv[1:])

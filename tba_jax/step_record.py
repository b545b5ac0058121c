# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `metrics.jsonl` holds of one optimizer step."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.replay import amount
from tba_jax.replay import draw as draw_lib


def _by_age(
    staleness_BxK: np.ndarray, rewards_BxK: np.ndarray
) -> dict[str, float]:
  """Returns the mean reward of the completions younger and older than usual.

  Split at the batch's mean staleness, so that a policy that learns does not
  make the old data of a run look worse; {} where all are of one age.
  """
  old_BxK = staleness_BxK > staleness_BxK.mean()
  if not old_BxK.any():
    return {}
  return {
      "reward_young": float(rewards_BxK[~old_BxK].mean()),
      "reward_old": float(rewards_BxK[old_BxK].mean()),
  }


def step_record(
    step: int,
    metrics: Mapping[str, float],
    draw: draw_lib.Draw,
    *,
    seconds: Mapping[str, float],
    buffer: Mapping[str, Any],
    generated: amount.Amount,
) -> dict[str, Any]:
  """Returns the record of a step.

  Args:
    step: that was made.
    metrics: of the train step, bare names.
    draw: what it learned from.
    seconds: of the trainer by kind of span.
    buffer: `ReplayBuffer.stats`.
    generated: by all searchers since the start of the run.
  """
  staleness_BxK = np.maximum(step - draw.versions, 0)
  values, counts = np.unique(staleness_BxK, return_counts=True)
  data = {
      "staleness_steps": float(staleness_BxK.mean()),
      "staleness_histogram": {
          str(int(v)): int(c) for v, c in zip(values, counts, strict=True)
      },
      **_by_age(staleness_BxK, draw.rewards),
      **draw.stats(),
      **buffer,
  }
  return {
      **{f"train/{name}": value for name, value in metrics.items()},
      **{f"replay/{name}": value for name, value in data.items()},
      "time/step_s": seconds.get("step", 0.0),
      "time/wait_s": seconds.get("wait_fresh", 0.0),
      "time/draw_s": seconds.get("draw", 0.0),
      "total/completions": generated.completions,
      "total/tokens": generated.tokens,
  }

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the params that did best on the validation split.

WORKDIR/best/model is a Hugging Face folder, WORKDIR/best/best.json says of
which step it is and what it reached. The test split has no part in the choice:
what is chosen by it would look better than it is.
"""

from collections.abc import Callable, Mapping
import pathlib
import shutil
from typing import Any

from tba_jax import jsonl
from tba_jax import types

METRIC = "pass_at_1"
SaveFn = Callable[[pathlib.Path, types.PyTree], None]


class BestModel:
  """Compares each evaluation with the best one, and keeps the better."""

  def __init__(self, folder: pathlib.Path, save: SaveFn | None):
    """Finds what an earlier process kept.

    Args:
      folder: WORKDIR/best.
      save: writes params into a folder; None = nothing is kept.
    """
    self._folder = folder
    self._save = save
    found = jsonl.read_json(folder / "best.json") or {}
    self._best = found.get(METRIC, float("-inf"))

  def offer(
      self, step: int, params: types.PyTree, result: Mapping[str, Any]
  ) -> bool:
    """Keeps the params where the result is better; True where it was.

    Args:
      step: steps that the params have done.
      params: of the policy.
      result: of the evaluator.
    """
    if self._save is None or result[METRIC] <= self._best:
      return False
    model = self._folder / "model"
    partial = self._folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    self._folder.mkdir(parents=True, exist_ok=True)
    self._save(partial, params)
    shutil.rmtree(model, ignore_errors=True)
    partial.rename(model)
    names = ("split", METRIC, f"{METRIC}_interval", "num_prompts")
    kept = {name: result[name] for name in names if name in result}
    jsonl.atomic_write_json(self._folder / "best.json", {"step": step, **kept})
    self._best = result[METRIC]
    return True

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
      folder: WORKDIR/best; `best.partial` and `best.old` beside it are where
        one takes the other's place.
      save: writes params into a folder; None = nothing is kept.
    """
    self._folder = folder
    self._partial = folder.with_name(folder.name + ".partial")
    self._old = folder.with_name(folder.name + ".old")
    self._save = save
    if self._old.exists() and not folder.exists():
      self._old.rename(folder)
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
    shutil.rmtree(self._partial, ignore_errors=True)
    self._partial.mkdir(parents=True)
    self._save(self._partial / "model", params)
    names = ("split", METRIC, f"{METRIC}_interval", "num_prompts")
    kept = {name: result[name] for name in names if name in result}
    jsonl.atomic_write_json(self._partial / "best.json", {"step": step, **kept})
    # Params and what is said of them change together.
    shutil.rmtree(self._old, ignore_errors=True)
    if self._folder.exists():
      self._folder.rename(self._old)
    self._partial.rename(self._folder)
    shutil.rmtree(self._old, ignore_errors=True)
    self._best = result[METRIC]
    return True

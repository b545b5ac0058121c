# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A prompt order that revisits prompts by how often they were solved.

The first N positions are a permutation of the N prompts. The rest come in
rounds of N/4, rounded up: prompts drawn without replacement with weights

    unsolved    1 - s         as in Kimi k1.5 (arXiv:2501.12599, §2.3.4)
    uncertain   s (1 - s)     the variance of a binary reward
    s = (solved + 1)/(sampled + 2)

where solved and sampled count the prompt's completions, and each new visit
halves the weight of older ones. No prompt ever has zero weight.

A round is drawn when its first position is admitted, from the groups applied by
then, and written to a file before any of it is sampled. A trainer that resumes
from an earlier checkpoint thus has the same order as its journal.
"""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import prompt_order
from tba_jax.sampling import offline_sampler
from tba_jax.system import jsonl
from tba_jax.tasks import base

WEIGHTS = {
    "unsolved": lambda s: 1 - s,
    "uncertain": lambda s: s * (1 - s),
}
_ROUND_SHARE = 4
_KEPT = 0.5  # Decay of earlier counts at each new visit.
# Separates these random numbers from the permutation's.
_STREAM = 0xD1F
_SCHEMA = {"num_prompts": int, "prompts": [int]}


class CurriculumOrder(prompt_order.PromptOrder):
  """Maps positions to prompts; only `prompt` is thread-safe."""

  def __init__(
      self,
      num_prompts: int,
      *,
      seed: int,
      weight: str,
      solved_threshold: float,
      prompt_ids: Sequence[int] | None = None,
      folder: pathlib.Path | None = None,
  ):
    """Reads rounds drawn earlier, if any.

    Args:
      num_prompts: N.
      seed: random seed of permutation and draws.
      weight: name in `WEIGHTS`.
      solved_threshold: smallest reward of a solved completion.
      prompt_ids: N prompt ids; None uses 0 to N - 1.
      folder: directory of the rounds' files; None keeps rounds in memory.

    Raises:
      ValueError: a file is damaged, or belongs to another order.
    """
    super().__init__(num_prompts, seed=seed, prompt_ids=prompt_ids)
    self._weight = WEIGHTS[weight]
    self._solved_from = solved_threshold
    self._folder = folder
    self._size = -(-num_prompts // _ROUND_SHARE)
    self._index_of = {self.id_of(i): i for i in range(num_prompts)}
    self._solved = np.zeros(num_prompts)
    self._sampled = np.zeros(num_prompts)
    self._visits = np.ones(num_prompts, np.int64)
    # Indices and visits of each round.
    self._rounds: list[tuple[np.ndarray, np.ndarray]] = []
    while (drawn := self._read(len(self._rounds))) is not None:
      self._add(drawn)

  def prompt(self, position: int) -> tuple[int, int]:
    """Returns (prompt_id, visit) of a position.

    Returns (-1, -1) if `extend` has not reached the position.
    """
    if position < self.num_prompts:
      return super().prompt(position)
    number, place = divmod(position - self.num_prompts, self._size)
    if number >= len(self._rounds):
      return -1, -1
    indices, visits = self._rounds[number]
    return self.id_of(int(indices[place])), int(visits[place])

  def extend(self, limit: int) -> None:
    """Draws the rounds of all positions below `limit`."""
    while self.num_prompts + len(self._rounds) * self._size < limit:
      drawn = self._draw(len(self._rounds))
      path = self._path(len(self._rounds))
      if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = {"num_prompts": self.num_prompts, "prompts": drawn.tolist()}
        jsonl.atomic_write_json(path, record)
      self._add(drawn)

  def note(self, group: types.Group) -> None:
    """Counts how many of a group's judged completions were solved."""
    i, group = self._index_of[group.prompt_id], group.rewarded()
    if not group.num_completions:
      return
    solved = int((group.rewards >= self._solved_from).sum())
    self._solved[i] = _KEPT * self._solved[i] + solved
    self._sampled[i] = _KEPT * self._sampled[i] + group.num_completions

  def get_state(self) -> dict[str, Any]:
    """Returns the counts and the number of rounds drawn."""
    return {
        "solved": self._solved.copy(),
        "sampled": self._sampled.copy(),
        "num_rounds": len(self._rounds),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores the counts; raises ValueError if a round's file is missing."""
    if state and state["num_rounds"] > len(self._rounds):
      raise ValueError(
          f"{self._path(len(self._rounds))}: is missing, but the checkpoint has"
          f" drawn {state['num_rounds']} rounds of prompts; restore the file,"
          " or give another --workdir"
      )
    if state:
      self._solved = np.array(state["solved"])
      self._sampled = np.array(state["sampled"])

  def _draw(self, number: int) -> np.ndarray:
    """Returns the prompt indices of a round, in sampling order.

    Source: weighted sampling by the largest of u^(1/w), Efraimidis and Spirakis
    2006.
    """
    weights = self._weight((self._solved + 1) / (self._sampled + 2))
    rng = np.random.default_rng([self._seed, _STREAM, number])
    keys = np.log(1 - rng.random(self.num_prompts)) / weights
    return np.argsort(-keys, kind="stable")[: self._size]

  def _add(self, indices: np.ndarray) -> None:
    self._rounds.append((indices, self._visits[indices].copy()))
    self._visits[indices] += 1

  def _path(self, number: int) -> pathlib.Path | None:
    return self._folder and self._folder / f"order-{number:06d}.json"

  def _read(self, number: int) -> np.ndarray | None:
    """Returns a round drawn earlier, or None."""
    path = self._path(number)
    saved = path and jsonl.read_object(path, _SCHEMA)
    if not saved:
      return None
    drawn = np.array(saved["prompts"], np.int64)
    allowed = np.intersect1d(drawn, np.arange(self.num_prompts))
    is_ours = saved["num_prompts"] == self.num_prompts
    if not is_ours or not len(drawn) == len(allowed) == self._size:
      raise ValueError(
          f"{path}: must be {self._size} of {self.num_prompts} prompts; it has"
          f" {len(drawn)} of {saved['num_prompts']}. Give another --workdir"
      )
    return drawn


def make_order(
    config: ml_collections.ConfigDict,
    task: base.PromptSet,
    tokenizer: Any,
    folder: pathlib.Path | None = None,
) -> prompt_order.PromptOrder:
  """Returns the order of the task's training prompts.

  If all data is offline, it has only prompts with offline completions. Logged
  prompts of environments take their share of positions.

  Args:
    config: reads `seed`, `search`, and what `offline_sampler.make` reads.
    folder: replay directory of the run; None keeps the order in memory.

  Raises:
    ValueError: a file in the folder is damaged, or belongs to another order.
  """
  size, prompt_ids = task.num_prompts(base.TRAIN), None
  log = offline_sampler.make(config, task, tokenizer)
  if log is not None and log.share == 1:
    prompt_ids = log.prompt_ids
    size = len(prompt_ids)
  elif log is not None and task.has_turns:
    return prompt_order.MixedOrder(
        size,
        seed=config.seed,
        other=prompt_order.PromptOrder(
            len(log.prompt_ids), seed=config.seed, prompt_ids=log.prompt_ids
        ),
        takes_other=functools.partial(
            offline_sampler.is_logged, config.seed, log.share
        ),
    )
  common = {"seed": config.seed, "prompt_ids": prompt_ids}
  if config.search.order == "shuffled":
    return prompt_order.PromptOrder(size, **common)
  return CurriculumOrder(
      size,
      weight=config.search.order,
      solved_threshold=config.search.solved_threshold,
      folder=folder,
      **common,
  )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop, and a source that samples in the training thread.

A source yields the batch of each step once its groups have arrived. `Inline`
samples them itself, at an exact lag; `hooks.Draws` receives them from searchers
in threads or other processes. With `search.lockstep`, all are bitwise equal.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import ml_collections

from tba_jax import collect
from tba_jax import schedule as schedule_lib
from tba_jax import types
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import prompt_order
from tba_jax.sampling import samplers

# Called with a step, its draw and its metrics.
Hook = Callable[[int, Any, Mapping[str, Any]], None]


class StepLearner(Protocol):
  """Trains on batches."""

  def step(self, draw: Any) -> Mapping[str, Any]:
    """Dispatches a step; returns its metrics, which may be on devices."""


def run(
    source: Iterable[tuple[int, Any]],
    learner: StepLearner,
    hooks: Sequence[Hook] = (),
) -> None:
  """Trains on what a source yields.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), figure 1, and Noukhovitch
  et al. 2024 (arXiv:2410.18252), figure 2.
  """
  for step, draw in source:  # Waits until the groups of the step have arrived.
    metrics = learner.step(draw)  # The devices may still be computing it.
    for hook in hooks:  # Publish, record, guard, evaluate, save.
      hook(step, draw, metrics)


# `Collector` or a similar function: (prompts, params, version) -> groups.
CollectFn = Callable[
    [Sequence[collect.Prompt], types.PyTree, int], Sequence[types.Group]
]


class Inline:
  """Samples, judges and draws in the training thread, at an exact lag.

  Args:
    config: reads `train.prompts_per_batch`, `train.completions_per_prompt`,
      `search.sampler` and `offline.path`.
    params: () -> current params.
    collector: function that samples prompts and rewards their completions.
    schedule: source of the pinned versions.
    should_stop: whether to stop, checked before each step.

  Raises:
    ValueError: the schedule does not pin versions.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      params: Callable[[], types.PyTree],
      collector: CollectFn,
      schedule: schedule_lib.Schedule,
      buffer: buffer_lib.ReplayBuffer,
      order: prompt_order.PromptOrder,
      should_stop: Callable[[], bool] = lambda: False,
  ):
    if not schedule.is_pinned:
      raise ValueError(
          "config.search.lockstep = False: must be True, or use rounds"
          " (config.rounds.mini_batches), because the lag must be exact"
      )
    self._config = config
    self._params = params
    self._collector = collector
    self._schedule = schedule
    self._buffer = buffer
    self._order = order
    self._should_stop = should_stop
    self._waiting: collections.deque[types.Group] = collections.deque()
    self._num_sampled = 0

  def __iter__(self) -> Iterator[tuple[int, types.Draw]]:
    """Yields each step with its batch.

    Raises:
      RuntimeError: a group was sampled with another version than scheduled.
    """
    train, schedule, buffer = self._config.train, self._schedule, self._buffer
    num_inserted = 0
    buffer.begin_epoch(0, 0)
    for step in range(schedule.num_steps):
      if self._should_stop():
        return
      # Prompts that this step or a later one trains on.
      self._sample(schedule.admitted(step), step)
      while num_inserted < schedule.needed(step):
        group = self._waiting.popleft()
        self._check_version(group)
        group = buffer.rewarded(group)
        if group.num_tokens:  # 0 if nothing was judged, or without a prompt.
          self._order.note(group)
        buffer.insert(group, step)
        num_inserted += 1
      # Later prompts may depend on what has been solved so far.
      self._sample(schedule.admitted_after(step), step)
      draw = buffer.draw(
          train.prompts_per_batch, train.completions_per_prompt, step
      )
      buffer.mark_drawn(draw.ids)
      yield step, draw

  def _sample(self, limit: int, version: int) -> None:
    """Samples prompts up to position `limit`, from where it left off."""
    self._order.extend(limit)
    prompts = [
        (position, *self._order.prompt(position))
        for position in range(self._num_sampled, limit)
    ]
    if prompts:
      self._waiting.extend(self._collector(prompts, self._params(), version))
      self._num_sampled = limit

  def _check_version(self, group: types.Group) -> None:
    wanted = self._schedule.version_of(group.position)
    search, log = self._config.search, self._config.offline.path
    is_exact = not [*samplers.without("is_exact", search.sampler, log)]
    # Other samplers report their own versions, which are never newer.
    is_kept = not is_exact and group.versions.max() <= wanted
    if set(group.versions.tolist()) != {wanted} and not is_kept:
      raise RuntimeError(
          f"position {group.position} was sampled with versions"
          f" {sorted(set(group.versions.tolist()))}, not {wanted}"
      )

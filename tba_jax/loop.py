# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop: sample, replay, learn, in one thread and at an exact lag.

This is the system without its processes. Searchers and trainer do the same work
side by side; with `search.lockstep` they arrive at the same bits.
"""

import collections
from collections.abc import Callable, Iterator, Sequence

import ml_collections

from tba_jax import collect
from tba_jax import schedule as schedule_lib
from tba_jax import types
from tba_jax.learning import learner as learner_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import prompt_order

# `Collector`, or a function like it: prompts, params and version -> groups.
CollectFn = Callable[
    [Sequence[collect.Prompt], types.PyTree, int], Sequence[types.Group]
]


def train(
    config: ml_collections.ConfigDict,
    learner: learner_lib.Learner,
    collector: CollectFn,
    schedule: schedule_lib.Schedule,
    buffer: buffer_lib.ReplayBuffer,
    order: prompt_order.PromptOrder,
) -> Iterator[tuple[int, buffer_lib.Draw, dict[str, float]]]:
  """Trains for `schedule.num_steps`, and yields after each step.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), figure 1, and Noukhovitch
  et al. 2024 (arXiv:2410.18252), figure 2, at the lag of the schedule.

  Args:
    config: reads `train.prompts_per_batch`, `train.completions_per_prompt` and
      `logged.path`.
    learner: state, train step and reference policy.
    collector: samples and rewards the completions of prompts.
    schedule: schedule of lockstep or of rounds.
    buffer: replay buffer, empty.
    order: prompt order of the run.

  Yields:
    Step, its batch and its metrics. `learner.params` are those after the step.

  Raises:
    ValueError: nothing pins the version that samples a prompt.
    RuntimeError: a group has another version than the schedule gives.
  """
  if not schedule.is_pinned:
    raise ValueError(
        "config.search.lockstep = False: allowed True, or rounds"
        " (config.rounds.mini_batches); else the lag is not exact"
    )
  B, K = config.train.prompts_per_batch, config.train.completions_per_prompt
  waiting: collections.deque[types.Group] = collections.deque()
  num_sampled = num_inserted = 0

  def sample(limit: int, version: int) -> None:
    """Samples the prompts below a position that are not sampled yet."""
    nonlocal num_sampled
    order.extend(limit)
    prompts = [
        (position, *order.prompt(position))
        for position in range(num_sampled, limit)
    ]
    if prompts:
      waiting.extend(collector(prompts, learner.params, version))
      num_sampled = limit

  buffer.begin_epoch(0, 0)
  for step in range(schedule.num_steps):
    # Search: the collector samples the prompts that this step, or one after it,
    # trains on.
    sample(schedule.admitted(step), step)

    # Replay: the groups of this step enter the buffer; a batch leaves it.
    while num_inserted < schedule.needed(step):
      _check_version(waiting[0], schedule, config.logged.path)
      if waiting[0].num_tokens:  # 0 if its environment gave no prompt.
        order.note(waiting[0])
      buffer.insert(waiting.popleft(), step)
      num_inserted += 1
    # The prompts of the next round may depend on what was solved in this one.
    sample(schedule.num_sampled(step), step)
    draw = schedule.draw(buffer, B, K, step)
    buffer.mark_trained(draw.rows)

    # Learn: one step on the batch makes the next version.
    metrics = learner.step(draw)
    yield step, draw, metrics


def _check_version(
    group: types.Group, schedule: schedule_lib.Schedule, log: str
) -> None:
  wanted = schedule.version_of(group.position)
  # Logged groups keep their own versions, which are never newer.
  is_logged = log and group.versions.max() <= wanted
  if set(group.versions.tolist()) != {wanted} and not is_logged:
    raise RuntimeError(
        f"position {group.position} was sampled with versions"
        f" {sorted(set(group.versions.tolist()))}, not {wanted}"
    )

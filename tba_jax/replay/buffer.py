# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The replay buffer: completions by prompt, their eviction, and group draws.

Source: Bartoldson et al. 2025 (arXiv:2503.18929) §4.1-4.2. Where we differ: the
recent window is a span of steps, so it is exact however often a prompt came and
whatever was a duplicate; a global capacity evicts the oldest completion; all
randomness comes from one generator, which is part of the state.

Nothing here depends on the number of stored completions: an insert or a draw
touches the rows of its own prompts, and the one search for an id is binary.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tba_jax import types
from tba_jax.replay import admission
from tba_jax.replay import amount
from tba_jax.replay import completions
from tba_jax.replay import draw as draw_lib
from tba_jax.replay import prompt_rows
from tba_jax.replay import selection as selection_lib

_FORMAT = 1


class ReplayBuffer:
  """A bounded store of completions, drawn as groups of one prompt each."""

  def __init__(
      self,
      *,
      capacity_per_prompt: int,
      capacity: int,
      max_prompt_tokens: int,
      max_completion_tokens: int,
      recent_fraction: float,
      recent_window_steps: int,
      selection: str,
      reward_temperature: Callable[[int], float],
      dedupe: bool,
      seed: int,
      rules: admission.Rules = admission.PLAIN,
  ):
    """Makes an empty buffer.

    Args:
      capacity_per_prompt: completions of one prompt; the oldest goes.
      capacity: completions in all; the oldest goes.
      max_prompt_tokens: P.
      max_completion_tokens: T, stop token included.
      recent_fraction: probability, for each prompt of a batch, of drawing it
        and its completions from the recent window.
      recent_window_steps: a completion is recent at step t when it arrived at a
        step above t - recent_window_steps.
      selection: completions outside the window: "uniform" or "reward".
      reward_temperature: step -> temperature above 0, of "reward": weights
        exp(reward / temperature).
      dedupe: of equal completions of a prompt only the newest is kept.
      seed: of all draws.
      rules: of who is taken in and who has to go.

    Raises:
      ValueError: a setting is out of its range.
    """
    _check(selection in ("uniform", "reward"), "selection", selection)
    _check(0 <= recent_fraction <= 1, "recent_fraction", recent_fraction)
    _check(capacity_per_prompt > 0, "capacity_per_prompt", capacity_per_prompt)
    _check(capacity > 0, "capacity", capacity)
    _check(recent_window_steps > 0, "recent_window_steps", recent_window_steps)
    self.capacity = capacity
    self._max_prompt_tokens = max_prompt_tokens
    self._recent_fraction = recent_fraction
    self._recent_window_steps = recent_window_steps
    self._selection = selection
    self._reward_temperature = reward_temperature
    self._rng = np.random.default_rng(seed)
    self._store = completions.CompletionStore(
        capacity_per_prompt=capacity_per_prompt,
        capacity=capacity,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        dedupe=dedupe,
        rules=rules,
    )
    self._replay_pool = selection_lib.PromptPool()
    self._recent_pool = selection_lib.RecentPool(recent_window_steps)
    self._sample_step = 0
    self._recent_misses = 0

  def __len__(self) -> int:
    return len(self._store)

  @property
  def num_prompts(self) -> int:
    return len(self._store.prompts)

  def untrained(self) -> amount.Amount:
    """Returns what is stored and was never trained on."""
    return self._store.uses.untrained

  def insert(self, group: types.Group, step: int) -> amount.InsertResult:
    """Stores the completions of a group; each is recent from `step` on.

    In this order: of equal completions within the group the last stays; older
    copies of them go; then the prompt's oldest, and the oldest of all, until
    there is room. Completions that exceed a capacity by themselves are evicted
    at once, the first ones first.

    Args:
      group: S completions; padding is ignored.
      step: at which they arrive; must not fall from one insert to the next.

    Returns:
      What came, what was replaced and what was evicted.

    Raises:
      ValueError: too many tokens, shapes that disagree, a reward that is not
        finite, a step that falls, or other tokens than before for this prompt.
        The buffer is unchanged.
    """
    first_id = self._store.table.next_id
    result, emptied = self._store.insert(group, step)
    if self._store.table.next_id > first_id:  # Not all of it was refused.
      if group.prompt_id not in self._replay_pool:
        self._replay_pool.add(group.prompt_id)
      self._recent_pool.add(group.prompt_id, step)
    for prompt_id in emptied:
      self._replay_pool.remove(prompt_id)
      self._recent_pool.remove(prompt_id)
    return result

  def sample(
      self, num_prompts: int, num_completions: int, step: int
  ) -> draw_lib.Draw:
    """Returns a batch; each prompt is drawn from the recent window or from all.

    Prompts are drawn without replacement within each of the two branches, whose
    pools outlive the batch: a prompt is in a batch at most twice, unless there
    are fewer prompts than slots. Completions are drawn without replacement
    where the branch has `num_completions` of the prompt, else with it. While
    nothing is recent, all prompts come from the other branch.

    Args:
      num_prompts: B.
      num_completions: K.
      step: the step that will learn from the batch; must not fall.

    Raises:
      ValueError: the buffer is empty, or `step` falls.
    """
    if not len(self._store):
      raise ValueError("the replay buffer is empty: nothing to draw")
    if step < self._sample_step:
      raise ValueError(f"step {step} after step {self._sample_step}")
    self._sample_step = step
    self._recent_pool.expire(step)
    recent_B = self._rng.random(num_prompts) < self._recent_fraction
    num_recent = int(recent_B.sum())
    if not self._recent_pool:
      self._recent_misses += num_recent
      num_recent, recent_B = 0, np.zeros(num_prompts, np.bool_)
    prompt_ids_B = np.empty(num_prompts, np.int64)
    prompt_ids_B[recent_B] = self._recent_pool.draw(self._rng, num_recent)
    prompt_ids_B[~recent_B] = self._replay_pool.draw(
        self._rng, num_prompts - num_recent
    )
    rows_BxK = np.empty((num_prompts, num_completions), np.int64)
    for b, (key, recent) in enumerate(
        zip(prompt_ids_B.tolist(), recent_B.tolist(), strict=True)
    ):
      rows_BxK[b] = self._choose(
          self._store.prompts[key], num_completions, recent
      )
    return self._gather(rows_BxK, recent_B, prompt_ids_B)

  def sample_in_order(
      self,
      num_prompts: int,
      num_completions: int,
      step: int,
      *,
      arrived_from: int,
      skip: int,
  ) -> draw_lib.Draw:
    """Returns groups in their order of arrival, without any randomness.

    A group of which a completion was refused or evicted is passed over. Where
    fewer are left than asked for, the first come again. `arrived_from` is the
    first step whose arrivals count, `skip` how many groups precede the batch.
    """
    if step < self._sample_step:
      raise ValueError(f"step {step} after step {self._sample_step}")
    self._sample_step = step
    self._recent_pool.expire(step)
    table = self._store.table
    groups = table.whole_groups(arrived_from, num_completions)
    if not len(groups):
      raise ValueError(f"step {step}: no whole group since {arrived_from}")
    rows_BxK = groups[(skip + np.arange(num_prompts)) % len(groups)]
    return self._gather(
        rows_BxK,
        np.ones(num_prompts, np.bool_),
        table.prompt_ids[rows_BxK[:, 0]],
    )

  def mark_trained(self, ids: np.ndarray) -> amount.Amount:
    """Counts uses of completions; returns what is trained for the first time.

    Args:
      ids: `Draw.rows` of any shape. A repeated id counts as often. An id whose
        completion is gone is passed over: it was accounted for when it went.
    """
    return self._store.mark_trained(ids)

  def set_ref_logprobs(
      self, ids: np.ndarray, values: np.ndarray, ref_version: int
  ) -> int:
    """Caches reference log-probs; returns how many completions are still here.

    Args:
      ids: [...] int64, of `Draw.rows`.
      values: [..., T] float32, nats.
      ref_version: of the reference policy, at least 0.
    """
    return self._store.set_ref_logprobs(ids, values, ref_version)

  def stats(self) -> dict[str, Any]:
    """Returns numbers on what is stored; their cost is constant.

    size: completions. prompts: with completions. untrained: completions never
    used. use_count: mean uses of a stored completion. use_count_histogram: uses
    (the last bin also holds all above) to completions. recent_misses: prompts
    of all draws that found nothing recent.
    """
    uses = self._store.uses
    return {
        "size": len(self),
        "prompts": self.num_prompts,
        "untrained": uses.untrained.completions,
        "use_count": uses.num_uses / max(len(self), 1),
        "use_count_histogram": {
            str(n): count for n, count in enumerate(uses.histogram)
        },
        "recent_misses": self._recent_misses,
    }

  def get_state(self) -> dict[str, Any]:
    """Returns arrays of the live rows, the pools and the generator."""
    return {
        "format": _FORMAT,
        "store": self._store.get_state(),
        "replay_pool": self._replay_pool.get_state(),
        "recent_pool": self._recent_pool.get_state(),
        "rng": self._rng.bit_generator.state,
        "sample_step": self._sample_step,
        "recent_misses": self._recent_misses,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Takes a state of `get_state`; all then goes on as it would have.

    Raises:
      ValueError: a newer format, or tokens beyond the present maximum lengths.
    """
    if state["format"] > _FORMAT:
      raise ValueError(
          f"replay state of format {state['format']}; this version of tba_jax"
          f" reads up to {_FORMAT}"
      )
    self._store.set_state(state["store"])
    self._replay_pool.set_state(state["replay_pool"])
    self._recent_pool.set_state(state["recent_pool"])
    self._rng.bit_generator.state = state["rng"]
    self._sample_step = int(state["sample_step"])
    self._recent_misses = int(state["recent_misses"])

  def check_valid(self) -> None:
    """Raises RuntimeError where the buffer contradicts itself."""
    self._store.check_valid()
    self._replay_pool.check_valid()
    self._recent_pool.check_valid()
    prompts = self._store.prompts
    if len(self._replay_pool) != len(prompts) or any(
        key not in self._replay_pool for key in prompts
    ):
      raise RuntimeError("the replay pool does not hold exactly the prompts")
    arrivals = self._store.table.arrivals
    last = {key: arrivals[p.view()[-1]] for key, p in prompts.items()}
    oldest = self._sample_step - self._recent_window_steps
    for key, arrived in last.items():
      if arrived > oldest and key not in self._recent_pool:
        raise RuntimeError(f"prompt {key} is recent but not in the pool")

  def _choose(
      self, prompt: prompt_rows.PromptRows, count: int, recent: bool
  ) -> np.ndarray:
    """Returns rows of one prompt, [count] int64."""
    rows, table = prompt.view(), self._store.table
    oldest = self._sample_step - self._recent_window_steps
    first = prompt.first_after(oldest, table.arrivals) if recent else len(rows)
    # What was recent may have been replaced since: then all are drawn from.
    if first < len(rows):
      rows = rows[first:]
    elif self._selection == "reward":
      return rows[
          selection_lib.choose_by_reward(
              self._rng,
              table.rewards[rows],
              count,
              temperature=self._reward_temperature(self._sample_step),
          )
      ]
    return rows[selection_lib.choose_uniform(self._rng, len(rows), count)]

  def _gather(
      self, rows_BxK: np.ndarray, recent_B: np.ndarray, prompt_ids_B: np.ndarray
  ) -> draw_lib.Draw:
    return draw_lib.gather(
        self._store,
        rows_BxK,
        recent_B,
        prompt_ids_B,
        num_columns=self._max_prompt_tokens,
        step=self._sample_step,
    )


def _check(ok: bool, name: str, value: Any) -> None:
  if not ok:
    raise ValueError(f"config.replay.{name}={value!r} is out of range")

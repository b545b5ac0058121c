# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay buffer: stores completions by prompt, evicts, and samples batches.

Source: Bartoldson et al. 2025 (arXiv:2503.18929) §4.1-4.2; skipped groups, Yu
et al. 2025 (DAPO, arXiv:2503.14476) §3.2. Differences: the recent window is a
span of steps, so duplicates and repeated prompts do not change it; if a prompt
has too few recent completions, its newest older ones fill up the group, where
the published code repeats the recent ones; a global capacity evicts the oldest
completion; all randomness comes from one generator, which is part of the state.
The cost of an insert or a draw does not depend on the number of stored
completions.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import hashlib
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import ledger
from tba_jax.replay import records as records_lib
from tba_jax.replay import selection
from tba_jax.replay import similarity
from tba_jax.system import ramps

_NO_REWARD = (
    "there is nothing to train on: no completion received a reward. Fix the"
    " errors in the reward_failed events, and give another --workdir"
)
# From rows, [n] int64, to whether each is left out, [n] bool.
LeftOutFn = Callable[[np.ndarray], np.ndarray]
# 128 bits: among 10^9 completions, a collision has probability 1e-21.
_DIGEST_BYTES = 16


class NothingLeftError(ValueError):
  """A draw leaves out all stored completions."""

  def __init__(self):
    super().__init__("nothing is left to draw: all stored groups are left out")


def staleness(
    starts: Sequence[tuple[int, int]],
    epochs: np.ndarray,
    versions: np.ndarray,
    step: int,
) -> np.ndarray:
  """Returns the number of updates between the sampling params and a step's.

  A restart goes back to a checkpoint and abandons the versions published after
  it. With b the earliest step that a later epoch started from and c =
  min(version, b) the last common ancestor,

      staleness = (step - c) + (version - c)

  which is step - version unless the version was abandoned.

  Args:
    starts: (epoch, first step) of all epochs.
    epochs: [...] int, epoch that published the params.
    versions: [...] int, step at which the params were published.

  Returns:
    [...] int32, at least 0.
  """
  branch = np.full(versions.shape, np.iinfo(np.int64).max)
  for epoch, start in starts:
    branch = np.where(epochs < epoch, np.minimum(branch, start), branch)
  common = np.minimum(versions, branch)
  return np.maximum(step + versions - 2 * common, 0).astype(np.int32)


def evict_oldest(
    buffer: "ReplayBuffer",
    group: types.Group,
    prompt: records_lib.PromptRecords,
    candidates: list[int],
) -> list[int]:
  """Evicts the oldest completions, first of the prompt, then of all prompts."""
  table = buffer.table
  candidates = candidates[-min(buffer.capacity_per_prompt, buffer.capacity) :]
  excess = len(prompt) + len(candidates) - buffer.capacity_per_prompt
  if excess > 0:
    buffer.remove(prompt.view()[:excess].copy())
  excess = len(table) + len(candidates) - buffer.capacity
  if excess > 0:
    buffer.remove(table.oldest(excess))
  return candidates


def evict_lowest_reward(
    buffer: "ReplayBuffer",
    group: types.Group,
    prompt: records_lib.PromptRecords,
    candidates: list[int],
) -> list[int]:
  """Evicts the lowest rewards, stored or new: of the prompt, then of all.

  Ties evict the oldest.
  """
  table = buffer.table
  for capacity, of_all in (
      (buffer.capacity_per_prompt, False),
      (buffer.capacity, True),
  ):
    rows = table.live_rows() if of_all else prompt.view()
    excess = len(rows) + len(candidates) - capacity
    if excess <= 0:
      continue
    ages = np.concatenate(
        [table.ids[rows], table.next_id + np.array(candidates)]
    )
    rewards = np.concatenate([table.rewards[rows], group.rewards[candidates]])
    lowest = np.lexsort((ages, rewards))[:excess]
    refused = set((lowest[lowest >= len(rows)] - len(rows)).tolist())
    buffer.remove(rows[lowest[lowest < len(rows)]])
    candidates = [j for i, j in enumerate(candidates) if i not in refused]
  return candidates


# Rules of `replay_filter.evict`: each removes stored completions until the
# group's `candidates` fit, and returns the indices of completions to store.
EVICTION_RULES: Mapping[str, Callable[..., list[int]]] = {
    "oldest": evict_oldest,
    "lowest_reward": evict_lowest_reward,
}


class ReplayBuffer:
  """A bounded store of completions, sampled as groups of one prompt each.

  table: the stored completions; read-only.
  prompts: rows of each prompt with completions, by prompt id; read-only.
  capacity, capacity_per_prompt: maximum completions in total and per prompt.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      *,
      reward_temperature: Callable[[int], float],
      embed: similarity.EmbedFn | None = None,
      content_mask: similarity.ContentMaskFn | None = None,
      columns: Mapping[str, tuple[int, ...]] | None = None,
      fallback: float | None = None,
  ):
    """Makes an empty buffer.

    Args:
      config: reads `replay`, `replay_filter`, `rounds`, `sampling` (P and T),
        `seed` and `loss.beta`.
      reward_temperature: step -> temperature above 0, for
        `replay.selection="reward"`.
      embed: sentence encoder, for `replay_filter.similarity="cosine"`.
      content_mask: mask of sampled tokens without stop tokens and stop strings,
        for any `replay_filter.similarity`.
      columns: optional columns of groups, see `collect.optional_columns`.
      fallback: reward given to completions without one; None does not store
        such completions.
    """
    self._fallback = fallback
    self.settings, self._filter = config.replay, config.replay_filter
    self._rounds = config.rounds
    self._max_prompt_tokens = config.sampling.max_prompt_tokens
    self._temperature = config.sampling.temperature
    self.reward_temperature = reward_temperature
    self._evict = EVICTION_RULES[self._filter.evict]
    self.capacity = self.settings.capacity
    self.capacity_per_prompt = self.settings.capacity_per_prompt
    self.table = records_lib.RecordTable(
        config.sampling.max_completion_tokens,
        self.capacity,
        columns or {},
    )
    self._prompt_columns = records_lib.stored_columns(self.columns, "P")
    self._similarity = None
    if self._filter.similarity != "none":
      self._similarity = similarity.SimilarityFilter(
          self._filter,
          self.table,
          embed,
          content_mask,
          ramps.parse(config.loss.beta).start,
      )
    self.prompts: dict[int, records_lib.PromptRecords] = {}
    # With `replay.dedupe`: digest of a text -> its newest row, and the reverse.
    self.row_of: dict[bytes, int] = {}
    self.digests: dict[int, bytes] = {}
    # Prompts whose last row was removed since the current insert began.
    self._emptied: list[int] = []
    self._rng = np.random.default_rng(config.seed)
    self.replay_pool = selection.PromptPool()
    self.recent_pool = selection.RecentPool(self.settings.recent_window_steps)
    # (epoch, step) of each start of the trainer.
    self._starts: list[tuple[int, int]] = []
    self._insert_step = 0
    self.sample_step = 0
    self._recent_misses = 0
    self._skipped_groups = 0

  def __len__(self) -> int:
    return len(self.table)

  @property
  def num_prompts(self) -> int:
    return len(self.prompts)

  @property
  def columns(self) -> Mapping[str, tuple[int, ...]]:
    """Optional columns of groups, see `collect.optional_columns`."""
    return self.table.columns

  @property
  def epoch(self) -> int:
    """The newest epoch that has begun, -1 before the first."""
    return self._starts[-1][0] if self._starts else -1

  def untrained(self) -> ledger.Amount:
    """Returns the amount of stored data that was never trained on."""
    return self.table.untrained

  def begin_epoch(self, epoch: int, step: int) -> None:
    """Records that an epoch of the trainer starts from the params of `step`."""
    self._starts.append((epoch, step))

  def has_other_tokens(self, group: types.Group) -> bool:
    """Returns whether the group's prompt is stored with different tokens.

    If so, its text or the tokenizer has changed.
    """
    prompt = self.prompts.get(group.prompt_id)
    return prompt is not None and not np.array_equal(
        prompt.columns["prompt_tokens"], group.prompt_tokens
    )

  def rewarded(self, group: types.Group) -> types.Group:
    """Returns the group reduced to completions with a reward."""
    return group.rewarded(self._fallback)

  def insert(self, group: types.Group, step: int) -> ledger.Amount:
    """Stores the completions of a group; they are recent from `step` on.

    By default, the newest of equal completions is kept, and the oldest
    completions are evicted, first of the prompt, then of all prompts. If the
    group alone exceeds a capacity, its first completions are evicted. With
    `replay.skip_equal_rewards`, a group of equal rewards is stored but drawn
    only from the pool of all prompts. Completions that are not `rewarded`, or
    lack values that the loss needs (`types.Group.is_never_drawn`), are not
    stored.

    Args:
      group: S valid completions (`messages.reject_reason`), or completions
        without sampled tokens, which are not stored; padding is ignored.
      step: arrival step; must not decrease.

    Returns:
      Amount of unused data that left the buffer or never entered it.

    Raises:
      ValueError: `step` decreased, the prompt had other tokens before, or a
        column is missing; the buffer is unchanged.
    """
    if step < self._insert_step:
      raise ValueError(f"insert at step {step} after step {self._insert_step}")
    added = ledger.Amount(1, group.num_completions, group.num_tokens)
    group = self.rewarded(group)
    if not group.num_tokens:  # No reward, or no prompt from its environment.
      return added
    if self.has_other_tokens(group):
      raise ValueError(f"prompt {group.prompt_id} comes with other tokens")
    for name in self.columns:
      if getattr(group, name) is None:
        raise ValueError(f"prompt {group.prompt_id} comes without {name!r}")
    if group.is_never_drawn:
      self._insert_step = step
      self._skipped_groups += 1
      return added
    prompt = self.prompts.get(group.prompt_id)
    if prompt is None:
      prompt = records_lib.PromptRecords({})
      self.prompts[group.prompt_id] = prompt
    for name, column in self._prompt_columns.items():
      if column.when or name not in prompt.columns:
        prompt.columns[name] = np.array(getattr(group, name), column.dtype)
    self._insert_step = step
    if self._filter.freeze_step and step >= self._filter.freeze_step:
      self.capacity = min(self.capacity, max(len(self), 1))
    before = self.untrained()
    candidates, digests, replaced = self._deduplicate(group)
    features = {}
    if self._similarity is not None:
      rows = prompt.view()
      candidates, similar, features = self._similarity.admit(
          group, candidates, rows[~np.isin(rows, replaced)]
      )
      replaced += similar
    # Replaced rows do not count towards the capacities.
    if replaced:
      self.remove(np.array(replaced, np.int64))
    stored = self._evict(self, group, prompt, candidates)
    if stored:
      rows = self.table.append(group, stored, step)
      prompt.append(rows)
      for row, j in zip(rows.tolist(), stored):
        if self.settings.dedupe:
          self.row_of[digests[j]] = row
          self.digests[row] = digests[j]
        if features:
          self._similarity.store(row, features[j])
      if group.prompt_id not in self.replay_pool:
        self.replay_pool.add(group.prompt_id)
      if self.settings.skip_equal_rewards and not np.ptp(group.rewards):
        self._skipped_groups += 1
      else:
        self.recent_pool.add(group.prompt_id, step)
    self._forget_emptied(group.prompt_id)
    return before + added - self.untrained()

  def remove(self, rows: np.ndarray) -> None:
    """Removes rows of any prompts, [n] int64; used by eviction rules."""
    owners = self.table.prompt_ids[rows].tolist()
    for row, prompt_id in zip(rows.tolist(), owners):
      self.prompts[prompt_id].remove(row, self.table.ids)
      if not len(self.prompts[prompt_id]):
        self._emptied.append(prompt_id)
      digest = self.digests.pop(row, None)
      # A newer copy may exist if deduping was off before a restart.
      if self.row_of.get(digest) == row:
        del self.row_of[digest]
    self.table.free(rows)

  def draw(
      self, num_prompts: int, num_completions: int, step: int
  ) -> types.Draw:
    """Returns a step's batch: sampled from replay, or the next of its round.

    Args and raises: see `sample`.
    """
    num_batches = self._rounds.mini_batches
    if not num_batches:
      return self.sample(num_prompts, num_completions, step)
    done = step % (num_batches * self._rounds.passes)
    return self.sample_in_order(
        num_prompts,
        num_completions,
        step,
        arrived_from=step - done,
        skip=done % num_batches * num_prompts,
    )

  def sample(
      self, num_prompts: int, num_completions: int, step: int
  ) -> types.Draw:
    """Returns a batch; each prompt comes from the recent pool or the full pool.

    Prompts are drawn without replacement within each pool, across batches, so a
    prompt is in a batch at most twice, unless there are fewer prompts than
    slots. Completions are drawn without replacement if the prompt has
    `num_completions`. Otherwise each is repeated equally often and the rest is
    drawn without replacement; by reward, all are drawn with replacement. A
    prompt from the recent pool uses its recent completions and, if these are
    too few, its newest older ones. While nothing is recent, all prompts come
    from the full pool.

    Args:
      num_prompts: B.
      num_completions: K.
      step: optimizer step that will use the batch; must not decrease.

    Raises:
      ValueError: the buffer is empty, or `step` decreased.
    """
    if not len(self):
      raise ValueError(_NO_REWARD)
    self._advance(step)
    recent_B = self._rng.random(num_prompts) < self.settings.recent_fraction
    num_recent = int(recent_B.sum())
    if not self.recent_pool:
      self._recent_misses += num_recent
      num_recent, recent_B = 0, np.zeros(num_prompts, np.bool_)
    prompt_ids_B = np.empty(num_prompts, np.int64)
    prompt_ids_B[recent_B] = self.recent_pool.draw(self._rng, num_recent)
    prompt_ids_B[~recent_B] = self.replay_pool.draw(
        self._rng, num_prompts - num_recent
    )
    rows_BxK = np.empty((num_prompts, num_completions), np.int64)
    for b, (key, recent) in enumerate(
        zip(prompt_ids_B.tolist(), recent_B.tolist(), strict=True)
    ):
      rows_BxK[b] = self._choose(
          self._rng, self.prompts[key], num_completions, recent
      )
    return self._gather(rows_BxK, recent_B)

  def sample_in_order(
      self,
      num_prompts: int,
      num_completions: int,
      step: int,
      *,
      arrived_from: int,
      skip: int,
  ) -> types.Draw:
    """Returns groups in order of arrival.

    A group with fewer than K completions, because some could not be judged,
    repeats them in turn. With too few groups, the first are repeated; with
    none, all stored groups are used.

    Args:
      num_prompts: B.
      num_completions: K.
      step: optimizer step that will use the batch; must not decrease.
      arrived_from: first step whose arrivals count.
      skip: number of groups before the batch.
    """
    self._advance(step)
    groups = self.table.whole_groups(arrived_from, num_completions)
    if not len(groups):
      self._recent_misses += num_prompts
      groups = self.table.whole_groups(0, num_completions)
    if not len(groups):
      raise ValueError(_NO_REWARD)
    rows_BxK = groups[(skip + np.arange(num_prompts)) % len(groups)]
    return self._gather(rows_BxK, np.ones(num_prompts, np.bool_))

  def redraw(
      self,
      draw: types.Draw,
      is_left_out: LeftOutFn,
      rng: np.random.Generator,
  ) -> types.Draw:
    """Returns a draw with other completions instead of the left-out ones.

    Changes only the slots that have left-out completions. A slot keeps its
    prompt if other completions of it remain, recent ones in a slot of the
    recent pool. Otherwise it gets a prompt of the same pool, or of the full
    pool if none remains: undrawn prompts come first, prompts that the batch
    already has come last. In rounds, a slot gets the next group after the batch
    in order of arrival. The buffer, its pools and its generator do not change.

    Args:
      draw: newest result of `draw`.
      is_left_out: predicate of rows.

    Raises:
      NothingLeftError: all stored completions are left out.
    """
    rows_BxK, _ = self.table.find(draw.ids)
    out_BxK = is_left_out(rows_BxK.ravel()).reshape(rows_BxK.shape)
    slots = out_BxK.any(axis=1).nonzero()[0].tolist()
    recent_B = draw.recent.copy()
    if slots and self._rounds.mini_batches:
      rows_BxK[slots] = self._next_groups(rows_BxK, len(slots), is_left_out)
    elif slots:
      prompt_ids = draw.prompt_ids.tolist()
      for b in slots:
        others = {*prompt_ids[:b], *prompt_ids[b + 1 :]}
        prompt_ids[b], prompt, recent_B[b] = self._other_prompt(
            rng, prompt_ids[b], bool(recent_B[b]), others, is_left_out
        )
        rows_BxK[b] = self._choose(rng, prompt, len(out_BxK[b]), recent_B[b])
    return self._gather(rows_BxK, recent_B)

  def mark_drawn(self, ids: np.ndarray) -> ledger.Amount:
    """Counts uses of completions; returns the amount of first uses.

    Args:
      ids: values of `Draw.ids`, any shape; repeats count. Evicted ids are
        ignored, because eviction has already accounted for them.
    """
    rows, alive = self.table.find(ids.ravel())
    return self.table.use(rows[alive])

  def set_ref_logprobs(
      self, ids: np.ndarray, values: np.ndarray, ref_version: int
  ) -> int:
    """Caches reference log-probs; returns how many ids are still stored.

    Args:
      ids: [...] int64, values of `Draw.ids`.
      values: [..., T] float32, nats.
      ref_version: version of the reference policy, 0 or more.
    """
    rows, alive = self.table.find(ids)
    rows, values = rows[alive], values[alive]
    sampled = self.table.tokens("sampled_mask", rows)
    values = np.where(sampled, values, 0)
    self.table.set_tokens("ref_logprobs", rows, values)
    self.table.ref_versions[rows] = ref_version
    return len(rows)

  def stats(self) -> dict[str, Any]:
    """Returns statistics of the stored data, in constant time.

    size: completions. untrained: completions never used. use_count: mean uses
    of a stored completion. use_count_histogram: completions by number of uses
    (the last bin is open). recent_misses: draws from an empty recent window.
    skipped_groups: groups that `replay.skip_equal_rewards` skipped.
    """
    return {
        "size": len(self),
        "prompts": self.num_prompts,
        "untrained": self.untrained().completions,
        "use_count": self.table.num_uses / max(len(self), 1),
        "use_count_histogram": {
            str(n): count for n, count in enumerate(self.table.histogram)
        },
        "recent_misses": self._recent_misses,
        "skipped_groups": self._skipped_groups,
    }

  def get_state(self) -> dict[str, Any]:
    """Returns the stored completions, the pools and the generator."""
    prompts = [prompt.columns for prompt in self.prompts.values()]
    lengths = [len(columns["prompt_tokens"]) for columns in prompts]
    of_prompts = {}
    for name, column in self._prompt_columns.items():
      empty = np.zeros((0, *self.columns.get(name, ())), column.dtype)
      of_prompts[name] = np.concatenate([empty, *[p[name] for p in prompts]])
    return {
        "rows": self.table.get_state(),
        "prompt_ids": np.array(list(self.prompts), np.int64),
        "prompt_lengths": np.array(lengths, np.int64),
        **of_prompts,
        "replay_pool": self.replay_pool.get_state(),
        "recent_pool": self.recent_pool.get_state(),
        "rng": self._rng.bit_generator.state,
        "starts": np.array(self._starts, np.int64).reshape(-1, 2),
        "capacity": self.capacity,
        "temperature": self._temperature,
        "insert_step": self._insert_step,
        "sample_step": self.sample_step,
        "recent_misses": self._recent_misses,
        "skipped_groups": self._skipped_groups,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; later draws are the same as in the saved buffer.

    If the capacities are smaller now, later inserts evict the excess. Cached
    reference log-probs of another temperature are dropped.

    Raises:
      ValueError: a prompt or completion is longer than the config allows.
    """
    longest = state["prompt_lengths"].max(initial=0)
    if longest > self._max_prompt_tokens:
      raise ValueError(
          f"saved prompts of up to {longest} tokens; must be at most"
          f" max_prompt_tokens={self._max_prompt_tokens}"
      )
    self.table.set_state(state["rows"])
    if state["temperature"] != self._temperature:
      self.table.ref_versions[self.table.live_rows()] = -1
    ends = np.cumsum(state["prompt_lengths"])[:-1]
    names = list(self._prompt_columns)
    of_prompts = zip(*[np.split(state[name], ends) for name in names])
    self.prompts = {
        key: records_lib.PromptRecords(dict(zip(names, values)))
        for key, values in zip(state["prompt_ids"].tolist(), of_prompts)
    }
    rows = self.table.live_rows()
    owners = self.table.prompt_ids[rows]
    order = np.argsort(owners, kind="stable")
    prompt_ids, starts = np.unique(owners[order], return_index=True)
    shares = np.split(rows[order], starts[1:])
    for prompt_id, share in zip(prompt_ids.tolist(), shares):
      self.prompts[prompt_id].append(share)
    self.row_of, self.digests = {}, {}
    if self.settings.dedupe:
      for row in rows.tolist():
        self.digests[row] = self.digest_of(row)
        self.row_of[self.digests[row]] = row
    if self._similarity is not None:
      self._similarity.restore()
    if self._filter.freeze_step:
      self.capacity = min(self.settings.capacity, int(state["capacity"]))
    self.replay_pool.set_state(state["replay_pool"])
    self.recent_pool.set_state(state["recent_pool"])
    self._rng.bit_generator.state = state["rng"]
    self._starts = [tuple(pair) for pair in state["starts"].tolist()]
    self._insert_step = int(state["insert_step"])
    self.sample_step = int(state["sample_step"])
    self._recent_misses = int(state["recent_misses"])
    self._skipped_groups = int(state["skipped_groups"])

  def digest_of(self, row: int) -> bytes:
    """Returns the digest of a stored completion and its prompt id."""
    length = self.table.completion_lengths[row]
    tokens = self.table.tokens("completion_tokens", np.array(row))[:length]
    return _digest(int(self.table.prompt_ids[row]), tokens.tobytes())

  def _deduplicate(
      self, group: types.Group
  ) -> tuple[list[int], dict[int, bytes], list[int]]:
    """Finds copies within the group and in the buffer.

    Returns:
      Indices of the completions to store, digests by index, and the rows that
      they replace.
    """
    if not self.settings.dedupe:
      return list(range(len(group.rewards))), {}, []
    data = group.completion_tokens.astype(np.int32, copy=False).tobytes()
    stride = 4 * group.completion_tokens.shape[1]
    last: dict[bytes, int] = {}
    for j, length in enumerate(group.completion_lengths.tolist()):
      text = data[j * stride : j * stride + 4 * length]
      digest = _digest(group.prompt_id, text)
      # The newest copy is kept, at its place in the order.
      last.pop(digest, None)
      last[digest] = j
    rows = [self.row_of.get(digest) for digest in last]
    digests = {j: digest for digest, j in last.items()}
    if self._filter.duplicates == "oldest":
      new = [j for j, row in zip(digests, rows) if row is None]
      return new, digests, []
    return list(digests), digests, [row for row in rows if row is not None]

  def _forget_emptied(self, inserted: int) -> None:
    """Drops prompts without rows, possibly including the inserted one."""
    for prompt_id in dict.fromkeys([*self._emptied, inserted]):
      if len(self.prompts[prompt_id]):
        continue
      del self.prompts[prompt_id]
      if prompt_id in self.replay_pool:
        self.replay_pool.remove(prompt_id)
      self.recent_pool.remove(prompt_id)
    self._emptied.clear()

  def _advance(self, step: int) -> None:
    """Moves the recent window to a step."""
    if step < self.sample_step:
      raise ValueError(f"step {step} after step {self.sample_step}")
    self.sample_step = step
    self.recent_pool.expire(step)

  def _choose(
      self,
      rng: np.random.Generator,
      prompt: records_lib.PromptRecords,
      count: int,
      recent: bool,
  ) -> np.ndarray:
    """Returns rows of one prompt, [count] int64."""
    rows = prompt.view()
    if recent:
      oldest = self.sample_step - self.settings.recent_window_steps
      first = prompt.first_after(oldest, self.table.arrivals)
      # If these are too few, add the newest others.
      rows = rows[min(first, max(len(rows) - count, 0)) :]
      if self.settings.skip_equal_rewards:
        rows = self._without_equal_groups(rows, count)
    elif self.settings.selection == "reward":
      temperature = self.reward_temperature(self.sample_step)
      chosen = selection.choose_by_reward(
          rng,
          self.table.rewards[rows],
          count,
          temperature=temperature,
          ages=staleness(
              self._starts,
              self.table.epochs[rows],
              self.table.versions[rows],
              self.sample_step,
          ),
          age_decay=self.settings.age_decay_steps,
      )
      return rows[chosen]
    return rows[selection.choose_uniform(rng, len(rows), count)]

  def _without_equal_groups(self, rows: np.ndarray, count: int) -> np.ndarray:
    """Leaves out groups of equal rewards, unless fewer than `count` remain."""
    mixed = rows[self.table.equal[rows] == 0]
    return mixed if len(mixed) >= count else rows

  def _other_prompt(
      self,
      rng: np.random.Generator,
      key: int,
      recent: bool,
      in_batch: Collection[int],
      is_left_out: LeftOutFn,
  ) -> tuple[int, records_lib.PromptRecords, bool]:
    """Returns the prompt for a slot, its remaining rows, and its pool.

    Args:
      key: the slot's prompt so far.
      recent: whether it was drawn from the recent pool.
      in_batch: prompts of the other slots.
      is_left_out: predicate of rows.
    """
    pools = [(self.recent_pool.pool, True)] * recent
    for pool, of_recent in (*pools, (self.replay_pool, False)):
      undrawn, drawn = np.split(
          np.array(pool.items, np.int64), [pool.num_undrawn]
      )
      others = [*rng.permutation(undrawn), *rng.permutation(drawn)]
      others.sort(key=in_batch.__contains__)  # Stable.
      stays = of_recent == recent and key in pool
      for other in map(int, [key] * stays + others):
        prompt = self._remaining(other, of_recent, is_left_out)
        if prompt is not None:
          return other, prompt, of_recent
    raise NothingLeftError

  def _remaining(
      self, key: int, recent: bool, is_left_out: LeftOutFn
  ) -> records_lib.PromptRecords | None:
    """Returns a prompt without left-out rows, None if no pool would have it."""
    rows = self.prompts[key].view()
    prompt = records_lib.PromptRecords(self.prompts[key].columns)
    prompt.append(rows[~is_left_out(rows)])
    rows = prompt.view()
    if recent:
      oldest = self.sample_step - self.settings.recent_window_steps
      rows = rows[prompt.first_after(oldest, self.table.arrivals) :]
      if self.settings.skip_equal_rewards:
        rows = rows[self.table.equal[rows] == 0]
    return prompt if len(rows) else None

  def _next_groups(
      self, rows_BxK: np.ndarray, count: int, is_left_out: LeftOutFn
  ) -> np.ndarray:
    """Returns the groups that follow a round's batch, [count, K] int64."""
    steps = self._rounds.mini_batches * self._rounds.passes
    number = lambda groups_nxK: self.table.groups[groups_nxK[:, 0]]
    for arrived_from in (self.sample_step - self.sample_step % steps, 0):
      groups = self.table.whole_groups(arrived_from, rows_BxK.shape[1])
      groups = groups[~is_left_out(groups[:, 0])]
      if len(groups):
        break
    else:
      raise NothingLeftError
    drawn_B = number(rows_BxK)
    after = np.searchsorted(number(groups), drawn_B[-1], side="right")
    groups = np.roll(groups, -after, axis=0)
    in_batch = np.isin(number(groups), drawn_B)
    groups = np.concatenate([groups[~in_batch], groups[in_batch]])
    return groups[np.arange(count) % len(groups)]

  def _gather(self, rows_BxK: np.ndarray, recent_B: np.ndarray) -> types.Draw:
    """Copies rows out of the table."""
    integers = self.table.integers(rows_BxK, ("groups", "arrivals", "equal"))
    prompt_ids_B = integers.pop("prompt_ids")[:, 0]
    # If a row was drawn twice, only its first copy may be its first use.
    first_BxK = np.zeros(rows_BxK.shape, np.bool_)
    first_BxK.flat[np.unique(rows_BxK, return_index=True)[1]] = True
    prompts = [self.prompts[key].columns for key in prompt_ids_B.tolist()]
    B, P = len(prompts), self._max_prompt_tokens
    starts_B = np.array([P - len(p["prompt_tokens"]) for p in prompts])
    inside_BxP = np.arange(P) >= starts_B[:, None]
    padded = {"prompt_mask": inside_BxP.astype(np.float32)}
    for name, column in self._prompt_columns.items():
      shape = B, P, *self.columns.get(name, ())
      padded[name] = np.zeros(shape, column.dtype)
      values = [columns[name] for columns in prompts]
      padded[name][inside_BxP] = np.concatenate(values)
    completions = self.table.take(rows_BxK)
    completions["ref_logprobs"][integers["ref_versions"] < 0] = 0
    return types.Draw(
        recent=recent_B,
        fresh=(integers.pop("use_counts") == 0) & first_BxK,
        prompt_ids=prompt_ids_B,
        staleness_steps=staleness(
            self._starts,
            integers["epochs"],
            integers["versions"],
            self.sample_step,
        ),
        step=self.sample_step,
        **integers,
        **padded,
        **completions,
    )


def _digest(prompt_id: int, tokens: bytes) -> bytes:
  prefix = prompt_id.to_bytes(8, "little", signed=True)
  return hashlib.blake2b(prefix + tokens, digest_size=_DIGEST_BYTES).digest()

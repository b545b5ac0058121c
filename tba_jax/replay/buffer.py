# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay buffer: stores completions by prompt, evicts, and samples batches.

Source: Bartoldson et al. 2025 (arXiv:2503.18929) §4.1-4.2. Differences: the
recent window is a span of steps, so duplicates and repeated prompts do not
change it; a global capacity evicts the oldest completion; all randomness comes
from one generator, which is part of the state. The cost of an insert or a draw
does not depend on the number of stored completions.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import math
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import ledger
from tba_jax.replay import rows as rows_lib
from tba_jax.replay import selection as selection_lib
from tba_jax.replay import similarity

# Result of an eviction rule, (store, group, prompt, kept) -> (stored, evicted,
# emptied): `kept` and `stored` index the new group's completions, before and
# after eviction; `evicted` has the untrained and trained amounts; `emptied` are
# the other prompts left without completions.
Eviction = tuple[list[int], tuple[ledger.Amount, ledger.Amount], list[int]]


def evict_oldest(
    store: "CompletionStore",
    group: types.Group,
    prompt: rows_lib.PromptRows,
    kept: list[int],
) -> Eviction:
  """Evicts the oldest completions, first of the prompt, then of all prompts."""
  stored = kept[-min(store.capacity_per_prompt, store.capacity) :]
  excess = len(prompt) + len(stored) - store.capacity_per_prompt
  own = store.release(prompt.view()[: max(excess, 0)].copy())
  prompt.drop_oldest(max(excess, 0))
  excess = len(store.table) + len(stored) - store.capacity
  if excess <= 0:
    return stored, own, []
  rows = store.table.oldest(excess)
  emptied = []
  for owner_id in store.table.prompt_ids[rows].tolist():
    owner = store.prompts[owner_id]
    # Both lists are in order of arrival, so this row is its owner's first.
    owner.drop_oldest(1)
    # The group's own prompt is about to get rows, so it is never emptied.
    if not len(owner) and owner_id != group.prompt_id:
      del store.prompts[owner_id]
      emptied.append(owner_id)
  others = store.release(rows)
  return stored, (own[0] + others[0], own[1] + others[1]), emptied


def evict_lowest_reward(
    store: "CompletionStore",
    group: types.Group,
    prompt: rows_lib.PromptRows,
    kept: list[int],
) -> Eviction:
  """Evicts the lowest rewards, old or new: of the prompt, then of all."""
  evicted, emptied = store.release(np.zeros(0, np.int64)), []
  for capacity, of_all in (
      (store.capacity_per_prompt, False),
      (store.capacity, True),
  ):
    rows = store.table.live_rows() if of_all else prompt.view()
    excess = len(rows) + len(kept) - capacity
    if excess <= 0:
      continue
    rows, refused = _lowest_rewards(
        store.table, rows, group.rewards[kept], excess
    )
    kept = [j for j, no in zip(kept, refused.tolist(), strict=True) if not no]
    for row in rows.tolist():
      owner_id = int(store.table.prompt_ids[row])
      owner = store.prompts[owner_id]
      owner.remove(row, store.table.ids)
      if not len(owner) and owner_id != group.prompt_id:
        del store.prompts[owner_id]
        emptied.append(owner_id)
    freed = store.release(rows)
    evicted = evicted[0] + freed[0], evicted[1] + freed[1]
  return kept, evicted, emptied


def _lowest_rewards(
    table: rows_lib.RowTable,
    rows: np.ndarray,
    rewards: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the `count` lowest of stored and new rewards; ties: oldest first.

  Args:
    rows: [n] int64, stored completions.
    rewards: [m] float32, rewards of the new completions.

  Returns:
    Rows to evict, and [m] bool, True for a new completion to refuse.
  """
  newer = table.next_id + np.arange(len(rewards))
  order = np.lexsort(
      (
          np.concatenate([table.ids[rows], newer]),
          np.concatenate([table.rewards[rows], rewards]),
      )
  )[:count]
  refused = np.zeros(len(rewards), np.bool_)
  refused[order[order >= len(rows)] - len(rows)] = True
  return rows[order[order < len(rows)]], refused


EVICTION_RULES: Mapping[str, Callable[..., Eviction]] = {
    "oldest": evict_oldest,
    "lowest_reward": evict_lowest_reward,
}


# 128 bits: among 10^9 completions, a collision has probability 1e-21.
_DIGEST_BYTES = 16


class CompletionStore:
  """Completions by prompt, oldest first, within two capacities.

  Deterministic: sampling is up to `ReplayBuffer`.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      embed: similarity.EmbedFn | None = None,
  ):
    self.capacity_per_prompt = config.replay.capacity_per_prompt
    self.capacity = self._full_capacity = config.replay.capacity
    self._freeze_step = config.replay_filter.freeze_step
    self._evict = EVICTION_RULES[config.replay_filter.evict]
    self._max_prompt_tokens = config.sampling.max_prompt_tokens
    self._max_completion_tokens = config.sampling.max_completion_tokens
    self._dedupe = config.replay.dedupe
    self.table = rows_lib.RowTable(self._max_completion_tokens, self.capacity)
    self._admission = similarity.Admission(
        config.replay_filter, self.table, embed
    )
    self._clear()

  def __len__(self) -> int:
    return len(self.table)

  def insert(
      self, group: types.Group, step: int
  ) -> tuple[ledger.InsertResult, list[int]]:
    """Stores a group; also returns the prompts left without completions.

    See `ReplayBuffer.insert`.
    """
    self._check(group, step)
    self._insert_step = step
    if self._freeze_step and step >= self._freeze_step:
      self.capacity = min(self.capacity, max(len(self), 1))
    prompt = self.prompts.get(group.prompt_id)
    is_known = prompt is not None
    if not is_known:
      prompt = rows_lib.PromptRows(np.array(group.prompt_tokens, np.int32))
      self.prompts[group.prompt_id] = prompt
    kept, digests = self._deduplicate(group)
    digest_of = dict(zip(kept, digests))
    plan = self._admission.plan(
        group,
        kept,
        [self._row_of.get(digest_of.get(j)) for j in kept],
        prompt.view(),
    )
    # Replaced rows do not count towards the capacities.
    for row in plan.leaving:
      prompt.remove(row, self.table.ids)
    replaced = self.release(np.array(plan.leaving, np.int64))
    stored, evicted, emptied = self._evict(self, group, prompt, plan.kept)
    whole = 0
    if stored:
      some = [digest_of[j] for j in stored] if self._dedupe else []
      rows = self._store(group, prompt, stored, some, step)
      self._admission.store(rows, plan, stored)
    else:
      whole = 1  # With no completion left, the whole group counts as gone.
      if not len(prompt):
        del self.prompts[group.prompt_id]
        emptied += [group.prompt_id] * is_known
    lengths = group.completion_lengths.tolist()
    places = set(plan.kept)
    gone = [lengths[j] for j in plan.kept if j not in set(stored)]
    within = [length for j, length in enumerate(lengths) if j not in places]
    result = ledger.InsertResult(
        inserted=ledger.sum_of_amounts(1, lengths),
        replaced_untrained=replaced[0] + ledger.sum_of_amounts(whole, within),
        replaced_trained=replaced[1],
        evicted_untrained=evicted[0] + ledger.sum_of_amounts(0, gone),
        evicted_trained=evicted[1],
    )
    return result, emptied

  def release(self, rows: np.ndarray) -> tuple[ledger.Amount, ledger.Amount]:
    """Frees rows without a prompt; returns untrained and trained amounts."""
    if not len(rows):
      return ledger.Amount(), ledger.Amount()
    out = self.uses.remove(rows)
    for row in rows.tolist() if self._dedupe else ():
      digest = self._digests.pop(row)
      # There may be a newer copy if deduping was off before a restart.
      if self._row_of.get(digest) == row:
        del self._row_of[digest]
    self.table.free(rows)
    return out

  def mark_trained(self, ids: np.ndarray) -> ledger.Amount:
    """See `ReplayBuffer.mark_trained`."""
    rows, alive = self.table.find(np.asarray(ids).ravel())
    return self.uses.use(rows[alive])

  def set_ref_logprobs(
      self, ids: np.ndarray, values: np.ndarray, ref_version: int
  ) -> int:
    """See `ReplayBuffer.set_ref_logprobs`."""
    rows, alive = self.table.find(np.asarray(ids))
    rows, values = rows[alive], values[alive]
    mask = self.table.token_mask(self.table.lengths[rows])
    self.table.ref_logprobs[rows] = np.where(mask, values, 0)
    self.table.ref_versions[rows] = ref_version
    return len(rows)

  def get_state(self) -> dict[str, Any]:
    """Returns all stored data, without free rows or padding."""
    prompts = [p.tokens for p in self.prompts.values()]
    return {
        "rows": self.table.get_state(),
        "prompt_ids": np.array(list(self.prompts), np.int64),
        "prompt_lengths": np.array([len(p) for p in prompts], np.int64),
        "prompt_tokens": np.concatenate([np.zeros(0, np.int32), *prompts]),
        "untrained_groups": self.uses.untrained_groups(),
        "next_group": self._next_group,
        "insert_step": self._insert_step,
        "capacity": self.capacity,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; later inserts evict what exceeds the capacities.

    Raises:
      ValueError: a prompt or completion is longer than the config allows.
    """
    longest = state["prompt_lengths"].max(initial=0)
    if longest > self._max_prompt_tokens:
      raise ValueError(
          f"saved prompts of up to {longest} tokens; allowed:"
          f" max_prompt_tokens={self._max_prompt_tokens}"
      )
    self._clear()
    self.table.set_state(state["rows"])
    ends = np.cumsum(state["prompt_lengths"])
    tokens = np.split(state["prompt_tokens"], ends[:-1]) if len(ends) else []
    for prompt_id, row in zip(state["prompt_ids"].tolist(), tokens):
      self.prompts[prompt_id] = rows_lib.PromptRows(row)
    rows = self.table.live_rows()
    owners = self.table.prompt_ids[rows]
    order = np.argsort(owners, kind="stable")
    found, starts = np.unique(owners[order], return_index=True)
    shares = np.split(rows[order], starts[1:])
    for prompt_id, share in zip(found.tolist(), shares):
      self.prompts[prompt_id].append(share)
    self.uses.restore(state["untrained_groups"])
    self._next_group = int(state["next_group"])
    self._insert_step = int(state["insert_step"])
    if self._freeze_step:
      self.capacity = min(self._full_capacity, int(state["capacity"]))
    self._admission.restore()
    if self._dedupe:
      for row in rows.tolist():
        self._remember(row, self._digest_of(row))

  def check_valid(self) -> None:
    """Raises RuntimeError if the store is inconsistent."""
    table = self.table
    table.check_valid()
    rows = table.live_rows()
    of_prompts = [p.view() for p in self.prompts.values()]
    if not all(len(view) for view in of_prompts):
      raise RuntimeError("a prompt without completions")
    if sorted(np.concatenate([*of_prompts, rows[:0]])) != sorted(rows):
      raise RuntimeError("the prompts' rows are not exactly the live rows")
    for prompt_id, prompt in self.prompts.items():
      view = prompt.view()
      if np.any(table.prompt_ids[view] != prompt_id):
        raise RuntimeError(f"prompt {prompt_id} has a row of another prompt")
      if np.any(np.diff(table.ids[view]) <= 0):
        raise RuntimeError(f"prompt {prompt_id} is not in order of arrival")
    self.uses.check_valid()
    if self._dedupe:
      found = {self._digest_of(row): row for row in rows.tolist()}
      if found != self._row_of:
        raise RuntimeError("digests do not match the live rows")
      if set(self._digests) != set(rows.tolist()):
        raise RuntimeError("a live row without a digest, or the reverse")

  def _clear(self) -> None:
    self.prompts: dict[int, rows_lib.PromptRows] = {}
    self.uses = ledger.UseAccount(self.table)
    self._next_group = 0
    self._insert_step = 0
    self._row_of: dict[bytes, int] = {}
    self._digests: dict[int, bytes] = {}

  def _check(self, group: types.Group, step: int) -> None:
    if step < self._insert_step:
      raise ValueError(f"insert at step {step} after step {self._insert_step}")
    count = len(group.rewards)
    tokens, lengths = group.completion_tokens, group.completion_lengths
    shapes = [len(group.stopped), len(group.versions), len(lengths)]
    if count == 0 or shapes != [count] * 3 or len(tokens) != count:
      raise ValueError("a group without completions, or of unequal columns")
    if tokens.shape != group.behavior_logprobs.shape:
      raise ValueError("tokens and behavior log-probs of unequal shape")
    longest = max(lengths.tolist())
    if longest > min(self._max_completion_tokens, tokens.shape[1]):
      raise ValueError(
          f"a completion of {longest} tokens; allowed:"
          f" max_completion_tokens={self._max_completion_tokens}"
      )
    if min(lengths.tolist()) < 1:
      raise ValueError("a completion without tokens")
    if len(group.prompt_tokens) > self._max_prompt_tokens:
      raise ValueError(
          f"a prompt of {len(group.prompt_tokens)} tokens; allowed:"
          f" max_prompt_tokens={self._max_prompt_tokens}"
      )
    if not all(map(math.isfinite, group.rewards.tolist())):
      raise ValueError(f"prompt {group.prompt_id}: a reward that is not finite")
    known = self.prompts.get(group.prompt_id)
    prompt_tokens = np.asarray(group.prompt_tokens, np.int32)
    if known and known.tokens.tobytes() != prompt_tokens.tobytes():
      raise ValueError(f"prompt {group.prompt_id} comes with other tokens")

  def _deduplicate(self, group: types.Group) -> tuple[list[int], list[bytes]]:
    """Returns indices of distinct completions, and digests if deduping."""
    if not self._dedupe:
      return list(range(len(group.rewards))), []
    data = group.completion_tokens.astype(np.int32, copy=False).tobytes()
    stride = 4 * group.completion_tokens.shape[1]
    prefix = _prefix(group.prompt_id)
    last: dict[bytes, int] = {}
    for j, length in enumerate(group.completion_lengths.tolist()):
      digest = _digest(prefix + data[j * stride : j * stride + 4 * length])
      # The newest copy is kept, at its own place in the order.
      last.pop(digest, None)
      last[digest] = j
    return list(last.values()), list(last)

  def _store(
      self,
      group: types.Group,
      prompt: rows_lib.PromptRows,
      stored: list[int],
      digests: list[bytes],
      step: int,
  ) -> np.ndarray:
    """Appends the completions with indices `stored`; returns their rows."""
    take = np.asarray
    if len(stored) < len(group.rewards):
      index = np.array(stored)
      take = lambda column: column[index]
    lengths = take(group.completion_lengths)
    rows = self.table.append(
        prompt_id=group.prompt_id,
        group=self._next_group,
        arrival=step,
        lengths=lengths,
        stopped=take(group.stopped),
        versions=take(group.versions),
        epoch=group.epoch,
        rewards=take(group.rewards),
        tokens=take(group.completion_tokens),
        behavior_logprobs=take(group.behavior_logprobs),
    )
    prompt.append(rows)
    self.uses.add(self._next_group, lengths.tolist())
    self._next_group += 1
    for row, digest in zip(rows.tolist(), digests):
      self._remember(row, digest)
    return rows

  def _remember(self, row: int, digest: bytes) -> None:
    self._row_of[digest] = row
    self._digests[row] = digest

  def _digest_of(self, row: int) -> bytes:
    tokens = self.table.tokens[row, : self.table.lengths[row]]
    prefix = _prefix(int(self.table.prompt_ids[row]))
    return _digest(prefix + tokens.tobytes())


def _prefix(prompt_id: int) -> bytes:
  return prompt_id.to_bytes(8, "little", signed=True)


def _digest(data: bytes) -> bytes:
  return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclasses.dataclass(frozen=True)
class Draw:
  """B groups of K completions, copied out of the buffer.

  rows: [B, K] int64, ids of the completions; never reused.
  recent: [B] bool, drawn from the recent window.
  fresh: [B, K] bool, the completion's first use in training.
  prompt_ids: [B] int64.
  prompt_tokens: [B, P] int32, left-padded with 0.
  prompt_mask: [B, P] float32, 1 on prompt tokens.
  completion_tokens: [B, K, T] int32, 0 past the length.
  completion_lengths: [B, K] int32, with the stop token.
  stopped: [B, K] bool.
  behavior_logprobs: [B, K, T] float32, nats, 0 past the length.
  ref_logprobs: [B, K, T] float32, nats, 0 past the length and if not cached.
  ref_versions: [B, K] int32, reference policy of `ref_logprobs`, -1 if not
    cached.
  rewards: [B, K] float32.
  versions: [B, K] int32, step of the params that sampled.
  epochs: [B, K] int32, start count of the trainer that published them.
  staleness_steps: [B, K] int32, updates between those params and the trainer's;
    0 is on-policy. See `staleness`.
  step: the step that will train on the batch.
  """

  rows: np.ndarray
  recent: np.ndarray
  fresh: np.ndarray
  prompt_ids: np.ndarray
  prompt_tokens: np.ndarray
  prompt_mask: np.ndarray
  completion_tokens: np.ndarray
  completion_lengths: np.ndarray
  stopped: np.ndarray
  behavior_logprobs: np.ndarray
  ref_logprobs: np.ndarray
  ref_versions: np.ndarray
  rewards: np.ndarray
  versions: np.ndarray
  epochs: np.ndarray
  staleness_steps: np.ndarray
  step: int

  def stats(self) -> dict[str, Any]:
    """Returns statistics of the batch.

    fresh_share: completions used for the first time. recent_share: prompts from
    the recent window. unique_share: distinct rows. unique_completions: mean
    number of distinct texts in a group. completion_tokens: mean length with the
    stop token. stop_rate: completions that end with a stop token.
    """
    texts = [
        {
            tokens[:length].tobytes()
            for tokens, length in zip(*group, strict=True)
        }
        for group in zip(
            self.completion_tokens, self.completion_lengths, strict=True
        )
    ]
    return {
        "fresh_share": float(self.fresh.mean()),
        "recent_share": float(self.recent.mean()),
        "unique_share": len(np.unique(self.rows)) / self.rows.size,
        "staleness_steps": float(self.staleness_steps.mean()),
        "unique_completions": sum(map(len, texts)) / len(texts),
        "completion_tokens": float(self.completion_lengths.mean()),
        "stop_rate": float(self.stopped.mean()),
    }


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
    starts: (epoch, step that it started from) of all epochs.
    epochs: [...] int, epoch that published the params.
    versions: [...] int, step at which they were published.
    step: the trainer's step.

  Returns:
    [...] int32, at least 0.
  """
  branch = np.full(versions.shape, np.iinfo(np.int64).max)
  for epoch, start in starts:
    branch = np.where(epochs < epoch, np.minimum(branch, start), branch)
  common = np.minimum(versions, branch)
  return np.maximum(step + versions - 2 * common, 0).astype(np.int32)


def gather_draw(
    store: CompletionStore,
    rows_BxK: np.ndarray,
    recent_B: np.ndarray,
    prompt_ids_B: np.ndarray,
    *,
    num_columns: int,
    starts: Sequence[tuple[int, int]],
    step: int,
) -> Draw:
  """Returns rows copied out of a store, with prompts padded to `num_columns`.

  Args are as for `Draw` and `staleness`.
  """
  table = store.table
  integers = table.integers(rows_BxK)
  # Of a row that was drawn twice, only the first copy is its first use.
  first_BxK = np.zeros(rows_BxK.shape, np.bool_)
  first_BxK.flat[np.unique(rows_BxK, return_index=True)[1]] = True
  prompt_tokens_BxP = np.zeros((len(rows_BxK), num_columns), np.int32)
  prompt_mask_BxP = np.zeros((len(rows_BxK), num_columns), np.float32)
  for b, key in enumerate(prompt_ids_B.tolist()):
    tokens = store.prompts[key].tokens
    prompt_tokens_BxP[b, num_columns - len(tokens) :] = tokens
    prompt_mask_BxP[b, num_columns - len(tokens) :] = 1
  ref_versions_BxK = integers["ref_versions"]
  ref_logprobs_BxKxT = table.ref_logprobs[rows_BxK]
  ref_logprobs_BxKxT[ref_versions_BxK < 0] = 0
  return Draw(
      rows=integers["ids"],
      recent=recent_B,
      fresh=(integers["use_counts"] == 0) & first_BxK,
      prompt_ids=prompt_ids_B,
      prompt_tokens=prompt_tokens_BxP,
      prompt_mask=prompt_mask_BxP,
      completion_tokens=table.tokens[rows_BxK],
      completion_lengths=integers["lengths"],
      stopped=integers["stopped"],
      behavior_logprobs=table.behavior_logprobs[rows_BxK],
      ref_logprobs=ref_logprobs_BxKxT,
      ref_versions=ref_versions_BxK,
      rewards=table.rewards[rows_BxK],
      versions=integers["versions"],
      epochs=integers["epochs"],
      staleness_steps=staleness(
          starts, integers["epochs"], integers["versions"], step
      ),
      step=step,
  )


class ReplayBuffer:
  """A bounded store of completions, sampled as groups of one prompt each."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      *,
      reward_temperature: Callable[[int], float],
      embed: similarity.EmbedFn | None = None,
  ):
    """Makes an empty buffer.

    Args:
      config: reads `replay`, `replay_filter`, `sampling` (P and T) and `seed`.
      reward_temperature: step -> temperature above 0, for
        `replay.selection="reward"`.
      embed: encoder of sentences, for `replay_filter.similarity="cosine"`.
    """
    replay = config.replay
    self.capacity = replay.capacity
    self._max_prompt_tokens = config.sampling.max_prompt_tokens
    self._recent_fraction = replay.recent_fraction
    self._recent_window_steps = replay.recent_window_steps
    self._selection = replay.selection
    self._reward_temperature = reward_temperature
    self._rng = np.random.default_rng(config.seed)
    self._store = CompletionStore(config, embed)
    # (epoch, step) of each start of the trainer.
    self._starts: list[tuple[int, int]] = []
    self._replay_pool = selection_lib.PromptPool()
    self._recent_pool = selection_lib.RecentPool(replay.recent_window_steps)
    self._sample_step = 0
    self._recent_misses = 0

  def __len__(self) -> int:
    return len(self._store)

  @property
  def num_prompts(self) -> int:
    return len(self._store.prompts)

  def untrained(self) -> ledger.Amount:
    """Returns the amount of data that is stored and never trained on."""
    return self._store.uses.untrained

  def begin_epoch(self, epoch: int, step: int) -> None:
    """Records that a trainer's epoch starts from the params of `step`."""
    self._starts.append((epoch, step))

  def insert(self, group: types.Group, step: int) -> ledger.InsertResult:
    """Stores the completions of a group; they are recent from `step` on.

    By default the newest of equal completions is kept, and the oldest are
    evicted: first the prompt's, then those of all prompts. If the group alone
    exceeds a capacity, its first completions are evicted.

    Args:
      group: S completions; padding is ignored.
      step: at which they arrive; must not decrease.

    Raises:
      ValueError: the group is malformed, has too many tokens, a non-finite
        reward, or other tokens than before for this prompt; or `step`
        decreased. The buffer is unchanged.
    """
    first_id = self._store.table.next_id
    result, emptied = self._store.insert(group, step)
    if self._store.table.next_id > first_id:  # At least one row was stored.
      if group.prompt_id not in self._replay_pool:
        self._replay_pool.add(group.prompt_id)
      self._recent_pool.add(group.prompt_id, step)
    for prompt_id in emptied:
      self._replay_pool.remove(prompt_id)
      self._recent_pool.remove(prompt_id)
    return result

  def sample(self, num_prompts: int, num_completions: int, step: int) -> Draw:
    """Returns a batch; each prompt is drawn from the recent window or from all.

    Prompts are drawn without replacement within each of the two pools, which
    outlive the batch: a prompt is in a batch at most twice, unless there are
    fewer prompts than slots. Completions are drawn without replacement if there
    are `num_completions`, else with it. While nothing is recent, all prompts
    come from the pool of all.

    Args:
      num_prompts: B.
      num_completions: K.
      step: the step that will train on the batch; must not decrease.

    Raises:
      ValueError: the buffer is empty, or `step` decreased.
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
  ) -> Draw:
    """Returns groups in their order of arrival.

    Incomplete groups are skipped. If there are too few, the first are repeated.

    Args:
      num_prompts: B.
      num_completions: K.
      step: as of `sample`.
      arrived_from: first step whose arrivals count.
      skip: number of groups before the batch.
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

  def mark_trained(self, ids: np.ndarray) -> ledger.Amount:
    """Counts uses of completions; returns the amount of first uses.

    Args:
      ids: `Draw.rows` of any shape; repeats count. Evicted ids are ignored, as
        they were accounted for at their eviction.
    """
    return self._store.mark_trained(ids)

  def set_ref_logprobs(
      self, ids: np.ndarray, values: np.ndarray, ref_version: int
  ) -> int:
    """Caches reference log-probs; returns how many ids are still stored.

    Args:
      ids: [...] int64, from `Draw.rows`.
      values: [..., T] float32, nats.
      ref_version: of the reference policy, at least 0.
    """
    return self._store.set_ref_logprobs(ids, values, ref_version)

  def stats(self) -> dict[str, Any]:
    """Returns statistics of the stored data, in constant time.

    size: completions. untrained: completions never used. use_count: mean uses
    of a stored completion. use_count_histogram: number of uses to completions
    (the last bin is open). recent_misses: draws from an empty recent window.
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
    """Returns the stored completions, the pools and the generator."""
    return {
        "store": self._store.get_state(),
        "replay_pool": self._replay_pool.get_state(),
        "recent_pool": self._recent_pool.get_state(),
        "rng": self._rng.bit_generator.state,
        "starts": np.array(self._starts, np.int64).reshape(-1, 2),
        "sample_step": self._sample_step,
        "recent_misses": self._recent_misses,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; later draws are the same as in the saved buffer.

    Raises:
      ValueError: a prompt or completion is longer than the config allows.
    """
    self._store.set_state(state["store"])
    self._replay_pool.set_state(state["replay_pool"])
    self._recent_pool.set_state(state["recent_pool"])
    self._rng.bit_generator.state = state["rng"]
    self._starts = [tuple(pair) for pair in state["starts"].tolist()]
    self._sample_step = int(state["sample_step"])
    self._recent_misses = int(state["recent_misses"])

  def check_valid(self) -> None:
    """Raises RuntimeError if the buffer is inconsistent."""
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
      self, prompt: rows_lib.PromptRows, count: int, recent: bool
  ) -> np.ndarray:
    """Returns rows of one prompt, [count] int64."""
    rows, table = prompt.view(), self._store.table
    oldest = self._sample_step - self._recent_window_steps
    first = prompt.first_after(oldest, table.arrivals) if recent else len(rows)
    # If the recent rows have been replaced since, draw from all rows.
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
  ) -> Draw:
    return gather_draw(
        self._store,
        rows_BxK,
        recent_B,
        prompt_ids_B,
        num_columns=self._max_prompt_tokens,
        starts=self._starts,
        step=self._sample_step,
    )

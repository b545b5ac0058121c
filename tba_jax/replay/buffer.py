# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay buffer: completions by prompt, eviction, and draws of groups.

Source: Bartoldson et al. 2025 (arXiv:2503.18929) §4.1-4.2. Differences: the
recent window is a span of steps, so duplicates and repeated prompts do not
change it; a global capacity evicts the oldest completion; all randomness comes
from one generator, which is part of the state.

The cost of an insert or a draw does not depend on the number of stored
completions: it touches the rows of its own prompts; ids are found by bisection.
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

# An eviction rule makes room for new completions: (store, group, prompt, kept)
# -> (stored, evicted, emptied). `kept` are places in the new group, `stored`
# those of them that enter; `evicted` are untrained and trained amounts;
# `emptied` are other prompts of which nothing is left.
Room = tuple[list[int], tuple[ledger.Amount, ledger.Amount], list[int]]


def evict_oldest(
    store: "CompletionStore",
    group: types.Group,
    prompt: rows_lib.PromptRows,
    kept: list[int],
) -> Room:
  """Evicts the oldest completions: of the prompt, then of all."""
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
    # Both are in order of arrival, so this row is its owner's first.
    owner.drop_oldest(1)
    # The prompt itself is about to have rows and never counts as emptied.
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
) -> Room:
  """Evicts the lowest rewards, also new ones: of the prompt, then of all."""
  evicted, emptied = store.release(np.zeros(0, np.int64)), []
  for capacity, of_all in (
      (store.capacity_per_prompt, False),
      (store.capacity, True),
  ):
    rows = store.table.live_rows() if of_all else prompt.view()
    excess = len(rows) + len(kept) - capacity
    if excess <= 0:
      continue
    rows, goes = _lowest(store.table, rows, group.rewards[kept], excess)
    kept = [j for j, gone in zip(kept, goes.tolist(), strict=True) if not gone]
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


def _lowest(
    table: rows_lib.RowTable,
    rows: np.ndarray,
    rewards: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rows and new completions of lowest reward; ties: oldest first.

  Args:
    table: of the rows.
    rows: [n] int64, stored.
    rewards: [m] float32, of new completions.
    count: to evict, at most n + m.

  Returns:
    Evicted rows, and [m] bool, True for an evicted new completion.
  """
  newer = table.next_id + np.arange(len(rewards))
  order = np.lexsort(
      (
          np.concatenate([table.ids[rows], newer]),
          np.concatenate([table.rewards[rows], rewards]),
      )
  )[:count]
  goes = np.zeros(len(rewards), np.bool_)
  goes[order[order >= len(rows)] - len(rows)] = True
  return rows[order[order < len(rows)]], goes


RULES: Mapping[str, Callable[..., Room]] = {
    "oldest": evict_oldest,
    "lowest_reward": evict_lowest_reward,
}


# 128 bits: two different completions among 10^9 share one with odds of 1e-21.
_DIGEST_BYTES = 16


class CompletionStore:
  """Completions by prompt, oldest first, within two capacities.

  No randomness is here. An insert touches the rows of its own prompt and those
  that it evicts.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      embed: similarity.EmbedFn | None = None,
  ):
    """Makes an empty store; see `ReplayBuffer`."""
    self.capacity_per_prompt = config.replay.capacity_per_prompt
    self.capacity = self._full_capacity = config.replay.capacity
    self._freeze_step = config.replay_filter.freeze_step
    self._make_room = RULES[config.replay_filter.evict]
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
    """Stores a group; see `ReplayBuffer.insert`.

    Returns:
      The changed amounts, and the prompts without completions left.
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
    kept, digests = self._distinct(group)
    digest_of = dict(zip(kept, digests))
    plan = self._admission.plan(
        group,
        kept,
        [self._row_of.get(digest_of.get(j)) for j in kept],
        prompt.view(),
    )
    # Replaced rows leave before the capacities are checked.
    for row in plan.leaving:
      prompt.remove(row, self.table.ids)
    replaced = self.release(np.array(plan.leaving, np.int64))
    stored, evicted, emptied = self._make_room(self, group, prompt, plan.kept)
    whole = 0
    if stored:
      some = [digest_of[j] for j in stored] if self._dedupe else []
      rows = self._store(group, prompt, stored, some, step)
      self._admission.store(rows, plan, stored)
    else:
      whole = 1  # The group leaves with the last of its completions.
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
    """Frees rows that no prompt holds; returns untrained and trained."""
    if not len(rows):
      return ledger.Amount(), ledger.Amount()
    out = self.uses.remove(rows)
    for row in rows.tolist() if self._dedupe else ():
      digest = self._digests.pop(row)
      # Without deduping before a restart there may be a newer copy.
      if self._row_of.get(digest) == row:
        del self._row_of[digest]
    self.table.free(rows)
    return out

  def mark_trained(self, ids: np.ndarray) -> ledger.Amount:
    """Counts uses; see `ReplayBuffer.mark_trained`."""
    rows, alive = self.table.find(np.asarray(ids).ravel())
    return self.uses.use(rows[alive])

  def set_ref_logprobs(
      self, ids: np.ndarray, values: np.ndarray, ref_version: int
  ) -> int:
    """Caches log-probs; see `ReplayBuffer.set_ref_logprobs`."""
    rows, alive = self.table.find(np.asarray(ids))
    rows, values = rows[alive], values[alive]
    mask = self.table.token_mask(self.table.lengths[rows])
    self.table.ref_logprobs[rows] = np.where(mask, values, 0)
    self.table.ref_versions[rows] = ref_version
    return len(rows)

  def get_state(self) -> dict[str, Any]:
    """Returns arrays of all stored data, without free rows or padding."""
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
    """Takes a state of `get_state`.

    Later inserts evict what exceeds the present capacities.

    Raises:
      ValueError: a prompt or completion is longer than is allowed now.
    """
    longest = state["prompt_lengths"].max(initial=0)
    if longest > self._max_prompt_tokens:
      raise ValueError(
          f"a saved prompt of {longest} tokens; allowed:"
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
      frozen = int(state.get("capacity", self._full_capacity))
      self.capacity = min(self._full_capacity, frozen)
    self._admission.restore()
    if self._dedupe:
      for row in rows.tolist():
        self._remember(row, self._digest_of(row))

  def check_valid(self) -> None:
    """Raises RuntimeError where the store contradicts itself."""
    table = self.table
    table.check_valid()
    rows = table.live_rows()
    of_prompts = [p.view() for p in self.prompts.values()]
    if not all(len(view) for view in of_prompts):
      raise RuntimeError("a prompt without completions")
    if sorted(np.concatenate([*of_prompts, rows[:0]])) != sorted(rows):
      raise RuntimeError("prompts do not share out the live rows")
    for prompt_id, prompt in self.prompts.items():
      view = prompt.view()
      if np.any(table.prompt_ids[view] != prompt_id):
        raise RuntimeError(f"prompt {prompt_id} holds another's row")
      if np.any(np.diff(table.ids[view]) <= 0):
        raise RuntimeError(f"prompt {prompt_id} is not in order of arrival")
    self.uses.check_valid()
    if self._dedupe:
      found = {self._digest_of(row): row for row in rows.tolist()}
      if found != self._row_of:
        raise RuntimeError("digests do not name the live rows")
      if set(self._digests) != set(rows.tolist()):
        raise RuntimeError("a live row without its digest, or the reverse")

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

  def _distinct(self, group: types.Group) -> tuple[list[int], list[bytes]]:
    """Returns the places of distinct completions, and digests if deduping."""
    if not self._dedupe:
      return list(range(len(group.rewards))), []
    data = group.completion_tokens.astype(np.int32, copy=False).tobytes()
    stride = 4 * group.completion_tokens.shape[1]
    prefix = _prefix(group.prompt_id)
    last: dict[bytes, int] = {}
    for j, length in enumerate(group.completion_lengths.tolist()):
      digest = _digest(prefix + data[j * stride : j * stride + 4 * length])
      # The newest copy wins, and stands where the newest stood.
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
    """Appends the completions at `stored`; returns their rows."""
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
  """Returns the key by which equal completions are found."""
  return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclasses.dataclass(frozen=True)
class Draw:
  """B groups of K completions, copied out of the buffer.

  rows: [B, K] int64, ids of the completions, which no later one ever has.
  recent: [B] bool, drawn from the recent window.
  fresh: [B, K] bool, the first use of this completion by any step.
  prompt_ids: [B] int64.
  prompt_tokens: [B, P] int32, left-padded with 0.
  prompt_mask: [B, P] float32, 1 on prompt tokens.
  completion_tokens: [B, K, T] int32, 0 past the length.
  completion_lengths: [B, K] int32, with the stop token.
  stopped: [B, K] bool.
  behavior_logprobs: [B, K, T] float32, nats, 0 past the length.
  ref_logprobs: [B, K, T] float32, nats, 0 past the length and where none are
    cached.
  ref_versions: [B, K] int32, of the reference policy, -1 where none are cached.
  rewards: [B, K] float32.
  versions: [B, K] int32, step of the params that sampled.
  epochs: [B, K] int32, start count of the trainer that published them.
  staleness_steps: [B, K] int32, updates between those params and the trainer's;
    0 is on-policy. See `staleness`.
  step: of the draw.
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
    """Returns means over this batch's completions.

    fresh_share: used for the first time. recent_share: of the recent window.
    unique_share: rows that differ. unique_completions: texts of a group that
    differ. completion_tokens: with the stop token. stop_rate: ended by a stop
    token.
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
  """Returns the updates between the params that sampled and those of a step.

  A restart goes back to a checkpoint, and the versions past it that the trainer
  had published belong to a branch that was given up. With b the earliest step
  that a later epoch started from and c = min(version, b), the last params that
  both have in common,

      staleness = (step - c) + (version - c)

  which is step - version on the surviving branch, and at least 1 off it.

  Args:
    starts: (epoch, step that it started from) of all epochs.
    epochs: [...] int, of the trainer that published the params.
    versions: [...] int, of the params.
    step: of the trainer.

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
  """Returns the draw of some rows, copied out of their store.

  Args:
    store: of the rows.
    rows_BxK: [B, K] int64.
    recent_B: [B] bool, drawn from the recent window.
    prompt_ids_B: [B] int64.
    num_columns: P.
    starts: as of `staleness`.
    step: of the draw.
  """
  table = store.table
  integers = table.integers(rows_BxK)
  # Of a row that was drawn twice, only the first place is its first use.
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


_FORMAT = 2


class ReplayBuffer:
  """A bounded store of completions, drawn as groups of one prompt each."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      *,
      reward_temperature: Callable[[int], float],
      embed: similarity.EmbedFn | None = None,
  ):
    """Makes an empty buffer.

    Args:
      config: reads `replay`, `replay_filter`, `seed`, and of `sampling` the
        maximum lengths P and T.
      reward_temperature: step -> temperature above 0, where `replay.selection`
        is "reward": weights exp(reward / temperature).
      embed: sentence embeddings, where `replay_filter.similarity` is "cosine".
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
    """Returns the amount stored and never trained on."""
    return self._store.uses.untrained

  def begin_epoch(self, epoch: int, step: int) -> None:
    """Notes that a trainer of this epoch starts from the params of `step`."""
    self._starts.append((epoch, step))

  def insert(self, group: types.Group, step: int) -> ledger.InsertResult:
    """Stores the completions of a group; each is recent from `step` on.

    With the default rules, in this order: of equal completions within the group
    the last stays; older copies are replaced; then the prompt's oldest and the
    oldest of all are evicted until there is room. Where the group alone exceeds
    a capacity, its first completions are evicted at once.

    Args:
      group: S completions; padding is ignored.
      step: at which they arrive; must not fall from one insert to the next.

    Returns:
      The inserted, replaced and evicted amounts.

    Raises:
      ValueError: too many tokens, shapes that disagree, a reward that is not
        finite, a step that falls, or other tokens than before for this prompt.
        The buffer is unchanged.
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
  ) -> Draw:
    """Returns groups in their order of arrival, without any randomness.

    Groups that miss a completion are skipped. Where fewer are left than asked
    for, the first are repeated. `arrived_from` is the first step whose arrivals
    count, `skip` the number of groups before the batch.
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
      ids: `Draw.rows` of any shape; repeats count. Evicted ids are ignored:
        they were accounted for when they were evicted.
    """
    return self._store.mark_trained(ids)

  def set_ref_logprobs(
      self, ids: np.ndarray, values: np.ndarray, ref_version: int
  ) -> int:
    """Caches reference log-probs; returns how many completions are stored.

    Args:
      ids: [...] int64, of `Draw.rows`.
      values: [..., T] float32, nats.
      ref_version: of the reference policy, at least 0.
    """
    return self._store.set_ref_logprobs(ids, values, ref_version)

  def stats(self) -> dict[str, Any]:
    """Returns numbers on the stored data, in constant time.

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
        "starts": np.array(self._starts, np.int64).reshape(-1, 2),
        "sample_step": self._sample_step,
        "recent_misses": self._recent_misses,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state of `get_state`: later draws are the same as without it.

    Raises:
      ValueError: another format, or tokens beyond the present maximum lengths.
    """
    if state["format"] != _FORMAT:
      raise ValueError(
          f"replay state of format {state['format']}; this version of tba_jax"
          f" reads {_FORMAT}"
      )
    self._store.set_state(state["store"])
    self._replay_pool.set_state(state["replay_pool"])
    self._recent_pool.set_state(state["recent_pool"])
    self._rng.bit_generator.state = state["rng"]
    self._starts = [tuple(pair) for pair in state["starts"].tolist()]
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
      self, prompt: rows_lib.PromptRows, count: int, recent: bool
  ) -> np.ndarray:
    """Returns rows of one prompt, [count] int64."""
    rows, table = prompt.view(), self._store.table
    oldest = self._sample_step - self._recent_window_steps
    first = prompt.first_after(oldest, table.arrivals) if recent else len(rows)
    # Recent rows may have been replaced since; then all rows are drawn from.
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

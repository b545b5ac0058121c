# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the replay buffer holds: completions by prompt, duplicates, eviction.

No randomness is here. Nothing depends on the number of stored completions: an
insert touches the rows of its own prompt and those that it evicts.
"""

import hashlib
import math
from typing import Any

import numpy as np

from tba_jax import types
from tba_jax.replay import admission as admission_lib
from tba_jax.replay import amount
from tba_jax.replay import eviction
from tba_jax.replay import prompt_rows
from tba_jax.replay import rows as rows_lib

# 128 bits: two different completions among 10^9 share one with odds of 1e-21.
_DIGEST_BYTES = 16


class CompletionStore:
  """Completions by prompt, oldest first, within two capacities."""

  def __init__(
      self,
      *,
      capacity_per_prompt: int,
      capacity: int,
      max_prompt_tokens: int,
      max_completion_tokens: int,
      dedupe: bool,
      rules: admission_lib.Rules = admission_lib.PLAIN,
  ):
    """Makes an empty store; for the settings see `ReplayBuffer`."""
    self.capacity_per_prompt = capacity_per_prompt
    self.capacity = self._full_capacity = capacity
    self._rules = rules
    self._max_prompt_tokens = max_prompt_tokens
    self._max_completion_tokens = max_completion_tokens
    self._dedupe = dedupe
    self.table = rows_lib.RowTable(max_completion_tokens, capacity)
    self._admission = admission_lib.Admission(rules, self.table)
    self._clear()

  def __len__(self) -> int:
    return len(self.table)

  def insert(
      self, group: types.Group, step: int
  ) -> tuple[amount.InsertResult, list[int]]:
    """Stores a group; see `ReplayBuffer.insert`.

    Returns:
      What changed, and the prompts of which nothing is left.
    """
    self._check(group, step)
    self._insert_step = step
    if self._rules.freeze_step and step >= self._rules.freeze_step:
      self.capacity = min(self.capacity, max(len(self), 1))
    prompt = self.prompts.get(group.prompt_id)
    is_known = prompt is not None
    if not is_known:
      prompt = prompt_rows.PromptRows(np.array(group.prompt_tokens, np.int32))
      self.prompts[group.prompt_id] = prompt
    kept, digests = self._distinct(group)
    digest_of = dict(zip(kept, digests))
    plan = self._admission.plan(
        group,
        kept,
        [self._row_of.get(digest_of.get(j)) for j in kept],
        prompt.view(),
    )
    # What is replaced leaves before the capacities are looked at.
    for row in plan.leaving:
      prompt.remove(row, self.table.ids)
    replaced = self.release(np.array(plan.leaving, np.int64))
    make_room = eviction.RULES[self._rules.evict]
    stored, evicted, emptied = make_room(self, group, prompt, plan.kept)
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
    result = amount.InsertResult(
        inserted=amount.sum_of(1, lengths),
        replaced_untrained=replaced[0] + amount.sum_of(whole, within),
        replaced_trained=replaced[1],
        evicted_untrained=evicted[0] + amount.sum_of(0, gone),
        evicted_trained=evicted[1],
    )
    return result, emptied

  def release(self, rows: np.ndarray) -> tuple[amount.Amount, amount.Amount]:
    """Frees rows that no prompt holds; returns untrained and trained."""
    if not len(rows):
      return amount.Amount(), amount.Amount()
    out = self.uses.remove(rows)
    for row in rows.tolist() if self._dedupe else ():
      digest = self._digests.pop(row)
      # Without deduping before a restart there may be a newer copy.
      if self._row_of.get(digest) == row:
        del self._row_of[digest]
    self.table.free(rows)
    return out

  def mark_trained(self, ids: np.ndarray) -> amount.Amount:
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
    """Returns arrays of what is stored, without free rows or padding."""
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

    What exceeds the present capacities leaves with later inserts.

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
      self.prompts[prompt_id] = prompt_rows.PromptRows(row)
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
    if self._rules.freeze_step:
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
    self.prompts: dict[int, prompt_rows.PromptRows] = {}
    self.uses = amount.UseAccount(self.table)
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
    """Returns the completions that stay, and their digests where deduping."""
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
      prompt: prompt_rows.PromptRows,
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
  """Returns what equal completions of a prompt share."""
  return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()

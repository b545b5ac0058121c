# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Consistency checks of the replay buffer and its parts, after every change."""

import numpy as np

from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import records as records_lib
from tba_jax.replay import selection


def check_buffer(buffer: buffer_lib.ReplayBuffer) -> None:
  """Raises AssertionError if the buffer is inconsistent."""
  check_table(buffer.table)
  rows = buffer.table.live_rows()
  views = {key: prompt.view() for key, prompt in buffer.prompts.items()}
  assert all(map(len, views.values())), "a prompt without completions"
  np.testing.assert_array_equal(
      np.sort(np.concatenate([*views.values(), rows[:0]])), np.sort(rows)
  )
  for key, view in views.items():
    assert np.all(buffer.table.prompt_ids[view] == key)
    assert np.all(np.diff(buffer.table.ids[view]) > 0)
  if buffer.settings.dedupe:
    digests = {row: buffer.digest_of(row) for row in rows.tolist()}
    assert digests == buffer.digests
    # The newer of two copies, saved before deduping was turned on.
    assert {digest: row for row, digest in digests.items()} == buffer.row_of
  check_pool(buffer.replay_pool)
  check_recent_pool(buffer.recent_pool)
  assert set(buffer.replay_pool.items) == set(views)
  oldest = buffer.sample_step - buffer.settings.recent_window_steps
  for key, view in views.items():
    if buffer.table.arrivals[view[-1]] > oldest:
      assert key in buffer.recent_pool, f"prompt {key} is recent"


def check_table(table: records_lib.RecordTable) -> None:
  """Raises AssertionError if a table's rows or counts are inconsistent."""
  rows = table.live_rows()
  assert len(rows) == len(table)
  everywhere = np.concatenate([rows, np.array(table.free_rows, np.int64)])
  np.testing.assert_array_equal(np.sort(everywhere), np.arange(table.num_used))
  assert np.all(np.diff(table.ids[rows]) > 0)
  assert np.all(np.diff(table.arrivals[rows]) >= 0)
  inside = table.token_mask(table.completion_lengths[rows])
  for name in ("completion_tokens", "sampled_mask"):
    assert not table.tokens(name, rows)[~inside].any()
  # Each page is of one row, or free.
  pages = table.pages[rows]
  pages = np.append(pages[pages > 0], table.free_pages)
  np.testing.assert_array_equal(np.sort(pages), np.arange(1, table.num_pages))
  # A recount from the rows gives the same counts.
  fresh = records_lib.RecordTable(
      table.num_tokens, table.max_rows, table.columns
  )
  fresh.set_state(table.get_state())
  for name in ("untrained", "histogram", "num_uses", "unused_groups"):
    assert getattr(fresh, name) == getattr(table, name), name
  used = rows[table.use_counts[rows] > 0]
  assert not set(table.groups[used].tolist()) & set(table.unused_groups)


def check_pool(pool: selection.PromptPool) -> None:
  """Raises AssertionError if a pool is inconsistent."""
  assert 0 <= pool.num_undrawn <= len(pool)
  assert pool.position == {key: i for i, key in enumerate(pool.items)}


def check_recent_pool(pool: selection.RecentPool) -> None:
  """Raises AssertionError if a recent prompt would never expire."""
  check_pool(pool.pool)
  assert set(pool.last) == set(pool.pool.items)
  assert {(step, key) for key, step in pool.last.items()} <= set(pool.arrivals)

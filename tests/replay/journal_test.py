# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the journal: order, segments, restarts, crashes while writing."""

import os
import stat
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.replay import journal as journal_lib
from tests.replay import journal_case

_PAYLOADS = [b"first", b"", b"third" * 50, bytes(range(256))]


class AppendTest(journal_case.JournalTestCase):

  def test_replay_gives_what_was_appended(self):
    journal = self.open()
    positions = journal.append(_PAYLOADS[:3]) + journal.append(_PAYLOADS[3:])
    expected = list(zip(positions, _PAYLOADS, strict=True))
    self.assertEqual(list(journal.replay(0)), expected)
    self.assertEqual(list(journal.replay(journal.start)), expected)
    # A position is behind its record: replay goes on after it.
    for i, position in enumerate(positions):
      self.assertEqual(list(journal.replay(position)), expected[i + 1 :])
    self.assertEqual(journal.position, positions[-1])
    self.assertEqual(self.events, [])

  def test_nothing_to_append(self):
    journal = self.open()
    self.assertEqual(journal.append([]), [])
    self.assertEqual(self.files(), [])
    self.assertEqual((journal.start, journal.position), (0, 0))

  def test_private_to_the_user(self):
    os.makedirs(self.directory, mode=0o755)
    self.open().append([b"x"])
    self.assertEqual(stat.S_IMODE(self.directory.stat().st_mode), 0o700)
    self.assertEqual(stat.S_IMODE(self.files()[0].stat().st_mode), 0o600)

  def test_a_list_is_one_sync(self):
    journal = self.open()
    journal.append([b"opens the segment"])
    with mock.patch.object(os, "fsync") as fsync:
      journal.append(_PAYLOADS)
    fsync.assert_called_once()

  def test_segments_are_closed_when_full(self):
    journal = self.open(max_segment_bytes=320)
    positions = [journal.append([bytes([i]) * 100])[0] for i in range(6)]
    self.assertLen(self.files(), 3)
    self.assertTrue(all(p.stat().st_size <= 320 for p in self.files()))
    self.assertEqual(positions, sorted(set(positions)))
    for i, position in enumerate(positions):
      self.assertLen(self.payloads(journal, position), 5 - i)

  def test_an_append_larger_than_a_segment(self):
    journal = self.open(max_segment_bytes=100)
    journal.append([b"a" * 500, b"b" * 500])
    journal.append([b"c" * 500])
    self.assertLen(self.files(), 2)
    self.assertLen(self.payloads(journal), 3)

  def test_truncate_drops_only_what_is_covered(self):
    journal = self.open(max_segment_bytes=320)
    positions = [journal.append([bytes([i]) * 100])[0] for i in range(6)]
    self.assertEqual(journal.truncate_before(positions[0]), 0)
    self.assertEqual(journal.truncate_before(positions[2]), 1)
    self.assertEqual(self.payloads(journal)[0], bytes([2]) * 100)
    self.assertEqual(journal.start, positions[1])
    # The last segment stays, so that the positions go on.
    self.assertEqual(journal.truncate_before(10**9), 1)
    self.assertLen(self.files(), 1)
    self.assertGreater(journal.append([b"x"])[0], positions[-1])


class RestartTest(journal_case.JournalTestCase):

  def test_positions_go_on(self):
    journal = self.open()
    positions = journal.append([b"a", b"b"])
    journal.close()
    for i in range(3):
      journal = self.open()
      self.assertEqual(journal.position, positions[-1])
      positions += journal.append([b"%d" % i])
      journal.close()
    self.assertEqual(positions, sorted(set(positions)))
    expected = list(zip(positions, [b"a", b"b", b"0", b"1", b"2"], strict=True))
    self.assertEqual(list(self.open().replay(0)), expected)
    self.assertEqual(self.events, [])

  def test_positions_outlive_the_files(self):
    journal = self.open()
    (position,) = journal.append([b"a"])
    journal.close()
    for path in self.files():
      path.unlink()
    journal = self.open(min_position=position)
    self.assertEqual((journal.start, journal.position), (position, position))
    journal.append([b"b"])
    self.assertEqual(self.payloads(journal, position), [b"b"])

  def test_min_position_below_changes_nothing(self):
    self.open().append([b"a"])
    journal = self.open(min_position=1)
    journal.append([b"b"])
    self.assertEqual(self.payloads(journal), [b"a", b"b"])

  def test_other_files_are_left_alone(self):
    self.directory.mkdir()
    (self.directory / "segment-1.journal").write_bytes(b"no")
    (self.directory / "notes.txt").write_bytes(b"no")
    journal = self.open()
    journal.append([b"a"])
    self.assertEqual(self.payloads(journal), [b"a"])
    self.assertLen(self.files(), 3)


class CrashTest(journal_case.JournalTestCase):

  def test_every_torn_end(self):
    """A file cut at any byte gives all records before it, and goes on."""
    journal = self.open()
    positions = journal.append([b"one", b"two" * 10, b"three"])
    journal.close()
    (path,) = self.files()
    whole = path.read_bytes()
    for size in range(len(whole)):
      for other in self.files():
        other.unlink()
      path.write_bytes(whole[:size])
      self.events.clear()
      journal = self.open()
      kept = sum(position <= size for position in positions)
      found = list(journal.replay(0))
      self.assertEqual([p for p, _ in found], positions[:kept])
      last = positions[kept - 1] if kept else journal_lib.HEADER_BYTES
      torn = 0 if size in (0, last) else size - (last if size > last else 0)
      self.assertEqual(journal.torn_bytes, torn, size)
      self.assertEqual(self.kinds(), ["journal_torn"] * bool(torn))
      # Nothing of what was cut is given again.
      (position,) = journal.append([b"new"])
      self.assertGreater(position, size)
      journal.close()
      self.events.clear()
      self.assertEqual(
          list(self.open().replay(0)), [*found, (position, b"new")]
      )
      self.assertEqual(self.events, [])

  def test_message_names_file_and_bytes(self):
    journal = self.open()
    journal.append([b"one"])
    journal.close()
    (path,) = self.files()
    size = path.stat().st_size
    with open(path, "ab") as f:
      f.write(b"torn")
    self.open()
    ((_, message),) = self.events
    self.assertIn(str(path), message)
    self.assertIn(f"4 bytes after byte {size}", message)

  @parameterized.parameters(0, 10_000)
  def test_cut_positions_stay_cut_over_restarts(self, min_position):
    journal = self.open()
    positions = journal.append([b"one", b"two" * 100])
    journal.close()
    os.truncate(self.files()[0], positions[-1] - 1)
    for _ in range(3):
      self.open(min_position=min_position).close()
    journal = self.open(min_position=min_position)
    (position,) = journal.append([b"new"])
    self.assertGreater(position, max(positions[-1], min_position))
    journal.close()
    self.assertEqual(self.payloads(self.open()), [b"one", b"new"])
    self.assertEqual(self.kinds(), ["journal_torn"])

  def test_cut_and_restart_above_it(self):
    journal = self.open()
    journal.append([b"one"])
    journal.close()
    with open(self.files()[0], "ab") as f:
      f.write(b"torn")
    journal = self.open(min_position=10_000)
    (position,) = journal.append([b"new"])
    self.assertGreater(position, 10_000)
    self.assertEqual(self.payloads(journal, 10_000), [b"new"])

  def test_garbage_tail_at_random(self):
    rng = np.random.default_rng(0)
    for _ in range(30):
      journal = self.open()
      before = self.payloads(journal)
      journal.append([rng.bytes(rng.integers(200))])
      after = self.payloads(journal)
      self.assertEqual(after[:-1], before)
      journal.close()
      with open(self.files()[-1], "ab") as f:
        f.write(rng.bytes(rng.integers(100)))
      self.assertEqual(self.payloads(self.open()), after)


if __name__ == "__main__":
  absltest.main()

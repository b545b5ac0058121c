# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the journal: order, restarts, crashes, damage, full disks."""

import os
import pathlib
import stat
import subprocess
import sys
import tracemalloc
from unittest import mock

from absl.testing import parameterized
import numpy as np

from tba_jax.transport.groups import journal as journal_lib

_PAYLOADS = [b"first", b"", b"third" * 50, bytes(range(256))]


class JournalTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path) / "journal"
    self.events: list[tuple[str, str]] = []

  def open(self, **changes) -> journal_lib.Journal:
    journal = journal_lib.Journal(
        self.directory,
        **{
            "max_segment_bytes": 1_000_000,
            "on_event": lambda *event: self.events.append(event),
            **changes,
        },
    )
    self.addCleanup(journal.close)
    return journal

  def files(self) -> list[pathlib.Path]:
    return sorted(self.directory.iterdir())

  def payloads(self, journal, offset=0) -> list[bytes]:
    return [payload for _, payload in journal.replay(offset)]

  def kinds(self) -> list[str]:
    return [kind for kind, _ in self.events]


class AppendTest(JournalTestCase):

  def test_replay_returns_appended_records(self):
    journal = self.open()
    offsets = journal.append(_PAYLOADS[:3]) + journal.append(_PAYLOADS[3:])
    expected = list(zip(offsets, _PAYLOADS, strict=True))
    self.assertEqual(list(journal.replay(0)), expected)
    self.assertEqual(list(journal.replay(journal.start)), expected)
    # An offset is the end of its record, so replay continues after it.
    for i, offset in enumerate(offsets):
      self.assertEqual(list(journal.replay(offset)), expected[i + 1 :])
    self.assertEqual(journal.offset, offsets[-1])
    self.assertEqual(self.events, [])

  def test_files_are_private_to_user(self):
    os.makedirs(self.directory, mode=0o755)
    self.open().append([b"x"])
    self.assertEqual(stat.S_IMODE(self.directory.stat().st_mode), 0o700)
    self.assertEqual(stat.S_IMODE(self.files()[0].stat().st_mode), 0o600)

  def test_list_is_one_sync(self):
    journal = self.open()
    journal.append([b"opens the segment"])
    with mock.patch.object(os, "fsync") as fsync:
      journal.append(_PAYLOADS)
    fsync.assert_called_once()

  def test_segments_are_closed_when_full(self):
    journal = self.open(max_segment_bytes=320)
    offsets = [journal.append([bytes([i]) * 100])[0] for i in range(6)]
    self.assertLen(self.files(), 3)
    self.assertTrue(all(p.stat().st_size <= 320 for p in self.files()))
    self.assertEqual(offsets, sorted(set(offsets)))
    for i, offset in enumerate(offsets):
      self.assertLen(self.payloads(journal, offset), 5 - i)

  def test_append_may_exceed_segment(self):
    journal = self.open(max_segment_bytes=100)
    journal.append([b"a" * 500, b"b" * 500])
    journal.append([b"c" * 500])
    self.assertLen(self.files(), 2)
    self.assertLen(self.payloads(journal), 3)

  def test_truncate_drops_only_covered_segments(self):
    journal = self.open(max_segment_bytes=320)
    offsets = [journal.append([bytes([i]) * 100])[0] for i in range(6)]
    self.assertEqual(journal.truncate_before(offsets[0]), 0)
    self.assertEqual(journal.truncate_before(offsets[2]), 1)
    self.assertEqual(self.payloads(journal)[0], bytes([2]) * 100)
    self.assertEqual(journal.start, offsets[1])
    # The last segment stays, so that the offsets go on.
    self.assertEqual(journal.truncate_before(10**9), 1)
    self.assertLen(self.files(), 1)
    self.assertGreater(journal.append([b"x"])[0], offsets[-1])


class RestartTest(JournalTestCase):

  def test_file_reader_matches_replay(self):
    journal = self.open(max_segment_bytes=300)
    offsets = [p for _ in range(3) for p in journal.append(_PAYLOADS)]
    self.assertGreater(len(self.files()), 2)
    for offset in (0, offsets[1], offsets[-2]):
      self.assertEqual(
          list(journal_lib.read_records(self.directory, offset)),
          list(journal.replay(offset)),
      )
    # It repairs nothing and skips damage.
    with self.files()[0].open("r+b") as file:
      file.seek(journal_lib.HEADER_BYTES + 3)
      file.write(b"?")
    before = [path.read_bytes() for path in self.files()]
    result = [p for p, _ in journal_lib.read_records(self.directory, 0)]
    self.assertEqual(result, offsets[1:])
    self.assertEqual([path.read_bytes() for path in self.files()], before)

  def test_file_reader_of_empty_journal_yields_nothing(self):
    self.directory.mkdir()
    self.assertEqual(list(journal_lib.read_records(self.directory, 0)), [])

  def test_positions_continue(self):
    journal = self.open()
    offsets = journal.append([b"a", b"b"])
    journal.close()
    for i in range(3):
      journal = self.open()
      self.assertEqual(journal.offset, offsets[-1])
      offsets += journal.append([b"%d" % i])
      journal.close()
    self.assertEqual(offsets, sorted(set(offsets)))
    expected = list(zip(offsets, [b"a", b"b", b"0", b"1", b"2"], strict=True))
    self.assertEqual(list(self.open().replay(0)), expected)
    self.assertEqual(self.events, [])

  def test_positions_continue_after_files_are_lost(self):
    journal = self.open()
    (offset,) = journal.append([b"a"])
    journal.close()
    for path in self.files():
      path.unlink()
    journal = self.open(min_offset=offset)
    self.assertEqual((journal.start, journal.offset), (offset, offset))
    journal.append([b"b"])
    self.assertEqual(self.payloads(journal, offset), [b"b"])

  def test_other_files_are_untouched(self):
    self.directory.mkdir()
    (self.directory / "segment-1.journal").write_bytes(b"no")
    (self.directory / "notes.txt").write_bytes(b"no")
    journal = self.open()
    journal.append([b"a"])
    self.assertEqual(self.payloads(journal), [b"a"])
    self.assertLen(self.files(), 3)


class CrashTest(JournalTestCase):

  def test_every_torn_end(self):
    """A file cut at any byte keeps the records before it, and can grow."""
    journal = self.open()
    offsets = journal.append([b"one", b"two" * 10, b"three"])
    journal.close()
    (path,) = self.files()
    whole = path.read_bytes()
    for size in range(len(whole)):
      for other in self.files():
        other.unlink()
      path.write_bytes(whole[:size])
      self.events.clear()
      journal = self.open()
      kept = sum(offset <= size for offset in offsets)
      result = list(journal.replay(0))
      self.assertEqual([p for p, _ in result], offsets[:kept])
      last = offsets[kept - 1] if kept else journal_lib.HEADER_BYTES
      torn = 0 if size in (0, last) else size - (last if size > last else 0)
      self.assertEqual(self.kinds(), ["journal_torn"] * bool(torn))
      self.assertIn(f"cut {torn} bytes" if torn else "", str(self.events))
      # No offset of the cut bytes is used again.
      (offset,) = journal.append([b"new"])
      self.assertGreater(offset, size)
      journal.close()
      self.events.clear()
      self.assertEqual(list(self.open().replay(0)), [*result, (offset, b"new")])
      self.assertEqual(self.events, [])

  @parameterized.parameters(0, 10_000)
  def test_cut_positions_stay_cut_over_restarts(self, min_offset):
    journal = self.open()
    offsets = journal.append([b"one", b"two" * 100])
    journal.close()
    os.truncate(self.files()[0], offsets[-1] - 1)
    for _ in range(3):
      self.open(min_offset=min_offset).close()
    journal = self.open(min_offset=min_offset)
    (offset,) = journal.append([b"new"])
    self.assertGreater(offset, max(offsets[-1], min_offset))
    journal.close()
    self.assertEqual(self.payloads(self.open()), [b"one", b"new"])
    self.assertEqual(self.kinds(), ["journal_torn"])

  def test_cuts_garbage_tail_at_random(self):
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


class DamageTest(JournalTestCase):

  def _damage(self, path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)

  def test_any_flipped_bit_loses_one_record(self):
    journal = self.open()
    payloads = [b"one", b"two" * 10, b"three"]
    offsets = journal.append(payloads)
    journal.close()
    (path,) = self.files()
    whole = path.read_bytes()
    for at in range(offsets[-2]):
      for other in self.files():
        other.unlink()
      path.write_bytes(whole)
      self._damage(path, at)
      self.events.clear()
      journal = self.open()
      hit = sum(p <= at for p in offsets)
      expected = list(zip(offsets, payloads, strict=True))
      if at >= journal_lib.HEADER_BYTES:
        del expected[hit]
      # Replaying again finds the same; it is reported once.
      self.assertEqual(list(journal.replay(0)), expected)
      self.assertEqual(list(journal.replay(0)), expected)
      self.assertEqual(self.kinds(), ["journal_damaged"])
      start = (
          0
          if at < journal_lib.HEADER_BYTES
          else ([journal_lib.HEADER_BYTES, *offsets][hit])
      )
      self.assertIn(f"from byte {start}", self.events[0][1])
      journal.close()

  def test_damage_in_closed_segment(self):
    journal = self.open(max_segment_bytes=320)
    for i in range(6):
      journal.append([bytes([i]) * 100])
    self._damage(self.files()[0], self.files()[0].stat().st_size - 1)
    self.assertEqual(
        self.payloads(journal), [bytes([i]) * 100 for i in (0, 2, 3, 4, 5)]
    )
    self.assertEqual(self.kinds(), ["journal_damaged"])

  def test_records_inside_of_payload_are_not_taken_for_records(self):
    """The payload of a damaged record contains a copy of a journal."""
    journal = self.open()
    journal.append([b"inner"])
    journal.close()
    copy = self.files()[0].read_bytes()
    self.files()[0].unlink()
    journal = self.open()
    offsets = journal.append([b"x" * 7 + copy, b"after"])
    journal.close()
    self._damage(self.files()[0], offsets[0] - len(copy) - 3)
    self.assertEqual(self.payloads(self.open()), [b"after"])

  def test_reads_oversized_headers_fast(self):
    """Hashing each of them to the end takes 10 s."""
    journal = self.open()
    journal.append([b"before"])
    journal.close()
    segment, size = self.files()[0], 800_000
    begin, header = segment.stat().st_size, journal_lib.RECORD_BYTES
    made_up = bytearray()
    for at in range(0, size, header):
      made_up += journal_lib.encode_record(begin + at, b"")
      length = (size - header - at).to_bytes(8, "little")
      made_up[at + 8 : at + 16] = length
    with segment.open("ab") as f:
      f.write(made_up)
    with mock.patch.object(
        journal_lib, "_digest", side_effect=journal_lib._digest
    ) as digest:
      spans, _ = journal_lib.read_segment(segment, 0)
    self.assertLess(digest.call_count, 100)
    self.assertEqual([s.payload for s in spans], [b"before", None])

  def test_oversized_record_is_not_copied(self):
    self.open().append([b"before"])
    segment, rest = self.files()[0], 1_000_000
    record = bytearray(journal_lib.encode_record(segment.stat().st_size, b""))
    record[8:16] = (2 * rest).to_bytes(8, "little")
    with segment.open("ab") as f:
      f.write(bytes(record) + bytes(rest))
    data = segment.read_bytes()
    tracemalloc.start()
    result = journal_lib._payload_at(data, len(data) - rest - len(record), 0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    self.assertEqual(result, (None, 0))
    self.assertLess(peak_bytes, rest // 10)

  def test_skips_missing_segment(self):
    journal = self.open(max_segment_bytes=320)
    for i in range(6):
      journal.append([bytes([i]) * 100])
    journal.close()
    self.files()[1].unlink()
    self.assertEqual(
        self.payloads(self.open()), [bytes([i]) * 100 for i in (0, 1, 4, 5)]
    )

  def test_newer_format_is_refused_by_name(self):
    with mock.patch.object(journal_lib, "FORMAT", journal_lib.FORMAT + 1):
      journal = self.open()
      journal.append([b"a"])
      journal.close()
    before = self.files()[0].read_bytes()
    with self.assertRaisesRegex(ValueError, "journal format 2.*up to 1"):
      self.open()
    self.assertEqual(self.files()[0].read_bytes(), before)


class FullDiskTest(JournalTestCase):

  def _full_after(self, room: int):
    """os.write as on a disk with so many bytes left."""
    left = [room]
    write = os.write

    def limited(fd: int, data) -> int:
      if not left[0]:
        raise OSError(28, "No space left on device")
      count = write(fd, bytes(data)[: left[0]])
      left[0] -= count
      return count

    return mock.patch.object(os, "write", limited)

  @parameterized.parameters(0, 1, 40, 60, 110)
  def test_refused_append_leaves_no_bytes(self, room):
    journal = self.open()
    (offset,) = journal.append([b"before"])
    size = self.files()[0].stat().st_size
    with self._full_after(room):
      with self.assertRaisesRegex(
          journal_lib.JournalFullError, str(self.directory)
      ):
        journal.append([b"x" * 50, b"y" * 50])
    self.assertEqual(self.files()[0].stat().st_size, size)
    self.assertEqual(self.payloads(journal), [b"before"])
    self.assertEqual(journal.offset, offset)
    journal.append([b"after"])
    journal.close()
    self.assertEqual(self.payloads(self.open()), [b"before", b"after"])
    self.assertEqual(self.events, [])

  @parameterized.parameters(0, 10)
  def test_new_segment_without_room_leaves_journal_whole(self, room):
    journal = self.open(max_segment_bytes=100)
    journal.append([b"a" * 60])
    with self._full_after(room):
      with self.assertRaises(journal_lib.JournalFullError):
        journal.append([b"b" * 60])
    self.assertLen(self.files(), 1)
    journal.append([b"c" * 60])
    self.assertEqual(self.payloads(journal), [b"a" * 60, b"c" * 60])

  def test_failed_cut_is_repeated_later(self):
    journal = self.open()
    journal.append([b"before"])
    with self._full_after(20), mock.patch.object(
        os, "ftruncate", side_effect=OSError(5, "I/O error")
    ):
      with self.assertRaises(journal_lib.JournalFullError):
        journal.append([b"x" * 50])
    self.assertEqual(self.kinds(), ["journal_unclean"])
    self.assertEqual(self.payloads(journal), [b"before"])
    journal.append([b"after"])
    self.assertEqual(self.payloads(journal), [b"before", b"after"])
    journal.close()
    self.assertEqual(self.payloads(self.open()), [b"before", b"after"])
    self.assertEqual(self.kinds(), ["journal_unclean"])

  def test_remains_of_failed_cut_do_not_stay_in_closed_segment(self):
    journal = self.open(max_segment_bytes=500)
    journal.append([b"before"])
    fails = lambda name: mock.patch.object(os, name, side_effect=OSError(5, ""))
    with fails("fsync"), fails("ftruncate"), self.assertRaises(OSError):
      journal.append([b"x" * 50])
    journal.append([b"y" * 500])  # Opens the next segment.
    self.assertLen(self.files(), 2)
    for _ in range(2):
      self.assertEqual(self.payloads(journal), [b"before", b"y" * 500])
      journal.close()
      journal = self.open()

  def test_failed_sync_raises(self):
    journal = self.open()
    journal.append([b"before"])
    with mock.patch.object(os, "fsync", side_effect=OSError(5, "I/O error")):
      with self.assertRaises(OSError) as caught:
        journal.append([b"x"])
    self.assertNotIsInstance(caught.exception, journal_lib.JournalFullError)
    journal.append([b"after"])
    self.assertEqual(self.payloads(journal), [b"before", b"after"])

  def test_limit_of_operating_system_leaves_journal_whole(self):
    """A child with a limit on the size of files, as a real write meets it."""
    code = """
import resource, sys
from tba_jax.transport.groups import journal as journal_lib
journal = journal_lib.Journal(
    sys.argv[1], max_segment_bytes=10**6, on_event=lambda *event: None
)
journal.append([b"before" * 10])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
  journal.append([b"x" * 5000])
except journal_lib.JournalFullError:
  print("full")
journal.append([b"after"])
print(len(list(journal.replay(0))))
"""
    process = subprocess.run(
        [sys.executable, "-c", code, str(self.directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    self.assertEqual(process.stdout.split(), ["full", "2"], process.stderr)
    self.assertEqual(self.payloads(self.open()), [b"before" * 10, b"after"])
    self.assertEqual(self.events, [])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the journal on damaged and on full disks."""

import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.replay import journal as journal_lib
from tests.replay import journal_case


class DamageTest(journal_case.JournalTestCase):

  def _damage(self, path: pathlib.Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)

  def test_any_flipped_bit_loses_one_record(self):
    journal = self.open()
    payloads = [b"one", b"two" * 10, b"three"]
    positions = journal.append(payloads)
    journal.close()
    (path,) = self.files()
    whole = path.read_bytes()
    for offset in range(positions[-2]):
      for other in self.files():
        other.unlink()
      path.write_bytes(whole)
      self._damage(path, offset)
      self.events.clear()
      journal = self.open()
      hit = sum(p <= offset for p in positions)
      expected = list(zip(positions, payloads, strict=True))
      if offset >= journal_lib.HEADER_BYTES:
        del expected[hit]
      # Replaying again finds the same; it is reported once.
      self.assertEqual(list(journal.replay(0)), expected)
      self.assertEqual(list(journal.replay(0)), expected)
      self.assertEqual(self.kinds(), ["journal_damaged"])
      start = (
          0
          if offset < journal_lib.HEADER_BYTES
          else ([journal_lib.HEADER_BYTES, *positions][hit])
      )
      self.assertIn(f"from byte {start}", self.events[0][1])
      self.assertGreater(journal.damaged_bytes, 0)
      self.assertEqual(journal.torn_bytes, 0)
      journal.close()

  def test_damage_in_a_closed_segment(self):
    journal = self.open(max_segment_bytes=320)
    for i in range(6):
      journal.append([bytes([i]) * 100])
    self._damage(self.files()[0], self.files()[0].stat().st_size - 1)
    self.assertEqual(
        self.payloads(journal), [bytes([i]) * 100 for i in (0, 2, 3, 4, 5)]
    )
    self.assertEqual(self.kinds(), ["journal_damaged"])

  def test_records_inside_of_a_payload_are_not_taken_for_records(self):
    """The payload of a damaged record holds a copy of a whole journal."""
    journal = self.open()
    journal.append([b"inner"])
    journal.close()
    copy = self.files()[0].read_bytes()
    self.files()[0].unlink()
    journal = self.open()
    positions = journal.append([b"x" * 7 + copy, b"after"])
    journal.close()
    self._damage(self.files()[0], positions[0] - len(copy) - 3)
    self.assertEqual(self.payloads(self.open()), [b"after"])

  def test_missing_segment(self):
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


class FullDiskTest(journal_case.JournalTestCase):

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
  def test_nothing_of_a_refused_append_stays(self, room):
    journal = self.open()
    (position,) = journal.append([b"before"])
    size = self.files()[0].stat().st_size
    with self._full_after(room):
      with self.assertRaisesRegex(
          journal_lib.JournalFullError, str(self.directory)
      ):
        journal.append([b"x" * 50, b"y" * 50])
    self.assertEqual(self.files()[0].stat().st_size, size)
    self.assertEqual(self.payloads(journal), [b"before"])
    self.assertEqual(journal.position, position)
    journal.append([b"after"])
    journal.close()
    self.assertEqual(self.payloads(self.open()), [b"before", b"after"])
    self.assertEqual(self.events, [])

  @parameterized.parameters(0, 10)
  def test_no_room_for_a_new_segment(self, room):
    journal = self.open(max_segment_bytes=100)
    journal.append([b"a" * 60])
    with self._full_after(room):
      with self.assertRaises(journal_lib.JournalFullError):
        journal.append([b"b" * 60])
    self.assertLen(self.files(), 1)
    journal.append([b"c" * 60])
    self.assertEqual(self.payloads(journal), [b"a" * 60, b"c" * 60])

  def test_cut_that_fails_is_made_good_later(self):
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

  def test_sync_that_fails(self):
    journal = self.open()
    journal.append([b"before"])
    with mock.patch.object(os, "fsync", side_effect=OSError(5, "I/O error")):
      with self.assertRaises(OSError) as caught:
        journal.append([b"x"])
    self.assertNotIsInstance(caught.exception, journal_lib.JournalFullError)
    journal.append([b"after"])
    self.assertEqual(self.payloads(journal), [b"before", b"after"])

  def test_limit_of_the_operating_system(self):
    """A child with a limit on the size of files, as a real write meets it."""
    code = """
import resource, sys
from tba_jax.replay import journal as journal_lib
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
    done = subprocess.run(
        [sys.executable, "-c", code, str(self.directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    self.assertEqual(done.stdout.split(), ["full", "2"], done.stderr)
    self.assertEqual(self.payloads(self.open()), [b"before" * 10, b"after"])
    self.assertEqual(self.events, [])


if __name__ == "__main__":
  absltest.main()

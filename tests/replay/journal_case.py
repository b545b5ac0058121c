# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of the journal share."""

import pathlib

from absl.testing import parameterized

from tba_jax.replay import journal as journal_lib


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

  def payloads(self, journal, position=0) -> list[bytes]:
    return [payload for _, payload in journal.replay(position)]

  def kinds(self) -> list[str]:
    return [kind for kind, _ in self.events]

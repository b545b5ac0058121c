# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""SQLite file of a server; every method may be called from any thread."""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
import sqlite3
import threading
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, finished TEXT, created_s REAL);
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, session TEXT, spec TEXT);
CREATE TABLE IF NOT EXISTS samplers (
  id TEXT PRIMARY KEY, session TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS episodes (
  id TEXT PRIMARY KEY, session TEXT, together TEXT, spec TEXT, outcome TEXT);
CREATE INDEX IF NOT EXISTS by_group ON episodes (together);
CREATE TABLE IF NOT EXISTS replays (
  model TEXT PRIMARY KEY, running INTEGER, reason TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (
  path TEXT PRIMARY KEY, model TEXT, spec TEXT, created_s REAL);
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT,
  seq INTEGER, kind TEXT, body BLOB, digest TEXT, accepted_s REAL,
  result BLOB, failure TEXT, done INTEGER);
CREATE INDEX IF NOT EXISTS by_owner ON requests (owner, seq);
CREATE INDEX IF NOT EXISTS by_done ON requests (owner, done);
CREATE INDEX IF NOT EXISTS by_age ON requests (done) WHERE body IS NULL;
"""


class Database:
  """Connection to the file; outside a `transaction`, each statement commits.

  Raises:
    OSError: the file cannot be opened or written.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._lock = threading.RLock()
    try:
      self._db = sqlite3.connect(
          path, check_same_thread=False, isolation_level=None
      )
      self._db.execute("PRAGMA journal_mode=WAL")
      self._db.execute("PRAGMA synchronous=FULL")
      self._db.executescript(_TABLES)
    except sqlite3.Error as error:
      raise OSError(f"{path}: {error}") from error

  def close(self) -> None:
    with self._lock:
      self._db.close()

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    """Keeps other threads from running statements meanwhile."""
    with self._lock:
      yield

  @contextlib.contextmanager
  def transaction(self) -> Iterator[None]:
    """Commits all statements of its body, or none."""
    with self._lock:
      self.fetch_all("BEGIN IMMEDIATE")
      try:
        yield
        self.fetch_all("COMMIT")
      except BaseException:
        # A full disk may already have rolled back the transaction.
        if self._db.in_transaction:
          self._db.execute("ROLLBACK")
        raise

  def fetch_all(
      self, statement: str, *values: Any
  ) -> Sequence[tuple[Any, ...]]:
    """Runs a statement; returns its rows."""
    with self._lock:
      try:
        return self._db.execute(statement, values).fetchall()
      except sqlite3.Error as error:
        raise OSError(f"{self._path}: {error}") from error

  def fetch_one(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
    """Runs a statement; returns its first row, or None."""
    rows = self.fetch_all(statement, *values)
    return rows[0] if rows else None

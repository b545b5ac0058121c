# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Journal of a server: what it has promised, in an SQLite file.

A request is in the journal before its client is told its number, and its result
before its client sees it. Both are committed, so that a server that is killed
at any moment goes on: what has no result is done again, in the same order, from
the newest checkpoint of its model. A request is known by its owner, a model or
a sampling session, and its number there (`seq_id`): one that comes again is the
same request.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
import sqlite3
import threading
import time
from typing import Any

# Results kept for clients that ask late; older ones are forgotten.
_KEEP_RESULTS = 20_000

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


@dataclasses.dataclass(frozen=True)
class Request:
  """A journaled request.

  id: name by which the client asks for the result.
  owner: model or sampling session that it is for.
  seq: number among the owner's requests.
  kind: name of the operation, as `optim_step`.
  body: body as it came; None once a checkpoint holds its effect.
  accepted_s: Unix time of its arrival.
  """

  id: str
  owner: str
  seq: int
  kind: str
  body: bytes | None
  accepted_s: float


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Outcome of a request: a result, a failure, or neither yet.

  kind: name of the operation.
  result: bytes of the result.
  failure: {"error": text, "category": "user" or "server"}.
  """

  kind: str
  result: bytes | None
  failure: Mapping[str, str] | None

  @property
  def is_done(self) -> bool:
    return self.result is not None or self.failure is not None


class ConflictError(ValueError):
  """Another request has the same owner and number."""


class Journal:
  """The journal of a server; every method is for any thread.

  Raises:
    OSError: the file cannot be opened or written.
  """

  def __init__(self, path: pathlib.Path):
    self._lock = threading.Lock()
    try:
      self._db = sqlite3.connect(
          path, check_same_thread=False, isolation_level=None
      )
      self._db.execute("PRAGMA journal_mode=WAL")
      self._db.execute("PRAGMA synchronous=FULL")
      self._db.executescript(_TABLES)
    except sqlite3.Error as error:
      raise OSError(f"{path}: {error}") from error
    self._path = path

  def close(self) -> None:
    with self._lock:
      self._db.close()

  # Requests.

  def accept(
      self, id: str, owner: str, seq: int, kind: str, body: bytes
  ) -> tuple[Request, bool]:
    """Writes a request; returns it, and whether it is new.

    Raises:
      ConflictError: another one has the same owner and number.
    """
    digest = _digest(body)
    now_s = time.time()
    with self._lock:
      row = self._one(
          "SELECT kind, digest, accepted_s FROM requests WHERE id=?", id
      )
      if row is not None:
        if row[:2] != (kind, digest):
          if id == f"{owner}:{seq}":
            raise ConflictError(
                f"seq_id {seq} of {owner} was another {row[0]}: a number stands"
                " for one request"
            )
          # Clients do not number these.
          raise ConflictError(
              f"{id}: {row[0]} came before with another body, and the first one"
              " stands"
          )
        return Request(id, owner, seq, kind, body, row[2]), False
      self._run(
          "INSERT INTO requests (id, owner, seq, kind, body, digest,"
          " accepted_s) VALUES (?, ?, ?, ?, ?, ?, ?)",
          *(id, owner, seq, kind, body, digest, now_s),
      )
    return Request(id, owner, seq, kind, body, now_s), True

  def finish(self, outcomes: Mapping[str, bytes | Mapping[str, str]]) -> None:
    """Writes results (bytes) and failures (objects) by request, all or none.

    The body of a sample or forward pass goes: it has no effect that would be
    needed again. The pass keeps its place among its model's requests, an empty
    body, until `drop_bodies`: `next_seq` reads them without a gap.
    """
    with self._lock:
      self._run("BEGIN IMMEDIATE")
      try:
        (newest,) = self._one("SELECT coalesce(max(done), 0) FROM requests")
        for n, (id, outcome) in enumerate(outcomes.items(), newest + 1):
          is_result = isinstance(outcome, bytes)
          self._run(
              "UPDATE requests SET result=?, failure=?, done=?, body=CASE kind"
              " WHEN 'sample' THEN NULL WHEN 'sample_into_replay' THEN NULL"
              " WHEN 'answer' THEN NULL WHEN 'forward' THEN x'' ELSE body END"
              " WHERE id=? AND done IS NULL",
              outcome if is_result else None,
              None if is_result else json.dumps(outcome),
              n,
              id,
          )
        self._run(
            "DELETE FROM requests WHERE done < ? AND body IS NULL",
            newest - _KEEP_RESULTS,
        )
        self._run("COMMIT")
      except BaseException:
        # A full disk may have rolled it back already.
        if self._db.in_transaction:
          self._db.execute("ROLLBACK")
        raise

  def same_body(self, owner: str, body: bytes) -> str | None:
    """Returns the newest request with this body that did not fail, or None."""
    row = self._read(
        "SELECT id FROM requests WHERE owner=? AND digest=? AND failure IS NULL"
        " ORDER BY seq DESC LIMIT 1",
        *(owner, _digest(body)),
    )
    return row and row[0]

  def drop_bodies(self, owner: str, seq: int) -> None:
    """Forgets the bodies of an owner's finished requests up to a number."""
    with self._lock:
      self._run(
          "UPDATE requests SET body=NULL WHERE owner=? AND seq<=? AND done IS"
          " NOT NULL AND body IS NOT NULL",
          *(owner, seq),
      )

  def outcome(self, id: str) -> Outcome | None:
    """Returns the outcome of a request; None for one that is not known."""
    with self._lock:
      row = self._one(
          "SELECT kind, result, failure FROM requests WHERE id=?", id
      )
    if row is None:
      return None
    return Outcome(row[0], row[1], row[2] and json.loads(row[2]))

  def pending(self) -> list[Request]:
    """Returns the requests without outcome, in the order of their arrival."""
    return self._requests("done IS NULL ORDER BY number")

  def since(self, owner: str, seq: int) -> Iterator[tuple[Request, bool]]:
    """Yields an owner's requests after a number, and whether each is done.

    Bodies may be large: one of them is read at a time.
    """
    with self._lock:
      rows = self._all(
          "SELECT id, done IS NOT NULL FROM requests WHERE owner=? AND seq>?"
          " ORDER BY seq",
          *(owner, seq),
      )
    for id, is_done in rows:
      for request in self._requests("id=?", id):
        yield request, bool(is_done)

  def answered(self, owner: str, kind: str) -> list[tuple[Request, bytes]]:
    """Returns an owner's requests of a kind that have body and result.

    They are in the order of `finish`.
    """
    with self._lock:
      rows = self._all(
          "SELECT id, owner, seq, kind, body, accepted_s, result FROM requests"
          " WHERE owner=? AND kind=? AND body IS NOT NULL AND result IS NOT"
          " NULL ORDER BY done",
          *(owner, kind),
      )
    return [(Request(*row[:-1]), row[-1]) for row in rows]

  def next_seq(self, owner: str) -> int:
    """Returns the number after the owner's last done one without a gap."""
    with self._lock:
      done = self._all(
          "SELECT seq FROM requests WHERE owner=? AND done IS NOT NULL ORDER BY"
          " seq",
          owner,
      )
    # Old ones may be forgotten: the first that is there follows them.
    expected = done[0][0] if done else 0
    for (seq,) in done:
      if seq != expected:
        break
      expected += 1
    return expected

  def last_seq(self, owner: str) -> int:
    """Returns the highest number of an owner's requests, -1 without any."""
    with self._lock:
      return self._one(
          "SELECT coalesce(max(seq), -1) FROM requests WHERE owner=?", owner
      )[0]

  def completions(
      self, owner: str, after: int, *, first: int, last: int, limit: int = 1000
  ) -> list[tuple[int, str, bool]]:
    """Returns an owner's requests finished after a place of `finish`.

    Args:
      owner: owner of the requests.
      after: place.
      first: lowest number of a request.
      last: highest number.
      limit: most requests.

    Returns:
      Place, id, and whether it failed, by place.
    """
    with self._lock:
      rows = self._all(
          "SELECT done, id, failure IS NOT NULL FROM requests WHERE owner=? AND"
          " done>? AND seq BETWEEN ? AND ? ORDER BY done LIMIT ?",
          *(owner, after, first, last, limit),
      )
    return [(done, id, bool(failed)) for done, id, failed in rows]

  # What requests are about.

  def fact(self, name: str, value: Any) -> Any:
    """Returns a fact as first written; `value`, which is JSON, if it is new."""
    with self._lock:
      self._run(
          "INSERT OR IGNORE INTO facts VALUES (?, ?)", name, json.dumps(value)
      )
      row = self._one("SELECT value FROM facts WHERE name=?", name)
    return json.loads(row[0])

  def add_session(self, id: str) -> None:
    self._write("INSERT INTO sessions VALUES (?, NULL, ?)", id, time.time())

  def finish_session(self, id: str, reason: str) -> None:
    self._write(
        "UPDATE sessions SET finished=coalesce(finished, ?) WHERE id=?",
        *(reason, id),
    )

  def session(self, id: str) -> tuple[bool, float] | None:
    """Returns whether a session has finished, and its start; None if none."""
    row = self._read("SELECT finished, created_s FROM sessions WHERE id=?", id)
    return row and (row[0] is not None, row[1])

  def add_model(self, id: str, session: str, spec: Mapping[str, Any]) -> None:
    self._write(
        "INSERT OR IGNORE INTO models VALUES (?, ?, ?)",
        *(id, session, json.dumps(spec)),
    )

  def model(self, id: str) -> dict[str, Any] | None:
    """Returns the spec of a model; None if there is none."""
    row = self._read("SELECT spec FROM models WHERE id=?", id)
    return row and json.loads(row[0])

  def last_asked_s(self, model: str) -> float:
    """Returns the Unix time of a model's newest request that is not forgotten.

    Without one it is that of the model's session.
    """
    return self._read(
        "SELECT COALESCE((SELECT MAX(accepted_s) FROM requests WHERE owner=?1),"
        " (SELECT created_s FROM sessions JOIN models ON session=sessions.id"
        " WHERE models.id=?1))",
        model,
    )[0]

  def models_of(self, session: str) -> list[str]:
    with self._lock:
      rows = self._all("SELECT id FROM models WHERE session=?", session)
    return [id for (id,) in rows]

  def add_sampler(self, id: str, session: str, path: str) -> None:
    self._write(
        "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", *(id, session, path)
    )

  def sampler(self, id: str) -> str | None:
    """Returns the path of a sampling session, "" for the base model."""
    row = self._read("SELECT path FROM samplers WHERE id=?", id)
    return row and row[0]

  def samplers_of(self, session: str) -> list[str]:
    with self._lock:
      rows = self._all("SELECT id FROM samplers WHERE session=?", session)
    return [id for (id,) in rows]

  def add_episode(
      self,
      id: str,
      session: str,
      spec: Mapping[str, Any],
      *,
      together: str = "",
      size: int = 0,
  ) -> None:
    """Adds an episode, unless it has come before.

    Args:
      id: id of the episode.
      session: session that it is of.
      spec: facts about it.
      together: group that its rows are trained in; "" = none.
      size: episodes of the group.

    Raises:
      ConflictError: another episode has this id.
      ValueError: the group has all its episodes, or another size.
    """
    with self._lock:
      before = self._one("SELECT spec FROM episodes WHERE id=?", id)
      if before is not None:
        if json.loads(before[0]) != spec:
          raise ConflictError(f"{id}: another episode came with this key")
        return
      if together:
        group = self._all(
            "SELECT spec FROM episodes WHERE together=? ORDER BY rowid",
            together,
        )
        first = json.loads(group[0][0])["num_episodes"] if group else size
        name = together.rpartition("/")[2]
        if size != first:
          raise ValueError(
              f"num_episodes={size}: allowed {first}, that of group {name}'s"
              " first episode"
          )
        if len(group) >= size:
          raise ValueError(
              f"group {name} has its {size} episodes: allowed another name"
          )
      self._run(
          "INSERT INTO episodes VALUES (?, ?, ?, ?, NULL)",
          *(id, session, together, json.dumps(spec)),
      )

  def outcomes_of(self, together: str) -> tuple[list[Any], int]:
    """Returns the outcomes of a group's finished episodes, and its size."""
    with self._lock:
      rows = self._all(
          "SELECT outcome, spec FROM episodes WHERE together=? ORDER BY rowid",
          together,
      )
    outcomes = [json.loads(outcome) for outcome, _ in rows if outcome]
    return outcomes, json.loads(rows[0][1])["num_episodes"]

  def episode(self, id: str) -> tuple[dict[str, Any], Any] | None:
    """Returns spec and outcome of an episode, None for what is not there."""
    row = self._read("SELECT spec, outcome FROM episodes WHERE id=?", id)
    return row and (json.loads(row[0]), row[1] and json.loads(row[1]))

  def finish_episode(self, id: str, outcome: Mapping[str, Any]) -> None:
    self._write(
        "UPDATE episodes SET outcome=coalesce(outcome, ?) WHERE id=?",
        *(json.dumps(outcome), id),
    )

  def set_sampler(self, id: str, path: str) -> None:
    """Gives a sampling session another path."""
    self._write("UPDATE samplers SET path=? WHERE id=?", path, id)

  def set_running(self, model: str, running: bool, reason: str) -> None:
    self._write(
        "INSERT OR REPLACE INTO replays VALUES (?, ?, ?)",
        *(model, running, reason),
    )

  def running(self, model: str) -> tuple[bool, str]:
    """Returns whether a replay trains, and why it does not."""
    row = self._read("SELECT running, reason FROM replays WHERE model=?", model)
    return (bool(row[0]), row[1]) if row else (False, "not started")

  def running_replays(self) -> list[str]:
    with self._lock:
      rows = self._all("SELECT model FROM replays WHERE running")
    return [model for (model,) in rows]

  def results(
      self, owner: str, kind: str, after: int, limit: int
  ) -> list[tuple[int, bytes]]:
    """Returns the newest results of a kind after a number: number, result."""
    with self._lock:
      rows = self._all(
          "SELECT seq, result FROM requests WHERE owner=? AND kind=? AND seq>?"
          " AND result IS NOT NULL ORDER BY seq DESC LIMIT ?",
          *(owner, kind, after, limit),
      )
    return rows[::-1]

  def add_checkpoint(
      self, path: str, model: str, spec: Mapping[str, Any]
  ) -> None:
    self._write(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
        *(path, model, json.dumps(spec), time.time()),
    )

  def drop_checkpoint(self, path: str) -> None:
    self._write("DELETE FROM checkpoints WHERE path=?", path)

  def checkpoint(self, path: str) -> dict[str, Any] | None:
    """Returns the spec of a checkpoint; None if there is none."""
    row = self._read("SELECT spec FROM checkpoints WHERE path=?", path)
    return row and json.loads(row[0])

  def checkpoints_of(self, model: str) -> list[tuple[str, float]]:
    """Returns path and Unix time of a model's checkpoints, oldest first."""
    with self._lock:
      return self._all(
          "SELECT path, created_s FROM checkpoints WHERE model=? ORDER BY"
          " created_s",
          model,
      )

  def newest(
      self, table: str, limit: int, offset: int
  ) -> tuple[Sequence[tuple[Any, ...]], int]:
    """Returns the newest rows of a table, and how many there are.

    Args:
      table: `models` or `sessions`, whose rows are an id, or `checkpoints`, a
        path and a Unix time.
      limit: most rows.
      offset: newer rows that are left out.
    """
    columns = "path, created_s" if table == "checkpoints" else "id"
    with self._lock:
      rows = self._all(
          f"SELECT {columns} FROM {table} ORDER BY rowid DESC LIMIT ? OFFSET ?",
          *(limit, offset),
      )
      (count,) = self._one(f"SELECT count(*) FROM {table}")
    return rows, count

  def _requests(self, where: str, *values: Any) -> list[Request]:
    with self._lock:
      rows = self._all(
          "SELECT id, owner, seq, kind, body, accepted_s FROM requests WHERE "
          + where,
          *values,
      )
    return [Request(*row) for row in rows]

  def _write(self, statement: str, *values: Any) -> None:
    with self._lock:
      self._run(statement, *values)

  def _read(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
    with self._lock:
      return self._one(statement, *values)

  def _one(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
    rows = self._run(statement, *values)
    return rows[0] if rows else None

  def _all(self, statement: str, *values: Any) -> Sequence[tuple[Any, ...]]:
    return self._run(statement, *values)

  def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    try:
      return self._db.execute(statement, values).fetchall()
    except sqlite3.Error as error:
      raise OSError(f"{self._path}: {error}") from error


def _digest(body: bytes) -> str:
  return hashlib.blake2b(body, digest_size=16).hexdigest()

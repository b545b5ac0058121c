# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Registry of a server's sessions, models, samplers, episodes, checkpoints.

A spec is a JSON object of facts that do not change.
"""

from collections.abc import Mapping, Sequence
import json
import time
from typing import Any

from tba_jax.serving import database
from tba_jax.serving import request_journal


class Registry:
  """Persistent sessions, models, sampling sessions, episodes and checkpoints.

  Every method may be called from any thread, and raises OSError if the file
  cannot be read or written.
  """

  def __init__(self, db: database.Database):
    self._db = db

  def fact(self, name: str, value: Any) -> Any:
    """Returns the first stored value of a fact; stores `value` if it is new."""
    self._db.fetch_all(
        "INSERT OR IGNORE INTO facts VALUES (?, ?)", name, json.dumps(value)
    )
    row = self._db.fetch_one("SELECT value FROM facts WHERE name=?", name)
    return json.loads(row[0])

  def add_session(self, id: str) -> None:
    self._db.fetch_all(
        "INSERT INTO sessions VALUES (?, NULL, ?)", id, time.time()
    )

  def finish_session(self, id: str, reason: str) -> None:
    self._db.fetch_all(
        "UPDATE sessions SET finished=coalesce(finished, ?) WHERE id=?",
        *(reason, id),
    )

  def session(self, id: str) -> tuple[bool, float] | None:
    """Returns whether a session has finished, and its start; None if none."""
    row = self._db.fetch_one(
        "SELECT finished, created_s FROM sessions WHERE id=?", id
    )
    return row and (row[0] is not None, row[1])

  def add_model(self, id: str, session: str, spec: Mapping[str, Any]) -> None:
    self._db.fetch_all(
        "INSERT OR IGNORE INTO models VALUES (?, ?, ?)",
        *(id, session, json.dumps(spec)),
    )

  def model(self, id: str) -> dict[str, Any] | None:
    """Returns the spec of a model, or None."""
    row = self._db.fetch_one("SELECT spec FROM models WHERE id=?", id)
    return row and json.loads(row[0])

  def models_of(self, session: str) -> list[str]:
    rows = self._db.fetch_all("SELECT id FROM models WHERE session=?", session)
    return [id for (id,) in rows]

  def add_sampler(self, id: str, session: str, path: str) -> None:
    self._db.fetch_all(
        "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", *(id, session, path)
    )

  def sampler(self, id: str) -> str | None:
    """Returns the path of a sampling session, "" for the base model."""
    row = self._db.fetch_one("SELECT path FROM samplers WHERE id=?", id)
    return row and row[0]

  def samplers_of(self, session: str) -> list[str]:
    rows = self._db.fetch_all(
        "SELECT id FROM samplers WHERE session=?", session
    )
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
    """Adds an episode, unless it already exists.

    Args:
      spec: facts about the episode.
      together: group in which its rows are trained; "" = none.
      size: number of episodes of the group.

    Raises:
      request_journal.ConflictError: another episode has this id.
      ValueError: the group is complete, or has another size.
    """
    with self._db.transaction():
      before = self._db.fetch_one("SELECT spec FROM episodes WHERE id=?", id)
      if before is not None:
        if json.loads(before[0]) != spec:
          raise request_journal.ConflictError(
              f"{id}: another episode came with this key"
          )
        return
      if together:
        group = self._db.fetch_all(
            "SELECT spec FROM episodes WHERE together=? ORDER BY rowid",
            together,
        )
        first = json.loads(group[0][0])["num_episodes"] if group else size
        name = together.rpartition("/")[2]
        if size != first:
          raise ValueError(
              f"num_episodes = {size}: must be {first}, as in the first episode"
              f" of group {name}"
          )
        if len(group) >= size:
          raise ValueError(
              f"group {name} has its {size} episodes: take another name"
          )
      self._db.fetch_all(
          "INSERT INTO episodes VALUES (?, ?, ?, ?, NULL)",
          *(id, session, together, json.dumps(spec)),
      )

  def outcomes_of(self, together: str) -> tuple[list[Any], int]:
    """Returns the outcomes of a group's finished episodes, and its size."""
    rows = self._db.fetch_all(
        "SELECT outcome, spec FROM episodes WHERE together=? ORDER BY rowid",
        together,
    )
    outcomes = [json.loads(outcome) for outcome, _ in rows if outcome]
    return outcomes, json.loads(rows[0][1])["num_episodes"]

  def episode(self, id: str) -> tuple[dict[str, Any], Any] | None:
    """Returns an episode's spec and outcome (None if unfinished), or None."""
    row = self._db.fetch_one(
        "SELECT spec, outcome FROM episodes WHERE id=?", id
    )
    return row and (json.loads(row[0]), row[1] and json.loads(row[1]))

  def finish_episode(self, id: str, outcome: Mapping[str, Any]) -> None:
    self._db.fetch_all(
        "UPDATE episodes SET outcome=coalesce(outcome, ?) WHERE id=?",
        *(json.dumps(outcome), id),
    )

  def set_sampler(self, id: str, path: str) -> None:
    """Points a sampling session at another path."""
    self._db.fetch_all("UPDATE samplers SET path=? WHERE id=?", path, id)

  def set_running(self, model: str, running: bool, reason: str) -> None:
    self._db.fetch_all(
        "INSERT OR REPLACE INTO replays VALUES (?, ?, ?)",
        *(model, running, reason),
    )

  def running(self, model: str) -> tuple[bool, str]:
    """Returns whether a replay is training, and if not, why."""
    row = self._db.fetch_one(
        "SELECT running, reason FROM replays WHERE model=?", model
    )
    return (bool(row[0]), row[1]) if row else (False, "not started")

  def running_replays(self) -> list[str]:
    rows = self._db.fetch_all("SELECT model FROM replays WHERE running")
    return [model for (model,) in rows]

  def add_checkpoint(
      self, path: str, model: str, spec: Mapping[str, Any]
  ) -> None:
    self._db.fetch_all(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
        *(path, model, json.dumps(spec), time.time()),
    )

  def drop_checkpoint(self, path: str) -> None:
    self._db.fetch_all("DELETE FROM checkpoints WHERE path=?", path)

  def checkpoint(self, path: str) -> dict[str, Any] | None:
    """Returns the spec of a checkpoint, or None."""
    row = self._db.fetch_one("SELECT spec FROM checkpoints WHERE path=?", path)
    return row and json.loads(row[0])

  def checkpoints_of(self, model: str) -> list[tuple[str, float]]:
    """Returns path and Unix time of a model's checkpoints, oldest first."""
    return self._db.fetch_all(
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
      offset: number of newer rows to skip.
    """
    columns = "path, created_s" if table == "checkpoints" else "id"
    rows = self._db.fetch_all(
        f"SELECT {columns} FROM {table} ORDER BY rowid DESC LIMIT ? OFFSET ?",
        *(limit, offset),
    )
    (count,) = self._db.fetch_one(f"SELECT count(*) FROM {table}")
    return rows, count

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ordered journal of a server: requests that it has promised to do.

A request is in the journal before its client gets its number, and its result
before its client sees it. Both are committed, so that a server that is killed
at any moment goes on: what has no result is done again, in the same order, from
the newest checkpoint of its model. A request is known by its owner, a model or
a sampling session, and its number there (`seq_id`): one that comes again is the
same request.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import json
import time
from typing import Any

from tba_jax.serving import database

# Results kept for clients that ask late; older ones are forgotten.
_KEEP_RESULTS = 20_000


@dataclasses.dataclass(frozen=True)
class ServerRequest:
  """A journaled request.

  id: name by which the client asks for the result.
  owner: model or sampling session that it is for.
  seq: number among the owner's requests.
  kind: name of the operation, as `optim_step`.
  body: JSON as received; None once a checkpoint holds its effect.
  accepted_s: Unix time of its arrival.
  """

  id: str
  owner: str
  seq: int
  kind: str
  body: bytes | None
  accepted_s: float


@dataclasses.dataclass(frozen=True)
class RequestOutcome:
  """RequestOutcome of a request: a result, a failure, or neither yet.

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


class RequestJournal:
  """The requests of a server; every method is for any thread.

  All raise OSError if the file cannot be read or written.
  """

  def __init__(self, db: database.Database):
    self._db = db

  def accept(
      self, id: str, owner: str, seq: int, kind: str, body: bytes
  ) -> tuple[ServerRequest, bool]:
    """Writes a request; returns it, and whether it is new.

    Raises:
      ConflictError: another one has the same owner and number.
    """
    digest = _digest(body)
    now_s = time.time()
    with self._db.transaction():
      row = self._db.fetch_one(
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
        return ServerRequest(id, owner, seq, kind, body, row[2]), False
      self._db.fetch_all(
          "INSERT INTO requests (id, owner, seq, kind, body, digest,"
          " accepted_s) VALUES (?, ?, ?, ?, ?, ?, ?)",
          *(id, owner, seq, kind, body, digest, now_s),
      )
    return ServerRequest(id, owner, seq, kind, body, now_s), True

  def finish(self, outcomes: Mapping[str, bytes | Mapping[str, str]]) -> None:
    """Writes results (bytes) and failures (objects) by request, all or none.

    The body of a sample or forward pass goes: it has no effect that would be
    needed again. The pass keeps its place among its model's requests, an empty
    body, until `drop_bodies`: `next_seq` reads them without a gap.
    """
    with self._db.transaction():
      (newest,) = self._db.fetch_one(
          "SELECT coalesce(max(done), 0) FROM requests"
      )
      for n, (id, outcome) in enumerate(outcomes.items(), newest + 1):
        is_result = isinstance(outcome, bytes)
        self._db.fetch_all(
            "UPDATE requests SET result=?, failure=?, done=?, body=CASE kind"
            " WHEN 'sample' THEN NULL WHEN 'sample_into_replay' THEN NULL"
            " WHEN 'answer' THEN NULL WHEN 'forward' THEN x'' ELSE body END"
            " WHERE id=? AND done IS NULL",
            outcome if is_result else None,
            None if is_result else json.dumps(outcome),
            n,
            id,
        )
      self._db.fetch_all(
          "DELETE FROM requests WHERE done < ? AND body IS NULL",
          newest - _KEEP_RESULTS,
      )

  def same_body(self, owner: str, body: bytes) -> str | None:
    """Returns the newest request with this body that did not fail, or None."""
    row = self._db.fetch_one(
        "SELECT id FROM requests WHERE owner=? AND digest=? AND failure IS NULL"
        " ORDER BY seq DESC LIMIT 1",
        *(owner, _digest(body)),
    )
    return row and row[0]

  def drop_bodies(self, owner: str, seq: int) -> None:
    """Forgets the bodies of an owner's finished requests up to a number."""
    self._db.fetch_all(
        "UPDATE requests SET body=NULL WHERE owner=? AND seq<=? AND done IS"
        " NOT NULL AND body IS NOT NULL",
        *(owner, seq),
    )

  def outcome(self, id: str) -> RequestOutcome | None:
    """Returns the outcome of a request; None for one that is not known."""
    row = self._db.fetch_one(
        "SELECT kind, result, failure FROM requests WHERE id=?", id
    )
    if row is None:
      return None
    return RequestOutcome(row[0], row[1], row[2] and json.loads(row[2]))

  def pending(self) -> list[ServerRequest]:
    """Returns the requests without outcome, in the order of their arrival."""
    return self._requests("done IS NULL ORDER BY number")

  def since(self, owner: str, seq: int) -> Iterator[tuple[ServerRequest, bool]]:
    """Yields an owner's requests after a number, and whether each is done.

    Bodies may be large: one of them is read at a time.
    """
    rows = self._db.fetch_all(
        "SELECT id, done IS NOT NULL FROM requests WHERE owner=? AND seq>?"
        " ORDER BY seq",
        *(owner, seq),
    )
    for id, is_done in rows:
      for request in self._requests("id=?", id):
        yield request, bool(is_done)

  def answered(
      self, owner: str, kind: str
  ) -> list[tuple[ServerRequest, bytes]]:
    """Returns an owner's requests of a kind that have body and result.

    They are in the order of `finish`.
    """
    rows = self._db.fetch_all(
        "SELECT id, owner, seq, kind, body, accepted_s, result FROM requests"
        " WHERE owner=? AND kind=? AND body IS NOT NULL AND result IS NOT"
        " NULL ORDER BY done",
        *(owner, kind),
    )
    return [(ServerRequest(*row[:-1]), row[-1]) for row in rows]

  def next_seq(self, owner: str) -> int:
    """Returns the number after the owner's last done one without a gap."""
    completed = self._db.fetch_all(
        "SELECT seq FROM requests WHERE owner=? AND done IS NOT NULL ORDER BY"
        " seq",
        owner,
    )
    # Old ones may be forgotten: the first that is there follows them.
    expected = completed[0][0] if completed else 0
    for (seq,) in completed:
      if seq != expected:
        break
      expected += 1
    return expected

  def last_seq(self, owner: str) -> int:
    """Returns the highest number of an owner's requests, -1 without any."""
    return self._db.fetch_one(
        "SELECT coalesce(max(seq), -1) FROM requests WHERE owner=?", owner
    )[0]

  def completions(
      self, owner: str, after: int, *, first: int, last: int, limit: int = 1000
  ) -> list[tuple[int, str, bool]]:
    """Returns an owner's requests finished after a place of `finish`.

    Args:
      owner: sequence of requests: a model, a session or a sampler.
      after: place.
      first: lowest number of a request.
      last: highest number.
      limit: most requests.

    Returns:
      Place, id, and whether it failed, by place.
    """
    rows = self._db.fetch_all(
        "SELECT done, id, failure IS NOT NULL FROM requests WHERE owner=? AND"
        " done>? AND seq BETWEEN ? AND ? ORDER BY done LIMIT ?",
        *(owner, after, first, last, limit),
    )
    return [(done, id, bool(failed)) for done, id, failed in rows]

  def results(
      self, owner: str, kind: str, after: int, limit: int
  ) -> list[tuple[int, bytes]]:
    """Returns the newest results of a kind after a number: number, result."""
    rows = self._db.fetch_all(
        "SELECT seq, result FROM requests WHERE owner=? AND kind=? AND seq>?"
        " AND result IS NOT NULL ORDER BY seq DESC LIMIT ?",
        *(owner, kind, after, limit),
    )
    return rows[::-1]

  def last_request_s(self, model: str) -> float:
    """Returns the Unix time of a model's newest request that is not forgotten.

    Without one it is the start of the model's session.
    """
    return self._db.fetch_one(
        "SELECT COALESCE((SELECT MAX(accepted_s) FROM requests WHERE owner=?),"
        " (SELECT created_s FROM sessions JOIN models ON session=sessions.id"
        " WHERE models.id=?))",
        model,
        model,
    )[0]

  def _requests(self, where: str, *values: Any) -> list[ServerRequest]:
    rows = self._db.fetch_all(
        "SELECT id, owner, seq, kind, body, accepted_s FROM requests WHERE "
        + where,
        *values,
    )
    return [ServerRequest(*row) for row in rows]


def _digest(body: bytes) -> str:
  return hashlib.blake2b(body, digest_size=16).hexdigest()

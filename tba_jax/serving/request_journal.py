# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ordered journal of a server: the requests that it has accepted.

A request is committed to the journal before its client gets the id, and a
result before its client sees it. So a server may be killed at any moment:
requests without a result are executed again, in the same order, from the newest
checkpoint of their model. A request is identified by its owner (a model, a
sampling session or an episode) and its number there (`seq_id`): a second
request with the same two is a retry.
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
  owner: model, sampling session or episode of the request.
  seq: number among the owner's requests.
  kind: name of the operation, as `optim_step`.
  body: JSON, or a protocol buffer of a pass; None once it is not needed again.
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
  """Outcome of a request: a result, a failure, or neither yet.

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
  """Persistent requests of a server.

  Every method may be called from any thread, and raises OSError if the file
  cannot be read or written.
  """

  def __init__(self, db: database.Database):
    self._db = db

  def accept(
      self, id: str, owner: str, seq: int, kind: str, body: bytes
  ) -> tuple[ServerRequest, bool]:
    """Journals a request; returns it, and whether it is new.

    Raises:
      ConflictError: another request has the same owner and number.
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
          # Clients do not number these requests.
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

    The body of a sample or forward pass is dropped: it has no effect to repeat.
    A forward pass keeps an empty body, and so its row, until `drop_bodies`:
    `next_seq` needs its model's numbers without a gap.
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
    """Returns the id of the newest request with this body that has not failed.

    Returns None without such a request.
    """
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
    """Returns the outcome of a request; None if the request is unknown."""
    row = self._db.fetch_one(
        "SELECT kind, result, failure FROM requests WHERE id=?", id
    )
    if row is None:
      return None
    return RequestOutcome(row[0], row[1], row[2] and json.loads(row[2]))

  def pending(self) -> list[ServerRequest]:
    """Returns the unfinished requests, in order of arrival."""
    return self._requests("done IS NULL ORDER BY number")

  def since(self, owner: str, seq: int) -> Iterator[tuple[ServerRequest, bool]]:
    """Yields an owner's requests after a number, and whether each is done.

    Bodies may be large, so they are read one at a time.
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
    """Returns an owner's requests of a kind that have a body and a result.

    Requests come in the order in which they finished.
    """
    rows = self._db.fetch_all(
        "SELECT id, owner, seq, kind, body, accepted_s, result FROM requests"
        " WHERE owner=? AND kind=? AND body IS NOT NULL AND result IS NOT"
        " NULL ORDER BY done",
        *(owner, kind),
    )
    return [(ServerRequest(*row[:-1]), row[-1]) for row in rows]

  def next_seq(self, owner: str) -> int:
    """Returns the number after the owner's unbroken run of done requests."""
    completed = self._db.fetch_all(
        "SELECT seq FROM requests WHERE owner=? AND done IS NOT NULL ORDER BY"
        " seq",
        owner,
    )
    # Old requests may be forgotten: the run starts at the oldest that is left.
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
    """Returns an owner's requests finished after a place in finishing order.

    Args:
      owner: model, sampling session or episode.
      first: lowest number of a request.
      last: highest number of a request.
      limit: most requests.

    Returns:
      Place, id, and whether the request failed, in order of places.
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
    """Returns (number, result) of a kind's newest results after a number."""
    rows = self._db.fetch_all(
        "SELECT seq, result FROM requests WHERE owner=? AND kind=? AND seq>?"
        " AND result IS NOT NULL ORDER BY seq DESC LIMIT ?",
        *(owner, kind, after, limit),
    )
    return rows[::-1]

  def last_request_s(self, model: str) -> float:
    """Returns the Unix time of a model's newest request in the journal.

    Without any request it is the start of the model's session.
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The objects of a bucket in memory, as Google Cloud Storage tells of them."""

import base64
import dataclasses
import hashlib
import threading
import time
from typing import Any
from urllib import parse

BUCKET = "bucket"


class Refused(Exception):
  """An answer that is not success."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


@dataclasses.dataclass(frozen=True)
class Object:
  """One object: its bytes, the count of writes it is from, and its times."""

  data: bytes
  generation: int
  updated: float
  content_type: str = "application/octet-stream"


class Objects:
  """The objects of one bucket; what its methods refuse raises `Refused`.

  by_name: a test may read and change it.
  """

  def __init__(self, url: str):
    """Has none yet; `url` is of the server, for links."""
    self.by_name: dict[str, Object] = {}
    self._url = url
    self._lock = threading.Lock()
    self._generation = time.time_ns() // 1000

  def write(self, name: str, data: bytes, query: dict[str, str]) -> Object:
    with self._lock:
      self.check(name, query)
      self._generation += 1
      made = Object(data, self._generation, time.time())
      self.by_name[name] = made
      return made

  def delete(self, name: str, query: dict[str, str]) -> None:
    with self._lock:
      self.get(name)
      self.check(name, query)
      del self.by_name[name]

  def read(self, name: str, query: dict[str, str]) -> Object:
    with self._lock:
      found = self.get(name)
      self.check(name, query)
      return found

  def get(self, name: str) -> Object:
    if name not in self.by_name:
      raise Refused(404, f"No such object: {BUCKET}/{name}")
    return self.by_name[name]

  def check(self, name: str, query: dict[str, str]) -> None:
    """Refuses where a precondition on an object's generation does not hold."""
    there = self.by_name.get(name)
    now = str(there.generation if there else 0)
    if query.get("ifGenerationMatch", now) != now:
      raise Refused(412, "Precondition Failed")
    if query.get("ifGenerationNotMatch") == now:
      raise Refused(304, "Not Modified")
    if "generation" in query and query["generation"] != now:
      raise Refused(404, f"No such generation of {name}")

  def metadata(self, name: str, found: Object) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(found.updated))
    stamp += f".{int(found.updated % 1 * 1000):03d}Z"
    quoted = parse.quote(name, safe="")
    path = f"storage/v1/b/{BUCKET}/o/{quoted}"
    return {
        "kind": "storage#object",
        "id": f"{BUCKET}/{name}/{found.generation}",
        "name": name,
        "bucket": BUCKET,
        "size": str(len(found.data)),
        "generation": str(found.generation),
        "metageneration": "1",
        "contentType": found.content_type,
        "timeCreated": stamp,
        "updated": stamp,
        "storageClass": "STANDARD",
        "selfLink": f"{self._url}/{path}",
        "mediaLink": f"{self._url}/download/{path}?alt=media",
        "md5Hash": base64.b64encode(hashlib.md5(found.data).digest()).decode(),
        "etag": str(found.generation),
    }

  def list(self, query: dict[str, str]) -> dict[str, Any]:
    """Answers a list: items, and prefixes up to the delimiter, by pages."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    first, end = query.get("startOffset", ""), query.get("endOffset")
    entries: dict[str, dict[str, Any] | None] = {}
    with self._lock:
      objects = dict(self.by_name)
    for name, found in objects.items():
      if not name.startswith(prefix) or name < first or (end and name >= end):
        continue
      cut = name.find(delimiter, len(prefix)) if delimiter else -1
      if cut >= 0:
        entries[name[: cut + len(delimiter)]] = None
      else:
        entries[name] = self.metadata(name, found)
    names = sorted(n for n in entries if n > query.get("pageToken", ""))
    page = names[: int(query.get("maxResults", 1000))]
    answer: dict[str, Any] = {"kind": "storage#objects"}
    if items := [entries[n] for n in page if entries[n]]:
      answer["items"] = items
    if prefixes := [n for n in page if not entries[n]]:
      answer["prefixes"] = prefixes
    if len(page) < len(names):
      answer["nextPageToken"] = page[-1]
    return answer

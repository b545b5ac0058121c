# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A bucket of Google Cloud Storage in memory, served over HTTP.

Implements the part of the JSON API that gcsfs, google-cloud-storage and
TensorStore use: media, multipart and resumable uploads, range reads, lists,
rewrites, deletes (also in batches), and generation preconditions. Other
requests fail with status 501.
"""

import base64
import dataclasses
import email.parser
import email.policy
import hashlib
import http.server
import json
import re
import threading
import time
from typing import Any
from urllib import parse

BUCKET = "bucket"
_OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_OBJECTS = re.compile(r"/(?:upload/)?storage/v1/b/([^/]+)/o/?")
_COPY = re.compile(
    r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:copyTo|rewriteTo)/b/([^/]+)/o/([^/]+)"
)
_MOVE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)")


class Refused(Exception):
  """Error response."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


@dataclasses.dataclass(frozen=True)
class Object:
  """One object; `generation` counts all writes."""

  data: bytes
  generation: int
  updated: float
  content_type: str = "application/octet-stream"


class Objects:
  """The objects of one bucket; tests may read and change `by_name`."""

  def __init__(self, url: str):
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
      result = self.get(name)
      self.check(name, query)
      return result

  def get(self, name: str) -> Object:
    if name not in self.by_name:
      raise Refused(404, f"No such object: {BUCKET}/{name}")
    return self.by_name[name]

  def check(self, name: str, query: dict[str, str]) -> None:
    """Raises `Refused` unless the preconditions on the generation hold."""
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
    """Returns a page of items, and of prefixes up to the delimiter."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    first, end = query.get("startOffset", ""), query.get("endOffset")
    entries: dict[str, dict[str, Any] | None] = {}
    with self._lock:
      objects = dict(self.by_name)
    for name, result in objects.items():
      if not name.startswith(prefix) or name < first or (end and name >= end):
        continue
      cut = name.find(delimiter, len(prefix)) if delimiter else -1
      if cut >= 0:
        entries[name[: cut + len(delimiter)]] = None
      else:
        entries[name] = self.metadata(name, result)
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


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def handle_error(self, request: Any, client_address: Any) -> None:
    pass  # The client was killed or closed the connection.


class FakeGcs:
  """The server of one bucket.

  store: objects of the bucket.
  requests: (method, path) of all requests so far.
  """

  def __init__(self) -> None:
    self.requests: list[tuple[str, str]] = []
    self.uploads: dict[str, tuple[str, dict[str, str], bytearray]] = {}
    handler = type("Handler", (_Handler,), {"fake": self})
    self._server = _Server(("127.0.0.1", 0), handler)
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    self.store = Objects(self.url)
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()

  def environment(self) -> dict[str, str]:
    """Returns environment variables that direct a process to this server."""
    return {
        "STORAGE_EMULATOR_HOST": self.url,
        "TENSORSTORE_GCS_HTTP_URL": self.url,
        # Prevents requests for credentials.
        "FSSPEC_GCS_TOKEN": "anon",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers the requests of a connection."""

  fake: FakeGcs
  protocol_version = "HTTP/1.1"
  # Nagle's algorithm would delay the second of two packets by 40 ms.
  disable_nagle_algorithm = True

  def log_message(self, format: str, *args: Any) -> None:
    pass

  def do_GET(self) -> None:
    self._answer_safely(self._get)

  def do_POST(self) -> None:
    self._answer_safely(self._post)

  def do_PUT(self) -> None:
    self._answer_safely(self._post)

  def do_DELETE(self) -> None:
    self._answer_safely(self._delete)

  def _answer_safely(self, act: Any) -> None:
    url = parse.urlsplit(self.path)
    self._path = url.path
    self._query = dict(parse.parse_qsl(url.query, keep_blank_values=True))
    self.fake.requests.append((self.command, self.path))
    self._body = self._read_body()
    try:
      act()
    except Refused as refused:
      error = {"code": refused.status, "message": str(refused)}
      body = {} if refused.status == 304 else {"error": error}
      self._answer(body, refused.status)

  def _read_body(self) -> bytes:
    if self.headers.get("Transfer-Encoding") == "chunked":
      parts = []
      while size := int(self.rfile.readline().split(b";")[0], 16):
        parts.append(self.rfile.read(size))
        self.rfile.readline()
      self.rfile.readline()
      return b"".join(parts)
    return self.rfile.read(int(self.headers.get("Content-Length") or 0))

  def _answer(
      self, body: Any, status: int = 200, headers: Any = (), kind: str = ""
  ) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if status in (204, 304):
      data = b""
    self.send_response(status)
    self.send_header("Content-Type", kind or "application/json")
    for name, value in headers:
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def _match(self, pattern: re.Pattern[str]) -> list[str] | None:
    """Returns the pattern's groups in this bucket's path, else None."""
    result = pattern.fullmatch(self._path)
    if result is None:
      return None
    parts = [parse.unquote(part) for part in result.groups()]
    if parts[0] != BUCKET:
      raise Refused(404, f"The specified bucket does not exist: {parts[0]}")
    return parts

  def _get(self) -> None:
    if result := self._match(_OBJECT):
      name, fake = result[1], self.fake
      there = fake.store.read(name, self._query)
      if self._query.get("alt") == "media":
        self._send_data(there)
      else:
        self._answer(fake.store.metadata(name, there))
    elif self._match(_OBJECTS):
      self._answer(self.fake.store.list(self._query))
    elif self._match(re.compile("/storage/v1/b/([^/]+)")):
      self._answer({"kind": "storage#bucket", "name": BUCKET})
    else:
      raise Refused(501, f"not in this fake: GET {self.path}")

  def _send_data(self, found: Object) -> None:
    size, headers = len(found.data), []
    first, last, status = 0, size - 1, 200
    expected = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
    if expected:
      if expected[1]:
        first, last = int(expected[1]), min(int(expected[2] or last), last)
      else:
        first = max(0, size - int(expected[2]))
      if first > last:
        raise Refused(416, "Request range not satisfiable")
      status = 206
      headers.append(("Content-Range", f"bytes {first}-{last}/{size}"))
    digest = base64.b64encode(hashlib.md5(found.data).digest()).decode()
    headers += [
        ("X-Goog-Generation", str(found.generation)),
        ("X-Goog-Hash", f"md5={digest}"),
    ]
    self._answer(
        found.data[first : last + 1], status, headers, found.content_type
    )

  def _post(self) -> None:
    if "upload_id" in self._query:
      self._resume(self._query["upload_id"])
    elif self._path.startswith("/upload/") and self._match(_OBJECTS):
      self._upload()
    elif result := self._match(_COPY):
      _, source, bucket, target = result
      if bucket != BUCKET:
        raise Refused(404, f"The specified bucket does not exist: {bucket}")
      made = self.fake.store.write(
          target, self.fake.store.get(source).data, self._query
      )
      resource = self.fake.store.metadata(target, made)
      done = {"kind": "storage#rewriteResponse", "done": True}
      rewrites = "/rewriteTo/" in self._path
      self._answer({**done, "resource": resource} if rewrites else resource)
    elif result := self._match(_MOVE):
      _, source, target = result
      made = self.fake.store.write(
          target, self.fake.store.get(source).data, self._query
      )
      self.fake.store.delete(source, {})
      self._answer(self.fake.store.metadata(target, made))
    elif self._path.startswith("/batch/storage/v1"):
      self._batch()
    else:
      raise Refused(501, f"not in this fake: {self.command} {self.path}")

  def _upload(self) -> None:
    kind, name = self._query.get("uploadType"), self._query.get("name")
    if kind == "media":
      self._written(name, self._body, self._query)
    elif kind == "multipart":
      described, data = self._parts()
      self._written(name or described["name"], data, self._query)
    elif kind == "resumable":
      described = json.loads(self._body or b"{}")
      upload = f"u{len(self.fake.uploads)}"
      name = name or described["name"]
      self.fake.store.check(name, self._query)
      self.fake.uploads[upload] = name, self._query, bytearray()
      place = f"{self.fake.url}{self._path}?upload_id={upload}"
      self._answer({}, headers=[("Location", place)])
    else:
      raise Refused(501, f"not in this fake: uploadType={kind}")

  def _resume(self, upload: str) -> None:
    name, query, data = self.fake.uploads[upload]
    place = self.headers.get("Content-Range", "bytes 0-/*")
    first, total = re.match(r"bytes (?:(\d+)-\d*|\*)/(\d+|\*)", place).groups()
    if first is not None and int(first) == len(data):
      data += self._body
    if total == "*" or len(data) < int(total):
      have = [("Range", f"bytes=0-{len(data) - 1}")] if data else []
      self._answer({}, 308, have)
    else:
      self._written(name, bytes(data), query)

  def _written(self, name: str, data: bytes, query: dict[str, str]) -> None:
    made = self.fake.store.write(name, data, query)
    self._answer(self.fake.store.metadata(name, made))

  def _parts(self) -> tuple[dict[str, Any], bytes]:
    """Returns the two parts of a multipart upload, the second unchanged."""
    kind = self.headers["Content-Type"]
    boundary = re.search('boundary="?([^";]+)"?', kind)[1].encode()
    _, described, data = self._body.split(b"--" + boundary)[:3]
    # The data may contain the boundary.
    rest = self._body[self._body.index(described) + len(described) :]
    data = rest[len(b"--" + boundary) : rest.rindex(b"--" + boundary)]
    cut = re.compile(rb"\r?\n\r?\n")
    text = cut.split(described, maxsplit=1)[1]
    data = re.sub(rb"\r?\n\Z", b"", cut.split(data, maxsplit=1)[1])
    return json.loads(text), data

  def _batch(self) -> None:
    """Answers a batch of deletes."""
    kind = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
    parser = email.parser.BytesParser(policy=email.policy.compat32)
    answers = []
    for part in parser.parsebytes(kind + self._body).get_payload():
      line = part.get_payload().strip().splitlines()[0]
      method, target, _ = line.split(" ")
      url = parse.urlsplit(target)
      name = parse.unquote(_OBJECT.fullmatch(url.path)[2])
      if method != "DELETE":
        raise Refused(501, f"not in this fake: {method} in a batch")
      try:
        self.fake.store.delete(name, dict(parse.parse_qsl(url.query)))
        status, text = "204 No Content", ""
      except Refused as refused:
        error = {"code": refused.status, "message": str(refused)}
        status = f"{refused.status} Refused"
        text = json.dumps({"error": error})
      answers.append(
          "Content-Type: application/http\r\n\r\n"
          f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}\r\n"
      )
    body = "".join(f"--batch_fake\r\n{answer}" for answer in answers)
    self._answer(
        f"{body}--batch_fake--".encode(),
        kind="multipart/mixed; boundary=batch_fake",
    )

  def _delete(self) -> None:
    if "upload_id" in self._query:
      self.fake.uploads.pop(self._query["upload_id"], None)
      self._answer({}, 499)
    elif result := self._match(_OBJECT):
      self.fake.store.delete(result[1], self._query)
      self._answer({}, 204)
    else:
      raise Refused(501, f"not in this fake: DELETE {self.path}")

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A local Hugging Face hub of models, for `HF_ENDPOINT`.

Implements the requests with which `huggingface_hub` creates a repository,
commits small files and downloads a snapshot, without the hub's errors and large
files.
"""

import base64
import http.server
import json
import threading
import urllib.parse

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
  """A hub that serves until `close`.

  url: address of the hub.
  models: content by path of each model, ORG/NAME.
  tokens: access tokens of the requests.
  """

  def __init__(self):
    self.models: dict[str, dict[str, bytes]] = {}
    self.tokens: list[str | None] = []
    handler = type("Handler", (_Handler,), {"hub": self})
    self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
    self._thread = threading.Thread(target=self._http.serve_forever)
    self._thread.start()

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()
    self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
  hub: FakeHub

  def log_message(self, *arguments):
    """Keeps the output of tests clean."""

  def _send(self, status, body=b"", **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def _json(self, value, status=200):
    body = json.dumps(value).encode()
    self._send(status, body, Content_Type="application/json")

  def _missing(self):
    self._send(404, b"{}", X_Error_Code="RepoNotFound")

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    parts = urllib.parse.urlparse(self.path).path.strip("/").split("/")
    if parts[:2] == ["api", "models"]:
      files = self.hub.models.get("/".join(parts[2:4]))
      if files is None:
        return self._missing()
      names = [{"rfilename": name, "size": len(files[name])} for name in files]
      name = "/".join(parts[2:4])
      if parts[4:5] == ["tree"]:
        return self._json(
            [
                {"type": "file", "path": n, "size": len(files[n]), "oid": "0"}
                for n in files
            ]
        )
      return self._json({"id": name, "sha": _COMMIT, "siblings": names})
    repo, name = "/".join(parts[:2]), "/".join(parts[4:])
    files = self.hub.models.get(repo)
    if parts[2:3] != ["resolve"] or files is None or name not in files:
      return self._missing()
    return self._send(200, files[name], ETag=f'"{name}"', X_Repo_Commit=_COMMIT)

  def do_POST(self):
    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    self.hub.tokens.append(self.headers.get("Authorization"))
    path = urllib.parse.urlparse(self.path).path
    if path == "/api/repos/create":
      asked = json.loads(body)
      name = f"{asked.get('organization') or 'me'}/{asked['name']}"
      self.hub.models.setdefault(name, {})
      return self._json({"url": f"{self.hub.url}/{name}", "name": name})
    parts = path.strip("/").split("/")
    files = self.hub.models.get("/".join(parts[2:4]))
    if files is None:
      return self._missing()
    if parts[4] == "preupload":
      asked = json.loads(body)["files"]
      return self._json(
          {
              "files": [
                  {
                      "path": f["path"],
                      "uploadMode": "regular",
                      "shouldIgnore": False,
                  }
                  for f in asked
              ]
          }
      )
    if parts[4] == "commit":
      for line in body.decode().splitlines():
        item = json.loads(line)
        if item["key"] == "file":
          value = item["value"]
          files[value["path"]] = base64.b64decode(value["content"])
      url = f"{self.hub.url}/{'/'.join(parts[2:4])}/commit/{_COMMIT}"
      return self._json({"success": True, "commitOid": _COMMIT,
                         "commitUrl": url, "hookOutput": ""})  # fmt: skip
    return self._missing()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a client finds the store: the file in which its host announces it."""

import dataclasses
import json
import os
import pathlib
import socket
from typing import Any

FILE_NAME = "locator.json"

# Under this key a service says which one it is; a client compares that with
# the locator before it trusts an address.
IDENTITY_KEY = "meta/store"


@dataclasses.dataclass(frozen=True)
class Locator:
  """What the store's host announces.

  run: id of the run.
  generation: number of the store generation.
  address: "unix:/path" or "host:port".
  pid: process id of the service.
  """

  run: str
  generation: int
  address: str
  pid: int

  def __str__(self) -> str:
    return (
        f"key-value store of run {self.run!r}, generation {self.generation},"
        f" at {self.address} (process {self.pid})"
    )


@dataclasses.dataclass(frozen=True)
class Tls:
  """Files (PEM) by which store and clients know each other: mutual TLS.

  cert_file, key_file: of this host.
  ca_file: of the authority that both sides trust.
  """

  cert_file: str
  key_file: str
  ca_file: str


def identity(run_id: str, generation: int) -> bytes:
  """Returns the value of `IDENTITY_KEY` in that generation of that run."""
  return json.dumps({"run": run_id, "generation": generation}).encode()


def read(path: str | os.PathLike[str]) -> Locator | None:
  """Returns the locator in `path`; None where there is no file.

  Raises:
    ValueError: the file holds something else.
  """
  try:
    text = pathlib.Path(path).read_text()
  except FileNotFoundError:
    return None
  try:
    fields = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{path} is no store locator: {error}") from error
  return from_dict(fields, path)


def from_dict(fields: Any, source: str | os.PathLike[str]) -> Locator:
  """Returns the locator of parsed fields.

  Raises:
    ValueError: they are something else; `source` is named.
  """
  try:
    locator = Locator(**fields)
  except TypeError as error:
    raise ValueError(f"{source} is no store locator: {error}") from error
  for field in dataclasses.fields(Locator):
    value = getattr(locator, field.name)
    if type(value) is not field.type:
      raise ValueError(f"{source} is no store locator: {field.name}={value!r}")
  return locator


def write(path: str | os.PathLike[str], locator: Locator) -> None:
  """Replaces the file at `path`; a reader sees the old or the new one."""
  write_atomically(path, json.dumps(dataclasses.asdict(locator)))


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
  """Replaces the file at `path` by one that holds `text`."""
  path = pathlib.Path(path)
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  temporary.write_text(text)
  os.replace(temporary, path)


def accepts(address: str, wait_s: float) -> bool:
  """Returns whether something listens at `address`; tries for `wait_s`."""
  try:
    if address.startswith("unix:"):
      with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(wait_s)
        probe.connect(address.removeprefix("unix:"))
    else:
      host, _, port = address.rpartition(":")
      target = (host.strip("[]"), int(port))
      socket.create_connection(target, timeout=wait_s).close()
  except OSError:
    return False
  return True

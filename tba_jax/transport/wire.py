# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wire format: a JSON header and arrays as authenticated safetensors bytes.

A message, all numbers little-endian:

    offset  0  4 bytes      magic, b"TBAJ"
    offset  4  uint16       schema version
    offset  6  uint16       zero
    offset  8  uint64       bytes of the safetensors part
    offset 16  32 bytes     BLAKE2b of all other bytes, keyed with the secret
    offset 48  safetensors  arrays by name; metadata {"header": JSON text}

Before verifying the keyed hash, a reader trusts nothing but the length. The
hash proves that a process of this run wrote the message, not when or under
which key: where that matters, the message's header states it.
"""

from collections.abc import Callable, Mapping
import hashlib
import hmac
import json
import math
import os
import pathlib
import secrets
import stat
import struct
import time
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from tba_jax.system import jsonl
from tba_jax.system import processes

MAGIC = b"TBAJ"
SCHEMA = 2
# Environment variable: the secret in hexadecimal, for hosts without its file.
SECRET_VARIABLE = "TBA_JAX_SECRET"
SECRET_BYTES = 32
# Shortest time between two events of messages refused for the same reason.
_REFUSAL_EVENT_S = 60.0

PREFIX = struct.Struct("<4sHHQ")
_DIGEST_BYTES = 32
BODY_START = PREFIX.size + _DIGEST_BYTES
_METADATA = "__metadata__"  # Name that safetensors reserves.
DTYPES = frozenset(
    "bool float16 float32 float64 int8 int16 int32 int64"
    " uint8 uint16 uint32 uint64".split()
)


class WireError(ValueError):
  """Invalid message.

  reason: "truncated" (shorter than declared), "length" (longer), "magic",
    "schema" (another version), "hash" (modified, or another secret), "header"
    (JSON text) or "array" (safetensors part: names, dtypes, shapes or sizes).
  """

  def __init__(self, reason: str, message: str):
    super().__init__(f"wire message refused ({reason}): {message}")
    self.reason = reason


class RunIdentity(NamedTuple):
  """Fields of `run_directory.RunInfo` that messages and their files need.

  secret: key of the message hashes.
  workdir: directory of this process; holds the trainer's journal in `replay/`,
    or a searcher's lease in `leases/`. None = keep no lease.
  """

  run_id: str
  secret: bytes
  workdir: pathlib.Path | None = None


class Refusals:
  """Counts refused messages; logs one event a minute for each reason."""

  def __init__(
      self,
      on_event: Callable[[str, str], None],
      clock: Callable[[], float] = time.monotonic,
      kind: str = "refused_message",
  ):
    self.count = 0
    self._on_event = on_event
    self._clock = clock
    self._kind = kind
    self._due_at: dict[str, float] = {}
    self._unlogged: dict[str, int] = {}

  def add(self, key: str, error: WireError) -> None:
    """Counts the message under `key`, refused for `error`."""
    self.count += 1
    reason, now = error.reason, self._clock()
    if now < self._due_at.get(reason, -math.inf):
      self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
      return
    self._due_at[reason] = now + _REFUSAL_EVENT_S
    num_unlogged = self._unlogged.pop(reason, 0)
    more = (
        f" ({num_unlogged} more since the last event)" if num_unlogged else ""
    )
    self._on_event(self._kind, f"{key[:200]}: {str(error)[:500]}{more}")


def encode(
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    secret: bytes,
) -> bytes:
  """Returns a message.

  Args:
    header: JSON types with string keys.
    arrays: bool, int, uint or float, by name.
    secret: key of the hash, 16 to 64 bytes.

  Raises:
    ValueError: a name, a dtype or the length of the secret is not allowed.
    TypeError: `header` is not JSON.
  """
  tensors = {n: np.asarray(array, order="C") for n, array in arrays.items()}
  for name, array in tensors.items():
    if name == _METADATA:
      raise ValueError(f"an array is named {name!r}: must have another name")
    if array.dtype.name not in DTYPES:
      raise ValueError(
          f"array {name!r} has dtype {array.dtype}; must be one of"
          f" {sorted(DTYPES)}"
      )
  text = json.dumps(dict(header), separators=(",", ":"))
  body = safetensors.numpy.save(tensors, {"header": text})
  prefix = PREFIX.pack(MAGIC, SCHEMA, 0, len(body))
  return b"".join((prefix, message_digest(prefix, body, secret), body))


def decode(
    data: bytes, secret: bytes
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of a message; arrays are read-only copies.

  Raises:
    WireError: `data` is not a valid message under this secret.
  """
  prefix, digest, body = _open_envelope(data)
  if not hmac.compare_digest(message_digest(prefix, body, secret), digest):
    raise WireError("hash", "modified, or another run's secret")
  return _read_body(body)


def decode_unverified(
    data: bytes,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns what `decode` does, for an audit without the secret."""
  return _read_body(_open_envelope(data)[2])


def encode_message(message: Mapping[str, Any], secret: bytes) -> bytes:
  """Returns a message without arrays."""
  return encode(message, {}, secret)


def decode_message(
    data: bytes, secret: bytes, schema: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the fields of a message without arrays.

  Args:
    data: result of `encode_message`.
    schema: types of the fields, see `jsonl.schema_error`.

  Raises:
    WireError: `decode` fails, or the fields do not match the schema.
  """
  header, arrays = decode(data, secret)
  if arrays:
    raise WireError("array", "unexpected arrays")
  if error := jsonl.schema_error(header, schema or {}):
    raise WireError("header", error)
  return header


def decode_placed(
    data: bytes,
    secret: bytes,
    run_id: str,
    key: str,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns the fields of a message whose `run` and `key` must match.

  Raises:
    WireError: `decode_message` fails, or the message has another run or key.
  """
  message = decode_message(data, secret, schema)
  check_place(message, run_id, key)
  return message


def check_place(header: Mapping[str, Any], run_id: str, key: str) -> None:
  """Raises WireError unless a message's `run` and `key` match."""
  for name, expected in (("run", run_id), ("key", key)):
    if header.get(name) != expected:
      raise WireError("header", f"{name} is {header.get(name)!r}")


def load_or_make_secret(path: str | os.PathLike[str]) -> bytes:
  """Returns the run's secret; creates the file with mode 0600 if missing.

  Processes that start together get the same secret.

  Raises:
    ValueError: the file is not a regular file of this user or of root, is
      accessible to others, or does not have `SECRET_BYTES` bytes.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    raise ValueError(f"secret file {path}: must be a file of this user")
  if not os.path.lexists(path):
    _make_secret(path)
  fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  with os.fdopen(fd, "rb") as file:
    info = os.fstat(file.fileno())
    user = os.geteuid()
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (user, 0):
      raise ValueError(f"secret file {path}: must be a file of this user")
    # A secret mounted by Kubernetes is owned by root and readable by the user's
    # group.
    forbidden = 0o077 if info.st_uid == user else 0o037
    if info.st_mode & forbidden:
      raise ValueError(
          f"secret file {path} has mode {stat.S_IMODE(info.st_mode):04o};"
          " must be 0600 (only its owner may read it)"
      )
    secret = file.read(SECRET_BYTES + 1)
  if len(secret) != SECRET_BYTES:
    raise ValueError(f"secret file {path}: must have {SECRET_BYTES} bytes")
  return secret


def _make_secret(path: pathlib.Path) -> None:
  temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
  fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with processes.naming(path), os.fdopen(fd, "wb") as file:
      file.write(secrets.token_bytes(SECRET_BYTES))
      file.flush()
      os.fsync(file.fileno())
    # Unlike a rename, a link never replaces another process's secret.
    try:
      os.link(temporary, path)
    except FileExistsError:
      pass
  finally:
    os.unlink(temporary)


def message_digest(prefix: bytes, body: bytes, secret: bytes) -> bytes:
  if not 16 <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
    raise ValueError(f"wire secret has {len(secret)} bytes; must have 16 to 64")
  state = hashlib.blake2b(prefix, digest_size=_DIGEST_BYTES, key=secret)
  state.update(body)
  return state.digest()


def _open_envelope(data: bytes) -> tuple[bytes, bytes, bytes]:
  """Returns prefix, digest and safetensors part of a message."""
  if len(data) < BODY_START:
    raise WireError("truncated", f"{len(data)} bytes are less than a prefix")
  magic, schema, _, num_bytes = PREFIX.unpack_from(data)
  if magic != MAGIC:
    raise WireError("magic", f"begins with {bytes(magic)!r}, not {MAGIC!r}")
  if schema != SCHEMA:
    raise WireError(
        "schema", f"schema {schema}; this program reads schema {SCHEMA}"
    )
  if (size := len(data) - BODY_START) != num_bytes:
    reason = "truncated" if size < num_bytes else "length"
    raise WireError(reason, f"{size} bytes of {num_bytes} declared")
  prefix, digest = data[: PREFIX.size], data[PREFIX.size : BODY_START]
  return bytes(prefix), bytes(digest), bytes(data[BODY_START:])


def _read_body(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of a safetensors part."""
  try:
    arrays = safetensors.numpy.load(body)
  except (
      *(safetensors.SafetensorError, KeyError),  # A dtype that NumPy lacks.
      *(ValueError, OverflowError),  # A shape, such as (0, 2**62, 8).
  ) as error:
    raise WireError("array", f"safetensors part: {error!r}") from error
  for name, array in arrays.items():
    if array.dtype.name not in DTYPES:
      raise WireError("array", f"{name!r} has dtype {array.dtype}")
    # A bool is one byte, 0 or 1.
    if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
      raise WireError("array", f"{name!r} has bytes that are not bool")
    array.flags.writeable = False
  (size,) = struct.unpack_from("<Q", body)
  try:
    table = json.loads(body[8 : 8 + size])
    header = json.loads(table[_METADATA]["header"])
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise WireError("header", f"JSON text: {error!r}") from error
  if not isinstance(header, dict):
    raise WireError("header", f"header is a {type(header).__name__}")
  return header, arrays

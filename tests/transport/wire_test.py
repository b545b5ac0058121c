# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import hashlib
import json
import os
import pathlib
import stat
import struct
import tempfile
import threading
import time
import tracemalloc
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import safetensors

from tba_jax.transport import wire

SECRET = bytes(range(32))
HEADER = {"run": "r", "seq": 2**70, "share": 0.25, "none": None, "text": "é/\0"}


def example_arrays() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
      "tokens": rng.integers(0, 99, (3, 5)).astype(np.int32),
      "logprobs": rng.normal(size=(3, 5)).astype(np.float32),
      "stopped": np.array([True, False, True]),
      "empty": np.zeros((0, 4), np.float64),
      "scalar": np.array(7, np.uint16),
  }


def seal(body: bytes) -> bytes:
  """Returns a message of any safetensors part with a valid hash."""
  prefix = wire.PREFIX.pack(wire.MAGIC, wire.SCHEMA, 0, len(body))
  return prefix + wire.message_digest(prefix, body, SECRET) + body


def forge(table: object, arrays: bytes = b"") -> bytes:
  """Returns a message of any table and arrays with a valid hash."""
  text = table if isinstance(table, bytes) else json.dumps(table).encode()
  return seal(struct.pack("<Q", len(text)) + text + arrays)


def table(text: str = "{}", **entries: tuple[str, list, int, int]) -> object:
  """Returns a table of (dtype, shape, begin, end) of each array."""
  rows = {
      name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
      for name, (dtype, shape, begin, end) in entries.items()
  }
  return {"__metadata__": {"header": text}, **rows}


class RoundTripTest(parameterized.TestCase):

  def test_header_and_arrays(self):
    arrays = example_arrays()
    header, decoded = wire.decode(wire.encode(HEADER, arrays, SECRET), SECRET)
    self.assertEqual(header, HEADER)
    self.assertEqual(set(decoded), set(arrays))
    for name, array in arrays.items():
      self.assertEqual(decoded[name].dtype, array.dtype)
      np.testing.assert_array_equal(decoded[name], array)
      self.assertFalse(decoded[name].flags.writeable)
      self.assertTrue(decoded[name].flags.aligned)

  def test_arrays_do_not_keep_message(self):
    data = bytearray(wire.encode({}, {"x": np.ones(3)}, SECRET))
    _, decoded = wire.decode(data, SECRET)
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(decoded["x"], np.ones(3))

  def test_allowed_dtypes(self):
    arrays = {name: np.arange(7).astype(name) for name in wire.DTYPES}
    _, decoded = wire.decode(wire.encode({}, arrays, SECRET), SECRET)
    for name, array in arrays.items():
      self.assertEqual(decoded[name].dtype, array.dtype)
      np.testing.assert_array_equal(decoded[name], array)

  def test_any_layout_in_memory(self):
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for array in (base.T, base[::2, ::-1], np.asfortranarray(base)):
      _, decoded = wire.decode(wire.encode({}, {"x": array}, SECRET), SECRET)
      np.testing.assert_array_equal(decoded["x"], array)
    swapped = base.astype(">i4")
    self.assertEqual(
        wire.encode({}, {"x": swapped}, SECRET),
        wire.encode({}, {"x": base}, SECRET),
    )

  def test_bytes_are_documented_format(self):
    x = np.array([1, -1], np.int16)
    data = wire.encode({"a": 1}, {"x": x}, SECRET)
    self.assertEqual(data[:8], b"TBAJ\x02\x00\x00\x00")
    self.assertEqual(int.from_bytes(data[8:16], "little"), len(data) - 48)
    digest = hashlib.blake2b(
        data[:16] + data[48:], digest_size=32, key=SECRET
    ).digest()
    self.assertEqual(data[16:48], digest)
    path = pathlib.Path(self.create_tempfile().full_path)
    path.write_bytes(data[48:])
    with safetensors.safe_open(path, framework="np") as file:
      self.assertEqual(file.metadata(), {"header": '{"a":1}'})
      np.testing.assert_array_equal(file.get_tensor("x"), x)
      self.assertEqual(list(file.keys()), ["x"])

  def test_messages(self):
    message = {"sid": "a", "seq": [1, 2], "deep": {"x": None}}
    data = wire.encode_message(message, SECRET)
    self.assertEqual(wire.decode_message(data, SECRET), message)
    group = wire.encode(message, {"x": np.zeros(1)}, SECRET)
    with self.assertRaises(wire.WireError) as caught:
      wire.decode_message(group, SECRET)
    self.assertEqual(caught.exception.reason, "array")

  def test_invalid_input_is_not_encoded(self):
    for array in (
        np.array(["text"]),
        np.array([object()]),
        np.array([1j]),
        np.zeros(2, [("a", np.int32)]),
        np.zeros(2, jnp.bfloat16),
    ):
      with self.assertRaisesRegex(ValueError, "'x' has dtype"):
        wire.encode({}, {"x": array}, SECRET)
    with self.assertRaisesRegex(ValueError, "'__metadata__'.* another name"):
      wire.encode({}, {"__metadata__": np.zeros(1)}, SECRET)
    with self.assertRaises(TypeError):
      wire.encode({"x": np.float32(1)}, {}, SECRET)
    for length in (0, 15, 65):
      with self.assertRaisesRegex(ValueError, f"has {length} bytes"):
        wire.encode({}, {}, bytes(length))


class RefusalTest(parameterized.TestCase):

  def assert_refused(self, data, reason, secret=SECRET):
    with self.assertRaises(wire.WireError) as caught:
      wire.decode(data, secret)
    self.assertEqual(caught.exception.reason, reason, str(caught.exception))

  def test_another_secret(self):
    data = wire.encode(HEADER, example_arrays(), SECRET)
    self.assert_refused(data, "hash", bytes(32))

  def test_flipped_bytes(self):
    data = wire.encode(HEADER, example_arrays(), SECRET)
    rng = np.random.default_rng(0)
    regions = {"magic": 4, "schema": 6, "prefix": 16, "hash": 48}
    for offset in range(len(data)):
      changed = bytearray(data)
      changed[offset] ^= int(rng.integers(1, 256))
      with self.assertRaises(wire.WireError, msg=f"offset {offset}") as caught:
        wire.decode(bytes(changed), SECRET)
      reason = caught.exception.reason
      if offset < regions["magic"]:
        self.assertEqual(reason, "magic")
      elif offset < regions["schema"]:
        self.assertEqual(reason, "schema")
      elif 8 <= offset < regions["prefix"]:
        self.assertIn(reason, ("truncated", "length"))
      else:
        self.assertEqual(reason, "hash")

  def test_truncated_and_extended_messages(self):
    data = wire.encode(HEADER, example_arrays(), SECRET)
    for length in range(len(data)):
      self.assert_refused(data[:length], "truncated")
    self.assert_refused(data + b"\0", "length")

  def test_audit_reads_without_secret(self):
    data = wire.encode(HEADER, {"x": np.ones(3)}, SECRET)
    header, arrays = wire.decode_unverified(data)
    self.assertEqual(header, HEADER)
    np.testing.assert_array_equal(arrays["x"], np.ones(3))
    for wrong in (data[:-1], data + b"\0", seal(b""), b""):
      with self.assertRaises(wire.WireError):
        wire.decode_unverified(wrong)

  def test_newer_schema(self):
    data = bytearray(wire.encode({}, {}, SECRET))
    data[4:6] = (wire.SCHEMA + 1).to_bytes(2, "little")
    with self.assertRaisesRegex(wire.WireError, "schema 3; .* reads schema 2"):
      wire.decode(bytes(data), SECRET)

  @parameterized.named_parameters(
      ("not_json", b"\xff{"),
      ("deep", b"[" * 100_000),
      ("no_object", [1]),
      ("no_offsets", table() | {"x": {"dtype": "I8", "shape": [8]}}),
      ("object", table(x=("O", [1], 0, 8))),
      ("bfloat16", table(x=("BF16", [4], 0, 8))),
      ("complex", table(x=("C64", [1], 0, 8))),
      ("half_bytes", table(x=("F4", [16], 0, 8))),
      ("too_long", table(x=("I8", [9], 0, 9))),
      ("beyond_its_bytes", table(x=("I8", [9], 0, 8))),
      ("overflow", table(x=("I8", [2**62, 4], 0, 8))),
      ("huge", table(x=("I8", [2**70], 0, 8))),
      ("axes", table(x=("I8", [1] * 65 + [8], 0, 8))),
      ("negative", table(x=("I8", [-8], 0, 8))),
      ("float", table(x=("I8", [8.0], 0, 8))),
      ("truth", table(x=("I64", [True], 0, 8))),
      ("left_over", table(x=("I8", [7], 0, 7))),
      ("not_bool", table(x=("BOOL", [8], 0, 8))),
      (
          "overlap",
          table(x=("I8", [8], 0, 8), y=("I8", [8], 0, 8)),
      ),
  )
  def test_invalid_arrays_with_valid_hash(self, record):
    self.assert_refused(forge(record, b"\2" * 8), "array")
    wire.decode(forge(table(x=("I8", [8], 0, 8)), b"\2" * 8), SECRET)

  @parameterized.named_parameters(
      ("metadata_missing", {}, "header"),
      ("header_missing", {"__metadata__": {"other": "{}"}}, "header"),
      ("header_not_text", {"__metadata__": {"header": 3}}, "array"),
      ("header_not_json", table("\xff{"), "header"),
      ("header_deep", table("[" * 100_000), "header"),
      ("header_list", table("[]"), "header"),
      ("axis_over_int64", table(x=("I8", [0, 2**63], 0, 0)), "array"),
      ("huge_and_empty", table(x=("I8", [0, 2**62, 8], 0, 0)), "array"),
  )
  def test_invalid_table_without_arrays(self, record, reason):
    self.assert_refused(forge(record), reason)
    wire.decode(forge(table(x=("I8", [0], 0, 0))), SECRET)

  def test_table_with_wrong_size_is_refused(self):
    for size in (3, 2**31, 2**63, 2**64 - 1):
      self.assert_refused(seal(struct.pack("<Q", size) + b"{}"), "array")
    for size in range(8):
      self.assert_refused(seal(bytes(size)), "array")

  def test_flipped_bytes_under_valid_hash_are_read_or_refused(self):
    body = wire.encode(HEADER, example_arrays(), SECRET)[wire.BODY_START :]
    refused = 0
    for offset in range(len(body)):
      for bit in range(8):
        changed = bytearray(body)
        changed[offset] ^= 1 << bit
        try:
          wire.decode(seal(bytes(changed)), SECRET)
        except wire.WireError:
          refused += 1
    self.assertGreater(refused, len(body))

  def test_long_shape_is_refused_quickly(self):
    # Its product has a million digits.
    record = table(x=("I8", [99999999] * 100_000, 0, 8))
    start = time.monotonic()
    self.assert_refused(forge(record, bytes(8)), "array")
    self.assertLess(time.monotonic() - start, 2.0)

  def test_reading_holds_one_copy_of_arrays(self):
    data = wire.encode({}, {"x": np.zeros(1 << 22, np.uint8)}, SECRET)
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    wire.decode(data, SECRET)
    self.assertLess(tracemalloc.get_traced_memory()[1], 2.5 * len(data))

  @parameterized.parameters({"a": 1.0}, {"a": True}, {"b": 1}, {"a": None})
  def test_fields_must_match_schema(self, **message):
    data = wire.encode_message({"run": "r", "key": "k", **message}, SECRET)
    for decode in (
        lambda schema: wire.decode_message(data, SECRET, schema),
        lambda schema: wire.decode_placed(data, SECRET, "r", "k", schema),
    ):
      with self.assertRaises(wire.WireError) as caught:
        decode({"a": int})
      self.assertEqual(caught.exception.reason, "header")


class SecretTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / "secret"

  def test_is_made_once_and_private(self):
    self.addCleanup(os.umask, os.umask(0))
    secret = wire.load_or_make_secret(self.path)
    self.assertLen(secret, wire.SECRET_BYTES)
    self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)
    self.assertEqual(wire.load_or_make_secret(self.path), secret)
    self.assertEqual(os.listdir(self.path.parent), ["secret"])
    other = wire.load_or_make_secret(self.path.with_name("other"))
    self.assertNotEqual(other, secret)

  def test_concurrent_processes_share_secret(self):
    barrier, secrets = threading.Barrier(8), []

    def work() -> None:
      barrier.wait(30)
      secrets.append(wire.load_or_make_secret(self.path))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(30)
    self.assertLen(secrets, 8)
    self.assertLen(set(secrets), 1)

  def test_unsafe_file_is_refused(self):
    wire.load_or_make_secret(self.path)
    link = self.path.with_name("link")
    link.symlink_to(self.path)
    for path in (link, self.path.parent):
      with self.assertRaises((ValueError, OSError)):
        wire.load_or_make_secret(path)
    for mode in (0o640, 0o604, 0o660):
      self.path.chmod(mode)
      with self.assertRaisesRegex(ValueError, f"mode {mode:04o}"):
        wire.load_or_make_secret(self.path)

  def test_accepts_secret_mounted_by_root_for_group(self):
    secret = wire.load_or_make_secret(self.path)
    user = os.geteuid() + 1
    for owner, mode, allowed in (
        (0, 0o440, True), (0, 0o400, True), (0, 0o460, False),
        (0, 0o444, False), (user, 0o440, False), (user + 1, 0o400, False),
    ):  # fmt: skip
      info = mock.Mock(st_mode=stat.S_IFREG | mode, st_uid=owner)
      with (
          mock.patch.object(os, "geteuid", return_value=user),
          mock.patch.object(os, "fstat", return_value=info),
      ):
        if allowed:
          self.assertEqual(wire.load_or_make_secret(self.path), secret)
        else:
          with self.assertRaisesRegex(ValueError, "secret file .* must be"):
            wire.load_or_make_secret(self.path)

  def test_wrong_length_is_refused(self):
    for length in (0, 31, 33):
      self.path.write_bytes(bytes(length))
      self.path.chmod(0o600)
      with self.assertRaisesRegex(ValueError, "must have 32 bytes"):
        wire.load_or_make_secret(self.path)

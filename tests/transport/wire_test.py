# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import json
import os
import pathlib
import stat
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

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


def forge(record: object, body: bytes = b"", secret: bytes = SECRET) -> bytes:
  """Returns a message of any content with a valid hash."""
  text = record if isinstance(record, bytes) else json.dumps(record).encode()
  prefix = wire._PREFIX.pack(wire.MAGIC, wire.SCHEMA, 0, len(text), len(body))
  return prefix + wire._digest(prefix, [text, body], secret) + text + body


class RoundTripTest(parameterized.TestCase):

  def test_header_and_arrays(self):
    arrays = example_arrays()
    header, decoded = wire.decode(wire.encode(HEADER, arrays, SECRET), SECRET)
    self.assertEqual(header, HEADER)
    self.assertEqual(list(decoded), list(arrays))
    for name, array in arrays.items():
      self.assertEqual(decoded[name].dtype, array.dtype)
      np.testing.assert_array_equal(decoded[name], array)
      self.assertFalse(decoded[name].flags.writeable)
      self.assertTrue(decoded[name].flags.aligned)

  def test_arrays_are_aligned_after_any_header(self):
    for length in range(9):
      data = wire.encode({"x": "a" * length}, {"x": np.ones(3)}, SECRET)
      _, decoded = wire.decode(data, SECRET)
      self.assertTrue(decoded["x"].flags.aligned)

  def test_allowed_dtypes(self):
    arrays = {name: np.arange(7).astype(name) for name in wire._DTYPES}
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

  def test_bytes_are_the_documented_format(self):
    data = wire.encode({"a": 1}, {"x": np.array([1, -1], np.int16)}, SECRET)
    self.assertEqual(data[:8], b"TBAJ\x01\x00\x00\x00")
    text_bytes = int.from_bytes(data[8:12], "little")
    self.assertEqual(int.from_bytes(data[12:20], "little"), 8)
    self.assertEqual(
        json.loads(data[52 : 52 + text_bytes]),
        {"header": {"a": 1}, "arrays": [["x", "int16", [2]]]},
    )
    self.assertEqual(data[52 + text_bytes :], b"\1\0\xff\xff\0\0\0\0")

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
    ):
      with self.assertRaisesRegex(ValueError, "'x' has dtype"):
        wire.encode({}, {"x": array}, SECRET)
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
    regions = {"magic": 4, "schema": 6, "prefix": 20, "hash": 52}
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

  def test_newer_schema(self):
    data = bytearray(wire.encode({}, {}, SECRET))
    data[4:6] = (wire.SCHEMA + 1).to_bytes(2, "little")
    with self.assertRaisesRegex(wire.WireError, "schema 2; .* reads schema 1"):
      wire.decode(bytes(data), SECRET)

  @parameterized.named_parameters(
      ("not_json", b"\xff{", "header"),
      ("deep", b"[" * 100_000, "header"),
      ("no_object", [1], "header"),
      ("no_arrays", {"header": {}}, "header"),
      ("header_is_a_list", {"header": [], "arrays": []}, "header"),
      ("row", {"header": {}, "arrays": [["x", "int8"]]}, "header"),
      ("object", {"header": {}, "arrays": [["x", "O", [1]]]}, "array"),
      ("too_long", {"header": {}, "arrays": [["x", "int8", [9]]]}, "array"),
      (
          "overflow",
          {"header": {}, "arrays": [["x", "int8", [2**62, 4]]]},
          "array",
      ),
      ("huge", {"header": {}, "arrays": [["x", "int8", [2**70]]]}, "array"),
      (
          "huge_and_empty",
          {"header": {}, "arrays": [["x", "int8", [0, 2**62, 8]]]},
          "array",
      ),
      (
          "axes",
          {"header": {}, "arrays": [["x", "int8", [1] * 65 + [8]]]},
          "array",
      ),
      ("negative", {"header": {}, "arrays": [["x", "int8", [-8]]]}, "array"),
      ("float", {"header": {}, "arrays": [["x", "int8", [8.0]]]}, "array"),
      ("truth", {"header": {}, "arrays": [["x", "int64", [True]]]}, "array"),
      ("left_over", {"header": {}, "arrays": []}, "array"),
      ("not_bool", {"header": {}, "arrays": [["x", "bool", [8]]]}, "array"),
      (
          "twice",
          {"header": {}, "arrays": [["x", "int8", [0]], ["x", "int8", [8]]]},
          "array",
      ),
  )
  def test_invalid_content_with_a_valid_hash(self, record, reason):
    self.assert_refused(forge(record, b"\2" * 8), reason)
    wire.decode(forge({"header": {}, "arrays": []}), SECRET)

  def test_long_shape_is_refused_quickly(self):
    # Its product has a million digits.
    record = {"header": {}, "arrays": [["x", "int8", [99999999] * 100_000]]}
    start = time.monotonic()
    self.assert_refused(forge(record), "array")
    self.assertLess(time.monotonic() - start, 2.0)

  @parameterized.parameters({"a": 1.0}, {"a": True}, {"b": 1}, {"a": None})
  def test_fields_must_match_the_schema(self, **message):
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

  def test_processes_that_start_together_share_it(self):
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

  def test_file_that_root_mounts_for_a_group(self):
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
          with self.assertRaisesRegex(ValueError, "secret file .* allowed is"):
            wire.load_or_make_secret(self.path)

  def test_wrong_length_is_refused(self):
    for length in (0, 31, 33):
      self.path.write_bytes(bytes(length))
      self.path.chmod(0o600)
      with self.assertRaisesRegex(ValueError, "allowed are 32 bytes"):
        wire.load_or_make_secret(self.path)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import json
import os
import pathlib
import socket
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.transport import locator


class LocatorTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.path = pathlib.Path(folder) / "locator.json"

  def test_what_is_written_is_read(self):
    self.assertIsNone(locator.read_locator(self.path))
    for generation in (1, 2):
      written = locator.Locator("run", generation, "unix:/x/kv.sock", 12)
      locator.write_locator(self.path, written)
      self.assertEqual(locator.read_locator(self.path), written)
    # Nothing is left of the writing.
    self.assertEqual(os.listdir(self.path.parent), ["locator.json"])

  @parameterized.parameters(
      "",
      "{",
      "[]",
      '{"run": "r"}',
      json.dumps({"run": "r", "generation": "1", "address": "a", "pid": 1}),
      json.dumps({"run": "r", "generation": True, "address": "a", "pid": 1}),
      json.dumps(
          {"run": "r", "generation": 1, "address": "a", "pid": 1, "more": 1}
      ),
  )
  def test_refuses_what_is_no_locator(self, text):
    self.path.write_text(text)
    with self.assertRaisesRegex(ValueError, "is no store locator"):
      locator.read_locator(self.path)

  def test_accepts_only_where_something_listens(self):
    unix_path = str(self.path.with_name("a.sock"))
    self.assertFalse(locator.accepts(f"unix:{unix_path}", 1.0))
    with socket.socket(socket.AF_UNIX) as server:
      server.bind(unix_path)
      server.listen()
      self.assertTrue(locator.accepts(f"unix:{unix_path}", 1.0))
    self.assertFalse(locator.accepts(f"unix:{unix_path}", 1.0))
    with socket.socket() as server:
      server.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{server.getsockname()[1]}"
      self.assertFalse(locator.accepts(address, 1.0))
      server.listen()
      self.assertTrue(locator.accepts(address, 1.0))

  def test_identity_tells_runs_and_generations_apart(self):
    identities = [locator.identity(r, g) for r in "ab" for g in (1, 2)]
    self.assertLen(set(identities), 4)


if __name__ == "__main__":
  absltest.main()

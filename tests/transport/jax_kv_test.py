# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

import tba_jax
from tba_jax.transport import jax_kv
from tba_jax.transport import locator


class SelfTestTest(absltest.TestCase):

  def test_this_version_of_jax_works(self):
    jax_kv.self_test()

  def test_a_changed_behavior_is_named_with_the_versions(self):
    source = pathlib.Path(jax_kv.__file__).read_text()
    changes = {
        '"get", b.key_value_try_get_bytes("d/02"), b"\\0two"': (
            '"get", b"other", b"\\0two"',
            "get gave b'other', not",
        ),
        '"NOT_FOUND", lambda: b.key_value_try_get_bytes("none")': (
            '"NOT_FOUND", lambda: b.key_value_try_get_bytes("d/10")',
            "no NOT_FOUND error but b'ten'",
        ),
        "service.shutdown()": ("os.abort()", "SIGABRT"),
        "_jax.get_distributed_runtime_client(": (
            "_jax.a_renamed_function(",
            "a_renamed_function",
        ),
    }
    for old, (new, message) in changes.items():
      with tempfile.TemporaryDirectory() as folder:
        changed = pathlib.Path(folder) / "jax_kv.py"
        self.assertEqual(source.count(old), 1, old)
        changed.write_text(source.replace(old, new))
        with mock.patch.object(jax_kv, "__file__", str(changed)):
          with self.assertRaisesRegex(
              RuntimeError, r"(?s)jaxlib \d.*0\.10 and 0\.11.*" + message
          ):
            jax_kv.self_test()

  def test_a_hang_ends_at_the_deadline(self):
    with tempfile.TemporaryDirectory() as folder:
      hanging = pathlib.Path(folder) / "jax_kv.py"
      hanging.write_text("import time; time.sleep(60)")
      with mock.patch.object(jax_kv, "__file__", str(hanging)):
        with self.assertRaisesRegex(RuntimeError, "no answer in"):
          jax_kv.self_test(deadline_s=0.3)


class InterfaceTest(absltest.TestCase):

  def test_error_code_is_the_prefix(self):
    self.assertEqual(jax_kv.error_code(RuntimeError("A_B: c: d")), "A_B")
    self.assertEqual(jax_kv.error_code(RuntimeError("")), "")

  def test_tls_is_handed_on_or_refused(self):
    tls = locator.Tls("cert", "key", "ca")
    client = mock.Mock(__doc__="… mtls_cert_file: str …")
    with mock.patch.object(
        jax_kv._jax, "get_distributed_runtime_client", client
    ):
      jax_kv.connect("127.0.0.1:1", tls)
      given = client.call_args.kwargs
      jax_kv.connect("127.0.0.1:1")
    self.assertEqual(
        {n: v for n, v in given.items() if "mtls" in n or "verify" in n},
        {
            "mtls_cert_file": "cert",
            "mtls_key_file": "key",
            "mtls_ca_file": "ca",
            "verify_secure_credentials": True,
        },
    )
    self.assertNotIn("mtls_cert_file", client.call_args.kwargs)
    client.__doc__ = "without"
    with mock.patch.object(
        jax_kv._jax, "get_distributed_runtime_client", client
    ):
      with self.assertRaisesRegex(RuntimeError, "tls_cert_file.*jaxlib 0.11"):
        jax_kv.make_service("127.0.0.1:1", tls)

  def test_a_proxy_is_not_asked_for_the_store(self):
    environment = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "a,b"}
    with mock.patch.dict(os.environ, environment, clear=True):
      jax_kv._bypass_proxy("unix:/x")
      self.assertNotIn("no_grpc_proxy", os.environ)
      for _ in range(2):
        jax_kv._bypass_proxy("[::1]:80")
      self.assertEqual(os.environ["no_grpc_proxy"], "a,b,::1")
    with mock.patch.dict(os.environ, {}, clear=True):
      jax_kv._bypass_proxy("127.0.0.1:80")
      self.assertNotIn("no_grpc_proxy", os.environ)

  def test_no_other_file_uses_private_names_of_jax(self):
    root = pathlib.Path(tba_jax.__file__).parent
    users = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if re.search(r"jax\._src|jaxlib", path.read_text())
        and re.search(r"^(import|from) jax(\._src|lib)", path.read_text(), re.M)
    ]
    self.assertEqual(users, ["transport/jax_kv.py"])

  def test_needs_no_import_of_jax(self):
    code = (
        "import sys; import tba_jax.transport.kv_service;"
        " sys.exit('jax' in sys.modules)"
    )
    root = pathlib.Path(tba_jax.__file__).parents[1]
    child = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)
    self.assertEqual(child.returncode, 0)

  def test_jaxlib_does_not_log_what_goes_well(self):
    folder = self.create_tempdir().full_path
    code = (
        "import os; from tba_jax.transport import jax_kv;"
        f" os.chdir({folder!r}); service = jax_kv.make_service('unix:s');"
        " jax_kv.connect('unix:s')"
    )
    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pathlib.Path(tba_jax.__file__).parents[1],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(child.returncode, 0)
    self.assertNotIn("Distributed task", child.stderr)


if __name__ == "__main__":
  absltest.main()

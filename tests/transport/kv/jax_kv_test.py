# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""JAX's private key-value store behaves as the package needs it."""

import os
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import pytest

from tba_jax.system import processes
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import jax_kv

# Another process runs it, which a changed library may abort.
_INTERFACE = """
from tba_jax.transport.kv import jax_kv

def code_of(operation, *args):
  try:
    return operation(*args)
  except jax_kv.KvError as error:
    return jax_kv.error_code(error)

service = jax_kv.make_service("unix:s")
a, b = (jax_kv.connect("unix:s") for _ in range(2))
for key, value in (("d/02", b"\\0two"), ("d/10", b"ten"), ("d/1", b"one")):
  a.key_value_set_bytes(key, value, allow_overwrite=False)
assert code_of(b.key_value_set_bytes, "d/02", b"x", False) == "ALREADY_EXISTS"
assert b.key_value_try_get_bytes("d/02") == b"\\0two"
assert code_of(b.key_value_try_get_bytes, "none") == "NOT_FOUND"
listed = [("d/02", b"\\0two"), ("d/1", b"one"), ("d/10", b"ten")]
assert list(b.key_value_dir_get_bytes("d")) == listed
assert list(b.key_value_dir_get_bytes("none")) == []
a.key_value_set_bytes("d/02", b"new", allow_overwrite=True)
assert b.key_value_try_get_bytes("d/02") == b"new"
a.key_value_delete("d")
assert list(b.key_value_dir_get_bytes("d")) == []
service.shutdown()
del service
# The process would abort here with a client that is not detached.
assert code_of(a.key_value_try_get_bytes, "d") == "UNAVAILABLE"
"""

# Aborted by a library in which a callback does not prevent it.
_NOBODY = """
from tba_jax.transport.kv import jax_kv

try:
  jax_kv.connect("unix:nobody", deadline_s=0.1)
except jax_kv.ConnectError as error:
  assert "within 0.1 s" in str(error), error
else:
  raise AssertionError("connected")
"""


class JaxKvTest(absltest.TestCase):

  def run_child(self, code):
    env = processes.package_environment()
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=self.create_tempdir().full_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    self.assertEqual(child.returncode, 0, child.stderr)
    return child

  @pytest.mark.slow
  def test_failed_connect_is_error(self):
    self.run_child(_NOBODY)

  def test_offers_functions_used_by_client(self):
    child = self.run_child(_INTERFACE)
    # Connects are not logged.
    self.assertNotIn("Distributed task", child.stderr)

  def test_tls_options_are_passed(self):
    with mock.patch.object(
        jax_kv._jax, "get_distributed_runtime_client"
    ) as client:
      jax_kv.connect("127.0.0.1:1", certificates.Tls("cert", "key", "ca"))
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

  def test_store_is_reached_without_proxy(self):
    environment = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "a,b"}
    with mock.patch.dict(os.environ, environment, clear=True):
      jax_kv.bypass_proxy("unix:/x")
      self.assertNotIn("no_grpc_proxy", os.environ)
      for _ in range(2):
        jax_kv.bypass_proxy("[::1]:80")
      self.assertEqual(os.environ["no_grpc_proxy"], "a,b,::1")
    with mock.patch.dict(os.environ, {}, clear=True):
      jax_kv.bypass_proxy("127.0.0.1:80")
      self.assertNotIn("no_grpc_proxy", os.environ)

  def test_service_does_not_import_jax(self):
    code = (
        "import sys; import tba_jax.transport.kv.kv_service;"
        " sys.exit('jax' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env=processes.package_environment(),
        check=True,
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""JAX's private key-value store: service and detached client.

JAX has no public interface to the key-value store of its coordination service.
All private names that the package uses are in this file, and `self_test` checks
the installed version. They come from jaxlib, since `import jax` would cost each
store process a second.

The library aborts the process on many errors of a client. A *detached* client
is safe: it connects and then shuts down, which ends heartbeat and error polls.
Set, get, list and delete still work; blocking gets and barriers do not.
"""

from collections.abc import Callable
import os
import signal
import subprocess
import sys
import tempfile

# jaxlib reads it when it is loaded and logs every connect otherwise; `import
# jax` sets the same.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

from jaxlib import _jax  # noqa: E402
from jaxlib import version  # noqa: E402

from tba_jax.system import processes  # noqa: E402
from tba_jax.transport import locator  # noqa: E402

KNOWN_TO_WORK = "0.10 and 0.11"

KvError = _jax.JaxRuntimeError
Client = _jax.DistributedRuntimeClient
Service = _jax.DistributedRuntimeService

# In effect infinite, in seconds: a detached client has no heartbeat, and a
# connect that times out aborts the process.
_NEVER_S = 10**8
_CONNECT_S = 10**5


def make_service(address: str, tls: locator.Tls | None = None) -> Service:
  """Starts a service in this process, which ends with the returned object.

  Args:
    address: "unix:/path" or "host:port", never used by another service: its
      clients would abort on their next operation.
    tls: files of mutual TLS; clients without them are refused.

  Raises:
    RuntimeError: jaxlib does not support `tls`.
  """
  return _jax.get_distributed_runtime_service(
      address,
      1,
      heartbeat_timeout=_NEVER_S,
      shutdown_timeout=1,
      # Any number of clients may connect as node 0.
      recoverable=True,
      **_tls_options(tls),
  )


def connect(address: str, tls: locator.Tls | None = None) -> Client:
  """Returns a detached client of the service at `address`.

  Blocks until the service answers, for up to a day: probe the socket first, and
  call it on a thread that may be abandoned.
  """
  _bypass_proxy(address)
  client = _jax.get_distributed_runtime_client(
      address,
      0,
      init_timeout=_CONNECT_S,
      heartbeat_timeout=_NEVER_S,
      shutdown_on_destruction=False,
      # Compression makes writes of 100 KB ten times slower.
      use_compression=False,
      **_tls_options(tls),
  )
  client.connect()
  client.shutdown()
  return client


def _tls_options(tls: locator.Tls | None) -> dict[str, object]:
  if tls is None:
    return {}
  if "mtls_cert_file" not in (
      _jax.get_distributed_runtime_client.__doc__ or ""
  ):
    raise RuntimeError(
        "config.store.tls_cert_file: mutual TLS needs jaxlib 0.11 or newer;"
        f" this is {version.__version__}"
    )
  return tls.jax_options()


def distributed_client() -> Client:
  """Returns the client of `jax.distributed`, which is not detached."""
  from jax._src import distributed  # Store processes do not import jax.

  return distributed.global_state.client


def error_code(error: BaseException) -> str:
  """Returns the gRPC code of an error, such as "NOT_FOUND"."""
  return str(error).partition(":")[0].strip()


def self_test(deadline_s: float = 60.0) -> None:
  """Checks in a child process that this jaxlib's store behaves as needed.

  Raises:
    RuntimeError: it does not, or did not answer within `deadline_s`.
  """
  here = f"jaxlib {version.__version__}"
  hint = (
      f"the private key-value interface of {here} does not behave as tba_jax"
      f" needs it (jax {KNOWN_TO_WORK} are known to work)"
  )
  try:
    child = subprocess.run(
        # -P: keep this file's folder out of sys.path.
        [sys.executable, "-P", __file__],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        env=processes.package_environment(),
    )
  except subprocess.TimeoutExpired as error:
    raise RuntimeError(f"{hint}: no answer in {deadline_s:.0f} s") from error
  if child.returncode < 0:
    name = signal.Signals(-child.returncode).name
    raise RuntimeError(f"{hint}: the test ended by {name}: {child.stderr}")
  if child.returncode:
    raise RuntimeError(f"{hint}: {child.stderr.strip()[-2000:]}")


def _bypass_proxy(address: str) -> None:
  """Keeps gRPC from sending `address` through an HTTP proxy, which aborts."""
  proxies = ("grpc_proxy", "http_proxy", "https_proxy")
  if address.startswith("unix:") or not any(map(os.environ.get, proxies)):
    return
  present = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
  hosts = [host for host in present.split(",") if host]
  host = address.rpartition(":")[0].strip("[]")
  if host not in hosts:
    os.environ["no_grpc_proxy"] = ",".join([*hosts, host])


def _check_interface() -> None:
  """Raises RuntimeError if the store does not behave as needed."""
  with tempfile.TemporaryDirectory(prefix="tba-kv-") as folder:
    address = f"unix:{folder}/kv.sock"
    service = make_service(address)
    clients = [connect(address) for _ in range(2)]
    a, b = clients
    a.key_value_set_bytes("d/02", b"\0two", allow_overwrite=False)
    a.key_value_set_bytes("d/10", b"ten", allow_overwrite=False)
    a.key_value_set_bytes("d/1", b"one", allow_overwrite=False)
    _expect_code(
        "ALREADY_EXISTS",
        lambda: b.key_value_set_bytes("d/02", b"x", allow_overwrite=False),
    )
    _expect("get", b.key_value_try_get_bytes("d/02"), b"\0two")
    _expect_code("NOT_FOUND", lambda: b.key_value_try_get_bytes("none"))
    listed = [("d/02", b"\0two"), ("d/1", b"one"), ("d/10", b"ten")]
    _expect("list", list(b.key_value_dir_get_bytes("d")), listed)
    _expect("empty list", list(b.key_value_dir_get_bytes("none")), [])
    a.key_value_set_bytes("d/02", b"new", allow_overwrite=True)
    _expect("overwrite", b.key_value_try_get_bytes("d/02"), b"new")
    a.key_value_delete("d")
    _expect("recursive delete", list(b.key_value_dir_get_bytes("d")), [])
    service.shutdown()
    del service
    # With a client that is not detached, the process would abort here.
    _expect_code("UNAVAILABLE", lambda: a.key_value_try_get_bytes("d"))


def _expect(what: str, got: object, wanted: object) -> None:
  if got != wanted:
    raise RuntimeError(f"{what} gave {got!r}, not {wanted!r}")


def _expect_code(code: str, operation: Callable[[], object]) -> None:
  try:
    got = operation()
  except KvError as error:
    _expect("error code", error_code(error), code)
  else:
    raise RuntimeError(f"no {code} error but {got!r}")


if __name__ == "__main__":
  _check_interface()

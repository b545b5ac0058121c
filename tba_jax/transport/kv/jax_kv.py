# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""JAX's private key-value store: service and detached client.

JAX has no public interface to the key-value store of its coordination service.
All private names that the package uses are in this file; its test checks how
the installed version behaves. They come from jaxlib, since `import jax` would
cost each store process a second.

The library aborts the process on many errors of a client. A *detached* client
is safe: it connects and then shuts down, which ends heartbeat and error polls.
Set, get, list and delete still work; blocking gets and barriers do not.
"""

import math
import os
from typing import Any

# jaxlib reads this when it is loaded, and would otherwise log every connect;
# `import jax` sets the same value.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

from jaxlib import _jax  # noqa: E402

from tba_jax.transport.kv import certificates  # noqa: E402

KvError = _jax.JaxRuntimeError
Client = _jax.DistributedRuntimeClient
Service = _jax.DistributedRuntimeService

# Seconds that are in effect infinite: a detached client has no heartbeat.
_NEVER_S = 10**8


class ConnectError(RuntimeError):
  """No service answered a connect."""


def make_service(address: str, tls: certificates.Tls | None = None) -> Service:
  """Starts a service in this process, which ends with the returned object.

  Args:
    address: "unix:/path" or "host:port", new to every service: clients of an
      earlier one there would abort on their next operation.
    tls: files of mutual TLS; clients without them are refused.
  """
  return _jax.get_distributed_runtime_service(
      address,
      1,
      heartbeat_timeout=_NEVER_S,
      shutdown_timeout=1,
      # Any number of clients may connect as node 0.
      recoverable=True,
      **(tls.jax_options() if tls else {}),
  )


def connect(
    address: str,
    tls: certificates.Tls | None = None,
    *,
    deadline_s: float = 60.0,
) -> Client:
  """Returns a detached client of the service at `address`.

  Nothing can interrupt the wait for a service that does not answer: probe the
  socket first, and connect on a thread that may be abandoned.

  Raises:
    ConnectError: no service answered; within 25 s after the deadline.
  """
  bypass_proxy(address)
  client = _jax.get_distributed_runtime_client(
      address,
      0,
      # Whole seconds; the library adds 5, and a pause of up to 16.
      init_timeout=max(1, math.ceil(deadline_s)),
      heartbeat_timeout=_NEVER_S,
      # Without a callback the library aborts the process at the deadline.
      missed_heartbeat_callback=_ignore,
      shutdown_on_destruction=False,
      # Compression makes writes of 100 KB ten times slower.
      use_compression=False,
      **(tls.jax_options() if tls else {}),
  )
  reason = None
  try:
    client.connect()
  # jaxlib fails to convert the callback's argument, in this thread; a version
  # that can convert it raises its own error.
  except RuntimeError as error:
    reason = str(error)
  if reason is not None:
    del client  # The traceback would keep the client and its connection.
    raise ConnectError(f"no answer within {deadline_s:.1f} s ({reason})")
  client.shutdown()
  return client


def _ignore(status: Any) -> None:
  del status


def distributed_client() -> Client:
  """Returns the client of `jax.distributed`, which is not detached."""
  from jax._src import distributed  # Store processes do not import jax.

  return distributed.global_state.client


def error_code(error: BaseException) -> str:
  """Returns the gRPC code of an error, such as "NOT_FOUND"."""
  return str(error).partition(":")[0].strip()


def bypass_proxy(address: str) -> None:
  """Keeps gRPC from using an HTTP proxy for `address`, which would abort."""
  proxies = ("grpc_proxy", "http_proxy", "https_proxy")
  if address.startswith("unix:") or not any(map(os.environ.get, proxies)):
    return
  present = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
  hosts = [host for host in present.split(",") if host]
  host = address.rpartition(":")[0].strip("[]")
  if host not in hosts:
    os.environ["no_grpc_proxy"] = ",".join([*hosts, host])

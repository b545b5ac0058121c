# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a process becomes one of the trainer's, or says why it cannot."""

from collections.abc import Sequence
import inspect
import os
import re
import socket
import sys
import threading
from typing import TYPE_CHECKING

import jax
import ml_collections

from tba_jax import cluster as cluster_lib
from tba_jax import processes
from tba_jax.transport import jax_kv

if TYPE_CHECKING:
  from tba_jax.transport import locator

# All leave together; who does not come is not waited for any longer.
_SHUTDOWN_S = 20


def join(
    settings: ml_collections.ConfigDict,
    operands: Sequence[str],
    secret: bytes,
    tls: "locator.Tls | None" = None,
) -> cluster_lib.Cluster:
  """Joins this process to the trainer's others; to be called before any device.

  Waits until all have come, `start_deadline_s` at most; ends this process with
  a message where they have not, since `jax.distributed` would abort it.

  Args:
    settings: `config.trainer`.
    operands: of the program: the number of this process, and host:port of
      process 0, `settings.coordinator` where not given. With neither, what JAX
      finds in the environment of Slurm, TPU VMs and others.
    secret: key of the commands.
    tls: files of mutual TLS with process 0; None = without.

  Raises:
    ValueError: an operand or setting that does not fit the others, or `tls`
      where JAX does not offer it.
  """
  if settings.cpu_devices:
    jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
  num_processes = settings.num_processes
  process, address = _parse(settings, operands)
  if num_processes == 1:
    return cluster_lib.Cluster()
  secured = _tls_options(tls)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # It would take SIGTERM away from this program, and see it only where all
  # processes call it; here any of them tells process 0, which decides.
  jax.config.update("jax_enable_preemption_service", False)
  if process == 0:
    _check_free(address)
  waited = threading.Timer(
      settings.start_deadline_s, _give_up, (settings, process, address)
  )
  waited.daemon = True
  waited.start()
  found = {}
  if address is not None:
    found = dict(
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process,
        # Never on all interfaces of a machine, which is what JAX would do.
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
    )
  jax.distributed.initialize(
      **found,
      **secured,
      # The timer comes first: it says what is wrong.
      initialization_timeout=int(settings.start_deadline_s) + 60,
      heartbeat_timeout_seconds=max(1, int(settings.heartbeat_s)),
      shutdown_timeout_seconds=_SHUTDOWN_S,
  )
  waited.cancel()
  if jax.process_count() != num_processes:
    raise ValueError(
        f"config.trainer.num_processes = {num_processes}: the environment has"
        f" {jax.process_count()}"
    )
  return cluster_lib.Cluster(
      jax.process_index(),
      num_processes,
      secret=secret,
      deadline_s=settings.deadline_s,
      client=jax_kv.distributed_client(),
  )


def _parse(
    settings: ml_collections.ConfigDict, operands: Sequence[str]
) -> tuple[int | None, str | None]:
  """Returns the number of this process and the address of process 0.

  None where JAX is to find them.
  """
  num_processes = settings.num_processes
  if num_processes > 1 and not operands and not settings.coordinator:
    return None, None
  text = operands[0] if operands else "0"
  if not text.isdigit() or int(text) >= num_processes:
    raise ValueError(
        f"operand {text!r}: allowed the number of a process of the trainer, 0"
        f" to {num_processes - 1} (config.trainer.num_processes ="
        f" {num_processes})"
    )
  address = operands[1] if len(operands) > 1 else settings.coordinator
  if num_processes > 1 and not re.fullmatch(r"\S+:\d+", address):
    raise ValueError(
        f"config.trainer.coordinator = {address!r}: allowed host:port of"
        " process 0, where each process is started with its number"
    )
  return int(text), address


def _tls_options(tls: "locator.Tls | None") -> dict[str, object]:
  if tls is None:
    return {}
  offered = inspect.signature(jax.distributed.initialize).parameters
  if "mtls_cert_file" not in offered:
    raise ValueError(
        f"config.store.tls_cert_file = {tls.cert_file!r}: mutual TLS between"
        " the trainer's processes needs jax 0.11 or newer, here is"
        f" {jax.__version__}; allowed '' or config.trainer.num_processes = 1"
    )
  return {
      "mtls_cert_file": tls.cert_file,
      "mtls_key_file": tls.key_file,
      "mtls_ca_file": tls.ca_file,
      # No fall-back to a connection without it.
      "verify_secure_credentials": True,
  }


def _check_free(address: str) -> None:
  """Raises where somebody listens: two coordinators would share the port."""
  host, _, port = address.rpartition(":")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    with socket.socket(family) as probe:
      # What an earlier coordinator has left in TIME_WAIT is no obstacle.
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind((host.strip("[]"), int(port)))
  except OSError as error:
    raise ValueError(
        f"config.trainer.coordinator = {address!r}: process 0 cannot listen"
        f" there ({error}); another trainer may"
    ) from error


def _give_up(
    settings: ml_collections.ConfigDict,
    process: int | None,
    address: str | None,
) -> None:
  who = "a process" if process is None else f"process {process}"
  print(
      f"error: {who} of the trainer waited {settings.start_deadline_s:.0f} s at"
      f" {address or 'the address that JAX found'} and not all of"
      f" config.trainer.num_processes = {settings.num_processes} came: start"
      " each number from 0 on once, with one coordinator",
      file=sys.stderr,
      flush=True,
  )
  os._exit(processes.EXIT_CONFIG)  # pylint: disable=protected-access

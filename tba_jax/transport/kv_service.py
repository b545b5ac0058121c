# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One generation of the store: the child process that `kv_host` starts.

It holds the service and proves that it answers: a client in this process
increments a key every `--probe_interval_s` and writes one byte to the host's
pipe after each answer. It ends when its host does.
"""

import argparse
import ctypes
import os
import signal
import sys
import threading
import time

from tba_jax.transport import jax_kv
from tba_jax.transport import locator

_PROBE_KEY = "meta/probe"
_PR_SET_PDEATHSIG = 1


def main() -> None:
  """Serves until killed, or until the host ends."""
  args = _parse_args()
  # The host decides when the store stops; a Ctrl-C in the terminal reaches
  # the whole process group, and the last drain still needs the store.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  _die_with_host(args.host_pid)
  # Held for its lifetime: dropping it would end the service.
  tls = None
  if args.tls_cert_file:
    tls = locator.Tls(args.tls_cert_file, args.tls_key_file, args.tls_ca_file)
  service = jax_kv.make_service(args.address, tls)
  client = jax_kv.connect(args.address, tls)
  client.key_value_set_bytes(
      locator.IDENTITY_KEY, locator.identity(args.run_id, args.generation)
  )
  try:
    while service is not None:
      client.key_value_increment(_PROBE_KEY, 1)
      os.write(args.probe_fd, b".")
      time.sleep(args.probe_interval_s)
  except BrokenPipeError:
    os._exit(0)


def _parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--address", required=True)
  parser.add_argument("--run_id", required=True)
  parser.add_argument("--generation", type=int, required=True)
  parser.add_argument("--host_pid", type=int, required=True)
  parser.add_argument("--probe_fd", type=int, required=True)
  parser.add_argument("--probe_interval_s", type=float, required=True)
  for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
    parser.add_argument(f"--{name}", default="")
  return parser.parse_args()


def _die_with_host(host_pid: int) -> None:
  """Ends this process when the host ends, by whichever way notices first.

  The host holds the other end of our stdin, so its end is an EOF everywhere.
  On Linux the kernel also kills us, which works while we are stopped or hang.
  """
  threading.Thread(target=_exit_at_eof, daemon=True).start()
  if sys.platform == "linux":
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
      raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != host_pid:
      os._exit(0)


def _exit_at_eof() -> None:
  while os.read(0, 1):
    pass
  os._exit(0)


if __name__ == "__main__":
  main()

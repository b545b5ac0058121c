# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The child process of `kv_host` that serves one generation of the store.

The process ends with its host, which passes the settings as JSON. As a health
check, a client in this process writes the identity key every
`probe_interval_s`, then a byte to the host's pipe. This also restores the key
if another client has overwritten or deleted it.

The directory of all keys is secret: it comes in an environment variable, since
`ps` shows arguments.
"""

import json
import os
import signal
import sys
import threading
import time

from tba_jax.system import processes
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import locator


def main(settings: str) -> None:
  """Serves until killed, or until the host ends."""
  args = json.loads(settings)
  # A Ctrl-C reaches the whole process group, but the host decides when the
  # store stops: the queue still has to be drained.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # EOF on stdin shows on any system that the host has ended; on Linux the
  # kernel also kills this process while it is stopped or hangs.
  threading.Thread(target=_exit_at_eof, daemon=True).start()
  processes.die_with_parent(args["host_pid"])
  processes.raise_open_files()
  # Only now: the import is slow, and the host may end meanwhile.
  from tba_jax.transport.kv import jax_kv  # pylint: disable=g-import-not-at-top

  tls = args["tls"] and certificates.Tls(**args["tls"])
  service = jax_kv.make_service(args["address"], tls)
  client = jax_kv.connect(args["address"], tls)
  root = os.environ.pop(locator.ROOT_VARIABLE, "")
  key = f"{root}/{locator.IDENTITY_KEY}" if root else locator.IDENTITY_KEY
  identity = locator.identity(args["run_id"], args["generation"])
  try:
    while service is not None:  # The service ends with its last reference.
      client.key_value_set_bytes(key, identity, allow_overwrite=True)
      os.write(args["probe_fd"], b".")
      time.sleep(args["probe_interval_s"])
  except BrokenPipeError:
    os._exit(0)


def _exit_at_eof() -> None:
  while os.read(0, 1):
    pass
  os._exit(0)


if __name__ == "__main__":
  main(*sys.argv[1:])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One of a trainer's two processes: the child of `trainer_tls_test.py`.

Usage: tls_child.py PROCESS ADDRESS CERT KEY CA. Process 0 tells a command; the
other one prints its name.
"""

import sys

from tba_jax.config import settings as settings_lib
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.transport.kv import certificates


def main(process: str, address: str, *files: str) -> None:
  settings = settings_lib.get_config().trainer
  settings.num_processes = 2
  settings.cpu_devices = 1
  tls = certificates.Tls(*files)
  with cluster_lib.join(
      settings, [process, address], b"s" * 32, tls
  ) as cluster:
    cluster.broadcast("heard over TLS")
    cluster.end(0)
    if not cluster.leads:
      print(cluster.receive(lambda: False).name, flush=True)
      cluster.receive(lambda: False)  # The end, after which nothing is awaited.


if __name__ == "__main__":
  main(*sys.argv[1:])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One process that plays a role in many runs, one after the other.

    python -m tests.multi_process.role_server CORE

reads a command a line, `trainer WORKDIR`, `searcher WORKDIR` or `single WORKDIR
OUT.npz` (the single-process loop), carries it out and writes a line `status N`.
Starting a process for each role of each run takes longer than a tiny run.
"""

from collections.abc import Callable, Sequence
import faulthandler
import os
import sys

import ml_collections
import numpy as np

from tba_jax.programs import roles
from tba_jax.run import run_directory
from tba_jax.system import processes
from tests.support import single_process


def _single(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  (out,) = operands
  np.savez(out, **single_process.train(config, f"{workdir}/single"))
  return processes.EXIT_OK


_ROLES: dict[str, Callable[..., int]] = {
    "trainer": roles.run_trainer,
    "searcher": roles.run_searcher,
    "single": _single,
}


def main(argv: Sequence[str]) -> None:
  (core,) = argv
  if core:
    # Before a device is touched: XLA makes its threads for the cores it finds.
    os.sched_setaffinity(0, processes.parse_cores(core))
  faulthandler.enable()
  processes.prepare_compiling()
  for line in sys.stdin:
    role, workdir, *operands = line.split()
    config = run_directory.load_config(workdir)
    status = _ROLES[role](config, workdir, operands)
    print(f"status {status}", flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])

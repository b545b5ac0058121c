# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the trainer and the searchers share."""

from collections.abc import Callable

import ml_collections

from tba_jax.monitor import run_directory
from tba_jax.transport import kv_client

PARTITION = 0


def transport_maker(
    config: ml_collections.ConfigDict, run: run_directory.Run
) -> Callable[[], kv_client.KvTransport]:
  """Returns what makes clients of a run's store."""
  return lambda: kv_client.KvTransport(
      run.finder,
      deadline_s=config.store.deadline_s,
      run_id=run.run_id,
      tls=run.tls,
  )

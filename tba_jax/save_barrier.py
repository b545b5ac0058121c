# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a trainer wait for each other while they save.

Orbax writes in threads beside the steps, and has those of all processes meet at
barriers, one after the other. One that could not write leaves out what is left
to do, and would meet the others at another barrier than the one they wait at,
until the deadline of a slow disk. Here they meet by count: it says why it
failed, and that is then the error of all of them.
"""

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from tba_jax.transport import jax_kv

_PREFIX = "tba_save"
_LOOK_S = 0.05


class SaveError(OSError):
  """A process could not write its part; the message names it and the cause."""


class SaveBarrier:
  """Called as `orbax.checkpoint.AsyncOptions.barrier_sync_fn`.

  All processes call it equally often and in one order, from one thread at a
  time; after an error no more saves may begin.

  failure: what went wrong, in whatever process; None as long as nothing has.
  deadline_s: of a whole save.
  """

  def __init__(
      self,
      client: "jax_kv.Client",
      process: int,
      num_processes: int,
      *,
      deadline_s: float,
  ):
    """Waits for nobody yet.

    Args:
      client: of the coordinator of all of them.
      process: this one.
      num_processes: in all.
      deadline_s: at least 1.
    """
    self._client = client
    self._process = process
    self._num_processes = num_processes
    self._count = 0
    self.failure: SaveError | None = None
    self.deadline_s = deadline_s

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all have come; each call is the next barrier.

    Args:
      key: what Orbax calls it, for messages.
      timeout_ms: the longest wait, what is left of the deadline.

    Raises:
      SaveError: one of them could not write, or did not come in time.
    """
    # Orbax calls it while the error of what it has just done is on its way up.
    error = sys.exc_info()[1]
    if error is not None and self.failure is None:
      late = (
          f"not done within {self.deadline_s:.0f} s"
          " (config.trainer.save_deadline_s): "
      )
      cause = late * isinstance(error, TimeoutError) + str(error)
      self.failure = SaveError(
          f"process {self._process} of the trainer: {cause}"
      )
    count, self._count = self._count, self._count + 1
    text = "" if self.failure is None else str(self.failure)
    self._client.key_value_set_bytes(
        f"{_folder(count)}/{self._process}", text.encode()
    )
    if self.failure is not None:
      raise self.failure
    self._wait(count, key, timeout_ms / 1e3)
    if count:
      # All are here, so none looks at the one before any more.
      self._client.key_value_delete(f"{_folder(count - 1)}/{self._process}")

  def _wait(self, count: int, key: str, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while True:
      came = {
          int(name.rpartition("/")[2]): text.decode()
          for name, text in self._client.key_value_dir_get_bytes(_folder(count))
      }
      causes = [text for text in came.values() if text]
      lacking = sorted(set(range(self._num_processes)) - set(came))
      if causes:
        self.failure = SaveError(causes[0])
      elif not lacking:
        return
      elif time.monotonic() > until:
        self.failure = SaveError(
            f"process {', '.join(map(str, lacking))} of the trainer did not"
            f" come to {key} within {timeout_s:.0f} s"
            " (config.trainer.save_deadline_s)"
        )
      if self.failure is not None:
        raise self.failure
      time.sleep(_LOOK_S)


def _folder(count: int) -> str:
  return f"{_PREFIX}/{count:012d}"

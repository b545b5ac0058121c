# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that the hosts of a run have the same config, model and data.

The trainer writes its settings, and digests of model, data and tokenizer, to
the store under `meta/settings`. A searcher compares them with its own before it
samples and after each trainer restart, and exits with one line per difference
that `settings.hosts` does not allow.
"""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import socket
import time
from typing import Any

import ml_collections

from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.losses import objective_table
from tba_jax.mesh import cluster as cluster_lib
from tba_jax.policy import lora
from tba_jax.policy import policy as policy_lib
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.tasks import offline_completions
from tba_jax.transport import byte_store
from tba_jax.transport import wire

KEY = "meta/settings"
_SCHEMA = {
    "generation": int,
    "epoch": int,
    "place": str,
    "settings": dict,
    "digests": dict,
}
_PAUSE_S = 0.1
# Settings of files that are compared by content.
_FILES = ("offline.path", "loss.baseline_file")
# Model fields that depend on the host's device.
_DTYPES = ("param_dtype", "compute_dtype")


class DiffersError(ValueError):
  """Config, model or data of this process differ from the trainer's."""


def describe(
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
    policy: policy_lib.Policy | None = None,
) -> dict[str, Any]:
  """Returns `place`, `settings` and `digests` of this process.

  `digests` is empty without a policy.
  """
  return {
      "place": f"{socket.gethostname()}:{run.workdir}",
      "settings": load.flatten(config.to_dict()),
      "digests": _digests(config, policy) if policy is not None else {},
  }


def _digests(
    config: ml_collections.ConfigDict, policy: policy_lib.Policy
) -> dict[str, str]:
  """Returns digests of model, data and tokenizer, by config key."""
  tokenizer, prompts = policy.tokenizer, policy.task.identity()
  tokens = [list(map(int, tokenizer.encode_prompt(p))) for p in prompts]
  shape = dataclasses.asdict(policy.model.config)
  parts = {
      "config.init": {k: v for k, v in shape.items() if k not in _DTYPES},
      "config.tokenizer": [tokens, sorted(map(int, tokenizer.stop_ids))],
  }
  if objective_table.holds_reference(config, "searcher"):
    folder = config.reference.init or policy.folder
    parts["config.reference"] = lora.base_name(folder, config.seed)
  digests = {key: _digest(value) for key, value in parts.items()}
  digests["config.task"] = policy.task.digest()
  settings = load.flatten(config.to_dict())
  is_read = {
      "loss.baseline_file": objective_table.baseline(config.loss) == "file"
  }
  return digests | {
      f"config.{key}": _file_digest(settings[key])
      for key in _FILES
      if settings[key] and is_read.get(key, True)
  }


def _digest(value: Any) -> str:
  text = json.dumps(value, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _file_digest(path: str) -> str:
  """Returns a digest of a file, or of all files of a pattern."""
  digests = []
  for name in offline_completions.files_of(path):
    with open(name, "rb") as file:
      digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:16])
  return digests[0] if len(digests) == 1 else _digest(digests)


def put(
    transport: byte_store.Transport,
    mine: Mapping[str, Any],
    run: run_directory.RunInfo,
    epoch: int,
) -> None:
  """Writes the trainer's message to the store if it is not there yet.

  Args:
    transport: store client of the calling thread.
    mine: the trainer's `describe`.
    epoch: the trainer's start count.
  """
  # Marks the message as this trainer's: an older one may differ in settings.
  about = {"generation": transport.generation, "epoch": epoch}
  message = wire.encode_message(
      {"run": run.run_id, "key": KEY, **about, **mine}, run.secret
  )
  if transport.get(KEY) != message:
    transport.put(KEY, message)


class Agreement:
  """Compares a searcher with its trainer; `mine` is from `describe`.

  epoch: start count of the last trainer that the searcher agreed with, or -1.
  """

  def __init__(
      self,
      mine: Mapping[str, Any],
      run: run_directory.RunInfo,
      events: metrics.EventLog,
  ):
    self._mine = mine
    self._run = run
    self._events = events
    self._refusal = ""
    self.epoch = -1

  def holds(
      self, transport: byte_store.Transport, epoch: int | None = None
  ) -> bool:
    """Returns whether the trainer's settings have arrived and agree.

    Args:
      transport: store client of the calling thread.
      epoch: the trainer's start count; None for any.

    Raises:
      DiffersError: they differ; one line per difference.
    """
    data = transport.get(KEY)
    if data is None:
      return False
    try:
      theirs = wire.decode_placed(
          data, self._run.secret, self._run.run_id, KEY, _SCHEMA
      )
      for name, wanted in (
          ("generation", transport.generation),
          ("epoch", theirs["epoch"] if epoch is None else epoch),
      ):
        if theirs[name] != wanted:
          raise wire.WireError("header", f"{name} is {theirs[name]}")
    except wire.WireError as error:
      # The trainer rewrites its message within seconds.
      if str(error) != self._refusal:
        self._refusal = str(error)
        self._events.write("refused_message", f"{KEY}: {error}")
      return False
    sides = (
        f"this searcher ({self._mine['place']})",
        f"the trainer ({theirs['place']})",
    )
    try:
      differences.check_hosts(
          self._mine["settings"], theirs["settings"], sides, searcher=True
      )
    except ValueError as error:
      raise DiffersError(str(error)) from error
    lines = [
        f"{key}: content differs between {sides[0]} and {sides[1]}"
        "; all hosts of a run need the same models and data"
        for key, digest in self._mine["digests"].items()
        if digest != theirs["digests"].get(key, digest)
    ]
    if lines:
      raise DiffersError("\n".join(lines))
    self.epoch = theirs["epoch"]
    return True

  def wait(
      self,
      connect: Callable[[], byte_store.Transport],
      should_stop: Callable[[], bool],
  ) -> None:
    """Waits until `holds` is true or the searcher should stop.

    If settings differ, the message may be stale. It is deleted and read once
    more: a running trainer rewrites it within seconds.

    Raises:
      DiffersError: `holds` raised it twice.
      TransportError: a lost store did not return in time.
    """
    transport = connect()
    differed = False
    try:
      while not should_stop():
        try:
          if self.holds(transport):
            return
        except DiffersError:
          if differed:
            raise
          differed = True
          transport.delete(KEY)
        except byte_store.TransportError as error:
          self._events.write("store_lost", f"{KEY}: {error}")
          transport.reconnect()
        time.sleep(_PAUSE_S)
    finally:
      transport.close()


def check_processes(
    cluster: cluster_lib.Cluster,
    config: ml_collections.ConfigDict,
    run: run_directory.RunInfo,
) -> None:
  """Checks in process 0 that all trainer processes have the same settings.

  All trainer processes must call it.

  Raises:
    ValueError: settings differ; one line per key.
    TransportError: `Cluster.collect` failed.
  """
  mine = describe(config, run)
  for process, other in cluster.collect("settings", mine).items():
    sides = (
        f"process {process} ({other['place']})",
        f"process 0 ({mine['place']})",
    )
    differences.check_hosts(
        other["settings"], mine["settings"], sides, searcher=False
    )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether the hosts of a run go by the same settings: the trainer tells them.

They stand in the store, authenticated as all else there. A searcher reads them
before it samples, and again where another trainer has taken over; where one
differs that may not (`validate.HOST_KEYS`), it ends with a line for each.
Folders may differ, so what they hold is compared too, as a few facts.
"""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import socket
import time
from typing import Any, TYPE_CHECKING

import ml_collections

from tba_jax.config import load
from tba_jax.transport import base
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.monitor import run_directory
  from tba_jax.training import cluster as cluster_lib
  from tba_jax.training import policy as policy_lib


_KEY = "meta/settings"
_LOOK_EVERY_S = 0.1
_SPLIT = "train"
# Prompts that stand for all, evenly spaced.
_NUM_PROMPTS = 64
# Of a model, what the device of its host decides.
_DTYPES = ("param_dtype", "compute_dtype")


class DiffersError(ValueError):
  """This process would not compute what the trainer's run does."""


@dataclasses.dataclass(frozen=True)
class Terms:
  """What a process of a run goes by.

  place: of its directory, for people.
  settings: its config, by key.
  facts: what its files hold, by name, of JSON types.
  """

  place: str
  settings: Mapping[str, Any]
  facts: Mapping[str, Any]

  @classmethod
  def make(
      cls,
      config: ml_collections.ConfigDict,
      run: "run_directory.Run",
      policy: "policy_lib.Policy | None" = None,
  ) -> "Terms":
    """Returns those of this process; without a policy they have no facts."""
    return cls(
        place=f"{socket.gethostname()}:{run.workdir}",
        settings=load.flatten(config.to_dict()),
        facts=facts(policy) if policy is not None else {},
    )


def put(
    transport: base.Transport, terms: Terms, *, run_id: str, secret: bytes
) -> None:
  """Makes a trainer's terms those of its store's run."""
  message = {"run": run_id, "key": _KEY, **dataclasses.asdict(terms)}
  transport.put(_KEY, wire.encode_message(message, secret))


class Agreement:
  """Holds a searcher to the terms of its trainer."""

  def __init__(
      self,
      terms: Terms,
      *,
      run_id: str,
      secret: bytes,
      check: Callable[..., None],
      on_event: Callable[[str, str], None],
  ):
    """Reads nothing yet.

    Args:
      terms: of this searcher.
      run_id: the run.
      secret: key of the run's messages.
      check: as `validate.check_hosts`.
      on_event: called with (kind, message).
    """
    self._terms = terms
    self._keys = {"run_id": run_id, "secret": secret}
    self._check = check
    self._on_event = on_event
    self._refusal = ""

  def holds(self, transport: base.Transport) -> bool:
    """Returns True where the trainer's terms are these; False where none are.

    Raises:
      DiffersError: they are others; a line for each that differs.
      TransportError: as of the transport.
    """
    data = transport.get(_KEY)
    try:
      found = data and wire.decode_placed(data, key=_KEY, **self._keys)
    except wire.WireError as error:
      found = None
      # One that stays there is read again and again.
      if str(error) != self._refusal:
        self._refusal = str(error)
        self._on_event("refused_message", f"{_KEY}: {error}")
    if not found:
      return False
    theirs = Terms(found["place"], found["settings"], found["facts"])
    sides = (
        f"this searcher ({self._terms.place})",
        f"the trainer ({theirs.place})",
    )
    try:
      self._check(self._terms.settings, theirs.settings, sides, searcher=True)
    except ValueError as error:
      raise DiffersError(str(error)) from error
    check_facts(self._terms.facts, theirs.facts, sides)
    return True

  def wait(
      self,
      make_transport: Callable[[], base.Transport],
      should_stop: Callable[[], bool],
  ) -> None:
    """Waits for the trainer's terms, or until it should stop.

    Raises:
      DiffersError, TransportError: as `holds`; no store came back in time.
    """
    transport = make_transport()
    try:
      while not should_stop():
        try:
          if self.holds(transport):
            return
        except base.TransportError as error:
          self._on_event("store_lost", f"settings: {error}")
          transport.reconnect()
        time.sleep(_LOOK_EVERY_S)
    finally:
      transport.close()


def hold_processes(
    cluster: "cluster_lib.Cluster", mine: Terms, check: Callable[..., None]
) -> None:
  """Holds a trainer's other processes to the settings of process 0.

  All of them must call it; process 0 is told of the others, and raises.

  Args:
    cluster: this process among the others.
    mine: terms of this process, without facts.
    check: as `validate.check_hosts`.

  Raises:
    ValueError: settings of a process are others; a line for each.
    TransportError: as `Cluster.collect`.
  """
  found = cluster.collect("settings", dataclasses.asdict(mine))
  for process, other in found.items():
    sides = f"process {process} ({other['place']})", f"process 0 ({mine.place})"
    check(other["settings"], mine.settings, sides, searcher=False)


def check_facts(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], sides: tuple[str, str]
) -> None:
  """Raises where files of two processes do not hold the same.

  Raises:
    DiffersError: a line for each fact that differs.
  """
  lines = [
      f"{name}: {mine[name]!r} at {sides[0]}, {theirs[name]!r} at {sides[1]};"
      " the hosts of a run need the same models and data"
      for name in sorted(set(mine) & set(theirs))
      if mine[name] != theirs[name]
  ]
  if lines:
    raise DiffersError("\n".join(lines))


def facts(policy: "policy_lib.Policy") -> dict[str, Any]:
  """Returns what model, tokenizer and data of a policy are, by name."""
  task = policy.task
  size = task.num_prompts(_SPLIT)
  step = max(1, size // _NUM_PROMPTS)
  prompts = [task.prompt(_SPLIT, i) for i in range(0, size, step)]
  tokens = [list(map(int, policy.tokenizer.encode_prompt(p))) for p in prompts]
  shape = {
      f"config.init: {name} of the model": value
      for name, value in dataclasses.asdict(policy.model.config).items()
      if name not in _DTYPES
  }
  return json.loads(
      json.dumps(
          {
              **shape,
              "config.task: number of training prompts": size,
              "config.task: digest of training prompts": _digest(prompts),
              "config.tokenizer: digest of their tokens": _digest(tokens),
              "config.tokenizer: stop tokens": sorted(
                  policy.tokenizer.stop_ids
              ),
          }
      )
  )


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

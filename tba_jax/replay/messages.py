# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages of the queue: their keys, fields and arrays.

    q/P/SID/SEQ      searcher   block: the groups of one sampling round
    new/P/SID/SEQ    searcher   announces that a block is complete
    live/SID         searcher   lease, renewed while the searcher lives
    join/SLOT/N      searcher   order in which the processes of a slot started
    work/SID         trainer    granted blocks and acknowledgements
    ctl/stop         trainer    asks all searchers to leave
    status/run       trainer    live state, for people
    meta/trainer     trainer    lock: the directory whose trainer uses the store

Every message contains its run and key, so that a copy under another key is
refused. Arrays of a block are stacked over its groups.
"""

from collections.abc import Callable, Mapping, Sequence
import math
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

from tba_jax import types
from tba_jax.transport import wire

PARTITION = 0
STOP_KEY = "ctl/stop"
STATUS_KEY = "status/run"
LOCK_KEY = "meta/trainer"
UNITS = ("prompts", "completions", "tokens")

# Shortest time between two events of refused messages with one reason.
_REFUSAL_EVENT_S = 60.0

_STACKED = {
    "completion_tokens": (np.int32, 3),
    "completion_lengths": (np.int32, 2),
    "stopped": (np.bool_, 2),
    "behavior_logprobs": (np.float32, 3),
    "rewards": (np.float32, 2),
    "versions": (np.int32, 2),
}
_SCALARS = ("prompt_id", "visit", "position", "epoch")


class RunIdentity(NamedTuple):
  """The fields of `run_directory.Run` that the queue reads.

  run_id: id in all messages.
  secret: key of their hashes.
  workdir: run directory; its `replay/` has the journal.
  """

  run_id: str
  secret: bytes
  workdir: pathlib.Path = pathlib.Path()


def block_key(sid: str, sequence: int) -> str:
  return f"q/{PARTITION}/{sid}/{sequence:012d}"


def announcement_key(sid: str, sequence: int) -> str:
  return f"new/{PARTITION}/{sid}/{sequence:012d}"


def work_key(sid: str) -> str:
  return f"work/{sid}"


def lease_key(sid: str) -> str:
  return f"live/{sid}"


def encode(
    run: RunIdentity,
    key: str,
    fields: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> bytes:
  """Returns the message to write under a key."""
  header = {"run": run.run_id, "key": key, **fields}
  return wire.encode(header, arrays or {}, run.secret)


def decode(
    run: RunIdentity, key: str, data: bytes, kind: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of the message under a key.

  Args:
    run: that the message must belong to.
    key: that it was read from.
    data: its bytes.
    kind: "block", "lease", "work", "stop" or "lock".

  Raises:
    WireError: the message is of another run, key or kind.
  """
  header, arrays = wire.decode(data, run.secret)
  for name, wanted in (("run", run.run_id), ("key", key)):
    if header.get(name) != wanted:
      raise wire.WireError("header", f"{name} is {header.get(name)!r}")
  for name, is_valid in _FIELDS[kind].items():
    if name not in header or not is_valid(header[name]):
      raise wire.WireError("header", f"{name} is {header.get(name)!r}")
  if arrays and kind != "block":
    raise wire.WireError("array", f"arrays in a {kind} message")
  return header, arrays


def _is_int(value: Any) -> bool:
  return type(value) is int


def _is_count(value: Any) -> bool:
  return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
  return isinstance(value, str)


def _is_bool(value: Any) -> bool:
  return isinstance(value, bool)


def _is_totals(value: Any) -> bool:
  return isinstance(value, dict) and all(_is_count(value.get(u)) for u in UNITS)


def _is_list(
    size: int | None, is_item: Callable[[Any], bool]
) -> Callable[[Any], bool]:
  return lambda value: (
      isinstance(value, list)
      and (size is None or len(value) == size)
      and all(map(is_item, value))
  )


def _is_grant(value: Any) -> bool:
  """[number, version, [[position, prompt_id, visit], ...]]"""
  return (
      isinstance(value, list)
      and len(value) == 3
      and _is_count(value[0])
      and _is_int(value[1])
      and _is_list(None, _is_list(3, _is_int))(value[2])
  )


_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "block": {
        "sid": _is_text,
        "sequence": _is_count,
        "totals": _is_totals,
        "amount": _is_totals,
    },
    "lease": {
        "sid": _is_text,
        "slot": _is_text,
        "joined": _is_list(2, _is_count),
        "index": _is_count,
        "beat": _is_count,
        "totals": _is_totals,
        "unacked": _is_count,
        "final": _is_bool,
        "stats": lambda value: isinstance(value, dict),
    },
    "work": {
        "epoch": _is_count,
        "count": _is_count,
        "acked": _is_count,
        "blocks": _is_list(None, _is_grant),
    },
    "stop": {"epoch": _is_count, "done": _is_bool},
    "lock": {"owner": _is_text, "place": _is_text},
}


class Refusals:
  """Counts refused messages; logs one event a minute for each reason.

  count: messages refused.
  """

  def __init__(
      self,
      on_event: Callable[[str, str], None],
      clock: Callable[[], float] = time.monotonic,
  ):
    self.count = 0
    self._on_event = on_event
    self._clock = clock
    self._due_at: dict[str, float] = {}
    self._unlogged: dict[str, int] = {}

  def add(self, key: str, error: wire.WireError) -> None:
    """Counts the message under `key`, refused for `error`."""
    self.count += 1
    reason, now = error.reason, self._clock()
    if now < self._due_at.get(reason, -math.inf):
      self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
      return
    self._due_at[reason] = now + _REFUSAL_EVENT_S
    others = self._unlogged.pop(reason, 0)
    more = f" ({others} more since the last event)" if others else ""
    self._on_event("refused_message", f"{key[:200]}: {str(error)[:500]}{more}")


def pack_groups(
    groups: Sequence[types.Group],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the header fields and arrays of a block; all groups share S and T.

  Raises:
    ValueError: no group, or groups of unequal shapes.
  """
  if not groups:
    raise ValueError("a block needs at least one group")
  arrays = {}
  for name, (dtype, _) in _STACKED.items():
    arrays[name] = np.stack([getattr(g, name) for g in groups]).astype(
        dtype, copy=False
    )
  arrays["prompt_tokens"] = np.concatenate(
      [g.prompt_tokens for g in groups]
  ).astype(np.int32, copy=False)
  header = {name: [int(getattr(g, name)) for g in groups] for name in _SCALARS}
  header["prompt_lengths"] = [len(g.prompt_tokens) for g in groups]
  return header, arrays


def unpack_groups(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[types.Group]:
  """Returns the groups of a block made by `pack_groups`.

  Raises:
    ValueError: a field is missing or of another type, or shapes disagree.
  """
  columns = {name: _integers(header, name) for name in _SCALARS}
  lengths = _integers(header, "prompt_lengths")
  num_groups = len(lengths)
  if not num_groups or any(len(c) != num_groups for c in columns.values()):
    raise ValueError("header lists of unequal length, or no group")
  for name, (dtype, ndim) in _STACKED.items():
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim != ndim:
      raise ValueError(f"{name}: expected {ndim} axes of {np.dtype(dtype)}")
  leading = arrays["completion_tokens"].shape
  for name, (_, ndim) in _STACKED.items():
    if arrays[name].shape != leading[:ndim] or leading[0] != num_groups:
      raise ValueError(
          f"{name}: shape {arrays[name].shape}, expected {leading[:ndim]}"
      )
  prompts = arrays.get("prompt_tokens")
  if prompts is None or prompts.dtype != np.int32 or prompts.ndim != 1:
    raise ValueError("prompt_tokens: expected one axis of int32")
  if min(lengths) < 1 or sum(lengths) != len(prompts):
    raise ValueError("prompt_lengths do not add up to prompt_tokens")
  ends = np.cumsum(lengths)
  return [
      types.Group(
          prompt_tokens=prompts[ends[i] - lengths[i] : ends[i]],
          **{name: column[i] for name, column in columns.items()},
          **{name: arrays[name][i] for name in _STACKED},
      )
      for i in range(num_groups)
  ]


def check_group(
    group: types.Group, *, vocab_size: int, max_prompt_tokens: int
) -> str | None:
  """Returns why a group is rejected, a reason of the ledger, or None."""
  if not np.isfinite(group.rewards).all():
    return "reward"
  if not np.isfinite(group.behavior_logprobs).all():
    return "logprob"
  num_tokens = group.completion_tokens.shape[1]
  lengths = group.completion_lengths
  if (lengths < 1).any() or (lengths > num_tokens).any():
    return "length"
  if len(group.prompt_tokens) > max_prompt_tokens:
    return "length"
  for tokens in (group.completion_tokens, group.prompt_tokens):
    if (tokens < 0).any() or (tokens >= vocab_size).any():
      return "token"
  return None


def _integers(header: Mapping[str, Any], name: str) -> list[int]:
  value = header.get(name)
  if not isinstance(value, list) or not all(map(_is_int, value)):
    raise ValueError(f"header field {name!r}: expected a list of integers")
  return value

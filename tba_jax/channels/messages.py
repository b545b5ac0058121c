# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages of the queue: their keys, fields and arrays.

    q/P/SID/SEQ      searcher   block: the groups of one sampling round
    new/P/SID/SEQ    searcher   delivers the block: it is complete
    live/SID         searcher   lease, renewed while the searcher lives
    join/SLOT/N      searcher   order in which the processes of a slot started
    work/SID         trainer    granted blocks and acknowledgements
    ctl/stop         trainer    asks all searchers to leave
    status/run       trainer    live state, for people
    meta/trainer     trainer    lock: the directory whose trainer uses the store

Every message contains its run and key, so that a copy under another key is
refused; a delivery has none, and is followed by its block. What a later message
replaces, or an older one must not undo, has a count of its own (`lease.beat`,
`work.epoch` and `work.count`), or the generation of the store it was written
to, so that an old one that someone writes again is refused as well. Arrays of a
block are stacked over its groups.

Any key may be overwritten or deleted by a process that is not of the run. Who
owns a message writes it again: a searcher whose block is not delivered, or whom
the trainer asks (`work.again`); a trainer when a lease shows that its searcher
has not seen the newest grants (`lease.seen`). That a block was acknowledged and
is not kept any more is told by a searcher's lease alone (`lease.first`).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

from tba_jax import types
from tba_jax.system import jsonl
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
    "sampled_mask": (np.bool_, 3),
    "stopped": (np.bool_, 2),
    "behavior_logprobs": (np.float32, 3),
    "rewards": (np.float32, 2),
    "versions": (np.int32, 2),
}
# Only in blocks of searchers that hold the reference.
_REFERENCE = {"ref_logprobs": (np.float32, 3)}
# Only in blocks for a loss that reads them.
_TURNS = {"turn_rewards": (np.float32, 3)}
# Only in blocks of searchers that record the experts of tokens. Their last two
# axes, layers and experts of a token, are the trainer's to check.
_ROUTES, _PROMPT_ROUTES = "routes", "prompt_routes"
_SCALARS = ("prompt_id", "visit", "position", "epoch")

_TOTALS = {unit: int for unit in UNITS}
# Fields of the header by kind of message, see `jsonl.schema_error`.
_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "block": {
        "sid": str,
        "sequence": int,
        "totals": _TOTALS,
        "amount": _TOTALS,
    },
    "lease": {
        "sid": str,
        "slot": str,
        "joined": [int],
        "index": int,
        "beat": int,
        "totals": _TOTALS,
        "unacked": int,
        # Sequence of the oldest block that the searcher keeps, and the totals
        # before it.
        "first": int,
        "acked": _TOTALS,
        # (epoch, count) of its newest message of kind "work".
        "seen": [int],
        "credits": int,
        "final": bool,
        "stats": {},
    },
    # `prompts` are (position, prompt_id, visit).
    "work": {
        "epoch": int,
        "count": int,
        "acked": int,
        # A block to send again, -1 for none.
        "again": int,
        "blocks": [{"number": int, "version": int, "prompts": [[int]]}],
    },
    "join": {"generation": int},
    "stop": {"generation": int, "epoch": int, "done": bool},
    "lock": {"generation": int, "owner": str, "place": str},
}
_GROUPS_SCHEMA = {name: [int] for name in (*_SCALARS, "prompt_lengths")}


class RunIdentity(NamedTuple):
  """The fields of `run_directory.Run` that the queue reads.

  run_id: id in all messages.
  secret: key of their hashes.
  workdir: directory of this process; the trainer's has the journal in
    `replay/`, a searcher's its lease in `leases/`. None = keep no lease.
  """

  run_id: str
  secret: bytes
  workdir: pathlib.Path | None = None


def block_key(sid: str, sequence: int) -> str:
  return f"q/{PARTITION}/{sid}/{sequence:012d}"


def delivery_key(sid: str, sequence: int) -> str:
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
    run: RunIdentity,
    key: str,
    data: bytes,
    kind: str,
    generation: int | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of the message under a key.

  Args:
    run: run that the message must belong to.
    key: key that the message was read from.
    data: bytes of the message.
    kind: "block", "lease", "work", "join", "stop" or "lock".
    generation: generation of the store, for the last three.

  Raises:
    WireError: the message is of another run, key, kind or generation.
  """
  header, arrays = wire.decode(data, run.secret)
  for name, wanted in (("run", run.run_id), ("key", key)):
    if header.get(name) != wanted:
      raise wire.WireError("header", f"{name} is {header.get(name)!r}")
  if error := jsonl.schema_error(header, _SCHEMAS[kind]):
    raise wire.WireError("header", error)
  if generation is not None and header["generation"] != generation:
    raise wire.WireError("header", f"generation is {header['generation']}")
  return header, arrays


class Refusals:
  """Counts refused messages; logs one event a minute for each reason.

  count: messages refused.
  """

  def __init__(
      self,
      on_event: Callable[[str, str], None],
      clock: Callable[[], float] = time.monotonic,
      kind: str = "refused_message",
  ):
    self.count = 0
    self._on_event = on_event
    self._clock = clock
    self._kind = kind
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
    self._on_event(self._kind, f"{key[:200]}: {str(error)[:500]}{more}")


def _arrays_of(
    has_ref_logprobs: bool, has_routes: bool, has_turns: bool
) -> dict[str, tuple[type, int]]:
  """Returns dtype and number of axes of a block's stacked arrays."""
  out = dict(_STACKED)
  if has_ref_logprobs:
    out |= _REFERENCE
  if has_routes:
    out[_ROUTES] = np.uint8, 5
  return out | _TURNS if has_turns else out


def pack_groups(
    groups: Sequence[types.Group],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the header fields and arrays of a block; all groups share S and T.

  Raises ValueError for no group, or groups of unequal shapes.
  """
  arrays = {}
  has_ref_logprobs = any(g.ref_logprobs is not None for g in groups)
  has_routes = any(g.routes is not None for g in groups)
  if has_routes:
    groups = _with_routes(groups)
    arrays[_PROMPT_ROUTES] = np.concatenate([g.prompt_routes for g in groups])
  has_turns = any(g.turn_rewards is not None for g in groups)
  stacked = _arrays_of(has_ref_logprobs, has_routes, has_turns)
  for name, (dtype, _) in stacked.items():
    arrays[name] = np.stack([getattr(g, name) for g in groups]).astype(
        dtype, copy=False
    )
  arrays["prompt_tokens"] = np.concatenate(
      [g.prompt_tokens for g in groups]
  ).astype(np.int32, copy=False)
  header = {name: [int(getattr(g, name)) for g in groups] for name in _SCALARS}
  header["prompt_lengths"] = [len(g.prompt_tokens) for g in groups]
  return header, arrays


def _with_routes(groups: Sequence[types.Group]) -> list[types.Group]:
  """Returns groups of which those without a prompt have routes of zeros."""
  *_, N, A = next(g.routes.shape for g in groups if g.routes is not None)
  zeros = lambda tokens: np.zeros((*tokens.shape, N, A), np.uint8)
  return [
      g
      if g.routes is not None
      else dataclasses.replace(
          g,
          routes=zeros(g.completion_tokens),
          prompt_routes=zeros(g.prompt_tokens),
      )
      for g in groups
  ]


def unpack_groups(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[types.Group]:
  """Returns the groups of a block made by `pack_groups`.

  Raises:
    ValueError: a field is missing or of another type, or shapes disagree.
  """
  if error := jsonl.schema_error(header, _GROUPS_SCHEMA):
    raise ValueError(error)
  columns = {name: header[name] for name in _SCALARS}
  lengths = header["prompt_lengths"]
  num_groups = len(lengths)
  if not num_groups or any(len(c) != num_groups for c in columns.values()):
    raise ValueError("header lists of unequal length, or no group")
  has_routes = _ROUTES in arrays
  stacked = _arrays_of(
      "ref_logprobs" in arrays, has_routes, "turn_rewards" in arrays
  )
  needed = {"prompt_tokens", *stacked, *[_PROMPT_ROUTES] * has_routes}
  if missing := needed - set(arrays):
    raise ValueError(f"no array {min(missing)!r}")
  shape = num_groups, *arrays["completion_tokens"].shape[1:]
  if has_routes:
    shape += arrays[_ROUTES].shape[3:]
  for name, (dtype, ndim) in stacked.items():
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape[:ndim]:
      raise ValueError(
          f"{name}: {array.dtype}{array.shape}, not {dtype.__name__}"
          f"{shape[:ndim]}"
      )
  prompts = arrays["prompt_tokens"]
  if min(lengths) < 0 or prompts.shape != (sum(lengths),):
    raise ValueError("prompt_lengths do not add up to prompt_tokens")
  if has_routes:
    array = arrays[_PROMPT_ROUTES]
    if array.dtype != np.uint8 or array.shape != (sum(lengths), *shape[3:]):
      raise ValueError(
          f"{_PROMPT_ROUTES}: {array.dtype}{array.shape}, not"
          f" uint8{(sum(lengths), *shape[3:])}"
      )
  ends = np.cumsum(lengths)
  return [
      types.Group(
          prompt_tokens=prompts[ends[i] - lengths[i] : ends[i]],
          **{name: column[i] for name, column in columns.items()},
          **{name: arrays[name][i] for name in stacked},
          prompt_routes=(
              arrays[_PROMPT_ROUTES][ends[i] - lengths[i] : ends[i]]
              if has_routes
              else None
          ),
      )
      for i in range(num_groups)
  ]


def reject_reason(
    group: types.Group,
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    has_ref_logprobs: bool,
    routes_shape: tuple[int, int] | None = None,
    num_experts: int = 0,
    has_turn_rewards: bool = False,
) -> str | None:
  """Returns why a group is rejected, a reason of the ledger, or None.

  Args:
    group: group that `unpack_groups` returned, or its like.
    vocab_size: upper bound of token ids.
    max_prompt_tokens, max_completion_tokens: P and T.
    has_ref_logprobs: whether searchers compute reference log-probs.
    routes_shape: layers, and experts of a token, of the routes that searchers
      record; None if they record none.
    num_experts: upper bound of the numbers of experts.
    has_turn_rewards: whether groups have the rewards of turns.
  """
  if not group.sampled_mask.any():
    return "environment"  # It gave no prompt.
  if np.isinf(group.rewards).any():
    return "reward"
  if (group.turn_rewards is not None) != has_turn_rewards:
    return "turn_rewards"
  if has_turn_rewards and not np.isfinite(group.rewarded().turn_rewards).all():
    return "reward"
  if (group.ref_logprobs is not None) != has_ref_logprobs:
    return "reference"
  if not np.isfinite(group.behavior_logprobs).all():
    return "logprob"
  if has_ref_logprobs and not np.isfinite(group.ref_logprobs).all():
    return "logprob"
  longest = min(group.completion_tokens.shape[1], max_completion_tokens)
  lengths = group.completion_lengths
  if (lengths < 1).any() or (lengths > longest).any():
    return "length"
  if not 1 <= len(group.prompt_tokens) <= max_prompt_tokens:
    return "length"
  sampled = group.sampled_mask
  past = np.arange(sampled.shape[1]) >= lengths[:, None]
  if (sampled & past).any() or not sampled.any(axis=1).all():
    return "mask"
  layers_shape = None if group.routes is None else group.routes.shape[2:]
  if layers_shape != routes_shape:
    return "routes"
  if routes_shape is not None:
    if max(x.max() for x in (group.routes, group.prompt_routes)) >= num_experts:
      return "routes"
  for tokens in (group.completion_tokens, group.prompt_tokens):
    if (tokens < 0).any() or (tokens >= vocab_size).any():
      return "token"
  return None

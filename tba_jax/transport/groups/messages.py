# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages of the queue: their keys, fields and arrays.

    q/P/SID/SEQ      searcher   block: groups that were finished together
    new/P/SID/SEQ    searcher   delivers the block: it is complete
    live/SID         searcher   lease, renewed while the searcher lives
    join/SLOT/N      searcher   order in which the processes of a slot started
    work/SID         trainer    grants and acknowledgements
    ctl/stop         trainer    asks all searchers to leave
    status/run       trainer    live state, for people
    meta/trainer     trainer    lock: the directory whose trainer uses the store

Every message contains its run and key, so that a copy under another key is
refused; a delivery is empty and refers to its block. Messages that are replaced
also have a counter (`lease.beat`, `work.epoch` and `work.count`) or the
generation of the store, so that old copies are refused. Arrays of a block are
stacked over its groups.

A process outside the run may overwrite or delete any key. The owner then writes
its message again: a searcher if its block is not delivered or the trainer asks
for it (`work.again`), a trainer if a lease shows that its searcher has not seen
the newest grants (`lease.seen`). Which blocks were acknowledged and dropped is
known only from a searcher's lease (`lease.first`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax import types
from tba_jax.system import jsonl
from tba_jax.transport import wire

PARTITION = 0
STOP_KEY = "ctl/stop"
STATUS_KEY = "status/run"
LOCK_KEY = "meta/trainer"
UNITS = ("prompts", "completions", "tokens")

# Column unit -> reason for rejecting a group with non-finite values.
_NONFINITE = {"nats": "logprob", "reward": "reward"}

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
        # (epoch, count) of the newest message of kind "work" that it has read.
        "seen": [int],
        # (epoch, number) of the last grant that it started.
        "begun": [int],
        "credits": int,
        "final": bool,
        "stats": {},
    },
    # `prompts` are (position, prompt_id, visit).
    "work": {
        "epoch": int,
        "count": int,
        "acked": int,
        # Block to resend, -1 for none.
        "again": int,
        "blocks": [{"number": int, "version": int, "prompts": [[int]]}],
    },
    "join": {"generation": int},
    "stop": {"generation": int, "epoch": int, "done": bool},
    "lock": {"generation": int, "owner": str, "place": str},
}


def block_key(sid: str, sequence: int) -> str:
  return f"q/{PARTITION}/{sid}/{sequence:012d}"


def delivery_key(sid: str, sequence: int) -> str:
  return f"new/{PARTITION}/{sid}/{sequence:012d}"


def work_key(sid: str) -> str:
  return f"work/{sid}"


def lease_key(sid: str) -> str:
  return f"live/{sid}"


def encode(
    run: wire.RunIdentity,
    key: str,
    fields: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> bytes:
  """Returns the message to write under a key."""
  header = {"run": run.run_id, "key": key, **fields}
  return wire.encode(header, arrays or {}, run.secret)


def decode(
    run: wire.RunIdentity,
    key: str,
    data: bytes,
    kind: str,
    generation: int | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of the message under a key.

  Args:
    run: expected run.
    kind: "block", "lease", "work", "join", "stop" or "lock".
    generation: expected store generation, for the last three.

  Raises:
    WireError: run, key, kind or generation differ.
  """
  header, arrays = wire.decode(data, run.secret)
  wire.check_place(header, run.run_id, key)
  if error := jsonl.schema_error(header, _SCHEMAS[kind]):
    raise wire.WireError("header", error)
  if generation is not None and header["generation"] != generation:
    raise wire.WireError("header", f"generation is {header['generation']}")
  return header, arrays


def amount_of(groups: Sequence[types.Group]) -> dict[str, int]:
  """Returns how much groups hold, by unit."""
  return {
      "prompts": len(groups),
      "completions": sum(g.num_completions for g in groups),
      "tokens": sum(g.num_tokens for g in groups),
  }


def pack_groups(
    groups: Sequence[types.Group],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the header fields and arrays of a block; all groups share S and T.

  Prompts are concatenated. Columns that a group without a prompt lacks are 0.

  Raises ValueError without groups, or if columns or shapes differ.
  """
  if not groups:
    raise ValueError("no group")
  header = {"prompt_lengths": [len(g.prompt_tokens) for g in groups]}
  arrays = {}
  for name, column in types.COLUMNS.items():
    values = [getattr(group, name) for group in groups]
    if not column.axes:
      header[name] = list(map(int, values))
      continue
    if column.when:
      present = [x for x in values if x is not None]
      if not present:
        continue
      values = [
          _zeros(name, column, group, present[0]) if x is None else x
          for group, x in zip(groups, values)
      ]
    array = np.concatenate(values).astype(column.dtype, copy=False)
    if column.axes[0] == "S":
      if len({x.shape for x in values}) > 1:
        raise ValueError(f"{name}: shapes {sorted(x.shape for x in values)}")
      array = array.reshape(len(groups), *values[0].shape)
    arrays[name] = array
  return header, arrays


def _zeros(
    name: str, column: types.Column, group: types.Group, like: np.ndarray
) -> np.ndarray:
  """Returns a missing column of a group without a prompt, shaped as `like`."""
  if group.num_tokens:
    raise ValueError(f"position {group.position}: no column {name!r}")
  first = len(group.prompt_tokens) if column.axes[0] == "P" else len(like)
  return np.zeros((first, *like.shape[1:]), column.dtype)


def unpack_groups(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[types.Group]:
  """Returns the groups of a block made by `pack_groups`.

  Raises:
    ValueError: a column is missing, unknown or has a wrong type, or shapes
      disagree.
  """
  columns = types.COLUMNS
  numbers = [name for name, column in columns.items() if not column.axes]
  schema = {name: [int] for name in (*numbers, "prompt_lengths")}
  if error := jsonl.schema_error(header, schema):
    raise ValueError(error)
  lengths = header["prompt_lengths"]
  num_groups = len(lengths)
  for name in numbers:
    if len(header[name]) != num_groups:
      raise ValueError(f"{name}: {len(header[name])} of {num_groups} groups")
  if min(lengths, default=-1) < 0:
    raise ValueError(f"prompt_lengths: {lengths}"[:200])
  for name in arrays:
    if name not in columns or name in numbers:
      raise ValueError(f"unknown column {name!r}")
  # Columns with the same condition are all present or all absent.
  met = {columns[name].when for name in arrays} | {""}
  tokens = np.shape(arrays.get("completion_tokens", ()))
  sizes = dict(zip("GST", tokens)) | {"G": num_groups, "P": sum(lengths)}
  for name, column in columns.items():
    if not column.axes or column.when not in met:
      continue
    if (array := arrays.get(name)) is None:
      raise ValueError(f"no column {name!r}")
    axes = column.axes if column.axes[0] == "P" else "G" + column.axes
    if any(axis not in sizes for axis in axes):  # The first array sets N and A.
      sizes = dict(zip(axes, array.shape)) | sizes
    shape = tuple(map(sizes.get, axes))
    if array.dtype != column.dtype or array.shape != shape:
      raise ValueError(
          f"{name}: {array.dtype}{array.shape}, not {column.dtype}{shape}"
      )
  ends = np.cumsum(lengths).tolist()
  parts = {name: header[name] for name in numbers}
  for name, array in arrays.items():
    parts[name] = array
    if columns[name].axes[0] == "P":
      parts[name] = [array[end - n : end] for n, end in zip(lengths, ends)]
  return [
      types.Group(**{name: part[i] for name, part in parts.items()})
      for i in range(num_groups)
  ]


def reject_reason(
    group: types.Group,
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    columns: Mapping[str, tuple[int, ...]],
    num_experts: int = 0,
) -> str | None:
  """Returns the ledger's reason for rejecting a group, or None.

  Args:
    group: result of `unpack_groups`.
    vocab_size: upper bound of token ids.
    max_prompt_tokens, max_completion_tokens: P and T.
    columns: optional columns of the run, see `collect.optional_columns`.
    num_experts: upper bound of the numbers of experts.
  """
  if not group.sampled_mask.any():
    return "environment"  # The environment returned no prompt.
  for name, column in types.COLUMNS.items():
    values = getattr(group, name)
    if column.when:
      is_there = values is not None
      if is_there != (name in columns):
        return column.when
      if not is_there:
        continue
      last = len(columns[name])
      if last and values.shape[-last:] != columns[name]:
        return column.when
    if name == "ref_logprobs" and group.is_never_drawn:
      continue
    if column.dtype.kind == "f" and not np.isfinite(values).all():
      if column.unit == "reward":  # Only of completions with a reward.
        values = values[~np.isnan(group.rewards)]
      if not np.isfinite(values).all():
        return _NONFINITE.get(column.unit, name)
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
  for experts in (group.routes, group.prompt_routes):
    if experts is None:
      continue
    if num_experts > 256:
      experts = np.ascontiguousarray(experts).view("<u2")
    if experts.max(initial=0) >= num_experts:
      return "routes"
  if group.kept_ids is not None:
    kept, tokens = group.kept_ids, group.completion_tokens[..., None]
    if (kept < -1).any() or (kept >= vocab_size).any():
      return "kept_ids"
    if (sampled & ~(kept == tokens).any(axis=-1)).any():
      return "kept_ids"
  for tokens in (group.completion_tokens, group.prompt_tokens):
    if (tokens < 0).any() or (tokens >= vocab_size).any():
      return "token"
  return None
